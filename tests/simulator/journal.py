# SPDX-License-Identifier: BSD-3-Clause
"""The data path in plain Python: what `shiftverbs/_core` promises about a QP's journal and its completions.

Names and rules are those of `_core.pyi` and `native/core/journal.pxd`; nothing of the C code is used. What the
application sees is `WC`s in `Cq.buffer`; what the driver sees is events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from simulator.rnic import TWO_SIDED, HwQp, Wqe

APP, MARKER, ARM, FENCE = "APP", "MARKER", "ARM", "FENCE"
PATH_ERRORS = frozenset({"RETRY_EXC_ERR", "WR_FLUSH_ERR"})
GONE = frozenset({5, 19, 6})  # EIO, ENODEV, ENXIO: what a device that is not there any more answers
# A receive that is withheld: its memory is still being registered.
NO_KEY = -1


class Wr:
    """A send WR of the application. buf: its memory, one number; data: what it held when it was posted.

    shared: a READ and a WR before it have the same memory.
    """

    __slots__ = (
        "buf",
        "data",
        "fence",
        "index",
        "inline",
        "opcode",
        "posted_ns",
        "remote",
        "shared",
        "side",
        "signaled",
        "wr_id",
    )

    def __init__(
        self,
        side: str,
        index: int,
        opcode: str,
        remote: int,
        data: int,
        signaled: bool,
        fence: bool,
        inline: bool,
    ) -> None:
        self.side = side
        self.index = index
        self.opcode = opcode
        self.remote = remote
        self.data = data
        self.buf: list[Any] = [data]
        self.signaled = signaled
        self.fence = fence
        self.inline = inline
        self.shared = False
        self.wr_id = index
        self.posted_ns = 0

    def __repr__(self) -> str:
        return f"{self.side}{self.index} {self.opcode}"


class Record:
    """One outstanding send WR in the journal."""

    __slots__ = ("buf", "hw_signaled", "proven", "two_sided", "wr")

    def __init__(self, wr: Wr, buf: list[Any], two_sided: int, hw_signaled: bool) -> None:
        self.wr = wr
        self.buf = buf
        self.two_sided = two_sided
        self.hw_signaled = hw_signaled
        self.proven = False


class RecvRecord:
    """One outstanding receive."""

    __slots__ = ("buf", "done", "registering", "sends_before", "wr_id")

    def __init__(self, wr_id: int, buf: list[Any], sends_before: int = 0, registering: bool = False) -> None:
        self.wr_id = wr_id
        self.buf = buf
        self.done = False
        self.sends_before = sends_before
        self.registering = registering  # no backup NIC knows its memory yet


class PairState:
    """What the data path knows of one pair."""

    def __init__(self, qp: HwQp) -> None:
        self.qp = qp
        self.generation = -1
        self.fence_again = False
        self.renew()

    def renew(self) -> None:
        self.generation += 1
        self.fencing = self.fence_again
        self.sq_fenced = self.rq_fenced = self.fence_again = False
        self.forgotten = self.recv_stale = self.error_raised = False
        self.sq_error_seen = self.rq_error_seen = False
        self.sending = False  # sends were handed over in this life
        self.own_fence = False  # a fence WRITE of ours is on its way
        self.rq_out = 0
        self.recv_upto = 0
        self.first_status: str | None = None
        self.failed_wr: int | None = None


class Journal:
    """One application QP over its pairs. emit(kind, k, value) tells the driver; deliver(wc) the application."""

    def __init__(
        self,
        qps: list[HwQp],
        capacity: int,
        recv_capacity: int,
        emit: Callable[[str, int, Any], None],
        deliver: Callable[[tuple[Any, ...]], None],
    ) -> None:
        self.pairs = [PairState(qp) for qp in qps]
        self.pairs[0].sending = True
        self.capacity = capacity
        self.recv_capacity = recv_capacity
        self.emit = emit
        self.deliver = deliver
        self.sends: deque[Record] = deque()
        self.head = self.wired = self.tail = 0
        self.proven_end = self.shown_end = 0
        self.posted_ts = self.wired_ts = self.acked_ts = 0
        self.last_signaled = 0
        self.recvs: deque[RecvRecord] = deque()
        self.rhead = self.rwired = self.rtail = 0
        self.rx = 0
        self.rx_target: int | None = None
        self.send_pair = self.recv_pair = 0
        self.send_open = self.recv_open = True
        self._guarded = False
        self.ending = False
        self.shown_error: str | None = None  # the first that the application was shown with nothing withheld
        self.withheld_sends = self.withheld_recvs = 0  # up to here errors were withheld
        self.fence_seq: int | None = None
        self.fence_wanted = False
        self.fence_upto = 0  # where what is posted later is for the next pair: a fence waits for room there
        self.own_fence = False  # our own WRITE is to be the fence, once nothing waits ahead of it
        self.blocked = False
        self.crossed = 0  # sends below it were handed over when something last came over another NIC
        self.answered = 0  # crossed, as a full queue found it: these take no room
        self.send_limit: int | None = (
            None  # sends from this one on were posted behind a receive that is withheld
        )
        self.look: Callable[[int], None] = lambda k: None  # takes what the CQs of pair k hold

    def rec(self, seq: int) -> Record:
        return self.sends[seq - self.head]

    @property
    def guarded(self) -> bool:
        return self._guarded

    @guarded.setter
    def guarded(self, value: bool) -> None:
        self._guarded = value
        if not value:
            self.give_withheld()

    # ---- the application

    def post_send(self, wr: Wr) -> int:
        """0; ENOMEM (12) with a full journal; what the hardware of the send pair refuses this WR with."""
        if not self.has_room():
            self.look(self.send_pair)
        if not self.has_room() and not self.discount_answered():
            return 12
        if wr.opcode in TWO_SIDED:
            self.posted_ts += 1
        signaled = wr.signaled
        if not signaled and self.tail + 1 - self.last_signaled >= max(1, self.capacity // 2):
            signaled = True
        fence = self.fence_wanted and self.send_open and self.wired >= self.fence_upto
        if fence:
            signaled = True
        if signaled:
            self.last_signaled = self.tail + 1
        # The application may reuse inline memory at once: the journal keeps the bytes.
        self.sends.append(Record(wr, self.keep(wr), self.posted_ts, signaled))
        self.tail += 1
        if fence:
            self.fence_upto = self.tail
        rc = self.hand_over()
        if rc and self.wired < self.tail - 1:
            self.pump()  # one that waited longer: this one waits behind it
        elif rc and self.refused_by_path(self.send_pair, rc):
            self.post_refused(rc)
        elif rc:
            self.cut()
            return rc
        if self.fence_wanted:
            self.fence_last()
        return 0

    def fence_last(self) -> None:
        """A fence is wanted: the last that can be handed over is it, else our own WRITE that had to wait."""
        if not self.send_open or self.wired != self.fence_end():
            return
        if self.wired > self.head and self.rec(self.wired - 1).hw_signaled:
            self.start_fence(self.wired - 1)
            self.emit("FENCE_POSTED", self.send_pair, 0)
        elif self.own_fence:
            self.post_own_fence()

    def post_own_fence(self) -> None:
        k = self.send_pair
        wqe = Wqe(self.hw_id(False, FENCE, k, self.wired), "WRITE", [0], -1, True, False, None)
        if not self.pairs[k].own_fence and self.pairs[k].qp.post_send(wqe) == 0:
            self.pairs[k].own_fence = True
            self.start_fence(self.wired)
            self.emit("FENCE_POSTED", k, 0)

    def has_room(self) -> bool:
        return self.tail - max(self.head, self.answered) < self.capacity

    def discount_answered(self) -> bool:
        """While the directions use different NICs, an answer may overtake the ACK: what it may answer takes no room."""
        if self.send_pair != self.recv_pair:
            self.crossed = max(self.crossed, self.wired)
        self.answered = max(self.answered, self.crossed)
        return self.has_room()

    def cut(self) -> None:
        """Take the newest record out again: the hardware refused it."""
        self.tail -= 1
        if self.sends.pop().wr.opcode in TWO_SIDED:
            self.posted_ts -= 1
        if self.last_signaled > self.tail:
            self.last_signaled = self.head
        if self.fence_upto > self.tail:
            self.fence_upto = 0

    def refused_by_path(self, k: int, rc: int) -> bool:
        """Whether a refusal on pair k is no fault of what was posted."""
        pair = self.pairs[k]
        if not self.guarded:
            return False
        if rc not in GONE:
            self.look(k)
        return rc in GONE or (self.guarded and pair.first_status is not None)

    def post_refused(self, rc: int) -> None:
        pair = self.pairs[self.send_pair]
        self.send_open = False
        if pair.failed_wr is None:
            pair.failed_wr = self.wired
        self.emit("POST_FAILED", self.send_pair, rc)

    def keep(self, wr: Wr) -> list[Any]:
        """The memory that the hardware will read."""
        return [wr.buf[0]] if wr.inline else wr.buf

    def post_recv(self, wr_id: int, buf: list[Any], registering: bool = False) -> int:
        """As post_send. registering: its memory is new, and no backup NIC knows it yet."""
        if self.rtail - self.rhead >= self.recv_capacity:
            return 12
        self.recvs.append(RecvRecord(wr_id, buf, self.tail, registering))
        self.rtail += 1
        rc = self.pump_recv() if self.recv_open else 0
        if rc == NO_KEY:
            self.recv_open = False
            self.send_limit = self.recvs[self.rwired - self.rhead].sends_before
        elif rc and (self.rwired < self.rtail - 1 or self.refused_by_path(self.recv_pair, rc)):
            self.recv_open = False
            self.emit("POST_FAILED", self.recv_pair, rc)
        elif rc:
            self.recvs.pop()
            self.rtail -= 1
            return rc
        return 0

    # ---- handing over

    def hw_id(self, recv: bool, kind: str, k: int, seq: int) -> tuple[bool, str, int, int]:
        return (recv, kind, self.pairs[k].generation, seq)

    def pump(self) -> None:
        """Hand over what waits; what is refused is told when all ahead of it has completed."""
        rc = self.hand_over()
        if not rc and self.fence_wanted:
            self.fence_last()
        if rc:
            ahead = (self.rec(seq) for seq in range(self.head, self.wired))
            if rc not in GONE and any(rec.hw_signaled and not rec.proven for rec in ahead):
                self.blocked = True
            else:
                self.post_refused(rc)

    def hand_over(self) -> int:
        """Hand over [wired, tail) to the hardware of the send pair. 0, or what it refused the WR at wired with."""
        self.blocked = False
        k = self.send_pair
        end = self.send_end()
        while self.send_open and self.wired < end:
            if self.wired - self.head >= self.capacity:
                self.blocked = True
                return 0
            rec = self.rec(self.wired)
            if not rec.proven:
                wr = rec.wr
                wqe = Wqe(
                    self.hw_id(False, APP, k, self.wired),
                    wr.opcode,
                    rec.buf,
                    wr.remote,
                    rec.hw_signaled,
                    wr.fence,
                    wr,
                )
                rc = self.pairs[k].qp.post_send(wqe)
                if rc:
                    return rc
            self.wired += 1
            self.wired_ts = max(self.wired_ts, rec.two_sided)
        return 0

    def send_end(self) -> int:
        """How far sends may be handed over: what is behind a withheld receive may tell the peer of that."""
        end = self.tail if self.send_limit is None else min(self.tail, self.send_limit)
        return min(end, self.fence_upto) if self.fence_wanted and self.wired < self.fence_upto else end

    def registered(self) -> None:
        """The backup NICs know all memory of receives now."""
        for rec in self.recvs:
            rec.registering = False
        if self.send_limit is not None:
            self.open_recv(self.recv_pair)

    def pump_recv(self) -> int:
        """Hand over the receives that the receive pair does not have yet. 0, or what it refused one with."""
        k = self.recv_pair
        pair = self.pairs[k]
        pair.recv_upto = max(pair.recv_upto, self.rhead)
        self.rwired = pair.recv_upto
        while self.rwired < self.rtail:
            rec = self.recvs[self.rwired - self.rhead]
            if not rec.done:
                if k and rec.registering:
                    return NO_KEY
                rc = pair.qp.post_recv(self.hw_id(True, APP, k, self.rwired), rec.buf)
                if rc:
                    return rc
                pair.rq_out += 1
            self.rwired += 1
            pair.recv_upto = self.rwired
        return 0

    # ---- completions

    def dispatch(self, k: int, cqe: tuple[Any, ...]) -> None:
        """Take one completion of pair k."""
        queue, (recv, kind, generation, seq), status = cqe
        pair = self.pairs[k]
        if generation != pair.generation:
            return
        if pair.forgotten:
            if status != "SUCCESS":  # it means nothing, but that the QP is in ERR
                self.fenced(k, recv)
            return
        if recv and pair.rq_out:
            pair.rq_out -= 1
        if kind != APP:
            self.own_wc(k, kind, recv, seq, status)
        elif recv:
            self.recv_wc(k, seq, status)
        else:
            self.send_wc(k, seq, status)

    def own_wc(self, k: int, kind: str, recv: bool, seq: int, status: str) -> None:
        pair = self.pairs[k]
        if kind == ARM:
            self.emit("ARM_WC", k, (recv, status == "SUCCESS"))
        elif kind == FENCE:
            pair.own_fence = False
        if status != "SUCCESS":
            if pair.fencing:
                self.note_error(k, recv, status, kind, seq)
                self.fenced(k, recv)
            elif kind == FENCE and self.guarded:
                self.note_error(k, recv, status, kind, seq)
                self.raise_error(k, status)
        elif kind == FENCE and seq <= self.wired:
            self.retire_below(seq)
            self.after_retire()
            if self.fence_seq == seq == self.wired:  # else a WR of the application's is the fence
                self.fence_seq = None
                self.emit("FENCE_DONE", k, 0)
            if self.fence_wanted:
                self.fence_last()

    def raise_error(self, k: int, status: str) -> None:
        if not self.pairs[k].error_raised:
            self.pairs[k].error_raised = True
            self.emit("ERROR", k, status)

    def note_error(self, k: int, recv: bool, status: str, kind: str, seq: int) -> None:
        pair = self.pairs[k]
        if recv:
            pair.rq_error_seen = True
        else:
            if not pair.sq_error_seen and kind == APP:
                pair.failed_wr = seq
            if not pair.sq_error_seen and kind != ARM and k == self.send_pair and pair.sending:
                self.sends_shown(min(seq, self.wired))
            pair.sq_error_seen = True
        if pair.first_status in (None, "WR_FLUSH_ERR"):
            pair.first_status = status

    def sends_shown(self, end: int) -> None:
        """A NIC's first error says that what it had before is complete. Messages: the peer may have lost receipts."""
        for seq in range(self.head, end):
            self.rec(seq).proven |= self.rec(seq).wr.opcode not in TWO_SIDED
        self.shown_end = max(self.shown_end, end)

    def withhold(self, k: int, recv: bool, status: str, seq: int) -> bool:
        pair = self.pairs[k]
        before = pair.first_status or "WR_FLUSH_ERR"
        self.note_error(k, recv, status, APP, seq)
        if pair.fencing or self.ending:
            self.fenced(k, recv)
            return True
        if not self.guarded:
            self.shown_error = self.shown_error or status
            if recv:
                self.abort_recvs(min(seq, self.withheld_recvs))
            else:
                self.abort_sends(min(seq, self.withheld_sends), before)
            return False
        if recv and self.rhead <= seq < self.rwired and not pair.recv_stale:
            self.withheld_recvs = seq + 1
        elif not recv and self.head <= seq < self.wired:
            self.withheld_sends = seq + 1
        self.raise_error(k, status)
        return True

    def give_withheld(self) -> None:
        """Nothing is withheld any more: the errors that were come first. Where it is not plain, the driver ends it."""
        status = self.pairs[0].first_status
        if self.ending or not self.is_plain or status is None:
            return
        if self.head < self.withheld_sends or self.rhead < self.withheld_recvs:
            self.shown_error = self.shown_error or status
        self.abort_sends(self.withheld_sends, status)
        self.abort_recvs(self.withheld_recvs)

    def fenced(self, k: int, recv: bool) -> None:
        pair = self.pairs[k]
        if not pair.fencing:
            return
        if recv and not pair.rq_fenced:
            pair.rq_fenced = True
            self.emit("RQ_FENCED", k, 0)
        elif not recv and not pair.sq_fenced:
            pair.sq_fenced = True
            self.emit("SQ_FENCED", k, 0)

    def send_wc(self, k: int, seq: int, status: str) -> None:
        if status != "SUCCESS" and self.withhold(k, False, status, seq):
            return
        if not self.head <= seq < self.wired:
            return
        self.retire_below(seq)
        rec = self.sends.popleft()
        self.head = seq + 1
        if status != "SUCCESS":
            self.deliver(("send", rec.wr, status))
            while self.head < self.proven_end:  # no success behind an error: RC shows none
                self.deliver(("send", self.sends.popleft().wr, "WR_FLUSH_ERR"))
                self.head += 1
        else:
            self.acked_ts = max(self.acked_ts, rec.two_sided)
            if rec.wr.signaled:
                self.deliver(("send", rec.wr, "SUCCESS"))
        self.after_retire()

    def recv_wc(self, k: int, seq: int, status: str) -> None:
        pair = self.pairs[k]
        if status != "SUCCESS" and self.withhold(k, True, status, seq):
            return
        if pair.recv_stale or not self.rhead <= seq < self.rwired:
            return
        if self.take_recv(seq, status) and k != self.send_pair:
            self.crossed = max(self.crossed, self.wired)

    def take_recv(self, seq: int, status: str) -> bool:
        """Whether a message came with it."""
        rec = self.recvs[seq - self.rhead]
        if rec.done:
            return False
        rec.done = True
        while self.recvs and self.recvs[0].done:
            self.recvs.popleft()
            self.rhead += 1
        self.rwired = max(self.rwired, self.rhead)
        self.deliver(("recv", rec, status))
        if status == "SUCCESS":
            self.rx += 1
            if self.rx_target is not None and self.rx >= self.rx_target:
                self.rx_target = None
                self.emit("RX_REACHED", self.recv_pair, self.rx)
        return status == "SUCCESS"

    def retire_below(self, seq: int) -> None:
        """RC completes in order: what lies before `seq` is complete."""
        while self.head < seq:
            rec = self.sends.popleft()
            self.head += 1
            if rec.wr.signaled:
                self.deliver(("send", rec.wr, "SUCCESS"))
            self.acked_ts = max(self.acked_ts, rec.two_sided)

    def after_retire(self) -> None:
        while self.head < self.proven_end and self.sends and self.sends[0].proven:
            rec = self.sends.popleft()
            self.head += 1
            if rec.wr.signaled:
                self.deliver(("send", rec.wr, "SUCCESS"))
        self.wired = max(self.wired, self.head)
        if self.fence_seq is not None and self.head > self.fence_seq:
            self.fence_seq = None
            self.emit("FENCE_DONE", self.send_pair, 0)
        if self.blocked:
            self.pump()

    # ---- the driver's primitives

    def counters(self) -> tuple[int, int, int]:
        return self.rx, self.acked_ts, self.wired_ts

    def close_send(self) -> None:
        self.send_open = False

    def open_send(self, k: int) -> None:
        self.pairs[k].sending = True
        self.send_pair = k
        self.send_open = True
        self.pump()

    def open_recv(self, k: int) -> None:
        self.pairs[k].recv_stale = False
        if self.recv_pair != self.send_pair:
            self.crossed = max(self.crossed, self.wired)
        self.recv_pair = k
        self.recv_open = self.pump_recv() == 0
        if self.send_limit is not None:
            self.send_limit = None
            self.pump()

    def close_recv(self) -> None:
        self.recv_open = False
        self.send_limit = None

    def recv_awaits(self, k: int, move: bool) -> None:
        """As open_recv or move_recv, where the memory of the receives is not registered on NIC k yet."""
        if move and k != self.recv_pair:
            self.pairs[self.recv_pair].recv_stale = True
        self.pairs[k].recv_stale = False
        if self.recv_pair != self.send_pair:
            self.crossed = max(self.crossed, self.wired)
        self.recv_pair = k
        self.recv_open = False

    def forget(self, k: int) -> None:
        """A RESET is about to be given: whatever still comes from pair k is stale."""
        self.pairs[k].forgotten = True
        self.pairs[k].fence_again = False

    def begin_fence(self, k: int) -> None:
        pair = self.pairs[k]
        pair.fence_again = pair.forgotten  # where a RESET is under way, the fence outlives it
        if pair.fencing:
            return
        pair.fencing = True
        pair.sq_fenced = pair.rq_fenced = False
        if pair.sq_error_seen:
            self.fenced(k, False)
        if pair.rq_error_seen or pair.rq_out == 0:
            self.fenced(k, True)

    def fence_state(self, k: int) -> tuple[bool, bool]:
        pair = self.pairs[k]
        if pair.fencing and not pair.rq_fenced and pair.rq_out == 0:
            self.fenced(k, True)
        return pair.sq_fenced, pair.rq_fenced

    def post_marker(self, k: int) -> None:
        """Behind everything on a QP in ERR: an acknowledged unsignaled tail never flushes."""
        pair = self.pairs[k]
        pair.qp.post_send(Wqe(self.hw_id(False, MARKER, k, self.tail), "SEND", [0], 0, True, False, None))
        if pair.qp.post_recv(self.hw_id(True, MARKER, k, self.rtail), [0]) == 0:
            pair.rq_out += 1

    def post_arm_recv(self, k: int) -> int:
        rc = self.pairs[k].qp.post_recv(self.hw_id(True, ARM, k, self.rtail), [0])
        self.pairs[k].rq_out += rc == 0
        return rc

    def post_arm_send(self, k: int) -> int:
        return self.pairs[k].qp.post_send(
            Wqe(self.hw_id(False, ARM, k, self.tail), "SEND", [0], 0, True, False, None)
        )

    def unsafe_reason(self, cqes_lost: bool = False, receipts_lost: bool = False) -> str | None:
        """What hardware has, is not proven, and must not run twice. …_lost: by a dead NIC of ours, of the peer's."""
        handed = list(enumerate(self.sends, self.head))[: self.wired - self.head]
        given = [rec for _, rec in handed if not rec.proven]
        # A message that was complete is sent again where its receipt is lost, and with it what is behind it.
        again = [
            rec for seq, rec in handed if not rec.proven or (receipts_lost and self.is_behind_a_message(seq))
        ]
        if any(rec.wr.opcode == "FADD" for rec in again):
            return "an atomic is outstanding"
        return self.overwritten(again, self.owing(again, cqes_lost), receipts_lost) or self.behind_fence(
            given, self.owing(given, cqes_lost), receipts_lost
        )

    def is_behind_a_message(self, seq: int) -> bool:
        """Whether WR seq was complete, and a message before it, which no counter proves."""
        before = (self.rec(i) for i in range(self.head, min(seq, self.shown_end)))
        return seq < self.shown_end and any(rec.wr.opcode in TWO_SIDED and not rec.proven for rec in before)

    def owing(self, given: list[Record], cqes_lost: bool) -> list[bool]:
        """What was to show a completion and has not is not complete, unless the NIC took it along."""
        return [rec.hw_signaled and not cqes_lost for rec in given]

    def overwritten(self, given: list[Record], owes: list[bool], receipts_lost: bool) -> str | None:
        """The bytes of one WR lie where a later READ may have landed."""
        sent: list[Record] = []
        for rec, owing in zip(given, owes, strict=True):
            if rec.wr.opcode == "READ":
                for other in sent:
                    if other.buf is rec.buf:
                        return f"{other.wr} would be sent again from where {rec.wr} landed"
            elif rec.wr.opcode in TWO_SIDED and not receipts_lost:
                sent = []  # executed it proves what is before; not executed nothing behind it was
            else:
                sent.append(rec)
            if owing:
                break  # nothing behind it was answered
        return None

    def behind_fence(self, given: list[Record], owes: list[bool], receipts_lost: bool) -> str | None:
        """A READ that may be complete, a fence that waited for it, a WRITE there or behind."""
        before: Record | None = None
        held: Record | None = None
        incomplete = False
        for i, rec in enumerate(given):
            if rec.wr.fence:
                if incomplete:
                    break
                before, held = None, held or before
            if rec.wr.opcode == "READ":
                if any(owes[: i + 1]):
                    incomplete = True
                else:
                    before = before or rec
            elif rec.wr.opcode in TWO_SIDED and not receipts_lost:
                held = None
            elif held is not None and rec.wr.opcode in ("WRITE", "WRITE_IMM"):
                return f"{held.wr} would be repeated behind the fenced {rec.wr}"
        return None

    def trim(self, peer_rx: int) -> None:
        """Everything up to the peer_rx-th two-sided WR is executed; READs among them are replayed all the same."""
        if not self.acked_ts <= peer_rx <= self.wired_ts:
            raise ValueError(
                f"peer has received {peer_rx}: {self.acked_ts} acknowledged, {self.wired_ts} sent"
            )
        end = self.head
        for i in range(self.tail - self.head):
            rec = self.sends[i]
            if rec.two_sided > peer_rx:
                break
            if rec.wr.opcode in TWO_SIDED:
                end = self.head + i + 1
        end = max(end, self.proven_end, self.shown_end)
        first = end
        # What carries FENCE and was executed had waited for the responses of all READs before it.
        fence = max((seq for seq in range(self.head, end) if self.rec(seq).wr.fence), default=-1)
        lost = next(
            (seq for seq in range(self.head, self.shown_end) if self.is_lost(self.rec(seq), peer_rx)), end
        )
        for seq in range(self.head, end):
            rec = self.rec(seq)
            if self.is_lost(rec, peer_rx):
                first = min(first, seq)
            elif self.is_covered(seq, lost):
                rec.proven = False  # what is sent again before it would cover its data
                first = min(first, seq)
            elif self.is_proven(rec) or seq < fence or seq < self.shown_end:
                rec.proven = True
            else:
                rec.hw_signaled = True
                first = min(first, seq)
        self.proven_end = end
        self.crossed = max(self.crossed, end)
        self.shown_end = min(self.shown_end, lost)
        self.wired = first
        self.wired_ts = self.acked_ts = peer_rx
        self.withheld_sends = self.withheld_recvs = 0
        self.fence_seq = None
        self.fence_wanted = False
        self.blocked = False
        self.after_retire()

    def is_lost(self, rec: Record, peer_rx: int) -> bool:
        """Whether a message that was complete was acknowledged by a NIC that died before it was received."""
        return rec.wr.opcode in TWO_SIDED and rec.two_sided > peer_rx

    def is_covered(self, seq: int, lost: int) -> bool:
        """Whether a message that is sent again might cover the data of a WRITE behind it."""
        return lost < seq < self.shown_end and self.rec(seq).wr.opcode == "WRITE"

    def is_proven(self, rec: Record) -> bool:
        """The counter proves the request, not the response."""
        return rec.wr.opcode not in ("READ", "FADD")

    @property
    def is_plain(self) -> bool:
        """Whether all of it is at home and open."""
        home = self.send_pair == 0 and self.recv_pair == 0 and self.send_open and self.recv_open
        return home and not self.pairs[0].fencing

    def begin_end(self) -> None:
        """It has failed for good: nothing is handed over and no error shown until abort()."""
        self.ending = True
        self.send_open = self.recv_open = False
        self.send_limit = None
        self.fence_seq = None
        self.fence_wanted = False
        self.rx_target = None

    def abort(self, status: str, still_ending: bool = False) -> None:
        """Error WCs for everything outstanding; the application has its default QP back, bare."""
        self.abort_sends(self.tail, status)
        self.abort_recvs(self.rtail)
        if still_ending:
            return
        self._guarded = self.ending = False
        self.fence_seq = None
        self.fence_wanted = False
        self.blocked = False
        self.rx_target = None
        self.send_pair = self.recv_pair = 0
        self.send_open = self.recv_open = True
        for k, pair in enumerate(self.pairs):
            pair.forgotten = k != 0
            pair.fence_again = False
        self.pairs[0].fencing = self.pairs[0].recv_stale = False
        self.pairs[0].recv_upto = self.rtail

    def abort_sends(self, end: int, status: str) -> None:
        """Error WCs for those below end: the first has status, the rest are flushed."""
        failed = False
        while self.head < end:
            rec = self.sends.popleft()
            self.head += 1
            if (
                rec.proven or self.head <= self.shown_end
            ) and not failed:  # no success behind an error: RC shows none
                if rec.wr.signaled:
                    self.deliver(("send", rec.wr, "SUCCESS"))
            else:
                self.deliver(("send", rec.wr, status))
                status = "WR_FLUSH_ERR"
                failed = True
        self.wired = max(self.wired, self.head)
        self.proven_end = max(self.proven_end, self.head)

    def abort_recvs(self, end: int) -> None:
        while self.rhead < end:
            recv = self.recvs.popleft()
            self.rhead += 1
            if not recv.done:
                self.deliver(("recv", recv, "WR_FLUSH_ERR"))
        self.rwired = max(self.rwired, self.rhead)

    # ---- MOVE

    def start_fence(self, seq: int) -> None:
        self.fence_wanted = False
        self.fence_seq = seq
        self.send_open = False

    def move_begin(self) -> str:
        self.fence_seq = None
        self.fence_wanted = self.own_fence = False
        self.fence_upto = 0
        end = self.fence_end()
        if end == self.head:
            self.send_open = False
            return "idle"
        if self.wired == end and self.rec(end - 1).hw_signaled:
            self.start_fence(end - 1)
            return "posted"
        self.fence_wanted = True
        if self.blocked:
            self.rec(end - 1).hw_signaled = True
            self.last_signaled = self.fence_upto = end
        return "wanted"

    def fence_end(self) -> int:
        """Where a MOVE may cut: what is withheld behind a receive is for the next pair."""
        withheld = self.send_limit is not None and self.send_limit <= self.wired < self.tail
        if withheld:
            return self.wired
        return self.fence_upto if self.fence_wanted and self.wired <= self.fence_upto else self.tail

    def post_fence_write(self) -> None:
        self.pump()
        if not self.fence_wanted:
            return
        if self.wired != self.fence_end() or self.pairs[self.send_pair].own_fence:
            self.own_fence = True
        else:
            self.post_own_fence()

    def move_cancel(self) -> None:
        self.fence_seq = None
        self.fence_wanted = False
        self.send_open = True
        self.pump()

    def set_rx_target(self, n: int | None) -> None:
        self.rx_target = None
        if n is None:
            return
        if self.rx >= n:
            self.emit("RX_REACHED", self.recv_pair, self.rx)
        else:
            self.rx_target = n

    def move_recv(self, k: int) -> None:
        if k != self.recv_pair:
            self.pairs[self.recv_pair].recv_stale = True
        self.open_recv(k)
