# SPDX-License-Identifier: BSD-3-Clause
"""Signals at random moments among verbs: executed in a host on strings, beside its `Endpoint`s.

Each handler raises, and the program catches: what a handler raised and nobody caught was swallowed on its way.

The program catches around a call, never around a loop: with Python 3.13 a jump back may lie outside the `try` that
is written around it, and what a handler raises there goes past the `except`. Out of a call it always comes at the call.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


class Alarm(Exception):
    """What the handler raises."""


class Alarms:
    """Traffic over some endpoints in the main thread, under alarms.

    endpoints: connected; seed: of the moments; shifts: whether there are `qp.shift`s to look at.
    """

    def __init__(self, endpoints: list[Any], seed: int, shifts: bool) -> None:
        self.endpoints = endpoints
        self.random = random.Random(seed)
        self.shifts = shifts
        self.fired = self.caught = self.lost = 0
        self.completed = 0
        self.made: Any = None  # the endpoint that came last
        self.errors: list[str] = []
        self.was = ""
        self.swallowed: dict[str, int] = {}  # where the interpreter did, and how often
        signal.signal(signal.SIGALRM, self._handler)
        sys.unraisablehook = self._swallowed

    def _swallowed(self, what: Any) -> None:
        name = getattr(what.object, "__qualname__", repr(what.object))
        if what.object is None:  # from Python 3.14 on it is told in a text alone
            name = (re.search(r"function (\S+) at 0x", what.err_msg) or [what.err_msg] * 2)[1]
        self.swallowed[name] = self.swallowed.get(name, 0) + 1

    def _handler(self, number: int, frame: Any) -> None:
        self.fired += 1
        raise Alarm(str(self.fired))

    def run(self, count: int, until: Any = None) -> dict[str, Any]:
        """Go on until so many alarms came. Returns how many were caught, and what was wrong."""
        goal = self.fired + count
        while self.fired < goal:
            try:
                self.until_alarm(0.002, self.turn)
            except Alarm:
                self.caught += 1
            if self.shifts:
                self.tell()
        return {"fired": self.fired, "caught": self.caught, "lost": self.lost, "errors": self.errors[:5]}

    def until_alarm(self, longest_s: float, turn: Callable[[], None]) -> None:
        """turn() again and again, under an alarm within longest_s, and another where that was lost. Ends by raising."""
        self.arm(longest_s)
        while True:
            turn()
            if self.fired > self.caught + self.lost:
                self.lost += 1
                self.arm(longest_s)

    def arm(self, longest_s: float) -> None:
        """One alarm within so many seconds."""
        signal.setitimer(signal.ITIMER_REAL, self.random.uniform(0.0001, longest_s))

    def turn(self) -> None:
        """Traffic on each endpoint."""
        for ep in self.endpoints:
            self.traffic(ep)

    def traffic(self, ep: Any) -> None:
        """A WRITE, and what completed. An alarm may come anywhere."""
        try:
            ep.post("RDMA_WRITE", slot=1, length=64, wr_id=7)
        except Alarm:
            raise
        except Exception as error:
            if getattr(error, "error_code", None) != 12:  # the queue is full
                self.errors.append(repr(error))
        _, wcs = ep.cq.poll(16)
        for wc in wcs:
            self.completed += 1
            if wc.status:
                self.errors.append(f"wr_id {wc.wr_id}: status {wc.status}")

    def come_and_go(self, make: Any, connect: Any, count: int) -> dict[str, Any]:
        """Make an endpoint, connect it to nobody, let go of it; again and again, until so many alarms came."""
        peer = dict(self.endpoints[0].peer)

        def turn() -> None:
            self.made = ep = make()
            ep.connect(peer)
            ep.qp.close()
            ep.mr.close()
            ep.cq.close()
            ep.pd.close()

        while self.fired < count:
            self.made = None
            try:
                self.until_alarm(0.01, turn)
            except Alarm:
                self.caught += 1
            except Exception as error:
                self.errors.append(repr(error))
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.lost += self.fired - self.caught - self.lost
            if self.made is not None:
                for each in (self.made.qp, self.made.mr, self.made.cq, self.made.pd):
                    each.close()
        return {"fired": self.fired, "caught": self.caught, "lost": self.lost, "errors": self.errors[:5]}

    def tell(self) -> None:
        """Say where the traffic is, when that changed."""
        states = {(ep.qp.shift.state, ep.qp.shift.recv_state) for ep in self.endpoints}
        now = {("DEFAULT", "DEFAULT"): "home", ("FALLBACK", "FALLBACK"): "away"}.get(
            next(iter(states)) if len(states) == 1 else ("", ""), self.was
        )
        if now != self.was:
            self.was = now
            print(f"all {now} at {self.fired}", flush=True)

    def settle(self) -> dict[str, Any]:
        """Without alarms: all that is outstanding completes, and then one more WR of each, and nothing else."""
        deadline = time.monotonic() + 20
        found = {}
        for number, ep in enumerate(self.endpoints):
            while time.monotonic() < deadline:
                try:
                    ep.post("RDMA_WRITE", slot=1, length=64, wr_id=1000 + number)
                    break
                except Exception as error:
                    if getattr(error, "error_code", None) != 12:
                        raise
                    ep.cq.poll(16)
            last = None
            while last != 1000 + number and time.monotonic() < deadline:
                _, wcs = ep.cq.poll(1)
                last = wcs[0].wr_id if wcs else None
            found[number] = [last == 1000 + number, ep.none(0.05)]
        return found
