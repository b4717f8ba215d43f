# SPDX-License-Identifier: BSD-3-Clause
"""Which bytes of a pool are in use. Pure: offsets, no memory."""

from __future__ import annotations

from bisect import bisect_left

#: Every offset is a multiple of it, as DLPack wants.
ALIGNMENT = 256


class Allocator:
    """Best fit; neighbours that are free become one. size: bytes, rounded down to ALIGNMENT."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.in_use = 0
        self._used: dict[int, int] = {}
        # Free pieces: their offsets in order, and their lengths in the same places.
        self._offsets: list[int] = [0] if self.size else []
        self._lengths: list[int] = [self.size] if self.size else []

    def allocate(self, length: int) -> int | None:
        """An offset of so many bytes, one or more; None: there is no piece that long."""
        if length < 1:
            raise ValueError(f"{length} bytes cannot be allocated")
        length = -(-length // ALIGNMENT) * ALIGNMENT
        at = min(
            (i for i, free in enumerate(self._lengths) if free >= length),
            key=self._lengths.__getitem__,
            default=None,
        )
        if at is None:
            return None
        offset = self._offsets[at]
        if self._lengths[at] == length:
            del self._offsets[at], self._lengths[at]
        else:
            self._offsets[at] += length
            self._lengths[at] -= length
        self._used[offset] = length
        self.in_use += length
        return offset

    def free(self, offset: int) -> None:
        """Give back what `allocate` gave. Raises ValueError for an offset that is not in use."""
        if offset not in self._used:
            raise ValueError(f"offset {offset} is not in use")
        length = self._used.pop(offset)
        self.in_use -= length
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and offset + length == self._offsets[at]:
            length += self._lengths[at]
            del self._offsets[at], self._lengths[at]
        if at and self._offsets[at - 1] + self._lengths[at - 1] == offset:
            self._lengths[at - 1] += length
        else:
            self._offsets.insert(at, offset)
            self._lengths.insert(at, length)

    @property
    def longest(self) -> int:
        """Bytes of the longest piece that is free."""
        return max(self._lengths, default=0)
