# SPDX-License-Identifier: BSD-3-Clause
"""What must hold after a run, judged from what was posted, what the NICs executed, and what the applications saw.

Nothing here calls the code that is judged, or the model of the NICs: only lists of facts are read. Each check raises
`Violation`, which names the rule.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

from simulator.application import ATOMIC_CELLS, CELLS, Application, Wr
from simulator.network import Network, OwnError, Violation
from simulator.rnic import ERR

from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol.events import Status

TWO_SIDED = ("SEND", "SEND_IMM", "WRITE_IMM")
ATOMICS = ("CAS", "FADD")
OK, FLUSHED = int(WcStatus.SUCCESS), int(WcStatus.WR_FLUSH_ERR)
MOST_MOVES, MINUTE_NS = 4, 60 * 10**9
#: What is done where a MOVE has succeeded, was called off, or something worse has come.
MOVE_IS_OVER = ("OpenSend", "CancelMove", "CloseSend", "DeliverErrors", "SetStatus")


def over(app: Application) -> str | None:
    """Why this application's QP is not a protected one any more; None while it is, or is on its way to that."""
    if app.left:
        return "its application left"
    if app.failed and (app.own_error or app.peer.own_error):
        return app.own_error or app.peer.own_error
    endpoint = app.endpoint
    if endpoint.status in (Status.UNPROTECTED, Status.FAILED):
        return str(endpoint.connection.why)
    if app.ends is not None and not app.host.plain and app.ends < protected_since(app):
        return "it failed before it was protected"
    return None


NEVER = 1 << 62


def protected_since(app: Application) -> int:
    """When its QP was protected for the first time, in ns; NEVER if it was not."""
    for t, name, action in app.net.trace:
        if name == app.name and type(action).__name__ == "SetStatus" and action.status is Status.PROTECTED:
            return t
    return NEVER


def was_protected(net: Network, app: Application) -> bool:
    return protected_since(app) < NEVER


def on_its_way(app: Application) -> bool:
    """Whether one of both sides is in a SWITCH: they are protected in a moment, or end."""
    return any(
        end.protocol is not None and end.protocol.switching for end in (app.endpoint, app.peer.endpoint)
    )


def ended(app: Application) -> bool:
    """Whether this application's QP is not a working one any more: errors, its own doing, or the peer's."""
    # As with plain verbs.
    nobody_s = app.endpoint.hardware.nic.dead and not on_its_way(app) and not was_protected(app.net, app)
    return app.failed or app.left or nobody_s or over(app) is not None


def check(net: Network) -> None:
    """All rules for all QPs and both directions."""
    if net.errors:
        raise OwnError(net.errors[0])
    for app in net.apps:
        peer = app.peer
        # A message whose completion died with the NIC was not received, as far as anybody can tell.
        executions = [
            e
            for e in net.executions
            if e[4].side == app.name and (e[1], e[2], e[3], e[5]) not in net.lost_cqes
        ]
        messages_once_and_in_order(app, peer, executions)
        completions_once_and_in_order(app)
        what_failed_is_told(net, app)
        nothing_complete_fails(net, app)
        executed_no_more_than_allowed(net, app, executions)
        data_before_its_message(executions)
        nothing_acknowledged_is_lost(net, app, peer)
        what_succeeds_was_executed(net, app)
        reads_are_right(app)
        room_is_known(app)
        nothing_bad_succeeds(app)
        if not ended(app) and not ended(peer):
            everything_executed(app, executions)
            memory_is_right(app, peer)
    no_more_than_asked_for(net)
    nothing_after_the_fence(net)
    nothing_behind_a_flush(net)
    nothing_without_a_right(net)
    nothing_strays(net)
    moves_end(net)
    fences_end(net)
    each_arm_resets_once(net)
    receives_before_messages(net)
    no_storm(net)
    nothing_is_given_up_early(net)
    if net.straggler != "off":
        only_slow_rails_are_said_to_be(net)
        no_going_to_and_fro(net)


def no_more_than_asked_for(net: Network) -> None:
    """A NIC has room for what the application asked room for, and for two WRs of our own; a CQ for all of its WRs."""
    for qp in net.qps:
        if any(qp.shared.overflows):
            raise Violation(
                "no queue overflows", f"{qp.nic.host}, NIC {qp.nic.k}: {list(qp.shared.overflows)}"
            )
        if qp.send_cq.overrun or qp.recv_cq.overrun:
            raise Violation("no CQ is overrun", f"{qp.nic.host}, NIC {qp.nic.k}: {qp.send_cq.most}")


def room_is_known(app: Application) -> None:
    """What the peer has answered has been executed, and its room is free: a program may go by that.

    But not where ACKs are lost or late, and answers are not (`Network.waits_for_ack`).
    """
    orderly = {"port", "wall", "both_walls", "migrate", "etcd", "freeze", "slow", "datagrams", "slow_memory"}
    if app.refused_room and not ended(app) and orderly >= set(app.net.faults):
        raise Violation("room is given by answers", f"{app.name} was refused {app.refused_room} times")


def nothing_bad_succeeds(app: Application) -> None:
    """A WR that names no memory, or has no right, fails as with plain verbs, and nothing behind it is executed."""
    bad = next((wr.index for wr in app.posted if wr.bad or wr.denied), None)
    if bad is None:
        return
    for queue, wr, status in app.wcs:
        if queue == "send" and wr.index >= bad and status == OK:
            raise Violation("what names no memory fails", f"{app.name}: {wr} succeeded")
    for _, _, _, _, wr, _ in app.net.executions:
        if wr.side == app.name and wr.index >= bad:
            raise Violation("what names no memory fails", f"{wr} was executed")


def nothing_without_a_right(net: Network) -> None:
    """Once a right was withdrawn, and the verb has returned, no NIC executes what needs it."""
    for app in net.apps:
        for t, _, qp, _, wr, _ in net.executions if app.withdrawn_ns is not None else ():
            if wr.side == app.peer.name and wr.opcode in app.withheld and t > app.withdrawn_ns:
                raise Violation(
                    "no right, no work", f"{wr} at {t} on NIC {qp.nic.k}, withdrawn at {app.withdrawn_ns}"
                )


def nothing_strays(net: Network) -> None:
    """No NIC touches memory that is the application's alone, or other memory than a WR means."""
    if net.strays:
        raise Violation("no DMA where none may be", str(net.strays[0]))


def nothing_is_given_up_early(net: Network) -> None:
    """Rails that fail in turn carry everything, sooner or later."""
    for app in net.apps:
        if net.one_rail_is_well and over(app) is not None:
            raise Violation("a rail that is well is found", f"{app.name}: {over(app)}")


def receives_before_messages(net: Network) -> None:
    """Nobody may be sent to whose receives are still being posted: the sender may have few RNR retries."""
    if net.too_early:
        raise Violation("receives are there before the peer sends", str(net.too_early[0]))


def each_arm_resets_once(net: Network) -> None:
    """A doubled or late REQ must not reset a pair again."""
    seen = set()
    for t, name, action in net.trace:
        if type(action).__name__ == "ResetPair" and action.dummy:
            key = (name, action.pair, action.arm, net.life_at(name, t))
            if key in seen:
                raise Violation("each ARM resets once", f"{name} at {t}: {action}")
            seen.add(key)


def only_slow_rails_are_said_to_be(net: Network) -> None:
    """No verdict against a path, unless its rail was slow at some time."""
    for host in net.hosts:
        if host.runtime.driver.measures.failed:
            raise Violation("the detector works", "it is off")
        for device, fault in host.runtime.driver.totals.slow_paths:
            if fault == "path" and int(device[1:]) not in net.slowed:
                raise Violation("only slow rails are said to be", f"{device} was well all the time")


def no_going_to_and_fro(net: Network) -> None:
    """No more than four moves in any minute, of each QP's sends, where no failure moves them."""
    for app in net.apps:
        times = [t for t, name, _ in net.whereabouts if name == app.name]
        for n in range(len(times) - MOST_MOVES):
            if times[n + MOST_MOVES] - times[n] < MINUTE_NS and not net.faults:
                raise Violation("no going to and fro", f"{app.name}: {net.whereabouts}")


def no_storm(net: Network) -> None:
    """What breaks costs a bounded number of SWITCHes."""
    started = sum(1 for _, _, action in net.trace if type(action).__name__ == "SwitchStarted")
    if started > (20 + 20 * len(net.faults)) * len(net.apps) // 2:
        raise Violation("bounds", f"{started} SWITCHes for {net.faults}")


def messages_once_and_in_order(app: Application, peer: Application, executions: list[Any]) -> None:
    posted = [wr for wr in app.posted if wr.opcode in TWO_SIDED]
    executed = [e[4] for e in executions if e[4].opcode in TWO_SIDED]
    if executed != posted[: len(executed)]:
        raise Violation(
            "once and in order", f"{app.name} posted {posted}, {peer.name}'s NICs took {executed}"
        )
    seen = [value for _, value in peer.received]
    tells = {
        "SEND": lambda wr: wr.data,
        "SEND_IMM": lambda wr: (wr.data, wr.ref),
        "WRITE_IMM": lambda wr: wr.ref,
    }
    expected = [tells[wr.opcode](wr) for wr in posted]
    if seen != expected[: len(seen)]:
        raise Violation("once and in order", f"{peer.name} received {seen} of {posted}")
    ids = [number for number, _ in peer.received]
    if ids != list(range(len(ids))):
        raise Violation("receives in order", f"{peer.name}'s receives completed as {ids}")


def completions_once_and_in_order(app: Application) -> None:
    expected = list(app.posted)
    at = 0
    failed = False
    for queue, wr, status in app.wcs:
        if queue != "send":
            continue
        while at < len(expected) and expected[at] is not wr:
            skipped = expected[at]
            if skipped.signaled or failed:
                raise Violation("one completion each", f"{app.name}: {skipped} has none before that of {wr}")
            at += 1
        if at == len(expected):
            raise Violation("one completion each", f"{app.name}: {wr} completed twice or out of order")
        at += 1
        if status == OK:
            if failed:
                raise Violation("errors in order", f"{app.name}: {wr} succeeded after an error")
            if app.ends is not None and wr.posted_ns > app.ends:
                raise Violation("nothing works behind the end", f"{app.name}: {wr} succeeded")
            if not wr.signaled:
                raise Violation("one completion each", f"{app.name}: {wr} is unsignaled")
        else:
            if failed and status != FLUSHED:
                raise Violation(
                    "errors in order", f"{app.name}: {wr} {WcStatus(status).name} behind an error"
                )
            failed = True
            if over(app) is None and not app.host.plain:
                raise Violation("no error without a reason", f"{app.name}: {wr} {WcStatus(status).name}")
    if not ended(app):
        for wr in expected[at:]:
            if wr.signaled:
                raise Violation("one completion each", f"{app.name}: {wr} never completed")
    receives = [number for queue, number, _ in app.wcs if queue == "recv"]
    if len(set(receives)) != len(receives):
        raise Violation("one completion each", f"{app.name}: receives {receives}")
    if app.was_reset and not app.host.plain and len(app.wcs) > app.told:
        raise Violation("RESET takes all", f"{app.name}: {app.wcs[app.told :]} came behind it")
    if app.late and not app.host.plain:
        raise Violation("close takes all", f"{app.name}: {app.late} came behind it")


def what_failed_is_told(net: Network, app: Application) -> None:
    """A QP in ERR has a WC for every WR, but for those unsignaled ones that succeeded before the first error.

    As with plain verbs, a NIC that dies may take along those of what is posted behind the end.
    """
    default = app.endpoint.hardware.nic
    if app.closed or app.was_reset or (app.device.name, 0) in net.took_along:
        return
    if default.dead and not was_protected(net, app):
        return
    # As with plain verbs, only what completed before that; but where we flush anything, we flush it all.
    plain = app.name in net.died_plain and all(status == OK for _, _, status in app.wcs)
    qp = app.endpoint.qp(app.endpoint.core.send_pair) or app.endpoint.hardware
    if not (app.failed or (ended(app) and qp.state == ERR and not qp.nic.dead)):
        return
    sends = {wr: status for queue, wr, status in app.wcs if queue == "send"}
    first = next((wr.index for wr, status in sends.items() if status != OK), math.inf)
    for wr in app.posted:
        due = not plain or wr.ref in app.endpoint.hardware.completed
        if wr not in sends and due and (wr.signaled or wr.index > first):
            raise Violation("what failed is told", f"{app.name}: {wr} never completed")
    if only_waits(net, app):
        return  # its next send ends it
    receives = {number for queue, number, _ in app.wcs if queue == "recv"}
    came = [e for e in net.executions if e[4].side == app.peer.name and e[5] is not None]
    came = [e for e in came if (e[1], e[2], e[3], e[5]) not in net.lost_cqes]
    if len(receives) < (len(came) if plain else app.next_recv):
        raise Violation(
            "what failed is told", f"{app.name}: {app.next_recv} receives, of which {receives} ended"
        )


def only_waits(net: Network, app: Application) -> bool:
    """Whether the peer has left it split, and only the backup that it would send by has broken, with nothing on it."""
    core = app.endpoint.core
    let_go_ns = net.let_go.get(app.name)
    if app.failed or let_go_ns is None or core.send_pair == 0 or core.outstanding[0]:
        return False  # a default QP that has broken flushes what waits elsewhere, too
    if any(wr.posted_ns > let_go_ns for wr in app.posted):
        return False
    receives = app.endpoint.qp(core.recv_pair)
    return receives is not None and receives.state != ERR and not receives.nic.dead


def nothing_complete_fails(net: Network, app: Application) -> None:
    """As with plain verbs: what a NIC completed has no error, signaled or not. (A NIC may die before it tells, also
    the peer's: what that has received is lost.)

    But where RESET is refused, what its backups had is gone ("What stays unproven").
    """
    if app.refused_reset or any(lost[0] == app.peer.device.name for lost in net.lost_cqes):
        return
    if {"kill", "hold_and_kill", "stall", "hung"} & set(net.faults) or any(
        nic.dead for nic in app.device.hardware
    ):
        return
    first = next((wr for queue, wr, status in app.wcs if queue == "send" and status != OK), None)
    if first is not None and any(
        first.ref in qp.completed for qp in net.qps if qp.nic.host == app.device.name
    ):
        raise Violation("no error for what is complete", f"{app.name}: {first}")


def executed_no_more_than_allowed(net: Network, app: Application, executions: list[Any]) -> None:
    times: dict[Any, list[int]] = defaultdict(list)
    for t, _, _, _, wr, _ in executions:
        times[wr].append(t)
    trims = [(t, peer_rx) for t, name, peer_rx in net.trims if name == app.name]
    messages = [wr.index for wr in app.posted if wr.opcode in TWO_SIDED]
    for wr, when in times.items():
        if len(when) == 1:
            continue
        if wr.opcode in TWO_SIDED or wr.opcode in ATOMICS:
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


def everything_executed(app: Application, executions: list[Any]) -> None:
    done = {e[4] for e in executions}
    for wr in app.posted:
        if wr not in done:
            raise Violation("lost", f"{wr} was never executed")


def nothing_acknowledged_is_lost(net: Network, app: Application, peer: Application) -> None:
    """A success says that the peer gets it, however its QP ends; where its NIC lost it, both were told of errors."""
    sure = [wr for queue, wr, status in app.wcs if queue == "send" and status == OK]
    if not sure or (
        ended(app) and ended(peer) and any(lost[0] == peer.device.name for lost in net.lost_cqes)
    ):
        return
    if ended(peer) and not was_protected(net, app):
        return  # not protected yet, a plain QP: as with plain verbs, the one whose NIC died hears of it
    last = sure[-1].index
    owed = sum(1 for wr in app.posted if wr.opcode in TWO_SIDED and wr.index <= last)
    # Where RESET is refused, what its backups had is gone all the same ("What stays unproven").
    forgets = peer.closed or peer.was_reset or peer.refused_reset
    if not forgets and len(peer.received) < owed:
        got = len(peer.received)
        raise Violation(
            "acknowledged and lost", f"{app.name} was told of {owed} messages, {peer.name} has {got}"
        )


def what_succeeds_was_executed(net: Network, app: Application) -> None:
    """A success says so of its WR and of all before it, signaled or not, however the QP ends."""
    last = max((wr.index for queue, wr, status in app.wcs if queue == "send" and status == OK), default=-1)
    done = {wr for _, _, _, _, wr, _ in net.executions if wr.side == app.name}
    for wr in app.posted:
        if wr.index <= last and wr not in done:
            raise Violation("succeeded and lost", f"{app.name}: {wr}, of those up to {last} that succeeded")


def reads_are_right(app: Application) -> None:
    """A READ shows what was written before it, or later by a WRITE that was free to pass it."""
    posted = app.posted
    for wr, value in app.reads:
        if wr.opcode in ATOMICS:
            before = made_by_atomics(posted, wr.cell, wr.index)
            if value != before:
                raise Violation("atomics once", f"{wr} returned {value}, not {before}")
            continue
        allowed = {0}
        fenced = False
        for other in posted:
            if other.index > wr.index and other.fence:
                fenced = True
            if other.opcode not in ("WRITE", "WRITE_IMM") or other.cell != wr.cell:
                continue
            if other.index < wr.index:
                allowed = {other.data}
            elif not fenced:
                allowed.add(other.data)
        if value not in allowed:
            raise Violation("reads", f"{wr} of cell {wr.cell} returned {value}, not one of {allowed}")


def made_by_atomics(posted: list[Wr], cell: int, until: float = math.inf) -> int:
    """What a cell has when those before WR `until` were carried out, once each and in order."""
    value = 0
    for wr in posted:
        if wr.index >= until or wr.cell != cell:
            continue
        if wr.opcode == "FADD":
            value += wr.data
        elif wr.opcode == "CAS" and value == wr.compare:
            value = wr.data
    return value


def memory_is_right(app: Application, peer: Application) -> None:
    """The peer's memory is what app's WRs, executed once and in order, would have made of it."""
    expected = [0] * CELLS
    for wr in app.posted:
        if wr.opcode in ("WRITE", "WRITE_IMM"):
            expected[wr.cell] = wr.data
    for cell in {wr.cell for wr in app.posted if wr.opcode in ATOMICS}:
        expected[cell] = made_by_atomics(app.posted, cell)
    cells = peer.cells
    if cells != expected:
        rule = "memory" if cells[: ATOMIC_CELLS.start] != expected[: ATOMIC_CELLS.start] else "atomics once"
        raise Violation(rule, f"{peer.name} has {cells}, not {expected}")


def nothing_behind_a_flush(net: Network) -> None:
    """Once a flush, or an error not its own doing, was shown to an application, its memory is its own.

    No message comes there, no WRITE or atomic of the peer's is executed and no READ, no result of its own lands, and
    nothing is sent out of it.
    """
    flushed = {app.name: app.flushed for app in net.apps if app.flushed is not None}
    receivers = {app.peer.name: app.name for app in net.apps}
    for t, _, qp, _, wr, _ in net.executions:
        receiver = receivers[wr.side]
        if t > flushed.get(receiver, t):
            raise Violation(
                "memory given back", f"{wr} at {t} on NIC {qp.nic.k}, flushed at {flushed[receiver]}"
            )
    for t, name, what in net.behind_flush:
        if t > flushed.get(name, t):
            raise Violation("memory given back", f"{what}, at {t}, flushed at {flushed[name]}")


def nothing_after_the_fence(net: Network) -> None:
    for t, host, qp, life, wr, _ in net.executions:
        fenced = net.fences.get((qp, life))
        if fenced is not None and t > fenced:
            raise Violation(
                "executed behind the fence", f"{wr} at {t} on pair {qp.nic.k} of {host}, fenced at {fenced}"
            )


def moves_end(net: Network) -> None:
    """A MOVE waits for what was posted, and for a fence behind it: never for all that a program goes on to post."""
    for app in net.apps:
        begun = None
        spans = []
        for t, name, action in net.trace:
            if name != app.name:
                continue
            what = type(action).__name__
            if what == "BeginFenceWr":
                begun = t
            elif begun is not None and what in MOVE_IS_OVER:
                spans.append((begun, t))
                begun = None
        if begun is not None and not ended(app):
            spans.append((begun, net.clock.now))
        for first, last in spans:
            done = [e[4] for e in net.executions if e[4].side == app.name and first < e[0] <= last]
            # As many as there is room for, and as many again while its directions use different NICs.
            if len(done) > 2 * app.endpoint.capacity + 2:
                raise Violation(
                    "a MOVE ends", f"{app.name}: {len(done)} WRs executed while one waited for its fence"
                )


def fences_end(net: Network) -> None:
    """A NIC that works has flushed long ago: where that was not seen, something of ours took the proof away."""
    if {"stall", "hold_and_kill", "hung"} & set(net.faults) or any(
        nic.dead for nics in net.nics.values() for nic in nics
    ):
        return
    for t, name, action in net.trace:
        if type(action).__name__ == "DeliverErrors" and "did not flush" in action.reason:
            raise Violation("fences end", f"{name} at {t}: {action.reason}")
