# SPDX-License-Identifier: BSD-3-Clause
"""Work is old, its peer stands still, and answers take longer on the other rail: that one is missed later.

The reverse of `a_peer_stands_still_for_a_second` in staged_silence.py.
"""

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


@pytest.mark.parametrize("still_ms", [200, 400, 600, 900, 1100])
@pytest.mark.parametrize("rails_ms", [(0.1, 0.1), (0.1, 10), (1, 20), (1, 30), (20, 1)])
def test_a_peer_stands_still(rails_ms: tuple[float, float], still_ms: float) -> None:
    """rails_ms: what each takes, one way, as is known. The message has waited for its receive for two seconds."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for k, delay_ms in enumerate(rails_ms):
        for name in "ab":
            net.links[name, k].delay_ns = int(delay_ms * MS)
    wait(net, 3000)
    post(a, "SEND")
    wait(net, 2000)
    net.b.frozen_until_ns = net.clock.now + int(still_ms * MS)
    wait(net, still_ms + 300)
    assert never_switched(net)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)
