# SPDX-License-Identifier: BSD-3-Clause
"""Completion queues: events, resizing, overrun, order."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from harness import wait_until

from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]


def test_resize_keeps_what_is_in_it(two: Pair) -> None:
    left, right = two({"cqe": 64, "send_wr": 100, "recv_wr": 100})
    right.recv_many(150 if right.numbers()["max_recv_wr"] >= 150 else 60, 8)
    left.send_many(40, op="SEND", length=8)
    assert len(right.poll(10)) == 10
    assert right.resize(500) >= 500
    assert statuses(right.poll(30)) == [(i, "SUCCESS") for i in range(11, 41)]
    left.send_many(20, op="SEND", length=8)
    right.poll(0), left.poll(60)
    assert right.resize(32) >= 32
    assert len(right.poll(20)) == 20


def test_resize_below_what_is_in_it_is_refused(two: Pair) -> None:
    left, right = two({"cqe": 64})
    right.recv_many(50, 8)
    left.send_many(50, op="SEND", length=8)
    assert len(left.poll(50)) == 50
    with pytest.raises(VerbsError) as refused:
        right.resize(4)
    assert refused.value.errno == errno.EINVAL
    assert len(right.poll(50)) == 50


def test_overrun_is_an_error_of_the_queue(hosts: Callable[..., Any]) -> None:
    """A full CQ loses completions: CQ_ERR, and its queue pairs go to ERR."""
    a, b = hosts("a").open("soft0"), hosts("b").open("soft0")
    left, right = a.endpoint(cqe=4), b.endpoint()
    connect(left, right)
    room = left.numbers()["cqe"]
    left.send_many(room + 1, op="RDMA_WRITE", length=8)
    assert a.event() == "CQ_ERR"
    wait_until(lambda: left.state() == "ERR", what="the queue pair is in error")
    assert b.event(0.02) is None and right.state() == "RTS"


def test_event_per_arming(two: Pair) -> None:
    left, right = two({"channel": True})
    right.recv_many(10, 8)
    right.arm()
    left.send_many(5, op="SEND", length=8)
    assert right.wait_event() and len(right.poll(5)) == 5
    assert not right.wait_event(0.05)
    # Armed on a queue that is not empty: the next completion tells, not the ones that are there.
    left.send("SEND", 6, 8)
    left.poll(6)
    right.arm()
    assert not right.wait_event(0.05)
    left.send("SEND", 7, 8)
    assert right.wait_event() and len(right.poll(2)) == 2


def test_errors_are_solicited_events(two: Pair) -> None:
    left, _ = two({"channel": True}, rnr_retry=7, min_rnr_timer=12)
    left.recv(1, 8)
    left.arm(solicited=True)
    left.modify("ERR")
    assert left.wait_event() and statuses(left.poll()) == [(1, "WR_FLUSH_ERR")]


def test_completions_of_a_closed_queue_pair_stay_readable(two: Pair) -> None:
    """Destroying one of two QPs on a CQ leaves the other's completions alone."""
    left, right = two()
    other = Proxy(left._host, "device1").endpoint(share=left)
    right.recv_many(3, 8)
    left.send_many(3, op="SEND", length=8)
    right.poll(3)
    other.modify_raw("STATE", qp_state=0)
    other._host.call("host", "forget", other._name)
    assert statuses(left.poll(3)) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
