# SPDX-License-Identifier: BSD-3-Clause
"""`benchmarks/allreduce.py`: bus bandwidth of torch's allreduce, with what it can be at most beside it.

Four things take turns in slices: the shift backend protected, the same on plain pyverbs (SHIFTVERBS_DISABLE=1), gloo
over the same loopback, and `ib_write_bw -b` with plain pyverbs on the same NICs, of which one direction counts. With
four ranks two pairs of the latter run at once: as many NICs then send and receive as the ring has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.suite.lab import Child, Lab, SuiteError, machine
from benchmarks.suite.programs import Pair
from benchmarks.suite.rows import quartiles, ratios

HOSTS = "abcd"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
#: The wire's messages: perftest's default size, and how many in a slice.
WIRE_SIZE, WIRE_ITERS = 64 * KIB, 320
WIRE, PROTECTED, PLAIN, GLOO = "ib_write_bw -b / 2", "shift", "shift, plain pyverbs", "gloo"
#: From this size on there are goals.
GOAL_SIZE = MIB
WIRE_GOAL, PLAIN_GOAL = 0.80, 0.95
MB = 2**20


@dataclass(frozen=True)
class Result:
    """One size with so many ranks. Bandwidths in MB/s (2^20), medians; ratios: medians over the rounds, quartiles."""

    ranks: int
    size: int
    bandwidths: Mapping[str, float]
    to_wire: float
    to_wire_quartiles: tuple[float, float]
    to_plain: float
    to_plain_quartiles: tuple[float, float]

    @property
    def met(self) -> bool | None:
        """Whether it meets the goals; None where there are none."""
        if self.size < GOAL_SIZE:
            return None
        return self.to_wire >= WIRE_GOAL and self.to_plain >= PLAIN_GOAL


def bus_bandwidth(ranks: int, size: int, took_s: float) -> float:
    """Return what each rank sends, and receives, in that time at least: 2 (n - 1) / n of the size, in MB/s (2^20)."""
    return 2 * (ranks - 1) / ranks * size / took_s / MB


def iterations(size: int) -> int:
    """Return how many allreduces make a slice."""
    return max(1, min(100, 8 * MIB // size))


class Group:
    """The ranks of one backend, each on a host of its own."""

    def __init__(self, lab: Lab, backend: str, ranks: int, file: str, env: Mapping[str, str]) -> None:
        self.ranks = ranks
        self._children: list[Child] = []
        package = "pyverbs" if backend == "gloo" or "SHIFTVERBS_DISABLE" in env else "shiftverbs"
        job = lab.job()
        try:
            for rank in range(ranks):
                base = lab.environment(HOSTS[rank], package, job)
                base |= {
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "PYTHONWARNINGS": "ignore",
                    **env,
                }
                arguments = (backend, str(rank), str(ranks), file)
                self._children.append(Child("allreduce_host", base, *arguments))
            for child in self._children:
                child.answer()
        except BaseException:
            self.close()
            raise

    def slice(self, size: int) -> float:
        """Measure once; the bus bandwidth by the slowest rank."""
        for child in self._children:
            child.tell(size=size, iters=iterations(size))
        took = max(float(child.answer()["value"]) for child in self._children)
        return bus_bandwidth(self.ranks, size, took)

    def close(self) -> None:
        """End all ranks."""
        for child in self._children:
            child.close()


class Wire:
    """ib_write_bw -b between the hosts, two and two."""

    def __init__(self, lab: Lab, ranks: int) -> None:
        self._pairs: list[Pair] = []
        try:
            for first in range(0, ranks, 2):
                hosts = (HOSTS[first], HOSTS[first + 1])
                self._pairs.append(Pair(lab, "ib_write_bw", "pyverbs", ("-b", "-s", str(WIRE_SIZE)), hosts))
        except BaseException:
            self.close()
            raise

    def slice(self, _: int = 0) -> float:
        """Measure once; one direction of a pair, the mean of all pairs, in MB/s (2^20)."""
        for pair in self._pairs:
            pair.begin(WIRE_SIZE, WIRE_ITERS)
        return statistics.fmean(pair.end() for pair in self._pairs) / 2

    def close(self) -> None:
        """End all."""
        for pair in self._pairs:
            pair.close()


def measure(lab: Lab, ranks: int, sizes: Sequence[int], rounds: int, tell: Callable[[Result], None]) -> None:
    """Measure all sizes with so many ranks; tell gets each result.

    :raises SuiteError: a child fails
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="shiftverbs-allreduce-"))
        kinds: dict[str, Wire | Group] = {WIRE: Wire(lab, ranks)}
        stack.callback(kinds[WIRE].close)
        for name, backend, env in (
            (PROTECTED, "shift", {}),
            (PLAIN, "shift", {"SHIFTVERBS_DISABLE": "1"}),
            (GLOO, "gloo", {}),
        ):
            kinds[name] = Group(lab, backend, ranks, f"{directory}/{len(kinds)}", env)
            stack.callback(kinds[name].close)
        for size in sizes:
            tell(_one_size(kinds, ranks, size, rounds))


def _one_size(kinds: Mapping[str, Wire | Group], ranks: int, size: int, rounds: int) -> Result:
    values: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        order = list(kinds) if number % 2 else list(kinds)[::-1]
        for name in order:
            value = kinds[name].slice(size)
            if number:  # the first one warms up
                values[name].append(value)
    wire = ratios(values[WIRE], values[PROTECTED])
    plain = ratios(values[PLAIN], values[PROTECTED])
    return Result(
        ranks,
        size,
        {name: statistics.median(taken) for name, taken in values.items()},
        statistics.median(wire),
        quartiles(wire),
        statistics.median(plain),
        quartiles(plain),
    )


def size_text(size: int) -> str:
    """Return "4 KiB" or "1 MiB"."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size / KIB:g} KiB"


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Print what was measured."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ranks", "size", PROTECTED, PLAIN, GLOO, WIRE):
        table.add_column(name, justify="right")
    for name in ("shift : wire", "shift : plain", "met"):
        table.add_column(name, justify="right")
    for result in results:
        found = result.bandwidths
        cells = [f"{found[name]:.0f}" for name in (PROTECTED, PLAIN, GLOO, WIRE)]
        for ratio, (low, high) in (
            (result.to_wire, result.to_wire_quartiles),
            (result.to_plain, result.to_plain_quartiles),
        ):
            cells.append(f"{ratio:.2f} ({low:.2f} … {high:.2f})")
        met = {True: "yes", False: "MISSED", None: ""}[result.met]
        table.add_row(str(result.ranks), size_text(result.size), *cells, met)
    console.print(
        "Bus bandwidth in MB/s (2^20), medians; ratios: medians over the rounds and their quartiles"
    )
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exits where it is wrong."""
    parser = argparse.ArgumentParser(prog="allreduce.py", description=__doc__)
    parser.add_argument(
        "--ranks", default="2,4", help="how many, 2 or 4, or several with commas (default %(default)s)"
    )
    parser.add_argument(
        "--sizes", help="bytes, with commas, multiples of 4 (default 4 KiB to 64 MiB)", metavar="BYTES"
    )
    parser.add_argument("--rounds", type=int, default=15, help="slices of each (default %(default)s)")
    parser.add_argument("--device", metavar="DEV", help="a NIC of this machine instead of the software one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table as JSON")
    options = parser.parse_args(argv)
    try:
        options.ranks = [int(text) for text in options.ranks.split(",")]
        options.sizes = [int(text) for text in options.sizes.split(",")] if options.sizes else list(SIZES)
    except ValueError as error:
        parser.error(str(error))
    if set(options.ranks) - {2, 4}:
        parser.error("--ranks: 2 or 4")
    if any(size < 4 or size % 4 for size in options.sizes):
        parser.error("--sizes: multiples of 4")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit status 0 even where goals are missed: that is a result, not an error."""
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    begun = time.monotonic()
    told = machine(options.device or "softrnic")
    results: list[Result] = []

    def tell(result: Result) -> None:
        results.append(result)
        print(f"{result.ranks} ranks, {size_text(result.size)}: done", file=sys.stderr, flush=True)

    try:
        with Lab(options.device) as lab:
            for ranks in options.ranks:
                measure(lab, ranks, options.sizes, options.rounds, tell)
    except SuiteError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(console, results)
    line = f"{told['cpu']}, {told['cores']} cores, Linux {told['kernel']}, {told['device']}, {told['commit']}"
    console.print(f"{line}; load before: {told['load']:.1f}; took {time.monotonic() - begun:.0f} s")
    if options.json:
        rows: list[dict[str, Any]] = [asdict(result) | {"met": result.met} for result in results]
        options.json.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0
