# SPDX-License-Identifier: BSD-3-Clause
"""Ski rental, coming home, back-off, and never too many moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.stragglers.decision import MINUTE_NS, Decision
from shiftverbs.stragglers.records import MS, SECOND, Settings

SETTINGS = Settings(move_cost_ns=20 * MS, hold_ns=10 * SECOND, most_hold_ns=40 * SECOND)


def test_it_pays_once_the_loss_is_a_move_there_and_back() -> None:
    decision = Decision(0, SETTINGS)
    assert not decision.pays(40 * MS - 1)
    assert decision.pays(40 * MS)
    decision.order_move(2.0, 0)
    decision.handle_moved(1, 0, 100 * MS)
    assert not decision.pays(199 * MS) and decision.pays(200 * MS)


def test_home_again_after_a_hold_that_doubles_with_relapses() -> None:
    decision, now, holds = Decision(0, SETTINGS), 0, []
    for _ in range(4):
        decision.order_move(2.0, now)
        assert decision.return_ns is None  # it is not there yet
        decision.handle_moved(1, now, MS)
        holds.append(decision.return_ns - now)
        now = decision.return_ns
        decision.order_return(False, now)
        decision.handle_moved(0, now, MS)
        now += SECOND
    assert holds == [10 * SECOND, 20 * SECOND, 40 * SECOND, 40 * SECOND]
    now += 3600 * SECOND
    decision.order_move(2.0, now)
    decision.handle_moved(1, now, MS)
    assert decision.return_ns - now == 10 * SECOND


def test_who_was_moved_by_somebody_else_is_not_brought_home() -> None:
    decision = Decision(0, SETTINGS)
    decision.handle_moved(1, 0, None)
    assert decision.return_ns is None


def test_a_refusal_is_not_repeated_at_once() -> None:
    decision = Decision(0, SETTINGS)
    decision.order_move(2.0, 0)
    assert not decision.may_move(SECOND)
    decision.handle_refused(SECOND)
    assert not decision.may_move(2 * SECOND)
    assert decision.may_move(11 * SECOND)


@given(st.lists(st.integers(0, 5 * SECOND), max_size=200))
def test_never_more_moves_a_minute_than_allowed(waits: list[int]) -> None:
    decision, now, moves = Decision(0, SETTINGS), 0, []
    for wait in waits:
        now += wait
        if decision.may_move(now):
            moves.append(now)
            decision.order_move(2.0, now)
            decision.handle_moved(1 - decision.rail, now, MS)
    for i, at in enumerate(moves):
        assert sum(at - MINUTE_NS < other <= at for other in moves[: i + 1]) <= SETTINGS.moves_a_minute
