# SPDX-License-Identifier: BSD-3-Clause
"""Silence: which path counts as silent, when it is asked about, and how often."""

from __future__ import annotations

import pytest

from shiftverbs.protocol import silence
from shiftverbs.protocol.path_health import PROBE_NS, PingState
from shiftverbs.protocol.silence import Silence

MS = 1_000_000


class Two:
    """A path with work, another one to the same peer, and time. here, there: whether pings are answered."""

    def __init__(self) -> None:
        self.now = 10**9
        self.here = self.there = True
        self.late_ns = {False: 0, True: 0}
        self.path, self.other = PingState(10**9, 4), PingState(10**9, 4)
        self.silence = Silence()
        self.oldest, self.since = 0, self.now
        self.pings = 0
        self._answers: list[tuple[int, bool, int]] = []
        self._ping()
        self.run(1)

    def _ping(self) -> None:
        for is_other, ping in ((False, self.path), (True, self.other)):
            number = ping.poll_ping(self.now)
            if number is not None:
                self.pings += 1
                if self.there if is_other else self.here:
                    self._answers.append((self.now + self.late_ns[is_other] + MS // 10, is_other, number))

    def run(self, ms: float, waits: bool = True) -> bool:
        """Let time pass: looks as the watchdog's. Returns whether the path was found silent."""
        end = self.now + int(ms * MS)
        look = self.now
        while self.now < end:
            self.now += MS // 10
            for answer in [each for each in self._answers if each[0] <= self.now]:
                self._answers.remove(answer)
                (self.other if answer[1] else self.path).handle_pong(answer[2], self.now)
            if self.now >= look:
                age = self.now - self.since if waits else 0
                if self.silence.look(self.now, self.oldest, age, self.path, lambda: [self.other]):
                    return True
                look = self.now + (4 if self.silence.asks else 10) * MS
                for ping in (self.path, self.other):
                    ping.interval_ns = PROBE_NS if self.silence.asks else 10**9
                    ping.hurry(self.now)
            self._ping()
        return False

    def complete(self, after_ms: float) -> None:
        """The oldest send takes so long, and the next is there."""
        self.run(after_ms)
        self.oldest, self.since = self.oldest + 1, self.now


@pytest.fixture
def two() -> Two:
    two = Two()
    two.complete(1)
    return two


def test_a_path_that_answers_nothing_is_silent_soon(two: Two) -> None:
    two.here = False
    began = two.now
    assert two.run(45)
    assert 20 * MS < two.now - began


def test_one_that_answers_is_asked_less_and_less(two: Two) -> None:
    asked = []
    for _ in range(6):
        before = two.pings
        assert not two.run(160)
        asked.append(two.pings - before)
    assert asked[0] > 0 and sum(asked[1:]) <= 2 * asked[0] + 12


@pytest.mark.parametrize("there", [True, False])
def test_where_nobody_answers_it_is_the_peer(two: Two, there: bool) -> None:
    two.here, two.there = False, there
    assert two.run(300) == there


def test_it_gives_up_where_nobody_answers(two: Two) -> None:
    two.here = two.there = False
    two.run(20)
    assert two.silence.asks
    two.run(silence.GIVE_UP_NS / MS)
    assert not two.silence.asks and two.silence.works


def test_no_answer_of_before_counts(two: Two) -> None:
    """The other path must have answered what was asked behind the last that is missing here."""
    two.here = False
    two.run(12)
    assert two.silence.asks
    two.there = False
    assert not two.run(80)


def test_work_that_takes_long_may(two: Two) -> None:
    for _ in range(3):
        two.complete(80)
    before = two.pings
    two.run(200)
    assert two.pings == before
    two.here = False
    assert two.run(120)


def test_that_work_took_long_is_forgotten(two: Two) -> None:
    for _ in range(3):
        two.complete(80)
    for _ in range(40):
        two.complete(11)
    two.here = False
    assert two.run(80)


def test_late_answers_are_waited_for(two: Two) -> None:
    two.late_ns[False] = 30 * MS
    two.run(3000, waits=False)  # pings of every day
    two.since = two.now
    assert not two.run(300)
    two.late_ns[True] = 30 * MS
    two.here = False
    two.run(3000, waits=False)
    assert two.path.longest_ns > 20 * MS


def test_what_the_peer_delays_on_both_is_no_patience_with_one(two: Two) -> None:
    two.late_ns[False] = two.late_ns[True] = 30 * MS
    two.run(3050, waits=False)
    two.late_ns[False] = two.late_ns[True] = 0
    two.here = False
    two.since = two.now
    assert two.run(75)


def test_late_answers_are_forgotten(two: Two) -> None:
    two.late_ns[False] = 30 * MS
    two.run(3000, waits=False)
    two.late_ns[False] = 0
    two.run(20_000, waits=False)
    assert two.path.longest_ns < MS


def test_another_path_begins_anew(two: Two) -> None:
    two.here = False
    two.run(14)
    assert two.silence.asks
    other = PingState(10**9, 4)
    assert not two.silence.look(two.now, two.oldest, 500 * MS, other, lambda: [two.path])
    assert not two.silence.asks and two.silence.works


def test_nobody_asks_where_there_is_no_other_path(two: Two) -> None:
    for age_ms in range(10, 1000, 10):
        assert not two.silence.look(two.now, two.oldest, age_ms * MS, two.path, list)
    assert not two.silence.asks


def test_nobody_asks_of_what_was_never_heard_or_has_no_port(two: Two) -> None:
    two.path.port_ok = False
    for path in (two.path, PingState(10**9, 4)):
        path.suspect()
        for age_ms in range(10, 1000, 10):
            assert not two.silence.look(two.now, two.oldest, age_ms * MS, path, lambda: [two.other])
        assert not two.silence.asks


@pytest.mark.parametrize("unanswered", [2, 4, 9])
def test_a_path_that_died_long_ago_is_silent_as_soon(two: Two, unanswered: int) -> None:
    """Pings alone said so, or nearly, while there was no work; and one that is back is not left for that."""
    two.here = False
    two.run((unanswered + 1) * 1000 + 500, waits=False)
    assert two.path.alive is (None if unanswered < 4 else False)
    two.since = two.now
    assert two.run(45)
    two.silence.rest()
    two.here = True
    two.complete(1)
    assert not two.run(2000)


def test_what_was_found_is_not_asked_about(two: Two) -> None:
    """A path that may not be left, or whose SWITCH waits, is not pinged as densely for ever."""
    two.here = False
    assert two.run(45)
    assert not two.silence.asks
    assert two.silence.look(two.now + 10 * MS, two.oldest, 60 * MS, two.path, lambda: [two.other])
    assert not two.silence.asks, "and it is silent as long as nothing is heard"


def test_pings_that_cannot_be_sent_are_not_missing(two: Two) -> None:
    """Nothing goes there by us (no address handle): that says nothing of the path."""
    two.here = False
    poll_ping = two.path.poll_ping

    def unsent(now_ns: int) -> int | None:
        number = poll_ping(now_ns)
        if number is not None:
            two.path.handle_unsent()
        return number

    two.path.poll_ping = unsent  # type: ignore[method-assign]
    assert not two.run(600)


def test_an_answer_to_a_ping_that_was_not_sent() -> None:
    ping = PingState(50 * MS, 4)
    assert ping.poll_ping(0) == 1
    ping.handle_unsent()
    ping.handle_unsent()
    assert ping.handle_pong(1, MS) is None and ping.alive


def test_what_another_found_makes_no_third_path_missing(two: Two) -> None:
    """Where another QP's pings have shown that it is silent, this one has asked nobody."""
    two.here = two.there = False
    third = PingState(10**9, 4)
    two.run(40)
    two.path.found_silent(two.now)
    for ping in (two.path, third):
        ping.interval_ns = PROBE_NS
        ping.hurry(two.now)
        for t in range(12):
            ping.poll_ping(two.now + 2 * t * MS)
    assert two.silence.look(two.now + 30 * MS, two.oldest, 100 * MS, two.path, lambda: [two.other])
    assert not two.silence.is_missing_too(two.now + 30 * MS, third)


def test_a_rest_ends_the_doubt(two: Two) -> None:
    two.here = False
    two.run(14)
    two.silence.rest()
    assert not two.silence.asks and not two.silence.works


def test_dense_pings_make_no_path_dead_sooner() -> None:
    """A peer that stands still for a tenth of a second is not dead."""
    ping = PingState(50 * MS, 4)
    ping.poll_ping(0)
    ping.handle_pong(1, MS)
    ping.interval_ns = PROBE_NS
    for t in range(2, 150, 2):
        ping.poll_ping(t * MS)
    assert ping.alive is not False
    for t in range(150, 260, 2):
        ping.poll_ping(t * MS)
    assert ping.alive is False


def test_it_is_asked_at_once_whether_a_path_answers() -> None:
    ping = PingState(1000 * MS, 4)
    assert ping.poll_ping(0) == 1
    assert ping.poll_ping(MS) is None
    ping.peer_knows_us()
    assert ping.poll_ping(2 * MS) == 2
    ping.peer_knows_us()
    assert ping.poll_ping(3 * MS) is None
