# SPDX-License-Identifier: BSD-3-Clause
"""The package that is measured, loaded by name, and one endpoint with RC QPs built with it.

Only names that both packages share are used, so the same lines run over pyverbs and over shiftverbs.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import random
import socket
from types import ModuleType
from typing import Any

from benchmarks.perftest.exchange import Destination, Exchange
from benchmarks.perftest.options import Options

MTU_CODE = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
MTU_BYTES = {code: size for size, code in MTU_CODE.items()}
LINK_ETHERNET = 2
LINK_NAMES = {0: "Unknown", 1: "IB", LINK_ETHERNET: "Ethernet"}


class CompletionError(Exception):
    """A work request ended with an error; str() is what perftest would print."""

    def __init__(self, wc: Any, side: str, posted: int, completed: int) -> None:
        super().__init__(
            f" Completion with error at {side}\n"
            f" Failed status {wc.status}: wr_id {wc.wr_id} syndrom 0x{wc.vendor_err:x}\n"
            f"scnt={posted}, ccnt={completed}"
        )


class Verbs:
    """The modules of pyverbs or of its mirror.

    With SOFTRNIC set the software RNIC is switched on first; it must be there before pyverbs is loaded.
    """

    def __init__(self, package: str) -> None:
        if os.environ.get("SOFTRNIC") and package == "pyverbs":
            importlib.import_module("shiftverbs.softrnic").enable()
        self.package = package
        self.Error: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
        self.device = self._load("device")
        self.pd = self._load("pd")
        self.mr = self._load("mr")
        self.cq = self._load("cq")
        self.qp = self._load("qp")
        self.wr = self._load("wr")
        self.addr = self._load("addr")
        # Constants alone, the same for both; where and how pyverbs spells them differs between its releases.
        self.enums = importlib.import_module("shiftverbs.enums")

    def _load(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


class Endpoint:
    """Context, PD, buffer, CQs and RC QPs of one side.

    :param verbs: the package to use
    :param options: the command line
    :raises ValueError: no such device
    """

    def __init__(self, verbs: Verbs, options: Options) -> None:
        self.verbs, self.options = verbs, options
        e = verbs.enums
        try:
            names = [device.name.decode() for device in verbs.device.get_device_list()]
        except verbs.Error:  # no RDMA in this kernel, and no software RNIC
            names = []
        self.device_name = options.device or (names[0] if names else "")
        if self.device_name not in names:
            raise ValueError(
                f" IB device {self.device_name or '(any)'} not found; there are: {', '.join(names) or 'none'}"
            )
        self.ctx = verbs.device.Context(name=self.device_name)
        self.outs = options.outs or min(self.ctx.query_device().max_qp_rd_atom, 255)
        port = self.ctx.query_port(options.ib_port)
        self.lid: int = port.lid
        self.link: str = LINK_NAMES.get(port.link_layer, "Unknown")
        self.mtu: int = options.mtu or MTU_BYTES[port.active_mtu]
        self.gid_index = options.gid_index
        if self.gid_index is None and port.link_layer == LINK_ETHERNET:
            self.gid_index = 0
        self.gid = bytes(16)
        if self.gid_index is not None:
            self.gid = socket.inet_pton(
                socket.AF_INET6, str(self.ctx.query_gid(options.ib_port, self.gid_index))
            )

        self.pd = verbs.pd.PD(self.ctx)
        # Twice the largest size: what is sent, and what the other side writes.
        self.half = max(max(options.sizes), 64)
        self.buffer = mmap.mmap(-1, 2 * self.half)
        pointer = (ctypes.c_char * (2 * self.half)).from_buffer(self.buffer)
        self.vaddr = ctypes.addressof(pointer)
        del pointer
        self.access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        if options.test.verb == "read":
            self.access |= e.IBV_ACCESS_REMOTE_READ
        elif options.test.verb == "atomic":
            self.access |= e.IBV_ACCESS_REMOTE_ATOMIC
        self.mr = verbs.mr.MR(self.pd, 2 * self.half, self.access, address=self.vaddr)
        # Both sides may send and receive, so each CQ has room for all its queue can complete.
        self.rx_depth = options.rx_depth if options.uses_receives else 1
        self.send_cq = verbs.cq.CQ(self.ctx, options.tx_depth * options.num_qps)
        self.recv_cq = verbs.cq.CQ(self.ctx, self.rx_depth * options.num_qps)
        self.qps = [
            self._make_qp(self.send_cq, self.recv_cq, options.tx_depth, self.rx_depth)
            for _ in range(options.num_qps)
        ]
        self.qp = self.qps[0]
        self.idle_cq = verbs.cq.CQ(self.ctx, 2 * options.idle_qps) if options.idle_qps else None
        self.idle_qps = [self._make_qp(self.idle_cq, self.idle_cq, 1, 1) for _ in range(options.idle_qps)]
        self.psns = {qp.qp_num: random.SystemRandom().getrandbits(24) for qp in self.qps + self.idle_qps}
        #: the other side of each QP in `qps`, once connected
        self.peers: list[Destination] = []

    def _make_qp(self, send_cq: Any, recv_cq: Any, tx_depth: int, rx_depth: int) -> Any:
        verbs = self.verbs
        cap = verbs.qp.QPCap(
            max_send_wr=tx_depth,
            max_recv_wr=rx_depth,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=self.options.inline_size,
        )
        init = verbs.qp.QPInitAttr(
            qp_type=verbs.enums.IBV_QPT_RC, scq=send_cq, rcq=recv_cq, cap=cap, sq_sig_all=0
        )
        return verbs.qp.QP(self.pd, init)

    def local(self, qp: Any) -> Destination:
        """What the other side must know about one QP."""
        return Destination(
            self.lid,
            qp.qp_num,
            self.psns[qp.qp_num],
            self.mr.rkey,
            self.vaddr + self.half,
            self.gid,
            self.mtu,
            self.outs,
        )

    @property
    def locals(self) -> list[Destination]:
        """What the other side must know about each QP that carries traffic."""
        return [self.local(qp) for qp in self.qps]

    def connect(self, exchange: Exchange) -> None:
        """Swap addresses with the other side and bring every QP to RTS."""
        mine = {qp: self.local(qp) for qp in self.qps + self.idle_qps}
        peers = {qp: Destination.decode(exchange.swap(side.encode())) for qp, side in mine.items()}
        first = peers[self.qp]
        if self.options.mtu is None:
            self.mtu = min(self.mtu, first.mtu)
        self.outs = min(self.outs, first.outs)
        for qp, peer in peers.items():
            self._connect(qp, peer)
        self.peers = [peers[qp] for qp in self.qps]

    def _connect(self, qp: Any, peer: Destination) -> None:
        options, verbs = self.options, self.verbs
        if self.gid_index is None:
            ah = verbs.addr.AHAttr(dlid=peer.lid, is_global=0, port_num=options.ib_port)
        else:
            dgid = verbs.addr.GID(gid_text(peer.gid))
            route = verbs.addr.GlobalRoute(dgid=dgid, sgid_index=self.gid_index, hop_limit=64)
            ah = verbs.addr.AHAttr(dlid=peer.lid, is_global=1, gr=route, port_num=options.ib_port)
        attr = verbs.qp.QPAttr(port_num=options.ib_port)
        attr.qp_access_flags = self.access
        attr.ah_attr = ah
        attr.path_mtu = MTU_CODE[self.mtu]
        attr.dest_qp_num = peer.qpn
        attr.rq_psn = peer.psn
        attr.sq_psn = self.psns[qp.qp_num]
        attr.max_rd_atomic = self.outs
        attr.max_dest_rd_atomic = self.outs
        attr.min_rnr_timer = 12
        attr.timeout = options.qp_timeout
        attr.retry_cnt = options.retry_count
        attr.rnr_retry = 7
        qp.to_rts(attr)

    def send_wr(self, size: int, opcode: int, signaled: bool, index: int = 0) -> Any:
        """Return a work request for one message from the sending half to the other side's buffer.

        :param size: of the message in bytes
        :param index: of the QP it is for; also its wr_id
        """
        verbs, e, peer = self.verbs, self.verbs.enums, self.peers[index]
        flags = e.IBV_SEND_SIGNALED if signaled else 0
        if size <= self.options.inline_size:
            flags |= e.IBV_SEND_INLINE
        sge = verbs.wr.SGE(self.vaddr, size, self.mr.lkey)
        wr = verbs.wr.SendWR(wr_id=index, num_sge=1, sg=[sge], opcode=opcode, send_flags=flags)
        if opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_RDMA_READ):
            wr.set_wr_rdma(peer.rkey, peer.vaddr)
        if opcode in (e.IBV_WR_ATOMIC_FETCH_AND_ADD, e.IBV_WR_ATOMIC_CMP_AND_SWP):
            # perftest adds 0 and swaps 0 for 1: only time is of interest.
            wr.set_wr_atomic(peer.rkey, peer.vaddr, 0, 1)
        if opcode in (e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_SEND_WITH_IMM):
            wr.imm_data = 0
        return wr

    def recv_wr(self, size: int, index: int = 0) -> Any:
        """Return a receive for one message of this size into the receiving half; its wr_id is the QP's index."""
        verbs = self.verbs
        sge = verbs.wr.SGE(self.vaddr + self.half, size, self.mr.lkey)
        return verbs.wr.RecvWR(wr_id=index, num_sge=1, sg=[sge])

    def wait_protected(self, timeout_s: float = 30.0) -> None:
        """Wait until every QP is protected.

        :raises RuntimeError: one is not, and why
        """
        for qp in self.qps + self.idle_qps:
            if not qp.shift.wait_protected(timeout_s):
                raise RuntimeError(f"not protected: {qp.shift}")

    def close(self) -> None:
        """Release everything."""
        cqs = [cq for cq in (self.send_cq, self.recv_cq, self.idle_cq) if cq is not None]
        for resource in (*self.qps, *self.idle_qps, *cqs, self.mr, self.pd, self.ctx):
            resource.close()
        self.buffer.close()


def gid_text(gid: bytes) -> str:
    """Return a GID's 16 bytes as the eight full groups that pyverbs takes.

    :raises ValueError: not 16 bytes
    """
    if len(gid) != 16:
        raise ValueError("a GID has 16 bytes")
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))
