# SPDX-License-Identifier: BSD-3-Clause
"""Stories of the application's own errors that come while its QP ends for another reason. As staged.py."""

from __future__ import annotations

from simulator.clock import MS, US
from simulator.host import OwnMr
from simulator.network import Network
from simulator.rnic import Datagram
from simulator.story import (
    Story,
    armed,
    away,
    ends,
    feed,
    plan,
    post,
    said,
    sends,
    statuses,
    tell,
    until,
    wait,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Phase


def _a_peer_gives_up(net: Network) -> None:
    """b does, and its NIC works on for a while, as a's does when it hears of that."""
    for name in "ab":
        net.nics[name][0].command_ns = 2 * MS
    feed(ends(net)[1], ev.WorkRefused("staged"))
    until(net, lambda: ends(net)[0].endpoint.core.ending, ms=1)


def an_own_error_comes_when_the_peer_has_given_up() -> Network:
    """a's QP ends, and is not in ERR yet when its NIC hears why a WRITE fails: that is what a is told of it."""
    net = armed()
    a, _ = ends(net)
    a.own_error = "it named memory that is not there"
    net.links["a", 0].delay_ns = 500 * US
    plan(a, "WRITE", 2)
    plan(a, "WRITE", 1).bad = True
    plan(a, "SEND")
    for _ in range(3):
        a.due()
    _a_peer_gives_up(net)
    wait(net, 1000)
    assert sends(a) == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"], sends(a)
    return net


def an_own_error_comes_when_something_of_ours_has_failed() -> Network:
    """The same where nobody has given up but we, away from home: b's NIC has no rights left for a to use."""
    net = armed()
    a, _ = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 10)
    a.own_error = "it has no right to that"
    for region in net.nics["b"][1].regions.values():
        region.access = 0
    net.nics["a"][1].command_ns = 2 * MS
    net.links["a", 1].delay_ns = 500 * US
    post(a, "WRITE", 1)
    post(a, "SEND")
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 1000)
    assert sends(a) == ["SUCCESS", "REM_ACCESS_ERR", "WR_FLUSH_ERR"], sends(a)
    return net


def we_fail_while_a_key_is_asked_for() -> Network:
    """Something of ours fails at a, whose WRITE waits for b's answer: nobody asks any more, and the QP ends."""
    net = armed()
    a, _ = ends(net)
    away(net)
    net.nics["a"][1].command_ns = 200 * MS  # it is not at its end when the question would be asked again
    net.links["b", 0].hole = net.links["b", 1].hole = lambda p: isinstance(p, Datagram)
    post(a, "WRITE", 1)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 1000)
    assert sends(a) == ["RETRY_EXC_ERR"], sends(a)
    return net


def a_receive_fails_when_the_peer_has_given_up() -> Network:
    """a has taken the memory of its second receive away. b's message for it is on its way when b gives up."""
    net = armed(receives=3, at_start=1)
    a, b = ends(net)
    a.own_error = "it has taken its memory away"
    known, a.buffers = a.buffers, OwnMr(a.device, a.buffers.region[0], a.buffers.words, 1)
    with a.host:
        a.post_recv()
    a.buffers.close()
    a.buffers = known
    with a.host:
        a.post_recv()
    net.links["b", 0].delay_ns = 500 * US
    for _ in range(2):
        plan(b, "SEND")
        b.due()
    _a_peer_gives_up(net)
    wait(net, 1000)
    told = [status for what, status in statuses(a) if what == "recv"]
    assert told == ["SUCCESS", "LOC_PROT_ERR", *["WR_FLUSH_ERR"] * 2], told
    return net


def an_own_error_is_the_last_that_a_fence_finds() -> Network:
    """a's NIC hears why a WRITE fails just before it has its QP in ERR, in a SWITCH of b's, whose QP broke by that.

    a does not poll, and so the fence finds it, and is complete. b has sends waiting, and does not hear a's first BYE.
    """
    net = armed()
    a, b = ends(net)
    a.poll_ns = 400 * MS
    a.own_error = "it named memory that is not there"
    net.nics["a"][0].command_ns = 10 * MS
    net.nics["a"][1].command_ns = 2 * MS
    net.links["b", 0].delay_ns = 9600 * US
    for k in (0, 1):
        net.links["a", k].drops.append(lambda p: Phase.BYE in [getattr(m, "phase", None) for m in said(p)])
    plan(a, "WRITE", 1).bad = True
    plan(a, "SEND")
    for _ in range(2):
        a.due()
    until(net, lambda: b.endpoint.protocol.switching, ms=5)
    for _ in range(2):
        post(b, "SEND")
    wait(net, 1000)
    assert sends(a) == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"], sends(a)
    assert ("recv", "SUCCESS") not in statuses(a), "behind a send's error, and all was on one NIC"
    return net


TOLD: dict[Story, tuple[str, ...]] = {
    an_own_error_comes_when_the_peer_has_given_up: ("forget_an_own_error_in_an_end",),
    an_own_error_comes_when_something_of_ours_has_failed: ("forget_an_own_error_in_an_end",),
    we_fail_while_a_key_is_asked_for: ("ask_for_keys_without_a_protocol",),
    an_own_error_is_the_last_that_a_fence_finds: ("go_on_behind_an_own_error_in_a_fence",),
    a_receive_fails_when_the_peer_has_given_up: ("forget_an_own_error_of_a_receive_in_an_end",),
}
