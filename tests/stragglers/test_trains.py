# SPDX-License-Identifier: BSD-3-Clause
"""Trains ahead of pings: few, one at a time, and none for long where one took long."""

from __future__ import annotations

import random

import pytest

from shiftverbs.stragglers.records import MS, SECOND
from shiftverbs.stragglers.trains import APART_NS, FIRST_REST_NS, LONG_NS, MOST_REST_NS, Trains


@pytest.fixture
def trains() -> Trains:
    made = Trains()
    made.want("a", 1)
    return made


def test_ahead_of_every_so_many_th_ping_of_those_that_want_it(trains: Trains) -> None:
    trains.want("a", 3)
    went = []
    for n in range(9):
        now = n * SECOND
        went.append(trains.handle_ping("a", now))
        assert not trains.handle_ping("b", now)
        assert trains.handle_pong("a", now, now + MS) == went[-1]
        assert not trains.handle_pong("b", now, now + MS)
    assert went == [False, False, True] * 3
    trains.want("a", None)
    assert not any(trains.handle_ping("a", n * SECOND) for n in range(10, 20))


def test_one_at_a_time_and_some_time_apart_wherever_they_go(trains: Trains) -> None:
    trains.want("b", 1)
    assert trains.handle_ping("a", 0)
    assert not trains.handle_ping("b", 30 * MS), "one is under way"
    assert trains.handle_pong("a", 0, 31 * MS)
    assert trains.handle_ping("b", 32 * MS)
    assert trains.handle_pong("b", 32 * MS, 33 * MS)
    assert not trains.handle_ping("a", 32 * MS + APART_NS - 1)
    assert trains.handle_ping("a", 32 * MS + APART_NS)


def test_a_path_on_which_one_took_long_rests_ever_longer(trains: Trains) -> None:
    now, rests = 0, []
    for _ in range(10):
        assert trains.handle_ping("a", now)
        now += LONG_NS + 1
        began = now
        while not trains.handle_ping("a", now):  # pings, without an answer
            now += 100 * MS
        rests.append(now - began)
        assert trains.handle_pong("a", now, now + LONG_NS + 1), "late, and it counts"
        now += LONG_NS + 1
        trains.paths["a"].rests_until_ns = now  # only the first of the two is looked at
    assert rests[0] == FIRST_REST_NS and rests[-1] == MOST_REST_NS
    assert rests == sorted(rests)


def test_a_quick_one_makes_it_as_at_first(trains: Trains) -> None:
    assert trains.handle_ping("a", 0)
    assert trains.handle_pong("a", 0, 2 * LONG_NS)
    now = 2 * LONG_NS + FIRST_REST_NS
    assert not trains.handle_ping("a", now - 1)
    assert trains.handle_ping("a", now)
    assert trains.handle_pong("a", now, now + MS)
    now += APART_NS
    assert trains.handle_ping("a", now)
    assert trains.handle_pong("a", now, now + LONG_NS + 1)
    assert trains.handle_ping("a", now + LONG_NS + 1 + FIRST_REST_NS)


def test_one_that_is_given_up_is_heard_of_all_the_same(trains: Trains) -> None:
    trains.want("b", 1)
    assert trains.handle_ping("a", 0)
    assert not trains.handle_ping("b", LONG_NS)
    assert trains.handle_ping("b", LONG_NS + 1)
    assert trains.handle_pong("a", 0, LONG_NS + 2 * MS)
    assert not trains.handle_ping("a", LONG_NS + 3 * MS), "the other's is under way"
    assert trains.handle_pong("b", LONG_NS + 1, LONG_NS + 4 * MS)


def test_one_that_did_not_go_out_is_none(trains: Trains) -> None:
    assert trains.handle_ping("a", 0)
    trains.handle_failed("a")
    assert not trains.handle_pong("a", 0, MS)
    # The queue is full, and what room there will be in it is others'.
    assert not trains.handle_ping("a", FIRST_REST_NS - 1)
    assert trains.handle_ping("a", FIRST_REST_NS)


def test_whoever_wants_none_for_a_while_is_not_forgotten(trains: Trains) -> None:
    assert trains.handle_ping("a", 0)
    trains.want("a", None)
    assert trains.handle_pong("a", 0, MS), "that was no ordinary ping"
    trains.forget("a")
    assert not trains.handle_pong("a", 0, MS)
    trains.forget("b")


@pytest.mark.parametrize("seed", range(20))
def test_any_paths_at_any_time(seed: int) -> None:
    """Never two in APART_NS or under way together, whatever is lost; and whoever is answered has its turn."""
    rng = random.Random(seed)
    trains = Trains()
    paths = range(rng.choice([1, 3, 40]))
    good = [path for path in paths if rng.random() < 0.8]
    for path in paths:
        trains.want(path, rng.choice([1, 2, 5]))
    went: dict[int, list[int]] = {path: [] for path in paths}
    answers: list[tuple[int, int, int]] = []
    last_ns, under_way = -SECOND, None
    for now in range(0, 20 * SECOND, 5 * MS):
        for answer in [each for each in answers if each[0] <= now]:
            answers.remove(answer)
            assert trains.handle_pong(answer[1], answer[2], now)
            if under_way == answer[1:]:
                under_way = None
        for path in paths:
            if now % (25 * MS) == 0 and trains.handle_ping(path, now):
                assert now - last_ns >= APART_NS
                assert under_way is None or now - under_way[1] > LONG_NS
                last_ns, under_way = now, (path, now)
                went[path].append(now)
                if path in good:
                    answers.append((now + rng.randrange(1, 20) * MS, path, now))
    assert all(len(went[path]) >= 5 for path in good), went
    assert all(len(went[path]) <= 6 for path in set(paths) - set(good)), went
