# SPDX-License-Identifier: BSD-3-Clause
"""Doubt about a path costs a ping every 2 ms for 100 ms at most, also where its path is silent and is not left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.network import Network
from simulator.staged_silence import dead, patient, traffic
from simulator.story import ends, on, post, until, wait
from simulator.world import World


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def _asked(net: Network, k: int) -> int:
    return int(net.app("a").endpoint.connection.paths[k].ping._number)


@pytest.mark.parametrize("whose", ["ours", "the peer's"])
def test_a_silent_path_with_work_that_cannot_be_replayed(whose: str) -> None:
    """Nobody fences for a hint what cannot be replayed: its NIC decides, which may take minutes."""
    net = patient()
    a, b = ends(net)
    traffic(a, 20, 3)
    wait(net, 2000)
    net.one_rail_is_well = True
    dead(net, 0, True)
    post(a if whose == "ours" else b, "FADD", cell=8)
    if whose != "ours":
        post(a, "SEND")
    wait(net, 200)
    before = [_asked(net, k) for k in range(2)]
    wait(net, 3000)
    asked = [_asked(net, k) - before[k] for k in range(2)]
    assert not on(a, 1)
    assert max(asked) <= 400, f"pings in 3 s, by rail: {asked}"
    dead(net, 0, False)
    until(net, lambda: a.endpoint.core.outstanding[0] == b.endpoint.core.outstanding[0] == 0, ms=120_000)
