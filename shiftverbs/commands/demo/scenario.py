# SPDX-License-Identifier: BSD-3-Clause
"""One kind of traffic under one fault: with shiftverbs, verified; with plain pyverbs, until it dies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shiftverbs.commands.demo.host import DemoError, HostPair
from shiftverbs.commands.demo.network import Injection, Network
from shiftverbs.commands.demo.options import Plan

__all__ = ["BaselineResult", "Lab", "ScenarioResult", "Stage"]

PROTECTED_S = 20.0
FAULT_S = 10.0
HOME_S = 20.0
SETTLE_S = 10.0
# How often a fault is injected where the QPs happened to leave home just before it.
TRIES = 3
# How often plain pyverbs is run where it dies before its fault.
BASELINE_TRIES = 3
Reports = tuple[dict[str, Any], dict[str, Any]]


class Stage(StrEnum):
    """What is being done now, in words. The times taken so far stand in Lab.current."""

    STARTING = "starting two hosts"
    PLAIN = "plain pyverbs: traffic"
    PLAIN_FAULT = "plain pyverbs: fault injected"
    CONNECTING = "connecting"
    PAIRING = "pairing through etcd"
    HOME = "traffic on the default NICs"
    FAULT = "fault injected"
    AWAY = "traffic on the backups"
    AGAIN = "away before the fault: once more"
    HEALED = "healed: coming home"
    HOME_AGAIN = "traffic on the default NICs again"
    ACCOUNT = "every message accounted for"


class EarlyDeath(DemoError):
    """Plain pyverbs died before its fault was given: nothing was measured."""


@dataclass
class ScenarioResult:
    """What one scenario with shiftverbs gave. Times in ms, None where it was not seen. problem: why not ok.

    switches: SWITCHes of host a's QP; more than one where the backup failed too (a host starved for the 100 ms of the
    retry timers looks like that).
    """

    traffic: str
    fault: str
    messages: int = 0
    bytes: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    corrupt: int = 0
    detect_ms: float | None = None
    fallback_ms: float | None = None
    failback_ms: float | None = None
    states: list[str] = field(default_factory=list)
    ok: bool = False
    problem: str | None = None
    switches: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the object that goes into the JSON file."""
        return {name: value for name, value in vars(self).items() if name not in ("problem", "switches")}


@dataclass
class BaselineResult:
    """What plain pyverbs did: error is the first error's name, error_ms its time after the fault.

    repeats: how many runs before this one died before their fault, and were no measurement. problem: why the run
    itself failed, so that it shows nothing.
    """

    traffic: str
    fault: str
    survived: bool
    error: str | None
    error_ms: float | None = None
    problem: str | None = None
    repeats: int = 0

    @property
    def ok(self) -> bool:
        """A baseline that survives shows that the fault was none."""
        return not self.survived and self.problem is None

    def to_json(self) -> dict[str, Any]:
        """Return the object that goes into the JSON file."""
        return {name: getattr(self, name) for name in ("traffic", "fault", "survived", "error")}


def _ms(later_ns: int, earlier_ns: int) -> float:
    return round((later_ns - earlier_ns) / 1e6, 3)


def received(traffic: str, reports: Reports) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (sender's report, receiver's report) of each stream of messages."""
    a, b = reports
    if traffic == "write_imm":
        return [(a, b), (b, a)]
    return [(a, b)] if traffic == "send" else [(a, a)]


def checked(traffic: str, reports: Reports) -> int:
    """Return how many messages have been checked, over all streams."""
    return sum(receiver["checked"] for _, receiver in received(traffic, reports))


def settled(traffic: str, reports: Reports) -> bool:
    """Whether all that was sent has arrived and every signaled WR has completed."""
    if any(report["unconfirmed"] or report.get("credits_sent") != other.get("credits")
           for report, other in (reports, reports[::-1])):  # fmt: skip
        return False
    return all(sender["sent"] <= receiver["expected"] for sender, receiver in received(traffic, reports))


def at_home(report: dict[str, Any]) -> bool:
    """Whether both directions of this host's QP run on the default NIC."""
    shift = report["shift"]
    return (shift["state"], shift["recv_state"], shift["pair"]) == ("DEFAULT", "DEFAULT", 0)


def away(report: dict[str, Any]) -> bool:
    """Whether this host's QP runs on a backup."""
    shift = report["shift"]
    return shift["state"] == "FALLBACK" and shift["pair"] != 0


class Lab:
    """Everything scenarios run in: the network, etcd's endpoint, the hosts at work.

    phase: told what is being done (a Stage, or other words). tick: called often while the hosts work.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        etcd: str,
        phase: Callable[[str], None],
        tick: Callable[[HostPair], None],
    ) -> None:
        self.plan = plan
        self.network = network
        self.logs: list[str] = []
        self.current: ScenarioResult | None = None
        self._etcd = etcd
        self._phase = phase
        self._tick = tick
        self._pair: HostPair | None = None
        self._connected: tuple[str, int | None] | None = None  # traffic and retry_cnt

    # -- hosts

    def _environment(self, package: str) -> Callable[[str], Mapping[str, str]]:
        def environment(host: str) -> Mapping[str, str]:
            env = self.network.environment(host, os.environ)
            if package == "shiftverbs":
                env |= {"SHIFTVERBS_ETCD": self._etcd, "SHIFTVERBS_JOB": "demo"}
            return env

        return environment

    def _hosts(self, package: str) -> HostPair:
        """Return a running pair with this package; a pair with another one is ended."""
        if self._pair is not None and self._pair.package != package:
            self.end_hosts()
        if self._pair is None:
            self._phase(Stage.STARTING)
            self._pair = HostPair(
                package, self._environment(package), self._tick, self.network.patience
            ).__enter__()
        return self._pair

    def _attrs(self) -> dict[str, int]:
        own = {} if self.plan.retry_cnt is None else {"retry_cnt": self.plan.retry_cnt}
        return {**self.network.attrs, **own}

    def end_hosts(self) -> None:
        """End the hosts at work, if any."""
        pair, self._pair, self._connected = self._pair, None, None
        if pair is not None:
            if self.plan.verbose:
                self.logs.extend(f"host {host.name}:\n{host.log()}" for host in pair.both if host.log())
            pair.close()

    # -- with shiftverbs

    def run(self, traffic: str, fault: str) -> ScenarioResult:
        """Run one scenario; never raises DemoError: the result says what went wrong.

        Where the plan says so, consecutive scenarios of one kind of traffic share their connection, as long as
        all goes well.
        """
        result = self.current = ScenarioResult(traffic, fault)
        before: Reports | None = None
        try:
            pair = self.protected(traffic)
            before = self._status(pair)
            self._run_phases(pair, result)
            after = self._status(pair)
            self._account(result, before, after)
            result.switches = (
                after[0]["shift"]["counters"]["switches"] - before[0]["shift"]["counters"]["switches"]
            )
            self._verdict(result)
        except DemoError as error:
            result.problem = str(error)
            if before is not None and self._pair is not None:
                try:
                    self._account(result, before, self._status(self._pair))
                except DemoError:
                    pass  # the first error is the one to show
        if not result.ok:
            self.end_hosts()
        self.network.heal()
        return result

    def _status(self, pair: HostPair) -> Reports:
        a, b = pair.ask_both("status")
        return a, b

    def protected(self, traffic: str) -> HostPair:
        """Return hosts whose QPs for this traffic are connected and PROTECTED. Raises DemoError."""
        pair = self._hosts("shiftverbs")
        wanted = (traffic, self.plan.retry_cnt)
        if self._connected != wanted or self.plan.reconnect:
            self._connected = None
            self._phase(Stage.CONNECTING)
            pair.connect(traffic, self.network.device, self.plan.seed, self._attrs())
            self._phase(Stage.PAIRING)
            pair.wait_for(
                lambda a, b: a["shift"]["status"] == b["shift"]["status"] == "PROTECTED",
                PROTECTED_S,
                "both QPs PROTECTED",
            )
            self._connected = wanted
        return pair

    def _run_phases(self, pair: HostPair, result: ScenarioResult) -> None:
        traffic = result.traffic
        pair.ask_both("start")
        for tries_left in reversed(range(TRIES)):
            self._phase(Stage.HOME)
            pair.run_for(self.plan.warm_s)
            self._wait_moving(pair, traffic, "messages before the fault")
            self._wait_home(pair, "both QPs at home before the fault")
            self._phase(Stage.FAULT)
            fault_ns = self._wait_injected(pair, self.network.inject(result.fault, traffic))
            pair.wait_for(
                lambda a, b: self._sound(a, b) and away(a) and away(b), FAULT_S, "both QPs on the backup"
            )
            self._wait_moving(pair, traffic, "messages on the backup")
            if self._measure_fallback(pair, result, fault_ns, may_repeat=tries_left > 0):
                self._phase(Stage.AWAY)
                pair.run_for(self.plan.fault_s)
                break
            # A host that did not get its share of the machine for a moment left home just before the fault.
            self._phase(Stage.AGAIN)
            self.network.heal()
            self._wait_home(pair, "both QPs at home")

        self._phase(Stage.HEALED)
        healed_ns = self.network.heal()
        self._wait_home(pair, "both QPs at home")
        self._measure_failback(pair, result, healed_ns)
        self._phase(Stage.HOME_AGAIN)
        self._wait_moving(pair, traffic, "messages at home")
        pair.run_for(self.plan.home_s)

        self._phase(Stage.ACCOUNT)
        pair.ask_both("pause")
        pair.wait_for(
            lambda a, b: self._sound(a, b) and settled(traffic, (a, b)), SETTLE_S, "all messages arrived"
        )
        # A host that did not get its share of the machine for a moment may have left home again: it must return.
        self._wait_home(pair, "both QPs at home at the end")
        result.states = self._states(pair.a.call("status"), fault_ns)

    def _wait_home(self, pair: HostPair, what: str) -> None:
        pair.wait_for(lambda a, b: self._sound(a, b) and at_home(a) and at_home(b), HOME_S, what)

    @staticmethod
    def _sound(a: dict[str, Any], b: dict[str, Any]) -> bool:
        for name, report in (("a", a), ("b", b)):
            if report["error"] is not None:
                why = report["shift"]["why"]
                raise DemoError(
                    f"host {name} saw {report['error']} (shift: {report['shift']['status']}, {why})"
                )
        return True

    def _wait_moving(self, pair: HostPair, traffic: str, what: str) -> None:
        """Wait until every stream has had messages checked that were not even sent when this began."""
        start = [sender["sent"] for sender, _ in received(traffic, self._status(pair))]
        pair.wait_for(
            lambda a, b: (
                self._sound(a, b)
                and all(
                    receiver["expected"] > sent
                    for sent, (_, receiver) in zip(start, received(traffic, (a, b)), strict=True)
                )
            ),
            FAULT_S,
            what,
        )

    def _wait_injected(
        self, pair: HostPair, injection: Injection, look: Callable[[], object] = lambda: None
    ) -> int:
        """Return when the fault took effect. look: called meanwhile; an exception of its ends the wait."""
        deadline = time.monotonic() + FAULT_S
        while (at_ns := injection.at_ns()) is None:
            look()
            if time.monotonic() > deadline:
                raise DemoError(f"the packet to lose did not come within {FAULT_S:g} s\n{pair.story()}")
            pair.run_for(0.01)
        return at_ns

    def _measure_fallback(
        self, pair: HostPair, result: ScenarioResult, fault_ns: int, may_repeat: bool
    ) -> bool:
        """Take the times of the way to the backup. False: the way began before the fault; nothing is taken."""
        durations = [report["shift"]["durations"] for report in self._status(pair)]
        triggers = [t for t in (d.get("trigger_ns") for d in durations) if t and t > fault_ns]
        if not triggers:
            if not may_repeat:
                result.problem = f"fault at {fault_ns}, but no trigger_ns later than it: {durations}"
            return not may_repeat
        result.detect_ms = _ms(min(triggers), fault_ns)
        firsts = [t for t in (d.get("first_wc_ns") for d in durations) if t and t > min(triggers)]
        if firsts:
            result.fallback_ms = _ms(min(firsts), min(triggers))
        else:
            result.problem = f"no first_wc_ns later than the first trigger_ns: {durations}"
        return True

    def _measure_failback(self, pair: HostPair, result: ScenarioResult, healed_ns: int) -> None:
        """Take when the later of both came home, which is known when the verbs of that are done."""
        deadline = time.monotonic() + HOME_S * pair.patience
        while True:
            durations = [report["shift"]["durations"] for report in self._status(pair)]
            home_ns = [d.get("home_ns") or 0 for d in durations]
            if min(home_ns) > healed_ns:
                result.failback_ms = _ms(max(home_ns), healed_ns)
                return
            if time.monotonic() > deadline:
                result.problem = f"healed at {healed_ns}, but home_ns is not later on both hosts: {durations}"
                return
            pair.run_for(0.01)

    @staticmethod
    def _states(report: dict[str, Any], fault_ns: int) -> list[str]:
        """Return host a's send states from the one in which the fault met it, each change once."""
        history = report["shift"]["history"]
        states = [name for t_ns, name in history if t_ns <= fault_ns][-1:] or ["DEFAULT"]
        for t_ns, name in history:
            if t_ns > fault_ns and name != states[-1]:
                states.append(name)
        return states

    @staticmethod
    def _account(result: ScenarioResult, before: Reports, after: Reports) -> None:
        """Fill in what the messages of this scenario came to."""
        olds = received(result.traffic, before)
        news = received(result.traffic, after)
        faults = 0
        first: str | None = None
        for (_, old), (sender, new) in zip(olds, news, strict=True):
            result.messages += new["checked"] - old["checked"]
            result.bytes += new["bytes"] - old["bytes"]
            result.lost += new["lost_of_expected"] + max(0, sender["sent"] - new["expected"])
            for name in ("duplicated", "reordered", "corrupt"):
                setattr(result, name, getattr(result, name) + new[name] - old[name])
        for old, new in zip(before, after, strict=True):
            faults += (
                new["wc_faults"]
                - old["wc_faults"]
                + new.get("credit_faults", 0)
                - old.get("credit_faults", 0)
            )
            first = first or new["first_fault"]
        if first is not None and (
            faults or result.lost or result.duplicated or result.reordered or result.corrupt
        ):
            result.problem = result.problem or first
        elif faults:
            result.problem = result.problem or f"{faults} wrong completions"

    @staticmethod
    def _verdict(result: ScenarioResult) -> None:
        counts = (result.lost, result.duplicated, result.reordered, result.corrupt)
        if result.problem is None:
            if any(counts):
                result.problem = "lost, duplicated, reordered, corrupt: {}, {}, {}, {}".format(*counts)
            elif None in (result.detect_ms, result.fallback_ms, result.failback_ms):
                result.problem = "a time was not measured: qp.shift.durations says nothing of this fault"
            elif result.states[:2] != ["DEFAULT", "FALLBACK"] or result.states[-1] != "DEFAULT":
                result.problem = f"unexpected states: {' '.join(result.states)}"
            elif result.messages == 0:
                result.problem = "no message"
        result.ok = result.problem is None

    # -- with plain pyverbs

    def run_baseline(self, traffic: str, fault: str) -> BaselineResult:
        """Run the same traffic and fault with plain pyverbs until it dies. Raises DemoError where that fails.

        Where it dies before its fault was given (a host that gets no share of the machine for the 120 ms of the retry
        timers looks like that), nothing was measured: it is run again, BASELINE_TRIES times in all.
        """
        for repeats in range(BASELINE_TRIES):
            try:
                result = self._baseline(traffic, fault)
            except EarlyDeath as early:
                self._phase(f"plain pyverbs {early}: no measurement")
                self.end_hosts()
                self.network.heal()
                problem = f"{early}, in each of {BASELINE_TRIES} runs: not measured"
            else:
                result.repeats = repeats
                return result
        return BaselineResult(traffic, fault, False, None, problem=problem, repeats=repeats)

    @staticmethod
    def _death(reports: Reports, fault_ns: int | None) -> tuple[int, str] | None:
        """Return (CLOCK_MONOTONIC ns, name) of the first error that the hosts tell of.

        Raises EarlyDeath where that was before the fault; fault_ns None: it has not been given yet.
        """
        first = min(((r["error_ns"], r["error"]) for r in reports if r.get("error")), default=None)
        if first is not None and (fault_ns is None or first[0] < fault_ns):
            raise EarlyDeath(f"died of {first[1]} before its fault was given")
        return first

    def _baseline(self, traffic: str, fault: str) -> BaselineResult:
        pair = self._hosts("pyverbs")
        self._phase(Stage.PLAIN)
        pair.connect(traffic, self.network.device, self.plan.seed, self._attrs())
        pair.ask_both("start")
        start = checked(traffic, self._status(pair))
        pair.wait_for(
            lambda a, b: bool(a["error"] or b["error"]) or checked(traffic, (a, b)) > start,
            FAULT_S,
            "messages with plain pyverbs",
        )
        pair.run_for(self.plan.baseline_s)
        self._death(self._status(pair), None)
        self._phase(Stage.PLAIN_FAULT)
        injection = self.network.inject(fault, traffic)
        fault_ns = self._wait_injected(
            pair, injection, lambda: self._death((pair.a.report, pair.b.report), injection.at_ns())
        )
        try:
            pair.wait_for(lambda a, b: bool(a["error"] or b["error"]), FAULT_S, "an error")
        except DemoError:
            for host in pair.both:
                host.check_alive()
            error, error_ms = None, None
            at = checked(traffic, self._status(pair))
            pair.run_for(0.5)
            survived = checked(traffic, self._status(pair)) > at
            if not survived:
                error = f"no completion within {FAULT_S:g} s"
        else:
            survived = False
            death = self._death(self._status(pair), fault_ns)
            assert death is not None
            error, error_ms = death[1], _ms(death[0], fault_ns)
        self.network.heal()
        pair.ask_both("close")
        return BaselineResult(traffic, fault, survived, error, error_ms)
