# SPDX-License-Identifier: BSD-3-Clause
"""The timer table: what runs, what is next, what is over and in which order."""

from __future__ import annotations

from shiftverbs.protocol.timers import ArmTimer, Timer, Timers, arm_row, arm_timer


def test_rows_of_pairs_are_behind_the_others() -> None:
    rows = [arm_row(k, timer) for k in range(3) for timer in ArmTimer]
    assert rows == list(range(len(Timer), len(Timer) + len(rows)))
    assert [arm_timer(row) for row in rows] == [(k, timer) for k in range(3) for timer in ArmTimer]


def test_what_is_set_runs_until_it_is_stopped() -> None:
    t = Timers(2)
    assert t.next_ns(False) is None and t.running() == []
    t.set(Timer.SYNC, 30)
    t.set(arm_row(1, ArmTimer.DEADLINE), 20)
    assert t.runs(Timer.SYNC) and t.due_ns(Timer.SYNC) == 30 and t.due_ns(Timer.PREFER) is None
    assert t.next_ns(False) == 20
    t.set(Timer.SYNC, 10)
    assert t.next_ns(False) == 10
    t.stop(Timer.SYNC)
    t.stop(Timer.SYNC)
    assert t.next_ns(False) == 20 and t.running() == [arm_row(1, ArmTimer.DEADLINE)]
    t.stop_all()
    assert t.next_ns(False) is None


def test_arm_and_the_next_move_wait_for_a_switch() -> None:
    t = Timers(2)
    t.set(Timer.MOVE_BEGIN, 1)
    t.set(arm_row(0, ArmTimer.BEGIN), 2)
    assert t.next_ns(True) is None
    t.set(Timer.ATTEMPT, 3)
    assert t.next_ns(True) == 3 and t.next_ns(False) == 1


def test_what_is_over_comes_in_the_order_of_the_table() -> None:
    t = Timers(2)
    for row in (arm_row(1, ArmTimer.RESEND), Timer.SYNC, Timer.OPEN):
        t.set(row, 5)
    t.set(Timer.PREFER, 6)
    assert list(t.expire(4)) == []
    assert list(t.expire(5)) == [Timer.OPEN, Timer.SYNC, arm_row(1, ArmTimer.RESEND)]
    assert t.running() == [Timer.PREFER]


def test_what_happens_meanwhile_counts() -> None:
    """One timer's end may stop those behind it, or start them."""
    t = Timers(1)
    for row in (Timer.OPEN, Timer.SYNC, Timer.PREFER):
        t.set(row, 1)
    seen = []
    for row in t.expire(1):
        seen.append(row)
        if row == Timer.OPEN:
            t.stop(Timer.SYNC)
            t.set(Timer.OPEN, 9)
            t.set(Timer.MOVE_RESEND, 1)
    assert seen == [Timer.OPEN, Timer.MOVE_RESEND, Timer.PREFER]
    assert t.running() == [Timer.OPEN]
