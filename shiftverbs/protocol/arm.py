# SPDX-License-Identifier: BSD-3-Clause
"""ARM: an idle pair is made fit again: RESET, INIT, RTR, RTS and one zero-length SEND each way. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.messages import Arm, ArmStep, Phase
from shiftverbs.protocol.state import ArmState, Pair, PairState


class ArmProcedure(PairState):
    """REQ, REP, RTU; begun by the side with the smaller instance id."""

    def _idle(self, k: int) -> bool:
        move = self._move
        return k not in (self.send_pair, self.recv_pair) and (move is None or move.target != k)

    def _arm_times(self, k: int) -> list[int | None]:
        p = self.pairs[k]
        if p.state is not ArmState.IDLE:
            return [p.deadline_ns, p.resend_ns]
        if self._needs_arm(k):
            return [p.retry_ns]
        return []

    def _needs_arm(self, k: int) -> bool:
        """Whether `k` is idle and unfit, so that ARM is due: ours to begin, or to be asked for."""
        p = self.pairs[k]
        return (
            p.state is ArmState.IDLE and not p.clean and not p.dead and p.alive is not False and self._idle(k)
        )

    def _ask_for_arm(self, k: int, p: Pair) -> None:
        """The initiator may think this pair fit: its half of ARM can end well while ours fails."""
        self._say(Arm(ArmStep.REJ, self.epoch, k, p.arm, p.local, wanted=p.arm), k)
        p.backoff_ns = min(max(p.backoff_ns * 2, self.config.arm_timeout_ns), self.config.arm_backoff_most_ns)
        p.retry_ns = self._now + p.backoff_ns

    def _begin_arm(self, k: int, p: Pair, arm: int, requester: bool) -> None:
        p.state = ArmState.RESETTING
        p.requester = requester
        p.arm = arm
        p.armed = p.clean = False
        p.sent_ok = p.received_ok = p.rtu_seen = False
        p.deadline_ns = self._now + self.config.arm_timeout_ns
        p.resend_ns = None
        p.resend_step_ns = 0
        if requester:
            p.remote = None
        self._do(ev.ResetPair(k, arm, dummy=True))

    def unfit(self, k: int) -> str | None:
        """Why pair `k`, which carries nothing, could not take over as it is; None if it could."""
        p = self.pairs[k]
        if p.clean or self.over or not self._idle(k):
            return None
        if p.dead:
            return "its NIC is gone"
        if p.alive is False:
            return "no answer to pings there"
        return p.trouble or ("it is being connected" if self.initiator else "the peer does not begin")

    def _arm_failed(self, p: Pair, why: str | None = None, backoff: bool = True) -> None:
        p.trouble = why or p.trouble
        p.state = ArmState.IDLE
        p.armed = p.clean = False
        p.resend_ns = None
        if backoff:
            self.counts.arm_failures += 1
            first = self.config.arm_backoff_first_ns
            p.backoff_ns = min(max(p.backoff_ns * 2, first), self.config.arm_backoff_most_ns)
            p.retry_ns = self._now + p.backoff_ns + self.rng.randrange(p.backoff_ns // 4 + 1)
        else:
            p.retry_ns = self._now

    def _arm_timed_out(self, p: Pair) -> None:
        match p.state:
            case ArmState.RESETTING | ArmState.CONNECTING:
                why = "our own NIC does not carry out a command"
            case ArmState.WAIT_PEER if p.requester:
                why = "the peer does not answer"
            case _:
                why = "the peer's zero-length SEND does not come, or ours is not acknowledged"
        self._arm_failed(p, why)

    def _disarm(self, k: int) -> None:
        p = self.pairs[k]
        if p.state is not ArmState.IDLE or p.armed:
            self._arm_failed(p)

    def _on_arm(self, m: Arm) -> None:
        if m.pair >= len(self.pairs):
            self.counts.stale += 1
            return
        k, p = m.pair, self.pairs[m.pair]
        match m.step:
            case ArmStep.REQ:
                self._on_arm_req(k, p, m)
            case ArmStep.REP:
                if p.requester and p.state is ArmState.WAIT_PEER and m.arm == p.arm:
                    p.remote = m.address
                    p.state = ArmState.CONNECTING
                    p.resend_ns = None
                    self._do(ev.ConnectPair(k, p.arm, Stage.RTR_RTS, p.local.psn, m.address))
                elif p.requester and p.armed and m.arm == p.arm:
                    self._say_arm(ArmStep.RTU, k)
            case ArmStep.RTU:
                if not p.requester and m.arm == p.arm:
                    p.rtu_seen = True
                    p.resend_ns = None
            case ArmStep.REJ:
                under_way = p.requester and p.state is not ArmState.IDLE and m.wanted == p.arm
                # No arm of the peer up to `wanted` is fit any more, and an old number never becomes fit again.
                unfit = p.clean and self._idle(k) and m.epoch == self.epoch and m.wanted >= p.arm
                if under_way or (unfit and self.initiator and not self._switching()):
                    p.arm = max(p.arm, m.arm)
                    self._arm_failed(
                        p, "the peer cannot connect it, and knows why" if unfit else "the peer refuses"
                    )

    def _on_arm_req(self, k: int, p: Pair, m: Arm) -> None:
        if self._switching() or m.epoch != self.epoch:
            return  # the SWITCH decides first
        if m.arm == p.arm and not p.requester and p.state is not ArmState.IDLE:
            if p.state in (ArmState.WAIT_PEER, ArmState.PROBING):
                self._say_arm(ArmStep.REP, k)
            return
        if m.arm == p.arm and not p.requester and p.armed:
            return  # a late copy: both dummies went through already
        if m.arm <= p.arm or not self._idle(k) or p.dead:
            self._say(Arm(ArmStep.REJ, self.epoch, k, max(p.arm, m.arm), p.local, wanted=m.arm), k)
            return
        p.remote = m.address
        self._begin_arm(k, p, m.arm, requester=False)

    def _say_arm(self, step: ArmStep, k: int) -> None:
        p = self.pairs[k]
        self._say(Arm(step, self.epoch, k, p.arm, p.local), k)
        if step in (ArmStep.REQ, ArmStep.REP):
            p.resend_step_ns = self._backoff(p.resend_step_ns)
            p.resend_ns = self._now + p.resend_step_ns

    def _on_pair_reset(self, event: ev.PairReset) -> None:
        if self.over:
            return
        k, p, s = event.pair, self.pairs[event.pair], self._switch
        if s is not None and not s.done and s.target == k and s.resetting is not None:
            if event.arm != s.resetting:
                return
            s.resetting = s.command_ns = None
            if event.error is not None:
                self._next_attempt(f"pair {k}: {event.error}")
                return
            self._renew(k, event.arm, event)
            s.reset_arm = event.arm
            s.heard_ns = max(s.heard_ns, self._now)
            self._advance()
            return
        if p.state is not ArmState.RESETTING or event.arm != p.arm:
            return
        if event.error is not None:
            self._arm_failed(p, event.error)
            return
        self._renew(k, event.arm, event)
        if p.requester:
            p.state = ArmState.WAIT_PEER
            self._say_arm(ArmStep.REQ, k)
        else:
            assert p.remote is not None
            p.state = ArmState.CONNECTING
            self._do(ev.ConnectPair(k, p.arm, Stage.RTR, p.local.psn, p.remote))

    def _on_pair_connected(self, event: ev.PairConnected) -> None:
        if self.over:
            return
        k, p, s = event.pair, self.pairs[event.pair], self._switch
        if s is not None and not s.done and s.target == k and s.connecting:
            if event.arm != p.arm:
                return
            s.connecting = False
            if s.resetting is None:
                s.command_ns = None
            s.heard_ns = max(s.heard_ns, self._now)
            if event.error is not None:
                self._next_attempt(f"pair {k}: {event.error}")
                return
            if s.phase is Phase.FENCED and s.reset_arm == p.arm and s.resetting is None:
                self._post_receives(s)
            return
        if p.state not in (ArmState.CONNECTING, ArmState.PROBING) or event.arm != p.arm:
            return
        if event.error is not None:
            self._arm_failed(p, event.error)
            return
        if p.requester:
            p.state = ArmState.PROBING
            self._do(ev.PostArmSend(k))
        elif event.stage is Stage.RTR:
            p.state = ArmState.WAIT_PEER
            self._say_arm(ArmStep.REP, k)
            if p.received_ok:
                self._responder_rts(k, p)
        else:
            self._do(ev.PostArmSend(k))

    def _responder_rts(self, k: int, p: Pair) -> None:
        assert p.remote is not None
        p.state = ArmState.PROBING
        p.resend_ns = None
        self._do(ev.ConnectPair(k, p.arm, Stage.RTS, p.local.psn, p.remote))

    def _on_arm_completion(self, event: ev.ArmCompletion) -> None:
        k, p = event.pair, self.pairs[event.pair]
        if self.over or p.state in (ArmState.IDLE, ArmState.RESETTING):
            return  # of a former life: a dummy of this one is posted when RESET is through
        if not event.ok:
            what = "receive for the peer's" if event.receive else "own"
            self._arm_failed(p, f"the {what} zero-length SEND ended with an error")
            return
        if event.receive:
            p.received_ok = True
            if not p.requester and p.state is ArmState.WAIT_PEER:
                self._responder_rts(k, p)
        else:
            p.sent_ok = True
        if p.received_ok and p.sent_ok and p.state is ArmState.PROBING:
            p.state = ArmState.IDLE
            p.armed = p.clean = True
            p.resend_ns = None
            p.backoff_ns = 0
            p.trouble = None
            self.counts.arms += 1
            if p.requester:
                self._say_arm(ArmStep.RTU, k)
            if k != 0 and self.status is Status.PAIRING:
                self._set_status(Status.PROTECTED)
