# SPDX-License-Identifier: BSD-3-Clause
"""Objects dropped in the middle of the driver, between two hosts with traffic: as if they had been closed."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, HOME, WHERE, Network, go
from test_gone_memory import REGION, aim
from test_teardown import leave

#: Whatever hangs on `it` is dropped by the collector in a run of the driver's, in the control thread.
IN_A_RUN = """
import gc, threading
driver = ep.qp._shadow.domain.runtime.driver
class It: pass
def tie(*things):
    gc.collect()
    it = It()
    it.things, it.me = things, it
    for thing in things:
        thing.it = it
def collect():
    ran = threading.Event()
    driver.post(lambda: (gc.collect(), then(), ran.set()))
    assert ran.wait(10)
then = int
"""


@pytest.mark.parametrize("where", WHERE)
def test_memory_goes_before_the_next_instruction(network: Network, faults: Any, where: str) -> None:
    """The peer writes all the time; the bytes are somebody else's right after the collector."""
    a, b = network.protected()
    aim(a, b(REGION))
    a("ep.post('RDMA_WRITE', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    go(faults, where, a, b)
    a(
        "ep.fill(0, 'from a' * 10); w = [ep.post('RDMA_WRITE', wr_id=i, signaled=i % 8 == 7) for i in range(8)]"
    )
    a("ep.poll(1)")
    b(IN_A_RUN)
    b(
        """
memory = (ctypes.c_char * SLOT).from_address(gone.buf)
seen = []
def then():
    memory[:] = b'\\0' * SLOT
    seen.append(bytes(memory[:64]))
tie(gone)
gone = None
"""
    )
    a.begin("for i in range(8): ep.post('RDMA_WRITE', wr_id=i)\nep.poll(8)")
    b("collect()")
    wcs = [wc[:2] for wc in a.end()]
    assert wcs[-1][1] in ("SUCCESS", "REM_ACCESS_ERR", "WR_FLUSH_ERR")
    b("time.sleep(0.2); seen.append(bytes(memory[:64]))")
    assert b("[not any(each) for each in seen]") == [True, True]
    b("libc.munmap(0x2000_0000_0000, 2 * SLOT)")
    if wcs[-1][1] == "SUCCESS":
        a("ep.post('RDMA_WRITE', wr_id=9)")
        assert a("ep.poll(1)")[0][:2] == [9, "REM_ACCESS_ERR"]
    assert b("ep.text(0, 1)") == "\0", "it lives"
    leave(a)
    leave(b)


@pytest.mark.parametrize("where", ["home", "away"])
def test_a_qp_goes_and_its_peer_is_told(network: Network, faults: Any, where: str) -> None:
    a, b = network.protected()
    b("[ep.recv(i) for i in range(4)]")
    go(faults, where, a, b)
    a(IN_A_RUN)
    a("[ep.post('SEND', wr_id=i) for i in range(8)]; waiting = ep.cq; tie(ep.qp); ep.qp = None; collect()")
    wait_until(lambda: b("ep.shift()['status']") != "PROTECTED", what="b is told")
    wait_until(lambda: a("len(driver.connections)") == 0, what="nothing is left of it")
    a("ep.cq.close(); ep.pd.close(); ep.context.close()")
    leave(a)
    leave(b)


def test_qps_go_while_others_fail_over(network: Network, faults: Any) -> None:
    """Everywhere in a SWITCH and on the way home: nothing of it is disturbed, and nothing stays behind."""
    a, b = network.protected()
    for h in (a, b):
        h(IN_A_RUN)
        h(
            """
def one():
    x, y = Endpoint(shared=ep), Endpoint(shared=ep)
    x.connect(y.name()); y.connect(x.name())
    tie(x.qp, y.qp)
    return x.qp.shift.wait_protected(10) or [x.shift(), y.shift()]
"""
        )
    a(
        """
run = driver._work
def work():
    run()
    gc.collect()
driver._work = work
"""
    )
    for turn in range(3):
        assert a("[one() for _ in range(4)]") == [True] * 4
        b("[ep.recv(i) for i in range(4)]")
        (faults.up if turn % 2 else faults.down)("a/soft0")
        a("[ep.post('SEND', wr_id=i) for i in range(4)]")
        assert [wc[:2] for wc in a("ep.poll(4, 20)")] == [[i, "SUCCESS"] for i in range(4)]
        assert [wc[:2] for wc in b("ep.poll(4, 20)")] == [[i, "SUCCESS"] for i in range(4)]
        a(f"ep.wait({(HOME if turn % 2 else AWAY)!r}, 20)")
        wait_until(lambda: a("len(driver.connections)") == 1, 20, "the others are gone")
    leave(a)
    leave(b)


def test_a_nic_that_hangs_keeps_nobody_else(network: Network, faults: Any) -> None:
    """What was dropped waits for it; failover and the data path do not."""
    a, b = network.protected()
    a(IN_A_RUN)
    a(
        "x, y = Endpoint(shared=ep), Endpoint(shared=ep); x.connect(y.name()); y.connect(x.name());"
        "assert x.qp.shift.wait_protected(10)"
    )
    b("[ep.recv(i) for i in range(4)]")
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    a("x.wait(\"s.path == 'soft1'\", 20)")
    faults.hang("a/soft1")
    a("tie(x.qp, y.qp); x = y = None; began = time.monotonic(); collect()")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    assert a("time.monotonic() - began") < 3
    assert a("driver._lock.acquire(timeout=1)") is True
    a("driver._lock.release()")
    faults.unhang("a/soft1")
    wait_until(lambda: a("len(driver.connections)") == 1, 20, "they are gone")
    leave(a)
    leave(b)
