# SPDX-License-Identifier: BSD-3-Clause
"""The GID table of a RoCE port: what it holds, and traffic by each of its entries."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any

import pytest

from softrnic.hosts import Proxy, VerbsError, connect, statuses

LINK_LOCAL_V1, LINK_LOCAL_V2, IPV4_V1, IPV4_V2 = range(4)
#: Next header of a GRH (IBA 8.3) and of an IPv6 header.
BTH, UDP = 0x1B, 17


def address(gid: str) -> ipaddress.IPv6Address:
    return ipaddress.IPv6Address(gid)


@pytest.fixture(params=range(4))
def index(request: pytest.FixtureRequest) -> int:
    """Each index of the table."""
    return int(request.param)


def test_table(hosts: Callable[..., Any]) -> None:
    """Link-local v1 and v2, IPv4 v1 and v2, as the kernel fills it; by every verb that reads it."""
    seen = set()
    for device in (hosts("a").open("soft0"), hosts("b").open("soft0"), hosts("a").open("soft1")):
        table = device.gid_table()
        assert [(i, kind) for i, _, kind in table] == [
            (LINK_LOCAL_V1, "RoCE v1"), (LINK_LOCAL_V2, "RoCE v2"), (IPV4_V1, "RoCE v1"), (IPV4_V2, "RoCE v2")
        ]  # fmt: skip
        gids = [address(gid) for _, gid, _ in table]
        assert gids[0] == gids[1] and gids[0].is_link_local and gids[2] == gids[3]
        ipv4 = gids[3].ipv4_mapped
        assert ipv4 is not None and ipv4.is_loopback
        # EUI-64 of the MAC address 02:00 and those four bytes (RFC 4291, appendix A).
        a, b, c, d = ipv4.packed
        assert gids[0].packed[8:] == bytes([0x00, 0x00, a, 0xFF, 0xFE, b, c, d])
        rows = device.gid_rows()
        types = {"RoCE v1": 1, "RoCE v2": 2}
        assert rows[:4] == [[gid, types[kind] - 1, [gid, types[kind]]] for _, gid, kind in table]
        assert len(rows) == device.port()["gid_tbl_len"] > 4
        assert all(address(gid) == address("::") and found is None for gid, _, found in rows[4:])
        seen |= set(gids)
    assert len(seen) == 6


def test_null_devices_have_no_ipv4_address(hosts: Callable[..., Any]) -> None:
    table = hosts("a", "null").open("soft0").gid_table()
    assert [(address(gid).is_link_local, kind) for _, gid, kind in table] == [
        (True, "RoCE v1"),
        (True, "RoCE v2"),
    ]


@pytest.mark.parametrize("kind", ["RC", "UC"])
def test_connections(hosts: Callable[..., Any], kind: str, index: int) -> None:
    left, right = (hosts(host).open("soft0", index).endpoint(kind=kind) for host in "ab")
    connect(left, right)
    for sender, receiver in ((left, right), (right, left)):
        sender.pattern(3, 3000)
        receiver.recv(1, 3000)
        sender.send("SEND", 2, 3000)
        assert statuses(receiver.poll()) == [(1, "SUCCESS")] and receiver.matches(3, 3000)
        assert statuses(sender.poll()) == [(2, "SUCCESS")]


@pytest.mark.parametrize(
    ("mine", "theirs"), [(IPV4_V1, IPV4_V2), (LINK_LOCAL_V1, LINK_LOCAL_V2), (LINK_LOCAL_V2, IPV4_V2)]
)
def test_indices_that_do_not_match(hosts: Callable[..., Any], mine: int, theirs: int) -> None:
    """RoCE v1, v2 over IPv6 and v2 over IPv4 are three protocols: no packet of one reaches a QP of another."""
    a, b = hosts("a").open("soft0", mine), hosts("b").open("soft0", theirs)
    left, right = a.endpoint(), b.endpoint()
    # Each by its own GID, to the other's of the same kind.
    left.connect({**right.info(), "gid": b.gid(mine)}, timeout=10, retry_cnt=1)
    right.connect({**left.info(), "gid": a.gid(theirs)}, timeout=10, retry_cnt=1)
    right.recv(1, 100)
    left.send("SEND", 2, 100)
    assert statuses(left.poll(timeout_s=20.0)) == [(2, "RETRY_EXC_ERR")]
    assert right.poll(1, 0.05) == [] and right.state() == "RTS"


@pytest.mark.parametrize("kind", ["RC", "UD"])
def test_addresses_that_an_index_does_not_reach(hosts: Callable[..., Any], kind: str) -> None:
    """As the kernel has it: no IPv4 peer from a link-local address, nor the other way round; no empty entry."""
    peer = hosts("b").open("soft0")
    host = hosts("a")
    for index, gid in (
        (LINK_LOCAL_V1, peer.gid(IPV4_V1)),
        (LINK_LOCAL_V2, peer.gid(IPV4_V2)),
        (IPV4_V1, peer.gid(LINK_LOCAL_V1)),
        (IPV4_V2, peer.gid(LINK_LOCAL_V2)),
        (LINK_LOCAL_V2, "fe80:0000:0000:0000:0202:c9ff:fe00:0001"),  # a NIC's that is not of this network
        (4, peer.gid(IPV4_V2)),
        (255, peer.gid(IPV4_V2)),
    ):
        endpoint = host.open("soft0", 0).endpoint(kind=kind)
        if kind == "UD":
            endpoint.ud_ready()
        with pytest.raises(VerbsError, match="Invalid argument"):
            endpoint.reach(index, gid)


def test_datagrams(hosts: Callable[..., Any], index: int) -> None:
    """The 40 bytes before a datagram have the header it came with, and an address handle of them leads back."""
    devices = [hosts(host).open("soft0", index) for host in "ab"]
    left, right = (device.endpoint(kind="UD") for device in devices)
    left.ud_ready(), right.ud_ready()
    source, target = (address(device.gid()) for device in devices)
    for size, op in ((100, "SEND"), (9, "SEND_WITH_IMM")):
        left.pattern(7, size)
        left.recv(1, size + 40, 8192)
        right.recv(1, size + 40)
        left.send(op, 2, size, to=right.info())
        assert statuses(left.poll()) == [(2, "SUCCESS")]
        answer = right.answer(size)
        assert answer["status"] == "SUCCESS" and answer["src_qp"] == left.info()["qpn"]
        # As mlx5: a GRH, IPv6, IPv4. UCX looks there for where the addresses are.
        assert answer["sl"] == {LINK_LOCAL_V2: 1, IPV4_V2: 2}.get(index, 0)
        header = bytes.fromhex(answer["header"])
        # BTH, DETH, immediate, payload, padding, ICRC
        length = 12 + 8 + 4 * (op == "SEND_WITH_IMM") + size + -size % 4 + 4
        if index == IPV4_V2:
            assert header[20] == 0x45 and header[29] == UDP
            assert int.from_bytes(header[22:24], "big") == length + 20 + 8
            assert (header[32:36], header[36:40]) == (source.packed[12:], target.packed[12:])
        else:
            v2 = index == LINK_LOCAL_V2
            assert header[0] >> 4 == 6 and header[6] == (UDP if v2 else BTH)
            assert int.from_bytes(header[4:6], "big") == length + 8 * v2
            assert (header[8:24], header[24:40]) == (source.packed, target.packed)
        [returned] = left.poll(timeout_s=20.0)
        assert (returned["wr_id"], returned["status"], returned["byte_len"]) == (1, "SUCCESS", size + 40)
        assert left.matches(7, size, 8192 + 40)


def test_datagrams_of_every_kind_reach_one_queue_pair(hosts: Callable[..., Any]) -> None:
    """A QP of datagrams is bound to no GID, and answers each by the one it came by."""
    right = hosts("b").open("soft0").endpoint(kind="UD")
    right.ud_ready()
    sender = hosts("a")
    for index in range(4):
        device = sender.open("soft0", index)
        left = device.endpoint(kind="UD")
        left.ud_ready()
        left.recv(1, 60)
        right.recv(1, 60)
        left.send("SEND", 2, 20, to={**right.info(), "gid": right.gid(index)})
        assert statuses(left.poll()) == [(2, "SUCCESS")]
        assert right.answer(20)["status"] == "SUCCESS"
        assert statuses(left.poll(timeout_s=20.0)) == [(1, "SUCCESS")]


def test_headers_that_lead_nowhere(hosts: Callable[..., Any]) -> None:
    """ibv_create_ah_from_wc of what no datagram had before it: refused."""
    device: Proxy = hosts("a").open("soft0")
    receiver = device.endpoint(kind="UD")
    receiver.ud_ready()
    receiver.recv(1, 60)
    receiver.send("SEND", 2, 20, to=receiver.info())
    receiver.poll(2)
    own, other = address(device.gid(IPV4_V1)).packed, address("::ffff:1.2.3.4").packed
    for header in (
        bytes(40),
        b"\x60" + bytes(5) + b"\x06\x40" + other + own,  # TCP
        b"\x60" + bytes(5) + b"\x1b\x40" + own + other,  # to somebody else
    ):
        with pytest.raises(VerbsError, match="Failed to create AH"):
            receiver.handle_of(header.hex())
    assert receiver.handle_of((b"\x60" + bytes(5) + b"\x1b\x40" + other + own).hex())
