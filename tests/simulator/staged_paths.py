# SPDX-License-Identifier: BSD-3-Clause
"""Stories of how it is seen that a path fails, and that it is back. As staged.py."""

from __future__ import annotations

from simulator.clock import MS
from simulator.network import Network
from simulator.story import Story, armed, at_home, end, ends, on, post, until, wait


def a_port_fails_and_its_nic_says_nothing() -> Network:
    """a's NIC answers no question while its port is down. What was seen of that before says nothing of now."""
    net = armed()
    a, _ = ends(net)
    nic, events = a.endpoint.connection.nic(0), a.host.runtime.driver.nic_events
    net.nics["a"][0].failing = True
    net.port("a", 0, False, 2 * MS)
    until(net, lambda: on(a, 1), ms=100)
    wait(net, 1000)
    assert not events.port_ok(nic, 1), "it counts as up, and nobody has seen it so"
    net.port("a", 0, True, None)  # and nobody tells
    net.nics["a"][0].failing = False
    until(net, lambda: at_home(net), ms=5000)
    post(a, "SEND")
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_port_fails_and_its_nic_says_nothing: ("believe_a_look_that_failed",),
}
