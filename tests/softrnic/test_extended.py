# SPDX-License-Identifier: BSD-3-Clause
"""Extended CQs (start_poll, next_poll, end_poll) and QPs (ibv_wr_*)."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from softrnic.hosts import Proxy, VerbsError, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
EX = {"extended": True}


def test_every_operation(pair: Pair) -> None:
    left, right = pair(EX, mtu=256)
    left.pattern(1, 2000)
    right.recv_many(3, 2000, wr_id=10)
    left.wr_batch(
        [
            {"op": "send", "sge": [0, 2000]},
            {"op": "send_imm", "imm": 7, "inline": "aabbcc"},
            {"op": "write_imm", "imm": 8, "sge": [0, 1000], "remote_offset": 3000},
            {"op": "write", "sges": [[0, 500], [500, 500]], "remote_offset": 5000},
            {"op": "read", "sge": [3000, 1000], "remote_offset": 5000},
            {"op": "fetch_add", "add": 5, "sge": [5000, 8], "remote_offset": 8000},
            {"op": "cmp_swp", "compare": 5, "swap": 6, "sge": [5008, 8], "remote_offset": 8000},
        ]
    )
    sent = left.poll_ex(7)
    assert statuses(sent) == [(i, "SUCCESS") for i in range(1, 8)]
    assert [
        wc["opcode"] for wc in sent
    ] == "SEND SEND RDMA_WRITE RDMA_WRITE RDMA_READ FETCH_ADD COMP_SWAP".split()
    assert [(wc["wr_id"], wc["byte_len"], wc["imm"], wc["opcode"]) for wc in right.poll_ex(3)] == [
        (10, 2000, None, "RECV"),
        (11, 3, 7, "RECV"),
        (12, 1000, 8, "RECV_RDMA_WITH_IMM"),
    ]
    assert right.get(3) == "aabbcc" and right.matches(1, 1000, 3000) and right.matches(1, 1000, 5000)
    assert left.matches(1, 1000, 3000)
    assert left.get(16, 5000) == (0).to_bytes(8, "little").hex() + (5).to_bytes(8, "little").hex()
    assert right.get(8, 8000) == (6).to_bytes(8, "little").hex()


def test_datagrams(hosts: Callable[..., Any]) -> None:
    left, right = (hosts(name).open("soft0").endpoint(kind="UD", extended=True) for name in "ab")
    left.ud_ready(), right.ud_ready()
    right.recv(1, 140)
    left.pattern(2, 100)
    left.wr_batch([{"op": "send_imm", "imm": 4, "sge": [0, 100], "to": right.info()}])
    assert statuses(left.poll_ex()) == [(1, "SUCCESS")]
    [wc] = right.poll_ex()
    assert (wc["imm"], wc["byte_len"], wc["src_qp"]) == (4, 140, left.info()["qpn"])
    assert right.matches(2, 100, 40)
    with pytest.raises(VerbsError) as error:
        left.wr_batch([{"op": "send", "sge": [0, 100]}])
    assert error.value.errno == errno.EINVAL, "no address"


def test_unreliable_connection(pair: Pair) -> None:
    left, right = pair({"extended": True, "kind": "UC"})
    right.recv(1, 100)
    left.wr_batch([{"op": "write", "sge": [0, 100]}, {"op": "send", "sge": [0, 100]}])
    assert statuses(left.poll_ex(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert statuses(right.poll_ex()) == [(1, "SUCCESS")]


def test_abort_and_begin_anew(pair: Pair) -> None:
    left, right = pair(EX)
    right.recv(1, 100)
    left.wr_batch([{"op": "send", "sge": [0, 100], "wr_id": 8}] * 3, abort=True)
    left.wr_batch([{"op": "send", "sge": [0, 100], "wr_id": 9}])
    assert statuses(left.poll_ex()) == [(9, "SUCCESS")] and statuses(right.poll_ex()) == [(1, "SUCCESS")]
    assert left.poll_ex(1, 0.05) == []


def test_all_or_nothing(pair: Pair) -> None:
    """A batch that does not fit, or has a mistake anywhere, leaves no trace."""
    left, right = pair({"extended": True, "send_wr": 4, "inline": 64})
    right.recv_many(4, 100)
    good = {"op": "send", "sge": [0, 100]}
    for bad, number in (
        ([good] * 5, errno.ENOMEM),
        ([good, {"op": "send", "inline": "00" * 65}], errno.EINVAL),
        ([good, {"op": "send", "sges": [[0, 1]] * 9}], errno.EINVAL),
        ([good, {"op": "fetch_add", "add": 1, "sge": [0, 4]}], errno.EINVAL),
        ([good, {"op": "read", "inline": "00"}], errno.EINVAL),
    ):
        with pytest.raises(VerbsError) as error:
            left.wr_batch(bad)
        assert error.value.errno == number
    left.wr_batch([good] * 4)
    assert statuses(left.poll_ex(4)) == [(i, "SUCCESS") for i in range(1, 5)]
    assert right.poll_ex(5, 0.05)[3]["wr_id"] == 4


def test_old_and_new_calls_mix(pair: Pair) -> None:
    left, right = pair(EX)
    right.recv_many(2, 10)
    left.send("SEND", 1, 10)
    left.wr_batch([{"op": "send", "sge": [0, 10], "wr_id": 2}])
    assert statuses(left.poll_ex(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert len(right.poll_ex(2)) == 2


def test_errors_and_flush(two: Pair) -> None:
    left, right = two(EX, rnr_retry=7)
    left.wr_batch([{"op": "send", "sge": [0, 10]}] * 2)
    right.modify("ERR")
    left.modify("ERR")
    assert statuses(left.poll_ex(2)) == [(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR")]
    left.wr_batch([{"op": "send", "sge": [0, 10], "wr_id": 3}])
    assert statuses(left.poll_ex()) == [(3, "WR_FLUSH_ERR")]
    left.modify("RESET")
    with pytest.raises(VerbsError) as error:
        left.wr_batch([{"op": "send", "sge": [0, 10]}])
    assert error.value.errno == errno.EINVAL


def test_null_device(hosts: Callable[..., Any]) -> None:
    endpoint = hosts("a", "null").open("soft0").endpoint(extended=True)
    endpoint.connect(endpoint.info())
    endpoint.wr_batch([{"op": "write", "sge": [0, 100]}] * 3)
    assert statuses(endpoint.poll_ex(3)) == [(i, "SUCCESS") for i in (1, 2, 3)]
