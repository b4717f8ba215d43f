# SPDX-License-Identifier: BSD-3-Clause
"""What the broker's threads towards etcd report to its main thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


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


class OfSession(Struct, frozen=True):
    """What concerns one session with etcd, whose number is `session`."""

    session: int


class Loaded(Struct, frozen=True):
    """There is a link to etcd; it was not started yet."""

    link: Link


class NotLoaded(Struct, frozen=True):
    """There will be no link to etcd, and why."""

    reason: str


class Up(OfSession, frozen=True):
    """It began. `watch` is its watch stream; `held` as by Held."""

    watch: Watches
    held: dict[int, str] = {}


class Down(Struct, frozen=True):
    """There is no session, and why."""

    reason: str


class Got(OfSession, frozen=True):
    """Answers to a read, as of `revision`: bytes, None (no value), or an int (too large to fetch)."""

    revision: int
    values: dict[str, bytes | int | None]


class Denied(OfSession, frozen=True):
    """etcd does not let us read these keys: why, by key."""

    reasons: dict[str, str]


class Held(Struct, frozen=True):
    """etcd takes nothing new for now: what `owner` publishes has to wait, for this reason."""

    owner: int
    reason: str


class PutsTaken(Struct, frozen=True):
    """etcd takes what is published again."""


class Refused(Struct, frozen=True):
    """etcd does not take what `owner` published under `key`."""

    owner: int
    key: str
    reason: str


class Dropped(Struct, frozen=True):
    """`owner` is forgotten and, where etcd could be told, its keys are gone."""

    owner: int


class Changed(OfSession, frozen=True):
    """Values after changes: [(key, value or None for deleted, revision)]."""

    changes: list[tuple[str, bytes | None, int]]


class WatchEnded(OfSession, frozen=True):
    """A watch ended by itself, as when etcd compacted the revision it was to begin with, or refused it.

    number: which one; there may be another one of this target since.
    """

    target: str
    reason: str
    number: int


class StreamEnded(OfSession, frozen=True):
    """The whole stream failed."""

    reason: str
