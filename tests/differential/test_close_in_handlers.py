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
def alarm():
    ring(signal.SIGALRM)
def outer():
    when_it_waits({meanwhile})
    try:
        {outer}
    except Alarm:
        return 'raised'
"""


def closing(what: str) -> str:
    """An object's name: its close. Else a statement."""
    return f"ep.{what}.close()" if what.isidentifier() else what


def busy(
    network: Network, faults: Any, outer: str, inner: str, then: str = "pass", meanwhile: str = "alarm"
) -> Any:
    """Host a, and its outer(): the close of `outer`, or that statement, which waits for a NIC that hangs.

    meanwhile: what another thread calls while it waits; else a signal comes, whose handler runs inner(), then `then`.
    """
    a, _ = network.protected()
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r}, 20)")
    faults.hang("a/soft1")
    a(HANDLER.format(inner=closing(inner), outer=closing(outer), then=then, meanwhile=meanwhile))
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
    [(one, one) for one in ("qp", "mr", "pd", "cq", "context")]
    + [("pd", "context"), ("qp", "pd"), ("mr", "pd")],
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
    a = busy(network, faults, what, what, meanwhile="t.start")
    a("done = []; t = threading.Thread(target=lambda: (inner(), done.append(1)))")
    a.begin("outer()")
    a.child.expect("^inner$", 20)
    faults.unhang("a/soft1")
    a.end(30)
    assert a("t.join(20); done") == [1]
    assert a("said") == []
    finish(a, faults)


@pytest.mark.parametrize("inner", ["qp", "pd", "cq", "context"])
def test_a_handler_closes_what_is_being_reset(network: Network, faults: Any, inner: str) -> None:
    """It is closed, and the verb has nothing left to do."""
    reset = "attr = qp.QPAttr(); attr.qp_state = e.IBV_QPS_RESET; ep.qp.modify(attr, e.IBV_QP_STATE)"
    a = busy(network, faults, reset, inner)
    a.begin("outer()")
    a.child.expect("^inner$", 20)
    faults.unhang("a/soft1")
    assert a.end(30) is None
    assert a("said") == []
    finish(a, faults)


def test_a_handler_changes_memory_that_is_being_closed(network: Network, faults: Any) -> None:
    """No backup keeps it."""
    a = busy(network, faults, "mr", "ep.mr.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, access=1)")
    a.begin("outer()")
    a.child.expect("^inner$", 20)
    faults.unhang("a/soft1")
    assert a.end(30) is None
    finish(a, faults)
    assert "was not destroyed" not in a.child.output, a.child.output[-3000:]


@pytest.mark.parametrize("outer", ["pd", "cq", "context"])
def test_a_close_that_was_broken_off_begins_anew(network: Network, faults: Any, outer: str) -> None:
    """With all that it closes."""
    a = busy(network, faults, outer, "mr", "raise Alarm")
    assert a("outer()") == "raised"
    faults.unhang("a/soft1")
    a(f"ep.{outer}.close()")
    for each in ("qp", "context") if outer == "context" else ("qp",):
        assert a(f"__import__('shiftverbs').mirroring.lifetime.is_open(ep.{each})") is False
    finish(a, faults)


@pytest.mark.parametrize("what", ["qp", "mr"])
def test_a_signal_while_an_object_ends(network: Network, faults: Any, what: str) -> None:
    """What its handler raises comes out after it, and is swallowed by no weak reference's callback."""
    a = busy(network, faults, what, "qp")
    a(f"""
def handler(number, frame):
    raise Alarm
signal.signal(signal.SIGALRM, handler)
def ends():
    try:
        when_it_waits(lambda: (alarm(), print('came', flush=True)))
        del ep.{what}
        list(map(lambda _: None, range(9)))
        return 'nothing'
    except Alarm:
        return 'raised'
""")
    a.begin("ends()")
    a.child.expect("^came$", 20)
    faults.unhang("a/soft1")
    assert a.end(30) == "raised"
    assert "ignored" not in a.child.output, a.child.output[-3000:]
