# SPDX-License-Identifier: BSD-3-Clause
"""Is a NIC pair alive: pings between two control ports, judged in the caller's time. Pure: no I/O, no clock.

One `PingState` per NIC pair and process, however many QPs use it.
"""

from __future__ import annotations

# What an answered ping says of the present: beyond that its pair may have failed and come back.
FRESH_NS = 150_000_000
# What an answer takes on a busy machine.
PATIENCE_NS = 25_000_000
# Pings go out at most as often as so many answers take, one after the other: a slow peer is not a dead one.
ANSWERS_APART = 4
# But no further apart than this for that: one answer that was late must not hide an outage behind it.
MOST_APART_NS = 250_000_000


class PingState:
    """Pings one NIC pair, from the first poll on.

    interval_ns: between pings. dead_after: that many unanswered pings in a row mean dead. before_first: pings have the
    numbers after that; where it is drawn at random, an answer to a former `PingState`'s fits no ping of this one.
    """

    def __init__(self, interval_ns: int, dead_after: int = 3, before_first: int = 0) -> None:
        self.interval_ns = interval_ns
        self.dead_after = dead_after
        self.port_ok = True
        self._next_ns = 0
        self._number = self._answered = before_first
        self._answered_ns: int | None = None
        self._sent_ns = 0
        self._unanswered = 0
        self._lost_ns = -FRESH_NS  # when an answer last showed that one before it is missing
        self._takes_ns = 0  # an answer, of late

    def poll_ping(self, now_ns: int) -> int | None:
        """Return the number of the ping to send now, or None."""
        if now_ns < self._next_ns:
            return None
        if self._number > self._answered:
            self._unanswered += 1
        self._number += 1
        self._sent_ns = now_ns
        self._next_ns = now_ns + self._apart_ns
        return self._number

    @property
    def _apart_ns(self) -> int:
        return max(self.interval_ns, min(ANSWERS_APART * self._takes_ns, MOST_APART_NS))

    def hurry(self, now_ns: int) -> None:
        """The interval became shorter: do not wait out the old one."""
        self._next_ns = min(self._next_ns, now_ns + self._apart_ns)

    def handle_pong(self, number: int, now_ns: int) -> None:
        """The peer answered ping `number`; numbers never sent, and old ones, are ignored."""
        if self._answered < number <= self._number:
            if number > self._answered + 1:
                self._lost_ns = now_ns  # those between
            self._answered = number
            self._answered_ns = now_ns
            self._unanswered = 0
            if number == self._number:
                self._takes_ns = max(now_ns - self._sent_ns, self._takes_ns * 3 // 4)

    def suspect(self) -> None:
        """Something failed there: dead until a ping sent from now on is answered."""
        self._unanswered = self.dead_after
        self._answered = self._number
        self._next_ns = 0

    def answers(self, now_ns: int) -> bool:
        """Whether pings were answered up to now: one not long ago, and none is, or was just before, missing."""
        if not self.port_ok or self._answered_ns is None or now_ns - self._answered_ns > FRESH_NS:
            return False
        if now_ns - self._lost_ns < FRESH_NS:
            return False
        missing = self._number - self._answered
        return missing == 0 or (missing == 1 and now_ns - self._sent_ns <= PATIENCE_NS)

    @property
    def alive(self) -> bool | None:
        """True after an answer, False after `dead_after` lost pings or with the port down, None while unknown."""
        if not self.port_ok or self._unanswered >= self.dead_after:
            return False
        return True if self._answered_ns is not None and self._unanswered < 2 else None

    @property
    def next_timeout_ns(self) -> int:
        """When `poll_ping` wants to be called again."""
        return self._next_ns
