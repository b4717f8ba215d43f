# SPDX-License-Identifier: BSD-3-Clause
"""Stories of QPs that are reset and connected anew, with what is left of their former lives. As staged.py."""

from __future__ import annotations

import errno
from typing import Any

from simulator.application import CELLS, WORDS, Application
from simulator.clock import MS
from simulator.network import Network
from simulator.rnic import INIT, RESET, RTR, RTS, Datagram
from simulator.staged_keys import window_again
from simulator.story import (
    Story,
    another_window,
    armed,
    away,
    end,
    ends,
    no_hole,
    on,
    path_failed,
    plan,
    post,
    sends,
    until,
    wait,
)

from shiftverbs.protocol.events import Status


def begins_anew(app: Application) -> None:
    """The program has forgotten what its QP did before it was reset, and so have the checkers."""
    net = app.net
    app.left = app.was_reset = app.failed = False
    app.ends = app.flushed = None
    app.next_recv = app.backlog = app.complete = 0
    for known in (app.plan, app.posted, app.by_ref, app.wcs, app.received, app.reads, app.unread):
        known.clear()
    net.executions[:] = [e for e in net.executions if e[4].side != app.peer.name and e[4].side != app.name]
    for qp in net.qps:
        qp.completed.clear()
    for n in range(CELLS):
        app.memory.words[app._cells + n] = 0
    net.allow(app.device.name, app.first_word, WORDS)


def connect_anew(net: Network) -> None:
    """Both programs reset their first QP, if they have not, and connect it again."""
    for app in ends(net):
        app.reset()
    wait(net, 50)
    for app in ends(net):
        begins_anew(app)
    for app in ends(net):
        app.endpoint.connect(app.peer.endpoint)
    until(net, lambda: all(app.endpoint.status is Status.PROTECTED for app in ends(net)), ms=3000)
    wait(net, 10)


def _one_waits_for_room(net: Network, k: int) -> Application:
    """a's sends come to pair k, and its NIC has no room for the second one before the first has completed."""
    a, _ = ends(net)
    a.endpoint.prefer(k)
    until(net, lambda: a.endpoint.protocol.move_told, ms=500)
    for _ in range(2):
        plan(a, "SEND", signaled=True)
        a.due()
    qp = a.endpoint.qp(k)
    assert qp is not None and a.endpoint.core.unwired[0] == 2
    qp.shared.refuse_at[0], qp.shared.refuse_err[0] = 1, errno.ENOMEM
    net.hold_cqes("a", k, True)
    until(net, lambda: qp.shared.refuse_err[0] == 0, ms=20)
    wait(net, 1)
    assert a.endpoint.core.send_pair == k and a.endpoint.core.unwired[0] == 1
    return a


def what_waits_for_room_is_reset() -> Network:
    """The first one's completion is taken when the QP is in RESET: nothing is posted there."""
    net = armed()
    away(net)
    a = _one_waits_for_room(net, 0)
    modify = a.endpoint._hardware_modify

    def and_completes(attr: Any, state: int | None) -> None:
        modify(attr, state)
        if state == RESET:
            net.hold_cqes("a", 0, False)

    a.endpoint._hardware_modify = and_completes  # type: ignore[method-assign]
    connect_anew(net)
    post(a, "SEND")
    return end(net)


def what_waits_for_room_on_a_backup_is_reset() -> Network:
    """It is stopped there, and then taken what has completed."""
    net = armed()
    a = _one_waits_for_room(net, 1)
    verbs = a.host.verbs
    modify = verbs.modify

    def and_completes(qp: int, steps: Any) -> tuple[int, int]:
        result = modify(qp, steps)
        if any(step.get("state") == RESET for step in steps.steps):
            net.hold_cqes("a", 1, False)
        return result

    verbs.modify = and_completes  # type: ignore[method-assign]
    connect_anew(net)
    post(a, "SEND")
    return end(net)


def _one_side_closes_unheard(net: Network, app: Application) -> None:
    """The other one's second QP goes on, and nobody tells it that it is alone."""
    links = [link for (name, _), link in net.links.items() if name == app.device.name]
    for link in links:
        link.hole = lambda p: isinstance(p, Datagram)
    app.close()
    wait(net, 300)
    no_hole(net, app.device.name, *range(net.pairs))


def a_path_is_made_again() -> Network:
    """b has never let go of it, and knows which numbers a has used: a goes on behind those."""
    net = armed(qps=2)
    a, _ = ends(net)
    wait(net, 120_000)
    _one_side_closes_unheard(net, net.apps[2])
    connect_anew(net)
    post(a, "SEND")
    return end(net)


def a_peer_is_told_anew() -> Network:
    """b has forgotten what it told a; a has not, as another QP uses that, and b's memory has another key since."""
    net = armed(qps=2)
    a, b = ends(net)
    post(a, "WRITE", 1)
    wait(net, 20)
    _one_side_closes_unheard(net, net.apps[3])
    for app in (b, a):
        app.reset()
    wait(net, 20)
    window_again(b)
    connect_anew(net)
    path_failed(a, 0)
    post(a, "WRITE", 2)
    return end(net)


def a_qp_is_armed_before_it_may_send() -> Network:
    """b only receives at first, so nobody knows how many READs a serves at a time: one, as b's program says then."""
    net = armed()
    a, b = ends(net)
    for nic in (*net.nics["a"], *net.nics["b"]):
        nic.counts_reads = True
    for app in ends(net):
        app.reset()
    wait(net, 50)
    for app in ends(net):
        begins_anew(app)
    a.endpoint.connect(b.endpoint, serves=1)
    b.endpoint.connect(a.endpoint, states=(INIT, RTR), reads=1)
    wait(net, 1500)
    b.endpoint.connect(a.endpoint, states=(RTS,), reads=1)
    wait(net, 500)
    assert all(app.endpoint.status is Status.PROTECTED for app in ends(net))
    path_failed(b, 0)
    for _ in range(4):
        plan(b, "READ", 1, signaled=True)
        b.due()
    return end(net)


def a_qp_is_connected_while_memory_is_registered() -> Network:
    """Both have new memory, at which their backups are for long. Who is PROTECTED then may lose its NIC at once."""
    net = armed()
    a, b = ends(net)
    for app in (a, b):
        backup = app.device.hardware[1]
        backup.registering_ns = 800 * MS
        another_window(app)
        backup.registering_ns = 50_000
    connect_anew(net)
    assert all(app.window.shadow.keys(1) is not None for app in (a, b))
    net.port("a", 0, False, None)
    path_failed(a, 0)
    post(a, "WRITE", 1)
    until(net, lambda: sends(a) == ["SUCCESS"], ms=100)
    return end(net)


def memory_is_registered_while_the_peer_is_waited_for() -> Network:
    """b's backup is at memory for a second, and so b names nobody; a has named b, and registers memory now."""
    net = armed()
    a, b = ends(net)
    for app in (a, b):
        app.reset()
    wait(net, 50)
    for app, ms in ((b, 1000), (a, 2000)):
        backup = app.device.hardware[1]
        begins_anew(app)
        backup.registering_ns = ms * MS
        if app is b:
            another_window(app)
            backup.registering_ns = 50_000
    for app in (a, b):
        app.endpoint.connect(app.peer.endpoint)
    wait(net, 500)
    another_window(a)
    until(net, lambda: all(app.endpoint.status is Status.PROTECTED for app in (a, b)), ms=9000)
    assert all(app.window.shadow.keys(1) is not None for app in (a, b))
    return end(net)


def what_an_end_has_told_nobody_is_reset() -> Network:
    """a's program makes an error of its own, away from home, and polls none of its WCs before it begins anew."""
    net = armed()
    a, _ = ends(net)
    away(net)
    a.poll_ns = 3000 * MS
    a.own_error = "it named memory that is not there"
    a.posts_on = True
    plan(a, "WRITE", 1, signaled=True).bad = True
    plan(a, "SEND", signaled=True)
    a.due()
    until(net, lambda: a.endpoint.cq.buffered > 2 and not a.endpoint.core.ending, ms=500)
    connect_anew(net)
    a.own_error = None
    wr = post(a, "SEND")
    until(net, lambda: a.wcs != [], ms=5000)
    assert a.wcs == [("send", wr, 0)], a.wcs
    return end(net)


def _nobody_polls() -> Network:
    """Two QPs a side share a CQ, and are away; nobody polls for 100 s."""
    net = armed(qps=2, one_cq=True)
    for app in net.apps:
        app.endpoint.prefer(1)
    until(net, lambda: all(on(app, 1) and not app.endpoint.protocol.busy for app in net.apps), ms=200)
    for app in net.apps:
        app.poll_ns = 100_000 * MS
        app.look()
    return net


def what_a_backup_has_completed_is_closed() -> Network:
    """a closes the first of its QPs, whose completions nobody has polled; the other's are there."""
    net = _nobody_polls()
    first, other = (app for app in net.apps if app.device.name == "a")
    post(first, "SEND")
    wr = post(other, "SEND")
    for app in (first, other):
        app.endpoint.prefer(0)
        until(net, lambda app=app: on(app, 0) and not app.endpoint.protocol.busy, ms=200)
    assert first.endpoint.cq.buffered == 2
    first.close()
    wait(net, 200_000)
    assert other.wcs[:1] == [("send", wr, 0)], other.wcs
    return net


def a_qp_is_closed_on_a_nic_that_writes_no_cqes() -> Network:
    """a's close has waited for the NIC as long as it does; what that completes behind it is told nobody."""
    net = _nobody_polls()
    first, _ = (app for app in net.apps if app.device.name == "a")
    net.hold_cqes("a", 1, True)
    post(first.peer, "SEND")
    wait(net, 1)
    first.close()
    net.hold_cqes("a", 1, False)
    wait(net, 200_000)
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    memory_is_registered_while_the_peer_is_waited_for: ("look_once_for_memory",),
    a_qp_is_connected_while_memory_is_registered: ("protect_before_memory_is_there",),
    what_an_end_has_told_nobody_is_reset: ("keep_what_nobody_has_polled",),
    what_waits_for_room_is_reset: ("post_to_a_qp_in_reset",),
    what_waits_for_room_on_a_backup_is_reset: ("post_to_a_backup_that_is_stopped",),
    a_path_is_made_again: ("forget_the_seals_of_a_path",),
    a_qp_is_armed_before_it_may_send: ("keep_pairs_that_were_connected_too_early",),
    a_peer_is_told_anew: ("take_who_is_told_anew_for_who_knew",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    what_a_backup_has_completed_is_closed: ("keep_what_a_destroyed_qp_has_completed",),
    a_qp_is_closed_on_a_nic_that_writes_no_cqes: ("tell_what_comes_of_a_destroyed_qp",),
}
