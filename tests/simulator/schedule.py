# SPDX-License-Identifier: BSD-3-Clause
"""One run from one seed: what two applications post, what breaks and when, and how it must end."""

from __future__ import annotations

import copy
import random

from simulator import checks
from simulator.checks import Violation, ended
from simulator.hosts import ATOMIC_CELLS, Network, Side
from simulator.journal import Wr
from simulator.rnic import US, Packet

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.pair import MS

#: What can break; what stands here twice happens twice as often.
KINDS = (
    "port port port wall wall both_walls drop_answer drop_answer hold_and_kill loss delay duplicate echo echo stall"
    " slow hung failing migrate migrate kill qp_fatal close"
).split()
HEAL_AFTER_NS = 400 * MS
END_NS = 90_000 * MS


class Schedule:
    """What a seed stands for. plain: the same with plain verbs, for comparison.

    tight: one seed in six has READs land where something was sent from; one has one-sided work on two cells, with
    fences and hardly a completion.
    """

    def __init__(self, seed: int, tight: bool = True) -> None:
        self.seed = seed
        rng = self.rng = random.Random(seed)
        self.pairs = 3 if rng.random() < 0.2 else 2
        self.capacity = rng.choice([4, 8, 16, 32])
        self.receives = rng.choice([1, 3, 8, 16])
        self.count = rng.randrange(10, 50)
        self.span_ns = rng.choice([200 * US, 1 * MS, 5 * MS, 30 * MS])
        self.signaled = rng.choice([0.0, 0.2, 0.5, 1.0])
        self.poll_ns = [rng.choice([1 * US, 20 * US, 500 * US, 5 * MS]) for _ in "ab"]
        self.atomics = rng.random() < 0.15
        opcodes = ["SEND", "WRITE", "WRITE_IMM", "READ"] + ["FADD"] * self.atomics
        self.opcodes = rng.choice(
            [opcodes, opcodes, ["SEND"], ["WRITE", "WRITE", "WRITE_IMM"], ["READ", "SEND"]]
        )
        self.fences = rng.choice([0.0, 0.0, 0.2])
        self.inline = rng.choice([0.0, 0.5])
        self.reuse = 0.5 if tight and seed % 6 == 2 else 0.0
        self.cells = 2 if tight and seed % 6 == 5 else 8
        if self.cells == 2:
            self.opcodes, self.fences, self.signaled = ["READ", "WRITE", "WRITE", "WRITE_IMM"], 0.2, 0.05
        self.delay_ns = rng.choice([2 * US, 10 * US, 100 * US])
        self.start_ns = rng.choice([0, 30 * MS, 30 * MS, 30 * MS])
        self.faults = [self._fault(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 5]))]
        # In every tenth, memory is registered late on the backups, for all that the applications post.
        slowly = random.Random(seed + 2)
        self.registering_ns = [slowly.choice([0, 1, 30, 700, 1800]) * MS * (seed % 10 == 3) for _ in "ab"]
        # Now and then every rail loses one operation of one side, and nothing else, for good.
        self.hole = (rng.choice("ab"), rng.choice(self.opcodes)) if seed % 31 == 7 else None
        # An application that leaves closes its QP, or moves it to ERR and takes what is left: half of them each.
        self.into_err = tight and random.Random(seed + 4).random() < 0.5
        self.net: Network

    def _fault(self, rng: random.Random) -> tuple[int, str, str, int, int]:
        """(when, what, whose, which NIC, for how long)."""
        what = rng.choice(KINDS)
        if what in ("kill", "close", "hung", "failing") and rng.random() < 0.6:
            what = "port"
        k = 0 if rng.random() < 0.6 else rng.randrange(self.pairs)
        when = rng.randrange(1, max(2, int(self.span_ns * 1.2)))
        if rng.random() < 0.4:
            when += rng.choice([1, 5, 20, 100]) * MS * rng.randrange(1, 3)
        lasts = rng.choice([50 * US, 1 * MS, 5 * MS, 20 * MS, 60 * MS, 200 * MS])
        return when, what, rng.choice("ab"), k, lasts

    # ---- the run

    def build(self, plain: bool = False) -> Network:
        """Hosts with their plans; faults on the clock."""
        net = self.net = Network(self.seed, self.pairs, self.capacity, self.receives, plain)
        rng = random.Random(self.seed + 1)
        again = random.Random(self.seed + 3)
        clock = net.clock
        for link in net.links.values():
            link.delay_ns = self.delay_ns
        for side, poll_ns, registering_ns in zip(net.sides, self.poll_ns, self.registering_ns, strict=True):
            side.app.poll_ns = poll_ns
            side.registering_ns = registering_ns
            for index in range(self.count):
                opcode = rng.choice(self.opcodes)
                cell = rng.choice(ATOMIC_CELLS) if opcode == "FADD" else rng.randrange(8) % self.cells
                signaled = rng.random() < self.signaled or index == self.count - 1
                inline = opcode != "READ" and opcode != "FADD" and rng.random() < self.inline
                data = index + 1 if opcode != "READ" else -1
                wr = Wr(side.name, index, opcode, cell, data, signaled, rng.random() < self.fences, inline)
                side.app.plan.append(wr)
                if opcode == "READ" and again.random() < self.reuse:
                    self._share(wr, list(side.app.plan)[-4:-1], again)
                clock.later(self.start_ns + rng.randrange(self.span_ns), side.app.due)
        for when, what, name, k, lasts in self.faults:
            clock.later(self.start_ns + when, self._begin, what, name, k, lasts)
        clock.later(self.start_ns + self.span_ns + HEAL_AFTER_NS, self._heal)
        if self.hole is not None:
            name, opcode = self.hole
            net.faults.append("hole")
            for k in range(self.pairs):
                net.links[name, k].hole = lambda p: (
                    isinstance(p, Packet) and p.ref is not None and (p.kind, p.opcode) == ("req", opcode)
                )
        return net

    @staticmethod
    def _share(read: Wr, before: list[Wr], rng: random.Random) -> None:
        """Have a READ land where one of the WRs before it has its bytes."""
        free = [
            wr
            for wr in before
            if wr.opcode in ("SEND", "WRITE", "WRITE_IMM") and not (wr.inline or wr.shared)
        ]
        if free:
            other = rng.choice(free)
            read.buf = other.buf
            read.shared = other.shared = True

    def _begin(self, what: str, name: str, k: int, lasts: int) -> None:
        net = self.net
        later = net.clock.later
        side = net.side(name)
        nic = net.nics[name][k]
        link = net.links[name, k]
        match what:
            case "port":
                event_ns = random.Random(self.seed ^ lasts ^ k).choice([None, 10 * US, 2 * MS])
                net.port(name, k, False, event_ns)
                later(lasts, net.port, name, k, True, event_ns)
            case "wall":
                net.wall(name, k, True)
                later(lasts, net.wall, name, k, False)
            case "both_walls":
                for end in "ab":
                    net.wall(end, k, True)
                    later(lasts, net.wall, end, k, False)
            case "drop_answer":
                # The answer to one of the next messages is lost, then the path dies.
                link.drops.append(lambda p: isinstance(p, Packet) and p.kind in ("ack", "resp"))
                later(lasts // 50, net.wall, name, k, True)
                later(lasts * 2, net.wall, name, k, False)
            case "hold_and_kill":
                net.hold_cqes(name, k, True)
                later(lasts // 20, net.kill, name, k)
            case "kill":
                net.kill(name, k)
            case "loss":
                link.loss = 0.2
                later(lasts, setattr, link, "loss", 0.0)
            case "delay":
                # A switch holds packets back, some for longer than a SWITCH takes; later ones overtake them.
                link.delay_ns, link.jitter_ns = self.delay_ns * 2, min(lasts, 20 * MS)
                later(lasts, self._undelay, link)
            case "duplicate":
                link.duplicate, link.jitter_ns = 0.3, 200 * US
                later(lasts, setattr, link, "duplicate", 0.0)
                later(lasts, self._undelay, link)
            case "echo":
                # Packets that wait in a loop of switches come once more, long after their sender gave up.
                for end in "ab":
                    net.links[end, k].echo_ns = max(1, lasts)
                    later(lasts * 2, setattr, net.links[end, k], "echo_ns", 0)
            case "stall":
                net.stall(name, k, True)
                later(lasts, net.stall, name, k, False)
            case "slow":
                nic.command_ns = 5 * MS
                later(lasts * 4, setattr, nic, "command_ns", 30 * US)
            case "hung":
                nic.hung = True
                later(lasts * 4, nic.unhang)
            case "failing":
                nic.failing = True
                later(lasts, setattr, nic, "failing", False)
            case "migrate":
                if not side.plain:
                    side.feed(ev.PreferPair(k))
                    later(lasts, side.feed, ev.PreferPair(0))
            case "qp_fatal":
                qp = side.qps[k]
                if qp.state == "RTS":
                    qp.to_error("RETRY_EXC_ERR")
                    side.path_failed(k, "QP_FATAL")
            case "close":
                if self.into_err:
                    side.err()
                else:
                    side.close()
        net.faults.append(what)

    def _undelay(self, link: object) -> None:
        link.delay_ns, link.jitter_ns = self.delay_ns, 0  # type: ignore[attr-defined]

    def _heal(self) -> None:
        net = self.net
        for (name, k), link in net.links.items():
            link.loss = link.duplicate = 0.0
            link.echo_ns = 0
            self._undelay(link)
            link.drops.clear()
            nic = net.nics[name][k]
            nic.failing = False
            nic.command_ns = 30 * US
            nic.unhang()
            if nic.stalled:
                net.stall(name, k, False)
            if nic.holds_cqes and not nic.dead:
                net.hold_cqes(name, k, False)
            if not net.ports[name, k]:
                net.port(name, k, True, 10 * US)
            net.wall(name, k, False)
        for side in net.sides:
            if not side.plain:
                side.feed(ev.PreferPair(0))

    def finished(self) -> bool:
        """Both applications have posted everything, it is all executed, and traffic is where it belongs."""
        net = self.net
        if any(ended(side) for side in net.sides):
            return True
        home = not any(net.nics[name][0].dead for name in "ab")
        return all(quiet(side) and (side.plain or settled(side, home)) for side in net.sides)

    def run(self) -> Network:
        """Build, run to the end, judge. Raises Violation."""
        net = self.build()
        clock = net.clock
        clock.run(self.start_ns + self.span_ns + HEAL_AFTER_NS + 2 * MS)
        if not clock.run(clock.now + END_NS, self.finished):
            states = [
                (s.name, s.protocol.send_state, s.protocol.recv_state, s.journal.__dict__) for s in net.sides
            ]
            raise Violation("every run ends", f"not at rest after {END_NS // MS} ms: {states}")
        self.judge_end(net)
        checks.check(net)
        if any(s.app.failed for s in net.sides) and not any(s.app.closed for s in net.sides):
            self.not_worse_than_plain()
        return net

    def judge_end(self, net: Network) -> None:
        """Errors on both sides or on none; whoever does not know yet learns it when it needs its peer."""
        clock = net.clock
        clock.run(clock.now + 20 * MS)
        if not any(ended(side) for side in net.sides):
            return
        clock.run(clock.now + 400 * MS)
        for side in net.sides:
            if not ended(side):
                side.path_failed(side.protocol.send_pair, "RETRY_EXC_ERR")
        dead = any(nic.dead for nics in net.nics.values() for nic in nics)
        clock.run(clock.now + (15_000 if dead else 900) * MS, lambda: all(ended(side) for side in net.sides))
        for side in net.sides:
            if not ended(side) and side.statuses:  # one that never was protected is a plain QP
                raise Violation(
                    "errors on both sides", f"{side.name} does not know: {net.other(side.name).over}"
                )
        given_back = clock.run(
            clock.now + 5_000 * MS, lambda: all(side.ending is None or side.app.closed for side in net.sides)
        )
        clock.run(clock.now + 20 * MS)
        if not given_back:
            waits = {side.name: side.fence for side in net.sides}
            raise Violation("every posted WR ends", f"errors wait, and nothing hangs any more: {waits}")

    DETERMINISTIC = frozenset({"port", "wall", "both_walls", "slow", "kill", "qp_fatal", "stall"})

    def not_worse_than_plain(self) -> None:
        """Where failover ended in errors, plain verbs must have too."""
        if any(what not in self.DETERMINISTIC or k for _, what, _, k, _ in self.faults):
            return  # chance would differ between the two runs, or the backup's failures count as well
        plain = copy.copy(self)
        net = plain.build(plain=True)
        net.clock.run(plain.start_ns + plain.span_ns + HEAL_AFTER_NS + 2 * MS)
        net.clock.run(net.clock.now + END_NS, plain.finished)
        if not any(side.app.failed for side in net.sides):
            why = [side.over for side in self.net.sides]
            raise Violation("never worse than plain verbs", f"plain verbs survive this schedule; here: {why}")


def quiet(side: Side) -> bool:
    """Everything is posted, executed and seen."""
    journal = side.journal
    qp = side.qps[journal.send_pair]
    return (
        not side.app.plan
        and not side.app.inbox
        and journal.wired == journal.tail
        and not qp.unacked
        and not qp.unsent
        and not qp.send_cq
        and not any(rec.hw_signaled for rec in journal.sends)
    )


def settled(side: Side, home: bool) -> bool:
    p = side.protocol
    if p.busy or p.over:
        return p.over
    if home:
        return (p.send_state.value, p.recv_state.value) == ("DEFAULT", "DEFAULT")
    return p.send_pair == p.recv_pair
