# SPDX-License-Identifier: BSD-3-Clause
"""What goes in (paths, samples, pings, settings), what comes out (actions). Times: ns of one monotonic clock."""

from __future__ import annotations

import enum

from msgspec import Struct

MS = 1_000_000
SECOND = 1_000_000_000


class Path(Struct, frozen=True):
    """The way to `peer` over rail number `rail`, for all QPs that take it."""

    peer: str
    rail: int


class Sample(Struct, frozen=True):
    """What was outstanding on a path at one moment, and how long it took until exactly that was complete.

    Samples of one path should not overlap: a moment is then counted once.

    path: where. bytes: outstanding when it began. messages: in how many WRs, at least 1. began_ns, ended_ns: when it
    was taken, best at a post, and when the last completion of these was seen. unseen_ns: how long before `ended_ns` the
    CQ was last seen without that completion: it may have lain there that long. busy_ns: of the time since the
    path's last sample ended, how much had work outstanding, with this sample; 0 where that is not known.
    begun_bytes: of `bytes`, those of the oldest WR if others were ahead of it: some may have been done by then.
    probe: the work was our own, a train of datagrams on a path without traffic, which is a kind of its own.

    Raises ValueError where these cannot be.
    """

    path: Path
    bytes: int
    messages: int
    began_ns: int
    ended_ns: int
    unseen_ns: int = 0
    busy_ns: int = 0
    begun_bytes: int = 0
    probe: bool = False

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.messages < 1:
            raise ValueError(
                f"a sample of {self.bytes} bytes in {self.messages} messages: nothing was outstanding"
            )
        if self.ended_ns <= self.began_ns:
            raise ValueError(f"a sample ends at {self.ended_ns} ns, and began at {self.began_ns} ns")
        if not 0 <= self.unseen_ns <= self.took_ns:
            raise ValueError(f"unseen for {self.unseen_ns} ns in a sample of {self.took_ns} ns")
        if not 0 <= self.begun_bytes <= self.bytes:
            raise ValueError(f"{self.begun_bytes} bytes begun in a sample of {self.bytes} bytes")
        if self.busy_ns and self.busy_ns < self.took_ns:
            raise ValueError(f"busy for {self.busy_ns} ns with a sample of {self.took_ns} ns")

    @property
    def took_ns(self) -> int:
        """From the moment it was taken to the last completion."""
        return self.ended_ns - self.began_ns


class Ping(Struct, frozen=True):
    """A ping of a path that was answered. Raises ValueError where the answer is older than the ping."""

    path: Path
    sent_ns: int
    heard_ns: int

    def __post_init__(self) -> None:
        if self.heard_ns <= self.sent_ns:
            raise ValueError(f"a ping sent at {self.sent_ns} ns was answered at {self.heard_ns} ns")


class Mode(enum.Enum):
    """What is done about a straggler."""

    OFF = "off"
    OBSERVE = "observe"
    MIGRATE = "migrate"


class Settings(Struct, frozen=True):
    """What counts as slow, and what may be done about it.

    slow_ratio: observed by predicted time beyond which a path is slow. least_samples, least_ns: so many samples, over
    so long a time, before it is said. move_cost_ns: what a MOVE takes before one was measured. hold_ns, most_hold_ns:
    time away before coming home is tried, which doubles up to the other with each that failed. moves_a_minute: of
    one peer, there and back. probe_ns: between two pings of each path to a peer while one of them is suspected.

    Raises ValueError for values that make no sense.
    """

    mode: Mode = Mode.OBSERVE
    slow_ratio: float = 1.1
    least_samples: int = 16
    least_ns: int = SECOND
    move_cost_ns: int = 20 * MS
    hold_ns: int = 10 * SECOND
    most_hold_ns: int = 600 * SECOND
    moves_a_minute: int = 4
    probe_ns: int = 10 * MS

    def __post_init__(self) -> None:
        if not self.slow_ratio > 1:
            raise ValueError(f"slow_ratio must be above 1, not {self.slow_ratio}")
        for name in ("least_samples", "least_ns", "move_cost_ns", "hold_ns", "moves_a_minute", "probe_ns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.most_hold_ns < self.hold_ns:
            raise ValueError(f"most_hold_ns is {self.most_hold_ns}, less than hold_ns, {self.hold_ns}")


class Attribution(enum.Enum):
    """Whose fault it is that a path is slow. Only PATH ever moves anything."""

    PATH = "this path"
    PEER = "the peer"
    BOTH_RAILS = "load that all rails see"
    APPLICATION = "the application polls late"
    UNKNOWN = "nothing is known of the other rails"


class Evidence(Struct, frozen=True):
    """What a verdict rests on.

    ratio: observed by predicted time since `since_ns`, weighted by time. samples: how many since then. lost_ns: time
    beyond the predicted in that time, in which work was outstanding.
    """

    path: Path
    ratio: float
    since_ns: int
    samples: int
    lost_ns: int
    attribution: Attribution


class Observe(Struct, frozen=True):
    """A path is slow, for long enough to say so; again when the attribution changes."""

    evidence: Evidence


class Recovered(Struct, frozen=True):
    """A path of which `Observe` said that it is slow is not any more."""

    path: Path
    since_ns: int


class Probe(Struct, frozen=True):
    """Ping all paths to `peer` every `interval_ns` (None: as usual): the one that has the traffic is suspected.

    And send a train of datagrams on each path without traffic, in place of every second ping (as usual: of every
    fifth): a `Sample` with `probe`.
    """

    peer: str
    interval_ns: int | None


class Move(Struct, frozen=True):
    """Move what goes to `path.peer` off `path`, to rail `target`.

    Answered by `Stragglers.handle_moved` or `handle_refused`.
    """

    path: Path
    target: int
    evidence: Evidence


class Return(Struct, frozen=True):
    """Move what goes to `path.peer` back to `path`, its home. Answered as `Move` is."""

    path: Path
    reason: str


Action = Observe | Recovered | Probe | Move | Return
