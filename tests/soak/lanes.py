# SPDX-License-Identifier: BSD-3-Clause
"""The application of a soak run: lanes of traffic over RC QPs, and the receiver's checks of every byte.

It is written as a verbs program is: it knows nothing of failures, an error completion ends a lane. What message n of a
lane is (operation, size, contents) follows from the seed and n alone, so the receiver needs nothing from the sender.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
from collections import deque
from dataclasses import dataclass
from typing import Any

from shiftverbs.commands.demo.endpoint import Verbs, wc_status_name
from shiftverbs.commands.demo.pattern import Ledger, Pattern

#: What a lane may say by one message: a WRITE's bytes are told by the SEND behind it, READs go along.
OPS = ("send", "send_imm", "write_imm", "write_send", "read_send")
SINGLE_OPS = ("send", "send_imm", "write_imm")
SIZE = 1024
SIZES = (16, 17, 40, 64, 200, 511, 777, SIZE)
INLINE = 64
SERVED = 8
# WR ids return early, and are the same on every lane: a CQ is shared by many.
IDS = 1 << 12  # a receive's wr_id has this bit too
DRAIN, TRIAL = IDS << 1, IDS << 2  # wr_ids of a drain's last WR, and of one that tries a right
# What lies in memory that belongs to nobody but its owner: nothing may change it.
OURS = 0xA5


@dataclass(frozen=True)
class Shape:
    """How the lanes of one group behave. depth, receives: of the QPs.

    signal_every: every so many-th WR is signaled; 0: none ever is, all is inline and of SINGLE_OPS.
    mode: how completions are awaited, see application.py. extended: QPEx and CQEX, in modes without events.
    """

    lanes: int = 1
    mode: str = "spin"
    one_cq: bool = True
    depth: int = 16
    receives: int = 8
    signal_every: int = 4
    inline: bool = False
    ops: tuple[str, ...] = OPS
    batch: int = 16
    nap_s: float = 0.001
    timeout: int = 14
    extended: bool = False


def mixed(*numbers: int) -> int:
    """A number of 32 bits that depends on all of these in no obvious way."""
    x = 0x9E3779B9
    for number in numbers:
        x = ((x ^ number) * 0x85EBCA6B + 0xC2B2AE35) & 0xFFFFFFFF
        x ^= x >> 13
    return x


def rts_attributes(verbs: Verbs, peer: dict[str, Any], access: int, psn: int, timeout: int) -> Any:
    """QPAttr for to_rts. peer: its name(); psn: ours; timeout: as ibv_qp_attr has it."""
    a = verbs.qp.QPAttr(port_num=1)
    a.qp_access_flags = access
    a.path_mtu = verbs.e.IBV_MTU_1024
    a.dest_qp_num, a.rq_psn, a.sq_psn = peer["qpn"], peer["psn"], psn
    a.max_rd_atomic = a.max_dest_rd_atomic = 4
    a.min_rnr_timer = 12  # 0.64 ms
    a.timeout, a.retry_cnt, a.rnr_retry = timeout, 6, 7
    route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(peer["gid"]), sgid_index=1, hop_limit=64)
    a.ah_attr = verbs.addr.AHAttr(port_num=1, is_global=1, gr=route)
    return a


def send_ops(e: Any) -> int:
    """send_ops_flags for all that a lane posts."""
    names = "SEND SEND_WITH_IMM RDMA_WRITE RDMA_WRITE_WITH_IMM RDMA_READ".split()
    return sum(int(getattr(e, "IBV_QP_EX_WITH_" + name)) for name in names)


@dataclass
class Posted:
    """A send WR that was posted and is not known to be done. message: it ends this one; read: slot it lands in."""

    wr_id: int
    signaled: bool
    message: int | None
    read: tuple[int, int] | None


@dataclass(frozen=True)
class Work:
    """A send WR to be posted: memory of the lane's from `offset` on, `length` bytes; remote: an address, 0 = none."""

    wr_id: int
    opcode: int
    offset: int
    length: int
    remote: int = 0
    imm: int = 0
    signaled: bool = True
    inline: bool = False


class Lane:
    """One RC QP with traffic in both directions. role: 0 on host a, 1 on host b; number: of the lane, on both.

    A lane has lives: from one connection of it to the next, with a new QP or with the same one. What is counted, and
    what every byte must be, begins anew with each.
    """

    def __init__(
        self, verbs: Verbs, context: Any, pd: Any, cqs: tuple[Any, Any], shape: Shape, number: int, role: int,
        seed: int, pattern: Pattern, life: int = 0,
    ) -> None:  # fmt: skip
        v, e = verbs, verbs.e
        self.verbs, self.shape, self.number, self.role, self.seed, self.pattern = (
            v,
            shape,
            number,
            role,
            seed,
            pattern,
        )
        self.context = context
        self.sizes = [size for size in SIZES if size <= INLINE or not shape.inline]
        self.landings = shape.receives + 1  # a message's WRITE is safe until its receive is posted again
        areas = itertools.accumulate(
            (shape.depth, shape.receives, self.landings, shape.depth, 1, SERVED), initial=0
        )
        self.outgoing, self.incoming, self.landing, self.reading, self.tried, self.served, total = (
            n * SIZE for n in areas
        )
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        self.access = access
        self.memory = mmap.mmap(-1, total)  # not the MR's own: it is looked at when that is gone
        self.mr = v.mr.MR(pd, total, access, ctypes.addressof(ctypes.c_char.from_buffer(self.memory)))
        for i in range(SERVED):
            self.mr.write(pattern.message(self.stream(role, i, served=True)), SIZE, self.served + i * SIZE)
        cap = v.qp.QPCap(
            max_send_wr=shape.depth, max_recv_wr=shape.receives, max_inline_data=INLINE if shape.inline else 0
        )
        queues = {"qp_type": e.IBV_QPT_RC, "scq": cqs[0], "rcq": cqs[1], "cap": cap, "sq_sig_all": 0}
        if shape.extended:
            mask = e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            init = v.qp.QPInitAttrEx(**queues, pd=pd, comp_mask=mask, send_ops_flags=send_ops(e))
            self.qp = v.qp.QPEx(context, init)
        else:
            self.qp = v.qp.QP(pd, v.qp.QPInitAttr(**queues))
        self.qp_num = self.qp.qp_num
        self.faults: list[str] = []
        self.ledger = Ledger()
        self.begin_life(life)
        # Made once each: pyverbs up to 64 leaks what a WR or SGE held.
        self.sends: dict[tuple[int, int], Any] = {}
        self.recvs = [
            v.wr.RecvWR(0, 1, [v.wr.SGE(self.mr.buf + self.incoming + i * SIZE, SIZE, self.mr.lkey)])
            for i in range(shape.receives)
        ]

    def begin_life(self, life: int) -> None:
        """Nothing is sent or received yet."""
        if self.ledger.first_fault:
            self.fault(self.ledger.first_fault)
        self.life = life
        self.sent = 0  # messages
        self.confirmed = 0  # of them known to be done
        self.posted = 0  # send WRs
        self.received = 0
        self.receives_posted = 0
        self.ledger = Ledger()
        self.outstanding: deque[Posted] = deque()
        self.broken: str | None = None
        self.written: dict[int, bytes] = {}  # what the last WRITE into each landing slot must have left there
        self.flush_errors = self.received_errors = 0
        self.owed = 0  # WCs of signaled WRs; a number, because another thread reads it
        self.awake = True  # whether messages are sent
        self.last = False  # only one more, whose WC says that all is done
        self.leaving = False  # this life is about to end: errors are nobody's fault
        self.ended = False  # its QP takes nothing any more
        self.draining = self.drained = False
        self.tried_with: str | None = None

    @property
    def psn(self) -> int:
        """Ours in this life."""
        return self.psn_in(self.life)

    def psn_in(self, life: int) -> int:
        """The first PSN of a life. What is left on its way of the life before is far ahead, and so no duplicate."""
        return (self.qp_num * 7919 - life * 1_000_003) & 0xFFFFFF

    def _send_wr(self, offset: int, length: int) -> Any:
        wr = self.sends.get((offset, length))
        if wr is None:
            sge = self.verbs.wr.SGE(self.mr.buf + offset, length, self.mr.lkey)
            wr = self.verbs.wr.SendWR(0, num_sge=1, sg=[sge], opcode=self.verbs.e.IBV_WR_SEND)
            self.sends[offset, length] = wr
        return wr

    def stream(self, role: int, number: int, served: bool = False) -> int:
        """The number under which the pattern knows a message, or a block of served memory."""
        return ((self.number * 2 + role) * 2 + served) << 40 | (0 if served else self.life << 24) | number

    def plan(self, role: int, number: int) -> tuple[str, int]:
        """Operation and size of a message that `role` sends."""
        x = mixed(self.seed, self.number, role, number, self.life)
        ops = self.shape.ops
        return ops[x % len(ops)], self.sizes[(x >> 8) % len(self.sizes)]

    # -- connecting

    def name(self, later: int = 0) -> dict[str, Any]:
        """What the peer must know; later: of so many lives after this one, with the same QP."""
        gid, psn = str(self.context.query_gid(1, 1)), self.psn_in(self.life + later)
        return {"gid": gid, "qpn": self.qp_num, "psn": psn, "rkey": self.mr.rkey, "address": self.mr.buf}

    def connect(self, peer: dict[str, Any]) -> None:
        """To RTS, with all receives posted."""
        self.peer = peer
        self.qp.to_rts(rts_attributes(self.verbs, peer, self.access, self.psn, self.shape.timeout))
        for _ in range(self.shape.receives):
            self._post_recv()

    def _post_recv(self) -> None:
        if self.ended:
            return
        wr = self.recvs[self.receives_posted % self.shape.receives]
        wr.wr_id = self._id(self.receives_posted) | IDS
        try:
            self.qp.post_recv(wr)
        except self.verbs.error.PyverbsRDMAError as error:
            self._break(f"post_recv: {error}")
            return
        self.receives_posted += 1

    def _id(self, number: int) -> int:
        """wr_id of the so-manieth WR of a queue. Those of one life lie elsewhere than those of the next."""
        return (number + self.life * 1531) % IDS

    def _break(self, why: str) -> None:
        self.broken = self.broken or why

    def fault(self, what: str) -> None:
        """Note what must not be; the first few are kept."""
        if len(self.faults) < 5:
            self.faults.append(f"life {self.life}: {what}")

    # -- sending

    def pump(self, most: int) -> int:
        """Post up to `most` messages, as far as the send queue has room; returns how many."""
        count = 0
        while count < most and self.awake and self.broken is None and self._post_message():
            count += 1
            if self.last:
                self.last = self.awake = False
        return count

    def _post_message(self) -> bool:
        e = self.verbs.e
        number = self.sent
        op, size = self.plan(self.role, number)
        two = op in ("write_send", "read_send")
        # One that never signals hears of no completion: the queue itself tells when it is full.
        if self.shape.signal_every and len(self.outstanding) + 1 + two > self.shape.depth:
            return False
        contents = self.pattern.message(self.stream(self.role, number))[:size]
        landing = self.peer["address"] + self.landing + number % self.landings * SIZE
        if op == "write_send":
            self._post(e.IBV_WR_RDMA_WRITE, contents, landing)
        elif op == "read_send":
            block = mixed(self.seed, self.number, number) % SERVED
            self._post(
                e.IBV_WR_RDMA_READ, None, self.peer["address"] + self.served + block * SIZE, block=block
            )
        code = {"write_imm": e.IBV_WR_RDMA_WRITE_WITH_IMM, "send_imm": e.IBV_WR_SEND_WITH_IMM}.get(
            op, e.IBV_WR_SEND
        )
        if self.broken is None and self._post(code, contents, landing if op == "write_imm" else 0, number):
            self.sent += 1
            return True
        return False

    def _post(
        self,
        opcode: int,
        contents: bytes | None,
        remote: int,
        message: int | None = None,
        block: int | None = None,
    ) -> bool:
        """Post one WR; False where the queue of a lane that never signals is full. contents: None = a READ."""
        slot = self.posted % self.shape.depth
        if contents is None:
            offset, length = self.reading + slot * SIZE, SIZE
            self.mr.write(bytes(SIZE), SIZE, offset)  # a READ that did not happen is seen
        else:
            offset, length = self.outgoing + slot * SIZE, len(contents)
            self.mr.write(contents, length, offset)
        every = self.shape.signal_every
        said_last = self.last and message is not None
        signaled = every > 0 and (self.posted % every == every - 1 or said_last)
        inline = self.shape.inline and contents is not None
        wr_id, imm = self._id(self.posted), (message or 0) & 0xFFFFFFFF
        try:
            self._hand_over(Work(wr_id, opcode, offset, length, remote, imm, signaled, inline))
        except self.verbs.error.PyverbsRDMAError as error:
            if error.error_code != errno.ENOMEM or every:
                self._break(f"post_send: {error}")
            return False
        if every:
            read = None if block is None else (slot, block)
            self.outstanding.append(Posted(wr_id, signaled, message, read))
            self.owed += signaled
        self.posted += 1
        return True

    def _hand_over(self, work: Work) -> None:
        if self.shape.extended:
            self._post_extended(work)
            return
        e = self.verbs.e
        wr = self._send_wr(work.offset, work.length)
        wr.wr_id, wr.opcode, wr.imm_data = work.wr_id, work.opcode, work.imm
        wr.send_flags = (e.IBV_SEND_SIGNALED if work.signaled else 0) | (
            e.IBV_SEND_INLINE if work.inline else 0
        )
        if work.remote:
            wr.set_wr_rdma(self.peer["rkey"], work.remote)
        self.qp.post_send(wr)

    def _post_extended(self, work: Work) -> None:
        """The same through ibv_wr_*, as a batch of one."""
        e, qp, rkey = self.verbs.e, self.qp, self.peer["rkey"]
        qp.wr_start()
        qp.wr_id, qp.wr_flags = work.wr_id, e.IBV_SEND_SIGNALED if work.signaled else 0
        if work.opcode == e.IBV_WR_SEND:
            qp.wr_send()
        elif work.opcode == e.IBV_WR_SEND_WITH_IMM:
            qp.wr_send_imm(work.imm)
        elif work.opcode == e.IBV_WR_RDMA_WRITE:
            qp.wr_rdma_write(rkey, work.remote)
        elif work.opcode == e.IBV_WR_RDMA_WRITE_WITH_IMM:
            qp.wr_rdma_write_imm(rkey, work.remote, work.imm)
        else:
            qp.wr_rdma_read(rkey, work.remote)
        if work.inline:
            qp.wr_set_inline_data(self.mr.buf + work.offset, work.length)
        else:
            area = work.offset, work.length
            sge = self.sends.get(area)
            if sge is None:
                sge = self.sends[area] = self.verbs.wr.SGE(
                    self.mr.buf + work.offset, work.length, self.mr.lkey
                )
            qp.wr_set_sge(sge)
        qp.wr_complete()

    # -- completions

    def take(self, wc: Any) -> None:
        """Take one WC of this QP."""
        e = self.verbs.e
        if wc.wr_id == TRIAL:
            self.tried_with = wc_status_name(self.verbs, wc.status) if wc.status else "SUCCESS"
        elif wc.status != e.IBV_WC_SUCCESS:
            self._take_error(wc)
        elif wc.opcode & e.IBV_WC_RECV:
            self._take_message(wc)
        else:
            self._take_sent(wc)

    def _retire(self, wr_id: int, error: bool) -> None:
        """Everything up to the WR with this wr_id is done; it must be the next that owes a WC."""
        while self.outstanding:
            done = self.outstanding.popleft()
            self.owed -= done.signaled
            if done.wr_id == wr_id:
                if not done.signaled and not error:
                    self.fault(f"a success WC for WR {wr_id}, which was not signaled")
            elif done.signaled or (error and self.flush_errors > 1):
                self.fault(f"no WC for WR {done.wr_id}; WR {wr_id} completed")
            if done.wr_id != wr_id or not error:
                self._done(done)
            if done.wr_id == wr_id:
                return
        self.fault(f"a send WC with wr_id {wr_id}, which is not outstanding")

    def _done(self, done: Posted) -> None:
        if done.message is not None:
            self.confirmed = done.message + 1
        if done.read is not None:
            slot, block = done.read
            wanted = self.pattern.message(self.stream(1 - self.role, block, served=True))
            if self.mr.read(SIZE, self.reading + slot * SIZE) != wanted:
                self.fault(f"READ by WR {done.wr_id} of block {block}: wrong bytes")

    def _take_sent(self, wc: Any) -> None:
        if self.broken is not None:
            self.fault(f"a success WC of WR {wc.wr_id} behind an error")
        self._retire(wc.wr_id, error=False)

    def _take_error(self, wc: Any) -> None:
        name = wc_status_name(self.verbs, wc.status)
        if self.broken is None and name not in ("RETRY_EXC_ERR", "WR_FLUSH_ERR") and not self.leaving:
            self.fault(f"status {name}: no failure of a path")
        self._break(name)
        if wc.wr_id == DRAIN:
            self._drained()
            return
        # An error WC has no valid opcode: which queue it is of follows from what is outstanding. A receive's wr_id
        # is marked.
        if wc.wr_id & IDS:
            self._recv_due(wc.wr_id)
            self.received_errors += 1
            return
        self.flush_errors += 1
        if self.shape.signal_every:
            self._retire(wc.wr_id, error=True)

    def _drained(self) -> None:
        """Behind everything there was: what has no WC by now is not signaled, and done."""
        self.drained = True
        while self.outstanding:
            done = self.outstanding.popleft()
            self.owed -= done.signaled
            if done.signaled or self.flush_errors:
                self.fault(f"no WC for WR {done.wr_id}, and all is drained")
            self._done(done)

    def _recv_due(self, wr_id: int) -> None:
        due = self._id(self.ledger.checked + self.received_errors) | IDS
        if wr_id != due:
            self.fault(f"a receive WC with wr_id {wr_id}; {due} was due")

    def _take_message(self, wc: Any) -> None:
        e = self.verbs.e
        number = self.received
        op, size = self.plan(1 - self.role, number)
        self._recv_due(wc.wr_id)
        if self.received_errors:
            self.fault(f"message {number} behind a receive that was flushed")
        written = op == "write_imm"
        if wc.opcode != (e.IBV_WC_RECV_RDMA_WITH_IMM if written else e.IBV_WC_RECV) or wc.byte_len != size:
            self.fault(
                f"message {number}, {op} of {size} bytes: WC with opcode {wc.opcode}, {wc.byte_len} bytes"
            )
        with_imm = op in ("send_imm", "write_imm")
        if bool(wc.wc_flags & e.IBV_WC_WITH_IMM) != with_imm or (
            with_imm and wc.imm_data != number & 0xFFFFFFFF
        ):
            self.fault(f"message {number}, {op}: flags {wc.wc_flags}, immediate data {wc.imm_data}")
        stream = self.stream(1 - self.role, number)
        wanted = self.pattern.message(stream)[:size]
        receive = self.incoming + number % self.shape.receives * SIZE
        landing = self.landing + number % self.landings * SIZE
        if op in ("write_imm", "write_send"):
            self.written[number % self.landings] = wanted
        for place, used in ((landing, op in ("write_imm", "write_send")), (receive, not written)):
            got = self.mr.read(size, place) if used else wanted
            if got != wanted:
                claimed = self.pattern.claimed_number(got)
                said = "no header" if claimed is None else f"message {claimed - stream + number}"
                self.ledger.damaged(f"message {number}, {op}: other bytes; they are of {said}")
        self.ledger.arrived(number)
        self.received += 1
        self._post_recv()

    @property
    def is_over(self) -> bool:
        """Whether no completion can come any more, and no other life."""
        return self.broken is not None and not self.outstanding and not self.leaving

    # -- the end of a life

    def modify(self, mask: str = "IBV_QP_STATE", **attributes: Any) -> None:
        """Verb ibv_modify_qp with these attributes and no more; mask: names of IBV_QP_* flags."""
        attr = self.verbs.qp.QPAttr()
        for name, value in attributes.items():
            setattr(attr, name, value)
        self.qp.modify(attr, sum(int(getattr(self.verbs.e, flag)) for flag in mask.split()))

    def drain(self) -> None:
        """Behind everything in the send queue of a QP in ERR, so that its WC is the last: as ib_drain_qp does."""
        try:
            self._hand_over(Work(DRAIN, self.verbs.e.IBV_WR_SEND, self.outgoing, 1))
        except self.verbs.error.PyverbsRDMAError as error:
            if error.error_code != errno.ENOMEM:
                raise
            return  # what was flushed makes room when it is polled
        self.draining = True

    @property
    def is_drained(self) -> bool:
        """Whether every WR has its WC, or will have none."""
        return self.drained and self.receives_posted == self.ledger.checked + self.received_errors

    def record(self) -> list[int]:
        """[sent, confirmed, received] of this life."""
        return [self.sent, self.confirmed, self.received]

    def take_memory(self) -> None:
        """No NIC has any business in our memory now: overwrite all that one ever wrote."""
        self.memory[: self.served] = bytes([OURS]) * self.served

    def check_memory(self) -> None:
        """Since take_memory nobody wrote there."""
        now = self.memory[: self.served]
        if now != bytes([OURS]) * self.served:
            at = next(i for i, byte in enumerate(now) if byte != OURS)
            self.fault(f"memory was written at {at} of {self.served} after its QP, or its MR, was gone")

    def try_right(self, write: bool) -> None:
        """Post one WR into (out of) the peer's memory that no message uses; its WC goes to tried_with."""
        e = self.verbs.e
        self.mr.write(bytes(SIZE), SIZE, self.reading)
        self.mr.write(b"tried", 5, self.outgoing)
        self.tried_with = None
        code, offset = (e.IBV_WR_RDMA_WRITE, self.outgoing) if write else (e.IBV_WR_RDMA_READ, self.reading)
        self._hand_over(Work(TRIAL, code, offset, 5, self.peer["address"] + self.tried))

    # -- what the campaign asks

    def audit(self) -> None:
        """At rest: what WRITEs left in memory is still there."""
        for slot, wanted in self.written.items():
            if self.mr.read(len(wanted), self.landing + slot * SIZE) != wanted:
                self.fault(f"landing slot {slot} does not hold what the last WRITE into it wrote")

    def all_faults(self) -> list[str]:
        """What went wrong, for people."""
        faults = (*self.faults, self.ledger.first_fault)
        return [f"lane {self.number}: {what}" for what in faults if what]

    def status(self) -> list[Any]:
        """[sent, confirmed, received, WCs owed, broken, status, state, recv_state, pair, recv_errors], of this life."""
        shift = self.qp.shift
        return [
            self.sent, self.confirmed, self.received, self.owed, None if self.leaving else self.broken,
            shift.status, shift.state, shift.recv_state, shift.pair, self.received_errors,
        ]  # fmt: skip
