# SPDX-License-Identifier: BSD-3-Clause
"""Virtual time, and the only source of chance."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

US, MS = 1_000, 1_000_000
SECOND = 1_000_000_000
#: No run of two hosts takes more events.
MOST_STEPS = 1_000_000


class Clock:
    """Everything of a run follows from the seed. after: called behind each event."""

    def __init__(self, seed: int) -> None:
        self.now = SECOND
        self.rng = random.Random(seed)
        self.queue: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self.ticket = 0
        self.steps = 0
        self.most_steps = MOST_STEPS
        self.after: Callable[[], None] = lambda: None

    def later(self, delay_ns: int, call: Callable[..., object], *args: Any) -> None:
        """Call call(*args) delay_ns from now; equal times in the order of the calls."""
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + delay_ns, self.ticket, call, args))

    def run(self, until_ns: int, done: Callable[[], bool] | None = None, each: int = 16) -> bool:
        """Let time pass until until_ns, or until done() holds, which is looked at behind every `each`-th event."""
        queue = self.queue
        for n in itertools.count():
            if not queue or queue[0][0] > until_ns:
                self.now = max(self.now, until_ns)
                return done() if done is not None else True
            when, _, call, args = heapq.heappop(queue)
            if when > self.now:  # a wait within an event may have gone further
                self.now = when
            call(*args)
            self.after()
            self.steps += 1
            if self.steps > self.most_steps:
                raise AssertionError("the run does not come to rest")
            if done is not None and n % each == 0 and done():
                return True
        raise AssertionError
