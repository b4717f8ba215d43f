# SPDX-License-Identifier: BSD-3-Clause
"""What two peers agree on about one QP: SWITCH, ARM and MOVE. Pure: no I/O, no clock, no threads, no pyverbs.

A *pair* is our QP on NIC k with the peer's QP on its NIC k; pair 0 is the default one, pair k the k-th backup in each
side's published order. `PairProtocol` is fed events (`handle`) and the passing of time (`handle_timeout`, due at
`next_timeout_ns`) and returns actions in the order in which they must be carried out.

The three procedures are in switch.py, arm.py and move.py, how it ends in ending.py; each holds the state object that
they share (state.py), and those of the others that it calls: SWITCH calls all, MOVE calls ARM, nobody calls SWITCH.

* SWITCH moves both directions after a failure. Both sides close, fence every used pair, make the target fit if it is
  not, post their receives there and tell each other how much they received; then each trims what is proven and replays
  the rest. May replay WRITEs and READs (SHIFT, section 3.2).
* ARM makes an idle pair fit again: RESET, INIT, RTR, RTS on both sides and one zero-length SEND each way.
* MOVE takes one direction over voluntarily, behind a signaled fence (SHIFT, section 4.3.3). Never replays anything.

How messages are lost, doubled or late never matters: each carries whole state, and what was answered once is answered
the same way for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.arm import ArmProcedure
from shiftverbs.protocol.directions import Directions
from shiftverbs.protocol.draws import Chance
from shiftverbs.protocol.ending import Ending
from shiftverbs.protocol.events import Action, Event, Status
from shiftverbs.protocol.invariants import Invariants
from shiftverbs.protocol.messages import Arm, Message, Move, Phase, Prefer, Sync
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.state import MS, Counts, LocalPair, Pair, PairState, ProtocolConfig
from shiftverbs.protocol.switch import SwitchProcedure
from shiftverbs.protocol.tables import ArmState, SwitchState
from shiftverbs.protocol.timers import Timer, arm_timer
from shiftverbs.state_machine import RecvState, SendState

__all__ = ["MS", "LocalPair", "PairProtocol", "ProtocolConfig"]


class PairProtocol:
    """The protocol of one protected QP.

    locals_: our QPs, pair 0 first (at least two). initiator: True on the side with the smaller instance id, which
    starts ARM. rng: source of PSNs and of jitter; a seed replays a run bit for bit. now_ns: the present time.

    For reading: pairs: what is known of each pair; counts: how often things happened. next_timeout_ns: when
    `handle_timeout` must be called next, or None. busy: True while completions or commands are awaited: a SWITCH, an
    ARM or a MOVE is under way.
    """

    __slots__ = (
        "_invariants",
        "arm",
        "busy",
        "counts",
        "directions",
        "ending",
        "initiator",
        "move",
        "next_timeout_ns",
        "pairs",
        "state",
        "switch",
    )

    def __init__(
        self,
        config: ProtocolConfig,
        locals_: Sequence[LocalPair],
        initiator: bool,
        rng: Chance,
        now_ns: int,
    ) -> None:
        self.state = state = PairState(config, locals_, initiator, rng, now_ns)
        self.pairs: list[Pair] = state.pairs
        self.counts: Counts = state.counts
        self.initiator = initiator
        self.directions = Directions(state)
        self.arm = ArmProcedure(state)
        self.move = MoveProcedure(state, self.directions, self.arm)
        self.ending = Ending(state, self.directions, self.arm, self.move)
        self.switch = SwitchProcedure(state, self.directions, self.arm, self.move, self.ending)
        self._invariants = Invariants(state, self.switch, self.move, self.ending)
        self.next_timeout_ns: int | None = None
        self.busy = False

    # ---- events and time in, actions out ----------------------------------------------------------------------------

    def start(self, now_ns: int) -> list[Action]:
        """Begin: arm the backup pairs. Returns actions."""
        self._begin(now_ns)
        return self._finish()

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take one event; return the actions it causes, to be carried out in order."""
        s = self.state
        s.now_ns = now_ns
        s.out.clear()  # what an error left of the last time
        match event:
            case ev.MessageReceived():
                s.counts.messages_in += 1
                self._on_message(event.message, event.unsafe)
            case ev.PathHealth():
                self._on_path_health(event)
            case ev.NicDead():
                self._on_nic_dead(event.pair)
            case _:
                if not s.over:
                    self._on_event(event)
        return self._finish()

    def handle_timeout(self, now_ns: int) -> list[Action]:
        """Let time pass; return actions. Harmless when nothing is due."""
        self._begin(now_ns)
        self._on_time()
        return self._finish()

    # ---- what others may know ---------------------------------------------------------------------------------------

    @property
    def config(self) -> ProtocolConfig:
        """Its times."""
        return self.state.config

    @property
    def send_state(self) -> SendState:
        """The state of the send direction."""
        return self.state.send_state

    @property
    def recv_state(self) -> RecvState:
        """The state of the receive direction."""
        return self.state.recv_state

    @property
    def send_pair(self) -> int:
        """Where sends are."""
        return self.state.send_pair

    @property
    def recv_pair(self) -> int:
        """Where receives are."""
        return self.state.recv_pair

    @property
    def epoch(self) -> int:
        """Number of the last SWITCH."""
        return self.state.epoch

    @property
    def status(self) -> Status:
        """The protection status."""
        return self.state.status

    @property
    def over(self) -> bool:
        """Whether this pairing has ended: by an ABORT or a BYE, of either side."""
        return self.state.over

    @property
    def switching(self) -> bool:
        """True while a SWITCH is under way (asking included)."""
        return self.state.switching

    @property
    def fencing(self) -> bool:
        """True while a SWITCH is under way that has fenced what was used: not while it is only asked about."""
        return self.switch.fencing()

    @property
    def move_told(self) -> bool:
        """True while a MOVE of ours is told and not answered: nobody knows where the peer's receives are."""
        move = self.state.move_out
        return move is not None and move.tx is not None

    @property
    def left(self) -> bool:
        """True when it ended by a BYE, of either side."""
        return self.state.over and self.ending.phase is Phase.BYE

    @property
    def bye(self) -> Sync:
        """What it says from its end on."""
        return self.ending.sync()

    @property
    def all_fit(self) -> bool:
        """True when every usable pair carries work or is clean."""
        here = (self.state.send_pair, self.state.recv_pair)
        return all(p.dead or p.clean or k in here for k, p in enumerate(self.state.pairs))

    def unfit(self, k: int) -> str | None:
        """Why pair `k`, which carries nothing, could not take over as it is; None if it could."""
        return self.arm.unfit(k)

    @property
    def preferred(self) -> int:
        """The pair traffic should be on while all is well."""
        return self.move.prefer.target

    def invariants(self) -> None:
        """Check what always holds between two events (invariants.py). Raises AssertionError, naming what does not.

        Done by itself after each event where `config.invariants` says so.
        """
        self._invariants.check()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, now_ns: int) -> None:
        self.state.now_ns = now_ns
        self.state.out.clear()

    def _finish(self) -> list[Action]:
        """Start what nobody has to ask for, set the timers that follow from all the rest; return the actions."""
        s = self.state
        if s.switching:
            self.switch.pursue()
        elif not s.over:
            self.arm.pursue()
            if self.move.pursue():
                self.arm.set_timers()
        if s.config.invariants:
            self.invariants()
        self.next_timeout_ns = s.timers.next_ns(s.switching)
        self.busy = s.switching or s.move_out is not None or s.move_in is not None
        for p in s.pairs:
            self.busy |= p.state is not ArmState.IDLE
        out = s.out.copy()
        s.out.clear()
        return out

    def _on_event(self, event: Event) -> None:
        """An event that means nothing once the pairing is over."""
        s = self.state
        match event:
            case ev.PathFailed():
                self.switch.path_failed(event)
            case ev.FenceCompleted():
                self.switch.on_fence_completed(event)
            case ev.FenceHung():
                self.switch.on_fence_hung(event)
            case ev.PairReset():
                if not self.switch.on_pair_reset(event):
                    self.arm.on_pair_reset(event)
            case ev.PairConnected():
                if not self.switch.on_pair_connected(event):
                    self.arm.on_pair_connected(event)
            case ev.ArmCompletion():
                self.arm.on_completion(event)
            case ev.FenceWrPosted():
                self.move.on_fence_wr_posted()
            case ev.FenceWrDone():
                self.move.on_fence_wr_done(event.tx)
            case ev.RxReached():
                self.move.on_rx_reached()
            case ev.ReceivesPosted():
                self._on_receives_posted(event)
            case ev.PreferPair():
                self.move.on_prefer(event.pair)
            case ev.Quit():
                self.ending.quit(event.reason)
            case ev.KeysMissing():
                # After the SWITCH too: what cannot be posted where we are would wait for ever.
                if s.switching or s.send_pair or s.recv_pair:
                    self.ending.abort(event.reason)
            case ev.WorkRefused():
                if not s.switching:  # after a SWITCH it is posted once more
                    self.ending.abort(event.reason)

    def _on_receives_posted(self, event: ev.ReceivesPosted) -> None:
        """For a SWITCH or for a MOVE, whichever asked last."""
        if event.number == self.state.receives_number and not self.switch.on_receives_posted(event):
            failed = self.move.on_receives_posted(event)
            if failed is not None:
                self.switch.path_failed(failed)

    def _on_path_health(self, event: ev.PathHealth) -> None:
        s = self.state
        p = s.pairs[event.pair]
        if event.alive and p.alive is False:
            p.retry_ns = min(p.retry_ns, s.now_ns)
            p.backoff_ns = 0
        p.alive = event.alive
        if event.alive or s.over:
            return
        if s.switch_state is SwitchState.ASK and s.switch is not None and s.switch.target == event.pair:
            self.switch.drop_question()  # nobody will answer there, and our gate is closed
        if p.state is not ArmState.IDLE:
            self.arm.fail(event.pair)

    def _on_nic_dead(self, k: int) -> None:
        p = self.state.pairs[k]
        p.dead = True
        p.alive = False
        p.works = p.clean = False
        self.switch.path_failed(ev.PathFailed(k, "DEVICE_FATAL"))

    def _on_message(self, message: Message, unsafe: str | None) -> None:
        s = self.state
        if s.over:
            if isinstance(message, Sync):
                self.ending.answer(message)
            else:
                s.counts.stale += 1
                pair = message.pair if isinstance(message, Arm) else message.target
                s.say(self.ending.sync(), pair)
            return
        match message:
            case Sync():
                self.switch.on_message(message, unsafe)
            case Arm():
                self.arm.on_message(message)
            case Move():
                if self.move.on_message(message):
                    self.switch.answer_stale()
            case Prefer():
                self.move.on_prefer_message(message)

    def _on_time(self) -> None:
        for row in self.state.timers.expire(self.state.now_ns):
            match row:
                case Timer.OVER:
                    self.ending.say()
                case Timer.OPEN:
                    self.directions.open_now()
                case Timer.ATTEMPT:
                    self.switch.on_attempt_over()
                    return  # what else is over is looked at in the next call: all is different now
                case Timer.SYNC:
                    self.switch.say_again()
                case Timer.MOVE_ANSWER:
                    move = self.state.move_out
                    assert move is not None
                    self.switch.path_failed(ev.PathFailed(move.target, "a MOVE was not answered"))
                    return
                case Timer.FENCE_WRITE:
                    self.move.fence_write()
                case Timer.MOVE_RESEND:
                    self.move.say()
                case Timer.PREFER:
                    self.move.say_preference()
                case Timer.MOVE_BEGIN:
                    pass  # begun in _finish, as where it need not wait
                case _:
                    self.arm.on_timer(*arm_timer(row))
