# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.fabric`: congestion and flow control on rails, tables and figures (docs/fabric.md)."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import incast
from benchmarks.fabric import rail
from benchmarks.fabric.cases import (
    HEADERS,
    LINE,
    PAYLOAD,
    SEED,
    SENDERS,
    Case,
    Unfair,
    fixed_point,
    run_incasts,
    run_small_buffer,
    run_unfair,
)
from benchmarks.suite.lab import ROOT, machine

#: Between processes: what the rail has, how many send, seconds until it is measured, and for how long.
REAL = {
    "DCQCN": ("rate=40G,buffer=10M,dcqcn=sigcomm15,dilation=250", 2, 20, 8),
    "PFC": ("rate=40G,buffer=1M,pfc=on,xoff=100K,dilation=500", 2, 3, 6),
    "none": ("rate=40G,buffer=300K,dilation=500", 2, 3, 20),
    "small buffer, none": ("rate=40G,buffer=300K,dilation=500", 4, 1, 18),
    "small buffer, DCQCN": ("rate=40G,buffer=300K,dcqcn=sigcomm15,dilation=500", 4, 1, 18),
    "small buffer, PFC": ("rate=40G,buffer=300K,pfc=on,dilation=500", 4, 1, 9),
    "small buffer, PFC and DCQCN": ("rate=40G,buffer=300K,pfc=on,dcqcn=sigcomm15,dilation=500", 4, 1, 18),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fabric", description=__doc__)
    parser.add_argument("--no-processes", action="store_true", help="only what runs in virtual time")
    default = ROOT / "build" / "fabric"
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=default,
        help="figures and numbers (default build/fabric)",
    )
    return parser.parse_args(argv)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def incast_rows(cases: Iterable[Case], *, points: bool) -> Iterable[list[str]]:
    """One for each run: control, senders, and what became of them. points: with DCQCN's, where there is one."""
    for case in cases:
        has_point = points and "DCQCN" in case.control and case.senders < max(SENDERS)
        yield [
            case.control,
            f"{case.senders}",
            f"{case.queue / 1000:.1f} KB",
            f"{fixed_point(case.senders, PAYLOAD + HEADERS) / 1000:.1f} KB" if has_point else "",
            f"{case.throughput:.1%}",
            f"{case.unfairness:.1%}",
            f"{case.dropped}",
            f"{case.again:.1%}",
            f"{case.pauses}",
        ]


INCAST_HEADER = (
    "control",
    "senders",
    "queue, mean",
    "fixed point",
    "throughput",
    "farthest from an equal share",
    "dropped",
    "sent again",
    "pause frames",
)


def unfair_rows(unfair: Iterable[Unfair]) -> Iterable[list[str]]:
    """One for each number of flows, Gb/s."""
    for one in unfair:
        fair, idle = LINE / one.senders, LINE * (1 - 1 / one.senders)
        values = (fair, one.alone, one.shared, idle, one.victim, one.spared)
        yield [f"{one.senders}", *(f"{value / 1e9:.1f}" for value in values)]


UNFAIR_HEADER = (
    "flows",
    "equal share",
    "alone on its port",
    "the others, each",
    "left for the victim",
    "victim, PFC",
    "victim, PFC and DCQCN",
)
REAL_HEADER = ("control", "senders", "queue, mean", "throughput", "dropped", "pause frames")


def real_rows(measured: dict[str, incast.Incast | None]) -> Iterable[list[str]]:
    """One for each run between processes."""
    for name, one in measured.items():
        if one is None:
            yield [name, "", "a process ended early", "", "", ""]
            continue
        yield [
            name,
            f"{one.senders}",
            f"{one.queue / 1000:.1f} KB",
            f"{one.throughput:.1%}",
            f"{one.dropped}",
            f"{one.pauses}",
        ]


def run_processes() -> dict[str, incast.Incast | None]:
    """Measure them, one after the other."""
    measured = {}
    for name, (limits, senders, settle, seconds) in REAL.items():
        print(f"processes: {name} ({settle + seconds} s) ...", file=sys.stderr, flush=True)
        options = ["--senders", f"{senders}", "--settle", f"{settle}", "--seconds", f"{seconds}", limits]
        measured[name] = incast.run(incast.parser().parse_args(options))
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Exit status 1 where the program cannot be built or a process ended early."""
    options = parse(argv)
    began, told = time.monotonic(), machine("softrnic")
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        program = rail.build(options.output / "rail")
        cases, small = list(run_incasts(program)), list(run_small_buffer(program))
        unfair = [run_unfair(program, senders) for senders in SENDERS]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the model in virtual time: {error}", file=sys.stderr)
        return 1
    measured = {} if options.no_processes else run_processes()
    parts = [
        f"Incasts in virtual time (seed {SEED}):\n\n" + table(INCAST_HEADER, incast_rows(cases, points=True)),
        "Shares under PFC, Gb/s:\n\n" + table(UNFAIR_HEADER, unfair_rows(unfair)),
        "Four senders and a buffer of 300 KB:\n\n" + table(INCAST_HEADER, incast_rows(small, points=False)),
    ]
    if measured:
        parts.append("Between processes:\n\n" + table(REAL_HEADER, real_rows(measured)))
    line = f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, {told['commit']}"
    text = "\n".join(parts)
    print(f"{text}\n{line}; load before: {told['load']:.1f}; took {time.monotonic() - began:.0f} s")
    (options.output / "fabric.md").write_text(text, encoding="utf-8")
    write_json(options.output / "fabric.json", told, [*cases, *small], measured)
    try:
        from benchmarks.fabric.figure import draw

        for path in draw(options.output, cases, unfair, "virtual time, 40 Gb/s, packets of 1000 bytes"):
            print(f"wrote {path}")
    except ModuleNotFoundError as missing:
        print(f"no figure: {missing} (pip install 'shiftverbs[plot]')")
    return 1 if None in measured.values() else 0


def write_json(
    path: Path, told: dict[str, Any], cases: Iterable[Case], measured: dict[str, incast.Incast | None]
) -> None:
    """All numbers, for programs."""
    record = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **told,
        "seed": SEED,
        "virtual": [
            {
                "control": case.control,
                "senders": case.senders,
                "queue": case.queue,
                "rates": case.incast,
                "dropped": case.dropped,
                "again": case.again,
                "pauses": case.pauses,
            }
            for case in cases
        ],
        "processes": {name: one and vars(one) for name, one in measured.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
