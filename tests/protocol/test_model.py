# SPDX-License-Identifier: BSD-3-Clause
"""The Promela model in docs/model: its names are the code's, and spin finds nothing wrong with it (and its bugs)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import ROOT

from shiftverbs.protocol.messages import ArmStep, MoveStep, Phase
from shiftverbs.state_machine import SendState

MODEL = ROOT / "docs" / "model" / "failover.pml"
TEXT = MODEL.read_text()


def names(kind: str) -> set[str]:
    found = re.search(rf"mtype:{kind} = {{([^}}]*)}}", TEXT)
    assert found is not None
    return {name.strip() for name in found.group(1).split(",")}


def test_states_are_those_of_the_table() -> None:
    assert names("state") == {state.value for state in SendState}


def test_phases_and_steps_are_those_of_the_messages() -> None:
    # Without the question before an advisory fence, and without the application's own end; receives are posted at once.
    assert names("phase") == {phase.name for phase in Phase} - {"ASK", "REFUSE", "BYE", "POSTING"}
    steps = {step.name for step in (*ArmStep, *MoveStep)} - {
        "RTU",
        "HELD",
    }  # RTU informs, nothing waits for it
    assert names("step") == {"SYNC"} | steps


def check(folder: Path, *options: str, cycles: bool = False) -> str:
    """Let spin look at every state; return what it says. Raises CalledProcessError where it does not compile."""
    assert shutil.which("spin"), "no spin: `make setup` installs it"
    subprocess.run(
        ["spin", "-a", *options, str(MODEL)], cwd=folder, check=True, capture_output=True, timeout=120
    )
    how = ["-DNP"] if cycles else ["-DSAFETY"]
    subprocess.run(
        ["gcc", "-O0", *how, "-DCOLLAPSE", "-o", "pan", "pan.c"], cwd=folder, check=True, timeout=120
    )
    command = ["./pan", "-m400000", *(["-l"] if cycles else [])]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240).stdout


@pytest.mark.parametrize("options", [[], ["-DPAIRS=3", "-DN=1"]], ids=["two pairs", "three pairs"])
def test_exactly_once_and_no_deadlock(options: list[str], tmp_path: Path) -> None:
    said = check(tmp_path, *options)
    assert "errors: 0" in said, said
    assert "max search depth too small" not in said
    stored = re.search(r"(\d+) states, stored", said)
    assert stored is not None
    assert int(stored.group(1)) > 10_000


def test_no_livelock(tmp_path: Path) -> None:
    assert "errors: 0" in check(tmp_path, cycles=True)


@pytest.mark.parametrize("mutation", sorted(set(re.findall(r"MUTATION_\w+", TEXT))))
def test_the_model_notices(mutation: str, tmp_path: Path) -> None:
    assert "assertion violated" in check(tmp_path, f"-D{mutation}")
