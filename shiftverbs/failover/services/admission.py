# SPDX-License-Identifier: BSD-3-Clause
"""Turns: what is not urgent is begun by few connections at a time.

Coming home and making a pair fit are the same for every QP of a NIC, and due for all of them at once. Everything here
runs under the driver's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shiftverbs.protocol.pair import MS

# While this many connections come home or are made fit, no other begins that: of a thousand at once all would be late
# for their deadlines, and begin again.
UNDER_WAY = 64
# Where none of them arrived for this long, some more begin: those under way may wait for the application.
TURN_NS, TURN_COUNT = 100 * MS, 32


class Beginner(Protocol):
    """A connection that begins something in its turn."""

    @property
    def protocol(self) -> object | None:
        """None where there is nothing to begin."""


_Beginner = TypeVar("_Beginner", bound=Beginner)


class Turns(Generic[_Beginner]):
    """Which connections have begun, and which wait for their turn.

    waiting: those that wait, oldest first; for reading. now_ns: the clock; run_again: has the driver run once more;
    later: puts a call of a connection's at the end of what is to be handled.
    """

    def __init__(
        self,
        now_ns: Callable[[], int],
        run_again: Callable[[], None],
        later: Callable[
            [_Beginner, Callable[[_Beginner, Callable[[], None]], None], _Beginner, Callable[[], None]], None
        ],
    ) -> None:
        self._now_ns = now_ns
        self._run_again = run_again
        self._later = later
        self.waiting: dict[_Beginner, Callable[[], None]] = {}
        self.going: set[_Beginner] = set()  # those that began in their turn, and have not arrived
        self._moved_ns = 0

    def begin_in_turn(self, connection: _Beginner, begin: Callable[[], None]) -> None:
        """Have a connection begin what is not urgent: at once, or when few others are in the middle of that."""
        if self.waiting or self._room() <= 0:
            if not self.waiting:
                self._moved_ns = self._now_ns()
            self.waiting[connection] = begin
        else:
            self._begin(connection, begin)

    def arrived(self, connection: _Beginner) -> None:
        """A connection has finished what it began in its turn, or never will."""
        if connection in self.going:
            self.going.remove(connection)
            if self.waiting:
                self._moved_ns = self._now_ns()
                self._run_again()

    def _room(self) -> int:
        return UNDER_WAY - len(self.going)

    def _begin(self, connection: _Beginner, begin: Callable[[], None]) -> None:
        self.going.add(connection)
        begin()
        if connection.protocol is None:  # there was nothing to begin
            self.arrived(connection)

    def admit(self, now: int) -> None:
        """Let those begin for whom there is room; some in any case where nothing moves on."""
        room = self._room()
        if self.waiting and room <= 0 and now >= self._moved_ns + TURN_NS:
            room = TURN_COUNT
        for connection in list(itertools.islice(self.waiting, max(0, room))):
            self.going.add(connection)
            begin = self.waiting.pop(connection)
            self._moved_ns = now
            self._later(connection, self._begin, connection, begin)

    def drop(self, connection: _Beginner) -> None:
        """The life of its QP is over that it has begun something for, or would."""
        self.waiting.pop(connection, None)
        self.arrived(connection)

    @property
    def may_begin(self) -> bool:
        """Whether `admit` has something to do now, where somebody waits."""
        return self._room() > 0

    @property
    def due_ns(self) -> int:
        """When `admit` has something to do at the latest, where somebody waits."""
        return self._moved_ns + TURN_NS
