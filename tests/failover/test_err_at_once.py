# SPDX-License-Identifier: BSD-3-Clause
"""A program that moves its QP to ERR as soon as it is connected: that is the QP's end, as with plain verbs."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import Network

# All in one breath: the driver has not heard yet that the QP was connected.
LEAVE = """
ep.peer = {peer}
ep.qp.to_init(ep.attr())
[ep.recv(32 + i, 100 + i) for i in range(4)]
at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR
ep.qp.to_rts(ep.attr())
ep.qp.modify(at, e.IBV_QP_STATE)
began = time.monotonic()
got = [wc[:2] for wc in ep.poll(4, 6)]
took = time.monotonic() - began
"""


@pytest.mark.parametrize("package", ["pyverbs", "shiftverbs"])
def test_its_receives_are_flushed_and_it_stays_dead(network: Network, package: str) -> None:
    a, b = network.pair(package)  # from here on QPs are protected quickly
    if package == "shiftverbs":
        assert a("ep.qp.shift.wait_protected(20)")
    names = [host("ep = Endpoint(shared=ep); ep.name()") for host in (a, b)]
    b(f"ep.connect({names[0]!r})")
    a(LEAVE.format(peer=repr(names[1])))
    b("(ep.fill(0, 'late'), ep.post('SEND', length=4, wr_id=1))")
    sent = b("[wc[:2] for wc in ep.poll(1, 6)]")
    seen = a("got"), round(a("took"), 1), sent, a("ep.text(32, 4)") == "late"
    why = a("ep.shift()") if package == "shiftverbs" else None
    assert seen[0] == [[100 + i, "WR_FLUSH_ERR"] for i in range(4)] and seen[1] < 1.5, (seen, why)
    assert sent == [[1, "RETRY_EXC_ERR"]] and not seen[3], (seen, why)


def test_it_does_not_come_back_when_its_backup_is_made(network: Network, faults: Any) -> None:
    """The backup NIC has hung since the QP was made, and the program has moved that to ERR meanwhile."""
    a, b = network.protected()
    faults.hang("a/soft1")
    names = [host("ep = Endpoint(shared=ep); ep.name()") for host in (a, b)]
    for host, peer in ((b, names[0]), (a, names[1])):
        host(f"ep.connect({peer!r})")
    wait_until(lambda: "being made" in (a("ep.qp.shift.why") or ""), 10)
    a("at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR; ep.qp.modify(at, e.IBV_QP_STATE)")
    faults.unhang("a/soft1")
    a("ep.qp.shift.wait_protected(3)")
    b("ep.post('SEND', wr_id=1)")
    assert b("[wc[:2] for wc in ep.poll(1, 6)]") == [[1, "RETRY_EXC_ERR"]], (a("ep.shift()"), b("ep.shift()"))
    assert a("ep.shift()['status']") != "PROTECTED"
