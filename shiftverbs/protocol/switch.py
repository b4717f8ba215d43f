# SPDX-License-Identifier: BSD-3-Clause
"""SWITCH: both directions move to another pair after a failure, and how a pairing ends. Pure."""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage, Status
from shiftverbs.protocol.messages import Phase, Sync
from shiftverbs.protocol.state import ArmState, PairState, Switch
from shiftverbs.state_machine import RecvInput, SendInput, SendState


class SwitchProcedure(PairState):
    """Close, fence, agree on a fit target, compare counters, trim, replay."""

    # ---- SWITCH -----------------------------------------------------------------------------------------------------

    def _choose_target(self, left: int) -> int | None:
        """The next pair to try: fit ones first, the one just left last; None when all were tried."""
        best = [
            (k == left, p.alive is False, self._failed_last(k), not p.clean, k)
            for k, p in enumerate(self.pairs)
            if not p.dead and k not in self._tried
        ]
        return min(best)[-1] if best else None

    def _failed_last(self, k: int) -> int:
        """How late among the failures of what is to be carried pair k's last one was; 0: it has not failed it."""
        return max((n for n, j in enumerate(self._avoid, 1) if j == k), default=0)

    def _attempt_deadline_ns(self, s: Switch) -> int:
        patience, resend = self.config.peer_deadline_ns, self.config.resend_most_ns
        usable = max(1, sum(not p.dead for p in self.pairs))
        # One lost message must not end it, unless the user will not wait even for one that is said again.
        share = min(max(patience // usable, 2 * resend), patience)
        if s.command_ns is not None:
            # The peer may go on talking for ever while our own NIC hangs: another pair may do better.
            return s.command_ns + self.config.fence_deadline_ns
        if s.phase is not Phase.ASK and s.final is None:
            # our own fence runs against its own deadline; the peer's silence counts from its end
            return s.heard_ns + self.config.fence_deadline_ns + share
        if s.posting:
            # Memory is being registered, here or there: as long as that takes, if only the peer is heard.
            return s.heard_ns + max(patience, 4 * resend)
        return min(s.heard_ns + share, self._started_ns + patience * 5)

    def _leave_out_posting(self) -> None:
        """Time in which memory is registered, here or there, is not time in which pairs were tried."""
        s = self._switch
        if s is not None and not s.done and s.posting:
            if self._posting_ns is None:
                self._posting_ns = self._now
        elif self._posting_ns is not None:
            self._started_ns += self._now - self._posting_ns
            self._posting_ns = None

    def _is_hopeless(self, k: int, wr: int) -> bool:
        """Whether no pair gets `wr` through, which failed on pair k though nothing else did there.

        A later WR than ever before is progress: all before it got through. A round that is over soon may have come upon
        rails that fail in turn, so there is another, with growing pauses that make both long enough. Where the pairs do
        not come round because somebody else leaves them, its own failures on the rest decide, after two rounds' worth.
        """
        if wr > self._stuck_wr:
            self._stuck_wr = wr
            self._stuck_on = []
            self._stuck_ns = self._now
        self._stuck_on.append(k)
        failures, pairs, round_ns = len(self._stuck_on), len(self.pairs), self.config.round_ns
        tried = all(p.dead or j in self._stuck_on for j, p in enumerate(self.pairs))
        long_enough = self._now - self._stuck_ns >= round_ns
        if failures >= 2 * pairs or (tried and failures >= pairs and long_enough):
            return True
        if failures >= pairs:
            # The shares of 1 + 2 + ... + pairs; a little more, by chance, to be out of step with what comes and goes.
            pause_ns = round_ns * 2 * (failures - pairs + 1) // (pairs * (pairs + 1))
            self._open_ns = self._now + pause_ns + self.rng.randrange(pause_ns // 4 + 1)
        return False

    def _open_in_time(self, now_ns: int) -> None:
        """Hand over what waited for its next attempt, if it is time."""
        if self._opening and now_ns >= self._open_ns:
            self._opening = False
            self._do(ev.OpenSend(self.send_pair))

    def _on_path_failed(self, event: ev.PathFailed) -> None:
        if self.over:
            return
        s = self._switch
        here = event.pair == self.send_pair and (s is None or s.done or s.phase is Phase.ASK)
        if here and event.wr is not None and self._is_hopeless(event.pair, event.wr):
            self._abort(f"every path fails the same work: {event.reason}")
            return
        if s is not None and not s.done:
            if event.pair == s.target and s.phase is not Phase.ASK and not event.advisory:
                p = self.pairs[s.target]
                if s.phase in (Phase.POSTING, Phase.READY) or p.dead:
                    self._next_attempt(event.reason)
                else:  # late news of a life that this SWITCH ends anyway, or of an idle pair: it must be reset
                    p.armed = p.clean = False
                    self._advance()
            elif s.phase is not Phase.ASK and not event.advisory:
                self.pairs[event.pair].armed = self.pairs[event.pair].clean = False
            elif s.phase is Phase.ASK and not event.advisory:
                if event.pair in (self.send_pair, self.recv_pair):
                    self._begin_fencing(s, event.reason)
                    return
                self._disarm(event.pair)
                if (
                    event.pair == s.target
                ):  # nothing is broken where we are: do not fence that for a dead target
                    self._drop_ask()
            return
        if event.pair not in (self.send_pair, self.recv_pair) and not (
            self._move is not None and self._move.target == event.pair
        ):
            self._disarm(event.pair)
            return
        if event.advisory and (event.unsafe is not None or self._now < self._ask_retry_ns):
            return
        self._tried = set()
        self._avoid = self._stuck_on if event.wr is not None else []
        self._started_ns = self._now
        target = self._choose_target(event.pair)
        if target is None:
            self._abort(f"no pair left: {event.reason}")
            return
        if event.advisory and (target == event.pair or self.pairs[target].alive is False):
            return  # nowhere better to go: a short blip would lose nothing here
        self._begin(self.epoch + 1, target, event.pair, event.reason, ask=event.advisory)

    def _begin(self, epoch: int, target: int, left: int, reason: str, ask: bool = False) -> None:
        """Start or join a SWITCH."""
        if ask and self._move is not None:
            if self._move.tx is not None:
                # The peer was told: it may have moved its receives. The MOVE ends soon, one way or the other.
                self._ask_retry_ns = self._now + self.config.ask_retry_ns
                return
            self._cancel_move()
        s = Switch(epoch, target, Phase.ASK if ask else Phase.START, reason, left, heard_ns=self._now)
        if ask and self._switch is not None and self._switch.done:
            s.before = self._switch
        self._switch = s
        if not ask:
            self._begin_fencing(s, reason)
            return
        self._ask += 1
        s.ask = self._ask
        self.counts.asks += 1
        self._send_input(SendInput.ASKED, self.send_pair)
        self._send_sync(s)

    def _begin_fencing(self, s: Switch, reason: str) -> None:
        """From here on there is no way back: gates closed, ARM and MOVE cancelled, every used pair fenced."""
        self.epoch = s.epoch
        s.phase = Phase.START
        s.reason = reason
        s.heard_ns = self._now
        s.final = None
        self.counts.switches += 1
        self._tried.add(s.target)
        self._note_flap()
        self._move = None
        self._moving_in = None
        self._do(ev.AwaitRx(None))
        self._send_input(SendInput.PATH_FAILED, self.send_pair)
        self._recv_input(RecvInput.PATH_FAILED, self.recv_pair)
        self._do(ev.SwitchStarted(s.epoch, s.target, reason))
        for p in self.pairs:
            if p.state is not ArmState.IDLE:
                self._arm_failed(p, backoff=False)
        pairs = tuple(k for k, p in enumerate(self.pairs) if p.used and not p.fenced)
        self._send_sync(s)
        self._fence_number += 1
        self._do(ev.Fence(self._fence_number, pairs, self._now + self.config.fence_deadline_ns))

    def _next_attempt(self, reason: str) -> None:
        """The target did not work, or the peer did not answer there: epoch + 1 and the next pair."""
        s = self._switch
        assert s is not None
        target = self._choose_target(s.left)
        if target is None:
            self._abort(f"no pair left: {reason}")
            return
        self._begin(self.epoch + 1, target, s.left, reason)

    def _drop_ask(self) -> None:
        """Nothing was fenced yet: go on where we are, ask again later if the reason persists."""
        assert self._switch is not None
        self._switch = self._switch.before  # the last finished one answers late messages again
        self._ask_retry_ns = self._now + self.config.ask_retry_ns
        home = (
            SendInput.ASK_DROPPED_HOME if self.send_state is SendState.DEFAULT else SendInput.ASK_DROPPED_AWAY
        )
        self._send_input(home, self.send_pair)
        if self._moving_in is not None and not self._moving_in.posting:
            self._do(
                ev.AwaitRx(self._moving_in.message.tx)
            )  # a RxReached that came while asking was not acted on

    def _on_fence_completed(self, event: ev.FenceCompleted) -> None:
        s = self._switch
        if self.over or s is None or s.done or s.final is not None or event.number != self._fence_number:
            return
        for p in self.pairs:
            if p.used:
                p.fenced = True
                p.armed = p.clean = False
        s.final = event
        s.heard_ns = self._now
        if event.unsafe is not None:
            self._abort(f"work that cannot be replayed: {event.unsafe}")
            return
        self._advance()

    def _advance(self) -> None:
        """Take the SWITCH as far as what is known allows."""
        s = self._switch
        if self.over or s is None or s.done or s.final is None:
            return
        p = self.pairs[s.target]
        fit = p.clean or s.reset_arm == p.arm
        goal = p.arm if fit else p.arm + 1
        peer = s.peer
        if peer is not None:
            goal = max(goal, peer.arm if peer.clean or peer.phase is not Phase.START else peer.arm + 1)
        if s.resetting is not None:
            return  # the result brings us back here
        if not (fit and p.arm == goal):
            if s.phase in (Phase.POSTING, Phase.READY):
                self._recv_input(RecvInput.PATH_FAILED, s.target)
            s.phase = Phase.START
            s.resetting = goal
            s.command_ns = self._now
            self._do(ev.ResetPair(s.target, goal, dummy=False))
            return
        if s.phase is Phase.READY:
            if peer is not None and peer.phase is Phase.READY and peer.arm == p.arm:
                self._complete(s, peer)
            return
        if s.phase is Phase.POSTING:
            return  # the event brings us back here
        if p.clean:
            self._post_receives(s)
            return
        if s.phase is Phase.START:
            s.phase = Phase.FENCED
            self._send_sync(s)
        if (
            peer is not None
            and peer.phase in (Phase.FENCED, Phase.POSTING, Phase.READY)
            and peer.arm == p.arm
            and not s.connecting
        ):
            s.connecting = True
            s.command_ns = self._now
            self._do(ev.ConnectPair(s.target, p.arm, Stage.RTR_RTS, p.local.psn, peer.address))

    def _post_receives(self, s: Switch) -> None:
        """The target is fit. READY is said when the receives are there: the peer sends the moment it hears it."""
        s.phase = Phase.POSTING
        # clean lasts until something is posted; what makes the target fit from now on is this SWITCH itself
        s.reset_arm = self.pairs[s.target].arm
        self.pairs[s.target].armed = True
        self._recv_input(RecvInput.READY_HOME if s.target == 0 else RecvInput.READY_AWAY, s.target)

    def _on_receives_posted(self, event: ev.ReceivesPosted) -> None:
        """For a SWITCH or for a MOVE, whichever asked last."""
        if self.over or event.number != self._receives_number:
            return
        s = self._switch
        if s is not None and not s.done and s.phase is Phase.POSTING:
            if event.error is not None:
                self._next_attempt(f"pair {s.target}: {event.error}")
                return
            s.phase = Phase.READY
            s.heard_ns = max(s.heard_ns, self._now)
            self._send_sync(s)
            self._advance()
        elif self._moving_in is not None and self._moving_in.posting:
            if event.error is not None:
                self._on_path_failed(ev.PathFailed(self.recv_pair, event.error))
                return
            self._recv_input(RecvInput.RECEIVES_MOVED, self.recv_pair)

    def _complete(self, s: Switch, peer: Sync) -> None:
        """The peer is READY: what it received is proven, everything later is replayed."""
        final = s.final
        assert final is not None
        if not final.acked <= peer.rx <= final.wired:
            self._abort(
                f"the peer received {peer.rx} messages, but {final.acked} were acknowledged and {final.wired} sent:"
                " a message was acknowledged and lost"
                if peer.rx < final.acked
                else f"the peer received {peer.rx} messages, but only {final.wired} were sent"
            )
            return
        if peer.receipts_lost and final.unsafe_if_lost is not None:
            self._abort(
                f"the peer's NIC died with receipts, and work cannot be replayed: {final.unsafe_if_lost}"
            )
            return
        s.done = True
        self._tried = set()
        if self.status is Status.PAIRING:
            self._set_status(
                Status.PROTECTED
            )  # the peer's ARM was through, ours was cut short: both pairs work
        self._use(s.target)
        home = s.target == 0
        self._send_input(
            SendInput.SWITCHED_HOME if home else SendInput.SWITCHED_AWAY, s.target, peer_rx=peer.rx
        )
        self._note_home()
        if peer.seen_phase == Phase.READY and peer.seen_arm == peer.arm:
            s.settled = True
            s.resend_ns = None
        self._send_sync(s)

    def _sync(self, s: Switch, phase: Phase | None = None) -> Sync:
        p = self.pairs[s.target]
        clean = p.clean or (s.reset_arm == p.arm and s.phase in (Phase.POSTING, Phase.READY))
        return Sync(
            epoch=s.epoch,
            target=s.target,
            phase=s.phase if phase is None else phase,
            arm=p.arm,
            clean=clean,
            address=p.local,
            rx=s.final.rx if s.final is not None else 0,
            ask=s.ask,
            seen_phase=int(s.peer.phase) if s.peer is not None else -1,
            seen_arm=s.peer.arm if s.peer is not None else -1,
            settled=s.settled,
            receipts_lost=s.final is not None and s.final.receipts_lost,
        )

    def _send_sync(self, s: Switch) -> None:
        message = self._sync(s)
        now_at = (int(message.phase), message.arm)
        if now_at != s.sent_phase:
            s.resend_step_ns = 0
        s.sent_phase = now_at
        s.sent_ns = self._now
        s.resend_step_ns = self._backoff(s.resend_step_ns)
        s.resend_ns = None if s.settled else self._now + s.resend_step_ns
        # Only over the target's own NIC pair: an answer there shows that the target works at all.
        self._say(message, s.target)

    def _on_sync(self, m: Sync, unsafe: str | None) -> None:
        if self.over:
            if m.phase not in (Phase.ABORT, Phase.BYE):
                self._say_over(m)
            else:
                self._over_resend_ns = None
            return
        if m.target >= len(self.pairs):
            self.counts.stale += 1
            return
        if m.phase is Phase.ABORT:
            if m.epoch >= self.epoch:
                self._abort("the peer gave up", answer=True)
            return
        if m.phase is Phase.BYE:
            self._on_bye(m)
            return
        s = self._switch
        if m.phase is Phase.REFUSE:
            if (
                s is not None
                and not s.done
                and s.phase is Phase.ASK
                and m.ask == s.ask
                and m.epoch == s.epoch
            ):
                self.counts.asks_refused += 1
                self._drop_ask()
            return
        if s is not None and not s.done and s.phase is Phase.ASK:
            if (m.epoch, m.target) < (s.epoch, s.target):
                return  # a crossing question with a smaller target, or something late: ours stands
            if (m.epoch, m.target) == (s.epoch, s.target):
                self._on_current_sync(s, m)
                return
        ours = (s.epoch, s.target) if s is not None and s.phase is not Phase.ASK else (self.epoch, -1)
        if (m.epoch, m.target) > ours:
            self._join(m, unsafe)
            return
        if s is None or (m.epoch, m.target) < ours:
            self._answer_stale()
            return
        self._on_current_sync(s, m)

    def _join(self, m: Sync, unsafe: str | None) -> None:
        """A newer SWITCH of the peer: refuse a question we cannot afford, else take part."""
        if m.phase is Phase.ASK and unsafe is not None:
            p = self.pairs[m.target]
            self._say(Sync(m.epoch, m.target, Phase.REFUSE, p.arm, p.clean, p.local, 0, ask=m.ask), m.target)
            return
        left = self.send_pair
        if self._switch is None or self._switch.done or self._switch.phase is Phase.ASK:
            self._tried = set()
            self._started_ns = self._now
        p = self.pairs[m.target]
        if p.dead or (p.alive is False and any(q.alive is not False and not q.dead for q in self.pairs[:])):
            self._tried.add(m.target)
            other = self._choose_target(left)
            if other is not None and (p.dead or self.pairs[other].alive is not False) and other != left:
                self._begin(
                    m.epoch + 1, other, left, f"the peer's target, pair {m.target}, does not work here"
                )
                return
        self._begin(m.epoch, m.target, left, "the peer switches")
        s = self._switch
        assert s is not None
        if m.phase is not Phase.ASK:
            s.peer = m
        self._advance()

    def _on_current_sync(self, s: Switch, m: Sync) -> None:
        if s.phase is Phase.ASK:
            # The peer agreed, or asked the same at the same time. Nothing unsafe can have come since: the gate is
            # closed.
            s.peer = m if m.phase is not Phase.ASK else None
            self._begin_fencing(s, s.reason)
            return
        if m.phase is Phase.ASK:
            self._resend_sync_soon(s)
            return
        s.heard_ns = self._now
        known = s.peer
        if known is None or (m.arm, m.phase) >= (known.arm, known.phase):
            s.peer = m
        if s.done:
            if m.seen_phase == Phase.READY and m.seen_arm == self.pairs[s.target].arm:
                s.settled = True
                s.resend_ns = None
            if not m.settled:
                self._send_sync(s)
            return
        before = s.sent_phase
        self._advance()
        if self.over or s.done or s is not self._switch:
            return
        if s.sent_phase == before and (m.seen_phase, m.seen_arm) != before:
            self._resend_sync_soon(s)

    def _resend_sync_soon(self, s: Switch) -> None:
        if self._now - s.sent_ns >= self.config.resend_first_ns // 3:
            self._send_sync(s)

    def _answer_stale(self) -> None:
        self.counts.stale += 1
        s = self._switch
        if s is not None and s.phase is not Phase.ASK:
            self._say(self._sync(s), s.target)

    # ---- the end of a pairing ---------------------------------------------------------------------------------------

    def _abort(self, reason: str, answer: bool = False) -> None:
        self.counts.aborts += 1
        self._end(Phase.ABORT, tell=True)
        self._do(ev.AwaitRx(None))
        self._recv_input(RecvInput.ABORTED, 0)
        self._send_input(SendInput.ABORTED, 0, reason=reason)
        self._set_status(Status.FAILED, reason)
        if answer:
            self._over_resend_ns = None

    def _end(self, phase: Phase, tell: bool) -> None:
        self.over = True
        self._over_phase = phase
        if self._opening and phase is Phase.BYE:
            self._open_in_time(self._open_ns)  # nobody will do it later
        self._move = None
        if self._moving_in is not None and self._moving_in.posting:
            self._moved_in = self._moving_in.message.number
        self._moving_in = None
        for p in self.pairs:
            p.state = ArmState.IDLE
        if tell:
            self._over_until_ns = self._now + self.config.bye_deadline_ns
            self._over_step_ns = 0
            self._send_over()

    def _send_over(self) -> None:
        self._over_step_ns = self._backoff(self._over_step_ns)
        due = self._now + self._over_step_ns
        self._over_resend_ns = due if due < self._over_until_ns else None
        self._say(self._over_sync(self.epoch), self.send_pair, spread=True)

    def _over_sync(self, epoch: int) -> Sync:
        s = self._switch
        p = self.pairs[0]
        target = s.target if s is not None else 0
        moved = self._moved_in + 1 if self._over_phase is Phase.BYE else 0
        return Sync(max(epoch, self.epoch), target, self._over_phase, p.arm, False, p.local, 0, ask=moved)

    def _say_over(self, m: Sync) -> None:
        self._say(self._over_sync(m.epoch), m.target)

    def _on_bye(self, m: Sync) -> None:
        if self._switching() and self._switch is not None and self._switch.phase is not Phase.ASK:
            self._abort("the peer closed its QP", answer=True)
            return
        if self._switching():
            self._drop_ask()
        # The peer may have moved its receives: what is sent to those it left would be acknowledged, and lost.
        # Unless its BYE says which of our MOVEs was the last that it followed.
        out = self._move
        unanswered = out is not None and out.tx is not None and not m.ask
        if out is not None and out.tx is not None and m.ask > out.number:
            self._on_moved(out)
        elif out is not None and not unanswered:
            self._cancel_move()
        self._end(Phase.BYE, tell=False)
        self._do(ev.AwaitRx(None), ev.LetGo("the peer closed its QP", unanswered))
        if self.status is not Status.PAIRING:  # else: the pairing ends, and another may follow
            self._set_status(Status.UNPROTECTED, "the peer closed its QP")

    def _on_quit(self, reason: str) -> None:
        if not self.over:
            self._end(Phase.BYE, tell=True)
            self._set_status(Status.UNPROTECTED, reason)
