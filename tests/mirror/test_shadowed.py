# SPDX-License-Identifier: BSD-3-Clause
"""The mirror with failover running, on the software RNIC and a real etcd. Programs: shadowed.py, shadowed_ends.py."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn

SCRIPTS = {path: path.read_text() for path in Path(__file__).parent.glob("shadowed*.py")}
SPECIAL = {"teardown_in_any_order", "required", "unknown_backup", "no_backup"}
PLAIN = [
    "every_resource_has_its_shadow",
    "attributes_are_remembered",
    "connecting_never_waits_for_the_peer",
    "a_changed_mr_has_a_changed_shadow",
    "a_programs_own_subclasses",
    "protection_ends_and_the_qp_goes_on",
    "eight_threads",
    "reasons",
    "failover_is_not_seen",
    "waiting_does_not_hold_the_gil",
    "reset_and_again",
    "garbage_in_cycles",
    "fork_with_shadows",
    "a_channel_without_descriptors",
    "made_in_a_forked_child",
    "made_from_what_a_forked_child_inherited",
    "a_handler_uses_the_context_while_nics_open",
    "left_to_the_exit",
    "left_to_the_exit_while_pending",
    "left_to_the_exit_in_cycles",
    "closed_objects_do_not_crash",
    "an_interrupted_close_can_be_repeated",
    "an_interrupted_dereg_waits_when_it_is_repeated",
    "a_destroyed_cq_is_not_polled",
    "a_cq_that_cannot_be_destroyed_works_on",
    "ends_of_its_own",
]


def run(
    spawn: Spawn, etcd: EtcdServer, job: str, name: str, env: dict[str, str] | None = None, nics: str = "1"
) -> float:
    """Run one program; returns how long it took, in seconds."""
    (script,) = (path for path, source in SCRIPTS.items() if f"\n@check\ndef {name}(" in source)
    path = os.pathsep.join([*map(str, script.parents[1:3]), os.environ.get("PYTHONPATH", "")])
    variables = {"SHIFTVERBS_ETCD": etcd.endpoint, "SHIFTVERBS_JOB": job, "PYTHONPATH": path, **(env or {})}
    started = time.monotonic()
    child = spawn(str(script), name, env=variables, softrnic=nics, name=name)
    child.succeed(60)
    assert child.printed[-1:] == ["passed"], child.output
    return time.monotonic() - started


def test_every_program_is_run() -> None:
    found = re.findall(r"\n@check\ndef (\w+)\(", "".join(SCRIPTS.values()))
    assert sorted(found) == sorted([*PLAIN, *SPECIAL])


@pytest.mark.parametrize("name", PLAIN)
def test_program(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    took = run(spawn, shared_etcd, job, name)
    if name.startswith("left_to_the_exit"):
        assert took < 20


@pytest.mark.parametrize("seed", range(3))
def test_teardown_in_any_order(spawn: Spawn, shared_etcd: EtcdServer, job: str, seed: int) -> None:
    run(spawn, shared_etcd, job, "teardown_in_any_order", {"SEED": str(seed)})


WITHOUT = [
    "garbage_in_cycles",
    "left_to_the_exit_in_cycles",
    "teardown_in_any_order",
    "waiting_does_not_hold_the_gil",
]


@pytest.mark.parametrize("name", WITHOUT)
def test_without_failover(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    run(spawn, shared_etcd, job, name, {"SHIFTVERBS_DISABLE": "1"})


def test_required(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "required", {"SHIFTVERBS_REQUIRE": "1"})


@pytest.mark.parametrize("required", ["", "1"])
def test_unknown_backup(spawn: Spawn, shared_etcd: EtcdServer, job: str, required: str) -> None:
    env = {"SHIFTVERBS_BACKUP": "soft0=soft7,soft1", "SHIFTVERBS_REQUIRE": required}
    run(spawn, shared_etcd, job, "unknown_backup", env)


def test_no_backup_named(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "no_backup", {"SHIFTVERBS_BACKUP": "soft1=soft0"})


def test_no_other_nic(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "no_backup", nics="soft0@loopback")


def test_two_backups(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> None:
    run(spawn, shared_etcd, job, "every_resource_has_its_shadow", nics="3")
