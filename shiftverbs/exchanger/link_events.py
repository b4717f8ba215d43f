# SPDX-License-Identifier: BSD-3-Clause
"""What the broker's threads towards etcd report to its main thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


class Watches(Protocol):
    """A stream of watches, see etcd_watch.WatchStream."""

    def watch(self, target: str, start_revision: int) -> int:
        """Report every change of `target` from `start_revision` on. Returns the number of this watch."""

    def cancel(self, target: str) -> None:
        """No longer watch `target`."""

    def close(self) -> None:
        """End the stream, quietly."""

    def successor(self) -> Watches:
        """A fresh stream in the same session."""


class Link(Protocol):
    """The way to etcd, see etcd_link.EtcdLink; for the broker's main thread."""

    def start(self) -> None:
        """Begin; what happens is reported from then on."""

    def add(self, owner: int) -> None:
        """A client came."""

    def put(self, owner: int, key: str, text: str) -> None:
        """`text` shall stand under `key` as long as `owner` lives."""

    def delete(self, owner: int, key: str) -> None:
        """`owner` takes `key` back."""

    def get(self, keys: Iterable[str]) -> None:
        """Read `keys`; the answer comes as Got or Denied."""

    def drop(self, owner: int) -> None:
        """`owner` is gone: everything it published goes too."""


@dataclass(frozen=True)
class OfSession:
    """What concerns one session with etcd, whose number is `session`."""

    session: int


@dataclass(frozen=True)
class Loaded:
    """There is a link to etcd; it was not started yet."""

    link: Link


@dataclass(frozen=True)
class NotLoaded:
    """There will be no link to etcd, and why."""

    reason: str


@dataclass(frozen=True)
class Up(OfSession):
    """It began. `watch` is its watch stream; `held` as by Held."""

    watch: Watches
    held: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Down:
    """There is no session, and why."""

    reason: str


@dataclass(frozen=True)
class Got(OfSession):
    """Answers to a read, as of `revision`: bytes, None (no value), or an int (too large to fetch)."""

    revision: int
    values: dict[str, bytes | int | None]


@dataclass(frozen=True)
class Denied(OfSession):
    """etcd does not let us read these keys: why, by key."""

    reasons: dict[str, str]


@dataclass(frozen=True)
class Held:
    """etcd takes nothing new for now: what `owner` publishes has to wait, for this reason."""

    owner: int
    reason: str


@dataclass(frozen=True)
class PutsTaken:
    """etcd takes what is published again."""


@dataclass(frozen=True)
class Refused:
    """etcd does not take what `owner` published under `key`."""

    owner: int
    key: str
    reason: str


@dataclass(frozen=True)
class Dropped:
    """`owner` is forgotten and, where etcd could be told, its keys are gone."""

    owner: int


@dataclass(frozen=True)
class Changed(OfSession):
    """Values after changes: [(key, value or None for deleted, revision)]."""

    changes: list[tuple[str, bytes | None, int]]


@dataclass(frozen=True)
class WatchEnded(OfSession):
    """A watch ended by itself, as when etcd compacted the revision it was to begin with, or refused it.

    number: which one; there may be another one of this target since.
    """

    target: str
    reason: str
    number: int


@dataclass(frozen=True)
class StreamEnded(OfSession):
    """The whole stream failed."""

    reason: str
