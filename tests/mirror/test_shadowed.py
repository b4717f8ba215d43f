# SPDX-License-Identifier: BSD-3-Clause
"""The mirror with failover running, on the software RNIC and a real etcd: each test of shadowed/ in its own process.

It is a program with its own environment there, forks, takes signals, and its end is part of the test.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn

HERE = Path(__file__).parent / "shadowed"
# By its name, the file that each test is in.
FILES = {
    name: path
    for path in sorted(HERE.glob("check_*.py"))
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
}
TEARDOWN = "test_teardown_in_any_order"
#: These want an environment of their own, see below.
SPECIAL = {TEARDOWN, "test_required", "test_unknown_backup", "test_no_backup"}
PLAIN = [name for name in FILES if name not in SPECIAL]


def run(
    spawn: Spawn,
    etcd: EtcdServer,
    job: str,
    name: str,
    env: dict[str, str] | None = None,
    nics: str = "1",
    case: str = "",
) -> float:
    """Run one test; returns how long it took, in seconds. case: of several, its id."""
    # pytest-timeout uses a signal that these tests use; they have a deadline of their own, whose report is on standard
    # error: nothing is captured.
    options = ["-q", "-s", "--timeout=0", *(f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist"))]
    variables = {"SHIFTVERBS_ETCD": etcd.endpoint, "SHIFTVERBS_JOB": job, **(env or {})}
    started = time.monotonic()
    child = spawn(
        "-m", "pytest", *options, f"{FILES[name]}::{name}{case}", env=variables, softrnic=nics, name=name
    )
    child.succeed(60)
    assert re.search(r"1 passed in ", child.printed[-1]), child.output
    return time.monotonic() - started


def test_none_is_lost() -> None:
    assert len(PLAIN) == 45 and SPECIAL <= FILES.keys()


@pytest.mark.parametrize("name", PLAIN)
def test_with_failover(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    took = run(spawn, shared_etcd, job, name)
    if name.startswith("test_left_to_the_exit"):
        assert took < 20


@pytest.mark.parametrize("seed", range(3))
def test_teardown_in_any_order(spawn: Spawn, shared_etcd: EtcdServer, job: str, seed: int) -> None:
    run(spawn, shared_etcd, job, TEARDOWN, case=f"[{seed}]")


WITHOUT = {
    "test_garbage_in_cycles": "",
    "test_left_to_the_exit_in_cycles": "",
    TEARDOWN: "[1]",
    "test_waiting_does_not_hold_the_gil": "",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_failover(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    run(spawn, shared_etcd, job, name, {"SHIFTVERBS_DISABLE": "1"}, case=WITHOUT[name])


def test_required(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "test_required", {"SHIFTVERBS_REQUIRE": "1"})


@pytest.mark.parametrize("required", ["", "1"])
def test_unknown_backup(spawn: Spawn, shared_etcd: EtcdServer, job: str, required: str) -> None:
    env = {"SHIFTVERBS_BACKUP": "soft0=soft7,soft1", "SHIFTVERBS_REQUIRE": required}
    run(spawn, shared_etcd, job, "test_unknown_backup", env)


def test_no_backup_named(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "test_no_backup", {"SHIFTVERBS_BACKUP": "soft1=soft0"})


def test_no_other_nic(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "test_no_backup", nics="soft0@loopback")


def test_two_backups(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "test_every_resource_has_its_shadow", nics="3")
