# SPDX-License-Identifier: BSD-3-Clause
"""Backups that register memory slowly, as much of it does: nothing waits for that but whoever is told PROTECTED."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
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


def test_memory_that_is_registered_while_the_peer_is_late_is_waited_for(
    network: Network, faults: Any
) -> None:
    """One side is connected, and its program goes on; the other one's comes a moment later."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    b(f"ep.connect({names[0]!r})")
    wait_until(lambda: "peer" in (b("ep.qp.shift.why") or ""), what="b has published, and looks for a")
    b("slow = 2.0; more = mr.MR(ep.pd, 16384, ACCESS)")
    a(f"ep.connect({names[1]!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    assert b("more._shadow.state(1)") == "ready"
    b("ep.qp.post_recv(wr.RecvWR(7, 1, [wr.SGE(more.buf, 4096, more.lkey)]))")
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1, 20)")[0][1] == "SUCCESS"


def test_memory_that_is_registered_while_other_memory_is_waited_for_is_waited_for(network: Network) -> None:
    """What was asked before a long wait is old behind it."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    b("ep = Endpoint(); slow = 2.0; first = mr.MR(ep.pd, 16384, ACCESS)")
    names = [a("ep = Endpoint(); ep.name()"), b("ep.name()")]
    b(f"ep.connect({names[0]!r})")
    a(f"ep.connect({names[1]!r})")
    wait_until(lambda: "being registered" in (b("ep.qp.shift.why") or ""), what="the first wait")
    b("slow = 4.0; second = mr.MR(ep.pd, 16384, ACCESS)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(30)"), h("ep.shift()")
    assert b("[m._shadow.state(1) for m in (first, second)]") == ["ready"] * 2


@pytest.mark.parametrize("thread", ["worker", "registrar"])
def test_memory_that_is_being_registered_is_dropped_in_a_nics_thread(
    network: Network, faults: Any, thread: str
) -> None:
    """Nobody knows its keys; so that thread is not kept, and the port may blink meanwhile, or fail."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    connect(a, b)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    b("[ep.recv(i) for i in range(4)] and None")
    a("nic = ep.qp._shadow.domain.nic; slow = 30.0; more = mr.MR(ep.pd, 16384, ACCESS)")
    a(f"box = [more]; del more; nic.{thread}.post(box.clear) and None")
    wait_until(lambda: a("not box"), what="the drop")
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)")
    assert [status for _, status, *_ in a("ep.poll(2, 20)")] == ["SUCCESS"] * 2


def test_a_nics_thread_that_drops_memory_does_not_wait_for_a_nic_that_hangs(
    network: Network, faults: Any
) -> None:
    """The backup that nobody uses hangs; then the port at home blinks, and the other backup could take over."""
    a, b = network.protected(nics="3")
    b("[ep.recv(i) for i in range(4)] and None")
    a("nic = ep.qp._shadow.domain.nic; m = mr.MR(ep.pd, 4096, ACCESS)")
    wait_until(lambda: a("[m._shadow.state(k) for k in (1, 2)]") == ["ready"] * 2, what="the backups' memory")
    faults.hang("a/soft1")
    a("box = [m]; del m; nic.worker.post(box.clear) and None")
    wait_until(lambda: a("not box"), what="the drop")
    faults.down("a/soft0")
    faults.up("a/soft0")
    a(
        "[ep.recv(i, 100 + i) for i in range(2)] and None; ep.post('SEND', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)"
    )
    assert [status for _, status, *_ in a("ep.poll(2, 20)")] == ["SUCCESS"] * 2
    faults.unhang("a/soft1")


@pytest.mark.parametrize("end", ["dereg", "rereg"])
def test_nothing_comes_to_memory_that_ended_beside_a_long_registration(
    network: Network, faults: Any, end: str
) -> None:
    """The backup, where traffic is, has been registering for longer than anybody waits, and is slow with the rest."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(SLOWLY)
    connect(a, b)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    b("import ctypes, mmap; old, new = (mmap.mmap(-1, 4096) for _ in range(2))")
    b("at, other = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (old, new))")
    b("m = mr.MR(ep.pd, 4096, ACCESS, at)")
    wait_until(lambda: b("m._shadow.state(1)") == "ready", what="the backup's memory")
    rkey = b("m.rkey")
    address = b("at")
    go(faults, "away", a, b)
    a(
        "def write(n):\n"
        "    sge = wr.SGE(ep.mr.buf, 8, ep.mr.lkey)\n"
        "    w = wr.SendWR(n, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)\n"
        f"    w.set_wr_rdma({rkey}, {address})\n"
        "    ep.qp.post_send(w)\n"
    )
    a("ep.fill(0, 'arrived!'); write(1)")
    assert a("ep.poll(1, 10)")[0][1] == "SUCCESS" and b("old[:8].decode()") == "arrived!"
    a("ep.post('SEND', wr_id=2); write(3)")  # b has no receive yet
    b("slow = 40.0; more = mr.MR(ep.pd, 16384, ACCESS)")
    b("nic = ep.qp._shadow.domain.backups[0]")
    wait_until(lambda: b("nic.memory_hangs(5.5)"), what="a long registration")
    faults.slow("b/soft1", 0.5)
    b(
        "m.close()" if end == "dereg" else "m.rereg(e.IBV_REREG_MR_CHANGE_TRANSLATION, None, other, 4096, 0)",
        60,
    )
    b("old[:8] = b'reusedby'; ep.recv(5)")
    assert [status for _, status, *_ in a("ep.poll(2, 20)")] == ["SUCCESS", "REM_ACCESS_ERR"]
    assert b("old[:8].decode()") == "reusedby"
