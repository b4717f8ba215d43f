# SPDX-License-Identifier: BSD-3-Clause
"""UC: messages of many packets, and what becomes of them when a packet is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
UC = {"kind": "UC"}


def test_send_and_write(pair: Pair) -> None:
    left, right = pair(UC, mtu=256)
    for seed, size in enumerate((0, 1, 255, 256, 257, 5000, 60_000)):
        left.pattern(seed, size)
        right.recv(seed, size)
        left.send("SEND_WITH_IMM", 10, size, imm=seed)
        assert statuses(left.poll()) == [(10, "SUCCESS")]
        [wc] = right.poll()
        assert (wc["wr_id"], wc["status"], wc["byte_len"], wc["imm"]) == (seed, "SUCCESS", size, seed)
        assert right.matches(seed, size)
        left.pattern(seed + 100, size)
        right.recv(seed)
        left.send("RDMA_WRITE_WITH_IMM", 11, size, imm=seed)
        assert statuses(left.poll()) == [(11, "SUCCESS")]
        [wc] = right.poll()
        assert (wc["opcode"], wc["byte_len"], wc["imm"]) == ("RECV_RDMA_WITH_IMM", size, seed)
        assert right.matches(seed + 100, size)


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_lost_packet_costs_its_message(two: Pair, nth: int) -> None:
    """The first, a middle, the last: the sender sees success, the receive WR serves the next message."""
    left, right = two(UC, mtu=256)
    right.recv_many(2, 1000)
    faults.drop("a/soft0", direction="tx", nth=nth)
    left.pattern(1, 1000)
    left.send("SEND", 1, 1000)
    left.pattern(2, 1000)
    left.send("SEND", 2, 1000)
    assert statuses(left.poll(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert statuses(right.poll()) == [(1, "SUCCESS")] and right.matches(2, 1000)
    assert right.poll(1, 0.05) == []


def test_no_receive_wr(pair: Pair) -> None:
    left, right = pair(UC)
    left.send("SEND", 1, 10)
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    assert right.poll(1, 0.1) == []
    right.recv(5, 10)
    left.send("SEND", 2, 10)
    assert statuses(right.poll()) == [(5, "SUCCESS")]


def test_forbidden_write_is_dropped(pair: Pair) -> None:
    left, right = pair(UC)
    right.put("00" * 8)
    left.put("11" * 8)
    left.send("RDMA_WRITE", 1, 8, rkey=right.info()["rkey"] ^ 1)
    left.send("RDMA_WRITE", 2, 8, remote_offset=8)
    assert statuses(left.poll(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    right.recv(3)
    left.send("RDMA_WRITE_WITH_IMM", 3)  # in order: the two before it are through
    assert statuses(right.poll()) == [(3, "SUCCESS")]
    assert right.get(16) == "00" * 8 + "11" * 8 and right.state() == "RTS"


def test_receive_too_small(pair: Pair) -> None:
    left, right = pair(UC)
    right.recv_many(2, 10)
    left.send("SEND", 1, 11)
    assert statuses(right.poll(2)) == [(1, "LOC_LEN_ERR"), (2, "WR_FLUSH_ERR")]
    assert right.state() == "ERR" and left.state() == "RTS"


def test_what_uc_has_not(pair: Pair) -> None:
    left, _right = pair(UC)
    for op in ("RDMA_READ", "ATOMIC_FETCH_AND_ADD", "SEND_WITH_INV"):
        with pytest.raises(VerbsError):
            left.send(op, 1, 8)


def test_cable_and_reset(two: Pair) -> None:
    """Nothing tells a UC sender that nobody hears it.

    Its own cable: what the other NIC has not looked at yet when it is plugged in again, it would take.
    """
    left, right = two(UC)
    right.recv_many(3, 10)
    faults.down("a/soft0")
    left.send("SEND", 1, 10)
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    faults.up("a/soft0")
    right.modify("ERR")
    assert statuses(right.poll(3)) == [(i, "WR_FLUSH_ERR") for i in (1, 2, 3)]
    left.modify("RESET"), right.modify("RESET")
    connect(left, right)
    right.recv(7, 10)
    left.send("SEND", 2, 10)
    assert statuses(left.poll()) == [(2, "SUCCESS")] and statuses(right.poll()) == [(7, "SUCCESS")]
