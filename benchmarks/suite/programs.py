# SPDX-License-Identifier: BSD-3-Clause
"""The rows that come from the verbs' costs and from perftest's programs."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.suite.lab import Child, Lab
from benchmarks.suite.rows import Row, limit_row, own_spread, ratio_row, same_row
from benchmarks.suite.slow_commands import BEHIND
from shiftverbs.commands.demo.etcd_server import free_port

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
#: Those that a program runs for each of its QPs: microseconds more where many come in a row, and calls of ours.
IN_A_ROW_US = {"create_qp": 25.0, "destroy_qp": 25.0}
MOST_CALLS = 60
IDLE_QPS = 1000
MORE_IDLE_QPS = 10_000  # not with --quick: they take a minute to be protected
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
        row_of = {
            package: statistics.median(values) / 1000 for package, values in took["in_a_row"][name].items()
        }
        in_row = row_of["shiftverbs"] - row_of["pyverbs"]
        if name in IN_A_ROW_US:
            limit_us = IN_A_ROW_US[name]
            row.target = f"≤ +{limit_us:g} µs in a row, ≤ {MOST_CALLS} calls"
            row.met = in_row <= limit_us and took["calls"][name] <= MOST_CALLS
        elif name != "dereg_mr":  # which has a row of its own, on NICs that take their time
            row.target, row.met = f"≤ +{CONTROL_ADDED_US:g} µs", added <= CONTROL_ADDED_US
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


#: What a NIC's command takes in the rows of slow ones, microseconds; and what dereg_mr may, of the slower NIC's own.
SLOW_COMMAND_US = 100
DEREG_LIMIT = 1.2


def slow_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """What control verbs cost where a NIC's command takes its time, default and backup alike."""
    progress(f"commands of {SLOW_COMMAND_US} µs")
    env = lab.environment("a", "shiftverbs", lab.job())
    rounds = 20 if quick else 100
    with Child("slow_commands", env, "--us", str(SLOW_COMMAND_US), "--rounds", str(rounds)) as child:
        took = child.answer(300)
    rows = []
    for name in ("reg_mr", "create_qp", "destroy_qp", "dereg_mr", BEHIND):
        samples = {package: [ns / 1000 for ns in took[name][package]] for package in PACKAGES}
        limit = DEREG_LIMIT if name == "dereg_mr" else None
        text = f"{name}, NICs whose commands take {SLOW_COMMAND_US} µs"
        rows.append(ratio_row(text, "µs", samples["pyverbs"], samples["shiftverbs"], limit))
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
    """One program's part of the table. sizes: (bytes, messages in a slice); at_length: not with --quick."""

    program: str
    sizes: tuple[tuple[int, int], ...]
    options: tuple[str, ...] = ()
    suffix: str = ""
    at_length: bool = False

    @property
    def latency(self) -> bool:
        """Whether it measures latency."""
        return self.program.endswith("_lat")


SMALL = ((1, 200), (64, 200), (1024, 200), (4096, 200))
LARGE = ((1 << 16, 200), (1 << 20, 16))


def _with_idle(program: str, sizes: tuple[tuple[int, int], ...], count: int, at_length: bool = False) -> Run:
    return Run(program, sizes, ("--idle-qps", str(count)), f", {count:,} idle QPs", at_length)


RUNS = (
    Run("ib_write_lat", SMALL),
    _with_idle("ib_write_lat", SMALL, IDLE_QPS),
    _with_idle("ib_write_bw", LARGE[:1], IDLE_QPS),
    _with_idle("ib_write_lat", ((64, 200),), MORE_IDLE_QPS, at_length=True),
    _with_idle("ib_write_bw", LARGE[:1], MORE_IDLE_QPS, at_length=True),
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


#: How plain UDP goes beside the NIC: whether the kernel takes many datagrams at once through its stack, and its name.
PLAIN_UDP = ((False, "sendmmsg, recvmmsg"), (True, "GSO, GRO"))
#: The NIC's rate, of plain UDP's.
WIRE_SHARE = 0.9


def wire_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """The software NIC's ib_write_bw against plain UDP with datagrams of the same size, slices taking turns."""
    progress("software NIC and plain UDP")
    rounds, count = (4, 4000) if quick else (16, 16000)
    ports = str(free_port()), str(free_port())
    env = lab.environment("a", "pyverbs", "")
    pair = Pair(lab, "ib_write_bw", "pyverbs", ("-s", str(1 << 20)))
    with contextlib.ExitStack() as stack:
        stack.callback(pair.close)
        receiver = stack.enter_context(Child("udp_host", env, "receive", *ports))
        sender = stack.enter_context(Child("udp_host", env, "send", *reversed(ports)))
        receiver.answer()
        sender.answer()
        ours: list[float] = []
        plain: dict[bool, list[float]] = {gso: [] for gso, _ in PLAIN_UDP}
        for index in range(rounds + 1):
            udp = {}
            for gso, _ in PLAIN_UDP:
                for side in (receiver, sender):
                    side.tell(bytes=DATAGRAM, count=count, gso=gso)
                udp[gso] = receiver.answer()["value"]
                sender.answer()
            nic = pair.slice(1 << 20, count * 4096 >> 20)
            if index:
                ours.append(nic)
                for gso, rate in udp.items():
                    plain[gso].append(rate)
    rows = []
    for gso, how in PLAIN_UDP:
        row = ratio_row(
            f"software NIC's ib_write_bw 1 MiB : UDP in C ({how})", "MB/s", plain[gso], ours, None
        )
        assert row.ratio is not None
        row.target, row.met = f"≥ {WIRE_SHARE:.2f} ×", row.ratio >= WIRE_SHARE
        row.note = "left: UDP, right: the NIC"
        rows.append(row)
    return rows


def _within(values: dict[str, list[float]], rounds: int, since: float) -> bool:
    """Whether to take another pair of slices: a loaded machine gets fewer."""
    taken = len(values[PACKAGES[0]])
    return taken < rounds and (taken < MIN_ROUNDS or time.monotonic() - since < ROW_S)


def network_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """perftest's programs on the NIC: slices of the two packages take turns."""
    rows = []
    rounds = 6 if quick else 24
    for run in RUNS:
        if quick and run.at_length:
            continue
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
