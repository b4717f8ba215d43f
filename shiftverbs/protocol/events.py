# SPDX-License-Identifier: BSD-3-Clause
"""What goes into the pure core (events) and what comes out of it (actions).

Times are integer nanoseconds of one monotonic clock; pairs are numbered as in `pair`.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from shiftverbs.protocol.messages import Message, PairAddress

# ---- events ---------------------------------------------------------------------------------------------------------


class PathFailed(Struct, frozen=True):
    """Pair `pair` failed, or looks as if it did.

    advisory: only a hint (PORT_ERR, watchdog); it never fences a QP with unsafe work. unsafe: what could not be
    replayed on this side at this moment, or None. wr: number of the send WR that failed there, which grows from WR to
    WR, where nothing but its failure speaks against the pair: port and pings are fine. None otherwise.
    """

    pair: int
    reason: str
    advisory: bool = False
    unsafe: str | None = None
    wr: int | None = None


class FenceCompleted(Struct, frozen=True):
    """Every pair of `Fence` action `number` is fenced; the counters are final.

    rx, acked, wired: two-sided messages received, completed, handed to hardware. unsafe: see `PathFailed`.
    receipts_lost: a NIC died here and may have taken completions of receives with it. unsafe_if_lost: what could not
    be replayed, in addition, if that happened to the peer.
    """

    number: int
    rx: int
    acked: int
    wired: int
    unsafe: str | None = None
    receipts_lost: bool = False
    unsafe_if_lost: str | None = None


class FenceHung(Struct, frozen=True):
    """A NIC did not carry out `Fence` action `number` in time: nothing is proven."""

    number: int
    reason: str


class PairReset(Struct, frozen=True):
    """RESET and INIT of `pair` are done (error None) or failed. gid and mtu were read again on the way."""

    pair: int
    arm: int
    gid: bytes = b""
    mtu: int = 0
    error: str | None = None


class Stage(enum.Enum):
    """How far a ConnectPair action brings the QP."""

    RTR = "RTR"
    RTS = "RTS"
    RTR_RTS = "RTR_RTS"


class PairConnected(Struct, frozen=True):
    """The ConnectPair of (pair, arm, stage) is done or failed."""

    pair: int
    arm: int
    stage: Stage
    error: str | None = None


class ArmCompletion(Struct, frozen=True):
    """The WC of an ARM dummy: the receive (receive=True) or the zero-length SEND."""

    pair: int
    receive: bool
    ok: bool


class MessageReceived(Struct, frozen=True):
    """A control message of the peer. unsafe: see `PathFailed`; needed to answer an ASK."""

    message: Message
    unsafe: str | None = None


class FenceWrPosted(Struct, frozen=True):
    """MOVE: the fence WR is posted and later posts are withheld."""


class FenceWrDone(Struct, frozen=True):
    """MOVE: the fence WR completed. tx: two-sided messages sent so far."""

    tx: int


class RxReached(Struct, frozen=True):
    """MOVE: as many two-sided messages were received as the peer sent before its fence WR."""


class ReceivesPosted(Struct, frozen=True):
    """All receives of PostReceives or MoveReceives action `number` are posted (error None), or the NIC refused one."""

    number: int
    error: str | None = None


class PathHealth(Struct, frozen=True):
    """The ping of a NIC pair is answered (alive), or its port or ping is dead."""

    pair: int
    alive: bool


class NicDead(Struct, frozen=True):
    """The context of pair `pair` saw DEVICE_FATAL: it is never used again."""

    pair: int


class PreferPair(Struct, frozen=True):
    """`migrate` (pair > 0) or `restore` (pair 0)."""

    pair: int


class Quit(Struct, frozen=True):
    """The application closed its QP, or moved it to RESET or ERR."""

    reason: str


class KeysMissing(Struct, frozen=True):
    """The keys of outstanding work cannot be resolved for the target in time."""

    reason: str


class WorkRefused(Struct, frozen=True):
    """The NIC that carries sends refuses a WR that the application was not told of when it posted it: its own error."""

    reason: str


Event = (
    PathFailed
    | FenceCompleted
    | FenceHung
    | PairReset
    | PairConnected
    | ArmCompletion
    | MessageReceived
    | FenceWrPosted
    | FenceWrDone
    | RxReached
    | ReceivesPosted
    | PathHealth
    | NicDead
    | PreferPair
    | Quit
    | KeysMissing
    | WorkRefused
)

# ---- actions: carried out by the driver in the order given ----------------------------------------------------------


class CloseSend(Struct, frozen=True):
    """Later send posts are only journaled."""


class CloseRecv(Struct, frozen=True):
    """Later receive posts are only journaled."""


class Fence(Struct, frozen=True):
    """Bring these pairs to ERR, send a marker behind everything, poll until both queues have shown it.

    Answered by FenceCompleted or, after deadline_ns, FenceHung, with the same number.
    """

    number: int
    pairs: tuple[int, ...]
    deadline_ns: int


class ResetPair(Struct, frozen=True):
    """RESET and INIT `pair`; dummy: post one receive for ARM. Answered by PairReset."""

    pair: int
    arm: int
    dummy: bool


class ConnectPair(Struct, frozen=True):
    """Bring `pair` to `stage` towards `remote`, with our send PSN `psn`. Answered by PairConnected."""

    pair: int
    arm: int
    stage: Stage
    psn: int
    remote: PairAddress


class PostArmSend(Struct, frozen=True):
    """Post ARM's zero-length SEND on `pair`. Answered by ArmCompletion."""

    pair: int


class PostReceives(Struct, frozen=True):
    """Post all outstanding receives on `pair` and open it for later ones. Answered by ReceivesPosted.

    The answer may take as long as the registration of their memory there; after CloseRecv none is due.
    """

    pair: int
    number: int


class Trim(Struct, frozen=True):
    """Everything up to the peer_rx-th two-sided WR is proven executed."""

    peer_rx: int


class OpenSend(Struct, frozen=True):
    """Post what is journaled and not handed to hardware on `pair`; later posts go there at once."""

    pair: int


class DeliverErrors(Struct, frozen=True):
    """The pairing is over: outstanding work gets its original errors, the QP is a plain one again."""

    reason: str


class LetGo(Struct, frozen=True):
    """The peer left on purpose: errors are the application's own from now on.

    unanswered: it may have moved its receives before: no send is handed over any more, the first one ends the QP.
    """

    reason: str
    unanswered: bool = False


class BeginFenceWr(Struct, frozen=True):
    """MOVE: make the last outstanding or the next WR the fence WR. Answered by FenceWrPosted."""


class PostFenceWrite(Struct, frozen=True):
    """MOVE: nobody posted for a while: post our own zero-length WRITE as the fence WR, if the peer permits it."""


class CancelMove(Struct, frozen=True):
    """MOVE: post what was withheld on `pair`, where sends are, and go on there."""

    pair: int


class AwaitRx(Struct, frozen=True):
    """MOVE: answer with RxReached once that many two-sided messages were received; None: no longer."""

    rx: int | None


class MoveReceives(Struct, frozen=True):
    """MOVE: post the outstanding receives on `pair`; what is left on the old pair is stale. Answered likewise."""

    pair: int
    number: int


class SendMessage(Struct, frozen=True):
    """Send to the peer over the NIC pair of `pair`; spread: over every NIC pair that may work."""

    message: Message
    pair: int
    spread: bool = False


class Status(enum.Enum):
    """Protection status of a QP."""

    UNPROTECTED = "UNPROTECTED"
    PAIRING = "PAIRING"
    PROTECTED = "PROTECTED"
    FAILED = "FAILED"


class SetStatus(Struct, frozen=True):
    """The protection status changed; PROTECTED means that a backup pair works."""

    status: Status
    why: str | None = None


class StateChanged(Struct, frozen=True):
    """For observers: direction is "send" or "recv"; pair: where that direction is now."""

    direction: str
    state: str
    pair: int


class SwitchStarted(Struct, frozen=True):
    """For observers and for measuring."""

    epoch: int
    target: int
    reason: str


Action = (
    CloseSend
    | CloseRecv
    | Fence
    | ResetPair
    | ConnectPair
    | PostArmSend
    | PostReceives
    | Trim
    | OpenSend
    | DeliverErrors
    | LetGo
    | BeginFenceWr
    | PostFenceWrite
    | CancelMove
    | AwaitRx
    | MoveReceives
    | SendMessage
    | SetStatus
    | StateChanged
    | SwitchStarted
)
