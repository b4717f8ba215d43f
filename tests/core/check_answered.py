# SPDX-License-Identifier: BSD-3-Clause
"""A message's answer comes over one NIC before its ACK over another: the sender goes by the answer, and may."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable

import pytest
from fake import (
    FLUSH,
    INLINE,
    LOC_PROT,
    READ,
    REM_ACCESS,
    SIGNALED,
    SUCCESS,
    WRITE,
    PostStruct,
    World,
    send_wr,
    seqs,
)
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import _core

Make = Callable[..., World]
WITH_SEND = 1 << 2  # IBV_QP_EX_WITH_SEND


@pytest.fixture
def half_home(make: Make) -> Callable[..., World]:
    """`half_home(max_send=…)`: sends go to pair 1, receives came to pair 0 already."""

    def build(**options: int) -> World:
        w = make(**options)
        w.protect()
        assert w.qp.move_begin() == "idle"
        w.scq.set_active(1, True)
        w.qp.open_send(1)
        w.recv(100, 8)
        return w

    return build


def refused(w: World, wr_id: int) -> None:
    with pytest.raises(PyverbsRDMAError) as e:
        w.send(wr_id)
    assert e.value.error_code == errno.ENOMEM


def chain(w: World, *wr_ids: int) -> None:
    made = [send_wr(wr_ids[-1])]
    for wr_id in reversed(wr_ids[:-1]):
        made.append(send_wr(wr_id, next_wr=made[-1]))
    w.qp.post_send(made[-1])


def home(w: World) -> list[PostStruct]:
    """A SWITCH to pair 0, whose peer had nothing of it; what pair 0 was handed then."""
    w.fence(0, 1)
    for k in (0, 1):
        w.reset_pair(k)
    before = w.hw[0].count()
    w.switch(0, 0)
    return w.hw[0].posts(before)


def test_a_ping_pong_of_depth_one(half_home: Callable[..., World]) -> None:
    w = half_home(max_send=1)
    w.send(0)
    w.hw[0].receive()
    assert w.poll() == [(100, SUCCESS)]
    w.send(1)
    assert seqs(w.hw[1].posts()) == [0], "the NIC has room for what the application asked for"
    refused(w, 2)  # nobody can have answered 1
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)]
    assert seqs(w.hw[1].posts()) == [0, 1]
    w.hw[0].receive()
    assert w.poll() == [(101, SUCCESS)]
    w.send(2)
    w.hw[1].complete()
    assert w.poll() == [(1, SUCCESS)]
    w.hw[1].complete()
    assert w.poll() == [(2, SUCCESS)]
    assert w.qp.outstanding[0] == 0


def test_without_a_second_nic_full_is_full(guarded: World) -> None:
    w = guarded
    w.recv(100, 2)
    for i in range(w.max_send):
        w.send(i)
    w.hw[0].receive()
    assert w.poll() == [(100, SUCCESS)]
    refused(w, 99)


def test_answers_that_came_before_the_last_halves_met(half_home: Callable[..., World]) -> None:
    """Polled while the directions differed, gone by later."""
    w = half_home(max_send=2)
    w.send(0)
    w.send(1)
    w.hw[0].receive(2)
    assert w.poll() == [(100, SUCCESS), (101, SUCCESS)]
    assert w.qp.open_recv(1) == 0
    w.send(2)
    w.send(3)
    refused(w, 4)
    assert seqs(w.hw[1].posts()) == [0, 1]
    w.hw[1].complete(2)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS)]
    assert seqs(w.hw[1].posts()) == [0, 1, 2, 3]


def test_what_was_copied_inline_moves_along(half_home: Callable[..., World]) -> None:
    w = half_home(max_send=4)
    source = ctypes.create_string_buffer(16)
    at = ctypes.addressof(source)

    def send(wr_id: int) -> None:
        source.value = b"message %d" % wr_id
        w.send(wr_id, flags=SIGNALED | INLINE, sges=[(at, 9, 0)])

    for i in range(4):
        send(i)
    w.hw[0].receive(4)
    w.poll()
    before = w.qp.journal_bytes
    for i in range(4, 8):
        send(i)
    assert w.qp.journal_bytes > before
    source.value = b"overwritten"
    posts = home(w)
    assert [bytes(p.inline_data[: p.inline_len]) for p in posts] == [b"message %d" % i for i in range(4)]
    after = w.hw[0].count()
    w.hw[0].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(4)]
    posts = w.hw[0].posts(after)
    assert [bytes(p.inline_data[: p.inline_len]) for p in posts] == [b"message %d" % i for i in range(4, 8)]
    w.hw[0].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(4, 8)]


def test_a_chain_beyond_the_room(half_home: Callable[..., World]) -> None:
    w = half_home(max_send=4)
    for i in range(3):
        w.send(i)
    w.hw[0].receive(3)
    w.poll()
    chain(w, 3, 4, 5, 6)
    assert seqs(w.hw[1].posts()) == [0, 1, 2, 3] and w.qp.unwired[0] == 3
    w.hw[1].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(4)]
    assert seqs(w.hw[1].posts()) == list(range(7))
    w.hw[1].complete(3)
    assert w.poll() == [(i, SUCCESS) for i in range(4, 7)]


def test_a_batch_of_the_extended_post_beyond_the_room(half_home: Callable[..., World]) -> None:
    w = half_home(max_send=2)
    builder = _core.WrBuilder(w.qp, w.hw[0].ptr, WITH_SEND)
    w.send(0)
    w.send(1)
    w.hw[0].receive(2)
    w.poll()
    builder.wr_start()
    for wr_id in (2, 3):
        w.lib.fv_next_wr(w.hw[0].ptr, wr_id, SIGNALED)
        builder.wr_send()
    builder.wr_complete()
    assert seqs(w.hw[1].posts()) == [0, 1] and w.qp.unwired[0] == 2
    w.hw[1].complete(2)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS)]
    w.hw[1].complete(2)
    assert w.poll() == [(2, SUCCESS), (3, SUCCESS)]


def test_a_chain_that_just_fits_again(half_home: Callable[..., World]) -> None:
    """What was left out is complete by now; the discount has not ended, and the NIC takes no more than it has."""
    w = half_home(max_send=4)
    for i in range(4):
        w.send(i)
    w.hw[0].receive(4)
    w.poll()
    w.send(4)
    w.hw[1].complete(1)
    assert w.poll() == [(0, SUCCESS)] and w.qp.unwired[0] == 0
    chain(w, 5, 6)
    assert seqs(w.hw[1].posts()) == [0, 1, 2, 3, 4] and w.qp.unwired[0] == 2
    w.hw[1].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(1, 5)]
    w.hw[1].complete(2)
    assert w.poll() == [(5, SUCCESS), (6, SUCCESS)]
    assert w.qp.outstanding[0] == 0


def test_an_own_error_of_one_that_was_away_waits_for_the_driver(half_home: Callable[..., World]) -> None:
    """The backup that it has left may still answer a READ: what is behind the error is flushed when that is stopped."""
    w = half_home(max_send=2)
    for i in range(2):
        w.send(i)
    w.hw[0].receive(2)
    w.poll()
    w.send(2)
    posts = home(w)
    assert w.qp.is_plain and seqs(posts) == [0, 1] and w.qp.unwired[0] == 1
    w.hw[0].fail_send(REM_ACCESS)
    w.hw[0].flush()
    seen = w.poll()
    w.hw[0].flush()
    seen += w.poll()
    assert seen == [(0, REM_ACCESS)] and w.qp.ending and w.qp.carried == {1}
    assert (_core.EV_APP_ERROR, 0, REM_ACCESS, 0) in w.events()
    w.qp.abort(FLUSH)
    assert [(i, s) for i, s in w.poll() if i < 100] == [(1, FLUSH), (2, FLUSH)]
    assert w.qp.outstanding[0] == 0
    assert w.qp.carried == set() and w.qp.flushes_itself, "it was stopped"


@pytest.mark.parametrize("queue", ["send", "recv"])
def test_an_own_error_behind_a_flush_of_the_other_queue(half_home: Callable[..., World], queue: str) -> None:
    """The other CQ was polled first: its flushes are not shown before the backup is stopped, either."""
    w = half_home()
    w.send(0)
    w.hw[0].receive(2)
    w.poll()
    home(w)
    first, second = (w.rcq, w.scq) if queue == "send" else (w.scq, w.rcq)
    if queue == "send":
        w.hw[0].fail_send(REM_ACCESS)
    else:
        w.hw[0].fail_recv(LOC_PROT)
    w.hw[0].flush()
    assert w.poll_cq(first, 32) == []
    assert w.poll_cq(second, 32) == [(0, REM_ACCESS) if queue == "send" else (102, LOC_PROT)]
    assert w.poll() == [] and w.qp.ending
    w.qp.abort(FLUSH)
    rest = [(i, FLUSH) for i in range(102 if queue == "send" else 103, 108)]
    assert sorted(w.poll()) == sorted(rest if queue == "send" else [(0, FLUSH), *rest])


def test_a_move_that_begins_while_sends_wait_for_room(half_home: Callable[..., World]) -> None:
    """Nothing is posted after them, and our own WRITE cannot overtake them: the last of them is the fence."""
    w = half_home(max_send=2)
    for i in range(2):
        w.send(i)
    w.hw[0].receive(2)
    w.poll()
    w.send(2, flags=0)
    assert w.qp.move_begin() == "wanted"
    assert w.qp.post_fence_write(0, 0) == errno.EAGAIN
    assert w.events() == []
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)] and (_core.EV_FENCE_WR_POSTED, 1, 0, 0) in w.events()
    assert seqs(w.hw[1].posts()) == [0, 1, 2] and w.hw[1].post(2).flags & SIGNALED
    assert not w.qp.send_is_open
    w.hw[1].complete(2)
    assert w.poll() == [(1, SUCCESS)], "nobody asked for a WC of the fence"
    assert _core.EV_FENCE_WR_DONE in w.kinds() and w.qp.outstanding[0] == 0


@pytest.fixture
def sends_home(make: Make) -> Callable[..., World]:
    """`sends_home(max_send=…)`: sends go to pair 0 already, receives still come to pair 1."""

    def build(**options: int) -> World:
        w = make(**options)
        w.protect()
        w.rcq.set_active(1, True)
        assert w.qp.move_recv(1) == 0
        w.recv(100, 8)
        return w

    return build


def test_a_chain_whose_ring_is_doubled_halfway_fits_again(sends_home: Callable[..., World]) -> None:
    """Completions that come during the post make the whole of it fit into one call of the NIC's."""
    w = sends_home(max_send=4)
    w.send(0, flags=0)
    w.send(1)
    w.hw[0].complete(2)
    w.scqs[0].hide(1)  # its WC is there when the post looks for room the second time
    with pytest.raises(PyverbsRDMAError) as e:
        chain(w, 2, 3, 4, 5, 6)
    assert e.value.error_code == errno.ENOMEM
    assert w.qp.unwired[0] == 0 and seqs(w.hw[0].posts()) == list(range(6))
    w.hw[0].complete(4)
    assert w.poll() == [(i, SUCCESS) for i in range(1, 6)]


def test_a_fence_is_not_what_the_nic_has_without_a_signal(half_home: Callable[..., World]) -> None:
    """A chain's first WR is handed over while room is sought for its second, which finds none."""
    w = half_home(max_send=8)
    for i in range(8):
        w.send(i)
    w.hw[0].receive()
    w.poll()
    w.send(8)
    w.fence(0, 1)
    w.reset_pair(0)
    w.reset_pair(1)
    before = w.hw[1].count()
    w.switch(1, 0)
    assert seqs(w.hw[1].posts(before)) == list(range(8)) and w.qp.unwired[0] == 1
    for i in range(9, 15):
        w.send(i)
    w.events()
    assert w.qp.move_begin() == "wanted"
    w.hw[1].complete(8)
    last = send_wr(16)
    with pytest.raises(PyverbsRDMAError):
        w.qp.post_send(send_wr(15, flags=0, next_wr=last))
    kinds = w.kinds()
    assert w.hw[1].count() - before == 15 and w.qp.unwired[0] == 1, (
        "what is behind the fence is for the next pair"
    )
    posted = w.hw[1].post(-1)
    assert _core.EV_FENCE_WR_POSTED in kinds and posted.flags & SIGNALED


@pytest.mark.parametrize("target", [0, 1])
def test_an_answer_of_before_a_switch(half_home: Callable[..., World], target: int) -> None:
    """The message was heard, the WRITE ahead of it is sent again: the answer's sender may go on."""
    w = half_home(max_send=2)
    w.send(0, opcode=READ, flags=0)
    w.send(1)
    w.fence(0, 1)
    for k in (0, 1):
        w.reset_pair(k)
    w.switch(target, 1)
    w.hw[target].receive()
    w.poll()
    w.send(2)
    w.send(3)
    refused(w, 4)


def test_what_has_no_room_is_the_fence(half_home: Callable[..., World]) -> None:
    """Our own WRITE would have to be posted behind what waits for room: the last of that becomes the fence."""
    w = half_home(max_send=2)
    for i in range(2):
        w.send(i)
    w.hw[0].receive(2)
    w.poll()
    assert w.qp.move_begin() == "posted"
    w.qp.move_cancel()
    w.send(2, flags=0)
    assert w.qp.move_begin() == "wanted"
    assert w.qp.post_fence_write(0xABC, 0x12) == errno.EAGAIN
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)] and (_core.EV_FENCE_WR_POSTED, 1, 0, 0) in w.events()
    fence = w.hw[1].post(-1)
    assert seqs([fence]) == [2] and fence.flags == SIGNALED and not w.qp.send_is_open
    assert w.qp.post_fence_write(0xABC, 0x12) == errno.EAGAIN, "there is one"
    w.hw[1].complete(2)
    assert w.poll() == [(1, SUCCESS)] and w.kinds() == [_core.EV_FENCE_WR_DONE]
    assert w.qp.post_fence_write(0xABC, 0x12) == errno.EAGAIN, "and it is done"
    assert w.qp.outstanding[0] == 0


def post_until_full(w: World, wr_id: int) -> int:
    """As a program that goes by ENOMEM; the next wr_id."""
    while True:
        try:
            w.send(wr_id)
        except PyverbsRDMAError as error:
            assert error.error_code == errno.ENOMEM
            return wr_id
        wr_id += 1


@pytest.mark.parametrize("write", [False, True])
def test_a_program_that_posts_as_long_as_it_can_goes_home(
    half_home: Callable[..., World], write: bool
) -> None:
    """Something always waits for room: the fence is what waited when it was wanted, not what waits last."""
    w = half_home(max_send=8)
    wr_id = post_until_full(w, 0)
    assert wr_id == 16 and w.qp.move_begin() == "wanted"
    if write:
        assert w.qp.post_fence_write(0xABC, 0x12) == errno.EAGAIN
    for _ in range(16):
        w.hw[1].complete()
        w.poll()
        wr_id = post_until_full(w, wr_id)
        if not w.qp.send_is_open:
            break
    assert _core.EV_FENCE_WR_POSTED in w.kinds(), "the MOVE never ends"
    assert seqs(w.hw[1].posts()) == list(range(16)) and w.hw[1].post(-1).flags & SIGNALED
    w.hw[1].complete(w.hw[1].count() - w.hw[1].done[0])
    w.poll()
    assert _core.EV_FENCE_WR_DONE in w.kinds()
    w.reset_pair(0)
    w.qp.open_send(0)
    assert seqs(w.hw[0].posts()) == list(range(16, 24)), "what was posted behind it comes at home, in order"


def test_a_reset_hands_nothing_over(sends_home: Callable[..., World]) -> None:
    """A NIC that keeps the WCs of a QP in RESET: what is behind them waited for room, and is forgotten too."""
    w = sends_home(max_send=2)
    for i in range(3):
        w.send(i)
    assert w.qp.unwired[0] == 1
    w.hw[0].complete(2)
    w.qp.app_touched()
    w.events()
    calls = w.hw[0].calls()
    w.hw[0].fail(0, errno.EINVAL)  # as a QP in RESET does
    w.qp.reset_journal()
    assert w.hw[0].calls() == calls, "a post to a QP in RESET"
    assert w.events() == [], "the driver would take it for a failure, and end the QP"


def test_our_writes_of_moves_that_were_called_off_take_no_room(guarded: World) -> None:
    """One at a time: there is room for two WRs of ours, and the rest is the application's."""
    w = guarded
    for i in range(4):
        w.send(i, flags=0)
        assert w.qp.move_begin() == "wanted"
        w.qp.post_fence_write(0xABC, 0x12)
        w.qp.move_cancel()
    for i in range(4, w.max_send):
        w.send(i)
    w.hw[0].complete(w.hw[0].count())
    assert w.poll() == [(i, SUCCESS) for i in range(4, w.max_send)]


def test_our_write_waits_for_one_of_before(guarded: World) -> None:
    w = guarded
    for wr_id in (0, 1):
        w.send(wr_id, flags=0)
        assert w.qp.move_begin() == "wanted"
        if wr_id == 0:
            assert w.qp.post_fence_write(0xABC, 0x12) == 0
            w.qp.move_cancel()
    assert w.qp.post_fence_write(0xABC, 0x12) == errno.EAGAIN and w.qp.send_is_open
    w.events()
    w.hw[0].complete(2)
    w.poll()
    assert w.kinds() == [_core.EV_FENCE_WR_POSTED] and not w.qp.send_is_open
    w.hw[0].complete(2)
    w.poll()
    assert w.kinds() == [_core.EV_FENCE_WR_DONE] and w.qp.outstanding[0] == 0


def test_an_answer_that_is_no_message(half_home: Callable[..., World]) -> None:
    """The peer's WRITE into memory that the program looks at, before the halves meet; gone by later."""
    w = half_home(max_send=1)
    w.send(0)
    assert w.qp.open_recv(1) == 0
    w.send(1)
    refused(w, 2)
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)]
    w.hw[1].complete()
    assert w.poll() == [(1, SUCCESS)]


def asked_and_answered(make: Make) -> tuple[World, World]:
    """A QP that is away and has sent all it has room for, and one at home that has heard the answer."""
    asks = make(max_send=1)
    asks.protect()
    assert asks.qp.move_begin() == "idle"
    for cq in (asks.scq, asks.rcq):
        cq.set_active(1, True)
    asks.qp.open_send(1)
    assert asks.qp.move_recv(1) == 0
    hears = make(join=asks, qp_num=0x200)
    hears.protect()
    hears.recv(100)
    asks.send(0)
    hears.hw[0].receive()
    assert hears.poll() == [(100, SUCCESS)]
    return asks, hears


def test_an_answer_that_comes_by_another_qp(make: Make) -> None:
    """Requests by one QP, answers by another that is home already: with plain verbs both are on one NIC."""
    asks, _ = asked_and_answered(make)
    asks.send(1)
    refused(asks, 2)


@pytest.mark.parametrize("then", ["closed", "moved"])
def test_an_answer_by_a_qp_that_is_not_there_any_more(make: Make, then: str) -> None:
    """The answer came by another QP on another NIC, which was closed, or went after the one that asked."""
    asks, hears = asked_and_answered(make)
    if then == "closed":
        hears.qp.close()
    else:
        assert hears.qp.move_recv(1) == 0
    asks.send(1)
    refused(asks, 2)


def away(w: World) -> None:
    """Both halves on the backup."""
    w.protect()
    assert w.qp.move_begin() == "idle"
    for cq in (w.scq, w.rcq):
        cq.set_active(1, True)
    w.qp.open_send(1)
    assert w.qp.move_recv(1) == 0


def test_an_answer_of_before_a_switch_by_another_qp(make: Make) -> None:
    """A WRITE was answered, and is to be sent again when its pair works: by then the other QP receives there, too."""
    asks = make(max_send=1)
    asks.protect()
    hears = make(join=asks, qp_num=0x200)
    away(hears)
    hears.recv(100)
    asks.send(0, WRITE)
    hears.hw[1].receive()
    assert hears.poll() == [(100, SUCCESS)]
    asks.fence(0)
    asks.reset_pair(0)
    assert asks.qp.open_recv(0) == 0
    asks.qp.trim(0)
    assert hears.qp.move_recv(0) == 0
    asks.qp.open_send(0)
    asks.send(1)
    refused(asks, 2)


def test_an_answer_that_comes_by_a_qp_of_another_context(make: Make) -> None:
    """A program may open its NIC twice: that is one NIC with plain verbs all the same."""
    asks = make(max_send=1)
    away(asks)
    hears = make(beside=asks, qp_num=0x200)
    hears.protect()
    hears.recv(100)
    asks.send(0)
    hears.hw[0].receive()
    assert hears.poll() == [(100, SUCCESS)]
    asks.send(1)
    refused(asks, 2)
