# SPDX-License-Identifier: BSD-3-Clause
"""Stories of posts: room, refusals, work that no pair carries, attempts that take their time. As staged.py."""

from __future__ import annotations

import errno
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.application import Application, Wr
from simulator.host import Host
from simulator.network import Network
from simulator.rnic import Datagram
from simulator.staged_moves import receive_in_new_memory
from simulator.story import (
    Story,
    another_window,
    armed,
    away,
    drop_next,
    end,
    ends,
    go,
    hole,
    is_answer,
    is_request,
    no_answers,
    no_hole,
    on,
    path_failed,
    pinged,
    plan,
    post,
    said,
    sends,
    share,
    split,
    until,
    wait,
    went,
)

from shiftverbs import _core
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Keys, Phase, Sync
from shiftverbs.protocol.tables import SwitchState
from shiftverbs.wr import SGE, SendWR

NEVER = 1_000_000


def has_patience(app: Application) -> None:
    """The program allows its QPs so many retries that none of them gives up by itself."""
    for qp in app.endpoint.qps:
        qp.RETRIES = NEVER


def unheard(net: Network, name: str, phase: Phase, k: int) -> None:
    """What says on that rail that it is so far with a SWITCH is lost."""
    net.links[name, k].hole = lambda p: any(isinstance(m, Sync) and m.phase is phase for m in said(p))


def lose_events(host: Host, kind: int) -> None:
    """The ring is full when the next event of that kind comes."""
    machine = host.machine
    take = machine.take_events

    def taken() -> list[Any]:
        events = take()
        kept = [event for event in events if event[0] != kind]
        if len(kept) < len(events):
            host.events_lost = True
            machine.take_events = take  # type: ignore[method-assign]
        return kept

    machine.take_events = taken  # type: ignore[method-assign]


# ---- what a NIC was handed, and what it shows ------------------------------------------------------------------------


def a_pair_that_was_handed_nothing_fails() -> Network:
    """No other pair answers, so a goes back to the one it left, which is reset; that fails before it got the sends."""
    net = armed()
    a, _ = ends(net)
    hole(net, "a", None, 0)
    net.port("a", 1, False, None)
    unheard(net, "b", Phase.READY, 0)
    plan(a, "SEND", signaled=True)
    plan(a, "SEND", signaled=True)
    go(a)
    path_failed(a, 0)
    state = a.endpoint.protocol.state
    until(net, lambda: state.switch_state is SwitchState.READY and state.switch.target == 0, ms=3000)
    path_failed(a, 0)
    return end(net)


def a_question_while_work_completes() -> Network:
    """a has a WRITE that owes a completion, and a READ that lands where a WRITE behind it has its bytes.

    As long as the first one is not answered, neither are those; it is, before b's answer to a question would come.
    """
    net = armed()
    a, _ = ends(net)
    plan(a, "WRITE", 1, signaled=True)
    write, read = plan(a, "WRITE", 2), plan(a, "READ", 3)
    share(read, write)
    plan(a, "WRITE", 4, signaled=True)
    net.links["b", 0].delay_ns = 500_000
    net.links["b", 1].delay_ns = 2_000_000
    net.links["a", 0].hole = lambda p: is_request(p) and p.ref > a.posted[0].ref
    go(a)
    path_failed(a, 0, advisory=True)
    wait(net, 10)
    for k in range(2):
        net.links["b", k].delay_ns = 10_000
    no_hole(net, "a", 0)
    return end(net)


# ---- work that no pair carries ---------------------------------------------------------------------------------------


def rails_that_fall_silent_in_turn() -> Network:
    """Whatever rail a's WRITE is given to loses all that a says from then on: that says nothing of the WRITE."""
    net = armed()
    a, _ = ends(net)
    pinged(net)
    for qp in a.endpoint.qps:
        qp.RETRIES = 8  # until pings are missing, and before the watchdog has come to a conclusion from that
    net.one_rail_is_well = True
    deliver = net.clock.after

    def after() -> None:
        opened = went(net, ev.OpenSend, a)
        if len(opened) < 6:
            k = opened[-1].pair if opened else 0
            for n in range(net.pairs):
                net.wall("a", n, n == k)
        else:
            for n in range(net.pairs):
                net.wall("a", n, False)
        deliver()

    net.clock.after = after
    post(a, "WRITE", 1)
    wait(net, 8000)
    assert len(went(net, ev.SwitchStarted, a)) >= 5
    return end(net)


def two_of_three_rails_have_a_hole() -> Network:
    """They answer pings, and are fit again, when the third one's turn comes."""
    net = armed(pairs=3, receives=4, at_start=0)
    a, b = ends(net)
    post(b, "SEND", signaled=False)  # it waits for a receive: b's direction stays where it is
    pinged(net)
    hole(net, "a", "WRITE", 0, 1)
    post(a, "WRITE", 1)
    wait(net, 3000)
    no_hole(net, "a", 0, 1)
    with a.host:
        a.post_recv()
    return end(net)


# ---- how long an attempt may take ------------------------------------------------------------------------------------


def messages_are_lost_for_a_while() -> Network:
    """Whoever has little patience gives an attempt as long as a message takes that is said again, if he has that."""
    net = armed(peer_deadline_ms=150)
    a, _ = ends(net)
    net.links["a", 1].hole = lambda p: isinstance(p, Datagram)
    net.port("a", 0, False, None)
    path_failed(a, 0)
    wait(net, 80)
    no_hole(net, "a", 1)
    end(net)
    assert all(on(app, 1) for app in ends(net))
    return net


def memory_comes_late_in_a_switch() -> Network:
    """b's backup registers memory for longer than all attempts may take, and b is heard to say so."""
    net = armed(receives=8, at_start=4, peer_deadline_ms=150)
    a, b = ends(net)
    receive_in_new_memory(b, 1, 1500)
    net.port("a", 0, False, None)
    path_failed(a, 0)
    wait(net, 3000)
    assert all(on(app, 1) for app in ends(net))
    return end(net)


def a_pair_fails_whose_memory_came_late() -> Network:
    """Behind that time there is as much for the other pairs as there would have been without."""
    net = armed(pairs=3, receives=8, at_start=4, peer_deadline_ms=150)
    a, b = ends(net)
    receive_in_new_memory(a, 1, 1500)
    net.port("a", 0, False, None)
    path_failed(a, 0)
    wait(net, 1400)
    assert b.endpoint.protocol.state.switch_state is SwitchState.READY
    path_failed(b, 1)
    end(net)
    assert all(on(app, 2) for app in ends(net))
    return net


# ---- room ------------------------------------------------------------------------------------------------------------


def _full(net: Network, app: Application, *opcodes: str) -> None:
    """A program's queue is full of what the peer has executed; no answer of its NIC gets through."""
    has_patience(app)
    for opcode in opcodes:
        plan(app, opcode, 1, signaled=True)
    go(app)
    assert len(app.posted) == len(opcodes) == app.endpoint.capacity and not app.wcs[-1:]


def _one_more(net: Network, app: Application, *rails: int) -> Network:
    """The program knows from answers that there is room."""
    wr = post(app, "SEND")
    assert wr in app.posted, "there is room, as the answers say"
    no_hole(net, app.peer.device.name, *rails)
    return end(net)


def answers_overtake_acks() -> Network:
    """a sends over one NIC, and is answered over another one."""
    net = armed(capacity=4)
    a, b = ends(net)
    split(net, "a")
    no_answers(net, "b", 1)
    _full(net, a, *["SEND"] * 4)
    post(b, "SEND")
    wait(net, 1)
    assert len(b.received) == 4 and len(a.received) == 1
    return _one_more(net, a, 1)


def answers_come_by_another_qp() -> Network:
    """The other QP of the two programs is at home."""
    return _answered_by_another_qp()


def answers_come_by_a_qp_of_another_context() -> Network:
    """Of the same NIC: that is all the same."""
    return _answered_by_another_qp(two_contexts=True)


def _answered_by_another_qp(**options: Any) -> Network:
    net = armed(capacity=4, qps=2, **options)
    a, b = ends(net)
    away(net)
    no_answers(net, "b", 1)
    _full(net, a, *["SEND"] * 4)
    post(net.apps[3], "SEND")
    wait(net, 1)
    assert len(b.received) == 4 and len(net.apps[2].received) == 1
    return _one_more(net, a, 1)


def answers_came_by_a_qp_that_has_moved_since() -> Network:
    """Then it goes where the first one is, and nothing overtakes anything any more."""
    net = armed(capacity=4, qps=2)
    a, _ = ends(net)
    away(net)
    no_answers(net, "b", 1)
    _full(net, a, *["SEND"] * 4)
    post(net.apps[3], "SEND")
    wait(net, 1)
    net.apps[2].endpoint.prefer(1)
    until(net, lambda: all(on(app, 1) for app in net.apps), ms=100)
    return _one_more(net, a, 1)


def answers_came_by_a_qp_that_was_closed_since() -> Network:
    """Or it is closed."""
    net = armed(capacity=4, qps=2)
    a, _ = ends(net)
    away(net)
    no_answers(net, "b", 1)
    _full(net, a, *["SEND"] * 4)
    post(net.apps[3], "SEND")
    wait(net, 1)
    net.apps[2].close()
    wait(net, 20)
    return _one_more(net, a, 1)


def an_answer_is_no_message() -> Network:
    """b answers by WRITEs, over the NIC that a's sends fail over to then: there they have to be done once more."""
    net = armed(capacity=4)
    a, b = ends(net)
    split(net, "b")
    no_answers(net, "b", 0, 1)
    _full(net, a, *["WRITE"] * 4)
    post(b, "WRITE", 1)
    wait(net, 1)
    path_failed(a, 0)
    wait(net, 50)
    assert on(a, 1) and a.endpoint.core.outstanding[0] == 4
    return _one_more(net, a, 0, 1)


def what_was_answered_is_behind_what_goes_again() -> Network:
    """A READ is repeated after a failure; what is behind it is complete, and answered, as the peer's counter says."""
    net = armed(capacity=4)
    a, b = ends(net)
    no_answers(net, "b", 0, 1)
    _full(net, a, "READ", *["SEND"] * 3)
    path_failed(a, 0)
    wait(net, 0.15)
    assert on(a, 1) and a.endpoint.core.outstanding[0] == 4
    post(b, "SEND")
    wait(net, 0.05)
    assert on(a, 1) and len(a.received) == 1
    return _one_more(net, a, 0, 1)


def another_qp_has_answered_before_a_switch() -> Network:
    """... which comes back to the pair that it left, and has to ask for keys before it hands anything over again."""
    net = armed(capacity=4, qps=2)
    a, b = ends(net)
    away(net)
    post(a, "WRITE", 1)
    wait(net, 1)
    former = another_window(b)
    wait(net, 1)
    net.links["b", 1].hole = is_answer
    has_patience(a)
    for _ in range(4):
        plan(a, "WRITE", 1, signaled=True)
    go(a)
    post(net.apps[3], "SEND")
    wait(net, 1)
    assert len(net.apps[2].received) == 1 and a.endpoint.core.unwired[0] == 0
    net.links["b", 0].hole = lambda p: isinstance(p, Datagram)  # so that pair 0 is of no use
    net.links["b", 1].hole = lambda p: is_answer(p) or any(isinstance(m, Keys) for m in said(p))
    former.close()
    path_failed(a, 0)
    path_failed(a, 1)
    until(net, lambda: not a.endpoint.protocol.switching, ms=3000)
    assert on(a, 1) and a.endpoint.core.unwired[0] == 4
    return _one_more(net, a, 0, 1)


def _chain(app: Application, *opcodes: str) -> list[Wr]:
    """Post WRs in one call, as far as there is room for them. Returns those that were not taken."""
    wrs = [plan(app, opcode, 1, signaled=True) for opcode in opcodes]
    app.plan.clear()
    made: list[SendWR] = []  # the last one first
    for wr in reversed(wrs):
        made.append(app._send_wr(wr, made[-1] if made else None))
    bad = SendWR(wr_id=0, num_sge=1, sg=[SGE(0, 0, 0)])
    taken = len(wrs)
    with app.host:
        try:
            app.endpoint.core.post_send(made[-1], bad)
        except PyverbsRDMAError as error:
            assert error.error_code == errno.ENOMEM
            taken = next((n for n, wr in enumerate(wrs) if wr.ref == bad.wr_id), 0)
        for wr in wrs[:taken]:
            app._note(wr)
    return wrs[taken:]


def a_chain_fits_while_it_is_posted() -> Network:
    """a is answered over another NIC, and its NIC completes in the middle of a post: the rest is one chain no more."""
    net = armed(capacity=4)
    a, _ = ends(net)
    split(net, "b")
    a.host.frozen_until_ns = net.clock.now + 1_000_000
    plan(a, "SEND")
    plan(a, "SEND", signaled=True)
    go(a)
    a.endpoint.hardware.send_cq.hide(1)
    assert len(_chain(a, *["SEND"] * 5)) == 1
    return end(net)


def room_is_made_while_a_chain_is_posted() -> Network:
    """a's NIC has no room, and completes meanwhile: what waited is handed over by that, and the whole chain with it."""
    net = armed(capacity=4)
    a, _ = ends(net)
    away(net)
    a.endpoint.prefer(0)
    until(net, lambda: a.endpoint.protocol.move_told, ms=500)
    for _ in range(3):
        plan(a, "SEND", signaled=True)
        a.due()
    hardware = a.endpoint.hardware
    hardware.shared.refuse_at[0], hardware.shared.refuse_err[0] = 2, errno.ENOMEM
    net.hold_cqes("a", 0, True)
    until(net, lambda: hardware.shared.refuse_err[0] == 0, ms=20)
    wait(net, 0.1)
    assert a.endpoint.core.unwired[0] == 1
    a.host.frozen_until_ns = net.clock.now + 1_000_000
    net.hold_cqes("a", 0, False)
    hardware.send_cq.hide(1)
    hardware.shared.refuse_at[0], hardware.shared.refuse_err[0] = 1, errno.ENOMEM
    hardware.shared.refuse_more[0] = 1
    assert not _chain(a, "SEND", "SEND"), "there was room"
    return end(net)


# ---- refusals --------------------------------------------------------------------------------------------------------


def a_healthy_nic_refuses_a_post() -> Network:
    """As with plain verbs the post raises."""
    net = armed()
    a, _ = ends(net)
    a.endpoint.hardware.shared.refuse_err[0] = errno.EINVAL
    wr = post(a, "SEND")
    wait(net, 100)
    assert wr not in a.posted, "it was refused"
    post(a, "SEND")
    return end(net)


def _refused_late(net: Network) -> Application:
    """a's backup refuses the second of two WRs that it is handed late; the first one's ACK comes later still."""
    a, _ = ends(net)
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.move_told)
    plan(a, "SEND", signaled=True)
    plan(a, "SEND", signaled=True)
    for _ in range(2):
        a.due()
    backup = a.endpoint.qp(1)
    assert backup is not None and a.endpoint.core.unwired[0] == 2
    backup.shared.refuse_at[0], backup.shared.refuse_err[0] = 1, errno.EINVAL
    drop_next(net, "b", 1, "ack")
    until(net, lambda: backup.shared.refuse_err[0] == 0, ms=20)
    if a.endpoint.core.send_pair == 1:
        backup.shared.refusal[0] = errno.EINVAL
    return a


def a_healthy_nic_refuses_late() -> Network:
    """Each WR is told its own end, in turn, and no path has failed."""
    net = armed()
    a = _refused_late(net)
    end(net)
    assert sends(a) == ["SUCCESS", "LOC_QP_OP_ERR"], sends(a)
    assert not went(net, ev.SwitchStarted)
    return net


def a_healthy_nic_refuses_late_and_the_news_is_lost() -> Network:
    """Too much happened at once: it is looked for what may have been said."""
    net = armed()
    a, _ = ends(net)
    lose_events(a.host, _core.EV_POST_FAILED)
    _refused_late(net)
    end(net)
    assert sends(a) == ["SUCCESS", "LOC_QP_OP_ERR"], sends(a)
    return net


def a_receive_is_refused_late() -> Network:
    """b's backup refuses a receive whose memory has come: its QP ends, and both are told."""
    net = armed(receives=8, at_start=4)
    _, b = ends(net)
    away(net)
    receive_in_new_memory(b, 1, 10)
    backup = b.endpoint.qp(1)
    assert backup is not None and b.endpoint.core.unwired[1] == 1
    backup.shared.refuse_err[1] = errno.EINVAL
    return end(net)


SURVIVED: dict[Story, tuple[str, ...]] = {
    a_question_while_work_completes: ("ask_with_work_that_will_be_unsafe",),
    rails_that_fall_silent_in_turn: ("count_failures_on_silent_paths",),
    two_of_three_rails_have_a_hole: ("go_back_to_what_failed_the_work",),
    messages_are_lost_for_a_while: ("end_an_attempt_by_one_lost_message",),
    memory_comes_late_in_a_switch: ("give_memory_no_more_time_than_a_peer",),
    a_pair_fails_whose_memory_came_late: ("count_posting_among_the_attempts",),
    answers_overtake_acks: ("give_answers_no_room",),
    answers_come_by_another_qp: ("forget_the_answers_of_other_qps",),
    answers_come_by_a_qp_of_another_context: ("forget_the_nics_other_contexts",),
    answers_came_by_a_qp_that_has_moved_since: ("forget_the_answers_of_a_qp_that_goes",),
    an_answer_is_no_message: ("count_only_messages_as_answers",),
    a_chain_fits_while_it_is_posted: ("hand_over_a_broken_chain",),
    room_is_made_while_a_chain_is_posted: ("fail_a_post_that_room_made_whole",),
    what_was_answered_is_behind_what_goes_again: ("forget_what_was_answered_before_a_switch",),
    another_qp_has_answered_before_a_switch: ("forget_what_others_answered_before_a_switch",),
    a_healthy_nic_refuses_a_post: ("take_an_own_refusal_for_the_paths",),
}

ENDED: dict[Story, tuple[str, ...]] = {
    a_pair_that_was_handed_nothing_fails: ("trust_a_pair_that_was_handed_nothing",),
    a_healthy_nic_refuses_late: ("refuse_ahead_of_what_completes", "take_a_late_refusal_for_the_paths"),
    a_healthy_nic_refuses_late_and_the_news_is_lost: ("forget_a_refusal",),
    a_receive_is_refused_late: ("keep_a_late_refusal_of_a_receive",),
}

TOLD: dict[Story, tuple[str, ...]] = {
    answers_came_by_a_qp_that_was_closed_since: ("forget_the_answers_of_a_qp_that_goes",),
}
