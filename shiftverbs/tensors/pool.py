# SPDX-License-Identifier: BSD-3-Clause
"""Registered memory for tensors: one pool, and pieces of their own for tensors that it has no room for."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.tensors.allocator import Allocator
from shiftverbs.tensors.errors import PoolError
from shiftverbs.transport import Buffer

#: (address, bytes) to an MR of memory that peers may write to.
Register = Callable[[int, int], Any]


class Block(NamedTuple):
    """Memory that is registered. array: a ctypes array of it; whoever looks at the memory holds that."""

    array: Any
    address: int
    lkey: int
    rkey: int


class Pool:
    """Any thread may allocate; what nobody holds is free again.

    :param register: makes an MR
    :param nbytes: of the pool
    :param limit_bytes: how much it gives at most, pieces of their own included
    :raises PoolError: there is no memory for it
    """

    def __init__(self, register: Register, nbytes: int, limit_bytes: int) -> None:
        self._register, self._limit = register, limit_bytes
        self._allocator = Allocator(nbytes)
        self._buffer, self._mr = self._memory(max(1, nbytes))
        self._apart = 0
        self._numbers = itertools.count()
        # What is in use: where it lies in the pool, or its own MR and memory; and the numbers of what was let go.
        self._used: dict[int, tuple[Any, int, Any, Buffer | None]] = {}
        self._gone: deque[int] = deque()
        self._lock = threading.Lock()
        #: Called when memory was let go of: in any thread, under any lock.
        self.on_free: Callable[[], None] = lambda: None

    def _memory(self, nbytes: int) -> tuple[Buffer, Any]:
        try:
            buffer = Buffer(nbytes)
            return buffer, self._register(buffer.address, nbytes)
        except (OSError, ValueError, OverflowError, PyverbsError) as error:
            raise PoolError(f"no memory for {nbytes} bytes: {error}") from error

    @property
    def has_gained(self) -> bool:
        """Whether memory was let go of since the last `allocate`."""
        return bool(self._gone)

    @property
    def in_use(self) -> int:
        """Bytes that somebody holds."""
        with self._lock:
            self._collect()
            return self._allocator.in_use + self._apart

    def allocate(self, nbytes: int, apart: bool = True) -> Block | None:
        """So many bytes, one or more.

        :param apart: in a piece of its own, if the pool has no room
        :return: None: there is no room at the moment
        :raises PoolError: there never is, or the machine has none
        """
        with self._lock:
            self._collect()
            if nbytes > self._limit:
                raise PoolError(f"{nbytes} bytes are more than the limit of {self._limit}")
            if self._allocator.in_use + self._apart + nbytes > self._limit:
                return None
            offset = self._allocator.allocate(nbytes)
            if offset is not None:
                return self._block(nbytes, self._buffer, offset, self._mr, None)
            if not apart:
                return None
            self._apart += nbytes
        try:
            buffer, mr = self._memory(nbytes)
        except BaseException:
            with self._lock:
                self._apart -= nbytes
            raise
        with self._lock:
            return self._block(nbytes, buffer, 0, mr, buffer)

    def _block(self, nbytes: int, buffer: Buffer, offset: int, mr: Any, own: Buffer | None) -> Block:
        # The array keeps the memory mapped, even when the pool is no more.
        array = (ctypes.c_ubyte * nbytes).from_buffer(buffer.view, offset)
        number = next(self._numbers)

        def let_go(_: Any, gone: deque[int] = self._gone, number: int = number) -> None:
            gone.append(number)
            self.on_free()

        self._used[number] = (weakref.ref(array, let_go), offset, mr if own else None, own)
        return Block(array, buffer.address + offset, int(mr.lkey), int(mr.rkey))

    def _collect(self) -> None:
        """What was let go of is free."""
        while self._gone:
            _, offset, mr, own = self._used.pop(self._gone.popleft())
            if own is None:
                self._allocator.free(offset)
            else:
                self._apart -= own.length
                mr.close()

    def text(self) -> str:
        """How much is in use, for errors."""
        with self._lock:
            return (
                f"{self._allocator.in_use + self._apart} bytes of {self._limit} are in use, and the longest free "
                f"piece of the pool of {self._allocator.size} has {self._allocator.longest}"
            )

    def keys_of(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """lkey and rkey of memory that `allocate` gave; None: it gave none there."""
        start = self._buffer.address
        if start <= address and address + nbytes <= start + self._buffer.length:
            return int(self._mr.lkey), int(self._mr.rkey)
        with self._lock:
            for _, _, mr, own in self._used.values():
                if own and own.address <= address and address + nbytes <= own.address + own.length:
                    return int(mr.lkey), int(mr.rkey)
        return None

    def close(self) -> None:
        """Deregister all. Whoever holds memory keeps it."""
        with self._lock:
            self._collect()
            for _, _, mr, own in self._used.values():
                if own:
                    mr.close()
            self._mr.close()
