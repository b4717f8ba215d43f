# SPDX-License-Identifier: BSD-3-Clause
"""Stories of how it is seen that a path fails, and that it is back. As staged.py."""

from __future__ import annotations

from simulator.application import Application
from simulator.checks import over
from simulator.clock import MS
from simulator.network import Network
from simulator.story import (
    Story,
    armed,
    at_home,
    end,
    ends,
    hole,
    no_hole,
    on,
    path_failed,
    post,
    sends,
    until,
    wait,
    went,
)

from shiftverbs.native.ibv import EventType
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.path_health import MOST_AWAITED


def a_port_fails_and_its_nic_says_nothing() -> Network:
    """a's NIC answers no question while its port is down. What was seen of that before says nothing of now."""
    net = armed()
    a, _ = ends(net)
    nic, events = a.endpoint.connection.nic(0), a.host.runtime.driver.nic_events
    net.nics["a"][0].failing = True
    net.port("a", 0, False, 2 * MS)
    until(net, lambda: on(a, 1), ms=100)
    wait(net, 1000)
    assert not events.port_ok(nic, 1), "it counts as up, and nobody has seen it so"
    net.port("a", 0, True, None)  # and nobody tells
    net.nics["a"][0].failing = False
    until(net, lambda: at_home(net), ms=5000)
    post(a, "SEND")
    return end(net)


def _gets_through_nowhere(known: bool) -> Network:
    """A WRITE, on rails where an answer takes so long that several pings are on their way at any time.

    That says nothing against a rail: the WRITE's failures there count, one on each. known: it is so already.
    """
    net = armed()
    a, _ = ends(net)
    for link in net.links.values():
        link.delay_ns = 45 * MS
    for qp in net.qps:
        qp.RETRY_NS = 250 * MS
    hole(net, "a", "WRITE", 0, 1)
    wait(net, 1000 if known else 0)
    post(a, "SEND")
    post(a, "WRITE")
    until(net, lambda: over(a) is not None)
    assert "every path" in (over(a) or "") and len(went(net, ev.SwitchStarted, a)) == 1
    wait(net, 1000)
    assert sends(a) == ["SUCCESS", "RETRY_EXC_ERR"]
    return net


def a_wr_gets_through_nowhere_and_answers_begin_to_take_long() -> Network:
    """None of the answers that come is one to the newest ping."""
    return _gets_through_nowhere(known=False)


def a_wr_gets_through_nowhere_and_answers_take_long() -> Network:
    """Pings are no less dense for that: there is a fresh answer whenever it fails."""
    return _gets_through_nowhere(known=True)


def rails_blink_where_answers_take_long() -> Network:
    """A SEND waits for its receive, and fails whenever a rail is silent for as long as its NIC tries.

    Each time that is just after an answer. Pings are no less dense for taking long: one of them is missing in time.
    """
    net = armed(receives=4, at_start=0)
    a, b = ends(net)
    for link in net.links.values():
        link.delay_ns = 32 * MS
    for qp in net.qps:
        qp.RETRY_NS = 100 * MS
    wait(net, 1000)
    post(a, "SEND")
    for _ in range(12):
        k = a.endpoint.core.send_pair
        ping = a.endpoint.connection.paths[k].ping
        until(net, lambda ping=ping: net.clock.now - (ping._answered_ns or 0) < MS)
        for name in "ab":
            net.wall(name, k, True)
        wait(net, 145)
        for name in "ab":
            net.wall(name, k, False)
        wait(net, 400)
    with b.host:
        b.post_recv()
    wait(net, 3000)
    assert sends(a) == ["SUCCESS"]
    return end(net)


def rails_are_silent_until_their_first_answer() -> Network:
    """Pings are lost from the beginning on, while the peer knows of us: ARM was through.

    A SEND waits for its receive, and fails on each rail in turn, just behind the first answer there ever was.
    """
    net = Network(1, 3, 32, 4, at_start=0)
    a, b = ends(net)

    def silent(k: int, on: bool = True) -> None:
        for name in "ab":
            net.wall(name, k, on)

    def fails_on(k: int, after_ms: int) -> None:
        """It does, so long after rail k was given it. The rail is well for the last 60 ms, all retries behind it."""
        started = len(went(net, ev.SwitchStarted, a))
        wait(net, after_ms - 60)
        silent(k, False)
        until(net, lambda: len(went(net, ev.SwitchStarted, a)) > started or over(a) is not None, ms=100)

    silent(0)
    until(net, net.protected, ms=100)
    silent(1)
    silent(2)
    for qp in net.qps:
        qp.RETRY_NS = 90 * MS
    post(a, "SEND")
    fails_on(0, 360)
    for qp in net.qps:
        qp.RETRY_NS = 65 * MS
    for k in (1, 2):
        silent(k - 1)
        silent(k, False)
        until(net, lambda k=k: on(a, k) and not a.endpoint.protocol.switching)
        wait(net, 0.05)
        silent(k)
        fails_on(k, 260)
    with b.host:
        b.post_recv()
    wait(net, 3000)
    assert sends(a) == ["SUCCESS"]
    for k in (0, 1):
        silent(k, False)
    return end(net)


def a_rail_is_silent_since_its_address_changed() -> Network:
    """The peer knows us all the while: what it lost there says why a SEND failed. Nothing was answered before."""
    net = armed(receives=4, at_start=0)
    a, b = ends(net)
    for qp in net.qps:
        qp.RETRY_NS = 90 * MS
    connection, nic = a.endpoint.connection, net.nics["b"][0]
    path = connection.paths[0]
    nic.gid = nic.gid[:-1] + b"\x63"
    nic.event(EventType.GID_CHANGE, 1)
    until(net, lambda: connection.paths[0] is not path)
    for name in "ab":
        net.wall(name, 0, True)
    post(a, "SEND")
    wait(net, 300)
    for name in "ab":
        net.wall(name, 0, False)
    until(net, lambda: went(net, ev.SwitchStarted, a) != [], ms=200)
    assert connection.paths[0].ping.alive is False and not connection.protocol.switch.hopeless.failed_on
    with b.host:
        b.post_recv()
    until(net, lambda: at_home(net))
    assert sends(a) == ["SUCCESS"]
    return end(net)


def a_peer_spoke_long_ago() -> Network:
    """Its rail is silent since, and pings are seldom: what it said says nothing of now, when it is asked again."""
    net = armed()
    a, _ = ends(net)
    path = a.endpoint.connection.paths[0]
    wait(net, 2000)
    a.endpoint.prefer(1)
    until(net, lambda: on(a, 1))
    a.endpoint.prefer(0)
    until(net, lambda: at_home(net))
    until(net, lambda: path.heard_ns is not None)
    for name in "ab":
        net.wall(name, 0, True)
    number = path.asked
    until(net, lambda: path.asked != number)
    assert path.ping.alive and not path.ping.answers(net.clock.now)
    for name in "ab":
        net.wall(name, 0, False)
    return end(net)


def _a_send_is_stuck() -> Network:
    """Rail 0 loses a's SEND, its NIC is patient, and pings are as dense as for a WR that has failed."""
    net = armed()
    a, _ = ends(net)
    for qp in net.qps:
        qp.RETRY_NS = 10_000 * MS
    hole(net, "a", "SEND", 0)
    post(a, "SEND")
    connection = a.endpoint.connection
    connection.watchdog.stuck_wr = connection.core.oldest_wr
    return net


def answers_take_longer_than_pings_are_known() -> Network:
    """Of each that is answered it is forgotten when it was sent. All the same it is known that answers take long."""
    net = _a_send_is_stuck()
    a, _ = ends(net)
    connection = a.endpoint.connection
    for link in net.links.values():
        link.delay_ns = 1000 * MS
    wait(net, 6000)
    ping = connection.paths[0].ping
    assert len(ping._awaited) == MOST_AWAITED and ping.answers(net.clock.now)
    for link in net.links.values():
        link.delay_ns = MS // 100
    no_hole(net, "a", 0)
    wait(net, 10_000)
    assert sends(a) == ["SUCCESS"]
    return end(net)


def a_peer_pauses_again_and_again() -> Network:
    """For most of the time b's process stands still, and answers all at once in between: it is slow, not dead."""
    net = _a_send_is_stuck()
    a, _ = ends(net)
    connection = a.endpoint.connection
    link, ping = net.links["b", 0], connection.paths[0].ping
    for ms in range(4000):
        link.delay_ns = max(MS // 100, (400 - ms % 500) * MS)
        wait(net, 1)
        assert ms < 500 or ping.alive is not False, f"dead after {ms} ms"
    no_hole(net, "a", 0)
    wait(net, 10_000)
    assert sends(a) == ["SUCCESS"]
    return end(net)


def a_nic_does_not_say_what_its_ports_are() -> Network:
    """a's NIC was asked for its GIDs, and has not answered, when its path fails: no fence waits for that."""
    net = armed()
    a, _ = ends(net)
    post(a, "SEND")
    wait(net, 1)
    net.nics["a"][0].mute = True
    net.nics["a"][0].event(EventType.GID_CHANGE, 1)
    wait(net, 1)
    path_failed(a, 0)
    until(net, lambda: all(on(app, 1) for app in net.apps), ms=20)
    post(a, "SEND")
    wait(net, 2000)
    assert sends(a) == ["SUCCESS", "SUCCESS"]
    net.nics["a"][0].unhang()
    until(net, lambda: at_home(net))
    return end(net)


def _apart_ms(net: Network, app: Application, k: int, ms: float = 500) -> float:
    """How much time two pings of pair k have between them at most, in so long."""
    path = app.endpoint.connection.paths[k]
    ends, most = net.clock.now + ms * MS, 0
    while net.clock.now < ends:
        number, before = path.asked, net.clock.now
        until(net, lambda number=number: path.asked != number)
        most = max(most, net.clock.now - before)
    return most / MS


def a_wr_is_stuck_among_very_many_qps() -> Network:
    """More than are looked at at once: pings are dense all the time, not in some of the looks."""
    net = armed(qps=66, capacity=8, receives=2, at_start=1)
    a, _ = ends(net)
    for qp in a.endpoint.qps:
        qp.RETRY_NS = 400 * MS
    hole(net, "a", "SEND", 0, 1)
    post(a, "SEND")
    watchdog = a.endpoint.connection.watchdog
    until(net, lambda: watchdog.stuck_wr is not None)
    wait(net, 50)
    apart_ms = [_apart_ms(net, a, k, 150) for k in (0, 1)]
    assert watchdog.stuck_wr is not None and max(apart_ms) <= 26, apart_ms
    no_hole(net, "a", 0, 1)
    wait(net, 3000)
    assert sends(a) == ["SUCCESS"]
    return end(net)


def a_wr_that_failed_completes_away_from_home() -> Network:
    """Pings are as dense as they are for any QP that is away."""
    net = armed()
    a, _ = ends(net)
    for name in "ab":
        net.wall(name, 0, True)
    post(a, "SEND")
    until(net, lambda: on(a, 1) and sends(a) == ["SUCCESS"])
    wait(net, 200)
    assert _apart_ms(net, a, 1) >= 50
    for name in "ab":
        net.wall(name, 0, False)
    until(net, lambda: at_home(net))
    return end(net)


def nics_are_too_slow_for_the_first_arm() -> Network:
    """Every command takes so long that ARM is never through in the time that the first one has."""
    net = Network(1, 2, 32, 16)
    for name in "ab":
        net.nics[name][1].command_ns = 110 * MS
    wait(net, 20_000)
    assert net.protected()
    assert any(app.endpoint.connection.protocol.counts.arm_failures for app in ends(net))
    return end(net)


def control_threads_are_slow() -> Network:
    """Each side is in time for ARM now and then, and keeps to that: else they were in turn, and never both."""
    net = Network(1, 2, 32, 16)
    for app in net.apps:
        app.host.lag_ns = 71 * MS
    wait(net, 15_000)
    assert all(app.endpoint.connection.protocol.all_fit for app in net.apps)
    for app in net.apps:
        app.host.lag_ns = 0
    return end(net)


def a_responder_is_out_of_time_before_its_initiator() -> Network:
    """It says so at once: the initiator does not wait out its own time, which is longer."""
    net = Network(1, 2, 32, 16)
    a, b = ends(net)
    net.nics["a"][1].command_ns = 800 * MS
    wait(net, 50)
    mine, theirs = (app.endpoint.connection.protocol for app in (a, b))
    assert mine.initiator
    until(net, lambda: theirs.counts.arm_failures == 1, ms=20_000)
    assert mine.busy
    wait(net, 1)
    assert not mine.busy and not mine.all_fit
    net.nics["a"][1].command_ns = MS
    until(net, net.protected)
    return end(net)


STAGED: dict[Story, tuple[str, ...]] = {
    a_wr_gets_through_nowhere_and_answers_begin_to_take_long: (
        "measure_the_newest_answer_alone",
        "take_a_slow_answer_for_a_missing_one",
    ),
    a_wr_gets_through_nowhere_and_answers_take_long: ("ping_as_seldom_as_answers_come",),
}

SURVIVED: dict[Story, tuple[str, ...]] = {
    nics_are_too_slow_for_the_first_arm: ("give_each_arm_the_same_time",),
    control_threads_are_slow: ("give_an_arm_the_time_of_its_back_off",),
    a_responder_is_out_of_time_before_its_initiator: ("leave_the_initiator_to_its_own_time",),
    a_peer_pauses_again_and_again: ("forget_a_pause_in_what_comes_behind_it",),
    answers_take_longer_than_pings_are_known: ("learn_nothing_from_very_late_answers",),
    rails_are_silent_until_their_first_answer: ("let_first_answers_hide_what_was_lost_before",),
    a_rail_is_silent_since_its_address_changed: ("let_paths_made_anew_hide_what_was_lost_there",),
    a_peer_spoke_long_ago: ("take_what_was_said_before_for_news",),
    a_wr_is_stuck_among_very_many_qps: ("forget_between_two_looks_who_is_stuck",),
    a_wr_that_failed_completes_away_from_home: ("take_what_completed_away_for_stuck",),
    a_nic_does_not_say_what_its_ports_are: ("look_at_ports_among_the_commands",),
    rails_blink_where_answers_take_long: ("ping_as_seldom_as_answers_come",),
    a_port_fails_and_its_nic_says_nothing: ("believe_a_look_that_failed",),
}
