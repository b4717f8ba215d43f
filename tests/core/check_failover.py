# SPDX-License-Identifier: BSD-3-Clause
"""SWITCH on the data path: trim, replay, posts that are refused meanwhile; what is unsafe; misuse."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from fake import (
    BIND_MW,
    CAS,
    FAA,
    FENCE,
    FLUSH,
    LOC_PROT,
    LOC_QP_OP,
    LOCAL_INV,
    READ,
    RECV_BIT,
    RETRY_EXC,
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
    assert _core.at_work([w.qp]) == []
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


def test_what_is_proven_behind_an_own_error_waits_for_the_driver(guarded: World) -> None:
    """Where the other half of the QP may still work: a program that sees a flush takes its memory back."""
    w = guarded
    w.send(0, READ)
    w.send(1, SEND)
    w.send(2, SEND)
    w.fence(0)
    w.switch(1, 1)
    w.hw[1].fail_send(LOC_PROT)
    w.hw[1].flush()
    assert w.poll() == [(0, LOC_PROT)] and w.qp.ending
    w.qp.abort(FLUSH)
    assert w.poll() == [(1, FLUSH), (2, FLUSH)]
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
    assert _core.at_work([w.qp]) == [w.qp]
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


def test_a_read_before_a_fenced_wr_that_arrived_is_proven(guarded: World) -> None:
    """The fence waited for the READ's response: reading again would show what came later."""
    w = guarded
    w.send(0, READ)
    w.send(1, flags=SIGNALED | FENCE)
    w.send(2)
    w.fence(0)
    w.switch(1, 1)
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS)]


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


@pytest.mark.parametrize("how", ["reset_journal", "abort"])
def test_what_was_refused_ends_with_what_was_posted(guarded: World, how: str) -> None:
    """The next life of the QP has nothing that waits in no queue of the hardware."""
    w = guarded
    w.hw[0].fail(0, errno.EIO)
    w.send(0)
    assert w.qp.refused == errno.EIO
    getattr(w.qp, how)()
    assert w.qp.refused == 0 and w.qp.unwired == (0, 0) and w.qp.is_plain


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


def test_no_room_behind_what_tells_of_no_end_is_a_refusal(make: Make) -> None:
    """Nothing would set what waits going again: the driver hears of it, or the application whose post it is."""
    w = make(max_send=16)
    w.protect()
    for i in range(2):
        w.send(i, flags=0)
    w.fence(0)
    w.hw[1].fail(1, errno.ENOMEM)
    w.switch(1, 0)
    assert w.hw[1].count() == 1 and w.qp.unwired == (1, 0) and not w.qp.completion_due
    assert (_core.EV_POST_FAILED, 1, errno.ENOMEM, 0) in w.events() and not w.qp.send_is_open
    w.qp.open_send(1)
    w.hw[1].fail(0, errno.ENOMEM)
    assert refused(lambda: w.send(2, flags=0)) == errno.ENOMEM
    assert w.qp.unwired == (0, 0) and w.qp.send_is_open and w.events() == []


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
