# SPDX-License-Identifier: BSD-3-Clause
"""A model of two rails and what befalls them. Knows nothing of shiftverbs.stragglers: it is the truth.

A transfer takes latency + messages × per message + bytes ÷ rate, with some jitter. Lost packets cost what RC's
go-back-N makes of them: a NAK's round trip and what was in flight once more, or the timeout where nothing came behind.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

LATENCY_NS = 10 * US
BYTES_PER_NS = 3.0
PER_MESSAGE_NS = 500
JITTER = 0.08
PACKET = 4096
# The local ACK timeout of `timeout=14`, 4.096 µs × 2¹⁴.
TIMEOUT_NS = 67 * MS
# In flight when a loss is noticed.
IN_FLIGHT = 64 * 1024
CHANGES_NS = 20 * MS


@dataclass(frozen=True)
class Fault:
    """What a rail suffers from `begin_ns` to `end_ns`, towards the peers named, or all.

    extra_ns: latency. rate: the share of its rate that is left. loss: of packets. incast: others' senders into the
    same port; share and queue go up and down.
    """

    rail: int
    begin_ns: int
    end_ns: int
    extra_ns: int = 0
    rate: float = 1.0
    loss: float = 0.0
    incast: int = 0
    peers: frozenset[str] | None = None

    def holds(self, peer: str, rail: int, now_ns: float) -> bool:
        """Whether it is there."""
        there = rail == self.rail and (self.peers is None or peer in self.peers)
        return there and self.begin_ns <= now_ns < self.end_ns


@dataclass(frozen=True)
class Pause:
    """Nobody runs: on this host, or (peer named) on that one, whose NIC is software, too."""

    begin_ns: int
    end_ns: int
    peer: str | None = None


@dataclass(frozen=True)
class Load:
    """All rails have that share of their rate left, and so much more latency, from then on."""

    begin_ns: int
    rate: float
    extra_ns: int


@dataclass(frozen=True)
class Condition:
    """What a path is like at one moment."""

    latency_ns: float
    bytes_per_ns: float
    loss: float

    def mean_ns(self, size: int, messages: int) -> float:
        """What a transfer takes on average."""
        packets = max(messages, math.ceil(size / PACKET))
        lost = self.loss * (packets - 1) * self._again_ns(size) + self.loss * TIMEOUT_NS
        return self.latency_ns + messages * PER_MESSAGE_NS + size / self.bytes_per_ns + lost

    def _again_ns(self, size: int) -> float:
        return self.latency_ns + min(size, IN_FLIGHT) / self.bytes_per_ns

    def draw_ns(self, size: int, messages: int, rng: random.Random) -> float:
        """What one transfer takes."""
        took = self.latency_ns + messages * PER_MESSAGE_NS + size / self.bytes_per_ns
        took *= math.exp(rng.gauss(0, JITTER))
        if self.loss:
            packets = max(messages, math.ceil(size / PACKET))
            expected = self.loss * (packets - 1)
            if expected > 30:
                lost = max(0, round(rng.gauss(expected, math.sqrt(expected))))
            else:
                lost, left = 0, rng.expovariate(1.0)
                while left < expected:  # a Poisson process
                    lost += 1
                    left += rng.expovariate(1.0)
            took += lost * self._again_ns(size)
            if rng.random() < self.loss:
                took += TIMEOUT_NS
        return took


class World:
    """The rails, and all that befalls them in one story.

    seed: of what goes up and down. pauses, loads: in the order of their beginning, pauses of one host apart.
    """

    def __init__(
        self,
        seed: int,
        faults: list[Fault],
        pauses: list[Pause] | None = None,
        loads: list[Load] | None = None,
    ) -> None:
        self.seed = seed
        self.faults = faults
        self.pauses = sorted(pauses or [], key=lambda pause: pause.begin_ns)
        self.loads = loads or [Load(0, 1.0, 0)]
        self._pause_begins = [pause.begin_ns for pause in self.pauses]
        self._load_begins = [load.begin_ns for load in self.loads]

    def healthy(self, now_ns: float) -> Condition:
        """What both rails would be like without faults."""
        load = self.loads[max(0, bisect.bisect_right(self._load_begins, now_ns) - 1)]
        return Condition(LATENCY_NS + load.extra_ns, BYTES_PER_NS * load.rate, 0.0)

    def condition(self, peer: str, rail: int, now_ns: float) -> Condition:
        """What a path is like."""
        found = self.healthy(now_ns)
        latency, rate, loss = found.latency_ns, found.bytes_per_ns, found.loss
        for fault in self.faults:
            if not fault.holds(peer, rail, now_ns):
                continue
            latency += fault.extra_ns
            rate *= fault.rate
            loss = 1 - (1 - loss) * (1 - fault.loss)
            if fault.incast:
                step = random.Random(f"{self.seed} {rail} {now_ns // CHANGES_NS}")
                rate *= step.uniform(0.7, 1.3) / (fault.incast + 1)
                latency += step.uniform(0, 400 * US)
        return Condition(latency, rate, loss)

    def slow(self, peer: str, rail: int, now_ns: float, size: int, messages: int) -> bool:
        """Whether it truly takes more than 10 % longer than without its fault."""
        is_ns = self.condition(peer, rail, now_ns).mean_ns(size, messages)
        return is_ns > 1.1 * self.healthy(now_ns).mean_ns(size, messages)

    def resumed(self, peer: str | None, begin_ns: float, end_ns: float) -> float:
        """When what would end at `end_ns` does, if it needs a host that pauses: peer None is this one."""
        i = max(0, bisect.bisect_right(self._pause_begins, begin_ns - SECOND))
        while i < len(self.pauses) and self.pauses[i].begin_ns < end_ns:
            pause = self.pauses[i]
            if pause.peer == peer and pause.end_ns > begin_ns:
                end_ns += pause.end_ns - max(begin_ns, pause.begin_ns)
            i += 1
        return end_ns

    def seen(self, end_ns: float) -> tuple[float, float]:
        """When this host, polling unless it pauses, sees what came at `end_ns`; and how long it did not look."""
        i = bisect.bisect_right(self._pause_begins, end_ns)
        for pause in self.pauses[max(0, i - 8) : i]:
            if pause.peer is None and pause.end_ns > end_ns:
                return pause.end_ns, pause.end_ns - pause.begin_ns
        return end_ns, 0.0
