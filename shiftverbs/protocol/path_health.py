# SPDX-License-Identifier: BSD-3-Clause
"""Is a NIC pair alive: pings between two control ports, judged in the caller's time. Pure: no I/O, no clock.

One `PingState` per NIC pair and process, however many QPs use it.
"""

from __future__ import annotations

import collections

# What an answered ping says of the present: beyond that its pair may have failed and come back.
FRESH_NS = 150_000_000
# What an answer takes on a busy machine.
PATIENCE_NS = 25_000_000
# Where answers take longer than that they may take half as long again, but at most so much beyond.
MOST_BEYOND_NS = 150_000_000
# A row of unanswered pings grows by one in so many times what an answer takes: a slow peer is not a dead one.
ANSWERS_APART = 4
# But no slower than this for that: one answer that was late must not hide an outage behind it.
MOST_APART_NS = 250_000_000
# Where so many are on their way, the peer does not keep up: the next goes out behind an answer, or as the row grows.
MOST_UNDER_WAY = 8
# An answer that takes so long may be one of a peer that stood still; so many of those are remembered.
LATE_NS = 12_000_000
MOST_LATE = 16
# It is known of so many unanswered pings when they were sent.
MOST_AWAITED = 64
# Pings of a path whose work stands still (silence.py). A row of them grows no faster than one of usual pings: a peer
# that is stopped for a moment is not dead.
PROBE_NS = 2_000_000
PROBES_APART_NS = 50_000_000
# What an answer took at most is forgotten by a quarter each such time, what it took at least after so many of them.
FORGET_NS = 1_000_000_000
LEAST_OF = 4


class PingState:
    """Pings one NIC pair, from the first poll on.

    interval_ns: between pings. dead_after: that many unanswered pings in a row mean dead. before_first: pings have the
    numbers after that; where it is drawn at random, an answer to a former `PingState`'s fits no ping of this one.
    earliest_ns: no ping is due before; answered_sent_ns: when the last ping was sent of which an answer is known;
    longest_ns: what an answer took at most, of late; shortest_ns: at least, which no stop of anybody's makes longer.
    For reading.
    """

    def __init__(self, interval_ns: int, dead_after: int = 3, before_first: int = 0) -> None:
        self.interval_ns = interval_ns
        self.dead_after = dead_after
        self.port_ok = True
        self.earliest_ns = 0
        self.answered_sent_ns = -1
        self.longest_ns = self.shortest_ns = 0
        self._forget_ns = 0
        self._least: collections.deque[int] = collections.deque(maxlen=LEAST_OF)
        self._number = self._answered = before_first
        self._answered_ns: int | None = None
        self._known_after: int | None = None  # the last ping for which the peer may not have known us yet
        # Those that may still be answered: number, and when it was sent.
        self._awaited: collections.deque[tuple[int, int]] = collections.deque(maxlen=MOST_AWAITED)
        self._probes_after = before_first  # the last ping before its work stood still
        self._silent_ns: int | None = None
        # Answers of late that took LATE_NS and more: when they came, and how long.
        self._late: collections.deque[tuple[int, int]] = collections.deque(maxlen=MOST_LATE)
        # What was sent ahead of the pings after this one takes its time, until then.
        self._behind = before_first
        self._allowed_ns = 0
        self._unanswered = 0
        self._since_ns = 0  # what is unanswered since then is not counted yet
        self._lost_ns = -FRESH_NS  # when an answer last showed that one before it is missing
        self._takes_ns = 0  # an answer, of late
        self._learned_ns = 0  # when one last took that long
        self._patience_ns = PATIENCE_NS  # an answer that takes longer is late

    def poll_ping(self, now_ns: int) -> int | None:
        """Return the number of the ping to send now, or None."""
        if now_ns < self.next_timeout_ns:
            return None
        if self._number == self._answered:
            self._since_ns = max(self._since_ns, now_ns)
        elif now_ns >= self._counts_ns:
            self._unanswered += 1
            self._since_ns = now_ns
        self._number += 1
        self._awaited.append((self._number, now_ns))
        self.earliest_ns = now_ns + self.interval_ns
        return self._number

    def handle_unsent(self) -> None:
        """The last ping could not be sent: that no answer comes says something of us, and nothing of the path."""
        if self._awaited and self._awaited[-1][0] == self._number:
            self._awaited.pop()

    @property
    def _counts_ns(self) -> int:
        """When what is unanswered is one more."""
        apart_ns = min(ANSWERS_APART * self._takes_ns, MOST_APART_NS)
        if self.interval_ns == PROBE_NS:
            apart_ns = max(apart_ns, PROBES_APART_NS)
        return self._since_ns + apart_ns

    def hurry(self, now_ns: int) -> None:
        """The interval became shorter: do not wait out the old one."""
        soon_ns = now_ns + self.interval_ns
        if self.earliest_ns > soon_ns:
            self.earliest_ns = soon_ns
            if self.interval_ns == PROBE_NS:
                self.earliest_ns, self._probes_after = now_ns, self._number

    def is_well(self, now_ns: int) -> bool:
        """Whether it is alive, and no answer is late."""
        return self.alive is True and not self._is_late(now_ns)

    def allow(self, for_ns: int, now_ns: int, last_is_behind: bool = False) -> None:
        """What was sent there now takes its time: pings behind it are not missed for so long, unless one was before.

        last_is_behind: the last ping is one of those, and not on its way already.
        """
        if not self._is_late(now_ns):
            self._behind, self._allowed_ns = self._number - last_is_behind, now_ns + for_ns
            self._since_ns = max(self._since_ns, self._allowed_ns)

    def _is_late(self, now_ns: int) -> bool:
        return bool(self._awaited) and now_ns - self._awaited[0][1] > self._patience_ns

    def peer_knows_us(self) -> None:
        """The peer has all its paths to us: pings from now on are answered, and one that is lost says something."""
        if self._known_after is None:
            self._known_after = self._number
            if self._answered_ns is None:
                self.earliest_ns = 0  # it is known of no path yet whether it answers

    def handle_pong(self, number: int, now_ns: int) -> int | None:
        """The peer answered ping `number`; numbers never sent, and old ones, are ignored.

        Returns when that ping was sent, as far as it is known.
        """
        if not self._answered < number <= self._number:
            return None
        if self._known_after is None:
            self._known_after = number
        if number - 1 > max(self._answered, self._known_after):
            self._lost_ns = now_ns  # those between
        # Of one that is not known any more: no later than that. Of one that was never sent: it says nothing.
        sent_ns = self._awaited[0][1] if self._awaited else now_ns
        found = None
        while self._awaited and self._awaited[0][0] <= number:
            found, sent_ns = self._awaited.popleft()
        took_ns = now_ns - sent_ns
        if found == number:
            self.answered_sent_ns = sent_ns
        if now_ns >= self._forget_ns:
            self.longest_ns -= self.longest_ns // 4
            self._least.append(took_ns)
            self.shortest_ns = min(self._least)
            self._forget_ns = now_ns + FORGET_NS
        if took_ns < self.shortest_ns:
            self._least[-1] = self.shortest_ns = took_ns
        self.longest_ns = max(self.longest_ns, took_ns)
        if took_ns >= LATE_NS:
            self._late.append((now_ns, took_ns))
        if took_ns >= self._takes_ns:
            self._takes_ns, self._learned_ns = took_ns, now_ns
        elif sent_ns >= self._learned_ns:  # not one of those that came with it
            self._takes_ns = max(took_ns, self._takes_ns * 3 // 4)
        patience_ns = min(self._takes_ns * 3 // 2, self._takes_ns + MOST_BEYOND_NS)
        self._patience_ns = max(PATIENCE_NS, patience_ns)
        self._answered = number
        self._answered_ns = now_ns
        self._unanswered = 0
        self._since_ns = self._awaited[0][1] if self._awaited else now_ns
        if number > self._behind:
            self._allowed_ns = 0
        # One that was ahead of a train says nothing of what is behind it.
        self._since_ns = max(self._since_ns, self._allowed_ns)
        return sent_ns if found == number else None

    def handle_sign_of_life(self, heard_ns: int) -> None:
        """Something else came from there: as good as an answer then, but answers may still come, or be missing."""
        self._answered_ns = max(heard_ns, self._answered_ns or 0)
        self._since_ns = max(heard_ns, self._since_ns)
        self._unanswered = 0

    @property
    def is_to_answer(self) -> bool:
        """Whether its port is up, and the peer is known to answer there, or to know that it is to."""
        return self.port_ok and self._known_after is not None

    def found_silent(self, now_ns: int) -> None:
        """Work that stood still there has shown that it is silent (silence.py): it is so until something is heard."""
        self._silent_ns = now_ns

    @property
    def is_silent(self) -> bool:
        """Whether that was found, and nothing was heard since."""
        return self._silent_ns is not None and not self.heard_since(self._silent_ns)

    def heard_since(self, then_ns: int) -> bool:
        """Whether an answer, or anything else, came from there after that."""
        return self._answered_ns is not None and self._answered_ns >= then_ns

    def late_since(self, then_ns: int, longest_ns: int) -> int:
        """When, after that, the last answer came that took longer than this (LATE_NS or more); -1: none is known."""
        late = (at_ns for at_ns, took_ns in self._late if at_ns >= then_ns and took_ns > longest_ns)
        return max(late, default=-1)

    def missing_since(self, then_ns: int, count: int) -> int | None:
        """When the `count`-th of the unanswered pings after that was sent; None where there are not so many."""
        sent = [sent_ns for _, sent_ns in self._awaited if sent_ns >= then_ns]
        return sent[count - 1] if len(sent) >= count else None

    def suspect(self) -> None:
        """Something failed there: dead until a ping sent from now on is answered."""
        self._unanswered = self.dead_after
        self._answered = self._number
        self._awaited.clear()
        self.earliest_ns = 0

    def answers(self, now_ns: int) -> bool:
        """Whether pings were answered up to now: one not long ago, and none is, or was just before, missing."""
        if not self.port_ok or self._answered_ns is None or now_ns - self._answered_ns > FRESH_NS:
            return False
        if now_ns - self._lost_ns < FRESH_NS:
            return False
        return not self._awaited or now_ns - self._awaited[0][1] <= self._patience_ns

    @property
    def alive(self) -> bool | None:
        """True after an answer, False after `dead_after` lost pings or with the port down, None while unknown."""
        if not self.port_ok or self._unanswered >= self.dead_after:
            return False
        return True if self._answered_ns is not None and self._unanswered < 2 else None

    @property
    def next_timeout_ns(self) -> int:
        """When `poll_ping` wants to be called again, if no answer comes before."""
        under_way = len(self._awaited)
        if self.interval_ns == PROBE_NS:  # older ones are lost
            under_way = min(under_way, self._number - self._probes_after)
        keeps_up = under_way < MOST_UNDER_WAY
        return self.earliest_ns if keeps_up or self.alive is False else max(self.earliest_ns, self._counts_ns)
