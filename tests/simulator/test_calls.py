# SPDX-License-Identifier: BSD-3-Clause
"""How many Python functions of ours are called from a failure to the first success behind it, on each side.

Time says nothing on a busy machine; this is the same every time, and what a fallback costs besides the NIC's commands
and the peer's answers. Where call_budget.json is exceeded for a good reason, or can be lowered:

    SHIFTVERBS_WRITE_BUDGET=1 pytest tests/simulator/test_calls.py
"""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from simulator import network
from simulator.clock import US
from simulator.network import Network
from simulator.rnic import RTS
from simulator.story import armed, ends, plan, post, telling, until, wait

import shiftverbs

BUDGET = Path(__file__).parent / "call_budget.json"
PACKAGE = str(Path(shiftverbs.__file__).parent)
LOG = "process/log_lines.py"  # how often it is asked whether a line is wanted depends on who listens
OLD = 4  # WRs under way when it fails


def port_event(net: Network) -> None:
    """Only the one side is told; the other hears of it from its peer."""
    net.port("a", 0, False, 10 * US)


def error_wc(net: Network) -> None:
    """a's NIC has tried often enough."""
    net.wall("a", 0, True)
    net.wall("b", 0, True)


def count(net: Network, done: Callable[[], bool]) -> dict[str, collections.Counter[str]]:
    """Calls until something holds, by the host that was running, and by function."""
    calls: dict[str, collections.Counter[str]] = {"a": collections.Counter(), "b": collections.Counter()}
    names = {net.a: "a", net.b: "b"}

    def called(frame: FrameType, what: str, _: Any) -> None:
        code = frame.f_code
        if what == "call" and net.running is not None and code.co_filename.startswith(PACKAGE):
            place = code.co_filename[len(PACKAGE) + 1 :]
            asks = frame.f_back if code.co_name == "handle" else frame  # what `qp` asks
            if place == LOG or (
                asks.f_code.co_name == "qp" and asks.f_back.f_code.co_filename == network.__file__
            ):
                return  # the second is the simulator's own notes
            calls[names[net.running]][f"{place}: {getattr(code, 'co_qualname', code.co_name)}"] += 1

    gc.collect()  # what other tests left is not closed in between
    gc.disable()
    sys.setprofile(called)
    try:
        until(net, done)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("failure", [port_event, error_wc])
def test_a_fallback_stays_within_its_budget(
    failure: Callable[[Network], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "INVARIANTS", False)
    with telling(armed) as net:
        a, b = ends(net)
        post(a, "WRITE")
        post(b, "WRITE")
        wait(net, 1)
        before = len(a.wcs)
        for _ in range(OLD):
            plan(a, "SEND", signaled=True)
        failure(net)
        for _ in range(OLD):
            a.due()
        if failure is error_wc:  # what is looked at while the NIC still tries is no part of it
            until(net, lambda: a.endpoint.qps[0].state != RTS)
        calls = count(net, lambda: len(a.wcs) >= before + OLD)
        assert all(status == 0 for _, _, status in a.wcs[before:])
        wait(net, 50)  # the hurry is over, and the interpreter's switch interval what it was
    counted = {name: sum(each.values()) for name, each in calls.items()}
    budget = json.loads(BUDGET.read_text())
    if os.environ.get("SHIFTVERBS_WRITE_BUDGET"):
        budget[failure.__name__] = counted
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
    most = budget[failure.__name__]
    for name, each in calls.items():
        shown = "\n".join(f"{times:5} {function}" for function, times in each.most_common(40))
        assert counted[name] <= most[name], f"{counted[name]} calls on {name}, {most[name]} allowed:\n{shown}"
