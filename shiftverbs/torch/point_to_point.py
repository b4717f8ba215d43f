# SPDX-License-Identifier: BSD-3-Clause
"""send and recv, beside the collectives: any number at once, matched by rank and tag in the order they were called.

The receiver names its memory (OPEN), and the sender writes to it: small tensors as a message (CONTENT), larger ones as
chunks. A sender that nobody has named memory for says so (NOTE), for who receives from any rank.
"""

from __future__ import annotations

import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from shiftverbs.torch.tensors import from_bytes, nbytes, region, to_bytes
from shiftverbs.torch.work import ShiftWork
from shiftverbs.transport import SLOT_BYTES, Lease, Message, PeerTimeout, Transport
from shiftverbs.transport.group import STAGE_BYTES
from shiftverbs.transport.link import Kind

_OPEN = struct.Struct("<BqHQQI")  # what, tag, number of the receive, bytes, address, rkey
_NOTE = struct.Struct("<Bqq")  # what, tag, which send of this tag
_CONTENT = struct.Struct("<BHB")  # what, number of the receive, whether it is an error
OPEN, NOTE, CONTENT = 1, 2, 3
#: What fits into a slot behind the head.
SMALL_BYTES = SLOT_BYTES - _CONTENT.size
NUMBERS = 1 << 15


class Send:
    """One send on its way."""

    def __init__(self, tensor: Any, rank: int, tag: int, work: ShiftWork, deadline: float) -> None:
        self.tensor, self.rank, self.tag, self.work, self.deadline = tensor, rank, tag, work, deadline
        self.pieces: deque[tuple[int, int]] = deque()
        self.number = self.address = self.rkey = self.last = 0
        self.source = (0, 0)
        self.lease: Lease | None = None


class Receive:
    """One receive on its way. rank: None for any."""

    def __init__(self, tensor: Any, rank: int | None, tag: int, work: ShiftWork, deadline: float) -> None:
        self.tensor, self.rank, self.tag, self.work, self.deadline = tensor, rank, tag, work, deadline
        self.missing = 0
        self.lease: Lease | None = None


class PointToPoint:
    """All sends and receives of one transport. done: called when one has ended."""

    def __init__(
        self, transport: Transport, done: Callable[[ShiftWork, BaseException | None, int | None], None]
    ) -> None:
        self._transport, self._done = transport, done
        self._sends: defaultdict[tuple[int, int], deque[Send]] = defaultdict(deque)
        self._opened: defaultdict[tuple[int, int], deque[tuple[int, int, int, int]]] = defaultdict(deque)
        self._writing: list[Send] = []
        self._receives: dict[int, Receive] = {}
        self._any: deque[Receive] = deque()
        # How many sends of a rank's tag were noted, and how many receives were opened to it.
        self._noted: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._open_count: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._send_count: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._number = 0
        self._all: set[Send | Receive] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def deadline(self) -> float:
        """The first one. In time.monotonic()'s seconds."""
        return min(one.deadline for one in self._all)

    def ranks(self) -> list[int]:
        """Whom it waits for."""
        everybody = [link.rank for link in self._transport.links]
        return sorted({r for one in self._all for r in ([one.rank] if one.rank is not None else everybody)})

    def send(self, one: Send) -> None:
        """Begin."""
        self._all.add(one)
        key = (one.rank, one.tag)
        number = self._send_count[key]
        self._send_count[key] += 1
        self._sends[key].append(one)
        if not self._opened[key]:
            self._message(one.rank, _NOTE.pack(NOTE, one.tag, number))
        self._match(key)

    def receive(self, one: Receive) -> None:
        """Begin."""
        self._all.add(one)
        if one.rank is None:
            self._any.append(one)
            self._match_any()
        else:
            self._open(one)

    def _message(self, rank: int, data: bytes) -> None:
        self._transport.link(rank).send(Kind.MESSAGE, data)

    def _open(self, one: Receive) -> None:
        assert one.rank is not None
        while self._number in self._receives:
            self._number = (self._number + 1) % NUMBERS
        number, self._number = self._number, (self._number + 1) % NUMBERS
        self._receives[number] = one
        self._open_count[one.rank, one.tag] += 1
        length, address, rkey = nbytes(one.tensor), 0, 0
        one.missing = -(-length // STAGE_BYTES)
        if length > SMALL_BYTES:
            one.lease = self._transport.lease()
            address, _, rkey = region(one.lease, one.tensor)
        self._message(one.rank, _OPEN.pack(OPEN, one.tag, number, length, address, rkey))

    def _match_any(self) -> None:
        for one in list(self._any):
            for (rank, tag), noted in self._noted.items():
                if tag == one.tag and noted > self._open_count[rank, tag]:
                    self._any.remove(one)
                    one.rank = rank
                    self._open(one)
                    break

    def _match(self, key: tuple[int, int]) -> None:
        sends, opened = self._sends[key], self._opened[key]
        while sends and opened:
            one = sends.popleft()
            number, length, one.address, one.rkey = opened.popleft()
            one.number = number
            ours = nbytes(one.tensor)
            if ours != length:
                text = f"rank {one.rank} receives {length} bytes, rank {self._transport.rank} sends {ours}"
                self._message(one.rank, _CONTENT.pack(CONTENT, number, 1) + text.encode())
                self._end(one, ValueError(text))
            elif length <= SMALL_BYTES:
                self._message(one.rank, _CONTENT.pack(CONTENT, number, 0) + to_bytes(one.tensor))
                self._end(one)
            else:
                one.lease = self._transport.lease()
                address, lkey, _ = region(one.lease, one.tensor)
                one.source = (address, lkey)
                one.pieces.extend((at, min(STAGE_BYTES, length - at)) for at in range(0, length, STAGE_BYTES))
                self._writing.append(one)

    def take(self, message: Message) -> None:
        """What has come for us."""
        if message.data is None:
            one = self._receives[message.number]
            one.missing -= 1
            if not one.missing:
                del self._receives[message.number]
                self._end(one, source=message.rank)
        elif message.data[0] == OPEN:
            _, tag, number, length, address, rkey = _OPEN.unpack(message.data)
            self._opened[message.rank, tag].append((number, length, address, rkey))
            self._match((message.rank, tag))
        elif message.data[0] == NOTE:
            _, tag, which = _NOTE.unpack(message.data)
            self._noted[message.rank, tag] = which + 1
            self._match_any()
        else:
            _, number, failed = _CONTENT.unpack_from(message.data)
            content = message.data[_CONTENT.size :]
            receive = self._receives.pop(number)
            if failed:
                self._end(receive, ValueError(content.decode()))
            else:
                from_bytes(receive.tensor, content)
                self._end(receive, source=message.rank)

    def progress(self) -> None:
        """Write what can be written. Raises PeerTimeout for one that is too late."""
        if not self._all:
            return
        for one in list(self._writing):
            link = self._transport.link(one.rank)
            while one.pieces and link.room():
                at, length = one.pieces.popleft()
                source = (one.source[0] + at, length, one.source[1])
                one.last = link.write(Kind.DATA, one.number, source, (one.address + at, one.rkey))
            if not one.pieces and link.completed >= one.last:
                self._writing.remove(one)
                self._end(one)
        now = time.monotonic()
        for late in self._all:
            if late.deadline < now:
                where = "any rank" if late.rank is None else f"rank {late.rank}"
                verb = "send to" if isinstance(late, Send) else "receive from"
                raise PeerTimeout(
                    f"the {verb} {where} was not answered before the timeout was over",
                    [] if late.rank is None else [late.rank],
                )

    def is_writing(self) -> bool:
        """Whether completions of sends matter."""
        return bool(self._writing)

    def _end(
        self, one: Send | Receive, error: BaseException | None = None, source: int | None = None
    ) -> None:
        if one.lease is not None:
            one.lease.end()
        self._all.discard(one)
        self._done(one.work, error, source)

    def fail(self, error: BaseException) -> None:
        """All of them have failed."""
        for one in list(self._all):
            self._end(one, error)
        self._writing.clear()
        self._receives.clear()
        self._sends.clear()
        self._any.clear()
