# SPDX-License-Identifier: BSD-3-Clause
"""Random traffic, failures, replays and moves against a model that shares no code with the data path.

Two QPs with colliding wr_ids share their CQs. The hardware of a pair executes posts in order, acknowledges them in
order some time later, and a failure may fall between the two. The model knows what a correct data path must know:
each WR of the application, how far the peer has executed, which hardware WCs were consumed. Checked after each step:

- the application sees exactly the WCs of its signaled WRs and of its receives, in order, never early;
- the peer sees every two-sided message exactly once, in order;
- a READ's WC comes only after its response did;
- posts fail with ENOMEM exactly when the application's own capacity is used up, what the peer may have answered over
  another NIC left out.

Hypothesis prints the steps that failed and how to repeat them.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass, field

import fake
from fake import (
    FLUSH,
    READ,
    RETRY_EXC,
    SEND,
    SEQ_MASK,
    SIGNALED,
    SUCCESS,
    TWO_SIDED,
    WRITE,
    WRITE_IMM,
    World,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import _core

LIB = ctypes.CDLL(os.environ["SHIFTVERBS_FAKEVERBS"])
NICS = 3
CAP = 6


@dataclass
class Wr:
    """A send WR of the application."""

    wr_id: int
    opcode: int
    signaled: bool
    proven: bool = False
    read_back: bool = False  # a READ whose response arrived


@dataclass
class Side:
    """What the model knows of one QP."""

    world: World
    sends: list[Wr] = field(default_factory=list)
    recvs: list[int] = field(default_factory=list)
    head: int = 0
    rhead: int = 0
    shown_sends: int = 0  # WRs whose WC the application has had (or would have had)
    shown_recvs: int = 0
    # Posts per pair that the peer carried out.
    executed: list[int] = field(default_factory=lambda: [0] * NICS)
    received: list[int] = field(default_factory=list)  # sequence numbers of two-sided messages at the peer
    life: list[int] = field(default_factory=lambda: [0] * NICS)
    former: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NICS)])
    stale: list[bool] = field(default_factory=lambda: [False] * NICS)  # receives of another pair lie there
    send_pair: int = 0
    recv_pair: int = 0
    over: bool = False
    crossed: int = 0  # the most that the peer may have answered over another NIC
    shown: int = 0  # all below it was complete when a pair showed the first error of its sends
    erred: set[int] = field(default_factory=set)  # pairs that have shown one since their last reset
    sending: set[int] = field(default_factory=lambda: {0})  # pairs that were handed sends since then
    all: list[Side] = field(default_factory=list, compare=False, repr=False)  # of the same NIC, this one too

    @property
    def is_answered_elsewhere(self) -> bool:
        """Whether an answer may come over another NIC, to this QP or to another."""
        return any(side.recv_pair != self.send_pair for side in self.all)

    def may_cross(self) -> None:
        """To be called after whatever hands over, and where receives begin to come over another pair."""
        if self.is_answered_elsewhere:
            self.crossed = max(self.crossed, len(self.sends) - self.world.qp.unwired[0])

    def show(self, pair: int, seq: int) -> None:
        """A NIC says that a send failed: RC completes in order."""
        if pair not in self.erred and pair == self.send_pair and pair in self.sending:
            self.shown = max(self.shown, min(seq, len(self.sends) - self.world.qp.unwired[0]))
        self.erred.add(pair)

    def peer_rx(self) -> int:
        return len(self.received)


class DataPath(RuleBasedStateMachine):
    """Rules are what application, hardware and driver do; see the module."""

    def __init__(self) -> None:
        super().__init__()
        _core.set_driver(None)
        lib = fake.library()
        first = World(lib, nics=NICS, max_send=CAP, max_recv=CAP, shared_cq=True, qp_num=0x100)
        second = World(lib, nics=NICS, max_send=CAP, max_recv=CAP, shared_cq=True, qp_num=0x200, join=first)
        self.cq = first.scq
        self.hw_cqs = first.scqs
        self.queues: list[list[tuple[Side, int, int, bool, int, int]]] = [[] for _ in range(NICS)]
        self.sides = []
        for world in (first, second):
            world.pair_keys()
            world.qp.guarded = True
            self.sides.append(Side(world, all=self.sides))
        for k in range(1, NICS):
            self.cq.set_active(k, True)
        self.wr_ids = 0

    def teardown(self) -> None:
        try:
            for side in self.sides:
                self.finish(side)
        finally:
            for side in reversed(self.sides):
                side.world.close()
            _core.take_events()

    # --- the model's view of the hardware CQs

    def push(self, side: Side, k: int, post: fake.PostStruct, recv: bool, status: int) -> None:
        self.queues[k].append((side, k, side.life[k], recv, post.wr_id, status))
        opcode = 128 if recv else fake.WC_OPCODE[post.opcode]
        self.hw_cqs[k].push(post.wr_id, status, side.world.hw[k].qp_num, opcode=opcode)

    def consume(self) -> None:
        """Account for whatever the data path has polled since the last look."""
        for k in range(NICS):
            queue = self.queues[k]
            while len(queue) > self.hw_cqs[k].pending:
                side, pair, life, recv, wr_id, status = queue.pop(0)
                if status != SUCCESS and not recv and life == side.life[pair] and not side.over:
                    side.show(pair, wr_id & SEQ_MASK)
                if life != side.life[pair] or status != SUCCESS or (wr_id >> 60) & 7 or side.over:
                    continue
                if recv:
                    assert wr_id & SEQ_MASK == side.rhead
                    side.rhead += 1
                else:
                    side.head = max(side.head, (wr_id & SEQ_MASK) + 1)
                    self.skip_proven(side)

    @staticmethod
    def skip_proven(side: Side) -> None:
        while side.head < len(side.sends) and side.sends[side.head].proven:
            side.head += 1

    # --- the application

    def new_id(self) -> int:
        self.wr_ids += 1
        return self.wr_ids % 3

    @rule(
        q=st.integers(0, 1),
        opcodes=st.lists(st.sampled_from([SEND, SEND, WRITE, WRITE_IMM, READ]), min_size=1, max_size=3),
        signaled=st.integers(0, 7),
    )
    def post_send(self, q: int, opcodes: list[int], signaled: int) -> None:
        side = self.sides[q]
        wanted = [Wr(self.new_id(), op, bool(signaled >> i & 1)) for i, op in enumerate(opcodes)]
        chain: list[object] = []
        for wr in reversed(wanted):
            flags = SIGNALED if wr.signaled else 0
            # A READ into what a WRITE ahead of it is sent from would make a replay unsafe.
            sges = [(0x3000 if wr.opcode == READ else 0x1000, 64, 1)]
            chain.insert(
                0, fake.send_wr(wr.wr_id, wr.opcode, flags, sges, next_wr=chain[0] if chain else None)
            )
        before = side.world.qp.outstanding[0]
        side.may_cross()
        try:
            side.world.qp.post_send(chain[0])
            err = 0
        except PyverbsRDMAError as e:
            err = e.error_code
        self.consume()
        room = CAP - (len(side.sends) - side.head)
        taken = side.world.qp.outstanding[0] - (len(side.sends) - side.head)
        if err:
            assert err == errno.ENOMEM and room < len(wanted), f"{room} free, {before} outstanding"
            assert max(room, 0) <= taken < len(wanted)
        else:
            assert taken == len(wanted)
        if taken > room:  # something came over another NIC: what was handed over by then takes no room
            crossed = side.crossed
            if side.is_answered_elsewhere:  # completions polled for room may have had more handed over
                crossed = max(crossed, len(side.sends) + taken - side.world.qp.unwired[0])
            assert len(side.sends) + taken - crossed <= CAP
        side.sends += wanted[:taken]
        outstanding, unwired = side.world.qp.outstanding[0], side.world.qp.unwired[0]
        assert outstanding <= 2 * CAP and outstanding - unwired <= CAP
        side.may_cross()

    @rule(q=st.integers(0, 1), n=st.integers(1, 3))
    def post_recv(self, q: int, n: int) -> None:
        side = self.sides[q]
        for _ in range(n):
            wr_id = self.new_id()
            try:
                side.world.qp.post_recv(fake.recv_wr(wr_id))
                self.consume()
                side.recvs.append(wr_id)
                assert len(side.recvs) - side.rhead <= CAP
            except PyverbsRDMAError as e:
                self.consume()
                assert e.error_code == errno.ENOMEM and len(side.recvs) - side.rhead == CAP

    @rule(n=st.sampled_from([1, 2, 5, 40]))
    def poll(self, n: int) -> None:
        count, wcs = self.cq.poll(n)
        self.consume()
        assert count == len(wcs) <= n
        for wc in wcs:
            side = next(s for s in self.sides if s.world.qp_num == wc.qp_num)
            assert wc.status == SUCCESS
            if wc.opcode >= 128:
                assert wc.wr_id == side.recvs[side.shown_recvs] and side.shown_recvs < side.rhead
                side.shown_recvs += 1
                continue
            while not side.sends[side.shown_sends].signaled:
                side.shown_sends += 1
            wr = side.sends[side.shown_sends]
            assert side.shown_sends < side.head, "a WC before its time"
            assert wc.wr_id == wr.wr_id and wc.opcode == fake.WC_OPCODE[wr.opcode]
            assert wr.opcode != READ or wr.read_back
            side.shown_sends += 1

    # --- the hardware

    def execute_one(self, side: Side) -> bool:
        k = side.send_pair
        hw = side.world.hw[k]
        if side.executed[k] >= hw.count():
            return False
        post = hw.post(side.executed[k])
        side.executed[k] += 1
        if not (post.wr_id >> 60) & 7:
            wr = side.sends[post.wr_id & SEQ_MASK]
            assert post.opcode == wr.opcode and post.sge[0].lkey == 1 + 1000 * k
            if wr.opcode in TWO_SIDED:
                side.received.append(post.wr_id & SEQ_MASK)
        return True

    def ack_one(self, side: Side) -> bool:
        k = side.send_pair
        hw = side.world.hw[k]
        if hw.done[0] >= side.executed[k]:
            return False
        post = hw.post(hw.done[0])
        hw.done[0] += 1
        LIB.fv_free_slots(ctypes.c_void_p(hw.ptr), 0, ctypes.c_size_t(hw.done[0]))
        if not (post.wr_id >> 60) & 7 and post.opcode == READ:
            side.sends[post.wr_id & SEQ_MASK].read_back = True
        if post.flags & SIGNALED:
            self.push(side, k, post, False, SUCCESS)
        return True

    @rule(q=st.integers(0, 1), n=st.integers(1, 4))
    def execute(self, q: int, n: int) -> None:
        for _ in range(n):
            self.execute_one(self.sides[q])

    @rule(q=st.integers(0, 1), n=st.integers(1, 4))
    def acknowledge(self, q: int, n: int) -> None:
        for _ in range(n):
            self.ack_one(self.sides[q])

    def receive_one(self, side: Side) -> bool:
        k = side.recv_pair
        hw = side.world.hw[k]
        if hw.done[1] >= hw.count(recv=True):
            return False
        side.may_cross()
        post = hw.post(hw.done[1], recv=True)
        hw.done[1] += 1
        LIB.fv_free_slots(ctypes.c_void_p(hw.ptr), 1, ctypes.c_size_t(hw.done[1]))
        self.push(side, k, post, True, SUCCESS)
        return True

    @rule(q=st.integers(0, 1), n=st.integers(1, 3))
    def receive(self, q: int, n: int) -> None:
        for _ in range(n):
            self.receive_one(self.sides[q])

    def break_hw(self, side: Side, k: int) -> None:
        """The QP goes to ERR: everything not acknowledged gets an error WC."""
        hw = side.world.hw[k]
        status = RETRY_EXC
        while hw.done[0] < hw.count():
            self.push(side, k, hw.post(hw.done[0]), False, status)
            hw.done[0] += 1
            status = FLUSH
        while hw.done[1] < hw.count(recv=True):
            self.push(side, k, hw.post(hw.done[1], recv=True), True, FLUSH)
            hw.done[1] += 1

    # --- the driver

    @rule(k=st.integers(0, NICS - 1))
    def drain(self, k: int) -> None:
        self.cq.drain(k)
        self.consume()

    @rule(q=st.integers(0, 1), k=st.integers(0, NICS - 1), status=st.sampled_from([SUCCESS, FLUSH]))
    def late(self, q: int, k: int, status: int) -> None:
        """A WC from the pair's life before its last RESET."""
        side = self.sides[q]
        for wr_id in side.former[k]:
            self.queues[k].append((side, k, -1, False, wr_id, status))
            self.hw_cqs[k].push(wr_id, status, side.world.hw[k].qp_num, opcode=0)

    def reset(self, side: Side, k: int) -> None:
        """The QP of a pair goes to RESET; all its WCs were polled."""
        hw = side.world.hw[k]
        self.cq.drain(k)
        self.consume()
        side.former[k] = [hw.post(-1, recv).wr_id for recv in (False, True) if hw.count(recv)]
        hw.reset()
        side.executed[k] = hw.count()
        side.life[k] += 1
        side.stale[k] = False
        side.erred.discard(k)
        side.sending.discard(k)
        side.world.qp.pair_reset(k)

    @rule(q=st.integers(0, 1), step=st.integers(0, NICS - 1), posts=st.integers(0, 3), poll=st.booleans())
    def switch(self, q: int, step: int, posts: int, poll: bool) -> None:
        """A failure of the pairs in use, and a SWITCH to any pair, the same one included."""
        side = self.sides[q]
        core = side.world.qp
        used = {side.send_pair, side.recv_pair}
        for k in used:
            self.break_hw(side, k)
        if poll:
            self.poll(5)
        core.close_send()
        core.close_recv()
        for k in used:
            core.begin_fence(k)
            assert core.post_marker(k) == 0
            self.break_hw(side, k)
            self.cq.drain(k)
            self.consume()
            assert core.fence_state(k) == (True, True)
            core.forget_pair(k)
            side.life[k] += 1
        rx, acked, wired = core.counters()
        assert rx == side.rhead and acked <= side.peer_rx() <= wired
        for i in range(posts):
            self.post_send(q, [SEND if i else WRITE_IMM], 1)
        target = (side.send_pair + step) % NICS
        for k in {*used, target}:
            self.reset(side, k)
        self.answers_may_have_come()
        assert core.open_recv(target) == 0
        # The peer's counter proves two-sided work and all before it, but no READ.
        end = 0
        if side.received:
            end = side.received[-1] + 1
        end = max(end, side.shown)
        for seq in range(side.head, end):
            wr = side.sends[seq]
            wr.proven = wr.proven or wr.opcode != READ or seq < side.shown
        core.trim(side.peer_rx())
        side.crossed = max(side.crossed, end)
        self.skip_proven(side)
        core.open_send(target)
        side.send_pair = side.recv_pair = target
        side.sending.add(target)
        self.consume()

    @rule(q=st.integers(0, 1), step=st.integers(1, NICS - 1), posts=st.integers(0, 2))
    def move_send(self, q: int, step: int, posts: int) -> None:
        side = self.sides[q]
        core = side.world.qp
        _core.take_events()
        how = core.move_begin()
        if how == "wanted":
            if core.post_fence_write(0, 0):
                core.move_cancel()
                return
        for _ in range(posts):
            self.post_send(q, [SEND], 1)
        while self.execute_one(side):
            pass
        while self.ack_one(side):
            pass
        self.cq.drain(side.send_pair)
        self.consume()
        if how == "wanted":
            # Our own WRITE completes all before it.
            done = len(side.sends) - core.unwired[0]
            side.head = max(side.head, done)
        kinds = [e[0] for e in _core.take_events() if e[1] is core]
        assert (_core.EV_FENCE_WR_DONE in kinds) == (how != "idle")
        assert core.counters()[2] == side.peer_rx(), "tx of the MOVE"
        old, side.send_pair = side.send_pair, (side.send_pair + step) % NICS
        core.open_send(side.send_pair)
        side.sending.add(side.send_pair)
        self.consume()
        self.arm(side, old)

    def answers_may_have_come(self) -> None:
        """One of the QPs is about to receive elsewhere."""
        for side in self.sides:
            side.may_cross()

    @rule(q=st.integers(0, 1), step=st.integers(1, NICS - 1))
    def move_recv(self, q: int, step: int) -> None:
        side = self.sides[q]
        target = (side.recv_pair + step) % NICS
        if target == side.send_pair and side.stale[target]:
            return  # not armed: what was left there lies in front
        self.cq.drain(side.recv_pair)
        self.consume()
        self.answers_may_have_come()
        old, side.recv_pair = side.recv_pair, target
        side.stale[old] = True
        assert side.world.qp.move_recv(target) == 0
        self.arm(side, old)

    def arm(self, side: Side, k: int) -> None:
        """A pair that carries neither direction is reset."""
        if k in (side.send_pair, side.recv_pair):
            return
        self.reset(side, k)

    # --- always

    @invariant()
    def peer_saw_each_message_once_in_order(self) -> None:
        for side in self.sides:
            two_sided = [i for i, wr in enumerate(side.sends) if wr.opcode in TWO_SIDED]
            assert side.received == two_sided[: len(side.received)]

    @invariant()
    def counters_agree(self) -> None:
        for side in self.sides:
            rx, acked, wired = side.world.qp.counters()
            assert rx == side.rhead and acked <= side.peer_rx() <= wired

    @rule(q=st.integers(0, 1))
    def look(self, q: int) -> None:
        """Reading never changes anything."""
        side = self.sides[q]
        qp = side.world.qp
        before = (qp.outstanding, qp.unwired, qp.counters(), self.cq.buffered)
        assert qp.unsafe_reason() is None and qp.missing_keys(1) == (set(), set())
        _ = (qp.oldest_post_age(1), qp.first_error(0), qp.fence_state(0), qp.seen_rkeys, qp.stale, qp.posted)
        assert (qp.outstanding, qp.unwired, qp.counters(), self.cq.buffered) == before

    def finish(self, side: Side) -> None:
        """Let everything complete, or give up: either way each WR gets what it must get."""
        if self.wr_ids % 2:
            while self.execute_one(side) | self.ack_one(side):
                self.poll(40)
            while self.receive_one(side):
                self.poll(40)
            self.poll(40)
            self.poll(40)
            assert side.shown_recvs == len(side.recvs)
            unsignaled_tail = [wr.signaled for wr in side.sends[side.shown_sends :]]
            assert not any(unsignaled_tail), "nothing that owes a WC is left"
            return
        self.poll(40)
        self.poll(40)
        for k in range(NICS):
            self.cq.drain(k)
        self.consume()
        self.poll(40)
        side.world.qp.abort(RETRY_EXC, 3)
        _, wcs = self.cq.poll(100)
        mine = [wc for wc in wcs if wc.qp_num == side.world.qp_num]
        sends = [(wc.wr_id, wc.status) for wc in mine if wc.opcode < 128]
        recvs = [(wc.wr_id, wc.status) for wc in mine if wc.opcode >= 128]
        want = []
        status = RETRY_EXC
        for wr in side.sends[side.head :]:
            if wr.proven and status == RETRY_EXC:
                if wr.signaled:
                    want.append((wr.wr_id, SUCCESS))
                continue
            want.append((wr.wr_id, status))
            status = FLUSH
        assert sends == want and recvs == [(i, FLUSH) for i in side.recvs[side.rhead :]]
        assert side.world.qp.outstanding == (0, 0)
        side.over = True


DataPath.TestCase.settings = settings(
    max_examples=int(os.environ.get("SHIFTVERBS_MODEL_EXAMPLES", "200")),
    stateful_step_count=40,
    deadline=None,
)
TestDataPath = DataPath.TestCase
