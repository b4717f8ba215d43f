# SPDX-License-Identifier: BSD-3-Clause
"""Slow rails in virtual time, with all of what ships: what is said of them, and what is moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulator import checks, slow_rails
from simulator.checks import Violation
from simulator.clock import MS, US
from simulator.network import Network
from simulator.schedule import Schedule
from simulator.slow_rails import shown, verdicts, where
from simulator.story import telling

from shiftverbs.failover.services.stragglers import SlowPaths


@pytest.mark.parametrize("delay_ns, packet_ns", [(1 * MS, 0), (5 * MS, 0), (200 * US, 0), (0, 500 * US)])
def test_a_slow_rail_is_told_of(delay_ns: int, packet_ns: int) -> None:
    with telling(lambda: slow_rails.a_slow_rail_is_told_of(delay_ns, packet_ns)) as net:
        checks.check(net)
        assert verdicts(net) == {("a0", "path"): 1} and not shown(net)
        assert where(net) == []


def test_a_slow_rail_is_left_once_and_come_back_to() -> None:
    with telling(slow_rails.a_slow_rail_is_left_and_come_back_to) as net:
        checks.check(net)
        assert where(net) == [1, 0] and where(net, "b") == [1, 0] and not shown(net)
        assert net.a.runtime.driver.totals.straggler_moves == 2
        assert net.b.runtime.driver.totals.straggler_moves == 0


def test_where_both_sides_find_out_they_come_home_together() -> None:
    with telling(slow_rails.both_sides_send) as net:
        checks.check(net)
        assert where(net)[-1] == where(net, "b")[-1] == 0 and len(where(net)) <= 4
        assert all(app.endpoint.protocol.preferred == 0 for app in net.apps)


@pytest.mark.parametrize(
    "story",
    [
        slow_rails.both_rails_are_slow,
        slow_rails.the_program_is_slow,
        slow_rails.the_peer_stands_still_now_and_then,
    ],
)
def test_nothing_is_moved(story: Callable[[], Network]) -> None:
    with telling(story) as net:
        checks.check(net)
        assert where(net) == []
        assert ("a0", "path") not in verdicts(net)


def test_a_rail_that_is_slow_by_turns_is_not_followed() -> None:
    with telling(slow_rails.a_rail_is_slow_by_turns) as net:
        checks.check(net)
        assert 1 <= len(where(net)) <= 8


def test_whoever_asked_for_a_rail_keeps_it() -> None:
    with telling(slow_rails.the_application_has_asked_for_the_slow_rail) as net:
        checks.check(net)
        assert where(net) == [1]
        assert net.a.runtime.driver.totals.straggler_moves == 0


def test_a_failure_of_the_other_rail_comes_first() -> None:
    with telling(slow_rails.the_other_rail_fails_meanwhile) as net:
        checks.check(net)
        assert where(net)[:2] == [1, 0] and where(net)[-1] == 0, "it is not left where nobody asked it to be"
        assert all(app.endpoint.protocol.preferred == 0 for app in net.apps)


def test_an_error_in_the_detector_is_nobodys_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SlowPaths, peer: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SlowPaths, "_take_in", broken)
    net: Network | None = None

    def story() -> Network:
        nonlocal net
        net, stream = slow_rails.streaming("migrate")
        return slow_rails.end(net, stream)

    # The simulator takes any error of ours for the end of a run: it is looked at what that would leave behind.
    monkeypatch.setattr("simulator.world._note_error", lambda *args, **more: None)
    with telling(story) as told:
        for host in told.hosts:
            measures = host.runtime.driver.measures
            assert measures.failed == (host is told.a) and not measures.slow
        assert len(told.app("a").posted) > 500
        told.straggler = "off"
        checks.check(told)


@pytest.mark.parametrize("chunk", range(4))
def test_ordinary_schedules_with_the_detector(chunk: int) -> None:
    """Failures of every kind, with whoever moves slow paths: as clean, and no verdict."""
    for seed in range(chunk * 50, (chunk + 1) * 50):
        try:
            Schedule(seed, straggler="migrate").run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_checkers_bite() -> None:
    with telling(lambda: slow_rails.a_slow_rail_is_told_of(1 * MS)) as net:
        net.slowed.clear()
        with pytest.raises(Violation, match="only slow rails"):
            checks.check(net)
        net.slowed.add(0)
        net.whereabouts = [(n, "a", n % 2) for n in range(5)]
        with pytest.raises(Violation, match="to and fro"):
            checks.check(net)
