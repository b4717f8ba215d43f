# SPDX-License-Identifier: BSD-3-Clause
"""`make fabric`: what it writes, of runs that are too short to mean anything."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import incast
from benchmarks.fabric import cases, cli, figure, rail


def test_tables_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: (entry, 2, 50) for name, (entry, _, _) in cases.ENTRIES.items()}
    monkeypatch.setattr(cases, "ENTRIES", short)
    monkeypatch.setattr(cases, "SMALL_MS", 2)
    assert cli.main(["--no-processes", "--output", str(tmp_path)]) == 0
    for name in figure.FIGURES:
        assert (tmp_path / f"fabric-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"fabric-{name}.svg").read_text()
    lines = (tmp_path / "fabric.md").read_text().splitlines()
    assert sum(line.startswith("| PFC | ") for line in lines) == 4
    record = json.loads((tmp_path / "fabric.json").read_text())
    assert len(record["virtual"]) == 16 and record["seed"] == cases.SEED
    [lossless] = [run for run in record["virtual"][:12] if run["control"] == "PFC" and run["senders"] == 8]
    assert lossless["dropped"] == lossless["again"] == 0 and lossless["pauses"] > 0


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for reaches the incast, and a run that failed is shown as one."""
    asked = []
    done = incast.Incast(2, 0.99, 74_000.0, 10.0, 5, 4, 0, 7)

    def run(settings: object) -> incast.Incast | None:
        asked.append(vars(settings))
        return done if len(asked) == 1 else None

    monkeypatch.setattr(incast, "run", run)
    measured = cli.run_processes()
    assert [one["limits"] for one in asked] == [limits for limits, *_ in cli.REAL.values()]
    first, second, *_ = cli.real_rows(measured)
    assert first == ["DCQCN", "2", "74.0 KB", "99.0%", "0", "7"]
    assert second[2] == "a process ended early"


def test_the_model_is_complete(tmp_path: Path) -> None:
    """A program that does not understand says so."""
    program = rail.build(tmp_path / "rail")
    with pytest.raises(subprocess.CalledProcessError):
        rail.run(program, "rail0:rate=fast", 1, ["0-1"], seed=1)
