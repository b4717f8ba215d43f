# SPDX-License-Identifier: BSD-3-Clause
"""Two hosts: applications, completion queues, and a driver that carries out the protocol's actions in virtual time.

`Side` plays the part of `connection.py` and `driver.py`: it runs the real `PairProtocol`, gives commands to NICs,
drains completion queues, and tells the protocol what happened. It decides nothing.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from simulator.journal import GONE, Journal, RecvRecord, Wr
from simulator.rnic import MS, US, Clock, HwQp, Link, Nic, Packet

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.messages import Arm, PairAddress, Phase, Sync
from shiftverbs.protocol.pair import LocalPair, PairProtocol, ProtocolConfig

CELLS = 12  # memory of each side: the last four are for atomics
ATOMIC_CELLS = range(8, 12)
GONE_NS = 1_000_000_000
#: Whether the protocol's invariants are looked at after each event: SHIFTVERBS_INVARIANTS=0 for a campaign's speed.
INVARIANTS = os.environ.get("SHIFTVERBS_INVARIANTS", "1") != "0"
STEADY_NS = 50 * MS


class Application:
    """What a program does with one QP: posts its plan, keeps receives posted, polls when it gets round to it."""

    def __init__(self, side: Side, receives: int) -> None:
        self.side = side
        self.clock = side.clock
        self.receives = receives
        self.poll_ns = 5 * US
        self.plan: deque[Wr] = deque()
        self.posted: list[Wr] = []
        self.wcs: list[tuple[Any, ...]] = []
        self.inbox: deque[tuple[Any, ...]] = deque()
        self.received: list[tuple[int, Any]] = []
        self.reads: list[tuple[Wr, Any]] = []
        self.unread: deque[Wr] = deque()  # READs and atomics whose results are not there yet
        self.next_recv = 0
        self.poll_due = False
        self.failed = False
        self.closed = False
        self.posts_on = False  # whatever has failed
        self.retry_due = False

    @property
    def at_its_end(self) -> bool:
        return self.closed or (self.failed and not self.posts_on)

    def start(self) -> None:
        for _ in range(self.receives):
            self.post_recv()

    def post_recv(self) -> None:
        if not self.failed and not self.closed:
            self.next_recv += self.side.journal.post_recv(self.next_recv, [None]) == 0

    def post_next(self) -> None:
        """Post the plan's next WR; with a full queue, again a little later."""
        if not self.plan or self.at_its_end:
            return
        if self.retry_due:
            return
        self._post()

    def _post(self) -> None:
        while self.plan and not self.at_its_end:
            wr = self.plan[0]
            if wr.posted_ns < 0:
                break
            wr.posted_ns = self.clock.now
            rc = self.side.journal.post_send(wr)
            if rc == 12:
                self.side.make_room()
                rc = self.side.journal.post_send(wr)
            if rc == 12:
                if not self.retry_due:
                    self.retry_due = True
                    self.clock.later(200 * US, self._again)
                return
            self.plan.popleft()
            if rc == 0:  # else an exception: its device is gone
                self._note(wr)
            self.backlog -= 1
            if self.backlog <= 0:
                break
        self.side.wake()

    def _note(self, wr: Wr) -> None:
        self.posted.append(wr)
        if wr.opcode in ("READ", "FADD"):
            self.unread.append(wr)
        if wr.inline:
            wr.buf[0] = -7  # the application uses the memory again at once

    backlog = 0

    def due(self) -> None:
        """The time of one more WR of the plan has come."""
        self.backlog += 1
        if not self.retry_due:
            self._post()

    def _again(self) -> None:
        self.retry_due = False
        if self.backlog > 0:
            self._post()

    def deliver(self, wc: tuple[Any, ...]) -> None:
        """A completion is there for the next poll."""
        self.inbox.append(wc)
        self.wake()

    def wake(self) -> None:
        if not self.poll_due:
            self.poll_due = True
            self.clock.later(self.poll_ns, self.poll)

    def poll(self) -> None:
        """Poll to empty, and use what came."""
        self.poll_due = False
        self.side.drain_active()
        inbox = self.inbox
        while inbox:
            queue, what, status = inbox.popleft()
            if self.closed:
                continue
            if queue == "recv":
                record: RecvRecord = what
                self.wcs.append(("recv", record.wr_id, status))
                if status == "SUCCESS":
                    self.received.append((record.wr_id, record.buf[0]))
                    record.buf = [None]
                    self.post_recv()
                else:
                    self.fail()
            else:
                wr: Wr = what
                self.wcs.append(("send", wr, status))
                if status == "SUCCESS":
                    # It completes those before it that are not signaled.
                    while self.unread and self.unread[0].index <= wr.index:
                        read = self.unread.popleft()
                        self.reads.append((read, read.buf[0]))
                    if wr.opcode not in ("READ", "FADD") and not wr.shared:
                        wr.buf[0] = -9  # complete: the memory is the application's again
                else:
                    self.fail()

    def fail(self) -> None:
        self.failed = True
        if not self.side.statuses:
            self.side.over = self.side.over or "it failed before it was protected"


class Side:
    """One host's end of one protected QP."""

    def __init__(self, world: Network, name: str, capacity: int, receives: int, unpaired: bool) -> None:
        self.world = world
        self.clock = world.clock
        self.name = name
        self.nics = world.nics[name]
        self.memory = [0] * CELLS
        self.qps = [HwQp(nic, 100, self.memory, world.executed) for nic in self.nics]
        for k, qp in enumerate(self.qps):
            qp.on_cqe = lambda k=k: self.cqe(k)  # type: ignore[misc]
            qp.on_rnr = lambda k=k: self.refused(k)  # type: ignore[misc]
        self.app = Application(self, receives)
        self.journal = Journal(self.qps, capacity, receives, self.emit, self.app.deliver)
        self.journal.look = self.drain
        self.protocol: PairProtocol
        self.plain = unpaired
        self.active = {0}
        self.events: deque[ev.Event] = deque()
        self.feeding = False
        self.fence: list[Any] | None = None
        self.drain_due = False
        self.tick_due = False
        self.timer = 0
        self.resets = [0] * len(self.qps)
        self.looks = [0] * len(self.qps)
        self.statuses: list[Status] = []
        self.trace: list[tuple[int, str, ev.Action]] = world.trace
        self.over: str | None = None
        self.ending: str | None = (
            None  # the error that comes first of what is left, when all pairs have stopped
        )
        self.default_works = False
        self.was_protected = False
        self.watch_head = (-1, 0)
        self.alive: dict[int, bool] = {}
        self.driver_lag_ns = 2 * US
        self.registering_ns = 0  # how long the memory of receives is not known to the backup NICs yet
        self.posting: ev.PostReceives | ev.MoveReceives | None = None

    # ---- completions

    def cqe(self, k: int) -> None:
        if k in self.active:
            self.app.wake()
        if self.busy():
            self.drain_soon()

    def busy(self) -> bool:
        return self.fence is not None or self.protocol.busy

    def drain_soon(self) -> None:
        if not self.drain_due:
            self.drain_due = True
            self.clock.later(20 * US, self._drain_all)

    def _drain_all(self) -> None:
        self.drain_due = False
        for k in range(len(self.qps)):
            self.drain(k)
        if self.fence is not None:
            for k in sorted(self.fence[3]):
                self.fence_progress(k)

    def drain(self, k: int) -> None:
        cq = self.qps[k].send_cq
        while cq:
            self.journal.dispatch(k, cq.popleft())

    def drain_active(self) -> None:
        for k in sorted(self.active):
            self.drain(k)

    def make_room(self) -> None:
        """The hardware frees a slot when it completes, whether or not the application polls."""
        self.drain(self.journal.send_pair)

    def wake(self) -> None:
        if self.qps[self.journal.send_pair].send_cq:
            self.app.wake()

    # ---- events in

    def emit(self, kind: str, k: int, value: Any) -> None:
        """The data path says something: the driver hears it a moment later."""
        if not self.plain:
            self.clock.later(self.driver_lag_ns, self._core_event, kind, k, value)

    def _core_event(self, kind: str, k: int, value: Any) -> None:
        if kind == "ERROR":
            if self.is_left_alone_on(k):
                self.end(str(value))  # nobody else will deliver it
                return
            self.path_failed(k, str(value), wr=self.failed_wr(k))
        elif kind == "POST_FAILED":
            self.post_failed(k, value)
        elif kind in ("SQ_FENCED", "RQ_FENCED"):
            self.fence_progress(k)
        elif kind == "ARM_WC":
            self.feed(ev.ArmCompletion(k, receive=value[0], ok=value[1]))
        elif kind == "FENCE_POSTED":
            self.feed(ev.FencePosted())
        elif kind == "FENCE_DONE":
            self.feed(ev.FenceDone(self.journal.counters()[2]))
        elif kind == "RX_REACHED":
            self.feed(ev.RxReached())

    def is_left_alone_on(self, k: int) -> bool:
        """Whether the peer has let go of a QP that is still withholding errors, and that uses pair k."""
        alone = self.protocol.over and self.statuses[-1:] == [Status.UNPROTECTED] and self.journal.guarded
        return alone and k in (self.journal.send_pair, self.journal.recv_pair)

    def path_failed(self, k: int, reason: str, advisory: bool = False, wr: int | None = None) -> None:
        if self.plain or self.protocol.status is not Status.PROTECTED:
            return
        unsafe = self.journal.unsafe_reason(cqes_lost=True) if advisory else None
        if not self.path_answers(k):
            wr = None
        self.feed(ev.PathFailed(k, reason, advisory, unsafe, wr))

    def path_answers(self, k: int) -> bool:
        """What pings would say: the path is fine, and was for a while."""
        return self.world.passes(k) and self.clock.now - self.world.changed_ns[k] > STEADY_NS

    def failed_wr(self, k: int) -> int | None:
        if k != self.journal.send_pair:
            return None
        if self.journal.pairs[k].failed_wr is None:
            self.drain(k)
        return self.journal.pairs[k].failed_wr

    def post_failed(self, k: int, rc: int) -> None:
        self.drain(k)
        if rc in GONE or self.nics[k].dead or self.journal.pairs[k].first_status is not None:
            self.path_failed(k, f"post failed: {rc}", wr=self.failed_wr(k))
        elif self.protocol.over:
            self.end("LOC_QP_OP_ERR")
        elif not self.protocol.switching:
            self.feed(ev.WorkRefused(f"post refused: {rc}"))

    def message(self, message: Any) -> None:
        if self.app.closed:
            self._say_bye(message)
            return
        asked = isinstance(message, Sync) and message.phase is Phase.ASK
        unsafe = self.journal.unsafe_reason(cqes_lost=True) if asked else None
        self.feed(ev.MessageReceived(message, unsafe))

    def _say_bye(self, message: Any) -> None:
        """As the driver answers where nobody of that name is (any more)."""
        if not (isinstance(message, Sync) and message.phase in (Phase.BYE, Phase.ABORT)):
            nobody = PairAddress(bytes(16), 0, 0, 0, 1)
            pair = message.pair if isinstance(message, Arm) else message.target
            self.do_send_message(ev.SendMessage(Sync(0, 0, Phase.BYE, 0, False, nobody, 0), pair))

    def feed(self, event: ev.Event) -> None:
        self.events.append(event)
        if not self.feeding:
            self.run()

    def run(self) -> None:
        if self.plain:
            return
        self.feeding = True
        while self.events:
            self.execute(self.protocol.handle(self.events.popleft(), self.clock.now))
        self.feeding = False
        self.schedule()

    def execute(self, actions: list[ev.Action]) -> None:
        for action in actions:
            self.trace.append((self.clock.now, self.name, action))
            self.HANDLERS[type(action)](self, action)

    def schedule(self) -> None:
        due = self.protocol.next_timeout_ns
        if due is not None:
            self.timer += 1
            self.clock.later(max(1, due - self.clock.now), self._on_time, self.timer)
        if self.busy():
            self.drain_soon()

    def _on_time(self, number: int) -> None:
        if number == self.timer:
            self.execute(self.protocol.handle_timeout(self.clock.now))
            self.run()

    # ---- health: what pings and the watchdog would say

    def health(self, k: int, alive: bool) -> None:
        if not self.plain and self.alive.get(k) is not alive:
            self.alive[k] = alive
            self.feed(ev.PathHealth(k, alive))

    def watch(self) -> None:
        """The driver's periodic look: work too old, ports that are down, completions nobody polls for."""
        p = self.protocol
        if self.plain or p.over or p.status is not Status.PROTECTED:
            return
        journal = self.journal
        if journal.sends:
            self.drain(p.send_pair)
        if p.switching:
            return
        for k in {p.send_pair, p.recv_pair}:
            if not self.world.ports[self.name, k] and self.world.event_seen[self.name, k]:
                self.path_failed(k, "port down", advisory=True)
                return
        if journal.wired > journal.head:
            head, since = self.watch_head
            if head != journal.head:
                self.watch_head = (journal.head, self.clock.now)
            elif self.clock.now - since > GONE_NS and self.alive.get(p.send_pair) is False:
                self.path_failed(p.send_pair, "no completion and no ping", advisory=True)

    # ---- actions out

    def do_close_send(self, _: ev.CloseSend) -> None:
        self.journal.close_send()

    def do_close_recv(self, _: ev.CloseRecv) -> None:
        self.posting = None
        self.journal.close_recv()

    def do_fence(self, action: ev.Fence) -> None:
        self.begin_fence(action.number, action.pairs, action.deadline_ns)

    def begin_fence(self, number: int | None, pairs: tuple[int, ...], deadline_ns: int) -> None:
        """number: of a SWITCH's; None: the end."""
        # [number, deadline, pairs not in ERR yet, pairs that still have to show their flush]
        self.fence = work = [number, deadline_ns, set(pairs), set()]
        for k in pairs:
            self.looks[k] += 1  # what waits for its NIC to be looked at is called off
            self.journal.begin_fence(k)
        for k in pairs:
            if self.nics[k].dead:
                self.fence_erred(work, k)
            else:
                self.nics[k].command(self.fence_erred, work, k)
        self.fence_check()
        self.clock.later(deadline_ns - self.clock.now, self.fence_expired, work)

    def fence_erred(self, work: list[Any], k: int) -> None:
        """ERR is in place on pair k (or its NIC is dead)."""
        if not self.nics[k].dead:
            self.qps[k].to_error()
            self.world.fenced(self.name, k, self.qps[k].life)
        if work is not self.fence:
            return
        work[2].discard(k)
        if self.nics[k].dead:
            self.drain(k)
            self.world.fenced(self.name, k, self.qps[k].life)
        else:
            self.journal.post_marker(k)
            work[3].add(k)
            self.drain(k)
        self.fence_progress(k)

    def fence_progress(self, k: int) -> None:
        work = self.fence
        if work is not None and k in work[3] and self.journal.fence_state(k) == (True, True):
            work[3].discard(k)
        self.fence_check()

    def fence_check(self) -> None:
        work = self.fence
        if work is None or work[2] or work[3]:
            return
        self.fence = None
        if work[0] is None:
            self.ended()
            return
        rx, acked, wired = self.journal.counters()
        lost = any(nic.dead for nic in self.nics)
        unsafe, if_lost = (
            self.journal.unsafe_reason(lost),
            self.journal.unsafe_reason(lost, receipts_lost=True),
        )
        unsafe = self.shown_before_protection() or unsafe
        self.feed(ev.FenceCompleted(work[0], rx, acked, wired, unsafe, lost, if_lost))

    def shown_before_protection(self) -> str | None:
        """The peer's ARM was through, ours was not, and the application has seen its QP fail: that was its end."""
        failed = self.journal.shown_error
        return (
            f"behind {failed}, which came before the QP was protected"
            if failed and not self.statuses
            else None
        )

    def fence_expired(self, work: list[Any]) -> None:
        if work is not self.fence:
            return
        for k in sorted(work[2]):
            if self.nics[k].dead:
                self.fence_erred(work, k)
        if work is self.fence:
            self.world.fence_hung(self, work[3])
        if work is self.fence and work[0] is None:
            # What is in ERR takes nothing any more; the others are waited for.
            for k in sorted(work[3]):
                self.drain(k)
            work[3].clear()
            self.fence_check()
            self.clock.later(100 * MS, self.fence_expired, work)
        elif work is self.fence:
            self.fence = None
            self.feed(ev.FenceHung(work[0], "the NIC does not carry it out"))

    def do_reset(self, action: ev.ResetPair) -> None:
        k = action.pair
        self.looks[k] += 1
        self.drain(k)
        self.journal.forget(k)
        if action.dummy:
            self.nics[k].ask(self._looked, action, self.looks[k])
        else:
            self.give_reset(action)

    def _looked(self, action: ev.ResetPair, number: int) -> None:
        """The NIC was asked where the pair is reached."""
        if number == self.looks[action.pair]:
            self.give_reset(action)

    def give_reset(self, action: ev.ResetPair) -> None:
        k = action.pair
        self.resets[k] += 1
        self.journal.forget(k)  # again: a former RESET may have ended meanwhile
        self.nics[k].command(self._reset_done, action, self.resets[k])

    def _reset_done(self, action: ev.ResetPair, number: int) -> None:
        k = action.pair
        nic = self.nics[k]
        if nic.dead or nic.failing:
            self.feed(ev.PairReset(k, action.arm, error="the NIC fails"))
            return
        qp = self.qps[k]
        qp.send_cq.clear()
        qp.held.clear()
        qp.reset()
        qp.state = "INIT"
        if number != self.resets[k]:
            return  # a newer RESET follows: only its result counts
        self.journal.pairs[k].renew()
        if action.dummy:
            self.journal.post_arm_recv(k)
        self.feed(ev.PairReset(k, action.arm, self.name.encode() * 16, 3))

    def do_connect(self, action: ev.ConnectPair) -> None:
        self.nics[action.pair].command(self._connected, action)

    def _connected(self, action: ev.ConnectPair) -> None:
        k, qp = action.pair, self.qps[action.pair]
        if self.nics[k].dead or self.nics[k].failing:
            self.feed(ev.PairConnected(k, action.arm, action.stage, "the NIC fails"))
            return
        if action.stage is not Stage.RTS:
            if qp.state != "INIT":
                self.feed(ev.PairConnected(k, action.arm, action.stage, f"RTR in {qp.state}"))
                return
            qp.state = "RTR"
            qp.expected = action.remote.psn
        if action.stage is not Stage.RTR:
            if qp.state != "RTR":
                self.feed(ev.PairConnected(k, action.arm, action.stage, f"RTS in {qp.state}"))
                return
            qp.state = "RTS"
            qp.next_psn = action.psn
        self.feed(ev.PairConnected(k, action.arm, action.stage))

    def do_arm_send(self, action: ev.PostArmSend) -> None:
        if self.journal.post_arm_send(action.pair):
            self.events.append(ev.ArmCompletion(action.pair, receive=False, ok=False))

    def do_post_receives(self, action: ev.PostReceives) -> None:
        self.active.add(action.pair)
        if not self.registering(action):
            self.journal.open_recv(action.pair)
            self.events.append(ev.ReceivesPosted(action.number))

    def do_move_receives(self, action: ev.MoveReceives) -> None:
        self.active.add(action.pair)
        if not self.registering(action):
            self.journal.move_recv(action.pair)
            self.events.append(ev.ReceivesPosted(action.number))

    def registering(self, action: ev.PostReceives | ev.MoveReceives) -> bool:
        """Whether the memory of the receives is still being registered there: then they are posted when it is."""
        if action.pair == 0 or not self.registering_ns:
            return False
        self.journal.recv_awaits(action.pair, isinstance(action, ev.MoveReceives))
        self.posting = action
        self.clock.later(self.registering_ns, self._registered, action)
        return True

    def _registered(self, action: ev.PostReceives | ev.MoveReceives) -> None:
        if self.posting is action:
            self.posting = None
            self.journal.open_recv(action.pair)
            self.feed(ev.ReceivesPosted(action.number))

    def refused(self, k: int) -> None:
        """Our NIC had no receive for a message."""
        withheld = self.journal.send_limit is not None and self.journal.recv_pair == k
        if withheld or (self.posting is not None and self.posting.pair == k):
            self.world.too_early.append((self.clock.now, self.name, k))

    def do_trim(self, action: ev.Trim) -> None:
        self.world.trimmed(self.name, self.journal, action.peer_rx)
        self.journal.trim(action.peer_rx)

    def do_open_send(self, action: ev.OpenSend) -> None:
        self.active.add(action.pair)
        self.journal.open_send(action.pair)
        self.wake()

    def do_deliver_errors(self, action: ev.DeliverErrors) -> None:
        self.over = action.reason
        self.end("RETRY_EXC_ERR")

    def end(self, first: str) -> None:
        """The QP has failed for good: errors, when every pair has stopped and is empty."""
        if self.ending is not None:
            return
        self.ending = "WR_FLUSH_ERR" if self.journal.shown_error else first
        self.over = self.over or first
        self.journal.begin_end()
        self.journal.guarded = True
        pairs = [k for k, p in enumerate(self.protocol.pairs) if p.used and not p.fenced]
        if 0 not in pairs and not self.nics[0].dead:
            self.default_works = True
            self.nics[0].command(self._default_is_err)
        self.begin_fence(None, tuple(pairs), self.clock.now + self.protocol.config.fence_deadline_ns)
        self.drain_soon()

    def _default_is_err(self) -> None:
        self.qps[0].to_error()
        self.default_works = False
        if self.fence is None:
            self.ended()

    def ended(self) -> None:
        """All pairs have stopped. While the default QP may still work, what is posted fails here."""
        if self.ending is None or self.app.closed:
            return
        self.world.given_back(self.name)
        self.journal.abort(self.ending, self.default_works)
        self.ending = "WR_FLUSH_ERR"
        if self.default_works:
            self.clock.later(20 * MS, self._ended_again)
        else:
            self.ending = None

    def _ended_again(self) -> None:
        if self.default_works:
            self.ended()

    def do_let_go(self, action: ev.LetGo) -> None:
        self.over = action.reason
        if action.unanswered:  # sooner than the driver, which waits for something to send
            self.end("RETRY_EXC_ERR")
            return
        self.journal.guarded = not self.journal.is_plain

    def do_begin_fence(self, _: ev.BeginFence) -> None:
        how = self.journal.move_begin()
        if how != "wanted":
            self.events.append(ev.FencePosted())
        if how == "idle":
            self.events.append(ev.FenceDone(self.journal.counters()[2]))

    def do_fence_write(self, _: ev.PostFenceWrite) -> None:
        self.journal.post_fence_write()

    def do_cancel_move(self, _: ev.CancelMove) -> None:
        self.journal.move_cancel()

    def do_await_rx(self, action: ev.AwaitRx) -> None:
        self.journal.set_rx_target(action.rx)
        if action.rx is not None:
            self.drain(self.journal.recv_pair)

    def do_send_message(self, action: ev.SendMessage) -> None:
        pairs = range(len(self.qps)) if action.spread else (action.pair,)
        for k in pairs:
            if k < len(self.qps):
                self.world.datagram(self.name, k, action.message)

    def do_set_status(self, action: ev.SetStatus) -> None:
        failed = self.journal.shown_error
        if action.status is Status.PROTECTED and failed:
            self.over = self.over or f"it failed before it was protected: {failed}"
            self.events.append(ev.Quit(self.over))
            action = ev.SetStatus(Status.UNPROTECTED, self.over)
        self.statuses.append(action.status)
        self.was_protected |= action.status is Status.PROTECTED
        split = self.was_protected and not self.journal.is_plain
        self.journal.guarded = action.status is Status.PROTECTED or self.journal.ending or split

    def do_nothing(self, _: ev.Action) -> None:
        pass

    HANDLERS: dict[type, Callable[[Side, Any], None]] = {
        ev.CloseSend: do_close_send,
        ev.CloseRecv: do_close_recv,
        ev.Fence: do_fence,
        ev.ResetPair: do_reset,
        ev.ConnectPair: do_connect,
        ev.PostArmSend: do_arm_send,
        ev.PostReceives: do_post_receives,
        ev.MoveReceives: do_move_receives,
        ev.Trim: do_trim,
        ev.OpenSend: do_open_send,
        ev.DeliverErrors: do_deliver_errors,
        ev.LetGo: do_let_go,
        ev.BeginFence: do_begin_fence,
        ev.PostFenceWrite: do_fence_write,
        ev.CancelMove: do_cancel_move,
        ev.AwaitRx: do_await_rx,
        ev.SendMessage: do_send_message,
        ev.SetStatus: do_set_status,
        ev.StateChanged: do_nothing,
        ev.SwitchStarted: do_nothing,
    }

    # ---- the application's own end

    def close(self) -> None:
        """The application closes its QP."""
        if self.app.closed:
            return
        self.app.closed = True
        if not self.plain:
            self.over = self.over or "closed"
            self.feed(ev.Quit("closed"))
        for qp in self.qps:
            qp.to_error()

    def err(self) -> None:
        """The application moves its QP to ERR, and takes what is left."""
        if self.app.closed:
            return
        if self.plain:
            self.qps[0].to_error()
            return
        self.over = self.over or "moved to ERR"
        self.feed(ev.Quit("the application moved its QP to ERR"))
        self.end("WR_FLUSH_ERR")


class Network:
    """The rails between hosts a and b, their NICs, and what is known about a run for judging it."""

    def __init__(
        self, seed: int, pairs: int = 2, capacity: int = 32, receives: int = 16, plain: bool = False
    ) -> None:
        self.clock = Clock(seed)
        self.pairs = pairs
        self.nics: dict[str, list[Nic]] = {"a": [], "b": []}
        self.links = {(name, k): Link(self.clock) for name in "ab" for k in range(pairs)}
        for k in range(pairs):
            a, b = (Nic(self.clock, name, k, self.links[name, k]) for name in "ab")
            a.peer, b.peer = b, a
            self.nics["a"].append(a)
            self.nics["b"].append(b)
        self.ports = dict.fromkeys(self.links, True)
        self.event_seen = dict.fromkeys(self.links, False)
        self.changed_ns = dict.fromkeys(range(pairs), -STEADY_NS)  # when rail k last came or went
        self.walls: dict[tuple[str, int], int] = dict.fromkeys(self.links, 0)
        self.trace: list[tuple[int, str, ev.Action]] = []
        self.executions: list[tuple[int, str, int, int, Wr, Any]] = []
        self.lost_cqes: set[tuple[str, int, int, Any]] = set()
        self.took_along: set[tuple[str, int]] = set()  # NICs that died with completions
        self.fences: dict[tuple[str, int, int], int] = {}
        self.unseen_flushes: list[tuple[int, str, int]] = []
        self.trims: list[tuple[int, str, int]] = []
        self.ends: dict[str, int] = {}
        self.faults: list[str] = []
        self.broken: str | None = None
        self.one_rail_is_well = False  # at every moment: whatever is posted can be carried
        self.too_early: list[
            tuple[int, str, int]
        ] = []  # messages that came while their receives were being posted
        self.a = Side(self, "a", capacity, receives, plain)
        self.b = Side(self, "b", capacity, receives, plain)
        self.sides = (self.a, self.b)
        config = ProtocolConfig(invariants=INVARIANTS)
        for side in self.sides:
            locals_ = [LocalPair(side.name.encode() * 16, 0, 100 + k, 3) for k in range(pairs)]
            rng = random.Random(self.clock.rng.getrandbits(64))
            side.protocol = PairProtocol(config, locals_, side.name == "a", rng, self.clock.now)
            qp = side.qps[0]
            qp.state, qp.next_psn, qp.expected = "RTS", 0, 0
            side.app.start()
        for side in self.sides:
            if not plain:
                side.execute(side.protocol.start(self.clock.now))
                side.schedule()
        if not plain:
            self.clock.later(20 * MS, self._watch)

    def side(self, name: str) -> Side:
        return self.a if name == "a" else self.b

    def other(self, name: str) -> Side:
        return self.b if name == "a" else self.a

    # ---- what happens, noted for the checkers

    def executed(self, qp: HwQp, packet: Packet, recv_id: Any) -> None:
        if packet.ref is not None:
            self.executions.append((self.clock.now, qp.nic.host, qp.nic.k, qp.life, packet.ref, recv_id))

    def fence_hung(self, side: Side, flushing: set[int]) -> None:
        """The fence's deadline is over, and these pairs have shown no flush."""
        for k in sorted(flushing):
            nic, qp = side.nics[k], side.qps[k]
            since_ns = self.clock.now - self.fences[side.name, k, qp.life]
            if since_ns > MS and not (nic.stalled or nic.holds_cqes or nic.dead):
                self.unseen_flushes.append((self.clock.now, side.name, k))

    def fenced(self, name: str, k: int, life: int) -> None:
        self.fences.setdefault((name, k, life), self.clock.now)

    def given_back(self, name: str) -> None:
        """The application gets the memory of all that is outstanding back."""
        self.ends.setdefault(name, self.clock.now)

    def trimmed(self, name: str, journal: Journal, peer_rx: int) -> None:
        self.trims.append((self.clock.now, name, peer_rx))

    # ---- the control channel

    def datagram(self, name: str, k: int, message: Any) -> None:
        nic = self.nics[name][k]
        if not (nic.dead or nic.stalled):
            nic.out.send(message, self.other(name).message)

    # ---- faults

    def update(self, k: int) -> None:
        """Whether packets pass on rail k follows from ports and walls."""
        ports = self.ports["a", k] and self.ports["b", k]
        self.changed_ns[k] = self.clock.now
        for name in "ab":
            self.links[name, k].up = ports and not self.walls[name, k]
        self.clock.later(150 * MS, self.tell_health, k)

    def passes(self, k: int) -> bool:
        usable = not any(self.nics[name][k].dead or self.nics[name][k].stalled for name in "ab")
        return usable and self.links["a", k].up and self.links["b", k].up

    def tell_health(self, k: int) -> None:
        """What a few unanswered pings have shown by now."""
        for side in self.sides:
            side.health(k, self.passes(k))

    def port(self, name: str, k: int, up: bool, event_ns: int | None) -> None:
        """A port goes down or up; its own host hears of it after event_ns, or never (None)."""
        self.ports[name, k] = up
        self.event_seen[name, k] = False
        self.update(k)
        if event_ns is not None:
            self.clock.later(event_ns, self._port_event, name, k, up)

    def _port_event(self, name: str, k: int, up: bool) -> None:
        if self.ports[name, k] is not up or self.nics[name][k].dead:
            return
        side = self.side(name)
        self.event_seen[name, k] = True
        if up:
            if self.passes(k):
                self.clock.later(10 * MS, self.tell_health, k)
        else:
            side.health(k, False)
            side.path_failed(k, "PORT_ERR", advisory=True)

    def wall(self, name: str, k: int, on: bool) -> None:
        """Packets from `name` on rail k vanish, and nobody says so."""
        self.walls[name, k] = int(on)
        self.update(k)

    def kill(self, name: str, k: int) -> None:
        """DEVICE_FATAL."""
        nic = self.nics[name][k]
        if nic.dead:
            return
        for qp in nic.qps.values():
            # Executed, and nobody will ever know: what the dead NIC had not written yet.
            self.lost_cqes |= {(name, k, qp.life, cqe[1]) for cqe in qp.held if cqe[0] == "recv"}
            if qp.held:
                self.took_along.add((name, k))
        nic.die()
        self.changed_ns[k] = self.clock.now
        self.clock.later(150 * MS, self.tell_health, k)
        side = self.side(name)
        if not side.plain:
            side.feed(ev.NicDead(k))
        else:
            # A program with plain verbs sees the event, and its QP in error.
            qp = side.qps[k]
            for wqe in (*qp.unacked, *qp.unsent):
                qp.send_cq.append(("send", wqe.wr_id, "WR_FLUSH_ERR"))
            for wr_id, _ in qp.rq:
                qp.send_cq.append(("recv", wr_id, "WR_FLUSH_ERR"))
            side.app.wake()

    def stall(self, name: str, k: int, on: bool) -> None:
        """Nothing moves on that NIC, and no completion says so."""
        nic = self.nics[name][k]
        nic.stalled = on
        self.changed_ns[k] = self.clock.now
        if not on:
            for qp in nic.qps.values():
                qp.release()
                if qp.unacked and qp.state == "RTS":
                    qp._start_timer()
        self.clock.later(150 * MS, self.tell_health, k)

    def hold_cqes(self, name: str, k: int, on: bool) -> None:
        """The NIC acknowledges, and has not written the completions yet."""
        nic = self.nics[name][k]
        nic.holds_cqes = on
        if not on:
            for qp in nic.qps.values():
                qp.release()

    def _watch(self) -> None:
        for side in self.sides:
            side.watch()
        self.clock.later(20 * MS, self._watch)
