# SPDX-License-Identifier: BSD-3-Clause
"""Any poll, whatever happens amid it, against a model of what was completed: nothing is lost, doubled or out of order.

Amid a poll, in a driver run and in finalizers that the collector calls, QPs complete, are reset, closed and made anew
with the same number, move to the backup; CQs are drained, join and leave; other polls run; a signal's handler raises,
and memory is short.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from operator import call

import pytest
from fake import WRITE, World

from shiftverbs import _core

testcapi = pytest.importorskip("_testcapi")
STRANGER = 0x900  # a QP without a journal on the same CQ
COUNTS = (1, 1, 2, 3, 16, 31, 32, 33, 64, 1000, 1 << 70, True, 0, -1)


class Qp:
    """A QP of the program's, and which pair carries it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number, self.pair = world, number, 0
        world.protect()


class Finalized:
    """Its end, wherever the collector finds it, does something."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then, self.itself = then, self

    def __del__(self) -> None:
        gc.disable()
        self.then()


class Program:
    """Several QPs on one CQ. pending: the QP's number of each WR that has completed and was not polled."""

    def __init__(self, make: Callable[..., World], seed: int) -> None:
        self.random = random.Random(seed)
        self.base = make(shared_cq=True, with_channel=seed % 2 == 1, qp_num=0x90, max_send=256)
        self._make = make
        self.cq = self.base.scq
        self.pending: dict[int, int] = {}
        self.gone: set[int] = set()  # polled, or of a life that is over
        self.may_go: set[int] = set()  # of the stranger, once some of its WCs may have been taken along
        self.depth = self.nested = self.wr_id = 0
        self.in_post = False
        self.is_disturbed = False  # a nested poll took what came later, and what was before it was put back
        self.qps = [self.made(0x100 + i) for i in range(3)]
        self.errors: list[BaseException] = []
        self.polls: list[list[int]] = []  # of each that was not checked yet: empty once it has its answer

    def made(self, number: int) -> Qp:
        return Qp(self._make(join=self.base, shared_cq=True, qp_num=number, max_send=256), number)

    def forget(self, number: int) -> None:
        for wr_id in [each for each, qp_num in self.pending.items() if qp_num == number]:
            del self.pending[wr_id]
            self.gone.add(wr_id)

    def complete(self, qp: Qp) -> None:
        for _ in range(self.random.choice((1, 1, 2, 5, 33) if not self.depth else (1, 2))):
            hardware = qp.world.hw[qp.pair]
            self.wr_id += 1
            self.in_post = True
            try:
                qp.world.send(self.wr_id, WRITE)
            except OSError:  # its queue is full of what nobody has polled
                return
            finally:
                self.in_post = False
            hardware.complete(hardware.count() - hardware.done[0])
            self.pending[self.wr_id] = qp.number

    def reset(self, qp: Qp) -> None:
        for hardware in qp.world.hw:
            hardware.reset()
        qp.world.qp.reset_journal()
        self.forget(qp.number)
        qp.pair = 0
        qp.world.qp.guarded = True

    def close(self, qp: Qp) -> None:
        qp.world.qp.detach(0)
        qp.world.qp.destroyed()
        self.forget(qp.number)
        qp.world.qp.close()
        self.qps[self.qps.index(qp)] = self.made(qp.number)

    def move(self, qp: Qp) -> None:
        hardware = qp.world.hw[0]
        if qp.pair == 0 and hardware.count() == hardware.done[0]:
            qp.world.reset_pair(1)
            qp.world.fence(0)
            qp.world.switch(1, 0)
            qp.pair = 1

    def act(self) -> None:
        chance = self.random
        qp = chance.choice(self.qps)
        what = chance.choice("cccrxmdasfp")
        if what == "c":
            self.complete(qp)
        elif what == "r":
            self.reset(qp)
        elif what == "x":
            self.close(qp)
        elif what == "m":
            self.move(qp)
        elif what == "d":
            self.cq.drain(chance.randrange(2))
        elif what == "a":
            self.cq.set_active(1, chance.random() < 0.6)
        elif what == "s":
            self.wr_id += 1
            self.pending[self.wr_id] = STRANGER
            self.base.scqs[0].push(self.wr_id, 0, STRANGER)
        elif what == "f":
            self.may_go.update(each for each, number in self.pending.items() if number == STRANGER)
            self.cq.forget_qp(STRANGER)
        elif 0 < self.depth < 3:
            self.nested += 1
            self.poll(0, 0)

    def finalizer(self) -> None:
        if not all(self.polls):  # since Python 3.12 the collector runs between two steps of Python code
            return
        try:
            for _ in range(self.random.randrange(1, 3)):
                self.act()
        except BaseException as error:
            self.errors.append(error)

    def driver(self) -> None:
        gc.disable()
        testcapi.remove_mem_hooks()
        _core.clear_attention()
        _core.take_events()
        if self.depth and not self.in_post:
            for _ in range(self.random.randrange(3)):
                self.act()
            if self.random.random() < 0.2:
                raise KeyboardInterrupt

    def poll(self, collect: int, fails_at: int) -> None:
        """collect: so many objects later the collector runs; fails_at: which allocation fails; 0: none."""
        want = self.random.choice(COUNTS)
        nested = self.nested
        is_armed = self.random.random() < 0.4
        has_channel = self.base.with_channel
        if is_armed:
            _core.clear_attention()
            while has_channel and self.base.channel.wait(0)[0] is not None:
                pass
            self.cq.req_notify()
            _core.raise_attention()
        self.depth += 1
        self.polls.append([want])
        # Between the poll's end and that it is known, no step of Python code, and nothing that needs memory.
        steps = map(call, (partial(self.cq.poll, want), self.polls[-1].clear))
        try:
            if collect:
                gc.collect(0)  # it counts from here
                hoard = [
                    (i, i) for i in range(2200)
                ]  # more pairs than the interpreter keeps: the next one is new
                assert hoard
                Finalized(self.finalizer)
                gc.set_threshold(collect)
                gc.enable()
            if fails_at:
                testcapi.set_nomemory(fails_at, fails_at + 1)
            try:
                (count, wcs), _ = steps
            finally:
                testcapi.remove_mem_hooks()
                gc.disable()
        except (MemoryError, KeyboardInterrupt):
            self.is_disturbed |= nested != self.nested
            return
        else:
            assert count == len(wcs) <= max(0, want)
            self.check(
                [(wc.wr_id, wc.qp_num, wc.status) for wc in wcs], self.depth == 1 and nested == self.nested
            )
        finally:
            self.depth -= 1
            self.polls.pop()
        if not count and want > 0 and not self.depth and is_armed and has_channel:
            second = self.base.scqs[1].pending if self.cq.is_active(1) else 0
            if self.cq.buffered + self.base.scqs[0].pending + second:
                assert self.base.channel.wait(0)[0] is self.cq, "empty, and no event tells of what is there"

    def check(self, polled: list[tuple[int, int, int]], in_order: bool) -> None:
        for wr_id, number, status in polled:
            assert status == 0 and wr_id not in self.gone and self.pending[wr_id] == number, (wr_id, number)
            if in_order and not self.is_disturbed:
                before = [each for each, qp_num in self.pending.items() if qp_num == number and each < wr_id]
                assert self.may_go.issuperset(before), (wr_id, before)
            del self.pending[wr_id]
            self.gone.add(wr_id)

    def settle(self) -> None:
        """Poll to empty, with nothing amid it: nothing is missing."""
        _core.set_driver(None)
        _core.clear_attention()
        _core.take_events()
        self.cq.set_active(1, True)
        while True:
            _core.clear_attention()
            count, wcs = self.cq.poll(100)
            self.check([(wc.wr_id, wc.qp_num, wc.status) for wc in wcs], False)
            if not count:
                break
        assert self.may_go.issuperset(self.pending), self.pending
        self.forget(STRANGER)
        self.is_disturbed = False
        _core.set_driver(self.driver)


@pytest.fixture
def collector() -> Iterator[None]:
    """It runs where the program says so alone."""
    before = gc.get_threshold()
    gc.disable()
    yield
    _core.set_driver(None)
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.parametrize("seed", range(150))
def test_any_poll(make: Callable[..., World], collector: None, seed: int) -> None:
    program = Program(make, seed)
    _core.take_events()
    _core.clear_attention()
    _core.set_driver(program.driver)
    chance = program.random
    for _ in range(60):
        for _ in range(chance.randrange(1, 5)):
            program.act()
        if chance.random() < 0.5:
            _core.raise_attention()
        collect, fails_at = chance.choice(
            ((0, 0), (0, 0), (chance.randrange(1, 21), 0), (3, 0), (9, 0), (0, 1), (0, 3), (0, 8), (0, 20))
        )
        program.poll(collect, fails_at)
        gc.collect(0)
        assert not program.errors, program.errors
        if chance.random() < 0.15:
            program.settle()
    program.settle()
