# SPDX-License-Identifier: BSD-3-Clause
"""Silent paths with three NICs: a third rail, however slow, takes nothing of the patience with the first."""

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


@pytest.mark.parametrize("still_ms", [40, 50])
@pytest.mark.parametrize("delays_ms", [(10, 0.1), (10, 0.1, 0.1), (10, 30, 0.1), (10, 0.1, 30)])
def test_a_peer_goes_on_and_is_heard_on_the_quick_rail_first(
    delays_ms: tuple[float, ...], still_ms: int
) -> None:
    """As in staged_silence.py, where there are two: what an answer takes here beyond that one is waited for."""
    net = patient(receives=4, at_start=0, pairs=len(delays_ms))
    a, b = ends(net)
    for k, delay_ms in enumerate(delays_ms):
        for name in "ab":
            net.links[name, k].delay_ns = int(delay_ms * MS)
    wait(net, 3000)
    post(a, "SEND")
    net.b.frozen_until_ns = net.clock.now + still_ms * MS
    wait(net, still_ms + 60)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
