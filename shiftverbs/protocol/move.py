# SPDX-License-Identifier: BSD-3-Clause
"""MOVE: one direction moves voluntarily, behind a signaled fence WR; nothing is replayed. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.directions import Directions
from shiftverbs.protocol.messages import Move, MoveStep, Prefer
from shiftverbs.protocol.state import MoveIn, MoveOut, PairState, Preference
from shiftverbs.protocol.tables import ArmState
from shiftverbs.protocol.timers import NEVER, Timer
from shiftverbs.state_machine import RecvInput, SendInput, SendState, Step


class MoveProcedure:
    """The sender's and the receiver's half, and which pair both sides prefer.

    moved_in: number of the peer's last MOVE that our receives followed. prefer: where traffic should be.
    """

    __slots__ = (
        "_arm",
        "_directions",
        "_hold_ns",
        "_home_backoff_ns",
        "_home_since_ns",
        "_in_vain_ns",
        "_in_vain_until_ns",
        "_number",
        "_state",
        "moved_in",
        "prefer",
    )

    def __init__(self, state: PairState, directions: Directions, arm: ArmProcedure) -> None:
        self._state = state
        self._directions = directions
        self._arm = arm
        self.moved_in = 0
        self.prefer = Preference()
        self._number = 0  # of our last MOVE
        self._hold_ns = 0  # no MOVE of ours begins before
        self._home_backoff_ns = 0
        self._in_vain_ns = 0  # what the last MOVE that went unanswered made the next wait
        self._in_vain_until_ns = 0
        self._home_since_ns: int | None = None

    # ---- the sender's half ------------------------------------------------------------------------------------------

    def _wanted_pair(self) -> int:
        """Where sends should be: on the preferred pair, unless they must leave theirs so that ARM can reset it.

        The peer cannot come where we send while our stale receives are there. So we follow it, unless both can meet on
        the preferred pair.
        """
        s = self._state
        target = self.prefer.target
        preferred = s.pairs[target]
        cannot_meet = target == s.send_pair or preferred.dead or preferred.alive is False
        if s.pairs[s.send_pair].stale and cannot_meet:
            return s.recv_pair
        return target

    def _destination(self) -> int | None:
        """The pair that sends can leave for, if they are wanted on another one and that is fit."""
        s = self._state
        target = self._wanted_pair()
        p = s.pairs[target]
        wanted = (
            s.send_pair != target
            and s.move_out is None
            and (p.clean or (p.works and target == s.recv_pair))
            and p.alive is not False
            and not p.dead
            and s.send_state in (SendState.DEFAULT, SendState.FALLBACK)
            and not self._directions.pausing
        )
        return target if wanted else None

    def pursue(self) -> bool:
        """Begin what is wanted, or set the timer for that; call off what has become impossible and was told nobody.

        Returns whether it did either.
        """
        s = self._state
        m = s.move_out
        impossible = m is not None and m.tx is None and not s.pairs[m.target].works
        if impossible:
            self.cancel()
        target = self._destination()
        if target is not None and s.now_ns >= self._hold_ns:
            self._begin(target)
            return True
        s.timers.set(Timer.MOVE_BEGIN, NEVER if target is None else self._hold_ns)
        return impossible

    def _begin(self, target: int) -> None:
        s = self._state
        self._number += 1
        s.move_out = MoveOut(self._number, target)
        s.timers.stop(Timer.MOVE_BEGIN)
        s.timers.set(Timer.FENCE_WRITE, s.now_ns + s.config.move_grace_ns)
        self._directions.send(SendInput.MOVE_STARTED, s.send_pair)

    def fence_write(self) -> None:
        """Nobody posted the fence WR in time: ours is tried, now and then, as the NIC may have no room for it yet."""
        s = self._state
        if s.send_state is SendState.WAIT_SIGNALED:
            s.timers.set(Timer.FENCE_WRITE, s.now_ns + s.config.move_timeout_ns)
            s.do(ev.PostFenceWrite())

    def on_fence_wr_posted(self) -> None:
        """The fence WR is posted, by whomever."""
        s = self._state
        if s.move_out is not None and s.send_state is SendState.WAIT_SIGNALED:
            s.timers.stop(Timer.FENCE_WRITE)
            self._directions.send(SendInput.FENCE_WR_POSTED, s.send_pair)

    def on_fence_wr_done(self, tx: int) -> None:
        """The fence WR is complete: now the peer is told. tx: two-sided messages sent before it."""
        s = self._state
        m = s.move_out
        if m is not None and s.send_state is SendState.WAIT_DRAINED and m.tx is None:
            m.tx = tx
            s.timers.set(Timer.MOVE_ANSWER, s.now_ns + s.config.move_timeout_ns)
            if Step.SEND_MOVE in self._directions.send(SendInput.FENCE_WR_DONE, s.send_pair):
                self.say()

    def say(self) -> None:
        """Tell the peer of our MOVE, the first time or again."""
        s = self._state
        m = s.move_out
        assert m is not None and m.tx is not None
        m.resend_step_ns = s.backoff(m.resend_step_ns)
        s.timers.set(Timer.MOVE_RESEND, s.now_ns + m.resend_step_ns)
        s.say(Move(MoveStep.MOVE, s.epoch, m.number, m.target, s.pairs[m.target].arm, m.tx), m.target)

    def cancel(self) -> None:
        """Sends stay where they are."""
        s = self._state
        home = s.send_pair == 0
        self._forget()
        self._directions.send(
            SendInput.MOVE_CANCELLED_HOME if home else SendInput.MOVE_CANCELLED_AWAY, s.send_pair
        )
        self._hold_ns = max(self._hold_ns, s.now_ns + s.config.flap_backoff_first_ns)

    def arrive(self, out: MoveOut) -> None:
        """The peer's receives have followed: so do our sends."""
        s = self._state
        self._forget()
        s.counts.moves += 1
        s.use(out.target)
        home = out.target == 0
        self._directions.send(SendInput.MOVED_HOME if home else SendInput.MOVED_AWAY, out.target)
        self.note_home()

    def _forget(self) -> None:
        """No MOVE of ours is under way any more."""
        s = self._state
        s.move_out = None
        s.timers.stop(Timer.MOVE_ANSWER, Timer.FENCE_WRITE, Timer.MOVE_RESEND)

    def _on_answer(self, m: Move) -> None:
        s = self._state
        out = s.move_out
        if out is None or m.number != out.number or m.epoch != s.epoch or out.tx is None:
            return
        if m.step is MoveStep.HELD:
            s.timers.set(Timer.MOVE_ANSWER, s.now_ns + s.config.move_timeout_ns)
            return
        if m.step is MoveStep.REFUSED:
            if out.target not in (s.send_pair, s.recv_pair):
                self._arm.disarm(out.target)
            self.cancel()
            return
        self.arrive(out)

    # ---- the receiver's half ----------------------------------------------------------------------------------------

    def on_message(self, m: Move) -> bool:
        """A step of the peer's. Returns whether it is of an epoch that the peer has to be told is over."""
        s = self._state
        if m.target >= len(s.pairs):
            s.counts.stale += 1
            return False
        if m.step is not MoveStep.MOVE:
            self._on_answer(m)
            return False
        if m.epoch != s.epoch or s.switching:
            return m.epoch < s.epoch
        if m.number == self.moved_in:
            s.say(replace(m, step=MoveStep.MOVED), m.target)
            return False
        coming = s.move_in
        if coming is not None and coming.posting and m.number == coming.message.number:
            # Its patience counts for a path that is silent, not for memory that is still being registered.
            s.say(replace(m, step=MoveStep.HELD), m.target)
            return False
        if m.number < self.moved_in or (coming is not None and m.number <= coming.message.number):
            return False
        p = s.pairs[m.target]
        if p.arm == m.arm and p.state is not ArmState.IDLE:
            return False  # our side of ARM is nearly through: the peer asks again
        if not self._can_receive(m):
            s.say(replace(m, step=MoveStep.REFUSED), m.target)
            return False
        s.move_in = MoveIn(m)
        s.do(ev.AwaitRx(m.tx))
        return False

    def _can_receive(self, m: Move) -> bool:
        p = self._state.pairs[m.target]
        return p.arm == m.arm and p.works and not p.dead and not p.stale

    def on_rx_reached(self) -> None:
        """All that was sent before the peer's fence WR was received."""
        s = self._state
        coming = s.move_in
        if coming is None or coming.posting or s.switching:
            return
        m = coming.message
        if not self._can_receive(m):
            # It failed while we waited for the last message. Refusing is final: no later life has this `arm`.
            s.move_in = None
            s.say(replace(m, step=MoveStep.REFUSED), m.target)
            return
        coming.posting = True
        self._directions.receive(RecvInput.MOVE_HOME if m.target == 0 else RecvInput.MOVE_AWAY, m.target)

    def await_again(self) -> None:
        """A question is dropped: a RxReached that came meanwhile was not acted on."""
        coming = self._state.move_in
        if coming is not None and not coming.posting:
            self._state.do(ev.AwaitRx(coming.message.tx))

    def on_receives_posted(self, event: ev.ReceivesPosted) -> ev.PathFailed | None:
        """Our receives have followed the peer's MOVE, or could not: then this is returned as a failure of that pair."""
        s = self._state
        coming = s.move_in
        if coming is None or not coming.posting:
            return None
        if event.error is not None:
            return ev.PathFailed(s.recv_pair, event.error)
        if Step.ANSWER_MOVED in self._directions.receive(RecvInput.RECEIVES_MOVED, s.recv_pair):
            m = coming.message
            s.move_in = None
            self.moved_in = m.number
            s.say(replace(m, step=MoveStep.MOVED), m.target)
            self.note_home()
        return None

    # ---- both halves ------------------------------------------------------------------------------------------------

    def call_off(self) -> None:
        """A SWITCH begins: neither half goes on."""
        self._forget()
        self._state.move_in = None

    def end(self) -> None:
        """The pairing is over."""
        coming = self._state.move_in
        if coming is not None and coming.posting:
            self.moved_in = coming.message.number
        self.call_off()

    def note_home(self) -> None:
        """A direction has arrived somewhere: it is noted when both are at home."""
        s = self._state
        if s.send_pair == 0 and s.recv_pair == 0:
            self._home_since_ns = s.now_ns

    def note_flap(self, target: int) -> None:
        """All goes to another pair: soon after coming home, or on the way, the next homecoming waits longer."""
        s = self._state
        since, out = self._home_since_ns, s.move_out
        first, most = s.config.flap_backoff_first_ns, s.config.flap_backoff_most_ns
        if since is not None:
            flapped = s.now_ns - since < s.config.flap_window_ns
            self._home_backoff_ns = min(max(self._home_backoff_ns * 2, first), most) if flapped else 0
            if not flapped:
                self._in_vain_ns = 0
        self._home_since_ns = None
        if out is not None and out.tx is not None and out.target != target:
            # Told, and in vain: where that path is only slow, it will be the next time as well.
            first, most = s.config.move_timeout_ns, s.config.in_vain_backoff_most_ns
            self._in_vain_ns = min(max(self._in_vain_ns * 2, first), most)
            self._in_vain_until_ns = s.now_ns + self._in_vain_ns
        self._hold_ns = max(s.now_ns + self._home_backoff_ns, self._in_vain_until_ns)

    # ---- preference -------------------------------------------------------------------------------------------------

    def on_prefer(self, pair: int) -> None:
        """Somebody here wants traffic on that pair."""
        if pair < len(self._state.pairs):
            self._set_preference(Preference(self.prefer.number + 1, pair))
            self.say_preference()

    def _set_preference(self, prefer: Preference) -> None:
        s = self._state
        self.prefer = prefer
        s.timers.stop(Timer.PREFER)
        self._hold_ns = s.now_ns

    def say_preference(self) -> None:
        """Tell the peer of it, the first time or again."""
        s = self._state
        f = self.prefer
        f.resend_step_ns = s.backoff(f.resend_step_ns)
        s.timers.set(Timer.PREFER, s.now_ns + f.resend_step_ns)
        s.say(Prefer(f.number, f.target), f.target, spread=True)

    def on_prefer_message(self, m: Prefer) -> None:
        """A wish of the peer's, or that it has seen ours."""
        s = self._state
        if m.target >= len(s.pairs):
            s.counts.stale += 1
            return
        theirs, ours = (m.number, m.target), (self.prefer.number, self.prefer.target)
        if m.seen:
            if theirs == ours:
                s.timers.stop(Timer.PREFER)
            return
        if theirs > ours:
            self._set_preference(Preference(*theirs))
        if theirs >= ours:
            s.timers.stop(Timer.PREFER)
            s.say(replace(m, seen=True), m.target, spread=True)
        else:
            self.say_preference()
