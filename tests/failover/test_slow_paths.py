# SPDX-License-Identifier: BSD-3-Clause
"""A rail that works and is slow, between real processes: it is told of, and left where that is wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn
from hosts import Host, Network, connect

from shiftverbs.softrnic import fabric

# What the child does beside what a test says: sends as a program does that waits for each.
STREAM = '''
import time
from shiftverbs import observe
from shiftverbs.failover import runtime
from shiftverbs.failover.services.stragglers import SAID_NS
from shiftverbs.stragglers.records import Path, Sample
from shiftverbs.stragglers.trains import TRAIN_BYTES, TRAIN_MESSAGES

# A message takes 2 ms and what the machine needs: beside so much, what makes it slow here would hardly be seen.
STARVED_NS = 12_000_000

events = []
subscription = observe.subscribe(events.append, (observe.Straggler, observe.StragglerOver))

def stream(done, timeout_s):
    """Post one WRITE after the other, and poll for each, until done()."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(str((events, ep.shift(), measures().slow)))
        ep.post("RDMA_WRITE", length=4096)
        (wc,) = ep.poll(1, 20)
        time.sleep(0.001)  # it computes; and other processes have a turn on a small machine
        if wc[1] != "SUCCESS":
            raise RuntimeError(str((wc, ep.shift())))

def untold():
    """Whether what is found next is told at once."""
    return not events or time.monotonic_ns() - events[-1].t_ns > SAID_NS

def measures():
    return runtime.current().driver.measures

def learned():
    """Whether it is known what this takes on rail 0, and a round trip on both."""
    (peer,) = measures()._by_name.values()
    detector = measures()._detector
    rails = [detector.watch(Path(peer.name, rail)) for rail in range(2)]
    takes_ns = rails[0].healthy.predict(Sample(rails[0].path, 4096, 1, 0, 1))
    starved = takes_ns is not None and takes_ns > STARVED_NS
    if starved or any(rail.suspicion and rail.suspicion.attribution for rail in rails):
        # The machine gets slower or quicker, perhaps for good: what it took before is no measure.
        with runtime.current().driver.locked():
            for rail in rails:
                measures()._recovered(peer, rail.path)
            detector.forget_peer(peer.name)
            detector.add_peer(peer.name, 0)
            peer.pongs = peer.trains = 0
            peer.unsaid = None
        return False
    known = takes_ns is not None
    if measures().mode.value == "migrate":
        train = Sample(rails[1].path, TRAIN_BYTES, TRAIN_MESSAGES, 0, 1, probe=True)
        known = known and rails[1].healthy.predict(train) is not None
    return known and all(rail.healthy_ping.takes_ns is not None and not rail.suspicion for rail in rails)

def settled():
    """Whether what is learned still holds when that time has passed: what is found next is new, and told at once."""
    return learned() and untold()
'''


def healthy(where: str = "*") -> None:
    """A rail takes a millisecond each way: a moment in which a busy machine does not look is little beside that."""
    fabric.limit(where, 1e9, delay_s=1e-3)


def slow() -> None:
    """Rail 0 takes much longer, but not so long that it may be dead."""
    fabric.limit("rail0", 1e9, delay_s=8e-3)


@pytest.fixture(autouse=True)
def rails(faults: Any) -> Iterator[None]:
    healthy()
    yield
    fabric.unlimit()


def streaming(network: Network, mode: str) -> tuple[Host, Host]:
    """Two hosts, one of which has sent for long enough for its paths to be known."""
    a, b = network.host("a", SHIFTVERBS_STRAGGLER=mode), network.host("b", SHIFTVERBS_STRAGGLER="off")
    connect(a, b, attrs="timeout=16, retry=7")  # slow, and no failure
    for host in (a, b):
        assert host("ep.qp.shift.wait_protected(20)"), host("ep.shift()")
    a(f"exec({STREAM!r}, globals())")
    a("stream(settled, 240)", 270)
    assert a("ep.qp.shift.path") == "soft0"
    assert not a("[repr(e) for e in events if e.kind == 'Straggler' and e.fault == 'path']")
    return a, b


def test_a_slow_rail_is_told_of(network: Network, spawn: Spawn, tmp_path: Path) -> None:
    network.env["SHIFTVERBS_RUN_DIR"] = str(tmp_path)
    a, b = streaming(network, "observe")
    slow()
    a("stream(lambda: any(e.kind == 'Straggler' and e.fault == 'path' for e in events), 120)", 150)
    told = a(
        "[(e.device, e.path, e.ratio, e.samples, e.lost_ns, e.qp_nums == (ep.qp.qp_num,)) for e in events"
        " if e.kind == 'Straggler']"  # one that a busy machine made may be over since
    )
    device, path, ratio, samples, lost_ns, all_there = told[-1]
    assert (device, path, all_there) == ("soft0", "soft0", True), told
    assert ratio > 2 and samples >= 16 and lost_ns > 0, told
    env = {"SHIFTVERBS_RUN_DIR": str(tmp_path), "NO_COLOR": "1"}
    shown = spawn("-m", "shiftverbs", "status", "--json", softrnic=None, env=env, name="status").succeed(20)
    processes = {each["host"]: each for each in json.loads(shown)["processes"]}
    assert processes["b"]["stragglers"]["mode"] == "off"
    (found,) = processes["a"]["stragglers"]["slow"]
    assert (found["path"], found["fault"], found["qps"]) == ("soft0", "path", 1), found
    text = spawn("-m", "shiftverbs", "top", "--count", "1", softrnic=None, env=env, name="top").succeed(20)
    assert "slow: soft0 to " in text, text
    assert a("ep.qp.shift.path") == b("ep.qp.shift.path") == "soft0", "it is only observed"


def test_a_rail_with_a_low_rate_is_left(network: Network) -> None:
    a, b = streaming(network, "migrate")
    before = a("len(events)")
    fabric.limit("rail0", 2e6, delay_s=1e-3)  # 17 ms more for a message
    a("stream(lambda: ep.qp.shift.path == ep.qp.shift.recv_path == 'soft1', 120)", 150)
    assert b("ep.wait(\"s.path == s.recv_path == 'soft1'\", 20)")
    told = a(f"[(e.path, e.fault, e.ratio > 2) for e in events[{before}:] if e.kind == 'Straggler']")
    assert ["soft0", "path", True] in told, told
    # Home is asked what it carries while traffic is away, and that does not take it for dead or away from there.
    a("stop = time.monotonic() + 5")
    a("stream(lambda: time.monotonic() > stop, 30)", 60)
    assert a("ep.qp.shift.status") == "PROTECTED" and a("ep.qp.shift.path") == "soft1"
    assert a("runtime.current().driver.totals.switches") == 0


def test_a_rate_that_both_rails_have_lost_moves_nothing(network: Network) -> None:
    """Pings of a rail without traffic are as quick as ever: trains show that it is no better."""
    a, b = streaming(network, "migrate")
    before = a("len(events)")
    fabric.limit("*", 16e6, delay_s=1e-3)  # 2 ms more for a message, 34 for a train
    a(
        f"stream(lambda: any(e.kind == 'Straggler' and e.fault == 'both_rails' for e in events[{before}:]), 120)",
        150,
    )
    a("stop = time.monotonic() + 5")
    a("stream(lambda: time.monotonic() > stop, 30)", 60)
    told = a(f"[(e.path, e.fault) for e in events[{before}:] if e.kind == 'Straggler']")
    assert ["soft0", "path"] not in told, told
    assert a("ep.qp.shift.path") == b("ep.qp.shift.path") == "soft0"
    assert a("ep.qp.shift.counters['moves']") == 0 and a("runtime.current().driver.totals.switches") == 0


# What a path was taken for, one after the other.
HEALTH = """
from shiftverbs.failover.services import control_channel
told = []
tell = control_channel.ControlChannel._tell
def note(self, path):
    told.append((path.nic.name, path.ping.alive))
    tell(self, path)
control_channel.ControlChannel._tell = note
"""


@pytest.mark.parametrize("rate, buffer", [(4e6, 1_000_000), (1e6, 1_000_000), (16e6, 8192)])
def test_rails_on_which_trains_take_too_long_or_are_lost(network: Network, rate: float, buffer: int) -> None:
    """Nothing is moved because of what both rails see, and what is only slow is not dead."""
    a, b = streaming(network, "migrate")
    a(f"exec({HEALTH!r}, globals())")
    before = a("len(events)")
    fabric.limit("*", rate, delay_s=1e-3, buffer=buffer)
    a("stop = time.monotonic() + 15")
    a("stream(lambda: time.monotonic() > stop, 60)", 90)
    events = a(f"[(e.path, e.fault) for e in events[{before}:] if e.kind == 'Straggler']")
    assert ["soft0", "path"] not in events, events
    assert a("ep.qp.shift.path") == b("ep.qp.shift.path") == "soft0"
    assert a("ep.qp.shift.counters['moves']") == 0 and a("runtime.current().driver.totals.switches") == 0
    assert a("[each for each in told if each[1] is False]") == []


def test_a_slow_rail_is_left_and_come_back_to(network: Network) -> None:
    a, b = streaming(network, "migrate")
    slow()
    a("stream(lambda: ep.qp.shift.path == ep.qp.shift.recv_path == 'soft1', 120)", 150)
    assert b("ep.wait(\"s.path == s.recv_path == 'soft1'\", 20)")
    assert a("ep.qp.shift.counters['moves']") >= 1 and a("ep.qp.shift.preferred") == 1
    assert a("ep.qp.shift.status") == "PROTECTED" and a("runtime.current().driver.totals.switches") == 0
    healthy()
    a("stream(lambda: runtime.current().driver.totals.straggler_moves == 2, 120)", 150)
    assert a("ep.qp.shift.path") == a("ep.qp.shift.recv_path") == "soft0"
    assert a("runtime.current().driver.totals.switches") == 0
