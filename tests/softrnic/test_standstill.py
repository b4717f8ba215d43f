# SPDX-License-Identifier: BSD-3-Clause
"""A NIC that takes work and does none, and commands that do not return."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
FLUSHED = "WR_FLUSH_ERR"


def device_of(endpoint: Proxy) -> Proxy:
    """The device that the host opened first."""
    return Proxy(endpoint._host, "device1")


def background(call: Callable[[], Any]) -> Future[Any]:
    """Run a call that blocks in a thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- data path --
@pytest.mark.parametrize("where", ["a/soft0", "b/soft0"])
def test_stall_and_go_on(two: Pair, where: str) -> None:
    """Posts are accepted, nothing completes, no event tells; then all is done as if nothing had been."""
    left, right = two(timeout=20)
    faults.stall(where)
    assert faults.device(where).stalled
    left.pattern(1, 3000)
    right.recv_many(5, 3000)
    left.send_many(5, op="SEND", length=3000)
    assert left.poll(1, 0.3) == [] and right.poll(1, 0.1) == []
    stalled = left if where == "a/soft0" else right
    assert device_of(stalled).event(0) is None and device_of(stalled).port()["state"] == "ACTIVE"
    assert stalled.state() == "RTS", "commands work"
    faults.unstall(where)
    assert statuses(left.poll(5, 20)) == [(i, "SUCCESS") for i in range(1, 6)]
    assert statuses(right.poll(5, 20)) == [(i, "SUCCESS") for i in range(1, 6)]
    assert right.matches(1, 3000)


def test_the_peer_of_a_stalled_nic(two: Pair) -> None:
    left, right = two(timeout=10, retry_cnt=2)
    faults.stall("b/soft0")
    left.send("RDMA_WRITE", 1, 100)
    assert statuses(left.poll(1, 10)) == [(1, "RETRY_EXC_ERR")]
    assert right.state() == "RTS"


def test_stalled_nic_does_not_even_flush(two: Pair) -> None:
    left, right = two()
    right.recv_many(3, 100)
    faults.stall("b/soft0")
    right.modify("ERR")
    assert right.poll(1, 0.2) == [] and right.state() == "ERR"
    faults.clear()
    assert not faults.device("b/soft0").stalled
    assert statuses(right.poll(3)) == [(i, FLUSHED) for i in range(1, 4)]


def test_timers_stand_still(two: Pair) -> None:
    """A retry that would have been due waits for the NIC, and is made then."""
    left, _right = two(timeout=16, retry_cnt=1)  # 0.27 s
    faults.drop("a/soft0", direction="tx", opcode="write", count=2)
    left.send("RDMA_WRITE", 1, 100)
    faults.stall("a/soft0")
    assert left.poll(1, 1.0) == [], "both attempts would have failed by now"
    faults.clear("a/soft0", rules_only=True)
    faults.unstall("a/soft0")
    assert statuses(left.poll(1, 20)) == [(1, "SUCCESS")]


def test_null_device(hosts: Callable[..., Any]) -> None:
    endpoint = hosts("a", "null").open("soft0").endpoint()
    endpoint.connect(endpoint.info())
    faults.stall("a/soft0")
    endpoint.send("RDMA_WRITE", 1, 100)
    assert endpoint.poll(1, 0.1) == []
    faults.unstall("a/soft0")
    endpoint.send("RDMA_WRITE", 2, 100)
    assert statuses(endpoint.poll()) == [(2, "SUCCESS")]


# -- commands --
@pytest.mark.parametrize(
    "command",
    [
        lambda left: left.modify("ERR"),
        lambda left: left.state(),
        lambda left: device_of(left).port(),
        lambda left: device_of(left).reg(4096, "local_write")["index"],
        lambda left: device_of(left).endpoint()._name,
        lambda left: left.resize(600),
        lambda left: left.close(),
    ],
    ids=["modify_qp", "query_qp", "query_port", "reg_mr", "create", "resize_cq", "destroy"],
)
def test_hang(two: Pair, command: Callable[[Proxy], Any]) -> None:
    left, right = two()
    faults.hang("a/soft0")
    assert faults.device("a/soft0").commands_hang
    future = background(lambda: command(left))
    with pytest.raises(TimeoutError):
        future.result(0.2)
    right.send("RDMA_WRITE", 1, 100)
    assert statuses(right.poll()) == [(1, "SUCCESS")], "data moves"
    faults.unhang("a/soft0")
    future.result(20)


@pytest.mark.parametrize(
    "command",
    [lambda left: left.state(), lambda left: device_of(left).reg(4096, "local_write")["index"]],
    ids=["query_qp", "reg_mr"],
)
def test_slow(two: Pair, command: Callable[[Proxy], Any]) -> None:
    """A command of a slow NIC takes so long at least, and data moves meanwhile."""
    left, right = two()
    faults.slow("a/soft0", 0.5)
    assert faults.device("a/soft0").command_us == 500_000
    begun = time.monotonic()
    future = background(lambda: command(left))
    right.send("RDMA_WRITE", 1, 100)
    assert statuses(right.poll()) == [(1, "SUCCESS")], "data moves"
    future.result(20)
    assert time.monotonic() - begun >= 0.5
    faults.slow("a/soft0", 60)
    faults.clear("a/soft0")
    assert faults.device("a/soft0").command_us == 0
    background(lambda: command(left)).result(20)


@pytest.mark.parametrize("seconds", [-1, 61, float("nan"), float("inf")])
def test_no_such_time(network: object, seconds: float) -> None:
    faults.register("a")
    with pytest.raises(faults.FaultError, match="0 to 60"):
        faults.slow("a/soft0", seconds)
    with pytest.raises(faults.FaultError, match="soft9"):
        faults.slow("a/soft9", 1)


@pytest.mark.parametrize(
    "wait", [faults.hang, lambda target: faults.slow(target, 60)], ids=["hang", "a minute"]
)
def test_kill_ends_the_waiting(two: Pair, wait: Callable[[str], None]) -> None:
    left, _right = two()
    wait("a/soft0")
    future = background(lambda: left.modify("ERR"))
    with pytest.raises(TimeoutError):
        future.result(0.2)
    faults.kill("a/soft0")
    with pytest.raises(VerbsError) as error:
        future.result(20)
    assert error.value.errno == errno.EIO
