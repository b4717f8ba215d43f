# SPDX-License-Identifier: BSD-3-Clause
"""Memory of the transport's own, and memory regions of what others own, kept for the next time."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

#: How many regions, and how many bytes in them, a cache keeps that nobody uses at the moment.
MAX_ENTRIES = 256
MAX_BYTES = 1 << 30

Where = Callable[[], tuple[int, int]]


class Buffer:
    """Page-aligned memory, zeroed. length: bytes, at least one."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._map = mmap.mmap(-1, length)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class _Entry:
    __slots__ = ("mr", "owner", "pins", "where")

    def __init__(self, mr: Any, owner: object, where: Where | None) -> None:
        self.mr, self.owner, self.where = mr, owner, where
        self.pins = 0


class Lease:
    """The regions that one operation uses: none of them goes before `end`."""

    def __init__(self, cache: MrCache) -> None:
        self._cache = cache
        self._held: list[_Entry] = []

    def get(self, address: int, length: int, owner: object, where: Where | None = None) -> Any:
        """The MR of what MrCache.take gives, until `end`."""
        entry = self._cache.take(address, length, owner, where)
        self._held.append(entry)
        return entry.mr

    def end(self) -> None:
        """Let go of all."""
        held, self._held = self._held, []
        if held:
            self._cache.give_back(held)


class MrCache:
    """MRs by address and length, each with the object that owns its memory.

    Registering costs tens of microseconds, so a region is kept when its operation is over; and with it its owner, since
    a NIC would otherwise write into pages that meanwhile are somebody else's. The least recently used go first.

    :param register: makes an MR of (address, length in bytes)
    :param max_entries, max_bytes: how much is kept beside what is in use
    """

    def __init__(
        self, register: Callable[[int, int], Any], max_entries: int = MAX_ENTRIES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._register = register
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._gone: list[_Entry] = []  # replaced while in use

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in all regions."""
        return self._bytes

    def lease(self) -> Lease:
        """For one operation."""
        return Lease(self)

    def take(self, address: int, length: int, owner: object, where: Where | None) -> _Entry:
        """The region of memory at address, made if need be.

        :param owner: what keeps the memory; it is held as long as the region is
        :param where: tells the owner's (address, length) now: an owner can move, and others get its old memory
        :raises PyverbsRDMAError: as ibv_reg_mr
        """
        key = (address, length)
        stale: list[_Entry] = []
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.where is not None and entry.where() != key:
                self._remove(key, stale)
                entry = None
            if entry is not None:
                self._entries.move_to_end(key)
                entry.pins += 1
                return entry
        _close(stale)
        entry = _Entry(self._register(address, length), owner, where)
        entry.pins = 1
        with self._lock:
            stale = []
            if key in self._entries:  # another thread was quicker
                self._remove(key, stale)
            self._entries[key] = entry
            self._bytes += length
            self._shrink(stale)
        _close(stale)
        return entry

    def give_back(self, entries: list[_Entry]) -> None:
        """What `take` gave is not used any more.

        :param entries: each as often as it was taken
        """
        stale: list[_Entry] = []
        with self._lock:
            for entry in entries:
                entry.pins -= 1
            if self._gone:
                stale = [entry for entry in self._gone if not entry.pins]
                self._gone = [entry for entry in self._gone if entry.pins]
            self._shrink(stale)
        _close(stale)

    def _remove(self, key: tuple[int, int], stale: list[_Entry]) -> None:
        entry = self._entries.pop(key)
        self._bytes -= key[1]
        (self._gone if entry.pins else stale).append(entry)

    def _shrink(self, stale: list[_Entry]) -> None:
        if len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
            return
        for key in [key for key, entry in self._entries.items() if not entry.pins]:
            if len(self._entries) <= self._max_entries and self._bytes <= self._max_bytes:
                return
            self._remove(key, stale)

    def clear(self) -> None:
        """Deregister all that nobody uses."""
        stale: list[_Entry] = []
        with self._lock:
            for key in [key for key, entry in self._entries.items() if not entry.pins]:
                self._remove(key, stale)
        _close(stale)


def _close(entries: list[_Entry]) -> None:
    for entry in entries:
        entry.mr.close()
        entry.owner = None
