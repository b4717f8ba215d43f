# SPDX-License-Identifier: BSD-3-Clause
"""benchmarks/allreduce.py: its arithmetic, its command line, and a short run with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Spawn

from benchmarks.suite import allreduce


def test_bus_bandwidth_is_what_a_link_of_the_ring_carries() -> None:
    assert allreduce.bus_bandwidth(2, 4 * allreduce.MIB, 0.5) == pytest.approx(8)
    assert allreduce.bus_bandwidth(4, 4 * allreduce.MIB, 0.5) == pytest.approx(12)


def test_goals_begin_at_a_mebibyte() -> None:
    def result(size: int, wire: float, plain: float) -> allreduce.Result:
        return allreduce.Result(2, size, {}, wire, (wire, wire), plain, (plain, plain))

    assert result(allreduce.KIB, 0.1, 0.1).met is None
    assert result(allreduce.MIB, 0.8, 0.95).met is True
    assert result(allreduce.MIB, 0.79, 1.0).met is False
    assert result(allreduce.MIB, 0.9, 0.94).met is False


@pytest.mark.parametrize(
    "argv", [["--ranks", "3"], ["--ranks", "x"], ["--sizes", "6"], ["--sizes", "0"], ["--rounds", "0"]]
)
def test_what_makes_no_sense_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        allreduce.parse(argv)
    assert caught.value.code == 2 and "error" in capsys.readouterr().err


@pytest.mark.usefixtures("needs_torch")
def test_a_short_run_with_two_ranks(spawn: Spawn, tmp_path: Path) -> None:
    target = tmp_path / "table.json"
    sizes = [4096, 1 << 20]
    options = ("--ranks=2", "--rounds=1", f"--sizes={','.join(map(str, sizes))}", f"--json={target}")
    output = spawn("benchmarks/allreduce.py", *options, host=None, softrnic=None).succeed(180)
    assert "Bus bandwidth" in output
    rows = json.loads(target.read_text())["rows"]
    assert [(row["ranks"], row["size"]) for row in rows] == [(2, size) for size in sizes]
    for row in rows:
        kinds = {allreduce.WIRE, allreduce.PROTECTED, allreduce.PLAIN, allreduce.GLOO}
        assert set(row["bandwidths"]) == kinds and min(row["bandwidths"].values()) > 0
        assert row["to_wire"] > 0 and row["to_plain"] > 0
    assert [row["met"] is None for row in rows] == [True, False]
