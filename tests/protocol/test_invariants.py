# SPDX-License-Identifier: BSD-3-Clause
"""Each kind of fact speaks up for itself: a sound state made wrong by hand is noticed, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from protocol.one_side import ADDRESS, begun, one_side

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Move, MoveStep, Phase, Sync
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.protocol.state import MoveOut
from shiftverbs.protocol.tables import ArmState, SwitchState
from shiftverbs.protocol.timers import ArmTimer, Timer, arm_row
from shiftverbs.state_machine import RecvState, SendState

Story = Callable[[], PairProtocol]


def protected() -> PairProtocol:
    return one_side(3)[0]


def arming() -> PairProtocol:
    return begun(3)[0]


def asking() -> PairProtocol:
    p = protected()
    p.handle(ev.PathFailed(0, "PORT_ERR", advisory=True), p.state.now_ns)
    assert p.state.switch_state is SwitchState.ASK
    return p


def fencing() -> PairProtocol:
    p = protected()
    p.handle(ev.PathFailed(0, "RETRY_EXC_ERR"), p.state.now_ns)
    return p


def posting() -> PairProtocol:
    p = fencing()
    p.handle(ev.FenceCompleted(1, 0, 0, 0), p.state.now_ns)
    return p


def switched() -> PairProtocol:
    p = posting()
    p.handle(ev.ReceivesPosted(1), p.state.now_ns)
    p.handle(ev.MessageReceived(Sync(1, 1, Phase.READY, p.pairs[1].arm, True, ADDRESS, 0)), p.state.now_ns)
    assert p.send_pair == 1 and not p.switching
    return p


def moving() -> PairProtocol:
    p = protected()
    p.handle(ev.PreferPair(1), p.state.now_ns)
    p.handle(ev.FenceWrPosted(), p.state.now_ns)
    p.handle(ev.FenceWrDone(7), p.state.now_ns)
    assert p.move_told
    return p


def followed() -> PairProtocol:
    p = protected()
    move = Move(MoveStep.MOVE, 0, 1, 1, p.pairs[1].arm, 5)
    p.handle(ev.MessageReceived(move), p.state.now_ns)
    p.handle(ev.RxReached(), p.state.now_ns)
    return p


def leads_to(p: PairProtocol, target: int) -> None:
    """The MOVE that is followed says so now."""
    assert p.state.move_in is not None
    p.state.move_in.message = replace(p.state.move_in.message, target=target)


def ended() -> PairProtocol:
    p = protected()
    p.handle(ev.KeysMissing("k"), p.state.now_ns)  # at home: nothing
    p.handle(ev.WorkRefused("EINVAL"), p.state.now_ns)
    assert p.over
    return p


def _change(target: str, value: object) -> Callable[[PairProtocol], None]:
    """Set an attribute of the state, or of something in it: "switch.final", "pairs.1.used"."""

    def change(p: PairProtocol) -> None:
        thing: object = p.state
        *path, last = target.split(".")
        for name in path:
            thing = thing[int(name)] if isinstance(thing, list) else getattr(thing, name)
        setattr(thing, last, value)

    return change


BROKEN: list[tuple[Story, Callable[[PairProtocol], None], str]] = [
    (protected, lambda p: p.pairs.pop(), "has its pairs"),
    (switched, _change("epoch", 0), "only grow"),
    (protected, _change("counts.arms", 0), "only grow"),
    (protected, _change("pairs.1.arm", 0), "only grow"),
    (protected, _change("status", Status.PAIRING), "only grow"),
    (protected, _change("counts.switches", 3), "one fence"),
    (protected, _change("counts.asks_refused", 3), "only questions are refused"),
    (protected, _change("counts.aborts", 1), "FAILED, once"),
    (protected, lambda p: p.switch.hopeless.failed_on.extend([0] * 6), "given up"),
    (protected, _change("send_pair", 1), "DEFAULT sends are at home"),
    (protected, _change("recv_pair", 1), "DEFAULT receives are at home"),
    (protected, _change("send_pair", 7), "sends are on one of our pairs"),
    (protected, _change("send_state", SendState.FALLBACK), "FALLBACK sends are away"),
    (protected, _change("recv_state", RecvState.FALLBACK), "FALLBACK receives are away"),
    (fencing, _change("send_state", SendState.DEFAULT), "holds sends back"),
    (protected, _change("pairs.0.used", False), "traffic is used"),
    (protected, _change("pairs.0.clean", True), "traffic is not clean"),
    (protected, _change("pairs.0.fenced", True), "traffic is not fenced"),
    (protected, _change("pairs.0.works", False), "traffic works"),
    (protected, _change("pairs.0.stale", True), "none were left behind"),
    (protected, _change("pairs.0.state", ArmState.PROBING), "leaves a pair alone"),
    (protected, _change("send_state", SendState.WAIT_SIGNALED), "sends wait for a MOVE"),
    (moving, _change("move_out", None), "sends wait for a MOVE"),
    (moving, _change("move_out.target", 0), "to another pair"),
    (moving, _change("pairs.1.works", False), "to a pair that works"),
    (moving, _change("send_state", SendState.WAIT_SIGNALED), "behind its fence WR"),
    (asking, lambda p: setattr(p.state, "move_out", MoveOut(1, 1)), "sends wait for a MOVE"),
    (followed, _change("epoch", 1), "the epoch is that of a SWITCH"),
    (followed, lambda p: setattr(p.move, "moved_in", 1), "followed once"),
    (followed, lambda p: leads_to(p, 2), "posted where it leads"),
    (asking, _change("switching", False), "unless its state is IDLE"),
    (asking, _change("switch", None), "is known"),
    (asking, _change("switch.epoch", 5), "of the next epoch"),
    (asking, _change("switch.ask", 0), "has a number"),
    (asking, _change("switch.resetting", 3), "gives no command"),
    (switched, _change("switch", None), "the last SWITCH is kept"),
    (switched, _change("switch.epoch", 5), "that of the last SWITCH"),
    (switched, _change("switch.final", None), "has a final"),
    (switched, _change("switch.phase", Phase.POSTING), "says READY"),
    (switched, _change("switch.peer", None), "was READY"),
    (switched, _change("switch.connecting", True), "awaits no command"),
    (switched, lambda p: p.switch.tried.add(1), "by a SWITCH only"),
    (fencing, lambda p: p.switch.tried.clear(), "is being tried"),
    (fencing, _change("switch.command_ns", 1), "was given"),
    (fencing, _change("switch.settled", True), "only a SWITCH that is done"),
    (fencing, _change("switch.phase", Phase.READY), "how far we are"),
    (fencing, _change("switch.resetting", 3), "before the fence is through"),
    (fencing, _change("recv_state", RecvState.DEFAULT), "holds receives back"),
    (posting, _change("switch.final", None), "counters are final"),
    (posting, _change("switch.reset_arm", 99), "in the life agreed on"),
    (posting, _change("recv_pair", 2), "posted on the target"),
    (posting, _change("pairs.1.used", False), "takes receives is used"),
    (posting, _change("pairs.0.fenced", False), "fenced by the final"),
    (protected, _change("pairs.1.works", False), "what is clean works"),
    (protected, _change("pairs.1.used", True), "clean is not used"),
    (protected, _change("pairs.1.fenced", True), "only what was used is fenced"),
    (protected, _change("pairs.1.stale", True), "of a pair that was used"),
    (protected, _change("pairs.1.dead", True), "no clean pair"),
    (protected, lambda p: setattr(p.pairs[1], "local", replace(ADDRESS, psn=1 << 24)), "24 bits"),
    (arming, _change("pairs.1.works", True), "does not work yet"),
    (arming, _change("pairs.1.dead", True), "ARM is at no dead NIC"),
    (arming, _change("pairs.1.sent_ok", True), "before RESET is through"),
    (arming, _change("pairs.1.state", ArmState.CONNECTING), "knows where to"),
    (arming, lambda p: p.state.timers.stop(arm_row(1, ArmTimer.DEADLINE)), "has a deadline"),
    (arming, lambda p: p.state.timers.set(arm_row(1, ArmTimer.RESEND), 9), "while they matter"),
    (protected, lambda p: p.state.timers.set(arm_row(1, ArmTimer.BEGIN), 9), "where a pair is unfit"),
    (protected, lambda p: p.state.timers.set(Timer.OVER, 9), "does not say so"),
    (protected, lambda p: p.state.timers.set(Timer.ATTEMPT, 9), "only that"),
    (protected, lambda p: p.state.timers.set(Timer.SYNC, 9), "until it is settled"),
    (protected, lambda p: p.state.timers.set(Timer.FENCE_WRITE, 9), "for who waits"),
    (protected, lambda p: p.state.timers.set(Timer.PREFER, 9), "a wish"),
    (fencing, lambda p: p.state.timers.set(Timer.OPEN, 9), "behind a SWITCH"),
    (fencing, lambda p: p.state.timers.stop(Timer.ATTEMPT), "has a deadline"),
    (moving, lambda p: p.state.timers.stop(Timer.MOVE_ANSWER), "awaits its answer"),
    (moving, lambda p: p.state.timers.stop(Timer.MOVE_RESEND), "is said again"),
    (moving, lambda p: p.state.timers.set(Timer.MOVE_BEGIN, 9), "when none is under way"),
    (ended, _change("over", False), "only grow"),
    (ended, _change("status", Status.PROTECTED), "only grow"),
    (ended, lambda p: p.state.timers.set(Timer.SYNC, 9), "to say so again"),
    (ended, lambda p: setattr(p.state, "move_out", MoveOut(1, 1)), "over: no MOVE"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=lambda n: f"{n}-{BROKEN[n][2].replace(' ', '-')}")
def test_what_is_wrong_is_named(number: int) -> None:
    story, change, fact = BROKEN[number]
    p = story()
    p.invariants()
    change(p)
    with pytest.raises(AssertionError, match=f"^invariant: .*{fact}"):
        p.invariants()


def test_they_are_looked_at_after_each_event_where_wanted() -> None:
    for wanted in (False, True):
        p = protected()
        p.state.config = replace(p.config, invariants=wanted)
        p.pairs[2].dead = True
        if wanted:
            with pytest.raises(AssertionError, match="no clean pair"):
                p.handle_timeout(p.state.now_ns)
        else:
            p.handle_timeout(p.state.now_ns)
