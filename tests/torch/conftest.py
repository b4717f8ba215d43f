# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as processes on hosts of the software network, each on strings as those of the failover tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Child, EtcdServer, child_env, python_args
from ranks_env import ENV

sys.path.insert(0, str(Path(__file__).parents[1] / "failover"))

from hosts import PUPPET, Host, HostError, Network, faults_of, network_of

__all__ = ["faults_of", "network_of"]


def has_torch() -> bool:
    """Whether torch is there: this folder, which has its name, does not count."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None


@pytest.fixture(scope="session")
def needs_torch() -> None:
    """Skips where there is no torch."""
    if not has_torch():
        pytest.skip("torch is not there: apt-get install python3-torch libopenblas0-pthread")


class Ranks:
    """Some hosts that do the same at the same time."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts

    def __call__(self, source: str, timeout_s: float = 60.0) -> list[Any]:
        """Have all run source; the values."""
        self.begin(source)
        return self.end(timeout_s)

    def begin(self, source: str) -> None:
        """Have all begin."""
        for host in self.hosts:
            host.begin(source)

    def end(self, timeout_s: float = 60.0) -> list[Any]:
        """The values of what they began."""
        values, errors = [], []
        for host in self.hosts:
            try:
                values.append(host.end(timeout_s))
            except HostError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return values


def start_ranks(start: Callable[[str], Host], count: int, what: str, directory: Path) -> Ranks:
    """Processes on hosts a, b, …; what: the module of this folder, whose start(rank, count, directory) they call."""
    ranks = Ranks([start("abcd"[rank]) for rank in range(count)])
    for rank, host in enumerate(ranks.hosts):
        host.begin(f"import {what}; {what}.start({rank}, {count}, {str(directory)!r}); from {what} import *")
    ranks.end()
    return ranks


@pytest.fixture
def ranks(network: Network, tmp_path: Path) -> Callable[..., Ranks]:
    """ranks(count, what, **env): processes of this test's own, on two rails and protected."""

    def make(count: int, what: str, **env: str | None) -> Ranks:
        return start_ranks(lambda name: network.host(name, **ENV, **env), count, what, tmp_path)

    return make


@pytest.fixture(scope="module")
def four_ranks(needs_torch: None, shared_etcd: EtcdServer) -> Iterator[Ranks]:
    """Four ranks with a process group, for all tests of a module; none of them may break it."""
    directory = Path(tempfile.mkdtemp(prefix="sv-torch-"))
    env = {
        "SHIFTVERBS_ETCD": shared_etcd.endpoint,
        "SHIFTVERBS_JOB": f"torch-{os.getpid()}",
    }
    children: list[Child] = []

    def start(name: str) -> Host:
        command = python_args(PUPPET, "shiftverbs")
        children.append(Child(command, child_env(directory, name, "2", {**env, **ENV}), f"host {name}"))
        return Host(children[-1])

    try:
        yield start_ranks(start, 4, "rank", directory)
    finally:
        for child in children:
            child.close()
        shutil.rmtree(directory, ignore_errors=True)
