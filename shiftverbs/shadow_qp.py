# SPDX-License-Identifier: BSD-3-Clause
"""ShadowQP: a protected QP as the driver sees it, and what the application did with it.

The attributes needed to rebuild a QP are remembered from the application's `modify`, never queried.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from shiftverbs import pyverbs_objects
from shiftverbs.backup import Gid
from shiftverbs.shadow import Ending, NotReady, Shadow, ShadowCQ, ShadowPD, Slot, require

logger = logging.getLogger("shiftverbs.shadow")

# What QPs are given beyond the application's: a marker, and an ARM dummy or fence, on each queue.
HEADROOM_SEND_WR = 2
HEADROOM_RECV_WR = 2

# How long a verb of the application's waits for a command of ours that is under way on the same QP.
DRAIN_TIMEOUT_S = 5.0

# enum ibv_qp_state
RESET, INIT, RTR, RTS, SQD, SQE, ERR = range(7)
_STATE_NAMES = {INIT: "INIT", RTR: "RTR", RTS: "RTS"}

# enum ibv_qp_attr_mask
_STATE = 1 << 0
_AV = 1 << 7
_FIELDS = {
    1 << 3: "qp_access_flags",
    1 << 4: "pkey_index",
    1 << 5: "port_num",
    1 << 6: "qkey",
    1 << 8: "path_mtu",
    1 << 9: "timeout",
    1 << 10: "retry_cnt",
    1 << 11: "rnr_retry",
    1 << 12: "rq_psn",
    1 << 13: "max_rd_atomic",
    1 << 15: "min_rnr_timer",
    1 << 16: "sq_psn",
    1 << 17: "max_dest_rd_atomic",
    1 << 20: "dest_qp_num",
    1 << 25: "rate_limit",
}

# (send WRs, receive WRs, send SGEs, receive SGEs, inline bytes)
Cap = tuple[int, int, int, int, int]


def address_vector(attr: pyverbs_objects.AhAttr) -> dict[str, Any]:
    """struct ibv_ah_attr as a dict; `dgid` (16 bytes) and what goes with it only where it is global."""
    fields = {
        "dlid": attr.dlid,
        "sl": attr.sl,
        "src_path_bits": attr.src_path_bits,
        "static_rate": attr.static_rate,
        "port_num": attr.port_num,
        "is_global": attr.is_global,
    }
    if attr.is_global:
        grh = attr.grh
        fields.update(
            dgid=bytes(grh.dgid),
            flow_label=grh.flow_label,
            sgid_index=grh.sgid_index,
            hop_limit=grh.hop_limit,
            traffic_class=grh.traffic_class,
        )
    return fields


def masked_fields(attr: pyverbs_objects.Attr, mask: int) -> dict[str, Any]:
    """The fields of an ibv_qp_attr that a mask selects (without the state)."""
    fields = {name: getattr(attr, name) for bit, name in _FIELDS.items() if mask & bit}
    if mask & _AV:
        fields["ah_attr"] = address_vector(attr.ah_attr)
    return fields


class ShadowQP(Shadow):
    """ibv_qp: the default one, its shadows, its journal, and the application's attributes.

    qp: the application's QP (kept weakly); core: its QPCore; qp_num: the default QP's number.
    cap: capacities as the application knows them: what the default QP was granted, without headroom.
    transitions: what the application gave to each transition: "INIT", "RTR", "RTS" -> fields of ibv_qp_attr by name,
    the address vector as a dict `ah_attr` (see address_vector). attrs: the same merged, later ones over earlier ones.
    app_state: the state it last set (enum ibv_qp_state).
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
        self.transitions: dict[str, dict[str, Any]] = {}
        self.attrs: dict[str, Any] = {}
        self.app_state = RESET
        self._ended_without_nic = False
        self._left = set(range(1, len(self.slots) + 1))  # the backups that may still have a QP of it
        self._own_gid: Gid | None = None  # the application's, as it was when last seen
        # The driver's, from when it first needs one (runtime.connection_of).
        self.connection: Any = None

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
        self.closed = True
        self._tell("qp_closing")
        self.core.detach(0)

    def close(self) -> list[Ending]:
        """As for the others; the CQs get their room back, and the journal goes with the last shadow."""
        if not self._disposed:
            for cq, entries in self.entries.items():
                cq.release(entries)
        endings = super().close()
        if not self._left:
            self.core.close()
        return endings

    def gone(self, k: int) -> None:
        """With the last one goes the journal."""
        self._left.discard(k)
        if not self._left:
            self.core.close()

    # ---- what the application does ----------------------------------------------------------------------------

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy: the machinery behind it is the parent's."""
        return self._pid != os.getpid()

    def hides_state(self) -> bool:
        """Whether the application is shown its own view: until the QP really failed or the application ended it."""
        return bool(self.core.guarded) or self._ended_without_nic

    def ended_without_nic(self) -> None:
        """The application moved the QP to ERR, and the default NIC is gone: what is outstanding is flushed here."""
        self._ended_without_nic = True
        self._tell("qp_flushed")

    def was_rebuilt(self) -> bool:
        """Whether failover has taken the default QP through RESET since the application connected it."""
        protocol = getattr(self.connection, "protocol", None)
        return protocol is not None and protocol.pairs[0].arm > 0

    def is_away(self) -> bool:
        """Whether some of the traffic runs, or is about to run, elsewhere than on the default NIC."""
        core = self.core
        away = core.send_pair or core.recv_pair or not core.send_is_open or not core.recv_is_open
        return bool(core.guarded and away)

    def leaving(self, state: int) -> None:
        """Before the application moves the QP to RESET, ERR, SQD or SQE: nothing is withheld any more."""
        self.core.app_touched()
        self._tell("qp_touched", state)
        if not self.domain.nic.on_worker():
            self.domain.nic.worker.drain(self.default, DRAIN_TIMEOUT_S)

    def modified(self, attr: pyverbs_objects.Attr, mask: int) -> None:
        """After the application's modify succeeded."""
        fields = masked_fields(attr, mask)
        before = self.app_state
        if mask & _STATE:
            self.app_state = int(attr.qp_state)
        state = self.app_state
        name = _STATE_NAMES.get(state)
        if state == RESET:
            self.transitions = {}
        elif name is not None:
            if state == before or (state, before) == (RTS, SQD):
                fields = {**self.transitions.get(name, {}), **fields}
            elif state == INIT:
                self.transitions = {}
            self.transitions[name] = fields
        merged: dict[str, Any] = {}
        for known in _STATE_NAMES.values():
            merged.update(self.transitions.get(known, {}))
        self.attrs = merged  # in one go: the driver may look at any time
        if state == before:
            return
        if state == RESET:
            self._ended_without_nic = False
            self.core.reset_journal()
        elif state == RTR:
            self._tell("qp_connected")
        elif state == RTS and before == RTR:
            self._tell("qp_ready")

    def show(
        self, attr: pyverbs_objects.Attr, init: pyverbs_objects.InitAttr | pyverbs_objects.InitAttrEx
    ) -> None:
        """Turn what ibv_query_qp found into what the application is to see."""
        for cap in (attr.cap, init.cap):
            pyverbs_objects.set_cap(cap, self.cap)
        if not self.hides_state():
            return
        if attr.qp_state != self.app_state or self.was_rebuilt():
            # The default QP is out of service, being rebuilt, or was: failover chose other PSNs, perhaps another GID.
            for name, value in self.attrs.items():
                if name == "ah_attr":
                    _set_address_vector(attr.ah_attr, value)
                else:
                    setattr(attr, name, value)
            init.sq_sig_all, init.qp_type = self.sq_sig_all, 2
        attr.qp_state = attr.cur_qp_state = self.app_state


def _set_address_vector(attr: pyverbs_objects.AhAttr, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name == "dgid":
            attr.grh.dgid[:] = value
        elif name in ("flow_label", "sgid_index", "hop_limit", "traffic_class"):
            setattr(attr.grh, name, value)
        else:
            setattr(attr, name, value)
