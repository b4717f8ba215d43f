# SPDX-License-Identifier: BSD-3-Clause
"""When did a series begin to behave otherwise: Bayesian online change-point detection.

Adams and MacKay, "Bayesian Online Changepoint Detection", 2007 (arXiv 0710.3742), algorithm 1: a posterior over the run
length, the number of values since the last change; normal values of unknown mean and variance, so the predictive is a
Student-t; a constant hazard. Of the run lengths only the likeliest are kept, so that a value costs the same however
many came before.
"""

from __future__ import annotations

import math

from msgspec import Struct

# Values between two changes, on average: Greyhound's (ATC 2025, section 4) hazard.
HAZARD = 1 / 250
MOST_RUNS = 32
# What is believed of a run before its first value: a mean near 0, known as well as from a tenth of a value, and a
# standard deviation of about 0.1.
_MEAN, _WEIGHT, _SHAPE, _SCALE = 0.0, 0.1, 1.0, 0.01


class Run(Struct):
    """One hypothesis: the last `length` values belong together.

    log_p: log of its posterior probability. mean, weight, shape, scale: the normal-inverse-gamma posterior of those
    values.
    """

    length: int
    log_p: float
    mean: float = _MEAN
    weight: float = _WEIGHT
    shape: float = _SHAPE
    scale: float = _SCALE

    def log_predictive(self, value: float) -> float:
        """Log density of the next value: Student-t with 2 × shape degrees of freedom."""
        spread = 2 * self.scale * (self.weight + 1) / self.weight  # degrees of freedom × squared scale
        power = self.shape + 0.5
        far = (value - self.mean) ** 2 / spread
        norm = math.lgamma(power) - math.lgamma(self.shape) - 0.5 * math.log(math.pi * spread)
        return norm - power * math.log1p(far)

    def grown(self, value: float, log_p: float) -> Run:
        """The run with one value more."""
        weight = self.weight + 1
        mean = self.mean + (value - self.mean) / weight
        scale = self.scale + 0.5 * self.weight * (value - self.mean) ** 2 / weight
        return Run(self.length + 1, log_p, mean, weight, self.shape + 0.5, scale)


class ChangePoint:
    """The run lengths of one series.

    hazard: probability of a change at each value, between 0 and 1. most_runs: run lengths kept, at least 2: the cost of
    a value. Raises ValueError for others.
    """

    def __init__(self, hazard: float = HAZARD, most_runs: int = MOST_RUNS) -> None:
        if not 0 < hazard < 1:
            raise ValueError(f"the hazard must be between 0 and 1, not {hazard}")
        if most_runs < 2:
            raise ValueError(f"at least 2 run lengths must be kept, not {most_runs}")
        self._log_change = math.log(hazard)
        self._log_stay = math.log1p(-hazard)
        self._most_runs = most_runs
        self.runs = [Run(0, 0.0)]

    def handle(self, value: float) -> None:
        """The next value of the series. Raises ValueError where it is not finite."""
        if not math.isfinite(value):
            raise ValueError(f"a value of a series must be finite, not {value}")
        joint = [run.log_p + run.log_predictive(value) for run in self.runs]
        most = max(joint)
        log_total = most + math.log(sum(math.exp(p - most) for p in joint))
        grown = [
            run.grown(value, p - log_total + self._log_stay) for run, p in zip(self.runs, joint, strict=True)
        ]
        if len(grown) >= self._most_runs:
            grown.sort(key=lambda run: run.log_p, reverse=True)
            del grown[self._most_runs - 1 :]
            kept = math.log(sum(math.exp(run.log_p) for run in grown)) - self._log_stay
            for run in grown:
                run.log_p -= kept
        grown.append(Run(0, self._log_change))
        self.runs = grown

    @property
    def likeliest(self) -> Run:
        """The run with the greatest posterior probability; of equals the longest."""
        return max(self.runs, key=lambda run: (run.log_p, run.length))
