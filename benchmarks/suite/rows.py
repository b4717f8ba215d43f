# SPDX-License-Identifier: BSD-3-Clause
"""One line of the table, and the statistics that stand in it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """One measured thing.

    :param name: what
    :param target: in words
    :param met: whether the target is met; None where there is none
    :param unit: of pyverbs and shiftverbs
    :param pyverbs: median, None where pyverbs has nothing of the kind
    :param shiftverbs: median
    :param ratio: median of shiftverbs to pyverbs over the pairs, None where there are no pairs
    :param spread: quartiles of that ratio (or of the figure itself, where there is no ratio)
    :param note: what else is to be known
    :param samples: for the figures, not printed
    """

    name: str
    target: str
    met: bool | None
    unit: str
    pyverbs: float | None
    shiftverbs: float
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    note: str = ""
    samples: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object that goes into the JSON file."""
        return {
            "name": self.name,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
            "pyverbs": self.pyverbs,
            "shiftverbs": self.shiftverbs,
            "unit": self.unit,
            "spread": self.spread,
            "note": self.note,
        }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return other/base of each pair, which were measured one right after the other."""
    return [b / a for a, b in zip(base, other, strict=True)]


def ratio_row(
    name: str, unit: str, pyverbs: Sequence[float], shiftverbs: Sequence[float], limit: float | None
) -> Row:
    """Make the row of something that may cost at most `limit` times what it costs with pyverbs."""
    pairs = ratios(pyverbs, shiftverbs)
    ratio = statistics.median(pairs)
    return Row(
        name,
        "" if limit is None else f"≤ {limit:.2f} ×",
        None if limit is None else ratio <= limit,
        unit,
        statistics.median(pyverbs),
        statistics.median(shiftverbs),
        ratio,
        quartiles(pairs),
    )


def own_spread(values: Sequence[float]) -> float:
    """Return how far pyverbs differs from itself: the factor that 9 in 10 neighbouring pairs stay within."""
    steps = [abs(math.log(b / a)) for a, b in itertools.pairwise(values)]
    return math.exp(percentile(steps, 0.9)) if steps else 1.0


def same_row(
    name: str, unit: str, pyverbs: Sequence[float], shiftverbs: Sequence[float], more_is_better: bool
) -> Row:
    """Make the row of something that must be as with pyverbs, within what pyverbs differs from itself."""
    row = ratio_row(name, unit, pyverbs, shiftverbs, None)
    assert row.ratio is not None
    spread = own_spread(pyverbs)
    row.target = f"≥ {1 / spread:.2f} ×" if more_is_better else f"≤ {spread:.2f} ×"
    row.met = row.ratio >= 1 / spread if more_is_better else row.ratio <= spread
    row.note = "limit: pyverbs against itself"
    return row


def limit_row(name: str, unit: str, values: Sequence[float], limit: float | None, note: str = "") -> Row:
    """Make the row of something that pyverbs does not have, with a limit for its median."""
    middle = statistics.median(values)
    return Row(
        name,
        "" if limit is None else f"≤ {limit:g} {unit}",
        None if limit is None else middle <= limit,
        unit,
        None,
        middle,
        None,
        quartiles(values),
        note,
        {"values": list(values)},
    )
