# SPDX-License-Identifier: BSD-3-Clause
"""The rows that come from the verbs' costs and from perftest's programs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shiftverbs.commands.demo.etcd_server import free_port

from .lab import Child, Lab
from .rows import Row, limit_row, own_spread, ratio_row, same_row

PACKAGES = ("pyverbs", "shiftverbs")
#: At most so many times pyverbs' cost, by verb.
DATA_LIMITS = {
    "post_send + poll": 0.15,
    "post_send": None,
    "poll of 16": 0.10,
    "post_recv": 1.5,
    "empty poll": 1.0,
    "SGE + SendWR": 0.35,
    "SGE + RecvWR": None,
}
#: Microseconds that a control verb may cost more than with pyverbs.
CONTROL_ADDED_US = 20.0
IDLE_QPS = 1000
#: A row of the network takes this long at most, in seconds, but never fewer pairs than MIN_ROUNDS.
ROW_S = 6.0
MIN_ROUNDS = 6

#: Told after each step how many are done, of how many, and what comes next.
Progress = Callable[[str], None]


def verb_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """What each verb costs, on the null device."""
    progress("verbs on the null device")
    rounds, control = (8, 20) if quick else (40, 100)
    env = lab.environment("a", "shiftverbs", lab.job(), softrnic="null")
    with Child("verbs_cost", env, "--rounds", str(rounds), "--control-rounds", str(control)) as child:
        took = child.answer(300)
    rows = []
    for name, limit in DATA_LIMITS.items():
        samples = took["data"][name]
        rows.append(ratio_row(f"{name} (null)", "ns", samples["pyverbs"], samples["shiftverbs"], limit))
    for name, samples in took["control"].items():
        base = [ns / 1000 for ns in samples["pyverbs"]]
        ours = [ns / 1000 for ns in samples["shiftverbs"]]
        row = ratio_row(f"{name} (null)", "µs", base, ours, None)
        added = statistics.median(ours) - statistics.median(base)
        row.target, row.met = f"≤ +{CONTROL_ADDED_US:g} µs", added <= CONTROL_ADDED_US
        row_of = {
            package: statistics.median(values) / 1000 for package, values in took["in_a_row"][name].items()
        }
        in_row = row_of["shiftverbs"] - row_of["pyverbs"]
        row.note = f"{added:+.1f} µs; many in a row {in_row:+.1f}; {took['calls'][name]} calls"
        rows.append(row)
    memory = took["memory"]
    rows.append(
        limit_row(
            f"journal of a QP of {memory['depth']} + {memory['depth']} WRs",
            "bytes",
            [memory["journal_bytes"]],
            None,
            "sized from the QP's capacities",
        )
    )
    return rows


class Pair:
    """Server and client of one program with one package, connected and waiting for slices.

    :param program: ib_write_lat and its like
    :param options: the program's own, for both sides
    :param hosts: where server and client are
    """

    def __init__(
        self,
        lab: Lab,
        program: str,
        package: str,
        options: tuple[str, ...],
        hosts: tuple[str, str] = ("a", "b"),
    ) -> None:
        port, job = str(free_port()), lab.job()
        common = ["--module", package, "-d", lab.device, "-p", port, *options]
        if package == "shiftverbs" and lab.is_soft:
            common.append("--protected")
        self.sides: list[Child] = []
        try:
            server, client = (lab.environment(host, package, job) for host in hosts)
            self.sides.append(Child("perf_host", server, program, *common))
            self.sides.append(Child("perf_host", client, program, *common, "127.0.0.1"))
            for side in self.sides:
                side.answer()
        except BaseException:
            self.close()
            raise

    def slice(self, size: int, iters: int) -> float:
        """Measure once; the client's figure."""
        self.begin(size, iters)
        return self.end()

    def begin(self, size: int, iters: int) -> None:
        """Have both sides begin."""
        for side in self.sides:
            side.tell(do="slice", size=size, iters=iters)

    def end(self) -> float:
        """The client's figure of what began."""
        _, value = [side.answer()["value"] for side in self.sides]
        return float(value)

    def close(self) -> None:
        """End both sides."""
        for side in self.sides:
            side.close()


@contextlib.contextmanager
def both_packages(lab: Lab, program: str, options: tuple[str, ...]) -> Iterator[dict[str, Pair]]:
    """One program with each package, ready at the same time."""
    with contextlib.ExitStack() as stack:
        pairs = {}
        for package in PACKAGES:
            pairs[package] = pair = Pair(lab, program, package, options)
            stack.callback(pair.close)
        yield pairs


@dataclass(frozen=True)
class Run:
    """One program's part of the table. sizes: (bytes, messages in a slice)."""

    program: str
    sizes: tuple[tuple[int, int], ...]
    options: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def latency(self) -> bool:
        """Whether it measures latency."""
        return self.program.endswith("_lat")


SMALL = ((1, 200), (64, 200), (1024, 200), (4096, 200))
LARGE = ((1 << 16, 200), (1 << 20, 16))
RUNS = (
    Run("ib_write_lat", SMALL),
    Run("ib_write_lat", SMALL, ("--idle-qps", str(IDLE_QPS)), f", {IDLE_QPS:,} idle QPs"),
    Run("ib_send_lat", ((64, 200),)),
    Run("ib_read_lat", ((64, 200),)),
    Run("ib_atomic_lat", ((8, 200),)),
    Run("ib_write_bw", LARGE),
    Run("ib_send_bw", LARGE),
    Run("ib_read_bw", LARGE),
)


def _size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


#: BTH and ICRC around 4 KiB of payload.
DATAGRAM = 4096 + 12 + 4


def wire_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """The software NIC's ib_write_bw against plain UDP with datagrams of the same size, slices taking turns."""
    progress("software NIC and plain UDP")
    rounds, count = (4, 2000) if quick else (16, 8000)
    port = str(free_port())
    env = lab.environment("a", "pyverbs", "")
    pair = Pair(lab, "ib_write_bw", "pyverbs", ("-s", str(1 << 20)))
    with contextlib.ExitStack() as stack:
        stack.callback(pair.close)
        receiver = stack.enter_context(Child("udp_host", env, "receive", port))
        sender = stack.enter_context(Child("udp_host", env, "send", port))
        receiver.answer()
        sender.answer()
        plain, ours = [], []
        for index in range(rounds + 1):
            for side in (receiver, sender):
                side.tell(bytes=DATAGRAM, count=count)
            udp = receiver.answer()["value"]
            sender.answer()
            nic = pair.slice(1 << 20, count * 4096 >> 20)
            if index:
                plain.append(udp)
                ours.append(nic)
    row = ratio_row("software NIC's ib_write_bw 1 MiB : plain UDP", "MB/s", plain, ours, None)
    assert row.ratio is not None
    row.target, row.met = "≥ 0.50 ×", row.ratio >= 0.5
    row.note = "left: UDP, right: the NIC"
    return [row]


def _within(values: dict[str, list[float]], rounds: int, since: float) -> bool:
    """Whether to take another pair of slices: a loaded machine gets fewer."""
    taken = len(values[PACKAGES[0]])
    return taken < rounds and (taken < MIN_ROUNDS or time.monotonic() - since < ROW_S)


def network_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """perftest's programs on the NIC: slices of the two packages take turns."""
    rows = []
    rounds = 6 if quick else 24
    for run in RUNS:
        progress(run.program + run.suffix)
        largest = max(size for size, _ in run.sizes)
        # Atomics have one size, and no option for it.
        options = () if run.program == "ib_atomic_lat" else ("-s", str(largest))
        with both_packages(lab, run.program, options + run.options) as pairs:
            for size, iters in run.sizes:
                values: dict[str, list[float]] = {package: [] for package in PACKAGES}
                for package in PACKAGES:
                    pairs[package].slice(size, iters)  # warm
                since = time.monotonic()
                while _within(values, rounds, since):
                    for package in PACKAGES:
                        values[package].append(pairs[package].slice(size, iters))
                row = same_row(
                    f"{run.program} {_size_text(size)}{run.suffix}",
                    "µs" if run.latency else "MB/s",
                    values["pyverbs"],
                    values["shiftverbs"],
                    more_is_better=not run.latency,
                )
                row.samples = {**values, "size": size, "own_spread": own_spread(values["pyverbs"])}
                rows.append(row)
    return rows
