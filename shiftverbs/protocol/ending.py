# SPDX-License-Identifier: BSD-3-Clause
"""How a pairing ends: ABORT and BYE, ours and the peer's. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.directions import Directions
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Phase, Sync
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.state import PairState
from shiftverbs.protocol.tables import SwitchInput
from shiftverbs.protocol.timers import Timer
from shiftverbs.state_machine import RecvInput, SendInput


class Ending:
    """Ends every procedure; from then on it answers whoever still speaks.

    phase: ABORT or BYE, as it ended; BYE before it did.
    """

    __slots__ = ("_arm", "_directions", "_move", "_state", "_step_ns", "_until_ns", "phase")

    def __init__(
        self, state: PairState, directions: Directions, arm: ArmProcedure, move: MoveProcedure
    ) -> None:
        self._state = state
        self._directions = directions
        self._arm = arm
        self._move = move
        self.phase = Phase.BYE
        self._until_ns = 0
        self._step_ns = 0

    def abort(self, reason: str, answer: bool = False) -> None:
        """Failover gives up: outstanding work gets its errors. answer: the peer said so first, or left."""
        s = self._state
        s.counts.aborts += 1
        self._end(Phase.ABORT, tell=True)
        s.do(ev.AwaitRx(None))
        self._directions.receive(RecvInput.ABORTED, 0)
        self._directions.send(SendInput.ABORTED, 0, reason=reason)
        s.set_status(Status.FAILED, reason)
        if answer:
            s.timers.stop(Timer.OVER)

    def quit(self, reason: str) -> None:
        """The application has done with its QP."""
        self._end(Phase.BYE, tell=True)
        self._state.set_status(Status.UNPROTECTED, reason)

    def peer_left(self, m: Sync) -> None:
        """The peer's BYE, while no SWITCH is under way."""
        s = self._state
        # The peer may have moved its receives: what is sent to those it left would be acknowledged, and lost.
        # Unless its BYE says which of our MOVEs was the last that it followed.
        out = s.move_out
        unanswered = out is not None and out.tx is not None and not m.ask
        if out is not None and out.tx is not None and m.ask > out.number:
            self._move.arrive(out)
        elif out is not None and not unanswered:
            self._move.cancel()
        self._end(Phase.BYE, tell=False)
        s.do(ev.AwaitRx(None))
        s.do(ev.LetGo("the peer closed its QP", unanswered))
        if s.status is not Status.PAIRING:  # else: the pairing ends, and another may follow
            s.set_status(Status.UNPROTECTED, "the peer closed its QP")

    def _end(self, phase: Phase, tell: bool) -> None:
        s = self._state
        s.over = True
        self.phase = phase
        if self._directions.pausing and phase is Phase.BYE:
            self._directions.open_now()  # nobody will do it later
        s.step_switch(SwitchInput.ENDED)
        self._move.end()
        self._arm.end()
        s.timers.stop_all()
        if tell:
            self._until_ns = s.now_ns + s.config.bye_deadline_ns
            self._step_ns = 0
            self.say()

    def say(self) -> None:
        """Say over every path that it has ended, for a while."""
        s = self._state
        self._step_ns = s.backoff(self._step_ns)
        due_ns = s.now_ns + self._step_ns
        if due_ns < self._until_ns:
            s.timers.set(Timer.OVER, due_ns)
        else:
            s.timers.stop(Timer.OVER)
        s.say(self.sync(), s.send_pair, spread=True)

    def answer(self, m: Sync) -> None:
        """Somebody still speaks of a SWITCH: it is told, unless it knows."""
        s = self._state
        if m.phase in (Phase.ABORT, Phase.BYE):
            s.timers.stop(Timer.OVER)
        else:
            s.say(self.sync(m.epoch), m.target)

    def sync(self, epoch: int = 0) -> Sync:
        """What is said from the end on. epoch: of whom it is said to; never less than our own."""
        s = self._state
        p = s.pairs[0]
        target = s.switch.target if s.switch is not None else 0
        moved = self._move.moved_in + 1 if self.phase is Phase.BYE else 0
        return Sync(max(epoch, s.epoch), target, self.phase, p.arm, False, p.local, 0, ask=moved)
