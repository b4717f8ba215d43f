# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of docs/scale.md stands on sizes that are those of the code."""

from __future__ import annotations

from typing import Any

import pytest
from exchanger.conftest import qp_record
from harness import ROOT
from simulator.clock import US
from simulator.story import armed, at_home, ends, on, plan, post, said, telling, until, wait

from benchmarks import scale
from shiftverbs.exchanger import ControlEndpoint, Route, ShadowRoute, qp_key, records
from shiftverbs.exchanger.key_table import DIRECTORY_KEYS
from shiftverbs.failover.driver import QUIET_PING_NS
from shiftverbs.failover.qp.watchdog import URGENT_PING_NS
from shiftverbs.failover.services.control_channel import BATCH_ENTRIES
from shiftverbs.protocol.codec import Entry, Ping, encode
from shiftverbs.protocol.messages import PairAddress, Phase, Sync
from shiftverbs.protocol.seal import Seals


def test_the_page_has_the_table() -> None:
    assert scale.table() in (ROOT / "docs" / "scale.md").read_text()


def test_datagrams() -> None:
    seals = Seals(b"1" * 16, b"2" * 16)
    sync = Entry(1, 2, Sync(1, 1, Phase.ASK, 0, False, PairAddress(bytes(16), 0, 5, 7, 3), 0))
    (ping,) = encode([Entry(0, 0, Ping(1, False))], seals, 4096)
    (one,) = encode([sync], seals, 4096)
    (two,) = encode([sync] * 2, seals, 4096)
    assert (len(ping), len(one), len(two) - len(one)) == (scale.PING, scale.MESSAGE, scale.FURTHER)
    assert scale.TOGETHER == BATCH_ENTRIES


def test_an_entry() -> None:
    """As long as that of a QP with one backup, within what names and numbers make it longer or shorter."""
    gid = "fe80:0000:0000:0000:0000:7fff:fe20:0101"
    ends = tuple(ControlEndpoint(f"soft{k}", gid, 0, 5, 5_000_000, 1 << 30, "ab" * 16) for k in range(2))
    record = qp_record(
        "job", 5_000_000, gid, peer=Route(gid, 0, 5_000_000), peer_life="0123456789abcdef",
        shadows=(ShadowRoute("soft1", gid, 0, 5, 5_000_000),), control=ends,
    )  # fmt: skip
    key = qp_key("job", gid, 5_000_000)
    assert len(records.encode_value(key, record)) + len(key) == pytest.approx(scale.ENTRY, rel=0.05)


def test_who_watches_whole_directories() -> None:
    assert scale.QPS // scale.RING.peers >= DIRECTORY_KEYS > scale.QPS // scale.mesh(64).peers


def test_messages_of_a_switch_and_of_coming_home() -> None:
    with telling(armed) as net:
        a, b = ends(net)
        protocols = [app.endpoint.protocol for app in (a, b)]
        before = [p.counts.messages_out for p in protocols]
        plan(a, "SEND", signaled=True)
        net.port("a", 0, False, 10 * US)
        a.due()
        until(net, lambda: len(a.wcs) == 1)
        wait(net, 50)
        away = [p.counts.messages_out for p in protocols]
        net.port("a", 0, True, 10 * US)
        until(net, lambda: at_home(net))
        wait(net, 50)
        home = [p.counts.messages_out for p in protocols]
    assert abs(sum(away) - sum(before) - scale.SWITCH) <= 2
    assert abs(sum(home) - sum(away) - scale.HOME) <= 2


def test_how_many_messages_share_a_datagram() -> None:
    """Far fewer than may, where one QP after the other has something to say."""
    with telling(lambda: armed(qps=32, capacity=8, receives=8)) as net:
        for app in net.apps:
            post(app, "WRITE")
        wait(net, 30)
        datagrams: list[list[Any]] = []
        net.on_datagram = lambda nic, to, datagram: datagrams.append(said(datagram))
        for app in net.apps_of("a"):
            plan(app, "SEND", signaled=True)
        net.port("a", 0, False, 10 * US)
        for app in net.apps_of("a"):
            app.due()
        until(net, lambda: all(on(app, 1) and not app.endpoint.protocol.busy for app in net.apps))
    with_messages = [messages for messages in datagrams if not isinstance(messages[0], Ping)]
    assert len(with_messages) == pytest.approx(159, abs=10)
    assert sum(map(len, with_messages)) == pytest.approx(256, abs=10)


def test_pings_of_who_is_away() -> None:
    assert scale.AWAY_PINGS * URGENT_PING_NS == QUIET_PING_NS


def test_counts() -> None:
    few, many = (scale.cost(hosts, scale.mesh(hosts)) for hosts in (8, 1024))
    assert (few.qps, many.qps) == (8 * 512, 1024 * 512)
    assert many.transactions * scale.OPERATIONS == many.qps * scale.WRITES
    assert few.pings == 7 * 2 and many.pings == 64 * 2
    assert scale.cost(64, scale.RING).rail_datagrams == 2 * 3 * scale.SWITCH  # 32 QPs to each of two peers
