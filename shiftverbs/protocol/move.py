# SPDX-License-Identifier: BSD-3-Clause
"""MOVE: one direction moves voluntarily, behind a signaled fence; nothing is replayed. Pure."""

from __future__ import annotations

from dataclasses import replace

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.messages import Move, MoveStep, Prefer
from shiftverbs.protocol.state import ArmState, MoveIn, MoveOut, PairState, Preference
from shiftverbs.state_machine import RecvInput, SendInput, SendState


class MoveProcedure(PairState):
    """The sender's and the receiver's half, and which pair both sides prefer."""

    # ---- MOVE -------------------------------------------------------------------------------------------------------

    def _wanted_pair(self) -> int:
        """Where sends should be: on the preferred pair, unless they must leave theirs so that ARM can reset it.

        The peer cannot come where we send while our stale receives are there. So we follow it, unless both can meet on
        the preferred pair.
        """
        target = self._prefer.target
        preferred = self.pairs[target]
        cannot_meet = target == self.send_pair or preferred.dead or preferred.alive is False
        if self.pairs[self.send_pair].stale and cannot_meet:
            return self.recv_pair
        return target

    def _wants_move(self) -> bool:
        target = self._wanted_pair()
        p = self.pairs[target]
        return (
            self.send_pair != target
            and self._move is None
            and not self._opening
            and (p.clean or (p.armed and target == self.recv_pair))
            and p.alive is not False
            and not p.dead
            and self.send_state in (SendState.DEFAULT, SendState.FALLBACK)
        )

    def _begin_move(self, target: int) -> None:
        self._move_number += 1
        self._move = MoveOut(self._move_number, target, grace_ns=self._now + self.config.move_grace_ns)
        self._send_input(SendInput.MOVE_STARTED, self.send_pair)

    def _on_fence_posted(self) -> None:
        m = self._move
        if m is not None and self.send_state is SendState.WAIT_SIGNALED:
            m.grace_ns = None
            self._send_input(SendInput.FENCE_POSTED, self.send_pair)

    def _on_fence_done(self, tx: int) -> None:
        m = self._move
        if m is not None and self.send_state is SendState.WAIT_DRAINED and m.tx is None:
            m.tx = tx
            m.deadline_ns = self._now + self.config.move_timeout_ns
            self._send_input(SendInput.FENCE_DONE, self.send_pair)

    def _send_move(self) -> None:
        m = self._move
        assert m is not None and m.tx is not None
        m.resend_step_ns = self._backoff(m.resend_step_ns)
        m.resend_ns = self._now + m.resend_step_ns
        message = Move(MoveStep.MOVE, self.epoch, m.number, m.target, self.pairs[m.target].arm, m.tx)
        self._say(message, m.target)

    def _cancel_move(self) -> None:
        home = self.send_pair == 0
        self._move = None
        self._send_input(
            SendInput.MOVE_CANCELLED_HOME if home else SendInput.MOVE_CANCELLED_AWAY, self.send_pair
        )
        self._hold_home(self.config.flap_backoff_first_ns)

    def _on_move(self, m: Move) -> None:
        if m.target >= len(self.pairs):
            self.counts.stale += 1
            return
        if m.step is not MoveStep.MOVE:
            self._on_move_answer(m)
            return
        if m.epoch != self.epoch or self._switching():
            if m.epoch < self.epoch:
                self._answer_stale()
            return
        if m.number == self._moved_in:
            self._say(replace(m, step=MoveStep.MOVED), m.target)
            return
        coming = self._moving_in
        if coming is not None and coming.posting and m.number == coming.message.number:
            # Its patience counts for a path that is silent, not for memory that is still being registered.
            self._say(replace(m, step=MoveStep.HELD), m.target)
            return
        if m.number < self._moved_in or (coming is not None and m.number <= coming.message.number):
            return
        p = self.pairs[m.target]
        if p.arm == m.arm and p.state is not ArmState.IDLE:
            return  # our side of ARM is nearly through: the peer asks again
        if p.arm != m.arm or not p.armed or p.dead or p.stale:
            self._say(replace(m, step=MoveStep.REFUSED), m.target)
            return
        self._moving_in = MoveIn(m)
        self._do(ev.AwaitRx(m.tx))

    def _on_rx_reached(self) -> None:
        coming = self._moving_in
        if coming is None or coming.posting or self.over or self._switching():
            return
        m = coming.message
        p = self.pairs[m.target]
        if p.arm != m.arm or not p.armed or p.dead or p.stale:
            # It failed while we waited for the last message. Refusing is final: no later life has this `arm`.
            self._moving_in = None
            self._say(replace(m, step=MoveStep.REFUSED), m.target)
            return
        coming.posting = True
        self._recv_input(RecvInput.MOVE_HOME if m.target == 0 else RecvInput.MOVE_AWAY, m.target)

    def _answer_moved(self) -> None:
        assert self._moving_in is not None
        m = self._moving_in.message
        self._moving_in = None
        self._moved_in = m.number
        self._say(replace(m, step=MoveStep.MOVED), m.target)
        self._note_home()

    def _on_move_answer(self, m: Move) -> None:
        out = self._move
        if out is None or m.number != out.number or m.epoch != self.epoch or out.tx is None:
            return
        if m.step is MoveStep.HELD:
            out.deadline_ns = self._now + self.config.move_timeout_ns
            return
        if m.step is MoveStep.REFUSED:
            if out.target not in (self.send_pair, self.recv_pair):
                self._disarm(out.target)
            self._cancel_move()
            return
        self._on_moved(out)

    def _on_moved(self, out: MoveOut) -> None:
        self._move = None
        self.counts.moves += 1
        self._use(out.target)
        home = out.target == 0
        self._send_input(SendInput.MOVED_HOME if home else SendInput.MOVED_AWAY, out.target)
        self._note_home()

    def _note_home(self) -> None:
        if self.send_pair == 0 and self.recv_pair == 0:
            self._home_since_ns = self._now

    def _note_flap(self) -> None:
        """A failure soon after coming home makes the next homecoming wait longer."""
        since = self._home_since_ns
        if since is not None and self._now - since < self.config.flap_window_ns:
            first, most = self.config.flap_backoff_first_ns, self.config.flap_backoff_most_ns
            self._home_backoff_ns = min(max(self._home_backoff_ns * 2, first), most)
        elif since is not None:
            self._home_backoff_ns = 0
        self._home_since_ns = None
        self._home_hold_ns = self._now + self._home_backoff_ns

    def _hold_home(self, for_ns: int) -> None:
        self._home_hold_ns = max(self._home_hold_ns, self._now + for_ns)

    # ---- preference -------------------------------------------------------------------------------------------------

    def _on_prefer(self, pair: int) -> None:
        if self.over or pair >= len(self.pairs):
            return
        self._prefer = Preference(self._prefer.number + 1, pair)
        self._home_hold_ns = self._now
        self._send_prefer()

    def _send_prefer(self) -> None:
        f = self._prefer
        f.resend_step_ns = self._backoff(f.resend_step_ns)
        f.resend_ns = self._now + f.resend_step_ns
        self._say(Prefer(f.number, f.target), f.target, spread=True)

    def _on_prefer_message(self, m: Prefer) -> None:
        if m.target >= len(self.pairs):
            self.counts.stale += 1
            return
        f = self._prefer
        if m.seen:
            if (m.number, m.target) == (f.number, f.target):
                f.resend_ns = None
            return
        if (m.number, m.target) > (f.number, f.target):
            self._prefer = Preference(m.number, m.target)
            self._home_hold_ns = self._now
        f = self._prefer
        if (m.number, m.target) == (f.number, f.target):
            f.resend_ns = None
            self._say(replace(m, seen=True), m.target, spread=True)
        else:
            self._send_prefer()
