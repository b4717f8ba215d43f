# SPDX-License-Identifier: BSD-3-Clause
"""Asynchronous events of an application's Context: each one once to the application, once to the driver.

Both read from one descriptor. Whoever comes first takes every event that is there, acknowledges it to libibverbs
at once, tells the listener and queues a copy for the application. An application that never asks for its events
therefore blocks no destroy verb (libibverbs' destroy waits until all events *taken* are acknowledged).
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import threading
from collections.abc import Callable
from typing import Any

import pyverbs.device

from shiftverbs import _core
from shiftverbs.shadows import pyverbs_objects

# Beyond this the oldest is dropped: a NIC that raises events endlessly must not eat the memory of a program
# that never asks for them.
MAX_QUEUED = 4096


class QueuedAsyncEvent(pyverbs.device.AsyncEvent):
    """An event that was acknowledged when it was taken from the device."""

    def ack(self) -> None:
        """Verb ibv_ack_async_event: done already; this one may be called, or not, or twice."""


def wait_readable(fd: int, also: int = -1) -> None:
    """Wait, without the GIL, until fd (or also, if not -1) is readable; signals' handlers run meanwhile.

    Returns at once where fd is in non-blocking mode: the read then says EAGAIN, as in C.
    """
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK:
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if also >= 0:
        poll.register(also, select.POLLIN)
    poll.poll()


class AsyncEvents:
    """The events of one Context.

    context: its `ibv_context *`; fd: its async descriptor; take: reads one event without blocking and returns it
    (`type`, `element`, `ack()`) or None (`_nic.get_async_event`); listener: called with each event before `ack()`.
    ours: tells which events failover itself caused; the application does not get those.
    """

    def __init__(
        self, context: int, fd: int, take: Callable[[int], Any], listener: Callable[[Any], None] | None = None
    ) -> None:
        self.fd = fd
        self.listener = listener
        self.ours: Callable[[Any], bool] | None = None
        self.dropped = 0
        self._context = context
        self._take = take
        self._queue: collections.deque[int] = collections.deque()
        self._lock = _core.Unbroken(threading.RLock())
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def pump(self, wait: bool = True) -> int:
        """Take all events that are there. Returns how many. Any thread; never blocks on the device.

        wait: False returns at once where another thread is taking events. The driver must not: the collector may
        take memory away in that thread, and wait for a NIC.
        """
        count = 0
        if wait:
            self._lock.enter_within(-1)
        elif not self._lock.enter_now():
            return 0
        try:
            while not self._closed:
                event = self._take(self._context)
                if event is None:
                    break
                count += 1
                try:
                    if self.listener is not None:
                        self.listener(event)
                finally:
                    mine = self.ours is not None and self.ours(event)
                    event.ack()
                    if not mine:
                        self._queue.append(int(event.type))
                        if len(self._queue) > MAX_QUEUED:
                            self._queue.popleft()
                            self.dropped += 1
        finally:
            if count:  # whatever the listener raised, as what a signal's handler did in it
                os.eventfd_write(self._wake, 1)
            self._lock.leave()
        return count

    def get(self) -> pyverbs.device.AsyncEvent:
        """The application's next event; blocks without the GIL.

        Raises PyverbsRDMAError (EAGAIN) where the descriptor is non-blocking and nothing is there, or as the verb does.
        """
        while True:
            try:
                self.pump()
            except OSError as error:  # the device was removed
                raise pyverbs.device.PyverbsRDMAError("Failed to get async event", error.errno) from error
            with self._lock:
                if not self._closed:
                    # It also woke for what failover caused, which nobody gets here.
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                if self._queue:
                    event = QueuedAsyncEvent(self._queue.popleft())
                    if self._queue:
                        os.eventfd_write(self._wake, 1)
                    return event
            if self._closed or fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_NONBLOCK:
                raise pyverbs.device.PyverbsRDMAError("Failed to get async event", -1)
            wait_readable(self.fd, self._wake)

    @property
    def closed(self) -> bool:
        """Whether close() was called: the descriptor is no longer the device's."""
        return self._closed

    def close(self) -> None:
        """Forget everything. Whoever waits in get() gets an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            os.eventfd_write(self._wake, 1)
        # Not closed: a waiter may still poll it. It goes with the last reference.

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        wake = getattr(self, "_wake", -1)
        if wake >= 0:
            self._wake = -1
            with contextlib.suppress(OSError):
                _close(wake)


def get_directly(context: Any) -> pyverbs.device.AsyncEvent:
    """Verb ibv_get_async_event for a Context that nobody else reads: pyverbs' own event, without the GIL."""
    wait_readable(pyverbs_objects.async_fd(context))
    return pyverbs.device.Context.get_async_event(context)
