# SPDX-License-Identifier: BSD-3-Clause
"""A rank without torch: one end of a transport."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from shiftverbs.transport import Buffer, In, Out, Transport, run
from shiftverbs.transport.flow import Chunk, offer
from shiftverbs.transport.group import STAGE_BYTES, STAGES

assert "torch" not in sys.modules and "numpy" not in sys.modules

RANK, SIZE = 0, 1
t: Any = None


class DirectoryStore:
    """Keys as files."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def _file(self, key: str) -> Path:
        return self._directory / key.replace("/", "-")

    def set(self, key: str, value: bytes) -> None:
        """As Store.set."""
        beside = self._file(key).with_suffix(f".{RANK}")
        beside.write_bytes(value)
        beside.rename(self._file(key))

    def get(self, key: str, timeout_s: float) -> bytes:
        """As Store.get."""
        deadline = time.monotonic() + timeout_s
        while not self._file(key).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {key}")
            time.sleep(0.002)
        return self._file(key).read_bytes()


def start(rank: int, size: int, directory: str, timeout_s: float = 20.0) -> None:
    """Connect to the others."""
    global RANK, SIZE, t
    RANK, SIZE = rank, size
    t = Transport(DirectoryStore(directory), rank, size, timeout_s)


def soon(seconds: float = 10.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


def small(count: int, length: int) -> None:
    """As many messages to each peer, all before the first one is read; they come whole and in order."""
    peers = [r for r in range(SIZE) if r != RANK]
    for i in range(count):
        for peer in peers:
            t.send_small(peer, pattern(RANK, i, length))
    for peer in peers:
        for i in range(count):
            assert t.recv_small(peer, soon()) == pattern(peer, i, length), (peer, i)
    t.settle(soon())


def pattern(rank: int, number: int, length: int) -> bytes:
    """Bytes that only this message has."""
    return (f"{rank}/{number}.".encode() * (length // 3 + 1))[:length]


def ring(chunks: int, length: int) -> None:
    """So many chunks to the next rank's staging places, and as many to memory it offers; every byte is looked at."""
    after, before = t.link((RANK + 1) % SIZE), t.link((RANK - 1) % SIZE)
    source, target = Buffer(chunks * length), Buffer(chunks * length)
    for i in range(chunks):
        source.view[i * length : (i + 1) * length] = pattern(RANK, i, length)
    lease = t.lease()
    where = [lease.get(b.address, b.length, b) for b in (source, target)]
    seen: list[bytes] = []

    def look(place: int) -> bool:
        at = place % STAGES * STAGE_BYTES
        seen.append(bytes(t.stage.view[at : at + length]))
        return True

    pieces = [(source.address + i * length, length, where[0].lkey) for i in range(chunks)]
    out = [Chunk(piece, -1, 0, 0) for piece in pieces]
    out += [Chunk(piece, 0, i * length, chunks // 2) for i, piece in enumerate(pieces)]
    offer(t, before, [(target.address, where[1].rkey, target.length)])
    came = In(before, [look] * chunks + [None] * chunks)
    run(t, [came], [Out(after, out, came)], soon(30))
    lease.end()
    want = [pattern(before.rank, i, length) for i in range(chunks)]
    assert seen == want
    assert bytes(target.view) == b"".join(want)


def fails(call: Any) -> tuple[str, str, list[int], float]:
    """What call raises: its type, its text, its ranks, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), list(getattr(error, "ranks", ())), time.monotonic() - begin
    raise AssertionError("no error")
