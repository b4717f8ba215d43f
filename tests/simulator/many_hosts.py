# SPDX-License-Identifier: BSD-3-Clause
"""A job on many hosts in virtual time: `python tests/simulator/many_hosts.py [HOSTS] [SEED]` (default 64 and 1).

Each host has two NICs, two QPs to each neighbour in a ring and one to each neighbour in another ring. A switch dies and
comes back, another time it falls silent, a host loses a rail, a host loses its power. What must hold in each part is
asserted there, and what it costs is counted: two tables are printed, the second of which compares with the arithmetic
of benchmarks/scale.py.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from simulator.application import OK, Application
from simulator.checks import check, over
from simulator.clock import MS, SECOND, US
from simulator.network import Network, name_of
from simulator.rnic import Datagram, Nic
from simulator.story import on, plan, said, sends, succeeded, wait

from benchmarks import scale
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.codec import Ping

NEIGHBOURS_QPS = 2
#: What each posts when it works, within so long.
OPCODES = ("SEND", "WRITE", "READ", "SEND")
WORK_NS, MIDDLE_NS = 20 * MS, 10 * MS
PEER_DEADLINE_MS = 2000
#: For a WR to a host that is dead: its NIC gives up after some timeouts, and then the peer is waited for.
GIVES_UP_NS = (PEER_DEADLINE_MS + 50) * MS
LEASE_NS = 10 * SECOND
#: No part takes longer.
LIMIT_NS = 10 * SECOND


def wires(hosts: int, rng: random.Random) -> list[tuple[str, str]]:
    """Who is connected with whom: a ring, and another one with other neighbours. Six hosts at least."""
    names = [name_of(n + 1) for n in range(hosts)]
    ring = list(zip(names, names[1:] + names[:1], strict=True))
    near = {frozenset(wire) for wire in ring}
    while True:
        rng.shuffle(names)
        far = list(zip(names, names[1:] + names[:1], strict=True))
        if not near & {frozenset(wire) for wire in far}:
            return ring * NEIGHBOURS_QPS + far


@dataclass
class Cost:
    """What a part of the story took, all hosts together, in virtual time.

    done_ms: until all was as it had to be; moved: QPs with a SWITCH or a MOVE; longest_ms: until a QP that had begun a
    SWITCH could send again; datagrams: those with messages, beyond pings and answers; written, sought, told: entries
    that etcd was given, keys that it was asked for, news of them.
    """

    name: str
    done_ms: float
    lasted_s: float
    moved: int
    switches: int
    longest_ms: float
    moves: int
    messages: int
    datagrams: int
    pings: int
    answers: int
    written: int
    sought: int
    told: int
    cpu_s: float


class Job:
    """So many hosts, as a context manager. costs: of the parts so far, by name.

    peers: of each host; gave_up_ns: what the dead one's took for that, at most.
    """

    def __init__(self, hosts: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.wires = wires(hosts, self.rng)
        self.costs: dict[str, Cost] = {}
        self.gave_up_ns = 0
        self._cpu_s = time.process_time()
        self.net = Network(seed, capacity=8, receives=8, peer_deadline_ms=PEER_DEADLINE_MS, wires=self.wires)
        self.net.on_datagram = self._hear
        self.peers: dict[str, set[str]] = {name: set() for name in self.net.names}
        for name, peer in self.wires:
            self.peers[name].add(peer)
            self.peers[peer].add(name)
        self._counts: Counter[str] = Counter()  # of this part
        self._talkers: set[tuple[str, str]] = set()  # who said more than pings to whom
        self._strangers = 0
        self._switched: set[str] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.net.end()

    def _hear(self, nic: Nic, to: Nic, datagram: Datagram) -> None:
        assert to.host in self.peers[nic.host], f"{nic.name} talks to {to.name}"
        messages = 0
        for message in said(datagram):
            if isinstance(message, Ping):
                self._counts["answers" if message.answer else "pings"] += 1
            else:
                messages += 1
        if messages:
            self._counts["messages"] += messages
            self._counts["datagrams"] += 1
            self._talkers.add((nic.host, to.host))

    # ---- parts of the story -----------------------------------------------------------------------------------------

    def part(
        self,
        name: str,
        begin: Callable[[], None] = lambda: None,
        done: Callable[[], bool] | None = None,
        rest_ms: float = 0,
        switches: int = 1,
    ) -> None:
        """What begins so, until that holds, and so much longer. switches: no QP has more."""
        net = self.net
        started_ns, traced = net.clock.now, len(net.trace)
        before = self._etcd() if self.costs else Counter()  # the first part has what making the hosts cost
        self._counts.clear()
        self._talkers.clear()
        begin()
        if done is not None:
            assert net.clock.run(started_ns + LIMIT_NS, done, each=16), f"{name}: it does not come to its end"
        done_ms = (net.clock.now - started_ns) / MS
        wait(net, rest_ms)
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        switched, moved = self._traced(traced, ev.SwitchStarted), self._traced(traced, ev.BeginFenceWr)
        self.costs[name] = Cost(
            name,
            done_ms,
            lasted_s=(net.clock.now - started_ns) / SECOND,
            moved=len(switched | moved),
            switches=switched.total(),
            longest_ms=self._longest_ms(traced),
            moves=moved.total(),
            cpu_s=self._cpu_s - cpu_s,
            **{each: self._counts[each] for each in ("messages", "datagrams", "pings", "answers")},
            **{each: count - before[each] for each, count in self._etcd().items()},
        )
        assert max(switched.values(), default=0) <= switches, f"{name}: {switched.most_common(3)}"
        assert max(moved.values(), default=0) <= 1, f"{name}: {moved.most_common(3)}"
        self._switched = set(switched)
        self._nothing_from_strangers()

    def _etcd(self) -> Counter[str]:
        hosts = [host.exchanger for host in self.net.hosts]
        return Counter(
            written=sum(host.written for host in hosts),
            sought=sum(host.sought for host in hosts),
            told=sum(host.told for host in hosts),
        )

    def _traced(self, since: int, kind: type) -> Counter[str]:
        return Counter(name for _, name, action in self.net.trace[since:] if type(action) is kind)

    def _longest_ms(self, since: int) -> float:
        longest_ns, began_ns = 0, {}
        for t, name, action in self.net.trace[since:]:
            if type(action) is ev.SwitchStarted:
                began_ns[name] = t
            elif type(action) is ev.OpenSend and name in began_ns:
                longest_ns = max(longest_ns, t - began_ns.pop(name))
        return longest_ns / MS

    def _nothing_from_strangers(self) -> None:
        """Nobody hears anything from where it has no peer. (Some hear of a peer before etcd has told them of it.)"""
        strangers = sum(host.runtime.driver.channel.unknown for host in self.net.hosts)
        assert strangers == self._strangers or len(self.costs) == 1
        self._strangers = strangers

    def work(self, apps: Iterable[Application], span_ns: int = WORK_NS) -> None:
        """Each posts a few WRs within that time, the last one at its end."""
        for app in apps:
            for n, opcode in enumerate(OPCODES):
                plan(app, opcode, cell=n, signaled=True)
                self.net.clock.later(self.rng.randrange(span_ns) if n else span_ns, app.due)

    @staticmethod
    def is_done(app: Application) -> bool:
        """Whether all that it was to post has ended."""
        return not app.plan and len(sends(app)) == len(app.posted)

    def well(self, apps: Iterable[Application], k: int) -> bool:
        """Whether these have done their work, with nothing but success, and are on pair k."""
        return all(
            self.is_done(app) and on(app, k) and not self._is_busy(app, k) and succeeded(app) for app in apps
        )

    @staticmethod
    def _is_busy(app: Application, k: int) -> bool:
        """Where it is away from home, it may be trying for a while to make a pair anew whose other end is dead."""
        p = app.endpoint.protocol
        return bool(p.switching if k else p.busy)

    def within(self, least_us: int, most_us: int) -> int:
        """How long this host takes to hear something, in ns."""
        return self.rng.randrange(least_us * US, most_us * US)

    # ---- the story --------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Until all are protected; then they idle, and then work."""
        apps = self.net.apps
        self.part("set-up", done=self.net.protected, rest_ms=20)
        self.part("nothing to do", rest_ms=10_000)
        self.part("work", lambda: self.work(apps), lambda: self.well(apps, 0), rest_ms=20)

    def a_switch_dies(self) -> None:
        """Rail 0 of all hosts at once, amid work; it comes back, and everybody goes home."""
        net = self.net

        def changes(up: bool) -> None:
            self.work(net.apps)
            net.clock.later(MIDDLE_NS, net.switch, 0, up, lambda: self.within(10, 500))

        self.part("a switch dies", lambda: changes(False), lambda: self.well(net.apps, 1), rest_ms=50)
        assert self._switched == set(net.apps_by_name)
        self.part("it is away", rest_ms=5_000)
        self.part("the switch is back", lambda: changes(True), lambda: self.well(net.apps, 0), rest_ms=20)
        assert not self._switched

    def a_switch_falls_silent(self) -> None:
        """The same, but all ports stay up: nobody is told, and each NIC finds out by itself."""
        net = self.net

        def changes(silent: bool) -> None:
            self.work(net.apps)
            for name in net.names:
                net.clock.later(MIDDLE_NS, net.wall, name, 0, silent)

        self.part("a switch falls silent", lambda: changes(True), lambda: self.well(net.apps, 1), rest_ms=50)
        assert self._switched == set(net.apps_by_name)
        self.part("it speaks again", lambda: changes(False), lambda: self.well(net.apps, 0), rest_ms=20)
        assert not self._switched

    def a_rail_of_a_host_dies(self) -> None:
        """Its QPs move, and what they are connected with; whoever has no business with it hears nothing."""
        net = self.net
        name = net.names[len(net.names) // 2]
        concerned = {app for app in net.apps if name in (app.device.name, app.peer.device.name)}
        others = set(net.apps) - concerned

        def changes(up: bool) -> None:
            self.work(net.apps)
            net.clock.later(MIDDLE_NS, net.port, name, 0, up, self.within(10, 500))

        done = lambda: self.well(concerned, 1) and self.well(others, 0)  # noqa: E731
        self.part("a rail of a host dies", lambda: changes(False), done, rest_ms=2_000)
        assert self._switched == {app.name for app in concerned}
        assert all(name in way for way in self._talkers), self._talkers
        self.part("the rail is back", lambda: changes(True), lambda: self.well(net.apps, 0), rest_ms=20)
        assert not self._switched
        assert all(name in way for way in self._talkers), self._talkers

    def a_host_dies(self) -> None:
        """Its peers give up in bound, and keep all their other QPs. One has nothing to say to it until later."""
        net = self.net
        name = net.names[-1]
        idle, *peers = [app.peer for app in net.apps_of(name)]
        others = [app for app in net.apps if name not in (app.device.name, app.peer.device.name)]

        died_ns = net.clock.now + MIDDLE_NS

        def dies() -> None:
            self.work(app for app in net.apps if app is not idle)
            net.clock.later(MIDDLE_NS, net.lose, name, LEASE_NS)

        done = lambda: net.host(name).gone and all(map(self.is_done, peers)) and self.well(others, 0)  # noqa: E731
        # Each NIC of it is tried, one after the other.
        self.part("a host dies", dies, done, switches=net.pairs)
        assert self._switched == {app.name for app in peers}
        assert all(name in way for way in self._talkers), self._talkers
        for app in peers:
            self._gave_up(app, died_ns)
        self.part("its lease ends", rest_ms=(LEASE_NS + SECOND) / MS)
        assert not self._switched and self.well(others, 0) and succeeded(idle)
        self.part(
            "the last one calls it",
            lambda: self.work([idle], 1 * MS),
            lambda: self.is_done(idle),
            switches=net.pairs,
        )
        self._gave_up(idle, died_ns)

    def _gave_up(self, app: Application, died_ns: int) -> None:
        """In bound, from when something failed that it had posted."""
        failed = next(wr for queue, wr, status in app.wcs if queue == "send" and status != OK)
        assert over(app) is not None and app.ends is not None
        took_ns = app.ends - max(failed.posted_ns, died_ns)
        assert PEER_DEADLINE_MS * MS < took_ns < GIVES_UP_NS, f"{app.name} gave up after {took_ns} ns"
        self.gave_up_ns = max(self.gave_up_ns, took_ns)

    def run(self) -> None:
        """All of it."""
        self.set_up()
        self.a_switch_dies()
        self.a_switch_falls_silent()
        self.a_rail_of_a_host_dies()
        self.a_host_dies()
        check(self.net)


# ---- what it cost ----------------------------------------------------------------------------------------------------


def parts(job: Job) -> str:
    """The parts so far, in Markdown."""
    columns: dict[str, Callable[[Cost], Any]] = {
        "part of the story": lambda c: c.name,
        "done after": lambda c: f"{c.done_ms:,.1f} ms",
        "lasted": lambda c: f"{c.lasted_s:.2f} s",
        "QPs moved": lambda c: c.moved,
        "SWITCHes": lambda c: c.switches,
        "the longest": lambda c: f"{c.longest_ms:.2f} ms" if c.longest_ms else "",
        "MOVEs": lambda c: c.moves,
        "messages": lambda c: c.messages,
        "in datagrams": lambda c: c.datagrams,
        "pings": lambda c: c.pings,
        "answers": lambda c: c.answers,
        "entries written": lambda c: c.written,
        "keys sought": lambda c: c.sought,
        "news told": lambda c: c.told,
        "CPU": lambda c: f"{c.cpu_s:.1f} s",
    }
    lines = [_row(columns), "|---" * len(columns) + "|"]
    lines += [_row(show(cost) for show in columns.values()) for cost in job.costs.values()]
    return "\n".join(lines)


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"


def compared(job: Job) -> str:
    """What benchmarks/scale.py has for such a job, and what it was here, in Markdown."""
    hosts, qps, pairs = len(job.net.names), len(job.net.apps), len(job.wires)
    peers = sum(map(len, job.peers.values())) / hosts
    paths = peers * (1 + scale.BACKUPS)
    named = ("set-up", "nothing to do", "a switch dies", "it is away", "the switch is back")
    set_up, quiet, dies, away, back = (job.costs[name] for name in named)
    rows = [
        ("entries written until it is PROTECTED, a QP", f"{scale.WRITES}", f"{set_up.written / qps:.2f}"),
        ("keys sought, a QP", "1", f"{set_up.sought / qps:.2f}"),
        ("news of them, a QP", f"{1 + scale.WRITES}", f"{set_up.told / qps:.2f}"),
        ("pings of a process a second", f"{paths:.0f}", f"{quiet.pings / quiet.lasted_s / hosts:.1f}"),
        (
            "the same while a rail is away",
            f"{paths * scale.AWAY_PINGS:.0f}",
            f"{away.pings / away.lasted_s / hosts:.1f}",
        ),
        ("messages of a SWITCH, both sides", f"some {scale.SWITCH}", f"{dies.messages / pairs:.1f}"),
        ("their datagrams", "no more than that", f"{dies.datagrams / pairs:.1f}"),
        ("messages of coming home, both sides", f"some {scale.HOME}", f"{back.messages / pairs:.1f}"),
        ("their datagrams", "no more than that", f"{back.datagrams / pairs:.1f}"),
        (
            "a host dies: its peers have their errors",
            f"{PEER_DEADLINE_MS / 1000:.2f} s after the NIC's",
            f"{job.gave_up_ns / SECOND:.2f} s after the post",
        ),
    ]
    head = (f"{hosts} hosts, {qps} QPs, {peers:.0f} peers each", "on paper", "simulated")
    return "\n".join(["| " + " | ".join(head) + " |", "|---|---|---|", *map(_row, rows)])


def main() -> int:
    """The program."""
    hosts = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    started_s = time.process_time()
    with Job(hosts, seed) as job:
        try:
            job.run()
        finally:
            print(parts(job))
    clock, cpu_s = job.net.clock, time.process_time() - started_s
    print(
        f"\n{compared(job)}\n\nseed {seed}: {clock.now / SECOND - 1:.1f} s of virtual time, {clock.steps:,} events"
        f" in {cpu_s:.1f} s of CPU"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
