# SPDX-License-Identifier: BSD-3-Clause
"""Whole stories in virtual time: benchmarks/stragglers is the world, and knows what is true."""

from __future__ import annotations

import pytest

from benchmarks.stragglers.application import Driver, Phase, Record, false_alarms, verdict_ns
from benchmarks.stragglers.rails import Fault, Load, Pause, World
from benchmarks.stragglers.stories import FAULT_END_NS, FAULT_NS, LOADS, faulty, run_hour, run_now_and_then
from shiftverbs.stragglers.detector import Stragglers
from shiftverbs.stragglers.records import (
    MS,
    SECOND,
    Attribution,
    Mode,
    Move,
    Observe,
    Path,
    Ping,
    Probe,
    Recovered,
    Return,
    Sample,
    Settings,
)

USES = {use.name: use for use in LOADS}
MIB = 1 << 20


def observed(record: Record) -> set[Attribution]:
    return {action.evidence.attribution for _, action in record.actions if isinstance(action, Observe)}


def run(world: World, mode: Mode = Mode.MIGRATE, poll_ns: int = 0, peers: int = 2) -> Record:
    """Three minutes of 1 MiB messages to each peer."""
    end_ns = 180 * SECOND
    phases = {f"peer{i}": [Phase(end_ns, MIB, 8, 5 * MS, poll_ns)] for i in range(peers)}
    return Driver(world, phases, [("all", end_ns)], "detector", Settings(mode=mode)).run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "load", "within_s", "least_share"),
    [
        ("+ 1 ms", "64 KiB", 5, 0.9),
        ("+ 5 ms", "mixed", 10, 0.85),
        ("+ 20 ms", "64 B", 5, 0.9),
        ("half the rate", "1 MiB", 5, 0.9),
        ("a tenth of it", "1 MiB", 5, 0.9),
        ("another's incast, 4", "1 MiB", 5, 0.9),
        ("loses 1 %", "1 MiB", 20, 0.85),
    ],
)
def test_a_slow_path_is_left_and_come_back_to(
    name: str, load: str, within_s: int, least_share: float, seed: int
) -> None:
    print(f"seed {seed}")
    record, world = faulty(name, USES[load], seed, "detector")
    oracle, _ = faulty(name, USES[load], seed, "oracle")
    stay, _ = faulty(name, USES[load], seed, "stay")
    took_ns = verdict_ns(record, FAULT_NS)
    assert took_ns is not None and took_ns < within_s * SECOND
    assert not false_alarms(record, world)
    assert record.moves and len(record.moves) % 2 == 0, "it is at home in the end"
    assert record.moves[-1] < FAULT_END_NS + 120 * SECOND
    assert record.rate("during") > least_share * oracle.rate("during")
    assert record.rate("during") > stay.rate("during")


def test_load_that_both_rails_see_moves_nothing() -> None:
    world = World(3, [], loads=[Load(0, 1.0, 0), Load(60 * SECOND, 0.5, 0)])
    record = run(world)
    assert observed(record) == {Attribution.BOTH_RAILS}
    assert not record.moves


@pytest.mark.parametrize(
    ("size", "before", "after", "for_s"),
    [
        (16 << 10, (0.5, 200_000), (0.5, 0), 1.8),
        (MIB, (0.25, 0), (0.7, 0), 3),
        (MIB, (0.25, 0), (0.7, 0), 10),
        (16 * MIB, (0.25, 0), (0.7, 0), 1.8),
    ],
)
def test_load_that_eases_moves_nothing(
    size: int, before: tuple[float, int], after: tuple[float, int], for_s: float
) -> None:
    """Of the other rail the last seconds are known, of this one all of the suspicion: what was worse is no fault."""
    eased_ns = round((60 + for_s) * SECOND)
    world = World(1, [], loads=[Load(0, 1.0, 0), Load(60 * SECOND, *before), Load(eased_ns, *after)])
    end_ns = eased_ns + 30 * SECOND
    phases = {"peer0": [Phase(end_ns, size, 4 if size == MIB else 1, 20 * MS)]}
    record = Driver(world, phases, [("all", end_ns)], "detector", Settings(mode=Mode.MIGRATE)).run()
    assert observed(record) == {Attribution.BOTH_RAILS}
    assert not record.moves


def test_a_slow_peer_moves_nothing() -> None:
    peers = frozenset(["peer1"])
    faults = [Fault(rail, 60 * SECOND, 180 * SECOND, 2 * MS, rate=0.4, peers=peers) for rail in range(2)]
    record = run(World(4, faults))
    assert observed(record) == {Attribution.PEER}
    assert not record.moves


def test_who_polls_late_is_told_so() -> None:
    """Home gains 2 ms, and nobody looks for 20: it cannot be known, and moving would not help."""
    record = run(World(5, [Fault(0, 60 * SECOND, 180 * SECOND, 2 * MS)]), poll_ns=20 * MS)
    assert not record.moves
    assert Attribution.PATH not in observed(record)


@pytest.mark.parametrize("host", [None, "peer0"])
@pytest.mark.parametrize("apart_ms", [100, 1000])
def test_pauses_of_a_host_move_nothing(host: str | None, apart_ms: int) -> None:
    pauses = [
        Pause(at, at + (10 + at // MS * 7 % 391) * MS, host)
        for at in range(60 * SECOND, 170 * SECOND, (410 + apart_ms) * MS)
    ]
    record = run(World(6, [], pauses))
    assert Attribution.PATH not in observed(record)
    assert not record.moves


def test_where_it_only_observes_it_moves_nothing_and_off_says_nothing() -> None:
    world = World(7, [Fault(0, 60 * SECOND, 180 * SECOND, rate=0.2)])
    record = run(world, Mode.OBSERVE, peers=1)
    assert observed(record) == {Attribution.PATH}
    assert not record.moves
    assert run(world, Mode.OFF, peers=1).actions == []


@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm(seed: int) -> None:
    """Five minutes each; `python -m benchmarks.stragglers` has hours."""
    print(f"seed {seed}")
    record, world = run_hour(seed, 300 * SECOND)
    assert record.samples > 5000
    assert false_alarms(record, world) == []


@pytest.mark.parametrize(("slow_s", "well_s"), [(5, 5), (20, 20), (60, 60)])
def test_it_does_not_go_to_and_fro(slow_s: int, well_s: int) -> None:
    """A minute has at most four moves, and half an hour as many as a doubling hold allows."""
    record = run_now_and_then(1, slow_s * SECOND, well_s * SECOND, 1800 * SECOND)
    assert record.moves, "it is slow, after all"
    for at in record.moves:
        assert sum(at <= other < at + 60 * SECOND for other in record.moves) <= 4
    assert len(record.moves) <= 24


def steady(stragglers: Stragglers, begin_ns: int, count: int, took_ns: int, rail: int = 0) -> list[object]:
    """Samples of 1 MiB one behind the other, pings and probes of both rails beside them."""
    found: list[object] = []
    now = begin_ns
    for i in range(count):
        jitter = 1 + (i * 7 % 11 - 5) / 100
        ended = now + round(took_ns * jitter)
        for other in range(2):
            stragglers.handle_ping(Ping(Path("peer", other), now, now + round(20_000 * jitter)))
        train = Sample(Path("peer", 1 - rail), 65536, 16, now, now + round(40_000 * jitter), probe=True)
        found += stragglers.handle_sample(train)
        found += stragglers.handle_sample(
            Sample(Path("peer", rail), MIB, 1, now, ended, busy_ns=max(ended - now, 50 * MS))
        )
        now += 50 * MS
    return found


def test_trains_suspect_nobody_and_keep_nothing_from_being_learned() -> None:
    """On a busy machine trains of the idle rail become slow for a while: what goes on is learned all the same."""
    stragglers = Stragglers(Settings(mode=Mode.MIGRATE))
    stragglers.add_peer("peer", 0)
    idle, busy = Path("peer", 1), Path("peer", 0)
    for i in range(120):
        now = i * 50 * MS
        took = 40_000 if i < 40 else 200_000
        assert stragglers.handle_sample(Sample(idle, 65536, 64, now, now + took, probe=True)) == []
    assert stragglers.watch(idle).suspicion is None
    for i in range(120, 160):
        now = i * 50 * MS
        stragglers.handle_sample(Sample(busy, MIB, 1, now, now + 300_000))
    assert stragglers.watch(busy).healthy.predict(Sample(busy, MIB, 1, 0, 300_000)) == pytest.approx(300_000)


def test_a_move_that_does_not_help_is_undone() -> None:
    stragglers = Stragglers(Settings(mode=Mode.MIGRATE))
    stragglers.add_peer("peer", 0)
    assert steady(stragglers, 0, 200, 300_000) == []
    found = steady(stragglers, 10 * SECOND, 100, 600_000)
    assert [action.target for action in found if isinstance(action, Move)] == [1]
    stragglers.handle_moved("peer", 1, 16 * SECOND, 5 * MS)
    found = steady(stragglers, 17 * SECOND, 100, 900_000, rail=1)
    assert [action.reason for action in found if isinstance(action, Return)] == [
        "no better here than at home"
    ]
    stragglers.handle_moved("peer", 0, 23 * SECOND, 5 * MS)
    assert stragglers.next_timeout_ns is None


@pytest.mark.parametrize("ping_ns", [20_000, 40_000], ids=["quick", "slower"])
@pytest.mark.parametrize("trains", [0, 4], ids=["none", "few"])
def test_nothing_is_moved_to_where_trains_do_not_arrive(trains: int, ping_ns: int) -> None:
    """Both rails have lost their rate, so much that trains take too long or are lost, and few are sent."""
    stragglers = Stragglers(Settings(mode=Mode.MIGRATE))
    stragglers.add_peer("peer", 0)
    assert steady(stragglers, 0, 200, 300_000) == []
    actions: list[object] = []
    for i in range(200):
        now = 10 * SECOND + i * 50 * MS
        # Behind what is sent there a ping takes long; less on the rail without traffic.
        stragglers.handle_ping(Ping(Path("peer", 0), now, now + 400_000))
        stragglers.handle_ping(Ping(Path("peer", 1), now, now + ping_ns))
        if i and trains and i % (200 // trains) == 0:
            train = Sample(Path("peer", 1), 65536, 16, now - 200 * MS, now, probe=True)
            actions += stragglers.handle_sample(train)
        work = Sample(Path("peer", 0), MIB, 1, now, now + 9 * MS, busy_ns=50 * MS)
        actions += stragglers.handle_sample(work)
    told = {action.evidence.attribution for action in actions if isinstance(action, Observe)}
    assert told and Attribution.PATH not in told
    assert not [action for action in actions if isinstance(action, Move)]


def test_nothing_is_moved_to_where_nothing_is_known() -> None:
    stragglers = Stragglers(Settings(mode=Mode.MIGRATE))
    stragglers.add_peer("peer", 0)
    actions: list[object] = []
    for i in range(400):
        took = 300_000 if i < 200 else 900_000
        now = i * 50 * MS
        actions += stragglers.handle_sample(Sample(Path("peer", 0), MIB, 1, now, now + took))
    assert [a.evidence.attribution for a in actions if isinstance(a, Observe)] == [Attribution.UNKNOWN]
    assert not [a for a in actions if isinstance(a, Move)]


def test_a_machine_that_gets_busy_before_all_is_known_is_learned_anew() -> None:
    """What one rail takes was known, and not yet what the other does: that is not to be so for good."""
    stragglers = Stragglers(Settings(mode=Mode.MIGRATE))
    stragglers.add_peer("peer", 0)
    actions: list[object] = []
    for i in range(100):
        now = i * 50 * MS
        if i >= 92:
            stragglers.handle_ping(Ping(Path("peer", 1), now, now + 20_000))
        stragglers.handle_sample(Sample(Path("peer", 0), MIB, 1, now, now + 300_000, busy_ns=50 * MS))
    assert stragglers.watch(Path("peer", 1)).healthy_ping.takes_ns is None
    for i in range(400):
        now = 5 * SECOND + i * 50 * MS
        stragglers.handle_ping(Ping(Path("peer", 1), now, now + 30_000))
        work = Sample(Path("peer", 0), MIB, 1, now, now + 450_000, busy_ns=50 * MS)
        actions += stragglers.handle_sample(work)
    (told,) = [action.evidence.attribution for action in actions if isinstance(action, Observe)]
    assert told is Attribution.UNKNOWN
    assert [type(action) for action in actions if not isinstance(action, Probe)] == [Observe, Recovered]
    assert stragglers.watch(Path("peer", 1)).healthy_ping.takes_ns is not None
    assert steady(stragglers, 30 * SECOND, 200, 450_000) == []
    found = steady(stragglers, 45 * SECOND, 100, 1_400_000)
    assert [action.target for action in found if isinstance(action, Move)] == [1]


def test_peers_are_added_once_and_known() -> None:
    stragglers = Stragglers(Settings())
    stragglers.add_peer("a", 0)
    with pytest.raises(ValueError, match="a is known already"):
        stragglers.add_peer("a", 1)
    stragglers.forget_peer("a")
    with pytest.raises(ValueError, match=r"a is not known: add_peer\(\) first"):
        stragglers.handle_ping(Ping(Path("a", 0), 1, 2))
    assert stragglers.poll(0) == [] and stragglers.next_timeout_ns is None
