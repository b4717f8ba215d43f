# SPDX-License-Identifier: BSD-3-Clause
"""Work that gets through nowhere ends after a round over the pairs; work that only waits never does."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from typing import Any

import pytest
from simulator.checks import check, over
from simulator.clock import MS, US
from simulator.network import Network
from simulator.story import (
    armed,
    feed,
    follow_with_a_hole,
    hole,
    no_hole,
    pinged,
    plan,
    sends,
    telling,
    until,
    wait,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

SEEDS = 6


@contextlib.contextmanager
def network(seed: int, pairs: int, receives: int = 16, at_start: int | None = None) -> Iterator[Network]:
    """A protected one whose pings were answered on every path just now."""
    with telling(lambda: armed(seed, pairs, receives=receives, at_start=at_start)) as net:
        pinged(net)
        yield net


def post(
    net: Network, name: str, opcodes: list[str], signaled: Any = lambda n: True, gap_ns: int = 50 * US
) -> None:
    """One WR of each operation, one after the other."""
    app = net.app(name)
    before = len(app.posted) + len(app.plan)
    for n, opcode in enumerate(opcodes):
        plan(app, opcode, (before + n) % 8 if opcode != "SEND" else 0, signaled(n))
        net.clock.later(n * gap_ns, app.due)


def switches(net: Network) -> dict[str, int]:
    return {app.name: app.endpoint.protocol.counts.switches for app in net.apps}


def all_failed(net: Network) -> bool:
    return all(app.endpoint.status is Status.FAILED for app in net.apps)


def reasons(net: Network) -> list[str | None]:
    return [over(app) for app in net.apps]


def gets_through_nowhere(opcode: str, pairs: int, signaled: bool, retry_ns: int, most: int) -> None:
    for seed in range(SEEDS):
        for busy in (False, True):
            with network(seed, pairs) as net:
                a = net.app("a")
                for qp in a.endpoint.qps:
                    qp.RETRY_NS = retry_ns
                hole(net, "a", opcode, *range(pairs))
                post(net, "a", ["SEND" if opcode != "SEND" else "WRITE", opcode, opcode], lambda n: signaled)
                if busy:
                    post(net, "b", ["SEND"] * 400)
                begun = net.clock.now
                wait(net, 4000)
                assert all_failed(net), reasons(net)
                assert "every path" in (over(a) or "") and max(switches(net).values()) == most
                assert "RETRY_EXC_ERR" in sends(a) and sends(a)[-1] == "WR_FLUSH_ERR"
                assert a.ends is not None
                assert a.ends - begun >= a.endpoint.protocol.config.round_ns
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
        with network(seed, pairs) as net:
            for name in "ab":
                hole(net, name, "WRITE", *range(pairs))
                post(net, name, ["WRITE"] * 3, gap_ns=random.Random(seed).randrange(1, 20) * MS)
            wait(net, 4000)
            assert all_failed(net), reasons(net)
            assert max(switches(net).values()) <= 4 * pairs
            check(net)


@pytest.mark.parametrize("stuck", [0, 2])
def test_pings_are_dense_for_one_that_is_stuck_whoever_shares_its_path(stuck: int) -> None:
    """Another QP is away from home, and wants fewer."""
    with telling(lambda: armed(qps=2, at_start=4)) as net:
        for app in (net.apps[0], net.apps[2]):
            app.endpoint.prefer(1)
        connection = net.apps[stuck].endpoint.connection
        connection.watchdog.stuck_wr = connection.core.oldest_wr
        wait(net, 200)
        assert {path.ping.interval_ns for path in connection.paths} == {25 * MS}


def test_each_pair_loses_something_else() -> None:
    """The WRITE's failure shows that the READ before it is complete: the pair that loses READs never gets it."""
    for seed in range(SEEDS):
        with network(seed, 2) as net:
            hole(net, "a", "WRITE", 0)
            hole(net, "a", "READ", 1)
            post(net, "a", ["READ", "WRITE"], lambda n: n == 1, gap_ns=0)
            wait(net, 2000)
            assert sends(net.app("a")) == ["SUCCESS"] and not any(reasons(net))
            assert max(switches(net).values()) == 1
            check(net)


def test_each_side_loses_on_another_pair() -> None:
    """Neither ever fails on both: the failures on one pair decide."""
    for seed in range(SEEDS):
        with network(seed, 2) as net:
            for k, app in enumerate(net.apps):
                hole(net, app.name, "WRITE", k)
                post(net, app.name, ["SEND", "WRITE"])
                qp = app.endpoint.qp(1 - k)
                assert qp is not None
                qp.RETRIES = 60  # it has more patience than the other one's path has failures
            wait(net, 4000)
            assert all_failed(net) or all(app.wcs and sends(app)[-1] == "SUCCESS" for app in net.apps)
            assert max(switches(net).values()) <= 8
            check(net)


def test_one_rail_with_a_hole_costs_no_error() -> None:
    """However often: each WR gets through on the other rail, which is progress."""
    for seed in range(SEEDS):
        with network(seed, 2) as net:
            for n in range(10):
                hole(net, "a", "WRITE", n % 2)
                no_hole(net, "a", 1 - n % 2)
                post(net, "a", ["SEND", "WRITE"])
                wait(net, 300)
            assert sends(net.app("a")) == ["SUCCESS"] * 20
            check(net)


@pytest.mark.parametrize("event_ns", [10 * US])
def test_a_wr_that_waits_for_a_receive_survives_a_hundred_flaps(event_ns: int) -> None:
    """Both rails go down in turn while the receiver is slow: no fault of the WR's.

    Without events only pings speak for it: an outage may fall between two (protocol.md, "What stays unproven").
    """
    for seed in range(SEEDS):
        with network(seed, 2, receives=4, at_start=0) as net:
            rng = random.Random(seed)
            for qp in net.qps:
                qp.RETRY_NS = 15 * MS
            post(net, "a", ["WRITE", "SEND"])
            for n in range(100):
                name = rng.choice("ab")
                net.port(name, n % 2, False, event_ns)
                wait(net, rng.choice([1, 5, 30, 90]))
                net.port(name, n % 2, True, event_ns)
                wait(net, rng.choice([1, 5, 18, 30]))
                net.faults.append("port")
            assert not any(reasons(net)), reasons(net)
            b = net.app("b")
            with b.host:
                b.post_recv()
            wait(net, 3000)
            assert sends(net.app("a")) == ["SUCCESS", "SUCCESS"]
            check(net)


def the_third_pair_carries_it(net: Network) -> None:
    """Both others lose WRITEs."""
    before = switches(net)["a"]
    hole(net, "a", "WRITE", 0, 1)
    post(net, "a", ["WRITE", "SEND"])
    wait(net, 1000)
    assert sends(net.app("a")) == ["SUCCESS", "SUCCESS"]
    assert switches(net)["a"] == before + 2
    check(net)


def test_a_wr_that_failed_on_one_pair_is_carried_by_the_one_that_has_not() -> None:
    """Three pairs, two of which lose it: the third is tried before any is tried again."""
    for seed in range(SEEDS):
        with network(seed, 3) as net:
            the_third_pair_carries_it(net)


def test_pairs_that_have_not_failed_it_are_tried_before_those_that_have() -> None:
    """Also where the one that failed first is clean again: home was left soon after coming home, which waits now."""
    for seed in range(SEEDS):
        with network(seed, 3) as net:
            a = net.app("a")
            for k in (1, 0):
                a.endpoint.prefer(k)
                wait(net, 50)
                assert a.endpoint.protocol.send_pair == a.endpoint.protocol.recv_pair == k
            the_third_pair_carries_it(net)


def test_the_only_path_that_answers_loses_it() -> None:
    """The other one is silent: no round over the pairs can be had, and failures enough on this one decide."""
    for seed in range(SEEDS):
        with network(seed, 2) as net:
            hole(net, "a", "WRITE", 0)
            net.wall("a", 1, True)
            net.wall("b", 1, True)
            wait(net, 200)
            post(net, "a", ["SEND", "WRITE"])
            wait(net, 20_000)
            assert all_failed(net), reasons(net)
            assert sends(net.app("a")) == ["SUCCESS", "RETRY_EXC_ERR"] and max(switches(net).values()) <= 8
            check(net)


def test_refused_work_ends_the_pairing_where_it_was_journaled() -> None:
    """The backup refuses it after the SWITCH: what is ahead completes, then both sides have their errors."""
    for seed in range(SEEDS):
        with network(seed, 2) as net:
            a = net.app("a")
            net.wall("a", 0, True)
            post(net, "a", ["SEND", "SEND"], gap_ns=0)
            until(net, lambda: not a.endpoint.core.send_is_open)
            backup = a.endpoint.qp(1)
            assert backup is not None
            backup.shared.refuse_at[0], backup.shared.refuse_err[0] = 2, errno.EINVAL  # behind both SENDs
            post(net, "a", ["WRITE", "SEND"], gap_ns=0)
            wait(net, 500)
            assert sends(a) == ["SUCCESS", "SUCCESS", "LOC_QP_OP_ERR", "WR_FLUSH_ERR"]
            assert all_failed(net), reasons(net)
            assert max(switches(net).values()) == 1 and "refuses" in (over(a) or "")


def test_a_refusal_while_a_switch_is_under_way_waits_for_its_end() -> None:
    """The event is late: the SWITCH that began meanwhile hands the WR over once more."""
    with network(1, 2) as net:
        a = net.app("a")
        feed(a, ev.PathFailed(0, "RETRY_EXC_ERR"))
        assert a.endpoint.protocol.switching
        feed(a, ev.WorkRefused("late"))
        wait(net, 500)
        assert not any(reasons(net))


@pytest.mark.parametrize("pairs", [2, 3])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("opcode", ["WRITE", "SEND", "READ"])
def test_rails_that_lose_it_in_turn_cost_no_error(pairs: int, times: int, opcode: str) -> None:
    """One failure on each pair, one soon after the other, says nothing while a rail is well at every moment."""
    for seed in range(SEEDS):
        for busy in (False, True):
            with network(seed, pairs) as net:
                a = net.app("a")
                was = follow_with_a_hole(a, opcode, times * (pairs - 1))
                post(net, "a", [opcode, "SEND"])
                if busy:
                    post(net, "b", ["SEND"] * 400)
                wait(net, 2000)
                assert sends(a) == ["SUCCESS", "SUCCESS"], reasons(net)
                assert len(was) == 1 + times * (pairs - 1) and set(was) == set(range(pairs))
                check(net)


def waits_for_its_next_attempt(net: Network) -> None:
    """Run until a's work has failed on both pairs, and the SWITCH to the third attempt is over."""
    a = net.app("a")
    until(net, lambda: a.endpoint.protocol.counts.switches == 2 and not a.endpoint.protocol.switching, ms=500)
    assert not a.endpoint.core.send_is_open


def test_the_other_direction_goes_on_while_work_waits_for_its_next_attempt() -> None:
    """Its peer's messages pass on the pair on which nothing is handed over yet."""
    with network(1, 2) as net:
        a, b = net.apps
        follow_with_a_hole(a, "WRITE", 1)
        post(net, "a", ["WRITE"])
        waits_for_its_next_attempt(net)
        post(net, "b", ["SEND"] * 4)
        wait(net, 20)
        assert sends(b) == ["SUCCESS"] * 4 and sends(a) == []
        wait(net, 500)
        assert sends(a) == ["SUCCESS"]
        check(net)


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_waits_for_its_next_attempt_does_not_wait_for_a_peer_that_has_left(name: str) -> None:
    """The QP is let go of: what is left goes to the hardware, as with plain verbs."""
    with network(1, 2) as net:
        a = net.app("a")
        follow_with_a_hole(a, "WRITE", 1)
        post(net, "a", ["WRITE"])
        waits_for_its_next_attempt(net)
        net.app(name).close()
        wait(net, 100)
        assert sends(a) == ([] if name == "a" else ["RETRY_EXC_ERR"])
