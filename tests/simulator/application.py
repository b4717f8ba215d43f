# SPDX-License-Identifier: BSD-3-Clause
"""What a program does with one QP: posts its plan, keeps receives posted, polls when it gets round to it."""

from __future__ import annotations

import errno
from collections import Counter, deque
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator.clock import MS, SECOND, US
from simulator.endpoint import Endpoint
from simulator.host import ALL_RIGHTS, Cq, OwnMr
from simulator.memory import WORD
from simulator.rnic import ERR, NAKS, RESET, RESPONDED, RTS, WITH_IMM
from simulator.rnic import WC_RECV_RDMA as RECV_RDMA

from shiftverbs.native.ibv import QpAttrMask, WcStatus
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.wr import SGE, RecvWR, SendWR

CELLS = 12  # memory of each side that the peer reaches: the last four are for atomics
ATOMIC_CELLS = range(8, 12)
MOST_SENDS, MOST_RECEIVES = 600, 1200
#: Words of one endpoint's memory: cells, a slot for each send, one for each receive, and room for cells that move.
WORDS = CELLS + MOST_SENDS + MOST_RECEIVES + 4 * CELLS
OPCODES = {"WRITE": 0, "WRITE_IMM": 1, "SEND": 2, "SEND_IMM": 3, "READ": 4, "CAS": 5, "FADD": 6}
RDMA = ("WRITE", "WRITE_IMM", "READ")
#: These reach no memory that they name.
MESSAGES = ("SEND", "SEND_IMM")
FENCE, SIGNALED, INLINE = 1, 2, 8
RECV_ID = 1 << 32
OK, FLUSHED = int(WcStatus.SUCCESS), int(WcStatus.WR_FLUSH_ERR)
RETRY_EXC = int(WcStatus.RETRY_EXC_ERR)
NO_RECEIVE = int(NAKS["op"])


class Wr:
    """A send WR of the application. data: what its memory held when it was posted; cell: of the peer's.

    slot: the word of its memory; shared: a READ and a WR before it have the same. target: the address that it means.
    compare: what a CAS goes by.
    """

    __slots__ = (
        "bad", "cell", "compare", "data", "denied", "fence", "index", "inline", "opcode", "posted_ns", "ref", "shared",
        "side", "signaled", "slot", "target",
    )  # fmt: skip

    def __init__(
        self,
        side: str,
        index: int,
        opcode: str,
        cell: int,
        data: int,
        signaled: bool,
        fence: bool,
        inline: bool,
    ) -> None:
        self.side, self.index, self.opcode, self.cell, self.data = side, index, opcode, cell, data
        self.signaled, self.fence, self.inline = signaled, fence, inline
        self.shared = False
        self.slot = index
        self.posted_ns = 0
        self.target = 0
        self.ref = 0
        self.compare = 0
        self.bad = False  # it names no memory of the peer's
        self.denied = False  # the peer has withdrawn the right that it needs

    def __repr__(self) -> str:
        return f"{self.side}{self.index} {self.opcode}"


class Application:
    """One program with one QP. receives: how many it keeps posted."""

    def __init__(self, endpoint: Endpoint, cq: Cq, recv_cq: Cq) -> None:
        self.endpoint = endpoint
        self.device = endpoint.device
        self.cq = cq
        self.number = number = len(endpoint.net.apps_of(endpoint.device.name))
        for each in {cq, recv_cq}:
            each.apps[number] = self
        self.cqs = (cq,) if cq is recv_cq else (cq, recv_cq)  # in the order in which it polls them
        self.apart = False  # each at a time of its own
        self._turn = 0
        self._missed = False  # something came while it was at only one of them
        self.host = endpoint.host
        self.net = endpoint.net
        self.clock = endpoint.net.clock
        self.memory = endpoint.device.memory
        self.peer: Application
        self.name = f"{self.device.name}{number or ''}"
        self.poll_ns = 5 * US
        self.at_start = endpoint.receives  # so many receives are posted first
        self.plan: deque[Wr] = deque()
        self.posted: list[Wr] = []
        self.by_ref: dict[int, Wr] = {}
        self.wcs: list[tuple[str, Any, int]] = []
        # By which receive, and what: a word, immediate data, or both.
        self.received: list[tuple[int, Any]] = []
        self.reads: list[tuple[Wr, int]] = []
        self.unread: deque[Wr] = deque()  # READs and atomics whose results are not there yet
        self.complete = 0  # so many of its sends have ended, as it was told
        self.next_recv = 0
        self.poll_due = False
        self.failed = False
        self.left = False  # it closed its QP, or moved it to ERR or RESET
        self.stopped = False  # it was in SQD: nothing is protected any more
        self.was_reset = False
        self.refused = False  # it asked for ERR or RESET in vain
        self.refused_reset = False
        self._reset_due = False
        self.told = 0  # how many WCs it had when it was reset
        self.late: list[tuple[int, int]] = []  # of WCs that came after it was closed: wr_id and status
        self.closed = False
        self.posts_on = False  # whatever has failed
        self.retry_due = False
        self.retry_ns = 100 * US
        self.backlog = 0
        self.ends: int | None = None  # when it first saw an error or a flush
        self.flushed: int | None = None  # when it first saw a flush, or an error that is not its own doing
        self.rights = ALL_RIGHTS
        self.withheld: tuple[str, ...] = ()  # operations that the peer has been told to do no more
        self.withdrawn_ns: int | None = None  # since when it has no right to them
        self.trespasses = False  # it does what it has no right to
        self.renewed = False  # what it sends from, and receives into, is registered more than once
        self.renewing = False  # the peer is to use nothing of ours
        self.own_error: str | None = None  # what it has done that ends its QP, as with plain verbs
        self.answers = False  # it posts one for each message that comes, and knows by that what was executed
        self.begins, self.window_size = False, 0  # with so many
        self.refused_room = 0  # how often it was told ENOMEM where it knew of room
        # What these cells of the peer's have when all is executed.
        self._atomics: Counter[int] = Counter()
        self._cells = self.first_word = number * WORDS
        self._sends = self.first_word + CELLS
        self._recvs = self._sends + MOST_SENDS
        self._spare = [self._recvs + MOST_RECEIVES + n * CELLS for n in range(4)]
        endpoint.app = self
        endpoint.look = self.look
        endpoint.begin = self.start
        # Cells begin at offset 0 for whoever comes with an rkey: one that means other memory hits that.
        self.window = OwnMr(self.device, self.memory.address(self._cells), CELLS, ALL_RIGHTS, iova=0)
        self.buffers = OwnMr(self.device, self.memory.address(self._sends), MOST_SENDS + MOST_RECEIVES, 1)

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def cells(self) -> list[int]:
        """What the peer has made of our memory."""
        return [self.memory.words[self._cells + n] for n in range(CELLS)]

    def cell_address(self, cell: int) -> int:
        return self.memory.address(self._cells + cell)

    def slot(self, wr: Wr) -> int:
        """The word of a WR's memory."""
        return self._sends + wr.slot

    def renew_window(self, move: bool) -> None:
        """Deregister what the peer reaches, and register it, or other memory with the same content, anew.

        The peer has nothing under way there: it has been told, as programs do. One that has seen an error does not
        know: what its NIC has sent may still arrive, as with plain verbs.
        """
        nic = self.endpoint.hardware.nic
        used = self.peer.failed or self.peer.uses_window()
        if self.at_its_end or used or self.endpoint.blocked or nic.dead or nic.failing:
            return
        self.renewing = True
        self.window.close()
        if move:
            new = self._spare.pop(0)
            self._spare.append(self._cells)
            for n in range(CELLS):
                self.memory.words[new + n] = self.memory.words[self._cells + n]
                self.memory.words[self._cells + n] = 0
            self.net.forbid(self.device.name, self._cells, CELLS)
            self._cells = new
            self.net.allow(self.device.name, new, CELLS)
        self._register_window()

    def _register_window(self) -> None:
        """Again and again where its NIC has no room for it; never where that has died."""
        nic = self.endpoint.hardware.nic
        if nic.failing and not nic.dead:
            self.clock.later(5 * MS, self._register_window)
        elif not nic.dead:
            self.window = OwnMr(self.device, self.memory.address(self._cells), CELLS, ALL_RIGHTS, iova=0)
            self.renewing = False

    def renew_buffers(self) -> None:
        """From now on the memory of sends and receives has other keys: it is registered once more."""
        nic = self.endpoint.hardware.nic
        if not (self.at_its_end or self.own_error or self.endpoint.blocked or nic.dead or nic.failing):
            words = MOST_SENDS + MOST_RECEIVES
            self.renewed = True
            self.buffers = OwnMr(self.device, self.memory.address(self._sends), words, 1)

    def uses_window(self) -> bool:
        """Whether a WR of ours may still reach the peer's cells."""
        seen = max((wr.index for queue, wr, _ in self.wcs if queue == "send"), default=-1)
        # Not all of its plan was posted: an exception tells that a device is gone.
        return any(wr.opcode not in MESSAGES and wr.index > seen for wr in self.posted)

    def has_under_way(self, kinds: tuple[str, ...]) -> bool:
        """Whether it does not know of the end of some WR of these."""
        return any(wr.opcode in kinds and wr.index >= self.complete for wr in self.posted)

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def at_its_end(self) -> bool:
        return self.closed or ((self.left or self.failed) and not self.posts_on)

    def start(self) -> None:
        """Post the first receives."""
        with self.host:
            for _ in range(self.at_start):
                self.post_recv()

    def post_recv(self) -> None:
        if self.failed or self.left or self.next_recv >= MOST_RECEIVES:
            return
        number = self.next_recv
        address = self.memory.address(self._recvs + number)
        wr_id = RECV_ID | self.number << 20 | number
        wr = RecvWR(wr_id=wr_id, num_sge=1, sg=[SGE(address, WORD, self.buffers.lkey)])
        try:
            self.endpoint.core.post_recv(wr)
        except PyverbsRDMAError:  # its NIC is gone, and it is not protected yet: it tries later
            self.clock.later(5 * MS, self._post_recv_later)
            return
        self.next_recv += 1

    def _post_recv_later(self) -> None:
        nic = self.endpoint.hardware.nic
        if self.endpoint.blocked or (nic.dead and self.endpoint.status is not Status.PROTECTED):
            if self.clock.now < 3 * SECOND:
                self.clock.later(20 * MS, self._post_recv_later)
            return
        with self.host:
            self.post_recv()

    def due(self) -> None:
        """The time of one more WR of the plan has come."""
        self.backlog += 1
        if not self.retry_due:
            self._post()

    def _again(self) -> None:
        self.retry_due = False
        if self.backlog > 0:
            self._post()

    def _post(self) -> None:
        if self.endpoint.blocked:  # its thread is in another verb
            self._retry()
            return
        with self.host:
            while self.plan and not self.at_its_end:
                wr = self.plan[0]
                if wr.opcode not in MESSAGES and self.peer.renewing:
                    if not self.peer.endpoint.hardware.nic.dead:
                        self._retry()
                        return
                    self.plan.popleft()  # there will be no such memory any more
                    self.backlog -= 1
                    continue
                if wr.opcode in self.peer.withheld and not wr.bad:
                    self._obey(wr)
                try:
                    wr.posted_ns = self.clock.now
                    self.endpoint.core.post_send(self._send_wr(wr))
                except PyverbsRDMAError as error:
                    if error.error_code == errno.ENOMEM:
                        self._note_refusal()
                        self._retry()
                        return
                    self.plan.popleft()  # an exception: its device is gone
                else:
                    self.plan.popleft()
                    self.retry_ns = 100 * US
                    self._note(wr)
                self.backlog -= 1
                if self.backlog <= 0:
                    break
        self.look()

    def _obey(self, wr: Wr) -> None:
        """It sends a message instead of what the peer does not want any more; or it does not obey."""
        if self.trespasses and self.peer.withdrawn_ns is not None:
            wr.denied = True
            return
        if wr.opcode == "READ":
            wr.slot, wr.shared = wr.index, False  # where it would have landed are another one's bytes
        wr.opcode, wr.data = "SEND", wr.index + 1

    def _note_refusal(self) -> None:
        """The queue is full, it is said."""
        answered = len(self.received) - (0 if self.begins else self.peer.window_size)
        known = max(self._seen_sends(), answered)
        known = min(known, self.net.waits_for_ack(self))
        if self.answers and len(self.posted) - known < self.endpoint.capacity:
            self.refused_room += 1

    def _seen_sends(self) -> int:
        """How many of its sends it knows to be complete."""
        return max((wr.index + 1 for queue, wr, _ in self.wcs if queue == "send"), default=0)

    def _retry(self) -> None:
        if not self.retry_due:
            self.retry_due = True
            self.retry_ns = min(2 * self.retry_ns, 5 * MS)
            self.clock.later(self.retry_ns, self._again)

    def _send_wr(self, wr: Wr, following: SendWR | None = None) -> SendWR:
        slot = self.slot(wr)
        wr.ref = self.number << 16 | wr.index + 1
        if wr.opcode not in RESPONDED:
            self.memory.words[slot] = wr.data
        address = self.memory.address(slot)
        flags = SIGNALED * wr.signaled | FENCE * wr.fence | INLINE * wr.inline
        sge = SGE(address, WORD, self.buffers.lkey)
        made = SendWR(
            wr_id=wr.ref,
            opcode=OPCODES[wr.opcode],
            num_sge=1,
            sg=[sge],
            send_flags=flags,
            imm_data=wr.ref,
            next_wr=following,
        )
        peer = self.peer
        wr.target = peer.cell_address(wr.cell)
        if wr.opcode == "FADD":
            made.set_wr_atomic(peer.window.rkey, wr.cell * WORD, wr.data, 0)
        elif wr.opcode == "CAS":
            # Every second one goes by what is not there.
            wr.compare = self._atomics[wr.cell] if wr.index % 2 else 1 << 32
            made.set_wr_atomic(peer.window.rkey, wr.cell * WORD, wr.compare, wr.data)
        elif wr.opcode in RDMA:
            made.set_wr_rdma(0x7FFF0000 if wr.bad else peer.window.rkey, wr.cell * WORD)
        return made

    def _note(self, wr: Wr) -> None:
        self.posted.append(wr)
        self.by_ref[wr.ref] = wr
        if wr.denied and self.own_error is None:
            self.own_error = "it has no right any more to what it does"
        if wr.opcode in RESPONDED:
            self.unread.append(wr)
        if wr.opcode == "FADD":
            self._atomics[wr.cell] += wr.data
        elif wr.opcode == "CAS" and wr.compare == self._atomics[wr.cell]:
            self._atomics[wr.cell] = wr.data
        if wr.inline:
            self.memory.words[self.slot(wr)] = 0xBAD1  # the application uses the memory again at once

    # ---- completions ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Something may be there for the next poll."""
        self._missed |= self.poll_due and self.apart
        users = [app for cq in self.cqs for app in cq.apps.values()] if self.closed else ()
        if not self.poll_due and not (self.closed and all(app.closed for app in users)):
            self.poll_due = True
            self.clock.later(self.poll_ns, self.poll)

    def poll(self) -> None:
        """Poll to empty, and use what came."""
        self.poll_due = False
        if self.host.gone:
            return
        if self.endpoint.blocked or self.host.frozen_until_ns > self.clock.now:
            self.poll_due = True
            self.clock.later(200 * US, self.poll)
            return
        with self.host:
            for cq in self.cqs[self._turn : self._turn + 1] if self.apart else self.cqs:
                self._poll(cq)
        if self.apart:
            self._turn = (self._turn + 1) % len(self.cqs)
            if self._turn or self._missed:
                self._missed &= self._turn > 0
                self.look()

    @staticmethod
    def _poll(cq: Cq) -> None:
        while True:
            try:
                _, wcs = cq.core.poll(16)
            except PyverbsRDMAError:
                break
            for wc in wcs:
                number = wc.wr_id >> 20 & 0xFF if wc.wr_id >= RECV_ID else wc.wr_id >> 16
                with_imm = wc.opcode == RECV_RDMA or wc.wc_flags & WITH_IMM
                cq.apps[number]._take(wc.wr_id, wc.status, wc.imm_data if with_imm else 0, wc.opcode)
            if len(wcs) < 16:
                break

    def _take(self, wr_id: int, status: int, imm: int, opcode: int = RECV_RDMA) -> None:
        if self.closed:
            self.late.append((wr_id, status))
            return
        if status != OK and self.ends is None:
            self.ends = self.clock.now
        own = self.own_error is not None and status not in (FLUSHED, RETRY_EXC)
        # So is what the peer's program has done: it is shown at once, and receives on another pair may still complete.
        own = own or (status == NO_RECEIVE and self.peer.buffers.closed)
        if status != OK and not own and self.flushed is None:
            self.flushed = self.clock.now
        if wr_id >= RECV_ID:
            number = wr_id & 0xFFFFF
            self.wcs.append(("recv", number, status))
            if status == OK:
                word = self.memory.words[self._recvs + number]
                self.received.append((number, imm if opcode == RECV_RDMA else (word, imm) if imm else word))
                self.net.forbid(self.device.name, self._recvs + number, 1)
                self.post_recv()
                if self.answers:
                    self.backlog += 1
                    if not self.retry_due:
                        self.retry_due = True
                        self.clock.later(1, self._again)
            else:
                self.failed = True
            return
        wr = self.by_ref[wr_id]
        self.wcs.append(("send", wr, status))
        self.complete = wr.index + 1
        if status != OK:
            self.failed = True
            return
        # It completes those before it that are not signaled.
        while self.unread and self.unread[0].index <= wr.index:
            read = self.unread.popleft()
            self.reads.append((read, self.memory.words[self.slot(read)]))
        if wr.opcode not in RESPONDED and not wr.shared:
            self.memory.words[self.slot(wr)] = 0xBAD9  # complete: the memory is the application's again

    # ---- its own end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """It closes its QP."""
        if self.closed:
            return
        if self.endpoint.blocked:
            self.clock.later(1 * MS, self.close)
            return
        self.left = True
        self.endpoint.close()
        self.closed = True

    def err(self) -> None:
        """It moves its QP to ERR, and takes what is left. If it is refused, it tries again."""
        if not self.left:
            self._leave_by_err()

    def _leave_by_err(self) -> None:
        if self.closed or self.was_reset:
            return
        if self.endpoint.blocked:
            self.clock.later(1 * MS, self._leave_by_err if self.left else self.err)
            return
        self.left = True
        try:
            self.endpoint.modify(Attr(), ERR, 1)
        except PyverbsRDMAError:
            self.failed = self.refused = True
            if self._tries_again:
                self.clock.later(1 * MS, self._leave_by_err)
        self.look()

    def _reset_within(self, ns: int) -> None:
        def due() -> None:
            self._reset_due = False
            self.leave_by_reset()

        self._reset_due = True
        self.clock.later(ns, due)

    @property
    def _tries_again(self) -> bool:
        return self.net.verbs_take_time and not self.endpoint.hardware.nic.dead

    def sqd(self) -> None:
        """It stops its QP in SQD, and has it go on a little later: unprotected."""
        if self.left or self.failed or self.endpoint.blocked:
            return
        self.left = self.stopped = True
        try:
            self.endpoint.drain()
        except PyverbsRDMAError:
            self.left = False
            self.stopped = self.endpoint.status is Status.UNPROTECTED
            return
        self.clock.later(3 * MS, self._go_on)

    def _go_on(self) -> None:
        if self.closed or self.was_reset or self.failed:
            return
        if self.endpoint.blocked:
            self.clock.later(1 * MS, self._go_on)
            return
        try:
            self.endpoint.modify(Attr(), RTS, int(QpAttrMask.STATE))
        except PyverbsRDMAError:
            if not self.endpoint.hardware.nic.dead and self.clock.now < 3 * SECOND:
                self.clock.later(1 * MS, self._go_on)
            return
        self.left = False
        with self.host:
            for _ in range(
                self.at_start - (self.next_recv - sum(queue == "recv" for queue, _, _ in self.wcs))
            ):
                self.post_recv()
        self._again()
        self.look()

    def reset(self) -> None:
        """It moves its QP to RESET: what was outstanding is gone without a word. If it is refused, it tries again."""
        if not self.left:
            self.leave_by_reset()

    def leave_by_reset(self) -> None:
        """The same, whatever it did before."""
        if self.closed or self.was_reset or self._reset_due:
            return
        if self.endpoint.blocked:
            self._reset_within(1 * MS)
            return
        self.left = self.was_reset = True
        try:
            self.endpoint.modify(Attr(), RESET, 1)
        except PyverbsRDMAError:  # nothing is gone: all of it is told of
            self.failed = self.refused = self.refused_reset = True
            self.was_reset = False
            if self._tries_again:
                self._reset_within(1 * MS)
            self.look()
            return
        self.told = len(self.wcs)
        self.net.given_back(self)

    def take_memory_away(self) -> None:
        """It deregisters the memory of its sends and receives, whatever uses it."""
        if self.at_its_end or self.endpoint.blocked or self.own_error is not None:
            return
        self.own_error = "it has taken its memory away"
        self.buffers.close()
        if not self.renewed:
            self.net.forbid(self.device.name, self._sends, MOST_SENDS + MOST_RECEIVES)

    def change_rights(self, rights: int) -> None:
        """It changes what the peer may do, to something that the peer does not notice."""
        if self.left or self.failed or self.endpoint.blocked:
            return
        rights &= self.rights  # what was withdrawn stays so
        try:
            self.endpoint.set_rights(rights)
        except PyverbsRDMAError:
            return
        self.rights = rights

    def withdraw(self, right: int, kinds: tuple[str, ...]) -> None:
        """It takes a right from the peer, which has been told, and has nothing under way that needs it."""
        self.withheld = kinds
        if self.left or self.failed or self.peer.failed:
            return
        if self.endpoint.blocked or self.peer.has_under_way(kinds):
            self.clock.later(1 * MS, self.withdraw, right, kinds)
            return
        try:
            self.endpoint.set_rights(self.rights & ~right)
        except PyverbsRDMAError:
            return
        self.rights &= ~right
        self.withdrawn_ns = self.clock.now
