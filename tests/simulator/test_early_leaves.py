# SPDX-License-Identifier: BSD-3-Clause
"""A peer that leaves in the moment in which a QP is protected whose errors have waited for that."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from simulator.clock import MS
from simulator.network import Network
from simulator.story import ends, post, sends, until, wait
from simulator.world import World

from shiftverbs.protocol.events import Status
from shiftverbs.protocol.tables import ArmState


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def test_a_peer_that_leaves_as_we_are_protected() -> None:
    """Its program has seen an error, so it leaves when its half of ARM is through; ours is through a moment before.

    a's NIC was gone, and has refused a send: it has waited for protection, and is told as well.
    """
    net = Network(1, 2, 32, 8, at_start=4)
    a, b = ends(net)
    for name in "ab":
        net.nics[name][1].command_ns = 20 * MS
    wait(net, 3)
    post(a, "SEND")
    wait(net, 1)
    provider = a.endpoint.hardware.shared
    provider.refuse_err[0] = provider.refusal[0] = errno.EIO
    post(a, "SEND")
    assert a.endpoint.status is Status.PAIRING and a.endpoint.core.unwired == (1, 0)
    with b.host:
        b.endpoint.connection.early.end()  # its errors have waited for long enough
    b.endpoint.hardware.to_error()
    until(net, lambda: a.endpoint.protocol is not None, ms=500)
    until(net, lambda: a.endpoint.protocol.pairs[1].state is ArmState.PROBING, ms=500)
    # What ends our half of ARM is found by a look at the CQ; before the run that follows, the peer's BYE is there.
    net.a.frozen_until_ns = net.clock.now + 60 * MS
    until(net, lambda: b.endpoint.status is Status.UNPROTECTED, ms=59)
    with a.host:
        a.endpoint.connection.drain(1)
    wait(net, 5000)
    assert a.endpoint.core.outstanding == (0, 0), (a.endpoint.core.outstanding, a.endpoint.connection.why)
    assert len(sends(a)) == 2 and a.failed
