# SPDX-License-Identifier: BSD-3-Clause
"""What the watchdog tells the protocol of other paths, where that of the sends is silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shiftverbs.failover.qp.watchdog import Watchdog
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.path_health import PingState

MS = 1_000_000


class Three:
    """A QP of three pairs, its sends on the first. trusted: the channel does not suspect anybody now."""

    def __init__(self) -> None:
        self.trusted = False
        self.fed: list[Any] = []
        self.paths = [SimpleNamespace(ping=PingState(50 * MS, 4)) for _ in range(3)]
        for path in self.paths:
            path.ping.handle_pong(path.ping.poll_ping(0), MS)
        channel = SimpleNamespace(suspect=self._suspect)
        self.watchdog = Watchdog(
            SimpleNamespace(paths=self.paths, feed=self.fed.append, driver=SimpleNamespace(channel=channel))  # type: ignore[arg-type]
        )

    def _suspect(self, path: Any, now_ns: int, is_known: bool) -> None:
        if not self.trusted:
            path.ping.suspect()

    def tell(self, monkeypatch: pytest.MonkeyPatch, *missing: int) -> list[int]:
        """The pairs that count as dead for the protocol, where the QP's own pings miss these."""
        paths = [self.paths[k].ping for k in missing]
        monkeypatch.setattr(self.watchdog._silence, "is_missing_too", lambda now_ns, ping: ping in paths)
        self.watchdog._tell_dead_paths(0, 9 * MS)
        assert all(isinstance(event, ev.PathHealth) and not event.alive for event in self.fed)
        return [event.pair for event in self.fed]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Three:
    return Three()


def test_a_path_that_is_as_silent_counts_as_dead(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    assert three.tell(monkeypatch, 1) == [1]
    assert three.paths[1].ping.alive is False


def test_one_that_has_just_answered_a_suspicion_does_not(
    three: Three, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else is told, and so nobody would take it back."""
    three.trusted = True
    assert three.tell(monkeypatch, 1) == []


def test_what_another_qp_has_found_is_known_at_once(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    """The news of it is still on its way: the QP would ask there."""
    three.paths[2].ping.suspect()
    assert three.tell(monkeypatch) == [2]
