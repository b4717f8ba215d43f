# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.train`: trains through the settings, prints the tables, writes JSON and the figure."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.suite.lab import ROOT, Lab, SuiteError, machine
from benchmarks.train import exactness, launcher, slow_rail
from benchmarks.train.figure import draw
from benchmarks.train.record import Breakdown, Run, break_down
from benchmarks.train.settings import FAULTS, SETTINGS

MODELS = ("small", "gpt2", "tiny")

#: A step's gradients take a fifth of its time on such a rail, and twice as long where a backup is busy.
FABRIC = "rail0:rate=400M;rail1:rate=400M"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        choices=MODELS,
        default="small",
        help="0.87 M, 124 M or 8 k parameters (default %(default)s)",
    )
    add("--ranks", type=int, choices=(2, 4), default=2, help="on two hosts (default %(default)s)")
    add("--epochs", type=int, default=4, help="default %(default)s")
    add("--steps", type=int, default=40, help="of an epoch (default %(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the batches (default %(default)s)")
    add("--settings", default="1,2,3,4,5", help="some of 1,2,3,4,5; 1 always runs")
    add("--fault", choices=sorted(FAULTS), default="down", help="in the settings (default %(default)s)")
    add(
        "--no-weights",
        action="store_true",
        help="leave out the short runs that compare weights for each failure",
    )
    add(
        "--fabric",
        default=os.environ.get("SOFTRNIC_FABRIC", FABRIC),
        help="limits of the rails, as SOFTRNIC_FABRIC takes them; '': none (default: that variable, or %(default)s)",
    )
    add(
        "--slow-rail",
        action="store_true",
        help="no failures: a rail that becomes slow, without and with moving off it",
    )
    default = ROOT / "build" / "train"
    add("--output", metavar="DIR", type=Path, default=default, help="figure and JSON (default build/train)")
    options = parser.parse_args(argv)
    try:
        options.numbers = sorted({1, *(int(text) for text in options.settings.split(","))})
    except ValueError:
        parser.error(f"--settings: {options.settings!r} is no list of numbers")
    for number in options.numbers:
        if number not in SETTINGS:
            parser.error(f"--settings: there is no setting {number}")
    if options.epochs < 2 or options.steps < 5:
        parser.error("there must be at least 2 epochs of 5 steps: the failure is in the second one")
    return options


class Bar:
    """A progress bar with loss, step time and path."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total} {task.fields[told]}"),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console)
        self._task: Any = None

    def announce(self, name: str, steps: int) -> launcher.Progress:
        """Begin with another run."""
        if self._task is not None:
            self.progress.update(self._task, visible=False)
        task = self._task = self.progress.add_task(name, total=steps, told="starting")

        def progress(step: int, loss: float, ms: float, path: str) -> None:
            self.progress.update(task, completed=step, told=f"loss {loss:.3f}, {ms:.0f} ms, {path}")

        return progress


def measure(
    options: argparse.Namespace, job: launcher.Job, console: Console
) -> tuple[dict[int, Run], list[exactness.Comparison]]:
    """Run what was asked for. Raises SuiteError where a run does not come to its end."""
    bar = Bar(console)
    runs: dict[int, Run] = {}
    with Lab() as lab, bar.progress:
        for number in options.numbers:
            setting = SETTINGS[number]
            progress = bar.announce(setting.name, job.last_step)
            run = launcher.Supervisor(lab, setting, job, options.fault, progress).supervise()
            runs[number] = run
            told = f", {' → '.join(run.paths)}" if setting.is_protected else ""
            bar.progress.console.print(f"{setting.name}: {run.total_s:.1f} s{told}")
        found = [exactness.compare(run, runs[1]) for number, run in runs.items() if number != 1]
        if not options.no_weights:
            short = exactness.EPOCH_STEPS * job.epochs
            announce: Callable[[str], launcher.Progress] = lambda name: bar.announce(name, short)  # noqa: E731
            found += exactness.run_cases(lab, job, announce)
    return runs, found


def print_tables(
    console: Console, breakdowns: dict[int, Breakdown], comparisons: list[exactness.Comparison]
) -> None:
    """Where the time went; whose weights are the same."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting")
    for name in ("run", "slowdown", "rescheduling", "retraining", "slower steps"):
        table.add_column(name, justify="right")
    for number, parts in breakdowns.items():
        cells = [f"{parts.total_s:.1f} s"]
        for value in (parts.slowdown_s, parts.rescheduling_s, parts.retraining_s, parts.slower_s):
            cells.append("" if number == 1 else f"{value:.1f} s ({parts.fraction(value):.1%})")
        table.add_row(SETTINGS[number].name, *cells)
    console.print(table)
    weights = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("weights at the end", "failure", "as without it", "paths"):
        weights.add_column(name)
    for one in comparisons:
        same = "[green]bit for bit[/]" if one.is_same else "[red]NO[/]"
        weights.add_row(one.name, one.fault, same, " → ".join(one.paths))
    console.print(weights)


def print_slow_rail(console: Console, runs: dict[int, Run], found: dict[int, slow_rail.Steps]) -> None:
    """How long steps took, and when it moved."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting")
    for name in ("run", "step before", "on the slow rail", "on the other", "slow until moved"):
        table.add_column(name, justify="right")
    for number, steps in found.items():
        cells = [f"{runs[number].total_s:.1f} s", f"{steps.before * 1000:.0f} ms"]
        cells += ["" if value is None else f"{value * 1000:.0f} ms" for value in (steps.slow, steps.moved)]
        cells.append("" if steps.until_moved_s is None else f"{steps.until_moved_s:.1f} s")
        table.add_row(runs[number].name, *cells)
    console.print(table)


def main_slow_rail(options: argparse.Namespace, job: launcher.Job, console: Console) -> int:
    """What `--slow-rail` asks for."""
    told = machine("softrnic")
    bar = Bar(console)
    try:
        with Lab() as lab, bar.progress:
            runs = slow_rail.measure(lab, job, lambda name: bar.announce(name, job.last_step))
    except SuiteError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    found = {number: slow_rail.summarise(run) for number, run in runs.items()}
    print_slow_rail(console, runs, found)
    same = all(exactness.compare(run, runs[1]).is_same for run in runs.values())
    console.print(f"weights: {'as without it, bit for bit' if same else 'NOT as without it'}")
    line = f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, {told['device']}, {told['commit']}"
    console.print(f"{line}; load before: {told['load']:.1f}")
    record = {
        **describe(options, told),
        "steps": {number: steps.to_json() for number, steps in found.items()},
        "step_seconds": {
            number: [step[2] for step in slow_rail.durations(run)] for number, run in runs.items()
        },
        "runs": [run.to_json() for run in runs.values()],
    }
    write(console, options.output, "slow-rail", record, lambda: slow_rail.draw(options.output, runs, line))
    return 0 if same else 1


def describe(options: argparse.Namespace, told: dict[str, Any]) -> dict[str, Any]:
    """What ran where and when, for the JSON file."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **told,
        "model": options.model,
        "ranks": options.ranks,
        "epochs": options.epochs,
        "epoch_steps": options.steps,
        "seed": options.seed,
        "fabric": options.fabric or None,
    }


def write(
    console: Console, directory: Path, name: str, record: dict[str, Any], draw: Callable[[], list[Path]]
) -> None:
    """Write the record and the figure, and say so."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"wrote {path}")
    try:
        for path in draw():
            console.print(f"wrote {path}")
    except ModuleNotFoundError as missing:
        console.print(f"no figure: {missing} (pip install 'shiftverbs[plot]')")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, write. Exit status 1 where weights differ or a run does not come to its end."""
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if importlib.util.find_spec("torch") is None:
        console.print("torch is not there: make train, or apt-get install python3-torch libopenblas0-pthread")
        return 1
    job = launcher.Job(
        options.model, options.ranks, options.epochs, options.steps, options.seed, fabric=options.fabric
    )
    if options.slow_rail:
        return main_slow_rail(options, job, console)
    began = time.monotonic()
    told = machine("softrnic")
    try:
        runs, comparisons = measure(options, job, console)
    except SuiteError as error:
        console.print(f"{error}", style="red", markup=False)
        return 1
    breakdowns = {number: break_down(run, runs[1].total_s) for number, run in runs.items()}
    print_tables(console, breakdowns, comparisons)
    line = f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, {told['device']}, {told['commit']}"
    console.print(f"{line}; load before: {told['load']:.1f}; took {time.monotonic() - began:.0f} s")
    record = {
        **describe(options, told),
        "breakdown": {number: parts.to_json() for number, parts in breakdowns.items()},
        "weights": [one.to_json() for one in comparisons],
        "runs": [run.to_json() for run in runs.values()],
    }
    write(console, options.output, "training", record, lambda: draw(options.output, runs, breakdowns, line))
    return 0 if all(one.is_same for one in comparisons) else 1
