# SPDX-License-Identifier: BSD-3-Clause
"""The rows about failures: detection, fallback, failback, many QPs, and the traffic through a failure."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.suite import cold
from benchmarks.suite.failure_host import PATIENT
from benchmarks.suite.lab import Child, Lab, SuiteError
from benchmarks.suite.programs import Progress
from benchmarks.suite.rows import Row, limit_row
from shiftverbs.commands.demo.host import HostPair
from shiftverbs.commands.demo.options import Plan
from shiftverbs.commands.demo.scenario import Lab as DemoLab
from shiftverbs.softrnic import faults

MODES = ("polling", "blocked", "spinning")
AWAY_S, HOME_S = 15.0, 30.0
MANY = 1000
#: What the retry timers take before the NIC reports an error.
RETRY_MS = (PATIENT[1] + 1) * 4.096e-3 * 2 ** PATIENT[0]

FALLBACK_MS = {"polling": 1.0, "blocked": 1.0, "spinning": 10.0}
DETECT_MS = {"polling": 1.0, "blocked": 1.0, "spinning": 15.0}
SILENT_MS = 50.0
#: Seconds for a thousand QPs to be protected, and to come home; bytes that each weighs beyond pyverbs' own.
MANY_S = 1.0
WEIGHT = 12_000
#: Fallback is also measured by what one round trip with events costs in the same run.
FALLBACK_TRIPS = 10.0

BIN_NS = 50_000_000  # the programs report about as often
SHOWN_BEFORE_NS = 500_000_000

TRAFFIC = ("write_imm", "send", "read")
FAULTS = ("initiator_port", "responder_port", "switch")


@dataclass(frozen=True)
class Failure:
    """One failure and the way back, in milliseconds; None where it was not seen."""

    detect_ms: float | None
    fallback_ms: float | None
    failback_ms: float | None


class Hosts:
    """Host a and host b, connected.

    :param mode: see failure_host
    """

    def __init__(self, lab: Lab, package: str, mode: str) -> None:
        self.mode, self.package = mode, package
        job = lab.job()
        self.both: list[Child] = []
        try:
            for host in "ab":
                env = lab.environment(host, package, job)
                self.both.append(Child("failure_host", env, package, lab.device))
            for child in self.both:
                child.answer()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End both processes."""
        for child in self.both:
            child.close()

    def ask_both(self, **command: Any) -> list[dict[str, Any]]:
        """Send one command to both at once; return the answers of a and b."""
        for child in self.both:
            child.tell(**command)
        return [child.answer() for child in self.both]

    def connect(self, protect: bool = True, **how: Any) -> tuple[float, float]:
        """Open and connect; return the slower side's times in ms: of making the QPs, of connecting them."""
        for role, child in enumerate(self.both):
            child.tell(do="open", mode=self.mode, role=role, **how)
        opened = [child.answer() for child in self.both]
        for child, other in zip(self.both, reversed(opened), strict=True):
            child.tell(do="connect", peer=other["peer"])
        connected = [child.answer() for child in self.both]
        if protect:
            self.ask_both(do="protect")
        return max(o["took_ms"] for o in opened), max(c["took_ms"] for c in connected)

    def wait(self, what: str, reached: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
        """Wait until both sides' status is as wanted.

        :raises SuiteError: it is not in time
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.ask_both(do="status")
            if all(reached(state) for state in states):
                return
            if time.monotonic() > deadline:
                raise SuiteError(f"{self.mode}: not {what} within {timeout_s:g} s: {states}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the programs: a first, which tells b where b is asleep."""
        for child in self.both:
            child.ask(do="stop")


@contextlib.contextmanager
def hosts(lab: Lab, package: str, mode: str) -> Iterator[Hosts]:
    """Two hosts for a while."""
    pair = Hosts(lab, package, mode)
    try:
        yield pair
    finally:
        pair.end()


def _since(earlier_ns: int, times: list[int | None]) -> float | None:
    """The time in ms to the earliest of these that is later."""
    later = [t for t in times if t is not None and t > earlier_ns]
    return (min(later) - earlier_ns) / 1e6 if later else None


def _one_failure(
    pair: Hosts, fail: Callable[[], None], impatient: bool = False
) -> tuple[Failure, list[float]]:
    """A fresh connection, one failure, the way back. Returns the times, and a's round trips before the failure."""
    pair.connect(impatient=impatient)
    pair.ask_both(do="run")
    time.sleep(0.15)
    trips = pair.both[0].ask(do="status", full=True)["trips_us"]
    asked_ns = time.monotonic_ns()
    fail()
    failed_ns = time.monotonic_ns()
    changed = max(faults.device(f"{host}/soft0").changed_ns for host in "ab")
    if changed >= asked_ns:  # however long this process has been waiting for its turn since
        failed_ns = changed
    pair.wait("on the backup", lambda s: s["away"] == 1, AWAY_S)
    time.sleep(0.05)
    away = [answer["durations"][0] for answer in pair.ask_both(do="status", full=True)]
    healed_ns = time.monotonic_ns()
    faults.clear()
    pair.wait("home", lambda s: s["home"] == 1, HOME_S)
    home = [answer["durations"][0]["home_ns"] for answer in pair.ask_both(do="status", full=True)]
    pair.stop()
    pair.ask_both(do="close")
    triggers = [d["trigger_ns"] for d in away]
    detect_ms = _since(failed_ns, triggers)
    fallback_ms = None
    if detect_ms is not None:
        trigger = min(t for t in triggers if t is not None and t > failed_ns)
        fallback_ms = _since(trigger, [d["first_wc_ns"] for d in away])
    failback = [(t - healed_ns) / 1e6 for t in home if t is not None and t > healed_ns]
    return Failure(detect_ms, fallback_ms, max(failback) if failback else None), trips


def failure_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """Detection and fallback, by what the application does and what fails."""
    times = 3 if quick else 12
    rows: list[Row] = []
    found: dict[tuple[str, str], list[Failure]] = {}
    trips: list[float] = []
    faults_by_name: dict[str, Callable[[], None]] = {
        "port": lambda: faults.down("a/soft0"),
        "switch": lambda: faults.switch_down("rail0"),
        "error": lambda: faults.switch_down("rail0"),  # and the NIC does not try for long
    }
    # Blocked first: its round trips are the measure of the others.
    for mode in ("blocked", "polling", "spinning"):
        with hosts(lab, "shiftverbs", mode) as pair:
            for name, fail in faults_by_name.items():
                progress(f"failures: {mode}, {name}")
                for _ in range(times):
                    failure, seen = _one_failure(pair, fail, name == "error")
                    found.setdefault((mode, name), []).append(failure)
                    if mode == "blocked":
                        trips.extend(seen)
    trip_us = statistics.median(trips)
    rows.append(limit_row("CQ-event ping-pong, round trip", "µs", trips, None, "the measure of fallback"))
    rows[-1].samples = {}
    for mode in MODES:
        for name, cause in (("error", "error WC"), ("port", "port event"), ("switch", "silence")):
            values = [f.fallback_ms for f in found[mode, name] if f.fallback_ms is not None]
            if values:
                limit = FALLBACK_MS[mode]
                row = limit_row(f"fallback after {cause}, application {mode}", "ms", values, limit)
                if mode != "spinning":
                    in_trips = row.shiftverbs * 1000 / trip_us
                    row.target += f", ≤ {FALLBACK_TRIPS:g} round trips"
                    row.met = bool(row.met) and in_trips <= FALLBACK_TRIPS
                    row.note = f"{in_trips:.1f} round trips"
                rows.append(row)
    for mode in MODES:
        values = [f.detect_ms for f in found[mode, "port"] if f.detect_ms is not None]
        if values:
            note = f"the retry timers alone: {RETRY_MS:.0f} ms"
            rows.append(
                limit_row(
                    f"detection of a port that goes down, application {mode}",
                    "ms",
                    values,
                    DETECT_MS[mode],
                    note,
                )
            )
        silent = [f.detect_ms for f in found[mode, "switch"] if f.detect_ms is not None]
        if silent:
            note = f"no event anywhere, and the retry timers take {RETRY_MS:.0f} ms"
            row_name = f"detection of a dead switch port, application {mode}"
            rows.append(limit_row(row_name, "ms", silent, SILENT_MS, note))
    values = [f.failback_ms for each in found.values() for f in each if f.failback_ms is not None]
    if values:
        rows.append(limit_row("failback: healed to both directions home", "ms", values, None))
    warm = statistics.median(cold.first_steps(0.0))
    name = f"the protocol's first step after {1000 * cold.IDLE_S:.0f} ms of nothing"
    rows.append(
        limit_row(name, "µs", cold.first_steps(cold.IDLE_S), None, f"one after the other: {warm:.1f} µs")
    )
    return rows


def many_rows(lab: Lab, quick: bool, progress: Progress) -> list[Row]:
    """A thousand QPs: protected through etcd, failing over together, coming home, and what they weigh."""
    count = MANY // 5 if quick else MANY
    rows = []
    progress(f"{count:,} QPs: protection")
    weight = {}
    for package in ("pyverbs", "shiftverbs"):
        with hosts(lab, package, "many") as pair:
            pair.connect(protect=package == "shiftverbs")  # what one QP brings along is not counted
            before = [answer["rss"] for answer in pair.ask_both(do="memory")]
            pair.ask_both(do="close")
            requests = lab.etcd_requests()
            opened_ms, connected_ms = pair.connect(protect=False, qps=count, depth=4)
            if package == "pyverbs":
                memory = pair.ask_both(do="memory")
                weight[package] = (memory[0]["rss"] - before[0]) / count
                plain_ms = opened_ms + connected_ms
                continue
            told = pair.ask_both(do="protect")
            protected_ms = (max(t["ns"] for t in told) - min(t["connected_ns"] for t in told)) / 1e6
            whole_ms = (max(t["ns"] for t in told) - min(t["opened_ns"] for t in told)) / 1e6
            requests = lab.etcd_requests() - requests
            memory = pair.ask_both(do="memory")
            weight[package] = (memory[0]["rss"] - before[0]) / count
            rows.append(
                limit_row(
                    f"protecting {count:,} QPs through etcd: first connected to all protected",
                    "s",
                    [protected_ms / 1000],
                    MANY_S,
                    f"{requests:,} requests; with making them {whole_ms / 1000:.2f} s, "
                    f"plain pyverbs {plain_ms / 1000:.2f} s",
                )
            )
            rows.append(
                limit_row(
                    "memory per protected QP beyond pyverbs' own (4 + 4 WRs)",
                    "bytes",
                    [weight["shiftverbs"] - weight["pyverbs"]],
                    WEIGHT,
                    f"journal {memory[0]['journal'] / count:,.0f}; the rest shadow QP, Python objects, and the "
                    f"software NIC's own",
                )
            )
            progress(f"{count:,} QPs failing over together")
            pair.ask_both(do="run")
            time.sleep(0.3)
            faults.down("a/soft0")
            failed_ns = faults.device("a/soft0").changed_ns
            pair.wait("on the backup", lambda s: s["away"] == count, 60)
            healed_ns = 0
            deadline = time.monotonic() + 60
            while True:
                durations = pair.both[0].ask(do="status", full=True)["durations"]
                first = [d["first_wc_ns"] for d in durations]
                if all(t is not None and t > failed_ns for t in first):
                    break
                if time.monotonic() > deadline:
                    raise SuiteError("not every QP has completed a WR on the backup")
                time.sleep(0.05)
            healed_ns = time.monotonic_ns()
            faults.clear()
            pair.wait("home", lambda s: s["home"] == count, 60)
            both = pair.ask_both(do="status", full=True)
            home = max(d["home_ns"] for answer in both for d in answer["durations"])
            rows.append(
                limit_row(
                    f"{count:,} QPs failing over together: port down to the last first WC",
                    "s",
                    [(max(first) - failed_ns) / 1e9],
                    1.0,
                )
            )
            rows.append(
                limit_row(f"{count:,} QPs: healed to all home", "s", [(home - healed_ns) / 1e9], MANY_S)
            )
            pair.stop()
    return rows


@dataclass
class Timeline:
    """Bytes checked by both hosts' programs over time, around one failure; times in seconds from the failure."""

    traffic: str
    fault: str
    package: str
    points: list[tuple[float, float]]
    healed_s: float | None
    error: str | None = None


def timelines(lab: Lab, quick: bool, progress: Progress) -> tuple[list[Timeline], list[Any]]:
    """The demonstration's traffic through its failures; what moved when, and the times of each scenario."""
    phase = 0.4 if quick else 1.0
    found: list[Timeline] = []
    results = []
    seen: list[dict[int, int]] = [{}, {}]  # of each host: bytes by time

    def sample(pair: HostPair) -> None:
        for host, points in zip(pair.both, seen, strict=True):
            report = host.report
            if "bytes" in report:
                points[report["t_ns"]] = report["bytes"]

    plan = Plan(TRAFFIC, FAULTS, warm_s=phase, fault_s=phase, home_s=phase)
    moments: dict[str, int] = {}

    class Network:
        """lab's network, noting when what is done to it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lab.network, name)

        def inject(self, fault: str, traffic: str) -> Any:
            """As there."""
            moments.setdefault("failed", time.monotonic_ns())
            return lab.network.inject(fault, traffic)

        def heal(self) -> int:
            """As there."""
            moments.setdefault("healed", time.monotonic_ns())
            return lab.network.heal()

    demo = DemoLab(plan, Network(), lab.etcd.endpoint, lambda text: None, sample)
    try:
        for traffic in TRAFFIC:
            for fault in FAULTS:
                progress(f"{traffic} through {fault}")
                for points in seen:
                    points.clear()
                moments.clear()
                result = demo.run(traffic, fault)
                if not result.ok:
                    raise SuiteError(f"{traffic} through {fault}: {result.problem}")
                results.append(result)
                found.append(_timeline(traffic, fault, seen, moments))
    finally:
        demo.end_hosts()
    return found, results


def _at(points: list[tuple[int, int]], t_ns: int) -> float:
    """The bytes at some time, between the reports before and after it."""
    for (t0, b0), (t1, b1) in itertools.pairwise(points):
        if t0 <= t_ns <= t1:
            return b0 + (b1 - b0) * (t_ns - t0) / (t1 - t0)
    return points[-1][1] if t_ns > points[-1][0] else points[0][1]


def _timeline(traffic: str, fault: str, seen: list[dict[int, int]], moments: dict[str, int]) -> Timeline:
    failed = moments["failed"]
    hosts_points = [sorted(points.items()) for points in seen if len(points) > 1]
    begin = max(max(points[0][0] for points in hosts_points), failed - SHOWN_BEFORE_NS)
    end = min(points[-1][0] for points in hosts_points)
    points = []
    for t_ns in range(begin, end - BIN_NS, BIN_NS):
        moved = sum(_at(p, t_ns + BIN_NS) - _at(p, t_ns) for p in hosts_points)
        points.append(((t_ns + BIN_NS / 2 - failed) / 1e9, max(moved, 0.0) / (BIN_NS / 1e9) / 2**20))
    healed = moments.get("healed")
    return Timeline(traffic, fault, "shiftverbs", points, (healed - failed) / 1e9 if healed else None)
