# SPDX-License-Identifier: BSD-3-Clause
"""A rail that becomes slow under a training: step times with and without moving off it.

`python -m benchmarks.train --slow-rail`; docs/training.md has a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite.lab import Lab
from benchmarks.train.figure import pyplot, save
from benchmarks.train.launcher import Job, Progress, Supervisor
from benchmarks.train.record import Run
from benchmarks.train.settings import SETTINGS, SLOW, SLOW_RAIL

COLOURS = {1: "#8c8c8c", 6: "#c03030", 7: "#1f6fb4"}


@dataclass(frozen=True)
class Steps:
    """How long steps took, in seconds: medians.

    :param before: up to the moment the rail became slow
    :param slow: from then on, on the slow rail; None: none was
    :param moved: on the other rail; None: none was
    :param until_moved_s: from the rail's becoming slow to the first step that was on the other one alone; None: there
        was none
    """

    before: float
    slow: float | None
    moved: float | None
    until_moved_s: float | None

    def to_json(self) -> dict[str, float | None]:
        """For the JSON file."""
        return {
            "before_s": self.before,
            "slow_s": self.slow,
            "moved_s": self.moved,
            "until_moved_s": self.until_moved_s,
        }


def durations(run: Run) -> list[tuple[int, float, float, tuple[str, ...]]]:
    """Number, end and duration in seconds, and paths of each step but the first, which sets things up."""
    found = []
    for life in run.lives:
        for before, step in zip(life.steps, life.steps[1:], strict=False):
            found.append((step.number, step.t, step.t - before.t, step.paths))
    return found


def summarise(run: Run) -> Steps:
    """What there is to say of a run's steps. Raises ValueError where none ended before the rail was slow."""
    steps = durations(run)
    since = run.failed if run.failed is not None else float("inf")
    home = steps[0][3] if steps else ()
    before = [took for _, t, took, _ in steps if t <= since]
    if not before:
        raise ValueError(f"{run.name}: no step before the rail was slow")
    # The step in which it became so is neither.
    after = [step for step in steps if step[1] > since][1:]
    slow = [took for _, _, took, paths in after if paths == home]
    moved = [(t, took) for _, t, took, paths in after if not set(paths) & set(home)]
    return Steps(
        statistics.median(before),
        statistics.median(slow) if slow else None,
        statistics.median(took for _, took in moved) if moved else None,
        moved[0][0] - since if moved else None,
    )


def measure(lab: Lab, job: Job, announce: Callable[[str], Progress]) -> dict[int, Run]:
    """Train on a healthy rail, and on one that becomes slow, with each setting. Runs by their setting's number.

    :param announce: told of each run, gives what is told of its steps
    :raises SuiteError: a run does not come to its end, or not on the paths that it should
    """
    return {
        setting.number: Supervisor(lab, setting, job, SLOW, announce(setting.name)).supervise()
        for setting in (SETTINGS[1], *SLOW_RAIL)
    }


def draw(directory: Path, runs: dict[int, Run], machine: str) -> list[Path]:
    """Draw slow-rail.png and slow-rail.svg; the files written. Raises ModuleNotFoundError without matplotlib.

    :param machine: one line that says what it ran on
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 4))
    for number, run in runs.items():
        steps = durations(run)
        axis.plot(
            [step for step, *_ in steps],
            [took * 1000 for _, _, took, _ in steps],
            color=COLOURS[number],
            linewidth=1.1,
            label=f"{run.name}, {run.total_s:.0f} s",
        )
        _mark(axis, run, steps)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("step time, ms")
    axis.legend(fontsize=8)
    return save(plt, figure, directory, "slow-rail", machine)


def _mark(axis: Any, run: Run, steps: list[tuple[int, float, float, tuple[str, ...]]]) -> None:
    """Where the rail became slow, and where the run left it."""
    slow = next((n for n, t, *_ in steps if run.failed is not None and t > run.failed), None)
    moved = next((n for n, *_, paths in steps if paths != steps[0][3]), None)
    for at, style in ((slow, ":"), (moved, "--")):
        if at is not None:
            axis.axvline(at, color=COLOURS[run.number], linewidth=0.8, linestyle=style, alpha=0.8)
