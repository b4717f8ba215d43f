# SPDX-License-Identifier: BSD-3-Clause
"""Stories of paths that die and nobody tells, and of what looks alike. As staged.py.

NICs try for longer than any story takes, so what is seen is seen by us.
"""

from __future__ import annotations

from unittest import mock

from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.story import Story, armed, at_home, end, ends, on, post, sends, until, wait, went

from shiftverbs.failover import driver
from shiftverbs.protocol import events as ev


def patient(**options: object) -> Network:
    """A network whose NICs do not give up."""
    net = armed(**options)  # type: ignore[arg-type]
    for qp in net.qps:
        qp.RETRY_NS = 60_000 * MS
    return net


def traffic(app: Application, n: int, gap_ms: float, opcode: str = "SEND") -> None:
    """One WR after the other."""
    for _ in range(n):
        post(app, opcode)
        wait(app.net, gap_ms)


def dead(net: Network, k: int, is_dead: bool) -> None:
    """A switch that has rail k carries nothing, or does again."""
    for name in "ab":
        net.wall(name, k, is_dead)


def never_switched(net: Network) -> bool:
    """No SWITCH has begun."""
    return not any(went(net, ev.SwitchStarted, app) for app in net.apps)


def a_switch_dies_in_silence() -> Network:
    """Whoever has work on its way leaves soon, whatever its NIC waits for: 54 ms if it was idle, 44 if not."""
    net = patient()
    a, _ = ends(net)
    traffic(a, 100, 3)
    for gap_ms in (1, 4, 9):
        dead(net, 0, True)
        post(a, "SEND")
        until(net, lambda: on(a, 1), ms=55)
        wait(net, 20)
        assert set(sends(a)) == {"SUCCESS"}
        dead(net, 0, False)
        until(net, lambda: at_home(net))
        traffic(a, 100, gap_ms)
        wait(net, 6000)  # no flap
    return end(net)


def a_switch_died_long_before_there_was_work() -> Network:
    """Pings alone have said so, or nearly: the first work that meets it waits no longer than other work."""
    net = patient()
    a, _ = ends(net)
    for idle_ms in (1000, 3000, 30_000):
        traffic(a, 20, 3)
        dead(net, 0, True)
        wait(net, idle_ms)
        post(a, "SEND")
        until(net, lambda: on(a, 1), ms=55)
        wait(net, 20)
        assert set(sends(a)) == {"SUCCESS"}
        dead(net, 0, False)
        until(net, lambda: at_home(net))
        wait(net, 6000)  # no flap
    return end(net)


def a_rail_dies_on_which_answers_were_lost() -> Network:
    """While its peer stood still; then that said something there. Many pings have no answer, and it is asked anew."""
    net = patient()
    a, _ = ends(net)
    traffic(a, 20, 3)
    dead(net, 0, True)
    net.b.frozen_until_ns = net.clock.now + 130 * MS
    post(a, "SEND")
    wait(net, 150)
    a.endpoint.connection.paths[0].heard_ns = net.clock.now
    until(net, lambda: on(a, 1), ms=130)
    return end(net)


def a_peer_stands_still_and_its_receives_with_it() -> Network:
    """Its process, that is. It answers on no path: that says nothing of one."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    wait(net, 100)
    for _ in range(20):
        post(a, "SEND")
        net.b.frozen_until_ns = net.clock.now + 200 * MS
        wait(net, 250)
        with b.host:
            b.post_recv()
        wait(net, 50)
    assert never_switched(net)
    return end(net)


def a_peer_stands_still_for_a_second() -> Network:
    """Work is old and no path answers; then both do, one of them some milliseconds later. Nothing has died."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 5 * MS
    wait(net, 2000)
    for still_ms in (1008, 1024, 1056, 1200):
        post(a, "SEND")
        wait(net, 2)
        net.b.frozen_until_ns = net.clock.now + still_ms * MS
        wait(net, still_ms + 100)
        with b.host:
            b.post_recv()
        wait(net, 2000)
    assert never_switched(net)
    return end(net)


def a_switch_dies_that_has_two_of_three_rails() -> Network:
    """The third answers, and the others do not: nobody is asked on the second."""
    net = patient(pairs=3)
    a, _ = ends(net)
    traffic(a, 100, 3)
    wait(net, 2000)
    for k in (0, 1):
        dead(net, k, True)
    post(a, "SEND")
    until(net, lambda: on(a, 2), ms=55)
    return end(net)


def a_peer_goes_on_and_is_heard_on_the_other_path_first(ms: float = 45) -> Network:
    """What it answers here takes some milliseconds longer, and it stood still for long before."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 5 * MS
    wait(net, 3000)
    post(a, "SEND")
    net.b.frozen_until_ns = net.clock.now + ms * MS
    wait(net, ms + 30)
    with b.host:
        b.post_recv()
    assert never_switched(net)
    return end(net)


def a_switch_with_two_of_three_rails_dies_for_two_qps() -> Network:
    """What the pings of one have shown holds for the other at once: it asks nobody on the second rail either."""
    net = patient(pairs=3, qps=2)
    other, _, one, _ = net.apps  # the last is looked at first
    wait(net, 2000)
    for k in (0, 1):
        dead(net, k, True)
    post(one, "SEND")
    wait(net, 15)
    post(other, "SEND")
    until(net, lambda: on(one, 2) and on(other, 2), ms=45)
    return end(net)


def very_many_are_at_work_when_a_switch_dies() -> Network:
    """Their looks take turns, and a round takes longer than doubt lasts: who doubts is looked at all the same."""
    with mock.patch.object(driver, "WATCH_AT_ONCE", 4):
        net = patient(qps=32, receives=4)
        apps = net.apps[::2]
        for app in apps:
            post(app, "SEND")
        wait(net, 200)
        dead(net, 0, True)
        for app in apps:
            post(app, "SEND")
        until(net, lambda: all(on(app, 1) for app in apps), ms=700)
        return end(net)


def nothing_can_be_said_where_a_message_waits() -> Network:
    """Our own address handle is missing: that no ping of that path is answered says nothing of it."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    traffic(a, 0, 3)
    wait(net, 100)
    path = a.endpoint.connection.paths[0]
    ah, path.ah = path.ah, 0
    post(a, "SEND")
    wait(net, 400)
    path.ah = ah
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
    return end(net)


def an_atomic_waits_on_a_silent_path() -> Network:
    """It may not move, so the path is not left before its NIC has given up, and seldom asked about."""
    net = patient()
    a, _ = ends(net)
    for qp in net.qps:
        qp.RETRY_NS = 2000 * MS
    traffic(a, 20, 3)
    dead(net, 0, True)
    post(a, "FADD")
    wait(net, 100)
    ping = a.endpoint.connection.paths[0].ping
    asked = ping._number
    wait(net, 300)
    assert ping.is_silent and ping._number - asked <= 10
    dead(net, 0, False)
    wait(net, 100)
    assert not ping.is_silent, "that it is back is seen soon"
    return end(net)


def a_message_waits_for_its_receive() -> Network:
    """Pings are answered, and asked less and less often."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    wait(net, 100)
    ping = a.endpoint.connection.paths[0].ping
    asked = ping._number
    post(a, "SEND")
    wait(net, 240)
    assert 4 <= ping._number - asked <= 40
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
    return end(net)


def both_rails_lose_one_datagram_in_ten() -> Network:
    """Work stands still again and again, until its NIC tries once more; some ping of a row is answered."""
    net = patient(receives=32)
    a, _ = ends(net)
    for qp in net.qps:
        qp.RETRY_NS, qp.RETRIES = 60 * MS, 7
    for link in net.links.values():
        link.datagram_loss = 0.1
    for _ in range(50):
        traffic(a, 25, 8, "WRITE")  # that some take long is forgotten
        net.links["a", 0].drops.append(lambda packet: getattr(packet, "kind", None) == "req")
        post(a, "WRITE")
        wait(net, 70)
    assert never_switched(net)
    for link in net.links.values():
        link.datagram_loss = 0.0
    return net


def answers_take_longer_on_one_rail() -> Network:
    """Not lost: late. That is known from pings of before, and waited for."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 30 * MS
    wait(net, 4000)
    for _ in range(10):
        post(a, "SEND")
        wait(net, 300)
        with b.host:
            b.post_recv()
        wait(net, 300)
    assert never_switched(net)
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_switch_dies_in_silence: ("wait_for_a_nic_that_tries",),
    a_switch_died_long_before_there_was_work: ("ask_only_of_what_counts_as_alive",),
    a_rail_dies_on_which_answers_were_lost: ("wait_for_answers_to_lost_pings",),
    a_peer_stands_still_and_its_receives_with_it: ("take_a_peer_that_stands_still_for_a_silent_path",),
    a_peer_goes_on_and_is_heard_on_the_other_path_first: ("conclude_from_the_first_answer_elsewhere",),
    a_peer_stands_still_for_a_second: ("leave_old_work_for_who_is_heard_first",),
    a_switch_dies_that_has_two_of_three_rails: ("ask_on_a_path_that_is_silent_too",),
    a_switch_with_two_of_three_rails_dies_for_two_qps: ("find_what_another_has_found",),
    very_many_are_at_work_when_a_switch_dies: ("look_at_who_doubts_in_turn",),
    nothing_can_be_said_where_a_message_waits: ("miss_answers_to_what_was_not_sent",),
    an_atomic_waits_on_a_silent_path: ("ask_about_what_was_found",),
    a_message_waits_for_its_receive: (),
    both_rails_lose_one_datagram_in_ten: ("take_lost_pings_for_silence",),
    answers_take_longer_on_one_rail: ("take_a_late_answer_for_silence",),
}
