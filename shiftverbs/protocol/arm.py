# SPDX-License-Identifier: BSD-3-Clause
"""ARM: an idle pair is made fit again: RESET, INIT, RTR, RTS and one zero-length SEND each way. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.messages import Arm, ArmStep
from shiftverbs.protocol.state import PairState
from shiftverbs.protocol.tables import ArmAction, ArmInput, ArmState, step_arm
from shiftverbs.protocol.timers import NEVER, ArmTimer, arm_row


class ArmProcedure:
    """REQ, REP, RTU; begun by the side with the smaller instance id."""

    __slots__ = ("_begin_rows", "_state")

    def __init__(self, state: PairState) -> None:
        self._state = state
        self._begin_rows = [arm_row(k, ArmTimer.BEGIN) for k in range(len(state.pairs))]

    # ---- what begins, and how it ends -------------------------------------------------------------------------------

    def _is_due(self, k: int) -> bool:
        """Whether `k` is idle and unfit, so that ARM is due: ours to begin, or to be asked for."""
        p = self._state.pairs[k]
        return (
            p.state is ArmState.IDLE
            and not p.clean
            and not p.dead
            and p.alive is not False
            and not self._state.carries(k)
        )

    def pursue(self) -> None:
        """Begin, or ask for, what is due; else set the timer for that."""
        s = self._state
        for k, p in enumerate(s.pairs):
            due_ns = NEVER
            if not p.clean and p.state is ArmState.IDLE and self._is_due(k):
                if s.now_ns >= p.retry_ns:
                    if s.initiator:
                        self._begin(k, p.arm + 1, requester=True)
                        continue
                    self._ask_for(k)
                due_ns = p.retry_ns
            s.timers.set(self._begin_rows[k], due_ns)

    def unfit(self, k: int) -> str | None:
        """Why pair `k`, which carries nothing, could not take over as it is; None if it could."""
        s = self._state
        p = s.pairs[k]
        if p.clean or s.over or s.carries(k):
            return None
        if p.dead:
            return "its NIC is gone"
        if p.alive is False:
            return "no answer to pings there"
        return p.trouble or ("it is being connected" if s.initiator else "the peer does not begin")

    def _ask_for(self, k: int) -> None:
        """The initiator may think this pair fit: its half of ARM can end well while ours fails."""
        s = self._state
        p = s.pairs[k]
        s.say(Arm(ArmStep.REJ, s.epoch, k, p.arm, p.local, wanted=p.arm), k)
        p.backoff_ns = min(max(p.backoff_ns * 2, s.config.arm_timeout_ns), s.config.arm_backoff_most_ns)
        p.retry_ns = s.now_ns + p.backoff_ns

    def _begin(self, k: int, arm: int, requester: bool) -> None:
        s = self._state
        p = s.pairs[k]
        p.requester = requester
        p.arm = arm
        p.works = p.clean = False
        p.sent_ok = p.received_ok = False
        p.resend_step_ns = 0
        if requester:
            p.remote = None
        s.timers.stop(self._begin_rows[k])
        p.began_ns = s.now_ns
        s.timers.set(arm_row(k, ArmTimer.DEADLINE), s.now_ns + s.config.arm_timeout_ns + p.extra_ns)
        s.timers.stop(arm_row(k, ArmTimer.RESEND))
        self._step(k, ArmInput.BEGUN if requester else ArmInput.REQUESTED)

    def fail(self, k: int, why: str | None = None, backoff: bool = True) -> None:
        """ARM of pair k did not succeed, or what it made is broken. why: what ails the pair, None: as before."""
        s = self._state
        p = s.pairs[k]
        p.trouble = why or p.trouble
        p.works = p.clean = False
        answering = p.state is not ArmState.IDLE and not p.requester
        self._step(k, ArmInput.FAILED)
        if backoff:
            if answering:  # the peer would wait out its own time
                s.say(Arm(ArmStep.REJ, s.epoch, k, p.arm, p.local, wanted=p.arm), k)
            s.counts.arm_failures += 1
            first = s.config.arm_backoff_first_ns
            p.backoff_ns = min(max(p.backoff_ns * 2, first), s.config.arm_backoff_most_ns)
            p.retry_ns = s.now_ns + p.backoff_ns + s.rng.randrange(p.backoff_ns // 4 + 1)
        else:
            p.retry_ns = s.now_ns

    def disarm(self, k: int) -> None:
        """Pair k, which carries nothing, is broken."""
        p = self._state.pairs[k]
        if p.state is not ArmState.IDLE or p.works:
            self.fail(k)

    def call_off(self) -> None:
        """A SWITCH begins: whatever is under way is begun anew behind it."""
        for k, p in enumerate(self._state.pairs):
            if p.state is not ArmState.IDLE:
                self.fail(k, backoff=False)

    def end(self) -> None:
        """The pairing is over."""
        for k in range(len(self._state.pairs)):
            self._step(k, ArmInput.ENDED)

    def _step(self, k: int, given: ArmInput) -> None:
        """Step ARM's machine of pair k, and carry its steps out."""
        s = self._state
        p = s.pairs[k]
        p.state, steps = step_arm(p.state, given)
        if p.state is ArmState.IDLE:
            s.timers.stop(arm_row(k, ArmTimer.DEADLINE))
            s.timers.stop(arm_row(k, ArmTimer.RESEND))
        for step in steps:
            match step:
                case ArmAction.RESET:
                    s.do(ev.ResetPair(k, p.arm, dummy=True))
                case ArmAction.SAY_REQ:
                    self._say(ArmStep.REQ, k)
                case ArmAction.SAY_REP:
                    self._say(ArmStep.REP, k)
                case ArmAction.RTR:
                    self._connect(k, Stage.RTR)
                case ArmAction.RTS:
                    self._connect(k, Stage.RTS)
                case ArmAction.RTR_RTS:
                    self._connect(k, Stage.RTR_RTS)
                case ArmAction.POST_SEND:
                    s.do(ev.PostArmSend(k))
                case ArmAction.MARK_CLEAN:
                    self._mark_clean(k)

    def _connect(self, k: int, stage: Stage) -> None:
        s = self._state
        p = s.pairs[k]
        assert p.remote is not None
        s.timers.stop(arm_row(k, ArmTimer.RESEND))
        s.do(ev.ConnectPair(k, p.arm, stage, p.local.psn, p.remote))

    def _mark_clean(self, k: int) -> None:
        s = self._state
        p = s.pairs[k]
        p.works = p.clean = True
        p.backoff_ns = 0
        # Never less than this took: else the two sides could be in time in turn, and never both.
        p.extra_ns = min(p.extra_ns, max(0, 2 * (s.now_ns - p.began_ns) - s.config.arm_timeout_ns))
        p.trouble = None
        s.counts.arms += 1
        if p.requester:
            self._say(ArmStep.RTU, k)
        if k != 0 and s.status is Status.PAIRING:
            s.set_status(Status.PROTECTED)

    # ---- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, m: Arm) -> None:
        """A step of the peer's."""
        s = self._state
        if m.pair >= len(s.pairs):
            s.counts.stale += 1
            return
        k, p = m.pair, s.pairs[m.pair]
        match m.step:
            case ArmStep.REQ:
                self._on_req(k, m)
            case ArmStep.REP:
                if p.requester and p.state is ArmState.WAIT_PEER and m.arm == p.arm:
                    p.remote = m.address
                    self._step(k, ArmInput.REPLIED)
                elif p.requester and p.works and m.arm == p.arm:
                    self._say(ArmStep.RTU, k)
            case ArmStep.RTU:
                if not p.requester and m.arm == p.arm:
                    s.timers.stop(arm_row(k, ArmTimer.RESEND))
            case ArmStep.REJ:
                under_way = p.requester and p.state is not ArmState.IDLE and m.wanted == p.arm
                # No arm of the peer up to `wanted` is fit any more, and an old number never becomes fit again.
                unfit = p.clean and not s.carries(k) and m.epoch == s.epoch and m.wanted >= p.arm
                if under_way or (unfit and s.initiator and not s.switching):
                    p.arm = max(p.arm, m.arm)
                    self.fail(k, "the peer cannot connect it, and knows why" if unfit else "the peer refuses")

    def _on_req(self, k: int, m: Arm) -> None:
        s = self._state
        p = s.pairs[k]
        if s.switching or m.epoch != s.epoch:
            return  # the SWITCH decides first
        if m.arm == p.arm and not p.requester and p.state is not ArmState.IDLE:
            if p.state in (ArmState.WAIT_PEER, ArmState.PROBING):
                self._say(ArmStep.REP, k)
            return
        if m.arm == p.arm and not p.requester and p.works:
            return  # a late copy: both dummies went through already
        if m.arm <= p.arm or s.carries(k) or p.dead:
            s.say(Arm(ArmStep.REJ, s.epoch, k, max(p.arm, m.arm), p.local, wanted=m.arm), k)
            return
        p.remote = m.address
        self._begin(k, m.arm, requester=False)

    def _say(self, step: ArmStep, k: int) -> None:
        s = self._state
        p = s.pairs[k]
        s.say(Arm(step, s.epoch, k, p.arm, p.local), k)
        if step in (ArmStep.REQ, ArmStep.REP):
            p.resend_step_ns = s.backoff(p.resend_step_ns)
            s.timers.set(arm_row(k, ArmTimer.RESEND), s.now_ns + p.resend_step_ns)

    # ---- the NIC, and time ------------------------------------------------------------------------------------------

    def on_pair_reset(self, event: ev.PairReset) -> None:
        """RESET and INIT of a pair, which no SWITCH asked for."""
        k, p = event.pair, self._state.pairs[event.pair]
        if p.state is not ArmState.RESETTING or event.arm != p.arm:
            return
        if event.error is not None:
            self.fail(k, event.error)
            return
        self._state.renew(k, event.arm, event)
        self._step(k, ArmInput.RESET_TO_REQUEST if p.requester else ArmInput.RESET_TO_REPLY)

    def on_pair_connected(self, event: ev.PairConnected) -> None:
        """RTR or RTS of a pair, which no SWITCH asked for."""
        k, p = event.pair, self._state.pairs[event.pair]
        # A responder's RTS alone is given while PROBING, what else there is while CONNECTING.
        alone = not p.requester and event.stage is Stage.RTS
        awaited = ArmState.PROBING if alone else ArmState.CONNECTING
        if p.state is not awaited or event.arm != p.arm:
            return
        if event.error is not None:
            self.fail(k, event.error)
        elif p.requester:
            self._step(k, ArmInput.RTS_TO_PROBE)
        elif alone:
            self._step(k, ArmInput.RTS_TO_ANSWER)
        else:
            self._step(k, ArmInput.RTR_TO_REPLY)
            if p.received_ok:
                self._step(k, ArmInput.PROBED)

    def on_completion(self, event: ev.ArmCompletion) -> None:
        """The WC of a zero-length SEND, or of the receive for the peer's."""
        k, p = event.pair, self._state.pairs[event.pair]
        if p.state in (ArmState.IDLE, ArmState.RESETTING):
            return  # of a former life: a dummy of this one is posted when RESET is through
        if not event.ok:
            what = "receive for the peer's" if event.receive else "own"
            self.fail(k, f"the {what} zero-length SEND ended with an error")
            return
        if event.receive:
            p.received_ok = True
            if not p.requester and p.state is ArmState.WAIT_PEER:
                self._step(k, ArmInput.PROBED)
        else:
            p.sent_ok = True
        if p.received_ok and p.sent_ok and p.state is ArmState.PROBING:
            self._step(k, ArmInput.ALL_SEEN)

    def on_timer(self, k: int, timer: ArmTimer) -> None:
        """A timer of pair k is over."""
        s = self._state
        p = s.pairs[k]
        if timer is ArmTimer.RESEND:
            self._say(ArmStep.REQ if p.requester else ArmStep.REP, k)
        elif timer is ArmTimer.DEADLINE:
            match p.state:
                case ArmState.RESETTING | ArmState.CONNECTING:
                    why = "our own NIC does not carry out a command"
                case ArmState.WAIT_PEER if p.requester:
                    why = "the peer does not answer"
                case _:
                    why = "the peer's zero-length SEND does not come, or ours is not acknowledged"
            self.fail(k, why)
            # A machine that is too slow for this once is too slow the next time, too.
            p.extra_ns = min(max(2 * p.extra_ns, s.config.arm_timeout_ns), s.config.arm_backoff_most_ns)

    def set_timers(self) -> None:
        """When the next ARM of each pair may begin, after a MOVE has changed which of them are idle."""
        s = self._state
        for k, p in enumerate(s.pairs):
            s.timers.set(self._begin_rows[k], p.retry_ns if self._is_due(k) else NEVER)
