# SPDX-License-Identifier: BSD-3-Clause
"""Stories of backups that are to be stopped, as the application moves its QP to RESET or SQD, and whose NIC refuses.

As staged.py.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import Application
from simulator.clock import MS, US
from simulator.endpoint import Attr
from simulator.network import Network
from simulator.rnic import ERR, INIT, RESET
from simulator.staged_again import begins_anew, connect_anew
from simulator.staged_ends import wants_a_fence
from simulator.staged_late_reads import (
    amid_its_verb,
    came_home,
    catch_reads,
    comes_late,
    leave_a_spare_default_qp,
    poll_amid_its_verb,
)
from simulator.story import (
    Story,
    armed,
    at_home,
    away,
    ends,
    go,
    hole,
    path_failed,
    plan,
    post,
    sends,
    statuses,
    until,
    wait,
)

from shiftverbs import _core
from shiftverbs.failover.runtime import Runtime
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.qp import ShadowQP

SECOND = 1000 * MS


@contextlib.contextmanager
def _refusing(app: Application, k: int, times: int) -> Iterator[list[int]]:
    """NIC k refuses so many transitions, RESET too; yields how many are left."""
    verbs, nic = app.host.verbs, app.net.nics[app.device.name][k]
    carried_out, left = verbs.modify, [times]

    def refused(pointer: int, steps: Any) -> tuple[int, int]:
        qp = verbs.qps.get(pointer)
        if qp is not None and qp.nic is nic and left[0]:
            left[0] -= 1
            return errno.ETIMEDOUT, 0
        result: tuple[int, int] = carried_out(pointer, steps)
        return result

    with mock.patch.object(verbs, "modify", refused):
        yield left


@contextlib.contextmanager
def _default_refuses(app: Application, hangs: bool = False) -> Iterator[None]:
    """The application's own verb is refused; hangs: and its NIC carries out nothing from then on."""

    def refused(attr: Attr, state: int | None) -> None:
        app.net.nics[app.device.name][0].hung = hangs
        raise PyverbsRDMAError("Failed to modify QP", errno.ETIMEDOUT)

    with mock.patch.object(app.endpoint, "_hardware_modify", refused):
        yield


def _connected_anew(net: Network) -> None:
    """Both programs have reset their QP, and connect it."""
    for app in ends(net):
        if app.endpoint.shadow.app_state != RESET:
            app.reset()
        begins_anew(app)
    for app in ends(net):
        app.endpoint.connect(app.peer.endpoint)


def _breaks(app: Application) -> None:
    """Its default QP goes to ERR, and the NIC says so."""
    app.net.qp_fatal(app.device.name, 0)
    app.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)


def a_backup_refuses_to_be_stopped_in_sqd() -> Network:
    """Once: it is asked again, and what comes late is not answered behind the flushes of an error at home."""
    return _refuses_in_sqd(1)


def a_backup_refuses_to_be_stopped_in_sqd_again_and_again() -> Network:
    """The verb returns all the same, and errors wait until the backup has stopped."""
    return _refuses_in_sqd(30)


def _refuses_in_sqd(times: int) -> Network:
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    net.nics["a"][1].refusing = times
    a.endpoint.drain()
    _breaks(a)
    return comes_late(net, caught)


def a_backup_refuses_slowly() -> Network:
    """Each time after 50 s, as hardware does that is dying: SQD asks once more, and no third time."""
    net = armed()
    came_home(net, again=True)
    a, _ = ends(net)
    net.nics["a"][1].command_ns, net.nics["a"][1].refusing = 50 * SECOND, 10
    begun_ns = net.clock.now
    a.endpoint.drain()
    assert net.clock.now - begun_ns < 110 * SECOND
    net.nics["a"][1].command_ns, net.nics["a"][1].refusing = 20 * US, 0
    return net


def a_backup_that_carries_traffic_refuses_reset() -> Network:
    """Once: nothing touches the memory when the verb has returned."""
    net = armed()
    a, b = ends(net)
    caught = catch_reads(net, 1)
    away(net)
    post(b, "READ", 1)
    wait(net, 2)
    with _refusing(a, 1, 1):
        a.reset()
    assert caught
    return comes_late(net, caught)


def a_backup_that_carries_traffic_refuses_reset_for_a_while() -> Network:
    """The same, for 30 ms."""
    net = armed()
    a, b = ends(net)
    caught = catch_reads(net, 1)
    away(net)
    post(b, "READ", 1)
    wait(net, 2)
    with _refusing(a, 1, 10**6) as left:
        net.clock.later(30 * MS, left.__setitem__, 0, 0)
        a.reset()
    assert caught
    return comes_late(net, caught)


def a_backup_that_refused_once_is_stopped_in_another_life() -> Network:
    """A QP whose backup would not be stopped at RESET: SQD, in the next life, finds it well and keeps no error."""
    net = armed()
    a, _ = ends(net)
    away(net)
    with _refusing(a, 1, 1000):
        a.reset()
    connect_anew(net)
    path_failed(a, 0)
    until(net, lambda: all(app.endpoint.protocol.send_pair == 1 for app in ends(net)))
    for app in ends(net):
        app.endpoint.prefer(0)
    until(net, lambda: at_home(net))
    wait(net, 50)
    a.endpoint.drain()
    net.nics["a"][1].hung = True
    _breaks(a)
    wait(net, 10)
    assert [status for _, status in statuses(a)[-1:]] == ["WR_FLUSH_ERR"]
    net.nics["a"][1].unhang()
    return net


def backup_and_default_nic_refuse_reset() -> Network:
    """The QP is as it was, and unprotected: it is told what comes of what is posted."""
    net = armed()
    came_home(net, again=True)
    a, _ = ends(net)
    with _refusing(a, 1, 1000), _default_refuses(a):
        a.reset()
    a.left = a.failed = False
    a.own_error = "its QP is not protected any more, and its cable is cut"
    hole(net, "a", "SEND", 0)
    post(a, "SEND")
    wait(net, 5000)
    assert sends(a)[-1:] == ["RETRY_EXC_ERR"], sends(a)
    return net


def the_default_nic_refuses_reset_and_hangs() -> Network:
    """Its QP carried nothing, and does not now: the errors of what was away come when it had the time of a fence."""
    net = armed()
    a, _ = ends(net)
    leave_a_spare_default_qp(net)
    hole(net, "a", "SEND", 1)
    post(a, "SEND")
    with _default_refuses(a, hangs=True):
        a.reset()
    wait(net, 3000)
    assert a.endpoint.core.outstanding == (0, 0)
    return net


def a_move_has_its_fence_as_reset_begins_and_is_refused() -> Network:
    """Another thread posts it while the verb waits for the driver's lock: nobody but the QP's end opens that gate."""
    net = armed()
    a, _ = ends(net)
    a.posts_on = True
    wants_a_fence(net)
    leaving = ShadowQP.leaving

    def posts(shadow: ShadowQP, state: int) -> bool:
        amid_its_verb(a, lambda: post(a, "SEND"))
        return leaving(shadow, state)

    with mock.patch.object(ShadowQP, "leaving", posts), _default_refuses(a, hangs=False):
        a.reset()
    assert a.failed
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    wait(net, 3000)
    assert a.endpoint.core.outstanding == (0, 0)
    return net


def an_error_is_withheld_as_sqd_begins_and_a_backup_refuses() -> Network:
    """Its event was taken, and went with the pairing: the QP ends all the same."""
    return _withheld_as_sqd_begins(hung=False)


def an_error_is_withheld_as_sqd_begins_and_a_backup_hangs() -> Network:
    """And is not shown before the backup has stopped."""
    return _withheld_as_sqd_begins(hung=True)


def _withheld_as_sqd_begins(hung: bool) -> Network:
    net = armed()
    caught = came_home(net, again=True)
    a, _ = ends(net)
    backup = net.nics["a"][1]
    backup.hung, backup.refusing = hung, 0 if hung else 40
    hole(net, "a", "SEND", 0)
    for _ in range(2):
        post(a, "SEND")
    look, driver = ShadowQP.look_for_failure, a.host.runtime.driver

    def looked(shadow: ShadowQP) -> None:
        look(shadow)
        if shadow is a.endpoint.shadow:
            a.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)
            a.endpoint.core.send_cq.drain(0)
            if not hung:
                driver._collect(driver.now_ns())

    def polled() -> None:
        poll_amid_its_verb(a)
        net.clock.later(50 * US, net.links["b", 1]._arrive, caught[0], backup)

    if hung:
        net.clock.later(40 * MS, polled)
        net.clock.later(3 * SECOND, backup.unhang)
    with mock.patch.object(ShadowQP, "look_for_failure", looked), pytest.raises(PyverbsRDMAError):
        a.endpoint.drain()  # its QP is in ERR by then
    wait(net, 5000)
    assert a.endpoint.core.outstanding == (0, 0)
    return net


def an_error_comes_while_reset_waits_for_a_backup() -> Network:
    """Another thread polls it: it ends that life, and none of the next."""
    return _ends_amid_reset(early=False)


def an_error_comes_amid_reset_and_one_in_the_next_life() -> Network:
    """Before that is protected: it is withheld, as if there had been no life before."""
    return _ends_amid_reset(early=True)


def _ends_amid_reset(early: bool) -> Network:
    net = armed()
    came_home(net, again=True)
    a, b = ends(net)
    net.nics["a"][1].command_ns, net.links["a", 0].delay_ns = 1 * MS, 100 * US
    a.own_error = "it named memory that is not there"
    plan(a, "WRITE", 1).bad = True
    a.due()
    post(a, "SEND")

    net.clock.later(500 * US, poll_amid_its_verb, a)
    a.reset()
    net.nics["a"][1].command_ns, net.links["a", 0].delay_ns = 30 * US, 1 * US
    a.own_error = ""
    _connected_anew(net)
    if early:
        hole(net, "a", "SEND", 0)
        post(a, "SEND")
        a.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)
    until(net, lambda: all(app.endpoint.status is Status.PROTECTED for app in ends(net)), ms=3000)
    post(b, "SEND")
    if not early:
        post(a, "SEND")
    wait(net, 100)
    assert sends(a) == sends(b) == ["SUCCESS"], (sends(a), sends(b))
    return net


def a_rebuild_is_under_way_as_reset_is_done() -> Network:
    """The default NIC's thread is at something else for longer than RESET waits for it: it reaches no later life."""
    net = armed()
    a, _ = ends(net)
    _rebuild_hangs(net)
    net.clock.later(8 * SECOND, net.nics["a"][0].unhang)
    a.reset()
    return _works_anew(net)


def a_rebuild_ends_as_reset_is_done() -> Network:
    """That NIC answers again with the application's RESET, and nobody looks before it has carried out the rebuild."""
    net = armed()
    a, _ = ends(net)
    _rebuild_hangs(net)
    endpoint = a.endpoint
    worker, default = endpoint.connection.nic(0).worker, endpoint.shadow.default
    hardware_modify = endpoint._hardware_modify

    def resets(attr: Attr, state: int | None) -> None:
        hardware_modify(attr, state)
        if state == RESET:
            net.nics["a"][0].unhang()
            a.host.wait(lambda: not worker.pending(default), 10)

    with mock.patch.object(endpoint, "_hardware_modify", resets):
        a.reset()
    assert endpoint.hardware.state == RESET
    return _works_anew(net)


def _rebuild_hangs(net: Network) -> None:
    """a's default QP is to be made anew, and its NIC hangs as that begins."""
    a, _ = ends(net)
    path_failed(a, 0)
    a.endpoint.prefer(1)
    worker, default = a.endpoint.connection.nic(0).worker, a.endpoint.shadow.default
    submit = worker.submit

    def submitted(tag: Any, pointer: int, steps: Any) -> None:
        if pointer == default and steps.steps[0].get("state") == RESET:
            net.nics["a"][0].hung = True
        submit(tag, pointer, steps)

    with mock.patch.object(worker, "submit", submitted):
        wait(net, 30)
    assert net.nics["a"][0].hung


def _works_anew(net: Network) -> Network:
    _connected_anew(net)
    wait(net, 9000)
    for app in ends(net):
        post(app, "SEND")
    wait(net, 100)
    for app in ends(net):
        assert sends(app) == ["SUCCESS"], (app.name, sends(app))
    return net


def a_slow_backup_refuses_reset_once() -> Network:
    """Its command takes 2.5 s: it has the time for another one all the same."""
    net = armed()
    came_home(net, again=True)
    a, _ = ends(net)
    net.nics["a"][1].command_ns = 2500 * MS
    with _refusing(a, 1, 1):
        a.reset()
    assert a.endpoint.qp(1).state == RESET and not a.endpoint.connection.nic(1).refuses
    net.nics["a"][1].command_ns = 30 * US
    return net


def an_error_waits_for_its_turn_as_reset_is_done() -> Network:
    """The driver has much to do: what it has heard of a life that is over, and not looked at, is none of the next."""
    net = armed()
    a, b = ends(net)
    driver, reset = a.host.runtime.driver, Runtime.qp_reset

    def heard(runtime: Runtime, shadow: ShadowQP) -> None:
        connection = shadow.connection
        if connection is a.endpoint.connection:
            told = (_core.EV_APP_ERROR, 0, int(WcStatus.REM_ACCESS_ERR), 0, net.clock.now)
            driver.later(connection, connection.core_event, *told)
        reset(runtime, shadow)

    with mock.patch.object(Runtime, "qp_reset", heard):
        a.reset()
    _connected_anew(net)
    hole(net, "a", "SEND", 0)
    post(a, "SEND")
    a.endpoint.hardware.to_error(WcStatus.RETRY_EXC_ERR)
    until(net, lambda: all(app.endpoint.status is Status.PROTECTED for app in (a, b)), ms=3000)
    wait(net, 100)
    assert sends(a) == ["SUCCESS"], sends(a)
    return net


def one_backups_nic_refuses_for_good_and_another_once() -> Network:
    """That one is asked again all the same."""
    net = armed(pairs=3)
    a, b = ends(net)
    caught = catch_reads(net, 2)
    for k in (1, 2):
        for app in (a, b):
            app.endpoint.prefer(k)
        until(net, lambda k=k: all(app.endpoint.protocol.send_pair == k for app in ends(net)))  # type: ignore[misc]
        wait(net, 5)
    post(b, "READ", 1)
    wait(net, 2)
    a.endpoint.connection.nic(1).refuses = True
    with _refusing(a, 1, 10**6), _refusing(a, 2, 1):
        a.reset()
    assert caught and a.endpoint.qp(2).state == RESET
    return net


def a_backups_nic_refuses_for_all_qps() -> Network:
    """Four QPs of one process are brought to RESET, one after the other: the NIC is asked for two seconds once."""
    net = armed(qps=4)
    for app in net.apps:
        app.endpoint.prefer(1)
    wait(net, 100)
    mine = [app for app in net.apps if app.device.name == "a"]
    begun_ns = net.clock.now
    with _refusing(mine[0], 1, 10**6):
        for app in mine:
            app.reset()
    assert net.clock.now - begun_ns < 3 * SECOND
    return net


def a_backup_could_not_be_made_fit() -> Network:
    """Its RESET was done, INIT was not: in RESET it is stopped, and SQD asks for nothing more."""
    net = armed()
    a, _ = ends(net)
    verbs, nic = a.host.verbs, net.nics["a"][1]
    carried_out, fails = verbs.modify, False

    def half(pointer: int, steps: Any) -> tuple[int, int]:
        qp = verbs.qps.get(pointer)
        if qp is not None and qp.nic is nic:
            states = [step.get("state") for step in steps.steps]
            if fails and states[:2] == [RESET, INIT]:
                qp.modify({"state": RESET})
                return errno.EIO, 1
            if qp.state == RESET and states == [ERR]:
                return errno.EINVAL, 0  # as the kernel has it
        result: tuple[int, int] = carried_out(pointer, steps)
        return result

    with mock.patch.object(verbs, "modify", half):
        for app in ends(net):
            app.endpoint.prefer(1)
        path_failed(a, 0)
        until(net, lambda: all(app.endpoint.protocol.send_pair == 1 for app in ends(net)))
        post(a, "SEND")
        wait(net, 2)
        fails = True
        for app in ends(net):
            app.endpoint.prefer(0)
        until(net, lambda: at_home(net))
        wait(net, 200)
        begun_ns = net.clock.now
        a.endpoint.drain()
        assert net.clock.now - begun_ns < 100 * MS and not a.endpoint.core.guarded
    return net


TOLD: dict[Story, tuple[str, ...]] = {
    a_backup_refuses_to_be_stopped_in_sqd: ("ask_a_backup_to_stop_once",),
    a_backup_refuses_to_be_stopped_in_sqd_again_and_again: ("let_go_of_a_backup_that_refused",),
    a_backup_refuses_slowly: ("ask_a_slow_nic_for_ever",),
    a_backup_that_carries_traffic_refuses_reset: ("ask_a_backup_to_stop_once", "take_a_refusal_for_a_stop"),
    a_backup_that_carries_traffic_refuses_reset_for_a_while: ("ask_a_backup_to_stop_once",),
    a_backup_that_refused_once_is_stopped_in_another_life: ("remember_a_refusal_for_good",),
    backup_and_default_nic_refuse_reset: ("keep_errors_behind_a_refused_reset",),
    the_default_nic_refuses_reset_and_hangs: ("forget_a_spare_default_qp_before_reset",),
    an_error_is_withheld_as_sqd_begins_and_a_backup_refuses: ("forget_what_was_withheld_in_sqd",),
    an_error_comes_while_reset_waits_for_a_backup: ("end_a_new_life",),
    an_error_comes_amid_reset_and_one_in_the_next_life: ("remember_that_a_life_was_over",),
    a_rebuild_is_under_way_as_reset_is_done: ("leave_a_command_to_the_next_life",),
    a_move_has_its_fence_as_reset_begins_and_is_refused: ("leave_gates_closed_where_reset_was_refused",),
    a_rebuild_ends_as_reset_is_done: ("look_for_commands_behind_the_verb_alone",),
    a_slow_backup_refuses_reset_once: ("take_the_time_of_a_slow_nic_for_refusals",),
    an_error_waits_for_its_turn_as_reset_is_done: ("keep_a_former_lifes_backlog",),
    one_backups_nic_refuses_for_good_and_another_once: ("ask_all_nics_once_where_one_refuses",),
    a_backups_nic_refuses_for_all_qps: ("ask_a_nic_that_refuses_for_each_qp",),
    a_backup_could_not_be_made_fit: ("bring_what_is_in_reset_to_err",),
    an_error_is_withheld_as_sqd_begins_and_a_backup_hangs: ("show_flushes_amid_the_verb",),
}
