# SPDX-License-Identifier: BSD-3-Clause
"""Completion channels over several NICs, synthetic events, and waiting."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable

import pytest
from fake import FLUSH, RETRY_EXC, SUCCESS, World
from pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError

from shiftverbs import _core

Make = Callable[..., World]


@pytest.fixture
def w(make: Make) -> World:
    """A guarded QP whose CQs share one channel."""
    world = make(with_channel=True, nics=3)
    world.protect()
    return world


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def acked(w: World, cq: object) -> int:
    return int(w.lib.fv_acked(cq.ptr))  # type: ignore[attr-defined]


def test_event_of_the_default_nic(w: World) -> None:
    w.scq.req_notify()
    assert w.scq.armed and not readable(w.channel.fd)
    w.send(1)
    w.hw[0].complete()
    assert readable(w.channel.fd)
    assert w.channel.wait(1000) == (w.scq, 0, w.scqs[0].ptr)
    assert acked(w, w.scqs[0]) == 1 and not w.scq.armed and not readable(w.channel.fd)
    assert w.poll() == [(1, SUCCESS)]
    assert w.channel.wait(0) == (None, -1, 0)


def test_event_of_a_backup_is_the_same_cq(w: World) -> None:
    w.scq.set_active(1, True)
    w.rcq.set_active(1, True)
    w.rcq.req_notify()
    assert (
        w.lib.fv_armed(w.rcqs[0].ptr) and w.lib.fv_armed(w.rcqs[1].ptr) and not w.lib.fv_armed(w.rcqs[2].ptr)
    )
    w.recv(5)
    w.qp.open_recv(1)
    w.hw[1].receive()
    assert readable(w.channel.fd)
    assert w.channel.wait(1000) == (w.rcq, 1, w.rcqs[1].ptr)
    assert acked(w, w.rcqs[1]) == 1 and acked(w, w.rcqs[0]) == 0
    assert w.poll() == [(5, SUCCESS)]


def test_wcs_made_up_wake_an_armed_cq_once(w: World) -> None:
    w.send(1)
    w.send(2)
    w.recv(10)
    w.rcq.req_notify()
    assert not readable(w.channel.fd)
    w.qp.abort(RETRY_EXC)
    assert readable(w.channel.fd)
    assert w.channel.wait(0) == (w.rcq, -1, w.rcqs[0].ptr)
    assert acked(w, w.rcqs[0]) == 0, "never acknowledged to libibverbs"
    assert not readable(w.channel.fd), "the send CQ was not armed"
    assert w.channel.wait(0) == (None, -1, 0)
    assert w.poll() == [(1, RETRY_EXC), (2, FLUSH), (10, FLUSH)]


def test_synthetic_events_come_in_order_and_one_per_arming(w: World) -> None:
    w.send(1)
    w.recv(10, 3)
    w.rcq.req_notify()
    w.scq.req_notify()
    w.qp.abort(RETRY_EXC)
    assert [w.channel.wait(0)[0] for _ in range(2)] == [w.scq, w.rcq]
    assert w.channel.wait(0)[0] is None


def test_arming_a_cq_with_waiting_wcs_signals_at_once(w: World) -> None:
    w.send(1)
    w.qp.abort(RETRY_EXC)
    assert not readable(w.channel.fd)
    w.scq.req_notify()
    assert w.channel.wait(0) == (w.scq, -1, w.scqs[0].ptr)


def test_drain_from_a_cq_that_hardware_announced_makes_no_second_event(w: World) -> None:
    w.scq.req_notify()
    w.send(1)
    w.hw[0].complete()
    w.scq.drain(0)
    assert w.channel.wait(0) == (w.scq, 0, w.scqs[0].ptr)
    assert w.channel.wait(0)[0] is None
    assert w.poll() == [(1, SUCCESS)]


def test_drain_from_a_cq_that_was_not_armed_makes_one(w: World) -> None:
    w.rcq.req_notify()
    w.recv(5)
    w.qp.open_recv(1)
    w.hw[1].receive()
    assert not readable(w.channel.fd)
    w.rcq.drain(1)
    assert w.channel.wait(0) == (w.rcq, -1, w.rcqs[0].ptr)
    assert w.poll() == [(5, SUCCESS)]


def test_a_cq_that_joins_an_armed_one(w: World) -> None:
    w.rcq.req_notify()
    w.recv(5, 2)
    w.qp.open_recv(1)
    w.hw[1].receive()
    w.rcq.set_active(1, True)
    assert w.channel.wait(0) == (w.rcq, -1, w.rcqs[0].ptr), "what was there before"
    w.rcq.req_notify()
    w.channel.wait(0)
    w.rcq.req_notify()
    assert w.poll_cq(w.rcq) == [(5, SUCCESS)]
    w.hw[1].receive()
    assert (w.rcq, 1, w.rcqs[1].ptr) in [w.channel.wait(0), w.channel.wait(0)]


def test_default_cq_without_core(w: World) -> None:
    """An extended CQ on the application's channel."""
    from fake import HwCQ

    other = HwCQ(w.lib, w.ctx, channel=w.channels[0])
    unknown = HwCQ(w.lib, w.ctx, channel=w.channels[1])
    try:
        for cq in (other, unknown):
            w.lib.fv_acked(cq.ptr)
            _core.CQCore(cq.ptr).req_notify()
            cq.push(1)
        assert w.channel.wait(0) == (None, 0, other.ptr)
        assert w.channel.wait(0) == (None, -1, 0), "a shadow CQ that is gone is nobody's"
        assert acked(w, other) == 1 and acked(w, unknown) == 1
    finally:
        for cq in (other, unknown):
            w.lib.fv_free_cq(cq.ptr)


def test_timeouts(w: World) -> None:
    start = time.monotonic()
    assert w.channel.wait(30) == (None, -1, 0)
    assert 0.03 <= time.monotonic() - start < 5


@pytest.mark.parametrize("which", ["default", "ours"])
def test_nonblocking_descriptor(w: World, which: str) -> None:
    from ctypes import c_int

    fd = c_int.from_address(w.channels[0] + 8).value if which == "default" else w.channel.fd
    assert w.channel.wait(0) == (None, -1, 0)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    with pytest.raises(PyverbsRDMAError, match=r"Failed to get CQ event\. Errno: 11") as e:
        w.channel.wait()
    assert e.value.error_code == errno.EAGAIN
    w.scq.req_notify()
    w.send(1)
    w.hw[0].complete()
    assert w.channel.wait()[0] is w.scq


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_blocked_wait_is_woken_by_hardware_and_releases_the_gil(w: World) -> None:
    w.scq.req_notify()
    thread, results = in_thread(w.channel.wait)
    w.send(1)
    w.hw[0].complete()
    thread.join(10)
    assert results == [(w.scq, 0, w.scqs[0].ptr)]


def test_blocked_wait_is_woken_by_a_synthetic_event(w: World) -> None:
    w.send(1)
    w.scq.req_notify()
    thread, results = in_thread(w.channel.wait)
    w.qp.abort(RETRY_EXC)
    thread.join(10)
    assert results == [(w.scq, -1, w.scqs[0].ptr)]


@pytest.mark.parametrize("how", ["raise_attention", "descriptor"])
def test_blocked_wait_runs_the_driver(w: World, how: str) -> None:
    ran = threading.Event()

    def driver() -> None:
        _core.clear_attention()
        ran.set()

    thread, results = in_thread(lambda: w.channel.wait(20_000))
    w.scq.req_notify()
    _core.set_driver(driver)
    deadline = time.monotonic() + 10
    while not ran.is_set():
        if how == "raise_attention":
            _core.raise_attention()
        else:
            from ctypes import c_int

            c_int.from_address(_core.attention_address()).value = 1
            os.write(_core.wake_descriptor(), (1).to_bytes(8, "little"))
        assert not ran.wait(0.01) or time.monotonic() < deadline
        assert time.monotonic() < deadline
    w.send(1)
    w.hw[0].complete()
    thread.join(10)
    assert results == [(w.scq, 0, w.scqs[0].ptr)]


def test_two_threads_on_one_channel_get_one_event_each(w: World) -> None:
    w.scq.req_notify()
    w.rcq.req_notify()
    threads = [in_thread(lambda: w.channel.wait(10_000)) for _ in range(2)]
    w.send(1)
    w.recv(2)
    w.hw[0].complete()
    w.hw[0].receive()
    for thread, _ in threads:
        thread.join(20)
    assert {r[0][0] for _, r in threads} == {w.scq, w.rcq}


def test_asyncio(w: World) -> None:
    async def main() -> object:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.add_reader(w.channel.fd, lambda: future.done() or future.set_result(w.channel.wait(0)))
        w.scq.req_notify()
        w.send(1)
        loop.call_soon(w.hw[0].complete)
        result = await asyncio.wait_for(future, 10)
        loop.remove_reader(w.channel.fd)
        return result

    assert asyncio.run(main()) == (w.scq, 0, w.scqs[0].ptr)


def test_close_while_somebody_waits(w: World) -> None:
    thread, results = in_thread(lambda: w.channel.wait(20_000))
    deadline = time.monotonic() + 10
    while not thread.is_alive() and not results:
        assert time.monotonic() < deadline
    w.channel.close()
    w.channel.close()
    _core.raise_attention()
    thread.join(20)
    assert len(results) == 1 and (isinstance(results[0], PyverbsUserError) or results[0] == (None, -1, 0))
    with pytest.raises(PyverbsUserError):
        _ = w.channel.fd
    with pytest.raises(PyverbsUserError):
        w.channel.wait(0)


def test_cq_that_goes_takes_its_pending_event_along(w: World) -> None:
    w.send(1)
    w.recv(2)
    w.scq.req_notify()
    w.rcq.req_notify()
    w.qp.abort(RETRY_EXC)
    w.scq.close()
    assert w.channel.wait(0)[0] is w.rcq
    assert w.channel.wait(0)[0] is None and not readable(w.channel.fd)


def remove_device(w: World, k: int) -> None:
    """As the kernel does: what is in the queue can be read, then the descriptor is in error for good."""
    write_fd = ctypes.c_int.from_address(w.channels[k] + 16)
    os.close(write_fd.value)
    write_fd.value = -1


def test_a_removed_device_keeps_nobody_awake(w: World) -> None:
    """Its descriptor is never quiet again; the other NICs' events come as before."""
    w.scq.req_notify()
    w.send(1)
    w.hw[0].complete()
    for k in (0, 1):
        remove_device(w, k)
    assert w.channel.wait(0) == (w.scq, 0, w.scqs[0].ptr)
    began = time.thread_time()
    assert w.channel.wait(300) == (None, -1, 0)
    assert time.thread_time() - began < 0.1 and not readable(w.channel.fd)
    w.scq.set_active(2, True)
    w.rcq.set_active(2, True)
    w.rcq.req_notify()
    w.recv(5)
    w.qp.open_recv(2)
    w.hw[2].receive()
    assert w.channel.wait(1000) == (w.rcq, 2, w.rcqs[2].ptr)


def test_a_removed_default_device_is_told_where_nothing_is_guarded(make: Make) -> None:
    w = make(with_channel=True, nics=2)
    remove_device(w, 1)
    assert w.channel.wait(0) == (None, -1, 0)
    remove_device(w, 0)
    with pytest.raises(PyverbsRDMAError):
        w.channel.wait(0)


def test_req_notify_of_a_dead_nic(w: World) -> None:
    """The application of a guarded QP need not know; where another NIC carries the traffic, that one is armed."""
    w.scq.set_active(1, True)
    w.lib.fv_fail_cq(w.scqs[0].ptr, errno.EIO)
    w.scq.req_notify()
    assert w.lib.fv_armed(w.scqs[1].ptr)
    w.lib.fv_fail_cq(w.scqs[1].ptr, errno.EIO)
    w.scq.req_notify()
    w.send(1)
    w.qp.abort(RETRY_EXC)  # nothing is left: the errors wake whoever waits
    assert w.channel.wait(0)[0] is w.scq


def test_req_notify_error(w: World) -> None:
    w.qp.guarded = False
    w.lib.fv_fail_cq(w.scqs[0].ptr, errno.EIO)
    with pytest.raises(PyverbsRDMAError, match="Request notify CQ returned 5") as e:
        w.scq.req_notify()
    assert e.value.error_code == errno.EIO
    with pytest.raises(TypeError):
        w.scq.req_notify("x")


def test_channel_can_be_changed(w: World) -> None:
    w.scq.channel = None
    w.send(1)
    w.scq.req_notify()
    w.qp.abort(RETRY_EXC)
    assert w.channel.wait(0)[0] is None
    w.scq.channel = w.channel
    w.scq.req_notify()
    assert w.channel.wait(0)[0] is w.scq


# --- armings and their events


def test_a_readable_descriptor_means_an_event(w: World) -> None:
    """Though it is about nothing but what failover flushed: who waits for the descriptor may then take it blocking."""
    w.scq.req_notify()
    w.send(1)
    w.hw[0].fail_send(RETRY_EXC)
    w.fence(0)
    assert readable(w.channel.fd)
    assert w.channel.wait(0)[0] is w.scq
    assert w.poll() == [] and not readable(w.channel.fd)


def test_every_arming_with_a_completion_has_its_event(w: World) -> None:
    """However late the events are taken, and though the completions were polled long before."""
    for i in range(3):
        w.scq.req_notify()
        w.send(i)
        w.hw[0].complete()
        assert w.poll() == [(i, SUCCESS)]
    for _ in range(3):
        assert w.channel.wait(0) == (w.scq, 0, w.scqs[0].ptr)
    assert w.channel.wait(0) == (None, -1, 0)


def test_armed_again_before_the_event_is_taken(w: World) -> None:
    """The second arming stands: what failover then puts into the CQ is told of, once."""
    w.scq.req_notify()
    w.send(1)
    w.hw[0].complete()
    w.scq.req_notify()
    assert w.channel.wait(0) == (w.scq, 0, w.scqs[0].ptr)
    assert w.poll() == [(1, SUCCESS)]
    w.send(2)
    w.fence(0)
    w.qp.abort(RETRY_EXC, 0)
    assert w.channel.wait(0)[0] is w.scq
    assert w.poll() == [(2, RETRY_EXC)]
    assert w.channel.wait(0) == (None, -1, 0) and not readable(w.channel.fd)


def test_an_arming_whose_forerunners_events_are_all_taken(w: World) -> None:
    """It stands: of what comes on another NIC after a failover there is an event."""
    for i in range(3):
        w.scq.req_notify()
        w.rcq.req_notify()
        w.recv(10 + i)
        w.send(i)
        if i < 2:
            w.hw[0].complete()
            w.hw[0].receive()
    assert w.poll() == [(0, SUCCESS), (1, SUCCESS), (10, SUCCESS), (11, SUCCESS)]
    for _ in range(4):
        assert w.channel.wait(0)[0] is not None
    assert w.channel.wait(0) == (None, -1, 0) and w.scq.armed and w.rcq.armed
    w.scq.set_active(1, True)
    w.rcq.set_active(1, True)
    assert w.qp.open_recv(1) == 0
    w.hw[1].receive()
    assert w.channel.wait(0) == (w.rcq, 1, w.rcqs[1].ptr)


def test_solicited_only_takes_nothing_back(w: World) -> None:
    """Armed for any completion and then for solicited ones: the first request stands, on a NIC that joins too."""
    w.rcq.req_notify()
    w.rcq.req_notify(True)
    w.recv(5)
    w.rcq.set_active(1, True)
    assert w.qp.open_recv(1) == 0
    w.hw[1].receive()
    assert w.channel.wait(0) == (w.rcq, 1, w.rcqs[1].ptr)


def test_one_arming_has_one_event(w: World) -> None:
    """Though the NIC raised one for the flush, and failover one for the error that it made of it."""
    w.scq.req_notify()
    w.send(1)
    w.fence(0)
    w.qp.abort(RETRY_EXC, 0)
    assert w.poll() == [(1, RETRY_EXC)]
    assert w.channel.wait(0)[0] is w.scq  # the NIC's own, and the synthetic one with it
    assert w.channel.wait(0) == (None, -1, 0)


def test_a_synthetic_event_of_a_former_arming_stands(w: World) -> None:
    """Two armings, each with a completion: two events, one synthetic and one of the NIC."""
    w.recv(5)
    w.rcq.req_notify()
    w.qp.close_recv()
    w.qp.abort(RETRY_EXC, 0)  # no NIC has anything to do with it
    w.rcq.req_notify()
    w.rcqs[0].push(9, SUCCESS, 0x77)
    assert [w.channel.wait(0)[0] for _ in range(2)] == [w.rcq, w.rcq]
    assert w.channel.wait(0) == (None, -1, 0)
