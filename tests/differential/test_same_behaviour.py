# SPDX-License-Identifier: BSD-3-Clause
"""The same program prints the same with pyverbs and with shiftverbs: without failover, and with every QP shadowed."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn
from scenarios import SCENARIOS

from shiftverbs import softrnic

SCRIPT = Path(__file__).with_name("scenarios.py")
EXIT_STATUS = {"context_left_to_the_collector": 3}
# Where shiftverbs is meant to differ: our log lines (in pyverbs' format, which shows at INFO).
LOG_LINE = re.compile(
    r"^\[(INFO|WARNING)\] \d\d \w+ \d{4} [\d:]+ (runtime|protection|shadow|connection)\.py:\d+: "
)

# In the interpreter's warning of a fork with threads about, from Python 3.12 on: both packages cause it.
PID = re.compile(r"pid=\d+")


def output_of(spawn: Spawn, package: str, name: str, env: dict[str, str]) -> str:
    path = os.pathsep.join([*map(str, SCRIPT.parents[1:3]), os.environ.get("PYTHONPATH", "")])
    child = spawn(str(SCRIPT), package, name, env={**env, "PYTHONPATH": path}, name=f"{package} {name}")
    status = child.wait(60)
    lines = [PID.sub("pid=", line) for line in child.printed + child.errors if not LOG_LINE.match(line)]
    assert status == EXIT_STATUS.get(name, 0), child.output
    return "\n".join(lines)


def compare(spawn: Spawn, name: str, env: dict[str, str]) -> None:
    theirs = output_of(spawn, "pyverbs", name, {"LD_PRELOAD": str(softrnic.library_path())})
    ours = output_of(spawn, "shiftverbs", name, env)
    assert theirs.strip()
    difference = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), "pyverbs", "shiftverbs", n=1)
    assert ours == theirs, "\n".join(difference)


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_failover(spawn: Spawn, name: str) -> None:
    compare(spawn, name, {})


@pytest.mark.parametrize("name", SCENARIOS)
def test_with_every_qp_shadowed(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    compare(spawn, name, {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job})
