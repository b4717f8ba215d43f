# SPDX-License-Identifier: BSD-3-Clause
"""A peer that stands still under old work, where answers take longer on the other rail: nobody leaves for that."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import wait_until
from hosts import Network
from test_silent_rails import PATIENT, works


@pytest.mark.parametrize("delay_ms", [0, 20])
def test_the_rail_with_the_work_is_missed_first(network: Network, faults: Any, delay_ms: float) -> None:
    """The last WRITE was unsignaled: nothing ever tells of it, and it counts as old work."""
    a, b = network.protected(attrs=PATIENT)
    if delay_ms:
        for name in "ab":
            faults.delay(f"{name}/soft1", delay_ms / 1000, count=0)
    works(a)
    a("c = ep.qp._shadow.connection; ep.post('RDMA_WRITE', wr_id=1, signaled=False)")
    wait_until(lambda: a("c.watchdog.is_old"), 10)
    for _ in range(4):
        b.child.signal(signal.SIGSTOP)
        wait_until(lambda: a("all(path.ping.alive is False for path in c.paths)"), 10)
        b.child.signal(signal.SIGCONT)
        wait_until(lambda: a("all(path.ping.alive for path in c.paths)"), 10)
    assert a("ep.shift()['counters']['switches']") == 0, a("ep.shift()")
