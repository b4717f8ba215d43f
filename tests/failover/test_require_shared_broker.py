# SPDX-License-Identifier: BSD-3-Clause
"""SHIFTVERBS_REQUIRE beside a shared broker that stands still: it is not what the QP ends of."""

from __future__ import annotations

import contextlib
import os
import signal

from harness import stop_process, wait_until
from hosts import Network, connect

BROKER = "ep.qp._shadow.domain.runtime.driver.directory._exchanger.broker_pid"


def test_a_broker_that_stands_still_ends_nobodys_qp(network: Network) -> None:
    """Job and broker are suspended, or the broker alone; who comes would be PROTECTED at once with its own."""
    before = network.host("a")
    before("ep = Endpoint()")
    broker = wait_until(lambda: before(BROKER), 30, "a broker")
    stop_process(broker)
    before.child.signal(signal.SIGSTOP)
    try:
        a, b = network.host("a", SHIFTVERBS_REQUIRE="1"), network.host("b")
        connect(a, b)
        for host in (a, b):
            host("ep.qp.shift.wait_protected(45)")
            assert host("ep.shift()['status']") == "PROTECTED", host("ep.shift()")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker, signal.SIGKILL)
        before.child.signal(signal.SIGCONT)
