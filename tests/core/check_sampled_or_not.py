# SPDX-License-Identifier: BSD-3-Clause
"""Samples and the application: whatever it and the hardware do, it sees the same with samples as without."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from typing import Any

import pytest
from fake import (
    FLUSH,
    INLINE,
    READ,
    REM_ACCESS,
    RETRY_EXC,
    SEND,
    SIGNALED,
    WRITE,
    World,
    library,
    send_wr,
)

from shiftverbs import _core

RUNS = 8 * int(os.environ.get("SHIFTVERBS_MODEL_EXAMPLES", "40"))
STEPS = 120
QPS = 3
LIB = library()
DATA = ctypes.create_string_buffer(64)


def make(number: int, join: World | None = None) -> World:
    w = World(LIB, max_send=8, qp_num=0x100 + number, join=join)
    w.protect()
    return w


class Program:
    """A program on three QPs that share their CQs, drawn from a seed; seen: all that it saw."""

    def __init__(self, seed: int, sampled: bool) -> None:
        self.random, self.chance = random.Random(seed), random.Random(seed + 1)
        self.sampled = sampled
        self.seen: list[Any] = []
        self.base = make(0)
        self.qps: list[World | None] = [make(n, self.base) for n in range(1, 1 + QPS)]
        self.numbers = QPS
        self.moved: set[World] = set()
        self.samples: list[Any] = [_core.SendSample() for _ in range(3)] if sampled else []

    # ---- samples, which have a chance of their own

    def sample(self) -> None:
        c = self.chance
        at = c.randrange(3)
        what = c.choice(["want", "want", "want", "want", "drop", "del", "take", "take"])
        if what == "want":
            cores = [w.qp for w in self.qps if w is not None and c.random() < 0.7]
            self.samples[at].want(cores, c.choice([0, 0, 0, 1]))
        elif what == "drop":
            self.samples[at].drop()
        elif what == "del":
            self.samples[at] = None
            self.samples[at] = _core.SendSample()
        else:
            for each in _core.ended_samples():
                assert each in self.samples
                got = each.take()
                assert got is None or (got[0] >= 0 and got[1] > 0 and got[3] > got[2] and got[4] >= 0), got

    # ---- the application, the hardware and the driver

    def step(self) -> None:
        r = self.random
        at = r.randrange(QPS)
        w = self.qps[at]
        what = r.choice(
            ["send"] * 8
            + ["complete"] * 6
            + ["poll"] * 4
            + ["read"] * 2
            + ["fail", "refuse", "switch", "home", "move"]
            + ["own", "touched", "reset", "abort", "close", "end", "cq", "notify", "drain", "guard"]
        )
        if w is None:
            self.numbers += 1
            self.qps[at] = make(self.numbers, self.base)
            return
        try:
            getattr(self, what)(w, at)
        except Exception as error:  # what it is, both have to see
            self.seen.append((what, type(error).__name__, str(error)))
        self.seen.append((what, at, w.qp.outstanding if not w.qp.closed else None, w.events()))

    def live(self, w: World) -> Any:
        return w.hw[w.qp.send_pair]

    def send(self, w: World, at: int) -> None:
        r = self.random
        wrs: list[Any] = []  # a chain does not keep its WRs
        for n in range(r.choice([1, 1, 2, 5, 10])):
            flags = r.choice([0, SIGNALED, SIGNALED | INLINE])
            if flags & INLINE:  # only that is read
                opcode, sges = SEND, [(ctypes.addressof(DATA), 16, 1)]
            else:
                opcode, sges = (
                    r.choice([SEND, WRITE, READ]),
                    [(0x1000, 64, 1)] * r.choice([1, 2, 4, 9 if n else 1]),
                )
            wrs.append(send_wr(r.randrange(1000), opcode, flags, sges=sges, next_wr=wrs[-1] if wrs else None))
        bad = send_wr()
        try:
            w.qp.post_send(wrs[-1], bad)
        finally:
            self.seen.append(bad.wr_id)

    def complete(self, w: World, at: int) -> None:
        hw = self.live(w)
        left = hw.count() - hw.done[0]
        hw.complete(self.random.randint(0, left))

    def poll(self, w: World, at: int) -> None:
        self.seen.append(w.poll_cq(w.scq, self.random.choice([0, 1, 2, 64])))

    def read(self, w: World, at: int) -> None:
        """As of an extended CQ: up to so many completions, and what each call returned."""
        cursor, queue = _core.CQCursor(w.scq, w.scqs[0].ptr), w.scqs[0].ptr
        rc = cursor.start_poll(None)
        self.seen.append(rc)
        for _ in range(self.random.choice([0, 1, 64])):
            if rc:
                break
            self.seen.append((LIB.fv_cursor_wr_id(queue), LIB.fv_cursor_status(queue), cursor.read_opcode()))
            rc = cursor.poll_next()
            self.seen.append(rc)

    def fail(self, w: World, at: int) -> None:
        hw = self.live(w)
        if hw.done[0] < hw.count():
            hw.fail_send(self.random.choice([RETRY_EXC, FLUSH, REM_ACCESS]))
            hw.flush()

    def refuse(self, w: World, at: int) -> None:
        self.live(w).fail(self.random.randrange(3), self.random.choice([12, 22, 5]))

    def switch(self, w: World, at: int) -> None:
        here = w.qp.send_pair
        w.fence(here)
        w.reset_pair(1 - here)
        _, acked, wired = w.qp.counters()
        w.switch(1 - here, self.random.randint(acked, wired))

    def home(self, w: World, at: int) -> None:
        w.qp.close_send()
        w.qp.open_send(w.qp.send_pair)

    def move(self, w: World, at: int) -> None:
        self.seen.append(w.qp.move_begin())
        if self.random.random() < 0.5:
            self.seen.append(w.qp.post_fence_write(0, 7))
        if self.random.random() < 0.5:
            w.qp.move_cancel()

    def own(self, w: World, at: int) -> None:
        hw = self.live(w)
        if hw.done[0] < hw.count():
            hw.fail_send(REM_ACCESS)

    def touched(self, w: World, at: int) -> None:
        w.qp.app_touched()
        self.live(w).flush()

    def reset(self, w: World, at: int) -> None:
        for hw in w.hw:
            hw.reset()
        w.qp.reset_journal()

    def abort(self, w: World, at: int) -> None:
        w.qp.abort()

    def close(self, w: World, at: int) -> None:
        w.close()
        self.qps[at] = None
        if self.random.random() < 0.5:
            gc.collect(0)

    def end(self, w: World, at: int) -> None:
        w.qp.begin_end() if self.random.random() < 0.5 else w.qp.end_at_post()

    def cq(self, w: World, at: int) -> None:
        LIB.fv_fail_cq(w.scqs[0].ptr, self.random.choice([0, 12, 5]))

    def notify(self, w: World, at: int) -> None:
        w.scq.req_notify()

    def drain(self, w: World, at: int) -> None:
        self.seen.append(w.scq.drain(self.random.randrange(2)))

    def guard(self, w: World, at: int) -> None:
        w.qp.guarded = self.random.random() < 0.8

    def run(self) -> list[Any]:
        try:
            for _ in range(STEPS):
                if self.sampled:
                    for _ in range(self.chance.randrange(4)):
                        self.sample()
                self.step()
        finally:
            self.over()
        return self.seen

    def over(self) -> None:
        """Everything goes, the CQs first every other time, with samples that are wanted, under way and over."""
        LIB.fv_fail_cq(self.base.scqs[0].ptr, 0)
        if self.random.random() < 0.5:
            self.base.scq.close()
        for w in self.qps:
            if w is not None:
                w.close()
        self.qps.clear()
        self.base.close()
        self.samples.clear()
        assert _core.ended_samples() == []


@pytest.mark.parametrize("part", range(8))
def test_an_application_sees_the_same_with_samples(part: int) -> None:
    for seed in range(part, RUNS, 8):
        plain = Program(seed, sampled=False).run()
        sampled = Program(seed, sampled=True).run()
        for n, (one, other) in enumerate(zip(plain, sampled, strict=False)):
            assert one == other, (seed, n)
        assert len(plain) == len(sampled), seed
