# SPDX-License-Identifier: BSD-3-Clause
"""Faults from outside, as a program with plain pyverbs sees them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import wait_until

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
FLUSHED = "WR_FLUSH_ERR"


def device_of(endpoint: Proxy) -> Proxy:
    """The device that the host opened first."""
    return Proxy(endpoint._host, "device1")


def number(endpoint: Proxy, offset: int = 0) -> int:
    return int.from_bytes(bytes.fromhex(endpoint.get(8, offset)), "little")


# -- cables --
@pytest.mark.parametrize("where", ["a/soft0", "b/soft0"])
def test_port_down(two: Pair, where: str) -> None:
    left, right = two(timeout=10, retry_cnt=3)
    near, far = (left, right) if where == "a/soft0" else (right, left)
    faults.down(where)
    assert device_of(near).event() == "PORT_ERR" and device_of(near).port()["state"] == "DOWN"
    assert device_of(far).event(0.05) is None and device_of(far).port()["state"] == "ACTIVE"
    for wr_id in range(5):
        left.send("RDMA_WRITE", wr_id, 100)
    assert statuses(left.poll(5, 10)) == [(0, "RETRY_EXC_ERR"), *((i, FLUSHED) for i in range(1, 5))]
    assert right.state() == "RTS", "only the sender notices"
    faults.up(where)
    assert device_of(near).event() == "PORT_ACTIVE" and device_of(near).port()["state"] == "ACTIVE"
    left.modify("RESET"), right.modify("RESET")
    connect(left, right)
    left.send("RDMA_WRITE", 9, 100)
    assert statuses(left.poll()) == [(9, "SUCCESS")]


def test_short_blip_loses_nothing(two: Pair) -> None:
    """A cable that is out for less than the retries take: traffic goes on by itself."""
    left, right = two({"send_wr": 128, "recv_wr": 128}, timeout=14, retry_cnt=7, mtu=256)
    left.pattern(1, 10_000)
    right.recv_many(100, 10_000)
    left.send_many(50, op="SEND", length=10_000)
    faults.down("a/soft0")
    left.send_many(50, op="SEND", length=10_000, wr_id=51)
    faults.up("a/soft0")
    assert statuses(left.poll(100, 20)) == [(i, "SUCCESS") for i in range(1, 101)]
    assert statuses(right.poll(100, 20)) == [(i, "SUCCESS") for i in range(1, 101)]
    assert right.matches(1, 10_000)
    assert [device_of(left).event(), device_of(left).event()] == ["PORT_ERR", "PORT_ACTIVE"]


def test_every_context_gets_the_event(hosts: Callable[..., Any]) -> None:
    host = hosts("a")
    first, second, other = host.open("soft0"), host.open("soft0"), host.open("soft1")
    again = hosts("a").open("soft0")
    faults.down("a/soft0")
    assert [device.event() for device in (first, second, again)] == ["PORT_ERR"] * 3
    assert other.event(0.05) is None


def test_commands_work_while_the_cable_is_out(hosts: Callable[..., Any]) -> None:
    """Everything but traffic: the NIC is there."""
    faults.register("a")
    faults.down("a/soft0")
    device = hosts("a").open("soft0")
    assert device.port()["state"] == "DOWN"
    one, two = device.endpoint(), device.endpoint()
    connect(one, two, timeout=8, retry_cnt=1)
    one.send("SEND", 1, 4)
    assert statuses(one.poll(1, 10)) == [(1, "RETRY_EXC_ERR")], "not even to itself"


def test_rails_are_apart(hosts: Callable[..., Any]) -> None:
    a, b = hosts("a"), hosts("b")
    pairs = []
    for device in ("soft0", "soft1"):
        left, right = a.open(device).endpoint(), b.open(device).endpoint()
        connect(left, right, timeout=10, retry_cnt=1)
        pairs.append((left, right))
    faults.down("a/soft0")
    (left0, _), (left1, _) = pairs
    left0.send("RDMA_WRITE", 1, 4), left1.send("RDMA_WRITE", 2, 4)
    assert statuses(left1.poll()) == [(2, "SUCCESS")]
    assert statuses(left0.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]


# -- switch --
def test_switch_swallows_packets_silently(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=3)
    faults.switch_down("rail0")
    left.send("RDMA_WRITE", 1, 4), right.send("RDMA_WRITE", 2, 4)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    assert statuses(right.poll(1, 10)) == [(2, "RETRY_EXC_ERR")]
    for side in (left, right):
        assert device_of(side).event(0.02) is None and device_of(side).port()["state"] == "ACTIVE"
    faults.switch_up("rail0")
    left.modify("RESET"), right.modify("RESET")
    connect(left, right)
    left.send("RDMA_WRITE", 3, 4)
    assert statuses(left.poll()) == [(3, "SUCCESS")]


# -- death --
@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
def test_what_was_completed_before_death_is_read_after_it(hosts: Callable[..., Any], extended: bool) -> None:
    """A CQ is memory: what the NIC wrote there stays. What it had not done is not in it, and comes no more."""
    near, far = hosts("a").open("soft0"), hosts("b").open("soft0")
    left, right = near.endpoint(extended=extended), far.endpoint()
    connect(left, right, rnr_retry=7, timeout=19)
    right.recv_many(3, 100)
    left.recv_many(5, 100, wr_id=20)
    left.send_many(3, op="SEND", length=100)
    assert len(right.poll(3)) == 3
    # Behind the acknowledgements of those three: when this is there, they are; and the NIC is done with it when it
    # carries out a command.
    right.pattern(7, 10)
    right.send("SEND", 9, 10)
    wait_until(lambda: left.matches(7, 10), what="the message")
    assert statuses(right.poll()) == [(9, "SUCCESS")] and left.state() == "RTS"
    left.send("SEND", 4, 100), left.send("RDMA_WRITE", 5, 100)  # nobody takes the first
    faults.kill("a/soft0")
    assert near.event() == "DEVICE_FATAL"
    left.send("RDMA_WRITE", 6, 100), left.recv(30, 100)
    read = left.poll_ex if extended else left.poll
    done = [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS"), (20, "SUCCESS")]
    assert statuses(read(5, 0.1)) == done and read(1, 0.05) == []


def test_death_is_at_once(hosts: Callable[..., Any]) -> None:
    """Also for work that is done without a packet coming back, and before the NIC's thread has heard."""
    host = hosts("a")
    for _ in range(20):
        near = host.open("soft0")
        sender = near.endpoint(kind="UD")
        sender.ud_ready()
        sender.send("SEND", 1, 8, to=sender.info())
        assert statuses(sender.poll()) == [(1, "SUCCESS")]
        sender.kill_and_send(5, op="SEND", length=8, to=sender.info())
        assert sender.poll(1, 0.01) == []
        assert near.event() == "DEVICE_FATAL"
        sender.close(), near.close()
        faults.revive("a/soft0")


def test_death(hosts: Callable[..., Any]) -> None:
    a, b = hosts("a"), hosts("b")
    near, far = a.open("soft0"), b.open("soft0")
    left, right = near.endpoint(channel=True), far.endpoint()
    connect(left, right, timeout=10, retry_cnt=2, rnr_retry=7)
    left.recv(5, 10)
    left.send("SEND", 1, 10)
    faults.kill("a/soft0")
    assert near.event() == "DEVICE_FATAL"
    assert left.poll(1, 0.05) == [], "a dead NIC completes nothing"
    for command in (
        lambda: near.port(),
        lambda: near.device_attr(),
        lambda: near.reg(64, "local_write"),
        lambda: near.endpoint(),
        lambda: left.modify("ERR"),
        lambda: left.state(),
    ):
        with pytest.raises(VerbsError) as failed:
            command()
        assert failed.value.errno == errno.EIO
    with pytest.raises(VerbsError):
        a.open("soft0")
    right.send("SEND", 2, 10)
    assert statuses(right.poll(1, 10)) == [(2, "RETRY_EXC_ERR")]
    # The other NIC of the host lives on, and everything can be closed.
    third, fourth = a.open("soft1").endpoint(), b.open("soft1").endpoint()
    connect(third, fourth)
    third.send("RDMA_WRITE", 3, 4)
    assert statuses(third.poll()) == [(3, "SUCCESS")]
    left.close(), near.close()
    faults.revive("a/soft0")
    fresh, peer = a.open("soft0").endpoint(), far.endpoint()
    connect(fresh, peer)
    fresh.send("RDMA_WRITE", 4, 4)
    assert statuses(fresh.poll()) == [(4, "SUCCESS")]


def test_death_wakes_who_waits(hosts: Callable[..., Any]) -> None:
    """Context of the dead device open at the revival stays dead."""
    a = hosts("a")
    old = a.open("soft0")
    faults.kill("a/soft0")
    assert old.event() == "DEVICE_FATAL" and old.event(0.02) is None
    faults.revive("a/soft0")
    with pytest.raises(VerbsError):
        old.port()


# -- lost packets --
def test_lost_request(pair: Pair) -> None:
    """A packet from the middle of a message is lost: sequence NAK, sent again, nothing wrong."""
    for opcode, op in (
        ("RC_SEND_MIDDLE", "SEND"),
        ("RC_WRITE_LAST", "RDMA_WRITE"),
        ("RC_SEND_FIRST", "SEND"),
    ):
        left, right = pair(mtu=256, timeout=15, retry_cnt=7)
        rule = faults.drop("a/soft0", direction="tx", opcode=opcode)
        left.pattern(1, 3000)
        right.recv(1, 3000)
        left.send(op, 1, 3000)
        assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")]
        assert right.matches(1, 3000) and faults.rule(rule).fired == 1
        if op == "SEND":
            assert statuses(right.poll()) == [(1, "SUCCESS")]
        faults.clear()


def test_lost_ack_does_not_repeat_a_send(pair: Pair) -> None:
    left, right = pair(mtu=256, timeout=15, retry_cnt=7)
    rule = faults.drop("a/soft0", direction="rx", opcode="ack", count=2)
    right.recv_many(3, 1000)
    left.send("SEND", 1, 1000)
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")]
    assert faults.rule(rule).fired == 2
    assert statuses(right.poll(3, 0.1)) == [(1, "SUCCESS")], "a duplicate takes no second receive"
    left.send("SEND", 2, 1000)
    assert statuses(left.poll(1, 10)) == [(2, "SUCCESS")] and statuses(right.poll()) == [(2, "SUCCESS")]


def test_lost_response_does_not_repeat_an_atomic(pair: Pair) -> None:
    left, right = pair(timeout=15, retry_cnt=7)
    rule = faults.drop("a/soft0", direction="rx", opcode="atomic_ack", count=3)
    for wr_id in range(4):
        left.send("ATOMIC_FETCH_AND_ADD", wr_id, 8, wr_id * 8, remote_offset=64, compare_add=10)
    assert statuses(left.poll(4, 10)) == [(i, "SUCCESS") for i in range(4)]
    assert faults.rule(rule).fired == 3
    assert [number(left, i * 8) for i in range(4)] == [0, 10, 20, 30] and number(right, 64) == 40


@pytest.mark.parametrize("which", [1, 2, 5])
def test_lost_read_response(pair: Pair, which: int) -> None:
    """First, middle and last response packets; the rest of a READ is asked for again."""
    left, right = pair(mtu=256, timeout=15, retry_cnt=7)
    faults.drop("a/soft0", direction="rx", opcode="read_response", nth=which)
    right.pattern(1, 1200)
    left.send("RDMA_READ", 1, 1200)
    left.send("RDMA_READ", 2, 1200, 2000)
    assert statuses(left.poll(2, 10)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert left.matches(1, 1200) and left.matches(1, 1200, 2000)


def test_lost_read_request(pair: Pair) -> None:
    left, right = pair(mtu=256, timeout=15, retry_cnt=7)
    faults.drop("a/soft0", direction="tx", opcode="read_request", count=2)
    right.pattern(1, 1200)
    left.send("RDMA_READ", 1, 1200)
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")] and left.matches(1, 1200)


def test_lost_nak_and_lost_rnr_nak(pair: Pair) -> None:
    """Both are asked for again by the retry timer."""
    left, right = pair(mtu=256, timeout=15, rnr_retry=7, min_rnr_timer=20, retry_cnt=7)
    first = faults.drop("a/soft0", direction="rx", opcode="rnr_nak")
    left.send("SEND", 1, 10)
    wait_until(lambda: faults.rule(first).fired, what="an RNR NAK is lost")
    right.recv(1, 10)
    assert statuses(left.poll(1, 10)) == [(1, "SUCCESS")] and statuses(right.poll()) == [(1, "SUCCESS")]
    second = faults.drop("a/soft0", direction="rx", opcode="nak")
    faults.drop("a/soft0", direction="tx", opcode="RC_SEND_FIRST")
    left.pattern(3, 2000)
    right.recv(2, 2000)
    left.send("SEND", 2, 2000)
    assert statuses(left.poll(1, 10)) == [(2, "SUCCESS")] and statuses(right.poll()) == [(2, "SUCCESS")]
    assert right.matches(3, 2000) and faults.rule(second).fired == 1


def test_random_loss(pair: Pair) -> None:
    """Three percent of everything lost, both ways: only slower."""
    for target in ("a/soft0", "b/soft0"):
        faults.register(target[0])
        faults.drop(target, probability=0.03, seed=4711, count=0, direction="rx")
    left, right = pair({"send_wr": 200, "recv_wr": 200}, mtu=256, timeout=15, retry_cnt=7)
    left.pattern(1, 20_000)
    right.pattern(2, 20_000, 30_000)
    right.recv_many(60, 2000)
    for wr_id in range(60):
        left.send("SEND", wr_id, 1777)
        left.send("RDMA_READ", 100 + wr_id, 1500, 40_000, remote_offset=30_000)
        left.send("ATOMIC_FETCH_AND_ADD", 200 + wr_id, 8, 50_000, remote_offset=60_000, compare_add=1)
    wanted = [(base + wr_id, "SUCCESS") for wr_id in range(60) for base in (0, 100, 200)]
    assert statuses(left.poll(180, 30)) == wanted
    received = right.poll(60)
    assert statuses(received) == [(i + 1, "SUCCESS") for i in range(60)]
    assert right.matches(1, 1777) and left.matches(2, 1500, 40_000) and number(right, 60_000) == 60
    assert sum(rule.fired for rule in faults.status().rules) > 10


def test_acknowledgement_lost_then_port_down(two: Pair) -> None:
    """The message arrived, its sender must believe it did not: what failover has to sort out."""
    left, right = two({"send_wr": 64}, timeout=10, retry_cnt=3)
    right.recv_many(10, 100)
    rule = faults.drop("a/soft0", direction="rx", opcode="ack", msn=3, then="down")
    for wr_id in range(1, 6):
        left.send("SEND", wr_id, 100)
    done = left.poll(5, 10)
    assert [wc["wr_id"] for wc in done] == [1, 2, 3, 4, 5]
    acknowledged = [wc["wr_id"] for wc in done if wc["status"] == "SUCCESS"]
    received = [wc["wr_id"] for wc in right.poll(5, 0.2)]
    assert acknowledged == list(range(1, len(acknowledged) + 1)) and len(acknowledged) < 3
    assert done[len(acknowledged)]["status"] == "RETRY_EXC_ERR"
    assert received == list(range(1, len(received) + 1)) and len(received) >= 3
    found = faults.rule(rule)
    assert found.fired == 1 and not faults.device("a/soft0").link_up
    assert device_of(left).event() == "PORT_ERR"
    assert time.monotonic_ns() - found.fired_ns < 20e9


def test_read_response_lost_then_port_down(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=3)
    right.pattern(1, 100)
    faults.drop("a/soft0", direction="rx", opcode="read_response", then="down")
    left.send("RDMA_READ", 1, 100)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    assert not left.matches(1, 100)


def test_other_side_goes_down_with_the_lost_packet(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=3)
    right.recv(1, 10)
    faults.drop("b/soft0", direction="tx", opcode="ack", then="down")
    left.send("SEND", 1, 10)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    assert statuses(right.poll()) == [(1, "SUCCESS")] and device_of(right).event() == "PORT_ERR"


def test_null_devices_complete_at_once(hosts: Callable[..., Any]) -> None:
    host = hosts("a", "null")
    assert host.call("host", "device_names")[:2] == ["soft0", "soft1"]
    device = host.open("soft0")
    one, two = device.endpoint(), device.endpoint()
    connect(one, two)
    two.recv(1, 10)
    for op in ("SEND", "RDMA_WRITE", "RDMA_READ"):
        one.send(op, 1, 10)
        assert statuses(one.poll(1, 1))[0] == (1, "SUCCESS")
    faults.down("a/soft0")
    assert device.event() == "PORT_ERR" and device.port()["state"] == "DOWN"
