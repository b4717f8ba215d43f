# SPDX-License-Identifier: BSD-3-Clause
"""The state of one protected QP's protocol, and what its procedures SWITCH, ARM and MOVE share. Pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Action, Status
from shiftverbs.protocol.messages import Message, Move, PairAddress, Phase, Sync
from shiftverbs.state_machine import RecvInput, RecvState, SendInput, SendState, Step, step_recv, step_send

MS = 1_000_000
PSN_MASK = 0xFFFFFF
PSN_DISTANCE = 1 << 20


@dataclass(frozen=True, slots=True)
class ProtocolConfig:
    """Times of the protocol, in nanoseconds.

    peer_deadline_ns: how long a silent peer delays the original error, for all targets together. round_ns: how long
    work is tried at least before it counts as work that no pair carries.
    """

    peer_deadline_ns: int = 2000 * MS
    fence_deadline_ns: int = 1000 * MS
    resend_first_ns: int = 3 * MS
    resend_most_ns: int = 100 * MS
    ask_retry_ns: int = 50 * MS
    arm_timeout_ns: int = 500 * MS
    arm_backoff_first_ns: int = 20 * MS
    arm_backoff_most_ns: int = 5000 * MS
    move_grace_ns: int = 10 * MS
    move_timeout_ns: int = 500 * MS
    flap_window_ns: int = 5000 * MS
    flap_backoff_first_ns: int = 100 * MS
    flap_backoff_most_ns: int = 10_000 * MS
    bye_deadline_ns: int = 200 * MS
    round_ns: int = 500 * MS

    @classmethod
    def patient(cls, peer_deadline_ns: int) -> ProtocolConfig:
        """The times for a deadline that a user chose: one who waits longer than usual for a peer has a slow machine.

        Then NICs and answers get longer in proportion; a shorter deadline makes nothing else shorter.
        """
        usual = cls()
        factor = max(1.0, peer_deadline_ns / usual.peer_deadline_ns)
        return cls(
            peer_deadline_ns=peer_deadline_ns,
            fence_deadline_ns=int(usual.fence_deadline_ns * factor),
            arm_timeout_ns=int(usual.arm_timeout_ns * factor),
            move_timeout_ns=int(usual.move_timeout_ns * factor),
        )


class ArmState(enum.Enum):
    """How far ARM has come with one pair."""

    IDLE = 0
    RESETTING = 1
    WAIT_PEER = 2  # requester: REQ is out; responder: REP is out
    CONNECTING = 3
    PROBING = 4


@dataclass(slots=True)
class Pair:
    """What is known of one pair on this side."""

    local: PairAddress
    arm: int = 0
    armed: bool = False  # connected at `arm`, and shown to work
    clean: bool = False  # armed and nothing posted since
    used: bool = False  # carries or carried work since the last reset: must be fenced
    fenced: bool = False
    stale: bool = False  # a MOVE left receives behind here: nothing may be sent to them
    dead: bool = False
    alive: bool | None = None
    # ARM
    state: ArmState = ArmState.IDLE
    requester: bool = False
    remote: PairAddress | None = None
    sent_ok: bool = False
    received_ok: bool = False
    rtu_seen: bool = False
    deadline_ns: int = 0
    resend_ns: int | None = None
    resend_step_ns: int = 0
    backoff_ns: int = 0
    retry_ns: int = 0
    trouble: str | None = None  # why ARM failed last


@dataclass(slots=True)
class Switch:
    """One SWITCH as this side sees it; kept when it is done, to answer late messages."""

    epoch: int
    target: int
    phase: Phase
    reason: str
    left: int
    ask: int = 0
    done: bool = False
    settled: bool = False
    final: ev.FenceCompleted | None = None
    resetting: int | None = None
    command_ns: int | None = None  # when the NIC command we wait for was given
    reset_arm: int = -1
    connecting: bool = False
    peer: Sync | None = None
    heard_ns: int = 0
    sent_ns: int = -(1 << 62)
    sent_phase: tuple[int, int] = (-1, -1)
    resend_ns: int | None = None
    resend_step_ns: int = 0
    before: Switch | None = None  # while asking: the last finished SWITCH

    @property
    def posting(self) -> bool:
        """Whether receives are being posted, here or, as far as the peer has said, there."""
        return self.phase is Phase.POSTING or (self.peer is not None and self.peer.phase is Phase.POSTING)


@dataclass(slots=True)
class MoveOut:
    """Our own direction on its way to another pair."""

    number: int
    target: int
    tx: int | None = None
    grace_ns: int | None = None
    deadline_ns: int | None = None
    resend_ns: int | None = None
    resend_step_ns: int = 0


@dataclass(slots=True)
class MoveIn:
    """The peer's direction on its way to us, as its MOVE has it. posting: all was received; our receives follow."""

    message: Move
    posting: bool = False


@dataclass(slots=True)
class Counts:
    """How often things happened; for `qp.shift.counters`."""

    switches: int = 0
    moves: int = 0
    arms: int = 0
    arm_failures: int = 0
    asks: int = 0
    asks_refused: int = 0
    aborts: int = 0
    messages_in: int = 0
    messages_out: int = 0
    stale: int = 0


@dataclass(slots=True)
class Preference:
    """Which pair the traffic should be on (protocol.md, "MOVE"): the greatest (number, target) holds on both sides."""

    number: int = 0
    target: int = 0
    resend_ns: int | None = None
    resend_step_ns: int = 0


@dataclass(frozen=True, slots=True)
class LocalPair:
    """Our QP of one pair before anything was armed. gid: 16 bytes; mtu: enum ibv_mtu."""

    gid: bytes
    lid: int
    qpn: int
    mtu: int


class PairState:
    """What the three procedures share: the pairs, the two state machines, the actions being collected."""

    def __init__(
        self,
        config: ProtocolConfig,
        locals_: Sequence[LocalPair],
        initiator: bool,
        rng: random.Random,
        now_ns: int,
    ) -> None:
        if len(locals_) < 2:
            raise ValueError("a protected QP needs at least one backup pair")
        self.config = config
        self.initiator = initiator
        self.rng = rng
        self.pairs = [Pair(PairAddress(p.gid, p.lid, p.qpn, 0, p.mtu)) for p in locals_]
        for p in self.pairs:
            p.retry_ns = now_ns if initiator else now_ns + config.arm_timeout_ns
        self.pairs[0].armed = True
        self.pairs[0].used = True
        self.send_state = SendState.DEFAULT
        self.recv_state = RecvState.DEFAULT
        self.send_pair = 0
        self.recv_pair = 0
        self.epoch = 0
        self.status = Status.PAIRING
        self.over = False  # terminal for this pairing
        self.counts = Counts()
        self._over_phase = Phase.BYE
        self._over_resend_ns: int | None = None
        self._over_until_ns = 0
        self._over_step_ns = 0
        self._switch: Switch | None = None
        self._tried: set[int] = set()
        self._started_ns = 0  # when the first pair was tried; later by the time in which receives were posted
        self._posting_ns: int | None = None  # since when they are
        self._ask = 0
        self._fence_number = 0
        self._ask_retry_ns = 0
        self._stuck_wr = -1  # no later WR has failed so far ...
        self._stuck_on: list[int] = []  # ... and this is where it, or one before it, did since
        self._stuck_ns = 0  # since when
        self._open_ns = 0  # sends are not handed over before
        self._opening = False  # nothing but that time is waited for
        self._avoid: list[int] = []  # where what is to be carried now has failed already
        self._move: MoveOut | None = None
        self._move_number = 0
        self._moving_in: MoveIn | None = None
        self._receives_number = 0
        self._moved_in = 0
        self._prefer = Preference()
        self._home_hold_ns = 0
        self._home_backoff_ns = 0
        self._home_since_ns: int | None = None
        self._out: list[Action] = []
        self._now = now_ns

    def _take(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def _do(self, *actions: Action) -> None:
        self._out.extend(actions)

    def _say(self, message: Message, pair: int, spread: bool = False) -> None:
        self.counts.messages_out += 1
        self._do(ev.SendMessage(message, pair, spread))

    def _switching(self) -> bool:
        return not self.over and self._switch is not None and not self._switch.done

    def _set_status(self, status: Status, why: str | None = None) -> None:
        if self.status is not status:
            self.status = status
            self._do(ev.SetStatus(status, why))

    def _backoff(self, step_ns: int) -> int:
        return min(max(step_ns * 2, self.config.resend_first_ns), self.config.resend_most_ns)

    def _send_input(self, given: SendInput, pair: int, peer_rx: int = 0, reason: str = "") -> None:
        """Step the send machine and turn its steps into actions; `pair` is where sends are afterwards."""
        before = self.send_state
        self.send_state, steps = step_send(before, given)
        self.send_pair = pair
        for step in steps:
            match step:
                case Step.CLOSE_SEND:
                    self._opening = False
                    self._do(ev.CloseSend())
                case Step.TRIM:
                    self._do(ev.Trim(peer_rx))
                case Step.OPEN_SEND | Step.REOPEN_SEND:
                    self._opening = self._now < self._open_ns
                    if not self._opening:
                        self._do(ev.OpenSend(pair))
                case Step.BEGIN_FENCE:
                    self._do(ev.BeginFence())
                case Step.CANCEL_MOVE:
                    self._do(ev.CancelMove(pair))
                case Step.SEND_MOVE:
                    self._send_move()
                case Step.DELIVER_ERRORS:
                    self._do(ev.DeliverErrors(reason))
        if self.send_state is not before or Step.OPEN_SEND in steps:
            self._do(ev.StateChanged("send", self.send_state.value, pair))

    def _recv_input(self, given: RecvInput, pair: int) -> None:
        """Step the receive machine and turn its steps into actions; `pair` is where receives are afterwards."""
        before = self.recv_state
        self.recv_state, steps = step_recv(before, given)
        left, self.recv_pair = self.recv_pair, pair
        for step in steps:
            match step:
                case Step.CLOSE_RECV:
                    self._do(ev.CloseRecv())
                case Step.POST_RECEIVES:
                    self._use(pair)
                    self._receives_number += 1
                    self._do(ev.PostReceives(pair, self._receives_number))
                case Step.MOVE_RECEIVES:
                    self.pairs[left].stale = left != pair
                    self._use(pair)
                    self._receives_number += 1
                    self._do(ev.MoveReceives(pair, self._receives_number))
                case Step.ANSWER_MOVED:
                    self._answer_moved()
        if self.recv_state is not before:
            self._do(ev.StateChanged("recv", self.recv_state.value, pair))

    def _use(self, k: int) -> None:
        p = self.pairs[k]
        p.used = True
        p.clean = False
        p.fenced = False

    def _new_psn(self, old: int) -> int:
        # A delayed packet of the pair's last life must not fit the new window: stay away from where the old PSNs ran.
        return (old + PSN_DISTANCE + self.rng.randrange(PSN_MASK + 1 - 2 * PSN_DISTANCE)) & PSN_MASK

    def _renew(self, k: int, arm: int, event: ev.PairReset) -> None:
        """The pair was reset: a new life under `arm`."""
        p = self.pairs[k]
        old = p.local
        p.local = PairAddress(
            event.gid or old.gid, old.lid, old.qpn, self._new_psn(old.psn), event.mtu or old.mtu
        )
        p.arm = arm
        p.used = p.fenced = p.armed = p.clean = p.stale = False

    # ---- what the procedures offer each other; each is defined in one of them ---------------------------------------

    def _on_path_failed(self, event: ev.PathFailed) -> None:
        raise NotImplementedError

    def _answer_stale(self) -> None:
        raise NotImplementedError

    def _abort(self, reason: str, answer: bool = False) -> None:
        raise NotImplementedError

    def _advance(self) -> None:
        raise NotImplementedError

    def _next_attempt(self, reason: str) -> None:
        raise NotImplementedError

    def _post_receives(self, s: Switch) -> None:
        raise NotImplementedError

    def _arm_failed(self, p: Pair, why: str | None = None, backoff: bool = True) -> None:
        raise NotImplementedError

    def _disarm(self, k: int) -> None:
        raise NotImplementedError

    def _begin_move(self, target: int) -> None:
        raise NotImplementedError

    def _wants_move(self) -> bool:
        raise NotImplementedError

    def _wanted_pair(self) -> int:
        raise NotImplementedError

    def _send_move(self) -> None:
        raise NotImplementedError

    def _cancel_move(self) -> None:
        raise NotImplementedError

    def _answer_moved(self) -> None:
        raise NotImplementedError

    def _on_moved(self, out: MoveOut) -> None:
        raise NotImplementedError

    def _note_home(self) -> None:
        raise NotImplementedError

    def _note_flap(self) -> None:
        raise NotImplementedError
