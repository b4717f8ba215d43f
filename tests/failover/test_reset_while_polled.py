# SPDX-License-Identifier: BSD-3-Clause
"""A program moves its QP to RESET while errors wait for its protection, and another of its threads goes on polling."""

from __future__ import annotations

from typing import Any

from harness import wait_until
from hosts import Network
from test_early_errors import FAILED, POST, TAKE, held

# The verb has begun, and waits for a command that is under way on its QP.
BUSY = """
import threading
begun, go = threading.Event(), threading.Event()
nic = c.nic(0)
nic.worker.call(lambda: (begun.set(), go.wait(20)))
begun.wait(10)
nic.worker.submit(None, ep.qp._shadow.default, nic.verbs.ModifySteps().add(state=e.IBV_QPS_ERR))
at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET
leaving = threading.Thread(target=lambda: ep.qp.modify(at, e.IBV_QP_STATE), daemon=True)
leaving.start()
"""


def test_what_has_failed_does_not_succeed(network: Network, faults: Any) -> None:
    a, _ = held(network, faults)
    faults.switch_down("rail0")
    a("c = ep.qp._shadow.connection")
    a(POST.format(n=3))
    wait_until(lambda: a(f"(ep.cq.poll(1), {FAILED} and c.core.unwired == (0, 0))[1]"), 10)
    wait_until(lambda: a("c.early.due_ns is not None"), 10)
    a(f"exec({BUSY!r}, globals())")
    wait_until(lambda: not a("c.core.guarded"), 10)
    a("ep.post('SEND', slot=9, length=2, wr_id=9)")
    got = a(TAKE.format(n=4, s=2))
    a("go.set(); leaving.join(20)")
    assert a("ep.qp.qp_state == e.IBV_QPS_RESET") and a("ep.none()") == []
    assert "SUCCESS" not in [status for _, status in got], got
