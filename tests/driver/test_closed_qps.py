# SPDX-License-Identifier: BSD-3-Clause
"""QPs, pairings and Contexts that go away amid the driver: nothing is left of them, and nobody waits for nothing."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import Connection, Queue, add, as_the_collector, ends, shadow_qp
from harness import wait_until
from typed_doubles import Double, double

from shiftverbs import _core
from shiftverbs.failover import runtime as runtime_module
from shiftverbs.failover.driver import WATCH_AT_ONCE, WATCH_PERIOD_NS, Driver
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.failover.qp.pairing import Pairing
from shiftverbs.failover.runtime import Domain, Runtime
from shiftverbs.failover.services.admission import UNDER_WAY
from shiftverbs.protocol.codec import Entry
from shiftverbs.protocol.events import Status
from shiftverbs.protocol.messages import Arm, ArmStep, PairAddress
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.shadows.async_events import AsyncEvents
from shiftverbs.shadows.qp import ShadowQP


def test_closed_connections_are_let_go(driver: Driver, nic: Any, clock: Any, at_work: list[Any]) -> None:
    """They were kept by the round of looks under way, and by timers, as long as nobody made a new QP."""
    many = [add(driver, Connection(nic)) for _ in range(WATCH_AT_ONCE + 5)]
    at_work += many
    for each in many:
        each.core = each  # what `add` enters it under
        each.timer_ns = None
        driver.schedule(each, clock.now + 10**12)
    clock.now += WATCH_PERIOD_NS
    driver.run()
    gone = [weakref.ref(each) for each in many]
    at_work.clear()
    while many:
        driver.forget(many.pop())
    del each
    gc.collect()
    assert not any(ref() for ref in gone)
    driver.run()


def test_what_comes_back_after_its_pairing_is_dropped(driver: Driver, nic: Any) -> None:
    """A RESET of ours that ends when the application has begun a new life of the QP."""
    connection = add(driver, Connection(nic))
    came: list[tuple[int, int]] = []
    for expected in ([(0, 2)], [(0, 2)]):
        driver.command(connection, 0, None, lambda err, step: came.append((err, step)))  # type: ignore[arg-type]
        if came:
            connection.protocol = double(PairProtocol)
        nic.worker.finished.append((nic.worker.submitted.pop(), 0, 2, 0))
        driver.run()
        assert came == expected
    assert not driver._commands


def test_a_qp_whose_shadows_go_is_not_told_as_unprotected(driver: Driver) -> None:
    """The collector closes its shadows a moment before its connection hears of it: a warning came of that."""
    told: list[str] = []
    shadow = double(
        ShadowQP,
        closed=True,
        is_connected=True,
        domain=double(Domain, backups=[object()]),
        state=lambda k: "failed",
        reason=lambda k: "closed",
    )
    connection = double(
        RealConnection,
        driver=driver,
        shadow=shadow,
        closed=False,
        status=Status.PAIRING,
        never_protected=told.append,
    )
    pairing = Pairing(connection)  # type: ignore[arg-type]
    pairing.advance()
    assert told == []
    shadow.closed = False
    pairing.advance()
    assert told == ["no shadow QP: closed"]


def test_a_qp_has_a_connection_from_when_it_needs_one_and_leaves_nothing(driver: Driver, nic: Any) -> None:
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, False, os.getpid()
    nic.worker.pending = lambda qp: 0

    def qp(number: int) -> Any:
        return double(
            ShadowQP, core=double(_core.QPCore, send_cq=None, recv_cq=None, carried=set()), connection=None,
            closed=False, disposed=False, is_connected=False, qp_num=number, domain=double(Domain, nic=nic, backups=[]),
            handle=lambda k: 4096, state=lambda k: "pending",
        )  # fmt: skip

    unused, asked, connected = qp(1), qp(2), qp(3)
    assert runtime.connection_of(asked) is runtime.connection_of(asked) is asked.connection is not None
    runtime.qp_shadowed(unused)
    connected.is_connected = True
    runtime.qp_connected(connected)
    driver.run()
    assert (
        list(driver.connections.values()) == [asked.connection, connected.connection]
        and not unused.connection
    )
    for shadow in (unused, asked, connected):
        shadow.closed = True
        runtime.qp_closing(shadow)
        runtime.qp_connected(shadow)  # as from another thread, a moment too late
    assert (
        not driver.connections
        and asked.connection.closed
        and connected.connection.status.value == "UNPROTECTED"
    )
    driver.run()
    assert not driver.connections and runtime.connection_of(unused) is None


class Dropped:
    """What a QP is: its last reference goes in the middle of the driver, and closing it does what `close` says."""

    def __init__(self, close: Callable[[], object]) -> None:
        self.close = close

    @_core.whole_end
    def __del__(self) -> None:
        self.close()


def test_a_qp_whose_end_comes_amid_the_driver_is_closed_behind_it(driver: Driver, nic: Any) -> None:
    """The collector runs where objects are made, and finalizers where the last reference to something goes."""
    first, second = add(driver, Connection(nic)), add(driver, Connection(nic))
    ended: list[bool] = []

    def close() -> None:
        ended.append(driver.is_in())
        driver.drop_backlog(second)  # type: ignore[arg-type]

    for each in (first, second, first, second):
        driver._mail[each] = {("anything",): Dropped(close)}  # type: ignore[dict-item, index]
        driver.later(each, print, Dropped(close))  # type: ignore[arg-type]
    with driver.locked():
        ended.clear()
        driver.drop_backlog(first)  # type: ignore[arg-type]
        assert not ended and list(driver._pending) == [second]
    _core.close_dropped()
    assert set(ended) == {False}
    assert not driver._backlog and not driver._pending and not driver._mail


def waits(nic: Any) -> list[tuple[str, int]]:
    """Have a command for a QP in that NIC's queue; what is done about it."""
    done: list[tuple[str, int]] = []
    nic.on_worker = lambda: False
    nic.worker.pending = lambda qp: 1
    nic.worker.cancel = lambda qp: done.append(("cancel", qp))
    nic.worker.drain = lambda qp, timeout_s: done.append(("drain", qp)) or True
    return done


def closed_qp(nic: Any) -> Any:
    return shadow_qp(nic, connection=object(), closed=True, handle=lambda k: 4096)


def test_no_command_is_under_way_on_a_qp_closed_at_exit(driver: Driver, nic: Any) -> None:
    """By an exit handler of the application's, which comes after ours: the NICs' threads are still at work."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, True, os.getpid()
    waited = waits(nic)
    runtime.qp_closing(closed_qp(nic))
    assert waited == [("cancel", 4096), ("drain", 4096)]


def test_no_command_waits_for_a_qp_that_ends_on_a_nics_own_thread(driver: Driver, nic: Any) -> None:
    """None is under way then, but what is queued would find it destroyed."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, True, os.getpid()
    waited = waits(nic)
    nic.on_worker = lambda: True
    runtime.qp_closing(closed_qp(nic))
    assert waited == [("cancel", 4096)]


def test_telling_who_waits_waits_for_nobody(driver: Driver, nic: Any) -> None:
    """The collector may close a QP in a thread that waits for a state, while the driver changes that state."""
    connection = RealConnection(driver, shadow_qp(nic, core=None))
    collect, began = as_the_collector(driver)
    told = [False]

    def condition() -> bool:
        if not began.is_set():
            collect()
        return told[0]

    results: list[bool] = []
    waiter = threading.Thread(
        target=lambda: results.append(connection.wait_for(condition, time.monotonic() + 30)), daemon=True
    )
    with driver.locked():
        waiter.start()
        assert began.wait(5) and ends(connection.timeline.tell)
    # It waits again, or is about to: told now or later, it finds out.
    told[0] = True
    wait_until(lambda: bool(connection.timeline._waiting) or results)
    connection.timeline.tell()
    waiter.join(5)
    assert results == [True] and not connection.timeline._waiting
    assert (
        connection.wait_for(lambda: False, time.monotonic() + 0.01) is False
        and not connection.timeline._waiting
    )


def test_a_qp_that_is_closed_while_it_asks_for_looks_gets_none(driver: Driver, nic: Any) -> None:
    """Its CQs would be looked at two thousand times a second for ever."""
    holder: list[RealConnection] = []

    class Core(Double, real=_core.QPCore):
        @property
        def send_cq(self) -> Queue:
            if holder:
                holder.pop().close()
            return Queue()

    core = Core(recv_cq=Queue(), remote_keys=None, carried=set())
    connection = RealConnection(driver, shadow_qp(nic, core=core))
    protocol: Any = double(
        PairProtocol,
        over=False,
        busy=True,
        handle=lambda event, now: [],
        pairs=[SimpleNamespace(used=True, fenced=False)],
    )
    connection.protocol = protocol
    holder.append(connection)
    connection._look()
    assert connection.closed
    connection.clear_away()
    assert not driver.looks._looks and not driver.looks._looked_at


def test_a_qp_that_the_collector_closes_loses_its_turn_only(driver: Driver, nic: Any) -> None:
    """While turns are given: what others do in that run is not given up."""
    many: list[Any] = [Connection(nic) for _ in range(UNDER_WAY + 3)]
    begun: list[Any] = []
    for each in many:
        driver.turns.begin_in_turn(each, functools.partial(begun.append, each))
    for each in many[:3]:
        driver.turns.arrived(each)
    closed = many[UNDER_WAY + 1]
    later = driver.turns._later

    def close() -> None:
        closed.closed = True
        driver.drop_backlog(closed)

    dropped = [Dropped(close)]

    def make(*args: Any) -> None:  # something, so that the collector runs
        dropped.clear()
        later(*args)

    driver.turns._later = make
    with driver.locked():
        driver.turns.admit(0)
        assert not dropped and not closed.closed
    _core.close_dropped()
    assert closed.closed
    driver.run()
    assert begun == [*many[: UNDER_WAY + 1], many[UNDER_WAY + 2]] and closed not in driver.turns.going


def test_a_context_that_is_closed_when_it_is_to_be_watched(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be another file's by then, which would keep the control thread awake."""
    watched: set[int] = set()
    events: Any = double(AsyncEvents, closed=False, fd=7)

    def watch(fd: int) -> None:
        events.closed = True
        driver.nic_events.unwatch_events(events)
        watched.add(fd)

    monkeypatch.setattr(driver.waiter, "add", watch)
    monkeypatch.setattr(driver.waiter, "remove", watched.discard)
    driver.nic_events.watch_events(events)
    assert not watched and not driver.nic_events._watched_events


def test_a_qp_that_the_collector_finds_is_there_for_the_command_that_it_is_given(
    driver: Driver, nic: Any
) -> None:
    """Its own connection is about to give one: were the QP destroyed by then, the NIC's thread would crash."""
    one = add(driver, Connection(nic))
    dropped = [Dropped(lambda: setattr(one, "closed", True))]

    def handle(k: int) -> int:
        dropped.clear()
        return 4096

    one.shadow.handle = handle
    with driver.locked():
        driver.command(one, 0, None, lambda err, step: None)  # type: ignore[arg-type]
        assert len(nic.worker.submitted) == 1 and not one.closed
    _core.close_dropped()
    assert one.closed


def test_a_qp_that_the_collector_closes_leaves_no_message_behind(driver: Driver, nic: Any) -> None:
    """While a message for it is noted."""
    one = add(driver, Connection(nic))
    said = Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, PairAddress(bytes(16), 0, 1, 0, 3)))
    driver.drop_backlog(one)  # type: ignore[arg-type]
    one.closed = True
    driver._mail[one] = {said.message.about: said}  # type: ignore[index, union-attr]
    driver.run()
    assert not driver._mail and not driver._pending and "handle_message" not in one.told


def test_a_connection_made_for_a_qp_that_the_collector_finds_is_closed_with_it(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would ever close it, and it would go on with a QP that is destroyed."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, False, os.getpid()
    nic.worker.pending = lambda qp: 0
    core = double(_core.QPCore, send_cq=None, recv_cq=None, carried=set())
    shadow = shadow_qp(nic, core=core, connection=None, closed=False, handle=lambda k: 4096)

    def close() -> None:
        shadow.closed = True
        runtime.qp_closing(shadow)

    dropped = [Dropped(close)]

    def made(*args: Any) -> Any:
        dropped.clear()
        return RealConnection(*args)

    monkeypatch.setattr(runtime_module, "Connection", made)
    connection = runtime.connection_of(shadow)
    assert not dropped and not connection.closed
    _core.close_dropped()
    assert connection.closed and not driver.connections
