# SPDX-License-Identifier: BSD-3-Clause
"""A port comes back, and nobody tells its host."""

from __future__ import annotations

import pytest
from simulator.checks import check, over
from simulator.clock import MS
from simulator.network import Network


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
