# SPDX-License-Identifier: BSD-3-Clause
"""Stories of failures before a QP is protected. As staged.py."""

from __future__ import annotations

import errno
from typing import Any

from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.rnic import ERR, RESET
from simulator.story import Story, end, ends, on, post, sends, until, wait

from shiftverbs.protocol.events import Status
from shiftverbs.shadows.pyverbs_objects import Attr


def failing() -> tuple[Network, Application, Application]:
    """The default rail is dead from the first packet on, and a's WRs have failed there; nobody is protected."""
    net = Network(1, 2, 32, 16)
    a, b = ends(net)
    for name in "ab":
        net.wall(name, 0, True)
        net.nics[name][1].command_ns = 20 * MS  # it takes time to connect the backups
    post(a, "SEND")
    post(a, "WRITE")
    until(net, lambda: a.endpoint.hardware.state == ERR, ms=60)
    wait(net, 1)
    assert a.endpoint.status is Status.PAIRING and not a.wcs
    return net, a, b


def a_qp_fails_while_it_is_paired() -> Network:
    """As soon as it is protected it fails over; what was posted meanwhile comes behind."""
    net, a, b = failing()
    post(a, "SEND")
    post(b, "SEND")
    until(net, lambda: on(a, 1) and len(sends(a)) == 3, ms=1000)
    assert sends(a) == ["SUCCESS"] * 3
    return end(net)


def a_qp_fails_and_is_not_protected_in_time() -> Network:
    """Its errors have waited for the deadline, and come in order; nothing is executed behind them."""
    net, a, b = failing()
    for name in "ab":
        net.wall(name, 1, True)
    post(b, "SEND")
    failed_ns = net.clock.now
    until(net, lambda: len(sends(a)) == 2, ms=2500)
    assert net.clock.now - failed_ns >= 1900 * MS
    assert sends(a) == ["RETRY_EXC_ERR", "WR_FLUSH_ERR"]
    for name in "ab":
        net.wall(name, 1, False)
    wait(net, 5000)
    assert a.endpoint.status is not Status.PROTECTED
    return net


def _refused() -> tuple[Network, Application]:
    """a's default NIC is gone, and refuses what is posted, before anything is protected."""
    net = Network(1, 2, 32, 8, at_start=4)
    a, _ = ends(net)
    for name in "ab":
        net.nics[name][1].command_ns = 20 * MS
    wait(net, 3)
    post(a, "SEND")
    wait(net, 1)
    refuses = a.endpoint.hardware.shared
    refuses.refuse_err[0] = refuses.refusal[0] = errno.EIO
    post(a, "SEND")
    assert a.endpoint.status is Status.PAIRING
    return net, a


def a_nic_refuses_a_send_while_its_qp_is_paired() -> Network:
    """It was accepted for the backup, and gets there."""
    net, a = _refused()
    until(net, lambda: a.endpoint.core.send_pair == 1 and len(sends(a)) == 2, ms=1000)
    assert sends(a) == ["SUCCESS"] * 2
    return end(net)


def a_send_was_refused_and_the_qp_is_not_protected_in_time() -> Network:
    """Nobody takes it in the end: it is told, and so is all else."""
    net, a = _refused()
    for name in "ab":
        net.wall(name, 1, True)
    wait(net, 4000)
    assert a.endpoint.core.outstanding == (0, 0), a.endpoint.core.outstanding
    assert a.endpoint.status is Status.FAILED and len(sends(a)) == 2 and sends(a)[0] == "SUCCESS"
    return net


def connect_anew(net: Network, app: Application, takes_ms: float = 0) -> None:
    """To RESET, which takes its NIC so long, and to RTS."""
    modify = app.endpoint._hardware_modify

    def slowly(attr: Attr, state: int | None) -> None:
        if takes_ms:
            net.wait(lambda: False, takes_ms / 1000)
        modify(attr, state)

    app.endpoint._hardware_modify = slowly  # type: ignore[method-assign]
    app.endpoint.modify(Attr(), RESET, 1)
    app.endpoint._hardware_modify = modify  # type: ignore[method-assign]
    app.endpoint.connect(app.peer.endpoint)


def a_new_life_fails_before_it_is_protected() -> Network:
    """The cable is pulled just behind RTS, and a life that was protected lies behind that."""
    net = Network(1, 2, 32, 4, at_start=0)
    a, b = ends(net)
    wait(net, 100)
    assert a.endpoint.status is Status.PROTECTED
    for app in (a, b):
        net.nics[app.name][1].command_ns = 20 * MS
        connect_anew(net, app)
    for name in "ab":
        net.wall(name, 0, True)
    post(a, "SEND")
    with b.host:
        b.post_recv()
    until(net, lambda: bool(sends(a)), ms=3000)
    assert sends(a) == ["SUCCESS"] and on(a, 1)
    return net


def a_qp_that_has_failed_is_reset() -> Network:
    """Errors that nobody has seen go with RESET: those of before the last look, and the flushes behind them.

    Another thread of the program polls when the verb has begun, and its NIC has not been told yet.
    """
    net, a, _ = failing()
    for _ in range(3):
        post(a, "WRITE")
    net.deliver()  # they are flushed, and nobody has looked
    modify = a.endpoint._hardware_modify
    polled: list[Any] = []

    def when_another_thread_has_polled(attr: Any, state: int | None) -> None:
        polled.append(a.endpoint.cq.poll(16))
        modify(attr, state)

    a.endpoint._hardware_modify = when_another_thread_has_polled  # type: ignore[method-assign]
    a.reset()
    wait(net, 5000)
    assert polled == [(0, [])] and not sends(a), (polled, sends(a))
    return net


def a_qp_that_has_failed_is_reset_in_vain() -> Network:
    """Its NIC is gone by then, and refuses: the error that RESET would have taken is told, and the rest is flushed."""
    net, a, _ = failing()
    for _ in range(3):
        post(a, "WRITE")
    net.deliver()
    net.kill("a", 0)
    a.reset()
    wait(net, 5000)
    assert sends(a) == ["RETRY_EXC_ERR"] + 4 * ["WR_FLUSH_ERR"], sends(a)
    return net


def a_program_ends_its_qp_before_it_is_paired() -> Network:
    """By ERR. It stays there, whatever becomes of its backups."""
    net = Network(1, 2, 32, 4)
    a, b = ends(net)
    a.err()
    wait(net, 1000)
    post(b, "SEND")
    wait(net, 3000)
    assert a.endpoint.hardware.state == ERR and a.endpoint.status is not Status.PROTECTED
    assert sends(b) == ["RETRY_EXC_ERR"] and not a.received
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_fails_while_it_is_paired: ("show_errors_before_protection", "forget_what_failed_before_protection"),
    a_nic_refuses_a_send_while_its_qp_is_paired: ("forget_what_failed_before_protection",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_qp_fails_and_is_not_protected_in_time: ("wait_for_protection_for_ever",),
    a_send_was_refused_and_the_qp_is_not_protected_in_time: ("wait_for_protection_for_ever",),
    a_new_life_fails_before_it_is_protected: ("remember_that_a_life_was_over",),
    a_qp_that_has_failed_is_reset_in_vain: (
        "forget_though_reset_is_refused",
        "flush_what_failed_before_a_reset_in_vain",
    ),
    a_qp_that_has_failed_is_reset: ("forget_what_was_withheld_alone",),
    a_program_ends_its_qp_before_it_is_paired: ("pair_what_the_application_has_ended",),
}
