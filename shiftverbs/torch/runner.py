# SPDX-License-Identifier: BSD-3-Clause
"""The thread of a process group: it alone uses the group's transport. Collectives run one after the other, in the order
in which they were called; sends and receives beside them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from shiftverbs._core import without_signals
from shiftverbs.torch.collectives import Collectives
from shiftverbs.torch.futures import Futures
from shiftverbs.torch.point_to_point import PointToPoint, Receive, Send
from shiftverbs.torch.work import ShiftWork
from shiftverbs.transport import Transport, TransportError

log = logging.getLogger("shiftverbs.torch")

#: What a collective does, given the collectives and its deadline.
Action = Callable[[Collectives, float], None]


class Runner:
    """Runs what is submitted; begin with `start`, end with `stop`."""

    def __init__(self, transport: Transport, futures: Futures, name: str) -> None:
        self._transport, self._futures = transport, futures
        self._collectives = Collectives(transport)
        self._messages = PointToPoint(transport, self._ended)
        self._jobs: deque[tuple[Action, ShiftWork, float]] = deque()
        self._new: deque[Send | Receive] = deque()
        self._stop = False
        self._failed: BaseException | None = None
        self._lock = threading.Lock()
        transport.on_message = self._messages.take
        transport.background = self._background
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        without_signals(self._thread.start)

    @property
    def transport(self) -> Transport:
        """What it runs on."""
        return self._transport

    def submit(self, action: Action, work: ShiftWork, timeout_s: float) -> None:
        """Run a collective when those before it have ended; timeout_s: from then on."""
        with self._lock:
            if self._failed is None:
                self._jobs.append((action, work, timeout_s))
                self._transport.wake()
                return
        work.finish(self._failed)

    def post(self, one: Send | Receive) -> None:
        """Begin a send or a receive."""
        with self._lock:
            if self._failed is None:
                self._new.append(one)
                self._transport.wake()
                return
        one.work.finish(self._failed)

    def stop(self) -> None:
        """End, with what has not ended yet failing. Waits for the thread, unless this is it."""
        with self._lock:
            self._stop = True
            if self._failed is None:
                self._transport.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._futures.stop()

    def _ended(self, work: ShiftWork, error: BaseException | None, source: int | None) -> None:
        work.finish(error, source)

    def _background(self) -> None:
        """Called by the transport while it waits."""
        if self._stop:
            raise TransportError("the process group was destroyed")
        self._begin_new()
        self._messages.progress()

    def _begin_new(self) -> None:
        while self._new:
            one = self._new.popleft()
            if isinstance(one, Send):
                self._messages.send(one)
            else:
                self._messages.receive(one)

    def _run(self) -> None:
        current: ShiftWork | None = None
        try:
            while not self._stop:
                if self._jobs:
                    action, current, timeout_s = self._jobs.popleft()
                    deadline = time.monotonic() + timeout_s
                    action(self._collectives, deadline)
                    self._transport.settle(deadline)
                    current.finish()
                    current = None
                    del action  # it holds tensors
                    continue
                self._begin_new()
                if self._messages:
                    self._transport.wait(
                        lambda: bool(self._jobs) or self._stop or not self._messages,
                        self._messages.deadline() + 1.0,  # progress() is earlier
                        self._messages.ranks,
                        sends=self._messages.is_writing(),
                        woken=True,
                    )
                else:
                    self._transport.idle()
            error: BaseException = TransportError("the process group was destroyed")
        except BaseException as caught:
            error = caught
            if not isinstance(caught, TransportError):
                log.debug("a collective failed", exc_info=True)
                rank = self._transport.rank
                self._transport.give_up(TransportError(f"rank {rank} failed: {caught}", [rank]))
        self._end(error, current)

    def _end(self, error: BaseException, current: ShiftWork | None) -> None:
        with self._lock:
            self._failed = error
            jobs, new = list(self._jobs), list(self._new)
            self._jobs.clear()
            self._new.clear()
        # First of all: when an operation has failed, its memory is the application's, and peers may be writing still.
        self._transport.on_message = self._transport.background = None
        self._transport.close()
        if current is not None:
            current.finish(error)
        self._messages.fail(error)
        for _, work, _ in jobs:
            work.finish(error)
        for one in new:
            one.work.finish(error)
