# SPDX-License-Identifier: BSD-3-Clause
"""Is a path slow, and whose fault is that: suspected by the change-point detector, verified, attributed.

Greyhound (ATC 2025) verifies a change by comparing means: more than 10 % apart. Here that has to last as well.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable

from msgspec import Struct

from shiftverbs.stragglers.change_point import ChangePoint
from shiftverbs.stragglers.records import MS, SECOND, Attribution, Path, Ping, Sample, Settings
from shiftverbs.stragglers.signal import LEARNED, HealthyPath, HealthyPing, Reading, median

# A run of fewer values than that is a stray one or two.
LEAST_RUN = 4
# A suspicion is dropped after so many readings that are not slow.
RECENT = 128
# Slower than that by a single sample's say is not told apart: a pause says as much as a longer one.
MOST_LOG_RATIO = 4.0
# Of a path that was slow not long ago a quarter of the evidence is enough.
RELAPSE_ENOUGH = 4
# Evidence is kept in so many parts, at most.
MOST_PARTS = 64
# So many pings, or readings, say something.
LEAST_PINGS = 5
LEAST_READINGS = 8
MOST_PINGS = 256
MOST_PROBES = 64
# A path whose pings take that much longer is slow, if the suspect's do not take longer still by far.
SLOW_PINGS = 1.25
# Answers to what was sent on other rails meanwhile may come later than a sample ends.
LATE_NS = 100 * MS
# Stretches of time in which a path was overdue, kept.
MOST_STRETCHES = 512
# Standard deviations beyond which it is not by chance.
BY_CHANCE = 3.0
# What paths were like in so long a time before a suspicion is what they are compared with.
BEFORE_NS = 60 * SECOND
# Of what may be by chance in another rail's samples, so much is held against that rail.
PROBED = 2 / 3
# A suspicion that nothing is heard of any more is dropped.
STALE_NS = 10 * SECOND

Stretch = tuple[float, float]


class Part(Struct):
    """Some readings of a suspicion, one behind the other.

    shared_ns: of the time beyond the predicted, in how much another rail was overdue, too. variance: of the observed
    time in health. began_ns: when the first of them did.
    """

    observed_ns: float = 0.0
    predicted_ns: float = 0.0
    shared_ns: float = 0.0
    busy_ns: float = 0.0
    variance: float = 0.0
    readings: int = 0
    unclear: int = 0
    began_ns: float = math.inf

    def add(self, other: Part) -> None:
        """Take it in."""
        self.observed_ns += other.observed_ns
        self.predicted_ns += other.predicted_ns
        self.shared_ns += other.shared_ns
        self.busy_ns += other.busy_ns
        self.variance += other.variance
        self.readings += other.readings
        self.unclear += other.unclear
        self.began_ns = min(self.began_ns, other.began_ns)

    @property
    def ratio(self) -> float:
        """Observed by predicted time; 1 where there is none."""
        return self.observed_ns / self.predicted_ns if self.predicted_ns else 1.0

    @property
    def own_ratio(self) -> float:
        """The same without what was shared."""
        return (self.observed_ns - self.shared_ns) / self.predicted_ns if self.predicted_ns else 1.0

    @property
    def chance(self) -> float:
        """How far from 1 the ratio may be by chance: of these samples, and of those that the prediction is from."""
        if not self.predicted_ns:
            return 0.0
        spread = math.sqrt(self.variance / self.readings) / (self.predicted_ns / self.readings)
        return BY_CHANCE * math.sqrt(self.variance / self.predicted_ns**2 + 1.6 * spread**2 / LEARNED)


def by_all(part: Part) -> float:
    """By what a path is called slow: all of its time."""
    return part.ratio


def by_own(part: Part) -> float:
    """The same without what other rails shared."""
    return part.own_ratio


def part_of(reading: Reading, shared_ns: float = 0.0) -> Part:
    """One reading. What is unclear counts as what was predicted: without it only the slow ones would be left."""
    sample = reading.sample
    return Part(
        observed_ns=reading.observed_ns,
        predicted_ns=reading.predicted_ns,
        shared_ns=min(shared_ns, max(0.0, reading.observed_ns - reading.predicted_ns)),
        busy_ns=sample.busy_ns or sample.took_ns,
        variance=(reading.spread * reading.predicted_ns) ** 2,
        readings=1,
        unclear=int(reading.unclear),
        began_ns=sample.began_ns,
    )


def total(parts: Iterable[Part]) -> Part:
    """All of them as one."""
    whole = Part()
    for part in parts:
        whole.add(part)
    return whole


class Suspicion:
    """That a path is slow since `since_ns`: what speaks for it.

    raised_ns: when it was suspected, which is later: from then on its peer's paths are pinged often, and only what was
    seen since is evidence. relapse: it was slow not long ago, so that less of it is enough.
    """

    def __init__(self, since_ns: int, raised_ns: int, relapse: bool = False) -> None:
        self.relapse = relapse
        self.since_ns = since_ns
        self.raised_ns = raised_ns
        self.heard_ns = self.latest_ns = raised_ns  # the last sample's end, and of those that were taken in
        self.verified = False
        self.attribution: Attribution | None = None  # what was said
        # How other paths were before it began, by path: what they were taken for may be out of date.
        self.before: dict[Path, float] = {}
        self.found: Attribution | None = None  # what was found last, and how often in a row
        self.found_times = 0
        self._parts: list[Part] = []
        self._part_size = 1
        self._asked_at = 0

    def renewed(self) -> Suspicion:
        """The same with no evidence yet: what was attributed elsewhere is not held against the path later."""
        fresh = Suspicion(self.since_ns, self.latest_ns)
        fresh.attribution, fresh.before = self.attribution, self.before
        return fresh

    def grown(self, by: int) -> bool:
        """Whether there are so many readings more than when that was last so."""
        readings = self.whole.readings
        if readings < self._asked_at + by:
            return False
        self._asked_at = readings
        return True

    def find(self, attribution: Attribution) -> None:
        """It was attributed to that, this time."""
        self.found_times = self.found_times + 1 if attribution is self.found else 1
        self.found = attribution

    def add(self, reading: Reading, shared_ns: float) -> None:
        """A reading since then. shared_ns: in how much of its time another rail was overdue, too."""
        self.latest_ns = reading.sample.ended_ns
        part = part_of(reading, shared_ns)
        last = self._parts[-1] if self._parts else None
        if last is not None and last.readings < self._part_size:
            last.add(part)
            return
        if len(self._parts) == MOST_PARTS:
            self._parts = [total(pair) for pair in zip(self._parts[::2], self._parts[1::2], strict=True)]
            self._part_size *= 2
        self._parts.append(part)

    @property
    def whole(self) -> Part:
        """All that was read."""
        return total(self._parts)

    def latest(self, since_ns: float) -> Part:
        """What began since then; a quarter of all that was read if that is more, for less says little."""
        least, latest = self.whole.readings / 4, Part()
        for part in reversed(self._parts):
            if part.began_ns < since_ns and latest.readings >= least:
                break
            latest.add(part)
        return latest

    @property
    def lost_ns(self) -> int:
        """Time with work outstanding, beyond what a healthy path had taken for that work."""
        whole = self.whole
        return max(0, round(whole.busy_ns * (1 - 1 / whole.ratio))) if whole.ratio > 0 else 0

    def lasts(self, settings: Settings) -> bool:
        """Whether it is slow for long enough, in each quarter of what was read, and more than by chance."""
        return self._lasts(settings, by_all)

    def lasts_alone(self, settings: Settings) -> bool:
        """The same without what other rails shared."""
        return self._lasts(settings, by_own)

    def _lasts(self, settings: Settings, ratio: Callable[[Part], float]) -> bool:
        enough = RELAPSE_ENOUGH if self.relapse else 1
        if (self.latest_ns - self.raised_ns) * enough < settings.least_ns:
            return False
        whole = self.whole
        if whole.readings * enough < settings.least_samples:
            return False
        if ratio(whole) <= settings.slow_ratio + whole.chance:
            return False
        quarters = [Part() for _ in range(4)]
        seen = 0
        for part in self._parts:
            quarters[min(3, 4 * seen // whole.readings)].add(part)
            seen += part.readings
        return all(ratio(quarter) > settings.slow_ratio for quarter in quarters)


class PathWatch:
    """One path: what it takes when it is well, what it takes now."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.healthy = HealthyPath()
        self.healthy_ping = HealthyPing()
        self.suspicion: Suspicion | None = None
        self.recent: collections.deque[Reading] = collections.deque(maxlen=RECENT)
        self.relapse_until_ns = 0  # it was slow not long ago: until then little evidence is enough
        self.left = False  # because it was slow: what it does now is no example
        self.probes: collections.deque[Sample] = collections.deque(maxlen=MOST_PROBES)
        self._settings = settings
        self._series = ChangePoint()
        self._pings: collections.deque[Ping] = collections.deque(maxlen=MOST_PINGS)
        self._unsettled: collections.deque[Reading] = collections.deque(maxlen=RECENT)
        # When it was overdue, in order.
        self._overdue: collections.deque[Stretch] = collections.deque(maxlen=MOST_STRETCHES)

    def handle_sample(self, sample: Sample, learn: bool) -> Suspicion | None:
        """A sample ended. learn: see `handle_ping`. Returns a suspicion that was dropped by it."""
        reading = self.healthy.read(sample)
        if sample.probe:
            self.probes.append(sample)
        if learn and not self.left:
            self.healthy.learn(sample)
        if self.suspicion is not None and sample.ended_ns - self.suspicion.heard_ns > STALE_NS:
            return self.forget()
        if reading is None:
            return None
        self.recent.append(reading)
        if not reading.unclear:
            if not sample.probe:  # those say what others are compared with, and suspect nobody
                value = math.log(reading.ratio)
                self._series.handle(max(-MOST_LOG_RATIO, min(MOST_LOG_RATIO, value)))
            if reading.ratio > self._settings.slow_ratio:
                self._was_overdue(
                    sample.began_ns + reading.predicted_ns, sample.began_ns + reading.observed_ns
                )
        if self.suspicion is None:
            if not sample.probe:
                self._suspect()
            return None
        self.suspicion.heard_ns = sample.ended_ns
        self._unsettled.append(reading)
        return self._drop(self.suspicion)

    def _suspect(self) -> None:
        run = self._series.likeliest
        if run.length < LEAST_RUN or run.mean <= math.log(self._settings.slow_ratio):
            return
        clear = [r.sample for r in self.recent if not (r.unclear or r.sample.probe)][-run.length :]
        self.suspicion = Suspicion(
            clear[0].began_ns, clear[-1].ended_ns, clear[-1].ended_ns < self.relapse_until_ns
        )
        self.healthy.unlearn_recent()

    def settle(self, now_ns: int, rails: list[PathWatch]) -> None:
        """Take in readings of which it is known by now what the peer's other rails did meanwhile."""
        suspicion = self.suspicion
        if suspicion is not None and suspicion.raised_ns == now_ns:
            for rail in rails:
                before = rail.samples(suspicion.since_ns - BEFORE_NS, suspicion.since_ns)
                if before is not None:
                    suspicion.before[rail.path] = before.ratio
        while self._unsettled and self._unsettled[0].sample.ended_ns <= now_ns - LATE_NS:
            reading = self._unsettled.popleft()
            begin_ns = reading.sample.began_ns
            end_ns = begin_ns + reading.observed_ns
            if suspicion is not None and begin_ns >= suspicion.raised_ns:
                shared_ns = min((rail.overdue_within(begin_ns, end_ns) for rail in rails), default=0.0)
                suspicion.add(reading, shared_ns)

    def _drop(self, suspicion: Suspicion) -> Suspicion | None:
        whole = suspicion.whole
        if whole.readings < RECENT:
            return None
        if total(map(part_of, self.recent)).ratio <= self._settings.slow_ratio:
            return self.forget()
        if suspicion.found is not Attribution.PATH:
            self.suspicion = suspicion.renewed()
        return None

    def forget(self) -> Suspicion | None:
        """Suspect it no more; the series begins anew. Returns what was suspected."""
        suspicion, self.suspicion = self.suspicion, None
        self._series = ChangePoint()
        self.recent.clear()
        self._unsettled.clear()
        return suspicion

    def handle_ping(self, ping: Ping, learn: bool) -> None:
        """A ping was answered. learn: nobody thinks that the paths to this peer are slow."""
        before_ns = self._pings[-1].heard_ns if self._pings else ping.sent_ns
        self._pings.append(ping)
        takes_ns = self.healthy_ping.takes_ns
        if takes_ns is not None and ping.heard_ns - ping.sent_ns > 2 * takes_ns:
            # It may have begun behind the answer before, if that is not long ago.
            begin_ns = min(ping.sent_ns, max(before_ns, ping.sent_ns - 2 * self._settings.probe_ns))
            self._was_overdue(begin_ns, ping.heard_ns)
        if learn and not self.left:
            self.healthy_ping.learn(ping.heard_ns - ping.sent_ns)

    @property
    def was_cut_short(self) -> bool:
        """Whether it answers, and too little was learned of it before another path to its peer was suspected."""
        pings = len(self._pings) >= LEAST_PINGS and self.healthy_ping.takes_ns is None
        return pings or (bool(self.probes) and self.healthy.predict(self.probes[-1]) is None)

    def _was_overdue(self, begin_ns: float, end_ns: float) -> None:
        while self._overdue and self._overdue[-1][1] >= begin_ns:
            before = self._overdue.pop()
            begin_ns, end_ns = min(begin_ns, before[0]), max(end_ns, before[1])
        self._overdue.append((begin_ns, end_ns))

    def overdue_within(self, begin_ns: float, end_ns: float) -> float:
        """For how long of that time it was overdue, ns."""
        found_ns = 0.0
        for begin, end in reversed(self._overdue):
            if end <= begin_ns:
                break
            found_ns += max(0.0, min(end, end_ns) - max(begin, begin_ns))
        return found_ns

    def samples(self, since_ns: int, until_ns: int | None = None) -> Part | None:
        """Those that began then, together; None where there are too few."""
        whole = total(
            part_of(reading)
            for reading in self.recent
            if reading.sample.began_ns >= since_ns
            and (until_ns is None or reading.sample.began_ns < until_ns)
        )
        return whole if whole.readings >= LEAST_READINGS else None

    def probe_ratio(self, since_ns: int, rails: list[PathWatch]) -> float | None:
        """Observed by predicted time of probes since then; None where nothing is known.

        rails: others, to go by where this one was never without traffic in health.
        """
        observed_ns = predicted_ns = 0.0
        for probe in self.probes:
            for rail in (self, *rails):
                takes_ns = rail.healthy.predict(probe)
                if probe.began_ns >= since_ns and takes_ns is not None:
                    observed_ns += probe.took_ns - probe.unseen_ns
                    predicted_ns += takes_ns
                    break
        return observed_ns / predicted_ns if predicted_ns else None

    def pinged_since(self, since_ns: int) -> float:
        """When the first ping since then was sent, of those that are kept."""
        return next((ping.sent_ns for ping in self._pings if ping.sent_ns >= since_ns), math.inf)

    def ping_ratio(self, since_ns: int) -> float | None:
        """Round trips since then by what they take, in the median; None where there are too few."""
        took = [float(ping.heard_ns - ping.sent_ns) for ping in self._pings if ping.sent_ns >= since_ns]
        if len(took) < LEAST_PINGS or self.healthy_ping.takes_ns is None:
            return None
        return median(took) / self.healthy_ping.takes_ns


def slow_too(
    suspect: PathWatch, suspicion: Suspicion, other: PathWatch, ratio: Callable[[Part], float]
) -> bool | None:
    """Whether another path is slow, too, as much as makes it no better; None where nothing is known of it.

    ratio: by what the suspect is compared, in the time from which something is known of the other path: that may be
    less than the suspicion's, and load or pauses that were over before are not in what is seen of the other, either.
    """
    since_ns = suspicion.raised_ns
    by_samples, by_pings = other.samples(since_ns), other.ping_ratio(since_ns)
    ours_by_pings = max(1.0, suspect.ping_ratio(since_ns) or 1.0)
    if by_samples is None and (by_pings is None or ours_by_pings <= SLOW_PINGS):
        return None  # pings do not tell how much a rail carries: only probes with a load do

    def excess(known_ns: float) -> float:
        return math.log(max(1.0, ratio(suspicion.latest(known_ns))))

    if by_samples is not None:
        # A probe is mostly latency, so it shows less; and it must be more than by chance that it shows none.
        most = by_samples.ratio / min(1.0, suspicion.before.get(other.path, 1.0)) + by_samples.chance * PROBED
        if math.log(most) >= excess(by_samples.began_ns) / 3:
            return True
    if by_pings is not None and by_pings > SLOW_PINGS:
        if math.log(by_pings) >= max(math.log(ours_by_pings) / 2, excess(other.pinged_since(since_ns)) / 4):
            return True
    # Where trains go and few have arrived, that pings are quick is no sign that it is better.
    return None if by_samples is None and other.probes else False


def attribute(
    suspect: PathWatch, rails: list[PathWatch], elsewhere: list[PathWatch], settings: Settings
) -> tuple[Attribution, list[PathWatch]]:
    """Whose fault it is, and the rails that are better.

    suspect: a path with a suspicion. rails: the other paths to that peer. elsewhere: those to other peers.
    """
    suspicion = suspect.suspicion
    assert suspicion is not None
    whole = suspicion.whole
    if whole.unclear * 2 > whole.readings:
        return Attribution.APPLICATION, []
    # Whether a rail is better is asked by what was not shared, or pauses of both would make any load on it look small.
    states = [(rail, slow_too(suspect, suspicion, rail, by_own)) for rail in rails]
    better = [rail for rail, slow in states if slow is False]
    if better and suspicion.lasts_alone(settings):
        return Attribution.PATH, better
    if all(slow is None for _, slow in states):
        return Attribution.UNKNOWN, []
    others = [slow_too(suspect, suspicion, path, by_all) for path in elsewhere]
    if False in others and True not in others:
        return Attribution.PEER, []
    return Attribution.BOTH_RAILS, []
