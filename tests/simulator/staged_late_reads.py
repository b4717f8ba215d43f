# SPDX-License-Identifier: BSD-3-Clause
"""Stories of a READ that reaches a backup which was in use, and is not any more, behind what the application was told.

As staged.py: that no memory is touched behind a flush is what every run is judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import Application
from simulator.clock import MS, US
from simulator.endpoint import Attr
from simulator.network import Network
from simulator.rnic import HALF, MASK, RTS, Packet
from simulator.staged_again import begins_anew
from simulator.story import (
    Story,
    armed,
    at_home,
    away,
    ends,
    executed,
    fail_over,
    feed,
    hole,
    is_request,
    path_failed,
    plan,
    post,
    sends,
    statuses,
    tell,
    until,
    wait,
)

from shiftverbs import _core
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status


def came_home(net: Network, again: bool) -> list[Packet]:
    """Both were on pair 1, where b's READ was answered, and are home; again: the pair has begun another life.

    Returns the READ's request.
    """
    a, b = ends(net)
    for app in (a, b):
        app.endpoint.prefer(1)
    path_failed(a, 0)
    until(net, lambda: all(app.endpoint.protocol.send_pair == 1 for app in ends(net)))
    caught = catch_reads(net, 1)
    post(b, "READ", 1)
    wait(net, 2)
    assert caught
    if not again:
        for nic in net.nics.values():
            nic[1].command_ns = 500 * MS
    for app in (a, b):
        app.endpoint.prefer(0)
    until(net, lambda: at_home(net))
    if again:
        until(net, lambda: all(app.endpoint.qp(1).state == RTS for app in ends(net)))
        wait(net, 20)
        qp = a.endpoint.qp(1)
        # Random PSNs make it one that is long answered in every other case.
        caught[0].psn = (qp.expected - HALF // 2) & MASK
    return caught


def catch_reads(net: Network, k: int) -> list[Packet]:
    """The requests of b's READs on rail k, from now on."""
    caught: list[Packet] = []

    def catch(packet: Any) -> bool:
        if is_request(packet, "READ"):
            caught.append(packet)
        return False

    net.links["b", k].hole = catch
    return caught


def leave_a_spare_default_qp(net: Network) -> None:
    """Traffic is on pair 1, the default QPs were rebuilt and carry nothing."""
    fail_over(net)
    until(net, lambda: all(app.endpoint.protocol.pairs[0].works for app in ends(net)))
    wait(net, 20)


def amid_its_verb(app: Application, do: Callable[[], object]) -> None:
    """Another thread of the program does that, while its verb waits."""
    blocked, app.endpoint.blocked = app.endpoint.blocked, False
    do()
    app.endpoint.blocked = blocked


def poll_amid_its_verb(app: Application) -> None:
    """Another thread of the program polls, while its verb waits."""
    amid_its_verb(app, app.poll)


def comes_late(net: Network, caught: list[Packet]) -> Network:
    """The READ comes again, and the run goes on."""
    a, _ = ends(net)
    wait(net, 1)
    for packet in caught:
        net.links["b", 1]._arrive(packet, net.nics["a"][1])
    wait(net, 2000)
    return net


def _fails_by_itself(app: Application) -> None:
    """It names memory that is not there: its QP is in ERR, and it is told so."""
    app.own_error = "it named memory that is not there"
    bad = plan(app, "WRITE", 1)
    bad.bad = True
    post(app, "SEND")
    until(app.net, lambda: len(statuses(app)) >= 2 and statuses(app)[-1][1] == "WR_FLUSH_ERR", ms=3000)


def an_own_error_at_home_before_the_backup_begins_anew() -> Network:
    """Its flushes wait for the backup to be stopped."""
    net = armed()
    caught = came_home(net, again=False)
    _fails_by_itself(ends(net)[0])
    return comes_late(net, caught)


def an_own_error_at_home_when_the_backup_has_begun_anew() -> Network:
    """The same: what is late may look like what the new life has answered."""
    net = armed()
    caught = came_home(net, again=True)
    _fails_by_itself(ends(net)[0])
    return comes_late(net, caught)


def an_own_error_at_home_when_the_peer_has_left() -> Network:
    """The same: nothing of ours has ended with the pairing."""
    net = armed()
    caught = came_home(net, again=True)
    a, b = ends(net)
    b.close()
    until(net, lambda: a.endpoint.status is Status.UNPROTECTED, ms=1000)
    _fails_by_itself(a)
    return comes_late(net, caught)


def nobody_answers_at_home_when_the_peer_has_left() -> Network:
    """What the application is told is what plain verbs tell it."""
    net = armed()
    caught = came_home(net, again=True)
    a, b = ends(net)
    b.close()
    until(net, lambda: a.endpoint.status is Status.UNPROTECTED, ms=1000)
    post(a, "WRITE", 1)
    post(a, "WRITE", 2)
    until(net, lambda: len(sends(a)) == 2, ms=10_000)
    assert sends(a) == ["RETRY_EXC_ERR", "WR_FLUSH_ERR"]
    return comes_late(net, caught)


def an_own_error_away_while_the_default_nic_is_slow() -> Network:
    """What the default QP was asked before it was fenced comes when it has begun another life, and carries nothing."""
    return _while_the_default_nic_is_slow(refusing=0)


def an_own_error_away_while_the_default_nic_is_slow_and_the_other_refuses() -> Network:
    """The default NIC has the time of a fence all the same."""
    return _while_the_default_nic_is_slow(refusing=1)


def _while_the_default_nic_is_slow(refusing: int) -> Network:
    net = armed()
    a, b = ends(net)
    caught = catch_reads(net, 0)
    post(b, "READ", 1)
    wait(net, 2)
    leave_a_spare_default_qp(net)
    caught[0].psn = (a.endpoint.hardware.expected - HALF // 2) & MASK
    net.nics["a"][0].command_ns = 250 * MS
    net.nics["a"][1].refusing = refusing
    _fails_by_itself(a)
    wait(net, 1)
    net.links["b", 0]._arrive(caught[0], net.nics["a"][0])
    wait(net, 2000)
    return net


def an_own_error_away_while_the_default_nic_hangs() -> Network:
    """Its errors come all the same, when that had the time of a fence: it carries nothing."""
    net = armed()
    a, _ = ends(net)
    leave_a_spare_default_qp(net)
    net.nics["a"][0].hung = True
    a.own_error = "it named memory that is not there"
    plan(a, "WRITE", 1).bad = True
    a.due()
    until(net, lambda: sends(a) == ["REM_ACCESS_ERR"], ms=3000)
    a.posts_on = True
    wr = post(a, "SEND")
    wait(net, 2000)
    assert sends(a) == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"] and not executed(net, wr)
    return net


def the_application_ends_its_qp_away_while_the_default_nic_hangs() -> Network:
    """The same where the pairing is over with it: its flushes come when the default NIC had the time of a fence."""
    return _ends_while_the_default_nic_hangs(lambda a: a.err())


def we_give_a_qp_up_away_while_the_default_nic_hangs() -> Network:
    """And where something of ours has failed."""
    return _ends_while_the_default_nic_hangs(
        lambda a: tell(a, lambda: a.endpoint.connection.give_up("staged"))
    )


def _ends_while_the_default_nic_hangs(end: Callable[[Application], None]) -> Network:
    net = armed()
    a, _ = ends(net)
    leave_a_spare_default_qp(net)
    net.nics["a"][0].hung = True
    hole(net, "a", "SEND", 1)
    post(a, "SEND")
    end(a)
    wait(net, 2000)
    assert a.endpoint.core.outstanding == (0, 0), "nothing is left"
    return net


def a_new_life_is_not_protected_in_time_while_its_nic_refuses() -> Network:
    """Its default QP was one that carried nothing, before RESET; it carries the new life, and is stopped first."""
    net = armed()
    a, b = ends(net)
    leave_a_spare_default_qp(net)
    for app in (a, b):
        app.reset()
        begins_anew(app)
    caught = catch_reads(net, 0)
    for app in (a, b):
        app.endpoint.connect(app.peer.endpoint)
    assert a.endpoint.status is Status.PAIRING
    post(b, "READ", 1)
    wait(net, 0.05)
    assert caught and a.endpoint.status is Status.PAIRING
    net.nics["a"][0].refusing = 1
    a.own_error = "it was not protected in time"
    tell(a, a.endpoint.connection.requirement._end)
    a.poll()
    wait(net, 1)
    net.links["b", 0]._arrive(caught[0], net.nics["a"][0])
    wait(net, 2000)
    return net


def the_application_ends_its_qp_at_home() -> Network:
    """ERR by its own modify."""
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    a.err()
    return comes_late(net, caught)


def the_application_resets_its_qp_at_home() -> Network:
    """RESET."""
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    a.reset()
    return comes_late(net, caught)


def the_application_closes_its_qp_at_home() -> Network:
    """Close."""
    net = armed()
    caught = came_home(net, again=True)
    _comes_while_its_nic_is_slow(net, caught)
    ends(net)[0].close()
    wait(net, 2000)
    return net


def an_own_error_at_home_while_the_backups_nic_is_slow() -> Network:
    """An own error: nothing is flushed until that NIC has stopped the backup."""
    net = armed()
    caught = came_home(net, again=True)
    _comes_while_its_nic_is_slow(net, caught)
    _fails_by_itself(ends(net)[0])
    wait(net, 2000)
    return net


def a_path_fails_at_home_when_something_of_ours_has_failed() -> Network:
    """Nobody protects it any more, and what it had on a backup is to be stopped: it is ended by us, and told so."""
    return _gave_up_at_home(lambda net: net.wall("a", 0, True))


def a_default_qp_breaks_when_something_of_ours_has_failed() -> Network:
    """The same where its NIC says so."""
    return _gave_up_at_home(lambda net: net.qp_fatal("a", 0))


def _gave_up_at_home(fails: Callable[[Network], None]) -> Network:
    net = armed()
    caught = came_home(net, again=True)
    _comes_while_its_nic_is_slow(net, caught)
    a, _ = ends(net)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    fails(net)
    for cell in (1, 2):
        post(a, "WRITE", cell)
    wait(net, 2000)
    assert sends(a)[1:] == ["WR_FLUSH_ERR"], sends(a)
    return net


def the_peer_has_left_and_an_error_is_not_heard_of() -> Network:
    """There were too many events: what the driver finds out in their place ends the QP."""
    net = armed()
    came_home(net, again=True)
    a, b = ends(net)
    b.close()
    until(net, lambda: a.endpoint.status is Status.UNPROTECTED, ms=1000)
    core_event = Connection.core_event

    def unheard(connection: Connection, kind: int, *about: int) -> None:
        if connection is a.endpoint.connection and kind == _core.EV_ERROR:
            connection.catch_up()
        else:
            core_event(connection, kind, *about)

    with mock.patch.object(Connection, "core_event", unheard):
        post(a, "WRITE", 1)
        post(a, "WRITE", 2)
        wait(net, 5000)
    assert sends(a) == ["RETRY_EXC_ERR", "WR_FLUSH_ERR"]
    return net


def another_thread_polls_amid_err() -> Network:
    """Its NIC flushes as soon as the verb has done that, and the backup is stopped behind it."""
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    modify = a.endpoint._hardware_modify

    def polled(attr: Attr, state: int | None) -> None:
        modify(attr, state)
        a.poll()
        net.links["b", 1]._arrive(caught[0], net.nics["a"][1])
        wait(net, 2)

    with mock.patch.object(a.endpoint, "_hardware_modify", polled):
        a.err()
    return comes_late(net, caught)


def err_finds_what_was_withheld_at_home() -> Network:
    """Nobody has heard of that error yet: it is told, and first, when the backup has stopped."""
    return _err_comes_behind_an_error(seen=True)


def err_comes_behind_an_error_that_nobody_has_polled() -> Network:
    """The same, while it lies in the NIC's CQ."""
    return _err_comes_behind_an_error(seen=False)


def err_finds_what_was_withheld_amid_a_move() -> Network:
    """The same, where the fence of a MOVE has closed the gate."""
    return _err_comes_behind_an_error(seen=True, moving=True)


def err_finds_what_was_withheld_of_a_receive_at_home() -> Network:
    """Its NIC failed a receive, and flushed the sends: to a send that is no error of its own."""
    return _err_comes_behind_an_error(seen=True, of_a_receive=True)


def _err_comes_behind_an_error(seen: bool, moving: bool = False, of_a_receive: bool = False) -> Network:
    net = armed()
    caught = came_home(net, again=True)
    a, b = ends(net)
    net.nics["a"][1].command_ns = 5 * MS
    hole(net, "a", "SEND", 0)
    for _ in range(2):
        post(a, "SEND")
    if moving:
        feed(b, ev.PathHealth(1, False))  # its own direction stays
        a.endpoint.prefer(1)
        assert not a.endpoint.core.send_is_open
    wait(net, 0.05)
    if of_a_receive:
        a.endpoint.hardware.to_error(receives=WcStatus.LOC_QP_OP_ERR)
    else:
        a.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)
    if seen:
        with a.host:
            a.endpoint.core.send_cq.drain(0)
        assert a.endpoint.core.first_error(0)
    a.err()
    comes_late(net, caught)
    assert sends(a) == ["WR_FLUSH_ERR" if of_a_receive else "RETRY_EXC_ERR", "WR_FLUSH_ERR"], sends(a)
    return net


def an_own_error_comes_while_sqd_waits_for_a_backup() -> Network:
    """It is in use no more, but was: what is behind the error is flushed when it has stopped."""
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    net.nics["a"][1].command_ns = 300 * MS
    net.links["a", 0].delay_ns = 5 * MS
    a.own_error = "it named memory that is not there"
    plan(a, "WRITE", 1).bad = True
    a.due()
    post(a, "SEND")

    def polled() -> None:
        poll_amid_its_verb(a)
        net.clock.later(50 * US, net.links["b", 1]._arrive, caught[0], net.nics["a"][1])

    net.clock.later(40 * MS, polled)
    with pytest.raises(PyverbsRDMAError):  # its QP is in ERR by then
        a.endpoint.drain()
    wait(net, 1000)
    assert sends(a)[-2:] == ["REM_ACCESS_ERR", "WR_FLUSH_ERR"]
    return net


def what_reset_took_from_a_backup_was_not_complete() -> Network:
    """The default NIC is dead and refuses RESET; the backup was brought there: its flushes prove nothing."""
    net = armed()
    a, _ = ends(net)
    away(net)
    net.kill("a", 0)
    hole(net, "a", "SEND", 1)
    for _ in range(3):
        post(a, "SEND")
    wait(net, 0.2)
    a.reset()
    wait(net, 2000)
    assert "SUCCESS" not in sends(a), sends(a)
    return net


def _comes_while_its_nic_is_slow(net: Network, caught: list[Packet], times: int = 1200) -> None:
    """The READ comes again and again, and a's NIC 1 takes a while for what it is commanded."""
    nic = net.nics["a"][1]
    nic.command_ns = 5 * MS

    def comes(left: int) -> None:
        net.links["b", 1]._arrive(caught[0], nic)
        if left:
            net.clock.later(50 * US, comes, left - 1)

    comes(times)


TOLD: dict[Story, tuple[str, ...]] = {
    what_reset_took_from_a_backup_was_not_complete: ("believe_a_flush_behind_a_reset",),
    the_peer_has_left_and_an_error_is_not_heard_of: ("hear_of_no_error_behind_a_farewell",),
    another_thread_polls_amid_err: ("show_flushes_amid_the_verb",),
    err_finds_what_was_withheld_at_home: ("show_what_was_withheld_amid_err", "flush_what_failed_before_err"),
    err_comes_behind_an_error_that_nobody_has_polled: ("flush_what_nobody_has_polled_before_err",),
    err_finds_what_was_withheld_of_a_receive_at_home: ("tell_a_send_why_a_receive_failed",),
    err_finds_what_was_withheld_amid_a_move: ("flush_what_failed_before_err_amid_a_move",),
    an_own_error_comes_while_sqd_waits_for_a_backup: ("show_flushes_amid_the_verb",),
    an_own_error_at_home_before_the_backup_begins_anew: ("flush_at_home_what_was_away",),
    an_own_error_at_home_when_the_backup_has_begun_anew: (
        "forget_at_reset_who_was_in_use",
        "stop_only_what_is_in_use",
    ),
    an_own_error_at_home_when_the_peer_has_left: ("let_go_of_what_was_away",),
    nobody_answers_at_home_when_the_peer_has_left: ("let_go_of_what_was_away",),
    an_own_error_away_while_the_default_nic_is_slow: ("flush_before_the_default_qp_is_stopped",),
    an_own_error_away_while_the_default_nic_is_slow_and_the_other_refuses: (
        "leave_a_spare_default_qp_at_once",
    ),
    an_own_error_away_while_the_default_nic_hangs: ("wait_for_a_spare_default_qp",),
    the_application_ends_its_qp_away_while_the_default_nic_hangs: (
        "forget_a_spare_default_qp_with_its_pairing",
    ),
    we_give_a_qp_up_away_while_the_default_nic_hangs: ("forget_a_spare_default_qp_with_its_pairing",),
    a_new_life_is_not_protected_in_time_while_its_nic_refuses: ("take_a_new_life_for_spare",),
    the_application_ends_its_qp_at_home: ("stop_only_what_is_in_use",),
    the_application_resets_its_qp_at_home: ("stop_only_what_is_in_use",),
    an_own_error_at_home_while_the_backups_nic_is_slow: ("flush_at_home_what_was_away",),
    a_path_fails_at_home_when_something_of_ours_has_failed: ("leave_what_we_gave_up_to_nobody",),
    a_default_qp_breaks_when_something_of_ours_has_failed: ("leave_what_we_gave_up_to_nobody",),
    the_application_closes_its_qp_at_home: ("stop_only_what_is_in_use",),
}
