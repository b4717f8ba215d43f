# SPDX-License-Identifier: BSD-3-Clause
"""The driver's own duties, with NICs and connections that only remember: isolation, bounded looks, turns, hurry."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import Connection, Queue, add, as_the_collector, shadow_qp
from typed_doubles import double

from shiftverbs import _core, _nic
from shiftverbs.failover.driver import (
    EXCHANGE_NS,
    HURRY_NS,
    QUIET_PING_NS,
    SOON_NS,
    WATCH_AT_ONCE,
    Driver,
)
from shiftverbs.failover.qp.connection import Connection as RealConnection
from shiftverbs.failover.qp.watchdog import DOUBT_LOOK_NS, URGENT_PING_NS, WATCH_PERIOD_NS
from shiftverbs.failover.services.admission import TURN_COUNT, TURN_NS, UNDER_WAY
from shiftverbs.failover.services.cq_polling import LONGEST_LOOK_NS, LOOK_NS, LOOK_SHARE, PATIENCE
from shiftverbs.native.ibv import EventType
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.pair import PairProtocol
from shiftverbs.protocol.path_health import PROBE_NS, PingState
from shiftverbs.protocol.state import Pair
from shiftverbs.shadows.async_events import AsyncEvents
from shiftverbs.state_machine import SendState


def test_what_can_wait_a_moment_is_one_wake_up(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[int] = []
    monkeypatch.setattr(driver.waiter, "wake", lambda: pytest.fail("woken at once"))
    monkeypatch.setattr(driver.waiter, "wake_within", lambda ns: deadlines.append(clock.now + ns))
    done: list[int] = []
    for number in range(3):
        driver.post_soon(lambda number=number: done.append(number))  # type: ignore[misc]
        clock.now += SOON_NS // 4
    assert len(deadlines) == 1 and done == []
    driver.run()
    assert done == [0, 1, 2]
    # The run has put the driver's own deadline in its place.
    driver.post_soon(lambda: done.append(3))
    assert len(deadlines) == 2 and deadlines[1] == clock.now + SOON_NS
    # Nobody ran in time. Whoever set the moment anew each time would put it off for as long as the application goes on.
    woken: list[int] = []
    monkeypatch.setattr(driver.waiter, "wake", lambda: woken.append(clock.now))
    clock.now += SOON_NS
    driver.post_soon(lambda: done.append(4))
    assert len(deadlines) == 2 and woken == [clock.now]
    driver.post_soon(lambda: done.append(5))
    assert len(deadlines) == 3 and len(woken) == 1
    driver.run()
    assert done == [0, 1, 2, 3, 4, 5]


def test_what_can_wait_a_moment_is_not_forgotten_where_a_run_ends(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is past looking puts its own deadline in place of the moment's: it has to look once more."""
    done: list[int] = []

    def ends(at_ns: int) -> None:
        if not done:
            done.append(0)
            driver.post_soon(lambda: done.append(1))

    monkeypatch.setattr(driver.waiter, "set_deadline", ends)
    driver.run()
    assert done == [0, 1]


def test_a_removed_device_stops_nobody_else(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading its events fails for ever: it counts as dead, once, and the driver goes on."""
    bad, good = add(driver, Connection(nic, bug=True)), add(driver, Connection(nic))

    def broken(ctx: int) -> None:
        raise OSError(errno.EIO, "removed")

    driver.nic_events.watch_nic(nic)
    monkeypatch.setattr(_nic, "get_async_event", broken)
    for _ in range(3):
        driver.run()
    assert nic.dead
    assert good.told.count("nic_dead") == 1 and bad.told[:2] == ["nic_dead", "give_up"]
    done: list[bool] = []
    driver.post(lambda: done.append(True))
    driver.run()
    assert driver.outside.flush(10)
    assert done and "the failover driver failed" not in caplog.text
    driver.nic_events.watch_nic(nic)  # another Context on it
    driver.run()
    assert good.told.count("nic_dead") == 1


def test_a_bug_in_one_connection_costs_the_others_nothing(driver: Driver, nic: Any) -> None:
    both = [add(driver, Connection(nic, bug=True)), add(driver, Connection(nic))]
    driver.nic_events._on_async(nic, EventType.PORT_ERR, 1)
    driver.run()
    assert all("path_failed" in each.told for each in both)
    assert "give_up" in both[0].told and "give_up" not in both[1].told


def test_a_port_event_is_about_its_own_port(driver: Driver, nic: Any) -> None:
    """One NIC with two ports, a QP on each: the other one's path has not failed."""
    first, second = add(driver, Connection(nic)), add(driver, Connection(nic, port=2))
    driver.nic_events._on_async(nic, EventType.PORT_ERR, 2)
    driver.run()
    assert "path_failed" in second.told and "path_failed" not in first.told
    assert driver.nic_events.port_ok(nic, 1) and not driver.nic_events.port_ok(nic, 2)
    driver.nic_events._on_async(nic, EventType.PORT_ACTIVE, 2)
    assert driver.nic_events.port_ok(nic, 2)


def test_one_of_a_thousand_that_works_is_looked_at_each_time(
    driver: Driver, nic: Any, clock: SimpleNamespace, at_work: list[Any]
) -> None:
    many = [add(driver, Connection(nic)) for _ in range(1000)]
    at_work += [many[3], many[4]]
    many[4].watchdog.again_ns = WATCH_PERIOD_NS // 2
    for each in many[:3] + many[5:]:
        each.watchdog.watch = lambda now_ns: clock.__setattr__("now", clock.now + 10)
    for turn in range(1, 30):
        driver.run()
        assert len(many[4].told) >= turn and len(many[3].told) >= turn
        clock.now += WATCH_PERIOD_NS // 2
    assert len(many[4].told) <= 31, "and as others in its turn"
    at_work.clear()
    many[4].watchdog.again_ns = WATCH_PERIOD_NS
    before = len(many[3].told)
    for _ in range(10):
        driver.run()
        clock.now += WATCH_PERIOD_NS
    assert len(many[3].told) <= before + 1


def test_of_very_many_that_work_each_has_its_turn(
    driver: Driver, nic: Any, clock: SimpleNamespace, at_work: list[Any]
) -> None:
    many = [add(driver, Connection(nic)) for _ in range(5 * WATCH_AT_ONCE)]
    at_work += many[:-WATCH_AT_ONCE]  # a round begins with the last
    looks = 0
    for _ in range(4):
        driver.run()
        seen = sum(len(each.told) for each in many)
        assert seen - looks <= 2 * WATCH_AT_ONCE
        looks = seen
        clock.now += WATCH_PERIOD_NS
    assert all(each.told for each in at_work)
    for each in many[:-WATCH_AT_ONCE]:
        each.core = each  # what `add` enters it under
        driver.forget(each)
    at_work.clear()
    driver.run()
    assert not driver._working, "few again: nobody is left over"


def test_of_very_many_that_work_the_one_in_doubt_is_looked_at_each_time(
    driver: Driver, nic: Any, clock: SimpleNamespace, at_work: list[Any]
) -> None:
    """Doubt lasts for 100 ms: a round through all that work would take longer. One for each path is enough."""
    many = [add(driver, Connection(nic)) for _ in range(10 * WATCH_AT_ONCE)]
    path = type("Path", (), {"ping": PingState(QUIET_PING_NS, 4)})()
    at_work += many
    for each in many:
        each.paths, each.send_pair = [path], 0
    driver.run()
    for each in many:
        each.watchdog.pings_ns, each.watchdog.again_ns = PROBE_NS, DOUBT_LOOK_NS
    clock.now += WATCH_PERIOD_NS
    driver.run()
    (one,) = driver._asking.values()
    looks, before = len(one.told), sum(len(each.told) for each in many)
    for _ in range(25):
        clock.now += DOUBT_LOOK_NS
        driver.run()
    assert len(one.told) >= looks + 25
    assert sum(len(each.told) for each in many) - before <= 25 + 6 * 2 * WATCH_AT_ONCE
    one.watchdog.pings_ns = None
    for each in many:
        each.watchdog.pings_ns = None
    clock.now += WATCH_PERIOD_NS
    driver.run()
    assert not driver._asking and path.ping.interval_ns == URGENT_PING_NS


def test_a_thousand_idle_qps_are_looked_at_in_turns(
    driver: Driver, nic: Any, clock: SimpleNamespace, at_work: list[Any]
) -> None:
    many = [add(driver, Connection(nic)) for _ in range(1000)]
    looks = 0
    for _ in range(-(-1000 // WATCH_AT_ONCE)):
        driver.run()
        seen = sum(len(each.told) for each in many)
        assert seen - looks <= WATCH_AT_ONCE
        looks = seen
        clock.now += WATCH_PERIOD_NS
    assert all(each.told == ["watch"] for each in many)


def test_a_thousand_qps_in_a_procedure_cost_one_look_at_each_cq(
    driver: Driver, clock: SimpleNamespace
) -> None:
    """They share their CQs: what is looked at, and how often, does not depend on how many want it."""
    queue, other = Queue(), Queue(dead=True)
    many: list[Any] = [Connection(None) for _ in range(1000)]
    for each in many:
        driver.looks.look_at(each, [(queue, 0), (queue, 1), (other, 1)])
    driver.run()
    assert queue.looks == []
    for turn in range(1, 4):
        clock.now += LOOK_NS
        driver.run()
        assert sorted(queue.looks) == sorted([0, 1] * turn) and len(other.looks) == turn
    for each in many[1:]:
        driver.looks.look_at(each, [])
    driver.looks.look_at(many[0], [(queue, 1)])
    clock.now += LOOK_NS
    driver.run()
    assert sorted(queue.looks) == [0, 0, 0, 1, 1, 1, 1] and len(other.looks) == 3
    driver.looks.look_at(many[0], [])
    clock.now += LOOK_NS
    driver.run()
    assert len(queue.looks) == 7 and not driver.looks._looks and not driver.looks._looked_at


def test_looks_take_a_part_of_the_time_only(driver: Driver, clock: SimpleNamespace) -> None:
    """Each of a thousand QPs with a CQ of its own, and each look slow: they come less often."""

    class Slow(Queue):
        def drain(self, k: int) -> int:
            clock.now += 10 * LOOK_NS
            return super().drain(k)

    slow = Slow()
    driver.looks.look_at(Connection(None), [(slow, 0)])
    clock.now += LOOK_NS
    driver.run()
    assert len(slow.looks) == 1
    clock.now += (LOOK_SHARE - 1) * 10 * LOOK_NS
    driver.run()
    assert len(slow.looks) == 1
    clock.now += 10 * LOOK_NS
    driver.run()
    assert len(slow.looks) == 2


def test_looks_grow_sparse_where_nothing_comes(driver: Driver, clock: SimpleNamespace) -> None:
    """What comes is seen late by an eighth of what it was waited for, at most; then looks are dense again."""
    queue, other, waiting, began = Queue(), Queue(), Connection(None), clock.now
    driver.looks.look_at(waiting, [(queue, 0)])

    def look() -> int:
        """Let time pass up to the next look; returns how long that took."""
        due = driver.looks.due_ns
        assert due is not None
        passed, clock.now = due - clock.now, due
        driver.run()
        return passed

    gaps = []
    while clock.now - began < 1_000_000_000:
        waited = clock.now - began
        gaps.append(look())
        assert gaps[-1] <= max(LOOK_NS, waited // PATIENCE)
    assert gaps == sorted(gaps) and gaps[0] == LOOK_NS and gaps[-1] == LONGEST_LOOK_NS
    queue.holds = [1]
    look()
    assert look() == LOOK_NS
    # So they are where another one is to be looked at; but not where the same is wanted once more.
    for more in (other, queue):
        while look() < LONGEST_LOOK_NS:
            pass
        clock.now += 1
        driver.looks.look_at(Connection(None), [(more, 0)])
        assert look() == (LOOK_NS if more is other else LONGEST_LOOK_NS - 1)
    while look() < LONGEST_LOOK_NS:
        pass
    driver.looks.expect()
    assert look() == LOOK_NS and look() == LOOK_NS


def test_few_begin_at_once_what_is_not_urgent(driver: Driver, nic: Any) -> None:
    """A thousand QPs that may go home: so many are under way, the others follow as these arrive."""
    many: list[Any] = [Connection(nic) for _ in range(1000)]
    begun: list[Any] = []
    for each in many:
        driver.turns.begin_in_turn(each, functools.partial(begun.append, each))
    driver.run()
    assert begun == many[:UNDER_WAY]
    many[UNDER_WAY].closed = True
    driver.drop_backlog(many[UNDER_WAY + 1])
    for each in many[:3]:
        assert each in driver.turns.going
        driver.turns.arrived(each)
    driver.run()
    assert begun == many[:UNDER_WAY] + many[UNDER_WAY + 2 : UNDER_WAY + 4]
    driver.drop_backlog(many[UNDER_WAY])  # it was closed when its turn came
    driver.run()
    arrived = 3
    while arrived < len(begun):
        driver.turns.arrived(begun[arrived])
        arrived += 1
        driver.run()
    assert len(begun) == 998 and not driver.turns.waiting and not driver.turns.going


def test_who_is_under_way_for_long_keeps_nobody_waiting(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A MOVE may wait for the application's next post: others come home all the same."""
    many: list[Any] = [Connection(nic) for _ in range(UNDER_WAY + 3 * TURN_COUNT)]
    begun: list[Any] = []
    for each in many:
        driver.turns.begin_in_turn(each, functools.partial(begun.append, each))
    for turns in range(4):
        driver.run()
        assert begun == many[: UNDER_WAY + turns * TURN_COUNT]
        driver.run()
        assert begun == many[: UNDER_WAY + turns * TURN_COUNT]
        clock.now += TURN_NS


def test_a_long_hurry_does_not_keep_the_keys_of_memory_away(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a thousand QPs switch one after the other, some may wait for a key of the peer's memory."""
    began = clock.now
    looked: list[int] = []
    monkeypatch.setattr(driver.machine, "readable", lambda fd: True)
    driver.exchanger.poll_events = lambda: looked.append(clock.now - began) or []  # type: ignore[method-assign]
    for _ in range(30):
        driver.hurry(clock.now)
        driver.run()
        clock.now += HURRY_NS // 2
    driver.restore_switch_interval()
    assert looked == [EXCHANGE_NS, 2 * EXCHANGE_NS]


def test_what_the_exchanger_tells_in_a_hurry_keeps_nobody_awake(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken before the hurry is over, and its descriptor is readable until then."""
    watched: set[int] = {driver.exchanger.fileno()}
    monkeypatch.setattr(driver.waiter, "add", watched.add)
    monkeypatch.setattr(driver.waiter, "remove", watched.discard)
    for _ in range(2):
        driver.hurry(clock.now)
        driver.hurry(clock.now)
        driver.run()
        assert not watched
        clock.now += HURRY_NS
        driver.run()
        assert watched == {driver.exchanger.fileno()}


def test_what_is_logged_under_the_lock_waits_for_no_handler(driver: Driver) -> None:
    """The collector may run in a thread that writes a line, and close a QP there, which takes the driver's lock."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shiftverbs.driver")
    logger.addHandler(handler)
    logged = threading.Event()

    def said() -> None:
        logged.set()
        logger.warning("said in a run")

    handler.acquire()
    try:
        driver.post(said)
        other = threading.Thread(target=driver.run)
        other.start()
        assert logged.wait(10)
        other.join(10)
        assert not other.is_alive() and driver._lock.acquire(timeout=10)  # as closing a QP does
        driver._lock.release()
        with driver.locked(), driver.locked():
            logger.warning("said in a verb")
        assert lines == []
    finally:
        handler.release()
    assert driver.outside.flush(10)
    logger.removeHandler(handler)
    assert lines == ["said in a run", "said in a verb"]


def test_the_end_of_what_no_connection_asked_for_is_told(
    driver: Driver, nic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def bug(err: int) -> None:
        raise RuntimeError("a bug")

    nic.worker.finished += [(told.append, 0, 0, 9), (bug, 0, 0, 9), (told.append, errno.EBUSY, 0, 9)]
    driver.run()
    assert driver.outside.flush(10)
    assert told == [0, errno.EBUSY] and "a bug" in caplog.text


def test_lost_events_make_it_look_at_every_qp(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [add(driver, Connection(nic)) for _ in range(2)]
    lost = [True]
    monkeypatch.setattr(driver.machine, "events_overflowed", lambda: lost.pop() if lost else False)
    driver.run()
    driver.run()
    assert all(each.told.count("catch_up") == 1 for each in both)


def test_what_a_switch_does_not_need_waits_for_it(driver: Driver, clock: SimpleNamespace) -> None:
    """Logs and subscribers in order, the switch interval back as the application had it."""
    told: list[int] = []
    before_s = sys.getswitchinterval()
    driver.aside(lambda: told.append(1))
    assert told == [1]
    driver.hurry(clock.now)
    assert sys.getswitchinterval() < before_s
    driver.aside(lambda: told.append(2))
    driver.hurry(clock.now + 5 * 10**6)  # a second QP, a little later
    driver.run()
    assert told == [1]
    driver.aside(lambda: told.append(3))
    clock.now += 26 * 10**6
    driver.run()
    assert told == [1, 2, 3] and sys.getswitchinterval() == pytest.approx(before_s)


def test_pings_of_a_path_in_doubt_do_not_wait_for_who_computes(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    before_s = sys.getswitchinterval()
    connection = add(driver, Connection(nic))
    clock.now += WATCH_PERIOD_NS
    driver.run()
    assert sys.getswitchinterval() == pytest.approx(before_s)
    connection.watchdog.pings_ns = PROBE_NS
    clock.now += WATCH_PERIOD_NS
    driver.run()
    assert sys.getswitchinterval() < before_s / 2
    connection.watchdog.pings_ns = None
    clock.now += HURRY_NS - 1
    driver.run()
    assert sys.getswitchinterval() < before_s / 2
    clock.now += 1
    driver.run()
    assert sys.getswitchinterval() == pytest.approx(before_s)


def test_a_switch_interval_of_the_applications_own_stays(driver: Driver, clock: SimpleNamespace) -> None:
    before_s = sys.getswitchinterval()
    try:
        driver.hurry(clock.now)
        sys.setswitchinterval(0.05)
        clock.now += 10**9
        driver.run()
        assert sys.getswitchinterval() == pytest.approx(0.05)
        sys.setswitchinterval(0.0001)  # already shorter than what we would ask for
        driver.hurry(clock.now)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
        driver.stop(1.0)
        assert sys.getswitchinterval() == pytest.approx(0.0001)
    finally:
        sys.setswitchinterval(before_s)


def test_the_end_of_the_process_says_what_waited(driver: Driver, clock: SimpleNamespace) -> None:
    told: list[int] = []
    before_s = sys.getswitchinterval()
    driver.hurry(clock.now)
    driver.aside(lambda: told.append(1))
    driver.stop(1.0)
    assert told == [1] and sys.getswitchinterval() == pytest.approx(before_s)


def test_the_driver_does_not_wait_for_who_takes_async_events(driver: Driver) -> None:
    collect, began = as_the_collector(driver)
    reading, writing = os.pipe()
    events = AsyncEvents(1, reading, lambda context: collect() if not began.is_set() else None)
    driver.nic_events.watch_events(events)
    taker = threading.Thread(target=events.pump, daemon=True)
    with driver.locked():
        taker.start()
        assert began.wait(5)
        assert events.pump(wait=False) == 0
        done: list[bool] = []
        driver.post(lambda: done.append(True))
        driver.run()
    taker.join(5)
    assert done and not taker.is_alive()
    os.close(reading)
    os.close(writing)


def test_who_was_not_told_that_a_nic_died_finds_out(driver: Driver, nic: Any) -> None:
    """The run that told the QPs was interrupted."""
    core = double(
        _core.QPCore, seen_rkeys=(), guarded=True, ending=False, ends_at_post=False, first_error=lambda k: None,
        outstanding=(0, 0), unwired=(0, 0), refused=0,
    )  # fmt: skip
    connection = RealConnection(driver, shadow_qp(nic, core=core))
    told: list[ev.Event] = []
    pair = double(Pair, dead=False)

    def handle(event: ev.Event, now: int) -> list[ev.Action]:
        told.append(event)
        pair.dead = True
        return []

    protocol: Any = double(
        PairProtocol, over=False, switching=False, busy=False, pairs=[pair], send_pair=0, recv_pair=0,
        send_state=SendState.DEFAULT, next_timeout_ns=None, handle=handle,
    )  # fmt: skip
    connection.protocol = protocol
    connection.catch_up()
    assert told == []
    nic.dead = True
    connection.catch_up()
    connection.catch_up()
    assert told == [ev.NicDead(0)]


def test_a_refused_post_that_nobody_was_told_of_is_found(driver: Driver, nic: Any) -> None:
    """Its event was lost among too many: without it the gate would stay closed for ever."""
    cq = double(_core.CQCore, drain=lambda k: None)
    core = double(
        _core.QPCore, seen_rkeys=(), guarded=True, ending=False, ends_at_post=False, first_error=lambda k: None,
        outstanding=(1, 0), unwired=(1, 0), refused=errno.EINVAL, send_pair=0, send_cq=cq, recv_cq=cq,
    )  # fmt: skip
    connection = RealConnection(driver, shadow_qp(nic, core=core))
    told: list[ev.Event] = []
    pairs = [double(Pair, dead=False)]
    protocol: Any = double(
        PairProtocol, over=False, switching=True, busy=False, pairs=pairs, send_pair=0, recv_pair=0,
        send_state=SendState.DEFAULT, next_timeout_ns=None, handle=lambda event, now: told.append(event) or [],
    )  # fmt: skip
    connection.protocol = protocol
    connection.catch_up()
    assert told == []  # the SWITCH hands it over once more
    protocol.switching = False
    connection.catch_up()
    assert [type(event) for event in told] == [ev.WorkRefused] and "Invalid argument" in told[0].reason
    assert connection.ending.original == (2, errno.EINVAL)
