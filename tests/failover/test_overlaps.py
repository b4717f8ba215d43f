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
    wait_until(lambda: a("ep.qp._shadow.connection.nic(1)._looker.busy_since_ns") > 0, what="soft1 is asked")
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


# Host a's backup is so slow that ARM begins anew before its first RESET is through, and home fails just when the
# second one is given: in the same run of the driver, so that the fence's ERR is the next command.
SLOW_RESETS = """
import threading
from shiftverbs.shadows import nic as backup
from shiftverbs.failover.qp import connection, rebuild
from shiftverbs.protocol import events as ev
begun, told, given = [], threading.Event(), []
reset, give, look, feed = rebuild.Rebuild.reset, rebuild.Rebuild._reset, backup.Nic._look, connection.Connection.feed
again = threading.Event()

def slow_reset(self, action):
    if action.pair == 1:
        begun.append(action.arm)
        if len(begun) == 2:
            again.set()
    reset(self, action)

def slow_give(self, k, arm, dummy):
    if k == 1:
        given.append(arm)
        if len(given) == 1:
            self._c.nic(1).worker.post(again.wait, 30)
    give(self, k, arm, dummy)
    if k == 1 and len(given) == 2:
        self._c.later(ev.PathFailed(0, "staged", False, None))

def slow_look(self):
    if self is ep.qp._shadow.connection.nic(1) and len(begun) == 2:
        told.wait(30)
    look(self)

def told_feed(self, event):
    feed(self, event)
    if isinstance(event, ev.PairReset) and event.pair == 1 and event.arm == begun[0]:
        told.set()

rebuild.Rebuild.reset, rebuild.Rebuild._reset = slow_reset, slow_give
backup.Nic._look, connection.Connection.feed = slow_look, told_feed
"""


def test_a_failure_while_a_pair_is_reset_for_the_second_time(network: Network) -> None:
    """The end of the first RESET makes no fence forget that the second is on its way."""
    a, b = network.protected()
    b("[ep.recv(i) for i in range(2)]")
    a("ep.qp.shift.migrate()")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    a("ep.post('SEND', length=5, wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    a(SLOW_RESETS)
    b("ep.qp.shift.restore()")
    wait_until(lambda: a("len(given)") >= 2, 30, what="soft1 is reset for the second time")
    a("ep.post('SEND', length=5, wr_id=2)")
    got = a("ep.poll(1, timeout_s=30)")
    assert got[0][:2] == [2, "SUCCESS"], a("ep.shift()")
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[0, "SUCCESS"], [1, "SUCCESS"]]
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 30)")
        assert h("ep.shift()['status']") == "PROTECTED", h("ep.shift()")
