# SPDX-License-Identifier: BSD-3-Clause
"""The state of one protected QP's protocol, and what its procedures SWITCH, ARM and MOVE share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.draws import Chance
from shiftverbs.protocol.events import Action, Status
from shiftverbs.protocol.messages import Message, Move, PairAddress, Phase, Sync
from shiftverbs.protocol.tables import ArmState, SwitchInput, SwitchState, SwitchStep, step_switch
from shiftverbs.protocol.timers import Timers
from shiftverbs.state_machine import RecvState, SendState

MS = 1_000_000
PSN_MASK = 0xFFFFFF
PSN_DISTANCE = 1 << 20


class ProtocolConfig(Struct, frozen=True):
    """Times of the protocol, in nanoseconds.

    peer_deadline_ns: how long a silent peer delays the original error, for all targets together. round_ns: how long
    work is tried at least before it counts as work that no pair carries. invariants: whether `PairProtocol.invariants`
    is looked at after each event, for tests.
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
    in_vain_backoff_most_ns: int = 60_000 * MS
    bye_deadline_ns: int = 200 * MS
    round_ns: int = 500 * MS
    invariants: bool = False

    @classmethod
    def patient(cls, peer_deadline_ns: int, invariants: bool = False) -> ProtocolConfig:
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
            invariants=invariants,
        )


class Pair(Struct):
    """What is known of one pair on this side."""

    local: PairAddress
    arm: int = 0
    works: bool = False  # connected at `arm`, and shown to work by ARM, or about to be by a SWITCH
    clean: bool = False  # it works, and nothing was posted since
    used: bool = False  # carries or carried work since the last reset: a SWITCH must fence it
    fenced: bool = False  # a SWITCH has: its QP is in ERR and its queues are empty
    stale: bool = False  # a MOVE left receives behind here: nothing may be sent to them
    dead: bool = False
    alive: bool | None = None
    # ARM
    state: ArmState = ArmState.IDLE
    requester: bool = False
    remote: PairAddress | None = None
    sent_ok: bool = False
    received_ok: bool = False
    resend_step_ns: int = 0
    backoff_ns: int = 0
    retry_ns: int = 0  # no ARM before
    began_ns: int = 0  # when the last ARM began
    extra_ns: int = 0  # what the next one has beyond the time of the first
    trouble: str | None = None  # why ARM failed last


class Switch(Struct):
    """One SWITCH as this side sees it; kept when it is done, to answer late messages."""

    epoch: int
    target: int
    phase: Phase
    reason: str
    left: int
    ask: int = 0
    settled: bool = False  # it is done, and both sides know
    final: ev.FenceCompleted | None = None  # our fence is through: what it found
    resetting: int | None = None  # the `arm` under which the target is being reset
    command_ns: int | None = None  # when the NIC command we wait for was given
    reset_arm: int = -1  # the target's `arm` that this SWITCH gave it, or found fit
    connecting: bool = False
    peer: Sync | None = None
    heard_ns: int = 0
    sent_ns: int = -(1 << 62)
    sent_phase: tuple[int, int] = (-1, -1)
    resend_step_ns: int = 0
    before: Switch | None = None  # while asking: the last finished SWITCH
    before_due_ns: int | None = None  # ... and when its SYNC was to be said again

    @property
    def posting(self) -> bool:
        """Whether receives are being posted, here or, as far as the peer has said, there."""
        return self.phase is Phase.POSTING or (self.peer is not None and self.peer.phase is Phase.POSTING)


class MoveOut(Struct):
    """Our own direction on its way to another pair."""

    number: int
    target: int
    tx: int | None = None  # the fence WR is done, and the peer told: two-sided messages sent before it
    resend_step_ns: int = 0


class MoveIn(Struct):
    """The peer's direction on its way to us, as its MOVE has it. posting: all was received; our receives follow."""

    message: Move
    posting: bool = False


class Counts(Struct):
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


class Preference(Struct):
    """Which pair the traffic should be on (protocol.md, "MOVE"): the greatest (number, target) holds on both sides."""

    number: int = 0
    target: int = 0
    resend_step_ns: int = 0


class LocalPair(Struct, frozen=True):
    """Our QP of one pair before its first ARM. gid: 16 bytes; mtu: enum ibv_mtu."""

    gid: bytes
    lid: int
    qpn: int
    mtu: int


class PairState:
    """What the procedures share: the pairs, where each direction is, what is under way, the actions being collected.

    Each procedure holds it, and changes of it what is its own; what only one of them needs to know it keeps itself.
    out: the actions, emptied by `PairProtocol`, and never another list: `do` is this one's.
    """

    __slots__ = (
        "config",
        "counts",
        "do",
        "epoch",
        "initiator",
        "move_in",
        "move_out",
        "now_ns",
        "open_ns",
        "out",
        "over",
        "pairs",
        "receives_number",
        "recv_pair",
        "recv_state",
        "rng",
        "send_pair",
        "send_state",
        "status",
        "switch",
        "switch_state",
        "switching",
        "timers",
    )

    def __init__(
        self,
        config: ProtocolConfig,
        locals_: Sequence[LocalPair],
        initiator: bool,
        rng: Chance,
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
        self.pairs[0].works = True
        self.pairs[0].used = True
        self.send_state = SendState.DEFAULT
        self.recv_state = RecvState.DEFAULT
        self.send_pair = 0
        self.recv_pair = 0
        self.epoch = 0
        self.status = Status.PAIRING
        self.over = False  # terminal for this pairing
        self.counts = Counts()
        self.timers = Timers(len(self.pairs))
        self.switch_state = SwitchState.IDLE
        self.switching = False  # whether one is under way (asking included)
        self.switch: Switch | None = None  # under way, or the last one
        self.move_out: MoveOut | None = None
        self.move_in: MoveIn | None = None
        self.receives_number = 0  # of the last PostReceives or MoveReceives
        self.open_ns = 0  # sends are not handed over before
        self.now_ns = now_ns
        self.out: list[Action] = []
        # Asks for an action, behind those asked for so far.
        self.do: Callable[[Action], None] = self.out.append

    def say(self, message: Message, pair: int, spread: bool = False) -> None:
        """Tell the peer, over that NIC pair; spread: over every one that may work."""
        self.counts.messages_out += 1
        self.do(ev.SendMessage(message, pair, spread))

    def set_status(self, status: Status, why: str | None = None) -> None:
        """Change the protection status, and say so if it is another one."""
        if self.status is not status:
            self.status = status
            self.do(ev.SetStatus(status, why))

    def backoff(self, step_ns: int) -> int:
        """How long to wait after the next copy of a message; step_ns: after the last one, 0: there was none."""
        return min(max(step_ns * 2, self.config.resend_first_ns), self.config.resend_most_ns)

    def step_switch(self, given: SwitchInput) -> tuple[SwitchStep, ...]:
        """Step the machine of SWITCH; returns the steps. Raises IllegalTransition."""
        self.switch_state, steps = step_switch(self.switch_state, given)
        self.switching = self.switch_state is not SwitchState.IDLE
        return steps

    def carries(self, k: int) -> bool:
        """Whether pair k carries a direction, or ours is on its way there."""
        return k in (self.send_pair, self.recv_pair) or (
            self.move_out is not None and self.move_out.target == k
        )

    def use(self, k: int) -> None:
        """Work is given to pair k from now on."""
        p = self.pairs[k]
        p.used = True
        p.clean = False
        p.fenced = False

    def _new_psn(self, old: int) -> int:
        # A delayed packet of the pair's last life must not fit the new window: stay away from where the old PSNs ran.
        return (old + PSN_DISTANCE + self.rng.randrange(PSN_MASK + 1 - 2 * PSN_DISTANCE)) & PSN_MASK

    def renew(self, k: int, arm: int, event: ev.PairReset) -> None:
        """The pair was reset: a new life under `arm`."""
        p = self.pairs[k]
        old = p.local
        p.local = PairAddress(
            event.gid or old.gid, old.lid, old.qpn, self._new_psn(old.psn), event.mtu or old.mtu
        )
        p.arm = arm
        p.used = p.fenced = p.works = p.clean = p.stale = False
