# SPDX-License-Identifier: BSD-3-Clause
"""What happened to a QP and when, and the threads that wait for it: for `qp.shift` and for subscribers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from shiftverbs.process.waiting import SLICE_S, look_for_signals
from shiftverbs.state_machine import SendState

_MOST_STATES = 1000


class Timeline:
    """Of one QP: its send states, and when it left, worked again and came home last. Times are CLOCK_MONOTONIC, ns.

    away_since_ns: since when it has been away from home; None where it is at home. For reading.
    """

    __slots__ = (
        "_first_wc_ns",
        "_home_ns",
        "_seen_ns",
        "_trigger_ns",
        "_waiting",
        "away_since_ns",
        "history",
        "last_failure",
    )

    def __init__(self) -> None:
        self.history = [(time.monotonic_ns(), SendState.DEFAULT.value)]
        self._waiting: list[threading.Lock] = []  # a lock of each thread in wait_for
        # When the last SWITCH began, or failover gave up, and why; over all lives of the QP.
        self.last_failure: tuple[int, str] | None = None
        self.begin()

    def begin(self) -> None:
        """A life of the QP begins: what was before only stays in the history."""
        self._seen_ns: int | None = None
        self._trigger_ns: int | None = None
        self._first_wc_ns: int | None = None
        self.away_since_ns: int | None = None
        self._home_ns: int | None = None

    def reset(self, now_ns: int) -> None:
        """The send state is DEFAULT again, whatever it was."""
        if self.history[-1][1] != SendState.DEFAULT.value:
            self.send_state(now_ns, SendState.DEFAULT.value)

    def seen(self, t_ns: int) -> None:
        """What may start a SWITCH was seen."""
        self._seen_ns = t_ns

    def switch_started(self, now_ns: int) -> None:
        """A SWITCH began. The time from its trigger counts until the first WC, however many SWITCHes that takes."""
        if self._trigger_ns is None or self._first_wc_ns is not None:
            self._trigger_ns, self._first_wc_ns = self._seen_ns or now_ns, None
        self._seen_ns = None

    def first_wc(self, t_ns: int) -> float | None:
        """A WC came from where a SWITCH went; returns the ms since its trigger if it is the first, else None."""
        if self._first_wc_ns is not None:
            return None
        self._first_wc_ns = t_ns
        return (t_ns - self._trigger_ns) / 1e6 if self._trigger_ns is not None else 0.0

    def send_state(self, now_ns: int, state: str) -> None:
        """The send machine is in `state`."""
        self.history.append((now_ns, state))
        del self.history[:-_MOST_STATES]

    def is_home(self, home: bool, now_ns: int) -> float | None:
        """Whether both directions are in DEFAULT; returns the ms it was away if it came home now, else None."""
        if home and self.away_since_ns is not None:
            self._home_ns, away_ns = now_ns, now_ns - self.away_since_ns
            self.away_since_ns = None
            return away_ns / 1e6
        if not home and self.away_since_ns is None:
            self.away_since_ns = now_ns
            self._home_ns = None
        return None

    def durations(self) -> dict[str, float | int | None]:
        """For `qp.shift.durations`."""
        t, f, h = self._trigger_ns, self._first_wc_ns, self._home_ns
        return {
            "trigger_ns": t,
            "first_wc_ns": f,
            "home_ns": h,
            "fallback_ms": (f - t) / 1e6 if t is not None and f is not None and f >= t else None,
            "away_ms": (h - t) / 1e6 if t is not None and h is not None and h >= t else None,
        }

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(
        self, condition: Callable[[], bool], hopeless: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Wait, in any thread and without the driver's lock; returns whether condition() holds.

        hopeless: whether it never will; deadline: of time.monotonic(), None = for ever.
        """
        while True:
            # No Condition: a signal's handler that raises inside one may leave its lock to this thread, and the
            # collector may run in there, and close a QP, which takes the driver's lock. Whoever has that and tells us
            # something must not wait for us.
            told = threading.Lock()
            told.acquire()
            self._waiting.append(told)
            try:
                left = None if deadline is None else deadline - time.monotonic()
                if condition() or (left is not None and left <= 0) or hopeless():
                    return condition()
                told.acquire(timeout=SLICE_S if left is None else min(left, SLICE_S))
            finally:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(told)
            look_for_signals()

    def tell(self) -> None:
        """Something changed: wake all that wait, to look."""
        with contextlib.suppress(IndexError):
            while self._waiting:
                self._waiting.pop(0).release()
