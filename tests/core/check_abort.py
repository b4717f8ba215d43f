# SPDX-License-Identifier: BSD-3-Clause
"""What is outstanding gets its original errors, in order: the end of protection."""

from __future__ import annotations

import pytest
from fake import FLUSH, READ, RETRY_EXC, SIGNALED, World


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


def test_abort_of_nothing(guarded: World) -> None:
    guarded.qp.abort()
    guarded.qp.abort()
    assert guarded.poll() == [] and not guarded.qp.guarded


def test_abort_without_recorded_error(guarded: World) -> None:
    guarded.send(0)
    guarded.qp.abort()
    assert guarded.poll() == [(0, RETRY_EXC)]


@pytest.mark.parametrize("target", [0, 1])
def test_a_pair_that_was_handed_nothing_shows_nothing(guarded: World, target: int) -> None:
    """A SWITCH rebuilds it and ends in an ABORT before its sends begin: our own WR fails there, and proves no other."""
    w = guarded
    if target:
        w.fence(0)
        w.switch(1, 0)
    w.send(0, flags=0)
    w.send(1)
    w.send(2, READ)
    w.fence(target)
    w.reset_pair(target)
    assert w.qp.open_recv(target) == 0
    w.qp.begin_end()
    w.qp.begin_fence(target)
    assert w.qp.post_marker(target) == 0
    w.hw[target].flush()
    w.poll()
    w.qp.abort(RETRY_EXC)
    assert w.poll() == [(0, RETRY_EXC), (1, FLUSH), (2, FLUSH)]
