# SPDX-License-Identifier: BSD-3-Clause
"""A QP as a program has it, on the production objects: as qp.py does it around the verbs."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.host import ALL_RIGHTS, Cq, Device
from simulator.rnic import ERR, INIT, RESET, RTR, RTS, SQD, HwQp

from shiftverbs import _core
from shiftverbs.native.ibv import QpAttrMask
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.nic import GONE
from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.shadows.qp import HEADROOM_RECV_WR, HEADROOM_SEND_WR, ShadowQP

MASKS: dict[int, int] = {
    INIT: QpAttrMask.STATE | QpAttrMask.PKEY_INDEX | QpAttrMask.PORT | QpAttrMask.ACCESS_FLAGS,
    RTR: QpAttrMask.STATE
    | QpAttrMask.AV
    | QpAttrMask.PATH_MTU
    | QpAttrMask.DEST_QPN
    | QpAttrMask.RQ_PSN
    | QpAttrMask.MAX_DEST_RD_ATOMIC
    | QpAttrMask.MIN_RNR_TIMER,
    RTS: QpAttrMask.STATE
    | QpAttrMask.TIMEOUT
    | QpAttrMask.RETRY_CNT
    | QpAttrMask.RNR_RETRY
    | QpAttrMask.SQ_PSN
    | QpAttrMask.MAX_QP_RD_ATOMIC,
}


class Endpoint:
    """A QP of the application's, with its CQs.

    capacity, receives: WRs. pointer: its address, as pyverbs' objects have it. app: the program of the life it is in.
    """

    def __init__(self, device: Device, capacity: int, receives: int, cq: Cq, recv_cq: Cq) -> None:
        self.device = device
        host = self.host = device.host
        self.net = host.net
        self.capacity, self.receives = capacity, receives
        self.blocked = False  # its thread is in a verb
        self.closed = False
        self.app: Any = None
        self.look: Callable[[], None] = lambda: None
        self.begin: Callable[[], None] = lambda: None
        self.statuses: list[Status] = []
        verbs = host.verbs
        cap = (capacity, receives, 1, 1, 64)
        padded = (capacity + HEADROOM_SEND_WR, receives + HEADROOM_RECV_WR, 1, 1, 64)
        with host:
            self.cq, self.recv_cq = cq.core, recv_cq.core
            self.pointer, self.qp_num, _ = verbs.create_qp(device.pd, cq.pointer, recv_cq.pointer, padded)
            self.hardware: HwQp = verbs.qps[self.pointer]
            self.hardware.app = True
            self.core = _core.QPCore(
                self.cq, self.recv_cq, self.pointer, self.qp_num, *cap, False, device.keymap
            )
            self.shadow: Any = None
            if not host.plain:
                self.shadow = ShadowQP(
                    self, device.shadow_pd, cq.shadow, recv_cq.shadow, self.core, self.qp_num, cap, 0
                )
                for each, entries in self.shadow.entries.items():
                    each.reserve(entries)
                self.shadow.start()
        host.endpoints.append(self)

    # ---- what happens around it -------------------------------------------------------------------------------------

    @property
    def connection(self) -> Any:
        """The production Connection; None where there is none (yet)."""
        return self.shadow.connection if self.shadow is not None else None

    @property
    def protocol(self) -> Any:
        """The PairProtocol of its pairing."""
        return self.connection.protocol if self.connection is not None else None

    @property
    def status(self) -> Status | None:
        """As qp.shift shows it."""
        return self.connection.status if self.connection is not None else None

    @property
    def buffered(self) -> int:
        """How many completions lie in its CQs that it is to poll, and no NIC has any more."""
        return int(self.cq.buffered + (self.recv_cq.buffered if self.recv_cq is not self.cq else 0))

    def qp(self, k: int) -> HwQp | None:
        """The hardware QP of pair k."""
        if k == 0:
            return self.hardware
        handle = self.shadow.handle(k) if self.shadow is not None else 0
        return self.host.verbs.qps.get(handle)

    @property
    def qps(self) -> list[HwQp]:
        """All of them that there are."""
        found = [self.qp(k) for k in range(len(self.device.hardware))]
        return [qp for qp in found if qp is not None]

    # ---- verbs ------------------------------------------------------------------------------------------------------

    def connect(
        self,
        peer: Endpoint,
        rights: int = ALL_RIGHTS,
        states: Iterable[int] = (INIT, RTR, RTS),
        reads: int = 16,
        serves: int = 16,
        psn: int = 0,
    ) -> None:
        """INIT, where `begin` is called, RTR and RTS. reads, serves: how many READs and atomics at a time."""
        attr = Attr()
        attr.port_num, attr.pkey_index, attr.qp_access_flags = 1, self.hardware.nic.pkey_index, rights
        attr.path_mtu, attr.dest_qp_num = 3, peer.qp_num
        attr.rq_psn = attr.sq_psn = psn
        attr.max_dest_rd_atomic, attr.max_rd_atomic = serves, reads
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 7, 7, 12
        attr.ah_attr.is_global = attr.ah_attr.port_num = 1
        attr.ah_attr.grh.dgid = peer.hardware.nic.gid
        for state in states:
            self.modify(attr, state, int(MASKS[state]))
            if state == INIT:
                self.begin()

    def modify(self, attr: Attr, state: int | None, mask: int) -> None:
        """ibv_modify_qp, as qp.py has it. Raises PyverbsRDMAError."""
        attr.qp_state = state if state is not None else 0
        with self.host:
            if state in (RESET, ERR, SQD):
                self._leave(attr, state, mask)
            else:
                self._change(attr, state, mask)

    def _hardware_modify(self, attr: Attr, state: int | None) -> None:
        fields: dict[str, Any] = {}
        if state is not None:
            fields["state"] = state
        if state == RTR:
            fields |= {"rq_psn": attr.rq_psn, "dest_qp_num": attr.dest_qp_num}
            fields["ah_attr"] = {"dgid": bytes(attr.ah_attr.grh.dgid)}
            fields["max_dest_rd_atomic"] = attr.max_dest_rd_atomic
        if state == INIT:
            fields["pkey_index"] = attr.pkey_index
        if state == RTS:
            fields |= {"sq_psn": attr.sq_psn, "max_rd_atomic": attr.max_rd_atomic}
        if state in (INIT, None):
            fields["qp_access_flags"] = attr.qp_access_flags
        err = self._wait_for_nic(state)
        self.net.deliver()  # what was posted before comes before
        err = err or self.hardware.modify(fields)
        if err:
            raise PyverbsRDMAError("Failed to modify QP", err)

    def _wait_for_nic(self, state: int | None) -> int:
        """A verb takes the NIC's time, or as long as that hangs, and may be refused: errno.

        Only where `net.verbs_take_time`: in other runs the application's own verbs take none.
        """
        if not self.net.verbs_take_time:
            return 0
        nic = self.hardware.nic
        self.host.wait(lambda: nic.dead, nic.command_ns / 1e9)
        self.host.wait(lambda: nic.dead or not nic.hung, None)
        if nic.refusing > 0 and not nic.dead and state != INIT:
            nic.refusing -= 1
            return errno.ETIMEDOUT
        return 0

    def _leave(self, attr: Attr, state: int, mask: int) -> None:
        held = self.shadow
        if held is None:
            self._hardware_modify(attr, state)
            return
        refused = mask != QpAttrMask.STATE if state in (RESET, ERR) else not held.may_drain(mask)
        if refused:
            raise PyverbsRDMAError("Failed to modify QP", errno.EINVAL)
        if state == SQD:
            held.look_for_failure()
        was_guarded = held.core.guarded or held.core.ending
        was_out = held.is_away() or (was_guarded and held.core.first_error(0) is not None)
        while True:
            if not held.leaving(state):
                raise PyverbsRDMAError("Failed to modify QP", errno.EBUSY)
            if self.closed:  # while that waited for a NIC
                return
            if not held.is_connected or held.connection is None or held.is_inherited:
                break
        try:
            self._hardware_modify(attr, state)
        except PyverbsRDMAError as error:
            gone = was_guarded and error.error_code in GONE
            if state != ERR or not gone:
                held.refused(state, gone, was_out)
                raise
            held.ended_without_nic()
        if state == ERR:
            held.ended()
        held.modified(attr, mask, held.interruptions)

    def _change(self, attr: Attr, state: int | None, mask: int) -> None:
        held = self.shadow
        if held is None:
            self._hardware_modify(attr, state)
            return
        error: PyverbsRDMAError | None = None
        while not held.is_out_of_service():
            interruptions = held.interruptions
            try:
                states = held.change(attr, mask, self._hardware_modify, attr, state)
            except PyverbsRDMAError as refused:
                held.look_for_failure()
                if held.interruptions != interruptions:
                    continue
                if not held.is_out_of_service():
                    raise
                error = refused
                break
            assert states is not None, "there is one thread"
            held.follow(states, attr, mask, interruptions)
            return
        code = held.refusal(attr, mask)
        if code:
            raise PyverbsRDMAError("Failed to modify QP", code) from error
        held.modified(attr, mask)

    def drain(self) -> None:
        """RTS to SQD: nothing that is posted is begun any more. Raises PyverbsRDMAError."""
        self.modify(Attr(), SQD, int(QpAttrMask.STATE))

    def set_rights(self, rights: int) -> None:
        """RTS to RTS: other access flags."""
        attr = Attr()
        attr.qp_access_flags = rights
        self.modify(attr, None, int(QpAttrMask.ACCESS_FLAGS))

    def prefer(self, k: int) -> None:
        """`qp.shift.migrate` and `restore`."""
        if self.connection is not None and not self.closed:
            with self.host:
                self.connection.prefer(k)

    def close(self) -> None:
        """ibv_destroy_qp, as qp.py has it."""
        if self.closed:
            return
        with self.host:
            if self.shadow is not None:
                self.shadow.closing()
            self.closed = True
            self.net.given_back(self.app)
            try:
                destroy = functools.partial(self.host.verbs.destroy_qp, self.pointer)
                _core.destroy_qp(destroy, self.core, [], self.qp_num)
            finally:
                if self.shadow is not None:
                    self.shadow.close()
