# SPDX-License-Identifier: BSD-3-Clause
"""Is a path silent: its work stands still, and of pings to one peer only those of other paths are answered. Pure.

A peer that is stopped, or busy, answers on no path; one that answers on another, and not here, was not reached here, or
its answer was not. So a death that no NIC tells of is seen before any retry timer speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shiftverbs.protocol.path_health import PingState

# Work that stands still for so long is asked about, or for so many times what work of that path took of late.
LEAST_NS = 10_000_000
SEVERAL = 3
# So many pings in a row without an answer, with one link in ten lossy both ways, are one case in 100,000.
PINGS = 5
# The last of them may be late by this, or by so many times what an answer took there at most, beyond the other path's.
PATIENCE_NS = 12_000_000
ANSWERS = 2
# For so long that must have been seen; longer where the other path was silent at first too: a peer that goes on after a
# stop may be heard there first.
SETTLED_NS = 3_000_000
GOES_ON_NS = 50_000_000
# Then it is the peer that stands still; asked again when the work is twice as old.
GIVE_UP_NS = 100_000_000


class Silence:
    """What is known of the path that carries one QP's sends.

    asks: the path is in doubt, and pings are wanted on all that go to the peer, as dense as can be. works: it had work
    of late, and is to be looked at again soon.
    """

    def __init__(self) -> None:
        self.asks = self.works = False
        self._path: PingState | None = None
        self._oldest = -1
        self._age_ns = 0
        self._takes_ns = 0
        self._next_ns = 0  # it is not asked about before its work is so old
        self._since_ns = 0
        self._found = False  # by this QP's own pings, in this look
        self._beyond_ns = 0  # an answer may take so much longer here than elsewhere
        self._missing_ns: int | None = None  # since when another path has answered, and it not
        # The other paths, and how soon each answers where the peer is at work.
        self._soon: dict[PingState, int] = {}
        self._patience: dict[PingState, int] = {}  # and how late it may be

    def rest(self) -> None:
        """It is not looked at for a while."""
        self._path = None
        self.asks = self.works = False

    def look(
        self,
        now_ns: int,
        oldest: int,
        age_ns: int,
        path: PingState,
        others: Callable[[], Sequence[PingState]],
    ) -> bool:
        """Look once. Returns whether the path is silent.

        oldest: number of the oldest send that is not complete; age_ns: since when it is that, as far as its NIC has it,
        or 0. others: the other paths to that peer.
        """
        known, self._path = path is self._path, path
        self._found = False
        self.works = age_ns > 0 or (known and oldest != self._oldest)
        if known and oldest == self._oldest and age_ns:
            self._age_ns = age_ns
            is_silent = self._stands_still(now_ns, path, others)
            if is_silent:
                self._age_ns = 0  # that is not how long work takes there
            return is_silent
        if not known:
            self._takes_ns = 0
        elif oldest != self._oldest:
            self._takes_ns = max(self._age_ns, self._takes_ns * 7 // 8)
        self._next_ns = max(LEAST_NS, SEVERAL * self._takes_ns)
        self._oldest, self._age_ns = oldest, age_ns
        self.asks = False
        return False

    def _stands_still(self, now_ns: int, path: PingState, others: Callable[[], Sequence[PingState]]) -> bool:
        if path.is_silent and self._age_ns >= LEAST_NS:
            return True  # another QP's work has shown that
        if not self.asks:
            # One that counts as dead may be back, or may not: it is asked as well.
            if self._age_ns >= self._next_ns and path.is_to_answer and (elsewhere := others()):
                self.asks, self._since_ns = True, now_ns
                self._missing_ns = None
                # As they were before: what both are late by from now on is the peer's, and what they were late by in a
                # stop of before says nothing of the difference. The quickest of the others is heard first.
                longest_ns = path.longest_ns - min(other.longest_ns for other in elsewhere)
                shortest_ns = path.shortest_ns - min(other.shortest_ns for other in elsewhere)
                self._beyond_ns = ANSWERS * max(longest_ns, shortest_ns)
                self._soon = {other: PATIENCE_NS + ANSWERS * other.shortest_ns for other in elsewhere}
                self._patience = {other: max(PATIENCE_NS, ANSWERS * other.longest_ns) for other in elsewhere}
            return False
        since_ns = self._since_ns
        if path.heard_since(since_ns) or now_ns - since_ns > GIVE_UP_NS:
            self.asks, self._next_ns = False, 2 * self._age_ns
            return False
        last_ns = path.missing_since(since_ns, PINGS)
        if last_ns is None or not any(other.answered_sent_ns >= last_ns for other in others()):
            return False
        if self._missing_ns is None:
            self._missing_ns = now_ns
        late = now_ns - last_ns >= max(PATIENCE_NS, self._beyond_ns)
        # It stood still, at the beginning or later, where an answer took longer there than it should.
        went_on_ns = max(other.late_since(since_ns, soon_ns) for other, soon_ns in self._soon.items())
        settled_ns = max(GOES_ON_NS if went_on_ns >= since_ns else SETTLED_NS, self._beyond_ns)
        if late and now_ns - max(self._missing_ns, went_on_ns) >= settled_ns:
            path.found_silent(now_ns)
            self._found, self.asks = True, False
            return True
        return False

    def is_missing_too(self, now_ns: int, other: PingState) -> bool:
        """Whether another path has answered as little, and is no slower one, in a look that has found this one silent.

        By pings of this QP's own, that is: what another's have shown says nothing of a third path.
        """
        if not self._found or other not in self._patience or other.heard_since(self._since_ns):
            return False
        last_ns = other.missing_since(self._since_ns, PINGS)
        return last_ns is not None and now_ns - last_ns >= self._patience[other]
