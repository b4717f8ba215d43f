"""Log lines about QPs: what is to be said of many QPs at once is said in one line, when there is time for it."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable

logger = logging.getLogger("shiftverbs.driver")

#: So many QPs are named in one line.
MOST_NAMED = 8
#: How far apart lines of one kind are that somebody outside may cause.
SELDOM_NS = 1_000_000_000


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
    """Has what we log under the driver's lock written when that was given back.

    A handler writes under a lock of its own. The collector may run in there, in any thread, and close a QP, which takes
    the driver's lock: whoever has that must not wait for the handler. held: whether the calling thread has it.
    """

    def __init__(self, held: Callable[[], bool]) -> None:
        super().__init__()
        self._held = held
        self._kept: collections.deque[logging.LogRecord] = collections.deque()
        self._loggers = {
            name: each
            for name, each in list(logging.root.manager.loggerDict.items())
            if name.startswith("shiftverbs.") and isinstance(each, logging.Logger)
        }
        for each in self._loggers.values():
            each.addFilter(self)
            # Remembered by the logger. Else it asks under a lock of logging's own, which a signal's handler that raises
            # in a logging call of the program's may have left locked: the control thread must not wait for it.
            for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                each.isEnabledFor(level)

    def close(self) -> None:
        """Let everything pass from now on: in a forked child, whose threads may be taken for the holder."""
        for each in self._loggers.values():
            each.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """As logging asks: whether to go on with a record now."""
        if not self._held():
            return True
        self._kept.append(record)
        return False

    def write(self) -> None:
        """Write what was kept, unless the calling thread still has the lock. Raises what handlers do."""
        while self._kept and not self._held():
            try:
                record = self._kept.popleft()
            except IndexError:  # another thread was quicker
                return
            self._loggers[record.name].callHandlers(record)
