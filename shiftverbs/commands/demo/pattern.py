# SPDX-License-Identifier: BSD-3-Clause
"""What every byte of message n must be, and which messages are missing, double, late or damaged.

The receiver makes the contents it expects from the seed and the message's number alone; nothing of the sender's
memory is consulted. A message is a 16-byte header (stream, size, number) and then a piece of a random block that
starts at another place for every number: one slice instead of a generator step per byte, and two messages that
share a slot differ in nearly every byte.
"""

from __future__ import annotations

import random
import struct

__all__ = ["HEADER", "Ledger", "Pattern"]

HEADER = struct.Struct("<IIQ")  # stream, size of the message, its number
# A prime: the starts of consecutive messages (a multiple of STRIDE, modulo this) do not repeat for a million of them.
_STARTS = 1_048_573
_STRIDE = 7919


class Pattern:
    """The contents of one stream's messages.

    seed: of the run. stream: tells apart directions and kinds of traffic. size: bytes per message, at least 16.
    """

    def __init__(self, seed: int, stream: int, size: int) -> None:
        if size < HEADER.size:
            raise ValueError(f"a message needs at least {HEADER.size} bytes, not {size}")
        self.stream = stream
        self.size = size
        block = random.Random(f"{seed}/{stream}").randbytes(_STARTS)
        # Repeated at its end, so that every start has a whole message behind it.
        self._block = block + block[: size % _STARTS] if size <= _STARTS else block * (size // _STARTS + 2)

    def message(self, number: int) -> bytes:
        """Return the whole contents of one message."""
        start = number * _STRIDE % _STARTS
        body = self._block[start : start + self.size - HEADER.size]
        return HEADER.pack(self.stream, self.size, number) + body

    def verify(self, number: int, contents: bytes) -> str | None:
        """Return None where contents are exactly message number's, else what is wrong with them."""
        expected = self.message(number)
        if contents == expected:
            return None
        if len(contents) != len(expected):
            return f"message {number}: {len(contents)} bytes instead of {len(expected)}"
        wrong = [at for at in range(len(expected)) if contents[at] != expected[at]]
        stream, size, claimed = HEADER.unpack_from(contents)
        return (
            f"message {number}: {len(wrong)} wrong bytes from {wrong[0]} to {wrong[-1]}; "
            f"its header says stream {stream}, {size} bytes, message {claimed}"
        )

    def claimed_number(self, contents: bytes) -> int | None:
        """Return the number in the header, or None where it is no header of this stream."""
        if len(contents) < HEADER.size:
            return None
        stream, size, number = HEADER.unpack_from(contents)
        return number if (stream, size) == (self.stream, self.size) else None


class Ledger:
    """Who arrived: counts lost, duplicated, reordered and corrupt messages of one numbered stream.

    Numbers begin at 0. What is missing is held by number, so that a late one counts as reordered, not as lost.
    """

    # A number this far ahead is no gap but a damaged number.
    MAX_GAP = 100_000

    def __init__(self) -> None:
        self.expected = 0
        self.checked = 0
        self.duplicated = 0
        self.reordered = 0
        self.corrupt = 0
        self.first_fault: str | None = None
        self._missing: set[int] = set()

    def arrived(self, number: int) -> None:
        """Count the arrival of message number."""
        if number == self.expected:
            self.expected += 1
            self.checked += 1
        elif number in self._missing:
            self._missing.remove(number)
            self.checked += 1
            self.reordered += 1
            self._note(f"message {number} came after message {self.expected - 1}")
        elif number < self.expected:
            self.duplicated += 1
            self._note(f"message {number} came again; {self.expected} was next")
        elif number - self.expected > self.MAX_GAP:
            self.damaged(f"message number {number} where {self.expected} was next")
        else:
            self._note(f"message {number} came where {self.expected} was next")
            self._missing.update(range(self.expected, number))
            self.expected = number + 1
            self.checked += 1

    def damaged(self, what: str) -> None:
        """Count a message whose contents are wrong."""
        self.corrupt += 1
        self._note(what)

    def lost(self, sent: int) -> int:
        """Return how many of the first `sent` messages have not arrived."""
        return len([n for n in self._missing if n < sent]) + max(0, sent - self.expected)

    def unsent(self, sent: int) -> int:
        """Return how many arrived that nobody sent."""
        return max(0, self.expected - sent)

    def nearest(self, residue: int, modulus: int) -> int:
        """Return the number with this residue that is nearest to the expected one (of two, the later)."""
        half = modulus // 2
        return self.expected + (residue - self.expected + half - 1) % modulus - (half - 1)

    def _note(self, what: str) -> None:
        if self.first_fault is None:
            self.first_fault = what
