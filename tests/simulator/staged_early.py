# SPDX-License-Identifier: BSD-3-Clause
"""Stories of failures before a QP is protected. As staged.py."""

from __future__ import annotations

from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.rnic import ERR
from simulator.story import Story, end, ends, on, post, sends, until, wait

from shiftverbs.protocol.events import Status


def _failing() -> tuple[Network, Application, Application]:
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
    net, a, b = _failing()
    post(a, "SEND")
    post(b, "SEND")
    until(net, lambda: on(a, 1) and len(sends(a)) == 3, ms=1000)
    assert sends(a) == ["SUCCESS"] * 3
    return end(net)


def a_qp_fails_and_is_not_protected_in_time() -> Network:
    """Its errors have waited for the deadline, and come in order; nothing is executed behind them."""
    net, a, b = _failing()
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


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_qp_fails_while_it_is_paired: ("show_errors_before_protection", "forget_what_failed_before_protection"),
}

TOLD: dict[Story, tuple[str, ...]] = {
    a_qp_fails_and_is_not_protected_in_time: ("wait_for_protection_for_ever",),
}
