# SPDX-License-Identifier: BSD-3-Clause
"""Errors withheld and delivered, fence, trim, replay, abort: the driver's primitives of a SWITCH."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fake import (
    BIND_MW,
    CAS,
    FAA,
    FATAL,
    FENCE,
    FLUSH,
    LOC_LEN,
    LOC_PROT,
    LOC_QP_OP,
    LOCAL_INV,
    READ,
    RECV_BIT,
    REM_ACCESS,
    REM_INV,
    RETRY_EXC,
    RNR_EXC,
    SEND,
    SEND_IMM,
    SEND_INV,
    SEQ_MASK,
    SIGNALED,
    SUCCESS,
    WRITE,
    WRITE_IMM,
    World,
    recv_wr,
    send_wr,
    seqs,
)
from pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError

from shiftverbs import _core

Make = Callable[..., World]
RESP_TIMEOUT, GENERAL = 20, 21


# --- which errors are withheld


@pytest.mark.parametrize("status", [RETRY_EXC, FLUSH, LOC_QP_OP, FATAL, GENERAL, RESP_TIMEOUT])
def test_path_errors_are_withheld(guarded: World, status: int) -> None:
    w = guarded
    for i in range(3):
        w.send(i)
    w.recv(10)
    w.hw[0].complete()
    w.hw[0].fail_send(status, 0x81)
    w.hw[0].flush()
    assert w.poll() == [(0, SUCCESS)]
    assert w.events() == [(_core.EV_ERROR, 0, status, 0x81)], "once per pair"
    assert (
        w.qp.outstanding == (2, 1) and w.qp.first_error(0) == (status, 0x81) and w.qp.first_error(1) is None
    )
    assert w.qp.guarded


@pytest.mark.parametrize("status", [LOC_LEN, LOC_PROT, REM_ACCESS, REM_INV, 11, RNR_EXC, 6, 7, 8])
def test_the_application_s_errors_are_delivered(guarded: World, status: int) -> None:
    w = guarded
    for i in range(3):
        w.send(i, flags=0 if i == 1 else SIGNALED)
    w.hw[0].fail_send(status, 0x42)
    w.hw[0].flush()
    n, wcs = w.scq.poll(8)
    assert [(wc.wr_id, wc.status, wc.vendor_err) for wc in wcs] == [
        (0, status, 0x42),
        (1, FLUSH, 0),
        (2, FLUSH, 0),
    ]
    assert w.events() == [(_core.EV_APP_ERROR, 0, status, 0x42)]
    assert not w.qp.guarded
    w.send(9)
    w.hw[0].flush()
    assert w.poll() == [(9, FLUSH)]


def test_a_receive_s_own_error_is_delivered(guarded: World) -> None:
    w = guarded
    w.recv(1, 2)
    w.hw[0].fail_recv(LOC_LEN, 3)
    w.hw[0].flush()
    assert w.poll() == [(1, LOC_LEN), (2, FLUSH)]
    assert w.events() == [(_core.EV_APP_ERROR, 0, LOC_LEN, 3)]


def test_flush_seen_before_the_application_s_own_error_comes_out_with_it(guarded: World) -> None:
    """A receive error flushes the send queue; the application may poll the send CQ first."""
    w = guarded
    w.send(1)
    w.send(2, flags=0)
    w.recv(10, 2)
    w.hw[0].fail_send(FLUSH, 0x11)
    w.hw[0].fail_send(FLUSH)
    assert w.poll_cq(w.scq) == []
    w.hw[0].fail_recv(LOC_LEN)
    w.hw[0].flush()
    assert w.poll_cq(w.rcq) == [(10, LOC_LEN), (11, FLUSH)]
    assert w.poll_cq(w.scq) == [(1, FLUSH), (2, FLUSH)]
    assert [e[0] for e in w.events()] == [_core.EV_ERROR, _core.EV_APP_ERROR]
    assert w.qp.outstanding == (0, 0)


@pytest.mark.parametrize("polled_before", [False, True])
def test_the_application_s_error_found_by_a_fence(guarded: World, polled_before: bool) -> None:
    """The peer saw its side of the error first and began a SWITCH: the error is still the application's."""
    w = guarded
    for i in range(3):
        w.send(i, flags=0 if i == 0 else SIGNALED)
    w.recv(10)
    w.hw[0].complete()
    w.qp.close_send()
    w.qp.close_recv()
    w.qp.begin_fence(0)
    w.send(3)
    w.recv(11)
    w.hw[0].fail_send(REM_ACCESS, 0x88)
    if polled_before:
        assert w.poll() == [(1, REM_ACCESS)]
    w.hw[0].flush()
    w.scq.drain(0)
    w.rcq.drain(0)
    assert (_core.EV_APP_ERROR, 0, REM_ACCESS, 0x88) in w.events()
    # Another pair may be at work as well: nothing is given back before the driver has stopped them all.
    assert w.qp.ending
    assert w.poll() == ([] if polled_before else [(1, REM_ACCESS)])
    w.send(4)
    w.recv(12)
    assert w.poll() == []
    w.qp.abort(FLUSH)
    assert w.poll() == [(2, FLUSH), (3, FLUSH), (4, FLUSH), (10, FLUSH), (11, FLUSH), (12, FLUSH)]
    assert w.qp.outstanding == (0, 0) and not w.qp.guarded and not w.qp.ending


def test_messages_arrive_until_the_end_and_errors_wait_for_it(guarded: World) -> None:
    """One direction is at home, where the application's own error comes; the other one receives on."""
    w = guarded
    for i in (10, 11, 12):
        w.recv(i)
    w.qp.move_recv(1)
    w.send(1)
    w.send(2)
    w.hw[0].fail_send(LOC_PROT)
    w.hw[0].flush()
    assert w.poll() == [(1, LOC_PROT)]
    assert w.qp.ending and not w.qp.send_is_open and not w.qp.recv_is_open
    w.hw[1].receive()
    w.rcq.drain(1)
    assert w.poll() == [(10, 0)]
    w.qp.begin_fence(1)
    w.hw[1].flush()
    w.rcq.drain(1)
    assert w.poll() == []
    w.qp.pump()
    w.qp.move_cancel()
    w.send(3)
    assert w.poll() == [] and w.hw[0].count() == 2
    w.qp.abort(FLUSH, 0, still_ending=True)
    assert w.poll() == [(2, FLUSH), (3, FLUSH), (11, FLUSH), (12, FLUSH)]
    w.send(4)
    assert w.poll() == [] and w.qp.ending  # the default QP may still work
    w.qp.abort(FLUSH)
    assert w.poll() == [(4, FLUSH)] and not w.qp.ending
    w.send(5)
    assert w.hw[0].count() == 3


def test_the_end_is_forgotten_with_a_reset(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.qp.begin_end()
    w.hw[0].fail_send(RETRY_EXC)
    assert w.poll() == []
    w.qp.reset_journal()
    assert not w.qp.ending and w.qp.is_plain


def test_an_application_s_error_on_a_stale_receive_is_nobody_s(guarded: World) -> None:
    w = guarded
    w.recv(10)
    w.qp.move_recv(1)
    w.hw[0].fail_recv(LOC_LEN)
    assert w.poll() == [] and w.qp.guarded
    assert w.kinds() == [_core.EV_ERROR]


def test_an_error_that_repeats_on_another_pair_is_the_application_s(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.send(2)
    w.hw[0].fail_send(LOC_QP_OP)
    assert w.poll() == [] and w.kinds() == [_core.EV_ERROR]
    w.fence(0)
    w.switch(1, 0)
    w.events()
    w.hw[1].fail_send(LOC_QP_OP, 5)
    w.hw[1].flush()
    assert w.poll() == [(1, LOC_QP_OP)]
    assert (_core.EV_APP_ERROR, 1, LOC_QP_OP, 5) in w.events()
    w.qp.abort(FLUSH)
    assert w.poll() == [(2, FLUSH)]


def test_retry_exc_on_every_pair_stays_a_path_error(make: Make) -> None:
    w = make(nics=3)
    w.protect()
    w.send(1)
    for k in range(3):
        w.hw[k].fail_send(RETRY_EXC)
        assert w.poll() == []
        assert (_core.EV_ERROR, k, RETRY_EXC, 0) in w.events()
        w.fence(k)
        if k < 2:
            w.switch(k + 1, 0)


def test_not_guarded_or_touched_delivers_everything(guarded: World) -> None:
    w = guarded
    w.qp.app_touched()
    w.send(1)
    w.recv(2)
    w.hw[0].fail_send(RETRY_EXC)
    w.hw[0].flush()
    assert w.poll() == [(1, RETRY_EXC), (2, FLUSH)]
    assert w.events() == []


def test_clear_error_lets_the_next_one_through(guarded: World) -> None:
    w = guarded
    for i in range(2):
        w.send(i)
        w.hw[0].fail_send(FLUSH)
        w.poll()
        assert w.kinds() == [_core.EV_ERROR]
        w.qp.clear_error(0)


def test_the_error_that_says_why_goes_before_a_flush(guarded: World) -> None:
    w = guarded
    w.recv(1)
    w.send(2)
    w.hw[0].fail_recv(FLUSH)
    w.hw[0].fail_send(RETRY_EXC, 0x81)
    w.poll_cq(w.rcq)
    assert w.qp.first_error(0) == (FLUSH, 0)
    w.poll_cq(w.scq)
    assert w.qp.first_error(0) == (RETRY_EXC, 0x81)


# --- fence


def test_fence_needs_an_error_on_one_queue_and_a_flush_on_the_other(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.recv(2)
    w.qp.begin_fence(0)
    assert w.qp.fence_state(0) == (False, False) and w.events() == []
    assert w.qp.post_marker(0) == 0
    marker, receive = w.hw[0].post(-1), w.hw[0].post(-1, recv=True)
    assert marker.opcode == SEND and marker.num_sge == 0 and marker.flags == SIGNALED
    assert marker.wr_id >> 60 == 1 and receive.wr_id >> 60 == 8 + 1 and receive.num_sge == 0
    w.hw[0].complete()
    assert w.poll() == [(1, SUCCESS)], "a success counts during the fence"
    w.hw[0].fail_recv(FLUSH)
    w.rcq.drain(0)
    assert w.qp.fence_state(0) == (False, True) and w.qp.fence_drained(0) == (False, False)
    w.hw[0].flush()
    w.scq.drain(0)
    w.rcq.drain(0)
    assert w.qp.fence_state(0) == (True, True) and w.qp.fence_drained(0) == (True, True)
    assert w.events() == [(_core.EV_RQ_FENCED, 0, 0, 0), (_core.EV_SQ_FENCED, 0, 0, 0)]
    assert w.poll() == [] and w.qp.outstanding == (0, 1)


def test_unsignaled_tail_fence(guarded: World) -> None:
    """Golden scenario unsignaled_tail_fence: acknowledged unsignaled work never flushes; the marker shows the end."""
    w = guarded
    w.send(1, WRITE, 0)
    w.send(2, WRITE, 0)
    w.hw[0].complete(2)
    w.qp.begin_fence(0)
    w.scq.drain(0)
    assert w.qp.fence_state(0) == (False, True), "an empty receive queue is fenced"
    assert w.qp.post_marker(0) == 0
    w.hw[0].flush()
    w.scq.drain(0)
    assert w.qp.fence_state(0) == (True, True)
    assert w.poll() == []


def test_what_was_seen_before_the_fence_counts(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.recv(2)
    w.hw[0].fail_send(RETRY_EXC)
    w.hw[0].flush()
    w.poll()
    w.events()
    w.qp.begin_fence(0)
    assert w.events() == [(_core.EV_SQ_FENCED, 0, 0, 0), (_core.EV_RQ_FENCED, 0, 0, 0)]
    w.qp.begin_fence(0)
    assert w.events() == []


def test_marker_that_is_refused(guarded: World) -> None:
    w = guarded
    w.qp.begin_fence(0)
    w.hw[0].fail(0, errno.EINVAL)
    assert w.qp.post_marker(0) == errno.EINVAL
    w.hw[0].fail(0, errno.EIO, recv=True)
    assert w.qp.post_marker(0) == errno.EIO
    assert w.qp.fence_drained(0) == (False, False)


def test_markers_and_dummies_never_reach_the_application(world: World) -> None:
    """Also where the QP is not guarded."""
    w = world
    w.qp.post_marker(0)
    w.qp.post_arm_send(0)
    w.qp.post_arm_recv(0)
    w.qp.post_fence_write(0, 0)
    w.hw[0].complete(3)
    w.hw[0].receive(2)
    assert w.poll() == []
    assert w.scq.swallowed == 3 and w.rcq.swallowed == 2


def test_own_wrs_fit_beside_a_full_queue(guarded: World) -> None:
    w = guarded
    for i in range(w.max_send):
        w.send(i)
    w.recv(0, w.max_recv)
    assert w.qp.post_marker(0) == 0 and w.qp.post_marker(0) == 0


@pytest.mark.parametrize("fenced_before", [False, True])
def test_fence_that_begins_while_a_reset_is_under_way(guarded: World, fenced_before: bool) -> None:
    """ARM resets an idle pair, and before the NIC has answered a SWITCH fences it: the fence is of the new life."""
    w = guarded
    if fenced_before:
        w.send(1)
        w.recv(2)
        w.fence(0)
    w.qp.forget_pair(0)  # ARM: the command is on its way
    w.qp.begin_fence(0)  # SWITCH
    w.reset_pair(0)
    assert w.qp.post_arm_recv(0) == 0
    assert w.qp.fence_state(0) == (False, False)
    assert w.qp.post_marker(0) == 0
    w.hw[0].flush()
    w.scq.drain(0)
    w.rcq.drain(0)
    assert w.qp.fence_state(0) == (True, True)
    w.qp.forget_pair(0)
    w.reset_pair(0)
    w.switch(0, 0)
    w.events()
    w.send(5)
    w.hw[0].fail_send(RETRY_EXC)
    w.poll()
    assert w.kinds() == [_core.EV_ERROR], "the life after that is not fenced"


def test_fence_of_a_pair_whose_reset_failed(guarded: World) -> None:
    w = guarded
    w.recv(2)
    w.qp.forget_pair(0)
    w.qp.begin_fence(0)
    assert w.qp.post_marker(0) == 0
    w.hw[0].flush()
    w.scq.drain(0)
    w.rcq.drain(0)
    assert w.qp.fence_state(0) == (True, True) and w.qp.outstanding == (0, 1)


def test_late_wcs_of_a_forgotten_pair_and_of_an_old_generation(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.recv(2)
    w.fence(0)
    old_send, old_recv = w.hw[0].post(0).wr_id, w.hw[0].post(0, recv=True).wr_id
    w.events()

    def late() -> None:
        w.scqs[0].push(old_send, SUCCESS, w.qp_num)
        w.scqs[0].push(old_send, FLUSH, w.qp_num)
        w.rcqs[0].push(old_recv, SUCCESS, w.qp_num)
        assert w.poll() == [] and w.events() == [] and w.qp.outstanding == (1, 1)

    late()
    w.reset_pair(0)
    late()
    w.switch(0, 0)
    late()
    assert w.hw[0].post(-1).wr_id == (1 << 56) | 0
    w.hw[0].complete()
    w.hw[0].receive()
    assert w.poll() == [(1, SUCCESS), (2, SUCCESS)]


def test_generations_wrap(guarded: World) -> None:
    w = guarded
    for i in range(40):
        w.send(i)
        w.fence(0)
        w.reset_pair(0)
        w.switch(0, i)
        assert w.hw[0].post(-1).wr_id == ((i + 1) % 16) << 56 | i
        w.hw[0].complete()
        assert w.poll() == [(i, SUCCESS)]


# --- SWITCH: trim and replay


def test_switch_replays_what_the_peer_did_not_get(guarded: World) -> None:
    w = guarded
    w.recv(100, 3)
    for i in range(6):
        w.send(i, SEND_IMM if i % 2 else SEND, SIGNALED if i % 3 == 0 else 0, imm=i)
    w.hw[0].complete(2)  # 0 signaled, 1 not
    w.hw[0].receive()
    w.hw[0].fail_send(RETRY_EXC)
    w.hw[0].flush()
    assert w.poll() == [(0, SUCCESS), (100, SUCCESS)]
    w.fence(0)
    assert w.qp.counters() == (1, 1, 6), "1 is acknowledged, but no WC says so"
    w.send(6)
    assert w.qp.unwired[0] == 1
    w.switch(1, 4)
    posts = w.hw[1].posts()
    assert seqs(posts) == [4, 5, 6]
    assert [p.flags for p in posts] == [0, 0, SIGNALED]
    assert [p.opcode for p in posts] == [SEND, SEND_IMM, SEND] and posts[1].imm == 5
    assert all(p.sge[0].lkey == 1001 for p in posts)
    assert [p.wr_id & SEQ_MASK for p in w.hw[1].posts(recv=True)] == [1, 2]
    assert w.hw[1].post(0, recv=True).sge[0].lkey == 1001
    assert w.poll() == [(3, SUCCESS)], "proven and signaled"
    assert w.qp.counters() == (1, 4, 7)
    w.hw[1].complete(3)
    w.hw[1].receive(2)
    n, wcs = w.scq.poll(4)
    assert [(wc.wr_id, wc.qp_num) for wc in wcs] == [(6, w.qp_num)]
    assert w.poll() == [(101, SUCCESS), (102, SUCCESS)]
    assert w.qp.counters() == (3, 7, 7) and w.qp.outstanding == (0, 0)
    kinds = w.kinds()
    assert kinds.count(_core.EV_FIRST_WC) == 1


def test_proven_wcs_come_before_and_behind_in_turn(guarded: World) -> None:
    """A READ in the proven part holds back what lies behind it."""
    w = guarded
    w.send(0, SEND)
    w.send(1, READ)
    w.send(2, SEND)
    w.send(3, WRITE)
    w.send(4, SEND)
    w.fence(0)
    w.switch(1, 2)
    assert w.poll() == [(0, SUCCESS)]
    assert seqs(w.hw[1].posts()) == [1, 3, 4]
    w.hw[1].complete(1)
    assert w.poll_cq(w.scq, 1) == [(1, SUCCESS)]
    assert w.poll_cq(w.scq, 1) == [(2, SUCCESS)]
    w.hw[1].complete(2)
    assert w.poll() == [(3, SUCCESS), (4, SUCCESS)]


@pytest.mark.parametrize("flags", [0, SIGNALED])
def test_what_is_proven_behind_an_error_is_flushed(guarded: World, flags: int) -> None:
    """The peer closed, so the error of a replayed READ is the application's; RC shows no success behind an error."""
    w = guarded
    w.send(0, READ, 0)
    w.send(1, SEND, flags)
    w.send(2, READ, 0)
    w.send(3, SEND, flags)
    w.send(4, SEND, flags)
    w.fence(0)
    w.switch(1, 2)
    w.qp.guarded = False
    assert seqs(w.hw[1].posts()) == [0, 2, 4]
    w.hw[1].fail_send(RETRY_EXC)
    w.hw[1].flush()
    assert w.poll() == [(0, RETRY_EXC), (1, FLUSH), (2, FLUSH), (3, FLUSH), (4, FLUSH)]
    assert w.qp.outstanding == (0, 0)


def test_golden_read_response_lost_send_counted(guarded: World) -> None:
    """Golden scenario: a READ is never proven by the counter; it is sent again, signaled, before anything else."""
    w = guarded
    w.send(0, READ, 0)
    w.send(1, SEND, SIGNALED)
    w.send(2, READ, 0)
    w.send(3, SEND, 0)
    w.send(4, READ, 0)
    w.hw[0].flush()
    w.fence(0)
    assert w.qp.unsafe_reason() is None
    w.switch(1, 2)
    posts = w.hw[1].posts()
    assert seqs(posts) == [0, 2, 4] and [p.opcode for p in posts] == [READ] * 3
    assert [p.flags for p in posts] == [SIGNALED, SIGNALED, 0], "the last READ is an ordinary replay"
    assert w.poll() == []
    w.hw[1].complete()
    assert w.poll() == [(1, SUCCESS)]
    w.hw[1].complete()
    assert w.poll() == [] and w.qp.outstanding == (1, 0)
    assert w.qp.counters() == (0, 2, 2)


def test_proven_writes_are_not_sent_again(guarded: World) -> None:
    w = guarded
    for i in range(3):
        w.send(i, WRITE, 0)
    w.send(3, WRITE_IMM)
    w.send(4, WRITE, 0)
    w.fence(0)
    w.switch(1, 1)
    assert seqs(w.hw[1].posts()) == [4] and w.hw[1].post(0).rkey == 1007
    assert w.poll() == [(3, SUCCESS)]


@pytest.mark.parametrize("peer_rx", [0, 4, 10**18])
def test_acked_but_receive_cqe_lost(guarded: World, peer_rx: int) -> None:
    """Golden scenario: a peer that has received less than was acknowledged lost a message; more is nonsense."""
    w = guarded
    for i in range(3):
        w.send(i)
    w.hw[0].complete()
    w.poll()
    w.fence(0)
    with pytest.raises(ValueError, match=f"received {peer_rx}, but 1 are acknowledged and 3 sent"):
        w.qp.trim(peer_rx)
    assert w.qp.outstanding == (2, 0)
    w.switch(1, 1)
    assert seqs(w.hw[1].posts()) == [1, 2]


def test_everything_proven(guarded: World) -> None:
    w = guarded
    for i in range(4):
        w.send(i, flags=SIGNALED if i == 3 else 0)
    w.fence(0)
    w.switch(1, 4)
    assert w.hw[1].count() == 0 and w.poll() == [(3, SUCCESS)] and w.qp.outstanding == (0, 0)


def test_second_failure_before_the_first_replay_is_done(make: Make) -> None:
    w = make(nics=3)
    w.protect()
    for i in range(6):
        w.send(i, READ if i == 1 else SEND)
    w.fence(0)
    w.switch(1, 2)  # 0 and 2 proven, the READ is sent again, then 3, 4, 5
    assert seqs(w.hw[1].posts()) == [1, 3, 4, 5]
    w.hw[1].fail_send(RETRY_EXC)
    w.hw[1].flush()
    assert w.poll() == [(0, SUCCESS)]
    w.fence(1)
    assert w.qp.counters() == (0, 2, 5)
    w.switch(2, 4)
    assert seqs(w.hw[2].posts()) == [1, 5], "4 more were received meanwhile"
    w.hw[2].complete(2)
    assert [x[0] for x in w.poll()] == [1, 2, 3, 4, 5]
    assert w.qp.counters() == (0, 5, 5)


def test_failure_while_closed_loses_nothing(make: Make) -> None:
    w = make(nics=3)
    w.protect()
    w.send(0)
    w.fence(0)
    w.send(1)
    w.recv(10)
    w.fence(1)  # the target dies before it was used
    w.send(2)
    w.switch(2, 0)
    assert seqs(w.hw[2].posts()) == [0, 1, 2] and seqs(w.hw[2].posts(recv=True)) == [0]


def test_atomic_in_the_proven_part_is_unsafe_and_replay_would_be_signaled(guarded: World) -> None:
    w = guarded
    w.send(0, CAS, 0)
    w.send(1, SEND)
    assert w.qp.unsafe_reason() == "an atomic is outstanding"


def test_home_again(guarded: World) -> None:
    """0 → 1 → 0: generations and keys."""
    w = guarded
    w.send(0)
    w.recv(10)
    w.fence(0)
    w.switch(1, 0)
    w.reset_pair(0)
    w.fence(1)
    w.switch(0, 0)
    post = w.hw[0].post(-1)
    assert post.wr_id == 1 << 56 and post.sge[0].lkey == 1
    assert w.hw[0].post(-1, recv=True).wr_id == RECV_BIT | 1 << 56
    w.hw[0].complete()
    w.hw[0].receive()
    assert w.poll() == [(0, SUCCESS), (10, SUCCESS)]
    w.send(1)
    w.recv(11)
    assert w.hw[0].post(-1).wr_id == 1 << 56 | 1 and w.hw[0].calls() == 4  # send, marker, replay, this
    w.hw[0].complete()
    w.hw[0].receive()
    assert w.poll() == [(1, SUCCESS), (11, SUCCESS)]


def test_posting_goes_on_while_closed_until_the_queue_is_full(guarded: World) -> None:
    w = guarded
    w.qp.close_send()
    w.qp.close_recv()
    for i in range(w.max_send):
        w.send(i)
    w.recv(0, w.max_recv)
    for post in (w.send, w.recv):
        with pytest.raises(PyverbsRDMAError) as e:
            post()
        assert e.value.error_code == errno.ENOMEM
    assert w.hw[0].count() == 0 and w.hw[0].count(recv=True) == 0
    with pytest.raises(PyverbsRDMAError) as e:
        w.qp.post_send(send_wr(1, sges=[(0, 1, 1)] * 5))
    assert e.value.error_code in (errno.ENOMEM, errno.EINVAL)
    w.qp.open_send(0)
    assert w.qp.open_recv(0) == 0
    assert w.hw[0].count() == w.max_send and w.hw[0].count(recv=True) == w.max_recv


def test_replay_into_a_queue_without_room_goes_on_with_completions(guarded: World) -> None:
    w = guarded
    for i in range(4):
        w.send(i)
    w.fence(0)
    w.hw[1].fail(2, errno.ENOMEM)
    w.switch(1, 0)
    assert w.hw[1].count() == 2 and w.qp.unwired == (2, 0)
    assert _core.EV_POST_FAILED not in w.kinds()
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)]
    assert w.hw[1].count() == 4
    w.hw[1].complete(3)
    assert [x[0] for x in w.poll()] == [1, 2, 3]


def test_replay_refused_is_told_when_what_is_ahead_is_done(guarded: World) -> None:
    """Until then the gate stays open, as where the hardware has no room; nothing passes the WR that is refused."""
    w = guarded
    for i in range(3):
        w.send(i)
    w.fence(0)
    w.events()
    w.hw[1].fail(1, errno.EINVAL, times=99)
    w.switch(1, 0)
    assert w.events() == [] and w.qp.send_is_open and w.qp.unwired == (2, 0)
    w.send(3)
    assert w.hw[1].count() == 1 and w.events() == []
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)]
    assert w.events()[-1] == (_core.EV_POST_FAILED, 1, errno.EINVAL, 0) and w.qp.failed_wr(1) == 1
    assert not w.qp.send_is_open and w.qp.outstanding == (3, 0) and w.qp.unwired == (3, 0)
    assert w.qp.refused == errno.EINVAL
    w.send(4)
    assert w.hw[1].count() == 1
    w.qp.abort(LOC_QP_OP, errno.EINVAL)
    assert w.poll() == [(1, LOC_QP_OP), (2, FLUSH), (3, FLUSH), (4, FLUSH)]


@pytest.mark.parametrize("err", [errno.EINVAL, errno.EIO])
def test_replay_refused_is_told_at_once_where_nothing_will_complete(guarded: World, err: int) -> None:
    w = guarded
    w.send(0, WRITE, flags=0 if err == errno.EINVAL else SIGNALED)
    w.send(1)
    w.fence(0)
    w.events()
    w.hw[1].fail(1, err)
    w.switch(1, 0)
    assert w.events() == [(_core.EV_POST_FAILED, 1, err, 0)]
    assert not w.qp.send_is_open and w.qp.outstanding == (2, 0) and w.qp.unwired == (1, 0)
    w.send(2)
    assert w.hw[1].count() == 1


@pytest.mark.parametrize("err", [errno.EIO, errno.ENODEV, errno.ENXIO, -errno.EIO])
def test_post_refused_by_a_device_that_is_gone_is_kept(guarded: World, err: int) -> None:
    """A post fails because the device went away: the application does not see it."""
    w = guarded
    w.send(0)
    w.hw[0].fail(0, err)
    w.send(1)
    assert w.events() == [(_core.EV_POST_FAILED, 0, abs(err), 0)] and w.qp.failed_wr(0) == 1
    w.hw[0].fail(0, err, recv=True)
    w.recv(10)
    assert w.events() == [(_core.EV_POST_FAILED, 0, abs(err), 1)]
    w.send(2)
    assert w.hw[0].count() == 1 and w.qp.outstanding == (3, 1)
    w.fence(0)
    assert w.qp.refused == abs(err)
    w.switch(1, 0)
    assert seqs(w.hw[1].posts()) == [0, 1, 2] and seqs(w.hw[1].posts(recv=True)) == [0]
    assert w.qp.refused == 0


@pytest.mark.parametrize("polled", [True, False])
@pytest.mark.parametrize("recv", [False, True])
def test_post_refused_by_a_qp_in_error_is_kept(guarded: World, recv: bool, polled: bool) -> None:
    """The error may still be in either CQ: the provider knew of it first."""
    w = guarded
    w.send(0)
    w.recv(10)
    w.hw[0].fail_recv(FLUSH) if recv else w.hw[0].fail_send(RETRY_EXC)
    if polled:
        assert w.poll() == []
        w.events()
    w.hw[0].fail(0, errno.EINVAL)
    w.send(1)
    w.hw[0].fail(0, errno.EINVAL, recv=True)
    w.recv(11)
    assert [e for e in w.events() if e[0] != _core.EV_ERROR] == [
        (_core.EV_POST_FAILED, 0, errno.EINVAL, 0),
        (_core.EV_POST_FAILED, 0, errno.EINVAL, 1),
    ]
    assert w.qp.outstanding == (2, 2) and not w.qp.send_is_open and not w.qp.recv_is_open


def refused(post: Callable[[], None]) -> int:
    """The errno that it raises."""
    with pytest.raises(PyverbsRDMAError) as e:
        post()
    return int(e.value.error_code)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("err", [errno.EINVAL, errno.EOPNOTSUPP, errno.EMSGSIZE])
def test_post_refused_for_its_own_sake_is_raised(guarded: World, err: int, away: bool) -> None:
    """By the NIC that carries traffic, whichever that is; what is posted already stays."""
    w = guarded
    w.send(0)
    w.recv(10)
    if away:
        w.fence(0)
        w.switch(1, 0)
        w.events()
    hw = w.hw[int(away)]
    for _ in range(3):
        hw.fail(0, err)
        assert refused(lambda: w.send(1)) == err
        hw.fail(0, err, recv=True)
        assert refused(lambda: w.recv(11)) == err
    assert w.events() == [] and w.qp.send_is_open and w.qp.recv_is_open
    assert w.qp.outstanding == (1, 1) and w.qp.unwired == (0, 0) and w.qp.posted == 1
    assert w.qp.counters() == (0, 0, 1)
    w.send(2)
    w.recv(12)
    hw.complete(2)
    hw.receive(2)
    assert w.poll() == [(0, SUCCESS), (2, SUCCESS), (10, SUCCESS), (12, SUCCESS)]


@pytest.mark.parametrize("away", [False, True])
def test_a_chain_refused_in_the_middle(guarded: World, away: bool) -> None:
    w = guarded
    if away:
        w.fence(0)
        w.switch(1, 0)
        w.events()
    hw = w.hw[int(away)]
    sends, recvs = [send_wr(3)], [recv_wr(13)]  # each from its end: pyverbs does not keep what is behind a WR
    for i in reversed(range(3)):
        sends.append(send_wr(i, next_wr=sends[-1]))
        recvs.append(recv_wr(10 + i, next_wr=recvs[-1]))
    bad, bad_recv = send_wr(99), recv_wr(99)
    hw.fail(2, errno.EINVAL)
    assert refused(lambda: w.qp.post_send(sends[-1], bad)) == errno.EINVAL and bad.wr_id == 2
    hw.fail(1, errno.EINVAL, recv=True)
    assert refused(lambda: w.qp.post_recv(recvs[-1], bad_recv)) == errno.EINVAL and bad_recv.wr_id == 11
    assert w.qp.outstanding == (2, 1) and w.qp.counters() == (0, 0, 2) and w.events() == []
    w.send(5)
    w.recv(15)
    hw.complete(3)
    hw.receive(2)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS), (5, SUCCESS), (10, SUCCESS), (15, SUCCESS)]


def test_a_post_behind_one_that_waits_is_journaled(guarded: World) -> None:
    """The hardware has no room for an older one: whether it would take the new one is not known yet."""
    w = guarded
    for i in range(3):
        w.send(i)
    w.fence(0)
    w.hw[1].fail(1, errno.ENOMEM, times=2)
    w.switch(1, 0)
    w.send(3)
    assert w.hw[1].count() == 1 and w.qp.unwired == (3, 0)
    w.hw[1].fail(2, errno.EINVAL, times=99)
    w.hw[1].complete()
    assert w.poll() == [(0, SUCCESS)] and w.hw[1].count() == 3
    w.hw[1].complete(2)
    assert w.poll() == [(1, SUCCESS), (2, SUCCESS)]
    assert (_core.EV_POST_FAILED, 1, errno.EINVAL, 0) in w.events() and w.qp.failed_wr(1) == 3


@pytest.mark.parametrize("err", [errno.ENOMEM, -errno.ENOMEM])
def test_hardware_full_is_the_application_s_business(guarded: World, err: int) -> None:
    w = guarded
    w.hw[0].fail(0, err)
    assert refused(lambda: w.send(0)) == err and w.events() == []


def test_room_made_hands_the_rest_over_by_itself(make: Make) -> None:
    """A chain on a full queue: completions that are found while room is made set the journal going again."""
    w = make(max_send=4)
    w.protect()
    hw = w.hw[0]
    for i in range(3):
        w.send(i)
    w.fence(0)
    w.reset_pair(0)
    hw.fail(1, errno.ENOMEM)
    w.switch(0, 0)
    assert w.qp.unwired == (2, 0)
    hw.complete()
    last, bad = send_wr(4), send_wr(99)
    # The journal is full: room is made for the second of the chain. That hands 1 and 2 over, and the first finds no
    # room. Nor does it when it is posted; but then 1 is found complete, and what waits is handed over by that.
    hw.fail(2, errno.ENOMEM, times=2)
    w.scqs[0].push(1 << 56 | 1, SUCCESS, hw.qp_num)
    w.scqs[0].hide(1)
    w.qp.post_send(send_wr(3, next_wr=last), bad)
    assert bad.wr_id == 99 and w.qp.outstanding == (3, 0) and w.qp.unwired == (0, 0)
    assert seqs(hw.posts())[-4:] == [1, 2, 3, 4]
    hw.done[0] += 1
    hw.complete(3)
    assert w.poll() == [(i, SUCCESS) for i in range(5)]


# --- unsafe work


@pytest.mark.parametrize(
    ("opcode", "why"),
    [
        (CAS, "atomic"),
        (FAA, "atomic"),
        (LOCAL_INV, "local invalidate"),
        (BIND_MW, "bind"),
        (SEND_INV, "SEND with invalidate"),
    ],
)
def test_unsafe_opcodes(guarded: World, opcode: int, why: str) -> None:
    w = guarded
    w.send(0)
    assert w.qp.unsafe_reason() is None
    w.send(1, opcode, sges=None if opcode in (CAS, FAA) else [])
    assert why in (w.qp.unsafe_reason() or "")
    w.hw[0].complete(2)
    w.poll()
    assert w.qp.unsafe_reason() is None
    w.qp.close_send()
    w.send(2, opcode, sges=None if opcode in (CAS, FAA) else [])
    assert w.qp.unsafe_reason() is None


# --- abort


def test_abort_delivers_the_original_errors_in_order(guarded: World) -> None:
    w = guarded
    for i in range(4):
        w.send(i, flags=0 if i == 2 else SIGNALED)
    w.recv(10, 2)
    w.hw[0].complete()
    w.hw[0].fail_send(RETRY_EXC, 0x81)
    w.hw[0].flush()
    w.poll()
    w.fence(0)
    w.send(4)
    w.qp.abort()
    n, wcs = w.scq.poll(16)
    assert [(wc.wr_id, wc.status, wc.vendor_err, wc.qp_num) for wc in wcs] == [
        (1, RETRY_EXC, 0x81, w.qp_num),
        (2, FLUSH, 0, w.qp_num),
        (3, FLUSH, 0, w.qp_num),
        (4, FLUSH, 0, w.qp_num),
    ]
    assert w.poll_cq(w.rcq) == [(10, FLUSH), (11, FLUSH)]
    assert not w.qp.guarded and w.qp.outstanding == (0, 0)
    assert (w.qp.send_pair, w.qp.recv_pair, w.qp.send_is_open, w.qp.recv_is_open) == (0, 0, True, True)
    # The QP is in ERR: what the application posts now is flushed, and it sees that.
    w.send(5)
    w.recv(12)
    w.hw[0].flush()
    assert w.poll() == [(5, FLUSH), (12, FLUSH)]


def test_abort_with_flushes_still_to_come(guarded: World) -> None:
    w = guarded
    for i in range(3):
        w.send(i)
    w.recv(10)
    w.qp.abort(RETRY_EXC, 7)
    assert w.poll() == [(0, RETRY_EXC), (1, FLUSH), (2, FLUSH), (10, FLUSH)]
    w.hw[0].flush()
    assert w.poll() == [], "they had theirs"
    w.send(3)
    w.hw[0].flush()
    assert w.poll() == [(3, FLUSH)]


def test_abort_after_a_trim_shows_no_success_behind_an_error(guarded: World) -> None:
    w = guarded
    w.send(0, READ)
    w.send(1)
    w.send(2)
    w.fence(0)
    w.switch(1, 1)
    w.fence(1)
    w.qp.abort(RETRY_EXC)
    assert w.poll() == [(0, RETRY_EXC), (1, FLUSH), (2, FLUSH)]


def test_a_read_before_a_fenced_wr_that_arrived_is_proven(guarded: World) -> None:
    """The fence waited for the READ's response: reading again would show what came later."""
    w = guarded
    w.send(0, READ)
    w.send(1, flags=SIGNALED | FENCE)
    w.send(2)
    w.fence(0)
    w.switch(1, 1)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS)]


def test_abort_of_nothing(guarded: World) -> None:
    guarded.qp.abort()
    guarded.qp.abort()
    assert guarded.poll() == [] and not guarded.qp.guarded


def test_abort_without_recorded_error(guarded: World) -> None:
    guarded.send(0)
    guarded.qp.abort()
    assert guarded.poll() == [(0, RETRY_EXC)]


# --- misuse


@pytest.mark.parametrize(
    "call", ["open_send", "open_recv", "post_marker", "post_arm_send", "post_arm_recv", "move_recv"]
)
def test_pairs_without_qp_are_refused(world: World, call: str) -> None:
    with pytest.raises(ValueError, match="pair 2 has no QP"):
        getattr(world.qp, call)(2)
    for k in (-1, 16):
        with pytest.raises(ValueError, match="there are pairs 0 to 15"):
            getattr(world.qp, call)(k)


def test_after_close(world: World) -> None:
    w = world
    w.qp.close()
    w.qp.close()
    with pytest.raises(PyverbsRDMAError) as e:
        w.send(0)
    assert e.value.error_code == errno.EINVAL
    with pytest.raises(PyverbsRDMAError):
        w.recv(0)
    for call in ("open_send", "begin_fence", "fence_state", "pair_reset", "forget_pair", "first_error"):
        with pytest.raises(PyverbsUserError):
            getattr(w.qp, call)(0)
    with pytest.raises(PyverbsUserError):
        w.qp.abort()
