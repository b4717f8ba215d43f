# SPDX-License-Identifier: BSD-3-Clause
"""An error of our own code costs a QP its protection and is logged; in a simulated run it is a violation as well."""

from __future__ import annotations

import pytest
from simulator import checks
from simulator.network import Network, OwnError
from simulator.schedule import Schedule
from simulator.story import armed, feed, tell, telling, wait

from shiftverbs.failover.services.control_channel import ControlChannel
from shiftverbs.protocol import events as ev


def test_a_broken_invariant_ends_the_run() -> None:
    with telling(lambda: armed(pairs=3)) as net:
        net.app("a").endpoint.protocol.pairs[2].dead = True
        feed(net.app("a"), ev.PathHealth(1, True))
        with pytest.raises(OwnError, match="no clean pair"):
            checks.check(net)
        with pytest.raises(OwnError, match="no clean pair"):
            wait(net, 1)


def wrong() -> None:
    raise KeyError("staged")


def test_so_does_whatever_else_is_caught() -> None:
    with telling(armed) as net:
        tell(net.app("b"), wrong)
        with pytest.raises(OwnError, match="KeyError: 'staged'") as caught:
            wait(net, 1)
        assert isinstance(caught.value.__cause__, KeyError)


def test_so_it_is_in_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(channel: ControlChannel, now: int) -> None:
        raise RuntimeError("staged")

    monkeypatch.setattr(ControlChannel, "receive", receive)
    with pytest.raises(OwnError, match="staged"):
        Schedule(1).run()


def test_a_network_without_errors_has_none() -> None:
    with telling(armed) as net:
        assert isinstance(net, Network) and not net.errors
        checks.check(net)
