# SPDX-License-Identifier: BSD-3-Clause
"""The attention flag, inline driver runs, and the event ring."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import functools
import operator
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake import RETRY_EXC, SUCCESS, WRITE, World

from shiftverbs import _core

FLAG = ctypes.c_int.from_address(_core.attention_address())


@pytest.fixture
def runs() -> Iterator[list[int]]:
    """Driver runs so far: each clears attention and appends to this list."""
    seen: list[int] = []

    def driver() -> None:
        _core.clear_attention()
        seen.append(threading.get_ident())

    _core.set_driver(driver)
    yield seen
    _core.set_driver(None)


def test_the_flag_is_plain_memory(world: World) -> None:
    assert not _core.attention()
    FLAG.value = 1
    assert _core.attention()
    _core.clear_attention()
    assert FLAG.value == 0
    _core.raise_attention()
    assert FLAG.value == 1


@pytest.mark.parametrize("call", ["post_send", "post_recv", "poll", "req_notify"])
def test_every_entry_runs_the_driver(world: World, runs: list[int], call: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "post_send": lambda: world.send(1),
        "post_recv": lambda: world.recv(1),
        "poll": world.scq.poll,
        "req_notify": world.scq.req_notify,
    }
    calls[call]()
    assert runs == [] and not _core.attention()
    FLAG.value = 1
    calls[call]()
    assert runs == [threading.get_ident()] and FLAG.value == 0


def test_nobody_drives(world: World) -> None:
    FLAG.value = 1
    world.send(1)
    assert FLAG.value == 0
    FLAG.value = 1
    assert world.scq.poll() == (0, []) and FLAG.value == 0


def test_the_driver_is_not_entered_twice(world: World) -> None:
    depth = []

    def driver() -> None:
        _core.clear_attention()
        depth.append(1)
        if len(depth) < 3:
            _core.raise_attention()
            world.send(1)
            assert world.scq.poll() == (0, [])

    _core.set_driver(driver)
    _core.raise_attention()
    world.scq.poll()
    assert len(depth) == 3, "what came up meanwhile is done in the same call"


@contextlib.contextmanager
def driven_by_another_thread(world: World) -> Iterator[None]:
    """Another thread, in `poll`, is in the middle of the driver; it goes on at the end."""
    inside, go = threading.Event(), threading.Event()

    def driver() -> None:
        _core.clear_attention()
        inside.set()
        assert go.wait(10)

    _core.set_driver(driver)
    _core.raise_attention()
    thread = threading.Thread(target=world.scq.poll)
    thread.start()
    assert inside.wait(10)
    try:
        yield
    finally:
        go.set()
        thread.join(10)


def test_another_thread_does_not_wait_for_the_driver(world: World) -> None:
    with driven_by_another_thread(world):
        _core.raise_attention()
        world.send(1)
        assert world.hw[0].count() == 1
    assert not _core.attention(), "the running driver looked again"


def test_a_driver_that_never_clears_attention_does_not_hang_the_application(world: World) -> None:
    count = []
    _core.set_driver(lambda: count.append(1))
    _core.raise_attention()
    world.send(1)
    assert 1 <= len(count) <= 64
    world.hw[0].complete()
    assert world.poll() == [(1, SUCCESS)]


def test_a_failing_driver_is_reported_and_hidden(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reports.append(args.exc_value))

    def driver() -> None:
        _core.clear_attention()
        raise RuntimeError("broken")

    _core.set_driver(driver)
    _core.raise_attention()
    world.send(1)
    assert [str(e) for e in reports] == ["broken"]
    _core.raise_attention()
    assert world.scq.poll() == (0, [])
    assert len(reports) == 2


def test_interrupts_pass_through_the_driver(world: World) -> None:
    def driver() -> None:
        _core.clear_attention()
        raise KeyboardInterrupt

    _core.set_driver(driver)
    _core.raise_attention()
    with pytest.raises(KeyboardInterrupt):
        world.scq.poll()
    _core.set_driver(None)
    assert world.scq.poll() == (0, [])


@pytest.fixture
def alarm() -> Iterator[None]:
    """The application's handler of SIGUSR1 raises TimeoutError."""

    def handler(number: int, frame: object) -> None:
        raise TimeoutError("too long")

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_no_signal_breaks_off_the_driver(guarded: World, alarm: None) -> None:
    """Its handler runs, and what it raises comes out of the verb, when the driver is done; no completion is lost."""
    w = guarded
    for wr_id in range(1, 5):
        w.send(wr_id)
    done = []

    def driver() -> None:
        _core.clear_attention()
        signal.raise_signal(signal.SIGUSR1)
        done.append(1)

    w.hw[0].complete()
    w.hw[0].complete()
    _core.set_driver(driver)
    _core.raise_attention()
    with pytest.raises(TimeoutError, match="too long"):
        w.scq.poll(10)
    assert done == [1]
    _core.raise_attention()
    with pytest.raises(TimeoutError, match="too long"):
        w.send(5)
    assert done == [1, 1] and w.hw[0].count() == 4, "the verb ended before it began"
    _core.set_driver(None)
    assert [x[0] for x in w.poll()] == [1, 2]


def test_a_signal_that_came_before_is_handled_before(world: World, alarm: None) -> None:
    """What a handler raises at the way in leaves the driver to others."""
    done = []

    def driver() -> None:
        _core.clear_attention()
        done.append(1)

    def handler(number: int, frame: object) -> None:
        assert not done
        raise TimeoutError("too long")

    signal.signal(signal.SIGUSR1, handler)
    _core.set_driver(driver)
    _core.raise_attention()
    raises = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGUSR1)
    with pytest.raises(TimeoutError):
        # No bytecode lies between the two, where the interpreter would handle it.
        list(map(operator.call, [raises, world.scq.poll]))
    assert not done
    world.scq.poll()
    assert done == [1]
    _core.set_driver(None)


def test_no_signal_breaks_off_the_driver_of_another_thread(world: World, alarm: None) -> None:
    """There none is handled anyway; the main thread handles it at once."""
    with driven_by_another_thread(world), pytest.raises(TimeoutError):
        signal.raise_signal(signal.SIGUSR1)
    _core.set_driver(None)


def test_a_new_driver_learns_of_old_events(guarded: World) -> None:
    guarded.send(1)
    guarded.hw[0].fail_send(RETRY_EXC)
    guarded.poll()
    assert not _core.attention(), "there is no driver"
    _core.set_driver(lambda: None)
    assert _core.attention()


@pytest.mark.parametrize("bad", [1, "x"])
def test_driver_must_be_callable(bad: object) -> None:
    with pytest.raises(TypeError):
        _core.set_driver(bad)


def test_poll_runs_the_driver_on_what_it_just_polled(guarded: World) -> None:
    """An error WC is handled in the very poll that took it, and what the driver makes of it is returned."""
    w = guarded
    w.send(1)
    w.send(2)

    def driver() -> None:
        _core.clear_attention()
        for kind, qp, _k, a, b, _t in _core.take_events():
            if kind == _core.EV_ERROR:
                qp.abort(a, b)

    _core.set_driver(driver)
    w.hw[0].fail_send(RETRY_EXC, 9)
    n, wcs = w.scq.poll(1)
    assert n == 1 and (wcs[0].wr_id, wcs[0].status, wcs[0].vendor_err) == (1, RETRY_EXC, 9)
    assert [x[0] for x in w.poll()] == [2]


@pytest.mark.parametrize("entries", [3, 10])
def test_an_interrupt_in_the_middle_of_a_poll_loses_no_completion(guarded: World, entries: int) -> None:
    """The application's signal handler raises in the driver, which the poll ran on what it had just polled."""
    w = guarded
    for wr_id in range(1, 5):
        w.send(wr_id)

    def driver() -> None:
        _core.clear_attention()
        for kind, qp, _k, a, b, _t in _core.take_events():
            if kind == _core.EV_ERROR:
                qp.abort(a, b)
        raise KeyboardInterrupt

    w.hw[0].complete()
    w.hw[0].complete()
    w.hw[0].fail_send(RETRY_EXC)
    _core.set_driver(driver)
    with pytest.raises(KeyboardInterrupt):
        w.scq.poll(entries)
    _core.set_driver(None)
    assert [x[0] for x in w.poll()] == [1, 2, 3, 4]


def test_the_driver_may_take_a_cq_away_in_the_middle_of_a_poll(guarded: World) -> None:
    """Traffic is home again: the backup's CQ is not polled any more, what it still held comes along."""
    w = guarded
    w.scq.set_active(1, True)
    w.qp.open_send(1)
    for i in range(3):
        w.send(i)
    w.events()

    def driver() -> None:
        _core.clear_attention()
        if _core.take_events():
            w.hw[1].complete(2)
            w.scq.set_active(1, False)

    _core.set_driver(driver)
    w.hw[1].complete()
    assert w.poll_cq(w.scq, 8) == [(0, SUCCESS), (1, SUCCESS), (2, SUCCESS)]
    assert w.poll_cq(w.scq, 8) == []


def test_events_carry_time_and_object(guarded: World) -> None:
    w = guarded
    before = time.monotonic_ns()
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC, 9)
    w.poll()
    after = time.monotonic_ns()
    ((kind, qp, k, a, b, t_ns),) = _core.take_events()
    assert (kind, k, a, b) == (_core.EV_ERROR, 0, RETRY_EXC, 9) and qp is w.qp
    assert before <= t_ns <= after
    assert _core.take_events() == []


def test_events_of_a_closed_qp_are_dropped(guarded: World) -> None:
    w = guarded
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC)
    w.poll()
    w.qp.close()
    assert _core.take_events() == []


def test_a_full_ring_says_so(guarded: World) -> None:
    w = guarded
    assert not _core.events_overflowed()
    for i in range(4200):
        w.send(i, WRITE, rkey=10_000 + i)
        w.hw[0].complete()
        w.poll()
    assert _core.events_overflowed() and not _core.events_overflowed()
    events = _core.take_events()
    assert len(events) == 4096 and events[0][3] == 10_000
    assert len(w.qp.seen_rkeys) == 4200
    _core.clear_attention()


def test_what_came_in_an_end_is_not_raised_in_the_driver(world: World, alarm: None) -> None:
    """The interpreter runs pending calls where it runs handlers: one may be due when the driver is entered."""

    def handler(number: int, frame: object) -> None:
        raise InterruptedError("now")

    class Number(int):
        @_core.whole_end
        def __del__(self) -> None:
            pass

    swallowed: list[object] = []

    def driver() -> None:
        _core.clear_attention()

    signal.signal(signal.SIGUSR1, handler)
    _core.set_driver(driver)
    before, sys.unraisablehook = sys.unraisablehook, swallowed.append
    try:
        # The signal comes, an object ends, and the driver runs, without a bytecode in between.
        ends = map(ctypes.CDLL(None)["raise"], map(Number, [int(signal.SIGUSR1)]))
        _core.raise_attention()
        with pytest.raises(InterruptedError):
            collections.deque(
                map(operator.call, [functools.partial(collections.deque, ends, 0), world.scq.poll]), 0
            )
    finally:
        sys.unraisablehook = before
        _core.set_driver(None)
    assert swallowed == []


def test_who_saved_our_handler_may_put_it_back(world: World, alarm: None) -> None:
    """As a library does that has a handler for a while: whatever comes by ours is passed on."""
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    sigaction = ctypes.CDLL(None).sigaction
    saved = ctypes.create_string_buffer(256)  # struct sigaction
    _core.whole(sigaction)(signal.SIGUSR1, None, saved)
    sigaction(signal.SIGUSR1, saved, None)
    signal.raise_signal(signal.SIGUSR1)
    assert len(got) == 1
    during: list[int] = []
    _core.whole(lambda: (signal.raise_signal(signal.SIGUSR1), during.append(len(got))))()
    assert during == [1] and len(got) == 2
    signal.raise_signal(signal.SIGUSR1)
    assert len(got) == 3


def test_two_signals_at_once_in_a_verb_that_waits(world: World, alarm: None) -> None:
    """Both handlers' exceptions come out, one after the other, and neither in the middle of the verb."""
    inside: list[BaseException] = []

    def other(number: int, frame: object) -> None:
        raise LookupError("another")

    def verb() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        try:
            _core.interruptibly(int)
        except BaseException:
            try:
                for _ in range(100):
                    time.sleep(0)
            except LookupError as error:
                inside.append(error)
            raise

    before = signal.signal(signal.SIGUSR2, other)
    try:
        with pytest.raises(LookupError):
            try:
                _core.whole(verb)()
            except TimeoutError:
                for _ in range(100):
                    time.sleep(0)
                raise
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert inside == []


def test_a_handler_at_the_way_in_is_broken_into_as_ever(world: World, alarm: None) -> None:
    """It may wait for another signal."""
    got: list[str] = []

    def waits(number: int, frame: object) -> None:
        got.append("begins")
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 10
        while len(got) < 2 and time.monotonic() < deadline:
            pass
        got.append("ends")

    signal.signal(signal.SIGUSR1, waits)
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append("other"))
    try:
        # The signal comes, and the verb begins, without a bytecode in between.
        comes = functools.partial(ctypes.pythonapi.PyErr_SetInterruptEx, int(signal.SIGUSR1))
        collections.deque(map(operator.call, (comes, _core.whole(int))), 0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert got == ["begins", "other", "ends"]


def test_who_calls_the_handler_before_his_may_come_in_a_verb(world: World, alarm: None) -> None:
    """As faulthandler does: it is called once more, and not for ever."""
    got: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    with tempfile.TemporaryFile() as told:
        _core.whole(faulthandler.register)(signal.SIGUSR1, told, chain=True)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(got) == 1
            _core.whole(lambda: os.kill(os.getpid(), signal.SIGUSR1))()
            assert len(got) == 2
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(got) == 3
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        told.seek(0)
        assert told.read().count(b"most recent call first") == 3


def test_what_is_due_waits_for_no_other_threads_end(world: World, alarm: None) -> None:
    """Another thread's `__del__` may wait for a NIC for long."""
    begun, over = threading.Event(), threading.Event()

    class Slow:
        @_core.whole_end
        def __del__(self) -> None:
            begun.set()
            over.wait(20)

    class Number(int):
        @_core.whole_end
        def __del__(self) -> None:
            pass

    thread = threading.Thread(target=lambda: [Slow()].clear())
    thread.start()
    assert begun.wait(10)
    try:
        with pytest.raises(TimeoutError):
            collections.deque(map(ctypes.CDLL(None)["raise"], map(Number, [int(signal.SIGUSR1)])), 0)
            for _ in range(1000):
                time.sleep(0)
        assert not over.is_set()
    finally:
        over.set()
        thread.join(20)


def test_a_close_that_another_thread_had_begun_before_a_fork(world: World) -> None:
    """Nobody in the child goes on with it: whoever closes the object there does not wait for that."""
    begun, over = threading.Event(), threading.Event()
    parent = os.getpid()

    class Slow:
        pointer = 1

        @_core.whole_close(0)  # where every object has something
        def close(self) -> None:
            if os.getpid() == parent:
                begun.set()
                over.wait(20)

    slow = Slow()
    thread = threading.Thread(target=slow.close)
    thread.start()
    assert begun.wait(10)
    child = os.fork()
    if not child:
        signal.alarm(10)
        slow.close()
        os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        thread.join(20)
