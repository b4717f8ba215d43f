# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the mirror with failover running share."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from one_process import Connected, Verbs

import shiftverbs  # opens the software RNIC before pyverbs


class Logged(logging.Handler):
    """Lines, each with the name of its logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __repr__(self) -> str:
        return repr(self.lines)

    def take(self, *parts: str) -> list[str]:
        """Take away the lines that have all of these parts; return them."""
        found = [line for line in self.lines if all(part in line for part in parts)]
        self.lines = [line for line in self.lines if line not in found]
        return found


def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.002)
    return value


def cable(what: str, device: str = "a/soft0") -> None:
    command = [sys.executable, "-m", "shiftverbs.softrnic", what, device]
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
    until(lambda: machinery is None or not pending(*machinery.nics.all()))


def held_up(nic: Any, go: threading.Event) -> Any:
    """A NIC's thread for commands is at something until go is set, or for 30 s. Returns the job."""
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(30)

    job = nic.worker.call(wait)
    assert begun.wait(30)
    return job


def pending(*nics: Any) -> int:
    """How much these NICs' threads have not carried out, or have handed to each other."""
    return sum(thread.pending() for nic in nics for thread in (nic.worker, nic.registrar, nic.worker))
