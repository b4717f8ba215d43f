# SPDX-License-Identifier: BSD-3-Clause
"""Log lines about QPs: the same news of many QPs becomes one line, written when there is time."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("shiftverbs.driver")

#: How many QPs are named in one line.
MOST_NAMED = 8
#: How far apart lines of one kind are that somebody outside may cause.
SELDOM_NS = 1_000_000_000
#: How long the end of a program waits for the last lines, where a handler blocks.
LAST_LINES_S = 1.0
#: How many lines wait for handlers that block; further ones are lost.
MOST_WAITING = 4096


def _names(qp_nums: list[int]) -> str:
    if len(qp_nums) == 1:
        return f"QP {qp_nums[0]:#x}"
    named = ", ".join(f"{number:#x}" for number in qp_nums[:MOST_NAMED])
    if len(qp_nums) <= MOST_NAMED:
        return f"QPs {named}"
    return f"{len(qp_nums)} QPs ({named}, ...)"


class Announcements:
    """What is still to be said. Everything here runs under the driver's lock.

    A thousand QPs leave a port together: each line would cost its system call, and let go of the GIL.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], list[int]] = {}

    def say(self, level: int, qp_num: int, text: str) -> None:
        """Have `text` logged about this QP. level: as in logging."""
        if logger.isEnabledFor(level):
            self._said.setdefault((level, text), []).append(qp_num)

    def flush(self) -> None:
        """Log what was said since the last time."""
        said, self._said = self._said, {}
        for (level, text), qp_nums in said.items():
            logger.log(level, "%s: %s", _names(qp_nums), text)


class Seldom:
    """Log lines that somebody outside may cause as often as he likes: each kind is written once a second.

    A line's kind is its text before the arguments are put in. Everything here runs in one thread, or under one lock, in
    an application's process the driver's. now_ns: of any clock that only grows.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_ns: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, now_ns: int, text: str, *args: object) -> None:
        """Log a warning, unless one of the same text was logged within the last second. It tells of those left out."""
        self._log(logging.WARNING, now_ns, text, args)

    def info(self, now_ns: int, text: str, *args: object) -> None:
        """As `warning`, at level INFO."""
        self._log(logging.INFO, now_ns, text, args)

    def exception(self, now_ns: int, error: BaseException, text: str, *args: object) -> None:
        """As `warning`, at level ERROR and with the traceback of `error`."""
        self._log(logging.ERROR, now_ns, text, args, error)

    def _log(
        self, level: int, now_ns: int, text: str, args: tuple[object, ...], error: BaseException | None = None
    ) -> None:
        if now_ns < self._next_ns.get(text, now_ns):
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._next_ns[text] = now_ns + SELDOM_NS
        left_out = self._left_out.pop(text, 0)
        more = f" ({left_out} more like it since the last such line)" if left_out else ""
        self._logger.log(level, f"{text}%s", *args, more, exc_info=error)


class OutsideTheLock(logging.Filter):
    """Writes what we log in a thread that does nothing else, so that nothing of ours waits for it.

    A handler writes under a lock of its own, and may take as long as it likes; a signal's handler that raised in one
    may have left that locked. The collector may run in there, in any thread, and close a QP, which takes the driver's
    lock. So neither who has that, nor a thread of ours, calls a handler. What the application's threads log without
    it, they write themselves. held: whether the calling thread has the driver's lock.
    """

    def __init__(self, held: Callable[[], bool]) -> None:
        super().__init__()
        self._held = held
        # A lock in it is released when everything before it was written; None ends the thread.
        self._queue: queue.SimpleQueue[logging.LogRecord | threading.Lock | None] = queue.SimpleQueue()
        self._lost = 0
        self._loggers = {
            name: each
            for name, each in list(logging.root.manager.loggerDict.items())
            if name.startswith("shiftverbs.") and isinstance(each, logging.Logger)
        }
        self._thread = threading.Thread(target=self._write, name="shiftverbs-log", daemon=True)
        from shiftverbs import _core  # the broker, which needs Seldom alone, has none

        _core.without_signals(self._thread.start)
        for each in self._loggers.values():
            each.addFilter(self)
            # Else it asks under logging's module lock, whenever the program has set a level since: that may be locked
            # for good as well.
            each.isEnabledFor = functools.partial(_is_enabled, each)  # type: ignore[method-assign]

    def close(self) -> None:
        """Let everything pass from now on: in a forked child, whose threads may be taken for the holder."""
        for each in self._loggers.values():
            each.removeFilter(self)
        if self._thread.is_alive():
            self._queue.put(None)

    def filter(self, record: logging.LogRecord) -> bool:
        """As logging asks: whether to go on with a record now."""
        if not _is_ours() and not self._held():
            return True
        self._hand_over(record)
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was handed to the writing thread is written. False when the time, in seconds, ran out."""
        if not self._thread.is_alive():
            return True
        mark = threading.Lock()
        mark.acquire()
        self._queue.put(mark)
        return mark.acquire(timeout=timeout_s)

    def _hand_over(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= MOST_WAITING:
            self._lost += 1
        else:
            self._queue.put(record)

    def _write(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if not isinstance(item, logging.LogRecord):
                item.release()
                continue
            self._call_handlers(item)
            if self._lost:
                lost, self._lost = self._lost, 0
                text = "%d lines of shiftverbs are lost: a log handler of the program's blocked"
                self._call_handlers(
                    logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, (lost,), None)
                )

    def _call_handlers(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a handler's
            self._loggers[record.name].callHandlers(record)


def _is_ours() -> bool:
    """Whether the calling thread is one that the program did not make."""
    return threading.current_thread().name.startswith("shiftverbs-")


def _is_enabled(logger: logging.Logger, level: int) -> bool:
    """Logger.isEnabledFor, without its memory and the lock of that."""
    return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()
