# SPDX-License-Identifier: BSD-3-Clause
"""Stories of MOVEs: their fences, memory that is still being registered, peers that leave meanwhile. As staged.py."""

from __future__ import annotations

import errno
from typing import Any

from simulator.application import Application
from simulator.checks import over
from simulator.clock import MS
from simulator.host import OwnMr
from simulator.network import Network
from simulator.story import (
    Story,
    another_window,
    armed,
    at_home,
    away,
    end,
    ends,
    go,
    hole,
    is_request,
    no_answers,
    no_hole,
    on,
    path_failed,
    pinged,
    plan,
    post,
    said,
    sends,
    split,
    statuses,
    succeeded,
    until,
    wait,
    went,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Move, MoveStep, Phase, Sync
from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.state_machine import SendState


def receive_in_new_memory(app: Application, backup: int, ms: int) -> None:
    """One more receive, in memory that the backup takes so long to register."""
    app.device.hardware[backup].registering_ns = ms * MS
    known, app.buffers = app.buffers, OwnMr(app.device, app.buffers.region[0], app.buffers.words, 1)
    with app.host:
        app.post_recv()
    app.buffers = known
    app.device.hardware[backup].registering_ns = 50_000


def _an_own_fence_of_a_move_that_was_called_off() -> Network:
    """a's message waits for a receive, and a's own fence WRITE behind it; its MOVE was called off, another begins."""
    net = armed(capacity=4, receives=4, at_start=0)
    a, b = ends(net)
    plan(a, "SEND")
    plan(b, "SEND")
    plan(b, "FADD", 8, signaled=True, data=1)  # what b has may not be fenced because of a mere hint
    for app in ends(net):
        for _ in range(len(app.plan)):
            app.due()
    a.endpoint.prefer(1)
    p = a.endpoint.protocol
    wait(net, 250)
    assert p.send_state is SendState.WAIT_DRAINED
    path_failed(a, 1, advisory=True)
    until(net, lambda: p.counts.asks_refused == 1 and a.endpoint.core.send_is_open, ms=500)
    return net


def _receives_come(net: Network) -> None:
    for app in ends(net):
        with app.host:
            for _ in range(4):
                app.post_recv()


def an_old_fence_is_ahead_of_the_wr_that_is_one() -> Network:
    """The last WR is the fence of the next MOVE, and gets lost once. The old fence WRITE ahead of it is complete."""
    net = _an_own_fence_of_a_move_that_was_called_off()
    a, _ = ends(net)
    post(a, "WRITE", 1)
    until(net, lambda: a.endpoint.protocol.send_state is SendState.WAIT_DRAINED, ms=500)
    post(a, "SEND")
    net.links["a", 0].drops += [lambda p: is_request(p, "WRITE")] * 2
    _receives_come(net)
    end(net)
    assert all(on(app, 1) for app in ends(net)), "where it should be"
    return net


def an_idle_program_whose_old_fence_is_on_its_way_moves() -> Network:
    """The second MOVE wants a fence WRITE, too, and posts it when the first has completed: nobody posts any more."""
    net = _an_own_fence_of_a_move_that_was_called_off()
    a, _ = ends(net)
    wait(net, 150)
    assert a.endpoint.protocol.send_state is SendState.WAIT_SIGNALED
    _receives_come(net)
    until(net, lambda: all(on(app, 1) for app in ends(net)), ms=100)  # and not when it is tried again
    end(net)
    assert all(on(app, 1) for app in ends(net)), "where it should be"
    return net


def a_nic_has_no_room_for_a_fence_write() -> Network:
    """a's last WR is unsignaled, and its program posts nothing any more: only our own WRITE can show its end."""
    net = armed()
    a, _ = ends(net)
    plan(a, "SEND")
    go(a)
    shared = a.endpoint.hardware.shared
    shared.refuse_at[0], shared.refuse_err[0] = 0, errno.ENOMEM
    a.endpoint.prefer(1)
    end(net)
    assert shared.refuse_err[0] == 0
    assert all(on(app, 1) for app in ends(net)), "where it should be"
    return net


def what_lacks_a_key_goes_home() -> Network:
    """Away, a WR waits for the key of memory that the peer's NIC never comes to register. At home it needs none."""
    net = armed()
    a, b = ends(net)
    away(net)
    post(a, "SEND")
    wait(net, 1)
    net.nics["b"][1].hung = True
    another_window(b)
    post(a, "WRITE", 1)
    wait(net, 1)
    assert a.endpoint.core.unwired[0] == 1
    a.endpoint.prefer(0)
    wait(net, 8000)
    net.nics["b"][1].unhang()
    return end(net)


def a_move_waits_for_memory() -> Network:
    """b's receives wait for memory for a second, and a knows: it does not take that for a silent path."""
    net = armed(receives=8, at_start=4)
    a, b = ends(net)
    no_answers(net, "a", 0)
    b.endpoint.hardware.RETRIES = 1000
    post(b, "FADD", 8, data=1)  # nothing is fenced now, or both sides have to give up
    receive_in_new_memory(b, 1, 1000)
    a.endpoint.prefer(1)
    wait(net, 1200)
    no_hole(net, "a", 0)
    end(net)
    assert all(on(app, 1) for app in ends(net)), "where it should be"
    return net


def sends_that_pause_do_not_move() -> Network:
    """a's work has failed on each pair, and is complete, as the peer says. Before it goes on, it is wanted elsewhere.

    There b's receives wait for memory, while a's pause ends: what is sent where they were is lost.
    """
    net = armed(receives=8, at_start=4)
    a, b = ends(net)
    pinged(net)
    hole(net, "a", None, 0)
    no_answers(net, "b", 1)
    plan(a, "WRITE", 1)
    plan(a, "SEND", signaled=True)
    go(a)
    p = a.endpoint.protocol
    until(net, lambda: p.directions.pausing and not p.switching, ms=200)
    assert a.endpoint.core.outstanding[0] == 0
    no_hole(net, "a", 0)
    no_hole(net, "b", 1)
    until(net, lambda: all(app.endpoint.protocol.pairs[1].clean for app in ends(net)), ms=50)
    receive_in_new_memory(b, 1, 500)
    a.endpoint.prefer(1)
    until(net, lambda: not p.directions.pausing, ms=500)
    wait(net, 1)
    for _ in range(2):
        plan(a, "SEND", signaled=True)
    go(a)
    end(net)
    assert all(on(app, 1) for app in ends(net)), "where it should be"
    return net


def a_peer_leaves_who_pauses() -> Network:
    """a's WR waits for its next attempt when b closes its QP: it has it then, and ends."""
    net = armed()
    a, b = ends(net)
    pinged(net)
    hole(net, "a", "WRITE", 0, 1)
    post(a, "WRITE", 1)
    p = a.endpoint.protocol
    until(net, lambda: p.directions.pausing and not p.switching, ms=200)
    b.close()
    wait(net, 500)
    assert a.failed, "it never ends"
    return net


def _b_errs_slowly(net: Network) -> None:
    """b's application moves its QP to ERR; what is sent there is still taken for a while."""
    b = net.app("b")
    net.nics["b"][1].command_ns = 40 * MS
    modify = b.endpoint._hardware_modify

    def slowly(attr: Attr, state: int | None) -> None:
        net.wait(lambda: False, 0.04)
        modify(attr, state)

    b.endpoint._hardware_modify = slowly  # type: ignore[method-assign]
    b.err()


def a_peer_leaves_while_its_receives_are_moving() -> Network:
    """b's receives are on their way, one waits for its memory, and its application moves the QP to ERR."""
    net = armed(receives=8, at_start=4)
    a, b = ends(net)
    receive_in_new_memory(b, 1, 50)
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.move_told and b.endpoint.core.recv_pair == 1, ms=100)
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    _b_errs_slowly(net)
    return end(net)


def _left_in_a_move(net: Network, unheard: Any) -> None:
    """b has moved its receives, and is not heard to say so, nor what `unheard` drops besides; then it leaves."""
    a, b = ends(net)
    for k in range(net.pairs):
        net.links["b", k].hole = lambda p: any(
            (isinstance(m, Move) and m.step is MoveStep.MOVED)
            or (isinstance(m, Sync) and m.phase is Phase.BYE and unheard(m))
            for m in said(p)
        )
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.move_told and b.endpoint.core.recv_pair == 1, ms=100)
    _b_errs_slowly(net)


def who_only_waits_is_left_in_a_move() -> Network:
    """a had nothing to send, and does not know where it would have to: it waits on, until it posts something."""
    net = armed(qps=2)
    a, b = ends(net)
    net.clock.later(2 * MS, b.host.runtime.driver._left.clear)  # very many others have ended since
    _left_in_a_move(net, lambda m: m.ask > 0)
    wait(net, 1000)
    assert over(a) is not None and not a.failed and not a.wcs
    plan(a, "SEND")
    go(a)
    wait(net, 1000)
    assert a.failed, "it is never told"
    return net


def a_bye_is_not_heard_for_long() -> Network:
    """What it said of the MOVE is said to whoever asks later."""
    net = armed(qps=2)
    until_ns = net.clock.now + 250 * MS
    _left_in_a_move(net, lambda m: net.clock.now < until_ns)
    wait(net, 1000)
    return net


def a_rail_is_slower_than_a_move_waits() -> Network:
    """Its answers come, after 1.4 s: it is left once, and coming home is tried less and less often."""
    net = armed()
    a, _ = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 700 * MS
    for qp in net.qps:
        qp.RETRY_NS = 34_000 * MS
    for _ in range(50):
        post(a, "WRITE")
        wait(net, 500)
    switches = len(went(net, ev.SwitchStarted, a))
    assert 3 <= switches <= 10, f"{switches} SWITCHes in 25 s"
    assert set(sends(a)) == {"SUCCESS"} and len(sends(a)) == 50
    for name in "ab":
        net.links[name, 0].delay_ns = 0
    until(net, lambda: at_home(net), ms=61_000)
    return end(net)


def _registers_for_minutes(net: Network) -> None:
    """The backups' NICs begin to register memory."""
    for app in ends(net):
        backup = app.device.hardware[1]
        backup.registering_ns = 120_000 * MS
        another_window(app)
        backup.registering_ns = 50_000
    wait(net, 1)
    assert all(app.endpoint.connection.nic(1).registrar.busy_since_ns for app in ends(net))


def _registering_survives(net: Network, k: int) -> Network:
    """Traffic is on rail k, whose port at a blinks: it goes on elsewhere, long before the memory is registered."""
    a, b = ends(net)
    net.port("a", k, False, None)
    for app in (a, b):
        post(app, "SEND")
    path_failed(b, k)
    wait(net, 5)
    net.port("a", k, True, None)
    until(net, lambda: len(a.wcs) == len(b.wcs) == 4, ms=3000)
    assert went(net, ev.SwitchStarted) and all(on(app, 1 - k) for app in (a, b))
    assert all(app.endpoint.connection.nic(1).registrar.busy_since_ns for app in (a, b))
    assert succeeded(a) and succeeded(b), (statuses(a), statuses(b))
    return net


def a_message_is_on_its_way_to_where_only_receives_are() -> Network:
    """a's sends are at home and its receives on pair 1; home fails while b's message is on its way there, for 5 ms."""
    net = armed(pairs=3)
    a, b = ends(net)
    split(net, "b")
    net.links["b", 1].delay_ns = 5 * MS
    net.nics["a"][1].command_ns = 20 * MS  # as long as that takes, it may arrive
    post(b, "SEND")
    path_failed(a, 0)
    return end(net)


def what_a_move_has_left_registers_memory() -> Network:
    """Home again, the backups are made fit once more, though their NICs are at a registration: home fails next."""
    net = armed()
    a, b = ends(net)
    away(net)
    for app in (a, b):
        post(app, "SEND")
    wait(net, 5)
    _registers_for_minutes(net)
    a.endpoint.prefer(0)
    until(net, lambda: all(on(app, 0) for app in (a, b)), ms=1000)
    assert all(app.endpoint.protocol.send_state is SendState.DEFAULT for app in (a, b))
    wait(net, 20)
    return _registering_survives(net, 0)


def what_carries_traffic_registers_memory() -> Network:
    """Away, the NICs that carry the traffic are at a registration, and one of their ports fails."""
    net = armed()
    away(net)
    for app in ends(net):
        post(app, "SEND")
    wait(net, 5)
    _registers_for_minutes(net)
    return _registering_survives(net, 1)


def a_qp_ends_while_its_nic_registers_memory() -> Network:
    """Away, and moved to ERR: its errors do not wait until the memory is registered."""
    net = armed()
    a, _ = ends(net)
    away(net)
    _registers_for_minutes(net)
    net.port("a", 1, False, None)
    post(a, "SEND")
    a.err()
    until(net, lambda: sends(a) == ["WR_FLUSH_ERR"], ms=500)
    assert a.endpoint.connection.nic(1).registrar.busy_since_ns
    return net


def memory_ends_while_its_nic_registers() -> Network:
    """Other memory, for minutes, and each command takes a while: no NIC uses what was closed, or changed, when that
    verb returns.
    """
    net = armed()
    away(net)
    a, _ = ends(net)
    closed, changed = another_window(a), another_window(a)
    wait(net, 5)
    keys = [mr.shadow.keys(1)[1] for mr in (closed, changed)]
    hardware = net.nics["a"][1]
    assert hardware.regions.keys() >= set(keys)
    _registers_for_minutes(net)
    wait(net, 6000)
    hardware.command_ns = 600 * MS
    closed.close()
    assert keys[0] not in hardware.regions, "it was closed"
    changed.rereg(0.0)
    assert keys[1] not in hardware.regions, "it was changed"
    hardware.command_ns = 30_000
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    memory_ends_while_its_nic_registers: (
        "end_memory_behind_what_is_registered",
        "wait_for_no_end_beside_a_registration",
        "change_memory_behind_what_is_registered",
    ),
    a_message_is_on_its_way_to_where_only_receives_are: ("fence_only_where_we_send",),
    what_a_move_has_left_registers_memory: ("register_among_the_commands",),
    what_carries_traffic_registers_memory: ("register_among_the_commands",),
    a_rail_is_slower_than_a_move_waits: ("come_home_at_once_where_a_move_was_in_vain",),
    an_old_fence_is_ahead_of_the_wr_that_is_one: ("take_an_old_fence_write_for_the_wr",),
    an_idle_program_whose_old_fence_is_on_its_way_moves: (
        "forget_a_fence_write_that_had_to_wait",
        "drop_a_fence_write_that_finds_no_room",
    ),
    a_nic_has_no_room_for_a_fence_write: ("try_a_fence_write_once",),
    what_lacks_a_key_goes_home: ("wait_in_a_move_for_what_lacks_a_key",),
    a_move_waits_for_memory: ("let_a_move_time_out_over_memory",),
    sends_that_pause_do_not_move: ("move_while_sends_pause",),
}

LEFT: dict[Story, tuple[str, ...]] = {a_bye_is_not_heard_for_long: ("forget_what_a_bye_said",)}

TOLD: dict[Story, tuple[str, ...]] = {
    a_qp_ends_while_its_nic_registers_memory: ("register_among_the_commands",),
    a_peer_leaves_who_pauses: ("forget_sends_that_pause",),
    a_peer_leaves_while_its_receives_are_moving: ("forget_receives_that_were_moving",),
    who_only_waits_is_left_in_a_move: ("fail_who_only_waits", "tell_nobody_of_a_late_post"),
}
