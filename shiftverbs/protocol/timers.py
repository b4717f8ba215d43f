# SPDX-License-Identifier: BSD-3-Clause
"""The timer table of one protected QP: each deadline stands here and nowhere else. Pure.

A procedure sets and stops its timers as it goes; `PairProtocol.next_timeout_ns` is the least of the table, and
`handle_timeout` asks it which are over. As `TimerTable` of quinn-proto.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

NEVER = 1 << 62


class Timer(enum.IntEnum):
    """The rows that a QP has once, in the order in which they are handled where several are over."""

    OVER = 0  # the pairing has ended: ABORT or BYE is said again
    OPEN = 1  # a pause before the next attempt is over: sends are handed over
    ATTEMPT = 2  # a SWITCH, or the question before it, has waited long enough for the peer or for our own NIC
    SYNC = 3  # a SYNC is said again
    MOVE_ANSWER = 4  # a MOVE that was told has waited long enough for its answer
    FENCE_WRITE = 5  # nobody posted MOVE's fence WR: our own WRITE
    MOVE_RESEND = 6  # a MOVE is said again
    PREFER = 7  # a wish is said again
    # Sends may leave for the pair they are wanted on; this and those of the pairs wait for a SWITCH.
    MOVE_BEGIN = 8


class ArmTimer(enum.IntEnum):
    """The rows that each pair has, behind the others, pair by pair."""

    DEADLINE = 0  # an ARM under way has failed
    RESEND = 1  # REQ or REP is said again
    BEGIN = 2  # the next ARM may begin, or be asked for


_TIMERS, _ARM_TIMERS = len(Timer), len(ArmTimer)  # counted once: an enum's len is a Python function


def arm_row(k: int, timer: ArmTimer) -> int:
    """The row of pair k's timer."""
    return _TIMERS + _ARM_TIMERS * k + timer


def arm_timer(row: int) -> tuple[int, ArmTimer]:
    """The pair and the timer of such a row."""
    k, timer = divmod(row - _TIMERS, _ARM_TIMERS)
    return k, ArmTimer(timer)


class Timers:
    """When each timer is over, in nanoseconds. A row is a `Timer`, or comes from `arm_row`. pairs: how many."""

    __slots__ = ("_due_ns", "set")

    def __init__(self, pairs: int) -> None:
        self._due_ns = [NEVER] * (_TIMERS + _ARM_TIMERS * pairs)
        # set(row, due_ns): start a timer, or start it anew.
        self.set: Callable[[int, int], None] = self._due_ns.__setitem__

    def stop(self, *rows: int) -> None:
        """Stop timers; harmless where they do not run."""
        for row in rows:
            self._due_ns[row] = NEVER

    def stop_all(self) -> None:
        """Stop every timer."""
        self._due_ns[:] = [NEVER] * len(self._due_ns)

    def runs(self, row: int) -> bool:
        """Whether that timer runs."""
        return self._due_ns[row] != NEVER

    def due_ns(self, row: int) -> int | None:
        """When that timer is over; None: it does not run."""
        due_ns = self._due_ns[row]
        return due_ns if due_ns != NEVER else None

    def next_ns(self, switching: bool) -> int | None:
        """When the first of them is over; None: none runs. switching: those do not count that wait for a SWITCH."""
        due_ns = min(self._due_ns[: Timer.MOVE_BEGIN] if switching else self._due_ns)
        return due_ns if due_ns != NEVER else None

    def expire(self, now_ns: int) -> Iterator[int]:
        """The rows that are over, each stopped when its turn comes; one that is set meanwhile counts as it is then."""
        for row, due_ns in enumerate(self._due_ns):
            if now_ns >= due_ns:
                self._due_ns[row] = NEVER
                yield row

    def running(self) -> list[int]:
        """The rows that run."""
        return [row for row, due_ns in enumerate(self._due_ns) if due_ns != NEVER]
