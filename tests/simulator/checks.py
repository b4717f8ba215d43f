# SPDX-License-Identifier: BSD-3-Clause
"""What must hold after a run, judged from what was posted, what the NICs executed, and what the applications saw.

Nothing here calls the protocol, the journal or the NIC model: only lists of facts are read. Each check raises
`Violation`, which names the rule.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from simulator.hosts import ATOMIC_CELLS, CELLS, Network, Side

TWO_SIDED = ("SEND", "WRITE_IMM")
#: What is done where a MOVE has succeeded, was called off, or something worse has come.
MOVE_IS_OVER = ("OpenSend", "CancelMove", "CloseSend", "DeliverErrors", "SetStatus")


class Violation(AssertionError):
    """A rule that a run broke."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


def ended(side: Side) -> bool:
    """Whether this application's QP is not a working one any more: errors, its own close, or the peer's."""
    return side.app.failed or side.app.closed or side.over is not None


def check(net: Network) -> None:
    """All rules for both directions."""
    for side in net.sides:
        peer = net.other(side.name)
        # A message whose completion died with the NIC was not received, as far as anybody can tell.
        executions = [
            e
            for e in net.executions
            if e[4].side == side.name and (e[1], e[2], e[3], e[5]) not in net.lost_cqes
        ]
        messages_once_and_in_order(side, peer, executions)
        completions_once_and_in_order(side)
        what_failed_is_told(net, side)
        nothing_complete_fails(net, side)
        executed_no_more_than_allowed(net, side, executions)
        data_before_its_message(executions)
        nothing_acknowledged_is_lost(net, side, peer)
        reads_are_right(side)
        no_more_than_asked_for(side)
        if not ended(side) and not ended(peer):
            everything_executed(side, executions)
            memory_is_right(side, peer)
    nothing_after_the_fence(net)
    nothing_behind_a_flush(net)
    fences_end(net)
    moves_end(net)
    each_arm_resets_once(net)
    receives_before_messages(net)
    no_storm(net)
    nothing_is_given_up_early(net)


def no_more_than_asked_for(side: Side) -> None:
    """A NIC has room for what the application asked room for, and for two WRs of our own."""
    for k, qp in enumerate(side.qps):
        if qp.most > side.journal.capacity + 2:
            raise Violation("no send queue overflows", f"{side.name}, pair {k}: {qp.most} WRs at a time")


def nothing_is_given_up_early(net: Network) -> None:
    """Rails that fail in turn carry everything, sooner or later."""
    for side in net.sides:
        if net.one_rail_is_well and side.over is not None:
            raise Violation("a rail that is well is found", f"{side.name}: {side.over}")


def receives_before_messages(net: Network) -> None:
    """Nobody may be sent to whose receives are still being posted: the sender may have few RNR retries."""
    if net.too_early:
        raise Violation("receives are there before the peer sends", str(net.too_early[0]))


def each_arm_resets_once(net: Network) -> None:
    """A doubled or late REQ must not reset a pair again."""
    seen = set()
    for t, name, action in net.trace:
        if type(action).__name__ == "ResetPair" and action.dummy:
            key = (name, action.pair, action.arm)
            if key in seen:
                raise Violation("each ARM resets once", f"{name} at {t}: {action}")
            seen.add(key)


def no_storm(net: Network) -> None:
    """What breaks costs a bounded number of SWITCHes."""
    started = sum(1 for _, _, action in net.trace if type(action).__name__ == "SwitchStarted")
    if started > 20 + 20 * len(net.faults):
        raise Violation("bounds", f"{started} SWITCHes for {net.faults}")


def messages_once_and_in_order(side: Side, peer: Side, executions: list[Any]) -> None:
    posted = [wr for wr in side.app.posted if wr.opcode in TWO_SIDED]
    executed = [e[4] for e in executions if e[4].opcode in TWO_SIDED]
    if executed != posted[: len(executed)]:
        raise Violation(
            "once and in order", f"{side.name} posted {posted}, {peer.name}'s NICs took {executed}"
        )
    seen = [value for _, value in peer.app.received]
    if seen != [wr.data for wr in posted[: len(seen)]]:
        raise Violation(
            "once and in order", f"{peer.name} received {seen} of {[(wr, wr.data) for wr in posted]}"
        )
    ids = [wr_id for wr_id, _ in peer.app.received]
    if ids != list(range(len(ids))):
        raise Violation("receives in order", f"{peer.name}'s receives completed as {ids}")


def completions_once_and_in_order(side: Side) -> None:
    expected = list(side.app.posted)
    at = 0
    failed = False
    for queue, wr, status in side.app.wcs:
        if queue != "send":
            continue
        while at < len(expected) and expected[at] is not wr:
            skipped = expected[at]
            if skipped.signaled or failed:
                raise Violation("one completion each", f"{side.name}: {skipped} has none before that of {wr}")
            at += 1
        if at == len(expected):
            raise Violation("one completion each", f"{side.name}: {wr} completed twice or out of order")
        at += 1
        if status == "SUCCESS":
            if failed:
                raise Violation("errors in order", f"{side.name}: {wr} succeeded after an error")
            if not wr.signaled:
                raise Violation("one completion each", f"{side.name}: {wr} is unsignaled")
        else:
            if failed and status != "WR_FLUSH_ERR":
                raise Violation("errors in order", f"{side.name}: {wr} {status} behind an error")
            failed = True
            if side.over is None and not side.app.closed and not side.plain:
                raise Violation("no error without a reason", f"{side.name}: {wr} {status}")
    if not ended(side):
        for wr in expected[at:]:
            if wr.signaled:
                raise Violation("one completion each", f"{side.name}: {wr} never completed")
    receives = [wr_id for queue, wr_id, _ in side.app.wcs if queue == "recv"]
    if len(set(receives)) != len(receives):
        raise Violation("one completion each", f"{side.name}: receives {receives}")


def what_failed_is_told(net: Network, side: Side) -> None:
    """A QP in ERR has a WC for every WR, but for those unsignaled ones that succeeded before the first error.

    As with plain verbs, a NIC that dies may take along those of what is posted behind the end.
    """
    qp = side.qps[side.journal.send_pair]
    if side.app.closed or (side.name, 0) in net.took_along:
        return
    if not (side.app.failed or (ended(side) and qp.state == "ERR" and not qp.nic.dead)):
        return
    sends = {wr: status for queue, wr, status in side.app.wcs if queue == "send"}
    first = next((wr.index for wr, status in sends.items() if status != "SUCCESS"), len(side.app.posted))
    for wr in side.app.posted:
        if wr not in sends and (wr.signaled or wr.index > first):
            raise Violation("what failed is told", f"{side.name}: {wr} never completed")
    receives = {wr_id for queue, wr_id, _ in side.app.wcs if queue == "recv"}
    if len(receives) < side.app.next_recv:
        raise Violation(
            "what failed is told", f"{side.name}: {side.app.next_recv} receives, of which {receives} ended"
        )


def nothing_complete_fails(net: Network, side: Side) -> None:
    """As with plain verbs: what a NIC completed has no error, signaled or not. (A NIC may die before it tells.)"""
    if {"kill", "hold_and_kill", "stall", "hung"} & set(net.faults) or any(nic.dead for nic in side.nics):
        return
    first = next((wr for queue, wr, status in side.app.wcs if queue == "send" and status != "SUCCESS"), None)
    if first is not None and any(first in qp.completed for qp in side.qps):
        raise Violation("no error for what is complete", f"{side.name}: {first}")


def executed_no_more_than_allowed(net: Network, side: Side, executions: list[Any]) -> None:
    times: dict[Any, list[int]] = defaultdict(list)
    for t, _, _, _, wr, _ in executions:
        times[wr].append(t)
    trims = [(t, peer_rx) for t, name, peer_rx in net.trims if name == side.name]
    messages = [wr.index for wr in side.app.posted if wr.opcode in TWO_SIDED]
    for wr, when in times.items():
        if len(when) == 1:
            continue
        if wr.opcode in TWO_SIDED or wr.opcode == "FADD":
            raise Violation("executed twice", f"{wr} at {when}")
        for first, second in itertools.pairwise(when):
            between = [peer_rx for t, peer_rx in trims if first <= t <= second]
            if not between:
                raise Violation("a MOVE replays nothing", f"{wr} at {first} and {second}")
            if wr.opcode == "WRITE" and between[-1] and wr.index < messages[between[-1] - 1]:
                raise Violation("replayed though proven", f"{wr} at {first} and {second}")


def data_before_its_message(executions: list[Any]) -> None:
    """When a message is there, all that was posted before it is in memory, and is not written again."""
    newest = -1
    for _, _, _, _, wr, _ in executions:
        if wr.opcode in TWO_SIDED:
            newest = max(newest, wr.index)
        elif wr.opcode == "WRITE" and wr.index < newest:
            raise Violation("overwrites what was announced", f"{wr} after message {newest}")


def everything_executed(side: Side, executions: list[Any]) -> None:
    done = {e[4] for e in executions}
    for wr in side.app.posted:
        if wr not in done:
            raise Violation("lost", f"{wr} was never executed")


def nothing_acknowledged_is_lost(net: Network, side: Side, peer: Side) -> None:
    """A success says that the peer gets it, however its QP ends; where its NIC lost it, both were told of errors."""
    sure = [wr for queue, wr, status in side.app.wcs if queue == "send" and status == "SUCCESS"]
    if not sure or (ended(side) and ended(peer) and any(lost[0] == peer.name for lost in net.lost_cqes)):
        return
    if ended(peer) and not side.statuses:
        return  # not protected yet, a plain QP: as with plain verbs, the one whose NIC died hears of it
    last = sure[-1].index
    owed = sum(1 for wr in side.app.posted if wr.opcode in TWO_SIDED and wr.index <= last)
    if not peer.app.closed and len(peer.app.received) < owed:
        got = len(peer.app.received)
        raise Violation(
            "acknowledged and lost", f"{side.name} was told of {owed} messages, {peer.name} has {got}"
        )


def reads_are_right(side: Side) -> None:
    """A READ shows what was written before it, or later by a WRITE that was free to pass it."""
    posted = side.app.posted
    for wr, value in side.app.reads:
        if wr.opcode == "FADD":
            before = sum(
                w.data for w in posted if w.opcode == "FADD" and w.remote == wr.remote and w.index < wr.index
            )
            if value != before:
                raise Violation("atomics once", f"{wr} returned {value}, not {before}")
            continue
        allowed = {0}
        fenced = False
        for other in posted:
            if other.index > wr.index and other.fence:
                fenced = True
            if other.opcode not in ("WRITE", "WRITE_IMM") or other.remote != wr.remote:
                continue
            if other.index < wr.index:
                allowed = {other.data}
            elif not fenced:
                allowed.add(other.data)
        if value not in allowed:
            raise Violation("reads", f"{wr} of cell {wr.remote} returned {value}, not one of {allowed}")


def memory_is_right(side: Side, peer: Side) -> None:
    """The peer's memory is what side's WRs, executed once and in order, would have made of it."""
    expected = [0] * CELLS
    for wr in side.app.posted:
        if wr.opcode in ("WRITE", "WRITE_IMM"):
            expected[wr.remote] = wr.data
        elif wr.opcode == "FADD":
            expected[wr.remote] += wr.data
    if peer.memory != expected:
        rule = (
            "memory"
            if peer.memory[: ATOMIC_CELLS.start] != expected[: ATOMIC_CELLS.start]
            else "atomics once"
        )
        raise Violation(rule, f"{peer.name} has {peer.memory}, not {expected}")


def nothing_behind_a_flush(net: Network) -> None:
    """Once a side's WRs were flushed to its application, its memory takes nothing any more."""
    for t, host, k, _, wr, recv_id in net.executions:
        if recv_id is not None and t > net.ends.get(host, t):
            raise Violation(
                "memory given back", f"{wr} at {t} on pair {k} of {host}, flushed at {net.ends[host]}"
            )


def nothing_after_the_fence(net: Network) -> None:
    for t, host, k, life, wr, _ in net.executions:
        fenced = net.fences.get((host, k, life))
        if fenced is not None and t > fenced:
            raise Violation(
                "executed behind the fence", f"{wr} at {t} on pair {k} of {host}, fenced at {fenced}"
            )


def moves_end(net: Network) -> None:
    """A MOVE waits for what was posted, and for a fence behind it: never for all that a program goes on to post."""
    for side in net.sides:
        begun = None
        spans = []
        for t, name, action in net.trace:
            what = type(action).__name__
            if name == side.name and what == "BeginFence":
                begun = t
            elif name == side.name and begun is not None and what in MOVE_IS_OVER:
                spans.append((begun, t))
                begun = None
        if begun is not None:
            spans.append((begun, net.clock.now))
        for first, last in spans:
            done = [e[4] for e in net.executions if e[4].side == side.name and first < e[0] <= last]
            # As many as there is room for, and as many again while its directions use different NICs.
            if len(done) > 2 * side.journal.capacity + 2:
                raise Violation(
                    "a MOVE ends", f"{side.name}: {len(done)} WRs executed while one waited for its fence"
                )


def fences_end(net: Network) -> None:
    """A NIC that works has flushed long ago: where that was not seen, something of ours took the proof away."""
    for t, host, k in net.unseen_flushes:
        raise Violation("fences end", f"pair {k} of {host} has flushed, and at {t} its fence has not seen it")
