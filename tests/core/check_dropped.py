# SPDX-License-Identifier: BSD-3-Clause
"""What ends in a thread that has a lock of ours is closed outside it: by whom, in which order, and how often."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_until

from shiftverbs import _core

LOCK = _core.Unbroken(threading.RLock())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    _core.close_dropped()
    assert not _core.is_busy()


@pytest.fixture
def ignored() -> Iterator[list[Any]]:
    """What was raised where nobody could catch it."""
    seen: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, seen.append
    yield seen
    sys.unraisablehook = before


class Thing:
    """An object with an end, as ours have it."""

    _node: Any = None

    def __init__(self, name: str, ended: list[tuple[str, bool]]) -> None:
        self.name, self.ended, self.is_open = name, ended, True

    @_core.whole_close(0)  # where every object has something
    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.ended.append((self.name, _core.is_busy()))

    @_core.whole_end
    def __del__(self) -> None:
        self.close()


def node(*parents: Any) -> Any:
    """A place among parents and children, as lifetime.Node."""
    return SimpleNamespace(
        parents=list(parents), children=1, close_left=lambda: None, leave=lambda thing: None
    )


class Memory(Thing):
    @_core.whole_close(0, anywhere=True)
    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.ended.append((self.name, _core.is_busy()))

    @_core.whole_end_anywhere
    def __del__(self) -> None:
        self.close()


def test_outside_it_ends_at_once() -> None:
    ended: list[tuple[str, bool]] = []
    Thing("a", ended)
    _core.whole(lambda: Thing("b", ended))()
    assert ended == [("a", False), ("b", False)]


@pytest.mark.parametrize("way", ["drop", "close", "collect"])
def test_under_a_lock_it_ends_behind_it(way: str) -> None:
    ended: list[tuple[str, bool]] = []
    things = [Thing(name, ended) for name in "abc"]
    if way == "collect":
        for thing in things:
            thing.me = thing  # type: ignore[attr-defined]
        del thing
    with LOCK, LOCK:
        if way == "close":
            for thing in things:
                thing.close()
                thing.close()
        things.clear()
        if way == "collect":
            gc.collect()
        assert not ended
    assert not ended
    _core.close_dropped()
    assert sorted(ended) == [("a", False), ("b", False), ("c", False)]
    if way == "close":
        assert [name for name, _ in ended] == ["a", "b", "c"]


@pytest.mark.parametrize("verb", ["whole", "close"])
def test_the_next_verb_closes_what_was_dropped(verb: str) -> None:
    ended: list[tuple[str, bool]] = []
    with LOCK:
        Thing("a", ended)
    last = Thing("b", ended)
    if verb == "whole":
        _core.whole(lambda: ended.append(("verb", False)))()
        last.close()
    else:
        last.close()
    assert [name for name, _ in ended if name != "verb"] == ["a", "b"]
    assert ended[0] == ("a", False)


def test_a_verb_closes_what_it_dropped() -> None:
    ended: list[tuple[str, bool]] = []

    def verb() -> None:
        with LOCK:
            Thing("a", ended)
        assert not ended

    _core.whole(verb)()
    assert ended == [("a", False)]


def test_memory_ends_at_once() -> None:
    ended: list[tuple[str, bool]] = []
    with LOCK:
        Memory("dropped", ended)
        Memory("closed", ended).close()
    assert ended == [("dropped", True), ("closed", True)]


def test_whoever_puts_aside_rings() -> None:
    ended: list[tuple[str, bool]] = []
    rung: list[object] = []
    _core.when_dropped(rung.append)
    try:
        with LOCK:
            Thing("a", ended)
            Memory("b", ended)
        Thing("c", ended)
    finally:
        _core.when_dropped(None)
    assert rung == [None] and [name for name, _ in ended] == ["b", "a", "c"]


def test_a_thread_that_closes_nothing() -> None:
    ended: list[tuple[str, bool]] = []

    def work() -> None:
        _core.closes_nothing_here()
        Thing("a", ended)
        _core.close_dropped()
        _core.whole(int)()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not ended
    _core.close_dropped()
    assert ended == [("a", False)]


def test_a_lock_that_was_not_had_is_not_counted() -> None:
    other, go = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            other.set()
            go.wait(20)

    def handler(number: int, frame: object) -> None:
        raise TimeoutError("now")

    thread = threading.Thread(target=hold)
    thread.start()
    assert other.wait(10)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert not LOCK.enter_now() and not LOCK.enter_within(0.01) and not _core.is_busy()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError), LOCK:
            pass
        assert not _core.is_busy()
    finally:
        signal.signal(signal.SIGALRM, before)
        go.set()
        thread.join()
    with LOCK:
        assert _core.is_busy()


def test_a_handler_closes_at_once_while_its_thread_waits_for_a_lock() -> None:
    ended: list[tuple[str, bool]] = []
    other, go = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            other.set()
            go.wait(20)

    def handler(number: int, frame: object) -> None:
        Thing("a", ended)
        assert ended == [("a", False)]
        go.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert other.wait(10)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with LOCK:
            assert len(ended) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
        go.set()
        thread.join()


def test_what_fails_is_told_and_the_others_end(ignored: list[Any]) -> None:
    ended: list[tuple[str, bool]] = []

    class Fails(Thing):
        @_core.whole_end
        def __del__(self) -> None:
            raise ValueError("fails")

    with LOCK:
        Thing("a", ended)
        Fails("b", ended)
        Thing("c", ended)
    _core.close_dropped()
    assert [name for name, _ in ended] == ["a", "c"]
    assert [str(what.exc_value) for what in ignored] == ["fails"]
    assert "Fails.__del__" in ignored[0].object.__qualname__


def test_what_a_handler_raises_meanwhile_comes_out_behind(ignored: list[Any]) -> None:
    def handler(number: int, frame: object) -> None:
        raise InterruptedError("now")

    class Signalled(Thing):
        @_core.whole_end
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGUSR1)
            for _ in range(100):
                time.sleep(0)
            self.close()

    ended: list[tuple[str, bool]] = []
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with LOCK:
            Signalled("a", ended)
        with pytest.raises(InterruptedError):
            _core.close_dropped()
            for _ in range(1000):
                time.sleep(0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == [("a", False)] and not ignored


def test_a_programs_own_end_comes_first_and_outside() -> None:
    ended: list[tuple[str, bool]] = []
    kept: list[Any] = []

    def theirs(thing: Thing) -> None:
        ended.append(("theirs " + thing.name, _core.is_busy()))
        if thing.name == "kept":
            kept.append(thing)

    Mine = type("Mine", (Thing,), {"__del__": _core.and_end(theirs, Thing.__del__.our_end)})  # type: ignore[attr-defined]
    with LOCK:
        Mine("a", ended)
        Mine("kept", ended)
        assert not ended
    _core.close_dropped()
    assert ended == [("theirs a", False), ("a", False), ("theirs kept", False)]
    assert kept[0].is_open
    kept.clear()
    assert len(ended) == 3


def test_a_parent_waits_for_a_child_that_another_thread_closes() -> None:
    """pyverbs does not find that child any more, its weak references being gone."""
    ended: list[tuple[str, bool]] = []
    begun, go = threading.Event(), threading.Event()

    class Slow(Thing):
        @_core.whole_end
        def __del__(self) -> None:
            begun.set()
            go.wait(20)
            self.close()
            self._node.parents.clear()

    parent, other = Thing("parent", ended), Thing("other", ended)
    for thing in (parent, other):
        thing._node = node()
    child = Slow("child", ended)
    child._node = node(node(parent._node))
    with LOCK:
        del child
    thread = threading.Thread(target=_core.close_dropped)
    thread.start()
    assert begun.wait(10)
    other.close()
    assert [name for name, _ in ended] == ["other"]
    timer = threading.Timer(0.2, go.set)
    timer.start()
    parent.close()
    assert [name for name, _ in ended] == ["other", "child", "parent"]
    thread.join()
    timer.join()


def test_an_end_closes_its_parent_before_what_is_queued_behind_it() -> None:
    """A program's own `__del__` in the closing thread: what else stands on the parent goes first."""
    ended: list[tuple[str, bool]] = []
    parent = Thing("parent", ended)
    parent._node = node()
    between = node(parent._node)

    def theirs(thing: Thing) -> None:
        parent.close()

    Mine = type("Mine", (Thing,), {"__del__": _core.and_end(theirs, Thing.__del__.our_end)})  # type: ignore[attr-defined]
    with LOCK:
        for cls, name, on in ((Mine, "a", parent._node), (Thing, "stranger", node()), (Thing, "b", between)):
            thing = cls(name, ended)
            thing._node = node(on)
        del thing
    _core.close_dropped()
    assert [name for name, _ in ended] == ["b", "parent", "a", "stranger"]


def test_a_parent_waits_for_an_end_that_comes_at_once_elsewhere() -> None:
    ended: list[tuple[str, bool]] = []
    begun, go = threading.Event(), threading.Event()

    class Slow(Thing):
        @_core.whole_end
        def __del__(self) -> None:
            begun.set()
            go.wait(20)
            self.close()

    grandparent = Thing("grandparent", ended)
    grandparent._node = node()
    things = [Slow("child", ended)]
    things[0]._node = node(node(grandparent._node))
    thread = threading.Thread(target=things.clear)
    thread.start()
    assert begun.wait(10)
    timer = threading.Timer(0.2, go.set)
    timer.start()
    grandparent.close()
    assert [name for name, _ in ended] == ["child", "grandparent"]
    thread.join()
    timer.join()


def test_many_threads_close_each_once() -> None:
    ended: list[tuple[str, bool]] = []
    over = threading.Event()

    def close() -> None:
        while not over.is_set():
            _core.close_dropped()

    closers = [threading.Thread(target=close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for number in range(5000):
        with LOCK:
            Thing(str(number), ended)
    _core.close_dropped()
    wait_until(lambda: len(ended) >= 5000, 20)
    over.set()
    for closer in closers:
        closer.join()
    assert len(ended) == 5000 and len(set(ended)) == 5000


def test_a_long_queue_needs_no_stack() -> None:
    ended: list[tuple[str, bool]] = []
    with LOCK:
        for number in range(20_000):
            Thing(str(number), ended)
    _core.close_dropped()
    assert [name for name, _ in ended] == list(map(str, range(20_000)))


def test_a_forked_child_closes_nothing_of_its_parents() -> None:
    ended: list[tuple[str, bool]] = []
    with LOCK:
        Thing("a", ended)
    child = os.fork()
    if child == 0:
        _core.close_dropped()
        _core.whole(int)()
        mine: list[tuple[str, bool]] = []
        with LOCK:
            Thing("b", mine)
        _core.close_dropped()
        os._exit(0 if not ended and mine == [("b", False)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not ended
    _core.close_dropped()
    assert ended == [("a", False)]


def test_ends_that_close_each_others_parents_do_not_wait_for_each_other(ignored: list[Any]) -> None:
    """Neither can go first: one is refused its parent's end, which is the program's own mistake, and at once."""
    ended: list[tuple[str, bool]] = []
    both = threading.Barrier(2, timeout=20)
    parents = [Thing(name, ended) for name in ("first", "second")]
    for parent in parents:
        parent._node = node()

    def theirs(thing: Thing) -> None:
        both.wait()
        parents[int(thing.name)].close()

    Mine = type("Mine", (Thing,), {"__del__": _core.and_end(theirs, Thing.__del__.our_end)})  # type: ignore[attr-defined]
    things = [Mine("0", ended), Mine("1", ended)]
    for thing, parent in zip(things, reversed(parents), strict=True):
        thing._node = node(parent._node)
    del thing
    with LOCK:
        things.clear()
    closers = [threading.Thread(target=_core.close_dropped, daemon=True) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(20)
        assert not closer.is_alive()
    names = sorted(name for name, _ in ended)
    assert names in (["0", "1", "first"], ["0", "1", "second"])
    assert [what.exc_value.error_code for what in ignored] == [errno.EBUSY]


def parent_of_a_slow_child(ended: list[tuple[str, bool]]) -> tuple[Thing, threading.Thread, threading.Event]:
    """A parent whose child another thread is ending, until it is told to go on. That thread, and how it is told."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Thing):
        @_core.whole_end
        def __del__(self) -> None:
            begun.set()
            go.wait(20)
            self.close()

    parent = Thing("parent", ended)
    parent._node = node()
    things = [Slow("child", ended)]
    things[0]._node = node(parent._node)
    thread = threading.Thread(target=things.clear)
    thread.start()
    assert begun.wait(10)
    return parent, thread, go


def test_a_child_process_waits_for_no_thread_of_its_parents() -> None:
    ended: list[tuple[str, bool]] = []
    parent, thread, go = parent_of_a_slow_child(ended)
    pids: list[int] = []

    def handler(number: int, frame: object) -> None:
        pids.append(os.fork())  # in the middle of the wait
        if pids[0]:
            go.set()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        parent.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    if pids == [0]:
        os._exit(0 if ended == [("parent", False)] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert [name for name, _ in ended] == ["child", "parent"]
    thread.join()


def test_a_handler_closes_the_parent_that_is_waited_with() -> None:
    ended: list[tuple[str, bool]] = []
    parent, thread, go = parent_of_a_slow_child(ended)
    timer = threading.Timer(0.3, go.set)

    def handler(number: int, frame: object) -> None:
        timer.start()
        parent.close()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        parent.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [name for name, _ in ended] == ["child", "parent"]
    thread.join()
    timer.join()
