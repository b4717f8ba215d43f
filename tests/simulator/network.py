# SPDX-License-Identifier: BSD-3-Clause
"""The rails between hosts, two as a rule, and what is known about a run for judging it.

Each host is a process with the production code of failover in it; faults are done to NICs, links and etcd, never to
that code.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from simulator.application import MESSAGES, WORDS, Application, Wr
from simulator.border import Store
from simulator.clock import MOST_STEPS, Clock
from simulator.endpoint import Endpoint
from simulator.host import Cq, Device, Host
from simulator.memory import WORD, Memory
from simulator.provider import Posts
from simulator.rnic import RTS, Datagram, HwCq, HwQp, Link, Nic, Rail
from simulator.world import World

from shiftverbs import _core
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.native.ibv import EventType
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status

#: Whether the protocol's invariants are checked after each event: SHIFTVERBS_INVARIANTS=0 for a campaign's speed.
INVARIANTS = os.environ.get("SHIFTVERBS_INVARIANTS", "1") != "0"
STILL = 1 << 62


class Violation(AssertionError):
    """A rule that a run broke."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


class OwnError(Violation):
    """The production code caught an exception that it does not expect: a bug of ours, or a broken invariant."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("no error of our own code", f"{type(error).__name__}: {error}")


def number_of(name: str) -> int:
    """The number of a host: names are letters, and behind "z" comes "aa"."""
    number = 0
    for letter in name:
        number = 26 * number + ord(letter) - 96
    return number


def name_of(number: int) -> str:
    """The name of a host; the first is number 1."""
    name = ""
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(97 + letter) + name
    return name


class Network:
    """Two hosts with `pairs` NICs each, and `qps` QPs between them; or as many hosts as `wires` name.

    two_cqs: a CQ for sends, and one for receives; lives: how often each QP may be connected.

    wires: the hosts of each connection, where that is not all between a and b; names are letters, "a" the first.
    plain: the same without failover; one_cq: the QPs of a host share one; one_process: both ends are in the same.
    at_start: so many receives are posted before they are connected; None: as many as there is room for.
    peer_deadline_ms: the programs' patience with a silent peer. two_contexts: all QPs but the first one are on another
    Context of the same device. with_nics: what is to be done to the NICs before anybody opens them. straggler: what is
    done about slow paths, as SHIFTVERBS_STRAGGLER has it.
    """

    def __init__(
        self,
        seed: int,
        pairs: int = 2,
        capacity: int = 32,
        receives: int = 16,
        plain: bool = False,
        qps: int = 1,
        one_cq: bool = False,
        one_process: bool = False,
        at_start: int | None = None,
        peer_deadline_ms: int = 2000,
        two_contexts: bool = False,
        with_nics: Callable[[dict[str, list[Nic]]], None] = lambda nics: None,
        straggler: str = "off",
        wires: Sequence[tuple[str, str]] | None = None,
        two_cqs: bool = False,
        lives: int = 1,
    ) -> None:
        if wires is None:
            wires = [("a", "b")] * qps
        counts = Counter(name for wire in wires for name in wire)
        names = self.names = tuple(sorted(counts, key=number_of))
        self._world = World.entered()
        self._world.__enter__()
        World.current = self
        self.clock = Clock(seed)
        self.clock.most_steps = MOST_STEPS * len(names) // 2
        self.clock.after = self.deliver
        self.pairs = pairs
        self.capacity = capacity
        self.plain = plain
        self.straggler = straggler
        self.running: Host | None = None
        self.flag = ctypes.c_int.from_address(_core.attention_address())
        self.flag.value = 0
        _core.take_events()
        _core.ended_samples()
        self.posts = Posts()
        self.posts.take()
        self.objects: list[HwCq | HwQp] = []
        self.qps: list[HwQp] = []
        self.store = Store(self)
        self.memories = {name: Memory(WORDS * counts[name] * lives) for name in names}
        self.links = {(name, k): Link(self.clock) for name in names for k in range(pairs)}
        rails = [Rail() for _ in range(pairs)]
        self.nics: dict[str, list[Nic]] = {
            name: [
                Nic(self.clock, name, number_of(name), k, self.links[name, k], self.memories[name], rail)
                for k, rail in enumerate(rails)
            ]
            for name in names
        }
        with_nics(self.nics)
        # ---- facts
        self.ports = dict.fromkeys(self.links, True)
        self.walls: dict[tuple[str, int], int] = dict.fromkeys(self.links, 0)
        self.errors: list[BaseException] = []  # of the production code itself: caught there, and logged
        self.trace: list[tuple[int, str, ev.Action]] = []
        self.executions: list[tuple[int, str, HwQp, int, Wr, Any]] = []
        self.strays: list[tuple[int, str, str]] = []  # what a NIC did to memory that was not to be touched
        # What NICs did to a program's memory that had seen a flush, and is in no execution: when, whose, what.
        self.behind_flush: list[tuple[int, str, str]] = []
        self.lost_cqes: set[tuple[str, HwQp, int, int]] = set()  # receives' words
        self.took_along: set[tuple[str, int]] = set()  # NICs that died with completions
        self.fences: dict[tuple[HwQp, int], int] = {}
        self.fencing: dict[str, tuple[int, ...]] = {}
        self.trims: list[tuple[int, str, int]] = []
        self.pairings: list[tuple[int, str]] = []
        self.faults: list[str] = []
        self.slowed: set[int] = set()  # rails that were slow on purpose
        self.whereabouts: list[tuple[int, str, int]] = []  # when, whose sends, to which pair
        self._slow_ns: dict[int, int] = {}
        # Who sends to whom on which rail: until when that was last shut; STILL: it is.
        self._shut_ns = {
            (name, peer, k): -1
            for wire in dict.fromkeys(wires)
            for k in range(pairs)
            for name, peer in (wire, wire[::-1])
        }
        self._unacknowledged: set[tuple[HwQp, int, int]] = set()  # WRs that were answered, in a QP's life
        self._messages: Counter[str] = Counter()  # that have come for each program
        self.let_go: dict[str, int] = {}  # whose peer has left it, and when that was heard
        self.died_plain: set[str] = set()  # whose NIC died when its QP was a plain one again
        self.too_early: list[tuple[int, str, int]] = []
        self.one_rail_is_well = False
        self.verbs_take_time = False  # the application's own, too
        # Which NIC says what to which, whether or not it arrives.
        self.on_datagram: Callable[[Nic, Nic, Datagram], None] = lambda nic, to, datagram: None
        self.by_credits = True  # nobody is sent to who has not said that a receive is there
        self._forbidden: dict[str, set[int]] = {name: set() for name in names}
        devices = {name: (self.nics[name], self.memories[name]) for name in names}
        self._hosts: dict[str, Host] = {}
        for name in names:
            if one_process and self._hosts:
                self._hosts[name] = self._hosts[names[0]]
                continue
            opens = devices if one_process else {name: devices[name]}
            self._hosts[name] = Host(self, opens, plain, INVARIANTS, peer_deadline_ms, straggler)
        self.hosts = tuple(dict.fromkeys(self._hosts.values()))
        self.a, self.b = (self._hosts[name] for name in names[:2])
        self.apps: list[Application] = []
        self._apps_of: dict[str, list[Application]] = {name: [] for name in names}
        cqs: dict[str, tuple[Cq, Cq]] = {}
        others: dict[str, Device] = {}
        if two_contexts:
            others = {name: Device(self.host(name), name, *devices[name]) for name in names}
        for wire in wires:
            pair = []
            for name in wire:
                is_first = not self._apps_of[name]
                device = self.host(name).devices[name] if is_first or not two_contexts else others[name]
                if name not in cqs or not one_cq:
                    depth = (capacity + receives + 4) * (counts[name] if one_cq else 1)
                    cq = Cq(device, depth)
                    cqs[name] = cq, Cq(device, depth) if two_cqs else cq
                endpoint = Endpoint(device, capacity, receives, *cqs[name])
                pair.append(self._program(endpoint, *cqs[name]))
            self._are_peers(*pair)
        for app in self.apps:
            if at_start is not None:
                app.at_start = at_start
            app.endpoint.connect(app.peer.endpoint)
            self.deliver()

    def _program(self, endpoint: Endpoint, cq: Cq, recv_cq: Cq) -> Application:
        app = Application(endpoint, cq, recv_cq)
        self._apps_of[endpoint.device.name].append(app)
        return app

    def _are_peers(self, a: Application, b: Application) -> None:
        a.peer, b.peer = b, a
        self.apps += a, b

    def next_life(self, app: Application) -> tuple[Application, Application]:
        """What a program, and its peer, do with their QPs from now on is judged by itself, in memory of its own."""
        a, b = (self._program(each.endpoint, each.cqs[0], each.cqs[-1]) for each in (app, app.peer))
        for new, old in ((a, app), (b, app.peer)):
            new.cqs, new.apart, new.poll_ns = old.cqs, old.apart, old.poll_ns
            old.plan.clear()
            old.posts_on = False
        self._are_peers(a, b)
        return a, b

    # ---- processes --------------------------------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        return self._hosts[name]

    def app(self, name: str) -> Application:
        """The first one of a host."""
        return self._apps_of[name][0]

    @property
    def apps_by_name(self) -> dict[str, Application]:
        """All of them."""
        return {app.name: app for app in self.apps}

    def life_at(self, name: str, t_ns: int) -> int:
        """How often an application's QP had been paired by then."""
        return sum(1 for t, which in self.pairings if which == name and t <= t_ns)

    def apps_of(self, name: str) -> list[Application]:
        return self._apps_of[name]

    def run_inline(self) -> None:
        """Post and poll have seen the attention flag: the driver of the process that runs."""
        if self.running is not None and self.running.run_inline is not None:
            self.running.run_inline()

    def wait(self, done: Any, timeout_s: float | None) -> bool:
        """A wait of the process that runs."""
        assert self.running is not None
        return self.running.wait(done, timeout_s)

    def deliver(self) -> None:
        """Behind each event: the NICs take what was posted, and programs hear of completions.

        A run goes no further than to the first error of our own code.
        """
        if self.errors:
            raise OwnError(self.errors[0]) from self.errors[0]
        while self.posts.count.value:
            for post in self.posts.take():
                self.qps[post[6]].post(post)

    def end(self) -> None:
        """Let go of everything, C memory last."""
        for host in self.hosts:
            if not self.plain:
                host.runtime.driver.restore_switch_interval()
            with host:
                for endpoint in host.endpoints:
                    endpoint.core.close()
                    endpoint.cq.close()
                    endpoint.recv_cq.close()
        self.flag.value = 0
        _core.take_events()
        for thing in self.objects:
            thing.free()
        self.objects = []
        World.current = None
        self._world.__exit__(None, None, None)

    # ---- what happens, noted for the checkers -----------------------------------------------------------------------

    def note(self, qp: HwQp, what: str, ref: int, address: int, extra: Any) -> None:
        """A NIC has touched memory. ref: of the WR; address: where; extra: the receive's address, or what was read.

        what: a request is executed; its response has come; a READ is answered again; what is sent is read.
        """
        name = qp.nic.host
        if what == "executed":
            if ref:
                sender = self._sender(qp, ref)
                wr = sender.by_ref[ref]
                slot = None if extra is None else (extra - self.memories[name].base) // WORD
                self.executions.append((self.clock.now, name, qp, qp.life, wr, slot))
                if slot is not None:
                    self._look_for_acks(qp, sender.peer)
                if wr.opcode not in MESSAGES and address != wr.target:
                    self.strays.append((self.clock.now, name, f"{wr} meant another place"))
                if wr.opcode in MESSAGES and extra is not None:
                    self._look_for_stray(name, extra, wr)
                elif wr.opcode not in MESSAGES:
                    self._look_for_stray(name, address, wr)
        elif ref:
            if what == "again":
                app, told = self._sender(qp, ref).peer, f"a READ that comes again, from {qp.nic.name}"
            else:
                app = self._apps_of[name][ref >> 16]
                index = (ref & 0xFFFF) - 1
                told = f"{what} of {app.name}'s WR {index}, by {qp.nic.name}"
                if index < app.complete:
                    self.strays.append((self.clock.now, name, f"{told}: it is complete, as was told"))
            self._look_for_stray(name, address, told)
            if app.flushed is not None:
                self.behind_flush.append((self.clock.now, app.name, told))

    def _look_for_acks(self, qp: HwQp, app: Application) -> None:
        """A message came: where our NIC still waits for the ACK of what that answers, the way back has lost it.

        The peer's NIC sends its answer (again) before ours asks once more.
        """
        self._messages[app.name] += 1
        if not app.answers:
            return
        answered = self._messages[app.name] - (0 if app.begins else app.peer.window_size)
        shut_ns = self._shut_ns[app.peer.device.name, qp.nic.host, qp.nic.k]
        for wqe in qp.unacked:
            wr = app.by_ref.get(wqe.ref)
            if wr is not None and wr.index < answered and wr.posted_ns <= shut_ns:
                self._unacknowledged.add((qp, qp.life, wqe.ref))

    def waits_for_ack(self, app: Application) -> int:
        """The first of its WRs that was answered where its NIC still waits for the ACK; behind all: there is none.

        Or did wait, until the QP broke that its sends go by: they are complete when a SWITCH has said so.
        """
        here = app.endpoint.core.send_pair
        return min(
            (
                app.by_ref[wqe.ref].index
                for qp in app.endpoint.qps
                for wqe in (*qp.unacked, *(qp.given_up if qp.nic.k == here else ()))
                if (qp, qp.life, wqe.ref) in self._unacknowledged
            ),
            default=len(app.posted),
        )

    def refused(self, qp: HwQp) -> None:
        """A NIC has no receive for a message: one that came too early, if its receives are still being posted there.

        Not where its program has left, and the peer knows: that goes on where the BYE says, and has no answer anywhere.
        """
        for app in self.apps_of(qp.nic.host):
            core, connection = app.endpoint.core, app.endpoint.connection
            if connection is None or app.endpoint.qp(qp.nic.k) is not qp or core.recv_pair != qp.nic.k:
                continue
            if app is not app.endpoint.app:
                continue
            posting, p = connection.key_wait.posting, connection.protocol
            works = p is not None and not (p.over or p.switching or core.ending)
            withheld = works and core.unwired[1] > 0 and self.by_credits
            gone = app.left and app.peer.name in self.let_go
            if withheld or (posting is not None and posting.pair == qp.nic.k and not gone):
                self.too_early.append((self.clock.now, app.name, qp.nic.k))

    def _sender(self, qp: HwQp, ref: int) -> Application:
        return self._apps_of[qp.nic.rail.ever[qp.dgid].host][ref >> 16]

    def _look_for_stray(self, name: str, address: int, what: Any) -> None:
        word = (address - self.memories[name].base) // WORD
        if word in self._forbidden[name]:
            self.strays.append((self.clock.now, name, f"{what}: word {word} is not to be touched"))

    def forbid(self, name: str, word: int, count: int) -> None:
        """This memory is the application's alone from now on."""
        self._forbidden[name].update(range(word, word + count))

    def allow(self, name: str, word: int, count: int) -> None:
        """It may be reached again."""
        self._forbidden[name].difference_update(range(word, word + count))

    def given_back(self, app: Application) -> None:
        """A QP was closed, or reset: all of its memory is the application's."""
        self.forbid(app.device.name, app.first_word, WORDS)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def update(self, k: int) -> None:
        """Whether packets pass on rail k follows from ports and walls."""
        for name in self.names:
            self.links[name, k].up = self.ports[name, k] and not self.walls[name, k]
        for way, shut_ns in self._shut_ns.items():
            name, peer, rail = way
            if rail == k and not (self.links[name, k].up and self.ports[peer, k]):
                self._shut_ns[way] = STILL
            elif rail == k and shut_ns == STILL:
                self._shut_ns[way] = self.clock.now

    def port(self, name: str, k: int, up: bool, event_ns: int | None) -> None:
        """A port goes down or up; its own host hears of it after event_ns, or never (None)."""
        self.ports[name, k] = self.nics[name][k].port_active = up
        self.update(k)
        if event_ns is not None:
            self.clock.later(event_ns, self._port_event, name, k, up)

    def _port_event(self, name: str, k: int, up: bool) -> None:
        nic = self.nics[name][k]
        if self.ports[name, k] is up and not nic.dead:
            nic.event(EventType.PORT_ACTIVE if up else EventType.PORT_ERR, 1)

    def slow(self, k: int, delay_ns: int = 0, packet_ns: int = 0, loss: float = 0.0) -> None:
        """Rail k takes so much longer, both ways, and loses so much; nothing: it is well again."""
        for name in self.names:
            link = self.links[name, k]
            link.delay_ns += delay_ns - self._slow_ns.get(k, 0)
            link.packet_ns, link.loss = packet_ns, loss
        self._slow_ns[k] = delay_ns
        if delay_ns or packet_ns or loss:
            self.slowed.add(k)

    def wall(self, name: str, k: int, on: bool) -> None:
        """Packets from `name` on rail k vanish, and nobody says so."""
        self.walls[name, k] = int(on)
        self.update(k)

    def kill(self, name: str, k: int) -> None:
        """DEVICE_FATAL."""
        nic = self.nics[name][k]
        if nic.dead:
            return
        self._die(nic)
        nic.event(EventType.DEVICE_FATAL, 0)
        if self.plain:  # a program with plain verbs sees the event, and takes its QP for failed
            for app in self.apps_of(name):
                if app.endpoint.hardware.nic is nic:
                    app.failed = True

    def _die(self, nic: Nic) -> None:
        name = nic.host
        for qp in nic.qps.values():
            for _, _, address in qp.held:
                if address:
                    word = (address - self.memories[name].base) // WORD
                    self.lost_cqes.add((name, qp, qp.life, word))
            if qp.held:
                self.took_along.add((name, nic.k))
        self.died_plain |= {
            app.name for app in self.apps_of(name) if app.endpoint.hardware.nic is nic and self._is_plain(app)
        }
        nic.die()

    def _is_plain(self, app: Application) -> bool:
        """Whether its program or the peer's has ended the pairing, and its QP works at home, nothing being withheld."""
        core = app.endpoint.core
        at_home = core.send_pair == core.recv_pair == 0 and core.send_is_open and core.recv_is_open
        sends, receives = core.unwired
        # Behind a full queue: a NIC would have refused them.
        waits_for_room = core.outstanding[0] - sends >= app.endpoint.capacity
        withholds = core.guarded or receives or (sends and not waits_for_room)
        is_over = app.stopped or app.refused or app.name in self.let_go
        return is_over and at_home and not withholds and app.endpoint.hardware.state == RTS

    def switch(self, k: int, up: bool, event_ns: Callable[[], int]) -> None:
        """All ports of a rail go down or up at once; each host hears of it in its own time."""
        for name in self.names:
            self.port(name, k, up, event_ns())

    def lose(self, name: str, lease_ns: int) -> None:
        """A host loses its power, and nobody is told; what it had in etcd stays there for lease_ns."""
        host = self.host(name)
        host.gone = True
        for nic in self.nics[name]:
            self._die(nic)
        for app in self.apps_of(name):
            app.left = True
        self.clock.later(lease_ns, host.exchanger.go_away, True)

    def stall(self, name: str, k: int, on: bool) -> None:
        """Nothing moves on that NIC, and no completion says so."""
        nic = self.nics[name][k]
        nic.stalled = on
        if not on:
            for qp in list(nic.qps.values()):
                qp.release()
                if qp.unacked and qp.state == RTS:
                    qp._start_timer()

    def hold_cqes(self, name: str, k: int, on: bool) -> None:
        """The NIC acknowledges, and has not written the completions yet."""
        nic = self.nics[name][k]
        nic.holds_cqes = on
        if not on:
            for qp in list(nic.qps.values()):
                qp.release()

    def qp_fatal(self, name: str, k: int) -> None:
        """A QP breaks by itself."""
        for app in self.apps_of(name)[:1]:
            qp = app.endpoint.qp(k)
            if qp is not None and qp.state == RTS:
                qp.to_error(12)
                nic = self.nics[name][k]
                if k == 0 and not self.plain and not nic.dead:
                    host = self.host(name)
                    event = _QpFatal(qp.pointer)
                    with host:
                        host.runtime._on_application_event(event)

    def protected(self) -> bool:
        """Whether all QPs are."""
        return all(app.endpoint.status is Status.PROTECTED for app in self.apps)


class _QpFatal:
    type = EventType.QP_FATAL

    def __init__(self, element: int) -> None:
        self.element = element


# ---- what the production code does, for judging ---------------------------------------------------------------------

_execute, _fenced, _paired = Connection.execute, Connection._fenced, Connection.paired


def _name(connection: Connection) -> str:
    return str(connection.shadow.qp.app.name)


def _traced(connection: Connection, actions: list[ev.Action]) -> None:
    """Each action, as it is carried out."""
    net = World.current
    if net is not None:
        name = _name(connection)
        for action in actions:
            net.trace.append((net.clock.now, name, action))
            if type(action) is ev.Trim:
                net.trims.append((net.clock.now, name, action.peer_rx))
            elif type(action) is ev.Fence:
                net.fencing[name] = action.pairs
            elif type(action) is ev.LetGo:
                net.let_go[name] = net.clock.now
            elif type(action) is ev.OpenSend:
                net.whereabouts.append((net.clock.now, name, action.pair))
    _execute(connection, actions)


def _noted(connection: Connection, number: int) -> None:
    """The fence of a SWITCH has ended: nothing more is executed in the lives that it ended, or that had work before."""
    net = World.current
    if net is not None:
        endpoint = connection.shadow.qp
        worked = {e[2:4] for e in net.executions}
        fencing = net.fencing.get(_name(connection), ())
        for k in range(net.pairs):
            qp = endpoint.qp(k)
            if qp is not None and (k in fencing or (qp, qp.life) in worked):
                net.fences.setdefault((qp, qp.life), net.clock.now)
    _fenced(connection, number)


def _begun(connection: Connection, *args: Any) -> None:
    """A pairing begins."""
    net = World.current
    if net is not None:
        net.pairings.append((net.clock.now, _name(connection)))
        net.let_go.pop(_name(connection), None)
    _paired(connection, *args)


# What each is around, for those who put bugs into that (patching.py).
_begun.around, _traced.around, _noted.around = "_paired", "_execute", "_fenced"  # type: ignore[attr-defined]
Connection.paired = _begun  # type: ignore[method-assign]
Connection.execute = _traced  # type: ignore[method-assign]
Connection._fenced = _noted  # type: ignore[method-assign]
