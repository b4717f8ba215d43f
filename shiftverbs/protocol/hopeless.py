# SPDX-License-Identifier: BSD-3-Clause
"""Work that no pair carries: counts failures of send WRs that nothing else speaks for (docs/protocol.md). Pure."""

from __future__ import annotations

from shiftverbs.protocol.directions import Directions
from shiftverbs.protocol.state import PairState


class HopelessWork:
    """Which send WR has failed where, and whether another attempt makes sense.

    failed_on: the pairs on which it, or one before it, failed since there was progress, in order.
    """

    __slots__ = ("_directions", "_since_ns", "_state", "_wr", "failed_on")

    def __init__(self, state: PairState, directions: Directions) -> None:
        self._state = state
        self._directions = directions
        self._wr = -1  # no later WR has failed so far
        self._since_ns = 0
        self.failed_on: list[int] = []

    def is_hopeless(self, k: int, wr: int) -> bool:
        """Whether no pair gets `wr` through, which failed on pair k though nothing else did there.

        A later WR than ever before is progress: all before it got through. A round that is over soon may have come upon
        rails that fail in turn, so there is another, with growing pauses that make both long enough. Where the pairs do
        not come round because somebody else leaves them, its own failures on the rest decide, after two rounds' worth.
        """
        s = self._state
        if wr > self._wr:
            self._wr = wr
            self.failed_on = []
            self._since_ns = s.now_ns
        self.failed_on.append(k)
        failures, pairs, round_ns = len(self.failed_on), len(s.pairs), s.config.round_ns
        if failures < pairs:
            return False
        tried = all(p.dead or j in self.failed_on for j, p in enumerate(s.pairs))
        long_enough = s.now_ns - self._since_ns >= round_ns
        if failures >= 2 * pairs or (tried and long_enough):
            return True
        # The shares of 1 + 2 + ... + pairs; a little more, by chance, to be out of step with what comes and goes.
        pause_ns = round_ns * 2 * (failures - pairs + 1) // (pairs * (pairs + 1))
        self._directions.pause_until(s.now_ns + pause_ns + s.rng.randrange(pause_ns // 4 + 1))
        return False
