# SPDX-License-Identifier: BSD-3-Clause
"""Which error completions are withheld, which are delivered, and in what order they come out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake import (
    FATAL,
    FLUSH,
    LOC_LEN,
    LOC_PROT,
    LOC_QP_OP,
    REM_ACCESS,
    REM_INV,
    RETRY_EXC,
    RNR_EXC,
    SIGNALED,
    SUCCESS,
    World,
)

from shiftverbs import _core

Make = Callable[..., World]
RESP_TIMEOUT, GENERAL = 20, 21


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


@pytest.mark.parametrize("polled_first", ["send", "recv"])
def test_why_a_receive_failed_is_not_told_of_a_send(guarded: World, polled_first: str) -> None:
    w = guarded
    w.send(1)
    w.send(2)
    w.recv(10)
    w.hw[0].fail_recv(LOC_QP_OP, 0x33)
    w.hw[0].flush()
    for cq in (w.scq, w.rcq) if polled_first == "send" else (w.rcq, w.scq):
        assert w.poll_cq(cq) == []
    assert w.qp.first_error(0) == (LOC_QP_OP, 0x33) and w.qp.why_sends_fail(0) == (FLUSH, 0)
    w.qp.app_touched()
    n, wcs = w.scq.poll(8)
    assert [(wc.wr_id, wc.status, wc.vendor_err) for wc in wcs] == [(1, FLUSH, 0), (2, FLUSH, 0)]
    assert w.poll_cq(w.rcq) == [(10, FLUSH)]


@pytest.mark.parametrize("polled_first", ["send", "recv"])
@pytest.mark.parametrize("receive", [FLUSH, LOC_QP_OP])
def test_each_queue_has_an_error_of_its_own(guarded: World, receive: int, polled_first: str) -> None:
    w = guarded
    w.send(1)
    w.send(2)
    w.recv(10)
    w.hw[0].fail_recv(receive, 0x33)
    w.hw[0].fail_send(RETRY_EXC, 0x81)
    w.hw[0].flush()
    for cq in (w.scq, w.rcq) if polled_first == "send" else (w.rcq, w.scq):
        assert w.poll_cq(cq) == []
    assert w.qp.why_sends_fail(0) == (RETRY_EXC, 0x81)
    w.qp.abort()
    n, wcs = w.scq.poll(8)
    assert [(wc.wr_id, wc.status, wc.vendor_err) for wc in wcs] == [(1, RETRY_EXC, 0x81), (2, FLUSH, 0)]
    assert w.poll_cq(w.rcq) == [(10, FLUSH)]


def test_why_the_first_send_failed(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.recv(10)
    assert w.qp.why_sends_fail(0) is None
    w.hw[0].fail_send(RETRY_EXC, 0x81)
    w.hw[0].flush()
    assert w.poll() == [] and w.qp.why_sends_fail(0) == (RETRY_EXC, 0x81)


@pytest.mark.parametrize("flags", [SIGNALED, 0])
@pytest.mark.parametrize("queue", ["send", "recv"])
@pytest.mark.parametrize("how", ["touched", "let_go", "touched_away"])
def test_what_was_withheld_is_told_when_nothing_is_withheld_any_more(
    guarded: World, how: str, queue: str, flags: int
) -> None:
    """Protection ends between the first error and the flushes behind it: the WR that failed did not succeed."""
    w = guarded
    if how == "touched_away":
        w.fence(0)
        w.switch(1, 0)
    hw = w.hw[how == "touched_away"]
    for i in range(3):
        w.send(i, flags=flags)
    w.recv(10, 2)
    if queue == "send":
        hw.fail_send(RETRY_EXC)
    else:
        hw.fail_recv(FLUSH)
    assert w.poll() == []
    if how != "let_go":
        w.qp.app_touched()
    if how == "touched_away":
        assert w.qp.guarded and w.poll() == [], "the driver says when its pairs have stopped"
    w.qp.guarded = False
    hw.flush()
    first = RETRY_EXC if queue == "send" else FLUSH
    assert w.poll() == [(0, first), (1, FLUSH), (2, FLUSH), (10, FLUSH), (11, FLUSH)]
    assert w.qp.outstanding == (0, 0)
