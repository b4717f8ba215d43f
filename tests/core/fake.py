# SPDX-License-Identifier: BSD-3-Clause
"""Python side of fakeverbs.c: hardware that does what a test says, and the small vocabulary of the data path's tests.

`Hardware` makes contexts, CQs, QPs and channels without a NIC. `World` is one application QP with its CQs on several
NICs, the core objects around them, and verbs such as `complete` and `flush` in the hardware's place.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

from pyverbs.cq import WC as WC_CLASS  # noqa: F401  (for the checks)
from pyverbs.wr import SGE, RecvWR, SendWR

from shiftverbs import _core

SUCCESS, LOC_LEN, LOC_QP_OP, LOC_PROT, FLUSH, REM_INV, REM_ACCESS, RETRY_EXC, RNR_EXC = (
    0,
    1,
    2,
    4,
    5,
    9,
    10,
    12,
    13,
)
FATAL = 19
WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CAS, FAA, LOCAL_INV, BIND_MW, SEND_INV = range(10)
FENCE, SIGNALED, SOLICITED, INLINE = 1, 2, 4, 8
TWO_SIDED = {WRITE_IMM, SEND, SEND_IMM, SEND_INV}
WC_OPCODE = {
    WRITE: 1,
    WRITE_IMM: 1,
    SEND: 0,
    SEND_IMM: 0,
    READ: 2,
    CAS: 3,
    FAA: 4,
    LOCAL_INV: 6,
    BIND_MW: 5,
    SEND_INV: 0,
}
RECV_BIT = 1 << 63
SEQ_MASK = (1 << 56) - 1


class WcStruct(ctypes.Structure):
    """struct ibv_wc."""

    _fields_ = [
        ("wr_id", ctypes.c_uint64),
        ("status", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("vendor_err", ctypes.c_uint32),
        ("byte_len", ctypes.c_uint32),
        ("imm_data", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("src_qp", ctypes.c_uint32),
        ("wc_flags", ctypes.c_uint),
        ("pkey_index", ctypes.c_uint16),
        ("slid", ctypes.c_uint16),
        ("sl", ctypes.c_uint8),
        ("dlid_path_bits", ctypes.c_uint8),
    ]


class SgeStruct(ctypes.Structure):
    """struct ibv_sge."""

    _fields_ = [("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32)]


class PostStruct(ctypes.Structure):
    """struct fv_post."""

    _fields_ = [
        ("wr_id", ctypes.c_uint64),
        ("opcode", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("imm", ctypes.c_uint32),
        ("num_sge", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("compare_add", ctypes.c_uint64),
        ("swap", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
        ("inline_len", ctypes.c_uint32),
        ("sge", SgeStruct * 16),
        ("inline_data", ctypes.c_uint8 * 512),
    ]


_VOID, _SIZE, _INT, _U32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "fv_context": (_VOID, []),
    "fv_channel": (_VOID, [_VOID]),
    "fv_cq": (_VOID, [_VOID, _INT, _VOID]),
    "fv_qp": (_VOID, [_VOID, _VOID, _VOID, _U32, _SIZE, _SIZE]),
    "fv_next_wr": (None, [_VOID, ctypes.c_uint64, ctypes.c_uint]),
    "fv_cursor_wr_id": (ctypes.c_uint64, [_VOID]),
    "fv_cursor_status": (_INT, [_VOID]),
    "fv_null_mode": (None, [_VOID, _INT]),
    "fv_count": (_SIZE, [_VOID, _INT]),
    "fv_calls": (_SIZE, [_VOID, _INT]),
    "fv_post": (ctypes.POINTER(PostStruct), [_VOID, _INT, _SIZE]),
    "fv_fail": (None, [_VOID, _INT, _SIZE, _INT, _SIZE]),
    "fv_hide": (None, [_VOID, ctypes.c_uint]),
    "fv_free_slots": (None, [_VOID, _INT, _SIZE]),
    "fv_push": (None, [_VOID, ctypes.POINTER(WcStruct)]),
    "fv_fail_cq": (None, [_VOID, _INT]),
    "fv_pending": (_U32, [_VOID]),
    "fv_acked": (ctypes.c_uint, [_VOID]),
    "fv_armed": (_INT, [_VOID]),
    "fv_free_cq": (None, [_VOID]),
    "fv_free_qp": (None, [_VOID]),
    "fv_free_channel": (None, [_VOID]),
    "fv_free_context": (None, [_VOID]),
}


def library() -> ctypes.CDLL:
    """fakeverbs, which the parent compiled and this interpreter's conftest loaded before libibverbs."""
    lib = ctypes.CDLL(os.environ["SHIFTVERBS_FAKEVERBS"], mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class HwCQ:
    """A hardware CQ."""

    def __init__(self, lib: ctypes.CDLL, ctx: int, cqe: int = 4096, channel: int | None = None) -> None:
        self.lib, self.ptr = lib, lib.fv_cq(ctx, cqe, channel)

    def push(self, wr_id: int, status: int = SUCCESS, qp_num: int = 0, **fields: int) -> None:
        """Write one WC."""
        wc = WcStruct(wr_id=wr_id, status=status, qp_num=qp_num, **fields)
        self.lib.fv_push(self.ptr, ctypes.byref(wc))

    def hide(self, polls: int) -> None:
        """The newest WC shows itself after so many more polls."""
        self.lib.fv_hide(self.ptr, polls)

    @property
    def pending(self) -> int:
        return int(self.lib.fv_pending(self.ptr))


class HwQP:
    """A hardware QP: what was posted, and what becomes of it."""

    def __init__(
        self, lib: ctypes.CDLL, ctx: int, scq: HwCQ, rcq: HwCQ, qp_num: int, sq: int, rq: int
    ) -> None:
        self.lib, self.scq, self.rcq, self.qp_num = lib, scq, rcq, qp_num
        self.ptr = lib.fv_qp(ctx, scq.ptr, rcq.ptr, qp_num, sq, rq)
        self.done = [0, 0]  # posts that were completed, or skipped as unsignaled, per queue

    def count(self, recv: bool = False) -> int:
        return int(self.lib.fv_count(self.ptr, recv))

    def calls(self, recv: bool = False) -> int:
        return int(self.lib.fv_calls(self.ptr, recv))

    def post(self, i: int, recv: bool = False) -> PostStruct:
        """The i-th post, counted from 0 or from the end."""
        if i < 0:
            i += self.count(recv)
        found = self.lib.fv_post(self.ptr, recv, i)
        assert found, f"post {i} of {self.count(recv)}"
        return found.contents

    def posts(self, first: int = 0, recv: bool = False) -> list[PostStruct]:
        return [self.post(i, recv) for i in range(first, self.count(recv))]

    def fail(self, after: int, err: int, recv: bool = False, times: int = 1) -> None:
        """Refuse the post after the next `after` ones, so often."""
        self.lib.fv_fail(self.ptr, recv, after, err, times)

    def complete(self, n: int = 1) -> None:
        """The next n sends succeed; the signaled ones get a WC."""
        for _ in range(n):
            i = self.done[0]
            p = self.post(i)
            self.done[0] += 1
            self.lib.fv_free_slots(self.ptr, 0, i + 1)
            if p.flags & SIGNALED:
                self.scq.push(p.wr_id, SUCCESS, self.qp_num, opcode=WC_OPCODE[p.opcode])

    def receive(self, n: int = 1, **fields: int) -> None:
        """The next n receives are consumed by messages."""
        for _ in range(n):
            p = self.post(self.done[1], recv=True)
            self.done[1] += 1
            self.lib.fv_free_slots(self.ptr, 1, self.done[1])
            self.rcq.push(p.wr_id, SUCCESS, self.qp_num, **{"opcode": 128, "byte_len": 5, **fields})

    def fail_send(self, status: int, vendor_err: int = 0) -> None:
        """The next send fails (signaled or not)."""
        p = self.post(self.done[0])
        self.done[0] += 1
        self.lib.fv_free_slots(self.ptr, 0, self.done[0])
        self.scq.push(p.wr_id, status, self.qp_num, vendor_err=vendor_err, opcode=0xEE)

    def fail_recv(self, status: int, vendor_err: int = 0) -> None:
        """The next receive fails."""
        p = self.post(self.done[1], recv=True)
        self.done[1] += 1
        self.lib.fv_free_slots(self.ptr, 1, self.done[1])
        self.rcq.push(p.wr_id, status, self.qp_num, vendor_err=vendor_err)

    def flush(self) -> None:
        """The QP is in ERR: whatever is posted is flushed in order."""
        while self.done[0] < self.count():
            self.fail_send(FLUSH)
        while self.done[1] < self.count(recv=True):
            self.fail_recv(FLUSH)

    def reset(self) -> None:
        """The QP was moved to RESET: its queues are empty."""
        self.done = [self.count(), self.count(recv=True)]
        self.lib.fv_free_slots(self.ptr, 0, self.done[0])
        self.lib.fv_free_slots(self.ptr, 1, self.done[1])


@dataclass
class World:
    """One application QP on `nics` NICs. Capacities are the application's; hardware has the documented headroom."""

    lib: ctypes.CDLL
    nics: int = 2
    max_send: int = 16
    max_recv: int = 16
    max_sge: int = 4
    max_inline: int = 64
    sq_sig_all: bool = False
    qp_num: int = 0x100
    shared_cq: bool = False
    with_channel: bool = False
    join: World | None = None  # another QP on the CQs of that world
    beside: World | None = None  # another Context of that world's NICs
    ctx: int = 0
    scqs: list[HwCQ] = field(default_factory=list)
    rcqs: list[HwCQ] = field(default_factory=list)
    hw: list[HwQP] = field(default_factory=list)
    channels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        lib = self.lib
        if self.join is not None:
            j = self.join
            self.ctx, self.scqs, self.rcqs, self.channels = j.ctx, j.scqs, j.rcqs, j.channels
            self.scq, self.rcq, self.channel, self.keys, self.group = j.scq, j.rcq, j.channel, j.keys, j.group
        else:
            self.ctx = lib.fv_context()
            self.channel = None
            if self.with_channel:
                self.channels = [lib.fv_channel(self.ctx) for _ in range(self.nics)]
                self.channel = _core.ChannelCore(self.channels[0])
                for k in range(1, self.nics):
                    self.channel.attach(k, self.channels[k])
            for k in range(self.nics):
                channel = self.channels[k] if self.with_channel else None
                self.scqs.append(HwCQ(lib, self.ctx, channel=channel))
                self.rcqs.append(self.scqs[k] if self.shared_cq else HwCQ(lib, self.ctx, channel=channel))
            self.scq = _core.CQCore(self.scqs[0].ptr, self.channel)
            self.rcq = self.scq if self.shared_cq else _core.CQCore(self.rcqs[0].ptr, self.channel)
            for k in range(1, self.nics):
                self.scq.attach(k, self.scqs[k].ptr)
                if not self.shared_cq:
                    self.rcq.attach(k, self.rcqs[k].ptr)
            self.group = self.beside.group if self.beside is not None else _core.QPGroup()
            self.keys = _core.KeyMap(self.group)
        for k in range(self.nics):
            num = self.qp_num + 0x1000 * k
            self.hw.append(
                HwQP(lib, self.ctx, self.scqs[k], self.rcqs[k], num, self.max_send + 2, self.max_recv + 2)
            )
        self.qp = _core.QPCore(
            self.scq,
            self.rcq,
            self.hw[0].ptr,
            self.qp_num,
            self.max_send,
            self.max_recv,
            self.max_sge,
            self.max_sge,
            self.max_inline,
            self.sq_sig_all,
            self.keys,
        )
        for k in range(1, self.nics):
            self.qp.attach(k, self.hw[k].ptr, self.hw[k].qp_num)
        self.remote = _core.RemoteKeys()

    # --- keys

    def pair_keys(self, lkeys: tuple[int, ...] = (1,), rkeys: tuple[int, ...] = (7,)) -> None:
        """Default key x is x + 1000 * k on NIC k, on either side."""
        for k in range(1, self.nics):
            for key in lkeys:
                self.keys.set_local(key, k, key + 1000 * k)
            for key in rkeys:
                self.remote.set_remote(key, k, key + 1000 * k)
        self.qp.remote_keys = self.remote

    def protect(self) -> None:
        """Paired, guarded, keys known."""
        self.pair_keys()
        self.qp.guarded = True
        self.events()

    # --- the application

    def send(self, wr_id: int = 0, opcode: int = SEND, flags: int = SIGNALED, **more: Any) -> None:
        self.qp.post_send(send_wr(wr_id, opcode, flags, **more))

    def recv(self, wr_id: int = 0, n: int = 1) -> None:
        for i in range(n):
            self.qp.post_recv(recv_wr(wr_id + i))

    def poll(self, n: int = 64) -> list[tuple[int, int]]:
        """(wr_id, status) of both CQs, the send CQ's first."""
        result = self.poll_cq(self.scq, n)
        if not self.shared_cq:
            result += self.poll_cq(self.rcq, n)
        return result

    @staticmethod
    def poll_cq(cq: _core.CQCore, n: int = 64) -> list[tuple[int, int]]:
        count, wcs = cq.poll(n)
        assert count == len(wcs)
        return [(wc.wr_id, wc.status) for wc in wcs]

    # --- the driver

    def events(self) -> list[tuple[Any, ...]]:
        """(kind, pair, a, b) of this QP's events; the ring is empty then."""
        _core.clear_attention()
        return [(kind, k, a, b) for kind, qp, k, a, b, _t in _core.take_events() if qp is self.qp]

    def kinds(self) -> list[int]:
        return [e[0] for e in self.events()]

    def fence(self, *pairs: int) -> None:
        """Close, ERR, marker, drain: what a SWITCH does with a pair that is not clean."""
        self.qp.close_send()
        self.qp.close_recv()
        for k in pairs:
            self.qp.begin_fence(k)
            assert self.qp.post_marker(k) == 0
            self.hw[k].flush()
            self.scq.drain(k)
            self.rcq.drain(k)
            assert self.qp.fence_state(k) == (True, True)
            assert self.scq.drain(k) == 0 and self.rcq.drain(k) == 0
            self.qp.forget_pair(k)

    def switch(self, target: int, peer_rx: int) -> None:
        """The rest of a SWITCH, without the peer."""
        self.scq.set_active(target, True)
        if not self.shared_cq:
            self.rcq.set_active(target, True)
        assert self.qp.open_recv(target) == 0
        self.qp.trim(peer_rx)
        self.qp.open_send(target)

    def reset_pair(self, k: int) -> None:
        self.hw[k].reset()
        self.scq.drain(k)
        self.rcq.drain(k)
        self.qp.pair_reset(k)

    def close(self) -> None:
        """Everything, the hardware last."""
        self.qp.close()
        for hw in self.hw:
            self.lib.fv_free_qp(hw.ptr)
        self.hw = []
        if self.join is not None:
            return
        self.scq.close()
        self.rcq.close()
        if self.channel is not None:
            self.channel.close()
        for ptr in {cq.ptr for cq in self.scqs + self.rcqs}:
            self.lib.fv_free_cq(ptr)
        for ptr in self.channels:
            self.lib.fv_free_channel(ptr)
        self.lib.fv_free_context(self.ctx)


def send_wr(
    wr_id: int = 0,
    opcode: int = SEND,
    flags: int = SIGNALED,
    sges: list[tuple[int, int, int]] | None = None,
    rkey: int = 7,
    addr: int = 0x5000,
    imm: int = 0,
    next_wr: SendWR | None = None,
) -> SendWR:
    """A pyverbs SendWR; sges are (address, length, lkey)."""
    sg = [SGE(*s) for s in ([(0x1000, 64, 1)] if sges is None else sges)]
    plain = opcode in (CAS, FAA)
    wr = SendWR(
        wr_id=wr_id,
        opcode=SEND_INV if not sg else opcode,
        num_sge=len(sg),
        sg=sg,
        send_flags=flags,
        imm_data=imm,
        next_wr=next_wr,
    )
    wr.opcode = opcode
    if plain:
        wr.set_wr_atomic(rkey, addr, 1, 2)
    elif opcode in (WRITE, WRITE_IMM, READ):
        wr.set_wr_rdma(rkey, addr)
    return wr


def recv_wr(
    wr_id: int = 0, sges: list[tuple[int, int, int]] | None = None, next_wr: RecvWR | None = None
) -> RecvWR:
    """A pyverbs RecvWR."""
    sg = [SGE(*s) for s in ([(0x2000, 64, 1)] if sges is None else sges)]
    return RecvWR(wr_id=wr_id, num_sge=len(sg), sg=sg, next_wr=next_wr)


def seqs(posts: list) -> list[int]:
    """Sequence numbers of recorded posts."""
    return [p.wr_id & SEQ_MASK for p in posts]
