# SPDX-License-Identifier: BSD-3-Clause
"""A switch that dies and tells nobody, and NICs that try for minutes: as in the simulator, between processes.

The bounds are wide, for a busy machine: what takes a second without failover's own look at the path is told apart.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import wait_until
from hosts import Host, Network

PATIENT = "timeout=20, retry=7"
SOON_S = 0.5
POST = """
began = time.monotonic()
ep.post('RDMA_WRITE', wr_id=1)
got = {how}
took = time.monotonic() - began
"""
HOWS = {
    "polling": "[wc[:2] for wc in ep.poll(1, 20)]",
    "blocked": "[ep.cq.req_notify(), ep.channel.get_cq_event(ep.cq), ep.cq.ack_events(1)][0:0] + "
    "[wc[:2] for wc in ep.poll(1, 20)]",
}


def works(host: Host) -> None:
    """Some WRITEs, so that what they take is known."""
    for _ in range(20):
        host("ep.post('RDMA_WRITE', wr_id=0)")
        assert host("ep.poll(1)")[0][1] == "SUCCESS"


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("pings", ["answered", "missing"])
def test_a_path_that_died_while_nobody_worked(network: Network, faults: Any, how: str, pings: str) -> None:
    """The first work that meets it is moved soon, whether pings have told before or not."""
    a, _ = network.protected(setup="channel=True", attrs=PATIENT)
    works(a)
    a("c = ep.qp._shadow.connection")
    wait_until(lambda: a("all(path.ping.alive for path in c.paths)"), 10)
    faults.switch_down("rail0")
    if pings == "missing":
        wait_until(lambda: a("c.paths[0].ping.alive is not True"), 20)
    a(POST.format(how=HOWS[how]))
    assert a("got") == [[1, "SUCCESS"]], a("ep.shift()")
    assert a("took") < SOON_S, a("[took, ep.shift()]")


@pytest.mark.parametrize("longer_ms", [0, 5])
def test_a_peer_that_stands_still_while_nobody_works(network: Network, faults: Any, longer_ms: float) -> None:
    """The last WRITE was unsignaled: nothing ever tells of it, and it counts as old work. Nobody leaves for that."""
    a, b = network.protected(attrs=PATIENT)
    works(a)
    if longer_ms:
        for name in "ab":
            faults.delay(f"{name}/soft0", longer_ms / 1000, count=0)
    works(a)
    a("c = ep.qp._shadow.connection; ep.post('RDMA_WRITE', wr_id=1, signaled=False)")
    wait_until(lambda: a("c.watchdog.is_old"), 10)
    for _ in range(12):
        b.child.signal(signal.SIGSTOP)
        wait_until(lambda: a("c.paths[0].ping.alive is False"), 10)
        b.child.signal(signal.SIGCONT)
        wait_until(lambda: a("all(path.ping.alive for path in c.paths)"), 10)
    assert a("ep.shift()['counters']['switches']") == 0, a("ep.shift()")
