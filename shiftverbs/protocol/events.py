# SPDX-License-Identifier: BSD-3-Clause
"""What goes into the pure core (events) and what comes out of it (actions).

Times are integer nanoseconds of one monotonic clock; pairs are numbered as in `pair`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shiftverbs.protocol.messages import Message, PairAddress

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PathFailed:
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


@dataclass(frozen=True, slots=True)
class FenceCompleted:
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


@dataclass(frozen=True, slots=True)
class FenceHung:
    """A NIC did not carry out `Fence` action `number` in time: nothing is proven."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class PairReset:
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


@dataclass(frozen=True, slots=True)
class PairConnected:
    """The ConnectPair of (pair, arm, stage) is done or failed."""

    pair: int
    arm: int
    stage: Stage
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ArmCompletion:
    """The WC of an ARM dummy: the receive (receive=True) or the zero-length SEND."""

    pair: int
    receive: bool
    ok: bool


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A control message of the peer. unsafe: see `PathFailed`; needed to answer an ASK."""

    message: Message
    unsafe: str | None = None


@dataclass(frozen=True, slots=True)
class FencePosted:
    """MOVE: the fence WR is posted and later posts are withheld."""


@dataclass(frozen=True, slots=True)
class FenceDone:
    """MOVE: the fence WR completed. tx: two-sided messages sent so far."""

    tx: int


@dataclass(frozen=True, slots=True)
class RxReached:
    """MOVE: as many two-sided messages were received as the peer sent before its fence WR."""


@dataclass(frozen=True, slots=True)
class ReceivesPosted:
    """All receives of PostReceives or MoveReceives action `number` are posted (error None), or the NIC refused one."""

    number: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PathHealth:
    """The ping of a NIC pair is answered (alive), or its port or ping is dead."""

    pair: int
    alive: bool


@dataclass(frozen=True, slots=True)
class NicDead:
    """The context of pair `pair` saw DEVICE_FATAL: it is never used again."""

    pair: int


@dataclass(frozen=True, slots=True)
class PreferPair:
    """`migrate` (pair > 0) or `restore` (pair 0)."""

    pair: int


@dataclass(frozen=True, slots=True)
class Quit:
    """The application closed its QP, or moved it to RESET or ERR."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeysMissing:
    """The keys of outstanding work cannot be resolved for the target in time."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkRefused:
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
    | FencePosted
    | FenceDone
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


@dataclass(frozen=True, slots=True)
class CloseSend:
    """Later send posts are only journaled."""


@dataclass(frozen=True, slots=True)
class CloseRecv:
    """Later receive posts are only journaled."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Bring these pairs to ERR, send a marker behind everything, poll until both queues have shown it.

    Answered by FenceCompleted or, after deadline_ns, FenceHung, with the same number.
    """

    number: int
    pairs: tuple[int, ...]
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ResetPair:
    """RESET and INIT `pair`; dummy: post one receive for ARM. Answered by PairReset."""

    pair: int
    arm: int
    dummy: bool


@dataclass(frozen=True, slots=True)
class ConnectPair:
    """Bring `pair` to `stage` towards `remote`, with our send PSN `psn`. Answered by PairConnected."""

    pair: int
    arm: int
    stage: Stage
    psn: int
    remote: PairAddress


@dataclass(frozen=True, slots=True)
class PostArmSend:
    """Post ARM's zero-length SEND on `pair`. Answered by ArmCompletion."""

    pair: int


@dataclass(frozen=True, slots=True)
class PostReceives:
    """Post all outstanding receives on `pair` and open it for later ones. Answered by ReceivesPosted.

    The answer may take as long as the registration of their memory there; after CloseRecv none is due.
    """

    pair: int
    number: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Everything up to the peer_rx-th two-sided WR is proven executed."""

    peer_rx: int


@dataclass(frozen=True, slots=True)
class OpenSend:
    """Post what is journaled and not handed to hardware on `pair`; later posts go there at once."""

    pair: int


@dataclass(frozen=True, slots=True)
class DeliverErrors:
    """The pairing is over: outstanding work gets its original errors, the QP is a plain one again."""

    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """The peer left on purpose: errors are the application's own from now on.

    unanswered: it may have moved its receives before: no send is handed over any more, the first one ends the QP.
    """

    reason: str
    unanswered: bool = False


@dataclass(frozen=True, slots=True)
class BeginFence:
    """MOVE: make the last outstanding or the next WR the fence WR. Answered by FencePosted."""


@dataclass(frozen=True, slots=True)
class PostFenceWrite:
    """MOVE: nobody posted for a while: post our own zero-length WRITE as the fence WR, if the peer permits it."""


@dataclass(frozen=True, slots=True)
class CancelMove:
    """MOVE: post what was withheld on `pair`, where sends are, and go on there."""

    pair: int


@dataclass(frozen=True, slots=True)
class AwaitRx:
    """MOVE: answer with RxReached once that many two-sided messages were received; None: no longer."""

    rx: int | None


@dataclass(frozen=True, slots=True)
class MoveReceives:
    """MOVE: post the outstanding receives on `pair`; what is left on the old pair is stale. Answered likewise."""

    pair: int
    number: int


@dataclass(frozen=True, slots=True)
class SendMessage:
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


@dataclass(frozen=True, slots=True)
class SetStatus:
    """The protection status changed; PROTECTED means that a backup pair is armed."""

    status: Status
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StateChanged:
    """For observers: direction is "send" or "recv"; pair: where that direction is now."""

    direction: str
    state: str
    pair: int


@dataclass(frozen=True, slots=True)
class SwitchStarted:
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
    | BeginFence
    | PostFenceWrite
    | CancelMove
    | AwaitRx
    | MoveReceives
    | SendMessage
    | SetStatus
    | StateChanged
    | SwitchStarted
)
