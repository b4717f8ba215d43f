# SPDX-License-Identifier: BSD-3-Clause
"""This process's side of the exchanger: what it publishes, and which connection wants which entries.

Everything here runs under the driver's lock.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVarTuple

from shiftverbs.exchanger.interface import Connected, ExchangerEvent, Found, Rejected, Unavailable
from shiftverbs.exchanger.records import QpRecord
from shiftverbs.process.log_lines import Seldom

if TYPE_CHECKING:
    from shiftverbs._core import QPCore
    from shiftverbs.exchanger.interface import Exchanger

logger = logging.getLogger("shiftverbs.driver")
Args = TypeVarTuple("Args")

NOT_YET = "etcd has not answered yet"
AWAY = "etcd cannot be used: "
NO_ENTRY = "the peer has not published its QP (does it run shiftverbs, with the same etcd and job?)"


class Search(Protocol):
    """A search for a peer's entry."""

    def rejected(self, key: str, reason: str) -> None:
        """The exchanger refused what stands under a key."""


class Seeker(Protocol):
    """A connection whose peer is found here, or not."""

    @property
    def why(self) -> str | None:
        """Why it is not protected, as `qp.shift` shows it."""

    @property
    def pairing(self) -> Search:
        """How it finds its peer."""

    def set_why(self, why: str) -> None:
        """Say what pairing waits for."""


class DirectoryHost(Protocol):
    """What the directory asks of the driver."""

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""

    @property
    def connections(self) -> Mapping[QPCore, Seeker]:
        """All that there are now."""

    def now_ns(self) -> int:
        """The clock: CLOCK_MONOTONIC in nanoseconds."""

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run under the lock, soon."""

    def later(self, connection: None, call: Callable[[*Args], None], *args: *Args) -> None:
        """Append to what has to be handled."""


class Directory:
    """Keys of ours and of others in the exchanger."""

    def __init__(self, driver: DirectoryHost, exchanger: Exchanger) -> None:
        self._driver = driver
        self._exchanger = exchanger
        self._wanted: dict[str, list[Callable[[QpRecord | None], None]]] = {}
        self._values: dict[str, QpRecord] = {}
        self._told: collections.deque[ExchangerEvent] = collections.deque()
        # Others may write what they like into etcd, as often as they like.
        self._seldom = Seldom(logger)
        # Why no peer can be found at present, whatever it does; None while etcd answers.
        self.away: str | None = NOT_YET

    def publish(self, key: str, record: QpRecord) -> None:
        """Publish through the exchanger."""
        self._exchanger.publish(key, record)

    def withdraw(self, key: str) -> None:
        """Withdraw from the exchanger."""
        if not self._driver.stopped:
            self._exchanger.withdraw(key)

    def want(self, key: str, found: Callable[[QpRecord | None], None]) -> None:
        """Call found(record) under the lock now and whenever `key` changes."""
        users = self._wanted.setdefault(key, [])
        users.append(found)
        if len(users) == 1:
            self._exchanger.want(key)
        elif key in self._values:
            value = self._values[key]
            self._driver.post(lambda: found(value))

    def unwant(self, key: str, found: Callable[[QpRecord | None], None] | None = None) -> None:
        """Stop calling `found` for `key` (for a key with one user, whatever found is)."""
        users = self._wanted.get(key)
        if users is None:
            return
        if found in users:
            users.remove(found)
        else:
            users.clear()
        if not users:
            del self._wanted[key]
            self._values.pop(key, None)
            if not self._driver.stopped:
                self._exchanger.unwant(key)

    def take(self) -> None:
        """Take what the exchanger tells."""
        self._told.extend(self._exchanger.poll_events())
        while self._told:
            event = self._told[0]
            match event:
                case Found():
                    self._driver.later(None, self._found, event)
                case Rejected():
                    self._seldom.warning(
                        self._driver.now_ns(), "an entry in etcd is not used: %s", event.reason
                    )
                    for connection in list(self._driver.connections.values()):
                        connection.pairing.rejected(event.key, event.reason)
                case Unavailable():  # logged there already; what is paired stays protected
                    self.away = AWAY + event.reason
                    for connection in list(self._driver.connections.values()):
                        connection.set_why(self.away)
                case Connected():
                    before, self.away = self.away, None
                    now = NO_ENTRY if before == NOT_YET else "etcd is back; waiting for the peer's entry"
                    for connection in list(self._driver.connections.values()):
                        if (connection.why or "").startswith((AWAY, NOT_YET)):
                            connection.set_why(now)
            self._told.popleft()  # only now: nothing is told twice

    def explained(self, why: str | None) -> str | None:
        """A connection's `why`; before etcd's first answer, with what we wait for."""
        progress = self._exchanger.progress if why == NOT_YET else ""
        return f"{why}: {progress}" if progress else why

    @property
    def is_behind(self) -> bool:
        """Whether `take` was interrupted."""
        return bool(self._told)

    def _found(self, event: Found) -> None:
        if event.value is None:
            self._values.pop(event.key, None)
        elif event.key in self._wanted:
            self._values[event.key] = event.value
        for found in list(self._wanted.get(event.key, ())):
            try:
                found(event.value)
            except Exception as error:
                text = "what stands under %s could not be used"
                self._seldom.exception(self._driver.now_ns(), error, text, event.key)
