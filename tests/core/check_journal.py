# SPDX-License-Identifier: BSD-3-Clause
"""Appending, retiring, chains, inline data, forced signaling, a full journal: what plain traffic does."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable

import pytest
from fake import (
    CAS,
    FAA,
    FLUSH,
    INLINE,
    READ,
    RECV_BIT,
    REM_ACCESS,
    RETRY_EXC,
    SEND,
    SEND_IMM,
    SEQ_MASK,
    SIGNALED,
    SUCCESS,
    WRITE,
    WRITE_IMM,
    World,
    recv_wr,
    send_wr,
)
from pyverbs.cq import WC
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import RecvWR, SendWR

from shiftverbs import _core

Make = Callable[..., World]


def chain_of(make_wr: Callable[..., SendWR | RecvWR], n: int) -> list[SendWR | RecvWR]:
    """n WRs with wr_ids 0.., linked; the list keeps them alive (next_wr holds no reference)."""
    wrs: list[SendWR | RecvWR] = []
    for i in reversed(range(n)):
        wrs.insert(0, make_wr(i, next_wr=wrs[0] if wrs else None))
    return wrs


def test_signaled_send_comes_back_with_the_application_s_wr_id(world: World) -> None:
    world.send(0xFFFF_FFFF_FFFF_FFFF)
    post = world.hw[0].post(0)
    assert post.wr_id == 0 and post.opcode == SEND and post.flags == SIGNALED
    assert (post.sge[0].addr, post.sge[0].length, post.sge[0].lkey) == (0x1000, 64, 1)
    assert world.poll() == []
    world.hw[0].complete()
    n, wcs = world.scq.poll(4)
    assert n == 1 and type(wcs[0]) is WC
    assert (wcs[0].wr_id, wcs[0].status, wcs[0].qp_num) == (0xFFFF_FFFF_FFFF_FFFF, SUCCESS, world.qp_num)
    assert world.qp.outstanding == (0, 0)


def test_receive_carries_its_bit_and_fields_pass_through(world: World) -> None:
    world.recv(5)
    assert world.hw[0].post(0, recv=True).wr_id == RECV_BIT
    world.hw[0].receive(
        byte_len=4097, imm_data=0x01020304, wc_flags=2, src_qp=0x77, pkey_index=3, slid=9, sl=2
    )
    n, (wc,) = world.rcq.poll()
    assert n == 1
    assert (wc.wr_id, wc.byte_len, wc.imm_data, wc.wc_flags, wc.src_qp) == (5, 4097, 0x01020304, 2, 0x77)
    assert (wc.pkey_index, wc.slid, wc.sl, wc.opcode) == (3, 9, 2, 128)
    assert world.qp.counters() == (1, 0, 0)


@pytest.mark.parametrize("cap", [1, 2, 3, 16])
def test_rings_wrap_around(make: Make, cap: int) -> None:
    w = make(max_send=cap, max_recv=cap)
    for i in range(7 * cap + 3):
        w.send(1000 + i)
        w.recv(2000 + i)
        w.hw[0].complete()
        w.hw[0].receive()
        assert w.poll() == [(1000 + i, SUCCESS), (2000 + i, SUCCESS)]
    assert w.hw[0].post(-1).wr_id & SEQ_MASK == 7 * cap + 2
    assert w.qp.counters() == (7 * cap + 3,) * 3


def test_full_queues_refuse_as_a_provider_does(make: Make) -> None:
    w = make(max_send=4, max_recv=3)
    for i in range(4):
        w.send(i)
    w.recv(0, 3)
    for post in (lambda: w.send(4), lambda: w.recv(3)):
        with pytest.raises(PyverbsRDMAError) as e:
            post()
        assert e.value.error_code == errno.ENOMEM
    assert w.hw[0].count() == 4 and w.hw[0].count(recv=True) == 3
    assert w.qp.outstanding == (4, 3)
    with pytest.raises(PyverbsRDMAError, match=r"Failed to post send\. Errno: 12, Cannot allocate memory"):
        w.send(4)
    with pytest.raises(PyverbsRDMAError, match=r"Failed to post recv\. Errno: 12, Cannot allocate memory"):
        w.recv(3)


def test_a_slot_is_free_when_the_hardware_completed_even_if_nobody_polled(make: Make) -> None:
    w = make(max_send=4, max_recv=2)
    for i in range(4):
        w.send(i)
    w.recv(10, 2)
    w.hw[0].complete(2)
    w.hw[0].receive()
    w.send(4)
    w.send(5)
    with pytest.raises(PyverbsRDMAError):
        w.send(6)
    w.recv(12)
    assert w.scq.buffered == 2 and w.rcq.buffered == 1
    w.hw[0].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(6)] + [(10, SUCCESS)]


def test_the_buffer_of_a_cq_nobody_polls_is_bounded_by_the_cq(make: Make) -> None:
    w = make(max_send=4)
    ctypes.c_int.from_address(w.scqs[0].ptr + 28).value = 8  # ibv_cq.cqe
    posted = 0
    with pytest.raises(PyverbsRDMAError) as e:
        for posted in range(100):
            w.send(posted)
            w.hw[0].complete()
    assert e.value.error_code == errno.ENOMEM
    assert w.scq.buffered <= 8 + 4 and posted <= 8 + 4 + 4


def test_chain_goes_to_the_provider_in_one_call(world: World) -> None:
    wrs = chain_of(lambda i, next_wr: send_wr(i, flags=SIGNALED if i % 2 else 0, next_wr=next_wr), 5)
    world.qp.post_send(wrs[0])
    assert world.hw[0].calls() == 1
    assert [p.wr_id for p in world.hw[0].posts()] == [0, 1, 2, 3, 4]
    world.hw[0].complete(5)
    assert world.poll() == [(1, SUCCESS), (3, SUCCESS)]
    assert world.qp.outstanding == (1, 0)


def test_refused_in_the_middle_of_a_chain_keeps_what_went_before(world: World) -> None:
    wrs = chain_of(send_wr, 5)
    bad = send_wr(99)
    world.hw[0].fail(3, errno.EINVAL)
    with pytest.raises(PyverbsRDMAError) as e:
        world.qp.post_send(wrs[0], bad)
    assert e.value.error_code == errno.EINVAL
    assert bad.wr_id == 3 and bad.num_sge == 1
    assert world.qp.outstanding == (3, 0) and world.qp.counters() == (0, 0, 3) and world.qp.posted == 3
    world.send(50)
    world.hw[0].complete(4)
    assert world.poll() == [(0, 0), (1, 0), (2, 0), (50, 0)]
    assert world.qp.counters() == (0, 4, 4)


def test_refused_receive_in_the_middle_of_a_chain(world: World) -> None:
    wrs = chain_of(recv_wr, 4)
    bad = recv_wr(99)
    world.hw[0].fail(2, errno.EINVAL, recv=True)
    with pytest.raises(PyverbsRDMAError) as e:
        world.qp.post_recv(wrs[0], bad)
    assert e.value.error_code == errno.EINVAL and bad.wr_id == 2 and bad.num_sge == 1
    assert world.qp.outstanding == (0, 2)
    world.recv(7)
    world.hw[0].receive(3)
    assert world.poll() == [(0, 0), (1, 0), (7, 0)]


def test_chain_longer_than_the_queue(make: Make) -> None:
    w = make(max_send=4, max_recv=4)
    wrs, rwrs = chain_of(send_wr, 6), chain_of(recv_wr, 6)
    bad, rbad = send_wr(99), recv_wr(99)
    for post, first, into in ((w.qp.post_send, wrs[0], bad), (w.qp.post_recv, rwrs[0], rbad)):
        with pytest.raises(PyverbsRDMAError) as e:
            post(first, into)
        assert e.value.error_code == errno.ENOMEM and into.wr_id == 4
    assert w.qp.outstanding == (4, 4)
    w.hw[0].complete(4)
    w.hw[0].receive(4)
    assert [x[0] for x in w.poll()] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_refused_first_wr_leaves_nothing(world: World) -> None:
    for recv, post in ((False, lambda: world.send(1)), (True, lambda: world.recv(1))):
        world.hw[0].fail(0, errno.EINVAL, recv=recv)
        with pytest.raises(PyverbsRDMAError):
            post()
    assert world.qp.outstanding == (0, 0) and world.qp.counters() == (0, 0, 0)
    assert _core.take_events() == []


def test_wr_objects_may_be_reused_at_once(world: World) -> None:
    wr = send_wr(1)
    world.qp.post_send(wr)
    wr.wr_id = 2
    wr.send_flags = 0
    wr.opcode = WRITE
    world.qp.post_send(wr)
    world.hw[0].complete(2)
    assert world.poll() == [(1, SUCCESS)]


def test_inline_bytes_are_copied_at_post_time(world: World) -> None:
    world.protect()
    buffer = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    at = ctypes.addressof(buffer)
    world.qp.close_send()
    world.send(1, flags=SIGNALED | INLINE, sges=[(at, 4, 0), (at + 8, 8, 0), (at, 0, 0)])
    ctypes.memset(at, ord("x"), 16)
    world.qp.open_send(1)
    post = world.hw[1].post(0)
    assert bytes(post.inline_data[: post.inline_len]) == b"012389abcdef" and post.num_sge == 1
    world.qp.close_send()
    world.send(2, flags=SIGNALED | INLINE, sges=[(at, 0, 0)])
    world.qp.open_send(1)
    assert world.hw[1].post(1).num_sge == 0


def test_inline_beyond_the_capacity_is_refused(world: World) -> None:
    buffer = ctypes.create_string_buffer(65)
    for sges in ([(ctypes.addressof(buffer), 65, 0)], [(ctypes.addressof(buffer), 33, 0)] * 2):
        with pytest.raises(PyverbsRDMAError) as e:
            world.send(1, flags=INLINE, sges=sges)
        assert e.value.error_code == errno.EINVAL
    world.send(1, flags=INLINE | SIGNALED, sges=[(ctypes.addressof(buffer), 64, 0)])
    assert world.hw[0].post(0).inline_len == 64


def test_too_many_sges_and_unknown_opcodes_are_refused(world: World) -> None:
    with pytest.raises(PyverbsRDMAError) as e:
        world.send(1, sges=[(0, 1, 1)] * 5)
    assert e.value.error_code == errno.EINVAL
    with pytest.raises(PyverbsRDMAError) as e:
        world.qp.post_recv(recv_wr(1, [(0, 1, 1)] * 5))
    assert e.value.error_code == errno.EINVAL
    wr = send_wr(1)
    for opcode in (10, 31, 32, 1000):
        wr.opcode = opcode
        with pytest.raises(PyverbsRDMAError) as e:
            world.qp.post_send(wr)
        assert e.value.error_code == errno.EINVAL
    wr.opcode, wr.num_sge = SEND, -1
    with pytest.raises(PyverbsRDMAError):
        world.qp.post_send(wr)
    assert world.hw[0].count() == 0 and world.qp.outstanding == (0, 0)


def test_no_sge_at_all(world: World) -> None:
    world.send(1, sges=[])
    wr = recv_wr(2)
    wr.num_sge = 0
    world.qp.post_recv(wr)
    assert world.hw[0].post(0).num_sge == 0 and world.hw[0].post(0, recv=True).num_sge == 0


@pytest.mark.parametrize("args", [(None,), (3,), ("x",), (recv_wr(),), ()])
def test_wrong_send_arguments(world: World, args: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        world.qp.post_send(*args)


@pytest.mark.parametrize("args", [(None,), (3,), (send_wr(),), ()])
def test_wrong_recv_arguments(world: World, args: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        world.qp.post_recv(*args)


def test_wrong_bad_wr(world: World) -> None:
    with pytest.raises(TypeError):
        world.qp.post_send(send_wr(), recv_wr())
    with pytest.raises(TypeError):
        world.qp.post_recv(recv_wr(), 3)
    assert world.hw[0].count() == 0


def test_who_never_signals_still_gets_room(make: Make) -> None:
    w = make(max_send=8)
    for i in range(100):
        w.send(i, flags=0)
        w.hw[0].complete()
    flags = [p.flags for p in w.hw[0].posts()]
    assert flags == [SIGNALED if i % 4 == 3 else 0 for i in range(100)]
    assert w.poll() == []
    assert w.qp.outstanding == (0, 0) and w.scq.swallowed == 25


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_forced_signaling_in_tiny_queues(make: Make, cap: int) -> None:
    w = make(max_send=cap)
    for i in range(20):
        w.send(i, flags=0)
        w.hw[0].complete()
    assert w.poll() == []


def test_signaled_ones_are_not_forced_upon(make: Make) -> None:
    w = make(max_send=8)
    for i in range(30):
        w.send(i, flags=SIGNALED if i % 3 == 2 else 0)
        w.hw[0].complete()
    assert [p.flags for p in w.hw[0].posts()] == [SIGNALED if i % 3 == 2 else 0 for i in range(30)]
    assert [x[0] for x in w.poll()] == list(range(2, 30, 3))


def test_error_of_a_forced_one_is_the_application_s(make: Make) -> None:
    w = make(max_send=2)
    w.send(1, flags=0)
    assert w.hw[0].post(0).flags == SIGNALED
    w.hw[0].fail_send(REM_ACCESS, 0x88)
    n, (wc,) = w.scq.poll()
    assert (n, wc.wr_id, wc.status, wc.vendor_err, wc.qp_num) == (1, 1, REM_ACCESS, 0x88, w.qp_num)


def test_sq_sig_all(make: Make) -> None:
    w = make(sq_sig_all=True, max_send=4)
    for i in range(3):
        w.send(i, flags=0)
        post = w.hw[0].post(i)
        assert post.flags == 0
        w.scqs[0].push(post.wr_id, SUCCESS, w.qp_num)
    assert w.poll() == [(0, 0), (1, 0), (2, 0)]


def test_errors_complete_unsignaled_ones_and_flushes_come_in_order(world: World) -> None:
    for i in range(4):
        world.send(i, flags=0)
    world.send(4)
    world.recv(10, 2)
    world.hw[0].complete(2)
    world.hw[0].fail_send(RETRY_EXC, 0x81)
    world.hw[0].flush()
    assert world.poll() == [(2, RETRY_EXC), (3, FLUSH), (4, FLUSH), (10, FLUSH), (11, FLUSH)]
    assert world.qp.outstanding == (0, 0)
    assert world.events() == []


def test_a_wc_that_the_hardware_lost_is_made_good(world: World) -> None:
    """A success of a later WR completes all before it, whatever happened to their WCs."""
    for i in range(3):
        world.send(i, flags=0 if i == 1 else SIGNALED)
    world.scqs[0].push(world.hw[0].post(2).wr_id, SUCCESS, world.qp_num)
    n, wcs = world.scq.poll(8)
    assert [(wc.wr_id, wc.status, wc.qp_num, wc.byte_len) for wc in wcs] == [
        (0, SUCCESS, world.qp_num, 64),
        (2, SUCCESS, world.qp_num, 0),
    ]
    assert world.qp.counters() == (0, 3, 3)


def test_golden_shared_cq_colliding_wr_ids(make: Make) -> None:
    """Golden scenario shared_cq_colliding_wr_ids: one CQ, two QPs, both queues, every WR with the same wr_id."""
    a = make(shared_cq=True, qp_num=0x11)
    b = make(join=a, shared_cq=True, qp_num=0x22)
    for w in (a, b):
        w.send(7, flags=0)
        w.send(7)
        w.recv(7)
        w.recv(7)
    b.hw[0].receive()
    a.hw[0].complete(2)
    b.hw[0].complete(2)
    a.hw[0].receive(2)
    n, wcs = a.scq.poll(16)
    assert [(wc.qp_num, wc.wr_id, wc.opcode >= 128) for wc in wcs] == [
        (0x22, 7, True),
        (0x11, 7, False),
        (0x22, 7, False),
        (0x11, 7, True),
        (0x11, 7, True),
    ]
    assert n == 5 and a.qp.outstanding == (0, 0) and b.qp.outstanding == (0, 1)
    assert a.qp.counters() == (2, 2, 2) and b.qp.counters() == (1, 2, 2)


def test_unknown_qps_on_the_same_cq_pass_through(world: World) -> None:
    world.send(1)
    world.scqs[0].push((1 << 63) | 0x1234, SUCCESS, 0x999, opcode=3)
    world.hw[0].complete()
    world.scqs[0].push(42, RETRY_EXC, 0x999, vendor_err=5)
    n, wcs = world.scq.poll(8)
    assert [(wc.wr_id, wc.qp_num, wc.status) for wc in wcs] == [
        ((1 << 63) | 0x1234, 0x999, 0),
        (1, world.qp_num, 0),
        (42, 0x999, RETRY_EXC),
    ]


def test_only_two_sided_work_counts(world: World) -> None:
    for opcode in (SEND, WRITE, WRITE_IMM, READ, CAS, FAA, SEND_IMM):
        world.send(opcode, opcode)
    assert world.qp.counters() == (0, 0, 3)
    world.hw[0].complete(4)
    world.poll()
    assert world.qp.counters() == (0, 2, 3)


@pytest.mark.parametrize("n", [0, -1, 0.0])
def test_poll_of_nothing(world: World, n: int) -> None:
    world.send(1)
    world.hw[0].complete()
    assert world.scq.poll(n) == (0, [])
    assert world.scqs[0].pending == 1


@pytest.mark.parametrize("n", [None, "x", [1]])
def test_poll_of_nonsense(world: World, n: object) -> None:
    with pytest.raises(TypeError, match="'<' not supported between instances of 'int' and"):
        world.scq.poll(n)


def test_poll_takes_no_more_than_asked(make: Make) -> None:
    w = make(max_send=200)
    for i in range(100):
        w.send(i)
    w.hw[0].complete(100)
    assert w.poll_cq(w.scq, 1) == [(0, 0)]
    assert w.scqs[0].pending == 99
    assert len(w.poll_cq(w.scq, 40)) == 40 and w.scqs[0].pending == 59
    assert [x[0] for x in w.poll_cq(w.scq, 10**30)] == list(range(41, 100))
    assert w.scq.poll(num_entries=2.5) == (0, [])


def test_poll_goes_on_past_what_it_swallows(make: Make) -> None:
    w = make(max_send=4)
    w.send(0, flags=0)
    w.send(1, flags=0)
    w.send(2)
    w.hw[0].complete(3)
    assert w.poll_cq(w.scq, 1) == [(2, 0)]


def test_poll_error(world: World) -> None:
    world.lib.fv_fail_cq(world.scqs[0].ptr, errno.EIO)
    with pytest.raises(PyverbsRDMAError, match="Failed to poll CQ") as e:
        world.scq.poll()
    assert e.value.error_code == errno.EIO
    with pytest.raises(PyverbsRDMAError):
        world.scq.drain(0)
    world.lib.fv_fail_cq(world.scqs[0].ptr, 0)
    assert world.scq.poll() == (0, [])


def test_poll_of_a_dead_nic(guarded: World) -> None:
    """A guarded QP's failure is the driver's business, and what other NICs hold is delivered all the same."""
    w = guarded
    w.scq.set_active(1, True)
    w.lib.fv_fail_cq(w.scqs[0].ptr, errno.EIO)
    assert w.scq.poll() == (0, [])
    w.qp.guarded = False
    with pytest.raises(PyverbsRDMAError, match="Failed to poll CQ"):
        w.scq.poll()


def test_oldest_post_is_never_older_than_it_was_seen(world: World) -> None:
    assert world.qp.oldest_post_age(1000) == 0
    world.send(1)
    world.send(2)
    assert world.qp.oldest_post_age(2000) == 1
    assert world.qp.oldest_post_age(2500) == 500
    world.hw[0].complete()
    world.poll()
    assert world.qp.oldest_post_age(9000) == 1, "another one is the oldest now"
    world.hw[0].complete()
    world.poll()
    assert world.qp.oldest_post_age(9999) == 0


def test_reset_by_the_application(world: World) -> None:
    """All is forgotten, what nobody has polled too; what the old life still flushes is nobody's."""
    world.send(1)
    world.send(2)
    world.recv(3)
    world.hw[0].complete()
    world.qp.reset_journal()
    assert world.qp.outstanding == (0, 0) and world.qp.counters() == (0, 0, 0)
    world.hw[0].flush()
    assert world.poll() == []
    assert world.qp.stale == 2
    world.send(4)
    world.recv(5)
    world.hw[0].complete()
    world.hw[0].receive()
    assert world.poll() == [(4, SUCCESS), (5, SUCCESS)]
