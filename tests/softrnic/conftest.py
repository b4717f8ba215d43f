# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for tests that drive software NICs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from softrnic.hosts import HostProcess, Proxy, connect


@pytest.fixture
def network(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own network; faults given in this process act on it."""
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))
    return softrnic_dir


@pytest.fixture
def host_env() -> dict[str, str]:
    """What processes of hosts have in their environment beyond the usual; a module may override it."""
    return {}


@pytest.fixture
def hosts(network: Path, tmp_path: Path, host_env: dict[str, str]) -> Iterator[Callable[..., HostProcess]]:
    """Start processes of hosts: `hosts("a")`. At the end each must still be alive and end in an orderly way."""
    started: list[HostProcess] = []

    def start(host: str = "a", softrnic: str = "1", prefix: Sequence[str] = ()) -> HostProcess:
        started.append(HostProcess(network, host, softrnic, env=host_env, log=tmp_path, prefix=prefix))
        return started[-1]

    try:
        yield start
        for process in started:
            if process.process.poll() is None:
                process.end()
    finally:
        for process in started:
            process.kill()


@pytest.fixture(params=["one process", "two processes"])
def pair(
    request: pytest.FixtureRequest, hosts: Callable[..., HostProcess]
) -> Callable[..., tuple[Proxy, Proxy]]:
    """Two connected RC endpoints on soft0: `pair(mtu=256)`; within one process, and of two hosts."""

    def make(endpoint: dict[str, Any] | None = None, **kw: Any) -> tuple[Proxy, Proxy]:
        first = hosts("a").open("soft0")
        second = first if request.param == "one process" else hosts("b").open("soft0")
        left, right = first.endpoint(**(endpoint or {})), second.endpoint(**(endpoint or {}))
        connect(left, right, **kw)
        return left, right

    return make


@pytest.fixture
def two(hosts: Callable[..., HostProcess]) -> Callable[..., tuple[Proxy, Proxy]]:
    """As pair, only between two hosts a and b."""

    def make(endpoint: dict[str, Any] | None = None, **kw: Any) -> tuple[Proxy, Proxy]:
        left = hosts("a").open("soft0").endpoint(**(endpoint or {}))
        right = hosts("b").open("soft0").endpoint(**(endpoint or {}))
        connect(left, right, **kw)
        return left, right

    return make
