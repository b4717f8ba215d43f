# SPDX-License-Identifier: BSD-3-Clause
"""Stories of ends: of QPs that are away, of mistakes of ours, of who is left alone. As staged.py."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.clock import MS, US
from simulator.host import OwnMr
from simulator.network import Network
from simulator.rnic import ERR, RTS
from simulator.staged_late_reads import amid_its_verb
from simulator.story import (
    Story,
    armed,
    at_home,
    away,
    end,
    ends,
    executed,
    fail_over,
    feed,
    go,
    hole,
    on,
    path_failed,
    plan,
    post,
    said,
    sends,
    split,
    statuses,
    tell,
    until,
    wait,
)

from shiftverbs import observe
from shiftverbs.failover.qp.connection import Connection
from shiftverbs.native.ibv import QpAttrMask, WcStatus
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Move, MoveStep, Phase, Sync
from shiftverbs.protocol.tables import ArmState
from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.state_machine import SendState


def posts_every(net: Network, name: str, opcode: str, us: int, times: int) -> None:
    """A program posts one after the other."""
    app = net.app(name)
    for n in range(times):
        plan(app, opcode, 1, signaled=True)
        net.clock.later(n * us * US, app.due)


def an_own_error_of_a_qp_that_is_split() -> Network:
    """a's sends are at home, and break by its own doing; its receives are on pair 1, which knows nothing of it."""
    net = armed()
    a, _ = ends(net)
    split(net, "b")
    a.own_error = "it named memory that is not there"
    plan(a, "WRITE", 1, signaled=True).bad = True
    go(a)
    wait(net, 1000)
    assert a.failed
    return net


def messages_arrive_behind_an_own_error() -> Network:
    """a's sends break at home by its own doing; the NIC that its receives are on takes a while to stop, and b sends."""
    net = armed()
    a, b = ends(net)
    split(net, "b")
    a.own_error = "it named memory that is not there"
    a.poll_ns = 1 * US
    net.nics["a"][1].command_ns = 2 * MS
    net.links["b", 1].delay_ns = 500 * US
    posts_every(net, "b", "SEND", 1, 4)
    plan(a, "WRITE", 1, signaled=True).bad = True
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    wait(net, 1000)
    assert sends(a) == ["REM_ACCESS_ERR", *["WR_FLUSH_ERR"] * 3], sends(a)
    return net


def we_fail_while_a_move_is_told() -> Network:
    """b has moved its receives, a has not heard so, and something of ours fails there: it sends to nobody any more."""
    net = armed()
    a, b = ends(net)
    for k in range(net.pairs):
        net.links["b", k].hole = lambda p: any(
            isinstance(m, Move) and m.step is MoveStep.MOVED for m in said(p)
        )
    feed(b, ev.PathHealth(1, False))  # its own direction stays
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.move_told and b.endpoint.core.recv_pair == 1, ms=100)
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 1000)
    return net


def we_fail_while_a_peer_sends() -> Network:
    """a is away, and something of ours fails: its memory is its own again when b's messages cannot come any more."""
    net = armed()
    a, b = ends(net)
    away(net)
    net.nics["a"][1].command_ns = 2 * MS
    posts_every(net, "b", "SEND", 50, 100)
    wait(net, 0.5)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 100)
    assert a.failed
    b.close()
    wait(net, 100)
    return net


def who_is_left_alone_loses_the_nic_of_its_sends() -> Network:
    """a has nothing to send, and its receives are elsewhere: it waits on, until it posts something."""
    net = armed()
    a, b = ends(net)
    split(net, "a")
    b.close()
    wait(net, 100)
    net.kill("a", 1)
    wait(net, 1000)
    assert not a.failed and not a.wcs
    post(a, "SEND")
    wait(net, 1000)
    assert a.failed
    return net


def a_dead_nic_takes_posts() -> Network:
    """The default NIC is dead when the QP ends. What is posted behind that it would take, and never flush."""
    net = armed()
    a, _ = ends(net)
    net.kill("a", 0)
    wait(net, 100)
    assert on(a, 1)
    a.endpoint.hardware.shared.refusal[:] = (0, 0)
    feed(a, ev.KeysMissing("staged"))
    wait(net, 100)
    assert a.failed
    a.posts_on = True
    post(a, "SEND")
    wait(net, 1000)
    return net


def a_qp_is_closed_while_a_peer_sends() -> Network:
    """a is away, and closes its QP: when that returns, its memory is its own, however long its NICs take."""
    net = armed()
    a, _ = ends(net)
    away(net)
    net.nics["a"][1].command_ns = 2 * MS
    posts_every(net, "b", "SEND", 50, 100)
    wait(net, 0.5)
    a.close()
    wait(net, 1000)
    return net


def a_default_qp_works_on_behind_the_end() -> Network:
    """a is away when its QP ends. Its default QP works, for its NIC does not carry out that it must not."""
    net = armed()
    a, _ = ends(net)
    away(net)
    for name in "ab":
        net.nics[name][0].hung = True
    feed(a, ev.KeysMissing("staged"))
    until(net, lambda: a.failed, ms=2000)
    wait(net, 0.1)
    a.posts_on = True
    post(a, "WRITE", 1)
    wait(net, 1000)
    return net


def an_own_error_is_shown_just_before_a_switch() -> Network:
    """A post that looked for room has found a's own error. The driver hears of that behind the death of the NIC."""
    net = armed(at_start=4, receives=4)
    a, _ = ends(net)
    a.own_error = "it named memory that is not there"
    a.posts_on = True
    a.poll_ns = 5 * MS
    plan(a, "WRITE", 1, signaled=True).bad = True
    a.due()
    until(net, lambda: a.endpoint.hardware.state == ERR, ms=5)
    with a.host:
        a.endpoint.cq.drain(0)
    net.kill("a", 0)
    wait(net, 1)
    for _ in range(3):
        post(a, "SEND")
    wait(net, 1000)
    assert sends(a) == ["REM_ACCESS_ERR", *["WR_FLUSH_ERR"] * 3], sends(a)
    return net


def a_nic_refuses_to_end_a_default_qp() -> Network:
    """a is away when its QP ends, and its default NIC does not bring the default QP to ERR: it goes on to work."""
    net = armed()
    a, _ = ends(net)
    away(net)
    net.nics["a"][0].refusing = 1
    feed(a, ev.KeysMissing("staged"))
    until(net, lambda: a.failed, ms=100)
    wait(net, 1)
    assert net.nics["a"][0].refusing == 0
    a.posts_on = True
    wr = post(a, "WRITE", 1)
    wait(net, 1000)
    assert sends(a)[-1] == "WR_FLUSH_ERR" and not executed(net, wr)
    return net


def a_nic_refuses_to_stop_a_qp_for_good() -> Network:
    """Something of ours fails at a, away from home, and the NIC there does not bring the QP to ERR, however often.

    b has no part in that, and its program gets no message that nobody has sent.
    """
    net = armed()
    a, b = ends(net)
    away(net)
    net.nics["a"][1].refusing = 1000
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    until(net, lambda: a.failed, ms=5000)
    wait(net, 1000)
    assert not b.wcs, statuses(b)
    return net


def an_abort_that_a_receive_was_told_of_first() -> Network:
    """The send that says why was polled behind the receives: what it says is told all the same."""
    return _an_abort_begins(["RETRY_EXC_ERR", "WR_FLUSH_ERR"], first_status=WcStatus.RETRY_EXC_ERR)


def an_abort_that_an_error_of_a_receive_began() -> Network:
    """It is told of no send."""
    return _an_abort_begins(["WR_FLUSH_ERR", "WR_FLUSH_ERR"], receives=WcStatus.LOC_QP_OP_ERR)


def _an_abort_begins(told: list[str], **broken: int) -> Network:
    net = armed()
    a, _ = ends(net)
    hole(net, "a", "FADD", 0)
    post(a, "FADD", 8, data=1)  # may have been carried out: it is not tried again
    post(a, "SEND")
    wait(net, 0.05)
    a.endpoint.hardware.to_error(receives_first=True, **broken)
    wait(net, 1000)
    assert sends(a) == told, sends(a)
    return net


def a_question_is_answered_by_an_abort() -> Network:
    """a, which has switched before, asks; b's NIC refuses the fence at once, and b's ABORT overtakes its START."""
    net = armed()
    a, b = ends(net)
    fail_over(net)
    until(net, lambda: a.endpoint.protocol.all_fit and b.endpoint.protocol.all_fit)
    for k in range(net.pairs):
        net.links["b", k].hole = lambda packet: any(
            isinstance(m, Sync) and m.phase is Phase.START for m in said(packet)
        )
    net.nics["b"][1].refusing = 1
    path_failed(a, 1, advisory=True)
    until(net, lambda: a.failed and b.failed, ms=100)
    assert a.endpoint.protocol.status is Status.FAILED
    return net


def _a_nic_refuses_an_end_while_another_flushes(flush_ms: int) -> Network:
    """a is away, and has a WRITE that completed there unsignaled; its program moves the QP to ERR.

    Its default QP has been in ERR since the SWITCH; its NIC refuses to say so again, just when the other one begins to
    flush, which takes its time. The WRITE is complete all the same, which only the marker there tells.
    """
    net = armed()
    a, _ = ends(net)
    net.port("a", 0, False, None)
    fail_over(net)
    wr = post(a, "WRITE", 1, signaled=False)
    wait(net, 1)
    assert executed(net, wr)
    default = net.nics["a"][0]
    if flush_ms:
        net.hold_cqes("a", 1, True)
    a.err()
    default.refusing = 1
    wait(net, flush_ms)
    if flush_ms:
        net.hold_cqes("a", 1, False)
    wait(net, 1000)
    assert default.refusing == 0
    assert not sends(a), statuses(a)
    return net


def a_nic_refuses_an_end_while_another_flushes() -> Network:
    """And it flushes at once."""
    return _a_nic_refuses_an_end_while_another_flushes(0)


def a_nic_refuses_an_end_while_another_flushes_slowly() -> Network:
    """And it flushes after longer than it is waited between two commands, but in time."""
    return _a_nic_refuses_an_end_while_another_flushes(300)


def two_nics_refuse_an_end() -> Network:
    """Each of them less often than it may. The WRITE on the backup is complete, which only its flush tells."""
    net = armed(pairs=3)
    a, _ = ends(net)
    away(net)
    post(a, "WRITE", 0)
    wait(net, 1)
    a.endpoint.prefer(2)
    until(net, lambda: a.endpoint.protocol.send_pair == 2)
    wr = post(a, "WRITE", 1, signaled=False)
    wait(net, 1)
    assert executed(net, wr)
    sent = len(sends(a))
    a.err()
    backups = net.nics["a"][1:]
    for nic in backups:
        nic.refusing = 15
    wait(net, 3000)
    assert not any(nic.refusing for nic in backups)
    assert len(sends(a)) == sent, statuses(a)
    return net


def an_arm_waits_while_a_qp_ends() -> Network:
    """The default pair is being made fit, and waits for a look at its NIC. What is posted behind the end is flushed."""
    net = armed()
    a, _ = ends(net)
    path_failed(a, 0)
    state = a.endpoint.protocol.state
    until(net, lambda: state.switch is not None and state.switch.final is not None, ms=20)
    net.nics["a"][0].hung = True
    until(net, lambda: state.pairs[0].state is ArmState.RESETTING, ms=20)
    wait(net, 0.1)
    feed(a, ev.KeysMissing("staged"))
    wait(net, 1)
    net.nics["a"][0].unhang()
    wait(net, 100)
    assert a.failed
    a.posts_on = True
    wr = post(a, "SEND")
    wait(net, 1000)
    assert wr in a.posted, "a QP in ERR takes what is posted"
    return net


def errors_come_in_the_middle_of_a_verb() -> Network:
    """a's WRs fail while a MOVE waits for the last of them: one error is withheld, the rest comes when nothing is.

    For its application moves the QP to ERR, and another thread polls meanwhile.
    """
    net = armed()
    a, _ = ends(net)
    net.links["a", 0].hole = lambda p: getattr(p, "ref", 0) > 0
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    a.endpoint.prefer(1)
    assert not a.endpoint.core.send_is_open
    a.host.frozen_until_ns = net.clock.now + 1000 * MS
    net.hold_cqes("a", 0, True)
    hardware = a.endpoint.hardware
    hardware.to_error(12)
    (cq, cqe, _), *hardware.held = hardware.held
    net.nics["a"][0].holds_cqes = False
    cq.push(*cqe)
    with a.host:
        a.endpoint.connection.drain(0)
    modify = a.endpoint._hardware_modify

    def polled_by_another_thread(attr: Attr, state: int | None) -> None:
        hardware.release()
        a.endpoint.connection.drain(0)
        modify(attr, state)

    a.endpoint._hardware_modify = polled_by_another_thread  # type: ignore[method-assign]
    a.err()
    a.host.frozen_until_ns = 0
    wait(net, 1000)
    assert len(statuses(a)) == 3 + 16
    return net


def an_end_away_from_home() -> Network:
    """Whoever subscribed to that is told of no homecoming."""
    told: list[observe.Event] = []
    with mock.patch.object(observe, "publish", told.append):
        net = armed()
        a, _ = ends(net)
        away(net)
        feed(a, ev.KeysMissing("staged"))
        wait(net, 1000)
    kinds = [type(event) for event in told]
    assert observe.Failed in kinds and observe.Failback not in kinds
    return net


def a_fence_behind_a_reset() -> Network:
    """a's NIC takes long while an idle pair is reset, and again; then a path fails, and that pair is stopped."""
    net = armed()
    a, _ = ends(net)
    away(net)
    nic = net.nics["a"][1]
    pair = a.endpoint.protocol.pairs[1]
    a.endpoint.prefer(0)
    until(net, lambda: a.endpoint.core.is_plain, ms=50)
    nic.command_ns = 300 * MS
    until(net, lambda: pair.state is ArmState.RESETTING and pair.arm > 1, ms=50)
    arm = pair.arm
    until(net, lambda: a.endpoint.connection.nic(1).worker.pending() > 0, ms=1000)
    nic.mute = True  # what is asked of it before the second RESET takes until the first is over
    until(net, lambda: pair.state is ArmState.RESETTING and pair.arm > arm, ms=1000)
    nic.command_ns = 2 * MS
    until(net, lambda: not a.endpoint.connection.nic(1).worker.busy_since_ns, ms=1000)
    wait(net, 1)
    nic.unhang()
    until(net, lambda: a.endpoint.connection.nic(1).worker.pending() > 0, ms=1000)
    post(a, "SEND")
    path_failed(a, 0)
    return end(net)


def wants_a_fence(net: Network) -> None:
    """A MOVE of a's sends waits for its fence: what is outstanding tells of no end, and the next post would be it."""
    a, b = ends(net)
    post(a, "SEND", signaled=False)
    feed(b, ev.PathHealth(1, False))  # its own direction stays
    a.endpoint.prefer(1)
    wait(net, 1)
    assert a.endpoint.protocol.send_state is SendState.WAIT_SIGNALED and a.endpoint.core.send_is_open


def a_move_waits_when_a_qp_is_drained() -> Network:
    """a's application moves its QP to SQD, and then goes on without protection: so does all that it posts.

    Another thread of it posts while that waits for a backup to stop.
    """
    net = armed(receives=8, at_start=0)
    a, b = ends(net)
    away(net)
    for app in (a, b):
        app.endpoint.prefer(0)
    until(net, lambda: at_home(net))
    wants_a_fence(net)
    net.nics["a"][1].command_ns = 10 * MS
    net.clock.later(5 * MS, lambda: amid_its_verb(a, lambda: post(a, "SEND")))
    a.endpoint.drain()
    assert len(a.posted) == 2, "it was posted later"
    wait(net, 50)
    a.endpoint.modify(Attr(), RTS, int(QpAttrMask.STATE))
    with b.host:
        for _ in range(8):
            b.post_recv()
    for _ in range(3):
        plan(a, "SEND", signaled=True)
        go(a)
        wait(net, 10)
    assert sends(a) == ["SUCCESS"] * 4, sends(a)
    return net


def a_move_waits_when_a_qp_is_moved_to_err() -> Network:
    """a's application moves its QP to ERR, and posts on: its NIC flushes that too."""
    net = armed(receives=8, at_start=0)
    a, _ = ends(net)
    wants_a_fence(net)
    a.own_error = "its application moved it to ERR"
    a.endpoint.modify(Attr(), ERR, int(QpAttrMask.STATE))
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    wait(net, 50)
    assert sends(a) == ["WR_FLUSH_ERR"] * 4, sends(a)
    return net


def another_thread_polls_as_err_begins() -> Network:
    """Its sends have broken on the backup, and messages still come at home: it is shown nothing yet."""
    net = armed()
    a, _ = ends(net)
    split(net, "a")
    a.poll_ns = 10 * MS
    hole(net, "a", "SEND", 1)
    for _ in range(2):
        plan(a, "SEND", signaled=True)
    go(a)
    net.deliver()
    posts_every(net, "b", "SEND", 20, 20)
    backup = a.endpoint.qp(1)
    assert backup is not None
    backup.to_error(WcStatus.RETRY_EXC_ERR)
    take_leave = Connection._take_leave

    def polls(connection: Connection, reason: str) -> None:
        amid_its_verb(a, a.poll)
        wait(net, 0.1)
        take_leave(connection, reason)

    with mock.patch.object(Connection, "_take_leave", polls):
        a.err()
    wait(net, 1000)
    assert sends(a) == ["WR_FLUSH_ERR"] * 2, sends(a)
    return net


def a_qp_is_not_drained_away_from_home() -> Network:
    """The NIC that could do that does not have its traffic: the verb is refused, and nothing has changed."""
    net = armed()
    a, _ = ends(net)
    away(net)
    with contextlib.suppress(PyverbsRDMAError):
        a.endpoint.drain()
        a.endpoint.modify(Attr(), RTS, int(QpAttrMask.STATE))
    post(a, "SEND")
    return end(net)


def a_lost_message_is_not_sent_again() -> Network:
    """b's NIC took it and died with the receipt. Before it goes again, a's QP ends: its error is the first one."""
    net = armed()
    a, _ = ends(net)
    net.hold_cqes("b", 0, True)
    hole(net, "a", "WRITE", 0)
    hole(net, "a", None, 1)
    lost = plan(a, "SEND")
    plan(a, "WRITE", 1, signaled=True)
    go(a)
    net.kill("b", 0)
    net.faults.append("kill")  # so that what a's NIC saw completed may fail after all
    until(net, lambda: a.endpoint.core.send_pair == 1 and a.endpoint.core.send_is_open, ms=500)
    feed(a, ev.KeysMissing("staged"))
    wait(net, 500)
    first = next(what for queue, what, _ in a.wcs if queue == "send")
    assert first is lost, f"{lost} was never received, and {first} is the first that failed"
    return net


def a_move_is_refused_while_a_qp_ends() -> Network:
    """a's receive names memory that is gone, which another thread sees just before a hears that its MOVE is refused.

    Its sends were to leave a pair that works: what is posted behind the error is flushed all the same.
    """
    net = armed(pairs=3, receives=4, at_start=0)
    a, b = ends(net)
    a.own_error = "it has taken its memory away"
    known, a.buffers = a.buffers, OwnMr(a.device, a.buffers.region[0], a.buffers.words, 1)
    with a.host:
        a.post_recv()
    a.buffers.close()
    a.buffers = known
    with b.host:
        b.post_recv()
    split(net, "a")
    wait(net, 5)
    a.endpoint.prefer(2)
    path_failed(b, 2)
    until(net, lambda: a.endpoint.protocol.move_told, ms=100)
    net.nics["a"][1].command_ns = 20 * MS
    a.host.frozen_until_ns = net.clock.now + 5 * MS
    net.links["a", 0].hole = lambda p: getattr(p, "kind", None) == "op"  # b does not know yet
    post(b, "SEND")
    connection = a.endpoint.connection
    handle = connection.handle_message

    def another_thread(message: Any) -> None:
        """It polls just before the message is looked at, and posts just behind."""
        if not (isinstance(message, Move) and message.step is MoveStep.REFUSED):
            handle(message)
            return
        connection.handle_message = handle
        a.poll()
        net.wait(lambda: False, 1e-5)
        handle(message)
        assert a.failed
        a.posts_on = True
        post(a, "SEND")

    connection.handle_message = another_thread
    wait(net, 1000)
    assert a.posts_on
    return net


def what_we_gave_up_is_not_paired_again() -> Network:
    """Something of ours fails at a, amid b's messages. a's QP stays what its application was told, and b learns it."""
    net = armed()
    a, b = ends(net)
    away(net)
    posts_every(net, "b", "SEND", 50, 100)
    wait(net, 0.5)
    tell(a, lambda: a.endpoint.connection.give_up("staged"))
    wait(net, 100)
    assert a.failed and a.endpoint.status is Status.FAILED
    net.port("a", 1, False, 10 * US)  # and what is heard of its paths is no reason, either
    wait(net, 1000)
    net.port("a", 1, True, 10 * US)
    wait(net, 10_000)
    assert a.endpoint.status is Status.FAILED, "it is PROTECTED, and its receives are flushed"
    assert b.failed, "it waits for receives that were flushed"
    return net


def what_succeeded_is_behind_an_own_error() -> Network:
    """a takes the memory of a READ away that is on its way; the SENDs behind it are executed.

    Nobody has polled for its error when b's NIC dies. The fence finds it, and b's count proves the SENDs.
    """
    net = armed(receives=4, at_start=0)  # a's would lack their memory
    a, b = ends(net)
    with b.host:
        for _ in range(4):
            b.post_recv()
    for opcode, signaled in (("READ", True), ("SEND", False), ("SEND", True), ("READ", True)):
        plan(a, opcode, 1, signaled=signaled)
    for link in net.links.values():
        link.delay_ns = 100 * US
    a.poll_ns = 5 * MS
    for _ in range(4):
        a.due()
    a.take_memory_away()
    wait(net, 1)
    assert a.endpoint.hardware.state == ERR and b.endpoint.core.counters()[0] == 2
    net.kill("b", 0)
    wait(net, 1000)
    assert sends(a) == ["LOC_PROT_ERR", *["WR_FLUSH_ERR"] * 3], sends(a)
    return net


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_fence_behind_a_reset: ("forget_a_reset_under_way",),
    a_qp_is_not_drained_away_from_home: ("take_a_qp_to_sqd_amid_a_switch",),
}

ENDED: dict[Story, tuple[str, ...]] = {
    a_lost_message_is_not_sent_again: ("count_a_lost_message_as_complete",),
    an_arm_waits_while_a_qp_ends: ("revive_an_ended_qp",),
    a_dead_nic_takes_posts: ("trust_a_dead_nic_to_flush",),
    a_default_qp_works_on_behind_the_end: ("give_a_qp_back_that_still_works",),
    an_end_away_from_home: ("take_an_end_for_a_homecoming", "abort_in_silence"),
}


def memory_goes_when_its_qp_is_in_err() -> Network:
    """Away, on NICs that need a moment for each command, one program moves its QPs to ERR and deregisters memory.

    No NIC uses that any more, as with plain verbs, and so no peer is told that there is none.
    """
    net = armed(qps=2, capacity=64, receives=64)
    ours, theirs = net.apps_of("a"), net.apps_of("b")[1]
    for app in ours:
        app.endpoint.prefer(1)
    until(net, lambda: all(on(app, 1) and not app.endpoint.protocol.busy for app in net.apps), ms=300)
    wait(net, 5)
    net.nics["a"][1].command_ns = 2 * MS
    for n in range(30):
        plan(theirs, "SEND", signaled=True)
        net.clock.later(n * 400 * US, theirs.due)
    wait(net, 1)
    for app in ours:
        app.err()
    ours[1].own_error = "its QP is in ERR, and its memory is its own"
    ours[1].buffers.close()
    backup = ours[1].endpoint.qp(1)
    assert backup is not None and backup.state == ERR, "it works, and what its receives name is deregistered"
    wait(net, 3000)
    failed = [status for status in sends(theirs) if status != "SUCCESS"]
    assert "REM_OP_ERR" not in failed, failed
    own = {WcStatus(status).name for _, _, status in ours[1].wcs}
    assert own <= {"SUCCESS", "WR_FLUSH_ERR"}, own
    return net


TOLD: dict[Story, tuple[str, ...]] = {
    memory_goes_when_its_qp_is_in_err: ("take_memory_from_under_a_qp",),
    an_own_error_of_a_qp_that_is_split: (),
    messages_arrive_behind_an_own_error: (
        "go_on_with_one_half_behind_an_own_error",
        "show_errors_before_the_end",
    ),
    we_fail_while_a_move_is_told: ("call_off_a_told_move_where_we_failed",),
    we_fail_while_a_peer_sends: ("flush_at_once_where_we_failed",),
    who_is_left_alone_loses_the_nic_of_its_sends: ("flush_receives_of_who_is_idle",),
    a_qp_is_closed_while_a_peer_sends: ("close_while_backups_are_at_work",),
    an_own_error_is_shown_just_before_a_switch: ("leave_an_own_error_to_a_switch",),
    a_nic_refuses_to_stop_a_qp_for_good: ("post_a_marker_where_err_was_refused",),
    a_question_is_answered_by_an_abort: (),
    a_nic_refuses_an_end_while_another_flushes: ("drop_the_flush_where_another_nic_refuses",),
    two_nics_refuse_an_end: ("count_the_refusals_of_all_pairs",),
    a_nic_refuses_an_end_while_another_flushes_slowly: ("cut_the_flush_where_another_nic_refuses",),
    a_nic_refuses_to_end_a_default_qp: ("take_a_refused_err_for_an_end",),
    a_move_waits_when_a_qp_is_drained: ("leave_a_move_waiting_in_sqd",),
    an_abort_that_a_receive_was_told_of_first: ("tell_what_was_polled_first",),
    an_abort_that_an_error_of_a_receive_began: ("tell_what_was_polled_first",),
    another_thread_polls_as_err_begins: ("withhold_nothing_as_err_begins",),
    a_move_waits_when_a_qp_is_moved_to_err: ("leave_a_move_waiting_in_err",),
    a_move_is_refused_while_a_qp_ends: ("open_the_gate_in_an_end",),
    what_we_gave_up_is_not_paired_again: ("pair_again_what_was_given_up",),
    what_succeeded_is_behind_an_own_error: ("succeed_behind_an_own_error_in_a_fence",),
    errors_come_in_the_middle_of_a_verb: ("show_a_later_error_first",),
}
