# SPDX-License-Identifier: BSD-3-Clause
"""Stories of changes that reach the default QP by its own verb, or where a MOVE, a SWITCH or SQD has left it.

As staged.py.
"""

from __future__ import annotations

from simulator.application import Application
from simulator.clock import MS
from simulator.endpoint import Attr
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rnic import ERR, RTS
from simulator.staged_changes import LESS, no_writes
from simulator.story import (
    Story,
    armed,
    at_home,
    away,
    end,
    ends,
    fail_over,
    on,
    post,
    until,
    wait,
    went,
)

from shiftverbs.native.ibv import AccessFlag, QpAttrMask
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.shadows import pyverbs_objects

# ---- home again ------------------------------------------------------------------------------------------------------


def a_qp_is_changed_that_is_home_again_while_its_nic_is_slow() -> Network:
    """The default QP has what its own verb has said: no command of ours is waited for, and nothing comes of it."""
    net = _home_again()
    _, b = ends(net)
    _is_slow(b, 0)
    return _is_changed_at_once(net)


def a_qp_is_changed_that_is_home_again_while_its_nic_refuses() -> Network:
    """The same where NIC 0 would refuse a command of ours."""
    net = _home_again()
    _, b = ends(net)
    net.nics["b"][0].refusing = 1
    _is_changed_at_once(net)
    net.nics["b"][0].refusing = 0
    return net


def _is_changed_at_once(net: Network) -> Network:
    a, b = ends(net)
    switches, began = len(went(net, ev.SwitchStarted)), net.clock.now
    no_writes(b)
    took = net.clock.now - began
    wait(net, 5000)
    assert net.protected() and len(went(net, ev.SwitchStarted)) == switches
    assert took < 10 * MS
    assert b.endpoint.hardware.state == RTS and b.endpoint.hardware.rights == LESS
    post(a, "SEND")
    return end(net)


def a_plain_qp_is_changed_that_is_home_again_while_its_nic_refuses() -> Network:
    """Its peer has left, and nothing would take its place: it stays in use."""
    net = _home_again()
    a, b = ends(net)
    _leaves(a)
    net.nics["b"][0].refusing = 1
    no_writes(b)
    wait(net, 100)
    assert b.endpoint.hardware.state == RTS and b.endpoint.hardware.rights == LESS
    return net


def a_change_is_refused_when_the_qp_is_home_again_and_plain() -> Network:
    """It was begun while the QP was away: the default QP is all that the program has when the answer comes."""
    net = armed(receives=8)
    a, b = ends(net)
    fail_over(net)
    until(net, lambda: all(app.endpoint.protocol.pairs[0].works for app in ends(net)))
    net.nics["b"][0].refusing, net.nics["b"][0].command_ns = 1, 300 * MS

    def goes_home_and_leaves() -> None:
        _goes_home(net)
        _leaves(a)

    net.clock.later(1 * MS, goes_home_and_leaves)
    no_writes(b)
    wait(net, 500)
    assert net.nics["b"][0].refusing == 0 and b.endpoint.core.is_plain
    assert b.endpoint.hardware.state == RTS, "it is the application's"
    return net


def _home_again() -> Network:
    """Both sides were away, and failover has taken the default QPs through RESET."""
    net = armed(receives=8)
    fail_over(net)
    wait(net, 50)
    _goes_home(net)
    wait(net, 100)
    for app in ends(net):
        assert app.endpoint.shadow.was_rebuilt() and app.endpoint.connection.given[0].state == RTS
    return net


def _goes_home(net: Network) -> None:
    for app in ends(net):
        app.endpoint.prefer(0)
    until(net, lambda: at_home(net))


def _leaves(app: Application) -> None:
    """Its program drains its QP: the other one is a plain QP from now on."""
    app.endpoint.drain()
    until(app.net, lambda: app.peer.endpoint.status is Status.UNPROTECTED, ms=200)


def _is_slow(app: Application, k: int) -> None:
    """Its NIC k carries out a command of others', which takes long: what comes then is quick again."""
    hardware = app.net.nics[app.device.name][k]
    nic = app.endpoint.connection.nic(k)
    before, hardware.command_ns = hardware.command_ns, 3000 * MS
    with app.host:
        nic.worker.submit(lambda err: None, 0x1000, nic.verbs.ModifySteps().add(state=ERR))
    wait(app.net, 1)
    hardware.command_ns = before


# ---- away ------------------------------------------------------------------------------------------------------------


def a_right_is_withdrawn_when_a_move_has_left_the_default_qp() -> Network:
    """Nothing has fenced it, and rail 0 is gone, so that no ARM comes: it has what is wanted all the same."""
    net = armed(receives=8)
    a, b = ends(net)
    a.endpoint.prefer(1)
    until(net, lambda: all(on(app, 1) for app in ends(net)))
    for name in "ab":
        net.wall(name, 0, True)
    no_writes(b)
    assert not b.endpoint.shadow.was_rebuilt(), "a MOVE has left it as it was"
    assert b.endpoint.hardware.state == RTS and b.endpoint.hardware.rights == LESS
    post(a, "SEND")
    return end(net)


def a_qp_is_changed_whose_carrier_broke_unseen() -> Network:
    """Its NIC refuses the change, since the QP is in ERR: the program is not told so, and what takes over has it."""
    net = armed(pairs=3)
    a, b = ends(net)
    away(net)
    wait(net, 100)
    for name in "ab":
        net.wall(name, 1, True)
    post(b, "SEND")
    qp = b.endpoint.qp(1)
    assert qp is not None
    until(net, lambda: qp.state == ERR)
    assert b.endpoint.core.send_pair == 1 and b.endpoint.core.first_error(1) is None, "nobody has seen it"
    b.endpoint.set_rights(ALL_RIGHTS & ~AccessFlag.REMOTE_ATOMIC)
    post(a, "SEND")
    return end(net)


def a_timer_is_changed_while_the_only_carrier_is_slow() -> Network:
    """It takes nothing from the peer: the pair serves as before until its NIC gets to the change."""
    net = armed(receives=8)
    a, b = ends(net)
    fail_over(net)
    wait(net, 50)
    for name in "ab":
        net.wall(name, 0, True)
    wait(net, 500)
    switches = len(went(net, ev.SwitchStarted))
    _is_slow(b, 1)
    attr = Attr()
    attr.min_rnr_timer = 14
    b.endpoint.modify(attr, None, int(QpAttrMask.MIN_RNR_TIMER))
    post(a, "SEND")
    wait(net, 5000)
    assert on(b, 1) and len(went(net, ev.SwitchStarted)) == switches
    return end(net)


# ---- SQD -------------------------------------------------------------------------------------------------------------


def a_right_is_withdrawn_in_sqd() -> Network:
    """What is changed there is there in RTS, for a query and for each pair, beside all that there was."""
    net = _home_again()
    _, b = ends(net)
    before = dict(b.endpoint.shadow.attrs)
    b.endpoint.drain()
    wait(net, 50)
    no_writes(b)
    assert b.endpoint.shadow.attrs == before | {"qp_access_flags": LESS}
    b.endpoint.modify(Attr(), RTS, int(QpAttrMask.STATE))
    seen = Attr()
    seen.qp_state, seen.qp_access_flags = int(b.endpoint.hardware.state), int(b.endpoint.hardware.rights)
    b.endpoint.shadow.show(seen, pyverbs_objects.InitAttr())
    assert (seen.qp_state, seen.qp_access_flags) == (RTS, LESS)
    backup = b.endpoint.qp(1)
    assert backup is not None and (backup.rights == LESS or backup.state == ERR)
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_is_changed_that_is_home_again_while_its_nic_is_slow: ("say_again_what_a_verb_has_done",),
    a_qp_is_changed_that_is_home_again_while_its_nic_refuses: ("say_again_what_a_verb_has_done",),
    a_right_is_withdrawn_when_a_move_has_left_the_default_qp: ("leave_the_default_qp_as_a_move_left_it",),
    a_qp_is_changed_whose_carrier_broke_unseen: ("refuse_what_a_broken_carrier_refuses",),
    a_timer_is_changed_while_the_only_carrier_is_slow: ("give_up_a_slow_pair_that_takes_nothing_away",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_plain_qp_is_changed_that_is_home_again_while_its_nic_refuses: (
        "say_again_to_a_plain_qp_what_its_verb_has_done",
    ),
    a_change_is_refused_when_the_qp_is_home_again_and_plain: ("put_a_plain_default_qp_out_of_use",),
    a_right_is_withdrawn_in_sqd: ("forget_what_is_changed_in_sqd",),
}
