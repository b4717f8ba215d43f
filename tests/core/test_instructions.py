# SPDX-License-Identifier: BSD-3-Clause
"""What post and poll cost in machine instructions, against instruction_budget.json.

Time says nothing on a busy machine; instructions are the same every time. Where a budget is exceeded for a good
reason, or something got cheaper, set SHIFTVERBS_WRITE_BUDGET=1, run this, and look at the difference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BUDGET = HERE / "instruction_budget.json"
CALLS, BATCH = 512, 16
#: What is counted, in the order of instructions.py's phases, with the calls in each; None: not of interest.
PHASES = (
    None,
    ("post_send", CALLS),
    ("poll of 16", CALLS // BATCH),
    None,
    ("poll of 1", CALLS),
    ("empty poll", CALLS),
    ("post_recv", CALLS),
)
#: Each release of the interpreter has its own: what it does for a call differs more than the tolerance.
RELEASE = "{}.{}".format(*sys.version_info[:2])
#: Another minor version of the compiler or of the interpreter may need so much more.
TOLERANCE = 1.05


def entry_points() -> list[str]:
    """The C functions behind the counted methods. By name: callgrind muddles patterns that begin alike."""
    (library,) = (HERE.parents[1] / "shiftverbs").glob("_core.*.so")
    symbols = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.findall(
        r"__pyx_pw_\S*(?:QPCore_\d+post_send|QPCore_\d+post_recv|[^Q]CQCore_\d+poll)$", symbols, re.M
    )
    assert len(found) == 3, found
    return found


@pytest.fixture(scope="module")
def counted(fakeverbs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Instructions per call."""
    assert shutil.which("valgrind"), "no valgrind: `make setup` installs it"
    directory = tmp_path_factory.mktemp("callgrind")
    marker = directory / "phase.so"
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", str(HERE / "phase.c"), "-o", str(marker)], check=True)
    command = [
        "valgrind",
        "--tool=callgrind",
        f"--callgrind-out-file={directory}/out",
    ]
    command += [f"--toggle-collect={name}" for name in entry_points()]
    result = subprocess.run(
        [*command, sys.executable, str(HERE / "instructions.py")],
        env={
            **os.environ,
            "SHIFTVERBS_FAKEVERBS": str(fakeverbs),
            "SHIFTVERBS_PHASE": str(marker),
            "SHIFTVERBS_DISABLE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0 and "counted" in result.stdout, result.stdout + result.stderr
    found: dict[str, float] = {}
    for number, phase in enumerate(PHASES, 1):
        text = (directory / f"out.{number}").read_text()
        total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
        assert total is not None, f"no sum in callgrind's part {number}:\n{text[:1000]}"
        if phase is not None:
            name, calls = phase
            found[name] = round(int(total.group(1)) / calls, 1)
    return found


@pytest.mark.slow
def test_post_and_poll_stay_within_their_budget(counted: dict[str, float]) -> None:
    budgets = json.loads(BUDGET.read_text())
    if os.environ.get("SHIFTVERBS_WRITE_BUDGET"):
        budgets[RELEASE] = counted
        BUDGET.write_text(json.dumps(budgets, indent=1) + "\n")
    assert RELEASE in budgets, f"no budget for Python {RELEASE}: write one, see above"
    budget = budgets[RELEASE]
    assert counted.keys() == budget.keys()
    assert all(value > 0 for value in counted.values()), counted
    over = {
        name: (value, budget[name]) for name, value in counted.items() if value > budget[name] * TOLERANCE
    }
    assert not over, f"instructions per call (counted, budget): {over}"
    # A budget that is far above what is needed guards nothing.
    loose = {name: (value, budget[name]) for name, value in counted.items() if value < budget[name] * 0.8}
    assert not loose, f"cheaper than budgeted, lower instruction_budget.json: {loose}"
