# SPDX-License-Identifier: BSD-3-Clause
"""Logging's own lock may stay taken: a signal's handler raised in a logging call of the program's. Failover goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shiftverbs import observe
from shiftverbs.process import log_lines


@contextmanager
def module_lock_taken() -> Iterator[None]:
    """By a thread that does not give it back within. Not a fixture: pytest needs the lock itself after each test."""
    taken, over = threading.Event(), threading.Event()

    def keep() -> None:
        with logging._lock:  # type: ignore[attr-defined]
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=keep)
    thread.start()
    assert taken.wait(10)
    try:
        yield
    finally:
        over.set()
        thread.join(10)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[log_lines.OutsideTheLock]:
    monkeypatch.setattr(log_lines.logger, "filters", [])  # those of drivers that other tests made
    for each in (log_lines.logger, logging.root):
        each.manager._clear_cache()  # type: ignore[attr-defined]
    made = log_lines.OutsideTheLock(lambda: held.locked())
    yield made
    made.close()


held = threading.Lock()


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def handler() -> Iterator[Kept]:
    made = Kept()
    log_lines.logger.addHandler(made)
    yield made
    log_lines.logger.removeHandler(made)


def test_what_is_logged_under_the_drivers_lock_is_written(
    outside: log_lines.OutsideTheLock, handler: Kept
) -> None:
    def work() -> None:
        said = log_lines.Announcements()
        with held:
            said.say(logging.WARNING, 0x11, "leaves")
            said.say(logging.DEBUG, 0x11, "nobody wants this")
            said.flush()

    thread = threading.Thread(target=work, daemon=True)
    with module_lock_taken():
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and outside.flush(10)
    assert handler.texts == ["QP 0x11: leaves"]


def test_what_waits_for_a_handler_that_blocks_is_bounded(
    outside: log_lines.OutsideTheLock, handler: Kept
) -> None:
    blocks, go_on = threading.Event(), threading.Event()
    handler.addFilter(lambda _: blocks.set() or go_on.wait(60))

    def work() -> None:
        log_lines.logger.warning("the first")
        assert blocks.wait(10)
        for number in range(log_lines.MOST_WAITING + 100):
            log_lines.logger.warning("line %d", number)

    thread = threading.Thread(target=work, name="shiftverbs-works")
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and not outside.flush(0.01)
    go_on.set()
    assert outside.flush(60)
    lines = [f"line {number}" for number in range(log_lines.MOST_WAITING)]
    lost = "100 lines of shiftverbs are lost: a log handler of the program's blocked"
    assert handler.texts == ["the first", lost, *lines]


def test_flush_tells_whether_everything_was_delivered() -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def slow(event: observe.Event) -> None:
        stuck.set()
        assert go_on.wait(10)

    with observe.subscribe(slow):
        observe.publish(observe.Unprotected(qp_num=1, device="soft0"))
        assert stuck.wait(10)
        assert not observe.flush(0.01)
        go_on.set()
        assert observe.flush(10)
