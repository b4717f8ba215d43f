# SPDX-License-Identifier: BSD-3-Clause
"""The papers' figures, as PNG and SVG. matplotlib is needed for these alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.programs import IDLE_QPS
from benchmarks.suite.recovery import Timeline
from benchmarks.suite.rows import Row

FAULT_NAMES = {
    "initiator_port": "initiator's port down",
    "responder_port": "responder's port down",
    "switch": "switch port down",
}
COLOURS = {"pyverbs": "#8c8c8c", "shiftverbs": "#1f6fb4"}


def draw(
    directory: Path, rows: Sequence[Row], timelines: Sequence[Timeline], results: Sequence[Any], machine: str
) -> list[Path]:
    """Draw what there are figures for; return the files written.

    :param directory: made if it is not there
    :param machine: one line that says what was measured on
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False})
    plt.rcParams["axes.spines.right"] = False
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def save(name: str) -> None:
        figure = plt.gcf()
        figure.text(0.99, 0.005, machine, ha="right", va="bottom", fontsize=6, color="#777777")
        for suffix in ("png", "svg"):
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=130, bbox_inches="tight")
            written.append(path)
        plt.close(figure)

    if timelines:
        _throughput(plt, timelines)
        save("throughput_through_failure")
    if results or any("values" in row.samples for row in rows):
        _recovery(plt, rows, results)
        save("recovery_times")
    if any(row.name.endswith("(null)") for row in rows):
        _verbs(plt, rows)
        save("cost_of_verbs")
    if any("idle QPs" in row.name for row in rows):
        _latency(plt, rows)
        save("latency_with_idle_qps")
    return written


def _throughput(plt: Any, timelines: Sequence[Timeline]) -> None:
    traffics = list(dict.fromkeys(t.traffic for t in timelines))
    faults = list(dict.fromkeys(t.fault for t in timelines))
    _, axes = plt.subplots(len(traffics), len(faults), figsize=(10, 6.5), squeeze=False, sharey="row")
    for line in timelines:
        axis = axes[traffics.index(line.traffic)][faults.index(line.fault)]
        times, rates = [p[0] for p in line.points], [p[1] for p in line.points]
        axis.fill_between(times, rates, color=COLOURS["shiftverbs"], alpha=0.25, linewidth=0)
        axis.plot(times, rates, color=COLOURS["shiftverbs"], linewidth=1)
        axis.axvline(0, color="#c03030", linewidth=1)
        if line.healed_s is not None:
            axis.axvline(line.healed_s, color="#2f8f2f", linewidth=1, linestyle="--")
        axis.set_ylim(bottom=0)
    for column, fault in enumerate(faults):
        axes[0][column].set_title(FAULT_NAMES.get(fault, fault), fontsize=9)
        axes[-1][column].set_xlabel("seconds")
    for row, traffic in enumerate(traffics):
        axes[row][0].set_ylabel(f"{traffic}\nMB/s")
    plt.suptitle("Throughput through a failure (red) and back after healing (green), bins of 50 ms")
    plt.tight_layout()


def _recovery(plt: Any, rows: Sequence[Row], results: Sequence[Any]) -> None:
    kinds = ("detection", "fallback", "failback")
    _, axes = plt.subplots(1, 3, figsize=(11, 3.6))
    for axis, kind in zip(axes, kinds, strict=True):
        for row in rows:
            if row.name.startswith(kind) and "values" in row.samples:
                values = sorted(row.samples["values"])
                heights = [(i + 1) / len(values) for i in range(len(values))]
                axis.step(values, heights, where="post", linewidth=1.2, label=row.name.removeprefix(kind))
        field = {"detection": "detect_ms", "fallback": "fallback_ms", "failback": "failback_ms"}[kind]
        demo = sorted(v for v in (getattr(result, field) for result in results) if v is not None)
        if demo:
            heights = [(i + 1) / len(demo) for i in range(len(demo))]
            axis.step(
                demo, heights, where="post", color="#555555", linestyle=":", label=" demonstration's traffic"
            )
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
        axis.set_xlabel("ms")
        axis.set_title(kind)
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=5.5, loc="lower right")
    axes[0].set_ylabel("share of failures")
    plt.tight_layout()


def _verbs(plt: Any, rows: Sequence[Row]) -> None:
    groups = [
        ("data verbs", [r for r in rows if r.name.endswith("(null)") and r.unit == "ns"]),
        ("control verbs", [r for r in rows if r.name.endswith("(null)") and r.unit == "µs"]),
    ]
    _, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, (title, members) in zip(axes, groups, strict=True):
        names = [row.name.removesuffix(" (null)") for row in members]
        places = range(len(members))
        axis.bar(
            [p - 0.2 for p in places],
            [r.pyverbs for r in members],
            0.4,
            color=COLOURS["pyverbs"],
            label="pyverbs",
        )
        axis.bar(
            [p + 0.2 for p in places],
            [r.shiftverbs for r in members],
            0.4,
            color=COLOURS["shiftverbs"],
            label="shiftverbs",
        )
        axis.set_xticks(list(places), names, rotation=40, ha="right")
        axis.set_yscale("log")
        axis.set_ylabel(members[0].unit if members else "")
        axis.set_title(f"{title}, null device")
        axis.legend()
    plt.tight_layout()


def _latency(plt: Any, rows: Sequence[Row]) -> None:
    _, axis = plt.subplots(figsize=(7, 4))
    latency = [row for row in rows if row.name.startswith("ib_write_lat")]
    many = f", {IDLE_QPS:,} idle QPs"
    alone = [row for row in latency if "idle QPs" not in row.name]
    for members, suffix, style in ((alone, "", "-"), ([r for r in latency if many in r.name], many, "--")):
        sizes = [r.samples["size"] for r in members]
        for package in ("pyverbs", "shiftverbs"):
            label = package + suffix
            values = [getattr(r, package) for r in members]
            axis.plot(sizes, values, style, marker="o", markersize=3, color=COLOURS[package], label=label)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("message, bytes")
    axis.set_ylabel("half round trip, µs (10th percentile)")
    axis.set_title("ib_write_lat")
    axis.legend(fontsize=8)
