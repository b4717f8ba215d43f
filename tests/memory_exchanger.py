# SPDX-License-Identifier: BSD-3-Clause
"""The exchanger without etcd: a store in this process, for tests. The simulator has its own.

Several exchangers share one `MemoryStore`, each as if it were a process of its own. The store reads no clock:
leases expire by the clock it is given, when `tick` or any request looks at it. What a network and a crash do to
the real one can be done here too: `set_available`, `partition`, `MemoryExchanger.kill`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from shiftverbs.exchanger import records
from shiftverbs.exchanger.interface import Connected, Exchanger, ExchangerEvent, Found, Rejected, Unavailable


class MemoryStore:
    """Keys, values and leases.

    clock: returns seconds, increasing; the default stands still, so that no lease ever expires.
    lease_ttl_s: how long the keys of a dead or cut-off exchanger stay.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0, lease_ttl_s: float = 10.0):
        self._clock = clock
        self._ttl_s = lease_ttl_s
        self._lock = threading.RLock()
        self._values: dict[str, tuple[str, MemoryExchanger | None]] = {}
        self._exchangers: list[MemoryExchanger] = []
        self._available = True
        self._reason = ""

    def tick(self) -> None:
        """Renew the leases of live exchangers and expire those that are due."""
        with self._lock:
            now = self._clock()
            for exchanger in self._exchangers:
                if not self._available or (exchanger._alive and not exchanger._cut):
                    # While etcd itself is away no lease runs out: it extends them all when it is back.
                    exchanger._lease_end_s = now + self._ttl_s
            for exchanger in [one for one in self._exchangers if now >= one._lease_end_s]:
                self._drop_keys_of(exchanger)
                if not exchanger._alive:
                    self._exchangers.remove(exchanger)

    def set_available(self, available: bool, reason: str = "the store is switched off") -> None:
        """Switch the whole store off or on, as when etcd is stopped and restarted."""
        with self._lock:
            self.tick()
            self._available, self._reason = available, reason
            for exchanger in self._exchangers:
                exchanger._connection_changed()

    def partition(self, exchanger: MemoryExchanger, cut: bool) -> None:
        """Cut one exchanger off from the store, or mend the cut. Its lease runs out meanwhile."""
        with self._lock:
            self.tick()
            exchanger._cut = cut
            exchanger._connection_changed()

    def keys(self) -> list[str]:
        """All keys that stand in the store now, sorted."""
        with self._lock:
            self.tick()
            return sorted(self._values)

    def read(self, key: str) -> str | None:
        """The text under a key."""
        with self._lock:
            self.tick()
            return self._values[key][0] if key in self._values else None

    def write(self, key: str, text: str | None) -> None:
        """Put any text under a key as a stranger would, without a lease; None deletes."""
        with self._lock:
            self.tick()
            self._set(key, text, None)

    def _set(self, key: str, text: str | None, owner: MemoryExchanger | None) -> None:
        if text is None:
            self._values.pop(key, None)
        else:
            self._values[key] = (text, owner)
        for exchanger in self._exchangers:
            exchanger._changed(key)

    def _delete_owned(self, key: str, owner: MemoryExchanger) -> None:
        if key in self._values and self._values[key][1] is owner:
            self._set(key, None, None)

    def _drop_keys_of(self, owner: MemoryExchanger) -> None:
        for key in [key for key, (_, holder) in self._values.items() if holder is owner]:
            self._set(key, None, None)


class MemoryExchanger(Exchanger):
    """An exchanger on a MemoryStore.

    store: shared with the peers; job: the namespace its keys must lie in.
    """

    def __init__(self, store: MemoryStore, job: str = "default"):
        self._store = store
        self._prefix = records.job_prefix(job)
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events: deque[ExchangerEvent] = deque()
        self._published: dict[str, str] = {}
        # What was last delivered for each wanted key; absent until the first answer.
        self._wanted: set[str] = set()
        self._delivered: dict[str, str | None] = {}
        self._alive = True
        self._cut = False
        self._connected: bool | None = None
        with store._lock:
            self._lease_end_s = store._clock() + store._ttl_s
            store.tick()
            store._exchangers.append(self)
            self._connection_changed()

    def publish(self, key: str, record: records.QpRecord) -> None:
        self._check(key)
        text = records.encode_value(key, record)
        with self._store._lock:
            self._store.tick()
            self._published[key] = text
            if self._connected:
                self._store._set(key, text, self)

    def withdraw(self, key: str) -> None:
        with self._store._lock:
            self._store.tick()
            if self._published.pop(key, None) is not None and self._connected:
                self._store._delete_owned(key, self)

    def want(self, key: str) -> None:
        self._check(key)
        with self._store._lock:
            self._store.tick()
            self._wanted.add(key)
            self._changed(key)

    def unwant(self, key: str) -> None:
        with self._store._lock:
            self._wanted.discard(key)
            self._delivered.pop(key, None)
            self._events = deque(
                event for event in self._events if not isinstance(event, Found | Rejected) or event.key != key
            )

    def fileno(self) -> int:
        return self._eventfd

    def poll_events(self) -> list[ExchangerEvent]:
        with self._store._lock:
            if self._eventfd < 0:
                return []
            self._store.tick()
            try:
                os.eventfd_read(self._eventfd)
            except BlockingIOError:
                pass
            events = list(self._events)
            self._events.clear()
            return events

    def close(self, after_fork: bool = False) -> None:
        if after_fork:
            # The lock may have been held by a thread that does not exist here.
            self._drop_descriptor()
            return
        with self._store._lock:
            if self._alive:
                self._alive = False
                if self._connected:
                    self._store._drop_keys_of(self)
                    self._store._exchangers.remove(self)
            self._drop_descriptor()

    def kill(self) -> None:
        """Stop as a process does that is killed: nothing is withdrawn, the lease runs out."""
        with self._store._lock:
            self._store.tick()
            self._alive = False
            self._drop_descriptor()

    def _check(self, key: str) -> None:
        if self._eventfd < 0:
            raise RuntimeError("the exchanger is closed")
        records.parse_key(key)
        if not key.startswith(self._prefix):
            raise records.RecordError(key, "belongs to another job")

    def _connection_changed(self) -> None:
        connected = self._store._available and not self._cut
        if not self._alive or connected == self._connected:
            return
        self._connected = connected
        if not connected:
            self._post(Unavailable(self._store._reason if not self._cut else "cut off from the store"))
            return
        self._post(Connected())
        self._store.tick()
        for key, text in self._published.items():
            if self._store._values.get(key) != (text, self):
                self._store._set(key, text, self)
        for key in self._wanted:
            self._changed(key)

    def _changed(self, key: str) -> None:
        if not self._alive or not self._connected or key not in self._wanted:
            return
        text = self._store._values.get(key, (None, None))[0]
        if key in self._delivered and self._delivered[key] == text:
            return
        self._delivered[key] = text
        try:
            self._post(Found(key, None if text is None else records.decode_value(key, text)))
        except records.RecordError as error:
            self._post(Rejected(key, str(error)))

    def _post(self, event: ExchangerEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._eventfd, 1)

    def _drop_descriptor(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1
