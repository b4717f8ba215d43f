# SPDX-License-Identifier: BSD-3-Clause
"""A port comes back, and nobody tells its host."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from simulator.checks import check, over
from simulator.clock import MS, SECOND
from simulator.network import Network
from simulator.story import armed, tell, telling

from shiftverbs.native.ibv import EventType
from shiftverbs.shadows.nic import Nic


@pytest.mark.parametrize("name", "ab")
def test_a_port_whose_return_is_not_told_is_found_to_be_back(name: str) -> None:
    """Else traffic would come home by what pings say, leave again by what the last event said, and so on for ever."""
    net = Network(1)
    try:
        net.clock.run(net.clock.now + 30 * MS)
        assert net.protected()
        net.port(name, 0, False, 2 * MS)
        net.clock.run(net.clock.now + 300 * MS)
        assert all(app.endpoint.core.send_pair == 1 for app in net.apps)
        net.port(name, 0, True, None)
        net.clock.run(net.clock.now + 5000 * MS)
        assert all(app.endpoint.core.is_plain and over(app) is None for app in net.apps)
        switches = [t for t, _, action in net.trace if type(action).__name__ == "SwitchStarted"]
        assert len(switches) <= 2 * 15
        net.clock.run(net.clock.now + 5000 * MS)
        assert len(switches) == sum(type(action).__name__ == "SwitchStarted" for _, _, action in net.trace)
        check(net)
    finally:
        net.end()


def test_a_nic_that_hangs_is_asked_for_its_ports_once() -> None:
    with telling(armed) as net:
        a = net.app("a")
        asked: list[Callable[[], None]] = []
        with mock.patch.object(Nic, "look_again", lambda nic, then: asked.append(then)):
            net.port("a", 0, False, 2 * MS)
            net.clock.run(net.clock.now + 20 * SECOND)
            assert len(asked) == 1, "it has not answered"
            with a.host:
                asked.pop()()
            net.clock.run(net.clock.now + 1 * SECOND)
            assert len(asked) == 1, "it has, and the port is still down"


def test_what_was_seen_of_a_port_before_it_failed_again_says_nothing() -> None:
    with telling(armed) as net:
        a = net.app("a")
        events = a.host.runtime.driver.nic_events
        nic = a.endpoint.connection.nic(0)
        asked: list[Callable[[], None]] = []
        with mock.patch.object(Nic, "look_again", lambda nic, then: asked.append(then)):
            net.port("a", 0, False, 2 * MS)
            net.clock.run(net.clock.now + 500 * MS)
            tell(a, lambda: events._on_async(nic, EventType.PORT_ERR, 1))  # it was up in between, and seen
            with a.host:
                asked.pop(0)()
            net.clock.run(net.clock.now + 1 * MS)
            assert not events.port_ok(nic, 1)
