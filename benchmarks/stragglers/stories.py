# SPDX-License-Identifier: BSD-3-Clause
"""The stories: a fault under a load, an hour without one, a path that is slow now and then."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.stragglers.application import Driver, Phase, Record
from benchmarks.stragglers.rails import MS, SECOND, US, Fault, Load, Pause, World
from shiftverbs.stragglers.records import Settings

PEER = "peer"
FAULT_NS = 60 * SECOND
FAULT_END_NS = 180 * SECOND
END_NS = 420 * SECOND
PARTS = [("before", FAULT_NS), ("during", FAULT_END_NS), ("after", END_NS)]


def fault(**what: float) -> Fault:
    """On home, for two minutes."""
    extra_ns, incast = round(what.get("extra_ns", 0)), round(what.get("incast", 0))
    return Fault(0, FAULT_NS, FAULT_END_NS, extra_ns, what.get("rate", 1.0), what.get("loss", 0.0), incast)


FAULTS = {
    "loses 1 %": fault(loss=0.01),
    "loses 0.1 %": fault(loss=0.001),
    "+ 1 ms": fault(extra_ns=1 * MS),
    "+ 5 ms": fault(extra_ns=5 * MS),
    "+ 20 ms": fault(extra_ns=20 * MS),
    "half the rate": fault(rate=0.5),
    "a tenth of it": fault(rate=0.1),
    "another's incast, 1": fault(incast=1),
    "another's incast, 4": fault(incast=4),
}


@dataclass(frozen=True)
class Use:
    """A way to use the rails."""

    name: str
    sizes: tuple[int, ...]
    messages: tuple[int, ...]
    compute_ns: int = 0


KIB, MIB = 1 << 10, 1 << 20
LOADS = (
    Use("64 B", (64,), (1,)),
    Use("64 KiB", (64 * KIB,), (8,)),
    Use("1 MiB", (MIB,), (16,)),
    Use("64 MiB", (64 * MIB,), (2,)),
    Use("mixed", (64, 4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB), (1, 4, 16), 2 * MS),
)


def phases(load: Use, rng: random.Random, end_ns: int, each_ns: int) -> list[Phase]:
    """One after the other, chosen by chance where there is a choice."""
    found = []
    until_ns = 0
    while until_ns < end_ns:
        until_ns += each_ns
        found.append(Phase(until_ns, rng.choice(load.sizes), rng.choice(load.messages), load.compute_ns))
    return found


def faulty(name: str, load: Use, seed: int, policy: str) -> tuple[Record, World]:
    """A minute in health, two with a fault of home, four in health again."""
    world = World(seed, [FAULTS[name]])
    rng = random.Random(f"{seed} phases")
    driver = Driver(world, {PEER: phases(load, rng, END_NS, 200 * MS)}, PARTS, policy)
    return driver.run(), world


def pauses(rng: random.Random, end_ns: int, hosts: list[str | None]) -> list[Pause]:
    """CPU starvation: minutes in which each host pauses for 10 to 400 ms every now and then."""
    found = []
    for host in hosts:
        at = rng.uniform(0, 300) * SECOND
        while at < end_ns:
            until = at + rng.uniform(10, 180) * SECOND
            apart_ns = rng.choice([50 * MS, 300 * MS, 2 * SECOND])
            while at < until:
                length = rng.uniform(10, 400) * MS if apart_ns > 100 * MS else rng.uniform(10, 40) * MS
                found.append(Pause(round(at), round(at + length), host))
                at += length + rng.expovariate(1 / apart_ns)
            at += rng.expovariate(1 / 300) * SECOND
    return found


def hour(seed: int, end_ns: int = 3600 * SECOND, peers: int = 2) -> tuple[World, dict[str, list[Phase]]]:
    """No fault: load, sizes, compute and polling vary, others' load that both rails see, hosts that pause.

    And congestion of one rail that lasts 200 ms at most, which is no straggler.
    """
    rng = random.Random(f"{seed} hour")
    names = [f"peer{i}" for i in range(peers)]
    loads, at = [Load(0, 1.0, 0)], 0.0
    while at < end_ns:
        at += rng.uniform(5, 300) * SECOND
        loads.append(
            Load(round(at), rng.choice([1.0, 1.0, 0.9, 0.7, 0.5]), rng.choice([0, 0, 20 * US, 200 * US]))
        )
    bursts, at = [], 0.0
    while at < end_ns:
        at += rng.expovariate(1 / 20) * SECOND
        length = rng.uniform(5, 200) * MS
        bursts.append(Fault(rng.randrange(2), round(at), round(at + length), incast=rng.choice([1, 4])))
    by_peer = {}
    for name in names:
        found, until = [], 0.0
        while until < end_ns:
            # Steps of a few sizes each, for a while; then another program.
            sizes = [1 << rng.randint(6, 26) for _ in range(rng.randint(1, 4))]
            compute_ns = rng.choice([0, 1 * MS, 20 * MS, 200 * MS])
            poll_ns = rng.choice([0, 0, 0, 100 * US, 5 * MS])
            sliding = rng.random() < 0.3
            program_end = until + rng.uniform(5, 120) * SECOND
            while until < program_end:
                until += rng.uniform(50, 500) * MS
                size = rng.choice(sizes)
                messages = rng.choice([1, 2, 8, 64]) if size < 8 * MIB else rng.choice([1, 2])
                skew = rng.uniform(0.5, 2)
                found.append(Phase(round(until), size, messages, round(compute_ns * skew), poll_ns, sliding))
        by_peer[name] = found
    world = World(seed, bursts, pauses(rng, end_ns, [None, *names]), loads)
    return world, by_peer


def run_hour(seed: int, end_ns: int = 3600 * SECOND) -> tuple[Record, World]:
    """The hour under the detector, which may migrate."""
    world, by_peer = hour(seed, end_ns)
    return Driver(world, by_peer, [("all", end_ns)], "detector").run(), world


def run_now_and_then(
    seed: int, slow_ns: int, well_ns: int, end_ns: int, settings: Settings | None = None
) -> Record:
    """Home is slow and well by turns, which pings do not show: what invites to go to and fro."""
    turns = range(30 * SECOND, end_ns, slow_ns + well_ns)
    world = World(seed, [Fault(0, begin, begin + slow_ns, rate=0.3) for begin in turns])
    load = LOADS[2]
    by_peer = {PEER: phases(load, random.Random(seed), end_ns, SECOND)}
    return Driver(world, by_peer, [("all", end_ns)], "detector", settings).run()
