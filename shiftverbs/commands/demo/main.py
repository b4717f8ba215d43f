# SPDX-License-Identifier: BSD-3-Clause
"""The whole demo: `shiftverbs demo`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from shiftverbs.commands.demo.etcd_server import EtcdError, EtcdServer
from shiftverbs.commands.demo.host import DemoError
from shiftverbs.commands.demo.network import SoftNetwork
from shiftverbs.commands.demo.options import Plan, plan_from
from shiftverbs.commands.demo.report import PlainView, View, make_view, to_json, write_json
from shiftverbs.commands.demo.rxe import RxeNetwork, RxeNetworkError
from shiftverbs.commands.demo.scenario import BaselineResult, Lab
from shiftverbs.commands.demo.story import Story
from shiftverbs.softrnic import SoftrnicError

__all__ = ["main", "run"]


def main(parsed: argparse.Namespace) -> int:
    """Run the demo with parsed arguments (options.add_arguments). Returns 0 only if all is verified."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)  # etcd, hosts and folders are cleared away then too
    plan = plan_from(parsed)
    if plan.json_path not in (None, "-") and not Path(str(plan.json_path)).resolve().parent.is_dir():
        print(f"shiftverbs demo: no directory for {plan.json_path}", file=sys.stderr)
        return 2
    # The JSON gets standard output for itself.
    view = PlainView(sys.stderr) if plan.json_path == "-" else make_view(plan.plain)
    try:
        return run(plan, view)
    except (EtcdError, RxeNetworkError, SoftrnicError) as error:
        print(f"shiftverbs demo: {error}", file=sys.stderr)
        return 1


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run(plan: Plan, view: View) -> int:
    """Tell the story and run all scenarios of a plan. Returns the exit status."""
    started = time.monotonic()
    count = len(plan.traffic) * len(plan.faults)
    logs: list[str] = []
    told = True
    with RxeNetwork() if plan.device == "rxe" else SoftNetwork() as network, EtcdServer() as etcd:
        if plan.story:
            story = Story(plan, network, etcd.endpoint, view.say)
            told = story.tell()
            logs += story.logs
            view.say("Now each traffic through each fault, with plain pyverbs first; then the tables")
        lab = Lab(plan, network, etcd.endpoint, view.phase, view.tick)
        view.open(count * (2 if plan.baseline else 1))
        try:
            _scenarios(plan, lab, view)
        finally:
            lab.end_hosts()
            view.close()
    view.summary(time.monotonic() - started)
    if not told:
        view.say("The story at the beginning is NOT verified")
    for log in (*logs, *lab.logs):
        print(log, file=sys.stderr)
    if plan.json_path is not None:
        write_json(plan.json_path, to_json(view.scenarios, view.baseline))
    verified = all(result.ok for result in view.scenarios) and all(result.ok for result in view.baseline)
    return 0 if told and verified and len(view.scenarios) == count else 1


def _scenarios(plan: Plan, lab: Lab, view: View) -> None:
    if plan.baseline:
        for traffic in plan.traffic:
            for fault in plan.faults:
                view.begin(f"{traffic} / {fault}, plain pyverbs")
                try:
                    view.result(lab.run_baseline(traffic, fault))
                except DemoError as error:
                    lab.end_hosts()
                    lab.network.heal()
                    view.result(BaselineResult(traffic, fault, False, None, problem=str(error)))
    for traffic in plan.traffic:
        for fault in plan.faults:
            view.begin(f"{traffic} / {fault}")
            view.result(lab.run(traffic, fault))
