# SPDX-License-Identifier: BSD-3-Clause
"""The data path against scripted hardware: every check_*.py, each in an interpreter of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = sorted(p.name for p in HERE.glob("check_*.py"))


def run_check(
    name: str, library: Path, env: dict[str, str], *args: str, cwd: Path = HERE, timeout_s: float = 240
) -> str:
    """Run one file of checks; its output. Fails with that output unless all of them passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(HERE.parents[1]),
    ]
    result = subprocess.run(
        [*command, str(HERE / name), *args],
        cwd=cwd,
        env={**os.environ, "SHIFTVERBS_FAKEVERBS": str(library), "SHIFTVERBS_DISABLE": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    bad = re.search(
        r"failed|error|skipped|xfailed", result.stdout.splitlines()[-1] if result.stdout else "error"
    )
    if result.returncode or not passed or int(passed.group(1)) == 0 or bad:
        pytest.fail(f"{name} ended with status {result.returncode}\n{result.stdout}", pytrace=False)
    return result.stdout


def test_there_are_checks() -> None:
    """The collection below is not empty by accident."""
    assert len(CHECKS) >= 7


@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, fakeverbs: Path) -> None:
    """All checks of one file pass."""
    print(run_check(name, fakeverbs, {}))
