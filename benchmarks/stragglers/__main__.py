# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/stragglers.md: `python -m benchmarks.stragglers [--seeds 20] [--minutes 60]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from benchmarks.stragglers.application import Record, false_alarms, verdict_ns
from benchmarks.stragglers.rails import SECOND
from benchmarks.stragglers.stories import FAULT_NS, FAULTS, LOADS, Use, faulty, run_hour, run_now_and_then

POLICIES = ("stay", "oracle", "detector")
PARTS = ("before", "during", "after")


def fault_rows(name: str, use: Use, seeds: range) -> Iterator[str]:
    """A line of the table: one fault under one load, for all seeds together; times are medians, rates means."""
    runs: dict[str, list[Record]] = {policy: [] for policy in POLICIES}
    alarms, times = 0, []
    worth = False
    for seed in seeds:
        for policy in POLICIES:
            record, world = faulty(name, use, seed, policy)
            runs[policy].append(record)
            if policy == "detector":
                alarms += len(false_alarms(record, world))
                times.append(verdict_ns(record, FAULT_NS))
        worth = worth or bool(runs["oracle"][-1].moves)
    known = sorted(t for t in times if t is not None)
    missed = len(times) - len(known)
    text = f"{known[len(known) // 2] / SECOND:.1f}" if known else "–"
    health = sum(record.rate("before") for record in runs["stay"]) / len(seeds)
    rates = [
        f"{100 * sum(record.rate(part) for record in runs[policy]) / len(seeds) / health:.0f}"
        for policy, parts in (("detector", PARTS), ("stay", PARTS[1:2]), ("oracle", PARTS[1:2]))
        for part in parts
    ]
    moves = max(len(record.moves) for record in runs["detector"])
    misses = f"{missed} of {len(times)}" if worth else f"({missed})"
    yield f"| {use.name} | {name} | {text} | {misses} | {alarms} | {' | '.join(rates)} | {moves} |"


def main() -> int:
    """Print the tables; 1 if there was a false alarm in an hour without a fault."""
    parser = argparse.ArgumentParser(description="Stragglers in virtual time.")
    parser.add_argument("--seeds", type=int, default=20, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--minutes", type=int, default=60, help="of varying load without a fault, for each seed"
    )
    parser.add_argument("--fault-seeds", type=int, default=3, help="seeds for each fault under each load")
    settings = parser.parse_args()
    print(
        f"seeds {settings.first} to {settings.first + settings.seeds - 1}; rates in % of the healthy path's"
    )
    print(
        "| load | home | verdict s | missed | false alarms | before | during | after | stay | oracle | moves |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for use in LOADS:
        for name in FAULTS:
            for line in fault_rows(name, use, range(settings.first, settings.first + settings.fault_seeds)):
                print(line, flush=True)
    print("\nslow and well by turns, 30 minutes")
    print("| slow s | well s | moves | moves in the worst minute |\n|---|---|---|---|")
    for slow, well in ((5, 5), (20, 20), (60, 60), (5, 120)):
        record = run_now_and_then(settings.first, slow * SECOND, well * SECOND, 1800 * SECOND)
        worst = max((sum(0 <= b - a < 60 * SECOND for b in record.moves) for a in record.moves), default=0)
        print(f"| {slow} | {well} | {len(record.moves)} | {worst} |", flush=True)
    print(f"\n{settings.minutes} minutes without a fault")
    print("| seed | samples | suspected | false alarms | moves |\n|---|---|---|---|---|")
    total = 0
    for seed in range(settings.first, settings.first + settings.seeds):
        record, world = run_hour(seed, settings.minutes * 60 * SECOND)
        found = false_alarms(record, world)
        total += len(found)
        share = record.suspected_ns / (2 * settings.minutes * 60 * SECOND)
        print(f"| {seed} | {record.samples} | {share:.0%} | {len(found)} | {len(record.moves)} |", flush=True)
    print(f"\nfalse alarms: {total}")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
