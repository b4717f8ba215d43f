# SPDX-License-Identifier: BSD-3-Clause
"""Time in which another rail was overdue, too, is taken off: pauses that neither medians nor probes show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.stragglers.records import MS, SECOND, Attribution, Path, Ping, Sample, Settings
from shiftverbs.stragglers.verdict import PathWatch, attribute

BUSY, IDLE = Path("peer", 0), Path("peer", 1)
EACH_NS = 50 * MS
TAKES_NS = 300_000


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_shared_is_no_evidence(shared: bool) -> None:
    """Every third sample takes 20 ms longer; in the same moments the other rail's ping does, or does not."""
    settings = Settings()
    busy, idle = PathWatch(BUSY, settings), PathWatch(IDLE, settings)
    for i in range(400):
        now, stalls = i * EACH_NS, i >= 200 and i % 3 == 0
        jitter = 1 + (i * 7 % 11 - 5) / 100
        late_ns = 20 * MS if stalls else 0
        took_ns = round(TAKES_NS * jitter) + late_ns
        trusted = busy.suspicion is None
        for before_ns in (20 * MS, 10 * MS):  # pings that were answered in time
            idle.handle_ping(Ping(IDLE, now - before_ns, now - before_ns + 20_000), trusted)
        idle.handle_ping(Ping(IDLE, now, now + 20_000 + late_ns * shared), trusted)
        busy.handle_sample(Sample(BUSY, 1 << 20, 1, now, now + took_ns), trusted)
        busy.settle(now + took_ns, [idle])
    assert busy.suspicion is not None
    assert 9 * SECOND < busy.suspicion.since_ns < 11 * SECOND
    assert busy.suspicion.lasts(settings)
    assert busy.suspicion.lasts_alone(settings) is not shared


@pytest.mark.parametrize("stalls", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_pauses_do_not_make_another_rail_better(loaded: bool, stalls: bool) -> None:
    """Home takes 1.7 times as long, and stalls now and then, which pings of both rails show, but no probe does.

    Where the other rail's probes take 1.5 times as long, it is load that both see, whether hosts pause or not.
    """
    settings = Settings()
    busy, idle = PathWatch(BUSY, settings), PathWatch(IDLE, settings)
    for i in range(320):
        now, slow = i * EACH_NS, i >= 200
        jitter = 1 + (i * 7 % 11 - 5) / 100
        late_ns = 20 * MS if stalls and slow and i % 3 == 0 else 0
        took_ns = round(TAKES_NS * jitter * (1.7 if slow else 1.0)) + late_ns
        trusted = busy.suspicion is None
        for watch in (busy, idle):
            watch.handle_ping(Ping(watch.path, now - 10 * MS, now - 10 * MS + 20_000), trusted)
            watch.handle_ping(Ping(watch.path, now, now + 20_000 + late_ns), trusted)
        probed_ns = round(40_000 * jitter * (1.5 if slow and loaded else 1.0))
        idle.handle_sample(
            Sample(IDLE, 1 << 16, 16, now - 5 * MS, now - 5 * MS + probed_ns, probe=True), trusted
        )
        busy.handle_sample(Sample(BUSY, 1 << 20, 1, now, now + took_ns), trusted)
        busy.settle(now + took_ns, [idle])
    assert busy.suspicion is not None
    assert busy.suspicion.lasts_alone(settings)
    attribution, better = attribute(busy, [idle], [], settings)
    assert attribution is (Attribution.BOTH_RAILS if loaded else Attribution.PATH)
    assert better == ([] if loaded else [idle])


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=30), st.integers(0, 500))
def test_overdue_time_is_counted_once(pings: list[tuple[int, int]], begin_ns: int) -> None:
    """Against a count of single moments; pings are told in the order of their answers."""
    idle = PathWatch(IDLE, Settings(probe_ns=1))
    for i in range(63):
        idle.handle_ping(Ping(IDLE, -1000 + i * 10, -999 + i * 10), True)
    overdue: set[int] = set()
    for sent, took in sorted(pings, key=lambda ping: ping[0] + ping[1]):
        idle.handle_ping(Ping(IDLE, sent, sent + took), False)
        if took > 2:
            overdue |= set(range(sent, sent + took))
    found_ns = idle.overdue_within(begin_ns, begin_ns + 100)
    sure = len(overdue & set(range(begin_ns, begin_ns + 100)))
    # It may have begun up to two probes before the ping was sent, if none was answered since.
    assert sure <= found_ns <= min(100, sure + 2 * len(pings))
