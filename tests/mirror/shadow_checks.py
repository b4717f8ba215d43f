# SPDX-License-Identifier: BSD-3-Clause
"""What the programs that check the mirror with failover running share; one is run by `python shadowed.py NAME`.

soft0 is the default NIC, soft1 behind it. Each asserts for itself. What our code logs at WARNING or above is an error
unless the program expects it.
"""

from __future__ import annotations

import faulthandler
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from one_process import Connected, Verbs

import shiftverbs  # opens the software RNIC before pyverbs

CHECKS: dict[str, Callable[[Verbs], None]] = {}
LOGGED: list[str] = []


def check(function: Callable[[Verbs], None]) -> Callable[[Verbs], None]:
    CHECKS[function.__name__] = function
    return function


class Collect(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LOGGED.append(f"{record.name}: {record.getMessage()}")


def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.002)
    return value


def cable(what: str) -> None:
    command = [sys.executable, "-m", "shiftverbs.softrnic", what, "a/soft0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def settled(thing: Any, k: int = 1) -> Any:
    """Wait until a resource's shadow, if it has one, is there or has failed."""
    held = thing._shadow
    until(lambda: held is None or held.state(k) != "pending")
    return held


def protected(v: Verbs, channel: bool = False) -> Connected:
    """As Verbs.connected, when both QPs are protected."""
    pair = v.connected(channel)
    both_protected(pair.first, pair.second)
    return pair


def both_protected(*qps: Any, timeout_s: float = 15.0) -> None:
    """Wait until these QPs are."""
    assert all(qp.shift.wait_protected(timeout_s) for qp in qps), [qp.shift for qp in qps]


def nics_are_idle() -> None:
    """Wait until everything that closing queued is done."""
    machinery = shiftverbs.failover.runtime.current()
    until(lambda: machinery is None or not any(nic.worker.pending() for nic in machinery.nics.all()))


def main() -> None:
    faulthandler.dump_traceback_later(50, exit=True)
    handler = Collect(logging.WARNING)
    logging.getLogger("shiftverbs").addHandler(handler)
    CHECKS[sys.argv[1]](Verbs("shiftverbs"))
    assert not LOGGED, LOGGED
    print("passed")
