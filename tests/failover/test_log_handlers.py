# SPDX-License-Identifier: BSD-3-Clause
"""What the program does with logging, and leaves behind in it, does not hold up failover: it never polls meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, HOME, Network

HANDLER = """
import logging, threading

class Handler(logging.Handler):
    seen = []

    def emit(self, record):
        self.seen.append(record.getMessage())
        if how == "blocks":
            threading.Event().wait()
        elif how == "raises":
            raise RuntimeError("a handler's mistake")
        elif how == "asks":
            ep.qp.query(e.IBV_QP_STATE)
            logging.getLogger("shiftverbs.driver").debug("from a handler")

    def handleError(self, record):
        raise

handler = Handler()
logging.getLogger("shiftverbs").addHandler(handler)
logging.getLogger("shiftverbs").setLevel(logging.DEBUG)
if how == "module":
    logging._lock.acquire()
elif how == "handler":
    handler.acquire()
"""


@pytest.mark.parametrize("how", ["works", "module", "handler", "blocks", "raises", "asks"])
def test_failover_goes_on(network: Network, faults: Any, how: str) -> None:
    """module, handler: the main thread has that lock, as after a signal's handler that raised amid a log call.

    blocks: in any thread but the program's own, which writes what it logs itself.
    """
    a, b = network.protected()
    a(f"how = {how!r}\n{HANDLER}")
    for _ in range(2):
        faults.down("a/soft0")
        for h in (a, b):
            h(f"ep.wait({AWAY!r}, 20)")
        faults.up("a/soft0")
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 20)")
    a("ep.post('RDMA_WRITE', slot=3, length=6, wr_id=9)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[9, "SUCCESS"]]
    if how == "works":
        wait_until(lambda: len(a("Handler.seen")) >= 4, what="what happened is logged all the same")
