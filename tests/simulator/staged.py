# SPDX-License-Identifier: BSD-3-Clause
"""Short stories that chance finds seldom, and the mutations that show in them.

Each returns the network at the end, for the checkers. In those of STAGED a replay would be seen: failover has given up
there, and says because of which WRs. In those of SURVIVED nobody may notice anything.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from simulator import (
    staged_again,
    staged_answers,
    staged_changes,
    staged_default,
    staged_doubt,
    staged_early,
    staged_ends,
    staged_interrupted,
    staged_key_waits,
    staged_keys,
    staged_late_reads,
    staged_looks,
    staged_moves,
    staged_own_errors,
    staged_paths,
    staged_peers,
    staged_posts,
    staged_refused,
    staged_returned,
    staged_rights,
    staged_silence,
)
from simulator.application import OK
from simulator.checks import over
from simulator.clock import MS, US
from simulator.host import OwnMr
from simulator.network import Network
from simulator.rnic import ERR, FLUSHED
from simulator.story import (
    Story,
    armed,
    drop_next,
    end,
    ends,
    feed,
    follow_with_a_hole,
    go,
    hole,
    is_request,
    no_hole,
    on,
    path_failed,
    pinged,
    plan,
    post,
    said,
    share,
    tell,
    until,
    wait,
)

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Move, MoveStep, Phase, Sync
from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.state_machine import SendState


def a_read_lands_where_a_write_came_from() -> Network:
    net = armed()
    a, _ = ends(net)
    write, read = plan(a, "WRITE", 1), plan(a, "READ", 2)
    share(read, write)
    plan(a, "WRITE", 3, signaled=True)
    drop_next(net, "b", 0, "ack", times=3)
    go(a)
    net.kill("a", 0)  # it tells nobody that it is complete
    return end(net, write, read)


def a_fence_in_between() -> Network:
    net = armed()
    a, _ = ends(net)
    read = plan(a, "READ", 1)
    plan(a, "READ", 2, fence=True)
    write = plan(a, "WRITE", 1, signaled=True)
    drop_next(net, "b", 0, "ack", times=3)
    go(a)
    net.kill("a", 0)  # it tells nobody that it is complete
    return end(net, read, write)


def a_dead_nic_kept_the_reads_completion() -> Network:
    net = armed()
    a, _ = ends(net)
    read, write = plan(a, "READ", 1, signaled=True), plan(a, "WRITE", 1, signaled=True, fence=True)
    net.hold_cqes("a", 0, True)
    go(a)
    net.kill("a", 0)
    return end(net, read, write)


def the_peers_dead_nic_kept_the_receipt() -> Network:
    net = armed()
    a, _ = ends(net)
    send, read = plan(a, "SEND"), plan(a, "READ", 1)
    share(read, send)
    plan(a, "WRITE", 3, signaled=True)
    drop_next(net, "b", 0, "ack", times=3)
    net.hold_cqes("b", 0, True)
    go(a)
    net.kill("b", 0)
    return end(net, send, read)


def rails_that_fail_in_turn() -> Network:
    net = armed()
    a, _ = ends(net)
    pinged(net)
    follow_with_a_hole(a, "WRITE", 1)
    plan(a, "WRITE", 1, signaled=True)
    go(a)
    return end(net)


def a_message_comes_again_and_a_write_behind_it() -> Network:
    net = armed()
    a, _ = ends(net)
    net.hold_cqes("b", 0, True)
    plan(a, "WRITE_IMM", 1)
    plan(a, "WRITE", 1)
    go(a)
    net.kill("b", 0)
    plan(a, "SEND", signaled=True)
    go(a)
    return end(net)


def a_message_comes_again_and_a_write_behind_it_on_the_second_rail() -> Network:
    """On the first one nothing arrives."""
    net = armed(pairs=3)
    a, _ = ends(net)
    net.hold_cqes("b", 0, True)
    plan(a, "WRITE_IMM", 1)
    plan(a, "WRITE", 1)
    go(a)
    net.wall("a", 1, True)
    net.kill("b", 0)
    plan(a, "SEND", signaled=True)
    go(a)
    return end(net)


def a_write_behind_a_message_comes_again_twice() -> Network:
    """The pair where both come again carries the message alone, and breaks: the WRITE is still to come behind it."""
    net = armed(pairs=3)
    a, _ = ends(net)
    net.hold_cqes("b", 0, True)
    hole(net, "a", "WRITE", 1)
    plan(a, "WRITE_IMM", 1)
    plan(a, "WRITE", 1)
    go(a)
    net.kill("b", 0)
    plan(a, "SEND", signaled=True)
    go(a)
    return end(net)


def a_message_tells_of_a_receive_in_new_memory() -> Network:
    """Away, b posts a receive into memory that its backup is still registering, and tells a, which answers at once."""
    net = armed(receives=4, at_start=0)
    a, b = ends(net)
    net.port("a", 0, False, None)
    path_failed(a, 0)
    wait(net, 20)
    assert b.endpoint.core.recv_pair == 1 and b.endpoint.core.recv_is_open
    take = a._take

    def answer(*told: int) -> None:
        known = len(a.received)
        take(*told)
        if len(a.received) > known:
            plan(a, "SEND", signaled=True)
            net.clock.later(0, a.due)

    a._take = answer  # type: ignore[method-assign]
    with a.host:
        a.post_recv()
    backup = net.nics["b"][1]
    backup.registering_ns = 30 * MS
    known, b.buffers = b.buffers, OwnMr(b.device, b.buffers.region[0], b.buffers.words, 1)
    with b.host:
        b.post_recv()
    b.buffers = known
    assert b.endpoint.core.unwired[1] == 1, "withheld: its memory has no key there yet"
    post(b, "SEND", signaled=True)
    end(net)
    assert net.too_early or [wc[::2] for wc in b.wcs] == [("send", OK), ("recv", OK)]
    return net


def a_peer_leaves_with_its_moved_unheard() -> Network:
    """b has moved its receives, and is not heard to say so; then its application moves the QP to ERR.

    Its BYE tells where they are: a sends there, and what b's NIC takes until it stands still is delivered.
    """
    return _moved_unheard()


def a_peer_leaves_with_its_moved_unheard_and_does_not_know_any_more() -> Network:
    """The same, but b's process, with another QP between the two, has forgotten that life when it is heard again.

    What a sends to receives that were left would be lost.
    """
    return _moved_unheard(knows=False)


def _moved_unheard(knows: bool = True) -> Network:
    net = armed(qps=1 if knows else 2)
    a, b = ends(net)

    def unheard(packet: Any) -> bool:
        return any(
            (isinstance(m, Move) and m.step is MoveStep.MOVED)
            or (not knows and isinstance(m, Sync) and m.phase is Phase.BYE and m.ask > 0)
            for m in said(packet)
        )

    for k in range(net.pairs):
        net.links["b", k].hole = unheard
    a.endpoint.prefer(1)
    until(net, lambda: a.endpoint.protocol.move_told and b.endpoint.core.recv_pair == 1, ms=100)
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    net.nics["b"][1].command_ns = 40 * MS
    modify = b.endpoint._hardware_modify

    def slowly(attr: Attr, state: int | None) -> None:  # what is sent there is still taken for a while
        net.wait(lambda: False, 0.04)
        modify(attr, state)

    b.endpoint._hardware_modify = slowly  # type: ignore[method-assign]
    if not knows:
        net.clock.later(2 * MS, b.host.runtime.driver._left.clear)  # very many others have ended since
    b.err()
    return end(net)


def moves_that_are_called_off_one_after_the_other() -> Network:
    """The message ahead of each fence waits for a receive; the target seems to fail, and the peer says to stay."""
    net = armed(capacity=4, receives=4, at_start=0)
    a, b = ends(net)
    plan(a, "SEND")
    plan(b, "SEND")
    plan(b, "FADD", 8, signaled=True, data=1)  # what b has may not be fenced because of a mere hint
    for app in ends(net):
        for _ in range(len(app.plan)):
            app.due()
    a.endpoint.prefer(1)
    p = a.endpoint.protocol
    for n in range(3):
        wait(net, 250)  # its patience is over: our own WRITE is to be the fence
        assert p.send_state in (SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED)
        path_failed(a, 1, advisory=True)
        until(net, lambda n=n: p.counts.asks_refused == n + 1 and a.endpoint.core.send_is_open, ms=500)
    for _ in range(3):
        plan(a, "SEND", signaled=True)
    go(a)
    for app in ends(net):
        with app.host:
            for _ in range(4):
                app.post_recv()
    end(net)
    assert all(on(app, 1) for app in ends(net))
    return net


def a_program_that_posts_as_long_as_it_can_goes_home() -> Network:
    """a's receives are home, and its sends still away, so that more is posted than its NIC has room for."""
    net = armed(capacity=4)
    a, b = ends(net)
    a.endpoint.prefer(1)
    until(
        net,
        lambda: all(on(app, 1) and not app.endpoint.protocol.busy for app in ends(net)),
        ms=50,
    )
    feed(a, ev.PathHealth(0, False))
    b.endpoint.prefer(0)
    wait(net, 50)
    assert (a.endpoint.core.send_pair, a.endpoint.core.recv_pair) == (1, 0)
    poll = a.poll

    def poll_and_post() -> None:
        poll()
        a.backlog = len(a.plan)
        a._post()

    post(a, "WRITE", 1)  # then it knows the key of b's memory there, and nothing is withheld for that
    wait(net, 2)
    for link in net.links.values():
        link.delay_ns = 100 * US
    for _ in range(1999):
        wr = plan(a, "WRITE", 1, signaled=True)
        wr.slot = wr.index % 500
    for _ in range(a.endpoint.capacity):  # what is sent one by one completes one by one
        a.due()
        net.clock.run(net.clock.now + 50 * US)
    a.poll = poll_and_post  # type: ignore[method-assign]
    wait(net, 1)
    until(net, lambda: a.endpoint.core.unwired[0] > 0)  # more than its NIC has room for
    feed(a, ev.PathHealth(0, True))
    end(net)
    assert on(a, 0) and on(b, 0) and len(a.wcs) == 2000
    return net


def a_nic_refuses_once_behind_what_is_unsignaled() -> Network:
    """a's backup takes a WR that is sent again, and has no room for the next for now. No WC is due; home is gone."""
    net = armed(pairs=3)
    a, b = ends(net)
    hole(net, "a", "SEND", 0)
    for n in range(4):
        plan(a, "SEND", signaled=n == 3)
    backup = a.endpoint.qp(1)
    assert backup is not None
    backup.shared.refuse_at[0], backup.shared.refuse_err[0] = 1, errno.ENOMEM
    go(a)
    net.kill("a", 0)
    end(net)
    assert len(b.received) == 4 and [wc[::2] for wc in a.wcs] == [("send", OK)]
    return net


def a_nic_writes_no_flush_for_a_while() -> Network:
    """b's NIC brings its QP to ERR and writes no WC: one fence follows another, and a marker is refused once."""
    net = armed(capacity=4, receives=4)
    _, b = ends(net)
    net.stall("b", 0, True)
    net.faults.append("stall")
    for _ in range(4):
        plan(b, "SEND", signaled=True)
    go(b)
    b.endpoint.hardware.shared.refuse_err[1] = errno.ENOMEM
    path_failed(b, 0)
    until(net, lambda: b.endpoint.core.ending)
    wait(net, 200)
    net.stall("b", 0, False)
    return end(net)


def a_qp_that_failed_before_it_was_protected() -> Network:
    """b's dummy has no ACK yet, and a is PROTECTED. b's application sees an error and posts on, when a fails over."""
    net = Network(1)
    a, b = ends(net)
    net.links["a", 1].hole = lambda p: getattr(p, "kind", None) == "ack"
    until(net, lambda: b.endpoint.qp(1) is not None)
    backup = b.endpoint.qp(1)
    assert backup is not None
    backup.RETRIES = 1000
    until(net, lambda: a.endpoint.status is Status.PROTECTED, ms=30)
    assert b.endpoint.status is Status.PAIRING
    with b.host:
        b.endpoint.connection.early.end()  # its errors have waited for long enough
    b.posts_on = True
    b.endpoint.hardware.to_error()
    wait(net, 1)
    assert b.wcs[0] == ("recv", 0, FLUSHED)
    no_hole(net, "a", 1)
    for n in range(40):
        plan(b, "SEND", signaled=True)
        net.clock.later(n * 20 * US, b.due)
    wait(net, 0.1)
    path_failed(a, 0)
    return end(net)


def a_peer_leaves_just_behind_an_error() -> Network:
    """a's only WR has failed. Its error is withheld, and the driver has not heard of it when b's BYE comes.

    So it is where another thread polls while the driver runs, and has heard b already.
    """
    net = armed()
    a, b = ends(net)
    net.links["a", 0].hole = is_request
    plan(a, "SEND", signaled=True)
    go(a)
    a.host.frozen_until_ns = net.clock.now + 1000 * MS
    until(net, lambda: a.endpoint.hardware.state == ERR, ms=100)
    b.close()
    wait(net, 1)
    withheld: list[bool] = []

    def polled_by_another_thread() -> None:
        a.endpoint.connection.drain(0)
        withheld.append(a.endpoint.core.first_error(0) is not None and not a.endpoint.cq.buffered)

    tell(a, polled_by_another_thread)
    assert withheld == [True]
    a.host.frozen_until_ns = 0
    return end(net)


# ---- what each shows ----------------------------------------------------------------------------------------------

Stories = dict[Story, tuple[str, ...]]

_FILES = (
    staged_again,
    staged_moves,
    staged_posts,
    staged_returned,
    staged_ends,
    staged_key_waits,
    staged_keys,
    staged_changes,
    staged_answers,
    staged_default,
    staged_interrupted,
    staged_late_reads,
    staged_refused,
    staged_rights,
    staged_peers,
    staged_paths,
    staged_own_errors,
    staged_looks,
    staged_silence,
    staged_doubt,
    staged_early,
)


def _all(kind: str, *here: Stories) -> Stories:
    """The stories of that kind, of this file and of the others."""
    found: Stories = {}
    for stories in (*here, *(getattr(file, kind, {}) for file in _FILES)):
        found |= stories
    return found


#: Each story with the mutations that must show in it.
STAGED: Stories = _all(
    "STAGED",
    {
        a_read_lands_where_a_write_came_from: ("send_again_what_a_read_overwrote",),
        a_fence_in_between: ("repeat_a_read_behind_a_fence", "fence_only_the_wr_that_carries_it"),
        a_dead_nic_kept_the_reads_completion: (
            "trust_a_dead_nic_to_have_told",
            "repeat_a_read_behind_a_fence",
        ),
        the_peers_dead_nic_kept_the_receipt: (
            "trust_the_counter_of_a_dead_nic",
            "forget_what_comes_again_with_a_lost_message",
            "trust_a_counter_behind_lost_receipts",
        ),
    },
)

SURVIVED: Stories = _all(
    "SURVIVED",
    {
        rails_that_fail_in_turn: ("give_up_after_one_quick_round",),
        a_message_comes_again_and_a_write_behind_it: ("let_an_old_message_cover_a_write",),
        a_message_comes_again_and_a_write_behind_it_on_the_second_rail: (
            "let_an_old_message_cover_a_write_the_next_time",
        ),
        a_write_behind_a_message_comes_again_twice: ("let_an_old_message_cover_a_write_the_next_time",),
        a_message_tells_of_a_receive_in_new_memory: ("let_a_message_overtake_a_receive",),
        a_program_that_posts_as_long_as_it_can_goes_home: ("put_the_fence_behind_all_that_waits",),
        a_nic_refuses_once_behind_what_is_unsignaled: ("wait_for_room_that_nobody_tells_of",),
        moves_that_are_called_off_one_after_the_other: (
            "a_fence_write_for_each_move",
            "fence_an_unsafe_qp_on_a_port_event",
        ),
    },
)

#: Both sides end in these, and each of them is told the truth about what was done.
ENDED: Stories = _all(
    "ENDED",
    {
        a_qp_that_failed_before_it_was_protected: ("go_on_behind_an_error_that_was_shown",),
        a_peer_leaves_just_behind_an_error: ("swallow_what_was_withheld",),
        a_nic_writes_no_flush_for_a_while: ("post_markers_that_lie_there",),
        a_peer_leaves_with_its_moved_unheard_and_does_not_know_any_more: (
            "call_off_a_move_that_was_told",
            "send_to_receives_that_were_left",
        ),
    },
)

#: b leaves, and a goes on as a plain QP does.
LEFT: Stories = _all(
    "LEFT",
    {
        a_peer_leaves_with_its_moved_unheard: (
            "call_off_a_move_that_was_told",
            "say_nothing_of_moves_in_a_bye",
        ),
    },
)

#: What each side is told there, the story says itself.
TOLD: Stories = _all("TOLD")


def gave_up(net: Network) -> None:
    """Both sides have given up."""
    for app in ends(net):
        assert over(app) is not None, "both sides give up"


def went_on(net: Network) -> None:
    """Nobody has noticed anything."""
    for app in ends(net):
        assert over(app) is None and not app.failed, over(app)


def ended(net: Network) -> None:
    """Both sides know that it is over."""
    for app in ends(net):
        assert over(app) is not None and (app.failed or app.left), f"{app.name} does not know"


def left_alone(net: Network) -> None:
    """The first side was left by the other, and has not failed."""
    a, _ = ends(net)
    assert over(a) is not None and not a.failed
    core = a.endpoint.core
    assert core.send_is_open and core.send_pair == 1, "where its receives are"


def anything(net: Network) -> None:
    """The story has said what is to be said."""


#: Each kind, and how its stories end.
KINDS: tuple[tuple[Stories, Callable[[Network], None]], ...] = (
    (STAGED, gave_up),
    (SURVIVED, went_on),
    (ENDED, ended),
    (LEFT, left_alone),
    (TOLD, anything),
)
