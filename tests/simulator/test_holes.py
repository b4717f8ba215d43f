# SPDX-License-Identifier: BSD-3-Clause
"""Work that gets through nowhere ends in an error after one round over the pairs; work that only waits never does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from simulator.checks import check
from simulator.hosts import Network
from simulator.journal import Wr
from simulator.rnic import MS, US, Packet
from simulator.staged import follow_with_a_hole

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

SEEDS = 6


def network(seed: int, pairs: int, receives: int = 16) -> Network:
    net = Network(seed, pairs, receives=receives)
    net.clock.run(30 * MS)
    assert all(side.protocol.status is Status.PROTECTED for side in net.sides)
    return net


def post(
    net: Network, name: str, opcodes: list[str], signaled: Any = lambda n: True, gap_ns: int = 50 * US
) -> None:
    """One WR of each operation, one after the other."""
    side = net.side(name)
    before = len(side.app.posted) + len(side.app.plan)
    for n, opcode in enumerate(opcodes):
        data = -1 if opcode == "READ" else before + n + 1
        side.app.plan.append(Wr(name, before + n, opcode, n % 8, data, signaled(n), False, False))
        net.clock.later(n * gap_ns, side.app.due)


def hole(net: Network, name: str, opcode: str, *rails: int) -> None:
    """These rails lose that operation of one side's, and nothing else."""
    for k in rails:
        net.links[name, k].hole = lambda p: (
            isinstance(p, Packet) and p.ref is not None and (p.kind, p.opcode) == ("req", opcode)
        )


def switches(net: Network) -> dict[str, int]:
    return {side.name: side.protocol.counts.switches for side in net.sides}


def sends(net: Network, name: str) -> list[str]:
    return [status for queue, _, status in net.side(name).app.wcs if queue == "send"]


def gets_through_nowhere(opcode: str, pairs: int, signaled: bool, retry_ns: int, most: int) -> None:
    for seed in range(SEEDS):
        for busy in (False, True):
            net = network(seed, pairs)
            for qp in net.a.qps:
                qp.RETRY_NS = retry_ns
            hole(net, "a", opcode, *range(pairs))
            post(net, "a", ["SEND" if opcode != "SEND" else "WRITE", opcode, opcode], lambda n: signaled)
            if busy:
                post(net, "b", ["SEND"] * 400)
            begun = net.clock.now
            net.clock.run(net.clock.now + 4000 * MS)
            assert all(side.protocol.status is Status.FAILED for side in net.sides)
            assert "every path" in (net.a.over or "") and max(switches(net).values()) == most
            assert "RETRY_EXC_ERR" in sends(net, "a") and sends(net, "a")[-1] == "WR_FLUSH_ERR"
            assert net.ends["a"] - begun >= net.a.protocol.config.round_ns
            check(net)


@pytest.mark.parametrize("pairs", [2, 3])
@pytest.mark.parametrize("opcode", ["WRITE", "SEND", "WRITE_IMM", "READ"])
@pytest.mark.parametrize("signaled", [True, False])
def test_one_round_over_the_pairs_and_no_more(opcode: str, pairs: int, signaled: bool) -> None:
    """n pairs: n - 1 SWITCHes, and the last failure ends it on both sides, whatever the other direction does."""
    gets_through_nowhere(opcode, pairs, signaled, 250 * MS, pairs - 1)


@pytest.mark.parametrize("pairs", [2, 3])
@pytest.mark.parametrize("opcode", ["WRITE", "READ"])
@pytest.mark.parametrize("signaled", [True, False])
def test_a_round_that_is_over_too_soon_is_followed_by_another_and_no_more(
    opcode: str, pairs: int, signaled: bool
) -> None:
    """NICs that give up after a few ms: each pair has it twice, with pauses in between."""
    gets_through_nowhere(opcode, pairs, signaled, 4 * MS, 2 * pairs - 1)


@pytest.mark.parametrize("pairs", [2, 3])
def test_work_of_both_sides_that_gets_through_nowhere(pairs: int) -> None:
    """Each counts its own failures: whoever comes first takes the path away from the other."""
    for seed in range(4 * SEEDS):
        net = network(seed, pairs)
        for name in "ab":
            hole(net, name, "WRITE", *range(pairs))
            post(net, name, ["WRITE"] * 3, gap_ns=random.Random(seed).randrange(1, 20) * MS)
        net.clock.run(net.clock.now + 4000 * MS)
        assert all(side.protocol.status is Status.FAILED for side in net.sides)
        assert max(switches(net).values()) <= 4 * pairs
        check(net)


def test_each_pair_loses_something_else() -> None:
    """The WRITE's failure shows that the READ before it is complete: the pair that loses READs never gets it."""
    for seed in range(SEEDS):
        net = network(seed, 2)
        hole(net, "a", "WRITE", 0)
        hole(net, "a", "READ", 1)
        post(net, "a", ["READ", "WRITE"], lambda n: n == 1, gap_ns=0)
        net.clock.run(net.clock.now + 2000 * MS)
        assert sends(net, "a") == ["SUCCESS"] and not any(side.over for side in net.sides)
        assert max(switches(net).values()) == 1
        check(net)


def test_each_side_loses_on_another_pair() -> None:
    """Neither ever fails on both: the failures on one pair decide."""
    for seed in range(SEEDS):
        net = network(seed, 2)
        for k, name in enumerate("ab"):
            hole(net, name, "WRITE", k)
            post(net, name, ["SEND", "WRITE"])
            net.side(name).qps[
                1 - k
            ].RETRIES = 60  # it has more patience than the other one's path has failures
        net.clock.run(net.clock.now + 4000 * MS)
        assert all(side.protocol.status is Status.FAILED for side in net.sides) or all(
            side.app.wcs and sends(net, side.name)[-1] == "SUCCESS" for side in net.sides
        )
        assert max(switches(net).values()) <= 8
        check(net)


def test_one_rail_with_a_hole_costs_no_error() -> None:
    """However often: each WR gets through on the other rail, which is progress."""
    for seed in range(SEEDS):
        net = network(seed, 2)
        for n in range(10):
            hole(net, "a", "WRITE", n % 2)
            net.links["a", 1 - n % 2].hole = lambda p: False
            post(net, "a", ["SEND", "WRITE"])
            net.clock.run(net.clock.now + 300 * MS)
        assert sends(net, "a") == ["SUCCESS"] * 20
        check(net)


@pytest.mark.parametrize("event_ns", [None, 10 * US])
def test_a_wr_that_waits_for_a_receive_survives_a_hundred_flaps(event_ns: int | None) -> None:
    """Both rails go down in turn, with an event and without, while the receiver is slow: no fault of the WR's."""
    for seed in range(SEEDS):
        net = network(seed, 2, receives=0)
        net.b.journal.recv_capacity = 4
        rng = random.Random(seed)
        post(net, "a", ["WRITE", "SEND"])
        for n in range(100):
            name = rng.choice("ab")
            net.port(name, n % 2, False, event_ns)
            net.clock.run(net.clock.now + rng.choice([1, 5, 18, 30]) * MS)
            net.port(name, n % 2, True, event_ns)
            net.clock.run(net.clock.now + rng.choice([1, 5, 18, 30]) * MS)
            net.faults.append("port")
        assert not any(side.over for side in net.sides), [side.over for side in net.sides]
        net.b.app.post_recv()
        net.clock.run(net.clock.now + 3000 * MS)
        assert sends(net, "a") == ["SUCCESS", "SUCCESS"]
        check(net)


def the_third_pair_carries_it(net: Network) -> None:
    """Both others lose WRITEs."""
    hole(net, "a", "WRITE", 0, 1)
    post(net, "a", ["WRITE", "SEND"])
    net.clock.run(net.clock.now + 1000 * MS)
    assert sends(net, "a") == ["SUCCESS", "SUCCESS"]
    assert net.a.protocol.counts.switches == 2
    check(net)


def test_a_wr_that_failed_on_one_pair_is_carried_by_the_one_that_has_not() -> None:
    """Three pairs, two of which lose it: the third is tried before any is tried again."""
    for seed in range(SEEDS):
        net = network(seed, 3)
        the_third_pair_carries_it(net)


def test_pairs_that_have_not_failed_it_are_tried_before_those_that_have() -> None:
    """Also where the one that failed first is clean again: home was left soon after coming home, which waits now."""
    for seed in range(SEEDS):
        net = network(seed, 3)
        for k in (1, 0):
            net.a.feed(ev.PreferPair(k))
            net.clock.run(net.clock.now + 50 * MS)
            assert net.a.protocol.send_pair == net.a.protocol.recv_pair == k
        the_third_pair_carries_it(net)


def test_the_only_path_that_answers_loses_it() -> None:
    """The other one is silent: no round over the pairs can be had, and failures enough on this one decide."""
    for seed in range(SEEDS):
        net = network(seed, 2)
        hole(net, "a", "WRITE", 0)
        net.wall("a", 1, True)
        net.wall("b", 1, True)
        net.clock.run(net.clock.now + 200 * MS)
        post(net, "a", ["SEND", "WRITE"])
        net.clock.run(net.clock.now + 20_000 * MS)
        assert all(side.protocol.status is Status.FAILED for side in net.sides)
        assert sends(net, "a") == ["SUCCESS", "RETRY_EXC_ERR"] and max(switches(net).values()) <= 8
        check(net)


def test_refused_work_ends_the_pairing_where_it_was_journaled() -> None:
    """The backup refuses it after the SWITCH: what is ahead completes, then both sides have their errors."""
    for seed in range(SEEDS):
        net = network(seed, 2)
        refuse = net.a.qps[1].post_send
        net.a.qps[1].post_send = lambda wqe: (  # type: ignore[method-assign]
            22 if wqe.ref is not None and wqe.ref.opcode == "WRITE" else refuse(wqe)
        )
        net.wall("a", 0, True)
        post(net, "a", ["SEND", "SEND"], gap_ns=0)
        while net.a.journal.send_open:
            net.clock.run(net.clock.now + 10 * US)
        post(net, "a", ["WRITE", "SEND"], gap_ns=0)
        net.clock.run(net.clock.now + 500 * MS)
        assert sends(net, "a") == ["SUCCESS", "SUCCESS", "RETRY_EXC_ERR", "WR_FLUSH_ERR"]
        assert all(side.protocol.status is Status.FAILED for side in net.sides)
        assert max(switches(net).values()) == 1 and "refused" in (net.a.over or "")


def test_a_refusal_while_a_switch_is_under_way_waits_for_its_end() -> None:
    """The event is late: the SWITCH that began meanwhile hands the WR over once more."""
    net = network(1, 2)
    net.a.feed(ev.PathFailed(0, "RETRY_EXC_ERR"))
    assert net.a.protocol.switching
    net.a.feed(ev.WorkRefused("late"))
    net.clock.run(net.clock.now + 500 * MS)
    assert not any(side.over for side in net.sides)


@pytest.mark.parametrize("pairs", [2, 3])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("opcode", ["WRITE", "SEND", "READ"])
def test_rails_that_lose_it_in_turn_cost_no_error(pairs: int, times: int, opcode: str) -> None:
    """One failure on each pair, one soon after the other, says nothing while a rail is well at every moment."""
    for seed in range(SEEDS):
        for busy in (False, True):
            net = network(seed, pairs)
            was = follow_with_a_hole(net, opcode, times * (pairs - 1))
            post(net, "a", [opcode, "SEND"])
            if busy:
                post(net, "b", ["SEND"] * 400)
            net.clock.run(net.clock.now + 2000 * MS)
            assert sends(net, "a") == ["SUCCESS", "SUCCESS"], [side.over for side in net.sides]
            assert len(was) == 1 + times * (pairs - 1) and set(was) == set(range(pairs))
            check(net)


def waits_for_its_next_attempt(net: Network) -> None:
    """Run until a's work has failed on both pairs, and the SWITCH to the third attempt is over."""
    done = lambda: net.a.protocol.counts.switches == 2 and not net.a.protocol.switching  # noqa: E731
    assert net.clock.run(net.clock.now + 500 * MS, done) and not net.a.journal.send_open


def test_the_other_direction_goes_on_while_work_waits_for_its_next_attempt() -> None:
    """Its peer's messages pass on the pair on which nothing is handed over yet."""
    net = network(1, 2)
    follow_with_a_hole(net, "WRITE", 1)
    post(net, "a", ["WRITE"])
    waits_for_its_next_attempt(net)
    post(net, "b", ["SEND"] * 4)
    net.clock.run(net.clock.now + 20 * MS)
    assert sends(net, "b") == ["SUCCESS"] * 4 and sends(net, "a") == []
    net.clock.run(net.clock.now + 500 * MS)
    assert sends(net, "a") == ["SUCCESS"]
    check(net)


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_waits_for_its_next_attempt_does_not_wait_for_a_peer_that_has_left(name: str) -> None:
    """The QP is let go of: what is left goes to the hardware, as with plain verbs."""
    net = network(1, 2)
    follow_with_a_hole(net, "WRITE", 1)
    post(net, "a", ["WRITE"])
    waits_for_its_next_attempt(net)
    net.side(name).close()
    net.clock.run(net.clock.now + 100 * MS)
    assert sends(net, "a") == ([] if name == "a" else ["RETRY_EXC_ERR"])
