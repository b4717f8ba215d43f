# SPDX-License-Identifier: BSD-3-Clause
"""Applications on the rails, the samples and pings a driver would take of them, and who decides where traffic goes."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from benchmarks.stragglers.rails import MS, SECOND, Condition, World
from shiftverbs.stragglers.detector import Stragglers
from shiftverbs.stragglers.records import (
    Action,
    Attribution,
    Mode,
    Move,
    Observe,
    Path,
    Ping,
    Probe,
    Return,
    Sample,
    Settings,
)

RAILS = 2
SAMPLE_NS = 50 * MS
PING_NS = 100 * MS
PING_JITTER = 0.15
# A train of datagrams in place of each fifth ping of a path without traffic.
TRAIN_EACH = 5
TRAIN_EACH_PROBED = 2
TRAIN_MESSAGES = 16
TRAIN_BYTES = TRAIN_MESSAGES * 4096
POLL_NS = 100 * MS
HOME = 0


@dataclass(frozen=True)
class Phase:
    """What an application does for a while.

    size, messages: posted at once, bytes each. compute_ns: between the end of that and the next. poll_ns: how long it
    looks away while it waits; 0: never. sliding: something else is still under way when it posts.
    """

    until_ns: int
    size: int
    messages: int
    compute_ns: int = 0
    poll_ns: int = 0
    sliding: bool = False


@dataclass
class Record:
    """What came of one run: bytes and time by part of the story, what was said and done."""

    seed: int
    bytes_at: dict[str, float] = field(default_factory=dict)
    ns_at: dict[str, float] = field(default_factory=dict)
    actions: list[tuple[int, Action]] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    suspected_ns: int = 0
    samples: int = 0

    def rate(self, part: str) -> float:
        """Bytes per second in a part of the story; 0 where there was none."""
        return self.bytes_at.get(part, 0.0) / self.ns_at[part] * SECOND if self.ns_at.get(part) else 0.0


class Driver:
    """Time, the applications, and where their traffic is.

    policy: "stay", "oracle" (knows all, and what is to come) or "detector".
    parts: name of a part of the story, and when it ends.
    """

    def __init__(
        self,
        world: World,
        phases: dict[str, list[Phase]],
        parts: list[tuple[str, int]],
        policy: str,
        settings: Settings | None = None,
    ) -> None:
        self.world = world
        self.record = Record(world.seed)
        self._phases = phases
        self._parts = parts
        begin_ns = 0
        for name, end_ns in parts:
            self.record.ns_at[name] = end_ns - begin_ns
            begin_ns = end_ns
        self._policy = policy
        self._rng = random.Random(f"{world.seed} driver")
        self._heap: list[tuple[int, int, Callable[[int], int | None]]] = []
        self._order = itertools.count()
        self._stragglers = Stragglers(settings or Settings(mode=Mode.MIGRATE))
        self._rail = dict.fromkeys(phases, HOME)
        self._wanted = dict.fromkeys(phases, HOME)
        self._by_us: set[str] = set()
        self._phase_at = dict.fromkeys(phases, 0)
        self._ping_ns = dict.fromkeys(phases, PING_NS)
        self._probed_ns: dict[str, int] = {}
        self._pings: dict[Path, int] = {}
        for peer in phases:
            self._stragglers.add_peer(peer, HOME)

    def run(self) -> Record:
        """The whole story."""
        for peer in self._phases:
            self._push(0, functools.partial(self._step, peer))
            if self._policy == "detector":
                for rail in range(RAILS):
                    path = Path(peer, rail)
                    self._push(self._rng.randrange(PING_NS), functools.partial(self._ping, path))
        if self._policy == "detector":
            self._push(POLL_NS, self._poll)
        end_ns = self._parts[-1][1]
        while self._heap:
            now, _, act = heapq.heappop(self._heap)
            if now >= end_ns:
                continue
            again = act(now)
            if again is not None:
                self._push(max(again, now + 1), act)
        return self.record

    def _push(self, at_ns: int, act: Callable[[int], int | None]) -> None:
        heapq.heappush(self._heap, (at_ns, next(self._order), act))

    def _phase(self, peer: str, now: int) -> Phase:
        phases = self._phases[peer]
        while phases[self._phase_at[peer]].until_ns <= now and self._phase_at[peer] + 1 < len(phases):
            self._phase_at[peer] += 1
        return phases[self._phase_at[peer]]

    # ---- the application --------------------------------------------------------------------------------------------

    def _step(self, peer: str, now: int) -> int:
        """One batch in full, and as many as there is time for before the next sample, by what they take on average."""
        phase = self._phase(peer, now)
        if self._policy == "oracle":
            slow = self.world.slow(peer, HOME, now, phase.size * phase.messages, phase.messages)
            self._wanted[peer] = 1 if slow else HOME
        if self._wanted[peer] != self._rail[peer]:
            return self._move(peer, now)
        size = phase.size * phase.messages
        rail = self._rail[peer]
        condition = self.world.condition(peer, rail, now)
        took = condition.draw_ns(size, phase.messages, self._rng)
        begun = phase.size if phase.sliding else 0
        if begun:
            took += self._rng.random() * phase.size / condition.bytes_per_ns
        came = self.world.resumed(peer, now, now + took)
        seen, unseen = self._seen(phase, now, came)
        if self._policy == "detector":
            # What goes on for a while gives samples one behind the other; the rest has one in a while.
            unseen_ns = min(round(unseen), round(seen) - now)
            messages = phase.messages + phase.sliding
            path = Path(peer, rail)
            sample = Sample(path, size + begun, messages, now, round(seen), unseen_ns, begun_bytes=begun)
            self._push(round(seen), lambda at: self._sampled(sample, at))
        self._count(now, seen, size)
        began, now = now, round(seen) + phase.compute_ns
        left = SAMPLE_NS - (now - began)
        each = condition.mean_ns(size, phase.messages) + phase.compute_ns + phase.poll_ns / 2
        more = max(0, math.floor(left / each))
        if more:
            end_ns = self.world.resumed(None, now, self.world.resumed(peer, now, now + more * each))
            self._count(now, end_ns, size * more)
            now = round(end_ns)
        return now

    def _seen(self, phase: Phase, posted: int, came: float) -> tuple[float, float]:
        """When the application sees a completion, and how long it had not looked."""
        if phase.poll_ns:
            looks = math.ceil((came - posted) / phase.poll_ns)
            late, _ = self.world.seen(posted + looks * phase.poll_ns)
            return late, late - (posted + (looks - 1) * phase.poll_ns)
        seen, gap = self.world.seen(came)
        return seen, gap

    def _count(self, begin: float, end: float, size: float) -> None:
        for name, until in self._parts:
            if begin < until:
                self.record.bytes_at[name] = self.record.bytes_at.get(name, 0.0) + size
                return

    def _move(self, peer: str, now: int) -> int:
        """Traffic waits for as long as a MOVE takes."""
        took = self._rng.randint(2 * MS, 20 * MS)
        self._rail[peer] = self._wanted[peer]
        self.record.moves.append(now)
        if peer in self._by_us:
            self._by_us.discard(peer)
            self._push(now + took, lambda at: self._moved(peer, at, took))
        return now + took

    # ---- what a driver sees and does --------------------------------------------------------------------------------

    def _sampled(self, sample: Sample, now: int) -> None:
        self.record.samples += 1
        self._carry_out(self._stragglers.handle_sample(sample), now)

    def _moved(self, peer: str, now: int, took: int) -> None:
        self._carry_out(self._stragglers.handle_moved(peer, self._rail[peer], now, took), now)

    def _ping(self, path: Path, now: int) -> int:
        sent = round(self.world.resumed(None, now, now + 1))
        condition = self.world.condition(path.peer, path.rail, sent)
        self._pings[path] = self._pings.get(path, 0) + 1
        each = TRAIN_EACH if self._ping_ns[path.peer] == PING_NS else TRAIN_EACH_PROBED
        if self._pings[path] % each == 0 and self._rail[path.peer] != path.rail:
            self._train(path, condition, sent)
        elif self._rng.random() >= condition.loss:
            took = condition.latency_ns * math.exp(self._rng.gauss(0, PING_JITTER))
            if self._rng.random() < 0.02:  # whoever answers was busy
                took += self._rng.expovariate(1 / MS)
            heard = round(self.world.seen(self.world.resumed(path.peer, sent, sent + took))[0])
            self._push(heard, lambda at: self._ponged(Ping(path, sent, heard)))
        return sent + self._ping_ns[path.peer]

    def _train(self, path: Path, condition: Condition, sent: int) -> None:
        """Of a train that lost a datagram nothing is told."""
        if self._rng.random() < (1 - condition.loss) ** TRAIN_MESSAGES:
            took = replace(condition, loss=0.0).draw_ns(TRAIN_BYTES, TRAIN_MESSAGES, self._rng)
            came, gap = self.world.seen(self.world.resumed(path.peer, sent, sent + took))
            heard = round(came)
            unseen = min(round(gap), heard - sent)
            train = Sample(path, TRAIN_BYTES, TRAIN_MESSAGES, sent, heard, unseen, probe=True)
            self._push(heard, lambda at: self._carry_out(self._stragglers.handle_sample(train), at))

    def _ponged(self, ping: Ping) -> None:
        self._stragglers.handle_ping(ping)

    def _poll(self, now: int) -> int:
        self._carry_out(self._stragglers.poll(now), now)
        return now + POLL_NS

    def _carry_out(self, actions: list[Action], now: int) -> None:
        for action in actions:
            self.record.actions.append((now, action))
            if isinstance(action, Probe):
                self._ping_ns[action.peer] = action.interval_ns or PING_NS
                if action.interval_ns is not None:
                    self._probed_ns[action.peer] = now
                else:
                    self.record.suspected_ns += now - self._probed_ns.pop(action.peer)
            elif isinstance(action, Move):
                self._wanted[action.path.peer] = action.target
                self._by_us.add(action.path.peer)
            elif isinstance(action, Return):
                self._wanted[action.path.peer] = action.path.rail
                self._by_us.add(action.path.peer)


def false_alarms(record: Record, world: World) -> list[tuple[int, Action]]:
    """What was said or done of a path that had no fault then, nor in the second before."""
    found: list[tuple[int, Action]] = []
    for at, action in record.actions:
        if isinstance(action, Observe) and action.evidence.attribution is Attribution.PATH:
            path = action.evidence.path
        elif isinstance(action, Move):
            path = action.path
        else:
            continue
        if not any(
            fault.holds(path.peer, path.rail, then) for fault in world.faults for then in (at, at - SECOND)
        ):
            found.append((at, action))
    return found


def verdict_ns(record: Record, fault_ns: int) -> int | None:
    """How long after the fault began it was said that it is this path's; None where it never was."""
    for at, action in record.actions:
        if isinstance(action, Observe) and action.evidence.attribution is Attribution.PATH and at >= fault_ns:
            return at - fault_ns
    return None
