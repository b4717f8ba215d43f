# SPDX-License-Identifier: BSD-3-Clause
"""A program whose signal handlers raise sees of them what it sees with pyverbs, at home, away and in between."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from hosts import AWAY, HOME, Host, HostError, Network

PROGRAM = Path(__file__).with_name("alarms.py")
LOAD = f"import runpy; Alarms = runpy.run_path({str(PROGRAM)!r})['Alarms']"
QPS = 16


def connect(a: Host, b: Host, count: int) -> None:
    """So many endpoints on each host, connected in pairs: `eps`."""
    named = [
        h(
            f"ctx = device.Context(name='soft0'); eps = [Endpoint(ctx) for _ in range({count})];"
            " [x.name() for x in eps]"
        )
        for h in (a, b)
    ]
    for h, peers in ((a, named[1]), (b, named[0])):
        h(f"[ep.connect(n) for ep, n in zip(eps, {peers!r})]; None")


def alarmed(hosts: tuple[Host, ...], seed: int, count: int, shifts: bool) -> None:
    """Have every host begin its share of `count` alarms."""
    for number, h in enumerate(hosts):
        h(f"{LOAD}; al = Alarms(eps, {seed + number}, {shifts})")
    for h in hosts:
        h.begin(f"al.run({count // len(hosts)})")


def check(hosts: tuple[Host, ...], count: int) -> None:
    """Every alarm was caught, none was lost, and no verb failed."""
    for h in hosts:
        found = h.end(240)
        n = count // len(hosts)
        assert found == {"fired": n, "caught": n, "lost": 0, "errors": []}, (found, h.child.output[-3000:])
        assert "ignored" not in h.child.output and "Traceback" not in h.child.output, h.child.output[-3000:]


@pytest.mark.slow
def test_ten_thousand_alarms_while_cables_come_and_go(network: Network, faults: Any) -> None:
    """All of them reach the program, more than a hundred SWITCHes amid them; afterwards all is at home and in order."""
    seed, count = 20, 10_000
    print(f"seed {seed}")
    a, b = hosts = network.host("a"), network.host("b")
    connect(a, b, QPS)
    for h in hosts:
        assert h("all(ep.qp.shift.wait_protected(20) for ep in eps)")
    over = threading.Event()

    def cables() -> None:
        seen = 0
        with contextlib.suppress(AssertionError):  # at the program's end
            while not over.is_set():
                for what, where in ((faults.down, "away"), (faults.up, "home")):
                    what("a/soft0")
                    a.child.expect(f"^all {where} at", 10, seen)
                    seen = next(
                        i
                        for i in range(seen, len(a.child.lines))
                        if a.child.lines[i].startswith(f"all {where} at")
                    )

    alarmed(hosts, seed, count, shifts=True)
    thread = threading.Thread(target=cables, daemon=True)
    thread.start()
    try:
        check(hosts, count)
    finally:
        over.set()
        thread.join(20)
        faults.up("a/soft0")
    for h in hosts:
        h(f"[ep.wait({HOME!r}, 20) for ep in eps]")
        assert h("all(ep.qp.shift.status == 'PROTECTED' for ep in eps)"), h("[ep.shift() for ep in eps]")
    switches = a("sum(ep.qp.shift.counters['switches'] for ep in eps)")
    assert switches > 100, switches
    print(f"{switches} SWITCHes")
    for h in hosts:
        assert h("al.settle()") == {str(i): [True, []] for i in range(QPS)}


def test_plain_pyverbs_loses_no_alarm_either(network: Network) -> None:
    """What the program may count on."""
    a, b = hosts = network.host("a", "pyverbs"), network.host("b", "pyverbs")
    connect(a, b, 2)
    alarmed(hosts, 5, 500, shifts=False)
    check(hosts, 500)


def test_ctrl_c_wherever_it_comes(network: Network, faults: Any) -> None:
    """A failover that a signal's handler breaks into is carried out, and every QP comes home protected."""
    a, b = network.protected()
    a("import signal, threading; signal.signal(signal.SIGINT, signal.default_int_handler); None")
    a("from shiftverbs.failover.qp import connection")
    a("""
execute = connection.Connection.execute
done = [0]
def interrupted(self, actions):
    for action in actions:
        main = threading.current_thread() is threading.main_thread()
        done[0] += main
        if main and done[0] in (2, 5, 9):
            signal.raise_signal(signal.SIGINT)
        execute(self, [action])
connection.Connection.execute = interrupted
def there():
    ep.cq.poll(1)
    return eval(where, {'s': ep.qp.shift})
def poll_through():
    caught = 0
    end = time.monotonic() + 20
    print("it polls", flush=True)
    while time.monotonic() < end:
        try:
            arrived = there()
        except KeyboardInterrupt:
            arrived = False
            caught += 1
        if arrived:
            break
    return caught
""")
    a(f"where = {AWAY!r}")
    a.begin("poll_through()")
    a.child.expect("^it polls$")  # else another thread of its process may have carried it all out before
    faults.down("a/soft0")
    assert a.end()
    a(f"ep.wait({AWAY!r})")
    b(f"ep.wait({AWAY!r})")
    faults.up("a/soft0")
    a(f"where = {HOME!r}")
    a("poll_through()")
    for h in (a, b):
        h(f"ep.wait({HOME!r})")
        assert h("ep.qp.shift.status") == "PROTECTED"


INTERRUPTED = """
import random, signal, threading
signal.signal(signal.SIGALRM, signal.default_int_handler)
def soon(longest=0.003):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, longest))
def until_interrupted(verb, over):
    soon()
    while not over():
        verb()
    while True:
        time.sleep(0.01)  # it comes yet
def interrupted(times, verb, over=lambda: False):
    'Call verb again and again, until so many Ctrl-C came, or over() holds: how many came'
    caught = 0
    while caught < times and not over():
        try:
            until_interrupted(verb, over)
        except KeyboardInterrupt:
            caught += 1
    return caught
def change():
    attr = qp.QPAttr()
    attr.min_rnr_timer = random.randrange(1, 20)
    ep.qp.modify(attr, e.IBV_QP_MIN_RNR_TIMER)
over = []
"""


def test_ctrl_c_in_verbs(network: Network, faults: Any) -> None:
    """In a blocked get_cq_event, while two threads poll through failovers, in modify, in a close that waits for a hung
    NIC, and then the program ends: each verb is broken off where the program waits, and nothing else is."""
    a, b = network.protected(setup="channel=True")
    a(f"random = __import__('random'); random.seed(7)\n{INTERRUPTED}")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.cq.req_notify(); soon(0.1); ep.channel.get_cq_event(ep.cq)")
    a("other = threading.Thread(target=lambda: [ep.cq.poll(4) for _ in iter(lambda: bool(over), True)])")
    a("other.start()")
    a("told = threading.Thread(target=lambda: (sys.stdin.readline(), over.append(1)))")
    a.begin("told.start(); interrupted(1_000_000, lambda: ep.cq.poll(4), lambda: bool(over))")
    for _ in range(2):
        faults.down("a/soft0")
        b(f"ep.wait({AWAY!r}, 20)")
        faults.up("a/soft0")
        b(f"ep.wait({HOME!r}, 20)")
    a.child.send("over")
    assert a.end(20) > 10
    a("other.join(10); told.join(10)")
    a(f"ep.wait({HOME!r}, 20)")
    assert a("interrupted(100, change)") == 100
    assert a("ep.qp.shift.status") == "PROTECTED", a("ep.shift()")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=4)")
    assert [wc[:2] for wc in a("ep.poll(1)") + b("ep.poll(1)")] == [[4, "SUCCESS"], [1, "SUCCESS"]]
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r}, 20)")
    faults.hang("a/soft1")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("when_it_waits(lambda: ring(signal.SIGALRM)); ep.qp.close()")
    faults.unhang("a/soft1")
    a("ep.qp.close()")
    a.child.send('"raise SystemExit"')
    assert a.child.wait(20) == 0


def come_and_go(host: Host, seed: int, count: int, shifts: bool) -> None:
    """Objects come and go under alarms: every one is caught, but for those that the interpreter itself swallows."""
    host(f"{LOAD}; al = Alarms([ep], {seed}, {shifts})")
    found = host(f"al.come_and_go(lambda: Endpoint(ep.context), ep.connect, {count})", 60)
    swallowed = host("al.swallowed")
    print(found, swallowed)
    # What a handler raises in a weak reference's callback, which an object's end runs with plain pyverbs too.
    lost = swallowed.pop("WeakSet.__init__.<locals>._remove", 0)
    assert not swallowed
    fired = found["fired"]
    assert found == {"fired": fired, "caught": fired - lost, "lost": lost, "errors": []}, found
    assert lost < fired // 8
    assert "ignored" not in host.child.output, host.child.output[-3000:]


def test_plain_objects_come_and_go_under_alarms(network: Network) -> None:
    """What the program may count on."""
    a, _ = network.pair("pyverbs")
    come_and_go(a, 31, 400, shifts=False)


def test_alarms_while_objects_come_and_go(network: Network) -> None:
    """A verb that ends in an alarm leaves no lock behind: other threads make and close QPs, and so does the program."""
    seed = 31
    print(f"seed {seed}")
    a, b = network.protected()
    del b
    come_and_go(a, seed, 400, shifts=True)
    # pyverbs' attributes and GIDs look up their logger, and the library's own lock may be left so with pyverbs too.
    a("import logging\nwhile logging._lock._is_owned(): logging._lock.release()")
    a("import threading; made = []")
    a(
        "t = threading.Thread(target=lambda: made.append(Endpoint(ep.context).qp.close())); t.start(); t.join(10)"
    )
    assert a("made == [None]")
    assert a("ep.qp.shift.status") == "PROTECTED"
    a("ep.post('RDMA_WRITE', wr_id=3)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[3, "SUCCESS"]]
    a("ep.qp.close()")
    a.child.send('"raise SystemExit"')
    assert a.child.wait(20) == 0
