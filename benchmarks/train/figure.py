# SPDX-License-Identifier: BSD-3-Clause
"""The figure, as the SHIFT paper's Fig. 8: progress over time beside the two extremes, and the slowdown's parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.train.record import Breakdown, Run

COLOURS = {1: "#8c8c8c", 2: "#c03030", 3: "#1f6fb4", 4: "#1f6fb4", 5: "#1f6fb4"}
PARTS = {
    "rescheduling_s": ("rescheduling", "#e0a030"),
    "retraining_s": ("retraining", "#c03030"),
    "slower_s": ("slower steps", "#1f6fb4"),
}
#: The sub-figures: each beside settings 1 and 2.
PANELS = {"(a)": 3, "(b)": 4, "(c)": 5}


def pyplot() -> Any:
    """matplotlib.pyplot, set up for our figures. Raises ModuleNotFoundError without it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False})
    plt.rcParams["axes.spines.right"] = False
    return plt


def save(plt: Any, figure: Any, directory: Path, name: str, machine: str) -> list[Path]:
    """Write a figure as PNG and SVG, with the line that says what it ran on, and close it; the files written."""
    plt.tight_layout()
    figure.text(0.99, 0.002, machine, ha="right", va="bottom", fontsize=6, color="#777777")
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in ("png", "svg"):
        written.append(directory / f"{name}.{suffix}")
        figure.savefig(written[-1], dpi=130, bbox_inches="tight")
    plt.close(figure)
    return written


def draw(
    directory: Path, runs: Mapping[int, Run], breakdowns: Mapping[int, Breakdown], machine: str
) -> list[Path]:
    """Draw training.png and training.svg; the files written. Raises ModuleNotFoundError without matplotlib.

    :param directory: made if it is not there
    :param machine: one line that says what it ran on
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    for (letter, number), axis in zip(PANELS.items(), axes.flat, strict=False):
        _progress(axis, letter, [runs[one] for one in (1, 2, number) if one in runs])
    _parts(axes[1][1], breakdowns)
    return save(plt, figure, directory, "training", machine)


def _progress(axis: Any, letter: str, runs: list[Run]) -> None:
    for run in runs:
        times, epochs = zip(*run.progress(), strict=True)
        axis.plot(times, epochs, color=COLOURS[run.number], linewidth=1.3, label=run.name)
        for life in run.lives:
            for _, t in life.checkpoints:
                axis.axvline(
                    t - run.began, color=COLOURS[run.number], linewidth=0.6, linestyle="--", alpha=0.7
                )
        if run.failed is not None:
            at = run.failed - run.began
            done = max(epoch for time, epoch in run.progress() if time <= at)
            axis.plot([at], [done], "x", color=COLOURS[run.number], markersize=6)
    axis.set_title(f"{letter} progress; dashed: checkpoints, ×: failure", fontsize=9)
    axis.set_xlabel("seconds")
    axis.set_ylabel("epochs")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.legend(fontsize=7, loc="lower right")


def _parts(axis: Any, breakdowns: Mapping[int, Breakdown]) -> None:
    numbers = [number for number in sorted(breakdowns) if number != 1]
    places = list(range(len(numbers)))
    for offset, (part, (label, colour)) in zip((-0.27, 0.0, 0.27), PARTS.items(), strict=True):
        values = [getattr(breakdowns[number], part) for number in numbers]
        bars = axis.bar([p + offset for p in places], values, 0.25, color=colour, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.axhline(0, color="#000000", linewidth=0.6)
    axis.set_xticks(places, [f"({number})" for number in numbers])
    axis.set_ylabel("seconds more than (1)")
    axis.set_title("(d) where the time went", fontsize=9)
    axis.legend(fontsize=7)
