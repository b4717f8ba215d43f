# SPDX-License-Identifier: BSD-3-Clause
"""An error that the application was shown before its QP was protected is the QP's end, though the peer fails over."""

from __future__ import annotations

from typing import Any

from harness import wait_until
from hosts import Host, Network

FLUSHED = "WR_FLUSH_ERR"
CONNECTION = "ep.qp._shadow.connection"
HAS_A_PROTOCOL = f"{CONNECTION} is not None and {CONNECTION}.protocol is not None"


def half_protected(network: Network, faults: Any) -> tuple[Host, Host]:
    """One host whose QP is not protected yet, and its peer, whose QP is."""
    for name in "ab":
        faults.register(name, "2")
        faults.drop(f"{name}/soft1", direction="tx", opcode="ack", count=0)
    hosts = network.pair()
    for host in hosts:
        wait_until(lambda host=host: host(HAS_A_PROTOCOL), 20)
    late, early = sorted(hosts, key=lambda h: bool(h("ep.qp._shadow.connection.protocol.initiator")))
    other = "ab"[hosts.index(late)]
    # The one who answers is acknowledged by nobody, so its half of the pair is never through.
    for rule in [r for r in faults.status().rules if r.target.startswith(other)]:
        faults.undrop(rule.id)
    assert early("ep.qp.shift.wait_protected(20)"), early("ep.shift()")
    assert late("ep.shift()['status']") == "PAIRING"
    return late, early


POSTS_ON = """
seen, n, deadline = [], 1, time.monotonic() + 20
while ep.qp.shift.status == 'PAIRING' and time.monotonic() < deadline:
    if n - len([wc for wc in seen if wc[0] < 10**6]) < 14:
        ep.fill(n % 8, 'm%d' % n)
        ep.post('SEND', slot=n % 8, length=2, wr_id=n)
        n += 1
    if n - len([wc for wc in seen if wc[0] < 10**6]) >= 10:
        seen += ep.poll(1, 0)
[n, seen + ep.poll(n + 2 - len(seen), 5)]
"""


def test_nothing_is_executed_behind_an_error_that_was_shown(network: Network, faults: Any) -> None:
    late, early = half_protected(network, faults)
    early("[ep.recv(10 + i) for i in range(6)]")
    late("[ep.recv(10 + i, 10**6 + i) for i in range(3)]")
    faults.switch_down("rail0")
    late("(ep.fill(0, 'm0'), ep.post('SEND', slot=0, length=2, wr_id=0))")
    assert late("ep.poll(1)")[0][:2] == [0, "RETRY_EXC_ERR"]
    late.begin(POSTS_ON)
    early("ep.post('SEND', slot=1, length=2, wr_id=1)")
    early("ep.wait(\"s.counters['switches'] > 0\", 20)")
    faults.clear(rules_only=True)
    n, seen = late.end()
    sent = [wc[:2] for wc in seen if wc[0] < 10**6]
    assert sent == [[i, FLUSHED] for i in range(1, n)], late("ep.shift()")
    assert [wc[:2] for wc in seen if wc[0] >= 10**6] == [[10**6 + i, FLUSHED] for i in range(3)]
    # The peer is told, and none of its work waits for ever.
    assert sorted(wc[:2] for wc in early("ep.poll(7, 10)")) == [
        [1, "RETRY_EXC_ERR"],
        *([10 + i, FLUSHED] for i in range(6)),
    ], early("ep.shift()")
