# SPDX-License-Identifier: BSD-3-Clause
"""Devices on network interfaces, between two network namespaces: `ip link set down` is a pulled cable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from netns import Namespace, spaces_or_skip

from shiftverbs.softrnic import faults
from softrnic.hosts import Proxy, VerbsError, connect, statuses


@pytest.fixture
def spaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a cable: v0 with 10.77.0.1 in the one, v1 with 10.77.0.2 in the other."""
    with spaces_or_skip() as (one, two):
        one.ip(f"link add v0 type veth peer name v1 netns {two.holder.pid}")
        for space, device, address in ((one, "v0", "10.77.0.1/24"), (two, "v1", "10.77.0.2/24")):
            space.ip(f"addr add {address} dev {device}")
            space.ip(f"link set {device} up")
        one.wait_up("v0"), two.wait_up("v1")
        yield one, two


def test_cable_between_namespaces(hosts: Callable[..., Any], spaces: tuple[Namespace, Namespace]) -> None:
    one, two = spaces
    a = hosts("a", "soft0@netdev:v0", prefix=one.prefix)
    b = hosts("b", "soft0@netdev:v1", prefix=two.prefix)
    near, far = a.open("soft0"), b.open("soft0")
    assert near.gid().endswith("ffff:0a4d:0001") and far.gid().endswith("ffff:0a4d:0002")
    assert near.port()["active_mtu"] == 3, "1024 bytes fit into 1500"
    left, right = near.endpoint(), far.endpoint()
    connect(left, right, timeout=13, retry_cnt=6)  # the first packet waits for ARP
    left.pattern(1, 50_000)
    left.send("RDMA_WRITE", 1, 50_000)
    assert statuses(left.poll()) == [(1, "SUCCESS")] and right.matches(1, 50_000)

    # The far interface goes down: no carrier at the near one either.
    two.ip("link set v1 down")
    assert near.event() == "PORT_ERR" and far.event() == "PORT_ERR"
    assert near.port()["state"] == "DOWN" and far.port()["state"] == "DOWN"
    left.send("RDMA_WRITE", 2, 10)
    assert statuses(left.poll(1, 10)) == [(2, "RETRY_EXC_ERR")]
    two.ip("link set v1 up")
    assert near.event() == "PORT_ACTIVE" and far.event() == "PORT_ACTIVE"
    left.modify("RESET"), right.modify("RESET")
    connect(left, right)
    left.send("RDMA_WRITE", 3, 10)
    assert statuses(left.poll()) == [(3, "SUCCESS")]

    # The registry's cable works too, and both together are one cable.
    faults.down("a/soft0")
    assert near.event() == "PORT_ERR" and far.event(0.05) is None
    two.ip("link set v1 down")
    one.wait_up("v0", False)
    assert far.event() == "PORT_ERR" and near.event(0.05) is None
    faults.up("a/soft0")
    assert near.event(0.05) is None and near.port()["state"] == "DOWN"
    two.ip("link set v1 up")
    assert near.event() == "PORT_ACTIVE" and near.port()["state"] == "ACTIVE"


def test_each_process_needs_an_address(
    hosts: Callable[..., Any], spaces: tuple[Namespace, Namespace]
) -> None:
    one, _ = spaces
    first = hosts("a", "soft0@netdev:v0", prefix=one.prefix).open("soft0")
    second = hosts("a", "soft0@netdev:v0", prefix=one.prefix)
    with pytest.raises(VerbsError):
        second.open("soft0")
    assert "address 10.77.0.1 belongs to another process" in second.output()
    one.ip("addr add 10.77.0.9/24 dev v0")
    third = hosts("a", "soft0@netdev:v0/10.77.0.9", prefix=one.prefix).open("soft0")
    left, right = first.endpoint(), third.endpoint()
    connect(left, right)
    left.send("RDMA_WRITE", 1, 10)
    assert statuses(left.poll()) == [(1, "SUCCESS")]


def test_no_such_interface(hosts: Callable[..., Any]) -> None:
    host = hosts("a", "soft0@netdev:nope0;soft1@127.0.0.1")
    with pytest.raises(VerbsError):
        host.open("soft0")
    assert "nope0" in host.output()
    assert Proxy(host, host.open("soft1")._name).port()["state"] == "ACTIVE"
