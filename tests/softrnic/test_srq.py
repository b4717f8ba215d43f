# SPDX-License-Identifier: BSD-3-Clause
"""Shared receive queues."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, connect, statuses

Hosts = Callable[..., Any]


@pytest.fixture
def shared(hosts: Hosts) -> tuple[Proxy, Proxy, list[Proxy], list[Proxy]]:
    """(device b, its SRQ, three senders at a, three receivers at b that share the SRQ)."""
    near, far = hosts("a").open("soft0"), hosts("b").open("soft0")
    srq = far.srq()
    senders = [near.endpoint() for _ in range(3)]
    receivers = [far.endpoint(srq=srq) for _ in range(3)]
    for sender, receiver in zip(senders, receivers, strict=True):
        connect(sender, receiver, mtu=256, rnr_retry=7)
    return far, srq, senders, receivers


def test_first_come(shared: Any) -> None:
    _far, srq, senders, receivers = shared
    for i in range(6):
        srq.recv(i, 1000, i * 1000)
    for i, (sender, receiver) in enumerate(zip(senders * 2, receivers * 2, strict=True)):
        sender.pattern(i, 900)
        sender.send("SEND_WITH_IMM", 1, 900, imm=i)
        [wc] = receiver.poll()
        assert (wc["wr_id"], wc["status"], wc["imm"], wc["qpn"]) == (i, "SUCCESS", i, receiver.info()["qpn"])
        assert srq.matches(i, 900, i * 1000)
        assert statuses(sender.poll()) == [(1, "SUCCESS")]


def test_empty_is_receiver_not_ready(shared: Any) -> None:
    _far, srq, senders, receivers = shared
    senders[0].send("SEND", 1, 10)
    assert senders[0].poll(1, 0.1) == []
    srq.recv(5, 10)
    assert statuses(senders[0].poll()) == [(1, "SUCCESS")]
    assert statuses(receivers[0].poll()) == [(5, "SUCCESS")]


def test_write_with_immediate_takes_one(shared: Any) -> None:
    _far, srq, senders, receivers = shared
    srq.recv(1, 0)
    senders[1].send("RDMA_WRITE_WITH_IMM", 1, 1000, imm=9)
    assert [(wc["wr_id"], wc["imm"]) for wc in receivers[1].poll()] == [(1, 9)]


def test_limit_is_told_once(shared: Any) -> None:
    far, srq, senders, receivers = shared
    for i in range(4):
        srq.recv(i, 10)
    srq.modify("LIMIT", srq_limit=3)
    assert srq.query() == {"max_wr": 16, "max_sge": 2, "srq_limit": 3}
    senders[0].send("SEND", 1, 10)
    assert len(receivers[0].poll()) == 1 and far.event(0) is None
    senders[0].send("SEND", 1, 10)
    assert far.event() == "SRQ_LIMIT_REACHED" and srq.query()["srq_limit"] == 0
    senders[0].send("SEND", 1, 10)
    assert len(receivers[0].poll(2)) == 2 and far.event(0) is None


def test_error_leaves_the_queue_alone(shared: Any) -> None:
    """A QP in ERR flushes nothing of the SRQ's, and tells that it takes nothing more."""
    far, srq, senders, receivers = shared
    srq.recv(1, 10)
    receivers[0].modify("ERR")
    assert far.event() == "QP_LAST_WQE_REACHED" and receivers[0].poll(1, 0.05) == []
    senders[1].send("SEND", 1, 10)
    assert statuses(receivers[1].poll()) == [(1, "SUCCESS")]


def test_message_under_way_is_flushed(shared: Any) -> None:
    """What the QP had taken out for a message that never ends comes back as flushed."""
    _far, srq, senders, receivers = shared
    srq.recv(1, 1000)
    srq.recv(2, 1000)
    faults.drop("a/soft0", direction="tx", opcode="RC_SEND_LAST", count=0)
    senders[0].send("SEND", 1, 1000)
    assert receivers[0].poll(1, 0.1) == []
    receivers[0].modify("ERR")
    assert statuses(receivers[0].poll()) == [(1, "WR_FLUSH_ERR")]
    faults.clear()
    senders[1].send("SEND", 1, 100)
    assert statuses(receivers[1].poll()) == [(2, "SUCCESS")]


def test_resize(shared: Any) -> None:
    _far, srq, senders, receivers = shared
    for i in range(16):
        srq.recv(i, 10)
    with pytest.raises(VerbsError) as error:
        srq.recv(16, 10)
    assert error.value.errno == errno.ENOMEM
    srq.modify("MAX_WR", max_wr=32)
    srq.recv(16, 10)
    with pytest.raises(VerbsError) as error:
        srq.modify("MAX_WR", max_wr=8)
    assert error.value.errno == errno.EINVAL and srq.query()["max_wr"] == 32
    senders[0].send_many(17, length=10)
    assert statuses(receivers[0].poll(17)) == [(i, "SUCCESS") for i in range(17)]


def test_wrong_requests(shared: Any) -> None:
    far, srq, _senders, receivers = shared
    for wrong, number in (
        (lambda: far.srq(max_wr=0), errno.EINVAL),
        (lambda: far.srq(max_sge=33), errno.EINVAL),
        (lambda: srq.modify("LIMIT", srq_limit=17), errno.EINVAL),
        (lambda: srq.recv(1, 10, sges=3), errno.EINVAL),
        (lambda: receivers[0].recv(1, 10), errno.EINVAL),
    ):
        with pytest.raises(VerbsError) as error:
            wrong()
        assert error.value.errno == number


def test_datagrams(hosts: Hosts) -> None:
    near, far = hosts("a").open("soft0"), hosts("b").open("soft0")
    srq = far.srq()
    left, right = near.endpoint(kind="UD"), far.endpoint(kind="UD", srq=srq)
    left.ud_ready(), right.ud_ready()
    srq.recv(4, 140)
    left.pattern(1, 100)
    left.send("SEND", 1, 100, to=right.info())
    assert statuses(right.poll()) == [(4, "SUCCESS")] and srq.matches(1, 100, 40)
