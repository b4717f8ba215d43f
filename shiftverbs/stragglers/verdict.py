# SPDX-License-Identifier: BSD-3-Clause
"""Is a path slow, and whose fault is that: suspected by the change-point detector, verified, attributed.

Greyhound (ATC 2025) verifies a change by comparing means: more than 10 % apart. Here that has to last as well.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from dataclasses import dataclass

from shiftverbs.stragglers.change_point import ChangePoint
from shiftverbs.stragglers.records import Attribution, Path, Ping, Sample, Settings
from shiftverbs.stragglers.signal import HealthyPath, HealthyPing, Reading, median

# A run of fewer values than that is a stray one or two.
LEAST_RUN = 4
# A suspicion is dropped after so many readings that are not slow.
RECENT = 128
# Slower than that by a single sample's say is not told apart: a pause says as much as a longer one.
MOST_LOG_RATIO = 4.0
# Evidence is kept in so many parts, at most.
MOST_PARTS = 64
# So many pings, or readings, say something.
LEAST_PINGS = 5
LEAST_READINGS = 8
MOST_PINGS = 256
# A path whose pings take that much longer is slow, if the suspect's do not take longer still by far.
SLOW_PINGS = 1.25
# Of the time in which the suspect was overdue, others must have been so, too, for that to be the cause.
SHARED_STALLS = 1 / 3

Stretch = tuple[float, float]


@dataclass(slots=True)
class Part:
    """Some readings of a suspicion, one behind the other."""

    observed_ns: float = 0.0
    predicted_ns: float = 0.0
    busy_ns: float = 0.0
    readings: int = 0
    unclear: int = 0

    def add(self, other: Part) -> None:
        """Take it in."""
        self.observed_ns += other.observed_ns
        self.predicted_ns += other.predicted_ns
        self.busy_ns += other.busy_ns
        self.readings += other.readings
        self.unclear += other.unclear

    @property
    def ratio(self) -> float:
        """Observed by predicted time; 1 where there is none."""
        return self.observed_ns / self.predicted_ns if self.predicted_ns else 1.0


def part_of(reading: Reading) -> Part:
    """One reading. What is unclear is counted, and says nothing of times."""
    if reading.unclear:
        return Part(unclear=1)
    sample = reading.sample
    return Part(reading.observed_ns, reading.predicted_ns, sample.busy_ns or sample.took_ns, 1)


def total(parts: Iterable[Part]) -> Part:
    """All of them as one."""
    whole = Part()
    for part in parts:
        whole.add(part)
    return whole


class Suspicion:
    """That a path is slow since `since_ns`: what speaks for it.

    raised_ns: when it was suspected, which is later: from then on its peer's paths are pinged often.
    """

    def __init__(self, since_ns: int, raised_ns: int) -> None:
        self.since_ns = since_ns
        self.raised_ns = raised_ns
        self.latest_ns = raised_ns
        self.verified = False
        self.attribution: Attribution | None = None  # what was said
        self._parts: list[Part] = []
        self._part_size = 1

    def add(self, reading: Reading) -> None:
        """A reading since then."""
        self.latest_ns = reading.sample.ended_ns
        part = part_of(reading)
        last = self._parts[-1] if self._parts else None
        if last is not None and last.readings + last.unclear < self._part_size:
            last.add(part)
            return
        if len(self._parts) == MOST_PARTS:
            self._parts = [
                total(pair) for pair in zip(self._parts[::2], self._parts[1::2], strict=True)
            ]
            self._part_size *= 2
        self._parts.append(part)

    @property
    def whole(self) -> Part:
        """All that was read."""
        return total(self._parts)

    @property
    def lost_ns(self) -> int:
        """Time with work outstanding, beyond what a healthy path had taken for that work."""
        whole = self.whole
        return max(0, round(whole.busy_ns * (1 - 1 / whole.ratio))) if whole.ratio > 0 else 0

    def lasts(self, settings: Settings) -> bool:
        """Whether it is slow for long enough, in each quarter of what was read since."""
        if self.latest_ns - self.since_ns < settings.least_ns:
            return False
        readings = self.whole.readings
        if readings < settings.least_samples:
            return False
        quarters = [Part() for _ in range(4)]
        seen = 0
        for part in self._parts:
            quarters[min(3, 4 * seen // readings)].add(part)
            seen += part.readings
        return all(quarter.ratio > settings.slow_ratio for quarter in quarters)


class PathWatch:
    """One path: what it takes when it is well, what it takes now."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.healthy = HealthyPath()
        self.healthy_ping = HealthyPing()
        self.suspicion: Suspicion | None = None
        self.recent: collections.deque[Reading] = collections.deque(maxlen=RECENT)
        self._settings = settings
        self._series = ChangePoint()
        self._pings: collections.deque[Ping] = collections.deque(maxlen=MOST_PINGS)

    def handle_sample(self, sample: Sample) -> Suspicion | None:
        """A sample ended. Returns a suspicion that was dropped by it."""
        reading = self.healthy.read(sample)
        if reading is None or not reading.unclear:
            if self.suspicion is None and sample.unseen_ns * 4 < sample.took_ns:
                self.healthy.learn(sample)
        if reading is None:
            return None
        self.recent.append(reading)
        if not reading.unclear:
            value = math.log(reading.ratio)
            self._series.handle(max(-MOST_LOG_RATIO, min(MOST_LOG_RATIO, value)))
        if self.suspicion is None:
            self._suspect()
            return None
        self.suspicion.add(reading)
        return self._drop()

    def _suspect(self) -> None:
        run = self._series.likeliest
        slow = math.log(self._settings.slow_ratio)
        if run.length < LEAST_RUN or run.mean <= slow:
            return
        clear = [i for i, reading in enumerate(self.recent) if not reading.unclear]
        since = list(self.recent)[clear[-min(run.length, len(clear))] :]
        self.suspicion = Suspicion(since[0].sample.began_ns, since[-1].sample.ended_ns)
        for reading in since:
            self.suspicion.add(reading)
        self.healthy.unlearn_recent()

    def _drop(self) -> Suspicion | None:
        suspicion = self.suspicion
        assert suspicion is not None
        whole = suspicion.whole
        if whole.readings + whole.unclear < RECENT:
            return None
        if total(map(part_of, self.recent)).ratio > self._settings.slow_ratio:
            return None
        return self.forget()

    def forget(self) -> Suspicion | None:
        """Suspect it no more; the series begins anew. Returns what was suspected."""
        suspicion, self.suspicion = self.suspicion, None
        self._series = ChangePoint()
        self.recent.clear()
        return suspicion

    def handle_ping(self, ping: Ping, learn: bool) -> None:
        """A ping was answered. learn: nobody thinks that the paths to this peer are slow."""
        self._pings.append(ping)
        if learn:
            self.healthy_ping.learn(ping.heard_ns - ping.sent_ns)

    def sample_ratio(self, since_ns: int) -> float | None:
        """Observed by predicted time of samples since then; None where there are too few."""
        whole = total(part_of(reading) for reading in self.recent if reading.sample.ended_ns >= since_ns)
        return whole.ratio if whole.readings >= LEAST_READINGS else None

    def ping_ratio(self, since_ns: int) -> float | None:
        """Round trips since then by what they take, in the median; None where there are too few."""
        took = [float(ping.heard_ns - ping.sent_ns) for ping in self._pings if ping.sent_ns >= since_ns]
        if len(took) < LEAST_PINGS or self.healthy_ping.takes_ns is None:
            return None
        return median(took) / self.healthy_ping.takes_ns

    def overdue_samples(self, since_ns: int) -> list[Stretch]:
        """When it was overdue, by its samples."""
        return [
            (reading.sample.began_ns + reading.predicted_ns, reading.sample.began_ns + reading.observed_ns)
            for reading in self.recent
            if reading.sample.began_ns >= since_ns and reading.ratio > self._settings.slow_ratio
        ]

    def overdue_pings(self, since_ns: int) -> list[Stretch]:
        """When it was overdue, by its pings."""
        takes_ns = self.healthy_ping.takes_ns
        if takes_ns is None:
            return []
        due = ((ping.sent_ns + 2 * takes_ns, float(ping.heard_ns)) for ping in self._pings)
        return [(begin, end) for begin, end in due if begin < end and end >= since_ns]


def _union(stretches: list[Stretch]) -> list[Stretch]:
    merged: list[Stretch] = []
    for begin, end in sorted(stretches):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def shared(ours: list[Stretch], others: list[Stretch]) -> float:
    """Which share of our time was the others', too; 0 where we have none."""
    ours, others = _union(ours), _union(others)
    length = sum(end - begin for begin, end in ours)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in ours
        for other_begin, other_end in others
    )
    return both / length if length else 0.0


def slow_too(suspect: PathWatch, suspicion: Suspicion, other: PathWatch) -> bool | None:
    """Whether another path is slow, too, as much as makes it no better; None where nothing is known of it."""
    since_ns = suspicion.raised_ns
    excess = math.log(max(1.0, suspicion.whole.ratio))
    by_samples, by_pings = other.sample_ratio(since_ns), other.ping_ratio(since_ns)
    if by_samples is None and by_pings is None:
        return None
    if by_samples is not None and by_samples > 1 and math.log(by_samples) >= excess / 2:
        return True
    if by_pings is not None and by_pings > SLOW_PINGS:
        ours = math.log(max(1.0, suspect.ping_ratio(since_ns) or 1.0))
        if math.log(by_pings) >= max(ours / 2, excess / 4):
            return True
    overdue = other.overdue_samples(since_ns) + other.overdue_pings(since_ns)
    return shared(suspect.overdue_samples(since_ns), overdue) >= SHARED_STALLS


def attribute(
    suspect: PathWatch, rails: list[PathWatch], elsewhere: list[PathWatch]
) -> tuple[Attribution, list[PathWatch]]:
    """Whose fault it is, and the rails that are better.

    suspect: a path with a suspicion. rails: the other paths to that peer. elsewhere: those to other peers.
    """
    suspicion = suspect.suspicion
    assert suspicion is not None
    whole = suspicion.whole
    if whole.unclear > whole.readings:
        return Attribution.APPLICATION, []
    states = [(rail, slow_too(suspect, suspicion, rail)) for rail in rails]
    better = [rail for rail, slow in states if slow is False]
    if better:
        return Attribution.PATH, better
    if not any(slow for _, slow in states):
        return Attribution.UNKNOWN, []
    others = [slow_too(suspect, suspicion, path) for path in elsewhere]
    if False in others and True not in others:
        return Attribution.PEER, []
    return Attribution.BOTH_RAILS, []
