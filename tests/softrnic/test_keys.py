# SPDX-License-Identifier: BSD-3-Clause
"""SOFTRNIC_KEYS: whose memory a key of a region that is gone means next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from softrnic.hosts import Proxy, connect, statuses

ALL = "local_write remote_write remote_read remote_atomic"


def pair_of(hosts: Callable[..., Any]) -> tuple[Proxy, Proxy, Proxy]:
    """Two connected endpoints, and the second one's device."""
    device = hosts("b").open("soft0")
    left, right = hosts("a").open("soft0").endpoint(), device.endpoint()
    connect(left, right)
    return left, right, device


def test_new_keys_each_time(hosts: Callable[..., Any]) -> None:
    left, right, device = pair_of(hosts)
    seen = set()
    for _ in range(50):
        region = device.reg(64, ALL)
        device.dereg(region["index"])
        seen.add(region["rkey"])
    assert len(seen) == 50
    again = device.reg(64, ALL)
    left.send("RDMA_WRITE", 1, 8, remote_addr=again["addr"], rkey=region["rkey"])
    assert statuses(left.poll()) == [(1, "REM_ACCESS_ERR")], "an old key is no key"


class TestReuse:
    """SOFTRNIC_KEYS=reuse."""

    @pytest.fixture
    def host_env(self) -> dict[str, str]:
        return {"SOFTRNIC_KEYS": "reuse"}

    def test_the_next_registration_has_the_key(self, hosts: Callable[..., Any]) -> None:
        left, right, device = pair_of(hosts)
        first, other = device.reg(64, ALL), device.reg(64, ALL)
        assert first["rkey"] != other["rkey"], "not while the region is there"
        device.dereg(first["index"])
        second = device.reg(128, ALL)
        assert (second["lkey"], second["rkey"]) == (first["lkey"], first["rkey"])
        # Whoever kept the key reaches the new region with it, and only that.
        left.send("RDMA_WRITE", 1, 8, remote_addr=second["addr"], rkey=first["rkey"])
        assert statuses(left.poll()) == [(1, "SUCCESS")]

    def test_last_out_first_in(self, hosts: Callable[..., Any]) -> None:
        device = hosts("a").open("soft0")
        regions = [device.reg(64, ALL) for _ in range(3)]
        for region in regions:
            device.dereg(region["index"])
        again = [device.reg(64, ALL)["lkey"] for _ in range(3)]
        assert again == [region["lkey"] for region in reversed(regions)]

    def test_local_keys_too(self, hosts: Callable[..., Any]) -> None:
        """A receive that was posted with a key lands where the key leads when the message comes."""
        left, right, device = pair_of(hosts)
        first = device.reg(4096, ALL)
        device.dereg(first["index"])
        second = device.reg(4096, ALL)
        base = right.numbers()["addr"]
        right.recv(1, sges=[[second["addr"] - base, 8]], lkey=first["lkey"])
        left.send("SEND", 1, 8)
        assert statuses(left.poll()) == [(1, "SUCCESS")] and statuses(right.poll()) == [(1, "SUCCESS")]
