# SPDX-License-Identifier: BSD-3-Clause
"""ShadowQP: a protected QP as the driver sees it, and what the application did with it.

Which attributes the application gave it is in qp_attributes.py.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from shiftverbs import _core
from shiftverbs.native.ibv import QpAttrMask, QpType
from shiftverbs.process.waiting import in_slices
from shiftverbs.protocol.events import Status
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.cq import ShadowCQ
from shiftverbs.shadows.nic import GONE, Gid
from shiftverbs.shadows.pd import ShadowPD
from shiftverbs.shadows.qp_attributes import (
    ERR,
    LIVE,
    RESET,
    RTR,
    RTS,
    SQD,
    SQE,
    QpAttributes,
    QpFields,
    Transitions,
    masked_fields,
    refusal,
)
from shiftverbs.shadows.raw_verbs import Cap
from shiftverbs.shadows.shadow import FAILED, NotReady, Shadow, Slot, require

logger = logging.getLogger("shiftverbs.shadow")

# What QPs are given beyond the application's: a marker, and an ARM dummy or fence, on each queue.
HEADROOM_SEND_WR = 2
HEADROOM_RECV_WR = 2

# How long a verb of the application's waits for a command of ours that is under way on the same QP.
DRAIN_TIMEOUT_S = 5.0


class ShadowQP(Shadow):
    """ibv_qp: the default one, its shadows, its journal, and the application's attributes.

    qp: the application's QP (kept weakly); core: its QPCore; qp_num: the default QP's number.
    cap: capacities as the application knows them: what the default QP was granted, without headroom.
    app_state: the state the application last set (enum ibv_qp_state).
    """

    kind = "QP"

    def __init__(
        self,
        qp: Any,
        pd: ShadowPD,
        send_cq: ShadowCQ,
        recv_cq: ShadowCQ,
        core: Any,
        qp_num: int,
        cap: Cap,
        sq_sig_all: int,
    ) -> None:
        super().__init__(pd.domain, pyverbs_objects.pointer(qp))
        self._qp = weakref.ref(qp)
        self.pd = pd
        self.send_cq = send_cq
        self.recv_cq = recv_cq
        self.core = core
        self.qp_num = qp_num
        self.cap = cap
        self.sq_sig_all = sq_sig_all
        # How many CQ entries this QP may fill: every WR, ours included, may end in a WC.
        self.entries = {send_cq: cap[0] + HEADROOM_SEND_WR}
        self.entries[recv_cq] = self.entries.get(recv_cq, 0) + cap[1] + HEADROOM_RECV_WR
        self.app_state = RESET
        self._changing = _core.Unbroken(threading.RLock())  # across the default QP's verb and the note of it
        self.interruptions = 0  # how often failover has brought the default QP to RESET
        self._attributes = QpAttributes()
        self.commands_left = 0  # of ours, on the default QP, as the application's RESET, ERR or SQD began
        self._ended_without_nic = False
        self._left = set(range(1, len(self.slots) + 1))  # the backups that may still have a QP of it
        self._own_gid: Gid | None = None  # the application's, as it was when last seen
        # The driver's, from when it first needs one (runtime.connection_of).
        self.connection: Any = None
        # From RTR on, until the application moves it to RESET, ERR or SQD: else there is nothing to protect.
        self.is_connected = False
        # Since when it is at RTS, coming from RTR (CLOCK_MONOTONIC); None until then, and from RESET or ERR on.
        self.ready_ns: int | None = None

    @property
    def transitions(self) -> Transitions:
        """What the application gave to each transition, see QpAttributes."""
        return self._attributes.transitions

    @property
    def attrs(self) -> QpFields:
        """The same merged, later ones over earlier ones."""
        return self._attributes.merged

    @property
    def qp(self) -> Any:
        """The application's QP; None once that is gone."""
        return self._qp()

    def qpn(self, k: int) -> int:
        """The QP's number on NIC k; 0 unless READY."""
        return self.qp_num if k == 0 else self.slots[k - 1].number

    def route(self, k: int) -> tuple[int, int, bytes, int]:
        """(port, GID index, GID, active MTU as enum ibv_mtu) for this QP on NIC k, as the NIC was when last looked at.

        On the default NIC what the application chose, at whatever index it is now, or what took its place where it is
        gone (a table can change over a flap); on a backup the same port number, and a GID of the same type and family,
        as far as there is one. The GID is empty bytes where the port has none. Raises OSError.
        """
        nic = self.domain.nic if k == 0 else self.domain.backups[k - 1]
        vector = self.attrs.get("ah_attr", {})
        port = vector.get("port_num") or self.attrs.get("port_num") or self.domain.nic.port
        index = vector.get("sgid_index") if vector.get("is_global") else None
        own = None
        if index is not None and (k == 0 or self._own_gid is None):
            own = self.domain.nic.current_gid(port, index, self._own_gid)
            self._own_gid = own or self._own_gid
        if k == 0:
            gid = own if index is not None else self.domain.nic.gid(port, 0)
        else:
            port, gid = nic.route(port, self._own_gid)
        mtu = nic.port_seen(port).mtu
        return port, gid.index if gid is not None else 0, gid.raw if gid is not None else b"", mtu

    def pkey_index(self, k: int, port: int) -> int:
        """The P_Key index for this QP on NIC k, whose port is `port`: on a backup, that of the application's P_Key.

        Raises OSError where the backup is not in that partition: it cannot stand in.
        """
        index = int(self.attrs.get("pkey_index", 0))
        if k == 0:
            return index
        default = self.domain.nic
        own = self.attrs.get("port_num") or default.port
        return int(self.domain.backups[k - 1].pkey_index(port, default.pkey(own, index)))

    def _tell(self, what: str, *args: Any) -> None:
        """Call the driver; not in a forked child, whose driver is dead and may hold any lock."""
        if self._pid == os.getpid():
            getattr(self.domain.runtime, what)(self, *args)

    # ---- making and unmaking ----------------------------------------------------------------------------------

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        pd = require(self.pd, k)
        send_cq, recv_cq = require(self.send_cq, k), require(self.recv_cq, k)
        for cq in (self.send_cq, self.recv_cq):
            cq.room(k, nic)
        # The application's WRs and our own; its SGEs and inline bytes.
        wanted = (self.cap[0] + HEADROOM_SEND_WR, self.cap[1] + HEADROOM_RECV_WR, *self.cap[2:])
        handle, number, granted = nic.verbs.create_qp(pd, send_cq, recv_cq, wanted, self.sq_sig_all)
        if any(have < want for have, want in zip(granted, wanted, strict=True)):
            nic.verbs.destroy_qp(handle)
            raise NotReady(f"it grants {tuple(granted)} instead of {wanted}")
        slot.handle, slot.number = handle, number
        if self.core.closed:
            raise NotReady("closed")
        self.core.attach(k, handle, number)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.destroy_qp(handle)

    def _detach(self, k: int) -> None:
        self.core.detach(k)

    def settled(self) -> None:
        """The driver may pair it."""
        if not self.closed:
            self._tell("qp_shadowed")

    def closing(self) -> None:
        """Before the default QP is destroyed: driver, NIC commands and data path let go of it.

        The journal stays until every QP of it is gone: what a CQ still holds of them must be recognised as ours.
        """
        self._tell("qp_closing")
        self.closed = True
        self.core.detach(0)

    def close(self) -> None:
        """As for the others; the CQs get their room back, and the journal goes with the last shadow."""
        if not self.disposed:
            self.core.destroyed()
            for cq, entries in self.entries.items():
                cq.release(entries)
        super().close()
        if not self._left:
            self.core.close()

    def gone(self, k: int) -> None:
        """With the last one goes the journal."""
        self._left.discard(k)
        if not self._left:
            self.core.close()

    # ---- what the application does ----------------------------------------------------------------------------

    def ended_without_nic(self) -> None:
        """The application moves the QP to ERR, and the default NIC is gone: that counts as done."""
        self._ended_without_nic = True

    def ended(self, without_nic: bool = False) -> None:
        """After the application moved the QP to ERR, or tried to: we flush what no hardware will."""
        self._tell("qp_ended", without_nic or self._ended_without_nic)

    def refused(self, state: int, gone: bool, was_out: bool) -> None:
        """The NIC did not take the QP to RESET, ERR or SQD, after `leaving`; gone: it is not there any more.

        was_out: before that it was away, or errors were withheld. Its backups were stopped, and those muted.
        What a MOVE or SWITCH closed since then nobody would open.
        """
        left = was_out or self.core.forgets or not self.core.is_plain
        if state == ERR or (state == RESET and (gone or left)):
            self.ended(gone)

    def was_rebuilt(self) -> bool:
        """Whether failover has taken the default QP through RESET since the application connected it."""
        given = self.connection.given.get(0) if self.connection is not None else None
        return given is not None and given.rebuilt

    def known_state(self, ask: bool = False) -> int | None:
        """The state that the application should see (enum ibv_qp_state); None where the default QP has it.

        ask: where the QP is not protected any more, ask the NICs that carry its traffic.
        """
        core = self.core
        if core.ending or core.aborted:
            return ERR  # it has its errors, or is about to, wherever they came from
        if self._ended_without_nic:
            return self.app_state
        pairs = {core.send_pair, core.recv_pair}
        protected = self.connection is not None and self.connection.status is Status.PROTECTED
        if not protected and pairs != {0}:
            return ERR if any(self.is_broken(k, ask) for k in pairs) else self.app_state
        status = self.connection.status if self.connection is not None else None
        let_go = status in (Status.UNPROTECTED, Status.FAILED) and core.is_plain
        return self.app_state if core.guarded and not let_go else None

    def is_broken(self, k: int, ask: bool = True) -> bool:
        """Whether pair k's QP has failed, as far as is known; ask: or as its NIC says."""
        if self.core.first_error(k) is not None:
            return True
        if not ask:
            return False
        try:
            return self.domain.nic.verbs.query_qp_state(self.handle(k)) in (SQE, ERR)
        except OSError:
            return True

    def seen_state(self, hardware: int, ask: bool = False) -> int:
        """The same, where the default QP was found in state `hardware`."""
        known = self.known_state(ask)
        if known is None and hardware == RTS and self.was_rebuilt():
            return self.app_state  # it may be in RTR: it only receives
        return hardware if known is None else known

    def hopeless(self) -> str | None:
        """Why it is certain that the QP will not be protected as it is connected; None where it is not."""
        connection = self.connection
        if connection is not None and connection.status in (Status.UNPROTECTED, Status.FAILED):
            return str(connection.why)
        return f"no shadow QP: {self.reason(1)}" if self.state(1) == FAILED else None

    def is_owed(self) -> bool:
        """Whether the QP is at RTS, was never protected nor ended for that: what SHIFTVERBS_REQUIRE is about."""
        connection = self.connection
        return self.ready_ns is not None and (connection is None or connection.requirement.is_open)

    def is_away(self) -> bool:
        """Whether some of the traffic runs, or is about to run, elsewhere than on the default NIC."""
        core = self.core
        away = core.send_pair or core.recv_pair or not core.send_is_open or not core.recv_is_open
        return bool(core.guarded and away)

    def is_out_of_service(self) -> bool:
        """Whether the default QP is not in the state that the application left it in, so that it cannot be modified."""
        connection, core = self.connection, self.core
        if self._pid != os.getpid() or connection is None or self.app_state not in (RTR, RTS):
            return False
        if self.known_state() == ERR or 0 not in (core.send_pair, core.recv_pair):
            return True
        if self.app_state == RTR and self.was_rebuilt():
            return True
        protocol = connection.protocol
        # A mere question leaves it where it is, and in use.
        return bool(core.guarded and protocol is not None and protocol.fencing)

    def look_for_failure(self) -> None:
        """If the default QP, or its NIC, has failed, let the driver know before the application's modify goes on.

        Behind what is withheld from the application, this may be the first that tells of it.
        """
        connection = self.connection
        if self._pid != os.getpid() or connection is None or connection.status is not Status.PROTECTED:
            return
        try:
            if self.domain.nic.verbs.query_qp_state(self.default) not in (SQE, ERR):
                return
        except OSError as error:
            if error.errno not in GONE:
                return
        self._tell("qp_failed")

    def refusal(self, attr: pyverbs_objects.Attr, mask: int) -> int:
        """What the NIC that stands in for the default one says to the application's modify: its errno, or 0."""
        known = refusal(attr, mask, ERR if self.known_state() == ERR else self.app_state)
        live = self._live(attr, mask)
        if known or not live:
            return known
        return int(self.domain.runtime.qp_asked(self, live))

    @staticmethod
    def _live(attr: pyverbs_objects.Attr, mask: int) -> dict[str, int]:
        """What a modify says of what can be changed while the QP works."""
        fields = masked_fields(attr, mask)
        return {name: fields[name] for name in LIVE if name in fields}

    def may_drain(self, mask: int) -> bool:
        """Whether a NIC may take a modify to SQD with this mask (IBA 11.2.5.2)."""
        other = mask & ~(QpAttrMask.STATE | QpAttrMask.EN_SQD_ASYNC_NOTIFY)
        return self.app_state == SQD or (self.app_state == RTS and not other)

    def leaving(self, state: int, why: str = "") -> bool:
        """Before the application moves the QP to RESET, ERR, SQD or SQE: nothing is withheld any more.

        why: what the application does that ends protection as SQD does.
        False: SQD, and its traffic has left the default NIC, or is about to. Then nothing has changed.
        """
        if self._pid != os.getpid():
            self.touched(state)
        elif not self.domain.runtime.qp_touched(self, state, why):
            return False
        try:
            self._wait_for_commands()
        except BaseException:  # a handler's: the verb is not carried out, and the QP has left all the same
            if state != SQD:
                self.ended(without_nic=True)  # no verb has moved it, nor will
            raise
        return True

    def touched(self, state: int) -> None:
        """The application moves the QP to that state: nothing is withheld from now on.

        Under the driver's lock, where it has a connection.
        """
        if state in (RESET, ERR):
            self.ready_ns = None
            self.is_connected = False
        self.core.app_touched(state == RESET)

    def _wait_for_commands(self) -> None:
        """Until none is under way on the default QP, at most for `DRAIN_TIMEOUT_S`; notes how many are left."""
        worker = self.domain.nic.worker
        if not self.domain.nic.on_worker():
            in_slices(functools.partial(worker.drain, self.default), DRAIN_TIMEOUT_S)
            self.commands_left = worker.pending(self.default)

    def modified(self, attr: pyverbs_objects.Attr, mask: int, interruptions: int | None = None) -> None:
        """After the application's modify succeeded; interruptions: those before the default QP's own verb did it."""
        before = self.app_state
        self.app_state = int(attr.qp_state) if mask & QpAttrMask.STATE else before
        self._attributes.note(attr, mask, before, self.app_state)
        self.follow((before, self.app_state), attr, mask, interruptions)

    def change(
        self,
        attr: pyverbs_objects.Attr,
        mask: int,
        verb: Callable[..., None],
        *args: Any,
    ) -> tuple[int, int] | None:
        """Have verb(*args) change the default QP, and note that; `follow` is to come.

        One step for other threads: what is noted last is what it was given last. Returns its states before and after;
        None: another thread's was waited for, nothing was done, and all is to be looked at again.
        """
        own = self._pid == os.getpid()  # else a thread that is not here any more may have the lock
        if own and not self._changing.enter_now():
            with self._changing:
                return None
        try:
            verb(*args)
            before = self.app_state
            self.app_state = after = int(attr.qp_state) if mask & QpAttrMask.STATE else before
            self._attributes.note(attr, mask, before, after)
        finally:
            if own:
                self._changing.leave()
        return before, after

    def follow(
        self,
        states: tuple[int, int],
        attr: pyverbs_objects.Attr,
        mask: int,
        interruptions: int | None = None,
    ) -> None:
        """All that is ours follows what was noted; states: before and after it; else as for `modified`."""
        before, state = states
        said: tuple[int, dict[str, int]] | None = None
        if interruptions is not None and self.connection is not None and 0 in self.connection.given:
            said = interruptions, self._live(attr, mask)
        try:
            if self.connection is not None and state not in (RESET, ERR) and self._pid == os.getpid():
                self.domain.runtime.qp_changed(self, said)
        finally:  # where a handler raises the default QP is there all the same
            if state == before:
                pass
            elif state == RESET:
                self._ended_without_nic = False
                if self.connection is None or self._pid != os.getpid():
                    self.begin_anew()
                else:
                    self.domain.runtime.qp_reset(self)
            elif state == RTR:
                self.core.peer_qp_num = self.attrs.get("dest_qp_num", 0)
                self.is_connected = True
                self._tell("qp_connected")
            elif state == RTS and before == RTR:
                self._tell("qp_ready")

    def begin_anew(self) -> None:
        """The application's QP is in RESET: what was outstanding is forgotten."""
        self.core.reset_journal()
        self.core.forget_events()

    def show(
        self, attr: pyverbs_objects.Attr, init: pyverbs_objects.InitAttr | pyverbs_objects.InitAttrEx
    ) -> None:
        """Turn what ibv_query_qp found into what the application should see."""
        for cap in (attr.cap, init.cap):
            pyverbs_objects.set_cap(cap, self.cap)
        state = self.seen_state(attr.qp_state, ask=True)
        if attr.qp_state != state or self.was_rebuilt():
            # The default QP is out of service, being rebuilt, or was: failover chose other PSNs, perhaps another GID.
            self._attributes.write_to(attr)
            init.sq_sig_all, init.qp_type = self.sq_sig_all, QpType.RC
        attr.qp_state = attr.cur_qp_state = state
