# SPDX-License-Identifier: BSD-3-Clause
"""How soon a path that dies in silence is left, where staged_silence.py does not look: within 55 ms, as there.

Among many QPs that do nothing, or work as well; while a message waits for its receive; before it was protected. And
what is no death: a peer whose process stands still.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.application import Application
from simulator.clock import MS
from simulator.network import Network
from simulator.staged_silence import dead, never_switched, patient, traffic
from simulator.story import ends, on, post, sends, until, wait
from simulator.world import World

from shiftverbs.protocol.events import Status


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def left_within(net: Network, app: Application) -> float:
    """So many ms until its traffic is on the backup."""
    began = net.clock.now
    until(net, lambda: on(app, 1), ms=3000)
    return (net.clock.now - began) / MS


@pytest.mark.parametrize("qps", [1, 65, 200])
def test_among_many_qps(qps: int) -> None:
    """One works; all the others are idle."""
    net = Network(1, 2, 4, 2, qps=qps)
    wait(net, 400)
    assert net.protected()
    for qp in net.qps:
        qp.RETRY_NS = 60_000 * MS
    wait(net, 1500)
    a = net.app("a")
    traffic(a, 5, 3, "WRITE")
    dead(net, 0, True)
    post(a, "WRITE")
    assert left_within(net, a) <= 55


@pytest.mark.parametrize("qps", [100, 200])
def test_of_many_that_work_none_waits_for_its_nic(qps: int) -> None:
    """All of them: what one has found, the others have soon."""
    net = Network(1, 2, 4, 2, qps=qps)
    wait(net, 400)
    assert net.protected()
    for qp in net.qps:
        qp.RETRY_NS = 60_000 * MS
    wait(net, 300)
    for app in net.apps_of("a"):
        post(app, "WRITE")
    wait(net, 3)
    dead(net, 0, True)
    for app in net.apps_of("a"):
        post(app, "WRITE")
    began = net.clock.now
    until(net, lambda: all(on(app, 1) for app in net.apps_of("a")), ms=3000)
    assert (net.clock.now - began) / MS <= 110 + qps / 2


@pytest.mark.parametrize("qps", [1, 200])
def test_what_a_message_that_waits_costs_in_pings(qps: int) -> None:
    """As many as in staged_silence.py, however many other QPs there are."""
    net = Network(1, 2, 2, 2, qps=qps, at_start=0)
    wait(net, 500)
    assert net.protected()
    for qp in net.qps:
        qp.RETRY_NS = 60_000 * MS
    wait(net, 500)
    a = net.app("a")
    ping = a.endpoint.connection.paths[0].ping
    asked = ping._number
    post(a, "SEND")
    wait(net, 240)
    assert ping._number - asked <= 40


@pytest.mark.parametrize("age_ms", [30, 100, 350, 900])
def test_while_a_message_waits_for_its_receive(age_ms: int) -> None:
    """Its path answered when it was last asked, and dies then. It is asked again when the message is twice as old."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    wait(net, 2000)
    post(a, "SEND")
    wait(net, age_ms)
    dead(net, 0, True)
    took_ms = left_within(net, a)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert took_ms <= 55 + min(age_ms, 250)


@pytest.mark.parametrize("longer_ms", [1, 5])
def test_a_peer_stands_still_while_nobody_works(longer_ms: int) -> None:
    """The last WRITE was unsignaled, so it counts as old work. A stop of a fifth of a second is no death."""
    left = []
    for still_ms in range(200, 320, 6):
        net = patient(receives=4)
        a, _ = ends(net)
        for name in "ab":
            net.links[name, 0].delay_ns = longer_ms * MS
        wait(net, 2000)
        post(a, "WRITE", signaled=False)
        wait(net, 1500)
        net.b.frozen_until_ns = net.clock.now + still_ms * MS
        wait(net, still_ms + 100)
        if not never_switched(net):
            left.append(still_ms)
        net.end()
    assert not left, f"of 20 stops of 200 to 314 ms these were taken for the path's death: {left}"


@pytest.mark.parametrize("at_ms", [1, 4.5])
def test_where_it_died_before_its_qp_was_protected(at_ms: float) -> None:
    """And no NIC tells: its pings were never answered there."""
    net = Network(1, 2, 32, 16)
    a, _ = ends(net)
    for qp in net.qps:
        qp.RETRY_NS = 60_000 * MS
    wait(net, at_ms)
    assert a.endpoint.status is Status.PAIRING
    dead(net, 0, True)
    post(a, "SEND")
    until(net, lambda: a.endpoint.status is Status.PROTECTED, ms=100)
    assert left_within(net, a) <= 55


@pytest.mark.parametrize("longer_ms", [1, 5])
def test_a_peer_stands_still_for_a_second(longer_ms: int) -> None:
    """Its work is old and no path answers; then both do, one of them some milliseconds later. Nothing has died."""
    left = []
    for still_ms in range(1000, 1240, 8):
        net = patient(receives=4, at_start=0)
        a, b = ends(net)
        for name in "ab":
            net.links[name, 0].delay_ns = longer_ms * MS
        wait(net, 2000)
        post(a, "SEND")
        wait(net, 2)
        net.b.frozen_until_ns = net.clock.now + still_ms * MS
        wait(net, still_ms + 100)
        with b.host:
            b.post_recv()
        until(net, lambda app=a: sends(app) == ["SUCCESS"])
        if not never_switched(net):
            left.append(still_ms)
        net.end()
    assert not left, f"of 30 stops of 1,000 to 1,232 ms these were taken for the path's death: {left}"
