# SPDX-License-Identifier: BSD-3-Clause
"""What control verbs cost on NICs whose commands take their time: both packages in one process, on the software RNIC.

A child process of the suite; prints one JSON object: {verb: {package: [ns]}}. The default NIC and the backup are
equally slow; the packages take turns, and what one has left to the background is waited for before the other's turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time

from benchmarks.suite.verbs_cost import PACKAGES, Side, control_verbs, note, settle
from shiftverbs.softrnic import faults

#: dereg_mr where the backup NIC still has the ends of a QP and a CQ before it, as in a program that ends.
BEHIND = "dereg_mr behind destroy_qp and destroy_cq"


def dereg_alone(side: Side) -> float:
    """Nanoseconds of a dereg_mr that nothing else of this process's has to do with."""
    mr = side.reg_mr()
    settle()
    begun = time.perf_counter_ns()
    mr.close()
    return time.perf_counter_ns() - begun


def measure(rounds: int, command_s: float) -> dict[str, dict[str, list[float]]]:
    """Run each control verb so many times with each package."""
    sides = {package: Side(package) for package in PACKAGES}
    settle()
    devices = [device.name for device in faults.status().devices]
    for name in devices:
        faults.slow(name, command_s)
    found: dict[str, dict[str, list[float]]] = {}
    gc.collect()
    gc.disable()
    for index in range(rounds + 2):
        for package in PACKAGES:
            settle()
            took = control_verbs(sides[package], settle)
            took[BEHIND] = took["dereg_mr"]
            took["dereg_mr"] = dereg_alone(sides[package])
            if index >= 2:  # the first make what later ones find made
                note(found, package, took)
        gc.collect()
    gc.enable()
    for name in devices:
        faults.slow(name, 0)
    settle()
    for side in sides.values():
        side.close()
    return found


def main() -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--us", type=float, default=100.0, help="what a command takes, microseconds")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    print(json.dumps(measure(options.rounds, options.us / 1e6)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
