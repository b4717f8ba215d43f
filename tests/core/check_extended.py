# SPDX-License-Identifier: BSD-3-Clause
"""WrBuilder and CQCursor: batches against a plain model of them, and the cursor against the WCs it was given."""

from __future__ import annotations

import ctypes
import errno
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
from fake import (
    CAS,
    FAA,
    INLINE,
    LOCAL_INV,
    READ,
    RETRY_EXC,
    SEND,
    SEND_IMM,
    SEND_INV,
    SEQ_MASK,
    SIGNALED,
    SOLICITED,
    SUCCESS,
    WRITE,
    WRITE_IMM,
    World,
)
from pyverbs.cq import PollCqAttr
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import DataBuffer
from pyverbs.wr import SGE

from shiftverbs import _core

SEED = 20260707
ALL = 0b10_1111_1111
MASK64 = 2**64 - 1
BYTES = bytes(range(256))
SOURCE = ctypes.create_string_buffer(BYTES, 256)


class Model:
    """One application with a builder, and what must become of its batches."""

    def __init__(self, make: Callable[..., World], rng: random.Random, ops: int) -> None:
        self.rng, self.ops = rng, ops
        depth = rng.choice([4, 8, 17] if ops == ALL else [1, 3, 8])
        self.w = make(nics=1, max_send=depth, max_sge=rng.choice([1, 4]), max_inline=64)
        self.builder = _core.WrBuilder(self.w.qp, self.w.hw[0].ptr, ops)
        self.batch: list[dict[str, Any]] = []
        self.error = 0
        self.expected: list[dict[str, Any]] = []
        self.done = 0

    def fail(self, code: int) -> None:
        self.error = self.error or code

    def begin(self) -> None:
        """A WR of any kind, as the model has it and as the builder is told."""
        rng, b = self.rng, self.builder
        opcode = rng.choice([WRITE, WRITE_IMM, SEND, SEND_IMM, READ, CAS, FAA, LOCAL_INV, SEND_INV])
        wr_id, flags = rng.getrandbits(64), rng.choice([0, SIGNALED, SIGNALED | SOLICITED, SIGNALED | INLINE])
        self.w.lib.fv_next_wr(self.w.hw[0].ptr, wr_id, flags)
        rkey, addr, imm, x, y = (rng.getrandbits(n) for n in (32, 64, 32, 64, 64))
        call: dict[int, Callable[[], None]] = {
            WRITE: lambda: b.wr_rdma_write(rkey, addr),
            WRITE_IMM: lambda: b.wr_rdma_write_imm(rkey, addr, imm),
            SEND: lambda: b.wr_send(),
            SEND_IMM: lambda: b.wr_send_imm(imm),
            READ: lambda: b.wr_rdma_read(rkey, addr),
            CAS: lambda: b.wr_atomic_cmp_swp(rkey, addr, x, y),
            FAA: lambda: b.wr_atomic_fetch_add(rkey, addr, x),
            LOCAL_INV: lambda: b.wr_local_inv(rkey),
            SEND_INV: lambda: b.wr_send_inv(rkey),
        }
        call[opcode]()
        if not self.ops >> opcode & 1:
            self.fail(errno.EOPNOTSUPP)
            return
        if len(self.batch) >= self.w.max_send:
            self.fail(errno.ENOMEM)
            return
        wr: dict[str, Any] = {
            "id": wr_id,
            "opcode": opcode,
            "flags": flags & ~INLINE,
            "sges": [],
            "inline": None,
        }
        if opcode in (WRITE_IMM, SEND_IMM):
            wr["imm"] = int.from_bytes(imm.to_bytes(4, "big"), "little")
        if opcode in (WRITE, WRITE_IMM, READ):
            wr["remote"] = (rkey, addr)
        if opcode in (CAS, FAA):
            wr["atomic"] = (rkey, addr, x, y if opcode == CAS else 0)
        self.batch.append(wr)

    def count(self, good: int, bad: int) -> int:
        """Mostly a good number."""
        return bad if self.rng.random() < 0.03 else good

    def set_sges(self) -> None:
        rng = self.rng
        count = self.count(rng.randint(0, self.w.max_sge), 5)
        sges = [tuple(rng.getrandbits(n) for n in (64, 31, 32)) for _ in range(count)]
        made = [SGE(*sge) for sge in sges]
        if len(made) == 1 and rng.random() < 0.5:
            self.builder.wr_set_sge(made[0])
        else:
            self.builder.wr_set_sge_list(len(made), [*made, None])
        if not self.batch:
            self.fail(errno.EINVAL)
        elif len(sges) > self.w.max_sge:
            self.fail(errno.EINVAL)
        else:
            self.batch[-1].update(sges=sges, inline=None)

    def set_inline(self) -> None:
        rng = self.rng
        if self.batch and self.batch[-1]["opcode"] in (READ, CAS, FAA, LOCAL_INV) and rng.random() < 0.95:
            return
        parts = [
            (rng.randrange(200), self.count(rng.choice([0, 1, 7, 21]), 56)) for _ in range(rng.randrange(4))
        ]
        at = ctypes.addressof(SOURCE)
        if len(parts) == 1 and rng.random() < 0.5:
            self.builder.wr_set_inline_data(at + parts[0][0], parts[0][1])
        else:
            self.builder.wr_set_inline_data_list(
                len(parts), [DataBuffer(at + first, n) for first, n in parts]
            )
        if not self.batch:
            self.fail(errno.EINVAL)
            return
        total = sum(n for _, n in parts)
        if total > 64:
            self.fail(errno.EINVAL)
        self.batch[-1].update(sges=[], inline=b"".join(BYTES[first : first + n] for first, n in parts))

    def complete(self) -> None:
        wanted = self.error
        inlined = [wr for wr in self.batch if wr["inline"] is not None]
        outstanding = self.w.qp.outstanding[0]
        if not wanted and any(
            wr["opcode"] not in (WRITE, WRITE_IMM, SEND, SEND_IMM, SEND_INV) for wr in inlined
        ):
            wanted = errno.EINVAL
        if not wanted and outstanding + len(self.batch) > self.w.max_send:
            wanted = errno.ENOMEM
        if wanted:
            with pytest.raises(PyverbsRDMAError) as error:
                self.builder.wr_complete()
            assert error.value.error_code == wanted
            assert self.w.qp.outstanding[0] == outstanding
        else:
            self.builder.wr_complete()
            self.expected += self.batch
        self.batch, self.error = [], 0

    def check(self) -> None:
        posts = self.w.hw[0].posts(self.done)
        assert len(posts) == len(self.expected) - self.done
        for post, wr in zip(posts, self.expected[self.done :], strict=True):
            assert (post.opcode, post.wr_id & SEQ_MASK) == (wr["opcode"], self.done)
            # The journal may ask for a WC of its own.
            assert post.flags & ~SIGNALED == (wr["flags"] & ~SIGNALED) | (
                INLINE if wr["inline"] is not None else 0
            )
            assert not wr["flags"] & SIGNALED or post.flags & SIGNALED
            if wr["inline"] is not None:
                assert bytes(post.inline_data[: post.inline_len]) == wr["inline"]
            else:
                assert [(s.addr, s.length, s.lkey) for s in post.sge[: post.num_sge]] == wr["sges"]
            if "imm" in wr:
                assert post.imm == wr["imm"]
            if "remote" in wr:
                assert (post.rkey, post.remote_addr) == wr["remote"]
            if "atomic" in wr:
                assert (post.rkey, post.remote_addr, post.compare_add, post.swap) == wr["atomic"]
            self.done += 1

    def finish(self) -> None:
        """Some of what is at the hardware completes; the application's own are the ones it asked for."""
        hw = self.w.hw[0]
        first = hw.done[0]
        hw.complete(self.rng.randint(0, hw.count() - first))
        wanted = [(wr["id"], SUCCESS) for wr in self.expected[first : hw.done[0]] if wr["flags"] & SIGNALED]
        assert self.w.poll() == wanted

    def walk(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choices(
                [self.begin, self.set_sges, self.set_inline, self.complete, self.abort, self.finish],
                [6, 4, 2, 5, 0.3, 5],
            )[0]()
            self.check()

    def abort(self) -> None:
        self.rng.choice([self.builder.wr_abort, self.builder.wr_start])()
        self.batch, self.error = [], 0


@pytest.mark.parametrize("number", range(40))
def test_batches(make: Callable[..., World], number: int) -> None:
    rng = random.Random(f"{SEED} {number}")
    model = Model(make, rng, ALL if number % 4 else ALL & rng.getrandbits(10))
    model.walk(800)
    assert number % 4 == 0 or model.done > 40  # what was posted and compared


def test_what_the_provider_refuses(guarded: World) -> None:
    w = guarded
    w.qp.guarded = False
    builder = _core.WrBuilder(w.qp, w.hw[0].ptr, ALL)
    w.hw[0].fail(0, errno.EINVAL)
    builder.wr_send()
    builder.wr_send()
    with pytest.raises(PyverbsRDMAError) as error:
        builder.wr_complete()
    assert error.value.error_code == errno.EINVAL
    assert w.qp.outstanding == (0, 0) and w.hw[0].count() == 0
    builder.wr_complete()  # nothing is left of it


def test_wrong_arguments(world: World) -> None:
    builder = _core.WrBuilder(world.qp, world.hw[0].ptr, ALL)
    builder.wr_send()
    for call in (
        lambda: builder.wr_set_sge(None),
        lambda: builder.wr_set_inline_data_list(1, [None]),
        lambda: builder.wr_send_imm("x"),
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(TypeError, match="Argument 'attr' has incorrect type"):
        _core.CQCursor(world.scq, world.scqs[0].ptr).start_poll(3)
    with pytest.raises(AttributeError):
        builder.wr_set_sge_list(1, [3])
    with pytest.raises(IndexError):
        builder.wr_set_sge_list(2, [])
    with pytest.raises(OverflowError):
        builder.wr_send_imm(2**32)
    with pytest.raises(ValueError, match="address"):
        _core.WrBuilder(world.qp, 0, ALL)
    with pytest.raises(ValueError, match="address"):
        _core.CQCursor(world.scq, 0)
    builder.wr_set_sge_list(1, [types.SimpleNamespace(addr=5, length=6, lkey=7)])  # as with pyverbs
    builder.wr_complete()
    (post,) = world.hw[0].posts()
    assert [(s.addr, s.length, s.lkey) for s in post.sge[: post.num_sge]] == [(5, 6, 7)]
    builder.wr_send()
    builder.refuse(errno.EOPNOTSUPP)
    with pytest.raises(PyverbsRDMAError) as error:
        builder.wr_complete()
    assert error.value.error_code == errno.EOPNOTSUPP and world.hw[0].count() == 1


def test_a_closed_qp(world: World) -> None:
    builder = _core.WrBuilder(world.qp, world.hw[0].ptr, ALL)
    builder.wr_send()
    world.qp.detach(0)  # the QP is destroyed
    builder.wr_send()
    with pytest.raises(PyverbsRDMAError) as error:
        builder.wr_complete()
    assert error.value.error_code == errno.EINVAL


def test_the_cursor(make: Callable[..., World]) -> None:
    w = make(shared_cq=True, nics=3)
    w.protect()
    cursor = _core.CQCursor(w.scq, w.scqs[0].ptr)
    assert cursor.start_poll(PollCqAttr()) == errno.ENOENT
    w.recv(50, 5)
    for i in range(5):
        w.send(i, flags=SIGNALED if i % 2 else 0)
    w.hw[0].complete(5)
    w.hw[0].receive(2, byte_len=77, imm_data=9, wc_flags=2, src_qp=4, slid=5, sl=6, dlid_path_bits=7)
    seen = []
    rc = cursor.start_poll(None)
    while rc == 0:
        assert w.lib.fv_cursor_status(w.scqs[0].ptr) == SUCCESS and cursor.read_vendor_err() == 0
        assert cursor.read_qp_num() == w.qp_num
        seen.append((w.lib.fv_cursor_wr_id(w.scqs[0].ptr), cursor.read_opcode()))
        rc = cursor.poll_next()
    cursor.end_poll()
    assert (rc, seen) == (errno.ENOENT, [(1, 0), (3, 0), (50, 128), (51, 128)])
    names = "byte_len imm_data wc_flags src_qp slid sl dlid_path_bits".split()
    assert [getattr(cursor, "read_" + name)() for name in names] == [77, 9, 2, 4, 5, 6, 7]
    # Through a failure: what is withheld is not seen, and what comes from the other NIC is.
    w.send(7)
    w.hw[0].fail_send(RETRY_EXC)
    assert cursor.start_poll(None) == errno.ENOENT
    w.fence(0)
    w.switch(2, 5)
    assert cursor.start_poll(None) == errno.ENOENT
    w.hw[2].complete()
    assert cursor.start_poll(None) == 0
    assert (w.lib.fv_cursor_wr_id(w.scqs[0].ptr), cursor.read_qp_num()) == (7, w.qp_num)
    assert cursor.poll_next() == errno.ENOENT


def test_the_cursor_and_poll_take_turns(make: Callable[..., World]) -> None:
    w = make(shared_cq=True, nics=1, max_send=64)
    cursor = _core.CQCursor(w.scq, w.scqs[0].ptr)
    for i in range(60):
        w.send(i)
    w.hw[0].complete(60)
    seen = []
    rng = random.Random(SEED)
    while len(seen) < 60:
        if rng.random() < 0.5:
            assert cursor.start_poll(None) == 0
            seen.append(w.lib.fv_cursor_wr_id(w.scqs[0].ptr))
        else:
            seen += [wr_id for wr_id, _ in w.poll_cq(w.scq, rng.randrange(1, 5))]
    assert seen == list(range(60))


def test_a_cursor_that_gives_back_all_it_took_looks_again(make: Callable[..., World]) -> None:
    """Another QP's lies on the other NIC's CQ, and no event tells of what came before the CQ was armed."""
    other = make(shared_cq=True, with_channel=True, qp_num=0x200)
    other.protect()
    w = make(join=other, shared_cq=True, nics=1)
    w.protect()
    other.reset_pair(1)
    other.fence(0)
    other.switch(1, 0)
    w.qp.open_send(0)  # after a SWITCH or a MOVE: the driver hears of the first completion
    w.events()
    w.send(1)
    w.hw[0].complete()
    other.send(5)
    other.hw[1].complete()
    cursor = _core.CQCursor(w.scq, w.scqs[0].ptr)

    def driver() -> None:
        _core.clear_attention()
        w.qp.detach(0)
        w.qp.destroyed()

    _core.clear_attention()
    w.scq.req_notify()
    _core.set_driver(driver)
    rc = cursor.start_poll(None)
    _core.set_driver(None)
    _core.clear_attention()
    assert rc == 0 and w.lib.fv_cursor_wr_id(w.scqs[0].ptr) == 5
    assert cursor.poll_next() == errno.ENOENT


def test_a_cq_that_fails(make: Callable[..., World]) -> None:
    w = make(shared_cq=True, nics=1)
    cursor = _core.CQCursor(w.scq, w.scqs[0].ptr)
    w.lib.fv_fail_cq(w.scqs[0].ptr, errno.EIO)
    theirs = 0
    try:
        w.scq.poll()
    except PyverbsRDMAError as error:
        theirs = error.error_code
    assert cursor.start_poll(None) == theirs != 0
    w.lib.fv_fail_cq(w.scqs[0].ptr, 0)
    w.scq.close()
    assert cursor.start_poll(None) == errno.ENOENT
