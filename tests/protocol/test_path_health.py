# SPDX-License-Identifier: BSD-3-Clause
"""Pings of one NIC pair: when they are sent, and what their answers say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.protocol.path_health import PingState


def test_nothing_is_known_before_the_first_answer() -> None:
    ping = PingState(100)
    assert ping.alive is None
    assert ping.poll_ping(0) == 1
    assert ping.alive is None
    ping.handle_pong(1, 5)
    assert ping.alive is True


def test_one_ping_per_interval() -> None:
    ping = PingState(100)
    assert [ping.poll_ping(t) for t in (0, 50, 99, 100, 150, 200)] == [1, None, None, 2, None, 3]
    assert ping.next_timeout_ns == 300


def test_a_row_of_unanswered_pings_is_death_and_one_answer_is_life() -> None:
    ping = PingState(100, dead_after=3)
    ping.poll_ping(0)
    ping.handle_pong(1, 1)
    seen = []
    for t in (100, 200, 300, 400, 500):
        ping.poll_ping(t)
        seen.append(ping.alive)
    assert seen == [True, True, None, False, False]  # one lost ping says nothing yet, the third is too many
    ping.handle_pong(6, 510)
    assert ping.alive is True


def test_never_answered_is_death_too() -> None:
    ping = PingState(100, dead_after=3)
    for t in range(0, 400, 100):
        ping.poll_ping(t)
    assert ping.alive is False


def test_answers_to_nothing_and_late_ones_are_ignored() -> None:
    ping = PingState(100)
    ping.handle_pong(1, 0)
    assert ping.alive is None
    ping.poll_ping(0)
    ping.poll_ping(100)
    ping.handle_pong(2, 110)
    ping.handle_pong(1, 120)
    ping.handle_pong(99, 130)
    assert ping.alive is True
    assert ping.poll_ping(200) == 3


def test_a_suspect_path_needs_a_fresh_answer() -> None:
    ping = PingState(100)
    ping.poll_ping(0)
    ping.handle_pong(1, 1)
    assert ping.poll_ping(100) == 2
    ping.suspect()
    assert ping.alive is False
    ping.handle_pong(2, 101)  # sent before the suspicion: it proves nothing
    assert ping.alive is False
    assert ping.poll_ping(101) == 3  # at once, not at the interval
    ping.handle_pong(3, 102)
    assert ping.alive is True


def test_a_port_that_is_down_is_dead_whatever_the_pings_say() -> None:
    ping = PingState(100)
    ping.poll_ping(0)
    ping.handle_pong(1, 1)
    ping.port_ok = False
    assert ping.alive is False
    ping.port_ok = True
    assert ping.alive is True


def test_hurry_shortens_a_long_wait() -> None:
    ping = PingState(1000)
    ping.poll_ping(0)
    ping.interval_ns = 10
    ping.hurry(100)
    assert ping.next_timeout_ns == 110
    ping.hurry(200)
    assert ping.next_timeout_ns == 110


@given(st.lists(st.tuples(st.sampled_from(["poll", "pong", "suspect"]), st.integers(0, 50)), max_size=60))
def test_alive_means_that_an_answer_is_fresh(story: list[tuple[str, int]]) -> None:
    """A model that keeps every ping's fate: alive is True only if one of the last two pings was answered."""
    ping, now = PingState(10, dead_after=3), 0
    answered: dict[int, bool] = {}
    since = 0  # pings up to this one were sent before the last suspicion
    for what, number in story:
        now += 3
        if what == "poll":
            sent = ping.poll_ping(now)
            if sent is not None:
                assert sent == len(answered) + 1
                answered[sent] = False
        elif what == "pong":
            ping.handle_pong(number, now)
            if number in answered and number > since and not any(answered[n] for n in answered if n > number):
                answered[number] = True
        else:
            ping.suspect()
            since = len(answered)
        newest = len(answered)
        if ping.alive is True:
            assert any(answered[n] for n in range(max(1, newest - 2), newest + 1) if n > since)
        if newest > since and answered[newest]:
            assert ping.alive is True


def test_an_answer_to_the_pings_of_another_life_is_none() -> None:
    """Numbers begin where chance has put them, so what was answered before fits no ping of now."""
    before, now = PingState(100, before_first=1 << 40), PingState(100, before_first=5)
    assert before.poll_ping(0) == (1 << 40) + 1 and now.poll_ping(0) == 6
    for number in (1, 5, (1 << 40) + 1):
        now.handle_pong(number, 1)
        assert now.alive is None
    now.handle_pong(6, 1)
    assert now.alive is True


def test_answers_up_to_now() -> None:
    """What a failure there is judged by: an old answer, or one that is missing, says that the path may have failed."""
    ms = 1_000_000
    ping = PingState(50 * ms)
    assert not ping.answers(0)
    assert ping.poll_ping(0) == 1
    assert not ping.answers(1 * ms)
    ping.handle_pong(1, 2 * ms)
    assert ping.answers(2 * ms) and ping.answers(152 * ms) and not ping.answers(153 * ms)
    assert ping.poll_ping(60 * ms) == 2
    assert ping.answers(85 * ms), "it may still come"
    assert not ping.answers(86 * ms)
    assert ping.poll_ping(110 * ms) == 3
    assert not ping.answers(111 * ms), "that another was sent excuses nothing"
    ping.handle_pong(3, 112 * ms)
    assert not ping.answers(120 * ms), (
        "the path was down a moment ago: what failed now may have failed for that"
    )
    for n, t in enumerate(range(160, 270, 50)):
        assert ping.poll_ping(t * ms) == 4 + n
        ping.handle_pong(4 + n, t * ms + 1)
    assert not ping.answers(261 * ms)
    assert ping.answers(262 * ms)
    ping.port_ok = False
    assert not ping.answers(262 * ms)


def test_a_slow_answer_slows_pings_down() -> None:
    """Or every one of them would count as unanswered when the next goes out."""
    ms = 1_000_000
    ping = PingState(5 * ms, dead_after=4)
    assert ping.poll_ping(0) == 1
    ping.handle_pong(1, 10 * ms)
    assert ping.poll_ping(10 * ms) == 2, "it was to go out before the first answer was there"
    ping.handle_pong(2, 20 * ms)
    assert ping.poll_ping(49 * ms) is None
    assert ping.poll_ping(50 * ms) == 3
    ping.hurry(51 * ms)
    assert ping.poll_ping(60 * ms) is None
    ping.handle_pong(3, 51 * ms)
    assert ping.poll_ping(90 * ms) == 4, "as it was before"
    ping.handle_pong(4, 91 * ms)
    assert ping.poll_ping(119 * ms) is None
    assert ping.poll_ping(120 * ms) == 5, "and faster again, little by little"


@pytest.mark.parametrize("late_ms", [100, 900, 5000])
def test_an_outage_behind_one_late_answer_is_seen_in_time(late_ms: int) -> None:
    """A peer whose process stood still for once is asked as often as before, or nearly."""
    ms = 1_000_000
    ping = PingState(1000 * ms, dead_after=4)
    number = ping.poll_ping(0)
    assert number is not None
    ping.handle_pong(number, late_ms * ms)
    ping.interval_ns = 50 * ms
    ping.hurry(late_ms * ms)
    sent = []
    for t in range(late_ms, late_ms + 2000):
        if ping.poll_ping(t * ms) is not None:
            sent.append(t)
        if ping.alive is False:
            break
    assert ping.alive is False and sent[-1] - late_ms <= 1250, sent
