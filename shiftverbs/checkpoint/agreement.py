# SPDX-License-Identifier: BSD-3-Clause
"""How ranks agree to pause: one round after the other, over counters in a store, in a thread of each rank.

A round, in the order of its counters:

- `wanted`: somebody asks for it.
- `ready/RANK`: the first boundary at which a rank can still stop. Its thread says so, so that it need not be at one;
  from there on the rank goes no further until it knows the boundary.
- `boundary`: the latest of those, by rank 0, which alone looks at all ranks.
- `arrived/RANK`: the rank has stopped there.
- `outcome`: save, by rank 0, once all have; or resume, naming a rank, by whoever has waited too long. The first one to
  draw `ticket` decides, so it is one of the two for all.
- `saved/RANK`: how saving went at a rank that saves; `end`: all have, or one that has not, by rank 0.

A rank waits for each of these only so long, and only its thread ever waits for the store: when that hangs, the rank
goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("shiftverbs.checkpoint")

SAVE, RESUME = 1, 2  # an outcome; RESUME + r: rank r was waited for
DONE, FAILED = 1, 2  # how saving went at a rank; an end is DONE, or FAILED + r: at rank r it did not
#: How often the store is looked at while nothing is asked, and while our rank stands still; the second number is for
#: each rank of the job, all of which look.
IDLE_S, IDLE_RANK_S = 0.05, 0.0005
PAUSED_S, PAUSED_RANK_S = 0.002, 0.00005


class Store(Protocol):
    """Counters that all ranks of a job share."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, at one stroke; the sum. Raises an exception of its own."""


class LocalStore:
    """That of a job of one rank. Only one thread uses it."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        """As Store.add."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]


class Round:
    """What a rank and its thread tell each other of one round, under the rank's condition."""

    def __init__(self, ready: int) -> None:
        self.ready = ready
        # From the store
        self.boundary = 0
        self.outcome = 0
        self.end = 0
        self.end_failed = False  # the rank that `end` names said so: it was not late
        # From the rank
        self.is_waiting = False
        self.paused_ns = 0  # when it stopped at the boundary
        # A call of step() takes part: another one, in save or of another thread, does not.
        self.is_taken = False
        self.gave_up = False  # it has waited too long: nobody is to save any more
        self.result = 0
        self.left = False  # it goes on, whatever comes


class Conductor:
    """A rank's side of a round that somebody asked for; only the rank's thread uses it.

    :param store: of the job
    :param number: of the round
    :param rank, size: ours, and how many there are
    :param savers: the ranks that save
    :param save_timeout_s: how long saving may take
    :param changed: guards `state`, and is notified of what changes in it
    """

    def __init__(
        self,
        store: Store,
        number: int,
        rank: int,
        size: int,
        savers: Sequence[int],
        save_timeout_s: float,
        changed: threading.Condition,
    ) -> None:
        self._store = store
        self._number = number
        self._rank, self._size, self._savers = rank, size, savers
        self._save_timeout_s = save_timeout_s
        self._changed = changed
        self._told: set[str] = set()
        self._gathered: dict[str, list[int]] = {}
        self._save_until: float | None = None

    def is_wanted(self) -> bool:
        """Whether somebody asks for this round."""
        return self._read("wanted") > 0

    def want(self) -> None:
        """Ask for it."""
        self._add("wanted", 1)

    def is_over(self) -> bool:
        """Whether it was decided without us."""
        return self._read("outcome") > 0

    def begin(self, state: Round) -> None:
        """Say where our rank can stop."""
        self._add(f"ready/{self._rank}", state.ready)

    def look(self, state: Round) -> bool:
        """Take the round as far as it goes now; whether it is over for us. Raises what the store raises."""
        if not state.boundary:
            self._find_boundary(state)
        if state.paused_ns:
            self._tell("arrived", 1)
        if not state.outcome:
            late = self._gather("arrived", range(self._size)) if self._rank == 0 and state.boundary else 0
            if late is None:
                self._decide(SAVE)
            elif state.gave_up:
                self._decide(RESUME + self._missing(state))
            elif late:
                self._resume_if_gone(late)
            self._take(state, "outcome")
        if state.outcome == SAVE:
            self._finish(state)
        return state.outcome >= RESUME or state.end > 0 or state.left

    def abandon(self, state: Round) -> None:
        """Our rank takes no more part in it: nobody is to wait for it."""
        if not state.outcome:
            self._decide(RESUME + self._rank)
            self._take(state, "outcome")
        if state.outcome == SAVE and not state.end:
            self._tell("saved", state.result or FAILED)
            if self._rank == 0:
                self._tell_all("end", FAILED)  # who else would say it

    def leave(self) -> None:
        """Our rank takes part in no more rounds."""
        self._store.add(f"gone/{self._rank}", 1)

    def _resume_if_gone(self, late: int) -> None:
        if self._store.add(f"gone/{late}", 0):
            self._decide(RESUME + late)

    def _find_boundary(self, state: Round) -> None:
        if self._rank == 0:
            late = self._gather("ready", range(self._size))
            if late is not None:
                self._resume_if_gone(late)
                return
            self._add("boundary", max(self._gathered["ready"]))
        self._take(state, "boundary")
        if not state.boundary and not state.outcome:
            self._resume_if_gone(0)

    def _finish(self, state: Round) -> None:
        if self._save_until is None:
            self._save_until = time.monotonic() + self._save_timeout_s
        if state.left and not state.result:
            self._tell("saved", FAILED)
        elif state.result:
            self._tell("saved", state.result)
        if self._rank == 0:
            late = self._gather("saved", self._savers)
            if late is None:
                failed = [
                    rank
                    for rank, result in zip(self._savers, self._gathered["saved"], strict=True)
                    if result != DONE
                ]
                self._tell_all("end", FAILED + failed[0] if failed else DONE)
            elif time.monotonic() > self._save_until:
                self._tell_all("end", FAILED + late)
        end = self._read("end")
        if end:
            failed_there = end >= FAILED and self._read(f"saved/{end - FAILED}") == FAILED
            with self._changed:
                state.end, state.end_failed = end, failed_there
                self._changed.notify_all()

    def _take(self, state: Round, name: str) -> None:
        value = self._read(name)
        if value:
            with self._changed:
                setattr(state, name, value)
                self._changed.notify_all()

    def _decide(self, outcome: int) -> None:
        if "outcome" not in self._told:
            self._told.add("outcome")
            if self._add("ticket", 1) == 1:
                self._add("outcome", outcome)

    def _missing(self, state: Round) -> int:
        """A rank that our rank waits for in vain; rank 0 if there is none, for it alone can have gone no further."""
        name = "arrived" if state.boundary else "ready"
        return next((rank for rank in range(self._size) if not self._read(f"{name}/{rank}")), 0)

    def _gather(self, name: str, ranks: Sequence[int]) -> int | None:
        """Read what ranks have told, in order, as far as they have; the first one that has not, or None."""
        values = self._gathered.setdefault(name, [])
        while len(values) < len(ranks):
            value = self._read(f"{name}/{ranks[len(values)]}")
            if not value:
                return ranks[len(values)]
            values.append(value)
        return None

    def _tell(self, name: str, value: int) -> None:
        if name not in self._told:
            self._told.add(name)
            self._add(f"{name}/{self._rank}", value)

    def _tell_all(self, name: str, value: int) -> None:
        if name not in self._told:
            self._told.add(name)
            self._add(name, value)

    def _add(self, name: str, amount: int) -> int:
        return self._store.add(f"{self._number}/{name}", amount)

    def _read(self, name: str) -> int:
        return self._add(name, 0)


def interval_s(size: int, is_waiting: bool) -> float:
    """How long to wait before the store is looked at again."""
    if is_waiting:
        return max(PAUSED_S, size * PAUSED_RANK_S)
    return max(IDLE_S, size * IDLE_RANK_S)
