# SPDX-License-Identifier: BSD-3-Clause
"""A job on eight hosts in virtual time; `make simulate HOSTS=64` has as many as one likes."""

from __future__ import annotations

import pytest
from exchanger.test_key_table import CONFIG, Stream
from simulator import many_hosts
from simulator.clock import SECOND
from simulator.many_hosts import Job
from simulator.network import name_of, number_of

from benchmarks import scale
from shiftverbs.exchanger.key_table import KeyTable
from shiftverbs.exchanger.link_events import Got, Up


def test_names_of_hosts() -> None:
    names = [name_of(n) for n in range(1, 1025)]
    assert names[:2] == ["a", "b"] and names[25:28] == ["z", "aa", "ab"] and len(set(names)) == 1024
    assert [number_of(name) for name in names] == list(range(1, 1025))


def test_a_switch_a_rail_and_a_host_die() -> None:
    """What must hold is asserted as it goes along; here, that it costs what it is said to cost."""
    with Job(8) as job:
        job.run()
    costs, qps, pairs = job.costs, len(job.net.apps), len(job.wires)
    paths = 2 * sum(map(len, job.peers.values()))
    set_up = costs["set-up"]
    assert set_up.sought == qps
    assert qps < set_up.written <= scale.WRITES * qps and qps < set_up.told <= (1 + scale.WRITES) * qps
    later = [cost for name, cost in costs.items() if name != "set-up"]
    assert not any(cost.written or cost.sought for cost in later), "etcd has nothing to do with failures"
    assert not any(cost.told for name, cost in costs.items() if name not in ("set-up", "its lease ends"))
    quiet, away = costs["nothing to do"], costs["it is away"]
    assert not quiet.messages and not away.messages
    assert quiet.pings / quiet.lasted_s == quiet.answers / quiet.lasted_s == pytest.approx(paths, rel=0.02)
    assert away.pings / away.lasted_s == pytest.approx(paths * scale.AWAY_PINGS, rel=0.05)
    assert away.answers == away.pings / 2, "those on the rail that is left"
    dies, back = costs["a switch dies"], costs["the switch is back"]
    assert dies.datagrams <= dies.messages <= scale.SWITCH * pairs
    assert 0 < dies.longest_ms < 1, "nobody waits for another than its peer"
    assert back.datagrams <= back.messages <= 1.1 * scale.HOME * pairs


def test_brokers_watch_what_their_host_has_to_do_with() -> None:
    with Job(8) as job:
        job.set_up()
        for host in job.net.hosts:
            wanted = host.exchanger.wanted
            stream = Stream()
            table = KeyTable(CONFIG, lambda keys: None, lambda key, client: None)
            for key in wanted:
                table.want(key, 1)
            table.handle(Up(1, stream), 0.0)
            table.handle(Got(1, 1, dict.fromkeys(wanted)), 0.0)
            assert len(wanted) == len(host.endpoints) and stream.watched.keys() == wanted


def test_a_rail_of_somebody_else_dies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asserted there bites."""
    monkeypatch.setattr(many_hosts, "LIMIT_NS", SECOND)
    with Job(8) as job:
        job.set_up()
        port = job.net.port

        def both(name: str, k: int, up: bool, event_ns: int | None) -> None:
            port(name, k, up, event_ns)
            port("a" if name != "a" else "b", k, up, event_ns)

        job.net.port = both  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match="does not come to its end"):
            job.a_rail_of_a_host_dies()
