# SPDX-License-Identifier: BSD-3-Clause
"""A fence that meets an ARM's RESETs in the queue of a slow NIC, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from simulator import checks
from simulator.checks import Violation
from simulator.hosts import Network, Side
from simulator.rnic import MS
from simulator.test_golden_in_time import armed, at_home, post, until, wait

from shiftverbs.protocol import events as ev


def step_until(net: Network, done: Callable[[], bool]) -> None:
    """As `until`, and no event further."""
    while not done():
        net.clock.run(net.clock.now + MS // 20)


def reset_for_the_second_time() -> Network:
    """The backup's NIC is slow. ARM begins anew before its first RESET is through; home fails behind the second."""
    net = armed()
    side = next(s for s in net.sides if s.protocol.initiator)
    side.feed(ev.PreferPair(1))
    until(net, lambda: all(s.protocol.send_pair == s.protocol.recv_pair == 1 for s in net.sides))
    until(net, lambda: not any(s.protocol.busy for s in net.sides))
    net.nics[side.name][1].command_ns = 5 * MS
    side.feed(ev.PreferPair(0))
    step_until(net, lambda: side.resets[1] == 2)  # the first was when it was paired
    side.feed(ev.PathHealth(1, False))
    side.feed(ev.PathHealth(1, True))
    step_until(net, lambda: side.resets[1] == 3)
    post(side, "SEND")
    side.path_failed(0, "staged")
    wait(net, 2_000)
    net.nics[side.name][1].command_ns = 1000
    until(net, lambda: at_home(net) or any(s.over for s in net.sides), ms=30_000)
    return net


def test_a_fence_behind_a_second_reset_ends() -> None:
    net = reset_for_the_second_time()
    checks.check(net)
    assert all(s.over is None for s in net.sides) and at_home(net)


def test_a_reset_that_the_journal_is_not_told_of_is_noticed() -> None:
    """As if only the beginning of an ARM made its pair forgotten: the end of the first RESET undoes that."""

    def give(side: Side, action: ev.ResetPair) -> None:
        side.resets[action.pair] += 1
        side.nics[action.pair].command(side._reset_done, action, side.resets[action.pair])

    with mock.patch.object(Side, "give_reset", give), pytest.raises(Violation, match="fences end"):
        checks.check(reset_for_the_second_time())
