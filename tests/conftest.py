# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures shared by all tests. The tools behind them are in harness.py."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import Child, EtcdServer, Spawn, child_env, python_args
from hypothesis import settings

# The same examples on every run, so that a red run can be repeated.
# `HYPOTHESIS_PROFILE=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# What wants a core, and what is patient: no deadline in it is one that another process could make it miss. Where pytest
# runs in two processes (pytest-xdist's -n 2) one has these and the other all the rest: hosts, brokers and deadlines,
# one after the other.
BESIDE = tuple(
    f"tests/{name}"
    for name in (
        "benchmarks/", "checkpoint/", "core/test_instructions.py", "core/test_sanitized.py", "fuzz/", "model/",
        "others/", "pages/", "protocol/", "simulator/", "soak/", "softrnic/test_layers.py", "stragglers/", "tensors/",
        "test_docs.py", "test_packaging.py", "test_site.py", "torch/",
    )
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have two processes divide the tests so, where nothing else was asked for."""
    # Not marks for --dist loadgroup: those of pytest 9.2 do not reach pytest-xdist 3.8.
    from xdist.scheduler import LoadScopeScheduling

    class BesideScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "beside" if nodeid.startswith(BESIDE) else "hosts"

    return BesideScheduling(config, log) if config.getvalue("dist") == "load" else None


# A process keeps two descriptors for each software network that it ever gave faults in, and every test has its own;
# a login shell's usual limit is 1,024.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_wanted = 8192 if _hard == resource.RLIM_INFINITY else min(8192, _hard)
if _soft != resource.RLIM_INFINITY and _soft < _wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_wanted, _hard))

# Children, of which there are thousands, find their modules compiled, as those of an installed package are: an import
# takes half of the time then.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / "build" / "bytecode"))

# What a shell runs in the background is born deaf to SIGINT, and so would be every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def softrnic_dir() -> Iterator[Path]:
    """A registry directory of the software RNIC for one test: its faults reach nobody else.

    Short, because UNIX socket paths may be in it.
    """
    path = Path(tempfile.mkdtemp(prefix="sv-nic-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def spawn(softrnic_dir: Path) -> Iterator[Spawn]:
    """Start children that play hosts in one software network; whatever still runs at the end is killed.

    `spawn("script.py", "arg", host="b", env={"SHIFTVERBS_ETCD": …})`, `spawn("-c", source)`,
    `spawn("-m", "shiftverbs.softrnic", "list")`.
    """
    children: list[Child] = []

    def start(
        *args: str,
        host: str | None = "a",
        softrnic: str | None = "1",
        env: Mapping[str, str | None] | None = None,
        name: str | None = None,
        program: str | None = None,
    ) -> Child:
        command = python_args(*args) if program is None else [program, *args]
        child = Child(command, child_env(softrnic_dir, host, softrnic, env), name or f"host {host}")
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


def running_etcd() -> Iterator[EtcdServer]:
    server = EtcdServer()
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdServer]:
    """One etcd for the whole session. Never stop it: tests that do take `etcd_server`."""
    yield from running_etcd()


@pytest.fixture
def etcd_server() -> Iterator[EtcdServer]:
    """An etcd of the test's own, to be stopped and started at will."""
    yield from running_etcd()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """A job namespace (SHIFTVERBS_JOB) that no other test uses."""
    safe = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"t-{os.getpid()}-{safe}"[:60]
