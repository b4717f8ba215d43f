# SPDX-License-Identifier: BSD-3-Clause
"""Answers take longer on one rail, as has been known for long. A process that stood still meanwhile changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.clock import MS
from simulator.staged_silence import never_switched, patient
from simulator.story import ends, post, sends, until, wait
from simulator.world import World


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


@pytest.mark.parametrize("after_ms", [50, 500, 2000])
@pytest.mark.parametrize("still_ms", [0, 100, 300, 1100])
@pytest.mark.parametrize("whose", ["ours", "the peer's"])
@pytest.mark.parametrize("rails_ms", [(15, 4), (30, 15), (30, 5)])
def test_what_answers_take_is_known_after_a_stop(
    rails_ms: tuple[float, float], whose: str, still_ms: float, after_ms: float
) -> None:
    """All answers of that time are late by as much, on whichever rail: what one takes beyond the other is the rail's.

    rails_ms: what each takes, one way; after_ms: so long after the stop a message waits for its receive. When the stop
    begins, a ping is on its way on each.
    """
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for k, delay_ms in enumerate(rails_ms):
        for name in "ab":
            net.links[name, k].delay_ns = int(delay_ms * MS)
    wait(net, 4000)
    pings = [path.ping for path in a.endpoint.connection.paths]
    until(net, lambda: all(ping._awaited for ping in pings))
    host = net.a if whose == "ours" else net.b
    host.frozen_until_ns = net.clock.now + int(still_ms * MS)
    wait(net, still_ms + after_ms)
    post(a, "SEND")
    wait(net, 400)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
