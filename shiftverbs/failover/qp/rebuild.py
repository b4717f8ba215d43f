# SPDX-License-Identifier: BSD-3-Clause
"""Making a pair's QP anew on the hardware: RESET, INIT, RTR, RTS, with the application's attributes.

Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.qp.changes import ChangedQp, Given, on_pair
from shiftverbs.native.ibv import MigState, QpState
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage
from shiftverbs.shadows.qp_attributes import (
    ALTERNATE,
    CONNECTED,
    ERR,
    INIT,
    LIVE,
    RTR,
    RTS,
    AddressVector,
    Alternate,
    Connected,
    QpFields,
)

if TYPE_CHECKING:
    from shiftverbs._nic import ModifySteps

# What the application has not given yet, because its QP only receives so far.
_NOT_GIVEN: QpFields = {"timeout": 14, "retry_cnt": 7, "rnr_retry": 7}

logger = logging.getLogger("shiftverbs.driver")


class RebuiltQp(ChangedQp, Protocol):
    """A connection whose QPs are made anew."""

    @property
    def rebuild(self) -> Rebuild:
        """The one of the pairing that it is in."""

    def later(self, event: ev.Event) -> None:
        """Give one event to the protocol when the actions under way are carried out."""

    def carry_on(self, call: Callable[[], None]) -> None:
        """Go on with an action after something was awaited."""


class Rebuild:
    """What ResetPair and ConnectPair ask for, during one pairing of a connection."""

    __slots__ = ("_c", "_looks", "_resets")

    def __init__(self, connection: RebuiltQp) -> None:
        self._c = connection
        self._resets: collections.Counter[int] = collections.Counter()
        self._looks: collections.Counter[int] = collections.Counter()

    def call_off(self, k: int) -> None:
        """Pair k is fenced: a RESET that still waits for its NIC's answer would take the fence's marker away."""
        self._looks[k] += 1

    def is_under_way(self, k: int) -> bool:
        """Whether commands that are to take pair k out of ERR were given; its RESET may wait for a look before that."""
        given = self._c.given.get(k)
        return given is not None and given.state != ERR

    def reset(self, action: ev.ResetPair) -> None:
        """RESET and INIT; with a receive for the peer's zero-length SEND where that is wanted."""
        c = self._c
        k, arm, dummy = action.pair, action.arm, action.dummy
        self.call_off(k)
        # Flushes are consumed before RESET: some NICs discard, others keep, completions nobody polled.
        c.drain(k)
        # From here on nothing of the old life counts, not even an ARM's dummies; a fence sees its marker all the same.
        c.core.forget_pair(k)
        if dummy:
            self._see_nic_first(k, lambda: self._reset(k, arm, dummy))
        else:
            self._reset(k, arm, dummy)

    def _see_nic_first(self, k: int, then: Callable[[], None]) -> None:
        """Have pair k's NIC looked at anew, for where this QP is reached may have changed; then go on."""
        c = self._c
        mine = self._looks[k]

        def go_on() -> None:
            # Otherwise the QP is the application's again, or in another pairing.
            if c.rebuild is self and self._looks[k] == mine and not c.core.ending:
                c.carry_on(then)

        c.nic(k).look_again(lambda: c.driver.post(go_on))

    def _reset(self, k: int, arm: int, dummy: bool) -> None:
        c = self._c
        attrs = c.shadow.attrs
        try:
            route = c.local_port(k)
            pkey_index = c.shadow.pkey_index(k, route.port)
        except OSError as error:
            c.later(ev.PairReset(k, arm, error=error.strerror or str(error)))
            return
        rights = on_pair(c, k, {"qp_access_flags": attrs.get("qp_access_flags", 0)})
        steps = c.nic(k).verbs.ModifySteps()
        steps.add(state=QpState.RESET)
        steps.add(
            state=QpState.INIT,
            pkey_index=pkey_index,
            port_num=route.port,
            **rights,
        )

        self._resets[k] += 1
        mine = self._resets[k]

        def done(err: int, step: int) -> None:
            if mine != self._resets[k]:
                return  # a newer RESET is on its way already; a dummy posted now would be its life's first receive
            if err:
                c.feed(ev.PairReset(k, arm, error=f"step {step} on {c.device(k)}: {os.strerror(err)}"))
                return
            c.drain(k)
            c.core.pair_reset(k)
            if dummy:
                err = c.core.post_arm_recv(k)
                if err:
                    c.feed(ev.PairReset(k, arm, error=f"post_recv on {c.device(k)}: {os.strerror(err)}"))
                    return
            c.feed(ev.PairReset(k, arm, route.gid, route.mtu))

        # Again: a former RESET may have ended since `reset`, and then the pair is known again. A fence that begins
        # from here on must hear that a RESET lies before its ERR.
        c.core.forget_pair(k)
        c.given[k] = Given(INIT, {**rights}, served=k == 0 or k in c.given)
        c.shadow.interruptions += k == 0
        c.driver.command(c, k, steps, done)

    def connect(self, action: ev.ConnectPair) -> None:
        """To RTR, to RTS, or both."""
        c, k = self._c, action.pair
        attrs = self._attributes(k)
        live = on_pair(c, k, {name: attrs.get(name, 0) for name in LIVE})
        try:
            route = c.local_port(k)
        except OSError as error:
            c.later(ev.PairConnected(k, action.arm, action.stage, str(error)))
            return
        steps = c.nic(k).verbs.ModifySteps()
        if action.stage is not Stage.RTS:
            remote = action.remote
            app_ah: AddressVector = attrs.get("ah_attr") or {}
            ah: AddressVector = {
                "port_num": route.port,
                "dlid": remote.lid,
                "sl": app_ah.get("sl", 0),
                "src_path_bits": 0,
                "static_rate": app_ah.get("static_rate", 0),
            }
            if c.nic(k).uses_grh or remote.lid == 0:
                ah["is_global"] = 1
                ah["dgid"] = remote.gid
                ah["sgid_index"] = route.gid_index
                ah["hop_limit"] = app_ah.get("hop_limit") or 64
                ah["traffic_class"] = app_ah.get("traffic_class", 0)
                ah["flow_label"] = app_ah.get("flow_label", 0)
            steps.add(
                state=QpState.RTR,
                path_mtu=min(attrs.get("path_mtu", route.mtu), route.mtu, remote.mtu),
                dest_qp_num=remote.qpn,
                rq_psn=remote.psn,
                max_dest_rd_atomic=attrs.get("max_dest_rd_atomic", 0),
                ah_attr=ah,
                **live,
            )
        if action.stage is not Stage.RTR:
            steps.add(
                state=QpState.RTS,
                sq_psn=action.psn,
                **{name: attrs[name] for name in CONNECTED},
                **live,
            )
        needed = len(steps)
        if k == 0 and action.stage is not Stage.RTR:
            self._alternate_path(steps, attrs)
        state = RTR if action.stage is Stage.RTR else RTS
        names: tuple[Connected | Alternate, ...] = CONNECTED if k else CONNECTED + ALTERNATE
        c.given[k] = Given(state, {**live, **{name: attrs.get(name) for name in names}})

        def done(err: int, step: int) -> None:
            if err and step >= needed:
                logger.info(
                    "%s does not take the QP's alternate path again: %s", c.device(k), os.strerror(err)
                )
                err = 0
            error = f"step {step} on {c.device(k)}: {os.strerror(err)}" if err else None
            c.feed(ev.PairConnected(k, action.arm, action.stage, error))

        c.driver.command(c, k, steps, done)

    def _attributes(self, k: int) -> QpFields:
        """The application's, and for what it has not given yet something with which its QP can work.

        As many READs at a time as it answers itself: as a rule both sides say the same.
        """
        c = self._c
        attrs: QpFields = {**_NOT_GIVEN, **c.shadow.attrs}
        if "max_rd_atomic" not in attrs:
            most = c.nic(k).limits.get("max_qp_init_rd_atom", 0)
            attrs["max_rd_atomic"] = min(attrs.get("max_dest_rd_atomic", 0), most)
        return attrs

    @staticmethod
    def _alternate_path(steps: ModifySteps, attrs: QpFields) -> None:
        """The application's alternate path lies on its own NIC: that QP gets it back, if the NIC has it still."""
        if "alt_ah_attr" in attrs:
            steps.add(
                alt_ah_attr=attrs["alt_ah_attr"],
                alt_pkey_index=attrs["alt_pkey_index"],
                alt_port_num=attrs["alt_port_num"],
                alt_timeout=attrs["alt_timeout"],
            )
        if attrs.get("path_mig_state", MigState.MIGRATED) != MigState.MIGRATED:
            steps.add(path_mig_state=attrs["path_mig_state"])
