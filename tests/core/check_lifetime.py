# SPDX-License-Identifier: BSD-3-Clause
"""Teardown in any order, garbage collection, leaks, fork."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import resource
import signal
import weakref
from collections.abc import Callable

import fake
import pytest
from fake import RETRY_EXC, SUCCESS, World

from shiftverbs import _core

Make = Callable[..., World]


def rss_kb() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.parametrize("order", list(itertools.permutations(["qp", "scq", "rcq", "channel"])))
def test_close_in_any_order_twice_with_traffic(make: Make, order: tuple[str, ...]) -> None:
    w = make(with_channel=True)
    w.protect()
    w.scq.req_notify()
    w.send(1)
    w.send(2)
    w.recv(3)
    w.hw[0].complete()
    w.hw[0].fail_send(RETRY_EXC)
    w.scq.drain(0)
    for name in order * 2:
        getattr(w, name).close()
    assert w.scq.poll() == (0, []) or order[0] == "qp"
    assert _core.take_events() == []
    w.scq.detach(0)
    w.qp.detach(1)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["qp", "scq", "rcq", "channel", "keys", "remote"], 3))
)
def test_dropped_in_any_order(lib: ctypes.CDLL, order: tuple[str, ...]) -> None:
    w = World(lib, with_channel=True)
    w.protect()
    w.scq.req_notify()
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC)
    w.poll()
    refs = [weakref.ref(getattr(w, name)) for name in order]
    for name in order:
        setattr(w, name, None)
    for name in ("qp", "scq", "rcq", "channel", "keys", "remote"):
        setattr(w, name, None)
    assert [r() for r in refs] == [None] * 3
    assert _core.take_events() == []


def test_wcs_after_close_are_nobody_s(world: World) -> None:
    """What the hardware completed before close() is delivered with its own wr_id."""
    w = world
    w.send(77)
    w.recv(88)
    w.hw[0].complete()
    w.hw[0].receive()
    w.qp.detach(0)
    w.qp.close()
    assert w.poll() == [(77, SUCCESS), (88, SUCCESS)]


def test_number_reused_while_the_old_one_is_around(make: Make) -> None:
    a = make(qp_num=0x55, nics=1)
    a.send(1)
    a.qp.detach(0)
    b = make(join=a, qp_num=0x55, nics=1)
    b.send(2)
    a.qp.close()
    b.hw[0].complete()
    assert b.poll() == [(2, SUCCESS)]


def test_thousands_in_cycles(lib: ctypes.CDLL) -> None:
    """10,000 QPs in cycles with closures, some closed, some not, some with events queued."""

    class Holder:
        def __init__(self, w: World, qp: _core.QPCore) -> None:
            self.w, self.qp, self.me = w, qp, self
            self.poll = w.scq.poll
            self.post = qp.post_send

    w = World(lib, nics=2)
    kept = []
    for i in range(10_000):
        qp = _core.QPCore(w.scq, w.rcq, w.hw[0].ptr, 0x10000 + i, 2, 2, 1, 1, 0, False, w.keys)
        qp.attach(1, w.hw[1].ptr, 0x10000 + i)
        qp.begin_fence(0)
        if i % 3 == 0:
            qp.close()
        holder = Holder(w, qp)
        if i % 1000 == 0:
            kept.append(weakref.ref(qp))
        del holder, qp
    gc.collect()
    assert [r() for r in kept] == [None] * 10
    _core.clear_attention()
    assert _core.take_events() == []
    w.close()


def test_no_memory_grows(lib: ctypes.CDLL) -> None:
    def round_() -> None:
        for _ in range(100):
            w = World(lib, nics=3, with_channel=True, max_send=64, max_recv=64)
            w.protect()
            for i in range(64):
                w.send(i, fake.WRITE, rkey=i)
                w.recv(i)
            w.hw[0].fail_send(RETRY_EXC)
            w.poll()
            w.qp.abort()
            w.poll(100)
            _core.take_events()
            w.close()

    round_()
    # pyverbs 44 loses the SGEs' and WRs' own malloc: measured apart.
    before = rss_kb()
    wrs = [(fake.send_wr(i), fake.recv_wr(i)) for i in range(12_800)]
    leaked_by_pyverbs = rss_kb() - before
    del wrs
    before = rss_kb()
    objects = len(gc.get_objects())
    round_()
    round_()
    gc.collect()
    assert rss_kb() - before < 2 * leaked_by_pyverbs + 4096
    assert abs(len(gc.get_objects()) - objects) < 200


def test_no_descriptor_is_left(lib: ctypes.CDLL) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        w = World(lib, with_channel=True)
        w.close()
        World(lib).close()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_poll_keeps_no_reference(world: World) -> None:
    import sys

    empty = sys.getrefcount(fake.WC_CLASS)
    for i in range(200):
        world.send(i)
        world.hw[0].complete()
        n, wcs = world.scq.poll()
        count = sys.getrefcount(wcs[0])
        assert count == 2
        del wcs
    assert abs(sys.getrefcount(fake.WC_CLASS) - empty) < 5


def test_fork(make: Make) -> None:
    """The child's posts are the hardware's business; it may drop or close what it inherited; the parent goes on."""
    w = make(with_channel=True)
    w.protect()
    w.send(1)
    w.scq.req_notify()
    ran: list[int] = []
    _core.set_driver(lambda: (_core.clear_attention(), ran.append(1)))
    _core.raise_attention()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            assert _core.take_events() == []
            w.scq.poll()
            outstanding = w.qp.outstanding
            w.send(2)
            assert ran == [] and w.hw[0].count() == 2 and w.qp.outstanding == outstanding, (
                "no journal of the parent's"
            )
            assert w.channel.wait(1) == (None, -1, 0)
            w.hw[0].complete()
            w.qp.close()
            assert w.scqs[0].pending == 1, "the child's close does not touch the parent's hardware"
            w.channel.close()
            del w
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    w.hw[0].complete()
    assert w.channel.wait(5000) == (w.scq, 0, w.scqs[0].ptr)
    assert ran == [1]
    assert w.poll() == [(1, SUCCESS)]


@pytest.mark.parametrize("k", [-1, 16, 1 << 31])
def test_cq_pair_numbers(world: World, k: int) -> None:
    for call in (
        lambda: world.scq.attach(k, 1),
        lambda: world.scq.detach(k),
        lambda: world.scq.set_active(k, True),
        lambda: world.scq.drain(k),
    ):
        with pytest.raises((ValueError, OverflowError)):
            call()


def test_null_pointers_are_refused(world: World) -> None:
    with pytest.raises(ValueError):
        _core.CQCore(0)
    with pytest.raises(ValueError):
        _core.ChannelCore(0)
    with pytest.raises(ValueError):
        world.qp.attach(1, 0, 5)
    with pytest.raises(ValueError):
        world.scq.set_active(5, True)
    with pytest.raises(TypeError):
        _core.QPCore(None, world.rcq, 1, 1, 1, 1, 1, 1)
    with pytest.raises(TypeError):
        _core.QPCore(world.scq, 3, 1, 1, 1, 1, 1, 1)
    with pytest.raises(OverflowError):
        _core.QPCore(world.scq, world.rcq, world.hw[0].ptr, 1, -1, 1, 1, 1)


def test_queues_of_no_size(world: World) -> None:
    from pyverbs.pyverbs_error import PyverbsRDMAError

    qp = _core.QPCore(world.scq, world.rcq, world.hw[0].ptr, 0x777, 0, 0, 0, 0)
    for post, wr in ((qp.post_send, fake.send_wr()), (qp.post_recv, fake.recv_wr())):
        with pytest.raises(PyverbsRDMAError):
            post(wr)
    assert qp.move_begin() == "idle"
    qp.abort()
    qp.close()
