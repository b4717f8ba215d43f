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


def test_a_reset_that_is_interrupted_leaves_no_command_to_the_next_life(
    network: Network, faults: Any
) -> None:
    """Ctrl-C while RESET is commanded once more, behind a command of ours: it overtakes nothing that follows."""
    a, _ = network.protected()
    a(
        """
from shiftverbs.shadows.qp import ShadowQP

came = []
nic, pointer = ep.qp._shadow.domain.nic, ep.qp._shadow.default
ShadowQP._wait_for_commands = lambda shadow: setattr(shadow, "commands_left", 1)

def raises(number, frame):
    came.append(nic.worker.pending(pointer))
    raise KeyboardInterrupt

def rings():
    deadline = time.monotonic() + 10
    while not nic.hangs(0.05):  # until it is at that command
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)
    ring(signal.SIGINT)

before = signal.signal(signal.SIGINT, raises)
"""
    )
    faults.slow("a/soft0", 0.5)
    a("when_it_waits(rings, where='_await_stop')")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a(RESET)
    assert a("(came, nic.worker.pending(pointer), int(ep.qp.qp_state))") == [[1], 0, 0]


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


def test_what_handlers_raise_again_and_again_comes_out_once(network: Network, faults: Any) -> None:
    """Ctrl-C four times while a NIC is asked: what the program does about it is not interrupted three times more."""
    a, _ = away(network, faults)
    a(
        """
def raises(number, frame):
    if len(came) < 4:
        came.append(number)
        if len(came) == 4:
            go.set()
        raise KeyboardInterrupt

def change():
    at, caught = qp.QPAttr(), []
    at.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
    signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, 0.06, 0.06)
    try:
        ep.qp.modify(at, e.IBV_QP_ACCESS_FLAGS)
    except KeyboardInterrupt:
        caught.append(len(came))
    signal.setitimer(signal.ITIMER_REAL, 0)
    for _ in range(1000):
        len(caught)
    return caught
"""
    )
    assert a("change()") == [4]
    assert a("ep.qp._shadow.attrs['qp_access_flags'] == c.given[1].attrs['qp_access_flags']")
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


# Somebody has the driver's lock when bind_mw comes to it for the last time; a handler runs in that wait.
BIND = """
import pyverbs.mr
from pyverbs.mr import MWBind, MWBindInfo
mw, bound = mr.MW(ep.pd, e.IBV_MW_TYPE_1), mr.MR(ep.pd, SLOT, ACCESS | e.IBV_ACCESS_MW_BIND)
bind = MWBind(MWBindInfo(bound, bound.buf, SLOT, e.IBV_ACCESS_REMOTE_WRITE), e.IBV_SEND_SIGNALED, wr_id=5)
held, driver = ep.qp._shadow, ep.qp._shadow.domain.runtime.driver
go, begun, came = threading.Event(), threading.Event(), []
ends = held.closing

def hold():
    with driver.locked():
        begun.set()
        go.wait(20)

def closing():
    if not came:
        threading.Thread(target=hold).start()
        begun.wait(10)
        when_it_waits(lambda: ring(signal.SIGUSR1), where="qp_closing")
    ends()

def handler(number, frame):
    came.append(number)
    go.set()
    {act}

held.closing = closing
before = signal.signal(signal.SIGUSR1, handler)
"""


@pytest.mark.parametrize("act", ["ep.qp.close()", "ep.pd.close()", "mw.close()"])
def test_a_bind_whose_objects_a_handler_closes_is_refused(network: Network, faults: Any, act: str) -> None:
    a, b = network.protected()
    a(BIND.replace("{act}", act))
    with pytest.raises(HostError, match="Failed to Bind MW"):
        a("ep.qp.bind_mw(mw, bind)")
    assert a("len(came)") == 1
    assert b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), b("ep.shift()")
    a(
        "ep.qp.close(); mw.close(); bound.close(); ep.mr.close(); ep.cq.close(); ep.pd.close(); ep.context.close()"
    )
    assert "was not destroyed" not in a.child.output, a.child.output


def test_windows_that_are_bound_one_within_the_other_end_protection_once(
    network: Network, faults: Any
) -> None:
    a, b = network.protected()
    a(BIND.replace("{act}", "ep.qp.bind_mw(mw, bind)"))
    a("mw2 = mr.MW(ep.pd, e.IBV_MW_TYPE_1)")
    a(
        "bind2 = MWBind(MWBindInfo(bound, bound.buf, SLOT, e.IBV_ACCESS_REMOTE_WRITE), e.IBV_SEND_SIGNALED, wr_id=6)"
    )
    a("ep.qp.bind_mw(mw2, bind2)")
    assert a("len(came)") == 1 and a("ep.qp.shift.why") == "a memory window was bound through it"
    assert sorted(wc[:2] for wc in a("ep.poll(2)")) == [[5, "SUCCESS"], [6, "SUCCESS"]]
    assert b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), b("ep.shift()")
    a("ep.qp.close(); mw.close(); mw2.close(); bound.close(); ep.mr.close(); ep.cq.close(); ep.pd.close()")
    a("ep.context.close()")
    assert "was not destroyed" not in a.child.output, a.child.output


def test_a_bind_that_a_handler_breaks_off_has_changed_nothing(network: Network, faults: Any) -> None:
    a, b = network.protected()
    a(BIND.replace("{act}", "raise KeyboardInterrupt"))
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.qp.bind_mw(mw, bind)")
    b("ep.recv(0)")
    a("ep.post('SEND', wr_id=7)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "SUCCESS"]]
    a(
        "ep.qp.close(); mw.close(); bound.close(); ep.mr.close(); ep.cq.close(); ep.pd.close(); ep.context.close()"
    )
    assert "was not destroyed" not in a.child.output, a.child.output


@pytest.mark.parametrize(
    "where, verb",
    [
        ("resize", "its.resize(300)"),
        ("reserve", "qp.QP(made, init)"),
        ("release", "[x.close() for x in (made_before,)]"),
    ],
)
@pytest.mark.parametrize("act", ["its.close()", "raise KeyboardInterrupt"])
def test_who_waits_for_another_resize_of_a_cq_has_it_when_it_goes_on(
    network: Network, faults: Any, where: str, verb: str, act: str
) -> None:
    """No handler runs in that wait, which could close the CQ that the verb is about, or leave half of it.

    It would within 0.05 s.
    """
    a, _ = network.protected()
    a(
        f"""
its, made = cq.CQ(ep.context, 8, None, None, 0), pd.PD(ep.context)
init = qp.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=its, rcq=its, cap=qp.QPCap(max_send_wr=64, max_recv_wr=64))
made_before = qp.QP(made, init)
go, begun, came, took = threading.Event(), threading.Event(), [], its._shadow._protected

def hold():
    with its._shadow._lock:
        begun.set()
        go.wait(20)

def handler(number, frame):
    came.append(number)
    {act}

before = signal.signal(signal.SIGUSR1, handler)
holder = threading.Thread(target=hold)
holder.start()
begun.wait(10)
when_it_waits(lambda: (ring(signal.SIGUSR1), time.sleep(0.2), go.set()), where={where!r})
"""
    )
    if "raise" in act:
        with pytest.raises(HostError, match="KeyboardInterrupt"):
            a(f"{verb}; None")
        by_now = {"resize": "took", "reserve": "took", "release": "0"}[where]
        assert a(f"its._shadow._protected == {by_now}"), a("(took, its._shadow._protected)")
    else:
        a(f"{verb}; None")
        assert not a("its._node is None") and a("made_before.shift.why") == "it is closed"
    assert a("len(came)") == 1
    a(
        "made_before.close(); its.close(); made.close(); ep.qp.close(); ep.mr.close(); ep.cq.close(); ep.pd.close()"
    )
    a("ep.context.close()")
    assert "was not destroyed" not in a.child.output, a.child.output


@pytest.mark.parametrize("state", ["ERR", "SQD"])
def test_a_qp_that_a_handler_connects_anew_is_not_taken_for_protected(
    network: Network, faults: Any, state: str
) -> None:
    """The handler runs while the verb waits for a command on the default QP; then the verb goes on."""
    a, b = network.protected()
    a(
        """
nic, at_work, go, came = ep.qp._shadow.domain.nic, threading.Event(), threading.Event(), []
nic.worker.call(lambda: (at_work.set(), go.wait(30)))
at_work.wait(10)
nic.worker.submit(None, ep.qp._shadow.default, nic.verbs.ModifySteps().add(state=e.IBV_QPS_RTS))

def handler(number, frame):
    came.append(number)
    go.set()
    at = qp.QPAttr()
    at.qp_state = e.IBV_QPS_RESET
    ep.qp.modify(at, e.IBV_QP_STATE)
    ep.connect(ep.peer)

before = signal.signal(signal.SIGUSR1, handler)
when_it_waits(lambda: ring(signal.SIGUSR1))
"""
    )
    a(f"at = qp.QPAttr(); at.qp_state = e.IBV_QPS_{state}; ep.qp.modify(at, e.IBV_QP_STATE)")
    assert a("len(came)") == 1 and a(f"ep.qp.qp_state == e.IBV_QPS_{state}")
    assert a("not ep.qp._shadow.is_connected and str(ep.qp.shift.status) != 'PROTECTED'"), a("ep.shift()")
    b(RESET)
    b("ep.connect(ep.peer)")
    assert not a("ep.qp.shift.wait_protected(1)"), a("ep.shift()")


def test_a_backup_whose_stop_was_given_up_stands_in_again_when_it_has_recovered(
    network: Network, faults: Any
) -> None:
    """The QP is connected anew, and away there once more: what stopped it in its former life is over."""
    a, b = away(network, faults)
    a("from shiftverbs.failover import runtime; runtime.STOP_DMA_S = 1.0")
    a(RESET)
    assert a("nic.worker.pending(pointer)") == 1
    b(RESET)
    faults.up("a/soft0")
    a("go.set()")
    for h in (a, b):
        h("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    faults.down("a/soft0")
    for h in (a, b):
        assert h(f"ep.wait({AWAY!r}, 20)"), h("ep.shift()")
    b("ep.recv(0)")
    a("ep.recv(1); ep.post('SEND', wr_id=7)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[0, "SUCCESS"]]
    a("ep.qp.close()")
    assert a("nic.worker.drain(pointer, 20)")
    assert b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), b("ep.shift()")
