# SPDX-License-Identifier: BSD-3-Clause
"""Traffic both ways in virtual time under each kind of fault: everything arrives once and in order, and comes home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from protocol.world import World

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Sync
from shiftverbs.protocol.pair import MS
from shiftverbs.state_machine import RecvState, SendState

SEEDS = 12
Fault = Callable[[World], None]


def traffic(w: World, n: int = 400, gap_ns: int = 100_000) -> None:
    """Both sides post n messages, gap_ns apart."""
    for side in (w.a, w.b):
        for i in range(n):
            w.later(i * gap_ns + w.rng.randrange(gap_ns), side.post)


def initiator_port(w: World) -> None:
    w.later(5 * MS, lambda: w.port("a", 0, False))
    w.later(30 * MS, lambda: w.port("a", 0, True))


def switch(w: World) -> None:
    w.later(5 * MS, lambda: w.blackhole(0, True))
    w.later(60 * MS, lambda: w.blackhole(0, False))


def ack_lost(w: World) -> None:
    w.later(5 * MS, lambda: setattr(w, "ack_drops", 1))
    w.later(5 * MS + 90_000, lambda: w.port("b", 0, False))
    w.later(40 * MS, lambda: w.port("b", 0, True))


def flaps(w: World) -> None:
    for i in range(5):
        w.later((5 + 40 * i) * MS, lambda i=i: w.port("ab"[i % 2], 0, False))  # type: ignore[misc]
        w.later((25 + 40 * i) * MS, lambda i=i: w.port("ab"[i % 2], 0, True))  # type: ignore[misc]


def then_the_backup(w: World) -> None:
    initiator_port(w)
    w.later(12 * MS, lambda: w.blackhole(1, True))
    w.later(35 * MS, lambda: w.blackhole(1, False))


def slow_nic(w: World) -> None:
    w.b.slow_ns[1] = 20 * MS
    initiator_port(w)


def hung_nic(w: World) -> None:
    w.later(4 * MS, lambda: w.b.hung.add(1))
    initiator_port(w)
    w.later(300 * MS, lambda: w.b.unhang(1))


def story(w: World) -> str:
    """The last actions, for a failing test's message."""
    ends = "\n".join(str(line) for line in w.log[-40:])
    return f"{ends}\na {w.a.protocol.send_state} {w.a.failed} b {w.b.protocol.send_state} {w.b.failed}"


def come_home(w: World, n: int, within_ns: int = 30_000 * MS) -> None:
    """Run until both are home and everything is delivered, and judge."""
    start = w.now
    home = w.run(
        until_ns=start + within_ns,
        condition=lambda: (
            w.now > start + 60 * MS and w.home() and w.delivered() and w.a.tail == n == w.b.tail
        ),
    )
    w.check()
    assert home, story(w)


@pytest.mark.parametrize(
    "lossy", [(0.0, 0.0, 2), (0.2, 0.2, 2), (0.1, 0.2, 3)], ids=["clean", "lossy", "three"]
)
@pytest.mark.parametrize(
    "fault",
    [initiator_port, switch, ack_lost, flaps, then_the_backup, slow_nic, hung_nic],
    ids=lambda f: f.__name__,
)
def test_traffic_survives_and_comes_home(fault: Fault, lossy: tuple[float, float, int]) -> None:
    loss, duplicate, pairs = lossy
    for seed in range(SEEDS):
        print("seed", seed)
        w = World(seed, pairs, loss=loss)
        w.duplicate = duplicate
        w.jitter_ns = 200_000 if loss else w.jitter_ns
        w.run(until_ns=w.now + 50 * MS)
        traffic(w)
        fault(w)
        come_home(w, 400)


def test_a_seed_replays_bit_for_bit() -> None:
    logs = []
    for _ in range(2):
        w = World(99, 3, loss=0.3)
        traffic(w, 100)
        flaps(w)
        w.run(until_ns=w.now + 1000 * MS)
        logs.append(w.log)
    assert logs[0] == logs[1]


def ready(pairs: int = 2, seed: int = 1) -> World:
    """A world in which every backup is armed."""
    w = World(seed, pairs)
    assert w.run(until_ns=w.now + 50 * MS, condition=w.home)
    assert w.a.statuses == w.b.statuses == [Status.PROTECTED]
    return w


def test_migrate_and_restore_move_both_directions_and_replay_nothing() -> None:
    w = ready()
    traffic(w, 300)
    w.later(5 * MS, lambda: w.a.feed(ev.PreferPair(1)))
    assert w.run(
        until_ns=w.now + 200 * MS,
        condition=lambda: all(
            s.protocol.send_pair == 1 == s.protocol.recv_pair and s.protocol.send_state is SendState.FALLBACK
            for s in (w.a, w.b)
        ),
    ), story(w)
    w.later(5 * MS, lambda: w.b.feed(ev.PreferPair(0)))
    come_home(w, 300)
    assert not any(isinstance(action, ev.Trim | ev.Fence) for _, _, action in w.log)


def test_where_wishes_cross_both_sides_follow_the_same_one() -> None:
    """Each side asks before it hears of the other: the greater pair holds, and who has heard of it can undo it."""
    w = ready()
    traffic(w, 300)
    w.later(5 * MS, lambda: (w.a.feed(ev.PreferPair(0)), w.b.feed(ev.PreferPair(1))))

    def both_away() -> bool:
        return all(
            (s.protocol.preferred, s.protocol.send_pair, s.protocol.recv_pair) == (1, 1, 1)
            for s in (w.a, w.b)
        )

    assert w.run(until_ns=w.now + 200 * MS, condition=both_away), story(w)
    w.later(5 * MS, lambda: w.a.feed(ev.PreferPair(0)))
    come_home(w, 300)
    assert not any(isinstance(action, ev.Trim | ev.Fence) for _, _, action in w.log)


def test_a_dead_nic_is_left_and_never_used_again() -> None:
    w = ready(3)
    traffic(w, 200)
    w.later(5 * MS, lambda: w.kill("b", 0))
    w.run(until_ns=w.now + 3000 * MS)
    w.check()
    assert w.delivered()
    assert {w.a.protocol.send_pair, w.b.protocol.send_pair} == {1}
    assert w.a.protocol.send_state is SendState.FALLBACK


def test_with_every_pair_gone_both_sides_get_their_errors() -> None:
    w = ready()
    traffic(w, 200)
    w.later(5 * MS, lambda: (w.blackhole(0, True), w.blackhole(1, True)))
    w.run(until_ns=w.now + 20_000 * MS)
    w.check()
    for side in (w.a, w.b):
        assert side.failed is not None
        assert side.protocol.send_state is SendState.DEFAULT
        assert side.statuses[-1] is Status.FAILED


def test_closing_tells_the_peer() -> None:
    w = ready()
    w.a.close()
    w.run(until_ns=w.now + 50 * MS)
    assert w.b.let_go == "the peer closed its QP"
    assert w.b.statuses[-1] is Status.UNPROTECTED


def test_closing_in_the_middle_of_a_switch_ends_it_with_errors_at_once() -> None:
    w = ready()
    w.a.post()
    w.b.post()
    w.kill("b", 0)
    w.later(100_000, w.a.close)
    w.run(until_ns=w.now + 100 * MS)
    assert w.b.failed is not None or w.b.let_go is not None


# ---- named regressions ---------------------------------------------------------------------------------------------


def address() -> PairAddress:
    return PairAddress(b"x" * 16, 0, 99, 5, 3)


def one_side(pairs: int = 2) -> World:
    """Side a of an armed world; its peer is played by the test."""
    w = ready(pairs)
    w.loss = 1.0
    w.log.clear()
    return w


def said(w: World, side: str = "a") -> list[object]:
    return [
        action.message for _, name, action in w.log if name == side and isinstance(action, ev.SendMessage)
    ]


def test_rx_reached_while_asking_is_not_forgotten() -> None:
    """The MOVE that waited for it was never answered, and the peer's deadline made a needless SWITCH of it."""
    w = one_side()
    p, now = w.a.protocol, w.now
    arm = p.pairs[1].arm
    p.handle(ev.MessageReceived(Move(MoveStep.MOVE, 0, 1, 1, arm, 5)), now)
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    assert p.switching
    assert not any(isinstance(a, ev.MoveReceives) for a in p.handle(ev.RxReached(), now))
    refuse = Sync(1, 1, Phase.REFUSE, 0, False, address(), 0, ask=1)
    actions = p.handle(ev.MessageReceived(refuse), now)
    assert ev.AwaitRx(5) in actions
    assert ev.MoveReceives(1, 1) in p.handle(ev.RxReached(), now)


def test_ready_is_said_when_the_receives_are_posted() -> None:
    """READY, and the peer's replay, came while the memory of the receives was still being registered."""
    w = one_side()
    p, now = w.a.protocol, w.now
    arm = p.pairs[1].arm
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    actions = p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    assert ev.PostReceives(1, 1) in actions
    for _ in range(300):  # the peer is heard, and waits
        now += 100 * MS
        posting = Sync(1, 1, Phase.POSTING, arm, True, address(), 0)
        actions = p.handle(ev.MessageReceived(posting), now) + p.handle_timeout(now)
        assert {m.phase for m in sent(actions)} <= {Phase.POSTING}
        assert p.switching and p.epoch == 1
    assert [m.phase for m in sent(p.handle(ev.ReceivesPosted(1), now))] == [Phase.READY]
    # Its last word was that its NIC registers memory: it has the whole deadline, not the one pair's share.
    p.handle_timeout(now + 1900 * MS)
    assert p.epoch == 1
    p.handle_timeout(now + 2100 * MS)
    assert p.epoch == 2, "a silent peer is not waited for"


def test_time_in_which_receives_are_posted_is_taken_from_no_pair() -> None:
    """Their memory was registered for long, there and here; then the pair failed, and the next one got no time."""
    w = one_side(3)
    p, now = w.a.protocol, w.now
    arms = [pair.arm for pair in p.pairs]
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    for i in range(150):
        now += 100 * MS
        if i == 75:
            p.handle(ev.ReceivesPosted(1), now)  # only the peer's are not posted from here on
        p.handle(ev.MessageReceived(Sync(1, 1, Phase.POSTING, arms[1], True, address(), 0)), now)
        p.handle_timeout(now)
    assert p.epoch == 1
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    assert ev.PostReceives(2, 2) in p.handle(ev.FenceCompleted(2, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(2), now)
    now += 100 * MS
    p.handle_timeout(now)
    assert p.epoch == 2 and p.switching
    p.handle(ev.MessageReceived(Sync(2, 2, Phase.READY, arms[2], True, address(), 0)), now)
    assert not p.switching and p.send_pair == p.recv_pair == 2


def test_a_peer_that_talks_for_ever_without_progress_is_left() -> None:
    """All but posting counts: five deadlines after the first attempt began."""
    w = one_side(3)
    p, now = w.a.protocol, w.now
    arm = p.pairs[1].arm
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    now += 3000 * MS
    p.handle(ev.ReceivesPosted(1), now)
    until = now + 5 * p.config.peer_deadline_ns
    while now < until:
        assert p.epoch == 1
        now += 100 * MS
        p.handle(ev.MessageReceived(Sync(1, 1, Phase.FENCED, arm, False, address(), 0)), now)
        p.handle_timeout(now)
    assert p.epoch == 2


@pytest.mark.parametrize(
    "deadline_ms, silent_ms, posting_ms", [(300, 200, 400), (150, 150, 400), (3000, 1000, 3000)]
)
def test_one_lost_message_does_not_end_an_attempt(deadline_ms: int, silent_ms: int, posting_ms: int) -> None:
    """With a short deadline a pair's share of it was as long as the pause between two messages."""
    for phase in (Phase.FENCED, Phase.POSTING):
        allowed_ms = posting_ms if phase is Phase.POSTING else silent_ms
        w = one_side(3)
        p, now = w.a.protocol, w.now
        p.state.config = replace(p.config, peer_deadline_ns=deadline_ms * MS)
        arm = p.pairs[1].arm
        p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
        p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
        p.handle(ev.ReceivesPosted(1), now)
        p.handle(ev.MessageReceived(Sync(1, 1, phase, arm, True, address(), 0)), now)
        p.handle_timeout(now + allowed_ms * MS - 1)
        assert p.epoch == 1, phase
        p.handle_timeout(now + allowed_ms * MS)
        assert p.epoch == 2, phase


def test_receives_of_an_attempt_that_is_over_say_nothing() -> None:
    w = one_side(3)
    p, now = w.a.protocol, w.now
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    assert ev.PostReceives(1, 1) in p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    assert p.epoch == 2
    assert ev.PostReceives(2, 2) in p.handle(ev.FenceCompleted(2, 0, 0, 0), now)
    assert not sent(p.handle(ev.ReceivesPosted(1), now))
    assert not sent(p.handle(ev.ReceivesPosted(1, "refused"), now))
    assert [m.phase for m in sent(p.handle(ev.ReceivesPosted(2), now))] == [Phase.READY]


def test_a_target_that_refuses_a_receive_is_left() -> None:
    w = one_side(3)
    p, now = w.a.protocol, w.now
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(1, "refused"), now)
    assert p.epoch == 2 and p.recv_pair == 1 and p.switching
    move = one_side()
    p, now = move.a.protocol, move.now
    p.handle(ev.MessageReceived(Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)), now)
    p.handle(ev.RxReached(), now)
    p.handle(ev.ReceivesPosted(1, "refused"), now)
    assert p.switching and p.epoch == 1


def test_a_move_waits_for_receives_as_long_as_the_peer_says_so() -> None:
    """It was taken for a broken path after 500 ms, with every path healthy."""
    w = one_side()
    p, now = w.a.protocol, w.now
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), now)
    assert ev.MoveReceives(1, 1) in p.handle(ev.RxReached(), now)
    assert [m.step for m in sent(p.handle(ev.MessageReceived(move), now))] == [MoveStep.HELD]
    assert not p.handle(ev.RxReached(), now)
    assert [m.step for m in sent(p.handle(ev.ReceivesPosted(1), now))] == [MoveStep.MOVED]
    assert [m.step for m in sent(p.handle(ev.MessageReceived(move), now))] == [MoveStep.MOVED]
    w = one_side()
    p, now = w.a.protocol, w.now
    p.handle(ev.PreferPair(1), now)
    p.handle(ev.FencePosted(), now)
    (told,) = [m for m in sent(p.handle(ev.FenceDone(7), now)) if isinstance(m, Move)]
    held = replace(told, step=MoveStep.HELD)
    for _ in range(30):
        now += 100 * MS
        p.handle_timeout(now)
        p.handle(ev.MessageReceived(held), now)
        assert not p.switching
    now += 501 * MS
    p.handle_timeout(now)
    assert p.switching


def sent(actions: list[ev.Action]) -> list[Any]:
    """What these actions say."""
    return [action.message for action in actions if isinstance(action, ev.SendMessage)]


def test_a_dropped_question_leaves_the_last_switch_known() -> None:
    """A late SYNC of the SWITCH before the question was taken for a new one, and joined."""
    w = one_side()
    p, now = w.a.protocol, w.now
    arm = p.pairs[1].arm
    fence = next(a for a in p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now) if isinstance(a, ev.Fence))
    p.handle(ev.FenceCompleted(fence.number, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(1), now)
    ready_1 = Sync(1, 1, Phase.READY, arm, True, address(), 0, seen_phase=int(Phase.READY), seen_arm=arm)
    p.handle(ev.MessageReceived(ready_1), now)
    assert not p.switching and p.send_pair == 1
    p.handle(ev.PathFailed(1, "PORT_ERR", advisory=True), now)
    assert p.switching
    p.handle(ev.MessageReceived(Sync(2, 0, Phase.REFUSE, 0, False, address(), 0, ask=1)), now)
    assert not p.switching
    actions = p.handle(ev.MessageReceived(ready_1), now)
    assert not any(isinstance(a, ev.SwitchStarted | ev.CloseSend) for a in actions)
    assert not p.switching and p.epoch == 1


def test_a_move_whose_target_failed_meanwhile_is_refused() -> None:
    """Receives were posted on a pair that was being reset."""
    w = one_side()
    p, now = w.a.protocol, w.now
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), now)
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    actions = p.handle(ev.RxReached(), now)
    assert not any(isinstance(a, ev.MoveReceives) for a in actions)
    assert [a.message.step for a in actions if isinstance(a, ev.SendMessage)] == [MoveStep.REFUSED]
    assert p.recv_state is RecvState.DEFAULT


def test_an_advisory_trigger_never_leaves_for_a_dead_backup() -> None:
    """Both ports of a host blink: plain verbs lose nothing, so nothing may be fenced."""
    w = one_side()
    p = w.a.protocol
    p.handle(ev.PathHealth(1, False), w.now)
    assert p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), w.now) == []
    assert not p.switching


def test_the_target_failing_during_the_question_fences_nothing() -> None:
    w = one_side()
    p, now = w.a.protocol, w.now
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    actions = p.handle(ev.NicDead(1), now)
    assert not any(isinstance(a, ev.Fence) for a in actions)
    assert ev.OpenSend(0) in actions
    assert not p.switching


def test_a_question_ends_when_its_target_dies() -> None:
    """The gate stayed closed for a second, waiting for an answer over a NIC pair that was dead."""
    w = one_side()
    p, now = w.a.protocol, w.now
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    assert ev.OpenSend(0) in p.handle(ev.PathHealth(1, False), now)
    assert not p.switching


def test_late_news_of_an_old_life_does_not_end_a_switch() -> None:
    """QP_FATAL of the QP that is being fenced counted as the failure of the next attempt: ABORT for nothing."""
    w = ready()
    for pair in (0, 1, 0, 1, 0):
        w.a.feed(ev.PathFailed(pair, "QP_FATAL"))
    traffic(w, 20)
    come_home(w, 20)


def test_a_switch_before_our_own_arm_was_through_protects() -> None:
    """The side whose ARM was cut short stayed PAIRING, so its next path error went to the application."""
    w = World(3)
    w.run(until_ns=w.now + 50 * MS, condition=lambda: bool(w.a.statuses or w.b.statuses))
    first, other = (w.a, w.b) if w.a.statuses else (w.b, w.a)
    assert not other.statuses
    first.execute(first.protocol.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), w.now))
    w.run(until_ns=w.now + 20 * MS, condition=lambda: bool(other.statuses))
    assert other.statuses == [Status.PROTECTED]


def test_a_nic_that_never_carries_out_a_command_does_not_hold_up_the_switch() -> None:
    """The peer went on talking, so the deadline of the attempt moved on for ten seconds."""
    w = ready(3)
    for side in (w.a, w.b):
        side.protocol.pairs[1].clean = False  # the target must be reset, and that hangs
        side.protocol.pairs[2].clean = True
        side.protocol.handle(ev.PathHealth(2, False), w.now)
    w.a.hung.add(1)
    w.a.execute(w.a.protocol.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), w.now))
    assert w.run(
        until_ns=w.now + 2500 * MS, condition=lambda: w.a.protocol.send_pair == w.b.protocol.send_pair == 2
    ), story(w)


def test_the_initiator_hears_that_its_backup_is_not_fit() -> None:
    """An idle pair broke on the other side only: the initiator thought it fit for ever."""
    w = ready()
    assert w.a.protocol.initiator
    w.b.stop(1)
    w.b.feed(ev.PathFailed(1, "QP_FATAL"))
    arm = w.a.protocol.pairs[1].arm
    assert w.run(
        until_ns=w.now + 2000 * MS, condition=lambda: w.home() and w.a.protocol.pairs[1].arm > arm
    ), story(w)


def test_whoever_speaks_to_a_side_that_gave_up_hears_so() -> None:
    w = one_side()
    p, now = w.a.protocol, w.now
    p.ending.abort("test")
    for message in (Arm(ArmStep.REQ, 0, 1, 9, address()), Move(MoveStep.MOVE, 0, 1, 1, 1, 0)):
        actions = p.handle(ev.MessageReceived(message), now)
        assert [a.message.phase for a in actions if isinstance(a, ev.SendMessage)] == [Phase.ABORT]


def test_no_message_is_sent_to_receives_that_a_move_left_behind() -> None:
    """The peer moved away and back before the pair was reset: its messages fell into stale receives and were lost."""
    w = one_side()
    p, now = w.a.protocol, w.now
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), now)
    assert ev.MoveReceives(1, 1) in p.handle(ev.RxReached(), now)
    p.handle(ev.ReceivesPosted(1), now)
    back = Move(MoveStep.MOVE, 0, 2, 0, p.pairs[0].arm, 7)
    actions = p.handle(ev.MessageReceived(back), now)
    assert [a.message.step for a in actions if isinstance(a, ev.SendMessage)][:1] == [MoveStep.REFUSED]
    # Our own sends make room, so that the pair can be reset; then both come home.
    assert p.state.move_out is not None
    assert p.state.move_out.target == 1


def test_migrate_and_restore_in_quick_succession_lose_nothing() -> None:
    for seed in range(20):
        w = ready(seed=seed)
        traffic(w, 200, gap_ns=20_000)
        for i in range(12):
            side = w.a if w.rng.random() < 0.5 else w.b
            w.later(w.rng.randrange(4 * MS), lambda side=side, i=i: side.feed(ev.PreferPair(i % 2)))  # type: ignore[misc]
        w.later(5 * MS, lambda w=w: w.a.feed(ev.PreferPair(0)))  # type: ignore[misc]
        come_home(w, 200)


def test_a_completion_of_the_life_before_proves_nothing_of_the_new_one() -> None:
    """A dummy that came back before RESET was through armed the next life, whose own then took a message's receive."""
    w = one_side()
    p, now = w.a.protocol, w.now
    assert p.initiator
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    now += 1000 * MS
    (reset,) = [a for a in p.handle_timeout(now) if isinstance(a, ev.ResetPair)]
    p.handle(ev.ArmCompletion(1, receive=True, ok=True), now)  # late
    p.handle(ev.PairReset(1, reset.arm, b"x" * 16, 3), now)
    rep = Arm(ArmStep.REP, 0, 1, reset.arm, address())
    (connect,) = [a for a in p.handle(ev.MessageReceived(rep), now) if isinstance(a, ev.ConnectPair)]
    p.handle(ev.PairConnected(1, connect.arm, connect.stage), now)
    p.handle(ev.ArmCompletion(1, receive=False, ok=True), now)
    assert not p.pairs[1].works
    p.handle(ev.ArmCompletion(1, receive=True, ok=True), now)
    assert p.pairs[1].works
