# SPDX-License-Identifier: BSD-3-Clause
"""docs/model/switch.pml under spin: no error as it stands, an error with each mutation, the code's names."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import ROOT

from shiftverbs.protocol.messages import Phase

MODEL = ROOT / "docs" / "model" / "switch.pml"
QUIET = ("-DLOSSES=0", "-DDUPLICATES=0")
SOUND = {
    "a failure, both sides free to choose": QUIET,
    "a message lost": ("-DDUPLICATES=0", "-DEPOCHS=2"),
    "a question, a message doubled": ("-DFAULTS=0", "-DHINTS=1", "-DLOSSES=0", "-DEPOCHS=2"),
}
# Eight million states: hashes of them are kept instead of the states (-DHC4), which may miss a few.
LARGE = {
    "a failure, a question, a message doubled": (
        "-DFAULTS=1",
        "-DHINTS=1",
        "-DLOSSES=0",
        "-DEPOCHS=2",
        "-DDEPTH=1",
    ),
}
MUTATIONS = {
    "SKIP_PEER_FENCE": QUIET,
    "NO_TRIM": QUIET,
    "TRIM_ONE_TOO_MANY": QUIET,
    "FORGET_THE_SWITCH_BEFORE": LARGE["a failure, a question, a message doubled"],
}


def explore(folder: Path, *options: str, storage: str = "COLLAPSE") -> tuple[int, int]:
    """Run spin on the model; return (errors, states stored).

    storage: how states are kept, a -D option of spin's verifier.
    :raises AssertionError: a tool is missing, or the search was cut off by a bound without an error
    """
    for tool in ("spin", "gcc"):
        assert shutil.which(tool), f"no {tool}: `make setup` installs it"

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("spin", "-a", *options, str(MODEL))
    run("gcc", "-O2", "-w", "-DSAFETY", f"-D{storage}", "-DMEMLIM=1500", "-o", "pan", "pan.c")
    output = run("nice", "-n", "15", "./pan", "-m300000", "-w22")
    found = re.search(r"errors: (\d+)\s+(\d+) states, stored", output)
    assert found and "max search depth too small" not in output and "out of memory" not in output, output
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("name", SOUND)
def test_no_errors(name: str, tmp_path: Path) -> None:
    errors, states = explore(tmp_path, *SOUND[name])
    print(f"{name}: {states} states, {errors} errors")
    assert errors == 0 and states > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_errors_in_a_large_search(name: str, tmp_path: Path) -> None:
    errors, states = explore(tmp_path, *LARGE[name], storage="HC4")
    print(f"{name}: {states} states, {errors} errors")
    assert errors == 0 and states > 5_000_000


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_found(mutation: str, tmp_path: Path) -> None:
    errors, states = explore(tmp_path, f"-DMUTATION_{mutation}", *MUTATIONS[mutation])
    print(f"{mutation}: found within {states} states")
    assert errors > 0


def test_phases_are_the_codes() -> None:
    declared = re.search(r"mtype:phase = \{([^}]*)\}", MODEL.read_text())
    assert declared
    # BYE ends a pairing without a SWITCH, and POSTING says that READY is to follow: they are not in this model.
    elsewhere = (Phase.BYE, Phase.POSTING)
    assert [name.strip() for name in declared[1].split(",")] == [p.name for p in Phase if p not in elsewhere]
