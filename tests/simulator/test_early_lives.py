# SPDX-License-Identifier: BSD-3-Clause
"""A program that ends a life of its QP before anything is protected: that life is over, the next one begins anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from simulator.clock import MS
from simulator.network import Network
from simulator.rnic import ERR, Nic
from simulator.staged_early import connect_anew
from simulator.story import ends, on, post, sends, until, wait
from simulator.world import World

from shiftverbs.protocol.events import Status


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def slow_backups(ms: float) -> Callable[[dict[str, list[Nic]]], None]:
    """The backups need so long for each object that is made on them."""

    def slow(nics: dict[str, list[Nic]]) -> None:
        for rails in nics.values():
            for nic in rails[1:]:
                nic.command_ns = nic.making_ns = int(ms * MS)

    return slow


@pytest.mark.parametrize(("at_ms", "making_ms"), [(0, 0.03), (0, 5), (3, 5), (30, 50)])
@pytest.mark.parametrize("receives", [0, 4])
def test_a_qp_that_was_moved_to_err_stays_there(at_ms: float, making_ms: float, receives: int) -> None:
    """Whatever becomes of its shadows: its peer gets the error that plain verbs have for it."""
    net = Network(1, 2, 32, 4, at_start=receives, with_nics=slow_backups(making_ms))
    a, b = ends(net)
    wait(net, at_ms)
    a.err()
    wait(net, 1000)
    flushed = [number for _, number, status in a.wcs if status != 0]
    post(b, "SEND")
    wait(net, 3000)
    assert a.endpoint.hardware.state == ERR and a.endpoint.status is not Status.PROTECTED
    assert flushed == list(range(receives)) and sends(b) == ["RETRY_EXC_ERR"] and not a.received


@pytest.mark.parametrize(
    ("at_ms", "takes_ms"),
    [(0, 0), (0, 2), (4.5, 0), (100, 0)],
    ids=["at once", "slowly", "paired", "protected"],
)
def test_what_fails_in_the_next_life_waits_for_its_protection(at_ms: float, takes_ms: float) -> None:
    """The cable is pulled just behind RTS, whatever the life before it had come to."""
    net = Network(1, 2, 32, 4, at_start=0)
    a, b = ends(net)
    wait(net, at_ms)
    assert (a.endpoint.status is Status.PROTECTED) == (at_ms == 100)
    for app in (a, b):
        net.nics[app.name][1].command_ns = 20 * MS
        connect_anew(net, app, takes_ms)
    for name in "ab":
        net.wall(name, 0, True)
    post(a, "SEND")
    with b.host:
        b.post_recv()
    until(net, lambda: bool(sends(a)), ms=3000)
    assert sends(a) == ["SUCCESS"] and on(a, 1)
