# SPDX-License-Identifier: BSD-3-Clause
"""Cases of Waiter. The "application" is a thread that clears attention as a driver run does."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fakes import fds, in_child, until

from shiftverbs import _nic

LONG_US = 20_000_000  # a grace period that no test waits out


class Bench:
    """A waiter, its attention flag and a pipe to make ready."""

    def __init__(self) -> None:
        self.flag = ctypes.c_int(0)
        self.waiter = _nic.Waiter(ctypes.addressof(self.flag))
        self.read_fd, self.write_fd = os.pipe()
        self.waiter.add(self.read_fd)
        self.returned: list[list[int]] = []

    def make_ready(self) -> None:
        """Make the pipe readable."""
        os.write(self.write_fd, b"x")

    def consume(self) -> None:
        """Take what made it readable."""
        os.read(self.read_fd, 100)

    def in_thread(self, **arguments: int) -> threading.Thread:
        """Wait in a control thread."""
        thread = threading.Thread(
            target=lambda: self.returned.append(self.waiter.wait(**arguments)), daemon=True
        )
        thread.start()
        return thread


def case_ready_descriptor_raises_attention_and_is_returned() -> None:
    bench = Bench()
    bench.make_ready()
    assert bench.waiter.wait(timeout_ms=30_000, grace_us=0) == [bench.read_fd]
    assert bench.flag.value == 1
    bench.flag.value = 0
    # Level-triggered: as long as it has not been taken.
    assert bench.waiter.wait(timeout_ms=30_000, grace_us=100) == [bench.read_fd]
    bench.consume()
    bench.flag.value = 0
    assert bench.waiter.wait(timeout_ms=1) == []
    assert bench.flag.value == 0, "a timeout is not a reason to run the driver"
    bench.waiter.add(bench.read_fd)  # twice is allowed
    bench.waiter.remove(bench.read_fd)
    bench.waiter.remove(bench.read_fd)
    bench.make_ready()
    assert bench.waiter.wait(timeout_ms=1) == []


def case_wake_returns_without_descriptors() -> None:
    bench = Bench()
    thread = bench.in_thread(grace_us=0)
    bench.waiter.wake()
    thread.join(30)
    assert bench.returned == [[]] and bench.flag.value == 1
    assert bench.waiter.raised == 1


def case_wake_that_was_answered_already_does_not_return() -> None:
    bench = Bench()
    bench.waiter.wake()
    bench.flag.value = 0  # an application thread saw the flag, cleared it and ran the driver
    assert bench.waiter.wait(timeout_ms=10, grace_us=LONG_US) == []
    assert bench.flag.value == 0, "asked for a second run"
    assert bench.waiter.answered_inline == 1


def case_inline_run_keeps_the_control_thread_asleep() -> None:
    bench = Bench()
    thread = bench.in_thread(grace_us=LONG_US)
    raises: list[Callable[[], None]] = [
        bench.make_ready,
        bench.waiter.wake,
        lambda: bench.waiter.set_deadline(1),  # long past: at once
    ]
    for n in range(12):
        raises[n % 3]()
        until(lambda: bench.flag.value)
        bench.flag.value = 0
        if n % 3 == 0:
            bench.consume()
        until(lambda n=n: bench.waiter.answered_inline == n + 1)  # type: ignore[misc]
        assert bench.flag.value == 0, "asked for a second run"
    assert bench.returned == [] and thread.is_alive()
    bench.waiter.close()
    thread.join(30)
    assert bench.returned == [[]]


def case_nobody_runs_the_driver_within_the_grace_period() -> None:
    bench = Bench()
    bench.make_ready()
    begun = time.monotonic_ns()
    assert bench.waiter.wait(timeout_ms=-1, grace_us=5000) == [bench.read_fd]
    assert time.monotonic_ns() - begun >= 5_000_000
    assert bench.flag.value == 1 and bench.waiter.answered_inline == 0


def case_driver_that_consumes_nothing_is_reported() -> None:
    """Clearing attention without taking what is ready must neither spin for ever nor hide it from Python."""
    bench = Bench()
    bench.make_ready()
    done = threading.Event()
    cleared = [0]

    def application() -> None:
        while not done.is_set():
            if bench.flag.value:
                bench.flag.value = 0
                cleared[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=application, daemon=True)
    thread.start()
    assert bench.waiter.wait(timeout_ms=60_000, grace_us=200_000) == [bench.read_fd]
    done.set()
    thread.join(30)
    assert bench.waiter.answered_inline == 4
    assert 4 <= cleared[0] <= 5  # the fifth if it saw the flag that the return leaves set


def case_deadline_wakes_can_be_moved_and_disarmed() -> None:
    bench = Bench()
    at_ns = time.monotonic_ns() + 20_000_000
    bench.waiter.set_deadline(at_ns)
    assert bench.waiter.wait(timeout_ms=60_000, grace_us=0) == []
    assert time.monotonic_ns() >= at_ns and bench.flag.value == 1
    bench.flag.value = 0
    bench.waiter.set_deadline(time.monotonic_ns() + 1_000_000)
    bench.waiter.set_deadline(0)
    assert bench.waiter.wait(timeout_ms=20) == [] and bench.flag.value == 0
    # Moved while somebody sleeps in wait.
    bench.waiter.set_deadline(time.monotonic_ns() + 3600_000_000_000)
    thread = bench.in_thread(grace_us=0)
    bench.waiter.set_deadline(time.monotonic_ns() + 1_000_000)
    thread.join(30)
    assert bench.returned == [[]] and bench.flag.value == 1


def case_wake_within_wakes_whoever_sleeps() -> None:
    bench = Bench()
    thread = bench.in_thread(grace_us=0)
    until(lambda: _sleeping_in_epoll(thread))
    begun = time.monotonic_ns()
    bench.waiter.wake_within(2_000_000)
    assert bench.flag.value == 0, "attention is its caller's to raise"
    thread.join(30)
    assert bench.returned == [[]] and bench.flag.value == 1
    assert time.monotonic_ns() - begun >= 2_000_000
    bench.waiter.close()
    bench.waiter.wake_within(1)  # does nothing


def case_control_thread_needs_no_gil_to_raise_attention() -> None:
    bench = Bench()
    listener = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    bench.waiter.add_listener(listener)
    libc = ctypes.PyDLL(None)  # keeps the GIL
    thread = bench.in_thread(grace_us=0)
    until(lambda: _sleeping_in_epoll(thread))
    sys.setswitchinterval(3600.0)
    deadline = time.monotonic() + 30
    libc.write(bench.write_fd, b"x", 1)
    while not bench.flag.value:
        if time.monotonic() > deadline:
            sys.setswitchinterval(0.005)
            raise AssertionError("attention waits for the GIL")
    value = ctypes.c_uint64(0)
    while libc.read(listener, ctypes.byref(value), 8) != 8:
        if time.monotonic() > deadline:
            sys.setswitchinterval(0.005)
            raise AssertionError("the listener waits for the GIL")
    assert bench.returned == []  # it does need the GIL for that
    sys.setswitchinterval(0.005)
    thread.join(30)
    assert bench.returned == [[bench.read_fd]]


def _sleeping_in_epoll(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/syscall") as where:
        # epoll_wait and epoll_pwait on x86-64, epoll_pwait on ARM, epoll_pwait2
        return where.read().split()[0] in ("232", "281", "22", "441")


def case_listeners_are_woken_by_every_kind_of_raise() -> None:
    bench = Bench()
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    others = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(20)]
    for each in [fd, *others]:
        bench.waiter.add_listener(each)

    def woken() -> bool:
        return bool(select.select([fd], [], [], 30)[0]) and os.eventfd_read(fd) > 0

    bench.waiter.wake()
    assert woken()
    bench.waiter.wait(timeout_ms=0, grace_us=0)
    bench.flag.value = 0
    bench.make_ready()
    bench.waiter.wait(timeout_ms=30_000, grace_us=0)
    assert woken()
    bench.flag.value = 0
    worker = _nic.NicWorker("raises", ctypes.addressof(bench.flag), bench.waiter)
    worker.submit("command", 1, _nic.ModifySteps().add(state=6))
    assert woken() and bench.flag.value == 1
    assert worker.stop()
    assert all(os.eventfd_read(each) == 3 for each in others)
    os.eventfd_write(fd, 2**64 - 2)  # a full counter neither blocks nor fails
    bench.waiter.wake()
    assert all(os.eventfd_read(each) == 1 for each in others)


def case_more_descriptors_than_one_wait_reports() -> None:
    bench = Bench()
    pipes = [os.pipe() for _ in range(200)]
    for read_fd, write_fd in pipes:
        bench.waiter.add(read_fd)
        os.write(write_fd, b"x")
    seen: set[int] = set()
    for _ in range(50):
        ready = bench.waiter.wait(timeout_ms=0, grace_us=0)
        for fd in ready:
            os.read(fd, 1)
        assert not seen & set(ready)
        seen |= set(ready)
        if not ready:
            break
    assert seen == {read_fd for read_fd, _ in pipes}


def case_close_ends_waits_and_is_repeatable() -> None:
    before = fds()
    bench = Bench()
    thread = bench.in_thread(grace_us=LONG_US)
    until(lambda: _sleeping_in_epoll(thread))
    bench.waiter.close()
    thread.join(30)
    assert bench.returned == [[]]
    assert bench.waiter.closed
    bench.waiter.close()
    bench.waiter.wake()
    assert bench.flag.value == 0
    assert bench.waiter.wait() == []
    bench.waiter.remove(bench.read_fd)
    for wrong in (
        lambda: bench.waiter.add(bench.read_fd),
        lambda: bench.waiter.add_listener(5),
        lambda: bench.waiter.set_deadline(1),
    ):
        try:
            wrong()
        except ValueError:
            continue
        raise AssertionError("used after close")
    # Closed in the middle of a grace period, too.
    other = Bench()
    other.make_ready()
    thread = other.in_thread(grace_us=LONG_US)
    until(lambda: other.flag.value)
    other.waiter.close()
    thread.join(30)
    assert not thread.is_alive()
    for each in (bench, other):
        os.close(each.read_fd)
        os.close(each.write_fd)
    bench = other = each = wrong = None  # type: ignore[assignment]
    gc.collect()
    assert fds() == before


def case_bad_arguments() -> None:
    bench = Bench()
    regular = os.open(__file__, os.O_RDONLY)
    for wrong, kind in (
        (lambda: bench.waiter.add(-1), OSError),
        (lambda: bench.waiter.add(regular), PermissionError),  # epoll does not watch regular files
        (lambda: bench.waiter.set_deadline(-1), ValueError),
        (lambda: bench.waiter.wait("soon"), TypeError),
    ):
        try:
            wrong()  # type: ignore[no-untyped-call]
        except kind:
            continue
        raise AssertionError(f"no {kind}")


def case_forked_child_leaves_the_shared_epoll_set_alone() -> None:
    bench = Bench()
    thread = bench.in_thread(grace_us=0)
    until(lambda: _sleeping_in_epoll(thread))

    def child() -> None:
        waiter = bench.waiter
        for wrong in (lambda: waiter.wait(0), lambda: waiter.add(0), lambda: waiter.set_deadline(1)):
            try:
                wrong()
            except RuntimeError:
                continue
            raise AssertionError("used in a child")
        waiter.wake()
        waiter.wake_within(1)
        assert bench.flag.value == 0
        waiter.remove(bench.read_fd)
        before = fds()
        waiter.close()
        assert fds() == before - 3
        waiter.close()
        mine = Bench()
        mine.make_ready()
        assert mine.waiter.wait(1000, 0) == [mine.read_fd]
        del bench.waiter
        gc.collect()

    in_child(child)
    assert bench.returned == []
    bench.make_ready()
    thread.join(30)
    assert bench.returned == [[bench.read_fd]]


def _at_last(action: Callable[[], Any]) -> None:
    """Run action at exit after _nic's own hook."""
    atexit.unregister(_nic._at_exit)
    atexit.register(action)
    atexit.register(_nic._at_exit)


def case_exit_while_the_control_thread_sleeps() -> None:
    bench = Bench()
    thread = bench.in_thread()
    until(lambda: _sleeping_in_epoll(thread))
    globals()["kept"] = bench


def case_exit_while_something_wakes_the_control_thread() -> None:
    """What would return to Python after the exit hook stays in C."""
    bench = Bench()
    thread = bench.in_thread(grace_us=0)
    until(lambda: _sleeping_in_epoll(thread))

    def late() -> None:
        bench.make_ready()
        until(lambda: bench.flag.value)
        with open(f"/proc/self/task/{thread.native_id}/syscall") as where:
            print("after the hook:", where.read())
        until(lambda: not _sleeping_in_epoll(thread))
        assert bench.returned == []
        # The thread that ends the interpreter is not kept.
        assert bench.waiter.wait(timeout_ms=30_000, grace_us=0) == [bench.read_fd]
        print("stayed away", flush=True)

    _at_last(late)
