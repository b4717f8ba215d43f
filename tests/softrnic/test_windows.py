# SPDX-License-Identifier: BSD-3-Clause
"""Memory windows: what a key opens, to whom, and until when."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from softrnic.hosts import Proxy, VerbsError, connect, statuses

Pair = Callable[..., tuple[Proxy, Proxy]]
RW = "remote_write remote_read"


def device_of(endpoint: Proxy) -> Proxy:
    """The device that the host opened first."""
    return Proxy(endpoint._host, "device1")


def write(left: Proxy, rkey: int, offset: int = 0, length: int = 8) -> str:
    left.send("RDMA_WRITE", 9, length, rkey=rkey, remote_offset=offset)
    return str(left.poll()[0]["status"])


def bound(right: Proxy, index: int, *args: object) -> int:
    rkey = right.bind(index, *args)
    assert [(wc["status"], wc["opcode"]) for wc in right.poll()] == [("SUCCESS", "BIND_MW")]
    return int(rkey)


def again(left: Proxy, right: Proxy) -> None:
    left.modify("RESET"), right.modify("RESET")
    connect(left, right)


@pytest.mark.parametrize("kind", [1, 2])
def test_a_window_opens_its_part(two: Pair, kind: int) -> None:
    left, right = two()
    rkey = bound(right, right.window(kind), 100, 50, RW)
    left.pattern(1, 50)
    assert write(left, rkey, 100, 50) == "SUCCESS" and right.matches(1, 50, 100)
    left.send("RDMA_READ", 2, 50, 200, rkey=rkey, remote_offset=100)
    assert statuses(left.poll()) == [(2, "SUCCESS")] and left.matches(1, 50, 200)
    for offset, length in ((99, 8), (143, 8), (100, 51)):
        assert write(left, rkey, offset, length) == "REM_ACCESS_ERR"
        again(left, right)
    left.send("ATOMIC_FETCH_AND_ADD", 3, 8, rkey=rkey, remote_offset=104, compare_add=1)
    assert statuses(left.poll()) == [(3, "REM_ACCESS_ERR")], "not among the window's rights"


def test_binding_again_changes_the_key(two: Pair) -> None:
    left, right = two()
    window = right.window(1)
    first = bound(right, window, 0, 100, RW)
    second = bound(right, window, 100, 100, RW)
    assert first != second and first >> 8 == second >> 8
    assert write(left, second, 100) == "SUCCESS"
    assert write(left, first, 0) == "REM_ACCESS_ERR"
    again(left, right)
    bound(right, window, 0, 0)
    assert write(left, second, 100) == "REM_ACCESS_ERR", "unbound"


def test_type_2_belongs_to_its_qp(two: Pair) -> None:
    left, right = two()
    other_left, other_right = device_of(left).endpoint(), device_of(right).endpoint()
    connect(other_left, other_right)
    second, first = right.window(2), right.window(1)
    rkey2, rkey1 = bound(right, second, 0, 100, RW), bound(right, first, 0, 100, RW)
    addr = right.info()["addr"]
    other_left.send("RDMA_WRITE", 1, 8, rkey=rkey1, remote_addr=addr)
    assert statuses(other_left.poll()) == [(1, "SUCCESS")], "type 1 belongs to its PD"
    other_left.send("RDMA_WRITE", 2, 8, rkey=rkey2, remote_addr=addr)
    assert statuses(other_left.poll()) == [(2, "REM_ACCESS_ERR")]
    assert write(left, rkey2) == "SUCCESS"


def test_local_invalidate(two: Pair) -> None:
    left, right = two()
    window = right.window(2)
    rkey = bound(right, window, 0, 100, RW)
    right.send("LOCAL_INV", 4, rkey=rkey)
    assert [(wc["wr_id"], wc["opcode"], wc["status"]) for wc in right.poll()] == [(4, "LOCAL_INV", "SUCCESS")]
    assert write(left, rkey) == "REM_ACCESS_ERR"
    again(left, right)
    if not right.windows_are_told():
        right.bind(window, 0, 100, RW)  # of the key that the window had at first: the NIC has no such window
        assert statuses(right.poll()) == [(1, "MW_BIND_ERR")]
        again(left, right)
        window = right.window(2)
    assert write(left, bound(right, window, 0, 100, RW)) == "SUCCESS"


def test_remote_invalidate(two: Pair) -> None:
    left, right = two()
    rkey = bound(right, right.window(2), 0, 100, RW)
    right.recv(5, 100, 1000)
    left.pattern(3, 100)
    left.send("SEND_WITH_INV", 1, 100, rkey=rkey)
    assert statuses(left.poll()) == [(1, "SUCCESS")]
    [wc] = right.poll()
    assert (wc["wr_id"], wc["status"], wc["imm"]) == (5, "SUCCESS", None) and wc["invalidated"] == rkey
    assert right.matches(3, 100, 1000)
    assert write(left, rkey) == "REM_ACCESS_ERR"


def test_invalidating_what_is_not_ones_own(two: Pair) -> None:
    left, right = two()
    right.recv(5, 100)
    left.send("SEND_WITH_INV", 1, 100, rkey=right.info()["rkey"])  # a region's key
    assert statuses(left.poll()) == [(1, "REM_ACCESS_ERR")]
    assert statuses(right.poll()) == [(5, "REM_INV_REQ_ERR")] and right.state() == "ERR"


def test_binds_are_in_order_with_what_is_around_them(two: Pair) -> None:
    """Behind a READ that takes its time, before the SEND that tells the key; completions in the order of posting."""
    left, right = two()
    window = right.window(2)
    left.recv_many(2, 10)
    right.send("RDMA_READ", 1, 30_000)
    rkey = right.bind(window, 0, 100, RW, wr_id=2)
    right.send("SEND", 3, 10)
    right.send("LOCAL_INV", 4, rkey=rkey)
    right.send("SEND", 5, 10)
    assert statuses(right.poll(5)) == [(i, "SUCCESS") for i in range(1, 6)]


@pytest.mark.parametrize("kind", [1, 2])
def test_failed_bind_fails_the_qp(two: Pair, kind: int) -> None:
    _left, right = two()
    right.send("RDMA_READ", 1, 100)
    right.bind(right.window(kind), 0, 1 << 17, RW, wr_id=2)  # more than the region
    right.send("SEND", 3, 10)
    assert statuses(right.poll(3)) == [(1, "SUCCESS"), (2, "MW_BIND_ERR"), (3, "WR_FLUSH_ERR")]


def test_a_region_with_windows_stays(two: Pair) -> None:
    left, right = two()
    window = right.window(2)
    rkey = bound(right, window, 0, 100, RW)
    with pytest.raises(VerbsError) as error:
        right.close_mr()
    assert error.value.errno == errno.EBUSY
    right.free_window(window)
    assert write(left, rkey) == "REM_ACCESS_ERR"
    right.close_mr()


def test_wrong_requests(two: Pair) -> None:
    _left, right = two()
    with pytest.raises(VerbsError) as error:
        right.window(3)
    assert error.value.errno == errno.EINVAL
    datagrams = device_of(right).endpoint(kind="UD")
    datagrams.ud_ready()
    with pytest.raises(VerbsError):
        datagrams.bind(datagrams.window(2), 0, 10, RW)
