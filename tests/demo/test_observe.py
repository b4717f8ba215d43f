# SPDX-License-Identifier: BSD-3-Clause
"""Events for hooks: delivery, isolation from bad callbacks, bounds, fork."""

import dataclasses
import os
import subprocess
import sys
import threading
import time

import pytest

from shiftverbs import observe


@pytest.fixture(autouse=True)
def _no_leftovers():
    yield
    assert not observe._subscriptions, "a test left a subscription behind"


def fallback(n: int) -> observe.Fallback:
    return observe.Fallback(qp_num=n, device="soft0", epoch=n, target="soft1", durations={"fallback_ms": 1.5})


def test_delivered_in_order_on_one_other_thread():
    seen = []
    with observe.subscribe(lambda event: seen.append((event.qp_num, threading.current_thread()))):
        for n in range(100):
            observe.publish(fallback(n))
        assert observe.flush()
    assert [n for n, _ in seen] == list(range(100))
    assert {thread.name for _, thread in seen} == {"shiftverbs-observe"}
    assert all(thread.daemon for _, thread in seen)


def test_kinds_select():
    seen = []
    with observe.subscribe(seen.append, kinds=(observe.Failed, observe.Unprotected)):
        observe.publish(fallback(1))
        observe.publish(observe.Failed(qp_num=2, device="soft0", why="no path left"))
        observe.publish(observe.Unprotected(qp_num=3, device="soft0", why="no backup"))
        assert observe.flush()
    assert [event.kind for event in seen] == ["Failed", "Unprotected"]


def test_a_raising_callback_disturbs_nobody(caplog):
    seen = []

    def bad(event):
        raise RuntimeError("hook is broken")

    with observe.subscribe(bad) as broken, observe.subscribe(seen.append) as good:
        for n in range(5):
            observe.publish(fallback(n))
        assert observe.flush()
        assert broken.errors == 5 and broken.delivered == 0
        assert good.delivered == 5
    assert len(seen) == 5
    logged = [record for record in caplog.records if "hook is broken" in (record.exc_text or "")]
    assert len(logged) == 1, "logged once only"


def test_a_stuck_callback_never_blocks_publish_and_overflow_is_counted():
    release = threading.Event()
    entered = threading.Event()
    count = [0]

    def stuck(event):
        entered.set()
        release.wait(30)
        count[0] += 1

    before = observe.stats()
    with observe.subscribe(stuck):
        observe.publish(fallback(0))
        assert entered.wait(5)
        started = time.monotonic()
        for n in range(observe.QUEUE_LIMIT + 10):
            observe.publish(fallback(n))
        took = time.monotonic() - started
        release.set()
        assert observe.flush(30)
    after = observe.stats()
    assert took < 5, "publish waited for the callback"
    assert after.overflowed - before.overflowed == 10
    assert after.published - before.published == observe.QUEUE_LIMIT + 11
    assert count[0] == observe.QUEUE_LIMIT + 1


def test_cancel_ends_delivery_and_may_be_called_twice():
    seen = []
    subscription = observe.subscribe(seen.append)
    observe.publish(fallback(1))
    assert observe.flush()
    subscription.cancel()
    subscription()
    observe.publish(fallback(2))
    assert observe.flush()
    assert [event.qp_num for event in seen] == [1]
    assert not subscription.active


def test_cancel_from_within_the_callback():
    seen = []

    def once(event):
        seen.append(event)
        subscription.cancel()

    subscription = observe.subscribe(once)
    observe.publish(fallback(1))
    observe.publish(fallback(2))
    assert observe.flush()
    assert len(seen) == 1


def test_events_are_frozen_and_carry_monotonic_time():
    before = time.monotonic_ns()
    event = fallback(1)
    assert before <= event.t_ns <= time.monotonic_ns()
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.epoch = 7


@pytest.mark.parametrize("kinds", [int, (observe.Failed, "Fallback"), [None]])
def test_bad_kinds_are_refused(kinds):
    with pytest.raises(TypeError, match="not an event class"):
        observe.subscribe(print, kinds=kinds)


def test_bad_callback_is_refused():
    with pytest.raises(TypeError, match="callable"):
        observe.subscribe(None)


def test_flush_inside_a_callback_does_not_wait_for_itself():
    results = []
    with observe.subscribe(lambda event: results.append(observe.flush(30))):
        observe.publish(fallback(1))
        assert observe.flush(5)
    assert results == [False]


AMID = """
import signal, threading
from shiftverbs import observe
where, then = {where!r}, {then!r}
seen, inner = [], []
def due(at):
    if at == where:
        signal.raise_signal(signal.SIGUSR1)
class List(list):
    def append(self, one):
        list.append(self, one)
        due("append")
    def remove(self, one):
        list.remove(self, one)
        due("remove")
class Thread(threading.Thread):
    def start(self):
        due("start")
        super().start()
class Stop(Exception):
    pass
def handler(number, frame):
    signal.signal(number, signal.SIG_IGN)
    with observe.subscribe(inner.append):
        observe.publish(observe.Unprotected(qp_num=1, device="soft0", why="a test"))
        observe.flush(5)
    if then == "raise":
        raise Stop
signal.signal(signal.SIGUSR1, handler)
observe._subscriptions = List()
observe.threading.Thread = Thread
subscription = None
try:
    subscription = observe.subscribe(seen.append)
    subscription.cancel()
except Stop:
    pass
with observe.subscribe(seen.append):
    observe.publish(observe.Unprotected(qp_num=2, device="soft0", why="a test"))
    assert observe.flush(10)
print([event.qp_num for event in seen].count(2) >= 1, [event.qp_num for event in inner])
print([thread.name for thread in threading.enumerate()].count("shiftverbs-observe"))
"""


@pytest.mark.parametrize("then", ["return", "raise"])
@pytest.mark.parametrize("where", ["append", "start", "remove"])
def test_a_signal_handler_subscribes_in_the_middle_of_that(where, then):
    """It waits for no lock of the thread that it broke into, and leaves none taken."""
    done = subprocess.run(
        [sys.executable, "-c", AMID.format(where=where, then=then)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True [1]", "1"], (done.stdout, done.stderr)


def test_a_forked_child_starts_empty():
    seen = []
    with observe.subscribe(seen.append):
        observe.publish(fallback(1))
        assert observe.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                mine = []
                observe.publish(fallback(2))  # nobody listens here any more
                with observe.subscribe(mine.append):
                    observe.publish(fallback(3))
                    if observe.flush(5) and [e.qp_num for e in mine] == [3] and len(seen) == 1:
                        status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_prometheus_metrics_or_a_clear_error():
    try:
        import prometheus_client
    except ImportError:
        with pytest.raises(ImportError, match="prometheus_client"):
            observe.register_prometheus()
        return
    registry = prometheus_client.CollectorRegistry()
    with observe.register_prometheus(registry):
        observe.publish(fallback(1))
        assert observe.flush()
        labels = {"kind": "Fallback", "device": "soft0"}
        assert registry.get_sample_value("shiftverbs_events_total", labels) == 1
        assert registry.get_sample_value("shiftverbs_fallback_seconds_count", {"device": "soft0"}) == 1
        assert registry.get_sample_value("shiftverbs_events_overflowed_total") is not None
