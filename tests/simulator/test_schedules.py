# SPDX-License-Identifier: BSD-3-Clause
"""Random schedules in virtual time: the real protocol, judged by checkers that share no code with it.

`python tests/simulator/campaign.py FIRST LAST` runs as many more as wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import checks
from simulator.checks import Violation
from simulator.hosts import Network
from simulator.mutations import MUTATIONS
from simulator.rnic import MS, US
from simulator.schedule import KINDS, Schedule
from simulator.staged import ENDED, LEFT, STAGED, SURVIVED

CHUNKS, CHUNK = 12, 125
WITHIN = 2500  # schedules in which each mutation must be found
#: The first seeds that found the slower ones: tried first, to save time.
FIRST_FOUND = {
    "ignore_epochs": 2216,
    "reuse_stale_receives": 491,
    "fence_an_unsafe_qp_on_a_port_event": 315,
    "lose_the_withheld_queue": 206,
    "hide_a_lost_message": 122,
    "arm_resets_twice": 112,
    "replay_atomics": 92,
    "try_for_ever": 7,
    "end_without_a_drain": 5748,
    "trust_a_pair_that_was_handed_nothing": 213566,
}

#: Seeds that once failed. What each found is told in CHANGELOG.md or in the commit that names it.
FOUND_SOMETHING = {
    55: "a MOVE back to a pair whose stale receives were still in its queue: messages lost",
    115: "an error before protection began, then a SWITCH that revived the QP: false counters",
    97: "a QP became PROTECTED although its application had seen an error",
    955: "proven WRs succeeded behind the error of a READ before them",
    1036: "the checker's own: a message executed by a NIC that died before its completion",
    24006: "the checker's own: a side not protected yet cannot be told that its peer's NIC died",
    38499: "the preferred NIC dead, each direction stayed on a backup of its own, and none was left to fall back to",
    39994: "the simulator's own: a process answers for QPs that are gone",
    44650: "after an ABORT the default QP, just rebuilt, took work before it was in ERR: a gap, then success",
    110649: "the peer had closed; a replayed READ failed, and what was proven behind it succeeded all the same",
    135746: "the same, with unsignaled WRs: they owe a flush",
    25194: "the model's own: the RESET of the default QP failed, and what it flushed after the end was taken for stale",
}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_schedules_run_clean(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("seed", FOUND_SOMETHING)
def test_seeds_that_found_something_stay_clean(seed: int) -> None:
    Schedule(seed, tight=False).run()


def test_most_schedules_end_well() -> None:
    """A campaign in which everything gives up would prove little."""
    runs = [Schedule(seed).run() for seed in range(5000, 5200)]
    well = [net for net in runs if all(side.over is None for side in net.sides)]
    switched = [net for net in well if any(type(action).__name__ == "Trim" for _, _, action in net.trace)]
    moved = [
        net for net in well if any(type(action).__name__ == "MoveReceives" for _, _, action in net.trace)
    ]
    assert len(well) > 150
    assert len(switched) > 50
    assert len(moved) > 50
    assert sum(len(net.a.app.posted) + len(net.b.app.posted) for net in runs) > 200 * 40


def digest(seed: int) -> str:
    net = Schedule(seed).run()
    facts = repr(
        (net.trace, net.executions, [(side.app.wcs, side.memory) for side in net.sides], net.clock.steps)
    )
    return hashlib.sha256(facts.encode()).hexdigest()


@pytest.mark.parametrize("seed", [3, 46, 89])
def test_a_seed_replays_bit_for_bit(seed: int) -> None:
    assert digest(seed) == digest(seed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(name: str) -> None:
    """A checker that finds nothing proves nothing: each of these bugs must be seen soon."""
    what, patch = MUTATIONS[name]
    staged = [story for story, names in {**STAGED, **ENDED, **LEFT, **SURVIVED}.items() if name in names]
    for story in staged:
        with patch():
            net = story()
        with pytest.raises(Violation) as caught:
            checks.check(net)
        print(f"{name} ({what}) found by {story.__name__}: {caught.value}")
    for seed in () if staged else (FIRST_FOUND.get(name, 0), *range(WITHIN)):
        with patch():
            try:
                Schedule(seed).run()
            except Exception as error:
                print(f"{name} ({what}) found by seed {seed}: {type(error).__name__} {str(error)[:200]}")
                return
    if staged:
        return
    raise AssertionError(f"{name} was not found in {WITHIN} schedules: {what}")


@pytest.mark.parametrize("story", STAGED)
def test_a_replay_that_would_be_seen_is_an_abort(story: Callable[[], Network]) -> None:
    net = story()
    checks.check(net)
    for side in net.sides:
        assert side.over is not None, "both sides give up"


@pytest.mark.parametrize("story", ENDED)
def test_an_end_is_told_as_it_is(story: Callable[[], Network]) -> None:
    net = story()
    checks.check(net)
    for side in net.sides:
        assert side.over is not None and (side.app.failed or side.app.closed)


@pytest.mark.parametrize("story", LEFT)
def test_a_peer_that_leaves_fails_nobody(story: Callable[[], Network]) -> None:
    net = story()
    checks.check(net)
    assert net.a.over is not None and not net.a.app.failed
    assert net.a.journal.send_open and net.a.journal.send_pair == 1, "where its receives are"


@pytest.mark.parametrize("story", SURVIVED)
def test_a_story_that_nobody_notices(story: Callable[[], Network]) -> None:
    net = story()
    checks.check(net)
    for side in net.sides:
        assert side.over is None and not side.app.failed


def test_there_are_enough_mutations() -> None:
    assert len(MUTATIONS) >= 15


# ---- the same with hypothesis: a failure comes back as a short story -------------------------------------------------

FAULTS = st.tuples(
    st.integers(1, 40 * MS),
    st.sampled_from(sorted(set(KINDS))),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.sampled_from([50 * US, 1 * MS, 5 * MS, 20 * MS, 60 * MS, 200 * MS]),
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.lists(FAULTS, max_size=6),
    pairs=st.sampled_from([2, 3]),
    count=st.integers(1, 40),
    opcodes=st.lists(st.sampled_from(["SEND", "WRITE", "WRITE_IMM", "READ", "FADD"]), min_size=1, max_size=3),
    signaled=st.sampled_from([0.0, 0.3, 1.0]),
    receives=st.sampled_from([1, 4, 16]),
    start_ns=st.sampled_from([0, 30 * MS]),
)
def test_any_story_holds(
    seed: int,
    faults: list[tuple[int, str, str, int, int]],
    pairs: int,
    count: int,
    opcodes: list[str],
    signaled: float,
    receives: int,
    start_ns: int,
) -> None:
    schedule = Schedule(seed)
    schedule.pairs, schedule.count, schedule.opcodes = pairs, count, opcodes
    schedule.signaled, schedule.receives, schedule.start_ns = signaled, receives, start_ns
    schedule.faults = [(when, what, name, min(k, pairs - 1), lasts) for when, what, name, k, lasts in faults]
    schedule.run()


# ---- the checkers alone ----------------------------------------------------------------------------------------------


def test_a_clean_run_made_dirty_is_noticed() -> None:
    """Facts changed by hand after a clean run: each rule speaks up for itself."""

    def broken(change: object, rule: str) -> None:
        schedule = Schedule(5, tight=False)
        net = schedule.run()
        change(net)  # type: ignore[operator]
        with pytest.raises(Violation) as caught:
            checks.check(net)
        assert caught.value.rule == rule

    broken(lambda net: net.a.app.received.pop(0), "once and in order")
    broken(
        lambda net: net.executions.remove(next(e for e in net.executions if e[4].opcode == "SEND")),
        "once and in order",
    )
    broken(
        lambda net: net.executions.append(next(e for e in net.executions if e[4].opcode == "SEND")),
        "once and in order",
    )
    broken(
        lambda net: net.b.app.wcs.remove(next(w for w in net.b.app.wcs if w[0] == "send")),
        "one completion each",
    )
    broken(
        lambda net: net.b.app.wcs.append(next(w for w in net.b.app.wcs if w[0] == "send")),
        "one completion each",
    )
    broken(lambda net: net.a.memory.__setitem__(0, 12345), "memory")
    broken(
        lambda net: net.fences.__setitem__(net.executions[-1][1:4], 0),
        "executed behind the fence",
    )
