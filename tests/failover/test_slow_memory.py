# SPDX-License-Identifier: BSD-3-Clause
"""Backups that register memory slowly, as much of it does: nothing waits for that but whoever is told PROTECTED."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import Network, connect, go

# What is larger than a page takes `slow` seconds on the backups, as if it were very much.
SLOWLY = """
import gc, threading, time
from shiftverbs import _nic
from shiftverbs.shadows.nic import Nic
slow = 0.0
class Verbs:
    def __getattr__(self, name):
        return getattr(_nic, name)
    def reg_mr(self, *args):
        time.sleep(slow if args[2] > 8192 else 0.0)
        return _nic.reg_mr(*args)
init = Nic.__init__
def slow_init(self, name, make, verbs):
    init(self, name, make, verbs if name == "soft0" else Verbs())
Nic.__init__ = slow_init
"""
STATE = "ep.mr._shadow.state(1)"


def test_who_is_protected_has_its_memory_on_the_backup(network: Network, faults: Any) -> None:
    """A NIC may fail the next moment."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    b("slow = 2.0")
    connect(a, b)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)") and h(STATE) == "ready", h("ep.shift()")
    b("ep.recv(1)")
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)")
    assert [status for _, status, *_ in a("ep.poll(2, 20)")] == ["SUCCESS"] * 2


@pytest.mark.parametrize("k", [1, 0], ids=["on the backup", "at home again"])
def test_a_nic_that_registers_is_left(network: Network, faults: Any, k: int) -> None:
    """Its port fails while it is at that, or the other one's does: the fence is there at once."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    connect(a, b)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    go(faults, "away" if k else "back", a, b)
    b("[ep.recv(i) for i in range(4)]")
    for h in (a, b):
        h("slow = 30.0; more = mr.MR(ep.pd, 16384, ACCESS)")
    faults.up("a/soft0")
    faults.down(f"a/soft{k}")
    a("ep.post('SEND', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)")
    assert [status for _, status, *_ in a("ep.poll(2, 20)")] == ["SUCCESS"] * 2
    assert a("more._shadow.state(1)") == "pending", "the test has waited for the registration"


def test_memory_that_its_thread_drops_goes_behind_the_end_of_its_qp(network: Network, faults: Any) -> None:
    """A NIC is slow to bring a QP to ERR; what its receives name is dropped in its thread for memory."""
    a, b = network.protected()
    b("m = mr.MR(ep.pd, 4096, ACCESS); nic = ep.qp._shadow.domain.backups[0]; import time")
    go(faults, "away", a, b)
    b("[ep.qp.post_recv(wr.RecvWR(i, 1, [wr.SGE(m.buf, 64, m.lkey)])) for i in range(16)] and None")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1, 10)")[0][1] == "SUCCESS"
    b("nic.worker.post(time.sleep, 1.0)")
    b("at = qp.QPAttr(qp_state=e.IBV_QPS_ERR); ep.qp.modify(at, e.IBV_QP_STATE)")
    b("box = [m]; del m; nic.registrar.call(box.clear).wait(5.0)")
    a("[ep.post('SEND', wr_id=2 + i) for i in range(8)] and None")
    statuses = [status for _, status, *_ in a("ep.poll(8, 20)")]
    assert len(statuses) == 8 and set(statuses) <= {"SUCCESS", "RETRY_EXC_ERR", "WR_FLUSH_ERR"}, statuses
