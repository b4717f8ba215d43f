# SPDX-License-Identifier: BSD-3-Clause
"""Bayesian online change-point detection, against the whole posterior and known changes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.stragglers.change_point import HAZARD, MOST_RUNS, ChangePoint


def evidence(values: list[float]) -> float:
    """Log marginal likelihood of values of one run, in closed form (Murphy 2007, "Conjugate Bayesian analysis", 93)."""
    n, weight, shape, scale = len(values), 0.1, 1.0, 0.01
    if not n:
        return 0.0
    mean = sum(values) / n
    squares = sum((value - mean) ** 2 for value in values)
    last_scale = scale + squares / 2 + weight * n * mean**2 / (2 * (weight + n))
    return (
        math.lgamma(shape + n / 2)
        - math.lgamma(shape)
        + shape * math.log(scale)
        - (shape + n / 2) * math.log(last_scale)
        + 0.5 * math.log(weight / (weight + n))
        - n / 2 * math.log(2 * math.pi)
    )


def posterior(values: list[float]) -> list[float]:
    """Of run lengths 0 to n, by the sum over all partitions, as a recursion on evidences of whole runs."""
    # begun[i]: joint probability of the first i values and a change behind them.
    begun = [1.0]
    joint: list[float] = []
    for n in range(1, len(values) + 1):
        joint = [
            begun[n - r] * math.exp(evidence(values[n - r : n])) * (1 - HAZARD) ** r for r in range(1, n + 1)
        ]
        before = [
            begun[n - r] * math.exp(evidence(values[n - r : n])) * (1 - HAZARD) ** (r - 1)
            for r in range(1, n + 1)
        ]
        begun.append(HAZARD * sum(before))
    weights = [begun[-1], *joint]
    return [weight / sum(weights) for weight in weights]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_the_posterior_is_the_papers(values: list[float]) -> None:
    series = ChangePoint(most_runs=100)
    for value in values:
        series.handle(value)
    found = {run.length: math.exp(run.log_p) for run in series.runs}
    for length, probability in enumerate(posterior(values)):
        assert found[length] == pytest.approx(probability, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_a_change_is_found_where_it_was(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    series = ChangePoint()
    for i in range(1000):
        series.handle(rng.gauss(0.4 if i >= 980 else 0.0, 0.1))
    assert series.likeliest.length == pytest.approx(20, abs=2)
    assert series.likeliest.mean == pytest.approx(0.4, abs=0.1)


def test_its_cost_is_bounded_and_probabilities_add_up() -> None:
    rng = random.Random(1)
    series = ChangePoint()
    for _ in range(2000):
        series.handle(rng.gauss(0, 0.1))
        assert len(series.runs) <= MOST_RUNS
    assert sum(math.exp(run.log_p) for run in series.runs) == pytest.approx(1)
    assert series.likeliest.length > 1000


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="hazard must be between 0 and 1, not 1"):
        ChangePoint(hazard=1)
    with pytest.raises(ValueError, match="at least 2 run lengths must be kept, not 1"):
        ChangePoint(most_runs=1)
    with pytest.raises(ValueError, match="must be finite, not nan"):
        ChangePoint().handle(math.nan)
