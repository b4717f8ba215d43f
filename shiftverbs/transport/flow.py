# SPDX-License-Identifier: BSD-3-Clause
"""Bulk data in chunks: what goes out, what comes in, what may only go out when something came in.

A collective is a list of outgoing and incoming chunks for each link that it uses; `run` moves them, as many at once as
there is room for. That a rank's order of reduction is the order of its list, and not that of arrival over several
links, is what makes results the same on every run.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shiftverbs.transport.group import MARK, Transport
from shiftverbs.transport.link import CHUNK_MARK, Kind, Link

#: Address, rkey and bytes of memory that chunks may be written to.
PLACE = struct.Struct("<QIQ")
#: Called when a chunk has come; place: which staging place it is in. Returns whether the place is free again.
Arrived = Callable[[int], bool]


class Chunk(NamedTuple):
    """One outgoing chunk.

    :param source: address, length in bytes, lkey
    :param place: which of the receiver's places (`offer`) it goes to; negative: to a staging place
    :param offset: bytes into that place
    :param need: how many incoming chunks must have been taken in before
    :param frees: it leaves from a staging place, which is free when it has been sent
    """

    source: tuple[int, int, int]
    place: int
    offset: int
    need: int
    frees: bool = False


class _Place:
    """A staging place in use: until a link's count of completions is sent_at; negative: nobody knows yet."""

    __slots__ = ("link", "sent_at")

    def __init__(self) -> None:
        self.link: Link | None = None
        self.sent_at = -1

    def is_free(self) -> bool:
        """Whether it can be written to again."""
        return self.sent_at == 0 or (self.link is not None and self.link.completed >= self.sent_at)


class In:
    """Chunks that come over a link.

    :param link: None: from nobody, and there are none
    :param items: for each chunk that comes to a staging place, what is done with it; None for one that comes to the
        memory offered
    """

    __slots__ = ("_held", "_places", "done", "items", "link")

    def __init__(self, link: Link, items: Sequence[Arrived | None]) -> None:
        self.link, self.items, self.done = link, items, 0
        # The staging places in use, in order, since they are freed in order; and those of them not sent on yet.
        self._places: deque[_Place] = deque()
        self._held: deque[_Place] = deque()

    def take(self, transport: Transport) -> bool:
        """Take in what has come. Returns whether there was something. Raises ValueError for another collective's."""
        link, items, before = self.link, self.items, self.done
        while link.chunks and self.done < len(items):
            if link.chunks.popleft() != transport.mark & CHUNK_MARK:
                raise transport.disagrees(link.rank)
            act = items[self.done]
            self.done += 1
            if act is not None:
                place = link.places
                link.places += 1
                used = _Place()
                self._places.append(used)
                if act(place):
                    used.sent_at = 0
                else:
                    self._held.append(used)
        places = self._places
        while places and places[0].is_free():
            places.popleft()
            link.free_stage()
        return self.done != before

    def sent_on(self, link: Link, at: int) -> None:
        """The oldest place not sent on is sent over a link now; at: the count of completions when that is done."""
        used = self._held.popleft()
        used.link, used.sent_at = link, at

    @property
    def holds(self) -> bool:
        """Whether staging places wait for the completion of a send."""
        return bool(self._places)

    @property
    def is_over(self) -> bool:
        """Nothing more comes, and no staging place is in use."""
        return self.done == len(self.items) and not self._places


class Out:
    """Chunks that go over a link.

    :param after: where the chunks come from that `Chunk.need` counts
    """

    __slots__ = ("after", "items", "last", "link", "next", "places")

    def __init__(self, link: Link, items: Sequence[Chunk], after: In | None = None) -> None:
        self.link, self.items, self.after = link, items, after
        self.next = self.last = 0
        self.places: list[tuple[int, int, int]] | None = None

    def post(self, transport: Transport) -> bool:
        """Post what can be posted. Returns whether it was something.

        :raises ValueError: the peer is in another collective, or has not the memory for it
        """
        link, items, after, before = self.link, self.items, self.after, self.next
        while self.next < len(items) and link.room():
            source, place, offset, need, frees = items[self.next]
            if after is not None and need > after.done:
                break
            if place < 0:
                if not link.stages:
                    break
                target = link.stage_target()
            else:
                if self.places is None:
                    if not link.ready:
                        break
                    ready = transport.unmarked(link.rank, link.ready.popleft())
                    self.places = list(PLACE.iter_unpack(ready))
                address, rkey, length = self.places[place]
                if offset + source[1] > length:
                    raise transport.disagrees(link.rank)
                target = (address + offset, rkey)
            self.last = link.write(Kind.CHUNK, transport.mark & CHUNK_MARK, source, target)
            self.next += 1
            if frees:
                assert after is not None
                after.sent_on(link, self.last)
        return self.next != before

    @property
    def is_over(self) -> bool:
        """All is sent and acknowledged: its memory can be changed."""
        return self.next == len(self.items) and self.link.completed >= self.last


def offer(transport: Transport, link: Link, places: Iterable[tuple[int, int, int]]) -> None:
    """Tell a peer where the chunks of its next `Out` go: address, rkey and bytes of each place."""
    link.send(Kind.READY, MARK.pack(transport.mark) + b"".join(PLACE.pack(*place) for place in places))


def run(transport: Transport, ins: Sequence[In], outs: Sequence[Out], deadline: float) -> None:
    """Until all chunks have come and gone.

    :param deadline: in time.monotonic()'s seconds
    :raises PeerTimeout: it passed
    :raises PeerFailed, PeerLeft: a peer is gone
    :raises ValueError: a peer is in another collective
    """

    everything: list[In | Out] = [*ins, *outs]
    waits_for_sends = False

    def moved() -> bool:
        some = False
        for incoming in ins:
            some = incoming.take(transport) or some
        for outgoing in outs:
            some = outgoing.post(transport) or some
        return some

    def over() -> bool:
        return all(one.is_over for one in everything)

    def missing() -> set[int]:
        return {one.link.rank for one in everything if not one.is_over}

    def step() -> bool:
        nonlocal waits_for_sends
        some = moved()
        if over():
            return True
        waits_for_sends = any(
            one.next == len(one.items) or one.link.posted - one.link.completed > 64 for one in outs
        )
        return some

    transport.check()
    while not over():
        if not step():
            transport.wait(step, deadline, missing, sends=any(one.holds for one in ins) or waits_for_sends)
        else:
            transport.progress()
            transport.retire()
            transport.flush()
