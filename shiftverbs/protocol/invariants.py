# SPDX-License-Identifier: BSD-3-Clause
"""What always holds of one protected QP's protocol between two events: for tests (`SHIFTVERBS_INVARIANTS`). Pure.

None of it is needed to run: each line says what the other modules rely on without looking.
"""

from __future__ import annotations

from msgspec.structs import fields

from shiftverbs.protocol.ending import Ending
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import MoveStep, Phase
from shiftverbs.protocol.move import MoveProcedure
from shiftverbs.protocol.state import PSN_MASK, Counts, Pair, PairState, Switch
from shiftverbs.protocol.switch import SwitchProcedure
from shiftverbs.protocol.tables import ArmState, SwitchState
from shiftverbs.protocol.timers import ArmTimer, Timer, arm_row
from shiftverbs.state_machine import RecvState, SendState

# How far a status has come; it never goes back.
_STATUS = {Status.PAIRING: 0, Status.PROTECTED: 1, Status.UNPROTECTED: 2, Status.FAILED: 2}
_COUNTED = tuple(field.name for field in fields(Counts))
_WAITS = (SendState.WAIT_SIGNALED, SendState.WAIT_DRAINED)
_CONNECTED_LATER = (ArmState.WAIT_PEER, ArmState.CONNECTING, ArmState.PROBING)


def _fact(holds: bool, what: str, k: int | None = None) -> None:
    """Raise AssertionError with the fact that does not hold. k: of which pair it is."""
    if not holds:
        raise AssertionError(f"invariant: {what}" if k is None else f"invariant: {what} (pair {k})")


class Invariants:
    """Looks at one protocol, and remembers what it saw last: some things only ever grow."""

    __slots__ = ("_ending", "_fenced", "_grown", "_move", "_n_pairs", "_state", "_switch", "_wish")

    def __init__(
        self, state: PairState, switch: SwitchProcedure, move: MoveProcedure, ending: Ending
    ) -> None:
        self._state = state
        self._switch = switch
        self._move = move
        self._ending = ending
        self._n_pairs = len(state.pairs)
        self._grown: tuple[int, ...] = ()
        self._fenced = (-1, -1)  # (epoch, target) of the last SWITCH seen to fence
        self._wish = (0, 0)

    def check(self) -> None:
        """Raise AssertionError, naming it, if any of the facts does not hold."""
        self._check_growth()
        self._check_places()
        self._check_moves()
        self._check_switch()
        for k, p in enumerate(self._state.pairs):
            self._check_pair(k, p)
            self._check_arm(k, p)
        if self._state.over:
            self._check_end()
        else:
            self._check_timers()

    def _check_growth(self) -> None:
        """What only ever grows, and what the counters say of each other."""
        s = self._state
        _fact(len(s.pairs) == self._n_pairs >= 2, "a QP has its pairs, two at least, for ever")
        grown = (
            *(s.epoch, s.over, _STATUS[s.status], s.receives_number),
            self._switch.fence_number,
            *(n for p in s.pairs for n in (p.arm, p.dead)),
            *(getattr(s.counts, name) for name in _COUNTED),
        )
        for before, now in zip(self._grown, grown, strict=False):
            _fact(
                before <= now, "epochs, numbers, counters and lives only grow; what is dead or over stays so"
            )
        self._grown = grown
        wish = (self._move.prefer.number, self._move.prefer.target)
        _fact(wish >= self._wish, "the greatest wish holds")
        _fact(wish[1] < self._n_pairs, "the preferred pair is one of ours")
        self._wish = wish
        _fact(s.counts.switches == self._switch.fence_number, "each SWITCH has one fence")
        _fact(s.counts.switches > 0 or s.epoch == 0, "the epoch is that of a SWITCH")
        _fact(s.counts.asks_refused <= s.counts.asks, "only questions are refused")
        _fact(s.counts.aborts == (s.status is Status.FAILED), "who gives up is FAILED, once")
        failed_on = self._switch.hopeless.failed_on
        _fact(s.over or len(failed_on) < 2 * self._n_pairs, "work that every pair failed twice is given up")

    def _check_places(self) -> None:
        """Where the directions are, and what carries them."""
        s = self._state
        fencing = self._switch.fencing()
        _fact(0 <= s.send_pair < self._n_pairs, "sends are on one of our pairs")
        _fact(0 <= s.recv_pair < self._n_pairs, "receives are on one of our pairs")
        _fact(s.send_state is not SendState.DEFAULT or s.send_pair == 0, "DEFAULT sends are at home")
        _fact(s.recv_state is not RecvState.DEFAULT or s.recv_pair == 0, "DEFAULT receives are at home")
        if s.over:
            return
        if fencing:
            _fact(s.send_state is SendState.FALLBACK, "a SWITCH that fences holds sends back")
            return
        _fact(s.send_state is not SendState.FALLBACK or s.send_pair != 0, "FALLBACK sends are away")
        _fact(s.recv_state is not RecvState.FALLBACK or s.recv_pair != 0, "FALLBACK receives are away")
        for k in {s.send_pair, s.recv_pair}:
            p = s.pairs[k]
            _fact(p.used, "a pair that carries traffic is used", k)
            _fact(not p.clean, "a pair that carries traffic is not clean", k)
            _fact(not p.fenced, "a pair that carries traffic is not fenced", k)
            _fact(p.works, "a pair that carries traffic works", k)
            _fact(not p.dead, "a pair that carries traffic is not dead", k)
            _fact(p.state is ArmState.IDLE, "ARM leaves a pair alone that carries traffic", k)
        _fact(not s.pairs[s.recv_pair].stale, "receives are where none were left behind")
        if s.status is Status.PAIRING:
            _fact(s.send_pair == s.recv_pair == 0, "before protection all is at home")
            _fact(not any(p.clean for p in s.pairs[1:]), "a clean backup protects")

    def _check_moves(self) -> None:
        """Our direction on its way, and the peer's."""
        s = self._state
        out, coming = s.move_out, s.move_in
        _fact(s.over or (out is not None) == (s.send_state in _WAITS), "sends wait for a MOVE, and only then")
        if out is not None:
            target = s.pairs[out.target]
            _fact(not s.switching, "a SWITCH, or the question before it, calls a MOVE of ours off")
            _fact(out.target != s.send_pair, "a MOVE leads to another pair")
            _fact(target.works, "a MOVE leads to a pair that works", out.target)
            _fact(not target.dead, "a MOVE leads to no dead NIC", out.target)
            _fact(target.state is ArmState.IDLE, "ARM leaves a MOVE's target alone", out.target)
            told = s.send_state is SendState.WAIT_DRAINED
            _fact(out.tx is None or told, "a MOVE is told behind its fence WR")
        if coming is not None:
            m = coming.message
            _fact(not self._switch.fencing(), "a SWITCH that fences calls the peer's MOVE off")
            _fact(m.step is MoveStep.MOVE, "what we follow is a MOVE")
            _fact(m.epoch == s.epoch, "the MOVE that we follow is of this epoch")
            _fact(m.number > self._move.moved_in, "a MOVE is followed once")
            _fact(m.target < self._n_pairs, "the MOVE that we follow leads to one of our pairs")
            if coming.posting:
                _fact(s.recv_pair == m.target, "receives that follow a MOVE are posted where it leads")
                _fact(s.pairs[m.target].used, "where receives are posted is used", m.target)

    def _check_switch(self) -> None:
        """The SWITCH under way, or the last one."""
        s = self._state
        switch, state = s.switch, s.switch_state
        fencing = self._switch.fencing()
        _fact(
            s.switching == (state is not SwitchState.IDLE), "a SWITCH is under way unless its state is IDLE"
        )
        if switch is None:
            _fact(not s.switching, "a SWITCH under way is known")
            _fact(s.counts.switches == 0, "the last SWITCH is kept")
            return
        _fact(0 <= switch.target < self._n_pairs, "a SWITCH leads to one of our pairs")
        _fact(0 <= switch.left < self._n_pairs, "a SWITCH leaves one of our pairs")
        # The pairing may have ended with one.
        asked = state is SwitchState.ASK or (s.over and switch.phase is Phase.ASK)
        _fact(switch.before is None or asked, "only a question remembers what was before")
        if state is SwitchState.ASK:
            _fact(switch.phase is Phase.ASK, "who asks says ASK")
            _fact(switch.epoch == s.epoch + 1, "a question is of the next epoch")
            _fact(switch.ask > 0, "a question has a number")
            _fact(switch.final is None and switch.peer is None, "nothing is known behind a question")
            _fact(switch.resetting is None and not switch.connecting, "a question gives no command")
        elif not s.over:  # else it may have ended with a question
            _fact(switch.phase is not Phase.ASK, "a question that is dropped is forgotten")
            _fact(switch.epoch == s.epoch, "the epoch is that of the last SWITCH")
            place = (switch.epoch, switch.target)
            _fact(place >= self._fenced, "(epoch, target) of a SWITCH only grows")
            self._fenced = place
        tried = self._switch.tried
        _fact(tried <= set(range(self._n_pairs)), "only our pairs are tried")
        _fact(not fencing or switch.target in tried, "the target of a SWITCH is being tried")
        _fact(fencing or s.over or not tried, "pairs are tried by a SWITCH only")
        commanded = switch.resetting is not None or switch.connecting
        _fact(switch.command_ns is None or commanded, "a command that is awaited was given")
        _fact(not switch.settled or not s.switching, "only a SWITCH that is done is settled")
        if fencing:
            self._check_fencing(switch, state)
        elif state is SwitchState.IDLE and not s.over:
            peer = switch.peer
            _fact(switch.phase is Phase.READY, "a finished SWITCH says READY")
            _fact(switch.final is not None, "a finished SWITCH has a final")
            _fact(peer is not None and peer.phase is Phase.READY, "the peer of a finished SWITCH was READY")
            _fact(switch.resetting is None and not switch.connecting, "a finished SWITCH awaits no command")

    def _check_fencing(self, switch: Switch, state: SwitchState) -> None:
        s = self._state
        target = s.pairs[switch.target]
        _fact(switch.phase.name == state.value, "the peer is told how far we are")
        _fact(state is SwitchState.START or switch.final is not None, "behind START the counters are final")
        _fact(switch.resetting is None or state is SwitchState.START, "the target is reset in START")
        _fact(
            switch.resetting is None or switch.final is not None,
            "nothing is reset before the fence is through",
        )
        if state is SwitchState.FENCED:
            _fact(switch.reset_arm == target.arm, "FENCED is a life that this SWITCH began", switch.target)
            _fact(not target.used and not target.fenced, "FENCED is a target without work", switch.target)
        if state in (SwitchState.POSTING, SwitchState.READY):
            _fact(s.recv_pair == switch.target, "receives are posted on the target")
            _fact((s.recv_state is RecvState.DEFAULT) == (switch.target == 0), "the target's state is theirs")
            _fact(switch.reset_arm == target.arm, "receives are posted in the life agreed on", switch.target)
            _fact(switch.command_ns is None, "the target awaits no command when it takes receives")
            _fact(target.used and not target.clean, "a target that takes receives is used", switch.target)
            _fact(target.works and not target.fenced, "a target that takes receives works", switch.target)
        else:
            _fact(s.recv_state is RecvState.FALLBACK, "a SWITCH holds receives back until its target is fit")
        for k, p in enumerate(s.pairs):
            work = p.used and k != switch.target
            _fact(switch.final is None or not work or p.fenced, "all that was used is fenced by the final", k)

    def _check_pair(self, k: int, p: Pair) -> None:
        """What is known of one pair."""
        s = self._state
        _fact(p.arm >= 0 and 0 <= p.local.psn <= PSN_MASK, "lives count from 0, PSNs have 24 bits", k)
        _fact(not p.clean or p.works, "what is clean works", k)
        _fact(not p.clean or not p.used, "clean is not used", k)
        _fact(not p.fenced or p.used, "only what was used is fenced", k)
        _fact(not p.fenced or not p.works, "what is fenced does not work", k)
        _fact(not p.stale or p.used, "stale receives are of a pair that was used", k)
        _fact(not p.stale or s.over or k != s.recv_pair, "stale pairs carry no receives", k)
        _fact(not p.dead or not p.clean, "a dead NIC has no clean pair", k)

    def _check_arm(self, k: int, p: Pair) -> None:
        """ARM of one pair."""
        if p.state is ArmState.IDLE:
            return
        s = self._state
        _fact(not s.over and not self._switch.fencing(), "a SWITCH that fences, or the end, calls ARM off", k)
        _fact(not s.carries(k), "ARM leaves alone what carries traffic, or is about to", k)
        _fact(not p.works, "what ARM is at does not work yet", k)
        _fact(not p.dead, "ARM is at no dead NIC", k)
        _fact(not s.initiator or p.requester or p.remote is not None, "a responder knows its requester", k)
        if p.state is ArmState.RESETTING:
            _fact(not p.sent_ok and not p.received_ok, "nothing is proven before RESET is through", k)
        if p.state in _CONNECTED_LATER:
            _fact(not p.used and not p.fenced and not p.stale, "a new life of a pair carries no work", k)
        if p.state in (ArmState.CONNECTING, ArmState.PROBING):
            _fact(p.remote is not None, "who is being connected knows where to", k)

    def _check_end(self) -> None:
        """What holds for ever when the pairing is over."""
        s = self._state
        _fact(not s.switching, "over: no SWITCH is under way")
        _fact(s.move_out is None and s.move_in is None, "over: no MOVE is under way")
        _fact(self._ending.phase in (Phase.ABORT, Phase.BYE), "over: by ABORT or by BYE")
        aborted = self._ending.phase is Phase.ABORT
        _fact(aborted == (s.status is Status.FAILED), "over: FAILED by ABORT, and only by it")
        _fact(s.status is not Status.PROTECTED, "over: not protected any more")
        _fact(set(s.timers.running()) <= {Timer.OVER}, "over: nothing is waited for but to say so again")

    def _check_timers(self) -> None:
        """Each timer runs where it is waited for, and only there."""
        s = self._state
        t = s.timers
        told = s.move_out is not None and s.move_out.tx is not None
        known = s.switch is not None and not s.switch.settled
        _fact(s.status in (Status.PAIRING, Status.PROTECTED), "UNPROTECTED and FAILED are over")
        _fact(not t.runs(Timer.OVER), "what is not over does not say so")
        _fact(t.runs(Timer.ATTEMPT) == s.switching, "a SWITCH under way has a deadline, and only that")
        _fact(t.runs(Timer.SYNC) == known, "a SYNC is said again until it is settled")
        _fact(t.runs(Timer.MOVE_ANSWER) == told, "a MOVE that was told awaits its answer, and only that")
        _fact(t.runs(Timer.MOVE_RESEND) == told, "a MOVE that was told is said again, and only that")
        signaled = s.send_state is SendState.WAIT_SIGNALED
        _fact(
            not t.runs(Timer.FENCE_WRITE) or signaled, "our own fence WRITE is for who waits for a fence WR"
        )
        paused = t.runs(Timer.OPEN)
        _fact(not paused or not s.switching, "sends pause behind a SWITCH, not in it")
        _fact(not paused or s.move_out is None, "sends pause in no MOVE")
        _fact(not t.runs(Timer.PREFER) or self._move.prefer.number > 0, "a wish is said again")
        begins = t.runs(Timer.MOVE_BEGIN) and not s.switching
        _fact(not begins or s.move_out is None, "a MOVE begins when none is under way")
        for k, p in enumerate(s.pairs):
            idle = p.state is ArmState.IDLE
            _fact(
                t.runs(arm_row(k, ArmTimer.DEADLINE)) != idle, "ARM has a deadline while it is under way", k
            )
            resent = t.runs(arm_row(k, ArmTimer.RESEND))
            _fact(
                not resent or p.state in _CONNECTED_LATER, "REQ and REP are said again while they matter", k
            )
            if not s.switching:
                awaited = idle and not (p.clean or p.dead or p.alive is False or s.carries(k))
                _fact(t.runs(arm_row(k, ArmTimer.BEGIN)) == awaited, "ARM begins where a pair is unfit", k)
