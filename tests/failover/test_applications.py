# SPDX-License-Identifier: BSD-3-Clause
"""Applications of different habits: blocked on a channel, in poll() on its fd, silent, never signaling, many QPs."""

from __future__ import annotations

from typing import Any

from harness import wait_until
from hosts import AWAY, HOME, Network, connect

EVENTS = """
def wait_event(n):
    got = []
    while len(got) < n:
        ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.cq.req_notify()
        got += ep.poll(16, 0.01)
    return got
ep.cq.req_notify()
"""


def test_blocked_on_a_completion_channel(network: Network, faults: Any) -> None:
    """Both sides sleep in get_cq_event through failure and return; nobody polls meanwhile."""
    a, b = network.protected(setup="channel=True, depth=32")
    for h in (a, b):
        h(EVENTS)
    b("[ep.recv(i) for i in range(12)]")
    a("[ep.post('SEND', wr_id=i) for i in range(4)]")
    assert [wc[0] for wc in a("wait_event(4)")] == list(range(4))
    assert [wc[0] for wc in b("wait_event(4)")] == list(range(4))
    faults.switch_down("rail0")
    b.begin("wait_event(4)")
    a("[ep.post('SEND', wr_id=i) for i in range(4, 8)]")
    assert [wc[:2] for wc in a("wait_event(4)")] == [[i, "SUCCESS"] for i in range(4, 8)]
    assert [wc[:2] for wc in b.end()] == [[i, "SUCCESS"] for i in range(4, 8)]
    b.begin("wait_event(4)")
    faults.switch_up("rail0")
    a(f"ep.wait({HOME!r}, 20)")
    a("[ep.post('SEND', wr_id=i) for i in range(8, 12)]")
    assert [wc[:2] for wc in a("wait_event(4)")] == [[i, "SUCCESS"] for i in range(8, 12)]
    assert [wc[:2] for wc in b.end()] == [[i, "SUCCESS"] for i in range(8, 12)]
    for h in (a, b):
        h("ep.qp.close(); ep.cq.close(); ep.channel.close()")


def test_channel_descriptor_in_poll(network: Network, faults: Any) -> None:
    """The channel's fd in select.poll: readable for completions of either NIC, and not otherwise."""
    a, b = network.protected(setup="channel=True")
    poll = "import select; p = select.poll(); p.register(ep.channel.fd, select.POLLIN); ep.cq.req_notify()"
    b(poll)
    b("[ep.recv(i) for i in range(8)]")
    assert b("p.poll(50)") == []
    faults.down("b/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    # The fence's flushes may have raised the default CQ's event: an event without a completion, which verbs allow.
    b("while p.poll(50): ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.cq.req_notify()")
    assert b("ep.none(0)") == []
    assert b("p.poll(50)") == []
    a("ep.post('SEND', wr_id=1)")
    assert b("len(p.poll(5000))") == 1
    b("ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1)")
    assert b("ep.poll(1)")[0][:2] == [0, "SUCCESS"]


def test_application_that_spins_on_memory(network: Network, faults: Any) -> None:
    """It never calls us while it waits for a WRITE of the peer; the failover happens behind its back."""
    a, b = network.protected()
    spin = """
deadline = time.monotonic() + 10
while ep.text(7, 4) != 'done' and time.monotonic() < deadline:
    pass
ep.text(7, 4)
"""
    b.begin(spin)
    faults.switch_down("rail0")
    a("ep.fill(7, 'done'); ep.post('RDMA_WRITE', slot=7, length=4, wr_id=1)")
    a.begin("t = time.monotonic()\nwhile time.monotonic() - t < 1: pass")  # the sender does not poll either
    assert b.end() == "done"
    a.end()
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    assert a("ep.shift()['path']") == "soft1"


def test_application_that_never_signals(network: Network, faults: Any) -> None:
    """More posts than the queue is deep, none signaled; a failure in between; then home again."""
    a, b = network.protected(setup="depth=8")
    post = """
import errno
def push(start, n):
    for i in range(start, start + n):
        ep.fill(i % 32, '%4d' % i)
        deadline = time.monotonic() + 10
        while True:
            try:
                ep.post('RDMA_WRITE', slot=i % 32, length=4, signaled=False)
                break
            except Exception as error:
                if error.error_code != errno.ENOMEM or time.monotonic() > deadline: raise
"""
    a(post)
    a("push(0, 100)")
    faults.down("a/soft0")
    a("push(100, 100)")
    assert a("ep.shift()['path']") == "soft1"
    wait_until(lambda: b("ep.text(199 % 32, 4)") == " 199", what="the last WRITE")
    assert b("[int(ep.text(i, 4)) % 32 for i in range(32)]") == list(range(32))
    faults.up("a/soft0")
    a.begin(f"ep.wait({HOME!r}, 20)")
    a.end()
    a("push(200, 50)")
    wait_until(lambda: b("ep.text(249 % 32, 4)") == " 249", what="the last WRITE at home")
    assert a("ep.none()") == []


def test_64_qps_on_one_cq(network: Network, faults: Any) -> None:
    a, b = network.host("a"), network.host("b")
    n = 64
    unprotected = "[repr(x.qp.shift) for x in eps if x.qp.shift.status != 'PROTECTED']"
    for h in (a, b):
        h(
            f"first = Endpoint(depth=64); eps = [first] + [Endpoint(shared=first, depth=4) for _ in range({n - 1})]"
        )
    names = {h: h("[x.name() for x in eps]") for h in (a, b)}
    for h, peer in ((a, b), (b, a)):
        h(f"for x, p in zip(eps, {names[peer]!r}): x.connect(p)")
    for h in (a, b):
        assert h("all(x.qp.shift.wait_protected(30) for x in eps)"), h(unprotected)
    a("wcs = []; take = lambda: wcs.extend(first.cq.poll(16)[1]) or len(wcs)")
    b("wcs = []; take = lambda: wcs.extend(first.cq.poll(16)[1]) or len(wcs)")
    b("[(x.recv(1, 1), x.recv(2, 2)) for x in eps]")
    a("[x.post('SEND', wr_id=1) for x in eps]")
    faults.switch_down("rail0")
    a("[x.post('SEND', wr_id=2) for x in eps]")
    for h in (a, b):
        wait_until(lambda h=h: h("take()") >= 2 * n, 20, "all completions")
        assert h("sorted((w.wr_id, w.status) for w in wcs)") == [[1, 0]] * n + [[2, 0]] * n
        assert h(f"len({{w.qp_num for w in wcs}} & {{x.qp.qp_num for x in eps}}) == {n}")
        assert h("{x.qp.shift.path for x in eps} == {'soft1'}")
    faults.switch_up("rail0")
    for h in (a, b):
        assert h("all(x.qp.shift.wait_state('DEFAULT', 30) for x in eps)"), h(unprotected)
    for h in (a, b):
        assert h("take()") == 2 * n


def test_query_shows_what_the_application_set(network: Network, faults: Any) -> None:
    a, b = network.protected()
    query = "at, ia = ep.qp.query(e.IBV_QP_STATE | e.IBV_QP_CAP); "
    query += "[at.qp_state, at.cap.max_send_wr, ia.cap.max_recv_wr]"
    before = a(query)
    assert before[0] == 3
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r})")
    assert a(query) == before
    assert a("ep.qp.qp_state") == 3
    assert b("ep.qp.qp_state") == 3


def test_async_events_arrive_once_and_ours_never(network: Network, faults: Any) -> None:
    a, b = network.protected()
    a(
        """
import threading
events = []
def listen():
    while True:
        event = ep.context.get_async_event(); events.append(event.event_type); event.ack()
threading.Thread(target=listen, daemon=True).start()
"""
    )
    for _ in range(2):
        faults.down("a/soft0")
        a(f"ep.wait({AWAY!r})")
        faults.up("a/soft0")
        a(f"ep.wait({HOME!r}, 20)")
    faults.down("a/soft1")
    faults.up("a/soft1")
    port = [10, 9]  # PORT_ERR, PORT_ACTIVE
    wait_until(lambda: a("events") == port * 2, what="two flaps of the default NIC")
    assert a("ep.none(0.3); events") == port * 2


def test_observers_are_told(network: Network, faults: Any) -> None:
    network.env["SHIFTVERBS_JOB"] = str(network.env["SHIFTVERBS_JOB"]) + "-o"
    a, b = network.host("a"), network.host("b")
    a(
        "from shiftverbs import observe; seen = []; s = observe.subscribe(lambda event: seen.append(event.kind))"
    )
    connect(a, b)
    b("[ep.recv(i) for i in range(4)]")
    assert a("ep.qp.shift.wait_protected(20)")
    faults.switch_down("rail0")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    faults.switch_up("rail0")
    a(f"ep.wait({HOME!r}, 20)")
    wait_until(lambda: "Failback" in a("seen"), what="the last event")
    assert a("seen") == ["Paired", "Protected", "PathFailed", "Fallback", "Failback"]
