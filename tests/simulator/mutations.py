# SPDX-License-Identifier: BSD-3-Clause
"""Bugs to put in on purpose: each must be found by the checkers, or they prove nothing.

These patch the journal's model or the driver's; those of the protocol itself, and what a mutation is, are in
protocol_mutations.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from simulator.hosts import Side
from simulator.journal import Journal, PairState
from simulator.protocol_mutations import MUTATIONS, mutation
from simulator.rnic import TWO_SIDED

from shiftverbs.protocol import events as ev

__all__ = ["MUTATIONS"]


@contextlib.contextmanager
def handler(action: type, replacement: Callable[[Side, Any], None]) -> Iterator[None]:
    with mock.patch.dict(Side.HANDLERS, {action: replacement}):
        yield


@mutation("the peer of a failure fences too: late packets must not consume receives")
def skip_the_peers_fence() -> Iterator[None]:
    original = Side.do_fence

    def fence(side: Side, action: ev.Fence) -> None:
        if side.name == "b":
            rx, acked, wired = side.journal.counters()
            side.events.append(
                ev.FenceCompleted(action.number, rx, acked, wired, side.journal.unsafe_reason())
            )
        else:
            original(side, action)

    with handler(ev.Fence, fence):
        yield


@mutation("rx is final only when both queues are drained")
def read_the_counter_before_draining() -> Iterator[None]:
    original = Side.do_fence

    def fence(side: Side, action: ev.Fence) -> None:
        side.early = side.journal.counters()  # type: ignore[attr-defined]
        original(side, action)

    feed = Side.feed

    def early(side: Side, event: ev.Event) -> None:
        if isinstance(event, ev.FenceCompleted):
            rx, acked, wired = side.early  # type: ignore[attr-defined]
            event = replace(event, rx=rx, acked=acked, wired=wired)
        feed(side, event)

    with handler(ev.Fence, fence), mock.patch.object(Side, "feed", early):
        yield


@mutation("what the peer received is not sent again")
def do_not_trim() -> Iterator[None]:
    def trim(journal: Journal, peer_rx: int) -> None:
        journal.wired = journal.head
        journal.wired_ts = journal.acked_ts

    with mock.patch.object(Journal, "trim", trim):
        yield


@mutation("what the peer did not receive is sent again")
def trim_one_too_many() -> Iterator[None]:
    original = Journal.trim

    def trim(journal: Journal, peer_rx: int) -> None:
        original(journal, min(peer_rx + 1, journal.wired_ts))

    with mock.patch.object(Journal, "trim", trim):
        yield


@mutation("a READ is never proven by the counter")
def prove_a_read_by_the_counter() -> Iterator[None]:
    with mock.patch.object(Journal, "is_proven", lambda journal, rec: True):
        yield


@mutation("MOVED is answered when the last message was polled, not before")
def moved_before_the_last_message() -> Iterator[None]:
    def await_rx(side: Side, action: ev.AwaitRx) -> None:
        if action.rx is not None:
            side.events.append(ev.RxReached())

    with handler(ev.AwaitRx, await_rx):
        yield


@mutation("what MOVE withheld is still there after a second failure")
def lose_the_withheld_queue() -> Iterator[None]:
    original = Journal.close_send

    def close(journal: Journal) -> None:
        withheld = journal.fence_seq is not None and not journal.send_open
        original(journal)
        while withheld and journal.tail > journal.wired:
            journal.sends.pop()
            journal.tail -= 1
        journal.posted_ts = (
            journal.sends[-1].two_sided if journal.sends else max(journal.acked_ts, journal.wired_ts)
        )

    with mock.patch.object(Journal, "close_send", close):
        yield


@mutation("a trimmed WR completes once")
def complete_a_trimmed_wr_twice() -> Iterator[None]:
    original = Journal.trim

    def trim(journal: Journal, peer_rx: int) -> None:
        before = list(journal.sends)
        original(journal, peer_rx)
        for rec in before:
            if rec.proven and rec.wr.signaled:
                journal.deliver(("send", rec.wr, "SUCCESS"))

    with mock.patch.object(Journal, "trim", trim):
        yield


@mutation("a trimmed WR completes at all")
def swallow_completions_of_trimmed_wrs() -> Iterator[None]:
    original = Journal.trim

    def trim(journal: Journal, peer_rx: int) -> None:
        deliver, journal.deliver = journal.deliver, lambda wc: None
        original(journal, peer_rx)
        journal.deliver = deliver

    with mock.patch.object(Journal, "trim", trim):
        yield


@mutation("inline bytes are the journal's own")
def forget_inline_copies() -> Iterator[None]:
    with mock.patch.object(Journal, "keep", lambda journal, wr: wr.buf):
        yield


@mutation("completions taken ahead of the application wait for it")
def drop_the_wc_buffer() -> Iterator[None]:
    original = Side.do_open_send

    def open_send(side: Side, action: ev.OpenSend) -> None:
        side.app.inbox.clear()
        original(side, action)

    with handler(ev.OpenSend, open_send):
        yield


@mutation("READY is said after the receives are posted")
def forget_the_outstanding_receives() -> Iterator[None]:
    def post_receives(side: Side, action: ev.PostReceives) -> None:
        side.active.add(action.pair)
        side.journal.pairs[action.pair].recv_upto = side.journal.rtail
        side.journal.open_recv(action.pair)

    with handler(ev.PostReceives, post_receives):
        yield


@mutation("READY and MOVED wait for memory that is still being registered")
def say_ready_while_receives_wait() -> Iterator[None]:
    original = Side.registering

    def registering(side: Side, action: ev.PostReceives | ev.MoveReceives) -> bool:
        late = original(side, action)
        if late:
            side.events.append(ev.ReceivesPosted(action.number))
        return late

    with mock.patch.object(Side, "registering", registering):
        yield


@mutation("what may tell the peer of a receive waits until that is posted")
def let_a_message_overtake_a_receive() -> Iterator[None]:
    with mock.patch.object(Journal, "send_end", lambda journal: journal.tail):
        yield


@mutation("an atomic that hardware has is never replayed")
def replay_atomics() -> Iterator[None]:
    with mock.patch.object(
        Journal, "unsafe_reason", lambda journal, cqes_lost=False, receipts_lost=False: None
    ):
        yield


@mutation("what a READ may have overwritten is not sent again")
def send_again_what_a_read_overwrote() -> Iterator[None]:
    with mock.patch.object(Journal, "overwritten", lambda journal, given, owes, receipts_lost: None):
        yield


@mutation("a READ is not repeated behind a WRITE that a fence kept behind it")
def repeat_a_read_behind_a_fence() -> Iterator[None]:
    with mock.patch.object(Journal, "behind_fence", lambda journal, given, owes, receipts_lost: None):
        yield


@mutation("a fence orders all behind it, not only the WR that carries it")
def fence_only_the_wr_that_carries_it() -> Iterator[None]:
    def behind_fence(journal: Journal, given: list[Any], owes: list[bool], receipts_lost: bool) -> str | None:
        read = False
        for rec, owing in zip(given, owes, strict=True):
            if rec.wr.opcode == "READ":
                read = read or not owing
            elif read and rec.wr.fence and rec.wr.opcode in ("WRITE", "WRITE_IMM"):
                return "a fenced WRITE behind a READ"
        return None

    with mock.patch.object(Journal, "behind_fence", behind_fence):
        yield


@mutation("a dead NIC may have taken along the completion that would have told")
def trust_a_dead_nic_to_have_told() -> Iterator[None]:
    original = Journal.unsafe_reason

    def unsafe_reason(journal: Journal, cqes_lost: bool = False, receipts_lost: bool = False) -> str | None:
        return original(journal, False, receipts_lost)

    with mock.patch.object(Journal, "unsafe_reason", unsafe_reason):
        yield


@mutation("where the peer's NIC died, its counter says less than was executed")
def trust_the_counter_of_a_dead_nic() -> Iterator[None]:
    original = Side.feed

    def feed(side: Side, event: ev.Event) -> None:
        if isinstance(event, ev.FenceCompleted):
            event = replace(event, receipts_lost=False)
        original(side, event)

    with mock.patch.object(Side, "feed", feed):
        yield


@mutation("an acknowledged unsignaled tail never flushes: the marker does")
def forget_the_marker() -> Iterator[None]:
    with mock.patch.object(Journal, "post_marker", lambda journal, k: None):
        yield


@mutation("the first error of a send queue says that all before it is complete")
def forget_what_a_nic_has_shown() -> Iterator[None]:
    with mock.patch.object(Journal, "sends_shown", lambda journal, end: None):
        yield


@mutation("an error of our own WR on a pair that was handed nothing says nothing of what others were handed")
def trust_a_pair_that_was_handed_nothing() -> Iterator[None]:
    original = PairState.renew

    def renew(pair: PairState) -> None:
        original(pair)
        pair.sending = True

    with mock.patch.object(PairState, "renew", renew):
        yield


@mutation("a message that is sent again is followed by the WRITEs that were behind it")
def let_an_old_message_cover_a_write() -> Iterator[None]:
    with mock.patch.object(Journal, "is_covered", lambda journal, seq, lost: False):
        yield


@mutation("a MOVE that begins while sends wait for the NIC's room makes the last of them its fence")
def fence_only_what_is_posted_next() -> Iterator[None]:
    original = Journal.pump

    def pump(journal: Journal) -> None:
        with mock.patch.object(Journal, "fence_last", lambda journal: None):
            original(journal)

    with mock.patch.object(Journal, "pump", pump):
        yield


@mutation("the NIC is handed no more at a time than the application asked room for")
def hand_over_all_at_once() -> Iterator[None]:
    original = Journal.hand_over

    def hand_over(journal: Journal) -> int:
        capacity, journal.capacity = journal.capacity, 1 << 30
        try:
            return original(journal)
        finally:
            journal.capacity = capacity

    with mock.patch.object(Journal, "hand_over", hand_over):
        yield


@mutation("what is posted behind a fence that waits for room is for the next pair")
def put_the_fence_behind_all_that_waits() -> Iterator[None]:
    nowhere = property(lambda journal: 0, lambda journal, value: None)
    with mock.patch.object(Journal, "fence_upto", nowhere, create=True):
        yield


@mutation("one fence WRITE of ours at a time: there is room for no more")
def a_fence_write_for_each_move() -> Iterator[None]:
    nothing_under_way = property(lambda pair: False, lambda pair, value: None)
    with mock.patch.object(PairState, "own_fence", nothing_under_way, create=True):
        yield


@mutation("replay starts behind the last proven message, not at the last completed WR")
def replay_proven_writes() -> Iterator[None]:
    with mock.patch.object(Journal, "is_proven", lambda journal, rec: rec.wr.opcode in TWO_SIDED):
        yield


@mutation("an error that was shown before protection is the QP's end, though the peer fails over")
def go_on_behind_an_error_that_was_shown() -> Iterator[None]:
    with mock.patch.object(Side, "shown_before_protection", lambda side: None):
        yield


@mutation("a QP whose application has seen an error is not PROTECTED, though ARM is through")
def protect_what_has_failed() -> Iterator[None]:
    original = Side.do_set_status

    def set_status(side: Side, action: ev.SetStatus) -> None:
        shown, side.journal.shown_error = side.journal.shown_error, None
        original(side, action)
        side.journal.shown_error = shown

    with handler(ev.SetStatus, set_status):
        yield


@mutation("what was withheld is told when nothing is withheld any more")
def swallow_what_was_withheld() -> Iterator[None]:
    with mock.patch.object(Journal, "give_withheld", lambda journal: None):
        yield


@mutation("no WR is flushed to the application before every pair has stopped")
def end_without_a_fence() -> Iterator[None]:
    def ended_at_once(side: Side, first: str) -> None:
        for k, qp in enumerate(side.qps):
            if not side.nics[k].dead:
                side.nics[k].command(qp.to_error)
        if side.ending is None:
            side.over = side.over or first
            side.ending = first
            side.ended()

    with mock.patch.object(Side, "end", ended_at_once):
        yield


@mutation("what a NIC completed before the end is delivered as it completed")
def end_without_a_drain() -> Iterator[None]:
    original = Side.end

    def end(side: Side, first: str) -> None:
        if side.ending is None:
            for qp in side.qps:
                qp.send_cq.clear()
        original(side, first)

    with mock.patch.object(Side, "end", end):
        yield


@mutation("what the default QP completed before its NIC died is delivered")
def forget_the_dead_nics_cq() -> Iterator[None]:
    original = Side.fence_erred

    def fence_erred(side: Side, work: list[Any], k: int) -> None:
        if side.nics[k].dead:
            side.qps[k].send_cq.clear()
        original(side, work, k)

    with mock.patch.object(Side, "fence_erred", fence_erred):
        yield
