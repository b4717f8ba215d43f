# SPDX-License-Identifier: BSD-3-Clause
"""Two hosts, some NIC pairs and one QP pair in virtual time, for tests of the pure core.

Models just enough of RC: in-order delivery per life of a QP, acknowledgements that get lost, retries, the error
state, flushes; and of a driver: NIC commands that take time, in order per NIC, or hang, or fail. Only two-sided
SENDs; receives are always posted on whichever pair is open. Everything random comes from one seed, so a failing
seed replays.

`Side` also judges the order of actions: what the protocol may never ask for is an assertion where the action is done.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.messages import Message
from shiftverbs.protocol.pair import MS, LocalPair, PairProtocol, ProtocolConfig

LATENCY_NS = 20_000
RETRY_NS = 5 * MS
RETRIES = 3
COMMAND_NS = 50_000


@dataclass
class Qp:
    """One side's QP of one pair."""

    state: str = "RESET"
    life: int = 0  # grows with every RESET: packets of an old life fit nowhere
    peer_psn: int = -1
    psn: int = -1
    unacked: list[tuple[int, object]] = field(default_factory=list)  # (sequence in this life, what)
    next_out: int = 0
    next_in: int = 0
    retries: int = 0
    receives_open: bool = False
    dummy: bool = False
    timer: int = 0
    stale: bool = False  # a MOVE took the receives elsewhere
    carried: bool = False  # given to application work since the last RESET
    received_in_life: bool = False


class Side:
    """One host: its protocol, its journal (numbers of application messages), what it received."""

    def __init__(self, world: World, name: str, pairs: int) -> None:
        self.world = world
        self.name = name
        self.peer: Side
        self.qps = [Qp() for _ in range(pairs)]
        self.protocol: PairProtocol
        self.head = self.wired = self.tail = 0
        self.completed: list[int] = []
        self.received: list[int] = []
        self.open = True
        self.send_pair = 0
        self.recv_pair = 0
        self.fence_at: int | None = None
        self.fence_wanted = False
        self.rx_target: int | None = None
        self.errors = 0
        self.failed: str | None = None
        self.fenced: set[int] = set()
        self.dead: set[int] = set()
        self.unsafe: str | None = None
        self.statuses: list[Status] = []
        self.states: list[str] = []
        self.dropped_errors: list[int] = []
        self.let_go: str | None = None
        self.closed = False
        self.trim_due = False
        self.fence_due: int | None = None
        self.registering_ns = 0
        # NICs
        self.free_at = [0] * pairs  # when each NIC's command thread is through with what it was given
        self.hung: set[int] = set()
        self.failing: set[int] = set()
        self.slow_ns = [COMMAND_NS] * pairs
        self.waiting: list[list[Callable[[], None]]] = [[] for _ in range(pairs)]

    # -- NIC commands: in order per NIC

    def command(self, k: int, done: Callable[[], None]) -> None:
        """Have `done` called when NIC k has carried the command out."""

        def run() -> None:
            if self.closed:
                return
            if k in self.hung:
                self.waiting[k].append(done)
            else:
                done()

        self.free_at[k] = max(self.free_at[k], self.world.now) + 1 + self.world.rng.randrange(self.slow_ns[k])
        self.world.later(self.free_at[k] - self.world.now, run)

    def unhang(self, k: int) -> None:
        """NIC k carries out what it was given while it hung."""
        self.hung.discard(k)
        waiting, self.waiting[k] = self.waiting[k], []
        for done in waiting:
            done()

    # -- application

    def close(self) -> None:
        """The application closes its QP."""
        if self.closed:
            return
        self.closed = True
        self.execute(self.protocol.handle(ev.Quit("closed"), self.world.now))
        for qp in self.qps:
            qp.state = "ERR"
            qp.timer += 1

    def post(self, signaled: bool = True) -> None:
        """Post the next message."""
        if self.failed or self.let_go or self.closed:
            return
        self.tail += 1
        if self.open:
            self.pump()
        if self.fence_wanted and self.open:
            self.fence_wanted = False
            self.fence_at = self.tail
            self.open = False
            self.feed(ev.FencePosted())

    def pump(self) -> None:
        while self.wired < self.tail:
            self.wired += 1
            self.world.transmit(self, self.send_pair, self.wired)

    # -- protocol

    def feed(self, event: ev.Event) -> None:
        self.world.later(0, lambda: self.execute(self.protocol.handle(event, self.world.now)))

    def execute(self, actions: list[ev.Action]) -> None:
        for action in actions:
            self.world.log.append((self.world.now, self.name, action))
            getattr(self, "do_" + type(action).__name__)(action)
        self.world.reschedule(self)

    def do_CloseSend(self, _: ev.CloseSend) -> None:
        self.open = False
        self.fence_wanted = False
        self.fence_at = None

    def do_CloseRecv(self, _: ev.CloseRecv) -> None:
        pass

    def do_Fence(self, action: ev.Fence) -> None:
        assert not self.open, "a fence with the gate open"
        carried = {k for k, qp in enumerate(self.qps) if qp.carried and k not in self.fenced}
        assert carried <= set(action.pairs), f"not fenced: {carried - set(action.pairs)}"
        self.trim_due = True
        self.fence_due = action.number
        left = set(action.pairs)

        def erred(k: int) -> None:
            left.discard(k)
            self.stop(k)
            self.fenced.add(k)
            finish()

        def finish() -> None:
            if not left and self.fence_due == action.number:
                self.fence_due = None
                rx, acked, wired = len(self.received), self.head, self.wired
                self.feed(
                    ev.FenceCompleted(action.number, rx, acked, wired, self.unsafe if wired > acked else None)
                )

        def expire() -> None:
            if self.fence_due == action.number:
                self.fence_due = None
                self.feed(ev.FenceHung(action.number, "hung"))

        for k in action.pairs:
            if k in self.dead:
                erred(k)
            else:
                self.command(k, lambda k=k: erred(k))  # type: ignore[misc]
        if not action.pairs:
            finish()
        self.world.later(action.deadline_ns - self.world.now, expire)

    def stop(self, k: int) -> None:
        """The QP of pair k goes to ERR: nothing comes in or goes out any more."""
        qp = self.qps[k]
        qp.state = "ERR"
        qp.unacked.clear()
        qp.receives_open = False
        qp.timer += 1

    def do_ResetPair(self, action: ev.ResetPair) -> None:
        old = self.qps[action.pair]
        carries = any(what != "arm" for _, what in old.unacked) or (
            old.received_in_life and old.receives_open
        )
        assert not carries or action.pair in self.fenced or old.stale, f"pair {action.pair} carries work"

        def done() -> None:
            if action.pair in self.dead or action.pair in self.failing:
                self.feed(ev.PairReset(action.pair, action.arm, error="the NIC fails"))
                return
            old = self.qps[action.pair]
            old.timer += 1
            qp = self.qps[action.pair] = Qp("INIT", old.life + 1)
            qp.dummy = action.dummy
            self.fenced.discard(action.pair)
            self.feed(ev.PairReset(action.pair, action.arm, b"g" * 16, 3))

        self.command(action.pair, done)

    def do_ConnectPair(self, action: ev.ConnectPair) -> None:
        def done() -> None:
            if action.pair in self.dead or action.pair in self.failing:
                self.feed(ev.PairConnected(action.pair, action.arm, action.stage, error="the NIC fails"))
                return
            qp = self.qps[action.pair]
            if action.stage is not Stage.RTS:
                assert qp.state == "INIT", (self.name, action, qp.state)
                qp.state = "RTR"
                qp.peer_psn = action.remote.psn
            if action.stage is not Stage.RTR:
                if qp.state != "ERR":  # a port that fails between RTR and RTS
                    assert qp.state == "RTR", (self.name, action, qp.state)
                    qp.state = "RTS"
            qp.psn = action.psn
            self.feed(ev.PairConnected(action.pair, action.arm, action.stage))

        self.command(action.pair, done)

    def do_PostArmSend(self, action: ev.PostArmSend) -> None:
        self.world.transmit(self, action.pair, "arm")

    def do_PostReceives(self, action: ev.PostReceives) -> None:
        qp = self.qps[action.pair]
        assert qp.state in ("RTS", "ERR"), f"receives posted on pair {action.pair} in {qp.state}"
        qp.receives_open = qp.state == "RTS"
        qp.carried = True
        qp.stale = False
        self.recv_pair = action.pair
        # As where their memory is registered in time, or a moment late.
        self.world.later(self.registering_ns, lambda: self.feed(ev.ReceivesPosted(action.number)))

    def do_MoveReceives(self, action: ev.MoveReceives) -> None:
        old = self.recv_pair
        self.do_PostReceives(ev.PostReceives(action.pair, action.number))
        if old != action.pair:
            self.qps[old].stale = True

    def do_Trim(self, action: ev.Trim) -> None:
        assert self.head <= action.peer_rx <= self.wired
        self.trim_due = False
        while self.head < action.peer_rx:
            self.head += 1
            self.completed.append(self.head)
        self.wired = self.head

    def do_OpenSend(self, action: ev.OpenSend) -> None:
        assert not self.trim_due, "opened before the trim"
        assert self.qps[action.pair].state in ("RTS", "ERR"), "opened on a pair that is not connected"
        assert action.pair not in self.fenced, "opened on a fenced pair"
        self.open = True
        self.send_pair = action.pair
        self.pump()

    def do_DeliverErrors(self, action: ev.DeliverErrors) -> None:
        self.failed = action.reason
        self.dropped_errors = list(range(self.head + 1, self.tail + 1))

    def do_LetGo(self, action: ev.LetGo) -> None:
        self.let_go = action.reason

    def do_BeginFence(self, _: ev.BeginFence) -> None:
        if self.head == self.tail:
            self.open = False
            self.feed(ev.FencePosted())
            self.feed(ev.FenceDone(self.wired))
        elif self.world.rng.random() < 0.5:
            self.open = False
            self.fence_at = self.tail
            self.feed(ev.FencePosted())
        else:
            self.fence_wanted = True

    def do_PostFenceWrite(self, _: ev.PostFenceWrite) -> None:
        if self.fence_wanted:
            self.fence_wanted = False
            self.open = False
            self.fence_at = self.tail
            self.feed(ev.FencePosted())
            if self.head >= self.tail:
                self.fence_at = None
                self.feed(ev.FenceDone(self.wired))

    def do_CancelMove(self, action: ev.CancelMove) -> None:
        assert action.pair == self.send_pair
        self.fence_wanted = False
        self.fence_at = None
        self.open = True
        self.pump()

    def do_AwaitRx(self, action: ev.AwaitRx) -> None:
        self.rx_target = action.rx
        self.check_rx()

    def check_rx(self) -> None:
        if self.rx_target is not None and len(self.received) >= self.rx_target:
            self.rx_target = None
            self.feed(ev.RxReached())

    def do_SendMessage(self, action: ev.SendMessage) -> None:
        pairs = range(len(self.qps)) if action.spread else [action.pair]
        for k in pairs:
            self.world.datagram(self, k, action.message)

    def do_SetStatus(self, action: ev.SetStatus) -> None:
        self.statuses.append(action.status)

    def do_StateChanged(self, action: ev.StateChanged) -> None:
        if action.direction == "send":
            self.states.append(action.state)

    def do_SwitchStarted(self, action: ev.SwitchStarted) -> None:
        pass


class World:
    """The network, the clock and two sides `a` and `b`."""

    def __init__(
        self, seed: int, pairs: int = 2, config: ProtocolConfig | None = None, loss: float = 0.0
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 1000
        self.loss = loss
        self.duplicate = 0.0
        self.jitter_ns = LATENCY_NS  # more than the gap between messages: they overtake each other
        self.queue: list[tuple[int, int, object]] = []
        self.ticket = itertools.count()
        self.up = {(side, k): True for side in "ab" for k in range(pairs)}
        self.black: set[int] = set()
        self.ack_drops = 0
        self.log: list[tuple[int, str, object]] = []
        self.wakes = {"a": 0, "b": 0}
        self.a, self.b = Side(self, "a", pairs), Side(self, "b", pairs)
        self.a.peer, self.b.peer = self.b, self.a
        config = config or ProtocolConfig(invariants=True)
        for side in (self.a, self.b):
            locals_ = [LocalPair(side.name.encode() * 16, 0, 10 + k, 3) for k in range(pairs)]
            side.protocol = PairProtocol(
                config, locals_, side.name == "a", random.Random(self.rng.random()), self.now
            )
            qp = side.qps[0]
            qp.state, qp.receives_open, qp.carried = "RTS", True, True
            qp.psn, qp.peer_psn = 0, 0
        for side in (self.a, self.b):
            side.execute(side.protocol.start(self.now))

    # -- time

    def later(self, delay: int, call: object) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.ticket), call))

    def reschedule(self, side: Side) -> None:
        due = side.protocol.next_timeout_ns
        if due is None:
            return
        self.wakes[side.name] += 1
        number = self.wakes[side.name]

        def wake() -> None:
            if self.wakes[side.name] == number:
                side.execute(side.protocol.handle_timeout(self.now))

        self.later(max(1, due - self.now), wake)

    def run(self, until_ns: int | None = None, condition: object = None, most: int = 200_000) -> bool:
        """Let time pass until a time, or until condition() holds; return whether it does."""
        for _ in range(most):
            if condition is not None and condition():  # type: ignore[operator]
                return True
            if not self.queue or (until_ns is not None and self.queue[0][0] > until_ns):
                if until_ns is not None:
                    self.now = max(self.now, until_ns)
                return condition is None or bool(condition())  # type: ignore[operator]
            self.now, _, call = heapq.heappop(self.queue)
            call()  # type: ignore[operator]
        raise AssertionError("the world does not come to rest")

    # -- network

    def passes(self, k: int) -> bool:
        dead = k in self.a.dead or k in self.b.dead
        return self.up["a", k] and self.up["b", k] and k not in self.black and not dead

    def datagram(self, side: Side, k: int, message: Message) -> None:
        copies = 1 + (self.rng.random() < self.duplicate)
        for _ in range(copies):
            if self.rng.random() < self.loss or not self.passes(k):
                continue
            peer = side.peer

            def arrive(k: int = k, peer: Side = peer) -> None:
                if self.passes(k) and not peer.closed:
                    peer.execute(peer.protocol.handle(ev.MessageReceived(message, peer.unsafe), self.now))

            self.later(LATENCY_NS + self.rng.randrange(self.jitter_ns), arrive)

    def transmit(self, side: Side, k: int, what: object) -> None:
        qp = side.qps[k]
        qp.carried = qp.carried or what != "arm"
        if qp.state != "RTS":
            if what == "arm":
                side.feed(ev.ArmCompletion(k, receive=False, ok=False))
            else:
                assert qp.state == "ERR", f"posted on pair {k} in {qp.state}"
                side.feed(ev.PathFailed(k, f"post in {qp.state}"))
            return
        number = qp.next_out
        qp.next_out += 1
        qp.unacked.append((number, what))
        self.packet(side, k, qp, number, what)
        if len(qp.unacked) == 1:
            self.start_timer(side, k, qp)

    def start_timer(self, side: Side, k: int, qp: Qp) -> None:
        qp.timer += 1
        number = qp.timer

        def expire() -> None:
            if side.qps[k] is not qp or qp.timer != number or not qp.unacked or qp.state != "RTS":
                return
            qp.retries += 1
            if qp.retries > RETRIES:
                qp.state = "ERR"
                what = qp.unacked[0][1]
                if what == "arm":
                    side.feed(ev.ArmCompletion(k, receive=False, ok=False))
                else:
                    side.feed(ev.PathFailed(k, "RETRY_EXC_ERR"))
                return
            for number_, what in list(qp.unacked):
                self.packet(side, k, qp, number_, what)
            self.start_timer(side, k, qp)

        self.later(RETRY_NS, expire)

    def packet(self, side: Side, k: int, qp: Qp, number: int, what: object) -> None:
        if not self.passes(k):
            return
        peer = side.peer

        def arrive() -> None:
            other = peer.qps[k]
            if not self.passes(k) or other.state not in ("RTR", "RTS") or other.peer_psn != qp.psn:
                return
            if number > other.next_in:
                return
            if number == other.next_in:
                if what == "arm":
                    if not other.dummy:
                        return
                    other.dummy = False
                    other.next_in += 1
                    peer.feed(ev.ArmCompletion(k, receive=True, ok=True))
                else:
                    if not other.receives_open:
                        return
                    assert not other.stale, "a message fell into a receive that MOVE left behind"
                    assert side.peer.failed is None
                    other.next_in += 1
                    other.received_in_life = True
                    peer.received.append(what)  # type: ignore[arg-type]
                    peer.check_rx()
            if self.ack_drops and what != "arm":
                self.ack_drops -= 1
                return
            upto = other.next_in

            def ack() -> None:
                if not self.passes(k) or side.qps[k] is not qp or qp.state != "RTS":
                    return
                while qp.unacked and qp.unacked[0][0] < upto:
                    _, done = qp.unacked.pop(0)
                    qp.retries = 0
                    if done == "arm":
                        side.feed(ev.ArmCompletion(k, receive=False, ok=True))
                    else:
                        side.head = done  # type: ignore[assignment]
                        side.completed.append(done)  # type: ignore[arg-type]
                        if side.fence_at == done:
                            side.fence_at = None
                            side.feed(ev.FenceDone(side.wired))
                qp.timer += 1
                if qp.unacked:
                    self.start_timer(side, k, qp)

            self.later(LATENCY_NS, ack)

        self.later(LATENCY_NS, arrive)

    # -- faults

    def port(self, side: str, k: int, up: bool, event: bool = True) -> None:
        """A port goes down or up, with the async event on its own side."""
        self.up[side, k] = up
        me = self.a if side == "a" else self.b
        if event:
            me.feed(ev.PathHealth(k, up))
            if not up:
                me.feed(ev.PathFailed(k, "PORT_ERR", advisory=True, unsafe=me.unsafe))
        self.health(k)

    def blackhole(self, k: int, on: bool) -> None:
        """A switch port: packets vanish, no event."""
        (self.black.add if on else self.black.discard)(k)
        self.health(k)

    def kill(self, side: str, k: int) -> None:
        """DEVICE_FATAL: the context is never used again."""
        me = self.a if side == "a" else self.b
        if k not in me.dead:
            me.dead.add(k)
            me.stop(k)
            me.unhang(k)
            me.feed(ev.NicDead(k))
            self.health(k)

    def health(self, k: int) -> None:
        """The pings find out a little later."""

        def tell() -> None:
            for side in (self.a, self.b):
                side.feed(ev.PathHealth(k, self.passes(k)))

        self.later(10 * MS, tell)

    # -- judging

    def check(self) -> None:
        """Exactly once, in order, nothing acknowledged and lost."""
        for side in (self.a, self.b):
            assert side.peer.received == list(range(1, len(side.peer.received) + 1)), (
                "lost, doubled or reordered"
            )
            assert side.completed == list(range(1, len(side.completed) + 1))
            assert len(side.completed) <= len(side.peer.received)

    def home(self) -> bool:
        return all(
            side.protocol.send_state.value == "DEFAULT"
            and side.protocol.recv_state.value == "DEFAULT"
            and side.protocol.all_fit
            and not side.protocol.switching
            for side in (self.a, self.b)
        )

    def delivered(self) -> bool:
        return all(side.head == side.tail == len(side.peer.received) for side in (self.a, self.b))
