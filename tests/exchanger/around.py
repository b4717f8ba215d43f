# SPDX-License-Identifier: BSD-3-Clause
"""What is seen around a broker from outside: its process, etcd's leases and requests; and waiting for it."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import Child, EtcdServer, Spawn, stop_process
from harness import wait_until as wait_until_within

from exchanger.conftest import EtcdWorld, Watched


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    """As harness.wait_until; a broker's start takes seconds on a machine that is busy otherwise."""
    wait_until_within(condition, timeout_s, what)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def launch(spawn: Spawn, world: EtcdWorld, program: str, **extra: str) -> Child:
    """Start a program that uses this world's etcd and finds the tests' modules; extra: of its environment.

    It has a broker of its own unless told otherwise.
    """
    env = {
        "SHIFTVERBS_ETCD": world.server.endpoint,
        "SHIFTVERBS_JOB": world.job,
        "SHIFTVERBS_BROKER": "own",
        "TESTS": str(Path(__file__).resolve().parents[1]),
        **extra,
    }
    return spawn("-c", program, host=None, softrnic=None, env=env)


def leases(server: EtcdServer) -> set[str]:
    """The ids of all leases."""
    answer = server.call("lease/leases", {})
    found = answer.get("leases", [])
    assert isinstance(found, list)
    return {entry["ID"] for entry in found}


def lease_of(server: EtcdServer, key: str) -> str:
    """The id of the lease that a key hangs on."""
    answer = server.call("kv/range", {"key": base64.b64encode(key.encode()).decode()})
    (found,) = answer["kvs"]  # type: ignore[misc]
    return str(found["lease"])


def requests(server: EtcdServer) -> dict[str, int]:
    """How many messages each method of etcd's gRPC interface has received so far."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{server.endpoint}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    counts: dict[str, int] = {}
    for method, count in re.findall(
        r'^grpc_server_msg_received_total\{grpc_method="(\w+)".*\} (\S+)$', text, re.M
    ):
        counts[method] = counts.get(method, 0) + int(float(count))
    return counts


@contextlib.contextmanager
def stopped_broker(watched: Watched) -> Iterator[None]:
    """Hold an exchanger's broker still for a while."""
    pid = watched.exchanger.broker_pid  # type: ignore[attr-defined]
    stop_process(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
