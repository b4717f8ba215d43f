# SPDX-License-Identifier: BSD-3-Clause
"""UD: datagrams, the GRH in front of them, Q_Keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, statuses


@pytest.fixture(params=["one process", "two processes"])
def ends(request: pytest.FixtureRequest, hosts: Callable[..., Any]) -> tuple[Proxy, Proxy]:
    """Two UD endpoints on soft0."""
    first = hosts("a").open("soft0")
    second = first if request.param == "one process" else hosts("b").open("soft0")
    left, right = first.endpoint(kind="UD"), second.endpoint(kind="UD")
    left.ud_ready(), right.ud_ready()
    return left, right


def ipv4(gid: str) -> bytes:
    """The address in an IPv4-mapped GID."""
    return ipaddress.IPv6Address(int(gid.replace(":", ""), 16)).packed[12:]


def test_datagram(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    for seed, size in enumerate((0, 1, 5, 100, 1024, 4096)):
        left.pattern(seed, size)
        right.recv(seed, size + 40)
        left.send("SEND", 7, size, to=right.info())
        assert statuses(left.poll()) == [(7, "SUCCESS")]
        [received] = right.poll()
        assert (received["status"], received["opcode"], received["byte_len"]) == (
            "SUCCESS",
            "RECV",
            size + 40,
        )
        assert received["grh"] and received["src_qp"] == left.info()["qpn"]
        assert right.matches(seed, size, 40)
        header = bytes.fromhex(right.get(40))
        assert header[20] == 0x45 and header[32:36] == ipv4(left.info()["gid"])
        assert header[36:40] == ipv4(right.info()["gid"])


def test_immediate(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    right.recv(1, 140)
    left.send("SEND_WITH_IMM", 7, 100, imm=77, to=right.info())
    assert statuses(left.poll()) == [(7, "SUCCESS")]
    [received] = right.poll()
    assert received["imm"] == 77 and received["byte_len"] == 140


def test_both_ways_and_to_itself(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    for sender, receiver in ((left, right), (right, left), (left, left)):
        receiver.recv(1, 50)
        sender.send("SEND", 2, 10, to=receiver.info(), flags="")
        assert statuses(receiver.poll()) == [(1, "SUCCESS")]


def test_wrong_qkey_is_dropped(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    right.recv(1, 140)
    left.send("SEND", 7, 100, to=right.info(), qkey=0x4321)
    assert statuses(left.poll()) == [(7, "SUCCESS")], "a sender of datagrams learns nothing"
    assert right.poll(1, 0.1) == []
    left.send("SEND", 8, 100, to=right.info())
    assert statuses(right.poll()) == [(1, "SUCCESS")]


def test_controlled_qkey(ends: tuple[Proxy, Proxy]) -> None:
    """A Q_Key with its top bit set in the WR stands for the queue pair's own (IBA 10.2.5)."""
    left, right = ends
    right.recv(1, 140)
    left.send("SEND", 7, 100, to=right.info(), qkey=0x80000000)
    assert statuses(right.poll()) == [(1, "SUCCESS")]


def test_no_receive_and_nobody_there(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    left.send("SEND", 1, 10, to=right.info())
    left.send("SEND", 2, 10, to={**right.info(), "qpn": 0xFFFFF0})
    left.send("SEND", 3, 10, to={**right.info(), "gid": "0000:0000:0000:0000:0000:ffff:7f20:4040"})
    assert statuses(left.poll(3)) == [(1, "SUCCESS"), (2, "SUCCESS"), (3, "SUCCESS")]
    right.recv(9, 100)
    left.send("SEND", 4, 10, to=right.info())
    assert statuses(left.poll()) == [(4, "SUCCESS")] and statuses(right.poll()) == [(9, "SUCCESS")]


def test_too_long(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    right.recv(1, 8000)
    try:
        left.send("SEND", 1, 4097, to=right.info())
    except VerbsError:
        pass  # refused at once, or with a completion
    else:
        assert statuses(left.poll()) == [(1, "LOC_LEN_ERR")]
    assert right.poll(1, 0.05) == []


def test_receive_too_small(ends: tuple[Proxy, Proxy]) -> None:
    """A datagram that does not fit is dropped (IBA 9.9.3, class D) and the queue pair goes on."""
    left, right = ends
    right.recv(1, 50)
    left.send("SEND", 7, 100, to=right.info())
    assert statuses(left.poll()) == [(7, "SUCCESS")]
    assert right.poll(1, 0.05) == []
    left.send("SEND", 8, 10, to=right.info())
    [done] = right.poll()
    assert (done["wr_id"], done["status"], done["byte_len"]) == (1, "SUCCESS", 50)


def test_cable(ends: tuple[Proxy, Proxy]) -> None:
    left, right = ends
    right.recv(1, 140)
    faults.down("a/soft0")
    left.send("SEND", 1, 100, to=right.info())
    assert statuses(left.poll()) == [(1, "SUCCESS")] and right.poll(1, 0.05) == []
    faults.up("a/soft0")
    rule = faults.drop("a/soft0", direction="tx", opcode="ud")
    left.send("SEND", 2, 100, to=right.info()), left.send("SEND", 3, 50, to=right.info())
    [received] = right.poll()
    assert received["byte_len"] == 90 and faults.rule(rule).fired == 1


def test_flush(ends: tuple[Proxy, Proxy]) -> None:
    left, _ = ends
    for wr_id in range(3):
        left.recv(wr_id, 100)
    left.modify("ERR")
    assert statuses(left.poll(3)) == [(i, "WR_FLUSH_ERR") for i in range(3)]
    left.modify("RESET")
    left.ud_ready()
    left.recv(1, 100)
    left.send("SEND", 2, 10, to=left.info())
    assert sorted(statuses(left.poll(2))) == [(1, "SUCCESS"), (2, "SUCCESS")]
