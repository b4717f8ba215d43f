# SPDX-License-Identifier: BSD-3-Clause
"""Stories of doubt without a death: who stops in its middle, who is slow, who was suspected before. As staged.py."""

from __future__ import annotations

from simulator.clock import MS
from simulator.network import Network
from simulator.slow_rails import LEARNING_MS, Stream
from simulator.staged_silence import dead, never_switched, patient, traffic
from simulator.story import Story, at_home, end, ends, on, post, sends, until, wait


def a_peer_stops_in_mid_doubt() -> Network:
    """It has answered a ping on one path and not yet on the other; then it goes on, and is heard there first."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 1 * MS
    wait(net, 3000)
    post(a, "SEND")
    other = a.endpoint.connection.paths[1].ping
    asked = other._number
    until(net, lambda: other._number > asked and other._answered == other._number, ms=40)
    net.b.frozen_until_ns = net.clock.now + 60 * MS
    net.links["b", 0].delay_ns += 20 * MS
    wait(net, 140)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
    return end(net)


def a_slow_rail_beside_one_that_dies() -> Network:
    """It answers all the time, each ping after 60 ms, as is known: it does not count as dead."""
    net = patient(pairs=3)
    a, _ = ends(net)
    for name in "ab":
        net.links[name, 1].delay_ns = 30 * MS
    traffic(a, 100, 3)
    wait(net, 4000)
    dead(net, 0, True)
    post(a, "SEND")
    until(net, lambda: on(a, 2) or on(a, 1), ms=250)
    p = a.endpoint.protocol
    assert p is not None and p.pairs[1].alive is not False
    return end(net)


def two_of_three_rails_blink_twice() -> Network:
    """Both are on one switch. That they were suspected a moment ago, and answered, does not make them answer now."""
    net = patient(pairs=3)
    a, _ = ends(net)
    traffic(a, 100, 3)
    wait(net, 2000)
    for _ in range(2):
        for k in (0, 1):
            dead(net, k, True)
        post(a, "SEND")
        until(net, lambda: on(a, 2), ms=60)
        for k in (0, 1):
            dead(net, k, False)
        until(net, lambda: at_home(net), ms=2000)
        wait(net, 20)
    wait(net, 20_000)
    assert all(path.ping.alive for path in a.endpoint.connection.paths)
    return end(net)


def answers_take_longer_on_one_rail_and_we_stop() -> Network:
    """All answers of that time are late by as much; what one takes beyond the other is the rail's all the same."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for k, delay_ms in enumerate((15, 4)):
        for name in "ab":
            net.links[name, k].delay_ns = delay_ms * MS
    wait(net, 4000)
    pings = [path.ping for path in a.endpoint.connection.paths]
    until(net, lambda: all(ping._awaited for ping in pings))
    net.a.frozen_until_ns = net.clock.now + 300 * MS
    wait(net, 800)
    post(a, "SEND")
    wait(net, 400)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
    return end(net)


def a_peer_stops_under_old_work_beside_a_slow_rail() -> Network:
    """Where answers take longer they are missed later: that says nothing against the quicker rail."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for k, delay_ms in enumerate((1, 20)):
        for name in "ab":
            net.links[name, k].delay_ns = delay_ms * MS
    wait(net, 3000)
    post(a, "SEND")
    wait(net, 2000)
    net.b.frozen_until_ns = net.clock.now + 600 * MS
    wait(net, 900)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
    return end(net)


def a_train_goes_while_a_message_waits() -> Network:
    """A ping is on its way when the train goes, and answered; those behind it wait for half a second."""
    net = patient(receives=4, at_start=0, straggler="migrate")
    a, b = ends(net)
    for k in range(2):
        net.slow(k, 1 * MS)
    stream = Stream(a)
    wait(net, LEARNING_MS)
    net.slow(1, 1 * MS, 7 * MS)
    stream.stop()
    wait(net, 50)
    post(a, "SEND")
    for _ in range(80):
        wait(net, 100)
        assert all(path.ping.alive is not False for path in a.endpoint.connection.paths)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a)[-1] == "SUCCESS" and a.endpoint.core.outstanding[0] == 0)
    assert never_switched(net)
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_peer_stops_in_mid_doubt: ("conclude_from_the_first_answer_elsewhere",),
    a_slow_rail_beside_one_that_dies: ("take_a_slow_rail_for_a_silent_one",),
    two_of_three_rails_blink_twice: ("trust_who_is_known_to_be_silent",),
    answers_take_longer_on_one_rail_and_we_stop: ("forget_what_a_rail_takes_longer",),
    a_peer_stops_under_old_work_beside_a_slow_rail: ("take_who_is_not_missed_yet_for_alive",),
    a_train_goes_while_a_message_waits: ("take_patience_back",),
}
