# SPDX-License-Identifier: BSD-3-Clause
"""Traffic both ways under each kind of fault: everything arrives once and in order, and comes home.

And stories in which something went wrong once, between two sides; those of one side alone are in tests/protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from simulator import checks
from simulator.application import Application
from simulator.checks import over
from simulator.clock import MS, US
from simulator.network import Network
from simulator.rest import quiet, state
from simulator.rnic import RTS
from simulator.story import (
    armed,
    at_home,
    drop_next,
    feed,
    on,
    path_failed,
    plan,
    post,
    telling,
    until,
    wait,
    went,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.state_machine import SendState

SEEDS = 12
Fault = Callable[[Network], None]


@contextlib.contextmanager
def ready(pairs: int = 2, seed: int = 1) -> Iterator[tuple[Network, Application, Application]]:
    """A network in which every backup is armed, and both its programs."""
    with telling(lambda: armed(seed, pairs)) as net:
        until(net, lambda: is_home(net), ms=50)
        yield net, net.app("a"), net.app("b")


def traffic(net: Network, n: int = 400, gap_ns: int = 100 * US) -> None:
    """Both sides post n messages, gap_ns apart; some ask for no completion."""
    for app in net.apps:
        for i in range(n):
            plan(app, "SEND", signaled=i % 4 != 1)
            net.clock.later(i * gap_ns + net.clock.rng.randrange(gap_ns), app.due)


def is_home(net: Network) -> bool:
    """Whether all traffic is at home, nothing is under way, and every backup is fit."""
    return at_home(net) and all(app.endpoint.protocol.all_fit for app in net.apps)


def come_home(net: Network, n: int, within_ms: float = 30_000) -> None:
    """Let time pass until everything is delivered, and home, and judge."""
    clock = net.clock
    clock.run(clock.now + 60 * MS)

    def done() -> bool:
        return all(len(app.received) == n and quiet(app) for app in net.apps) and is_home(net)

    home = clock.run(clock.now + int(within_ms * MS), done)
    checks.check(net)
    assert home, "\n".join([*map(str, net.trace[-40:]), *map(state, net.apps)])
    for app in net.apps:
        assert over(app) is None and app.endpoint.status is Status.PROTECTED
        assert [value for _, value in app.received] == list(range(1, n + 1))


def later(net: Network, ms: float, call: Callable[..., object], *args: object) -> None:
    """Have call(*args) done in so many milliseconds."""
    net.clock.later(int(ms * MS), call, *args)


# ---- each kind of fault ----------------------------------------------------------------------------------------------


def port_blinks(net: Network, name: str, first_ms: float, last_ms: float) -> None:
    """The port of a default NIC goes down and up again, and its host hears of it."""
    net.faults.append("port")
    later(net, first_ms, net.port, name, 0, False, 10 * US)
    later(net, last_ms, net.port, name, 0, True, 10 * US)


def rail_is_cut(net: Network, k: int, first_ms: float, last_ms: float) -> None:
    """A switch carries nothing, and nobody says so."""
    net.faults.append("both_walls")
    for name in "ab":
        later(net, first_ms, net.wall, name, k, True)
        later(net, last_ms, net.wall, name, k, False)


def initiator_port(net: Network) -> None:
    (name,) = (app.name for app in net.apps if app.endpoint.protocol.initiator)
    port_blinks(net, name, 5, 30)


def switch(net: Network) -> None:
    rail_is_cut(net, 0, 5, 60)


def ack_lost(net: Network) -> None:
    net.faults.append("drop_answer")
    later(net, 5, drop_next, net, "b", 0, "ack")
    port_blinks(net, "b", 5.09, 40)


def flaps(net: Network) -> None:
    for i in range(5):
        port_blinks(net, "ab"[i % 2], 5 + 40 * i, 25 + 40 * i)


def then_the_backup(net: Network) -> None:
    initiator_port(net)
    rail_is_cut(net, 1, 12, 35)


def slow_nic(net: Network) -> None:
    net.faults.append("slow")
    net.nics["b"][1].command_ns = 7 * MS
    initiator_port(net)


def hung_nic(net: Network) -> None:
    net.faults.append("hung")
    nic = net.nics["b"][1]
    later(net, 4, setattr, nic, "hung", True)
    initiator_port(net)
    later(net, 300, nic.unhang)


@pytest.mark.parametrize(
    "lossy", [(0.0, 0.0, 2), (0.2, 0.2, 2), (0.1, 0.2, 3)], ids=["clean", "lossy", "three"]
)
@pytest.mark.parametrize(
    "fault",
    [initiator_port, switch, ack_lost, flaps, then_the_backup, slow_nic, hung_nic],
    ids=lambda f: f.__name__,
)
def test_traffic_survives_and_comes_home(fault: Fault, lossy: tuple[float, float, int]) -> None:
    """lossy: how many datagrams are lost, how many packets of any kind are doubled and overtaken; pairs."""
    loss, duplicate, pairs = lossy
    for seed in range(SEEDS):
        print("seed", seed)
        with telling(lambda: Network(seed, pairs)) as net:
            for link in net.links.values():
                link.datagram_loss, link.duplicate = loss, duplicate
                link.jitter_ns = 200 * US if loss else 20 * US
            until(net, net.protected)
            traffic(net)
            fault(net)
            come_home(net, 400)
            assert any(action.pair for action in went(net, ev.OpenSend)), "nobody left home"


# ---- orders, and ends ------------------------------------------------------------------------------------------------


def test_migrate_and_restore_move_both_directions_and_replay_nothing() -> None:
    with ready() as (net, a, b):
        traffic(net, 300)
        later(net, 5, a.endpoint.prefer, 1)

        def away(app: Application) -> bool:
            return on(app, 1) and app.endpoint.protocol.send_state is SendState.FALLBACK

        until(net, lambda: away(a) and away(b), ms=200)
        assert away(a) and away(b)
        later(net, 5, b.endpoint.prefer, 0)
        come_home(net, 300)
        assert not went(net, ev.Trim) and not went(net, ev.Fence)


def test_where_wishes_cross_both_sides_follow_the_same_one() -> None:
    """Each side asks before it hears of the other: the greater pair holds, and who has heard of it can undo it."""
    with ready() as (net, a, b):
        traffic(net, 300)
        later(net, 5, a.endpoint.prefer, 0)
        later(net, 5, b.endpoint.prefer, 1)

        def both_away() -> bool:
            return all(on(app, 1) and app.endpoint.protocol.preferred == 1 for app in net.apps)

        until(net, both_away, ms=200)
        assert both_away()
        later(net, 5, a.endpoint.prefer, 0)
        come_home(net, 300)
        assert not went(net, ev.Trim) and not went(net, ev.Fence)


def test_a_dead_nic_is_left_and_never_used_again() -> None:
    with ready(3) as (net, a, b):
        traffic(net, 200)
        later(net, 5, net.kill, "b", 0)
        net.faults.append("kill")
        wait(net, 3000)
        checks.check(net)
        for app in net.apps:
            assert len(app.received) == 200 and on(app, 1) and not app.failed
        assert a.endpoint.protocol.send_state is SendState.FALLBACK
        away_ns = max(t for t, _, what in net.trace if isinstance(what, ev.OpenSend) and what.pair == 1)
        assert not [e for e in net.executions if e[2].nic.k == 0 and e[0] > away_ns]
        assert not any(action.pair == 0 for action in went(net, ev.ResetPair))


def test_with_every_pair_gone_both_sides_get_their_errors() -> None:
    with ready() as (net, a, b):
        traffic(net, 200)
        net.faults.append("both_walls")
        for link in net.links:
            later(net, 5, net.wall, *link, True)
        wait(net, 20_000)
        checks.check(net)
        for app in net.apps:
            assert app.failed and app.endpoint.status is Status.FAILED
            assert app.endpoint.protocol.send_state is SendState.DEFAULT


def test_closing_tells_the_peer() -> None:
    with ready() as (net, a, b):
        a.close()
        wait(net, 50)
        checks.check(net)
        assert over(b) == "the peer closed its QP"
        assert b.endpoint.status is Status.UNPROTECTED and not b.failed


def test_closing_in_the_middle_of_a_switch_ends_it_with_errors_at_once() -> None:
    with ready() as (net, a, b):
        post(a, "SEND")
        post(b, "SEND")
        net.kill("b", 0)
        net.faults.append("kill")
        later(net, 0.1, a.close)
        wait(net, 100)
        checks.check(net)
        assert over(b) is not None
        assert b.failed or b.endpoint.status is Status.UNPROTECTED


# ---- named regressions -----------------------------------------------------------------------------------------------


def test_late_news_of_an_old_life_does_not_end_a_switch() -> None:
    """QP_FATAL of the QP that is being fenced counted as the failure of the next attempt: ABORT for nothing."""
    with ready() as (net, a, b):
        for pair in (0, 1, 0, 1, 0):
            feed(a, ev.PathFailed(pair, "QP_FATAL"))
        traffic(net, 20)
        come_home(net, 20)


def test_a_switch_before_our_own_arm_was_through_protects() -> None:
    """The side whose ARM was cut short stayed PAIRING, so its next path error went to the application."""
    with telling(lambda: Network(3)) as net:
        a, b = net.apps
        protected = lambda app: app.endpoint.status is Status.PROTECTED  # noqa: E731
        until(net, lambda: protected(a) or protected(b), ms=50)
        first, other = (a, b) if protected(a) else (b, a)
        assert protected(first) and not protected(other)
        path_failed(first, 0, "RETRY_EXC_ERR")
        until(net, lambda: protected(other), ms=20)
        assert protected(other)
        assert len(went(net, ev.SetStatus, other)) == 1
        come_home(net, 0)


def test_a_nic_that_never_carries_out_a_command_does_not_hold_up_the_switch() -> None:
    """The peer went on talking, so the deadline of the attempt moved on for ten seconds."""
    with ready(3) as (net, a, b):
        net.nics["a"][1].hung = True
        net.faults.append("hung")
        for app in net.apps:  # the target must be reset, and that hangs
            feed(app, ev.PathFailed(1, "QP_FATAL"))
            feed(app, ev.PathHealth(2, False))
        path_failed(a, 0, "RETRY_EXC_ERR")
        gone = lambda: all(on(app, 2) for app in net.apps)  # noqa: E731
        until(net, gone, ms=2500)
        assert gone(), [state(app) for app in net.apps]
        assert went(net, ev.SwitchStarted, a)[0].target == 1
        net.nics["a"][1].unhang()
        for app in net.apps:
            feed(app, ev.PathHealth(2, True))
        traffic(net, 20)
        come_home(net, 20)


@pytest.mark.parametrize("name", "ab")
def test_both_sides_hear_that_a_backup_is_not_fit(name: str) -> None:
    """An idle pair broke on one side only: the other, the initiator, thought it fit for ever."""
    with ready() as (net, a, b):
        app = net.app(name)
        before = [each.endpoint.protocol.pairs[1].arm for each in net.apps]
        net.qp_fatal(name, 1)
        feed(app, ev.PathFailed(1, "QP_FATAL"))
        again = lambda: all(  # noqa: E731
            each.endpoint.protocol.pairs[1].arm > arm for each, arm in zip(net.apps, before, strict=True)
        )
        until(net, lambda: is_home(net) and again(), ms=2000)
        assert is_home(net) and again(), [state(each) for each in net.apps]
        assert all(each.endpoint.qp(1).state == RTS for each in net.apps)
        checks.check(net)


@pytest.mark.parametrize("seed", range(20))
def test_migrate_and_restore_in_quick_succession_lose_nothing(seed: int) -> None:
    with ready(seed=seed) as (net, a, b):
        traffic(net, 200, gap_ns=20 * US)
        rng = net.clock.rng
        for i in range(12):
            later(net, rng.random() * 4, rng.choice((a, b)).endpoint.prefer, i % 2)
        later(net, 5, a.endpoint.prefer, 0)
        come_home(net, 200)
