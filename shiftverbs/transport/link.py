# SPDX-License-Identifier: BSD-3-Clause
"""One peer: its QP, the credits both ways, and what of its messages has not been consumed.

Every message is one WRITE with immediate. Its data goes to a slot, to a staging place, or to memory that the receiver
named in a message of its own (READY); the immediate says which, and gives credits back:

    bits 31–29  what it is (Kind)
    bits 28–21  how many messages of the other direction were taken in since the last time
    bits 20–15  how many staging places were
    bits 14–0   the length in the slot, or what else the kind needs

There are as many slots as credits, and message number s of a direction has slot s mod SLOTS, at both ends: the credit
that allows message s says that message s - SLOTS was copied out of it. CREDIT and NOTICE take no credit and no slot;
the receives posted beyond SLOTS are theirs.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, NamedTuple

from shiftverbs.transport.errors import PeerFailed, PeerLeft, PeerTimeout, TransportError
from shiftverbs.transport.memory import Buffer
from shiftverbs.transport.verbs import SGE, RecvWR, SendWR, e

SLOTS = 32
SLOT_BYTES = 16 * 1024
#: What a CHUNK can tell of its collective's mark: the bits of its number.
CHUNK_MARK = 0x7FFF
#: What may come without a credit: each end sends a CREDIT for half of either kind of credit at the earliest.
SPARE_RECEIVES = 16
RECEIVES = SLOTS + SPARE_RECEIVES
SENDS = 128
#: A send without a signal is retired by a later one: every so many are signaled.
SIGNAL_EVERY = 8
#: The slots of one link, and behind them a place for what has no content.
REGION_BYTES = (SLOTS + 1) * SLOT_BYTES
NOTHING = SLOTS * SLOT_BYTES
#: Credits fit into their bits of the immediate.
MOST_CREDITS, MOST_STAGES = 255, 63
LEFT = 0x7FFF
GAVE_UP = 0x4000


class Kind(enum.IntEnum):
    """What a message is."""

    CREDIT = 0  # nothing but credits
    SMALL = 1  # of a collective, in its slot
    CHUNK = 2  # of a collective, in a staging place or in the memory of a READY
    READY = 3  # the memory that chunks are to be written to
    MESSAGE = 4  # for the transport's user, in its slot
    DATA = 5  # for the transport's user: a chunk was written; the number is the user's
    NOTICE = 7  # LEFT, or a rank that failed (GAVE_UP: that is waited for no longer)


class Message(NamedTuple):
    """Of kind MESSAGE (data) or DATA (number), from rank."""

    rank: int
    data: bytes | None
    number: int


class Link:
    """The RC QP to one peer. It belongs to its transport, and to the transport's thread.

    :param rank: of the peer
    :param qp: in INIT
    :param number: which of the transport's links this is: the wr_id of its WRs
    :param incoming, outgoing: (buffer, offset) where its slots are; mrs: the regions of these two
    """

    def __init__(
        self,
        rank: int,
        qp: Any,
        number: int,
        incoming: tuple[Buffer, int],
        outgoing: tuple[Buffer, int],
        mrs: tuple[Any, Any],
    ) -> None:
        self.rank, self.qp, self.number = rank, qp, number
        self._in = incoming[0].view[incoming[1] : incoming[1] + REGION_BYTES]
        self._out = outgoing[0].view[outgoing[1] : outgoing[1] + REGION_BYTES]
        self._out_address, self._out_lkey = outgoing[0].address + outgoing[1], mrs[1].lkey
        self._slots_address = self._slots_rkey = 0
        self.stage_address = self.stage_rkey = self.stage_bytes = 0
        self.credits = SLOTS
        self.stages = 0
        self._sent = self._received = 0
        self._owed = self._stages_owed = self._stages_all = 0
        self._waiting: deque[tuple[Kind, bytes]] = deque()
        #: WRs posted, WRs known to be complete, and the number of the last one with a signal
        self.posted = self.completed = 0
        self._signaled = 0
        self.small: deque[bytes] = deque()
        self.ready: deque[bytes] = deque()
        #: the marks of the chunks that came
        self.chunks: deque[int] = deque()
        self.places = 0  # staging places that its chunks used so far
        self.left = False
        self._receive = RecvWR(number, 1, [SGE(incoming[0].address + incoming[1] + NOTHING, 8, mrs[0].lkey)])
        for _ in range(RECEIVES):
            qp.post_recv(self._receive)

    def connected(self, slots: tuple[int, ...], stage: tuple[int, ...], own_stages: int) -> None:
        """The peer is known.

        :param slots: address and rkey of its slots for us
        :param stage: address, rkey, places and bytes of each of its staging places for us
        :param own_stages: how many we have for it
        """
        self._slots_address, self._slots_rkey = slots
        self.stage_address, self.stage_rkey, self.stages, self.stage_bytes = stage
        self._stages_all = own_stages
        self._stage_count = self.stages

    # Sending

    def room(self) -> bool:
        """Whether a chunk can be posted now."""
        return self.credits > 0 and not self._waiting and self.posted - self.completed < SENDS - 2

    def send(self, kind: Kind, data: bytes) -> None:
        """Send a message of at most SLOT_BYTES. It waits its turn where there is no credit."""
        if len(data) > SLOT_BYTES:
            raise ValueError(f"a message has at most {SLOT_BYTES} bytes")
        if self.room():
            self._send(kind, data)
        else:
            self._waiting.append((kind, data))

    def _send(self, kind: Kind, data: bytes) -> None:
        at = self._sent % SLOTS * SLOT_BYTES
        length = len(data)
        if length:
            self._out[at : at + length] = data
        self._sent += 1
        self.credits -= 1
        # A length of SLOT_BYTES fits into the bits that it has.
        self._post(
            kind,
            length,
            self._out_address + at,
            length or 8,
            self._out_lkey,
            self._slots_address + at,
            self._slots_rkey,
        )

    def write(self, kind: Kind, number: int, source: tuple[int, int, int], target: tuple[int, int]) -> int:
        """Post a chunk; `room` must hold.

        :param number: for the kind, at most 15 bits
        :param source: address, length in bytes, and lkey
        :param target: address and rkey
        :return: the value of `completed` from which on its memory is free
        """
        self._sent += 1
        self.credits -= 1
        return self._post(kind, number, *source, *target, signal=True)

    def stage_target(self) -> tuple[int, int]:
        """The peer's next staging place, for `write`; `stages` must be more than none."""
        at = self.places_used % self._stage_count * self.stage_bytes
        self.places_used += 1
        self.stages -= 1
        return self.stage_address + at, self.stage_rkey

    places_used = 0

    def _post(
        self,
        kind: Kind,
        number: int,
        address: int,
        length: int,
        lkey: int,
        remote: int,
        rkey: int,
        signal: bool = False,
    ) -> int:
        owed, stages = min(self._owed, MOST_CREDITS), min(self._stages_owed, MOST_STAGES)
        self._owed -= owed
        self._stages_owed -= stages
        self._post_wr(e.IBV_WR_RDMA_WRITE_WITH_IMM, kind << 29 | owed << 21 | stages << 15 | number,
                      address, length, lkey, remote, rkey, signal)  # fmt: skip
        return self.posted

    def _post_wr(
        self,
        opcode: int,
        imm: int,
        address: int,
        length: int,
        lkey: int,
        remote: int,
        rkey: int,
        signal: bool,
    ) -> None:
        self.posted += 1
        flags = 0
        if signal or self.posted - self._signaled >= SIGNAL_EVERY:
            flags = e.IBV_SEND_SIGNALED
            self._signaled = self.posted
        sge = SGE(address, length, lkey)
        wr = SendWR(
            self.number << 32 | self.posted & 0xFFFFFFFF,
            num_sge=1,
            imm_data=imm,
            sg=[sge],
            opcode=opcode,
            send_flags=flags,
        )
        wr.set_wr_rdma(rkey, remote)
        self.qp.post_send(wr)
        wr.close()  # or pyverbs leaks what is behind them
        sge.close()

    def flush(self) -> None:
        """Send what waited for credits, and give back the peer's where it may wait for them."""
        while self._waiting and self.credits > 0 and self.posted - self.completed < SENDS - 2:
            self._send(*self._waiting.popleft())
        if self._owed * 2 >= SLOTS or self._stages_owed > 1 or 0 < self._stages_all == self._stages_owed:
            self._without_credit(Kind.CREDIT, 0)

    def notice(self, number: int) -> None:
        """Send a NOTICE, without which the peer would find out later. LEFT, or a rank, with GAVE_UP or without.

        It has a signal, so that who leaves after it hears when all before it has arrived.
        """
        self._without_credit(Kind.NOTICE, number, signal=True)

    def _without_credit(self, kind: Kind, number: int, signal: bool = False) -> None:
        if self.posted - self.completed < SENDS:
            self._post(
                kind,
                number,
                self._out_address + NOTHING,
                8,
                self._out_lkey,
                self._slots_address + NOTHING,
                self._slots_rkey,
                signal,
            )

    def probe(self) -> None:
        """Have the NIC find out whether the peer is there, unless something is outstanding that does.

        What was posted without a signal after the last one says nothing: it may be complete, and nobody knows.
        """
        if self.completed >= self._signaled and self.posted - self.completed < SENDS:
            self._post_wr(e.IBV_WR_RDMA_WRITE, 0, self._out_address + NOTHING, 8, self._out_lkey,
                          self._slots_address + NOTHING, self._slots_rkey, True)  # fmt: skip

    def retired(self, number: int) -> None:
        """A send completed; number: the low 32 bits of how many had been posted with it."""
        self.completed += (number - self.completed) & 0xFFFFFFFF

    # Receiving

    def arrived(self, imm: int) -> Message | int | None:
        """Take in a message.

        :return: what is for the transport's user; of a NOTICE the number
        """
        self.qp.post_recv(self._receive)
        self.credits += imm >> 21 & 0xFF
        self.stages += imm >> 15 & 0x3F
        kind, number = imm >> 29, imm & 0x7FFF
        if kind == Kind.CREDIT:
            return None
        if kind == Kind.NOTICE:
            self.left = self.left or number == LEFT
            return number
        at = self._received % SLOTS * SLOT_BYTES
        self._received += 1
        self._owed += 1
        if kind == Kind.CHUNK:
            self.chunks.append(number)
        elif kind == Kind.DATA:
            return Message(self.rank, None, number)
        else:
            data = bytes(self._in[at : at + number])
            if kind == Kind.SMALL:
                self.small.append(data)
            elif kind == Kind.READY:
                self.ready.append(data)
            else:
                return Message(self.rank, data, 0)
        return None

    def free_stage(self) -> None:
        """The oldest staging place in use can be written to again."""
        self._stages_owed += 1

    def check(self) -> None:
        """Raise PeerLeft if it left, and nothing more can come."""
        if self.left:
            raise PeerLeft(f"rank {self.rank} has left", [self.rank])

    @property
    def is_waiting(self) -> bool:
        """Whether a message waits for a credit."""
        return bool(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether there is something to send, or sent and not complete."""
        return bool(self._waiting) or self.posted != self.completed


def told(number: int, by: int) -> TransportError:
    """What a NOTICE about a failed rank means; by: who said so."""
    rank = number & ~GAVE_UP
    if number & GAVE_UP:
        return PeerTimeout(f"rank {by} waited for rank {rank} for too long", [rank])
    return PeerFailed(f"rank {rank} failed, says rank {by}", [rank])
