# SPDX-License-Identifier: BSD-3-Clause
"""Rails that lose packets, and processes that stand still for a moment, are no failures: traffic stays where it is.

For some seconds each; for longer, as the soak is run (half an hour in all):

    SHIFTVERBS_STILL_MINUTES=5 pytest -s tests/failover/test_nothing_died.py
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
from hosts import Host, Network

MINUTES = float(os.environ.get("SHIFTVERBS_STILL_MINUTES", "0.05"))
pytestmark = pytest.mark.timeout(60 * MINUTES + 300)
LOST = 0.05
STILL_S = 0.2
# How a program waits for what it has sent.
WAITS = {
    "polling": "(wc,) = ep.poll(1, 60)",
    "computing": "time.sleep(0.002); (wc,) = ep.poll(1, 60)",
}

STREAM = """
import time
from shiftverbs import observe
from shiftverbs.failover import runtime

said = []
observe.subscribe(lambda event: said.append(str(event)), observe.PathFailed)

def stream(seconds):
    '''Post one WRITE after the other, and wait for each; returns how many, and how long one took at most.'''
    until, count, longest = time.monotonic() + seconds, 0, 0.0
    while (began := time.monotonic()) < until:
        ep.post("RDMA_WRITE", length=4096)
        {wait}
        if wc[1] != "SUCCESS":
            raise RuntimeError(str((wc, ep.shift())))
        count, longest = count + 1, max(longest, time.monotonic() - began)
    return count, longest
"""


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("lossy", ["neither rail", "rail 0", "both rails"])
def test_nobody_leaves(network: Network, faults: Any, how: str, lossy: str) -> None:
    seed = random.randrange(1 << 31)
    print("seed", seed)
    rng = random.Random(seed)
    a, b = network.protected(attrs="timeout=14, retry=7")
    for k in range({"neither rail": 0, "rail 0": 1, "both rails": 2}[lossy]):
        faults.drop(f"a/soft{k}", count=0, probability=LOST, seed=rng.getrandbits(32))
    for host in (a, b):
        host(f"exec({STREAM.format(wait=WAITS[how])!r}, globals())")
    seconds = 60 * MINUTES
    until = time.monotonic() + seconds
    for host in (a, b):
        host.begin(f"stream({seconds})")
    stops = 0
    while time.monotonic() < until:
        threading.Event().wait(rng.uniform(0.2, 2 * seconds / 10))
        stand_still(rng.choice((a, b)))
        stops += 1
    for host in (a, b):
        count, longest = host.end(seconds + 120)
        print(f"{how}, {lossy} loses: {count} WRITEs, {stops} stops of both, at most {longest * 1e3:.0f} ms")
    for host in (a, b):
        switches = host("runtime.current().driver.totals.switches")
        if switches or host("ep.qp.shift.path") != "soft0":
            said = [(each("said"), each("ep.shift()")) for each in (a, b)]
            raise AssertionError(f"{switches} SWITCHes; what both say: {said}")


def stand_still(host: Host) -> None:
    """Its process does nothing for a moment: no NIC of it answers, and its clock goes on."""
    host.child.signal(signal.SIGSTOP)
    threading.Event().wait(STILL_S)
    host.child.signal(signal.SIGCONT)
