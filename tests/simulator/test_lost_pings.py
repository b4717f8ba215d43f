# SPDX-License-Identifier: BSD-3-Clause
"""Pings that are lost on one rail, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator.staged_silence import never_switched, patient
from simulator.story import ends, post, said, sends, until, wait
from simulator.world import World

from shiftverbs.protocol.codec import Ping


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever network a test has made is ended behind it."""
    yield
    if World.current is not None:
        World.current.end()


def test_five_pings_in_a_row_are_lost_while_a_message_waits() -> None:
    """Where one packet in ten is lost each way, that happens a dozen times an hour."""
    net = patient(receives=4, at_start=0)
    a, b = ends(net)
    wait(net, 2000)
    post(a, "SEND")
    wait(net, 1500)
    net.links["a", 0].drops += [lambda p: any(isinstance(m, Ping) and not m.answer for m in said(p))] * 5
    wait(net, 1000)
    with b.host:
        b.post_recv()
    until(net, lambda: sends(a) == ["SUCCESS"])
    assert not net.links["a", 0].drops and never_switched(net)
