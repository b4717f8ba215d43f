# SPDX-License-Identifier: BSD-3-Clause
"""Short stories that chance finds seldom, and the mutations that show in them.

Each returns the network at the end, for the checkers. In those of STAGED a replay would be seen: failover has given up
there, and says because of which WRs. In those of SURVIVED nobody may notice anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator.hosts import Network, Side
from simulator.journal import Wr
from simulator.rnic import MS, US, Packet

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Move, MoveStep
from shiftverbs.state_machine import SendState


def protected() -> Network:
    net = Network(1)
    net.clock.run(30 * MS)
    assert net.a.statuses == net.b.statuses == [Status.PROTECTED]
    return net


def post(side: Side, opcode: str, cell: int = 0, signaled: bool = False, fence: bool = False) -> Wr:
    app = side.app
    wr = Wr(side.name, len(app.posted) + len(app.plan), opcode, cell, 0, signaled, fence, inline=False)
    wr.buf[0] = wr.data = wr.index + 1 if opcode != "READ" else -1
    app.plan.append(wr)
    return wr


def go(net: Network) -> None:
    """Post all that is planned at once, and let it be executed."""
    for _ in range(len(net.a.app.plan)):
        net.a.app.due()
    net.clock.run(net.clock.now + MS // 10)


def lose_acks(net: Network) -> None:
    net.links["b", 0].drops += [lambda p: isinstance(p, Packet) and p.kind == "ack"] * 3


def end(net: Network, *seen: Wr) -> Network:
    net.clock.run(net.clock.now + 2000 * MS)
    assert all(net.a.over is None or str(wr) in net.a.over for wr in seen), net.a.over
    return net


def a_read_lands_where_a_write_came_from() -> Network:
    net = protected()
    write, read = post(net.a, "WRITE", 1), post(net.a, "READ", 2)
    read.buf = write.buf
    read.shared = write.shared = True
    post(net.a, "WRITE", 3, signaled=True)
    lose_acks(net)
    go(net)
    net.kill("a", 0)  # it tells nobody that it is complete
    return end(net, write, read)


def a_fence_in_between() -> Network:
    net = protected()
    read = post(net.a, "READ", 1)
    post(net.a, "READ", 2, fence=True)
    write = post(net.a, "WRITE", 1, signaled=True)
    lose_acks(net)
    go(net)
    net.kill("a", 0)  # it tells nobody that it is complete
    return end(net, read, write)


def a_dead_nic_kept_the_reads_completion() -> Network:
    net = protected()
    read, write = post(net.a, "READ", 1, signaled=True), post(net.a, "WRITE", 1, signaled=True, fence=True)
    net.hold_cqes("a", 0, True)
    go(net)
    net.kill("a", 0)
    return end(net, read, write)


def the_peers_dead_nic_kept_the_receipt() -> Network:
    net = protected()
    send, read = post(net.a, "SEND"), post(net.a, "READ", 1)
    read.buf = send.buf
    read.shared = send.shared = True
    post(net.a, "WRITE", 3, signaled=True)
    lose_acks(net)
    net.hold_cqes("b", 0, True)
    go(net)
    net.kill("b", 0)
    return end(net, send, read)


def follow_with_a_hole(net: Network, opcode: str, times: int) -> list[int]:
    """The rail that a's traffic is on loses this operation, up to `times` SWITCHes later; the others carry it.

    Returns where the hole was, as it goes along.
    """
    was: list[int] = []
    begun = net.a.HANDLERS[ev.SwitchStarted]

    def dig(k: int) -> None:
        for j in range(net.pairs):
            net.links["a", j].hole = lambda p, here=j == k: (  # type: ignore[misc]
                here and isinstance(p, Packet) and p.ref is not None and (p.kind, p.opcode) == ("req", opcode)
            )
        was.append(k)

    def follow(side: Side, action: ev.SwitchStarted) -> None:
        begun(side, action)
        if len(was) <= times:
            dig(action.target)

    dig(0)
    net.a.HANDLERS = {**net.a.HANDLERS, ev.SwitchStarted: follow}
    net.one_rail_is_well = True
    return was


def rails_that_fail_in_turn() -> Network:
    net = protected()
    follow_with_a_hole(net, "WRITE", 1)
    post(net.a, "WRITE", 1, signaled=True)
    go(net)
    return end(net)


def a_message_comes_again_and_a_write_behind_it() -> Network:
    net = protected()
    net.hold_cqes("b", 0, True)
    post(net.a, "WRITE_IMM", 1)
    post(net.a, "WRITE", 1)
    go(net)
    net.kill("b", 0)
    post(net.a, "SEND", signaled=True)
    go(net)
    return end(net)


def a_message_tells_of_a_receive_in_new_memory() -> Network:
    """Away, b posts a receive into memory that its backup is still registering, and tells a, which answers at once."""
    net = Network(1, receives=0)
    net.clock.run(30 * MS)
    net.port("a", 0, False, None)
    net.a.path_failed(0, "staged")
    net.clock.run(net.clock.now + 20 * MS)
    assert net.b.journal.recv_pair == 1 and net.b.journal.recv_open
    deliver = net.a.app.deliver

    def answer(wc: tuple[Any, ...]) -> None:
        deliver(wc)
        if wc[0] == "recv":
            post(net.a, "SEND", signaled=True)
            net.a.app.due()

    net.a.journal.deliver = answer
    for side in net.sides:
        side.journal.recv_capacity = 1
    net.a.journal.post_recv(0, [None])
    net.b.journal.post_recv(0, [None], registering=True)
    post(net.b, "SEND", signaled=True)
    net.b.app.due()
    net.clock.run(net.clock.now + 30 * MS)
    net.b.journal.registered()
    end(net)
    assert net.too_early or [wc[::2] for wc in net.b.app.wcs] == [("send", "SUCCESS"), ("recv", "SUCCESS")]
    return net


def a_peer_leaves_with_its_moved_unheard() -> Network:
    """b has moved its receives, and is not heard to say so; then its application moves the QP to ERR.

    Its BYE tells where they are: a sends there, and what b's NIC takes until it stands still is delivered.
    """
    return _moved_unheard()


def a_peer_leaves_with_its_moved_unheard_and_does_not_know_any_more() -> Network:
    """The same, but the pairing that knew it is gone on b: what a sends to receives that were left would be lost."""
    return _moved_unheard(knows=False)


def _moved_unheard(knows: bool = True) -> Network:
    net = protected()
    for k in range(net.pairs):
        net.links["b", k].hole = lambda p: isinstance(p, Move) and p.step is MoveStep.MOVED
    net.a.feed(ev.PreferPair(1))
    moved = lambda: net.a.protocol.move_told and net.b.journal.recv_pair == 1  # noqa: E731
    assert net.clock.run(net.clock.now + 100 * MS, moved)
    for _ in range(3):
        post(net.a, "SEND", signaled=True)
    go(net)
    net.nics["b"][0].command_ns = MS  # what is sent there is still taken for a while
    if not knows:
        net.b.protocol.move.moved_in = -1
    net.b.err()
    return end(net)


def moves_that_are_called_off_one_after_the_other() -> Network:
    """The message ahead of each fence waits for a receive; the target seems to fail, and the peer says to stay."""
    net = Network(1, capacity=4, receives=0)
    net.clock.run(30 * MS)
    post(net.a, "SEND")
    post(net.b, "SEND")
    post(net.b, "FADD", 8, signaled=True)  # what b has may not be fenced because of a mere hint
    for side in net.sides:
        side.journal.recv_capacity = 4
        for _ in range(len(side.app.plan)):
            side.app.due()
    net.a.feed(ev.PreferPair(1))
    for n in range(3):
        net.clock.run(net.clock.now + 250 * MS)  # its patience is over: our own WRITE is to be the fence
        assert net.a.protocol.send_state in (SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED)
        net.a.path_failed(1, "staged", advisory=True)
        stays = lambda n=n: net.a.protocol.counts.asks_refused == n + 1  # noqa: E731
        assert net.clock.run(net.clock.now + 500 * MS, stays) and net.a.journal.send_open
    for _ in range(3):
        post(net.a, "SEND", signaled=True)
    go(net)
    for side in net.sides:
        for _ in range(4):
            side.app.post_recv()
    end(net)
    assert all(side.protocol.send_pair == side.protocol.recv_pair == 1 for side in net.sides)
    return net


def a_program_that_posts_as_long_as_it_can_goes_home() -> Network:
    """a's receives are home, and its sends still away, so that more is posted than its NIC has room for."""
    net = Network(1, capacity=4)
    net.clock.run(30 * MS)
    on = lambda k: all(side.protocol.send_pair == side.protocol.recv_pair == k for side in net.sides)  # noqa: E731
    net.a.feed(ev.PreferPair(1))
    assert net.clock.run(
        net.clock.now + 50 * MS, lambda: on(1) and not any(side.busy() for side in net.sides)
    )
    net.a.health(0, False)
    net.b.feed(ev.PreferPair(0))
    net.clock.run(net.clock.now + 50 * MS)
    assert (net.a.journal.send_pair, net.a.journal.recv_pair) == (1, 0)
    app, poll = net.a.app, net.a.app.poll

    def poll_and_post() -> None:
        poll()
        app.backlog = len(app.plan)
        app._post()

    app.poll = poll_and_post  # type: ignore[method-assign]
    for link in net.links.values():
        link.delay_ns = 100 * US
    for _ in range(2000):
        post(net.a, "WRITE", 1, signaled=True)
    for _ in range(net.a.journal.capacity):  # what is sent one by one completes one by one
        app.due()
        net.clock.run(net.clock.now + 50 * US)
    net.clock.run(net.clock.now + MS)
    assert net.a.journal.blocked
    net.a.health(0, True)
    end(net)
    assert on(0) and len(app.wcs) == 2000
    return net


def a_qp_that_failed_before_it_was_protected() -> Network:
    """b's dummy has no ACK yet, and a is PROTECTED. b's application sees an error and posts on, when a fails over."""
    net = Network(1)
    net.links["a", 1].hole = lambda p: isinstance(p, Packet) and p.kind == "ack"
    net.b.qps[1].RETRIES = 1000
    net.clock.run(30 * MS)
    assert net.a.statuses == [Status.PROTECTED] and not net.b.statuses
    app = net.b.app
    app.posts_on = True
    net.b.qps[0].to_error()
    net.clock.run(net.clock.now + MS)
    assert app.wcs[0] == ("recv", 0, "WR_FLUSH_ERR")
    net.links["a", 1].hole = lambda p: False
    for n in range(40):
        post(net.b, "SEND", signaled=True)
        net.clock.later(n * 20 * US, app.due)
    net.clock.run(net.clock.now + 100 * US)
    net.a.path_failed(0, "staged")
    return end(net)


def a_peer_leaves_just_behind_an_error() -> Network:
    """a's only WR has failed. Its error is withheld, and the driver has not heard of it when b's BYE comes."""
    net = protected()
    net.links["a", 0].hole = lambda p: isinstance(p, Packet) and p.kind == "req"
    post(net.a, "SEND", signaled=True)
    go(net)
    net.a.driver_lag_ns = MS
    withheld = lambda: net.a.journal.pairs[0].error_raised  # noqa: E731
    while not withheld():
        net.clock.run(net.clock.now + 50 * US)
    net.b.close()
    return end(net)


#: Each story with the mutations that must show in it.
STAGED: dict[Callable[[], Network], tuple[str, ...]] = {
    a_read_lands_where_a_write_came_from: ("send_again_what_a_read_overwrote",),
    a_fence_in_between: ("repeat_a_read_behind_a_fence", "fence_only_the_wr_that_carries_it"),
    a_dead_nic_kept_the_reads_completion: ("trust_a_dead_nic_to_have_told", "repeat_a_read_behind_a_fence"),
    the_peers_dead_nic_kept_the_receipt: ("trust_the_counter_of_a_dead_nic",),
}

SURVIVED: dict[Callable[[], Network], tuple[str, ...]] = {
    rails_that_fail_in_turn: ("give_up_after_one_quick_round",),
    a_message_comes_again_and_a_write_behind_it: ("let_an_old_message_cover_a_write",),
    a_message_tells_of_a_receive_in_new_memory: ("let_a_message_overtake_a_receive",),
    a_program_that_posts_as_long_as_it_can_goes_home: ("put_the_fence_behind_all_that_waits",),
    moves_that_are_called_off_one_after_the_other: ("a_fence_write_for_each_move",),
}

#: Both sides end in these, and each of them is told the truth about what was done.
ENDED: dict[Callable[[], Network], tuple[str, ...]] = {
    a_qp_that_failed_before_it_was_protected: ("go_on_behind_an_error_that_was_shown",),
    a_peer_leaves_just_behind_an_error: ("swallow_what_was_withheld",),
    a_peer_leaves_with_its_moved_unheard_and_does_not_know_any_more: ("call_off_a_move_that_was_told",),
}

#: b leaves, and a goes on as a plain QP does.
LEFT: dict[Callable[[], Network], tuple[str, ...]] = {
    a_peer_leaves_with_its_moved_unheard: ("call_off_a_move_that_was_told",),
}
