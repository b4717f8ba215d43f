# SPDX-License-Identifier: BSD-3-Clause
"""The three kinds of traffic, each an ordinary verbs application: it knows nothing of failures.

Any error completion ends it (Broken), as it would end a real program. The receiver checks every byte of every
message; the sender checks that each signaled WR completes exactly once and in order.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from shiftverbs.commands.demo.endpoint import Endpoint, Peer, Verbs, wc_status_name
from shiftverbs.commands.demo.pattern import Ledger, Pattern

__all__ = ["KINDS", "Broken", "Read", "Send", "Traffic", "WriteImm"]

COUNTER = struct.Struct("<Q")


class Broken(Exception):
    """The connection is lost: what a verbs program sees when its NIC fails. The message is the error's name."""


class Traffic:
    """One side of a connection with its traffic.

    role: 0 on host a, which starts what has one direction only, 1 on host b. seed: of all contents.
    """

    #: False where this side does nothing but serve memory: its program may sleep.
    active = True

    def __init__(self, verbs: Verbs, device: str, role: int, seed: int) -> None:
        self.verbs = verbs
        self.role = role
        self.seed = seed
        self.sent = 0
        self.bytes = 0
        self.wc_faults = 0
        self.ledger = Ledger()
        self.first_fault: str | None = None
        self._signaled: deque[tuple[int, int]] = deque()  # (wr_id, WRs posted up to and including it)
        self._posted = 0
        self._retired = 0
        self._recv_flag = verbs.e.IBV_WC_RECV
        self.endpoint = self.open(device)

    def open(self, device: str) -> Endpoint:
        """Make the verbs objects."""
        raise NotImplementedError

    def start(self, peer: Peer) -> None:
        """Connect, and make what needs the peer's address."""
        raise NotImplementedError

    def step(self, sending: bool) -> bool:
        """Take what has completed, post what may be posted (new messages only if sending). True: something moved."""
        raise NotImplementedError

    @property
    def unconfirmed(self) -> int:
        """Signaled WRs that have not completed yet."""
        return len(self._signaled)

    def report(self) -> dict[str, object]:
        """Return the counters as a JSON object."""
        ledger = self.ledger
        return {
            "sent": self.sent,
            "expected": ledger.expected,
            "checked": ledger.checked,
            "bytes": self.bytes,
            "lost_of_expected": ledger.lost(ledger.expected),
            "duplicated": ledger.duplicated,
            "reordered": ledger.reordered,
            "corrupt": ledger.corrupt,
            "wc_faults": self.wc_faults,
            "unconfirmed": self.unconfirmed,
            "first_fault": self.first_fault or ledger.first_fault,
        }

    def close(self) -> None:
        """Destroy the verbs objects."""
        self.endpoint.close()

    # -- for the kinds of traffic

    def _check_status(self, wc: Any) -> None:
        if wc.status != self.verbs.e.IBV_WC_SUCCESS:
            raise Broken(wc_status_name(self.verbs, wc.status))

    def _post_send(self, wr: Any, count: int, signaled_wr_id: int | None) -> None:
        """Post a chain of count WRs; signaled_wr_id: of its last WR, where that is signaled."""
        try:
            self.endpoint.qp.post_send(wr)
        except self.verbs.error.PyverbsRDMAError as error:
            raise Broken(f"post_send: {error}") from error
        self._posted += count
        if signaled_wr_id is not None:
            self._signaled.append((signaled_wr_id, self._posted))

    def _post_recv(self, wr: Any) -> None:
        try:
            self.endpoint.qp.post_recv(wr)
        except self.verbs.error.PyverbsRDMAError as error:
            raise Broken(f"post_recv: {error}") from error

    def _send_completed(self, wc: Any) -> bool:
        """Match a send completion with the oldest signaled WR; False where it is not the one that is due."""
        if not self._signaled or self._signaled[0][0] != wc.wr_id:
            due = self._signaled[0][0] if self._signaled else "none"
            self._wc_fault(f"send WC with wr_id {wc.wr_id}, {due} was due")
            return False
        self._retired = self._signaled.popleft()[1]
        return True

    def _wc_fault(self, what: str) -> None:
        self.wc_faults += 1
        if self.first_fault is None:
            self.first_fault = what

    def _sge(self, offset: int, length: int) -> Any:
        mr = self.endpoint.mr
        return self.verbs.wr.SGE(mr.buf + offset, length, mr.lkey)

    def _check_message(self, pattern: Pattern, number: int, offset: int) -> None:
        fault = pattern.verify(number, self.endpoint.mr.read(pattern.size, offset))
        if fault is not None:
            self.ledger.damaged(fault)
        self.ledger.arrived(number)
        self.bytes += pattern.size


class WriteImm(Traffic):
    """Batches of unsignaled WRITEs closed by a signaled WRITE_WITH_IMM, in both directions (NCCL's Simple protocol).

    Message n goes to slot n % SLOTS of the receiver. It is overwritten only after the receiver checked it and said
    so by a WRITE_WITH_IMM of its own: a counter of checked messages, written to the sender's memory.
    """

    SLOTS = 8
    CHUNKS = 4
    CHUNK = 16 * 1024
    SIZE = CHUNKS * CHUNK
    # Immediate data: the number modulo NUMBERS (a multiple of SLOTS), or CREDIT and the credit's number modulo it.
    NUMBERS = 64
    CREDIT = 0x4000_0000
    SEND_DEPTH = SLOTS * CHUNKS + 32
    RECV_DEPTH = 4 * SLOTS
    # WR ids that say nothing: nobody looks at unsignaled ones.
    UNSIGNALED = 999

    def open(self, device: str) -> Endpoint:
        """Memory: SLOTS messages to send, SLOTS received, counters to send, the counter received."""
        self._received = self.SLOTS * self.SIZE
        self._counters = 2 * self._received
        self._counter = self._counters + self.NUMBERS * COUNTER.size
        length = self._counter + COUNTER.size
        endpoint = Endpoint(self.verbs, device, length, (self.SEND_DEPTH, self.RECV_DEPTH), one_cq=True)
        self._out = Pattern(self.seed, 10 + self.role, self.SIZE)
        self._in = Pattern(self.seed, 11 - self.role, self.SIZE)
        self.credits = Ledger()
        self._credits_sent = 0
        self._credited = 0
        self._granted = 0
        self._completed = 0
        return endpoint

    def start(self, peer: Peer) -> None:
        """Connect; make the WRs: a chain per number, a credit per number."""
        e, wr = self.verbs.e, self.verbs.wr
        self._receives = [wr.RecvWR(i, 1, [self._sge(self._counter, 8)]) for i in range(self.RECV_DEPTH)]
        self._batches = []
        self._links = []  # a chain holds no reference to its links
        self._credit_wrs = []
        for i in range(self.NUMBERS):
            slot = i % self.SLOTS * self.SIZE
            following = None
            for chunk in reversed(range(self.CHUNKS)):
                last = chunk == self.CHUNKS - 1
                offset = slot + chunk * self.CHUNK
                this = wr.SendWR(
                    i if last else self.UNSIGNALED,
                    num_sge=1,
                    sg=[self._sge(offset, self.CHUNK)],
                    opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM if last else e.IBV_WR_RDMA_WRITE,
                    imm_data=i if last else 0,
                    send_flags=e.IBV_SEND_SIGNALED if last else 0,
                )
                this.set_wr_rdma(peer.rkey, peer.address + self._received + offset)
                if following is not None:
                    this.next_wr = following
                following = this
                self._links.append(this)
            self._batches.append(following)
            credit = wr.SendWR(
                self.CREDIT + i,
                num_sge=1,
                sg=[self._sge(self._counters + i * COUNTER.size, COUNTER.size)],
                opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
                imm_data=self.CREDIT + i,
                send_flags=e.IBV_SEND_SIGNALED if self._credit_is_signaled(i) else 0,
            )
            credit.set_wr_rdma(peer.rkey, peer.address + self._counter)
            self._credit_wrs.append(credit)
        self.endpoint.connect(peer)
        for receive in self._receives:
            self._post_recv(receive)

    @staticmethod
    def _credit_is_signaled(i: int) -> bool:
        return i % 8 == 7

    def step(self, sending: bool) -> bool:
        """Completions first, then one credit for all that was checked, then new messages."""
        count, wcs = self.endpoint.send_cq.poll(16)
        for wc in wcs[:count]:
            self._check_status(wc)
            if wc.opcode & self._recv_flag:
                self._received_one(wc)
            elif self._send_completed(wc) and wc.wr_id < self.CREDIT:
                self._completed += 1
        moved = count > 0
        if self._granted < self.ledger.expected and self._room(1):
            self._grant()
        while (
            sending
            and self.sent - self._credited < self.SLOTS
            and self.sent - self._completed < self.SLOTS
            and self._room(self.CHUNKS)
        ):
            number = self.sent
            data = self._out.message(number)
            self.endpoint.mr.write(data, self.SIZE, number % self.SLOTS * self.SIZE)
            index = number % self.NUMBERS
            self._post_send(self._batches[index], self.CHUNKS, index)
            self.sent += 1
            moved = True
        return moved

    def _room(self, wrs: int) -> bool:
        return self._posted - self._retired + wrs <= self.SEND_DEPTH

    def _received_one(self, wc: Any) -> None:
        imm = wc.imm_data
        self._post_recv(self._receives[wc.wr_id])
        if imm & self.CREDIT:
            self.credits.arrived(self.credits.nearest(imm - self.CREDIT, self.NUMBERS))
            (counter,) = COUNTER.unpack(self.endpoint.mr.read(COUNTER.size, self._counter))
            if self._credited <= counter <= self.sent:
                self._credited = counter
            else:
                self.ledger.damaged(f"a credit of {counter} where {self._credited} to {self.sent} can be")
        else:
            number = self.ledger.nearest(imm, self.NUMBERS)
            self._check_message(self._in, number, self._received + number % self.SLOTS * self.SIZE)

    def _grant(self) -> None:
        index = self._credits_sent % self.NUMBERS
        self._granted = self.ledger.expected
        self.endpoint.mr.write(
            COUNTER.pack(self._granted), COUNTER.size, self._counters + index * COUNTER.size
        )
        signaled = self.CREDIT + index if self._credit_is_signaled(index) else None
        self._post_send(self._credit_wrs[index], 1, signaled)
        self._credits_sent += 1

    def report(self) -> dict[str, object]:
        """Add the credits: they are messages too, and each must arrive once and in order."""
        ledger = self.credits
        faults = ledger.duplicated + ledger.reordered + ledger.lost(ledger.expected)
        fault = f"credits: {ledger.first_fault}" if ledger.first_fault else None
        common = super().report()
        return common | {
            "credits_sent": self._credits_sent,
            "credits": ledger.expected,
            "credit_faults": faults,
            "first_fault": common["first_fault"] or fault,
        }


class Send(Traffic):
    """SEND/RECV from a to b; every fourth SEND is signaled, separate CQs. The number is in the message's header."""

    SIZE = 32 * 1024
    SEND_SLOTS = 16
    RECV_SLOTS = 32
    SIGNAL_EVERY = 4

    def open(self, device: str) -> Endpoint:
        """Memory: the slots of this side's role."""
        slots = self.RECV_SLOTS if self.role else self.SEND_SLOTS
        self._pattern = Pattern(self.seed, 20, self.SIZE)
        self._completed = 0
        depth = (self.SEND_SLOTS, self.RECV_SLOTS)
        return Endpoint(self.verbs, device, slots * self.SIZE, depth, one_cq=False)

    def start(self, peer: Peer) -> None:
        """Connect; post the receives."""
        e, wr = self.verbs.e, self.verbs.wr
        self._wrs: list[Any] = []
        if self.role:
            self._wrs = [
                wr.RecvWR(i, 1, [self._sge(i * self.SIZE, self.SIZE)]) for i in range(self.RECV_SLOTS)
            ]
        else:
            for i in range(self.SEND_SLOTS):
                self._wrs.append(
                    wr.SendWR(
                        i,
                        num_sge=1,
                        sg=[self._sge(i * self.SIZE, self.SIZE)],
                        opcode=e.IBV_WR_SEND,
                        send_flags=e.IBV_SEND_SIGNALED if self._is_signaled(i) else 0,
                    )
                )
        self.endpoint.connect(peer)
        if self.role:
            for receive in self._wrs:
                self._post_recv(receive)

    def _is_signaled(self, slot: int) -> bool:
        return slot % self.SIGNAL_EVERY == self.SIGNAL_EVERY - 1

    def step(self, sending: bool) -> bool:
        """One side sends, the other receives; each polls its CQ alone."""
        return self._receive() if self.role else self._send(sending)

    def _send(self, sending: bool) -> bool:
        count, wcs = self.endpoint.send_cq.poll(16)
        for wc in wcs[:count]:
            self._check_status(wc)
            if self._send_completed(wc):
                self._completed += self.SIGNAL_EVERY
        moved = count > 0
        while sending and self.sent - self._completed < self.SEND_SLOTS:
            slot = self.sent % self.SEND_SLOTS
            self.endpoint.mr.write(self._pattern.message(self.sent), self.SIZE, slot * self.SIZE)
            self._post_send(self._wrs[slot], 1, slot if self._is_signaled(slot) else None)
            self.sent += 1
            moved = True
        return moved

    def _receive(self) -> bool:
        count, wcs = self.endpoint.recv_cq.poll(16)
        for wc in wcs[:count]:
            self._check_status(wc)
            slot = wc.wr_id
            due = (self.ledger.checked + self.ledger.duplicated) % self.RECV_SLOTS
            if slot != due or wc.byte_len != self.SIZE:
                self._wc_fault(f"receive WC with wr_id {slot} and {wc.byte_len} bytes; {due} was due")
            offset = slot * self.SIZE
            claimed = self._pattern.claimed_number(self.endpoint.mr.read(64, offset))
            self._check_message(self._pattern, self.ledger.expected if claimed is None else claimed, offset)
            self._post_recv(self._wrs[slot])
        return count > 0


class Read(Traffic):
    """RDMA READ by a of memory that b serves; every second READ is signaled.

    b's memory has SERVED messages; READ number n fetches message n % SERVED to landing slot n % LANDING, which was
    overwritten with other bytes before, so that a READ that did not happen is seen.
    """

    SIZE = 32 * 1024
    SERVED = 61
    LANDING = 16
    SIGNAL_EVERY = 2

    def open(self, device: str) -> Endpoint:
        """Memory: the messages served, or the landing slots."""
        self.active = self.role == 0
        self._pattern = Pattern(self.seed, 30, self.SIZE)
        self._completed = 0
        slots = self.SERVED if self.role else self.LANDING
        endpoint = Endpoint(self.verbs, device, slots * self.SIZE, (self.LANDING, 1), one_cq=True)
        if self.role:
            for number in range(self.SERVED):
                endpoint.mr.write(self._pattern.message(number), self.SIZE, number * self.SIZE)
        return endpoint

    def start(self, peer: Peer) -> None:
        """Connect."""
        e, wr = self.verbs.e, self.verbs.wr
        self._wrs: list[Any] = []
        self._peer = peer
        for i in range(self.LANDING if self.role == 0 else 0):
            self._wrs.append(
                wr.SendWR(
                    i,
                    num_sge=1,
                    sg=[self._sge(i * self.SIZE, self.SIZE)],
                    opcode=e.IBV_WR_RDMA_READ,
                    send_flags=e.IBV_SEND_SIGNALED if self._is_signaled(i) else 0,
                )
            )
        self._poison = bytes(self.SIZE)
        self.endpoint.connect(peer)

    def _is_signaled(self, slot: int) -> bool:
        return slot % self.SIGNAL_EVERY == self.SIGNAL_EVERY - 1

    def step(self, sending: bool) -> bool:
        """Check what has landed; ask for more."""
        if self.role:
            return False
        count, wcs = self.endpoint.send_cq.poll(16)
        for wc in wcs[:count]:
            self._check_status(wc)
            if not self._send_completed(wc):
                continue
            for _ in range(self.SIGNAL_EVERY):
                number = self._completed
                offset = number % self.LANDING * self.SIZE
                fault = self._pattern.verify(number % self.SERVED, self.endpoint.mr.read(self.SIZE, offset))
                if fault is not None:
                    self.ledger.damaged(f"READ {number}: {fault}")
                self.ledger.arrived(number)
                self.bytes += self.SIZE
                self._completed += 1
        moved = count > 0
        # An unsignaled READ is never the last one: nothing would tell when its bytes are there.
        while (sending or self.sent % self.SIGNAL_EVERY) and self.sent - self._completed < self.LANDING:
            slot = self.sent % self.LANDING
            self.endpoint.mr.write(self._poison, self.SIZE, slot * self.SIZE)
            served = self.sent % self.SERVED * self.SIZE
            self._wrs[slot].set_wr_rdma(self._peer.rkey, self._peer.address + served)
            self._post_send(self._wrs[slot], 1, slot if self._is_signaled(slot) else None)
            self.sent += 1
            moved = True
        return moved


KINDS: dict[str, type[Traffic]] = {"write_imm": WriteImm, "send": Send, "read": Read}
