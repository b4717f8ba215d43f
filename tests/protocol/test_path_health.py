# SPDX-License-Identifier: BSD-3-Clause
"""Pings of one NIC pair: when they are sent, and what their answers say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.protocol.path_health import PingState

MS = 1_000_000


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


def test_an_answer_says_when_its_ping_was_sent() -> None:
    ping = PingState(100, before_first=40)
    for t in (0, 100, 200):
        ping.poll_ping(t)
    assert ping.handle_pong(42, 250) == 100
    assert ping.handle_pong(41, 260) is ping.handle_pong(44, 260) is None
    assert ping.handle_pong(43, 270) == 200


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


@given(
    st.lists(st.tuples(st.sampled_from(["poll", "pong", "life", "suspect"]), st.integers(0, 50)), max_size=60)
)
def test_alive_means_that_an_answer_is_fresh(story: list[tuple[str, int]]) -> None:
    """A model that keeps when each ping was sent.

    When alive is True, an answer came, or a sign of life behind one; and what was sent since waits no longer than for
    one ping more that is as late as the latest answer allows.
    """
    ping, now = PingState(10, dead_after=3), 0
    sent: dict[int, int] = {}
    answered = since = 0  # the last ping that was; pings up to this one were sent before the last suspicion
    heard_at = longest = 0
    for what, number in story:
        now += 3
        if what == "poll":
            polled = ping.poll_ping(now)
            if polled is not None:
                assert polled == len(sent) + 1
                sent[polled] = now
        elif what == "pong":
            ping.handle_pong(number, now)
            if number in sent and number > max(since, answered):
                answered, heard_at = number, now
                longest = max(longest, now - sent[number])
                assert ping.alive is True
        elif what == "life":
            if answered > since:
                ping.handle_sign_of_life(now)
                heard_at = now
        else:
            ping.suspect()
            since = len(sent)
        if ping.alive is True:
            assert answered > since
            waiting = [max(heard_at, sent[n]) for n in sent if n > answered]
            assert not waiting or sent[len(sent)] - waiting[0] < 2 * max(12, 4 * longest + 12)


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


def test_what_was_lost_before_the_first_answer_says_nothing() -> None:
    """The peer may not have known of us yet; later on it does."""
    ping = PingState(25 * MS)
    assert [ping.poll_ping(t * MS) for t in (0, 25, 50)] == [1, 2, 3]
    assert not ping.answers(50 * MS)
    ping.handle_sign_of_life(50 * MS)
    ping.handle_pong(3, 51 * MS)
    assert ping.answers(51 * MS)
    assert [ping.poll_ping(t * MS) for t in (75, 100)] == [4, 5]
    ping.handle_pong(5, 101 * MS)
    assert not ping.answers(101 * MS)


def test_what_a_peer_that_knows_us_lost_before_its_first_answer_counts() -> None:
    """What it lost before that says nothing, and neither does what is answered."""
    ping = PingState(25 * MS)
    assert [ping.poll_ping(t * MS) for t in (0, 25)] == [1, 2]
    ping.peer_knows_us()
    assert ping.poll_ping(50 * MS) == 3
    ping.handle_pong(3, 51 * MS)
    assert ping.answers(51 * MS)

    ping = PingState(25 * MS)
    assert ping.poll_ping(0) == 1
    ping.peer_knows_us()
    assert [ping.poll_ping(t * MS) for t in (25, 50)] == [2, 3]
    ping.peer_knows_us()
    ping.handle_pong(3, 51 * MS)
    assert not ping.answers(51 * MS)


def _where_answers_take(takes_ms: int, until_ms: int) -> PingState:
    """Pinged every 25 ms, each ping answered after so long, until then."""
    ping = PingState(25 * MS, dead_after=4)
    for t in range(0, until_ms, 5):
        if t % 25 == 0:
            assert ping.poll_ping(t * MS) == t // 25 + 1, "pings are as dense as ever"
        if t >= takes_ms and (t - takes_ms) % 25 == 0:
            ping.handle_pong((t - takes_ms) // 25 + 1, t * MS)
            assert ping.alive is True and ping.answers(t * MS)
    return ping


@pytest.mark.parametrize(
    ("takes_ms", "dead_ms"), [(10, 2000 + 4 * 50), (60, 1950 + 4 * 250), (180, 1825 + 4 * 250)]
)
def test_a_slow_peer_is_not_a_dead_one(takes_ms: int, dead_ms: int) -> None:
    """A row of unanswered pings grows by one in four times what an answer takes, at the slowest in 250 ms."""
    ping = _where_answers_take(takes_ms, 2000)
    dead = next(t for t in range(2000, 9000, 25) if ping.poll_ping(t * MS) and ping.alive is False)
    assert dead == dead_ms


@pytest.mark.parametrize(("takes_ms", "patience_ms"), [(5, 25), (20, 30), (60, 90), (120, 180)])
def test_an_outage_is_seen_where_answers_take_long(takes_ms: int, patience_ms: int) -> None:
    """An answer is missing as soon as it takes half as long again as others did."""
    ping = _where_answers_take(takes_ms, 1001)
    lost_ms = (1001 - takes_ms) // 25 * 25 + 25  # the first ping that was not answered
    for t in range(1025, lost_ms + patience_ms + 1, 25):
        ping.poll_ping(t * MS)
    assert ping.answers((lost_ms + patience_ms) * MS)
    assert not ping.answers((lost_ms + patience_ms) * MS + 1)


def test_an_answer_may_be_late_for_so_long_and_no_longer() -> None:
    """Where answers take seconds, half as long again would be an outage."""
    ping = PingState(25 * MS)
    ping.poll_ping(0)
    ping.handle_pong(1, 1000 * MS)
    ping.poll_ping(1000 * MS)
    for t in range(1025, 2151, 25):
        ping.poll_ping(t * MS)
        ping.handle_sign_of_life(t * MS)
    assert ping.answers(2150 * MS) and not ping.answers(2150 * MS + 1)


def test_a_sign_of_life_is_no_answer() -> None:
    """It says nothing of what answers take, nor that those which are not there are lost, nor that they are not."""
    ping = PingState(25 * MS, dead_after=4)
    assert ping.poll_ping(0) == 1
    ping.handle_pong(1, 1 * MS)
    assert [ping.poll_ping(t * MS) for t in (25, 50)] == [2, 3]
    ping.handle_sign_of_life(50 * MS)
    assert ping.alive is True and ping.answers(50 * MS) and not ping.answers(51 * MS)
    ping.handle_pong(2, 60 * MS)
    assert ping.answers(90 * MS), "none was lost, and an answer is known to take 35 ms"
    ping.handle_sign_of_life(90 * MS)
    assert ping.answers(102 * MS) and not ping.answers(103 * MS)
    assert ping.poll_ping(103 * MS) == 4
    ping.handle_pong(4, 104 * MS)
    assert not ping.answers(104 * MS), "the third is"


def test_a_peer_that_does_not_keep_up_is_asked_less_often() -> None:
    """Once for each answer, or in 250 ms; and every 25 ms as soon as it keeps up."""
    ping = PingState(25 * MS, dead_after=4)
    ping.poll_ping(0)
    ping.handle_pong(1, 500 * MS)
    for t in range(500, 700, 25):
        assert ping.next_timeout_ns <= t * MS and ping.poll_ping(t * MS)
    for t in (750, 1000):
        ping.hurry((t - 30) * MS)
        assert ping.next_timeout_ns == t * MS and ping.poll_ping(t * MS - 1) is None
        assert ping.poll_ping(t * MS)
    for n, t in enumerate(range(1100, 1300, 25)):
        assert ping.next_timeout_ns == (1250 if n == 0 else t + 225) * MS, "without an answer"
        ping.handle_pong(2 + n, t * MS)
        assert ping.poll_ping(t * MS) == 12 + n and ping.poll_ping(t * MS + 1) is None
    ping.handle_pong(18, 1280 * MS)
    assert ping.next_timeout_ns == 1300 * MS


def test_a_dead_path_is_asked_as_often_as_ever() -> None:
    ping = PingState(25 * MS, dead_after=4)
    assert [ping.poll_ping(t * MS) for t in range(0, 5000, 25)] == list(range(1, 201))


def test_pings_without_an_answer_are_not_kept_for_ever() -> None:
    ping = PingState(1, dead_after=4)
    assert [ping.poll_ping(t) for t in range(10_000)] == list(range(1, 10_001))
    assert ping.alive is False and len(ping._awaited) <= 64
    ping.handle_pong(2, 10_000)
    assert ping.alive is True, "one that nobody knows any more when it was sent"
    ping.handle_pong(10_000, 10_001)
    assert ping.alive is True and not ping._awaited


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


def test_an_answer_to_a_forgotten_ping_took_longer_than_those_that_are_known() -> None:
    ping = PingState(25 * MS, dead_after=4)
    for t in range(0, 2000, 25):
        assert ping.poll_ping(t * MS) == t // 25 + 1
    ping.handle_pong(1, 2000 * MS)  # the 64th before the last was sent at 400 ms
    assert ping.alive is True and ping.answers(2000 * MS)
    assert [ping.poll_ping(t * MS) for t in (2000, 2025)] == [81, None], "it does not keep up"
    assert ping.next_timeout_ns == 2250 * MS
