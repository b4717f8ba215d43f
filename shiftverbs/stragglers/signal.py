# SPDX-License-Identifier: BSD-3-Clause
"""How long should this have taken: the healthy path, learned, and samples by it.

A healthy path takes latency + messages × per_message + bytes ÷ rate, times a factor of the sample's size class. All are
learned from what it did, robustly. ResiHP (arXiv 2605.06374) normalises likewise, by the work that was to be done, so
that much work is no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from shiftverbs.stragglers.records import Sample

# A class is known of so many samples, and learned of so many.
KNOWN = 15
LEARNED = 63
MOST_RISE = 1.05
FASTER = 3
# The fit is made anew when so many more samples were learned, as a share of all.
REFIT_SHARE = 0.5
REFIT_LEAST = 8
_ROUNDS = 4
# Learned is from samples of which no more than that was unseen, or begun before.
MOST_UNSEEN = 0.2
MOST_BEGUN = 0.2
# Where there are no such samples, as with a program that seldom looks, it is learned from these what it takes at most.
MOST_UNCLEAR_COARSE = 0.5
# A sample whose end is known less well than that says only what is certain.
BLURRED = 1.25


# Bytes, messages, ns.
Record = tuple[int, int, float]
SizeClass = tuple[int, int, bool]


class Reading(Struct, frozen=True):
    """A sample by what was predicted.

    observed_ns: what it took for certain. spread: standard deviation of the ratio when the path is well. unclear: the
    prediction lies in the time in which nobody looked: it says nothing.
    """

    sample: Sample
    predicted_ns: float
    observed_ns: float
    unclear: bool
    spread: float

    @property
    def ratio(self) -> float:
        """Observed by predicted."""
        return self.observed_ns / self.predicted_ns


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def median(values: list[float]) -> float:
    """The middle one; of an even number the upper of the two."""
    return quantile(values, 0.5)


def size_class(sample: Sample) -> SizeClass:
    """Powers of two of the bytes outstanding and of a message's; and whether it was a probe."""
    message = sample.bytes // sample.messages
    return sample.bytes.bit_length(), message.bit_length(), sample.probe


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots, for up to three unknowns; None where the matrix is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) < 1e-9:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


_SUBSETS = ((0, 1, 2), (0, 1), (1, 2), (0, 2), (1,), (0,), (2,))


def _fit(samples: list[Record]) -> tuple[float, float, float]:
    """Latency, ns per byte and ns per message, none negative: least absolute relative error, by reweighting.

    samples: bytes, messages, ns.
    """
    best = (0.0, 0.0, 0.0)
    weights = [1.0] * len(samples)
    for _ in range(_ROUNDS):
        matrix = [[0.0] * 3 for _ in range(3)]
        right = [0.0] * 3
        for (n, m, took), weight in zip(samples, weights, strict=True):
            row = (1 / took, n / took, m / took)
            for i in range(3):
                right[i] += weight * row[i]
                for k in range(3):
                    matrix[i][k] += weight * row[i] * row[k]
        # Scaled to a diagonal of 1, or 64 MB beside one message makes it singular to a float.
        diagonal = [math.sqrt(matrix[i][i]) or 1.0 for i in range(3)]
        least = math.inf
        for subset in _SUBSETS:
            found = _solve(
                [[matrix[i][k] / diagonal[i] / diagonal[k] for k in subset] for i in subset],
                [right[i] / diagonal[i] for i in subset],
            )
            if found is None or min(found) < 0:
                continue
            # What is left of the squares, up to a constant: minus the right side by the solution.
            left = -sum(x * right[i] / diagonal[i] for x, i in zip(found, subset, strict=True))
            if left < least - 1e-12:
                least = left
                values = [0.0] * 3
                for x, i in zip(found, subset, strict=True):
                    values[i] = x / diagonal[i]
                best = (values[0], values[1], values[2])
        errors = [abs(1 - (best[0] + best[1] * n + best[2] * m) / took) for n, m, took in samples]
        weights = [1 / max(error, 0.01) for error in errors]
    return best


class Reference:
    """What is the custom, of up to `LEARNED` records: replaced by later ones, unless slowness would become the custom.

    What creeps is not to be missed, so it gets slower by no more than `MOST_RISE` altogether. It gets faster once
    `FASTER` windows in a row were by more than chance.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.recent: list[Record] = []
        self.level = 0.0  # the median
        self.spread = 0.0  # standard deviation by the median, from the quartiles
        # What it may be measured by: the level of the first, or of the last that got faster.
        self._anchor = math.inf
        self._faster: list[float] = []

    def learn(self, record: Record, level: Callable[[Record], float]) -> bool:
        """One record more. level: how slow that is. Returns whether it is the first for which this is new."""
        if len(self.records) < LEARNED:
            self.records.append(record)
            if len(self.records) in (KNOWN, LEARNED):
                self.measure(level)
                return True
            return False
        self.recent.append(record)
        if len(self.recent) == LEARNED:
            self._renew(level)
        return False

    def measure(self, level: Callable[[Record], float]) -> None:
        """The levels changed: another fit."""
        before = self.level
        self._look([level(record) for record in self.records])
        if len(self.records) == LEARNED:
            self._anchor = self.level if self._anchor == math.inf else self._anchor * self.level / before

    def _look(self, levels: list[float]) -> None:
        self.level = median(levels)
        self.spread = (quantile(levels, 0.75) - quantile(levels, 0.25)) / 1.35 / self.level

    def _renew(self, level: Callable[[Record], float]) -> None:
        recent, self.recent = self.recent, []
        levels = [level(record) for record in recent]
        now = median(levels)
        if now > self._anchor * MOST_RISE:
            self._faster = []
            return
        self._faster = [*self._faster, now] if now < quantile([level(r) for r in self.records], 0.25) else []
        if len(self._faster) == FASTER:
            self._anchor, self._faster = median(self._faster), []
        elif self._faster:
            return
        self.records = recent
        self._look(levels)


class HealthyPath:
    """What a path takes when it is well."""

    def __init__(self) -> None:
        self._classes: dict[SizeClass, Reference] = {}
        self._coarse: dict[SizeClass, Reference] = {}
        self._fitted = (0.0, 0.0, 0.0)
        self._learned = 0
        self._refit_at = REFIT_LEAST

    def _base(self, size: int, messages: int) -> float:
        latency, per_byte, per_message = self._fitted
        return latency + per_byte * size + per_message * messages

    @staticmethod
    def _is_known(classes: dict[SizeClass, Reference], key: SizeClass) -> bool:
        return key in classes and len(classes[key].records) >= KNOWN

    def _known(self, sample: Sample) -> Reference | None:
        key = size_class(sample)
        for classes in (self._classes, self._coarse):
            if self._is_known(classes, key):
                return classes[key]
        return None

    def predict(self, sample: Sample) -> float | None:
        """What it takes a healthy path, ns; None where nothing of its size was learned."""
        known = self._known(sample)
        return None if known is None else self._base(sample.bytes, sample.messages) * known.level

    def learn(self, sample: Sample) -> None:
        """It was made by a path of which nobody thinks that it is slow. What is not clear in it teaches little."""
        unseen, begun = sample.unseen_ns / sample.took_ns, sample.begun_bytes / max(1, sample.bytes)
        key, took_ns, new = size_class(sample), float(sample.took_ns), False
        if unseen <= MOST_UNSEEN and begun <= MOST_BEGUN:
            new = self._learn(self._classes, key, (sample.bytes, sample.messages, took_ns))
        if not self._is_known(self._classes, key) and max(unseen, begun) <= MOST_UNCLEAR_COARSE:
            # At most: what had begun may have been done.
            new |= self._learn(self._coarse, key, (sample.bytes, sample.messages, took_ns / (1 - begun)))
        if new:
            self._refit()

    def _learn(self, classes: dict[SizeClass, Reference], key: SizeClass, record: Record) -> bool:
        """Returns whether it is time for another fit."""
        known = classes.setdefault(key, Reference())
        filling = len(known.records) < LEARNED
        new = known.learn(record, self._level)
        self._learned += filling
        return new or (filling and self._learned >= self._refit_at)

    def unlearn_recent(self) -> None:
        """It is suspected now: what it did of late is no example."""
        for known in (*self._classes.values(), *self._coarse.values()):
            known.recent.clear()

    def _level(self, record: Record) -> float:
        return record[2] / (self._base(record[0], record[1]) or 1.0)

    def _refit(self) -> None:
        self._refit_at = max(self._learned + REFIT_LEAST, round(self._learned * (1 + REFIT_SHARE)))
        classes = self._classes or self._coarse
        self._fitted = _fit([record for known in classes.values() for record in known.records])
        for known in (*self._classes.values(), *self._coarse.values()):
            if known.records:
                known.measure(self._level)

    def read(self, sample: Sample) -> Reading | None:
        """The sample by the prediction; None where there is none.

        Where the end is not known well, the sample has the benefit of the doubt: it took as long as it must have. Where
        the prediction is coarse it always has, for that is what a healthy path takes at most.
        """
        known = self._known(sample)
        if known is None:
            return None
        predicted_ns = self._base(sample.bytes, sample.messages) * known.level
        least_ns = sample.took_ns - sample.unseen_ns
        if known is self._coarse.get(size_class(sample)):
            unclear = least_ns < predicted_ns and sample.unseen_ns > sample.took_ns * MOST_UNCLEAR_COARSE
            return Reading(
                sample, predicted_ns, predicted_ns if unclear else float(least_ns), unclear, known.spread
            )
        observed_ns, unclear = float(sample.took_ns), False
        if sample.took_ns > max(least_ns * BLURRED, predicted_ns):
            unclear = least_ns < predicted_ns
            observed_ns = predicted_ns if unclear else float(least_ns)
        if observed_ns < predicted_ns and sample.begun_bytes > sample.bytes * MOST_BEGUN:
            unclear = True
        return Reading(sample, predicted_ns, observed_ns, unclear, known.spread)


class HealthyPing:
    """What a round trip takes when the path is well."""

    def __init__(self) -> None:
        self._reference = Reference()

    @property
    def takes_ns(self) -> float | None:
        """The median, ns; None before it is known."""
        return self._reference.level or None

    def learn(self, took_ns: int) -> None:
        """A round trip of a path of which nobody thinks that it is slow."""
        self._reference.learn((0, 0, float(took_ns)), lambda record: record[2])
