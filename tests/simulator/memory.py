# SPDX-License-Identifier: BSD-3-Clause
"""The memory of one process: real addresses, words of 8 bytes."""

from __future__ import annotations

import ctypes

WORD = 8


class Memory:
    """words: how many."""

    def __init__(self, words: int) -> None:
        self.words = (ctypes.c_uint64 * words)()
        self.base = ctypes.addressof(self.words)
        self.bytes = words * WORD

    def address(self, word: int) -> int:
        """Where a word is."""
        return self.base + word * WORD

    def read(self, address: int) -> int:
        """What a NIC reads there."""
        at = address - self.base
        if not 0 <= at < self.bytes:
            return int(ctypes.c_uint64.from_address(address).value)
        return self.words[at >> 3]

    def write(self, address: int, value: int) -> None:
        """What a NIC writes there."""
        at = address - self.base
        assert 0 <= at < self.bytes, "a NIC writes into memory that is not the application's"
        self.words[at >> 3] = value
