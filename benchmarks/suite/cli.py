# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: measures everything, prints the table, writes JSON and figures."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.suite import programs, recovery, start
from benchmarks.suite.lab import ROOT, Lab, SuiteError, machine
from benchmarks.suite.rows import Row

Group = Callable[[Lab, bool, Callable[[str], None]], list[Row]]
#: name, what measures it, steps it announces, whether it needs the software NICs
GROUPS: tuple[tuple[str, Group, int, bool], ...] = (
    ("verbs", programs.verb_rows, 1, True),
    ("slow", programs.slow_rows, 1, True),
    ("wire", programs.wire_rows, 1, True),
    ("network", programs.network_rows, len(programs.RUNS), False),
    ("start", start.start_rows, 1, True),
    ("failures", recovery.failure_rows, 2 * len(recovery.MODES), True),
    ("many", recovery.many_rows, 2, True),
)
TIMELINES = "timelines"
TIMELINE_STEPS = len(recovery.TRAFFIC) * len(recovery.FAULTS)


def number(value: float | None) -> str:
    """Return a figure with three or four digits."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def print_table(console: Console, rows: Sequence[Row]) -> None:
    """Print what was measured, and what has missed its target."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", overflow="fold", ratio=1)
    for name in ("pyverbs", "shiftverbs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("ratio", "quartiles"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("met", no_wrap=True)
    table.add_column("", overflow="fold", ratio=1)
    for row in rows:
        spread = "" if row.spread is None else f"{number(row.spread[0])} … {number(row.spread[1])}"
        met = {True: "[green]yes[/]", False: "[red]MISSED[/]", None: ""}[row.met]
        cells = (row.name, number(row.pyverbs), number(row.shiftverbs), row.unit, number(row.ratio), spread)
        table.add_row(*cells, row.target, met, row.note)
    console.print(table)
    judged = [row for row in rows if row.met is not None]
    missed = sum(1 for row in judged if not row.met)
    console.print(f"{len(judged) - missed} of {len(judged)} targets met")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    known = [name for name, *_ in GROUPS] + [TIMELINES]
    parser.add_argument("--quick", action="store_true", help="few repetitions: the figures are rough")
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {','.join(known)}")
    parser.add_argument("--device", metavar="DEV", help="a NIC of this machine instead of the software one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table as JSON")
    default = ROOT / "build" / "bench"
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=default,
        help="figures, and history.jsonl to which each run appends (default build/bench)",
    )
    parser.add_argument("--no-figures", action="store_true", help="draw nothing")
    options = parser.parse_args(argv)
    options.groups = options.only.split(",") if options.only else known
    for name in options.groups:
        if name not in known:
            parser.error(f"--only: {name!r} is none of {', '.join(known)}")
    return options


def measure(options: argparse.Namespace, console: Console) -> tuple[list[Row], Any, Any]:
    """Run what was asked for. Returns rows, timelines and their scenarios' results."""
    rows: list[Row] = []
    timelines: list[Any] = []
    results: list[Any] = []
    groups = [g for g in GROUPS if g[0] in options.groups and (options.device is None or not g[3])]
    lines = TIMELINES in options.groups and options.device is None
    steps = sum(steps for _, _, steps, _ in groups) + (TIMELINE_STEPS if lines else 0)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Lab(options.device) as lab, Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("starting", total=steps)

        def progress(what: str) -> None:
            # A step announced means that the one before is done.
            done = bar.tasks[task].description != "starting"
            bar.update(task, description=what, advance=1 if done else 0)

        for name, group, _, _ in groups:
            try:
                rows.extend(group(lab, options.quick, progress))
            except SuiteError as error:
                bar.console.print(f"[red]{name}: {error}[/]")
                rows.append(
                    Row(name, "measured", False, "", None, float("nan"), note=str(error).splitlines()[0])
                )
        if lines:
            try:
                timelines, results = recovery.timelines(lab, options.quick, progress)
            except SuiteError as error:
                bar.console.print(f"[red]{TIMELINES}: {error}[/]")
        bar.update(task, description="done", completed=steps)
    return rows, timelines, results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit status 0 even where targets are missed: that is a result, not an error."""
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 200)
    begun = time.monotonic()
    told = machine(options.device or "softrnic")
    rows, timelines, results = measure(options, console)
    print_table(console, rows)
    line = f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, {told['device']}, {told['commit']}"
    console.print(f"{line}; load before: {told['load']:.1f}; took {time.monotonic() - begun:.0f} s")
    found = [row.to_json() for row in rows]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    options.output.mkdir(parents=True, exist_ok=True)
    record = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **told,
        "quick": options.quick,
        "rows": found,
        "scenarios": [result.to_json() for result in results],
    }
    with (options.output / "history.jsonl").open("a", encoding="utf-8") as history:
        history.write(json.dumps(record, ensure_ascii=False) + "\n")
    if not options.no_figures:
        try:
            from benchmarks.suite.figures import draw

            written = draw(options.output, rows, timelines, results, line)
        except ModuleNotFoundError as missing:
            console.print(f"no figures: {missing} (pip install 'shiftverbs[plot]')")
        else:
            for path in written:
                console.print(f"wrote {path}")
    return 0
