# SPDX-License-Identifier: BSD-3-Clause
"""A fork in the moment in which a NIC's thread begins, or begins a job: it is done, and the child ends.

A thread that is none of the interpreter's makes a state there, under a lock of CPython's and without the GIL. Until
3.12 a forked child waits for that lock for ever (gh-112275); from 3.13 on a fork holds it (gh-116522), and must
not wait for one whose holder wants that. Cases in fork_cases.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness import Spawn
from nic.fakes import case_names

HERE = Path(__file__).resolve().parent
CASES = case_names(HERE / "fork_cases.py")


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fork(spawn: Spawn, fake_verbs: Path, tmp_path: Path, case: str, preempted: bool) -> None:
    slow = tmp_path / "slow_threads.so"
    flags = "-std=gnu11 -O1 -Wall -Wextra -Werror -shared -fPIC".split()
    subprocess.run(["cc", *flags, str(HERE / "slow_threads.c"), "-o", str(slow), "-ldl"], check=True)
    env = {"FAKE_VERBS": str(fake_verbs), "LD_PRELOAD": str(slow) if preempted else None}
    child = spawn(str(HERE / "run_case.py"), "fork_cases", case, softrnic=None, env=env, name=case)
    output = child.succeed(60)
    assert f"case {case} done" in output and "Traceback" not in output, output
