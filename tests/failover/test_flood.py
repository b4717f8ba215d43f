# SPDX-License-Identifier: BSD-3-Clause
"""A peer that is out of its mind: it says a hundred thousand different things a second, all under its own seal."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import wait_until
from hosts import Host, Network

#: Messages that are each another one, mean nothing, and are answered by nobody; `stop` ends it.
FLOOD = """
import threading
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Move, MoveStep
stop = threading.Event()

def flood():
    connection, number = ep.qp._shadow.connection, 0
    driver = connection.driver
    while not stop.is_set():
        with driver.locked():
            for _ in range(200):
                number += 1
                connection._send_message(ev.SendMessage(Move(MoveStep.MOVED, 0, number, 1, 0, 0), 1, True))
            driver.channel.flush()
        driver.run()
        # What it has to say in earnest must get into the send queue too.
        time.sleep(0.002)

flooding = threading.Thread(target=flood, daemon=True)
flooding.start()
"""
RECEIVED = "sum(p.received for p in ep.qp._shadow.connection.driver.channel._ports.values())"
RESIDENT_MB = "int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20"


def flooded(a: Host, b: Host, datagrams: int) -> None:
    """Have a flood b, and wait until so many datagrams more have arrived."""
    before = b(RECEIVED)
    a(FLOOD)
    wait_until(lambda: b(RECEIVED) - before > datagrams, 60, "the flood has come")


@pytest.mark.parametrize("cable", ["a/soft0", "b/soft0"])
def test_a_flood_keeps_nobody_from_failing_over(network: Network, faults: Any, cable: str) -> None:
    """What happened here is handled first, and of what the peer says only the newest waits."""
    a, b = network.protected()
    before_mb = b(RESIDENT_MB)
    flooded(a, b, 20_000)
    assert b(RESIDENT_MB) < before_mb + 16
    faults.down(cable)
    a("ep.recv(1)")
    began = time.monotonic()
    b("ep.post('SEND', length=5, wr_id=7)")
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[7, "SUCCESS"]], (a("ep.shift()"), b("ep.shift()"))
    assert time.monotonic() - began < 5
    a("stop.set(); flooding.join()")
    assert a("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED"
        assert h("ep.shift()['path']") == "soft1"
    assert b(RESIDENT_MB) < before_mb + 16
    assert b("ep.shift()['counters']['superseded']") > 1000


#: On each of its control ports there is always more, and none of it is from anybody.
ENDLESS = """
import signal

class Flooded:
    more, refused = True, 0

    def __init__(self, port):
        self.port = port

    def __getattr__(self, name):
        return getattr(self.port, name)

    def recv(self, most):
        self.refused += 1
        return self.port.recv(most) + [(b"SV\\x02" + bytes(900), 1, None)] * most

driver = ep.qp._shadow.connection.driver
with driver.locked():
    for name, port in driver.channel._ports.items():
        driver.channel._ports[name] = Flooded(port)
rung = []
signal.signal(signal.SIGALRM, lambda *args: rung.append(1))

def longest_call(seconds):
    longest, until = 0, time.monotonic() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds / 2)
    while time.monotonic() < until:
        began = time.monotonic()
        ep.cq.poll(1)
        longest = max(longest, time.monotonic() - began)
    return longest
"""


def test_garbage_without_end_keeps_no_call_of_the_application(network: Network, faults: Any) -> None:
    """It comes faster than it can be refused: polls return, signals are heard, and the QP fails over."""
    a, b = network.protected()
    b(ENDLESS)
    wait_until(
        lambda: b("min(p.refused for p in driver.channel._ports.values())") > 100, 60, "the flood has come"
    )
    assert b("longest_call(2)") < 0.5
    assert b("rung") == [1]
    faults.down("b/soft0")
    a("ep.recv(1)")
    began = time.monotonic()
    b("ep.post('SEND', length=5, wr_id=7)")
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[7, "SUCCESS"]], (a("ep.shift()"), b("ep.shift()"))
    assert time.monotonic() - began < 5
    assert a("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]
