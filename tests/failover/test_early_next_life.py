# SPDX-License-Identifier: BSD-3-Clause
"""Errors that wait for a protection, and a program that connects its QP anew meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import Network
from test_early_errors import FAILED, POST, SOON

RESET = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE)"


@pytest.mark.parametrize("package", ["pyverbs", "shiftverbs"])
def test_errors_that_wait_end_with_their_life(network: Network, faults: Any, package: str) -> None:
    """RESET takes what nobody has polled, as on a NIC: the next life has WCs of its own alone."""
    for name in "ab":
        faults.register(name, "2")
        faults.drop(f"{name}/soft1", direction="tx", opcode="ack", count=0)
    a, b = hosts = network.pair(package, attrs=SOON)
    if package == "shiftverbs":
        wait_until(lambda: bool(a("ep.qp.shift.pairing")), 20)
    failed = "ep.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_ERR"
    if package == "shiftverbs":
        failed = f"(c := ep.qp._shadow.connection) and {FAILED}"
    faults.switch_down("rail0")
    a(POST.format(n=3))
    wait_until(lambda: a(failed), 10)
    faults.switch_up("rail0")
    for host in hosts:
        host(RESET)
    for host in hosts:
        host(f"ep.connect(ep.peer, {SOON})")
    b("ep.recv(32, 100)")
    a("(ep.fill(9, 'again'), ep.post('SEND', slot=9, length=5, wr_id=0))")
    assert a("[wc[:2] for wc in ep.poll(4, 1)]") == [[0, "SUCCESS"]]
    assert b("ep.poll(1)")[0][:2] == [100, "SUCCESS"] and b("ep.text(32, 5)") == "again"
