# SPDX-License-Identifier: BSD-3-Clause
"""Packets that come late, twice, or out of order: rules with a delay, in every direction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
PATIENT = {"timeout": 19}  # 2.1 s: nothing is sent again because this machine is busy


def number(endpoint: Proxy) -> int:
    return int.from_bytes(bytes.fromhex(endpoint.get(8)), "little")


@pytest.mark.parametrize("direction", ["tx", "rx"])
def test_delay(two: Pair, direction: str) -> None:
    left, _right = two(**PATIENT)
    rule = faults.delay(
        "a/soft0" if direction == "tx" else "b/soft0", 0.3, direction=direction, opcode="write"
    )
    start = left.send("RDMA_WRITE", 1, 100)
    assert statuses(found := left.poll(1, 10)) == [(1, "SUCCESS")]
    assert found[0]["at"] - start >= 0.3
    assert (faults.rule(rule).fired, faults.rule(rule).action, faults.rule(rule).delay_us) == (
        1,
        "delay",
        300_000,
    )
    start = left.send("RDMA_WRITE", 2, 100)
    assert statuses(found := left.poll(1, 10)) == [(2, "SUCCESS")]
    assert found[0]["at"] - start < 0.3, "only one packet was asked for"


def test_later_than_the_retries(two: Pair) -> None:
    """The retransmission is there first: the late packet is old news, and done only once."""
    left, right = two(timeout=14, retry_cnt=7)
    faults.delay("a/soft0", 0.5, direction="tx", opcode="RC_FETCH_ADD")
    left.send("ATOMIC_FETCH_AND_ADD", 1, 8, compare_add=7)
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")]
    assert number(right) == 7
    assert right.poll(1, 0.6) == []  # by then the late one is certainly there
    left.send("ATOMIC_FETCH_AND_ADD", 2, 8, compare_add=1)
    assert statuses(left.poll(1, 10)) == [(2, "SUCCESS")]
    assert number(right) == 8


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
@pytest.mark.parametrize("where", ["a/soft0", "b/soft0"])
def test_everything_twice(two: Pair, where: str, delay_s: float) -> None:
    left, right = two({"recv_wr": 64}, mtu=256, **PATIENT)
    rule = faults.duplicate(where, delay_s=delay_s, count=0)
    left.pattern(3, 5000)
    right.recv_many(20, 5000)
    left.send_many(20, op="SEND", length=5000)
    assert statuses(left.poll(20, 20)) == [(i, "SUCCESS") for i in range(1, 21)]
    assert statuses(right.poll(20, 20)) == [(i, "SUCCESS") for i in range(1, 21)]
    assert right.matches(3, 5000)
    right.put("00" * 8)
    left.send_many(10, op="ATOMIC_FETCH_AND_ADD", length=8, compare_add=1)
    assert statuses(left.poll(10, 20)) == [(i, "SUCCESS") for i in range(1, 11)]
    assert number(right) == 10
    assert left.poll(1, 0.1) == [] and right.poll(1, 0.1) == []
    assert faults.rule(rule).fired > 400


@pytest.mark.parametrize("opcode", ["send", "ack"])
def test_reordered_connection_stays_in_order(two: Pair, opcode: str) -> None:
    left, right = two({"recv_wr": 64}, mtu=256, **PATIENT)
    rule = faults.reorder("a/soft0", opcode=opcode, probability=0.3, seed=5, count=0)
    left.pattern(4, 5000)
    right.recv_many(30, 5000)
    left.send_many(30, op="SEND", length=5000)
    assert statuses(left.poll(30, 30)) == [(i, "SUCCESS") for i in range(1, 31)]
    assert statuses(right.poll(30, 30)) == [(i, "SUCCESS") for i in range(1, 31)]
    assert right.matches(4, 5000) and faults.rule(rule).fired > 0


def datagrams(hosts: Callable[..., Proxy]) -> tuple[Proxy, Proxy]:
    left, right = (hosts(name).open("soft0").endpoint(kind="UD") for name in "ab")
    left.ud_ready(), right.ud_ready()
    right.recv_many(8, 200)
    return left, right


def test_reordered_datagrams(hosts: Callable[..., Proxy]) -> None:
    """What an unreliable service shows: the second before the first."""
    left, right = datagrams(hosts)
    faults.reorder("a/soft0", direction="tx", wait_s=30)
    for imm in (1, 2, 3):
        left.send("SEND_WITH_IMM", imm, 10, imm=imm, to=right.info())
    assert [wc["imm"] for wc in right.poll(3)] == [2, 1, 3]


def test_nothing_to_be_overtaken_by(hosts: Callable[..., Proxy]) -> None:
    left, right = datagrams(hosts)
    faults.reorder("b/soft0", direction="rx", wait_s=0.2)
    start = left.send("SEND_WITH_IMM", 1, 10, imm=1, to=right.info())
    assert (wc := right.poll(1))[0]["imm"] == 1 and wc[0]["at"] - start >= 0.2


@pytest.mark.parametrize("direction", ["tx", "rx"])
def test_a_late_packet_meets_a_cut_cable(hosts: Callable[..., Proxy], direction: str) -> None:
    left, right = datagrams(hosts)
    where = "a/soft0" if direction == "tx" else "b/soft0"
    faults.delay(where, 0.2, direction=direction)
    left.send("SEND_WITH_IMM", 1, 10, imm=1, to=right.info())
    faults.down(where)
    assert right.poll(1, 0.5) == []
    faults.up(where)
    left.send("SEND_WITH_IMM", 2, 10, imm=2, to=right.info())
    assert [wc["imm"] for wc in right.poll(1)] == [2]


def test_wrong_requests(network: Path) -> None:
    faults.register("a")
    for wrong in (
        lambda: faults.delay("a/soft0", 0),
        lambda: faults.delay("a/soft0", -1),
        lambda: faults.delay("a/soft0", 61),
        lambda: faults.duplicate("a/soft0", delay_s=61),
        lambda: faults.reorder("a/soft0", wait_s=61),
        lambda: faults.reorder("b/soft0"),
    ):
        with pytest.raises(faults.FaultError):
            wrong()
    assert faults.status().rules == ()
