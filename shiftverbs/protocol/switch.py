# SPDX-License-Identifier: BSD-3-Clause
"""SWITCH: both directions move to another pair after a failure. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.directions import Directions
from shiftverbs.protocol.ending import Ending
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.hopeless import HopelessWork
from shiftverbs.protocol.messages import Phase, Sync
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.state import PairState, Switch
from shiftverbs.protocol.tables import SwitchInput, SwitchState, SwitchStep
from shiftverbs.protocol.timers import NEVER, Timer
from shiftverbs.state_machine import RecvInput, SendInput, SendState


class SwitchProcedure:
    """Close, fence, agree on a fit target, compare counters, trim, replay.

    hopeless: which send WRs failed where. tried: the pairs that were targets since the last SWITCH that was done.
    """

    __slots__ = (
        "_arm",
        "_ask",
        "_ask_retry_ns",
        "_avoid",
        "_directions",
        "_ending",
        "_move",
        "_posting_ns",
        "_started_ns",
        "_state",
        "fence_number",
        "hopeless",
        "tried",
    )

    def __init__(
        self,
        state: PairState,
        directions: Directions,
        arm: ArmProcedure,
        move: MoveProcedure,
        ending: Ending,
    ) -> None:
        self._state = state
        self._directions = directions
        self._arm = arm
        self._move = move
        self._ending = ending
        self.hopeless = HopelessWork(state, directions)
        self.tried: set[int] = set()
        self.fence_number = 0  # of the last Fence
        self._started_ns = 0  # when the first pair was tried; later by the time in which receives were posted
        self._posting_ns: int | None = None  # since when they are
        self._ask = 0  # number of the last question
        self._ask_retry_ns = 0  # no question before
        self._avoid: list[int] = []  # where what is to be carried now has failed already

    # ---- which pair, and how long it may take -----------------------------------------------------------------------

    def _choose_target(self, left: int) -> int | None:
        """The next pair to try: fit ones first, the one just left last; None when all were tried."""
        best = [
            (k == left, p.alive is False, self._failed_last(k), not p.clean, k)
            for k, p in enumerate(self._state.pairs)
            if not p.dead and k not in self.tried
        ]
        return min(best)[-1] if best else None

    def _failed_last(self, k: int) -> int:
        """How late among the failures of what is to be carried pair k's last one was; 0: it has not failed it."""
        failed = self._avoid
        return len(failed) - failed[::-1].index(k) if k in failed else 0

    def _attempt_deadline_ns(self, s: Switch, posting: bool) -> int:
        config = self._state.config
        patience, resend = config.peer_deadline_ns, config.resend_most_ns
        usable = len(self._state.pairs)
        for p in self._state.pairs:
            usable -= p.dead
        # One lost message must not end it, unless the user will not wait even for one that is said again.
        share = min(max(patience // max(1, usable), 2 * resend), patience)
        if s.command_ns is not None:
            # The peer may go on talking for ever while our own NIC hangs: another pair may do better.
            return s.command_ns + config.fence_deadline_ns
        if s.phase is not Phase.ASK and s.final is None:
            # our own fence runs against its own deadline; the peer's silence counts from its end
            return s.heard_ns + config.fence_deadline_ns + share
        if posting:
            # Memory is being registered, here or there: as long as that takes, if only the peer is heard.
            return s.heard_ns + max(patience, 4 * resend)
        return min(s.heard_ns + share, self._started_ns + patience * 5)

    def _leave_out_posting(self) -> None:
        """Time in which memory is registered, here or there, is not time in which pairs were tried."""
        s = self._state.switch
        if s is not None and self._state.switching and s.posting:
            if self._posting_ns is None:
                self._posting_ns = self._state.now_ns
        elif self._posting_ns is not None:
            self._started_ns += self._state.now_ns - self._posting_ns
            self._posting_ns = None

    def pursue(self) -> None:
        """Set the timer of the attempt under way: it follows from so much that each event may change it."""
        s = self._state.switch
        assert s is not None
        posting = s.posting
        if posting or self._posting_ns is not None:
            self._leave_out_posting()
        self._state.timers.set(Timer.ATTEMPT, self._attempt_deadline_ns(s, posting))

    def on_attempt_over(self) -> None:
        """The attempt under way has taken too long."""
        s = self._state.switch
        assert s is not None and self._state.switching
        if self._state.switch_state is SwitchState.ASK:
            self.drop_question()
        else:
            hung = "our own NIC does not carry out a command" if s.command_ns is not None else None
            self._next_attempt(hung or "the peer does not answer")

    def fencing(self) -> bool:
        """Whether a SWITCH is under way from which there is no way back."""
        return self._state.switch_state not in (SwitchState.IDLE, SwitchState.ASK)

    # ---- its beginning, and its steps -------------------------------------------------------------------------------

    def path_failed(self, event: ev.PathFailed) -> None:
        """A pair failed, or looks as if it did."""
        s = self._state
        if s.over:
            return
        asking = s.switch_state is SwitchState.ASK
        here = event.pair == s.send_pair and not self.fencing()
        if here and event.wr is not None and self.hopeless.is_hopeless(event.pair, event.wr):
            self._ending.abort(f"every path fails the same work: {event.reason}")
        elif self.fencing():
            if not event.advisory:
                self._failed_on_the_way(event)
        elif asking:
            if not event.advisory:
                self._failed_while_asking(event)
        elif s.carries(event.pair):
            self._failed_in_use(event)
        else:
            self._arm.disarm(event.pair)

    def _failed_on_the_way(self, event: ev.PathFailed) -> None:
        s = self._state
        p = s.pairs[event.pair]
        assert s.switch is not None
        target = event.pair == s.switch.target
        if target and (s.switch_state in (SwitchState.POSTING, SwitchState.READY) or p.dead):
            self._next_attempt(event.reason)
            return
        p.works = p.clean = False
        if target:  # late news of a life that this SWITCH ends anyway, or of an idle pair: it must be reset
            self._advance()

    def _failed_while_asking(self, event: ev.PathFailed) -> None:
        s = self._state
        assert s.switch is not None
        if event.pair in (s.send_pair, s.recv_pair):
            s.switch.reason = event.reason
            self._step(s.switch, SwitchInput.PATH_FAILED)
            return
        self._arm.disarm(event.pair)
        if (
            event.pair == s.switch.target
        ):  # nothing is broken where we are: do not fence that for a dead target
            self.drop_question()

    def _failed_in_use(self, event: ev.PathFailed) -> None:
        s = self._state
        if event.advisory and (event.unsafe is not None or s.now_ns < self._ask_retry_ns):
            return
        self.tried = set()
        self._avoid = self.hopeless.failed_on if event.wr is not None else []
        self._started_ns = s.now_ns
        target = self._choose_target(event.pair)
        if target is None:
            self._ending.abort(f"no pair left: {event.reason}")
            return
        if event.advisory and (target == event.pair or s.pairs[target].alive is False):
            return  # nowhere better to go: a short blip would lose nothing here
        if event.advisory:
            self._ask_peer(target, event)
        else:
            self._begin(SwitchInput.PATH_FAILED, s.epoch + 1, target, event.pair, event.reason)

    def _ask_peer(self, target: int, event: ev.PathFailed) -> None:
        """A mere hint: nothing is fenced before the peer agrees."""
        s = self._state
        if s.move_out is not None:
            if s.move_out.tx is not None:
                # The peer was told: it may have moved its receives. The MOVE ends soon, one way or the other.
                self._ask_retry_ns = s.now_ns + s.config.ask_retry_ns
                return
            self._move.cancel()
        self._ask += 1
        s.counts.asks += 1
        s.switch = Switch(
            s.epoch + 1,
            target,
            Phase.ASK,
            event.reason,
            event.pair,
            ask=self._ask,
            heard_ns=s.now_ns,
            before=s.switch,
            before_due_ns=s.timers.due_ns(Timer.SYNC),
        )
        self._directions.send(SendInput.ASKED, s.send_pair)
        self._step(s.switch, SwitchInput.HINTED)

    def _begin(self, given: SwitchInput, epoch: int, target: int, left: int, reason: str) -> None:
        """Start or join a SWITCH, or start over with another target."""
        s = self._state
        s.switch = Switch(epoch, target, Phase.START, reason, left, heard_ns=s.now_ns)
        self._step(s.switch, given)

    def _next_attempt(self, reason: str) -> None:
        """The target did not work, or the peer did not answer there: epoch + 1 and the next pair."""
        s = self._state
        assert s.switch is not None
        left = s.switch.left
        target = self._choose_target(left)
        if target is None:
            self._ending.abort(f"no pair left: {reason}")
            return
        self._begin(SwitchInput.NEXT_PAIR, s.epoch + 1, target, left, reason)

    def drop_question(self) -> None:
        """Nothing was fenced yet: go on where we are, ask again later if the reason persists."""
        s = self._state.switch
        assert s is not None
        self._step(s, SwitchInput.DROPPED)

    def _step(self, s: Switch, given: SwitchInput) -> None:
        """Step the machine of SWITCH, and carry its steps out."""
        steps = self._state.step_switch(given)
        if self._state.switching:
            s.phase = Phase[self._state.switch_state.value]
        else:
            self._state.timers.stop(Timer.ATTEMPT)
            if self._posting_ns is not None:
                self._leave_out_posting()
        for step in steps:
            match step:
                case SwitchStep.FENCE:
                    self._fence(s)
                case SwitchStep.SAY:
                    self._say(s)
                case SwitchStep.REOPEN:
                    self._reopen(s)
                case SwitchStep.CLOSE_RECV:
                    self._directions.receive(RecvInput.PATH_FAILED, s.target)
                case SwitchStep.RESET:
                    assert s.resetting is not None
                    self._state.do(ev.ResetPair(s.target, s.resetting, dummy=False))
                case SwitchStep.POST_RECEIVES:
                    self._post_receives(s)
                case SwitchStep.HAND_OVER:
                    self._hand_over(s)

    def _fence(self, switch: Switch) -> None:
        """From here on there is no way back: gates closed, ARM and MOVE cancelled, every used pair fenced."""
        s = self._state
        s.epoch = switch.epoch
        switch.before = None
        switch.heard_ns = s.now_ns
        s.counts.switches += 1
        self.tried.add(switch.target)
        self._move.note_flap(switch.target)
        self._move.call_off()
        s.do(ev.AwaitRx(None))
        self._directions.send(SendInput.PATH_FAILED, s.send_pair)
        self._directions.receive(RecvInput.PATH_FAILED, s.recv_pair)
        s.do(ev.SwitchStarted(switch.epoch, switch.target, switch.reason))
        self._arm.call_off()
        pairs = [k for k, p in enumerate(s.pairs) if p.used and not p.fenced]
        self._say(switch)
        self.fence_number += 1
        s.do(ev.Fence(self.fence_number, tuple(pairs), s.now_ns + s.config.fence_deadline_ns))

    def _reopen(self, asked: Switch) -> None:
        s = self._state
        s.switch = asked.before  # the last finished one answers late messages again
        if asked.before_due_ns is not None:
            s.timers.set(Timer.SYNC, asked.before_due_ns)
        else:
            s.timers.stop(Timer.SYNC)
        self._ask_retry_ns = s.now_ns + s.config.ask_retry_ns
        home = s.send_state is SendState.DEFAULT
        self._directions.send(SendInput.ASK_DROPPED_HOME if home else SendInput.ASK_DROPPED_AWAY, s.send_pair)
        self._move.await_again()

    def _post_receives(self, switch: Switch) -> None:
        """The target is fit. READY is said when the receives are there: the peer sends the moment it hears it."""
        p = self._state.pairs[switch.target]
        # clean lasts until something is posted; what makes the target fit from now on is this SWITCH itself
        switch.reset_arm = p.arm
        p.works = True
        home = switch.target == 0
        self._directions.receive(RecvInput.READY_HOME if home else RecvInput.READY_AWAY, switch.target)

    def _hand_over(self, switch: Switch) -> None:
        """What the peer received is proven, everything later is replayed."""
        s = self._state
        peer = switch.peer
        assert peer is not None
        self.tried = set()
        if s.status is Status.PAIRING:
            # the peer's ARM was through, ours was cut short: both pairs work
            s.set_status(Status.PROTECTED)
        s.use(switch.target)
        home = switch.target == 0
        self._directions.send(
            SendInput.SWITCHED_HOME if home else SendInput.SWITCHED_AWAY, switch.target, peer_rx=peer.rx
        )
        self._move.note_home()
        switch.settled = peer.seen_phase == Phase.READY and peer.seen_arm == peer.arm

    # ---- how far it can be taken ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the SWITCH as far as what is known allows."""
        switch, state = self._state.switch, self._state.switch_state
        if switch is None or state is SwitchState.IDLE or switch.final is None:
            return
        p, peer = self._state.pairs[switch.target], switch.peer
        fit = p.clean or switch.reset_arm == p.arm
        goal = p.arm if fit else p.arm + 1
        if peer is not None:
            goal = max(goal, peer.arm if peer.clean or peer.phase is not Phase.START else peer.arm + 1)
        if switch.resetting is not None:
            return  # the result brings us back here
        if not (fit and p.arm == goal):
            switch.resetting = goal
            switch.command_ns = self._state.now_ns
            self._step(switch, SwitchInput.UNFIT)
        elif state is SwitchState.READY:
            if peer is not None and peer.phase is Phase.READY and peer.arm == p.arm:
                self._complete(switch, peer)
        elif state is not SwitchState.POSTING:  # there, the event brings us back here
            if p.clean:
                self._step(switch, SwitchInput.CLEAN)
                return
            if state is SwitchState.START:
                self._step(switch, SwitchInput.WAS_RESET)
            connected = peer is not None and peer.phase in (Phase.FENCED, Phase.POSTING, Phase.READY)
            if peer is not None and connected and peer.arm == p.arm and not switch.connecting:
                switch.connecting = True
                switch.command_ns = self._state.now_ns
                self._state.do(ev.ConnectPair(switch.target, p.arm, Stage.RTR_RTS, p.local.psn, peer.address))

    def _complete(self, switch: Switch, peer: Sync) -> None:
        """The peer is READY: hand over, unless what it received does not fit what we sent."""
        final = switch.final
        assert final is not None
        if not final.acked <= peer.rx <= final.wired:
            self._ending.abort(
                f"the peer received {peer.rx} messages, but {final.acked} were acknowledged and {final.wired} sent:"
                " a message was acknowledged and lost"
                if peer.rx < final.acked
                else f"the peer received {peer.rx} messages, but only {final.wired} were sent"
            )
        elif peer.receipts_lost and final.unsafe_if_lost is not None:
            self._ending.abort(
                f"the peer's NIC died with receipts, and work cannot be replayed: {final.unsafe_if_lost}"
            )
        else:
            self._step(switch, SwitchInput.PEER_READY)

    def on_fence_completed(self, event: ev.FenceCompleted) -> None:
        """Every pair is fenced."""
        s = self._state
        switch = s.switch
        if switch is None or not self.fencing() or switch.final is not None:
            return
        if event.number != self.fence_number:
            return
        for p in s.pairs:
            if p.used:
                p.fenced = True
                p.works = p.clean = False
        switch.final = event
        switch.heard_ns = s.now_ns
        if event.unsafe is not None:
            self._ending.abort(f"work that cannot be replayed: {event.unsafe}")
            return
        self._advance()

    def on_fence_hung(self, event: ev.FenceHung) -> None:
        """A NIC does not stop: nothing is proven."""
        if self._state.switching and event.number == self.fence_number:
            self._ending.abort(f"the fence hung: {event.reason}")

    def on_pair_reset(self, event: ev.PairReset) -> bool:
        """RESET and INIT of a pair. Returns whether this SWITCH had asked for that."""
        s, switch = self._state, self._state.switch
        if switch is None or not s.switching or switch.target != event.pair or switch.resetting is None:
            return False
        if event.arm == switch.resetting:
            switch.resetting = switch.command_ns = None
            if event.error is not None:
                self._next_attempt(f"pair {event.pair}: {event.error}")
                return True
            s.renew(event.pair, event.arm, event)
            switch.reset_arm = event.arm
            switch.heard_ns = max(switch.heard_ns, s.now_ns)
            self._advance()
        return True

    def on_pair_connected(self, event: ev.PairConnected) -> bool:
        """RTR and RTS of a pair. Returns whether this SWITCH had asked for that."""
        s, switch = self._state, self._state.switch
        if switch is None or not s.switching or switch.target != event.pair or not switch.connecting:
            return False
        p = s.pairs[event.pair]
        if event.arm == p.arm:
            switch.connecting = False
            if switch.resetting is None:
                switch.command_ns = None
            switch.heard_ns = max(switch.heard_ns, s.now_ns)
            if event.error is not None:
                self._next_attempt(f"pair {event.pair}: {event.error}")
            elif (
                s.switch_state is SwitchState.FENCED
                and switch.reset_arm == p.arm
                and switch.resetting is None
            ):
                self._step(switch, SwitchInput.CONNECTED)
        return True

    def on_receives_posted(self, event: ev.ReceivesPosted) -> bool:
        """The last receives asked for are posted, or cannot be. Returns whether this SWITCH had asked for them."""
        s, switch = self._state, self._state.switch
        if switch is None or s.switch_state is not SwitchState.POSTING:
            return False
        if event.error is not None:
            self._next_attempt(f"pair {switch.target}: {event.error}")
            return True
        switch.heard_ns = max(switch.heard_ns, s.now_ns)
        self._step(switch, SwitchInput.RECEIVES_POSTED)
        self._advance()
        return True

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _sync(self, switch: Switch) -> Sync:
        p = self._state.pairs[switch.target]
        clean = p.clean or (switch.reset_arm == p.arm and switch.phase in (Phase.POSTING, Phase.READY))
        return Sync(
            epoch=switch.epoch,
            target=switch.target,
            phase=switch.phase,
            arm=p.arm,
            clean=clean,
            address=p.local,
            rx=switch.final.rx if switch.final is not None else 0,
            ask=switch.ask,
            seen_phase=int(switch.peer.phase) if switch.peer is not None else -1,
            seen_arm=switch.peer.arm if switch.peer is not None else -1,
            settled=switch.settled,
            receipts_lost=switch.final is not None and switch.final.receipts_lost,
        )

    def _say(self, switch: Switch) -> None:
        s = self._state
        message = self._sync(switch)
        now_at = (int(message.phase), message.arm)
        if now_at != switch.sent_phase:
            switch.resend_step_ns = 0
        switch.sent_phase = now_at
        switch.sent_ns = s.now_ns
        switch.resend_step_ns = s.backoff(switch.resend_step_ns)
        s.timers.set(Timer.SYNC, NEVER if switch.settled else s.now_ns + switch.resend_step_ns)
        # Only over the target's own NIC pair: an answer there shows that the target works at all.
        s.say(message, switch.target)

    def say_again(self) -> None:
        """The last SYNC was not answered."""
        assert self._state.switch is not None
        self._say(self._state.switch)

    def _say_again_soon(self, switch: Switch) -> None:
        if self._state.now_ns - switch.sent_ns >= self._state.config.resend_first_ns // 3:
            self._say(switch)

    def answer_stale(self) -> None:
        """The peer speaks of a former epoch: it is told of ours."""
        s = self._state
        s.counts.stale += 1
        if s.switch is not None and s.switch.phase is not Phase.ASK:
            s.say(self._sync(s.switch), s.switch.target)

    def on_message(self, m: Sync, unsafe: str | None) -> None:
        """A SYNC of the peer's, before the pairing is over. unsafe: see `events.PathFailed`."""
        s = self._state
        if m.target >= len(s.pairs):
            s.counts.stale += 1
            return
        match m.phase:
            case Phase.ABORT:
                if m.epoch >= s.epoch:
                    self._ending.abort("the peer gave up", answer=True)
            case Phase.BYE:
                self._on_bye(m)
            case Phase.REFUSE:
                self._on_refuse(m)
            case _:
                self._on_sync(m, unsafe)

    def _on_sync(self, m: Sync, unsafe: str | None) -> None:
        s = self._state
        switch = s.switch
        theirs = (m.epoch, m.target)
        if switch is not None and s.switch_state is SwitchState.ASK:
            asked = (switch.epoch, switch.target)
            if theirs < asked:
                return  # a crossing question with a smaller target, or something late: ours stands
            if theirs == asked:
                # The peer agreed, or asked the same at the same time. Nothing unsafe can have come since: the gate is
                # closed.
                switch.peer = m if m.phase is not Phase.ASK else None
                self._step(switch, SwitchInput.PEER_AGREED)
                return
        known = switch is not None and switch.phase is not Phase.ASK
        ours = (switch.epoch, switch.target) if switch is not None and known else (s.epoch, -1)
        if theirs > ours:
            self._join(m, unsafe)
        elif switch is None or theirs < ours:
            self.answer_stale()
        else:
            self._on_current_sync(switch, m)

    def _on_bye(self, m: Sync) -> None:
        if self.fencing():
            self._ending.abort("the peer closed its QP", answer=True)
            return
        if self._state.switching:
            self.drop_question()
        self._ending.peer_left(m)

    def _on_refuse(self, m: Sync) -> None:
        s = self._state
        switch = s.switch
        asking = switch is not None and s.switch_state is SwitchState.ASK
        if switch is not None and asking and (m.ask, m.epoch) == (switch.ask, switch.epoch):
            s.counts.asks_refused += 1
            self.drop_question()

    def _join(self, m: Sync, unsafe: str | None) -> None:
        """A newer SWITCH of the peer: refuse a question we cannot afford, else take part."""
        s = self._state
        p = s.pairs[m.target]
        if m.phase is Phase.ASK and unsafe is not None:
            s.say(Sync(m.epoch, m.target, Phase.REFUSE, p.arm, p.clean, p.local, 0, ask=m.ask), m.target)
            return
        left = s.send_pair
        if not self.fencing():
            self.tried = set()
            self._started_ns = s.now_ns
        if p.dead or (p.alive is False and any(q.alive is not False and not q.dead for q in s.pairs)):
            self.tried.add(m.target)
            other = self._choose_target(left)
            if other is not None and (p.dead or s.pairs[other].alive is not False) and other != left:
                why = f"the peer's target, pair {m.target}, does not work here"
                self._begin(SwitchInput.JOINED, m.epoch + 1, other, left, why)
                return
        self._begin(SwitchInput.JOINED, m.epoch, m.target, left, "the peer switches")
        assert s.switch is not None
        if m.phase is not Phase.ASK:
            s.switch.peer = m
        self._advance()

    def _on_current_sync(self, switch: Switch, m: Sync) -> None:
        s = self._state
        if m.phase is Phase.ASK:
            self._say_again_soon(switch)
            return
        switch.heard_ns = s.now_ns
        known = switch.peer
        if known is None or (m.arm, m.phase) >= (known.arm, known.phase):
            switch.peer = m
        if not s.switching:
            if m.seen_phase == Phase.READY and m.seen_arm == s.pairs[switch.target].arm:
                switch.settled = True
                s.timers.stop(Timer.SYNC)
            if not m.settled:
                self._say(switch)
            return
        before = switch.sent_phase
        self._advance()
        if switch is not s.switch or not s.switching:
            return
        if switch.sent_phase == before and (m.seen_phase, m.seen_arm) != before:
            self._say_again_soon(switch)
