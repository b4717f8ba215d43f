# SPDX-License-Identifier: BSD-3-Clause
"""Stories of attributes that the application changes while something else is under way, or from two threads.

As staged.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from unittest import mock

from simulator.application import Application
from simulator.clock import MS
from simulator.endpoint import MASKS, Attr
from simulator.host import ALL_RIGHTS
from simulator.network import Network
from simulator.rnic import ERR, INIT, RESET, RTR, RTS
from simulator.story import (
    Story,
    armed,
    end,
    ends,
    executed,
    fail_over,
    feed,
    no_hole,
    on,
    path_failed,
    post,
    split,
    until,
    wait,
    went,
)

from shiftverbs.failover.qp import changes
from shiftverbs.native.ibv import AccessFlag, QpAttrMask
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

LESS = ALL_RIGHTS & ~AccessFlag.REMOTE_WRITE
OTHERS = 5  # commands for others' QPs that a NIC has to carry out first


def no_writes(app: Application) -> None:
    """Its program withdraws the right to write."""
    app.endpoint.set_rights(LESS)


def begins_to_withdraw(app: Application) -> None:
    """The same, but a signal's handler raises while the NICs are waited for."""
    with mock.patch.object(changes, "in_slices", side_effect=KeyboardInterrupt):
        try:
            no_writes(app)
        except KeyboardInterrupt:
            return
    raise AssertionError("nothing was waited for")


def a_write_fails(net: Network) -> Network:
    """a's program writes all the same."""
    a, _ = ends(net)
    a.own_error = "it has no right to write"
    wr = post(a, "WRITE", 1)
    wait(net, 500)
    assert a.failed and not executed(net, wr), "it has no right to"
    return net


def _asked(app: Application) -> None:
    """Whether to SWITCH is asked, and nobody answers."""
    for link in app.net.links.values():
        link.datagram_loss = 1.0
    feed(app, ev.PathFailed(0, "port down", advisory=True))
    assert app.endpoint.protocol.switching and not app.endpoint.protocol.fencing


def _heard(net: Network) -> None:
    for link in net.links.values():
        link.datagram_loss = 0.0


def is_busy(app: Application, k: int) -> None:
    """Its NIC k has others' commands to carry out first, each of which takes its time: it does not hang."""
    nic = app.endpoint.connection.nic(k)
    app.net.nics[app.device.name][k].command_ns = 300 * MS
    with app.host:
        for number in range(OTHERS):
            nic.worker.submit(lambda err: None, 0x1000 + number, nic.verbs.ModifySteps().add(state=ERR))


def _goes_first(app: Application, then: Callable[[], None]) -> None:
    """Another thread's verb has the driver's lock when this one's next asks for it."""
    driver = app.host.runtime.driver
    locked = driver.locked

    def once(quietly: bool = False) -> object:
        patch.stop()
        then()
        return locked(quietly)

    patch = mock.patch.object(driver, "locked", once)
    patch.start()


# ---- a question, and what breaks meanwhile ---------------------------------------------------------------------------


def a_right_is_withdrawn_while_a_switch_is_asked_about() -> Network:
    """Nothing is fenced, and the default QP serves the peer all that time, and later."""
    net = armed()
    _, b = ends(net)
    _asked(b)
    no_writes(b)
    until(net, lambda: not b.endpoint.protocol.switching)
    _heard(net)
    return a_write_fails(net)


def a_qp_is_changed_that_broke_while_a_switch_was_asked_about() -> Network:
    """Nobody has seen that it broke, and the change is not refused: what takes over will have it."""
    net = armed()
    a, _ = ends(net)
    _asked(a)
    net.hold_cqes("a", 0, True)
    a.endpoint.hardware.to_error(12)
    net.clock.later(1 * MS, net.hold_cqes, "a", 0, False)
    a.endpoint.set_rights(ALL_RIGHTS & ~AccessFlag.REMOTE_ATOMIC)
    _heard(net)
    post(a, "SEND")
    return end(net)


# ---- a fence ---------------------------------------------------------------------------------------------------------


def a_right_is_withdrawn_amid_a_fence() -> Network:
    """b's NIC takes its time for the fence: the verb does not return before the default QP serves nobody."""
    return _is_withdrawn_amid_a_fence(armed(), 0)


def a_right_is_withdrawn_amid_the_fence_of_a_backup() -> Network:
    """The same, where a backup has carried the traffic."""
    net = armed()
    fail_over(net)
    return _is_withdrawn_amid_a_fence(net, 1)


def _is_withdrawn_amid_a_fence(net: Network, k: int) -> Network:
    a, b = ends(net)
    net.nics["b"][k].command_ns = 50 * MS
    path_failed(a, k)
    until(net, lambda: b.endpoint.protocol.fencing, ms=5)
    qp = b.endpoint.qp(k)
    assert qp.state == RTS
    no_writes(b)
    assert qp.state != RTS, "it would serve a's WRITEs"
    post(a, "SEND")
    return end(net)


def a_right_is_withdrawn_on_a_nic_that_is_busy() -> Network:
    """The fence waits its turn for longer than a NIC may hang: it is waited for all the same."""
    net = armed()
    a, b = ends(net)
    is_busy(b, 0)
    for link in net.links.values():
        link.datagram_loss = 1.0  # a hears of nothing
    path_failed(b, 0)
    until(net, lambda: b.endpoint.protocol.fencing, ms=5)
    no_writes(b)
    a.own_error = b.own_error = "one of them heard nothing"
    wr = post(a, "WRITE", 1)
    wait(net, 50)
    assert not executed(net, wr), "it has no right to"
    _heard(net)
    wait(net, 5000)
    return net


def a_right_is_withdrawn_amid_a_switch_that_leads_home_again() -> Network:
    """It begins and ends while the verb is at the default NIC, whose refusal says nothing: the verb is repeated."""
    net = armed()
    _, b = ends(net)
    for name in "ab":
        net.wall(name, 1, True)
    wait(net, 3000)
    modify = b.endpoint._hardware_modify

    def amid_a_switch(attr: Attr, state: int | None) -> None:
        b.endpoint._hardware_modify = modify  # type: ignore[method-assign]
        path_failed(b, 0)
        until(net, lambda: b.endpoint.hardware.state != RTS)
        try:
            modify(attr, state)
        finally:
            until(net, lambda: not b.endpoint.protocol.switching)
            wait(net, 20)

    b.endpoint._hardware_modify = amid_a_switch  # type: ignore[method-assign]
    no_writes(b)
    assert b.endpoint.status is Status.PROTECTED and on(b, 0)
    return a_write_fails(net)


# ---- two threads -----------------------------------------------------------------------------------------------------


def one_thread_changes_a_timer_and_one_a_right() -> Network:
    """The last one that tells the pairs knows of what the other has changed."""
    net = armed()
    _, b = ends(net)
    _goes_first(b, lambda: no_writes(b))
    attr = Attr()
    attr.min_rnr_timer = 14
    b.endpoint.modify(attr, None, int(QpAttrMask.MIN_RNR_TIMER))
    fail_over(net)
    return a_write_fails(net)


def a_right_is_given_back_before_its_withdrawal_is_done() -> Network:
    """What is published is what holds then: a's MOVE has its fence WR."""
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    net.nics["b"][1].command_ns = 50 * MS
    net.clock.later(1 * MS, b.endpoint.set_rights, ALL_RIGHTS)
    no_writes(b)
    net.nics["b"][1].command_ns = 30_000
    wait(net, 100)
    post(a, "SEND", signaled=False)
    with b.host:
        b.post_recv()
    wait(net, 5)
    a.endpoint.prefer(1)
    wait(net, 500)
    assert on(a, 1)
    return end(net)


def rights_are_changed_twice_on_a_carrier() -> Network:
    """It has what was said last, whichever verb returns last."""
    net = armed()
    _, b = ends(net)
    fail_over(net)
    net.nics["b"][1].command_ns = 40 * MS
    net.clock.later(1 * MS, b.endpoint.set_rights, ALL_RIGHTS & ~AccessFlag.REMOTE_READ)
    no_writes(b)
    wait(net, 200)
    assert b.endpoint.qp(1).rights == b.endpoint.shadow.attrs["qp_access_flags"]
    return end(net)


def a_right_is_withdrawn_twice() -> Network:
    """Neither verb returns before the carrier serves nobody who writes."""
    net = armed()
    _, b = ends(net)
    split(net, "a")
    net.nics["b"][1].command_ns = 50 * MS
    served: list[bool] = []

    def again() -> None:
        no_writes(b)
        served.append(bool(b.endpoint.qp(1).rights & AccessFlag.REMOTE_WRITE))

    net.clock.later(1 * MS, again)
    no_writes(b)
    until(net, lambda: bool(served))
    assert served == [False]
    return end(net)


def a_withdrawal_is_broken_off_and_said_again() -> Network:
    """Ctrl-C while a NIC is waited for; the verb's second call waits for what that has begun."""
    net = armed()
    _, b = ends(net)
    split(net, "a")
    net.nics["b"][1].command_ns = 50 * MS

    begins_to_withdraw(b)
    no_writes(b)
    qp = b.endpoint.qp(1)
    assert qp.state == ERR or not qp.rights & AccessFlag.REMOTE_WRITE, "it would serve a's WRITEs"
    return end(net)


def a_nic_keeps_a_right_when_the_peer_has_left() -> Network:
    """No SWITCH follows that could be waited for."""
    net = armed()
    a, b = ends(net)
    split(net, "a")
    a.endpoint.close()
    wait(net, 5)
    net.nics["b"][1].refusing, net.nics["b"][1].command_ns = 1, 50 * MS
    qp = b.endpoint.qp(b.endpoint.core.recv_pair)
    no_writes(b)
    assert qp.state == ERR or not qp.rights & AccessFlag.REMOTE_WRITE
    return net


# ---- no peer yet, and another life -----------------------------------------------------------------------------------


def a_right_is_withdrawn_before_there_is_a_peer() -> Network:
    """a relies on no right that it has not: its sends stay at home, as their MOVE cannot have a fence WR."""
    net = _changed_before_there_is_a_peer(ALL_RIGHTS, LESS)
    a, _ = ends(net)
    assert not went(net, ev.SwitchStarted) and a.endpoint.core.send_pair == 0
    return end(net)


def a_right_is_given_before_there_is_a_peer() -> Network:
    """a knows of it: its MOVE has a fence WR."""
    net = _changed_before_there_is_a_peer(LESS, ALL_RIGHTS)
    a, _ = ends(net)
    assert not went(net, ev.SwitchStarted) and on(a, 1)
    return end(net)


def _changed_before_there_is_a_peer(before: int, then: int) -> Network:
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    _reset(net)
    b.endpoint.connect(a.endpoint, before)
    wait(net, 50)
    assert b.endpoint.protocol is None
    b.endpoint.set_rights(then)
    a.endpoint.connect(b.endpoint)
    wait(net, 100)
    assert net.protected()
    post(a, "SEND", signaled=False)
    with b.host:
        b.post_recv()
    wait(net, 5)
    a.endpoint.prefer(1)
    wait(net, 500)
    return net


def a_peer_that_comes_again_has_one_backup_less() -> Network:
    """A pair that is no more, and does not follow a change, serves nobody, and nothing else comes of it."""
    net = _comes_again_with_one_backup_less()
    _, b = ends(net)
    net.nics["b"][2].refusing = 1
    no_writes(b)
    assert b.endpoint.qp(2).state == ERR
    fail_over(net)
    return a_write_fails(net)


def a_peer_that_comes_again_has_one_backup_less_before_rts() -> Network:
    """A pair that is no more is not connected anew when the application says how it wants that."""
    net = _comes_again_with_one_backup_less(states=(INIT, RTR))
    _, b = ends(net)
    _to_rts(b)
    wait(net, 100)
    assert net.protected()
    return end(net)


def a_qp_has_one_backup_less_in_its_next_life() -> Network:
    """The same where its own former life had one more."""
    net = armed(1, 3, receives=8, at_start=0)
    a, b = ends(net)
    _reset(net)
    _publish_one_backup(a)
    a.endpoint.connect(b.endpoint)
    b.endpoint.connect(a.endpoint, states=(INIT, RTR))
    wait(net, 100)
    _to_rts(b)
    wait(net, 100)
    assert net.protected()
    return end(net)


def _comes_again_with_one_backup_less(states: Iterable[int] = (INIT, RTR, RTS)) -> Network:
    """a is reset and connected anew before b, which goes as far as that, was protected."""
    net = armed(1, 3, receives=8, at_start=0)
    a, b = ends(net)
    _reset(net)
    net.links["a", 1].hole = lambda p: getattr(p, "kind", None) == "ack"
    b.endpoint.connect(a.endpoint, states=states)
    a.endpoint.connect(b.endpoint)
    given = b.endpoint.connection.given
    until(net, lambda: 2 in given and given[2].state == b.endpoint.qp(2).state == RTS)
    assert b.endpoint.status is Status.PAIRING
    a.endpoint.modify(Attr(), RESET, 1)
    no_hole(net, "a", 1)
    _publish_one_backup(a)
    a.endpoint.connect(b.endpoint)
    wait(net, 200)
    assert net.protected() and given[2].state == RTS
    return net


def a_qp_is_set_up_anew_while_a_backup_hangs() -> Network:
    """No verb of it waits for what the former life's QP there has."""
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    _reset(net)
    net.nics["b"][1].hung = True
    began = net.clock.now
    b.endpoint.connect(a.endpoint, LESS)
    assert net.clock.now - began < 10 * MS
    a.endpoint.connect(b.endpoint)
    return end(net)


def _to_rts(app: Application) -> None:
    """With other timeouts than its pairs were connected with."""
    attr = Attr()
    attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = 18, 6, 6, 8
    app.endpoint.modify(attr, RTS, int(MASKS[RTS]))


def _reset(net: Network) -> None:
    for app in ends(net):
        app.endpoint.modify(Attr(), RESET, 1)
    wait(net, 50)


def _publish_one_backup(app: Application) -> None:
    """Its other ones are of no use in its next life."""
    pairing = app.endpoint.connection.pairing
    pairing._publish = functools.partial(lambda publish, usable: publish(1), pairing._publish)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_is_changed_that_broke_while_a_switch_was_asked_about: ("leave_a_broken_qp_to_the_question",),
    a_right_is_withdrawn_amid_a_fence: ("change_a_qp_before_its_fence_is_done",),
    a_right_is_withdrawn_amid_the_fence_of_a_backup: ("change_a_qp_before_its_fence_is_done",),
    a_right_is_given_back_before_its_withdrawal_is_done: ("publish_the_rights_of_an_earlier_verb",),
    rights_are_changed_twice_on_a_carrier: ("note_what_a_carrier_took_when_it_has_answered",),
    a_right_is_withdrawn_twice: ("wait_for_ones_own_changes_alone",),
    a_withdrawal_is_broken_off_and_said_again: ("change_a_qp_before_its_fence_is_done",),
    a_right_is_withdrawn_before_there_is_a_peer: ("publish_no_change_before_there_is_a_peer",),
    a_right_is_given_before_there_is_a_peer: ("publish_no_change_before_there_is_a_peer",),
    a_peer_that_comes_again_has_one_backup_less_before_rts: ("connect_the_pairs_of_an_earlier_pairing_anew",),
    a_qp_has_one_backup_less_in_its_next_life: ("look_at_what_a_former_life_was_given",),
}

ENDED: dict[Story, tuple[str, ...]] = {
    a_right_is_withdrawn_while_a_switch_is_asked_about: (
        "leave_the_default_qp_when_a_switch_is_asked_about",
    ),
    one_thread_changes_a_timer_and_one_a_right: ("bring_the_pairs_what_was_there_before_the_lock",),
    a_right_is_withdrawn_amid_a_switch_that_leads_home_again: ("count_no_rebuilding",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_right_is_withdrawn_on_a_nic_that_is_busy: ("wait_no_longer_for_a_busy_nic",),
    a_nic_keeps_a_right_when_the_peer_has_left: ("leave_at_once_what_did_not_change",),
    a_peer_that_comes_again_has_one_backup_less: ("put_the_pairs_of_an_earlier_pairing_out_of_this_one",),
    a_qp_is_set_up_anew_while_a_backup_hangs: ("keep_what_a_former_life_was_given",),
}
