# SPDX-License-Identifier: BSD-3-Clause
"""What is said of one protected QP while it works: to the log, to subscribers (`observe`), and in the totals.

Runs under the driver's lock; what subscribers and handlers of the log do is put off until nothing is in a hurry.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Protocol

from shiftverbs import observe
from shiftverbs.failover.services.host import MeasuredQp
from shiftverbs.protocol.events import Status

if TYPE_CHECKING:
    from shiftverbs.failover.qp.requirement import Requirement
    from shiftverbs.failover.qp.timeline import Timeline


class ReportedQp(MeasuredQp, Protocol):
    """A connection of which something is said."""

    @property
    def timeline(self) -> Timeline:
        """What happened to it, and when."""

    @property
    def requirement(self) -> Requirement:
        """What is required of it."""


class Reports:
    """Of one connection."""

    __slots__ = ("connection",)

    def __init__(self, connection: ReportedQp) -> None:
        self.connection = connection

    def _publish(self, event: observe.Event) -> None:
        """Tell subscribers, when there is time for it."""
        self.connection.driver.aside(functools.partial(observe.publish, event))

    def _log(self, level: int, text: str) -> None:
        c = self.connection
        c.driver.announcements.say(level, c.shadow.qp_num, text)

    def _epoch(self) -> int:
        p = self.connection.protocol
        return p.epoch if p is not None else 0

    def _backups(self) -> tuple[str, ...]:
        c = self.connection
        return tuple(c.device(k) for k in range(1, c.n_pairs))

    def paired(self) -> None:
        """It knows its peer, and its backups are being connected."""
        c = self.connection
        peer = c.peer
        assert peer is not None
        named = f"{peer.default.gid or peer.default.lid} QPN {peer.default.qpn:#x}"
        self._publish(
            observe.Paired(qp_num=c.shadow.qp_num, device=c.device(0), backups=self._backups(), peer=named)
        )

    def status_changed(self, why: str | None, what: str) -> None:
        """It has another status. why: the reason alone; what: for the log, what is so where that is FAILED."""
        c = self.connection
        if c.status is Status.PROTECTED:
            c.requirement.met()
            self._publish(
                observe.Protected(qp_num=c.shadow.qp_num, device=c.device(0), backups=self._backups())
            )
            if c.driver.measures is not None:
                c.driver.measures.joined(c)
        elif c.status is Status.FAILED:
            self._log(logging.ERROR, f"{what}: {c.why}")
            c.timeline.last_failure = (c.driver.now_ns(), c.why or "")
            c.driver.totals.gave_up(why or "")
            self._publish(observe.Failed(qp_num=c.shadow.qp_num, device=c.device(0), why=c.why or ""))
        elif c.status is Status.UNPROTECTED:
            self._publish(observe.Unprotected(qp_num=c.shadow.qp_num, device=c.device(0), why=why or ""))

    def never_protected(self, why: str) -> None:
        """It cannot be protected; said once for each reason."""
        c = self.connection
        if c.status is not Status.UNPROTECTED or c.why != why:
            self._log(logging.WARNING, f"is not protected: {why}")

    def switch_started(self, target: int, why: str) -> None:
        """A SWITCH from where sends are to pair `target`."""
        c = self.connection
        now, left = c.driver.now_ns(), c.device(c.send_pair)
        reason = why.removesuffix(f" on {left}")  # not the same name twice in one line
        c.timeline.switch_started(now)
        c.timeline.last_failure = (now, f"{left}: {reason}")
        c.driver.totals.switches += 1
        self._log(logging.WARNING, f"leaving {left} for {c.device(target)}: {reason}")
        self._publish(observe.PathFailed(qp_num=c.shadow.qp_num, device=c.device(0), path=left, why=why))

    def first_wc(self, k: int, t_ns: int) -> None:
        """A completion has come from pair k, where a SWITCH went."""
        c = self.connection
        timeline = c.timeline
        took_ms = timeline.first_wc(t_ns)
        if took_ms is not None:
            target = c.device(k)
            durations = {"fallback_ms": took_ms}
            self._publish(
                observe.Fallback(
                    qp_num=c.shadow.qp_num,
                    device=c.device(0),
                    epoch=self._epoch(),
                    target=target,
                    durations=durations,
                )
            )
            timeline.tell()

    def is_home(self, home: bool, k: int) -> None:
        """Whether both directions are in DEFAULT; k: the pair that one of them is on now."""
        c = self.connection
        if home is (c.timeline.away_since_ns is None):
            return  # as before
        away_ms = c.timeline.is_home(home, c.driver.now_ns())
        p = c.protocol
        if away_ms is None or (p is not None and p.over):  # an end is no homecoming
            return
        c.driver.totals.homecomings += 1
        c.driver.totals.away_ns += int(away_ms * 1e6)
        name = c.device(k)
        self._log(logging.INFO, f"traffic is back on {name}")
        durations = {"away_ms": away_ms}
        self._publish(
            observe.Failback(
                qp_num=c.shadow.qp_num,
                device=c.device(0),
                epoch=self._epoch(),
                target=name,
                durations=durations,
            )
        )
