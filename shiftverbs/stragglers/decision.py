# SPDX-License-Identifier: BSD-3-Clause
"""Does moving pay, and when to come home: ski rental, hysteresis, back-off.

Who does not know for how long skis are needed buys them once the rent paid has reached their price, and so never pays
more than twice what was needed. The rent is the time that a slow path has cost, the price a MOVE there and one back.
"""

from __future__ import annotations

import collections

from shiftverbs.stragglers.records import SECOND, Settings

MINUTE_NS = 60 * SECOND
# Slow again within so many times its last absence, a path was not well: it is left for twice as long.
RELAPSE = 2
# Of what MOVEs took, the dearest of so many.
COSTS = 5


class Decision:
    """Where the traffic of one peer should be.

    home: the rail that the application chose. rail: where it is.
    """

    def __init__(self, home: int, settings: Settings) -> None:
        self.home = home
        self.rail = home
        self.moving = False
        self.moved_ns = 0  # when it last went where it is
        self.left_ratio = 1.0  # how slow the path was that it left
        self.left_home = False  # that was home, and because it was slow
        self._settings = settings
        self._hold_ns = settings.hold_ns
        self._returned_ns: int | None = None
        self._not_before_ns = 0
        self._moves: collections.deque[int] = collections.deque(maxlen=settings.moves_a_minute)
        self._costs: collections.deque[int] = collections.deque(maxlen=COSTS)

    @property
    def hold_ns(self) -> int:
        """How long home is left alone."""
        return self._hold_ns

    @property
    def price_ns(self) -> int:
        """What it costs to move there and back."""
        return 2 * max(self._costs, default=self._settings.move_cost_ns)

    def may_move(self, now_ns: int) -> bool:
        """Whether another move is allowed: none is under way, and there were few in the last minute."""
        if self.moving or now_ns < self._not_before_ns:
            return False
        return len(self._moves) < self._settings.moves_a_minute or now_ns - self._moves[0] >= MINUTE_NS

    def pays(self, lost_ns: int) -> bool:
        """Whether what was lost is what moving costs."""
        return lost_ns >= self.price_ns

    def order_move(self, ratio: float, now_ns: int) -> None:
        """A MOVE off the path of today was ordered, which is slow by `ratio`."""
        if self.rail == self.home:
            self.left_home = True
            if self._returned_ns is not None:
                relapsed = now_ns - self._returned_ns < RELAPSE * max(self._hold_ns, MINUTE_NS)
                self._longer() if relapsed else self._shortest()
        self.left_ratio = ratio
        self._order(now_ns)

    def order_return(self, worse: bool, now_ns: int) -> None:
        """A MOVE home was ordered. worse: because it is no better where it is: not to be tried again soon."""
        if worse:
            self._longer()
            self._not_before_ns = now_ns + self._hold_ns
        self._order(now_ns)

    def _order(self, now_ns: int) -> None:
        self.moving = True
        self._moves.append(now_ns)

    def _longer(self) -> None:
        self._hold_ns = min(2 * self._hold_ns, self._settings.most_hold_ns)

    def _shortest(self) -> None:
        self._hold_ns = self._settings.hold_ns

    def handle_moved(self, rail: int, now_ns: int, took_ns: int | None) -> None:
        """The traffic is on `rail` now. took_ns: what a MOVE of ours took; None: it was somebody else who moved it."""
        if took_ns is not None:
            self._costs.append(max(1, took_ns))
        if rail == self.home and self.left_home:
            self._returned_ns = now_ns
        if rail == self.home or took_ns is None:
            self.left_home = False
        self.rail = rail
        self.moving = False
        self.moved_ns = now_ns

    def handle_refused(self, now_ns: int) -> None:
        """A MOVE that was ordered did not take place: not again before a hold has passed."""
        self.moving = False
        self._not_before_ns = now_ns + self._hold_ns

    @property
    def return_ns(self) -> int | None:
        """When coming home may be tried; None where nothing is to come home."""
        if not self.left_home or self.rail == self.home or self.moving:
            return None
        return max(self.moved_ns + self._hold_ns, self._not_before_ns)
