# SPDX-License-Identifier: BSD-3-Clause
"""What two peers say to each other over the control channel: plain values, no encoding.

`shiftverbs.protocol.codec` turns these into datagrams and back; the pure core only ever sees the classes here.
Every message is idempotent: it carries whole state, so that a duplicate or a late copy does no harm.

`about` is the same in two messages of which the later one says all that the earlier one did; `age` then tells which is
the later one, where the network has turned them round (equal: the one that arrived last).
"""

from __future__ import annotations

import enum

from msgspec import Struct


class Phase(enum.IntEnum):
    """How far a side has come with a SWITCH. Order matters: a later phase includes the earlier ones."""

    ASK = 0  # advisory: nothing is fenced yet, the peer may refuse
    START = 1  # fencing
    FENCED = 2  # fenced, the target is in INIT with the announced `arm` and PSN
    # Connected; the receives are being posted, which takes as long as the registration of their memory.
    POSTING = 3
    READY = 4  # receives posted: the peer may send
    REFUSE = 5  # the answer to an ASK that came while unsafe work was outstanding
    ABORT = 6  # this pairing is over, both sides get their original errors
    BYE = 7  # the application closed, reset or failed its QP on purpose


class PairAddress(Struct, frozen=True):
    """Where one side's QP of a pair is reached: what its peer needs for RTR.

    gid: 16 bytes; lid: 0 on RoCE; qpn and psn: 24 bits; mtu: enum ibv_mtu (1 to 5).
    """

    gid: bytes
    lid: int
    qpn: int
    psn: int
    mtu: int


class Sync(Struct, frozen=True):
    """The whole state of one side in a SWITCH; resent with back-off until `seen` names it.

    epoch, target: which SWITCH. arm: how often the target pair was reset on this side. clean: nothing was posted
    on the target since then. rx: two-sided messages received over all pairs, final from FENCED on.
    ask: number of the question, in ASK and REFUSE; in BYE 1 + that of the peer's last MOVE that was followed, 0: not
    known. seen_phase, seen_arm: what this side last saw of the peer in
    this (epoch, target); seen_phase -1 is nothing. receipts_lost: a NIC of this side died and may have taken the
    completions of receives with it, so that more was executed here than `rx` says.
    """

    epoch: int
    target: int
    phase: Phase
    arm: int
    clean: bool
    address: PairAddress
    rx: int
    ask: int = 0
    seen_phase: int = -1
    seen_arm: int = -1
    settled: bool = False
    # Number of the last memory key that this side withdrew (memory_keys.py); put in where it is sent.
    keys: int = 0
    receipts_lost: bool = False

    @property
    def about(self) -> tuple[object, ...]:
        """One for each phase: an ABORT must not be lost in what comes behind it."""
        return (Sync, self.phase)

    @property
    def age(self) -> tuple[int, ...]:
        """Of the SWITCH, then of the target's life; a BYE that knows nothing comes before one that does."""
        return (self.epoch, self.target, self.arm, self.ask if self.phase is Phase.BYE else 0)


class ArmStep(enum.IntEnum):
    """Steps of ARM, in the words of the CM's handshake (IBA vol. 1, 12.9)."""

    REQ = 0
    REP = 1
    RTU = 2
    REJ = 3


class Arm(Struct, frozen=True):
    """One step of ARM on `pair`; `arm` is the number the pair is being reset under.

    wanted: in REJ, the `arm` of the REQ that is rejected; `arm` is then the least that could have been accepted
    less one.
    """

    step: ArmStep
    epoch: int
    pair: int
    arm: int
    address: PairAddress
    wanted: int = 0

    @property
    def about(self) -> tuple[object, ...]:
        """One for each step on each pair."""
        return (Arm, self.step, self.pair)

    @property
    def age(self) -> tuple[int, ...]:
        """Of the epoch, then of the pair's life."""
        return (self.epoch, self.arm, self.wanted)


class MoveStep(enum.IntEnum):
    """Steps of MOVE."""

    MOVE = 0
    MOVED = 1
    REFUSED = 2
    HELD = 3  # everything before the fence WR was received; the receives are being posted


class Move(Struct, frozen=True):
    """One step of MOVE for the direction of the side that says MOVE.

    number: grows with every MOVE of that direction. tx: two-sided messages sent before the fence WR.
    """

    step: MoveStep
    epoch: int
    number: int
    target: int
    arm: int
    tx: int
    keys: int = 0  # as in Sync

    @property
    def about(self) -> tuple[object, ...]:
        """One for each step: a direction has one MOVE at a time."""
        return (Move, self.step)

    @property
    def age(self) -> tuple[int, ...]:
        """Of the epoch, then of the MOVE."""
        return (self.epoch, self.number)


class Prefer(Struct, frozen=True):
    """Which pair traffic should be on while all is well; the greatest (number, target) holds on both sides."""

    number: int
    target: int
    seen: bool = False

    @property
    def about(self) -> tuple[object, ...]:
        """The wish, and that one was seen."""
        return (Prefer, self.seen)

    @property
    def age(self) -> tuple[int, ...]:
        """As the protocol compares them."""
        return (self.number, self.target)


Message = Sync | Arm | Move | Prefer


class KeyState(enum.IntEnum):
    """What there is of an MR on one backup NIC."""

    READY = 0
    PENDING = 1  # being registered
    NEVER = 2  # it cannot be registered there
    HUNG = 3  # it was to be registered, and the NIC hangs


class FoundKey(Struct, frozen=True):
    """What the memory behind `rkey` is called on each backup: its state, and its rkey there (0 unless READY).

    Nothing in `on`: the rkey is of no MR.
    """

    rkey: int
    on: tuple[tuple[KeyState, int], ...]

    @property
    def size(self) -> int:
        """Bytes of it in a datagram."""
        return 5 + 5 * len(self.on)


class WantKeys(Struct, frozen=True):
    """Which rkeys of the receiver's the sender uses; and that it heeds all withdrawals up to `version`.

    again: it was asked before; the answer had better go over every path. settled: up to this withdrawal, none of its
    WRs is on its way by what it was told before.
    """

    version: int
    rkeys: tuple[int, ...]
    again: bool
    settled: int = 0

    @property
    def about(self) -> tuple[object, ...]:
        """One for each question."""
        return (WantKeys, self.rkeys)

    @property
    def age(self) -> tuple[int, ...]:
        """Of what is heeded."""
        return (self.version, self.settled)


class Keys(Struct, frozen=True):
    """What the sender's rkeys are on its backups, as of its withdrawal number `version`.

    gone: what it withdrew since `since`; who heeds less than that must forget everything. push: a withdrawal that is
    to be confirmed.
    """

    version: int
    since: int
    gone: tuple[int, ...]
    found: tuple[FoundKey, ...] = ()
    push: bool = False

    @property
    def about(self) -> tuple[object, ...]:
        """One for each answer."""
        return (Keys, self.push, tuple(found.rkey for found in self.found))

    @property
    def age(self) -> tuple[int, ...]:
        """Of what is said of the same keys."""
        return (self.version,)

    @property
    def size(self) -> int:
        """Bytes of it in a datagram."""
        return 18 + 4 * len(self.gone) + sum(found.size for found in self.found)
