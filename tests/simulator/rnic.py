# SPDX-License-Identifier: BSD-3-Clause
"""NICs and links in virtual time: RC as the InfiniBand specification has it, one packet per message, and datagrams.

What is modelled (IBA vol. 1, chapter 9): PSNs and the duplicate region, cumulative acknowledgements, responses of READs
and atomics (an acknowledgement does not stand for a lost response), NAK for a sequence error, RNR NAK, retry counters
and timers, the FENCE flag, flush in order, the error state, RESET. Packets stay in flight after their sender gave up,
and reach whatever life of the QP is there then. Buffers are read when a packet is built, as zero-copy hardware does.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

US, MS = 1_000, 1_000_000
MASK = 0xFFFFFF
HALF = 1 << 23
WINDOW = 32  # requests in flight

TWO_SIDED = frozenset({"SEND", "WRITE_IMM"})
RESPONDED = frozenset({"READ", "FADD"})


class Clock:
    """Virtual time, and the only source of chance: everything of a run follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.now = 1_000
        self.rng = random.Random(seed)
        self.queue: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.ticket = 0
        self.steps = 0

    def later(self, delay_ns: int, call: Callable[..., None], *args: Any) -> None:
        """Call call(*args) delay_ns from now; equal times in the order of the calls."""
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + delay_ns, self.ticket, call, args))

    def run(self, until_ns: int, done: Callable[[], bool] | None = None, most: int = 400_000) -> bool:
        """Let time pass until until_ns, or until done() holds (looked at now and then)."""
        queue = self.queue
        for n in range(most):
            if not queue or queue[0][0] > until_ns:
                self.now = max(self.now, until_ns)
                return done() if done is not None else True
            self.now, _, call, args = heapq.heappop(queue)
            call(*args)
            self.steps += 1
            if done is not None and n % 16 == 0 and done():
                return True
        raise AssertionError("the run does not come to rest")


class Link:
    """One direction of one rail. up: whether packets pass; the rest says what happens to those that do."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.up = True
        self.loss = 0.0
        self.duplicate = 0.0
        self.delay_ns = 10 * US
        self.jitter_ns = 0
        self.echo_ns = 0  # some packets come a second time, up to this much later
        self.drops: list[Callable[[Any], bool]] = []  # one packet each: the first that matches is dropped
        self.hole: Callable[[Any], bool] = lambda packet: False  # these never get through
        self.open_at_arrival: Callable[[], bool] = lambda: True

    def send(self, packet: Any, arrive: Callable[[Any], None]) -> None:
        """Carry a packet, or lose it."""
        if not self.up or self.hole(packet):
            return
        rng = self.clock.rng
        for drop in self.drops:
            if drop(packet):
                self.drops.remove(drop)
                return
        if self.loss and rng.random() < self.loss:
            return
        copies = 2 if self.duplicate and rng.random() < self.duplicate else 1
        for _ in range(copies):
            jitter = rng.randrange(self.jitter_ns) if self.jitter_ns else 0
            self.clock.later(self.delay_ns + jitter, self._arrive, packet, arrive)
        if self.echo_ns and rng.random() < 0.3:
            self.clock.later(self.delay_ns + rng.randrange(self.echo_ns), self._arrive, packet, arrive)

    def _arrive(self, packet: Any, arrive: Callable[[Any], None]) -> None:
        # What was on the wire when the cable was pulled is gone; what waits in a switch comes out later.
        if self.up and self.open_at_arrival():
            arrive(packet)


class Packet:
    """A request or an answer. data: a request's payload or a response's; ref: for judging only, not looked at here."""

    __slots__ = ("data", "kind", "opcode", "psn", "ref", "remote")

    def __init__(
        self, kind: str, psn: int, opcode: str = "", data: int = 0, remote: int = 0, ref: Any = None
    ) -> None:
        self.kind = kind
        self.psn = psn
        self.opcode = opcode
        self.data = data
        self.remote = remote
        self.ref = ref


class Wqe:
    """A send WR at the hardware. buf: the application's memory, one number long."""

    __slots__ = ("buf", "fence", "opcode", "psn", "ref", "remote", "signaled", "wr_id")

    def __init__(
        self, wr_id: Any, opcode: str, buf: list[Any], remote: int, signaled: bool, fence: bool, ref: Any
    ) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.buf = buf
        self.remote = remote
        self.signaled = signaled
        self.fence = fence
        self.ref = ref
        self.psn = 0


class Nic:
    """One NIC: its links, its QPs, the order of its commands, and how it fails."""

    def __init__(self, clock: Clock, host: str, k: int, out: Link) -> None:
        self.clock = clock
        self.host = host
        self.k = k
        self.out = out
        self.peer: Nic
        self.qps: dict[int, HwQp] = {}
        self.dead = False
        self.stalled = False  # nothing moves, and nobody says so
        self.holds_cqes = False  # acknowledges, and has not written the completion yet
        self.hung = False  # commands do not come back
        self.failing = False
        self.command_ns = 30 * US
        self.free_at = 0
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        out_up = lambda: not (self.peer.dead or self.peer.stalled)  # noqa: E731
        out.open_at_arrival = out_up

    def command(self, done: Callable[..., None], *args: Any) -> None:
        """done(*args) is called when the command is carried out; in order."""
        self.free_at = max(self.free_at, self.clock.now) + self.command_ns
        self.clock.later(self.free_at - self.clock.now, self._command, done, args)

    def ask(self, done: Callable[..., None], *args: Any) -> None:
        """A question: answered behind the commands before it; answering takes no time worth telling."""
        if self.free_at <= self.clock.now:
            self._command(done, args)
        else:
            self.clock.later(self.free_at - self.clock.now, self._command, done, args)

    def _command(self, done: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.hung and not self.dead:
            self.waiting.append((done, args))
        else:
            done(*args)

    def unhang(self) -> None:
        """Carry out what waited."""
        self.hung = False
        waiting, self.waiting = self.waiting, []
        for done, args in waiting:
            done(*args)

    def die(self) -> None:
        """DEVICE_FATAL: completions not written yet never will be."""
        self.dead = True
        self.unhang()


class HwQp:
    """One RC QP of one NIC."""

    RETRY_NS = 4 * MS
    RETRIES = 3
    RNR_NS = 300 * US

    def __init__(self, nic: Nic, number: int, memory: list[int], log: Callable[..., None]) -> None:
        self.nic = nic
        self.clock = nic.clock
        self.number = number
        self.memory = memory
        self.log = log
        self.send_cq: deque[tuple[Any, ...]] = deque()
        self.on_cqe: Callable[[], None] = lambda: None
        self.on_rnr: Callable[[], None] = lambda: None
        self.life = 0
        self.held: list[tuple[Any, ...]] = []
        self.completed: list[Any] = []  # for judging only
        self.most = 0  # that ever were in the send queue at a time, for judging only
        nic.qps[number] = self
        self.reset()

    # ---- commands

    def reset(self) -> None:
        """RESET: queues empty, no state of the connection left."""
        self.state = "RESET"
        self.life += 1
        self.unsent: deque[Wqe] = deque()
        self.unacked: deque[Wqe] = deque()
        self.rq: deque[tuple[Any, list[Any]]] = deque()
        self.next_psn = 0
        self.expected = 0
        self.atomics: dict[int, int] = {}
        self.retries = 0
        self.timer = 0
        self.rnr_wait = False
        self.nak_sent = False  # one NAK per gap: what follows is dropped without a word

    def to_error(self, first_status: str = "WR_FLUSH_ERR") -> None:
        """The error state: everything is flushed in order, the send queue's first with first_status."""
        if self.state in ("ERR", "RESET"):
            return
        self.state = "ERR"
        self.timer += 1
        status = first_status
        for wqe in (*self.unacked, *self.unsent):
            self._cqe(("send", wqe.wr_id, status))
            status = "WR_FLUSH_ERR"
        self.unacked.clear()
        self.unsent.clear()
        for wr_id, _ in self.rq:
            self._cqe(("recv", wr_id, "WR_FLUSH_ERR"))
        self.rq.clear()

    # ---- posts

    def post_send(self, wqe: Wqe) -> int:
        """0 or an errno."""
        if self.nic.dead:
            return 5
        if self.state == "ERR":
            self._cqe(("send", wqe.wr_id, "WR_FLUSH_ERR"))
            return 0
        if self.state != "RTS":
            return 22
        self.unsent.append(wqe)
        self.most = max(self.most, len(self.unsent) + len(self.unacked))
        self._kick()
        return 0

    def post_recv(self, wr_id: Any, buf: list[Any]) -> int:
        """0 or an errno."""
        if self.nic.dead:
            return 5
        if self.state == "ERR":
            self._cqe(("recv", wr_id, "WR_FLUSH_ERR"))
            return 0
        if self.state == "RESET":
            return 22
        self.rq.append((wr_id, buf))
        return 0

    def _cqe(self, cqe: tuple[Any, ...]) -> None:
        if self.nic.dead:
            return
        if self.nic.holds_cqes or self.nic.stalled:
            self.held.append(cqe)
            return
        self.send_cq.append(cqe)
        self.on_cqe()

    def release(self) -> None:
        """Write the completions that were held back."""
        held, self.held = self.held, []
        for cqe in held:
            self._cqe(cqe)

    # ---- requester

    def _kick(self) -> None:
        unsent, unacked = self.unsent, self.unacked
        started = False
        while unsent and len(unacked) < WINDOW and not self.rnr_wait:
            wqe = unsent[0]
            if wqe.fence and any(other.opcode in RESPONDED for other in unacked):
                break
            unsent.popleft()
            wqe.psn = self.next_psn
            self.next_psn = (self.next_psn + 1) & MASK
            unacked.append(wqe)
            self._transmit(wqe)
            started = True
        if started and len(unacked) and not self.timer_running:
            self._start_timer()

    @property
    def timer_running(self) -> bool:
        return self.timer % 2 == 1

    def _transmit(self, wqe: Wqe) -> None:
        if self.nic.dead or self.nic.stalled:
            return
        data = wqe.buf[0] if wqe.opcode != "READ" else 0
        self.nic.out.send(Packet("req", wqe.psn, wqe.opcode, data, wqe.remote, wqe.ref), self._peer_request)

    def _peer_request(self, packet: Packet) -> None:
        self.nic.peer.qps[self.number].on_request(packet)

    def _start_timer(self) -> None:
        self.timer += 1 if self.timer % 2 == 0 else 2
        self.clock.later(self.RETRY_NS, self._expire, self.timer, self.life)

    def _expire(self, timer: int, life: int) -> None:
        if timer != self.timer or life != self.life or self.state != "RTS" or self.nic.dead:
            return
        if self.nic.stalled:
            self._start_timer()
            return
        self._retry()

    def _retry(self, skip: int = 0) -> None:
        self.retries += 1
        if self.retries > self.RETRIES:
            self.to_error("RETRY_EXC_ERR")
            return
        for wqe in list(self.unacked)[skip:]:
            self._transmit(wqe)
        self._start_timer()

    def on_answer(self, packet: Packet) -> None:
        """An ACK, a NAK or a response arrived."""
        if self.state != "RTS" or self.nic.dead or not self.unacked:
            return
        unacked = self.unacked
        at = (packet.psn - unacked[0].psn) & MASK
        kind = packet.kind
        if kind in ("nak", "rnr"):
            # Everything before the PSN named is acknowledged, except for responses that did not come.
            if at > len(unacked):
                return
            if not self._complete_until(at):
                return
            if kind == "rnr":
                if not self.rnr_wait:
                    self.rnr_wait = True
                    self.timer += 2 if self.timer % 2 == 0 else 1
                    self.clock.later(self.RNR_NS, self._after_rnr, self.life)
            else:
                self._retry()
            return
        if at >= len(unacked):
            return
        wqe = unacked[at]
        if kind == "ack" and wqe.opcode in RESPONDED:
            return  # a ghost: such a request is answered by a response
        if kind == "resp" and wqe.opcode not in RESPONDED:
            return
        if not self._complete_until(at):
            return
        if kind == "resp":
            wqe.buf[0] = packet.data
        self._complete_until(1) if kind == "ack" else self._finish()
        self._progress()

    def _complete_until(self, n: int) -> bool:
        """Complete the n oldest requests. False: a response is missing among them, and is asked for again."""
        for _ in range(n):
            if self.unacked[0].opcode in RESPONDED:
                self._retry()
                return False
            self._finish()
        if n:
            self._progress()
        return True

    def _finish(self) -> None:
        wqe = self.unacked.popleft()
        self.retries = 0
        self.completed.append(wqe.ref)
        if wqe.signaled:
            self._cqe(("send", wqe.wr_id, "SUCCESS"))

    def _progress(self) -> None:
        if self.unacked and not self.rnr_wait:
            self._start_timer()
        elif not self.unacked and self.timer_running:
            self.timer += 1
        self._kick()

    def _after_rnr(self, life: int) -> None:
        if life != self.life or self.state != "RTS":
            return
        self.rnr_wait = False
        for wqe in self.unacked:
            self._transmit(wqe)
        if self.unacked:
            self._start_timer()
        self._kick()

    # ---- responder

    def on_request(self, packet: Packet) -> None:
        """A request arrived."""
        if self.state not in ("RTR", "RTS") or self.nic.dead or self.nic.stalled:
            return
        ahead = (packet.psn - self.expected) & MASK
        if ahead == 0:
            self._execute(packet)
        elif ahead >= HALF:
            self._duplicate(packet)
        elif ahead < 1 << 16 and not self.nak_sent:
            self.nak_sent = True
            self._answer(Packet("nak", self.expected))

    def _execute(self, packet: Packet) -> None:
        opcode = packet.opcode
        if opcode in TWO_SIDED:
            if not self.rq:
                self.nak_sent = True
                self._answer(Packet("rnr", packet.psn))
                self.on_rnr()
                return
            wr_id, buf = self.rq.popleft()
            if opcode == "WRITE_IMM":
                self.memory[packet.remote] = packet.data
            buf[0] = packet.data
            self.log(self, packet, wr_id)
            self._cqe(("recv", wr_id, "SUCCESS"))
            answer = Packet("ack", packet.psn)
        elif opcode == "WRITE":
            if packet.remote >= 0:
                self.memory[packet.remote] = packet.data
            self.log(self, packet, None)
            answer = Packet("ack", packet.psn)
        elif opcode == "READ":
            self.log(self, packet, None)
            answer = Packet("resp", packet.psn, data=self.memory[packet.remote])
        else:
            old = self.memory[packet.remote]
            self.memory[packet.remote] = old + packet.data
            self.atomics[packet.psn] = old
            self.log(self, packet, None)
            answer = Packet("resp", packet.psn, data=old)
        answer.opcode = opcode
        answer.ref = packet.ref
        self.expected = (self.expected + 1) & MASK
        self.nak_sent = False
        self._answer(answer)

    def _duplicate(self, packet: Packet) -> None:
        if packet.opcode == "READ":
            self._answer(Packet("resp", packet.psn, "READ", self.memory[packet.remote], ref=packet.ref))
        elif packet.opcode == "FADD":
            if packet.psn in self.atomics:
                self._answer(Packet("resp", packet.psn, "FADD", self.atomics[packet.psn], ref=packet.ref))
        else:
            self._answer(Packet("ack", packet.psn, packet.opcode, ref=packet.ref))

    def _answer(self, packet: Packet) -> None:
        self.nic.out.send(packet, self._peer_answer)

    def _peer_answer(self, packet: Packet) -> None:
        self.nic.peer.qps[self.number].on_answer(packet)
