# SPDX-License-Identifier: BSD-3-Clause
"""ibv_rereg_mr, while a peer uses the memory by a backup: it is memory all the while."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import wait_until
from hosts import Host, Network, go
from test_memory_keys import WRITE, resolved

#: Between letting go of the registrations and the verb, other threads have the GIL until the peer has asked for long.
SLOWLY = """
import threading
from shiftverbs.failover.services import memory_keys; from shiftverbs.shadows import mr
asked, enough = [], threading.Event()
find, hand_over = memory_keys.KeyBook._find, mr.ShadowMR.hand_over
def found(book, told, rkey, backups):
    if m._shadow is None and rkey == m.rkey:
        asked.append(rkey)
        if len(asked) == 8:
            enough.set()
    return find(book, told, rkey, backups)
def handed_over(self):
    handles = hand_over(self)
    while not enough.wait(0.01):
        assert ep.qp.shift.status == "PROTECTED", ep.qp.shift.why
    return handles
memory_keys.KeyBook._find, mr.ShadowMR.hand_over = found, handed_over
"""


def away_with_memory(network: Network, faults: Any) -> tuple[Host, Host]:
    """Two hosts away from home; b has memory `m` that a has written to."""
    a, b = network.protected()
    a(WRITE)
    m = b("m = mr.MR(ep.pd, SLOT, ACCESS); m.rkey, m.buf")
    go(faults, "away", a, b)
    a(f"m = {m}; write(ep, m, 'old', 1)")
    assert [w[:2] for w in a("ep.poll(1)")] == [[1, "SUCCESS"]]
    resolved(a, m[0], "ep")
    return a, b


@pytest.mark.parametrize("what", ["access", "refused"])
def test_memory_that_is_being_registered_anew_is_waited_for(network: Network, faults: Any, what: str) -> None:
    """The peer is not told that there is no such memory, which would end its QP."""
    a, b = away_with_memory(network, faults)
    b(SLOWLY + "from pyverbs.pyverbs_error import PyverbsRDMAError")
    if what == "access":
        b.begin("m.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, None, 0, 0, ACCESS)")
    else:
        b.begin("try:\n    m.rereg(1 << 6)\nexcept PyverbsRDMAError:\n    pass")
    wait_until(
        lambda: not a("ep.qp._shadow.connection.keys._theirs.knows(m[0], 1)"), what="a has heard of it"
    )
    a("write(ep, m, 'new', 2)")
    b.end()
    assert [w[:2] for w in a("ep.poll(1)")] == [[2, "SUCCESS"]], a("ep.shift()['why']")
    assert b("m.read(3, 0).decode()") == "new"
    assert a("ep.shift()['status']") == "PROTECTED" == b("ep.shift()['status']")


def test_memory_that_was_closed_is_none(network: Network, faults: Any) -> None:
    """After a rereg, too, nothing of its key is left."""
    a, b = away_with_memory(network, faults)
    b("m.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, None, 0, 0, ACCESS); m.close()")
    wait_until(
        lambda: not a("ep.qp._shadow.connection.keys._theirs.knows(m[0], 1)"), what="a has heard of it"
    )
    a("write(ep, m, 'wrong', 2)")
    assert [w[:2] for w in a("ep.poll(1)")] == [[2, "REM_ACCESS_ERR"]]
    assert "no memory region of rkey" in a("ep.shift()['why']")


@pytest.mark.parametrize("who", ["a thread", "a handler"])
def test_memory_is_closed_while_its_change_waits_for_a_peer(network: Network, faults: Any, who: str) -> None:
    """One that stands still. What the change had taken over is gone with that: nobody lets go of it a second time."""
    a, b = away_with_memory(network, faults)
    wait_until(lambda: b("m._shadow.state(1)") == "ready", what="the backup's memory")
    b("""
import signal, threading
from shiftverbs.failover.runtime import Runtime
waits, await_peers = threading.Event(), Runtime.await_peers
def awaiting(runtime, shadow):
    waits.set()
    await_peers(runtime, shadow)
Runtime.await_peers = awaiting
def close():
    waits.wait(10)
    m.close()
    others.extend(mr.MR(ep.pd, 4096, ACCESS) for _ in range(3))
others = []
""")
    a.child.signal(signal.SIGSTOP)
    if who == "a thread":
        b("closing = threading.Thread(target=close); closing.start()")
    else:
        b("signal.signal(signal.SIGALRM, lambda *_: close()); closing = None")
        b("signal.setitimer(signal.ITIMER_REAL, 0.05) and None")
    b("m.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, None, 0, 0, ACCESS)")
    b("closing is None or closing.join()")
    wait_until(lambda: b("[each._shadow.state(1) for each in others]") == ["ready"] * 3, what="other memory")
    b("[each.close() for each in others] and None; ep.qp.close(); ep.mr.close(); ep.pd.close()")
    a.child.signal(signal.SIGCONT)
