# SPDX-License-Identifier: BSD-3-Clause
"""The healthy path, learned: against paths whose truth is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.stragglers.records import Path, Ping, Sample, Settings
from shiftverbs.stragglers.signal import KNOWN, LEARNED, HealthyPath, HealthyPing

PATH = Path("peer", 0)


def sample(size: int, messages: int, took: float, unseen: int = 0, begun: int = 0) -> Sample:
    return Sample(PATH, size, messages, 1000, 1000 + max(1, round(took)), unseen, begun_bytes=begun)


@given(
    seed=st.integers(0, 1 << 32),
    latency=st.floats(1_000, 1_000_000),
    rate=st.floats(0.1, 50.0),
    per_message=st.floats(0, 5_000),
)
def test_what_was_learned_is_predicted(seed: int, latency: float, rate: float, per_message: float) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [(1 << rng.randint(6, 26), rng.choice([1, 4, 16])) for _ in range(5)]
    healthy = HealthyPath()
    for _ in range(LEARNED):
        for size, messages in sizes:
            truth = latency + size / rate + per_message * messages
            healthy.learn(sample(size, messages, truth * math.exp(rng.gauss(0, 0.05))))
    for size, messages in sizes:
        predicted = healthy.predict(sample(size, messages, 1))
        assert predicted == pytest.approx(latency + size / rate + per_message * messages, rel=0.06)


def test_what_was_not_learned_is_not_predicted() -> None:
    healthy = HealthyPath()
    for _ in range(KNOWN - 1):
        healthy.learn(sample(4096, 1, 5000))
    assert healthy.predict(sample(4096, 1, 5000)) is None
    healthy.learn(sample(4096, 1, 5000))
    assert healthy.predict(sample(4096, 1, 5000)) == pytest.approx(5000)
    assert healthy.predict(sample(1 << 20, 1, 5000)) is None


def test_a_few_stalls_do_not_spoil_it() -> None:
    rng = random.Random(7)
    healthy = HealthyPath()
    for _ in range(300):
        stall = 50_000_000 if rng.random() < 0.2 else 0
        healthy.learn(sample(1 << 16, 4, 30_000 * rng.uniform(0.95, 1.05) + stall))
    assert healthy.predict(sample(1 << 16, 4, 1)) == pytest.approx(30_000, rel=0.05)


def test_it_may_creep_by_five_percent_and_no_more() -> None:
    healthy = HealthyPath()
    took = 100_000.0
    for _ in range(20_000):
        healthy.learn(sample(1 << 18, 1, took))
        took *= 1.0001
    predicted = healthy.predict(sample(1 << 18, 1, 1))
    assert predicted is not None and 100_000 <= predicted <= 106_000


def test_it_gets_faster_when_the_path_does() -> None:
    healthy = HealthyPath()
    rng = random.Random(3)
    for truth in (100_000, 60_000):
        for _ in range(6 * LEARNED):
            healthy.learn(sample(1 << 18, 1, truth * rng.uniform(0.95, 1.05)))
    assert healthy.predict(sample(1 << 18, 1, 1)) == pytest.approx(60_000, rel=0.05)


def test_who_does_not_look_has_the_benefit_of_the_doubt() -> None:
    healthy = HealthyPath()
    for _ in range(KNOWN):
        healthy.learn(sample(4096, 1, 10_000))
    late = healthy.read(sample(4096, 1, 5_000_000, unseen=4_999_000))
    assert late is not None and late.unclear and late.ratio == 1
    slow = healthy.read(sample(4096, 1, 5_000_000, unseen=4_000_000))
    assert slow is not None and not slow.unclear and slow.observed_ns == 1_000_000
    seen = healthy.read(sample(4096, 1, 20_000, unseen=1_000))
    assert seen is not None and seen.observed_ns == 20_000
    done_before = healthy.read(sample(4096, 1, 6_000, begun=4096))
    assert done_before is not None and done_before.unclear


def test_what_is_unclear_teaches_nothing() -> None:
    healthy = HealthyPath()
    for _ in range(LEARNED):
        healthy.learn(sample(4096, 1, 10_000, unseen=5_001))
        healthy.learn(sample(4096, 1, 10_000, begun=2049))
    assert healthy.predict(sample(4096, 1, 10_000)) is None


@pytest.mark.parametrize(("unseen", "begun", "at_most"), [(5_000, 0, 10_000), (0, 2048, 20_000)])
def test_what_is_half_clear_teaches_what_it_takes_at_most(unseen: int, begun: int, at_most: int) -> None:
    healthy = HealthyPath()
    for _ in range(KNOWN):
        assert healthy.predict(sample(4096, 1, 10_000)) is None
        healthy.learn(sample(4096, 1, 10_000, unseen=unseen, begun=begun))
    assert healthy.predict(sample(4096, 1, 10_000)) == pytest.approx(at_most)
    # By what it took for certain: nobody is called slow for what he was not seen to take.
    assert ratio(healthy, sample(4096, 1, 30_000, unseen=14_000)) == pytest.approx(16_000 / at_most)
    assert ratio(healthy, sample(4096, 1, 10_000, unseen=4_000, begun=2048)) < 1
    late = healthy.read(sample(4096, 1, 30_000, unseen=25_000))
    assert late is not None and late.unclear and late.ratio == 1
    assert ratio(healthy, sample(4096, 1, 100_000)) == pytest.approx(100_000 / at_most)
    # Those that are clear are better, once there are enough.
    for _ in range(KNOWN):
        healthy.learn(sample(4096, 1, 8_000))
    assert healthy.predict(sample(4096, 1, 10_000)) == pytest.approx(8_000)


def ratio(healthy: HealthyPath, of: Sample) -> float:
    """Of a sample, by the prediction."""
    reading = healthy.read(of)
    assert reading is not None and not reading.unclear
    return reading.ratio


def test_pings() -> None:
    healthy = HealthyPing()
    for _ in range(KNOWN):
        assert healthy.takes_ns is None
        healthy.learn(20_000)
    assert healthy.takes_ns == 20_000
    for _ in range(LEARNED):
        healthy.learn(20_000)
    for _ in range(100 * LEARNED):
        healthy.learn(90_000)  # slow for ever, and that is no custom
    assert healthy.takes_ns <= 20_000 * 1.06


@pytest.mark.parametrize(
    "what",
    [
        {"bytes": -1},
        {"messages": 0},
        {"ended_ns": 1000},
        {"unseen_ns": 600},
        {"unseen_ns": -1},
        {"busy_ns": 10},
        {"begun_bytes": 9},
    ],
)
def test_samples_that_cannot_be(what: dict[str, int]) -> None:
    good = {"bytes": 8, "messages": 1, "began_ns": 1000, "ended_ns": 1500}
    Sample(PATH, **good)
    with pytest.raises(ValueError, match=r"."):
        Sample(PATH, **(good | what))


def test_settings_and_pings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"slow_ratio must be above 1, not 1\.0"):
        Settings(slow_ratio=1.0)
    with pytest.raises(ValueError, match="probe_ns must be at least 1, not 0"):
        Settings(probe_ns=0)
    with pytest.raises(ValueError, match="most_hold_ns is 5, less than hold_ns"):
        Settings(most_hold_ns=5)
    with pytest.raises(ValueError, match="a ping sent at 7 ns was answered at 7 ns"):
        Ping(PATH, 7, 7)
