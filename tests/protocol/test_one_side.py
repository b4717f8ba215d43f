# SPDX-License-Identifier: BSD-3-Clause
"""What went wrong once, on one side alone: one protocol, and a peer that the test plays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from protocol.one_side import ADDRESS, one_side, sent

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, Phase, Sync
from shiftverbs.protocol.pair import MS
from shiftverbs.state_machine import RecvState


def test_rx_reached_while_asking_is_not_forgotten() -> None:
    """The MOVE that waited for it was never answered, and the peer's deadline made a needless SWITCH of it."""
    p, now = one_side()
    arm = p.pairs[1].arm
    p.handle(ev.MessageReceived(Move(MoveStep.MOVE, 0, 1, 1, arm, 5)), now)
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    assert p.switching
    assert not any(isinstance(a, ev.MoveReceives) for a in p.handle(ev.RxReached(), now))
    refuse = Sync(1, 1, Phase.REFUSE, 0, False, ADDRESS, 0, ask=1)
    actions = p.handle(ev.MessageReceived(refuse), now)
    assert ev.AwaitRx(5) in actions
    assert ev.MoveReceives(1, 1) in p.handle(ev.RxReached(), now)


def test_ready_is_said_when_the_receives_are_posted() -> None:
    """READY, and the peer's replay, came while the memory of the receives was still being registered."""
    p, now = one_side()
    arm = p.pairs[1].arm
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    actions = p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    assert ev.PostReceives(1, 1) in actions
    for _ in range(300):  # the peer is heard, and waits
        now += 100 * MS
        posting = Sync(1, 1, Phase.POSTING, arm, True, ADDRESS, 0)
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
    p, now = one_side(3)
    arms = [pair.arm for pair in p.pairs]
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    for i in range(150):
        now += 100 * MS
        if i == 75:
            p.handle(ev.ReceivesPosted(1), now)  # only the peer's are not posted from here on
        p.handle(ev.MessageReceived(Sync(1, 1, Phase.POSTING, arms[1], True, ADDRESS, 0)), now)
        p.handle_timeout(now)
    assert p.epoch == 1
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    assert ev.PostReceives(2, 2) in p.handle(ev.FenceCompleted(2, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(2), now)
    now += 100 * MS
    p.handle_timeout(now)
    assert p.epoch == 2 and p.switching
    p.handle(ev.MessageReceived(Sync(2, 2, Phase.READY, arms[2], True, ADDRESS, 0)), now)
    assert not p.switching and p.send_pair == p.recv_pair == 2


def test_a_peer_that_talks_for_ever_without_progress_is_left() -> None:
    """All but posting counts: five deadlines after the first attempt began."""
    p, now = one_side(3)
    arm = p.pairs[1].arm
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    now += 3000 * MS
    p.handle(ev.ReceivesPosted(1), now)
    until = now + 5 * p.config.peer_deadline_ns
    while now < until:
        assert p.epoch == 1
        now += 100 * MS
        p.handle(ev.MessageReceived(Sync(1, 1, Phase.FENCED, arm, False, ADDRESS, 0)), now)
        p.handle_timeout(now)
    assert p.epoch == 2


@pytest.mark.parametrize(
    "deadline_ms, silent_ms, posting_ms", [(300, 200, 400), (150, 150, 400), (3000, 1000, 3000)]
)
def test_one_lost_message_does_not_end_an_attempt(deadline_ms: int, silent_ms: int, posting_ms: int) -> None:
    """With a short deadline a pair's share of it was as long as the pause between two messages."""
    for phase in (Phase.FENCED, Phase.POSTING):
        allowed_ms = posting_ms if phase is Phase.POSTING else silent_ms
        p, now = one_side(3)
        p.state.config = replace(p.config, peer_deadline_ns=deadline_ms * MS)
        arm = p.pairs[1].arm
        p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
        p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
        p.handle(ev.ReceivesPosted(1), now)
        p.handle(ev.MessageReceived(Sync(1, 1, phase, arm, True, ADDRESS, 0)), now)
        p.handle_timeout(now + allowed_ms * MS - 1)
        assert p.epoch == 1, phase
        p.handle_timeout(now + allowed_ms * MS)
        assert p.epoch == 2, phase


def test_receives_of_an_attempt_that_is_over_say_nothing() -> None:
    p, now = one_side(3)
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    assert ev.PostReceives(1, 1) in p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    assert p.epoch == 2
    assert ev.PostReceives(2, 2) in p.handle(ev.FenceCompleted(2, 0, 0, 0), now)
    assert not sent(p.handle(ev.ReceivesPosted(1), now))
    assert not sent(p.handle(ev.ReceivesPosted(1, "refused"), now))
    assert [m.phase for m in sent(p.handle(ev.ReceivesPosted(2), now))] == [Phase.READY]


def test_a_target_that_refuses_a_receive_is_left() -> None:
    p, now = one_side(3)
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now)
    p.handle(ev.FenceCompleted(1, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(1, "refused"), now)
    assert p.epoch == 2 and p.recv_pair == 1 and p.switching
    p, now = one_side()
    p.handle(ev.MessageReceived(Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)), now)
    p.handle(ev.RxReached(), now)
    p.handle(ev.ReceivesPosted(1, "refused"), now)
    assert p.switching and p.epoch == 1


def test_a_move_waits_for_receives_as_long_as_the_peer_says_so() -> None:
    """It was taken for a broken path after 500 ms, with every path healthy."""
    p, now = one_side()
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), now)
    assert ev.MoveReceives(1, 1) in p.handle(ev.RxReached(), now)
    assert [m.step for m in sent(p.handle(ev.MessageReceived(move), now))] == [MoveStep.HELD]
    assert not p.handle(ev.RxReached(), now)
    assert [m.step for m in sent(p.handle(ev.ReceivesPosted(1), now))] == [MoveStep.MOVED]
    assert [m.step for m in sent(p.handle(ev.MessageReceived(move), now))] == [MoveStep.MOVED]
    p, now = one_side()
    p.handle(ev.PreferPair(1), now)
    p.handle(ev.FenceWrPosted(), now)
    (told,) = [m for m in sent(p.handle(ev.FenceWrDone(7), now)) if isinstance(m, Move)]
    held = replace(told, step=MoveStep.HELD)
    for _ in range(30):
        now += 100 * MS
        p.handle_timeout(now)
        p.handle(ev.MessageReceived(held), now)
        assert not p.switching
    now += 501 * MS
    p.handle_timeout(now)
    assert p.switching


def test_a_dropped_question_leaves_the_last_switch_known() -> None:
    """A late SYNC of the SWITCH before the question was taken for a new one, and joined."""
    p, now = one_side()
    arm = p.pairs[1].arm
    fence = next(a for a in p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), now) if isinstance(a, ev.Fence))
    p.handle(ev.FenceCompleted(fence.number, 0, 0, 0), now)
    p.handle(ev.ReceivesPosted(1), now)
    ready_1 = Sync(1, 1, Phase.READY, arm, True, ADDRESS, 0, seen_phase=int(Phase.READY), seen_arm=arm)
    p.handle(ev.MessageReceived(ready_1), now)
    assert not p.switching and p.send_pair == 1
    p.handle(ev.PathFailed(1, "PORT_ERR", advisory=True), now)
    assert p.switching
    p.handle(ev.MessageReceived(Sync(2, 0, Phase.REFUSE, 0, False, ADDRESS, 0, ask=1)), now)
    assert not p.switching
    actions = p.handle(ev.MessageReceived(ready_1), now)
    assert not any(isinstance(a, ev.SwitchStarted | ev.CloseSend) for a in actions)
    assert not p.switching and p.epoch == 1


def test_a_move_whose_target_failed_meanwhile_is_refused() -> None:
    """Receives were posted on a pair that was being reset."""
    p, now = one_side()
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), now)
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    actions = p.handle(ev.RxReached(), now)
    assert not any(isinstance(a, ev.MoveReceives) for a in actions)
    assert [a.message.step for a in actions if isinstance(a, ev.SendMessage)] == [MoveStep.REFUSED]
    assert p.recv_state is RecvState.DEFAULT


def test_an_advisory_trigger_never_leaves_for_a_dead_backup() -> None:
    """Both ports of a host blink: plain verbs lose nothing, so nothing may be fenced."""
    p, now = one_side()
    p.handle(ev.PathHealth(1, False), now)
    assert p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now) == []
    assert not p.switching


def test_the_target_failing_during_the_question_fences_nothing() -> None:
    p, now = one_side()
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    actions = p.handle(ev.NicDead(1), now)
    assert not any(isinstance(a, ev.Fence) for a in actions)
    assert ev.OpenSend(0) in actions
    assert not p.switching


def test_a_question_ends_when_its_target_dies() -> None:
    """The gate stayed closed for a second, waiting for an answer over a NIC pair that was dead."""
    p, now = one_side()
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), now)
    assert ev.OpenSend(0) in p.handle(ev.PathHealth(1, False), now)
    assert not p.switching


def test_whoever_speaks_to_a_side_that_gave_up_hears_so() -> None:
    p, now = one_side()
    p.ending.abort("test")
    for message in (Arm(ArmStep.REQ, 0, 1, 9, ADDRESS), Move(MoveStep.MOVE, 0, 1, 1, 1, 0)):
        actions = p.handle(ev.MessageReceived(message), now)
        assert [a.message.phase for a in actions if isinstance(a, ev.SendMessage)] == [Phase.ABORT]


def test_no_message_is_sent_to_receives_that_a_move_left_behind() -> None:
    """The peer moved away and back before the pair was reset: its messages fell into stale receives and were lost."""
    p, now = one_side()
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


def test_a_completion_of_the_life_before_proves_nothing_of_the_new_one() -> None:
    """A dummy that came back before RESET was through armed the next life, whose own then took a message's receive."""
    p, now = one_side()
    assert p.initiator
    p.handle(ev.PathFailed(1, "QP_FATAL"), now)
    now += 1000 * MS
    (reset,) = [a for a in p.handle_timeout(now) if isinstance(a, ev.ResetPair)]
    p.handle(ev.ArmCompletion(1, receive=True, ok=True), now)  # late
    p.handle(ev.PairReset(1, reset.arm, b"x" * 16, 3), now)
    rep = Arm(ArmStep.REP, 0, 1, reset.arm, ADDRESS)
    (connect,) = [a for a in p.handle(ev.MessageReceived(rep), now) if isinstance(a, ev.ConnectPair)]
    p.handle(ev.PairConnected(1, connect.arm, connect.stage), now)
    p.handle(ev.ArmCompletion(1, receive=False, ok=True), now)
    assert not p.pairs[1].works
    p.handle(ev.ArmCompletion(1, receive=True, ok=True), now)
    assert p.pairs[1].works
