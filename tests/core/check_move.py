# SPDX-License-Identifier: BSD-3-Clause
"""MOVE and ARM: the driver's primitives."""

from __future__ import annotations

import errno

import pytest
from fake import (
    FLUSH,
    RECV_BIT,
    RETRY_EXC,
    SEND,
    SIGNALED,
    SUCCESS,
    WRITE,
    World,
    recv_wr,
    send_wr,
    seqs,
)
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import _core

# --- MOVE


def test_move_of_an_idle_direction(guarded: World) -> None:
    w = guarded
    assert w.qp.move_begin() == "idle"
    w.send(0)
    assert w.hw[0].count() == 0
    w.qp.open_send(1)
    assert seqs(w.hw[1].posts()) == [0]
    w.qp.trim(0)


def test_move_behind_the_last_signaled(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    w.send(1)
    assert w.qp.move_begin() == "posted"
    w.send(2)
    assert w.hw[0].count() == 2 and w.events() == []
    w.hw[0].complete(2)
    assert w.poll() == [(1, SUCCESS)]
    assert w.events() == [(_core.EV_FENCE_WR_DONE, 0, 0, 0)]
    assert w.qp.counters() == (0, 2, 2), "tx of the MOVE: the withheld one does not count"
    w.scq.set_active(1, True)
    w.qp.open_send(1)
    assert seqs(w.hw[1].posts()) == [2]
    w.hw[1].complete()
    assert w.poll() == [(2, SUCCESS)]


def test_move_waits_for_the_next_post(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    assert w.qp.move_begin() == "wanted"
    w.send(1, flags=0)
    assert w.hw[0].post(1).flags == SIGNALED
    assert w.events() == [(_core.EV_FENCE_WR_POSTED, 0, 0, 0)]
    w.send(2, flags=0)
    assert w.hw[0].count() == 2
    w.hw[0].complete(2)
    assert w.poll() == [], "nobody asked for that WC"
    assert w.events() == [(_core.EV_FENCE_WR_DONE, 0, 0, 0)]
    w.qp.open_send(1)
    assert w.hw[1].post(0).flags == 0


def test_move_takes_a_whole_chain(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    w.qp.move_begin()
    last = send_wr(2, flags=0)
    first = send_wr(1, flags=0, next_wr=last)
    w.qp.post_send(first)
    assert [p.flags for p in w.hw[0].posts()] == [0, 0, SIGNALED]
    assert w.kinds() == [_core.EV_FENCE_WR_POSTED]


def test_move_when_the_fence_is_refused_waits_on(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    w.qp.move_begin()
    w.hw[0].fail(0, errno.ENOMEM)
    with pytest.raises(PyverbsRDMAError):
        w.send(1, flags=0)
    assert w.events() == [] and w.qp.send_is_open
    w.send(1, flags=0)
    assert w.kinds() == [_core.EV_FENCE_WR_POSTED]


def test_our_own_fence_write(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    w.send(1, WRITE, flags=0)
    assert w.qp.move_begin() == "wanted"
    assert w.qp.post_fence_write(0xABC, 0x12) == 0
    fence = w.hw[0].post(-1)
    assert (fence.opcode, fence.flags, fence.num_sge, fence.rkey, fence.remote_addr) == (
        WRITE,
        SIGNALED,
        0,
        0x12,
        0xABC,
    )
    w.send(2)
    assert w.hw[0].count() == 3
    w.hw[0].complete(3)
    assert w.poll() == [] and (_core.EV_FENCE_WR_DONE, 0, 0, 0) in w.events()
    assert w.qp.outstanding == (1, 0) and w.qp.counters() == (0, 1, 1)


@pytest.mark.parametrize("before", ["nothing", "signaled", "quiet"])
@pytest.mark.parametrize("lacks", ["rkey", "receive"])
def test_move_leaves_what_is_withheld_for_a_key(guarded: World, before: str, lacks: str) -> None:
    """The next pair takes it, if it can; the key may never come where it waits."""
    w = guarded
    assert w.qp.open_recv(1) == 0
    w.qp.open_send(1)
    w.scq.set_active(1, True)
    if before != "nothing":
        w.send(0, flags=SIGNALED if before == "signaled" else 0)
    if lacks == "receive":
        w.qp.post_recv(recv_wr(1, [(0, 8, 57)]))
        w.send(1)
    else:
        w.send(1, WRITE, sges=[(0, 8, 57)])
    w.send(2)
    w.events()
    count = w.hw[1].count()
    assert count == (before != "nothing") and w.qp.unwired[0] == 2
    how = w.qp.move_begin()
    assert how == {"nothing": "idle", "signaled": "posted", "quiet": "wanted"}[before]
    if before == "quiet":
        assert w.qp.post_fence_write(0, 0) == 0
        count += 1
    w.hw[1].complete(count)
    assert w.poll() == ([(0, SUCCESS)] if before == "signaled" else [])
    assert (_core.EV_FENCE_WR_DONE in w.kinds()) == (count > 0) and not w.qp.send_is_open
    assert w.qp.counters()[2] == (before != "nothing"), "what is withheld is not of this pair"
    if lacks == "receive":
        assert w.qp.move_recv(0) == 0
    w.qp.open_send(0)
    assert len(w.hw[0].posts()) == 2 and w.qp.unwired == (0, 0)
    w.hw[0].complete(2)
    assert w.poll() == [(1, SUCCESS), (2, SUCCESS)]


def test_own_fence_write_refused(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    w.qp.move_begin()
    w.hw[0].fail(0, errno.EIO)
    assert w.qp.post_fence_write(0, 0) == errno.EIO
    assert w.qp.send_is_open
    w.qp.close_send()
    w.send(1)
    assert w.qp.post_fence_write(0, 0) == errno.EAGAIN


def test_own_fence_write_that_fails_is_a_path_error(guarded: World) -> None:
    w = guarded
    w.send(0, flags=0)
    assert w.qp.move_begin() == "wanted" and w.qp.post_fence_write(0, 0) == 0
    w.hw[0].complete()
    w.hw[0].fail_send(RETRY_EXC)
    assert w.poll() == [] and w.kinds() == [_core.EV_ERROR]


def test_move_cancelled_opens_again(guarded: World) -> None:
    w = guarded
    w.send(0)
    assert w.qp.move_begin() == "posted"
    w.send(1)
    w.qp.move_cancel()
    assert w.hw[0].count() == 2 and w.qp.send_is_open
    w.hw[0].complete(2)
    w.poll()
    assert w.events() == []


def test_error_in_wait_drained_becomes_a_switch(guarded: World) -> None:
    """close_during_wait_drained's data half: nothing withheld is lost."""
    w = guarded
    w.send(0)
    w.qp.move_begin()
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC)
    assert w.poll() == [] and w.kinds() == [_core.EV_ERROR]
    w.fence(0)
    w.switch(1, 0)
    assert seqs(w.hw[1].posts()) == [0, 1]
    w.hw[1].complete(2)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS)]
    assert _core.EV_FENCE_WR_DONE not in w.kinds()


def test_golden_move_before_last_receive_polled(guarded: World) -> None:
    """Golden scenario: the receiver reaches tx by polling for itself; then its receives move, old copies are stale."""
    w = guarded
    w.recv(10, 4)
    w.hw[0].receive(2)
    w.qp.set_rx_target(2)
    assert w.events() == []
    w.rcq.drain(0)
    assert w.events() == [(_core.EV_RX_REACHED, 0, 2, 0)]
    w.rcq.set_active(1, True)
    assert w.qp.move_recv(1) == 0
    assert (w.qp.recv_pair, w.qp.send_pair) == (1, 0)
    assert seqs(w.hw[1].posts(recv=True)) == [2, 3]
    w.recv(14)
    assert seqs(w.hw[1].posts(recv=True)) == [2, 3, 4] and w.hw[0].count(recv=True) == 4
    w.hw[1].receive(3)
    w.hw[0].fail_recv(FLUSH)
    w.rcqs[0].push(w.hw[0].post(3, recv=True).wr_id, SUCCESS, w.qp_num)
    assert [x[0] for x in w.poll()] == [10, 11, 12, 13, 14]
    assert w.qp.counters()[0] == 5


def test_rx_target_at_once_and_taken_back(guarded: World) -> None:
    w = guarded
    w.recv(0, 2)
    w.hw[0].receive()
    w.poll()
    w.qp.set_rx_target(1)
    assert w.kinds() == [_core.EV_RX_REACHED]
    w.qp.set_rx_target(2)
    w.qp.set_rx_target(None)
    w.hw[0].receive()
    w.poll()
    assert w.events() == []


def test_receives_move_home_after_a_reset(guarded: World) -> None:
    w = guarded
    w.recv(0, 3)
    w.rcq.set_active(1, True)
    assert w.qp.move_recv(1) == 0
    w.hw[1].receive()
    assert w.poll() == [(0, SUCCESS)]
    w.reset_pair(0)
    assert w.qp.move_recv(0) == 0
    assert [p.wr_id for p in w.hw[0].posts(3, recv=True)] == [RECV_BIT | 1 << 56 | 1, RECV_BIT | 1 << 56 | 2]
    assert w.qp.recv_pair == 0


# --- ARM


def test_arm_dummies(guarded: World) -> None:
    w = guarded
    w.qp.pair_reset(1)
    assert w.qp.post_arm_recv(1) == 0 and w.qp.post_arm_send(1) == 0
    receive, send = w.hw[1].post(0, recv=True), w.hw[1].post(0)
    assert receive.num_sge == 0 and send.num_sge == 0 and send.opcode == SEND and send.flags == SIGNALED
    w.hw[1].complete()
    w.hw[1].receive()
    w.scq.drain(1)
    w.rcq.drain(1)
    assert w.events() == [(_core.EV_ARM_WC, 1, 0, SUCCESS), (_core.EV_ARM_WC, 1, 1, SUCCESS)]
    assert w.poll() == [] and w.qp.counters() == (0, 0, 0), "they do not count"
    w.qp.post_arm_send(1)
    w.hw[1].fail_send(RETRY_EXC)
    w.scq.drain(1)
    assert w.events() == [(_core.EV_ARM_WC, 1, 0, RETRY_EXC)]


def test_our_write_of_before_is_not_the_next_fence(guarded: World) -> None:
    """A MOVE is called off, and what is posted next has the number of our WRITE: the next MOVE waits for that WR."""
    w = guarded
    w.send(0, flags=0)
    assert w.qp.move_begin() == "wanted"
    assert w.qp.post_fence_write(0xABC, 0x12) == 0
    w.qp.move_cancel()
    w.send(1, WRITE)
    assert w.qp.move_begin() == "posted"
    w.events()
    w.hw[0].complete(2)
    assert w.poll() == []
    assert w.events() == [], "the WR that is to be the fence has not completed"
    w.hw[0].complete()
    assert w.poll() == [(1, SUCCESS)]
    assert w.kinds() == [_core.EV_FENCE_WR_DONE]
