# SPDX-License-Identifier: BSD-3-Clause
"""Random schedules in virtual time: the code that ships, judged by checkers that share none with it.

`make simulate SCHEDULES=100000` runs as many more as wanted.
"""

from __future__ import annotations

import collections
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import checks
from simulator.checks import Violation, over
from simulator.clock import MS, US
from simulator.network import Network
from simulator.schedule import KINDS, WIDE, Schedule

from shiftverbs.protocol import events as ev

CHUNKS, CHUNK = 12, 100
WIDE_CHUNKS = 8
#: A run ends as its last checker leaves it.
HERE = Path(__file__).parent


#: Seeds that once failed: what each found.
FOUND_SOMETHING = {
    1134: "an error of the application's own, then a SWITCH that could not be: RETRY_EXC_ERR behind it, not a flush",
    90013: "two wishes that crossed, and home dead: a checker that waited for directions which nothing brings together",
    96067: "two walls, the second gone first one way: a checker that had ACKs come where only answers could",
    96579: "an own error that a SWITCH's fence found, and successes behind it that the peer's count proved",
    59884: "an own error shown while plain, then the NIC's death: a SWITCH that nobody opens the gates behind",
    109309: "receives posted to a QP that its NIC did not bring to ERR were never flushed",
    116509: "the same, where the command was refused",
    304366: "posts that an exception refused: a program that took its READs for complete gave their memory away",
    10097358: "RESET amid errors that waited for protection: flushes behind those that it had taken",
    30001226: "the simulator's own: a WRITE that a READ lands over became a message that did not know so",
    30027352: "a right withdrawn while a SWITCH was asked about: the default QP served the peer on",
    30077050: "the same of READs, and the question dropped for another",
    **dict.fromkeys(
        (36000397, 36009623, 36025463, 36025559),
        "what was posted behind the end was withheld, as if the backups were not stopped",
    ),
    37018638: "what RESET had taken from a backup was told to be complete, where the default NIC refused it",
    37022793: "the judge's own: a slow registration takes more steps than a run was allowed",
    33604253: "the judge's own: two NICs had died, and a SWITCH began when it took the run to be over",
    **dict.fromkeys(
        (33086809, 33241084, 33336334, 33573784, 33690809),
        "flushes were shown while a backup that was in use before answered a READ that was late or doubled",
    ),
    47322743: "ERR amid a MOVE that waited for its fence: what was posted behind that was never flushed",
    48468513: "what was proven behind an own error was flushed while a message could still come",
    61898244: "the simulator's own: a further life that was refused, and was not left where a NIC had died since",
    62073808: "the judge's own: what waited for room behind a queue that died with a plain QP's NIC",
    30034213: "the simulator's own: its memory was still being registered where its backup had broken",
    **dict.fromkeys(
        (47043, 57709, 95284, 57232, 67702), "the simulator's own: WRs not posted, wishes that crossed"
    ),
}


@pytest.mark.parametrize("seed", FOUND_SOMETHING)
def test_seeds_that_found_something_stay_clean(seed: int) -> None:
    Schedule(seed).run()


#: Seeds that once took one of two courses, by the addresses of CQs and connections.
TWO_COURSES = 61383309, 61399504


@pytest.mark.parametrize("seed", TWO_COURSES)
def test_a_seed_is_one_course(seed: int) -> None:
    """Wherever its objects lie: former runs keep their memory."""
    former = [Schedule(seed).run() for _ in range(12)]
    assert len({(net.clock.now, net.clock.steps) for net in former}) == 1


@pytest.mark.parametrize(
    "first", [n * CHUNK for n in range(CHUNKS)] + [WIDE + n * CHUNK for n in range(WIDE_CHUNKS)]
)
def test_schedules_run_clean(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            Schedule(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_most_schedules_end_well() -> None:
    """A campaign in which everything gives up would prove little."""
    runs = [Schedule(seed).run() for seed in range(5000, 5200)]
    well = [net for net in runs if all(over(app) is None and not app.failed for app in net.apps)]

    def did(what: str) -> int:
        return sum(any(type(action).__name__ == what for _, _, action in net.trace) for net in well)

    assert len(well) > 110
    assert did("Trim") > 40 and did("MoveReceives") > 60
    assert sum(len(app.posted) for net in runs for app in net.apps) > 200 * 30


def test_wide_schedules_have_what_they_are_for() -> None:
    """And it is done: executed, answered, seen; another life is protected, and moves."""
    did: collections.Counter[str] = collections.Counter()
    for seed in range(WIDE + 5000, WIDE + 5300):
        schedule = Schedule(seed)
        net = schedule.run()
        done = {wr.opcode for _, _, _, _, wr, _ in net.executions}
        swapped = any(
            wr.opcode == "CAS" and value == wr.compare for app in net.apps for wr, value in app.reads
        )
        later = [app for app in net.apps if app.number >= schedule.qps]
        did.update(done & {"CAS", "FADD", "SEND_IMM"})
        did["swapped"] += swapped
        did["two CQs, polled apart"] += any(app.apart and app.wcs for app in net.apps)
        did["in SQD"] += any(app.stopped for app in net.apps)
        did["reset"] += any(app.was_reset for app in net.apps)
        did["RESET refused"] += schedule.verbs_take_time and any(app.refused_reset for app in net.apps)
        did["another life"] += bool(later)
        did["all of it executed"] += any(app.complete == schedule.count for app in later)
        protected = {name for _, name, action in net.trace if isinstance(action, ev.SetStatus)}
        did["protected"] += any(app.name in protected for app in later)
        did["moved"] += any(app.name == name for _, name, _ in net.whereabouts for app in later)
        did["nothing may be seen"] += net.one_rail_is_well
        did.update({"lost", "late_cqes"} & {*net.faults})
    few = {what: count for what, count in did.items() if count < 3}
    assert len(did) == 15 and not few, did


def digest(seed: int) -> str:
    """All that can be told of a run."""
    schedule = Schedule(seed)
    net = schedule.run()
    executions = [(t, host, qp.number, life, str(wr), slot) for t, host, qp, life, wr, slot in net.executions]
    wcs = [
        (app.name, [(queue, str(what), status) for queue, what, status in app.wcs], app.cells)
        for app in net.apps
    ]
    return hashlib.sha256(repr((net.trace, executions, wcs, net.clock.steps)).encode()).hexdigest()


@pytest.mark.parametrize("seed", [3, 46, 89, 131])
def test_a_seed_replays_bit_for_bit(seed: int) -> None:
    """In another process too, where objects lie elsewhere and hashes are others."""
    program = f"import sys; sys.path[:0] = {[str(HERE.parent), str(HERE.parents[1])]!r}\n"
    program += f"from simulator.test_schedules import digest; print(digest({seed}))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert digest(seed) == digest(seed) == child.stdout.strip()


# ---- the same with hypothesis: a failure comes back as a short story -------------------------------------------------

FAULTS = st.tuples(
    st.integers(1, 40 * MS),
    st.sampled_from(sorted(set(KINDS))),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.sampled_from([50 * US, 1 * MS, 5 * MS, 20 * MS, 60 * MS, 200 * MS]),
)


@settings(max_examples=80, deadline=None)
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
    schedule.answers, schedule.bad = False, None
    schedule.faults = [(when, what, name, min(k, pairs - 1), lasts) for when, what, name, k, lasts in faults]
    schedule.run()


# ---- the checkers alone ----------------------------------------------------------------------------------------------


def test_a_clean_run_made_dirty_is_noticed() -> None:
    """Facts changed by hand after a clean run: each rule speaks up for itself."""

    def broken(change: Callable[[Network], object], rule: str) -> None:
        schedule = Schedule(6)
        net = schedule.build()
        try:
            schedule.play(net)
            change(net)
            with pytest.raises(Violation) as caught:
                checks.check(net)
            assert caught.value.rule == rule
        finally:
            net.end()

    def first(net: Network, opcode: str) -> tuple[object, ...]:
        return next(e for e in net.executions if e[4].opcode == opcode)

    broken(lambda net: net.app("a").received.pop(0), "once and in order")
    broken(lambda net: net.executions.remove(first(net, "SEND")), "once and in order")  # type: ignore[arg-type]
    broken(lambda net: net.executions.append(first(net, "SEND")), "once and in order")  # type: ignore[arg-type]
    wcs = lambda net: net.app("b").wcs  # noqa: E731
    broken(lambda net: wcs(net).remove(next(w for w in wcs(net) if w[0] == "send")), "one completion each")
    broken(lambda net: wcs(net).append(next(w for w in wcs(net) if w[0] == "send")), "one completion each")
    broken(lambda net: net.executions.remove(first(net, "WRITE")), "succeeded and lost")  # type: ignore[arg-type]

    def leaves(net: Network) -> None:
        net.one_rail_is_well = net.app("a").left = True

    broken(leaves, "a rail that is well is found")
    broken(lambda net: net.memories["a"].words.__setitem__(0, 12345), "memory")
    broken(lambda net: net.fences.__setitem__(net.executions[-1][2:4], 0), "executed behind the fence")
    broken(lambda net: net.strays.append((0, "a", "staged")), "no DMA where none may be")
