# SPDX-License-Identifier: BSD-3-Clause
"""Verbs that are broken off while a NIC keeps them waiting, or whose QP a signal's handler closes."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, Host, HostError, Network

RESET = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE)"

# The backup's thread is at something, until `go`; Ctrl-C as soon as the verb waits for it.
BUSY_BACKUP = """
nic, pointer = ep.qp._shadow.connection.nic(1), ep.qp._shadow.handle(1)
go, at_work, interrupted, came = threading.Event(), threading.Event(), threading.Event(), []
job = nic.worker.call(lambda: (at_work.set(), go.wait(60)))
at_work.wait(10)

def raises(number, frame):
    came.append(number)
    interrupted.set()
    raise KeyboardInterrupt

before = signal.signal(signal.SIGINT, raises)
c = ep.qp._shadow.connection
"""


def away(network: Network, faults: Any) -> tuple[Host, Host]:
    """Two hosts whose traffic is on the backup, whose NIC's thread on host a is busy."""
    a, b = network.protected()
    faults.down("a/soft0")
    for h in (a, b):
        assert h(f"ep.wait({AWAY!r}, 20)"), h("ep.shift()")
    a(BUSY_BACKUP)
    return a, b


def test_a_close_that_is_interrupted_has_happened(network: Network, faults: Any) -> None:
    """Ctrl-C while it waits for a backup that hangs: closed it is, and the peer hears of it."""
    a, b = away(network, faults)
    a("ep.recv(1); when_it_waits(lambda: ring(signal.SIGINT))")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.qp.close()")
    assert a("(came == [signal.SIGINT], str(ep.qp.shift.status), ep.qp.shift.why)") == [
        True,
        "UNPROTECTED",
        "it is closed",
    ]
    a("from shiftverbs.mirroring import lifetime")
    assert not a("lifetime.is_open(ep.qp)")
    a("ep.qp.close(); ep.cq.close()")  # nothing is left of it that would keep these
    assert b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), b("ep.shift()")
    a("go.set()")
    assert a("nic.worker.drain(pointer, 20)")


def test_a_stop_that_was_given_up_is_commanded_again(network: Network, faults: Any) -> None:
    """RESET has waited for a backup in vain: the end of memory must not come before the stop of the QP that closes."""
    a, _ = away(network, faults)
    a("from shiftverbs.failover import runtime; runtime.STOP_DMA_S = 1.0")
    a(RESET)
    assert a("nic.worker.pending(pointer)") == 1, "RESET"
    a("ep.qp.close()")
    assert a("nic.worker.pending(pointer)") == 2, "ERR in its place, and the end"
    a("go.set()")
    assert a("nic.worker.drain(pointer, 20)")


def test_rights_that_are_interrupted_have_changed(network: Network, faults: Any) -> None:
    """Ctrl-C while the NIC that carries the traffic is asked: nobody is left in doubt what the peer may do."""
    a, _ = away(network, faults)
    a("when_it_waits(lambda: ring(signal.SIGINT)); at = qp.QPAttr()")
    a("at.qp_access_flags = e.IBV_ACCESS_REMOTE_READ")
    a("threading.Thread(target=lambda: (interrupted.wait(30), go.set())).start()")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.qp.modify(at, e.IBV_QP_ACCESS_FLAGS)")
    assert a("len(came)") == 1
    rights = a(
        "(ep.qp._shadow.attrs['qp_access_flags'], c.given[1].attrs['qp_access_flags'], int(at.qp_access_flags))"
    )
    assert rights[0] == rights[1] == rights[2], rights
    assert a("ep.shift()['status']") == "PROTECTED"


@pytest.mark.parametrize("state", ["RESET", "ERR", "SQD"])
def test_a_modify_whose_qp_a_handler_closes_touches_nothing(
    network: Network, faults: Any, state: str
) -> None:
    """It waits for the driver's lock, and finds the QP closed when it has it."""
    a, b = network.protected()
    a(
        """
go, begun, closing, came = threading.Event(), threading.Event(), threading.Event(), []
connection = ep.qp._shadow.connection

def hold():
    with connection.driver.locked():
        begun.set()
        go.wait(20)

def closes(number, frame):
    came.append(number)
    closing.set()
    ep.qp.close()

signal.signal(signal.SIGINT, closes)
holder = threading.Thread(target=hold)
holder.start()
begun.wait(10)
"""
    )
    a("when_it_waits(lambda: (ring(signal.SIGINT), closing.wait(10), go.set()), where='qp_touched')")
    a(f"at = qp.QPAttr(); at.qp_state = e.IBV_QPS_{state}; ep.qp.modify(at, e.IBV_QP_STATE)")
    assert a("(len(came), connection.closed, connection.status.name, connection.why)") == [
        1,
        True,
        "UNPROTECTED",
        "it is closed",
    ]
    a("holder.join(20); ep.cq.close()")
    assert b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), b("ep.shift()")
