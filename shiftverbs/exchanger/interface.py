# SPDX-License-Identifier: BSD-3-Clause
"""What the rest of shiftverbs sees of the exchanger, whichever store is behind it.

An exchanger is a key-value store with leases, spoken to without waiting: requests return at once, and what comes
of them is collected with `poll_events` whenever `fileno` is readable. Everything a process published disappears
when it closes its exchanger or dies.
"""

from __future__ import annotations

import abc
import secrets

from msgspec import Struct

from shiftverbs.exchanger.records import QpRecord


class Found(Struct, frozen=True):
    """The state of a wanted key: the record there, checked against the schema, or None when the key has none.

    The first answer to `want` always comes, None included; after it, one event per change. Two changes in quick
    succession may arrive as the last one only.
    """

    key: str
    value: QpRecord | None


class Rejected(Struct, frozen=True):
    """A wanted key holds something that is not ours to use, or the store refused what we published there.

    reason: names the key. For a wanted key it counts as an answer: the key stays wanted, and a good value that
    replaces the bad one arrives as Found.
    """

    key: str
    reason: str


class Connected(Struct, frozen=True):
    """The store answers; what was asked and published meanwhile is on its way."""


class Unavailable(Struct, frozen=True):
    """The store does not answer. It is tried again for ever; requests made meanwhile are kept.

    reason: what went wrong, for the one warning in the log. Comes once per outage, and again only when the
    reason changes. No Found events come from an outage as such.
    """

    reason: str


ExchangerEvent = Found | Rejected | Connected | Unavailable


class Exchanger(abc.ABC):
    """The exchanger. Every method may be called from any thread, and none waits for the store but `close`.

    broker_pid: the process that speaks to the store for us, or None where there is none at the moment.
    """

    @property
    def broker_pid(self) -> int | None:
        """See above."""
        return None

    @abc.abstractmethod
    def publish(self, key: str, record: QpRecord) -> None:
        """Make `record` stand under `key` until withdrawn, replaced, or this process is gone.

        key: from `records.qp_key` and its like, in this exchanger's job.
        Raises RecordError when either breaks the schema, RuntimeError after `close`.
        """

    @abc.abstractmethod
    def withdraw(self, key: str) -> None:
        """Take back what this process published under `key`. Nothing happens if it published nothing there."""

    @abc.abstractmethod
    def want(self, key: str) -> None:
        """Ask for `key` and for its changes: Found or Rejected events follow until `unwant`.

        Asking again for a wanted key has no effect. Raises RecordError for what is not a key of this job.
        """

    @abc.abstractmethod
    def unwant(self, key: str) -> None:
        """No more events for `key`, not even ones already waiting."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when `poll_events` has something to do. Constant until `close`, then -1.

        Whoever owns the exchanger has to poll it: what was asked and published is sent from there, all in one go.
        """

    @abc.abstractmethod
    def poll_events(self) -> list[ExchangerEvent]:
        """What has happened, oldest first; empty when nothing has. Never waits."""

    @property
    def progress(self) -> str:
        """Until the first Connected or Unavailable: what it waits for, and for how long. Empty from then on."""
        return ""

    @abc.abstractmethod
    def close(self, after_fork: bool = False) -> None:
        """Withdraw everything, waiting a bounded time for the store, and free all resources. May be repeated.

        after_fork: this is a child process and the exchanger belongs to its parent: only drop the child's
        descriptors; nothing is withdrawn.
        """

    def __enter__(self) -> Exchanger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def new_instance_id() -> str:
    """A process's instance id: 64 random bits as 16 hex digits."""
    return secrets.token_hex(8)
