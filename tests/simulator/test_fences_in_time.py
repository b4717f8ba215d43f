# SPDX-License-Identifier: BSD-3-Clause
"""A fence that meets an ARM's RESETs in the queue of a slow NIC, in virtual time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from simulator import checks
from simulator.checks import Violation, over
from simulator.clock import MS, US
from simulator.network import Network
from simulator.story import armed, at_home, feed, on, path_failed, post, telling, until, wait

from shiftverbs.failover.qp.rebuild import Rebuild
from shiftverbs.protocol import events as ev


def reset_for_the_second_time() -> Network:
    """The backup's NIC is slow. ARM begins anew before its first RESET is through; home fails behind the second."""
    net = armed(capacity=16, receives=8)
    app = next(app for app in net.apps if app.endpoint.protocol.initiator)
    connection = app.endpoint.connection
    given = lambda: connection.rebuild._resets[1]  # noqa: E731
    before = given()  # when it was paired
    app.endpoint.prefer(1)
    until(net, lambda: all(on(each, 1) for each in net.apps))
    until(net, lambda: not any(each.endpoint.protocol.busy for each in net.apps))
    slow = net.nics[app.device.name][1]
    slow.command_ns = 5 * MS
    app.endpoint.prefer(0)
    until(net, lambda: given() == before + 1)
    slow.mute = True  # what is asked of it before the next one takes until the first is over
    feed(app, ev.PathHealth(1, False))
    feed(app, ev.PathHealth(1, True))
    until(net, lambda: not connection.nic(1).worker.pending())
    wait(net, 1)
    slow.unhang()
    until(net, lambda: given() == before + 2)
    post(app, "SEND")
    path_failed(app, 0)
    wait(net, 2_000)
    slow.command_ns = 30 * US
    until(net, lambda: at_home(net) or any(over(each) for each in net.apps), ms=30_000)
    return net


def test_a_fence_behind_a_second_reset_ends() -> None:
    with telling(reset_for_the_second_time) as net:
        checks.check(net)
        assert all(over(app) is None for app in net.apps) and at_home(net)


class Unforgetful:
    """A QPCore that does not hear that a pair is to be forgotten."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def forget_pair(self, k: int) -> None:
        """Nobody hears it."""


def test_a_reset_that_the_journal_is_not_told_of_is_noticed() -> None:
    """As if only the beginning of an ARM made its pair forgotten: the end of the first RESET undoes that."""
    give = Rebuild._reset

    def untold(rebuild: Rebuild, k: int, arm: int, dummy: bool) -> None:
        connection: Any = rebuild._c
        core = connection.core
        connection.core = Unforgetful(core)
        try:
            give(rebuild, k, arm, dummy)
        finally:
            connection.core = core

    with mock.patch.object(Rebuild, "_reset", untold), telling(reset_for_the_second_time) as net:
        with pytest.raises(Violation, match="fences end"):
            checks.check(net)
