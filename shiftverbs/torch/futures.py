# SPDX-License-Identifier: BSD-3-Clause
"""Where the callbacks of futures run: never in the group's thread, which what they wait for may depend on."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

from shiftverbs._core import without_signals

log = logging.getLogger("shiftverbs.torch")

#: How long `stop` waits for a callback that does not end.
STOP_S = 5.0


class Futures:
    """Completes the futures of one group, in the order in which their operations end.

    A callback may call an operation itself and wait for its future (DDP's PowerSGD hook does). So there is a thread for
    the futures that were got outside, one for those got in its callbacks, and so on; each begins when it is needed.

    :param name: of the threads
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._levels: list[_Level] = []
        self._lock = threading.Lock()

    def level(self) -> _Level:
        """Where a future has to be completed that is got in this thread."""
        here = threading.current_thread()
        with self._lock:
            number = next((i + 1 for i, level in enumerate(self._levels) if level.thread is here), 0)
            if number == len(self._levels):
                self._levels.append(_Level(f"{self._name}-futures-{number}"))
            return self._levels[number]

    def stop(self) -> None:
        """End the threads when what was given to them is done."""
        with self._lock:
            levels = list(self._levels)
        for level in levels:
            level.stop()


class _Level:
    def __init__(self, name: str) -> None:
        self._bases: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        without_signals(self.thread.start)

    def complete(self, base: Any) -> None:
        """Have a future's callbacks run."""
        self._bases.put(base)

    def stop(self) -> None:
        """End it."""
        self._bases.put(None)
        if threading.current_thread() is not self.thread:
            self.thread.join(STOP_S)

    def _run(self) -> None:
        while (base := self._bases.get()) is not None:
            try:
                base.set_result(None)
            except Exception:
                log.exception("a callback of a future failed")
