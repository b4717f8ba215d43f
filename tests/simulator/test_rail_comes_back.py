# SPDX-License-Identifier: BSD-3-Clause
"""A rail that counts as dead beside a silent one counts as alive again when it answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.staged_silence import dead, patient, traffic
from simulator.story import at_home, ends, on, post, sends, until, wait
from simulator.world import World


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def sides(net: Network, sender: str) -> Application:
    """The program that sends, where the other one is to begin ARM or not."""
    a, b = ends(net)
    return a if sender == "a" else b


@pytest.mark.parametrize("blip_ms", [5, 30, 100])
@pytest.mark.parametrize("sender", ["a", "b"])
def test_two_of_three_rails_blink_twice(sender: str, blip_ms: float) -> None:
    """One switch has both. The second time is soon after the first one, when all is at home again."""
    net = patient(pairs=3)
    app = sides(net, sender)
    traffic(app, 100, 3)
    wait(net, 2000)
    suspected_ns = net.clock.now
    for _ in range(2):
        for k in (0, 1):
            dead(net, k, True)
        post(app, "SEND")
        until(net, lambda: on(app, 2), ms=100)
        wait(net, blip_ms)
        for k in (0, 1):
            dead(net, k, False)
        until(net, lambda: at_home(net), ms=2000)
        wait(net, 20)
    if blip_ms == 5:
        assert net.clock.now - suspected_ns < 900 * MS, (
            "the second blink is within half a second of the first"
        )
    wait(net, 20_000)
    p, path = app.endpoint.protocol, app.endpoint.connection.paths[1]
    assert path.ping.alive is True, "it has answered for long"
    assert p.pairs[1].alive is not False and p.all_fit, (p.unfit(1), app.endpoint.connection.shown_why)
    assert set(sends(app)) == {"SUCCESS"}


@pytest.mark.parametrize("sender", ["a", "b"])
def test_what_blinked_twice_is_used_in_the_end(sender: str) -> None:
    """Another switch dies for good later: the only rail that is left answers, and has done so for long."""
    net = patient(pairs=3)
    app = sides(net, sender)
    traffic(app, 100, 3)
    wait(net, 2000)
    for _ in range(2):
        for k in (0, 1):
            dead(net, k, True)
        post(app, "SEND")
        until(net, lambda: on(app, 2), ms=100)
        wait(net, 5)
        for k in (0, 1):
            dead(net, k, False)
        until(net, lambda: at_home(net), ms=2000)
        wait(net, 20)
    wait(net, 20_000)
    for k in (0, 2):
        dead(net, k, True)
    post(app, "SEND")
    until(net, lambda: on(app, 1), ms=1000)
