# SPDX-License-Identifier: BSD-3-Clause
"""Who may speak on the control channel: datagrams sealed with a key that two processes share. Pure: no I/O, no clock.

Each control port has a secret, which its process publishes in the exchanger and never sends. A datagram from one port
to another carries a keyed hash over all of it, under both secrets, the sender's first; so what went one way is not
taken for what came the other. It carries a number too, which grows from one to the next as long as the process lives,
and is taken once.
"""

from __future__ import annotations

from hashlib import blake2s
from hmac import compare_digest

SECRET_BYTES = 16  # two of them are the longest key that BLAKE2s takes
TAG_BYTES = 12
# UD may reorder: so many numbers below the greatest are still taken, once. More than a send queue holds.
WINDOW = 1024

_SEEN_MASK = (1 << WINDOW) - 1


class Window:
    """Which numbers were taken already (as in RFC 4303, 3.4.3)."""

    __slots__ = ("_seen", "_top")

    def __init__(self) -> None:
        self._top = 0
        self._seen = 1  # bit n: whether top - n was taken

    def take(self, number: int) -> bool:
        """Take a number; False if it was taken before, or is too old to tell."""
        ahead = number - self._top
        if ahead > 0:
            self._seen = (self._seen << ahead | 1) & _SEEN_MASK if ahead < WINDOW else 1
            self._top = number
            return True
        if ahead <= -WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Seals:
    """The two directions between one of our control ports and one of a peer's.

    ours, theirs: the ports' secrets, SECRET_BYTES each. first: number of the first datagram, greater than any that was
    sent under the same two secrets. name_in, name_out: what datagrams to us and from us say whose they are; they tell
    nothing about the secrets.
    """

    __slots__ = ("_in", "_out", "name_in", "name_out", "next_number", "take")

    def __init__(self, ours: bytes, theirs: bytes, first: int = 1) -> None:
        if len(ours) != SECRET_BYTES or len(theirs) != SECRET_BYTES:
            raise ValueError(f"secrets have {SECRET_BYTES} bytes, not {len(ours)} and {len(theirs)}")
        self.name_in, self.name_out = _name(theirs + ours), _name(ours + theirs)
        self.next_number = first
        self._in, self._out = _seal(theirs + ours), _seal(ours + theirs)
        # Takes the number of a datagram with the peer's seal; False if it was taken before, or is too old to tell.
        self.take = Window().take

    def seal(self, data: bytes) -> bytes:
        """`data`, which carries the next number, with its tag behind it: a datagram from us. The number is used up."""
        self.next_number += 1
        seal = self._out.copy()
        seal.update(data)
        return data + seal.digest()

    def is_theirs(self, data: bytes, tag: bytes) -> bool:
        """Whether the peer has put `tag` behind `data`."""
        seal = self._in.copy()
        seal.update(data)
        return compare_digest(seal.digest(), tag)


def _name(key: bytes) -> int:
    return int.from_bytes(blake2s(key=key, digest_size=8, person=b"sv name").digest(), "big")


def _seal(key: bytes) -> blake2s:
    return blake2s(key=key, digest_size=TAG_BYTES, person=b"sv seal")
