# SPDX-License-Identifier: BSD-3-Clause
"""Pulls of tensors beside gRPC, of 4 KiB to 256 MiB, over the same loopback, of the same bytes.

Three publishers and three pullers stand side by side, each a process of its own, and take turns in short slices:
gRPC, shiftverbs.tensors as plain pyverbs, and the same with failover, protected. The last two have the software NIC,
gRPC has the kernel's TCP. A pull goes into memory that is there, for gRPC into new bytes, since it has nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.suite.lab import Child, Lab, machine

KINDS = ("gRPC", "pyverbs", "shiftverbs")
SIZES = [4 << 10 << 2 * i for i in range(9)]
#: Bytes of a slice, and how many pulls it has at least and at most.
SLICE_BYTES, LEAST, MOST = 32 << 20, 2, 50


def hosts(lab: Lab, stack: contextlib.ExitStack, sizes: list[int]) -> dict[str, Child]:
    """The pullers, connected, by kind."""
    pullers = {}
    for kind in KINDS:
        what = "grpc" if kind == "gRPC" else "node"
        job = lab.job()
        ends = []
        for role, host in (("serve", "a"), ("pull", "b")):
            env = lab.environment(host, "shiftverbs" if kind == "shiftverbs" else "pyverbs", job)
            if kind != "shiftverbs":
                env["SHIFTVERBS_DISABLE"] = "1"
            if not lab.is_soft:
                env["SHIFTVERBS_DEVICE"] = lab.device
            ends.append(stack.enter_context(Child("tensors_host", env, role, what, *map(str, sizes))))
        ends[1].ask(address=ends[0].ask()["address"])
        pullers[kind] = ends[1]
    return pullers


def measure(pullers: dict[str, Child], size: int, rounds: int) -> dict[str, float]:
    """Seconds of a pull of that many bytes, by kind: the median of all slices."""
    count = max(LEAST, min(MOST, SLICE_BYTES // size))
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, puller in pullers.items():
            seconds[kind] += puller.ask(size=size, count=count)["seconds"]
    return {kind: statistics.median(values) for kind, values in seconds.items()}


def name_of(size: int) -> str:
    """4 KiB, 256 MiB."""
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def rate(size: int, seconds: float) -> str:
    """Time and MB/s of a pull."""
    took = f"{seconds * 1e6:,.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"
    return f"{took}, {size / seconds / 1e6:,.0f} MB/s"


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table in Markdown. arguments: the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="slices of each kind and size (default: 5)")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="bytes of the largest tensor")
    parser.add_argument("--device", help="a NIC of the machine's own instead of the software NIC")
    parser.add_argument("--json", type=Path, help="write machine and seconds to this file, too")
    options = parser.parse_args(arguments)
    sizes = [size for size in SIZES if size <= options.most]
    rows: list[dict[str, Any]] = []
    with Lab(options.device) as lab, contextlib.ExitStack() as stack:
        about = machine(lab.device)
        print("machine:", json.dumps(about))
        pullers = hosts(lab, stack, sizes)
        print("\n| tensor | gRPC | pyverbs | shiftverbs | pyverbs : gRPC | shiftverbs : pyverbs |")
        print("|---|---|---|---|---|---|")
        for size in sizes:
            took = measure(pullers, size, options.rounds)
            rows.append({"bytes": size, **took})
            cells = [rate(size, took[kind]) for kind in KINDS]
            ratios = [took["pyverbs"] / took["gRPC"], took["shiftverbs"] / took["pyverbs"]]
            print(
                f"| {name_of(size)} | {' | '.join(cells)} | {ratios[0]:.2f} × | {ratios[1]:.2f} × |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "seconds": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
