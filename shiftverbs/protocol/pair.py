# SPDX-License-Identifier: BSD-3-Clause
"""What two peers agree on about one QP: SWITCH, ARM and MOVE. Pure: no I/O, no clock, no threads, no pyverbs.

A *pair* is our QP on NIC k with the peer's QP on its NIC k; pair 0 is the default one, pair k the k-th backup in each
side's published order. `PairProtocol` is fed events (`handle`) and the passing of time (`handle_timeout`, due at
`next_timeout_ns`) and returns actions in the order in which they must be carried out.

The three procedures are in switch.py, arm.py and move.py, what they share in state.py:

* SWITCH moves both directions after a failure. Both sides close, fence every used pair, make the target fit if it is
  not, post their receives there and tell each other how much they received; then each trims what is proven and replays
  the rest. May replay WRITEs and READs (SHIFT, section 3.2).
* ARM makes an idle pair fit again: RESET, INIT, RTR, RTS on both sides and one zero-length SEND each way.
* MOVE takes one direction over voluntarily, behind a signaled fence (SHIFT, section 4.3.3). Never replays anything.

How messages are lost, doubled or late never matters: each carries whole state, and what was answered once is answered
the same way for ever.
"""

from __future__ import annotations

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.events import Action, Event
from shiftverbs.protocol.messages import Arm, ArmStep, Message, Move, Phase, Prefer, Sync
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.state import MS, ArmState, LocalPair, ProtocolConfig
from shiftverbs.protocol.switch import SwitchProcedure
from shiftverbs.state_machine import SendState

__all__ = ["MS", "LocalPair", "PairProtocol", "ProtocolConfig"]


class PairProtocol(SwitchProcedure, ArmProcedure, MoveProcedure):
    """The protocol of one protected QP.

    locals_: our QPs, pair 0 first (at least two). initiator: True on the side with the smaller instance id, which
    starts ARM. rng: source of PSNs and of jitter; a seed replays a run bit for bit. now_ns: the present time.
    """

    def start(self, now_ns: int) -> list[Action]:
        """Begin: arm the backup pairs. Returns actions."""
        self._now = now_ns
        self._out = []
        self._pursue()
        return self._take()

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; return the actions it causes, to be carried out in order."""
        self._now = now_ns
        self._out = []
        match event:
            case ev.MessageReceived():
                self.counts.messages_in += 1
                self._on_message(event.message, event.unsafe)
            case ev.PathFailed():
                self._on_path_failed(event)
            case ev.FenceCompleted():
                self._on_fence_completed(event)
            case ev.FenceHung():
                if self._switching() and event.number == self._fence_number:
                    self._abort(f"the fence hung: {event.reason}")
            case ev.PairReset():
                self._on_pair_reset(event)
            case ev.PairConnected():
                self._on_pair_connected(event)
            case ev.ArmCompletion():
                self._on_arm_completion(event)
            case ev.FencePosted():
                self._on_fence_posted()
            case ev.FenceDone():
                self._on_fence_done(event.tx)
            case ev.RxReached():
                self._on_rx_reached()
            case ev.ReceivesPosted():
                self._on_receives_posted(event)
            case ev.PathHealth():
                self._on_path_health(event)
            case ev.NicDead():
                self._on_nic_dead(event.pair)
            case ev.PreferPair():
                self._on_prefer(event.pair)
            case ev.Quit():
                self._on_quit(event.reason)
            case ev.KeysMissing():
                # After the SWITCH too: what cannot be posted where we are would wait for ever.
                if not self.over and (self._switching() or self.send_pair or self.recv_pair):
                    self._abort(event.reason)
            case ev.WorkRefused():
                if not self.over and not self._switching():  # after a SWITCH it is posted once more
                    self._abort(event.reason)
        self._pursue()
        return self._take()

    def handle_timeout(self, now_ns: int) -> list[Action]:
        """Let time pass; return actions. Harmless when nothing is due."""
        self._now = now_ns
        self._out = []
        self._on_time()
        self._pursue()
        return self._take()

    @property
    def next_timeout_ns(self) -> int | None:
        """When `handle_timeout` must be called next, or None."""
        times: list[int | None] = [self._over_resend_ns]
        if not self.over:
            s = self._switch
            if self._opening:
                times.append(self._open_ns)
            if s is not None:
                times.append(s.resend_ns)
                if not s.done:
                    times.append(self._attempt_deadline_ns(s))
            m = self._move
            if m is not None:
                times += [m.grace_ns, m.deadline_ns, m.resend_ns]
            times.append(self._prefer.resend_ns)
            if s is None or s.done:
                times += [t for k in range(len(self.pairs)) for t in self._arm_times(k)]
                if self._wants_move():
                    times.append(self._home_hold_ns)
        due = [t for t in times if t is not None]
        return min(due) if due else None

    @property
    def switching(self) -> bool:
        """True while a SWITCH is under way (asking included)."""
        return self._switching()

    @property
    def move_told(self) -> bool:
        """True while a MOVE of ours is told and not answered: nobody knows where the peer's receives are."""
        return self._move is not None and self._move.tx is not None

    @property
    def left(self) -> bool:
        """True when it ended by a BYE, of either side."""
        return self.over and self._over_phase is Phase.BYE

    @property
    def bye(self) -> Sync:
        """What it says from its end on."""
        return self._over_sync(self.epoch)

    @property
    def busy(self) -> bool:
        """True while completions or commands are awaited: a SWITCH, an ARM or a MOVE is under way."""
        if self._switching() or self._move is not None or self._moving_in is not None:
            return True
        return any(p.state is not ArmState.IDLE for p in self.pairs)

    @property
    def all_fit(self) -> bool:
        """True when every usable pair carries work or is armed and clean."""
        return all(
            p.dead or p.clean or k in (self.send_pair, self.recv_pair) for k, p in enumerate(self.pairs)
        )

    @property
    def preferred(self) -> int:
        """The pair traffic should be on while all is well."""
        return self._prefer.target

    def _pursue(self) -> None:
        """Start what nobody has to ask for: ARM of idle pairs, MOVE towards the preferred pair."""
        self._leave_out_posting()
        if self.over or self._switching():
            return
        for k, p in enumerate(self.pairs):
            if self._needs_arm(k) and self._now >= p.retry_ns:
                if self.initiator:
                    self._begin_arm(k, p, p.arm + 1, requester=True)
                else:
                    self._ask_for_arm(k, p)
        m = self._move
        if m is not None and m.tx is None and not self.pairs[m.target].armed:
            self._cancel_move()  # the peer was told nothing yet
        if self._wants_move() and self._now >= self._home_hold_ns:
            self._begin_move(self._wanted_pair())

    # ---- health, messages, time -------------------------------------------------------------------------------------

    def _on_path_health(self, event: ev.PathHealth) -> None:
        p = self.pairs[event.pair]
        if event.alive and p.alive is False:
            p.retry_ns = min(p.retry_ns, self._now)
            p.backoff_ns = 0
        p.alive = event.alive
        s = self._switch
        if (
            not event.alive
            and self._switching()
            and s is not None
            and s.phase is Phase.ASK
            and s.target == event.pair
        ):
            self._drop_ask()  # nobody will answer there, and our gate is closed
        if not event.alive and p.state is not ArmState.IDLE and not self.over:
            self._arm_failed(p)

    def _on_nic_dead(self, k: int) -> None:
        p = self.pairs[k]
        p.dead = True
        p.alive = False
        p.armed = p.clean = False
        self._on_path_failed(ev.PathFailed(k, "DEVICE_FATAL"))

    def _on_message(self, message: Message, unsafe: str | None) -> None:
        if self.over and not isinstance(message, Sync):
            self.counts.stale += 1
            self._say(
                self._over_sync(self.epoch), message.pair if isinstance(message, Arm) else message.target
            )
            return
        match message:
            case Sync():
                self._on_sync(message, unsafe)
            case Arm():
                self._on_arm(message)
            case Move():
                self._on_move(message)
            case Prefer():
                self._on_prefer_message(message)

    def _on_time(self) -> None:
        now = self._now
        if self.over:
            if self._over_resend_ns is not None and now >= self._over_resend_ns:
                self._send_over()
            return
        self._open_in_time(now)
        s = self._switch
        if s is not None and not s.done and now >= self._attempt_deadline_ns(s):
            if s.phase is Phase.ASK:
                self._drop_ask()
            else:
                hung = "our own NIC does not carry out a command" if s.command_ns is not None else None
                self._next_attempt(hung or "the peer does not answer")
            return
        if s is not None and s.resend_ns is not None and now >= s.resend_ns:
            self._send_sync(s)
        m = self._move
        if m is not None:
            if m.deadline_ns is not None and now >= m.deadline_ns:
                self._on_path_failed(ev.PathFailed(m.target, "a MOVE was not answered"))
                return
            if m.grace_ns is not None and now >= m.grace_ns:
                m.grace_ns = None
                if self.send_state is SendState.WAIT_SIGNALED:
                    self._do(ev.PostFenceWrite())
            if m.resend_ns is not None and now >= m.resend_ns:
                self._send_move()
        if self._prefer.resend_ns is not None and now >= self._prefer.resend_ns:
            self._send_prefer()
        for k, p in enumerate(self.pairs):
            if p.state is ArmState.IDLE:
                continue
            if now >= p.deadline_ns:
                self._arm_timed_out(p)
            elif p.resend_ns is not None and now >= p.resend_ns:
                self._say_arm(ArmStep.REQ if p.requester else ArmStep.REP, k)
