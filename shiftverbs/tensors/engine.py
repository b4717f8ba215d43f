# SPDX-License-Identifier: BSD-3-Clause
"""The thread that serves all channels of a node. It sleeps on their completion channels, all at once.

What has to do with channels happens under one lock. A thread of the application takes it if it is free, and does its
part by itself; else it leaves that to the engine, which would otherwise keep it waiting for as long as tensors move.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

from shiftverbs._core import without_signals

log = logging.getLogger("shiftverbs.tensors")

#: How long it looks for more before it sleeps: about what falling asleep and waking up take.
SPIN_S = 50e-6


class Served(Protocol):
    """A channel, as the engine sees it. What these raise ends the channel, and nothing else."""

    @property
    def fds(self) -> tuple[int, ...]:
        """Readable when there is something to do."""

    def turn(self) -> bool:
        """Do what there is to do, without waiting. Returns whether there was something."""

    def arm(self) -> bool:
        """Have the fds tell what comes next. Returns whether something came meanwhile."""

    def take_event(self, fd: int) -> None:
        """One of the fds is readable."""

    def tick(self) -> float:
        """Look at the time. Returns when to be called again, in time.monotonic()'s seconds."""

    def failed(self, error: Exception) -> None:
        """One of the above raised error. It is served no longer."""


class Engine:
    """Begins with the first channel, ends with `stop`. name: of its thread."""

    def __init__(self, name: str) -> None:
        self.lock = threading.RLock()
        self._calls: deque[Callable[[], None]] = deque()
        self._by_fd: dict[int, Served] = {}
        self._channels: dict[Served, tuple[int, ...]] = {}
        self._active: dict[Served, None] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with this object, not by `stop`: a thread that has just seen that it is not stopped may write to it.
        weakref.finalize(self, os.close, self._wake_fd)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._tick_at = math.inf
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def submit(self, call: Callable[[], None]) -> None:
        """Have call happen under the lock, now or soon; in the order in which one thread submits. It must not raise."""
        if self.lock.acquire(blocking=False):
            try:
                self._run_calls()
                call()
            finally:
                self.lock.release()
            if not self._calls:
                return
        else:
            self._calls.append(call)
        self.wake()

    def submit_later(self, call: Callable[[], None]) -> None:
        """As `submit`, and takes no lock: for finalizers."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Have the thread look. From any thread, and from finalizers."""
        if not self._stopped:
            os.eventfd_write(self._wake_fd, 1)

    def add(self, channel: Served) -> None:
        """Serve a channel from now on. The lock is held."""
        self._channels[channel] = channel.fds
        for fd in channel.fds:
            self._by_fd[fd] = channel
            self._poll.register(fd, select.POLLIN)
        if not self._started:
            self._started = True
            without_signals(self._thread.start)
        self.kick(channel)

    def remove(self, channel: Served) -> bool:
        """Serve it no longer. The lock is held. Returns whether it was served."""
        fds = self._channels.pop(channel, None)
        for fd in fds or ():
            self._poll.unregister(fd)
            del self._by_fd[fd]
        self._active.pop(channel, None)
        return fds is not None

    def kick(self, channel: Served, at: float = -math.inf) -> None:
        """There is something to do for a channel. The lock is held.

        :param at: not now, but then, in time.monotonic()'s seconds
        """
        if channel not in self._channels:
            return
        if at == -math.inf:
            if channel in self._active:
                return
            self._active[channel] = None
        elif at >= self._tick_at:
            return
        else:
            self._tick_at = at
        if threading.current_thread() is not self._thread:
            self.wake()

    def guard(self, channel: Served, call: Callable[[], bool]) -> bool:
        """call(), or the end of the channel. The lock is held."""
        try:
            return call()
        except Exception as error:
            if self.remove(channel):
                log.debug("a channel ended", exc_info=True)
                channel.failed(error)
            return True

    def stop(self) -> None:
        """End the thread. Whoever calls this has removed all channels."""
        with self.lock:
            if self._stopped:
                return
            self._run_calls()
            self.wake()
            self._stopped = True
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run_calls(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:
                log.exception("a call of the application's failed in the engine")

    def _run(self) -> None:
        busy_until = 0.0
        while not self._stopped:
            with self.lock:
                some, timeout_s = self._turn(time.monotonic() < busy_until)
            if some:
                busy_until = time.monotonic() + SPIN_S
            if timeout_s > 0:
                self._sleep(timeout_s)
            else:
                time.sleep(0)  # others get the lock

    def _turn(self, awake: bool) -> tuple[bool, float]:
        """One look at all that is active. Returns whether there was something to do, and how long to sleep."""
        self._run_calls()
        some = False
        for channel in list(self._active):
            some = self.guard(channel, channel.turn) or some
        now = time.monotonic()
        if now >= self._tick_at or some:
            self._tick(now)
        if some or awake:
            return some, 0.0
        for channel in list(self._active):
            if self.guard(channel, channel.arm):
                return True, 0.0
            self._active.pop(channel, None)
        if self._calls:
            return True, 0.0
        return False, max(1e-6, self._tick_at - time.monotonic())

    def _tick(self, now: float) -> None:
        self._tick_at = math.inf
        for channel in list(self._channels):
            self.guard(channel, lambda channel=channel: self._tick_one(channel))  # type: ignore[misc]

    def _tick_one(self, channel: Served) -> bool:
        self._tick_at = min(self._tick_at, channel.tick())
        return False

    def _sleep(self, for_s: float) -> None:
        ready = self._poll.poll(None if for_s == math.inf else math.ceil(for_s * 1000))
        with self.lock:
            for fd, _ in ready:
                if fd == self._wake_fd:
                    try:
                        os.eventfd_read(fd)
                    except BlockingIOError:
                        pass
                    continue
                channel = self._by_fd.get(fd)
                if channel is not None:
                    self._active[channel] = None
                    self.guard(channel, lambda: self._take_event(channel, fd))  # noqa: B023

    @staticmethod
    def _take_event(channel: Served, fd: int) -> bool:
        channel.take_event(fd)
        return True
