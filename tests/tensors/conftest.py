# SPDX-License-Identifier: BSD-3-Clause
"""Nodes as processes on hosts of the software network, on strings as those of the failover tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "failover"))

from hosts import Host, Network, faults_of, network_of  # noqa: E402

__all__ = ["faults_of", "network_of"]

END = str(HERE / "tensors_end.py")


@pytest.fixture
def end(network: Network) -> Callable[..., Host]:
    """end("a"): a process with what is in tensors_end.py, without a node yet."""

    def start(name: str, **env: str | None) -> Host:
        host = network.host(name, **env)
        # Not imported: what a test says is to see, and to set, the same names.
        host(f"exec(compile(open({END!r}).read(), {END!r}, 'exec'), globals())")
        return host

    return start


@pytest.fixture
def joined(end: Callable[..., Host]) -> Callable[..., tuple[Host, Host]]:
    """joined(): a publisher on host a and a puller on host b, connected; protected unless it is plain pyverbs."""

    def start(setup: str = "", **env: str | None) -> tuple[Host, Host]:
        a, b = end("a", **env), end("b", **env)
        address = a(f"serve({setup})")
        assert b(f"join({address!r})") == "pub"
        protected = "SHIFTVERBS_DISABLE" not in env
        assert [host("channel().wait_protected(20)") for host in (a, b)] == [protected] * 2
        return a, b

    return start
