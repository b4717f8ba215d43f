# SPDX-License-Identifier: BSD-3-Clause
"""A cable that is pulled before a QP is protected that was so in a former life: as test_early_errors.py."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import Network
from test_early_errors import FAILED, POST, SOON, TAKE

RESET = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE)"


@pytest.mark.parametrize("before", ["protected", "paired"])
def test_errors_of_a_qp_that_was_connected_anew_wait(network: Network, faults: Any, before: str) -> None:
    """RESET ends what was before; what fails from RTR on is a failure before protection again."""
    for name in "ab":
        faults.register(name, "2")
    drop = [{"target": f"{name}/soft1", "direction": "tx", "opcode": "ack", "count": 0} for name in "ab"]
    if before == "paired":
        for each in drop:
            faults.drop(**each)
    hosts = network.pair(attrs=SOON)
    for host in hosts:
        if before == "protected":
            assert host("ep.qp.shift.wait_protected(20)"), host("ep.shift()")
        else:
            wait_until(lambda host=host: bool(host("ep.qp.shift.pairing")), 20)
    if before == "protected":
        for each in drop:
            faults.drop(**each)
    for host in hosts:
        host(RESET)
    for host in hosts:
        host(f"ep.connect(ep.peer, {SOON}); [ep.recv(32 + i, 100 + i) for i in range(8)]")
    for host in hosts:
        wait_until(lambda host=host: bool(host("ep.qp.shift.pairing")), 20)
        assert host("ep.shift()['status']") == "PAIRING"
        host("c = ep.qp._shadow.connection")
    faults.switch_down("rail0")
    for host in hosts:
        host(POST.format(n=4))
    for host in hosts:
        wait_until(lambda host=host: host(f"(ep.qp.shift.status, [got := ep.poll(1, 0)], {FAILED})[2]"), 10)
        assert host("got + ep.poll(1, 0)") == [], "nothing is shown yet"
    faults.clear(rules_only=True)
    for host in hosts:
        got = host(TAKE.format(n=8, s=20))
        assert sorted(got) == [[i, "SUCCESS"] for i in [*range(4), *range(100, 104)]], host("ep.shift()")
