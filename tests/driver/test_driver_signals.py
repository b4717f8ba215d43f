# SPDX-License-Identifier: BSD-3-Clause
"""Signals, exceptions and forks amid the driver: the application hears of them, and nothing is lost."""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import Connection, add, shadow_qp
from typed_doubles import double

from shiftverbs import _core
from shiftverbs.exchanger.interface import Found
from shiftverbs.failover.driver import WATCH_PERIOD_NS, Driver
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.protocol.pair import PairProtocol


def test_a_log_handler_that_raises_is_not_the_verbs_business(driver: Driver) -> None:
    calls: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        calls.append(record.getMessage())
        raise RuntimeError("the handler's")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("shiftverbs.driver")
    logger.addHandler(handler)
    try:
        driver.post(lambda: logger.warning("in a run"))
        driver.run()
        with driver.locked():
            logger.warning("in a verb")
        assert driver.outside.flush(10)
    finally:
        logger.removeHandler(handler)
    assert calls == ["in a run", "in a verb"]


def test_an_interrupted_run_goes_on(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of it: no timer may stay unset, and what was collected must not wait for something new."""
    deadlines: list[int] = []
    monkeypatch.setattr(driver.waiter, "set_deadline", deadlines.append)

    def interrupted() -> None:
        raise KeyboardInterrupt

    told: list[int] = []
    driver.post(interrupted)
    driver.post(lambda: told.append(1))
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert not told and clock.now < deadlines[-1] <= clock.now + WATCH_PERIOD_NS
    driver.run()
    assert told == [1]


def test_what_an_interrupted_run_took_is_found_again(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is withheld and forgotten would be neither hidden nor delivered."""
    one = add(driver, Connection(nic))

    def taken() -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driver.machine, "take_events", taken)
        driver.run()
    assert "catch_up" not in one.told
    driver.run()
    driver.run()
    assert one.told.count("catch_up") == 1


def test_a_run_that_fails_is_repeated(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[int] = []
    monkeypatch.setattr(driver.waiter, "set_deadline", deadlines.append)

    def bug(now: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(driver.channel, "ping", bug)
    driver.run()
    assert clock.now < deadlines[-1] <= clock.now + WATCH_PERIOD_NS


def test_what_a_signal_handler_raises_is_the_applications(
    driver: Driver, nic: Any, alarm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It must get its timeout, when the run is over: nothing in it was broken off."""
    one = add(driver, Connection(nic))
    done: list[int] = []
    for begin in (driver.post, functools.partial(driver.later, None), functools.partial(driver.later, one)):
        begin(lambda: (alarm(), done.append(1)))  # type: ignore[operator]
        driver.post(lambda: done.append(2))
        with pytest.raises(TimeoutError, match="application"):
            driver.run()
        assert sorted(done) == [1, 2]
        done.clear()
    driver.run()
    assert driver.outside.flush(10)
    assert "give_up" not in one.told and "catch_up" not in one.told and not caplog.records


def test_a_verb_is_not_broken_off_under_the_lock(driver: Driver, alarm: Any) -> None:
    """However deep, and whoever raises; no other signal's handler either."""
    done: list[int] = []
    with pytest.raises(TimeoutError, match="application"), driver.locked():
        with driver.locked():
            alarm()
            done.append(1)
        done.append(2)
        driver.run()
        done.append(3)
    assert done == [1, 2, 3] and not driver.is_in()
    with pytest.raises(ZeroDivisionError), driver.locked():
        raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        alarm()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL and not driver.is_in()


@pytest.mark.parametrize("verb", ["run", "locked"])
def test_a_signal_between_any_two_bytecodes(driver: Driver, alarm: Any, verb: str) -> None:
    """It leaves no lock taken, and nothing is lost or done by half."""
    done: list[int] = []
    at = seen = interrupted = 0

    def act() -> None:
        if verb == "run":
            driver.post(lambda: done.extend((1, 2)))
            sys.settrace(tracer)
            driver.run()
        else:
            sys.settrace(tracer)
            with driver.locked():
                done.extend((1, 2))

    def tracer(frame: Any, event: str, arg: object) -> Any:
        nonlocal seen
        if "shiftverbs/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                alarm()
        return tracer

    act()  # Python 3.12 traces the bytecodes of a function from the second time on
    sys.settrace(None)
    while seen >= at:
        at, seen = at + (1 if at < 100 else 13), 0
        done.clear()
        try:
            act()
        except TimeoutError:
            interrupted += 1
        finally:
            sys.settrace(None)
        assert not driver.is_in(), at
        assert done in ([], [1, 2]), at
        driver.run()
        assert verb == "locked" or done == [1, 2], at
    assert interrupted > 10, "bytecodes are traced"


def test_who_waits_for_the_lock_can_be_interrupted(driver: Driver) -> None:
    """A NIC hangs under another thread's feet: Ctrl-C still ends the verb, which has not begun."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.locked():
            taken.set()
            assert over.wait(20)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the application's")

    before = signal.signal(signal.SIGALRM, handler)
    other = threading.Thread(target=hold)
    other.start()
    try:
        assert taken.wait(10)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError), driver.locked():
            raise AssertionError("it is another's")
        assert time.monotonic() - began < 10
    finally:
        over.set()
        other.join(20)
        signal.signal(signal.SIGALRM, before)
    with driver.locked():
        assert driver.is_in()


def test_a_handler_that_a_handler_sets_stays(driver: Driver) -> None:
    """Handlers that are due run before the driver is entered, and the signals are theirs again behind it."""
    heard: list[str] = []
    was = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR1, lambda *args: heard.append("old"))
    try:
        with driver.locked():
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *args: heard.append("new"))
            signal.signal(signal.SIGUSR2, lambda *args: heard.append("other"))
            assert not heard
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["new", "other", "new"]
        with driver.locked():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN and len(heard) == 3
    finally:
        for number, handler in was.items():
            signal.signal(number, handler)


def test_a_child_of_a_fork_amid_the_driver_hears_its_signals(driver: Driver, alarm: Any) -> None:
    """Another thread forks while the main thread is in the driver: what came to the parent is not the child's."""
    status: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeoutError:
                code = 7
            finally:
                os._exit(code)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    other = threading.Thread(target=fork)
    with pytest.raises(TimeoutError), driver.locked():
        alarm()
        other.start()
        other.join(20)
    assert status == [7]


def test_a_signal_amid_news_of_the_exchanger_is_the_applications_too(
    driver: Driver, alarm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And the others who want that key hear of it all the same."""
    heard: list[Any] = []

    def first(value: Any) -> None:
        heard.append(value)
        alarm()

    driver.directory._wanted["key"] = [first, heard.append]
    driver.later(None, driver.directory._found, Found("key", {"a": 1}))
    with pytest.raises(TimeoutError, match="application"):
        driver.run()
    assert driver.outside.flush(10)
    assert heard == [{"a": 1}] * 2 and not caplog.records


def test_a_signal_loses_nothing_that_a_nic_or_the_exchanger_has_told(
    driver: Driver, nic: Any, alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once. A command whose end is not noted is one that a fence waits for as long as its NIC works."""
    heard: list[Any] = []
    later, told = driver.later, [Found("a", {}), Found("b", {})]
    nic.worker.finished = [(heard.append, number, 0, 0) for number in range(3)]
    monkeypatch.setattr(driver.machine, "readable", lambda fd: bool(told))
    monkeypatch.setattr(driver.exchanger, "poll_events", lambda: [told.pop(0) for _ in told[:]])
    for key in ("a", "b"):
        driver.directory._wanted[key] = [functools.partial(lambda key, value: heard.append(key), key)]

    def interrupted(*args: Any) -> None:
        alarm()
        later(*args)

    monkeypatch.setattr(driver, "later", interrupted)
    with pytest.raises(TimeoutError):
        driver.run()
    driver.run()
    assert sorted(heard, key=str) == [0, 1, 2, "a", "b"]


def test_a_signal_while_a_qp_is_closed_is_the_applications_too(driver: Driver, nic: Any, alarm: Any) -> None:
    """QP.close raises it, and is carried out."""
    connection = RealConnection(
        driver, shadow_qp(nic, core=double(_core.QPCore, remote_keys=None, carried=set()))
    )
    protocol: Any = double(
        PairProtocol,
        handle=lambda event, now: alarm() or [],
        pairs=[SimpleNamespace(used=True, fenced=False)],
    )
    connection.protocol = protocol
    with pytest.raises(TimeoutError, match="application"), driver.locked():
        connection.close()
    assert connection.closed
