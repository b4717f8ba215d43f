# SPDX-License-Identifier: BSD-3-Clause
"""Stories of control: who is heard, and when; what is said of that. As staged.py."""

from __future__ import annotations

import itertools
import logging
from unittest import mock

from simulator.attacker import Attacker, lives
from simulator.clock import MS, US
from simulator.network import Network
from simulator.story import Story, end, ends, path_failed, post, sends, until, wait

from shiftverbs import observe
from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.failover.driver import MOST_UNREAD
from shiftverbs.failover.qp.pairing import gid_text
from shiftverbs.failover.services.directory import NO_ENTRY
from shiftverbs.protocol.codec import Entry, encode
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, ArmStep, Message, PairAddress, Phase, Prefer, Sync
from shiftverbs.protocol.seal import SECRET_BYTES, Seals

ABORT = Sync(1, 1, Phase.ABORT, 0, False, PairAddress(bytes(16), 0, 0, 0, 1), 0)


def _attacked() -> tuple[Network, Attacker]:
    """A network at rest, and who has heard all that b said to a on the first rail, where it spoke of its wish."""
    net = Network(1)
    attacker = Attacker(net, "a", 0)
    wait(net, 30)
    net.app("b").endpoint.prefer(0)
    wait(net, 10)
    assert attacker.heard
    return net, attacker


def somebody_forges_an_end() -> Network:
    """He knows all that can be heard, and says for b that it has given up."""
    net, attacker = _attacked()
    a, _ = ends(net)
    mine, theirs = lives(a)
    attacker.forge([Entry(mine, theirs, ABORT)])
    wait(net, 10)
    post(a, "SEND")
    return end(net)


def another_process_ends_a_qp() -> Network:
    """It is of the same job, and a has a path to it; but the QP is not its own."""
    net, attacker = _attacked()
    a, _ = ends(net)
    mine, theirs = lives(a)
    channel, nic = a.host.runtime.driver.channel, a.endpoint.connection.nic(0)
    secret = bytes(range(SECRET_BYTES))
    gid = gid_text(net.nics["b"][0].gid)
    with a.host:
        channel.open_path(
            nic, ControlEndpoint("c0", gid, 0, 3, 0x999, 0x999, secret.hex()), lambda path: None
        )
    wait(net, 1)
    for data in encode([Entry(mine, theirs, ABORT)], Seals(secret, channel.secret(nic))):
        attacker.send(data)
    wait(net, 10)
    post(a, "SEND")
    return end(net)


def somebody_repeats_what_a_peer_said() -> Network:
    """b's rail falls silent, and what b said before comes again and again: that is no sign of life.

    a's NIC does not give up by itself; that pings are not answered is all that tells.
    """
    net, attacker = _attacked()
    a, _ = ends(net)
    a.endpoint.hardware.RETRIES = 1_000_000
    net.wall("b", 0, True)
    for n in range(300):
        net.clock.later(n * 20 * MS, attacker.replay)
    post(a, "SEND")
    wait(net, 5500)
    assert sends(a) == ["SUCCESS"], "the other path works"
    net.wall("b", 0, False)
    return end(net)


def somebody_sends_nonsense() -> Network:
    """A line is written about it, and not one for each."""
    net, attacker = _attacked()
    with mock.patch.object(logging.Logger, "log", autospec=True) as log:
        for n in range(50):
            net.clock.later(n * MS, attacker.send, b"nonsense")
        wait(net, 500)
    assert 1 <= log.call_count <= 3, f"{log.call_count} lines"
    return end(net)


def etcd_cannot_be_reached_at_the_beginning() -> Network:
    """The peer's entry may be there, and is not asked for in vain."""
    net = Network(1)
    a, _ = ends(net)
    a.host.exchanger.go_away(lose_lease=False)
    wait(net, 100)
    shown = a.endpoint.connection.shown_why
    assert shown and NO_ENTRY not in shown, shown
    a.host.exchanger.come_back()
    wait(net, 3000)
    post(a, "SEND")
    return end(net)


def _a_verb_amid_a_flood(net: Network) -> None:
    """a's program polls: it is to get its thread back soon, whatever there is to read."""
    a, _ = ends(net)
    began = net.clock.now
    a.host.attention = 1  # the control thread has seen that there is something
    with a.host:
        a.endpoint.cq.poll(1)
    took_ns = net.clock.now - began
    assert took_ns <= 150 * MS, f"a verb took {took_ns // MS} ms"


def somebody_says_always_more() -> Network:
    """Each datagram takes a as long to read as it takes to send two."""
    net, attacker = _attacked()
    a, _ = ends(net)
    a.host.reading_ns = 10 * US
    a.host.grace_ns = 1000 * MS  # the control thread does not get the GIL
    a.host.lag_ns = 1000 * MS
    attacker.flood(b"nonsense", 5 * US, net.clock.now + 300 * MS)
    wait(net, 1)
    _a_verb_amid_a_flood(net)
    a.host.lag_ns, a.host.grace_ns = 2 * US, 300 * US
    a.host.wake()
    wait(net, 700)
    return end(net)


def very_much_has_arrived() -> Network:
    """It is there already, all of it, when a's program polls."""
    net, attacker = _attacked()
    a, _ = ends(net)
    a.host.reading_ns = 10 * US
    a.host.frozen_until_ns = net.clock.now + 1000 * MS
    for _ in range(40_000):
        attacker.send(b"nonsense")
    _a_verb_amid_a_flood(net)
    a.host.frozen_until_ns = 0
    wait(net, 500)
    return end(net)


def a_peer_speaks_without_end() -> Network:
    """b answers nothing in a SWITCH, and wishes the same again and again."""
    return _gives_up_all_the_same(1, [Prefer(1, 0, True)] * 60)


def a_peer_invents_pairs() -> Network:
    """b answers nothing in a SWITCH, and says for each of very many QPs as much as is kept of it."""
    somebody = PairAddress(bytes(16), 0, 0, 0, 1)
    return _gives_up_all_the_same(20, [Arm(ArmStep.RTU, 0, 100 + n, 1, somebody) for n in range(MOST_UNREAD)])


def _gives_up_all_the_same(qps: int, messages: list[Message]) -> Network:
    """b speaks more than a, which is busy, can read; a gives up as early as it would with a peer that is silent."""
    net = Network(1, qps=qps, peer_deadline_ms=150)
    attacker = Attacker(net, "a", 0)
    wait(net, 30)
    net.app("b").endpoint.prefer(0)
    wait(net, 10)
    a, b = ends(net)
    seals = b.endpoint.connection.paths[0].link.seals
    entries: list[Entry] = []
    for app in net.apps[1::2]:
        theirs, mine = lives(app)
        entries += [Entry(mine, theirs, message) for message in messages]
    parts = itertools.cycle([entries[at : at + 60] for at in range(0, len(entries), 60)])
    b.host.frozen_until_ns = net.clock.now + 1400 * MS
    net.wall("b", 1, True)
    a.host.reading_ns = 1 * MS

    def speak() -> None:
        for data in encode(next(parts), seals):
            attacker.send(data)

    for n in range(1400):
        net.clock.later(n * MS, speak)
    path_failed(a, 0)
    wait(net, 1000)
    assert a.endpoint.status is Status.FAILED, "its patience is over"
    a.host.reading_ns = 0
    net.wall("b", 1, False)
    return end(net)


def the_collector_takes_a_qp_apart() -> Network:
    """Its shadows go a moment before the rest of it, while a control port is being made. Nobody is told of that."""
    told: list[observe.Event] = []
    with mock.patch.object(observe, "publish", told.append):
        net = Network(1)
        a, _ = ends(net)
        net.nics["a"][1].command_ns = 50 * MS
        until(net, lambda: a.endpoint.connection is not None, ms=50)
        until(net, lambda: "control port" in str(a.endpoint.connection.why), ms=50)
        net.nics["a"][1].hung = net.nics["a"][0].hung = True
        with a.host:
            a.endpoint.shadow.close()
        net.nics["a"][1].unhang()
        net.nics["a"][0].unhang()
        wait(net, 10)
        a.close()
        wait(net, 100)
    assert not any(isinstance(event, observe.Unprotected) and "no shadow" in event.why for event in told), (
        told
    )
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    somebody_forges_an_end: ("believe_whoever_speaks",),
    another_process_ends_a_qp: ("let_any_process_speak_for_a_qp",),
    somebody_repeats_what_a_peer_said: ("hear_a_datagram_twice",),
    somebody_sends_nonsense: ("write_a_line_each_time",),
    etcd_cannot_be_reached_at_the_beginning: ("blame_a_peer_that_cannot_be_read",),
    somebody_says_always_more: ("run_as_long_as_others_speak",),
    very_much_has_arrived: ("read_a_flood_to_its_end",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_peer_speaks_without_end: ("read_all_that_a_peer_says_in_turn",),
    a_peer_invents_pairs: ("put_off_deadlines_by_what_is_said",),
    the_collector_takes_a_qp_apart: ("tell_of_a_qp_that_is_going",),
}
