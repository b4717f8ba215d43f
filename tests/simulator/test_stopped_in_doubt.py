# SPDX-License-Identifier: BSD-3-Clause
"""A peer that stops when the first ping of a doubt is answered already, and goes on: that is no death either."""

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


def late_in_doubt(still_ms: float, late_ms: float) -> None:
    """The first ping of a doubt is answered on the other path; then the peer stops, and is that late on this one."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    for name in "ab":
        net.links[name, 0].delay_ns = 1 * MS
    wait(net, 3000)
    post(a, "SEND")
    path, other = (p.ping for p in a.endpoint.connection.paths)
    asked = other._number
    until(net, lambda: other._number > asked and other._answered == other._number, ms=40)
    assert not path.heard_since(net.clock.now - 2 * MS), "that answer is on its way"
    net.b.frozen_until_ns = net.clock.now + int(still_ms * MS)
    net.links["b", 0].delay_ns += int(late_ms * MS)
    wait(net, still_ms + late_ms + 60)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert never_switched(net)


@pytest.mark.parametrize("late_ms", [2, 10])
@pytest.mark.parametrize("still_ms", [0, 25, 40, 60, 80])
def test_it_is_heard_on_the_other_path_first(still_ms: float, late_ms: float) -> None:
    """For once, by some milliseconds: alone that is waited for.

    As where the peer has stood still from the beginning of the doubt on (staged_silence.py): 50 ms say nothing.
    """
    late_in_doubt(still_ms, late_ms)


@pytest.mark.parametrize("takes_ms", [5, 10, 15, 18])
def test_answers_begin_to_take_long(takes_ms: float) -> None:
    """In the moment in which work stands still: less than the 20 ms for which a path may be left wrongly."""
    late_in_doubt(0, takes_ms - 2)
