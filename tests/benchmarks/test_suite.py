# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: its arithmetic, its table and figures, and a short run of its child processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Spawn

from benchmarks.suite import cli, figures, rows
from benchmarks.suite.recovery import Timeline, _timeline


def test_a_ratio_is_the_median_over_pairs() -> None:
    row = rows.ratio_row("x", "ns", [100.0, 200.0, 400.0], [10.0, 30.0, 40.0], 0.11)
    assert (row.ratio, row.pyverbs, row.shiftverbs, row.met) == (0.1, 200.0, 30.0, True)
    assert row.spread == pytest.approx((0.1, 0.125))
    missed = rows.ratio_row("x", "ns", [100.0], [12.0], 0.11)
    assert missed.met is False and missed.target == "≤ 0.11 ×"
    assert rows.ratio_row("x", "ns", [100.0], [12.0], None).met is None


def test_same_means_within_what_pyverbs_differs_from_itself() -> None:
    steady = [100.0] * 10
    assert rows.own_spread(steady) == 1.0
    assert rows.own_spread([100.0, 110.0] * 5) == pytest.approx(1.1)
    slower, faster = [105.0] * 10, [95.0] * 10
    assert rows.same_row("latency", "µs", steady, slower, more_is_better=False).met is False
    assert rows.same_row("latency", "µs", steady, faster, more_is_better=False).met is True
    assert rows.same_row("bandwidth", "MB/s", steady, faster, more_is_better=True).met is False
    noisy = [100.0, 110.0] * 5
    assert rows.same_row("latency", "µs", noisy, [108.0] * 10, more_is_better=False).met is True


def test_limits_are_for_the_median() -> None:
    assert rows.limit_row("x", "ms", [0.5, 0.9, 30.0], 1.0).met is True
    assert rows.limit_row("x", "ms", [0.5, 1.1, 30.0], 1.0).met is False


def test_throughput_is_the_sum_of_both_hosts() -> None:
    second = 10**9
    host_a = {n * second // 10: n * 2**20 for n in range(21)}
    host_b = {n * second // 20 + 7: n * 2**19 for n in range(41)}
    line = _timeline("send", "switch", [host_a, host_b], {"failed": second, "healed": 3 * second // 2})
    assert line.healed_s == 0.5
    assert [rate for _, rate in line.points] == pytest.approx([20.0] * len(line.points))
    assert line.points[0][0] == pytest.approx(-0.475)


def fake_rows() -> list[rows.Row]:
    """One row of each kind that a figure takes."""
    found = [
        rows.ratio_row("empty poll (null)", "ns", [40.0, 41.0], [30.0, 31.0], 1.0),
        rows.ratio_row("create_qp (null)", "µs", [8.0, 9.0], [20.0, 21.0], None),
        rows.limit_row("detection of a port", "ms", [0.2, 0.4, 0.3], 1.0),
        rows.limit_row("fallback after port event", "ms", [0.9], 1.0),
        rows.limit_row("failback: home", "ms", [40.0, 50.0], None),
    ]
    for suffix in ("", ", 1,000 idle QPs"):
        for size in (1, 64):
            row = rows.same_row(f"ib_write_lat {size} B{suffix}", "µs", [9.0, 9.1], [9.0, 9.2], False)
            row.samples = {"size": size}
            found.append(row)
    return found


def test_every_figure_is_drawn(tmp_path: Path) -> None:
    lines = [Timeline("send", "switch", "shiftverbs", [(-0.1, 5.0), (0.1, 0.0), (0.2, 5.0)], 0.15)]
    written = figures.draw(tmp_path, fake_rows(), lines, [], "a machine")
    assert {path.name for path in written} == {
        f"{name}.{suffix}"
        for name in ("throughput_through_failure", "recovery_times", "cost_of_verbs", "latency_with_idle_qps")
        for suffix in ("png", "svg")
    }
    assert all(path.stat().st_size > 1000 for path in written)


def test_a_short_run_writes_table_json_and_history(spawn: Spawn, tmp_path: Path) -> None:
    """The null device's verbs, slow commands, the NIC beside UDP: through the command line, with real children."""
    target = tmp_path / "table.json"
    options = (
        "--quick",
        "--no-figures",
        "--only",
        "verbs,slow,wire",
        "--json",
        str(target),
        "--output",
        str(tmp_path),
    )
    output = spawn("-m", "benchmarks", *options, host=None, softrnic=None).succeed(120)
    assert "targets met" in output
    found = json.loads(target.read_text())
    assert {"name", "ratio", "target", "met", "pyverbs", "shiftverbs", "unit"} <= set(found[0])
    by_name = {row["name"]: row for row in found}
    for name in ("post_send + poll (null)", "poll of 16 (null)", "modify to RTS (null)"):
        assert by_name[name]["pyverbs"] > 0 and by_name[name]["shiftverbs"] > 0
    for name in ("dereg_mr, NICs whose commands take 100 µs", "destroy_qp, NICs whose commands take 100 µs"):
        assert by_name[name]["pyverbs"] >= 100 and by_name[name]["shiftverbs"] >= 100
    udp = [row for name, row in by_name.items() if "UDP in C" in name]
    assert len(udp) == 2 and all(row["pyverbs"] > 0 and row["shiftverbs"] > 0 for row in udp)
    (record,) = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert record["rows"] == found and record["device"] == "softrnic" and "commit" in record


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--only", "verbs,nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_a_failure_and_the_way_back_are_measured(tmp_path: Path) -> None:
    """One failure under each kind of program, and a few QPs together: the rows' machinery, not their figures."""
    from benchmarks.suite import recovery
    from benchmarks.suite.lab import Lab
    from shiftverbs.softrnic import faults

    with Lab() as lab:
        for mode in recovery.MODES:
            with recovery.hosts(lab, "shiftverbs", mode) as pair:
                failure, trips = recovery._one_failure(pair, lambda: faults.down("a/soft0"))
                assert failure.detect_ms and failure.fallback_ms and failure.failback_ms
                assert bool(trips) is (mode == "blocked")


def test_a_start_is_measured_from_the_import_to_protected() -> None:
    """Without a broker, with the host's, and with pyverbs: the rows' machinery, not their figures."""
    from benchmarks.suite import start
    from benchmarks.suite.lab import Lab

    with Lab() as lab, start.started(lab, "shiftverbs", warm=True) as first:
        for package, warm in (("pyverbs", False), ("shiftverbs", False), ("shiftverbs", True)):
            with start.started(lab, package, warm) as took:
                assert 0 < took["import"] < took["rts"]
                assert ("protected" in took) is (package == "shiftverbs")
                assert took["rts"] <= took.get("protected", took["rts"])
        assert first["protected"] > 0
        brokers = [path for path in Path(lab.network.directory, "warm").glob("broker-*") if path.is_socket()]
        assert len(brokers) == 2, "the warm ones have met one broker a host"
