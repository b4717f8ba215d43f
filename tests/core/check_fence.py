# SPDX-License-Identifier: BSD-3-Clause
"""The fence of a failed pair: what shows that its queues are empty, markers, and pairs that are reset meanwhile."""

from __future__ import annotations

import errno

import pytest
from fake import FLUSH, RETRY_EXC, SEND, SIGNALED, SUCCESS, WRITE, World

from shiftverbs import _core


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
    assert w.qp.fence_state(0) == (False, True)
    w.hw[0].flush()
    assert w.scq.drain(0) == 1 and w.rcq.drain(0) == 1, "the markers"
    assert w.qp.fence_state(0) == (True, True)
    assert w.scq.drain(0) == 0 and w.rcq.drain(0) == 0
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
    w.hw[0].fail(0, errno.EIO, recv=True)
    assert w.qp.post_marker(0) == errno.EINVAL
    w.hw[0].fail(0, errno.EIO, recv=True)
    assert w.qp.post_marker(0) == errno.EIO
    assert w.qp.fence_state(0) == (False, True), "no marker will say that the SQ is empty"


def test_markers_and_dummies_never_reach_the_application(world: World) -> None:
    """Also where the QP is not guarded."""
    w = world
    w.qp.post_marker(0)
    w.qp.post_arm_send(0)
    w.qp.post_arm_recv(0)
    w.send(0, flags=0)
    assert w.qp.move_begin() == "wanted" and w.qp.post_fence_write(0, 0) == 0
    w.hw[0].complete(4)
    w.hw[0].receive(2)
    assert w.poll() == []
    assert w.scq.swallowed == 3 and w.rcq.swallowed == 2


def test_own_wrs_fit_beside_a_full_queue(guarded: World) -> None:
    w = guarded
    for i in range(w.max_send):
        w.send(i)
    w.recv(0, w.max_recv)
    assert w.qp.post_marker(0) == 0 and w.qp.post_marker(0) == 0


def test_a_marker_that_lies_there_is_not_posted_again(guarded: World) -> None:
    """There is room for one in each queue, whatever is refused and how many fences follow each other."""
    w = guarded
    w.send(1)
    w.recv(2)
    w.qp.begin_fence(0)
    w.hw[0].fail(0, errno.ENOMEM, recv=True)
    assert w.qp.post_marker(0) == errno.ENOMEM
    for _ in range(3):
        assert w.qp.post_marker(0) == 0
    assert w.hw[0].count() == 2 and w.hw[0].count(recv=True) == 2
    w.hw[0].flush()
    w.scq.drain(0)
    w.rcq.drain(0)
    assert w.qp.fence_state(0) == (True, True)
    w.reset_pair(0)
    w.qp.begin_fence(0)
    assert w.qp.post_marker(0) == 0
    assert w.hw[0].count() == 3 and w.hw[0].count(recv=True) == 3, "a new life has its own"


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
