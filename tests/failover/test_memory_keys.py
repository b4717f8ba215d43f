# SPDX-License-Identifier: BSD-3-Clause
"""The keys of memory on the backups: registered late, looked up late, withdrawn, used again."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, HOME, Host, Network

# A second QP on the first one's CQ and channel, memory beside the endpoint's own, and a thread that sleeps on the CQ.
TWO = """
import threading
two = Endpoint(shared=ep)
def more():
    return mr.MR(ep.pd, SLOT, ACCESS)
def recv_into(p, m, wr_id):
    p.qp.post_recv(wr.RecvWR(wr_id, 1, [wr.SGE(m.buf, SLOT, m.lkey)]))
came = []
def sleep_for(n):
    while len(came) < n:
        ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.cq.req_notify()
        while wcs := ep.cq.poll(16)[1]:
            came.extend([wc.wr_id, STATUS.get(wc.status, wc.status)] for wc in wcs)
def sleeper(n):
    global thread
    ep.cq.req_notify()
    thread = threading.Thread(target=sleep_for, args=(len(came) + n,), daemon=True)
    thread.start()
def slept(timeout_s=20):
    thread.join(timeout_s)
    got, came[:] = sorted(came), []
    return got
"""


def two_each(network: Network, attrs: str = "") -> tuple[Host, Host]:
    """Two hosts with two protected QPs each, `ep` and `two`, on one CQ with a channel."""
    a, b = network.pair(setup="channel=True", attrs=attrs)
    names = [h(TWO + "two.name()") for h in (a, b)]
    b(f"two.connect({names[0]!r}{', ' + attrs if attrs else ''})")
    a(f"two.connect({names[1]!r}{', ' + attrs if attrs else ''})")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.qp.shift.wait_protected(20)"), h(f"{p}.shift()")
    return a, b


def leave(by: str, faults: Any, host: Host) -> None:
    """Have both QPs leave for the backup, because of a failure or on purpose."""
    if by == "failure":
        faults.down("a/soft0")
    else:
        host("ep.qp.shift.migrate(); two.qp.shift.migrate()")


@pytest.mark.parametrize("by", ["failure", "move"])
def test_nothing_is_sent_before_the_receives_are_posted(network: Network, faults: Any, by: str) -> None:
    """Their memory is still being registered on the backup: a peer with one RNR retry must not notice."""
    a, b = two_each(network, attrs="rnr=1")
    faults.hang("b/soft1")
    b("m = more(); recv_into(ep, m, 5); recv_into(two, m, 6); sleeper(2)")
    leave(by, faults, a)
    for p in ("ep", "two"):
        b(f"{p}.wait(\"s.recv_path == 'soft1'\")")
    a("sleeper(2); ep.post('SEND', wr_id=1)")
    a("two.post('SEND', wr_id=2, signaled=False); two.post('RDMA_WRITE', wr_id=3)")
    # The peer says all the while that it is at it, for longer than a silent one would be waited for.
    for p in ("ep", "two"):
        heard = a(f"{p}.shift()['counters']['messages_in']")
        a(f"{p}.wait('s.counters[\"messages_in\"] >= {heard + 12} or ep.qp.shift.status != \"PROTECTED\"')")
    assert a("came") == [], a("ep.shift()")
    faults.unhang("b/soft1")
    assert a("slept()") == [[1, "SUCCESS"], [3, "SUCCESS"]], a("ep.shift()")
    assert b("slept()") == [[5, "SUCCESS"], [6, "SUCCESS"]], b("ep.shift()")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.shift()['status']") == "PROTECTED"
            assert h(f"{p}.shift()['counters']['switches']") == (1 if by == "failure" else 0)
            h(f"{p}.wait({AWAY!r})")
    faults.up("a/soft0")
    a("ep.qp.shift.restore(); two.qp.shift.restore()")
    for h in (a, b):
        for p in ("ep", "two"):
            h(f"{p}.wait({HOME!r}, 20)")
