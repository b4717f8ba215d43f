# SPDX-License-Identifier: BSD-3-Clause
"""Registered memory that the program took away: the process lives, and the work that needed it fails.

A NIC with pinned pages would not notice. Ours reaches memory as the program does, so that what is unmapped or protected
is an access error: of the requester's own memory LOC_PROT_ERR, of the responder's REM_ACCESS_ERR (of a receive's
REM_OP_ERR).
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
from harness import wait_until

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, connect, statuses

Hosts = Callable[..., Any]
ALL = "local_write remote_write remote_read remote_atomic mw_bind"
PAGE = 4096
FLUSHED = "WR_FLUSH_ERR"
# What becomes of a region of two pages.
GONE = ["unmapped", "second page unmapped", "no access"]


class Ends:
    """Two connected endpoints of hosts a and b, with a region of two pages at each."""

    def __init__(self, hosts: Hosts, kind: str = "RC", srq: bool = False, **attributes: Any) -> None:
        self.near, self.far = hosts("a").open("soft0"), hosts("b").open("soft0")
        self.srq = self.far.srq() if srq else None
        self.left = self.near.endpoint(kind=kind)
        self.right = self.far.endpoint(kind=kind, srq=self.srq)
        if kind == "UD":
            self.left.ud_ready(), self.right.ud_ready()
        else:
            connect(self.left, self.right, mtu=1024, **{"timeout": 16, **attributes})
        self.mine, self.theirs = self.near.reg_pages(2, ALL), self.far.reg_pages(2, ALL)

    def local(self, length: int = 2 * PAGE, offset: int = 0) -> dict[str, Any]:
        """For Endpoint.send: from or to a's region."""
        return sge(self.left, self.mine, length, offset)

    def remote(self, offset: int = 0) -> dict[str, Any]:
        """For Endpoint.send: b's region."""
        return {"rkey": self.theirs["rkey"], "remote_addr": self.theirs["addr"] + offset}

    def check_usable(self) -> None:
        """What is left works like new."""
        self.left.modify("RESET"), self.right.modify("RESET")
        connect(self.left, self.right)
        self.left.poll(100, 0.01)
        self.left.pattern(3, 5000)
        self.left.send("RDMA_WRITE", 77, 5000)
        assert statuses(self.left.poll()) == [(77, "SUCCESS")]
        # A UC WRITE has succeeded when it is sent.
        wait_until(lambda: self.right.matches(3, 5000), what="what was written is there")


def sge(endpoint: Proxy, region: dict[str, int], length: int, offset: int = 0) -> dict[str, Any]:
    """A region as the sges and lkey of Endpoint.send and recv."""
    return {"sges": [[region["addr"] + offset - endpoint.numbers()["addr"], length]], "lkey": region["lkey"]}


def take_away(device: Proxy, region: dict[str, int], how: str) -> None:
    if how == "unmapped":
        device.unmap(region["addr"], region["size"])
    elif how == "second page unmapped":
        device.unmap(region["addr"] + PAGE, PAGE)
    elif how == "no access":
        device.protect(region["addr"], region["size"], "none")
    else:
        device.protect(region["addr"], region["size"], "read")


@pytest.mark.parametrize("op", ["RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "RDMA_READ"])
@pytest.mark.parametrize("how", GONE)
def test_remote_memory(hosts: Hosts, how: str, op: str) -> None:
    """The responder refuses, and its program hears of it."""
    ends = Ends(hosts)
    ends.right.recv(5, 8)
    take_away(ends.far, ends.theirs, how)
    ends.left.send("RDMA_WRITE", 1, 8)
    ends.left.send(op, 2, 2 * PAGE, **ends.remote())
    ends.left.send("SEND", 3, 8)
    assert statuses(ends.left.poll(3)) == [(1, "SUCCESS"), (2, "REM_ACCESS_ERR"), (3, FLUSHED)]
    assert ends.far.event() == "QP_ACCESS_ERR" and ends.right.state() == "ERR"
    assert statuses(ends.right.poll()) == [(5, FLUSHED)]
    if op == "RDMA_READ" and how == "second page unmapped":
        assert ends.left.get(PAGE) == "aa" * PAGE, "what was there has come"
    ends.check_usable()


@pytest.mark.parametrize("op", ["ATOMIC_FETCH_AND_ADD", "ATOMIC_CMP_AND_SWP"])
@pytest.mark.parametrize("how", ["unmapped", "no access", "read only"])
def test_remote_atomic(hosts: Hosts, how: str, op: str) -> None:
    ends = Ends(hosts)
    take_away(ends.far, ends.theirs, how)
    ends.left.put("55" * 8)
    ends.left.send(op, 2, 8, compare_add=0xAAAAAAAAAAAAAAAA, swap=1, **ends.remote())
    assert statuses(ends.left.poll()) == [(2, "REM_ACCESS_ERR")]
    assert ends.far.event() == "QP_ACCESS_ERR" and ends.left.get(8) == "55" * 8
    ends.check_usable()


def test_read_only_memory(hosts: Hosts) -> None:
    """It can be read, here and there; what would change it fails."""
    ends = Ends(hosts)
    take_away(ends.near, ends.mine, "read only"), take_away(ends.far, ends.theirs, "read only")
    ends.left.send("RDMA_WRITE", 1, **ends.local())
    ends.left.send("RDMA_READ", 2, 2 * PAGE, **ends.remote())
    ends.left.send("RDMA_WRITE", 3, 8, **ends.remote())
    assert statuses(ends.left.poll(3)) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "REM_ACCESS_ERR")]
    assert ends.left.get(2 * PAGE) == ends.right.get(2 * PAGE) == "aa" * 2 * PAGE
    assert ends.far.peek(ends.theirs["addr"], 8) == "aa" * 8
    ends.check_usable()
    ends.left.send("RDMA_READ", 4, **ends.local())
    assert statuses(ends.left.poll()) == [(4, "LOC_PROT_ERR")]


@pytest.mark.parametrize("op", ["SEND", "RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD"])
@pytest.mark.parametrize("how", ["unmapped", "no access"])
def test_local_memory(hosts: Hosts, how: str, op: str) -> None:
    """What is sent is not there, or there is no place for the answer."""
    ends = Ends(hosts)
    ends.right.recv(5, 4 * PAGE)
    take_away(ends.near, ends.mine, how)
    ends.left.send("RDMA_WRITE", 1, 8)
    ends.left.send(op, 2, **ends.local(8 if op.startswith("ATOMIC") else 2 * PAGE))
    ends.left.send("SEND", 3, 8)
    assert statuses(ends.left.poll(3)) == [(1, "SUCCESS"), (2, "LOC_PROT_ERR"), (3, FLUSHED)]
    assert ends.left.state() == "ERR" and ends.right.state() == "RTS", "the peer is not to blame"
    ends.check_usable()


@pytest.mark.parametrize("op", ["SEND", "RDMA_WRITE", "RDMA_READ"])
def test_local_memory_ends_within_the_message(hosts: Hosts, op: str) -> None:
    """The first page goes over, then the WR fails; scattered SGEs behind it make no difference."""
    ends = Ends(hosts)
    ends.right.recv(5, 4 * PAGE)
    take_away(ends.near, ends.mine, "second page unmapped")
    whole = ends.local()
    pieces = [[0, 100], whole["sges"][0]]
    good = ends.near.reg_pages(1, ALL)
    ends.left.send("RDMA_WRITE", 1, **sge(ends.left, good, PAGE))
    ends.left.send(op, 2, sges=whole["sges"] if op != "RDMA_READ" else pieces[1:], lkey=whole["lkey"])
    assert statuses(ends.left.poll(2)) == [(1, "SUCCESS"), (2, "LOC_PROT_ERR")]
    if op == "RDMA_READ":
        assert ends.near.peek(ends.mine["addr"], PAGE) == ends.right.get(PAGE)
    ends.check_usable()


def test_sent_again(hosts: Hosts) -> None:
    """The memory was there for the first attempt, and not for the second."""
    ends = Ends(hosts, retry_cnt=7)
    faults.switch_down("rail0")
    ends.left.send("RDMA_WRITE", 1, **ends.local())
    assert ends.left.poll(1, 0.01) == []
    take_away(ends.near, ends.mine, "unmapped")
    faults.clear()
    assert statuses(ends.left.poll(1, 20)) == [(1, "LOC_PROT_ERR")]
    ends.check_usable()


def test_answered_again(hosts: Hosts) -> None:
    """A READ whose answer was lost is asked for again when its memory is gone."""
    ends = Ends(hosts, retry_cnt=7)
    rule = faults.drop("b/soft0", direction="tx", opcode="read_response", count=8, then="switch-down")
    ends.left.send("RDMA_READ", 1, 2 * PAGE, **ends.remote())
    wait_until(lambda: faults.rule(rule).fired == 8, what="the answer is lost")
    assert ends.left.poll(1, 0.01) == []
    take_away(ends.far, ends.theirs, "unmapped")
    faults.clear()
    assert statuses(ends.left.poll(1, 20)) == [(1, "REM_ACCESS_ERR")]
    ends.check_usable()


@pytest.mark.parametrize("how", GONE)
@pytest.mark.parametrize("srq", [False, True], ids=["own queue", "shared queue"])
def test_receive(hosts: Hosts, srq: bool, how: str) -> None:
    ends = Ends(hosts, srq=srq)
    if ends.srq is not None:
        # A shared queue's WRs are posted with its own region's key; here all of it is the one that goes.
        size = 2 * PAGE
        ends.srq.recv_at(5, ends.theirs["addr"], size, ends.theirs["lkey"])
    else:
        ends.right.recv(5, **sge(ends.right, ends.theirs, 2 * PAGE))
    take_away(ends.far, ends.theirs, how)
    ends.left.send("SEND", 2, 2 * PAGE)
    assert statuses(ends.left.poll()) == [(2, "REM_OP_ERR")]
    assert statuses(ends.right.poll()) == [(5, "LOC_PROT_ERR")] and ends.right.state() == "ERR"
    ends.check_usable()


def test_window(hosts: Hosts) -> None:
    """A key of a window leads to the same memory."""
    ends = Ends(hosts)
    window = ends.right.window(1)
    rkey = ends.right.bind_region(window, ends.theirs["index"], PAGE, 100, "remote_write remote_read")
    assert ends.right.poll()[0]["status"] == "SUCCESS"
    take_away(ends.far, ends.theirs, "second page unmapped")
    ends.left.send("RDMA_WRITE", 2, 8, rkey=rkey, remote_addr=ends.theirs["addr"] + PAGE)
    assert statuses(ends.left.poll()) == [(2, "REM_ACCESS_ERR")]
    ends.check_usable()


def test_unreliable_connection(hosts: Hosts) -> None:
    """The sender hears of its own memory, and of nothing else."""
    ends = Ends(hosts, kind="UC")
    ends.right.recv(5, **sge(ends.right, ends.theirs, 2 * PAGE))
    take_away(ends.far, ends.theirs, "second page unmapped"), take_away(ends.near, ends.mine, "unmapped")
    ends.left.send("RDMA_WRITE", 1, 2 * PAGE, **ends.remote())
    ends.left.send("SEND", 2, 2 * PAGE)
    assert statuses(ends.left.poll(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert statuses(ends.right.poll()) == [(5, "LOC_PROT_ERR")] and ends.right.state() == "ERR"
    ends.left.send("SEND", 3, **ends.local())
    assert statuses(ends.left.poll()) == [(3, "LOC_PROT_ERR")] and ends.left.state() == "ERR"
    ends.check_usable()


@pytest.mark.parametrize("offset", [PAGE - 20, PAGE - 60], ids=["in the GRH", "in the data"])
def test_datagram(hosts: Hosts, offset: int) -> None:
    ends = Ends(hosts, kind="UD")
    ends.right.recv(5, **sge(ends.right, ends.theirs, 1000, offset))
    take_away(ends.far, ends.theirs, "second page unmapped"), take_away(ends.near, ends.mine, "unmapped")
    ends.left.send("SEND", 2, 900, to=ends.right.info())
    assert statuses(ends.left.poll()) == [(2, "SUCCESS")]
    assert statuses(ends.right.poll()) == [(5, "LOC_PROT_ERR")] and ends.right.state() == "ERR"
    ends.left.send("SEND", 3, to=ends.right.info(), **ends.local(100))
    assert statuses(ends.left.poll()) == [(3, "LOC_PROT_ERR")]


def test_late_packet(hosts: Hosts) -> None:
    """A packet that a fault held back finds its memory gone."""
    ends = Ends(hosts, timeout=19)
    faults.delay("b/soft0", 0.2, direction="rx", opcode="write")
    ends.left.send("RDMA_WRITE", 1, 100, **ends.remote())
    assert ends.left.poll(1, 0.01) == []
    take_away(ends.far, ends.theirs, "unmapped")
    assert statuses(ends.left.poll(1, 10)) == [(1, "REM_ACCESS_ERR")]
    ends.check_usable()


@pytest.mark.parametrize("op", ["RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD", "SEND"])
@pytest.mark.parametrize("side", ["near", "far"])
def test_memory_comes_and_goes(hosts: Hosts, side: str, op: str) -> None:
    """While it is being used: each WR is done whole or fails, and nobody dies of it."""
    ends = Ends(hosts)
    device, region = (ends.near, ends.mine) if side == "near" else (ends.far, ends.theirs)
    length = 8 if op.startswith("ATOMIC") else 2 * PAGE
    where = ends.local(length) if side == "near" else {} if op == "SEND" else ends.remote()
    failure = "LOC_PROT_ERR" if side == "near" else "REM_OP_ERR" if op == "SEND" else "REM_ACCESS_ERR"
    seen = {"SUCCESS": 0, failure: 0}
    device.flicker(region["addr"], region["size"])
    try:
        for turn in range(3000):
            if op == "SEND":
                ends.right.recv(5, length, **(sge(ends.right, region, length) if side == "far" else {}))
            ends.left.send(op, turn, length, **where)
            [(_, status)] = statuses(ends.left.poll())
            seen[status] += 1
            if status == failure:
                ends.left.modify("RESET"), ends.right.modify("RESET")
                connect(ends.left, ends.right, mtu=1024)
            if min(seen.values()) >= 10:
                break
    finally:
        device.steady()
    assert min(seen.values()) >= 10, seen
    ends.check_usable()


def test_files_may_not_grow(hosts: Hosts) -> None:
    """A limit of the program's own on its files is none on what a NIC sends."""
    hosts("c").open("soft0")  # what all hosts share is a file

    def limited(host: str) -> Any:
        process = hosts(host)
        limit_files(process)
        return process

    ends = Ends(limited)
    check_copies(ends)
    take_away(ends.near, ends.mine, "second page unmapped"), take_away(ends.far, ends.theirs, "read only")
    before = ends.far.peek(ends.theirs["addr"], 2 * PAGE)
    for turn, (op, status, where) in enumerate([
        ("SEND", "LOC_PROT_ERR", ends.local()),
        ("RDMA_WRITE", "REM_ACCESS_ERR", ends.remote()),
        ("ATOMIC_FETCH_AND_ADD", "REM_ACCESS_ERR", ends.remote()),
    ]):  # fmt: skip
        ends.right.recv(5, 8)
        ends.left.send(op, turn, 8 if op.startswith("ATOMIC") else 2 * PAGE, **where)
        assert statuses(ends.left.poll()) == [(turn, status)]
        assert ends.far.peek(ends.theirs["addr"], 2 * PAGE) == before
        ends.check_usable()


def test_files_may_not_grow_any_more(hosts: Hosts) -> None:
    """The limit came when the NIC was open already; as long as the program lives with such limits, the NIC does."""
    ends = Ends(hosts)
    for device in (ends.near, ends.far):
        limit_files(device._host)
    check_copies(ends)


def limit_files(process: Any) -> None:
    """No file of this process may grow from now on."""
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def check_copies(ends: Ends) -> None:
    """To the peer's memory and back; one packet and many, of one piece and several."""
    ends.left.pattern(4, 5000)
    ends.right.recv(9, 5000)
    ends.left.send("SEND", 1, 5000, sges=[[0, 1001], [1001, 1], [1002, 3998]])
    assert statuses(ends.left.poll()) == [(1, "SUCCESS")] and statuses(ends.right.poll()) == [(9, "SUCCESS")]
    assert ends.right.matches(4, 5000)
    ends.left.send("RDMA_WRITE", 2, 5000, **ends.remote(3))
    ends.left.send("RDMA_READ", 3, 2 * PAGE, **ends.remote())
    assert statuses(ends.left.poll(2)) == [(2, "SUCCESS"), (3, "SUCCESS")]
    assert ends.left.get(3) == "aa" * 3 and ends.far.peek(ends.theirs["addr"] + 5003, 8) == "aa" * 8
    ends.left.send("ATOMIC_FETCH_AND_ADD", 4, 8, compare_add=1, **ends.remote(PAGE + 1024))
    assert statuses(ends.left.poll()) == [(4, "SUCCESS")]
    assert (
        ends.left.get(8) == "aa" * 8
        and ends.far.peek(ends.theirs["addr"] + PAGE + 1024, 8) == "ab" + "aa" * 7
    )
