"""The package that is measured, loaded by name, and one RC endpoint built with it.

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

from .exchange import Destination, Exchange
from .options import Options

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
        try:
            self.enums = self._load("enums")
        except ModuleNotFoundError:  # from pyverbs 59 on
            self.enums = self._load("libibverbs_enums")

    def _load(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


class Endpoint:
    """Context, PD, buffer, CQs and one RC QP of one side.

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
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.mr = verbs.mr.MR(self.pd, 2 * self.half, access, address=self.vaddr)
        # Both sides may send and receive, so each CQ has room for all its queue can complete.
        self.rx_depth = options.rx_depth if options.uses_receives else 1
        self.send_cq = verbs.cq.CQ(self.ctx, options.tx_depth)
        self.recv_cq = verbs.cq.CQ(self.ctx, self.rx_depth)
        cap = verbs.qp.QPCap(
            max_send_wr=options.tx_depth,
            max_recv_wr=self.rx_depth,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=options.inline_size,
        )
        init = verbs.qp.QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self.send_cq, rcq=self.recv_cq, cap=cap, sq_sig_all=0
        )
        self.qp = verbs.qp.QP(self.pd, init)
        self.psn = random.SystemRandom().getrandbits(24)
        self.peer: Destination | None = None

    @property
    def local(self) -> Destination:
        """What the other side must know."""
        return Destination(
            self.lid, self.qp.qp_num, self.psn, self.mr.rkey, self.vaddr + self.half, self.gid, self.mtu
        )

    def connect(self, exchange: Exchange) -> Destination:
        """Swap addresses with the other side and bring the QP to RTS."""
        options, verbs, e = self.options, self.verbs, self.verbs.enums
        peer = Destination.decode(exchange.swap(self.local.encode()))
        if options.mtu is None:
            self.mtu = min(self.mtu, peer.mtu)
        if self.gid_index is None:
            ah = verbs.addr.AHAttr(dlid=peer.lid, is_global=0, port_num=options.ib_port)
        else:
            dgid = verbs.addr.GID(gid_text(peer.gid))
            route = verbs.addr.GlobalRoute(dgid=dgid, sgid_index=self.gid_index, hop_limit=64)
            ah = verbs.addr.AHAttr(dlid=peer.lid, is_global=1, gr=route, port_num=options.ib_port)
        attr = verbs.qp.QPAttr(port_num=options.ib_port)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        attr.ah_attr = ah
        attr.path_mtu = MTU_CODE[self.mtu]
        attr.dest_qp_num = peer.qpn
        attr.rq_psn = peer.psn
        attr.sq_psn = self.psn
        attr.max_rd_atomic = 1
        attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer = 12
        attr.timeout = options.qp_timeout
        attr.retry_cnt = options.retry_count
        attr.rnr_retry = 7
        self.qp.to_rts(attr)
        self.peer = peer
        return peer

    def send_wr(self, size: int, opcode: int, signaled: bool, wr_id: int = 0) -> Any:
        """Return a work request for one message from the sending half to the other side's buffer."""
        assert self.peer is not None
        verbs, e = self.verbs, self.verbs.enums
        flags = e.IBV_SEND_SIGNALED if signaled else 0
        if size <= self.options.inline_size:
            flags |= e.IBV_SEND_INLINE
        sge = verbs.wr.SGE(self.vaddr, size, self.mr.lkey)
        wr = verbs.wr.SendWR(wr_id=wr_id, num_sge=1, sg=[sge], opcode=opcode, send_flags=flags)
        if opcode in (e.IBV_WR_RDMA_WRITE, e.IBV_WR_RDMA_WRITE_WITH_IMM):
            wr.set_wr_rdma(self.peer.rkey, self.peer.vaddr)
        if opcode in (e.IBV_WR_RDMA_WRITE_WITH_IMM, e.IBV_WR_SEND_WITH_IMM):
            wr.imm_data = 0
        return wr

    def recv_wr(self, size: int) -> Any:
        """Return a receive for one message of this size into the receiving half."""
        verbs = self.verbs
        sge = verbs.wr.SGE(self.vaddr + self.half, size, self.mr.lkey)
        return verbs.wr.RecvWR(num_sge=1, sg=[sge])

    def wait_protected(self, timeout_s: float = 30.0) -> None:
        """Wait until the QP is protected.

        :raises RuntimeError: it is not, and why
        """
        if not self.qp.shift.wait_protected(timeout_s):
            raise RuntimeError(f"not protected: {self.qp.shift}")

    def close(self) -> None:
        """Release everything."""
        for resource in (self.qp, self.send_cq, self.recv_cq, self.mr, self.pd, self.ctx):
            resource.close()
        self.buffer.close()


def gid_text(gid: bytes) -> str:
    """Return a GID's 16 bytes as the eight full groups that pyverbs takes.

    :raises ValueError: not 16 bytes
    """
    if len(gid) != 16:
        raise ValueError("a GID has 16 bytes")
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))
