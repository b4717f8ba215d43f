# SPDX-License-Identifier: BSD-3-Clause
"""Stories of changes between whose verb and its note failover comes, and of pairs that it has left as they were.

As staged.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import Application
from simulator.clock import MS
from simulator.endpoint import Attr
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rnic import ERR, INIT, RTR, RTS, HwQp
from simulator.staged_changes import LESS, _reset, no_writes
from simulator.staged_default import _goes_home, _is_slow
from simulator.story import (
    Story,
    armed,
    end,
    ends,
    executed,
    fail_over,
    on,
    path_failed,
    post,
    until,
    wait,
    went,
)

from shiftverbs.failover.qp import changes
from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.native.ibv import AccessFlag, QpAttrMask
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

# ---- between the verb and the note -----------------------------------------------------------------------------------


def a_switch_leads_home_again_behind_the_verb() -> Network:
    """What the verb gave the default QP is gone with its life: the new one is told."""
    net = armed()
    _, b = ends(net)
    for name in "ab":
        net.wall(name, 1, True)
    wait(net, 3000)
    modify = b.endpoint._hardware_modify

    def goes_and_comes(attr: Attr, state: int | None) -> None:
        modify(attr, state)
        path_failed(b, 0)
        until(net, lambda: b.endpoint.hardware.state != RTS)
        until(net, lambda: not b.endpoint.protocol.switching)
        wait(net, 20)

    with mock.patch.object(b.endpoint, "_hardware_modify", goes_and_comes):
        no_writes(b)
    return _writes_nothing(net)


def a_move_leads_home_again_behind_the_verb() -> Network:
    """The same, and nothing has fenced it."""
    net = armed(receives=8)
    _, b = ends(net)
    modify = b.endpoint._hardware_modify

    def goes_and_comes(attr: Attr, state: int | None) -> None:
        modify(attr, state)
        for app in ends(net):
            app.endpoint.prefer(1)
        until(net, lambda: all(on(app, 1) for app in ends(net)))
        until(net, lambda: all(app.endpoint.protocol.pairs[0].works for app in ends(net)))
        wait(net, 20)
        _goes_home(net)

    with mock.patch.object(b.endpoint, "_hardware_modify", goes_and_comes):
        no_writes(b)
    return _writes_nothing(net)


def _writes_nothing(net: Network) -> Network:
    a, b = ends(net)
    assert on(b, 0) and b.endpoint.hardware.rights == LESS == b.endpoint.connection.given[0].rights
    wait(net, 500)
    wr = post(a, "WRITE", 1)
    a.own_error = "it may not write"
    wait(net, 500)
    assert not executed(net, wr)
    return net


def another_thread_notes_while_one_waits_for_the_lock() -> Network:
    """One has withdrawn a right while the QP was away. Home again, another changes a timer by the QP's own verb."""
    net = armed(receives=8)
    _, b = ends(net)
    fail_over(net)
    until(net, lambda: all(app.endpoint.protocol.pairs[0].works for app in ends(net)))
    wait(net, 50)
    spread, done = changes.spread, []

    def late(connection: Any, *about: Any) -> None:
        if connection is b.endpoint.connection and not done:
            done.append(True)
            _goes_home(net)
            attr = Attr()
            attr.min_rnr_timer, attr.qp_access_flags = 14, b.endpoint.hardware.rights
            b.endpoint.modify(attr, None, int(QpAttrMask.MIN_RNR_TIMER))
        spread(connection, *about)

    with mock.patch.object(changes, "spread", late):
        no_writes(b)
    return _writes_nothing(net)


def a_right_is_withdrawn_while_it_is_published() -> Network:
    """The record is made of what was there before; what is published is what is wanted."""
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    _reset(net)
    reached_at, done = Pairing._reached_at, []

    def withdrawn(pairing: Pairing, usable: int) -> object:
        if pairing is b.endpoint.connection.pairing and not done and b.endpoint.shadow.app_state == RTS:
            done.append(True)
            no_writes(b)
        return reached_at(pairing, usable)

    with mock.patch.object(Pairing, "_reached_at", withdrawn):
        b.endpoint.connect(a.endpoint)
        a.endpoint.connect(b.endpoint)
        wait(net, 100)
    assert done and b.endpoint.connection.pairing._mine.qp_access_flags == LESS
    assert a.endpoint.connection.peer.qp_access_flags == LESS
    return end(net)


# ---- a carrier that is slow ------------------------------------------------------------------------------------------


def _only_a_backup(gives: bool) -> Network:
    """Both are on pair 1, and home is gone."""
    net = armed(receives=8)
    _, b = ends(net)
    if gives:
        no_writes(b)
        wait(net, 50)
    fail_over(net)
    wait(net, 50)
    for name in "ab":
        net.wall(name, 0, True)
    wait(net, 500)
    return net


def a_right_is_given_while_the_only_carrier_is_slow() -> Network:
    """Whether it has it nobody knows; but not more than that: no right is taken, and nothing is put out of use."""
    net = _only_a_backup(gives=True)
    return _stays(net, lambda b: b.endpoint.set_rights(ALL_RIGHTS))


def the_same_rights_are_said_again_while_the_only_carrier_is_slow() -> Network:
    """The same."""
    net = _only_a_backup(gives=False)
    return _stays(net, lambda b: b.endpoint.set_rights(ALL_RIGHTS))


def a_timer_is_changed_behind_a_right_that_was_refused() -> Network:
    """A carrier that refuses a right has what it had."""
    net = _only_a_backup(gives=True)
    _, b = ends(net)
    net.nics["b"][1].refusing = 1
    with pytest.raises(PyverbsRDMAError):
        b.endpoint.set_rights(ALL_RIGHTS)
    wait(net, 100)
    attr = Attr()
    attr.min_rnr_timer = 14
    return _stays(net, lambda b: b.endpoint.modify(attr, None, int(QpAttrMask.MIN_RNR_TIMER)))


def _stays(net: Network, change: Callable[[Application], None]) -> Network:
    a, b = ends(net)
    switches = len(went(net, ev.SwitchStarted))
    _is_slow(b, 1)
    change(b)
    post(a, "SEND")
    wait(net, 5000)
    assert len(went(net, ev.SwitchStarted)) == switches
    assert all(app.endpoint.status is Status.PROTECTED for app in ends(net))
    return net


def a_right_is_withdrawn_twice_while_the_only_carrier_hangs() -> Network:
    """The second asks before the first has its answer: that does not make the first's known."""
    net = _only_a_backup(gives=False)
    a, b = ends(net)
    net.nics["b"][1].hung = True
    wait_for, nested = changes._Told.wait, []

    def again(told: changes._Told, *args: Any) -> list[int]:
        if not nested:
            nested.append(True)
            no_writes(b)
        return wait_for(told, *args)

    with mock.patch.object(changes._Told, "wait", again):
        no_writes(b)
    assert nested
    wait(net, 100)
    wr = post(a, "WRITE", 1)
    wait(net, 1000)
    assert not executed(net, wr)
    return net


# ---- what failover has left ------------------------------------------------------------------------------------------


def _serves(qp: HwQp) -> bool:
    return qp.state in (RTR, RTS) and bool(qp.rights & AccessFlag.REMOTE_WRITE)


def a_right_is_withdrawn_while_the_reset_of_an_arm_waits() -> Network:
    """Until its NIC has carried that out, the QP serves the peer as before: it is waited for."""
    net = armed()
    _, b = ends(net)
    net.nics["b"][1].command_ns = 50 * MS
    for app in ends(net):
        path_failed(app, 1)
    until(net, lambda: b.endpoint.connection.given[1].state == INIT, ms=3000)
    qp = b.endpoint.qp(1)
    assert qp is not None and _serves(qp)
    no_writes(b)
    assert not _serves(qp)
    return end(net)


def _moved_away() -> Network:
    net = armed(receives=8)
    ends(net)[0].endpoint.prefer(1)
    until(net, lambda: all(on(app, 1) for app in ends(net)))
    for name in "ab":
        net.wall(name, 0, True)
    return net


def a_default_qp_that_a_move_has_left_refuses() -> Network:
    """As a backup would, it goes to ERR."""
    net = _moved_away()
    a, b = ends(net)
    net.nics["b"][0].refusing = 1
    no_writes(b)
    assert b.endpoint.hardware.state == ERR and not b.endpoint.shadow.was_rebuilt()
    return _query_shows_it(net)


def a_default_qp_that_a_move_has_left_hangs() -> Network:
    """It goes to ERR when its NIC is well again."""
    net = _moved_away()
    _, b = ends(net)
    net.nics["b"][0].hung = True
    no_writes(b)
    wait(net, 1000)
    net.nics["b"][0].unhang()
    wait(net, 100)
    assert b.endpoint.hardware.state == ERR
    return _query_shows_it(net)


def _query_shows_it(net: Network) -> Network:
    a, b = ends(net)
    assert b.endpoint.shadow.attrs["qp_access_flags"] == LESS and on(b, 1)
    for name in "ab":
        net.wall(name, 0, False)
    _goes_home(net)
    assert b.endpoint.hardware.rights == LESS
    post(a, "SEND")
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_right_is_withdrawn_while_it_is_published: ("publish_what_was_there_before",),
    a_right_is_given_while_the_only_carrier_is_slow: ("doubt_that_a_carrier_has_no_right_at_all",),
    the_same_rights_are_said_again_while_the_only_carrier_is_slow: (
        "doubt_that_a_carrier_has_no_right_at_all",
    ),
    a_timer_is_changed_behind_a_right_that_was_refused: ("doubt_that_a_carrier_refused",),
    a_right_is_withdrawn_while_the_reset_of_an_arm_waits: ("leave_a_reset_to_its_turn",),
    a_default_qp_that_a_move_has_left_refuses: ("ask_a_default_qp_that_a_move_left",),
    a_default_qp_that_a_move_has_left_hangs: ("ask_a_default_qp_that_a_move_left",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    another_thread_notes_while_one_waits_for_the_lock: ("take_what_was_noted_for_what_the_verb_said",),
    a_right_is_withdrawn_twice_while_the_only_carrier_hangs: ("know_what_was_asked_before",),
    a_switch_leads_home_again_behind_the_verb: ("believe_that_the_verbs_qp_is_there",),
    a_move_leads_home_again_behind_the_verb: ("believe_that_the_verbs_qp_is_there", "count_no_rebuilding"),
}
