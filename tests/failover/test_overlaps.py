# SPDX-License-Identifier: BSD-3-Clause
"""Procedures that meet while a NIC takes its time with a command."""

from __future__ import annotations

from typing import Any

from harness import wait_until
from hosts import AWAY, HOME, Network


def test_a_failure_while_arm_asks_for_the_route(network: Network, faults: Any) -> None:
    """The backup's NIC is slow to say where it is reached; its ARM must not RESET behind the fence of a SWITCH."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "40000"  # unhanged long before the fence's share of that
    a, b = network.protected(nics="3")
    b("[ep.recv(i) for i in range(4)]")
    a("ep.qp.shift.migrate()")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    a("ep.post('SEND', length=5, wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    faults.hang("a/soft1")
    b("ep.qp.shift.restore()")
    for h in (a, b):
        h(f"ep.wait({HOME!r})")
    wait_until(lambda: a("ep.qp._shadow.connection.nic(1).worker.busy_since_ns") > 0, what="soft1 is asked")
    faults.down("a/soft0")
    a("ep.post('SEND', length=5, wr_id=2)")
    wait_until(lambda: a("ep.shift()['counters']['switches']") == 1, what="a SWITCH has begun")
    faults.unhang("a/soft1")
    got = a("ep.poll(1, timeout_s=30)")
    assert got[0][:2] == [2, "SUCCESS"], a("ep.shift()")
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[0, "SUCCESS"], [1, "SUCCESS"]]
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 30)")
