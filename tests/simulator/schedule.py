# SPDX-License-Identifier: BSD-3-Clause
"""One run from one seed: what two applications post, what breaks and when, and how it must end."""

from __future__ import annotations

import copy
import errno
import random

from simulator import checks
from simulator.application import ATOMIC_CELLS, Application, Wr
from simulator.checks import Violation, ended, over, was_protected
from simulator.clock import MS, US
from simulator.host import ALL_RIGHTS
from simulator.lives import LIVES, Lives
from simulator.network import Network
from simulator.rest import quiet, settled, state, waits, waits_for_memory
from simulator.rnic import Link, Packet

from shiftverbs.native.ibv import AccessFlag

#: What can break; what stands here twice happens twice as often.
KINDS = (
    "port port port wall wall both_walls drop_answer drop_answer hold_and_kill loss delay duplicate echo echo stall"
    " slow hung failing migrate migrate kill qp_fatal close etcd freeze datagrams datagrams slow_memory refusing"
    " refuse_post gone drop_and_kill drop_and_kill"
).split()
#: From this seed on, a schedule has more of what programs do and NICs are capable of (`Schedule._widen`).
WIDE = 60_000_000
WIDER_KINDS = "late_cqes late_cqes lost close close close refused_close refused_close".split()
#: What costs nobody anything where it befalls one rail alone, and nothing is under way that cannot be replayed.
HIDDEN = frozenset(
    "port wall both_walls drop_answer loss slow delay duplicate echo qp_fatal migrate refuse_post freeze late_cqes"
    " datagrams stall kill drop_and_kill hung failing slow_memory etcd".split()
)
#: What of an earlier life of a QP's would come to its default QP in the next one, as with plain verbs.
LINGERS = ("delay", "duplicate", "echo")
#: What may be withdrawn from the peer, and what it can do no more then.
WITHDRAWN = {
    AccessFlag.REMOTE_WRITE: ("WRITE", "WRITE_IMM"),
    AccessFlag.REMOTE_READ: ("READ",),
}
#: What is still broken is mended then, after the last that begins by itself.
HEAL_FIRST_NS, HEAL_LAST_NS = 60 * MS, 400 * MS
END_NS = 90_000 * MS


class Schedule:
    """What a seed stands for.

    One seed in six has READs land where something was sent from; one has one-sided work on two cells, with fences and
    hardly a completion; one registers its memory anew now and then. straggler: what is done about slow paths.
    Seeds from WIDE on have more of everything; those before mean what they always did.
    """

    def __init__(self, seed: int, straggler: str = "off") -> None:
        self.seed = seed
        self.straggler = straggler
        rng = self.rng = random.Random(seed)
        self.pairs = rng.choices([1, 2, 3], [2, 73, 25])[0]
        self.qps = rng.choices([1, 2, 3], [80, 15, 5])[0]
        self.one_cq, self.one_process = rng.random() < 0.5, rng.random() < 0.1
        self.capacity = rng.choice([4, 8, 16, 32])
        self.receives = rng.choice([1, 3, 8, 16])
        self.count = rng.randrange(10, 50) // (1 if self.qps == 1 else 2)
        self.span_ns = rng.choice([200 * US, 1 * MS, 5 * MS, 30 * MS, 60 * MS])
        self.signaled = rng.choice([0.0, 0.2, 0.5, 1.0])
        self.poll_ns = [rng.choice([1 * US, 20 * US, 500 * US, 5 * MS]) for _ in "ab"]
        self.atomics = rng.random() < 0.15
        opcodes = ["SEND", "WRITE", "WRITE_IMM", "READ"] + ["FADD"] * self.atomics
        self.opcodes = rng.choice(
            [opcodes, opcodes, ["SEND"], ["WRITE", "WRITE", "WRITE_IMM"], ["READ", "SEND"]]
        )
        self.fences = rng.choice([0.0, 0.0, 0.2])
        self.inline = rng.choice([0.0, 0.5])
        self.reuse = 0.5 if seed % 6 == 2 else 0.0
        self.cells = 2 if seed % 6 == 5 else 8
        if self.cells == 2:
            self.opcodes, self.fences, self.signaled = ["READ", "WRITE", "WRITE", "WRITE_IMM"], 0.2, 0.05
        self.renewals = rng.randrange(1, 5) if seed % 6 == 4 else 0
        if seed % 6 == 1:
            # More than there is room for, while traffic moves.
            self.capacity, self.span_ns = rng.choice([1, 2, 4]), rng.choice([200 * US, 1 * MS])
        self.rights_change = rng.random() < 0.1
        self.delay_ns = rng.choice([2 * US, 10 * US, 100 * US])
        # In every sixth, traffic begins before it is protected.
        self.start_ns = rng.choice([0, 1 * MS, *[30 * MS] * 10])
        self.faults = [self._fault(rng) for _ in range(rng.choice([1, 2, 2, 3, 4, 6]))]
        if seed % 6 == 1:
            self.faults[0] = (
                rng.randrange(self.span_ns),
                "migrate",
                rng.choice("ab"),
                self.pairs - 1,
                rng.choice([1, 5]) * MS,
            )
        # In every tenth, memory is registered late on the backups.
        self.registering_ns = [
            rng.choice([1, 30, 700, 1800]) * MS if seed % 10 == 3 else 50 * US for _ in "ab"
        ]
        # Now and then every rail loses one operation of one side, and nothing else, for good.
        self.hole = (rng.choice("ab"), rng.choice(self.opcodes)) if seed % 31 == 7 else None
        # An application that leaves closes its QP, or moves it to ERR and takes what is left, or to RESET.
        self.leaves = rng.choice(["err", "err", "close", "close", "reset"])
        # Some programs go by the answers of their peer, with hardly a completion; some name memory that is not there.
        self.answers = seed % 12 == 7
        if self.answers:
            self.opcodes, self.signaled, self.capacity = ["SEND"], 1.0, rng.choice([1, 2, 4, 8])
            self.receives = max(self.receives, 2 * self.capacity)
        self.bad = rng.randrange(self.count) if seed % 25 == 9 else None
        self.late_ns = rng.choice([(200 * US, 2 * MS)] * 4 + [(5 * MS, 60 * MS)])
        if self.late_ns[1] > 2 * MS and self.start_ns == 30 * MS:
            self.start_ns = 250 * MS
        ends = [when + 2 * lasts + 30 * MS for when, _, _, _, lasts in self.faults]
        self.heal_ns = self.span_ns + min(HEAL_LAST_NS, max(HEAL_FIRST_NS, *ends))
        # How long a control thread takes to wake up.
        self.lag_ns = [rng.choice([2 * US, 30 * US, 30 * US, 200 * US]) for _ in "ab"]
        # In some, the right to write or to read is withdrawn; half of the peers try it all the same.
        apart = random.Random(seed + 5)
        self.withdrawal: tuple[AccessFlag, int, int, bool] | None = None
        if apart.random() < 0.06 and len(self.opcodes) > 1:
            right = apart.choice([each for each, kinds in WITHDRAWN.items() if {*kinds} & {*self.opcodes}])
            when = apart.randrange(2 * self.span_ns)
            self.withdrawal = right, apart.randrange(2), when, apart.random() < 0.5
            self.signaled = max(self.signaled, 0.5)
        self.verbs_take_time = self.two_cqs = self.apart = self.lives_again = self.compares = False
        self.with_imm = 0.0
        self.lost: set[tuple[str, int]] = set()  # NICs that answer no command any more, until they are dead
        self.lives: Lives | None = None
        if seed >= WIDE:
            self._widen(random.Random(seed + 7))
        self.net: Network

    def _widen(self, rng: random.Random) -> None:
        """CAS, immediate data, a CQ for each queue, verbs that take time or are refused, SQD, further lives."""
        self.verbs_take_time = rng.random() < 0.5
        self.two_cqs = rng.random() < 0.3
        self.apart = self.two_cqs and rng.random() < 0.5
        self.with_imm = rng.choice([0.0, 0.0, 0.3])
        self.compares = rng.random() < 0.5
        if rng.random() < 0.2 and len(self.opcodes) > 2:
            self.atomics, self.opcodes = True, [*self.opcodes, "FADD"]
        self.leaves = rng.choice(["err", "close", "reset", "reset", "sqd"])
        self.lives_again = rng.random() < 0.5
        for n, (when, what, name, k, lasts) in enumerate(self.faults):
            if rng.random() < 0.2:
                what = rng.choice(WIDER_KINDS)
            if what in LINGERS and self.lives_again:
                what = "port"
            self.faults[n] = when, what, name, k, lasts

    def _fault(self, rng: random.Random) -> tuple[int, str, str, int, int]:
        """(when, what, whose, which NIC, for how long)."""
        what = rng.choice(KINDS)
        if what in ("kill", "close", "hung", "failing") and rng.random() < 0.6:
            what = "port"
        k = 0 if rng.random() < 0.75 else rng.randrange(self.pairs)
        when = rng.randrange(1, max(2, int(self.span_ns * 1.2)))
        if rng.random() < 0.25:
            when += rng.choice([1, 5, 20, 100]) * MS * rng.randrange(1, 3)
        lasts = rng.choice([50 * US, 1 * MS, 5 * MS, 20 * MS, 60 * MS, 60 * MS, 200 * MS, 200 * MS])
        return when, what, rng.choice("ab"), k, lasts

    # ---- the run

    def build(self, plain: bool = False) -> Network:
        """Hosts with their plans; faults on the clock."""
        net = self.net = Network(
            self.seed,
            self.pairs,
            self.capacity,
            self.receives,
            plain,
            self.qps,
            one_cq=self.one_cq,
            one_process=self.one_process,
            straggler="off" if plain else self.straggler,
            two_cqs=self.two_cqs,
            lives=LIVES if self.lives_again else 1,
        )
        self.lives = Lives(net, self.qps, self._live) if self.lives_again else None
        self.lost.clear()
        net.verbs_take_time = self.verbs_take_time
        net.one_rail_is_well = not plain and self._is_to_be_hidden()
        rng = random.Random(self.seed + 1)
        again = random.Random(self.seed + 3)
        clock = net.clock
        net.by_credits = self.answers
        for link in net.links.values():
            link.delay_ns = self.delay_ns
        for host, lag_ns in zip(net.hosts, self.lag_ns, strict=False):
            host.lag_ns = lag_ns
            if not plain:
                host.exchanger.late_ns = self.late_ns
        for nics, registering_ns in zip(net.nics.values(), self.registering_ns, strict=True):
            for nic in nics[1:]:
                clock.later(self.start_ns, setattr, nic, "registering_ns", registering_ns)
        for n, app in enumerate(net.apps):
            app.poll_ns = self.poll_ns[n % 2]
            app.apart = self.apart
            if self.two_cqs and self.seed % 2:
                app.cqs = app.cqs[::-1]
            for index in range(self.count):
                wr = self._planned(app, index, rng)
                opcode = wr.opcode
                if opcode == "READ" and again.random() < self.reuse:
                    self._share(wr, list(app.plan)[-4:-1], again)
                if index == self.bad and n == self.seed // 25 % 2 and not wr.shared:
                    wr.opcode, wr.bad = "WRITE", True
                    app.own_error = "it named memory that is not there"
                if not self.answers or (n % 2 == 0 and index < self.capacity):
                    clock.later(self.start_ns + rng.randrange(self.span_ns), app.due)
            app.answers, app.begins = self.answers, n % 2 == 0
            app.posts_on = self.seed % 8 == 7 and not self.answers
            app.window_size = min(self.capacity, self.count)
            for _ in range(3 if self.seed % 10 == 3 else 0):
                clock.later(self.start_ns + rng.randrange(2 * self.span_ns), app.renew_buffers)
            for _ in range(self.renewals):
                clock.later(
                    self.start_ns + rng.randrange(2 * self.span_ns), app.renew_window, rng.random() < 0.7
                )
        if self.rights_change:
            app = net.apps[rng.randrange(2)]
            spare = 0 if self.atomics else int(AccessFlag.REMOTE_ATOMIC)
            clock.later(
                self.start_ns + rng.randrange(2 * self.span_ns), app.change_rights, ALL_RIGHTS & ~spare
            )
        if self.withdrawal is not None:
            right, whose, when, trespasses = self.withdrawal
            app = net.apps[whose]
            app.peer.trespasses = trespasses
            clock.later(self.start_ns + when, app.withdraw, int(right), WITHDRAWN[right])
        for when, what, name, k, lasts in self.faults:
            clock.later(self.start_ns + when, self._begin, what, name, k, lasts)
        clock.later(self.start_ns + self.heal_ns, self._heal)
        if self.hole is not None:
            name, opcode = self.hole
            net.faults.append("hole")
            for k in range(self.pairs):
                net.links[name, k].hole = lambda p: (
                    isinstance(p, Packet) and bool(p.ref) and (p.kind, p.opcode) == ("req", opcode)
                )
        return net

    def _is_to_be_hidden(self) -> bool:
        """Whether no program is to see anything of it: another rail is well all the time."""
        broken = {k for _, _, _, k, _ in self.faults}
        kinds = {what for _, what, _, _, _ in self.faults}
        early = self.start_ns < 30 * MS or self.seed % 10 == 3  # before all is protected
        refused = self.hole is not None or self.bad is not None or self.withdrawal is not None
        deadly = {"kill", "drop_and_kill", "lost"}
        held = kinds & {"late_cqes", "stall"} and kinds & deadly  # and gone with its NIC
        unfit = "FADD" in self.opcodes or self.fences or self.reuse or self.renewals or held
        return self.pairs > 1 and len(broken) == 1 and kinds <= HIDDEN and not (early or refused or unfit)

    def _planned(self, app: Application, index: int, rng: random.Random) -> Wr:
        """One more WR of its plan."""
        opcode = rng.choice(self.opcodes)
        cell = rng.choice(ATOMIC_CELLS) if opcode == "FADD" else rng.randrange(8) % self.cells
        signaled = rng.random() < self.signaled or index == self.count - 1
        inline = opcode != "READ" and opcode != "FADD" and rng.random() < self.inline
        data = index + 1 if opcode != "READ" else 0
        wr = Wr(app.name, index, opcode, cell, data, signaled, rng.random() < self.fences, inline)
        if opcode == "SEND" and self.with_imm and rng.random() < self.with_imm:
            wr.opcode = "SEND_IMM"
        elif opcode == "FADD" and self.compares and rng.random() < 0.5:
            wr.opcode = "CAS"
        app.plan.append(wr)
        return wr

    def _live(self, app: Application, life: int) -> None:
        """What both programs do in a further life, whatever breaks in it."""
        rng = random.Random(self.seed + 11 * life)
        for end in (app, app.peer):
            for index in range(self.count):
                self._planned(end, index, rng)
                self.net.clock.later(rng.randrange(self.span_ns), end.due)
        self.net.clock.later(30 * MS + rng.randrange(30 * MS), self._begin, "port", "a", 0, 20 * MS)

    @staticmethod
    def _share(read: Wr, before: list[Wr], rng: random.Random) -> None:
        """Have a READ land where one of the WRs before it has its bytes."""
        free = [
            wr
            for wr in before
            if wr.opcode in ("SEND", "SEND_IMM", "WRITE", "WRITE_IMM") and not (wr.inline or wr.shared)
        ]
        if free:
            other = rng.choice(free)
            read.slot = other.slot
            read.shared = other.shared = True

    def _begin(self, what: str, name: str, k: int, lasts: int) -> None:
        net = self.net
        later = net.clock.later
        host = net.host(name)
        app = net.app(name).endpoint.app
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
            case "drop_and_kill":
                # Executed, and its NIC dies before it heard so.
                other = net.links["b" if name == "a" else "a", k]
                other.drops += [lambda p: isinstance(p, Packet) and p.kind == "ack"] * 3
                later(lasts // 50, net.kill, name, k)
            case "hold_and_kill":
                net.hold_cqes(name, k, True)
                later(lasts // 20, net.kill, name, k)
            case "kill":
                net.kill(name, k)
            case "loss":
                link.loss = 0.2
                later(lasts, setattr, link, "loss", 0.0)
            case "datagrams":
                link.datagram_loss = 0.5
                later(lasts, setattr, link, "datagram_loss", 0.0)
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
            case "slow_memory":
                nic.registering_ns = min(lasts, 60 * MS)
                later(lasts * 4, setattr, nic, "registering_ns", 50 * US)
            case "hung":
                nic.hung = True
                later(lasts * 4, nic.unhang)
            case "lost":
                nic.hung = True
                self.lost.add((name, k))
            case "late_cqes":
                net.hold_cqes(name, k, True)
                later(min(lasts, 20 * MS), net.hold_cqes, name, k, False)
            case "failing":
                nic.failing = True
                later(lasts, setattr, nic, "failing", False)
            case "refusing":
                nic.refusing = 2
            case "freeze":
                host.frozen_until_ns = net.clock.now + lasts
            case "etcd":
                if not net.plain:
                    host.exchanger.go_away(lose_lease=lasts > 10 * MS)
                    later(lasts, host.exchanger.come_back)
            case "migrate":
                app.endpoint.prefer(k)
                later(lasts, app.endpoint.prefer, 0)
            case "qp_fatal":
                net.qp_fatal(name, k)
            case "close" | "refused_close" if self.lives is None or not self.lives.is_changing(app):
                net.nics[name][0].refusing += what == "refused_close"
                getattr(app, self.leaves)()
                if self.lives is not None:
                    self.lives.renew(app, lasts)
            case "gone":
                if self.seed % 3 == 0:
                    app.take_memory_away()
            case "refuse_post":
                qp = app.endpoint.qp(k)
                if qp is not None:
                    queue = self.seed % 2
                    qp.shared.refuse_at[queue] = lasts // MS % 4
                    qp.shared.refuse_err[queue] = errno.ENOMEM
        net.faults.append(what)

    def _undelay(self, link: Link) -> None:
        link.delay_ns, link.jitter_ns = self.delay_ns, 0

    def _heal(self) -> None:
        net = self.net
        for (name, k), link in net.links.items():
            link.loss = link.duplicate = link.datagram_loss = 0.0
            link.echo_ns = 0
            self._undelay(link)
            link.drops.clear()
            nic = net.nics[name][k]
            nic.failing = False
            nic.refusing = 0
            nic.command_ns, nic.registering_ns = 30 * US, 50 * US
            if (name, k) in self.lost:
                net.kill(name, k)
            nic.unhang()
            if nic.stalled:
                net.stall(name, k, False)
            if nic.holds_cqes and not nic.dead:
                net.hold_cqes(name, k, False)
            if not net.ports[name, k]:
                net.port(name, k, True, 10 * US)
            net.wall(name, k, False)
        for host in net.hosts:
            if not net.plain:
                host.exchanger.come_back()
        for app in net.apps:
            app.endpoint.prefer(0)
        if self.lives is not None:
            for app in net.apps[::2]:
                self.lives.renew_where_ended(app, 30 * MS)

    def finished(self) -> bool:
        """The applications have posted everything, it is all executed, and traffic is where it belongs."""
        net = self.net
        if self.lives is not None and self.lives.coming:
            return False
        home = not any(net.nics[name][0].dead for name in "ab")
        for app in net.apps:
            if ended(app) or ended(app.peer):
                continue
            if not quiet(app) or not (net.plain or settled(app, home)):
                return False
        return True

    def run(self) -> Network:
        """Build, run to the end, judge. Raises Violation."""
        net = self.build()
        try:
            self.play(net)
        finally:
            net.end()
        if any(a.failed for a in net.apps) and not any(a.left for a in net.apps):
            self.not_worse_than_plain(net)
        return net

    def play(self, net: Network) -> None:
        """Let it happen, and judge."""
        clock = net.clock
        started = clock.now
        clock.run(started + self.start_ns + self.heal_ns + 2 * MS)
        self.come_to_rest(net)
        clock.run(clock.now + 20 * MS)
        # One whose NIC died before it was protected seemed to have ended, and is on its way now.
        self.come_to_rest(net)
        self.judge_end(net)
        if any(checks.on_its_way(app) for app in net.apps):
            # Only now, the memory of its backup being registered since.
            self.come_to_rest(net)
            self.judge_end(net)
        checks.check(net)

    def come_to_rest(self, net: Network) -> None:
        """Wait for that."""
        if not net.clock.run(net.clock.now + END_NS, self.finished):
            raise Violation(
                "every run ends", f"not at rest after {END_NS // MS} ms: {[state(a) for a in net.apps]}"
            )

    def judge_end(self, net: Network) -> None:
        """Errors on both sides or on none; whoever does not know yet learns it when it needs its peer."""
        clock = net.clock
        concerned = [app for app in net.apps if ended(app) or ended(app.peer)]
        if not concerned:
            return
        clock.run(clock.now + 400 * MS)
        for app in concerned:
            if not ended(app) and not net.plain:
                self._needs_its_peer(app)
        dead = any(nic.dead for nics in net.nics.values() for nic in nics)
        # Where the BYE was lost: until a NIC has given up, and then for as long as a peer may be silent.
        clock.run(clock.now + (15_000 if dead else 4_000) * MS, lambda: all(ended(app) for app in concerned))
        for app in concerned:
            # One that never was protected is a plain QP; and one whose NIC died before that may be protected by now.
            # And whoever is in touch with a QP that was in SQD may go on so.
            if not ended(app) and ended(app.peer) and was_protected(net, app) and not app.peer.stopped:
                raise Violation(
                    "errors on both sides", f"{app.name} does not know: {over(app.peer)}; {state(app)}"
                )
        given_back = clock.run(clock.now + 10_000 * MS, lambda: not any(waits(app) for app in concerned))
        # Memory that was being registered when its backup broke: what waits for it ends then, and not before.
        clock.run(clock.now + 4_000 * MS, lambda: not any(waits_for_memory(app) for app in concerned))
        clock.run(clock.now + 20 * MS)
        # What it posts then, too.
        clock.run(clock.now + 1000 * MS, lambda: not any(app.poll_due for app in concerned))
        if not given_back:
            told = [state(app) for app in concerned if waits(app)]
            raise Violation("every posted WR ends", f"errors wait, and nothing hangs any more: {told}")

    @staticmethod
    def _needs_its_peer(app: Application) -> None:
        """It sends once more: nobody answers, or its peer's process does."""
        # Not all was posted, or is yet.
        index = max((wr.index for wr in (*app.posted, *app.plan)), default=-1) + 1
        wr = Wr(app.name, index, "SEND", 0, index + 1, True, False, False)
        app.plan.append(wr)
        app.due()

    DETERMINISTIC = frozenset({"port", "wall", "both_walls", "slow", "kill", "qp_fatal", "stall"})

    def not_worse_than_plain(self, net: Network) -> None:
        """Where failover ended in errors, plain verbs must have too."""
        if any(what not in self.DETERMINISTIC or k for _, what, _, k, _ in self.faults) or self.renewals:
            return  # chance would differ between the two runs, or the backup's failures count as well
        if self.rights_change or self.bad is not None or self.withdrawal is not None:
            return
        why = [over(app) for app in net.apps]
        plain = copy.copy(self)
        bare = plain.build(plain=True)
        try:
            bare.clock.run(bare.clock.now + plain.start_ns + plain.heal_ns + 2 * MS)
            bare.clock.run(bare.clock.now + END_NS, plain.finished)
        finally:
            bare.end()
        if not any(app.failed for app in bare.apps):
            raise Violation("never worse than plain verbs", f"plain verbs survive this schedule; here: {why}")
