# SPDX-License-Identifier: BSD-3-Clause
"""What happens to protected QPs, as events for checkpoint hooks, logs and metrics.

    import shiftverbs.observe as observe

    def hook(event):
        if isinstance(event, observe.Fallback):
            save_checkpoint_soon()

    subscription = observe.subscribe(hook, kinds=(observe.Fallback, observe.Failed))
    ...
    subscription.cancel()

Callbacks run one after the other on one daemon thread of this module, never in the thread that posts or
polls: a slow or raising callback delays other callbacks only. The queue before that thread is bounded; events
that do not fit are counted in `stats().overflowed` and lost: a stuck callback costs no memory and no traffic.
That thread takes no signals; threads and processes that a callback starts inherit this, until they unblock them.

Nothing here runs at import; the thread starts with the first subscription.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

__all__ = [
    "Event",
    "Failback",
    "Failed",
    "Fallback",
    "Migrated",
    "Paired",
    "PathFailed",
    "Protected",
    "Stats",
    "Straggler",
    "StragglerOver",
    "Subscription",
    "Unprotected",
    "flush",
    "publish",
    "register_prometheus",
    "stats",
    "subscribe",
]

# Beyond this many undelivered events new ones are dropped and counted.
QUEUE_LIMIT = 4096

_log = logging.getLogger("shiftverbs.observe")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Common part of all events.

    qp_num: the application's QP number (that of the default QP, whatever carries the traffic).
    device: name of the default NIC, for example "mlx5_0".
    t_ns: CLOCK_MONOTONIC in nanoseconds when it happened (not when it is delivered).
    """

    qp_num: int
    device: str
    t_ns: int = field(default_factory=time.monotonic_ns)

    @property
    def kind(self) -> str:
        """The event's name, for logs and labels."""
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class Paired(Event):
    """The peer's entry was found and names us: the pairing is mutual. Backups are connected next.

    backups: device names of our backups, in order. peer: a printable name of the peer's default route.
    """

    backups: tuple[str, ...] = ()
    peer: str = ""


@dataclass(frozen=True, kw_only=True)
class Protected(Event):
    """At least one backup pair is connected: from now on the QP survives a failure of its path.

    backups: device names of the connected backups, in order.
    """

    backups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unprotected(Event):
    """The QP runs as with plain pyverbs, or does again. why: the reason, in a sentence."""

    why: str = ""


@dataclass(frozen=True, kw_only=True)
class PathFailed(Event):
    """A path carrying this QP, or standing by for it, failed.

    path: our device on that path. why: what was seen, for example "RETRY_EXC_ERR" or "PORT_ERR".
    """

    path: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """Traffic runs on another path: SWITCH is complete, the first WR succeeded there (SHIFT paper, fallback).

    epoch: how many times this QP was switched. target: our device that carries it now.
    durations: milliseconds by name, at least "fallback_ms" (first error WC or event taken -> first
    successful WC).
    """

    epoch: int = 0
    target: str = ""
    durations: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failback(Event):
    """Both directions are on the default path again (SHIFT paper, recovery).

    epoch, target: as in Fallback. durations: milliseconds by name, at least "away_ms" (first error WC or event taken ->
    both directions home).
    """

    epoch: int = 0
    target: str = ""
    durations: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Migrated(Event):
    """Both directions were moved on request (`qp.shift.migrate()`), with nothing replayed.

    source, target: our devices before and after. No release publishes it yet: `qp.shift.path` tells where a QP is.
    """

    epoch: int = 0
    source: str = ""
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The failure could not be hidden: the application got its original errors. why: the reason."""

    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Straggler(Event):
    """A path works and is slow (`SHIFTVERBS_STRAGGLER`). One event for all QPs of the path; qp_num: one of them.

    path: our device on that path; peer: the peer's default GID, or LID. ratio: how long what was sent took, by what it
    takes when the path is well. since_ns: when that began, CLOCK_MONOTONIC. samples: of sends, since then. lost_ns:
    time lost by it. counted: what our NIC there has counted since it was suspected, for all its traffic, by mlx5's
    names (`local_ack_timeout_err`, `rp_cnp_handled`, …), as far as that grew. fault: whose it is: "path", "peer",
    "both_rails", "application" (it polls late) or "unknown"; only "path" is ever left. qp_nums: the QPs.
    """

    path: str = ""
    peer: str = ""
    ratio: float = 1.0
    since_ns: int = 0
    samples: int = 0
    lost_ns: int = 0
    counted: dict[str, int] = field(default_factory=dict)
    fault: str = ""
    qp_nums: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StragglerOver(Event):
    """A path of which `Straggler` was told is as it was before. path, peer: as there."""

    path: str = ""
    peer: str = ""


Callback = Callable[[Event], object]


class Subscription:
    """One callback's registration; call `cancel()` (or leave the `with` block) to end it.

    After cancel() has returned the callback is not started again; one that is running is not waited for.
    Made by `subscribe`, whose arguments callback and kinds it has.
    """

    def __init__(self, callback: Callback, kinds: tuple[type[Event], ...]) -> None:
        self._callback = callback
        self._kinds = kinds
        self._active = True
        self.delivered = 0
        self.errors = 0

    @property
    def active(self) -> bool:
        """Whether events are still delivered."""
        return self._active

    def cancel(self) -> None:
        """End the subscription. A second call does nothing."""
        self._active = False
        with contextlib.suppress(ValueError):
            _subscriptions.remove(self)

    __call__ = cancel

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _deliver(self, event: Event) -> None:
        if not self._active or not isinstance(event, self._kinds):
            return
        try:
            self._callback(event)
        except Exception:
            self.errors += 1
            if self.errors == 1:  # once: a hook that always raises must not flood the log
                _log.exception("observer %r raised on %s; further errors are counted", self._callback, event)
        else:
            self.delivered += 1


@dataclass(frozen=True)
class Stats:
    """Counters of this process.

    published: events while anybody was subscribed. overflowed: of them, lost to a full queue.
    """

    published: int
    overflowed: int


# Changed and read at one stroke, without a lock: a signal's handler may come here in the middle of anything.
_subscriptions: list[Subscription] = []
# SimpleQueue.put never blocks and may be called from anywhere, even from a finalizer in the middle of a put.
# What is no event is locked, and to be released when everything before it was delivered.
_queue: queue.SimpleQueue[Event | threading.Lock] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_starting: dict[str, Any] = {}  # the lock of who starts it
_fork_hook = False
_published = 0
_overflowed = 0


def subscribe(callback: Callback, kinds: Iterable[type[Event]] | type[Event] | None = None) -> Subscription:
    """Call callback(event) for every later event of the given kinds (classes of this module; None: all).

    Returns the handle that ends it. Raises TypeError where callback cannot be called or a kind is no event
    class.
    """
    if not callable(callback):
        raise TypeError(f"the callback must be callable, not {type(callback).__name__}")
    if kinds is None:
        kinds = (Event,)
    elif isinstance(kinds, type):
        kinds = (kinds,)
    wanted = tuple(kinds)
    for kind in wanted:
        if not (isinstance(kind, type) and issubclass(kind, Event)):
            raise TypeError(f"not an event class: {kind!r}")
    _ensure_thread()  # first: a signal's handler may raise there, and nobody could cancel
    subscription = Subscription(callback, wanted)
    _subscriptions.append(subscription)
    return subscription


def publish(event: Event) -> None:
    """Queue an event for all subscribers. Any thread; returns at once; nothing to do without subscribers."""
    global _published, _overflowed
    if not _subscriptions:
        return
    _published += 1
    if _queue.qsize() >= QUEUE_LIMIT:
        _overflowed += 1
        return
    _queue.put(event)


def flush(timeout_s: float = 5.0) -> bool:
    """Wait until everything published before this call was delivered; returns whether it was in time.

    timeout_s: how long to wait, in seconds.
    From within a callback it would wait for itself: there it returns False at once.
    """
    if _thread is None or not _thread.is_alive():
        return _queue.empty()
    if threading.current_thread() is _thread:
        return False
    # No Event: a signal's handler that raises inside one may leave its lock to this thread, for which ours would wait.
    mark = threading.Lock()
    mark.acquire()
    _queue.put(mark)
    return mark.acquire(timeout=timeout_s)


def stats() -> Stats:
    """Return the counters of this process."""
    return Stats(published=_published, overflowed=_overflowed)


def _ensure_thread() -> None:
    global _thread, _fork_hook
    from shiftverbs._core import Unbroken, without_signals

    with _starting.setdefault("lock", Unbroken(threading.RLock())):
        if not _fork_hook:
            os.register_at_fork(after_in_child=_after_fork)
            _fork_hook = True
        if _thread is None or not _thread.is_alive():
            thread = threading.Thread(target=_run, name="shiftverbs-observe", args=(_queue,), daemon=True)
            without_signals(thread.start)
            _thread = thread


def _run(source: queue.SimpleQueue[Event | threading.Lock]) -> None:
    while True:
        item = source.get()
        if not isinstance(item, Event):
            item.release()
            continue
        for subscription in tuple(_subscriptions):
            subscription._deliver(item)  # noqa: SLF001  (no program calls it)


def _after_fork() -> None:
    """In a forked child: no thread, an empty queue, and no subscription: the QPs belong to the parent."""
    global _queue, _thread
    _starting.clear()
    _queue = queue.SimpleQueue()
    _thread = None
    _subscriptions.clear()


def register_prometheus(registry: Any = None) -> Any:
    """Export the events as Prometheus metrics; returns the subscription that feeds them.

    registry: a prometheus_client CollectorRegistry, by default the client's global one. Metrics:
    `shiftverbs_events_total{kind,device}`, `shiftverbs_fallback_seconds{device}` (histogram),
    `shiftverbs_events_overflowed_total`.
    Raises ImportError naming the package where prometheus_client is not installed.
    """
    try:
        import prometheus_client
        from prometheus_client.core import CounterMetricFamily
    except ImportError as missing:
        raise ImportError("metrics need prometheus_client: pip install 'shiftverbs[metrics]'") from missing

    if registry is None:
        registry = prometheus_client.REGISTRY
    events = prometheus_client.Counter(
        "shiftverbs_events", "Events of protected QPs", ["kind", "device"], registry=registry
    )
    fallback = prometheus_client.Histogram(
        "shiftverbs_fallback_seconds",
        "First error until first success on the backup",
        ["device"],
        registry=registry,
        buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0),
    )

    class Overflow:
        """Reads the counter when it is scraped."""

        def collect(self) -> Iterable[Any]:
            yield CounterMetricFamily(
                "shiftverbs_events_overflowed", "Events lost to a full queue", value=stats().overflowed
            )

    registry.register(Overflow())

    def count(event: Event) -> None:
        events.labels(kind=event.kind, device=event.device).inc()
        if isinstance(event, Fallback) and "fallback_ms" in event.durations:
            fallback.labels(device=event.device).observe(event.durations["fallback_ms"] / 1000)

    return subscribe(count)
