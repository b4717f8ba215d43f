# SPDX-License-Identifier: BSD-3-Clause
"""Plain pyverbs that dies before its fault was given: repeated, and where that does not help, told aloud."""

import io
import time

import pytest

from shiftverbs.commands.demo import main, scenario
from shiftverbs.commands.demo.network import Injection, SoftNetwork
from shiftverbs.commands.demo.options import Plan
from shiftverbs.commands.demo.report import PlainView
from shiftverbs.commands.demo.scenario import BaselineResult, EarlyDeath, Lab, ScenarioResult

PLAN = Plan(("send",), ("initiator_port",), warm_s=0.1, fault_s=0.1, home_s=0.1, baseline_s=0.1)


class EarlyNetwork(SoftNetwork):
    """Its first faults count as given only when a program has died already."""

    def __init__(self, times):
        super().__init__()
        self.times = times
        self.lab = None

    def inject(self, fault, traffic):
        injection = super().inject(fault, traffic)
        if self.times == 0:
            return injection
        self.times -= 1
        hosts = self.lab._pair.both
        return Injection(
            lambda: time.monotonic_ns() if any(host.report.get("error") for host in hosts) else None
        )


def run(times):
    """Run a baseline that dies early so often; return its result and what was told."""
    told = []
    with EarlyNetwork(times) as network:
        network.lab = lab = Lab(PLAN, network, "", told.append, lambda pair: None)
        try:
            return lab.run_baseline("send", "initiator_port"), told
        finally:
            lab.end_hosts()


def test_a_run_that_dies_before_its_fault_is_repeated_and_told():
    result, told = run(1)
    assert result.ok and result.repeats == 1 and result.error == "RETRY_EXC_ERR"
    assert result.error_ms > 0
    assert told.count("plain pyverbs died of RETRY_EXC_ERR before its fault was given: no measurement") == 1
    view = PlainView(io.StringIO())
    view.result(result)
    (line,) = view.repeated()
    assert line == "send / initiator_port, plain pyverbs: died before its fault; run 2 counts"


def test_one_that_always_dies_before_its_fault_is_no_measurement():
    result, told = run(scenario.BASELINE_TRIES)
    assert not result.ok and not result.survived
    assert (result.error, result.error_ms) == (None, None), "a time before the fault is never shown"
    assert (
        result.problem == "died of RETRY_EXC_ERR before its fault was given, in each of 3 runs: not measured"
    )
    assert sum("no measurement" in text for text in told) == scenario.BASELINE_TRIES
    out = io.StringIO()
    view = PlainView(out)
    view.result(result)
    view.summary(1.0)
    text = " ".join(out.getvalue().split())
    assert "NOT MEASURED" in text and "plain pyverbs died in 0 of 1, 1 not measured" in text
    assert "send / initiator_port, plain pyverbs: died of RETRY_EXC_ERR before its" in text


@pytest.mark.parametrize("reports", [({"error": None}, {"error": None}), ({}, {})])
def test_nobody_has_died(reports):
    assert Lab._death(reports, None) is None and Lab._death(reports, 5) is None


def test_the_first_death_is_the_one_that_counts():
    reports = ({"error": "FLUSH", "error_ns": 7}, {"error": "RETRY", "error_ns": 6})
    assert Lab._death(reports, 5) == (6, "RETRY")
    for fault_ns in (None, 7):
        with pytest.raises(EarlyDeath, match="died of RETRY before"):
            Lab._death(reports, fault_ns)


class FakeLab:
    """Everything goes well, but plain pyverbs is not measured."""

    problem = "died before its fault"
    logs = []

    def __init__(self, plan, network, etcd, phase, tick):
        pass

    def end_hosts(self):
        pass

    def run(self, traffic, fault):
        return ScenarioResult(traffic, fault, messages=1, ok=True)

    def run_baseline(self, traffic, fault):
        return BaselineResult(traffic, fault, False, None, problem=self.problem)


@pytest.mark.parametrize(("problem", "status"), [("died before its fault", 1), (None, 0)])
def test_what_was_not_measured_is_no_success(monkeypatch, problem, status):
    monkeypatch.setattr(main, "Lab", FakeLab)
    monkeypatch.setattr(FakeLab, "problem", problem)
    assert main.run(PLAN, PlainView(io.StringIO())) == status
