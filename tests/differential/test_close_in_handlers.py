# SPDX-License-Identifier: BSD-3-Clause
"""A signal's handler, or another thread, that closes what is being closed already, while that waits for a hung NIC."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, Network

HANDLER = """
import signal, threading
class Alarm(Exception): pass
said = []
def inner():
    print('inner', flush=True)
    try:
        {inner}
    except Exception as error:
        said.append(getattr(error, 'error_code', repr(error)))
def handler(number, frame):
    inner()
    {then}
signal.signal(signal.SIGALRM, handler)
def outer():
    signal.setitimer(signal.ITIMER_REAL, {alarm})
    try:
        {outer}
    except Alarm:
        return 'raised'
"""


def busy(network: Network, faults: Any, outer: str, inner: str, then: str = "pass", alarm: float = 0.3) -> Any:
    """Host a, and its outer() begun: the close of `outer`, which waits for a NIC that hangs."""
    a, _ = network.protected()
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r}, 20)")
    faults.hang("a/soft1")
    a(HANDLER.format(inner=f"ep.{inner}.close()", outer=f"ep.{outer}.close()", then=then, alarm=alarm))
    return a


def finish(a: Any, faults: Any) -> None:
    """All can be closed, once more too; others come and go as ever; the program ends well."""
    faults.up("a/soft0")
    for each in ("qp", "mr", "cq", "pd", "context") * 2:
        a(f"ep.{each}.close()")
    a("two = Endpoint(device.Context(name='soft0')); two.qp.close()")
    a.child.send('"raise SystemExit"')
    assert a.child.wait(20) == 0, a.child.output[-3000:]
    assert "Traceback" not in a.child.output and "ignored" not in a.child.output, a.child.output[-3000:]


@pytest.mark.parametrize("then", ["pass", "raise Alarm"])
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(one, one) for one in ("qp", "mr", "pd", "cq", "context")] + [("pd", "context"), ("qp", "pd"), ("mr", "pd")],
)
def test_a_handler_closes_it_too(network: Network, faults: Any, outer: str, inner: str, then: str) -> None:
    """It is closed once; where a parent's close would pull it away, that is refused."""
    a = busy(network, faults, outer, inner, then)
    a.begin("outer()")
    a.child.expect("^inner$", 20)
    faults.unhang("a/soft1")
    assert a.end(30) == (None if then == "pass" else "raised")
    assert a("said") in ([], [16])  # EBUSY
    finish(a, faults)


@pytest.mark.parametrize("what", ["qp", "pd", "context"])
def test_another_thread_closes_it_too(network: Network, faults: Any, what: str) -> None:
    """It is closed when either returns."""
    a = busy(network, faults, what, what, alarm=0)
    a("done = []; t = threading.Thread(target=lambda: (inner(), done.append(1)))")
    a("threading.Timer(0.2, t.start).start()")
    a.begin("outer()")
    a.child.expect("^inner$", 20)
    faults.unhang("a/soft1")
    a.end(30)
    assert a("t.join(20); done") == [1]
    assert a("said") == []
    finish(a, faults)
