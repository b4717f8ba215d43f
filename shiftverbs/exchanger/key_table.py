# SPDX-License-Identifier: BSD-3-Clause
"""The broker's table of wanted keys: who wants them, their values, and which watch tells of changes.

A key is read once, in a batch with others, and watched from the revision after that, so that no change is missed
and none is polled for. Where many keys of one directory are wanted (all QPs of one NIC) a single watch covers the
directory; few keys get a watch each, so that a large job does not send everybody's changes to everybody.
When a watch or the stream fails, the keys are read again, after a growing pause: if watching is impossible
altogether, that amounts to polling. Of the keys that etcd denies to us a few are read again, after a growing pause
too; once one of them may be read, all are tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from msgspec import Struct

from shiftverbs.config import Config
from shiftverbs.exchanger import records
from shiftverbs.exchanger.link_events import (
    Changed,
    Denied,
    Got,
    OfSession,
    StreamEnded,
    Up,
    WatchEnded,
    Watches,
)

# From this number of wanted keys on, one watch takes the whole directory.
DIRECTORY_KEYS = 16
# A watch that failed longer ago than this says nothing about the next one.
FORGIVE_S = 60.0
# How many of the keys that etcd denies to us are tried again at a time.
PROBED_KEYS = 8


class _Key(Struct):
    clients: set[int] = set()
    known: bool = False
    # An int stands for a value too large to carry, a str for why it may not be read.
    value: bytes | int | str | None = None
    revision: int = 0
    target: str | None = None


class KeyTable:
    """See the module. One thread only.

    read: asks etcd for keys, the answer comes as Got; tell: called with (key, client) when there is news.
    """

    def __init__(
        self, config: Config, read: Callable[[Iterable[str]], None], tell: Callable[[str, int], None]
    ):
        self._config = config
        self._read = read
        self._tell = tell
        self._keys: dict[str, _Key] = {}
        # What each watch target covers, the number of its watch, and all keys by directory.
        self._targets: dict[str, set[str]] = {}
        self._watches: dict[str, int] = {}
        self._directories: defaultdict[str, set[str]] = defaultdict(set)
        self._session = 0
        self._stream: Watches | None = None
        self._due: dict[str, None] = {}
        self._due_at: float | None = None
        self._failures = 0
        self._failed_at = 0.0
        # Keys that may not be read, the next to try first; when, and after how many failures.
        self._denied: dict[str, None] = {}
        self._probe_at: float | None = None
        self._probes = 0

    def want(self, key: str, client: int) -> None:
        """`client` wants `key`: it is told now if the value is known, and at every change."""
        state = self._keys.get(key)
        if state is None:
            state = self._keys[key] = _Key()
            self._directories[_directory(key)].add(key)
            if self._stream is not None:
                self._read([key])
        if client not in state.clients:
            state.clients.add(client)
            if state.known:
                self._tell(key, client)

    def unwant(self, key: str, client: int) -> None:
        """`client` no longer wants `key`."""
        state = self._keys.get(key)
        if state is None:
            return
        state.clients.discard(client)
        if state.clients:
            return
        del self._keys[key]
        self._due.pop(key, None)
        self._denied.pop(key, None)
        directory = _directory(key)
        self._directories[directory].discard(key)
        if not self._directories[directory]:
            del self._directories[directory]
        if state.target is not None:
            covered = self._targets[state.target]
            covered.discard(key)
            if not covered:
                self._unwatch(state.target)

    def frame_for(self, key: str) -> dict[str, Any] | None:
        """What to tell about `key` now; None when it is no longer wanted or not known."""
        state = self._keys.get(key)
        if state is None or not state.known:
            return None
        value = state.value
        if value is None:
            return {"ev": "found", "key": key, "value": None}
        if isinstance(value, str):
            return {"ev": "refused", "key": key, "reason": value}
        if isinstance(value, int) or len(value) > records.MAX_VALUE_BYTES:
            size = value if isinstance(value, int) else len(value)
            return {"ev": "oversize", "key": key, "size": size}
        # Bytes that are not UTF-8 become lone surrogates, which the reader's check refuses.
        return {"ev": "found", "key": key, "value": value.decode("utf-8", "surrogateescape")}

    def handle_down(self) -> None:
        """The session with etcd ended. What is known stays known."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._forget_targets()
        self._due.clear()
        self._due_at = None
        self._forget_denied()

    def handle(self, event: object, now_s: float) -> None:
        """An event from the link or the watch stream."""
        if isinstance(event, Up):
            self._session, self._stream = event.session, event.watch
            # The revisions of an etcd restored from a backup start lower.
            for state in self._keys.values():
                state.revision = 0
            self._read(list(self._keys))
        elif self._stream is None or not isinstance(event, OfSession) or event.session != self._session:
            return
        elif isinstance(event, Got):
            self._handle_got(event)
        elif isinstance(event, Denied):
            self._handle_denied(event, now_s)
        elif isinstance(event, Changed):
            for key, value, revision in event.changes:
                self._apply(key, value, revision)
        elif isinstance(event, WatchEnded):
            if self._watches.get(event.target) != event.number:
                return  # an earlier one, which was cancelled meanwhile
            del self._watches[event.target]
            keys = self._targets.pop(event.target, set())
            for key in keys:
                self._keys[key].target = None
            self._read_later(keys, now_s)
        elif isinstance(event, StreamEnded):
            self._stream = self._stream.successor()
            self._forget_targets()
            self._read_later(self._keys, now_s)

    def next_due_s(self, now_s: float) -> float | None:
        """Seconds until `handle_time` has something to do, None when there is nothing planned."""
        times = [at for at in (self._due_at, self._probe_at) if at is not None]
        return max(0.0, min(times) - now_s) if times else None

    def handle_time(self, now_s: float) -> None:
        """Read again what is due."""
        if self._due_at is not None and now_s >= self._due_at:
            self._due_at = None
            keys, self._due = list(self._due), {}
            self._read(keys)
        if self._probe_at is not None and now_s >= self._probe_at:
            self._probe_at = None
            probed = list(islice(self._denied, PROBED_KEYS))
            for key in probed:  # the others' turn next
                del self._denied[key]
                self._denied[key] = None
            self._read(probed)

    def _handle_got(self, got: Got) -> None:
        uncovered: defaultdict[str, list[str]] = defaultdict(list)
        allowed = False
        for key, value in got.values.items():
            self._apply(key, value, got.revision)
            if key in self._denied:
                del self._denied[key]
                allowed = True
            state = self._keys.get(key)
            if state is not None and state.target is None:
                uncovered[_directory(key)].append(key)
        for directory, keys in uncovered.items():
            if directory in self._targets or len(self._directories[directory]) >= DIRECTORY_KEYS:
                self._cover(directory, keys, got.revision + 1)
            else:
                for key in keys:
                    self._cover(key, [key], got.revision + 1)

        if allowed and self._denied:
            keys = list(self._denied)
            self._forget_denied()
            self._read(keys)

    def _handle_denied(self, denied: Denied, now_s: float) -> None:
        news = False
        for key, reason in denied.reasons.items():
            if key in self._keys:
                news |= key not in self._denied
                self._denied[key] = None
                # No revision: whatever may be read later is newer.
                self._keys[key].revision = 0
                self._apply(key, reason, 0)
        if self._denied and self._probe_at is None:
            self._probes = 0 if news else self._probes + 1
            self._probe_at = now_s + self._pause_s(self._probes)

    def _forget_denied(self) -> None:
        self._denied.clear()
        self._probe_at, self._probes = None, 0

    def _apply(self, key: str, value: bytes | int | str | None, revision: int) -> None:
        state = self._keys.get(key)
        if state is None or (state.known and revision <= state.revision and not isinstance(value, str)):
            return
        news = not state.known or state.value != value
        state.known, state.value, state.revision = True, value, revision
        if news:
            for client in state.clients:
                self._tell(key, client)

    def _cover(self, target: str, keys: Iterable[str], start_revision: int) -> None:
        assert self._stream is not None
        if target not in self._targets:
            self._targets[target] = set()
            self._watches[target] = self._stream.watch(target, start_revision)
        for key in keys:
            self._targets[target].add(key)
            self._keys[key].target = target

    def _unwatch(self, target: str) -> None:
        del self._targets[target]
        self._watches.pop(target, None)
        if self._stream is not None:
            self._stream.cancel(target)

    def _forget_targets(self) -> None:
        self._targets.clear()
        self._watches.clear()
        for state in self._keys.values():
            state.target = None

    def _read_later(self, keys: Iterable[str], now_s: float) -> None:
        self._failures = 0 if now_s - self._failed_at > FORGIVE_S else self._failures + 1
        self._failed_at = now_s
        self._due.update(dict.fromkeys(keys))
        if self._due and self._due_at is None:
            self._due_at = now_s + self._pause_s(self._failures)

    def _pause_s(self, failures: int) -> float:
        config = self._config
        return min(config.etcd_backoff_min_ms * 2 ** min(failures, 20), config.etcd_backoff_max_ms) / 1000


def _directory(key: str) -> str:
    return key[: key.rindex("/") + 1]
