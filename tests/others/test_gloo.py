# SPDX-License-Identifier: BSD-3-Clause
"""Gloo's verbs transport, which Debian's libgloo has, on the software NIC."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from harness import Child

from others.conftest import Program
from shiftverbs.softrnic import faults

RANKS = 4


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    if shutil.which("g++") is None or not Path("/usr/include/gloo/transport/ibverbs").is_dir():
        pytest.skip("Gloo is not there: make others")
    target = tmp_path_factory.mktemp("gloo") / "gloo_ring"
    source = Path(__file__).with_name("gloo_ring.cc")
    done = subprocess.run(
        ["g++", "-O1", "-Wall", "-Wextra", str(source), "-o", str(target), "-lgloo", "-libverbs"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def ranks(program: Program, ring: Path, tmp_path: Path, count: int) -> list[Child]:
    """Two on each host."""
    hosts = ["a", "a", "b", "b"]
    return [
        program(str(ring), str(tmp_path), str(rank), str(RANKS), "soft0", str(count), host=hosts[rank])
        for rank in range(RANKS)
    ]


def test_allreduce(program: Program, ring: Path, tmp_path: Path) -> None:
    for rank, child in enumerate(ranks(program, ring, tmp_path, 20)):
        assert f"rank {rank} of {RANKS}: all right" in child.succeed(60)


def test_pulled_cable(program: Program, ring: Path, tmp_path: Path) -> None:
    """Every rank ends, those whose cable is in too."""
    children = ranks(program, ring, tmp_path, 1000000)
    for child in children:
        child.expect("the first is right", 60)
    faults.down("a/soft0")
    for child in children:
        assert child.wait(60) != 0
    assert any("transport retry counter exceeded" in child.output for child in children)
