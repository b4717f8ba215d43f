# SPDX-License-Identifier: BSD-3-Clause
"""The driver's own duties, with NICs and connections that only remember: isolation, bounded looks, late answers."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_until
from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs import _core, _nic, control, control_channel
from shiftverbs import events as ev
from shiftverbs import runtime as runtime_module
from shiftverbs.announce import SELDOM_NS
from shiftverbs.async_events import AsyncEvents
from shiftverbs.config import Config
from shiftverbs.connection import Connection as RealConnection
from shiftverbs.control import Entry, Ping
from shiftverbs.control_channel import READ_AT_ONCE, RETRY_FIRST_NS, TRUST_NS, ControlChannel
from shiftverbs.driver import (
    EXCHANGE_NS,
    HURRY_NS,
    LATER_NS,
    MOST_UNREAD,
    PINGS_UNTIL_DEAD,
    QUIET_PING_NS,
    RUN_NS,
    SLICE,
    SOON_NS,
    WATCH_AT_ONCE,
    WATCH_PERIOD_NS,
    Driver,
)
from shiftverbs.exchanger.interface import Found
from shiftverbs.exchanger.memory import MemoryExchanger, MemoryStore
from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.fence import Fence
from shiftverbs.looks import LOOK_NS, LOOK_SHARE
from shiftverbs.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync
from shiftverbs.nic_events import EVENT_DEVICE_FATAL, EVENT_PORT_ACTIVE, EVENT_PORT_ERR
from shiftverbs.runtime import Runtime
from shiftverbs.seal import TAG_BYTES, Seals
from shiftverbs.state_machine import SendState
from shiftverbs.turns import TURN_COUNT, TURN_NS, UNDER_WAY

GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
PEER_SECRET = "5e" * 16  # of the control port of a peer


class Worker:
    """A NIC's thread that does what it is told when `work` is called."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.submitted: list[Any] = []
        self.finished: list[tuple[Any, int, int, int]] = []
        self.under_way = 0

    def call(self, fn: Any, *args: Any) -> None:
        self.jobs.append((fn, args))

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for fn, args in jobs:
            fn(*args)

    def submit(self, tag: Any, qp: int, steps: Any) -> None:
        self.submitted.append(tag)

    def pending(self, qp: int) -> int:
        return self.under_way

    def results(self) -> list[tuple[Any, int, int, int]]:
        found, self.finished = self.finished, []
        return found


def make_nic(name: str = "nic0") -> Any:
    return SimpleNamespace(
        name=name, ctx=1, port=1, gid_index=0, dead=False, uses_grh=True, worker=Worker(),
        look_again=lambda then: None,
    )  # fmt: skip


class Connection:
    """Remembers what it was told; raises where `bug` is set."""

    def __init__(self, nic: Any, bug: bool = False, port: int = 1) -> None:
        self.shadow = SimpleNamespace(qp_num=1, handle=lambda k: 1)
        self.protocol: object = object()
        self.closed = self.wants_pings = False
        self.n_pairs = 1
        self.paths: list[Any] = []
        self.superseded = 0
        self.bug = bug
        self.why = None
        self.told: list[str] = []
        self._nic = nic
        self._port = port

    def port(self, k: int) -> int:
        return self._port

    def nic(self, k: int) -> Any:
        return self._nic

    def __getattr__(self, name: str) -> Any:
        def tell(*args: Any) -> None:
            self.told.append(name)
            if self.bug and name != "give_up":
                raise RuntimeError("a bug")

        return tell


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(now=10**9)
    monkeypatch.setattr(Driver, "now_ns", staticmethod(lambda: time.now))
    return time


@pytest.fixture
def nic() -> Any:
    return make_nic()


@pytest.fixture
def driver(clock: SimpleNamespace, nic: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(_nic, "async_fd", lambda ctx: 99)
    monkeypatch.setattr(_nic, "get_async_event", lambda ctx: None)
    waiter = SimpleNamespace(
        add=lambda fd: None,
        remove=lambda fd: None,
        wake=lambda: None,
        set_deadline=lambda at: None,
        wake_within=lambda ns: None,
    )
    exchanger = MemoryExchanger(MemoryStore())
    made = Driver(Config(), exchanger, "0" * 16, waiter, lambda: [nic])
    made.run()
    yield made
    exchanger.close()
    _core.clear_attention()


def add(driver: Driver, connection: Connection) -> Connection:
    driver.connections[connection] = connection  # type: ignore[assignment]
    return connection


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
    assert done and "the failover driver failed" not in caplog.text
    driver.nic_events.watch_nic(nic)  # another Context on it
    driver.run()
    assert good.told.count("nic_dead") == 1


def test_a_bug_in_one_connection_costs_the_others_nothing(driver: Driver, nic: Any) -> None:
    both = [add(driver, Connection(nic, bug=True)), add(driver, Connection(nic))]
    driver.nic_events._on_async(nic, EVENT_PORT_ERR, 1)
    driver.run()
    assert all("path_failed" in each.told for each in both)
    assert "give_up" in both[0].told and "give_up" not in both[1].told


def test_a_port_event_is_about_its_own_port(driver: Driver, nic: Any) -> None:
    """One NIC with two ports, a QP on each: the other one's path has not failed."""
    first, second = add(driver, Connection(nic)), add(driver, Connection(nic, port=2))
    driver.nic_events._on_async(nic, EVENT_PORT_ERR, 2)
    driver.run()
    assert "path_failed" in second.told and "path_failed" not in first.told
    assert driver.nic_events.port_ok(nic, 1) and not driver.nic_events.port_ok(nic, 2)
    driver.nic_events._on_async(nic, EVENT_PORT_ACTIVE, 2)
    assert driver.nic_events.port_ok(nic, 2)


def test_a_thousand_idle_qps_are_looked_at_in_turns(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    many = [add(driver, Connection(nic)) for _ in range(1000)]
    looks = 0
    for _ in range(-(-1000 // WATCH_AT_ONCE)):
        driver.run()
        seen = sum(len(each.told) for each in many)
        assert seen - looks <= WATCH_AT_ONCE
        looks = seen
        clock.now += WATCH_PERIOD_NS
    assert all(each.told == ["watch"] for each in many)


class Queue:
    """A CQCore: counts the looks at it."""

    def __init__(self, dead: bool = False) -> None:
        self.looks: list[int] = []
        self.dead = dead

    def drain(self, k: int) -> int:
        self.looks.append(k)
        if self.dead:
            raise PyverbsRDMAError("Failed to poll CQ", errno.EIO)
        return 0


def test_a_thousand_qps_in_a_procedure_cost_one_look_at_each_cq(driver: Driver, clock: SimpleNamespace) -> None:
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


def slow_work(driver: Driver, nic: Any, clock: SimpleNamespace, count: int, each_ns: int) -> list[Connection]:
    """Have so many connections hear that a port failed, which takes each of them so long."""

    class Slow(Connection):
        def path_failed(self, *args: Any) -> None:
            clock.now += each_ns
            self.told.append("path_failed")

    many = [add(driver, Slow(nic)) for _ in range(count)]
    driver.nic_events._on_async(nic, EVENT_PORT_ERR, 1)
    return many


def failed(many: list[Connection]) -> int:
    return sum("path_failed" in each.told for each in many)


class Peer:
    """The process at the other end of our control ports: what it says, and what it makes of what we say."""

    def __init__(self, driver: Driver, nic: Any, secret: str = PEER_SECRET) -> None:
        self.seals = Seals(bytes.fromhex(secret), driver.channel.secret(nic))

    def says(self, *entries: Entry) -> list[Any]:
        """What arrives at our port."""
        return arrived(*control.encode(entries, self.seals, 4096))

    def hears(self, *datagrams: bytes) -> list[Entry]:
        """What we said."""
        return [entry for data in datagrams for entry in control.decode(data, self.seals)]


def arrived(*datagrams: bytes) -> list[Any]:
    """Datagrams as a port gives them."""
    return [(data, 7, bytes.fromhex(GID.replace(":", ""))) for data in datagrams]


def test_pings_are_answered_while_a_thousand_qps_fail(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """Otherwise the peer takes the other path for dead as well, because we are busy leaving this one."""
    port = with_port(driver.channel, nic)
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)
    nic.worker.work()
    driver.run()
    peer = Peer(driver, nic)
    peer.hears(*port.sent)
    answered: list[int] = []
    clock.now += WATCH_PERIOD_NS
    many = slow_work(driver, nic, clock, 10 * SLICE, 10**6)

    def send(ah: int, qpn: int, qkey: int, message: bytes) -> bool:
        for entry in peer.hears(message):
            if isinstance(entry.message, Ping) and entry.message.answer:
                answered.append(failed(many))
        return True

    def recv(most: int) -> list[Any]:
        return peer.says(Entry(0, 0, Ping(len(answered) + 1, False)))

    port.send, port.recv = send, recv  # type: ignore[method-assign]
    driver.run()
    assert all(each.told.count("path_failed") == 1 for each in many)
    assert answered[:10] == [SLICE * turn for turn in range(1, 11)]


def test_no_deadline_passes_while_what_came_in_time_waits(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A thousand answers that lie here are not late, however long the first of them take. Others' deadlines are."""
    many = slow_work(driver, nic, clock, 3 * SLICE, 10**6)
    waits, other = many[SLICE + 1], Connection(nic)
    seen: dict[Any, int] = {}
    for each in (waits, other):
        each.timer_ns = None  # type: ignore[attr-defined]
        each.on_time = lambda now, each=each: seen.setdefault(each, failed(many))  # type: ignore[attr-defined]
        driver.schedule(each, clock.now)  # type: ignore[arg-type]
    driver.run()
    clock.now += LATER_NS
    driver.run()
    assert seen[other] == SLICE and seen[waits] >= 2 * SLICE
    assert not driver._pending


def heard_of(driver: Driver, nic: Any) -> tuple[Any, list[Any], Callable[..., None]]:
    """A connection (its life is 11) with a peer (22): it, what it hears, and arrive(sender, *messages)."""
    port = with_port(driver.channel, nic)
    path = driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)
    nic.worker.work()
    driver.run()
    heard: list[Any] = []
    one: Any = add(driver, Connection(nic))
    one.peer = SimpleNamespace(life=f"{22:016x}")
    one.paths = [path]
    one.handle_message = heard.append
    driver.by_life[11] = one
    peer = Peer(driver, nic)

    def arrive(sender: int, *messages: Any) -> None:
        port.inbox = peer.says(*(Entry(11, sender, message) for message in messages))

    return one, heard, arrive


def test_of_what_a_peer_says_again_only_the_newest_is_read(driver: Driver, nic: Any) -> None:
    """A peer that loses patience with us must not give us more to do. What the network turned round is not newer."""
    one, heard, arrive = heard_of(driver, nic)
    somebody = PairAddress(bytes(16), 0, 1, 0, 3)
    first, second = (Arm(ArmStep.REQ, 0, 1, number, somebody) for number in (1, 2))
    other = Arm(ArmStep.REP, 0, 1, 1, somebody)

    arrive(22, first, other, second, first, first)
    driver.run()
    assert heard == [second, other] and one.superseded == 3
    arrive(22, first)
    driver.run()
    assert heard == [second, other, first] and not driver._mail
    arrive(22, second)
    driver._collect(0)
    driver.drop_backlog(one)
    driver.run()
    assert heard == [second, other, first] and not driver._mail and not driver._pending
    # What its former life said is not newer, whatever numbers that had come to.
    arrive(22, replace(second, arm=99))
    driver._collect(0)
    one.peer = SimpleNamespace(life=f"{33:016x}")
    arrive(33, first)
    driver.run()
    assert heard == [second, other, first, first]


SOMEBODY = PairAddress(bytes(16), 0, 1, 0, 3)


@pytest.mark.parametrize(
    "newest",
    [
        [Sync(1, 1, phase, 2, False, SOMEBODY, 0) for phase in Phase],
        [Arm(step, 1, pair, 2, SOMEBODY) for step in ArmStep for pair in (0, 1)],
        [Move(step, 1, 2, 1, 1, 0) for step in MoveStep],
        [Prefer(2, 1), Prefer(2, 1, True)],
    ],
    ids=["sync", "arm", "move", "prefer"],
)
def test_what_is_about_something_else_is_not_taken_for_newer(driver: Driver, nic: Any, newest: list[Any]) -> None:
    """An ABORT is not lost in what comes behind it; of each kind the newest is read, in the order of their coming."""
    _one, heard, arrive = heard_of(driver, nic)
    older = [replace(each, **({"number": 1} if hasattr(each, "number") else {"epoch": 0})) for each in newest]
    arrive(22, *older, *newest, *older)
    driver.run()
    assert heard == newest


def test_what_a_peer_says_takes_no_more_room_than_it_can_mean(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """A peer that says something new each time, on pairs that do not exist: so much is kept, and read in turn."""
    one, heard, arrive = heard_of(driver, nic)
    for number in range(20):
        arrive(22, *(Arm(ArmStep(n % 4), 0, n % 256, number, SOMEBODY) for n in range(1024)))
        while driver.channel.port(nic).inbox:
            driver._collect(clock.now)
    assert len(driver._mail) == 1 and len(driver._mail[one]) == MOST_UNREAD
    assert not driver._backlog and one.superseded == 20 * 1024 - MOST_UNREAD
    driver.run()
    assert len(heard) == MOST_UNREAD and {each.arm for each in heard} == {19}


def test_what_happened_here_comes_before_what_is_said(driver: Driver, nic: Any) -> None:
    """But where much happens here, a part of what is said is read all the same: who says it has deadlines."""
    one, heard, arrive = heard_of(driver, nic)
    happened: list[int] = []
    read: list[int] = []
    one.handle_message = lambda message: (heard.append(message), read.append(len(happened)))
    arrive(22, Arm(ArmStep.REQ, 0, 1, 1, SOMEBODY))
    driver._collect(0)
    for number in range(2 * SLICE):
        driver.later(one, happened.append, number)
    driver._work()
    assert read == [SLICE] and happened == list(range(SLICE))
    driver._work()
    assert happened == list(range(2 * SLICE))


def test_who_is_never_silent_does_not_put_off_our_deadlines(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """What has come is read before, and then the deadline holds, whether or not there is more by then."""
    one, heard, arrive = heard_of(driver, nic)
    told: list[int] = []
    one.on_time = lambda now: told.append(len(heard))
    one.timer_ns = None
    driver.schedule(one, clock.now)
    arrive(22, Arm(ArmStep.REQ, 0, 1, 1, SOMEBODY))
    driver._collect(clock.now)
    driver._timeouts(clock.now)
    assert told == [1] and not driver._mail


def test_a_flood_is_read_in_pieces_and_to_the_end(driver: Driver, nic: Any) -> None:
    """The driver looks at everything else in between; pings of the same peer are in the flood, and answered."""
    _one, heard, _arrive = heard_of(driver, nic)
    port, peer = driver.channel.port(nic), Peer(driver, nic)
    peer.hears(*port.sent)
    happened: list[int] = []
    datagrams: list[Any] = []
    for number in range(3 * READ_AT_ONCE):
        datagrams += peer.says(Entry(11, 22, Arm(ArmStep.REQ, 0, 1, number, SOMEBODY)))
    port.inbox = datagrams + peer.says(Entry(0, 0, Ping(5, False)))
    port.sent.clear()
    driver.post(lambda: happened.append(len(port.inbox)))
    driver.run()
    assert happened == [2 * READ_AT_ONCE + 1]
    assert [each.arm for each in heard] == [n * READ_AT_ONCE - 1 for n in (1, 2, 3)] and port.inbox == []
    assert [each.message for each in peer.hears(*port.sent)] == [Ping(5, True)]


def test_a_flood_that_never_ends_keeps_no_thread(
    driver: Driver, nic: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage comes faster than it is refused. The thread may be in a poll: it goes, and has another run follow."""
    port = with_port(driver.channel, nic)
    woken: list[int] = []
    monkeypatch.setattr(driver.waiter, "wake", lambda: woken.append(clock.now))

    def recv(most: int) -> list[Any]:
        clock.now += RUN_NS // 10
        assert clock.now < began + 100 * RUN_NS, "the run ends"
        return [(b"SV\x02" + bytes(64), 1, None)] * most

    port.recv, port.more = recv, True  # type: ignore[method-assign]
    for run in range(3):
        began = clock.now
        driver.run()
        assert clock.now == began + RUN_NS and len(woken) == run + 1 and _core.attention()
    assert driver.channel.unknown == 30 * READ_AT_ONCE
    port.recv, port.more = lambda most: [], False  # type: ignore[method-assign, misc]
    driver.run()
    assert not _core.attention() and len(woken) == 3


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
        assert driver.turns.is_going(each)
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
    assert len(begun) == 998 and not driver.turns._waiting and not driver.turns._going


def test_who_is_under_way_for_long_keeps_nobody_waiting(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
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


def test_what_came_for_a_life_that_is_over_is_dropped(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    first, second = slow_work(driver, nic, clock, 2, 10**6)
    driver.drop_backlog(first)  # type: ignore[arg-type]
    driver.run()
    assert "path_failed" not in first.told and "path_failed" in second.told


def test_a_long_hurry_does_not_keep_the_keys_of_memory_away(
    driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a thousand QPs switch one after the other, some may wait for a key of the peer's memory."""
    began = clock.now
    looked: list[int] = []
    monkeypatch.setattr(_nic, "readable", lambda fd: True)
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
        free = driver._lock.acquire(timeout=10)  # as closing a QP does
        assert free
        driver._lock.release()
    finally:
        handler.release()
    other.join(10)
    with driver.locked(), driver.locked():
        logger.warning("said in a verb")
        assert lines == ["said in a run"]
    logger.removeHandler(handler)
    assert lines == ["said in a run", "said in a verb"]


def test_a_log_handler_that_raises_is_not_the_verbs_business(driver: Driver, alarm: Any) -> None:
    """But what a signal's handler raises meanwhile is."""
    handler = logging.Handler()
    logger = logging.getLogger("shiftverbs.driver")
    logger.addHandler(handler)

    def poll() -> None:
        driver.post(lambda: logger.warning("said"))
        driver.run()

    def close() -> None:
        with driver.locked():
            logger.warning("said")

    try:
        for verb in (poll, close):
            handler.emit = lambda record: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            verb()
            handler.emit = alarm  # type: ignore[method-assign]
            with pytest.raises(TimeoutError):
                verb()
    finally:
        logger.removeHandler(handler)
    assert not driver._lock._is_owned()  # type: ignore[attr-defined]


def fence_of(driver: Driver, nic: Any, deadline_ns: int) -> tuple[Fence, list[Any]]:
    """A fence of pair 0 of a QP on `nic`, and where its end will be told."""
    ends: list[Any] = []
    core = SimpleNamespace(
        begin_fence=lambda k: None, post_marker=lambda k: 0, fence_state=lambda k: (False, False),
        counters=lambda: (0, 0, 0), unsafe_reason=lambda cqes_lost, receipts_lost=False: None,
    )  # fmt: skip
    connection: Any = Connection(nic)
    connection.driver, connection.core, connection.timer_ns = driver, core, None
    connection.rebuild = SimpleNamespace(call_off=lambda k: None)
    connection.device = lambda k: nic.name
    connection.fence = Fence(connection, (0,), deadline_ns, lambda: ends.append("done"), ends.append)
    connection.fence.begin()
    return connection.fence, ends


def test_a_fence_waits_for_its_turn_at_a_nic_that_works(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A thousand QPs fail together: the last command stands behind 999 others, and the NIC hangs at none of them."""
    hangs = [False]
    nic.hangs = lambda longer_than_s: hangs[0]
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    for _ in range(50):
        assert fence.due_ns > clock.now
        clock.now = fence.due_ns
        fence.tick(clock.now)
    assert ends == [] and clock.now > 10**9 + 2 * 10**9
    hangs[0] = True
    clock.now = fence.due_ns
    fence.tick(clock.now)
    assert "did not bring the QP to ERR" in ends[0]


def test_markers_that_were_refused_are_posted_again(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    core = fence._c.core
    answers = [errno.EINVAL, errno.EINVAL, 0]
    core.post_marker = lambda k: answers.pop(0)
    core.fence_state = lambda k: (not answers, not answers)
    fence._erred(0, 0, 1)
    assert ends == [] and len(answers) == 2
    fence._kicked(0)
    assert ends == [] and len(answers) == 1
    fence._kicked(0)
    assert answers == [] and ends == ["done"]


def test_a_fence_that_hung_tells_what_became_of_its_markers(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    fence._c.core.post_marker = lambda k: errno.EINVAL
    fence._erred(0, 0, 1)
    while not ends:
        clock.now = fence.due_ns
        fence.tick(clock.now)
    told = "nic0 did not flush the send queue and the receive queue (its marker: Invalid argument) in time"
    assert ends[0] == told


def test_a_late_answer_leaves_time_for_the_flush(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """The NIC, or we, were busy: the deadline is over when the command comes back, but nothing hangs."""
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    clock.now += 10**9
    fence._erred(0, 0, 1)
    fence.tick(clock.now)
    assert ends == []
    while not ends:
        assert clock.now < 5 * 10**9
        clock.now = fence.due_ns
        fence.tick(clock.now)
    assert "did not flush" in ends[0]


def test_closed_connections_are_let_go(driver: Driver, nic: Any, clock: Any) -> None:
    """They were kept by the round of looks under way, and by timers, as long as nobody made a new QP."""
    many = [add(driver, Connection(nic)) for _ in range(WATCH_AT_ONCE + 5)]
    for each in many:
        each.core = each  # what `add` enters it under
        each.timer_ns = None
        driver.schedule(each, clock.now + 10**12)
    clock.now += WATCH_PERIOD_NS
    driver.run()
    gone = [weakref.ref(each) for each in many]
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
            connection.protocol = object()
        nic.worker.finished.append((nic.worker.submitted.pop(), 0, 2, 0))
        driver.run()
        assert came == expected
    assert not driver._commands


def test_the_end_of_what_no_connection_asked_for_is_told(
    driver: Driver, nic: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def bug(err: int) -> None:
        raise RuntimeError("a bug")

    nic.worker.finished += [(told.append, 0, 0, 9), (bug, 0, 0, 9), (told.append, errno.EBUSY, 0, 9)]
    driver.run()
    assert told == [0, errno.EBUSY] and "a bug" in caplog.text


def test_a_qp_has_a_connection_from_when_it_needs_one_and_leaves_nothing(driver: Driver, nic: Any) -> None:
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, False, os.getpid()
    nic.worker.pending = lambda qp: 0

    def qp(number: int) -> Any:
        core = SimpleNamespace(send_cq=None, recv_cq=None)
        return Shadow(
            core=Shadow(**vars(core)), connection=None, closed=False, transitions={}, qp_num=number,
            domain=SimpleNamespace(nic=nic, backups=[]), handle=lambda k: 4096, state=lambda k: "pending",
        )  # fmt: skip

    unused, asked, connected = qp(1), qp(2), qp(3)
    assert runtime.connection_of(asked) is runtime.connection_of(asked) is asked.connection is not None
    runtime.qp_shadowed(unused)
    connected.transitions["RTR"] = {}
    runtime.qp_connected(connected)
    driver.run()
    assert list(driver.connections.values()) == [asked.connection, connected.connection] and not unused.connection
    for shadow in (unused, asked, connected):
        shadow.closed = True
        runtime.qp_closing(shadow)
        runtime.qp_connected(shadow)  # as from another thread, a moment too late
    assert not driver.connections and asked.connection.closed and connected.connection.status.value == "UNPROTECTED"
    driver.run()
    assert not driver.connections and runtime.connection_of(unused) is None


def test_lost_events_make_it_look_at_every_qp(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [add(driver, Connection(nic)) for _ in range(2)]
    lost = [True]
    monkeypatch.setattr(_core, "events_overflowed", lambda: lost.pop() if lost else False)
    driver.run()
    driver.run()
    assert all(each.told.count("look_again") == 1 for each in both)


class Port:
    """A control port: `ah` is what the next create_ah gives, 0 an error."""

    state, max_message, fd, qpn, qkey = "ready", 4096, 5, 7, 9

    def __init__(self) -> None:
        self.ah = 1
        self.sent: list[bytes] = []
        self.inbox: list[Any] = []
        self.gone: list[int] = []
        self.more = False

    def create_ah(self, **attrs: Any) -> int:
        if not self.ah:
            raise OSError(errno.ETIMEDOUT, "no neighbour")
        return self.ah

    def destroy_ah(self, ah: int) -> None:
        self.gone.append(ah)

    def send(self, ah: int, qpn: int, qkey: int, message: bytes) -> bool:
        self.sent.append(message)
        return True

    def recv(self, most: int) -> list[Any]:
        found, self.inbox = self.inbox[:most], self.inbox[most:]
        self.more = bool(self.inbox)
        return found


def with_port(channel: ControlChannel, nic: Any) -> Port:
    port = channel._ports[nic.name] = Port()
    return port


def test_a_removed_device_does_not_keep_the_control_thread_awake(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors are never quiet again, those of its control port too, whether that was made before or after."""
    watched: set[int] = set()
    channel = driver.channel
    monkeypatch.setattr(channel, "_watch", watched.add)
    monkeypatch.setattr(channel, "_unwatch", watched.discard)
    port = Port()
    channel._port_made(nic, port, None)
    assert watched == {port.fd}
    driver.nic_events._on_async(nic, EVENT_DEVICE_FATAL)
    assert not watched
    channel._port_made(nic, port, None)
    assert not watched


def test_a_peer_that_was_restarted_or_moved_has_a_path_of_its_own(driver: Driver, nic: Any) -> None:
    """Same GID, same QPN, another Q_Key or LID, while a QP of ours still holds the path to what was there before."""
    channel, port = driver.channel, with_port(driver.channel, nic)
    users: list[Any] = [lambda path: None for _ in range(3)]
    before, after = "0a" * 16, "0b" * 16
    endpoints = [
        ControlEndpoint("x", GID, lid, 5, 7, qkey, secret)
        for lid, qkey, secret in ((1, 9, before), (1, 10, after), (2, 10, after))
    ]
    paths = [channel.open_path(nic, endpoint, user) for endpoint, user in zip(endpoints, users, strict=True)]
    nic.worker.work()
    driver.run()
    assert [path.endpoint for path in paths] == endpoints
    assert paths[0].link is not paths[1].link is paths[2].link

    def answered_by(secret: str) -> list[Any]:
        """The paths by which a ping of that process's is answered."""
        port.inbox = Peer(driver, nic, secret).says(Entry(0, 0, Ping(5, False)))
        channel.receive(0)
        found = [path for path in paths if path.outbox]
        for path in found:
            path.outbox.clear()
        return found

    assert answered_by(before) == [paths[0]] and answered_by(after) == [paths[2]]
    channel.close_path(paths[0], users[0])
    assert answered_by(before) == []
    assert channel.open_path(nic, endpoints[1], users[1]) is paths[1]  # there and back again
    assert paths[1].link.path is paths[1]
    channel.close_path(paths[2], users[2])
    assert paths[1].link.path is paths[1]
    for _ in range(2):
        assert list(channel.paths.values()) == [paths[1]]
        channel.close_path(paths[1], users[1])
    assert not channel.paths and not channel._links


def test_an_address_handle_is_made_again(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    channel, port = driver.channel, with_port(driver.channel, nic)
    path = channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)

    def settle() -> None:
        nic.worker.work()
        driver.run()

    settle()
    assert path.ah == 1
    port.ah = 0
    channel.renew(nic)  # the GID went away, or the neighbour did
    settle()
    assert path.ready and path.failed and port.gone == []
    port.ah = 2
    for _ in range(2):
        clock.now += RETRY_FIRST_NS
        settle()
    settle()
    assert path.ah == 2 and path.failed is None and port.gone == [1]
    assert not nic.worker.jobs
    port.ah = 3
    channel.renew(nic)
    channel.close_path(path, path.users[0])
    nic.worker.work()
    driver.run()
    nic.worker.work()
    assert port.gone == [1, 2, 3], "one that was being made when the path was closed is destroyed too"


def test_a_pair_that_answers_is_not_suspected_again_and_again(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    """A thousand QPs that fail there one after the other: each time every one of them would have to be told."""
    with_port(driver.channel, nic)
    told: list[bool | None] = []
    path = driver.channel.open_path(
        nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: told.append(path.told)
    )
    nic.worker.work()
    driver.run()
    path.users[0](path)
    told.clear()

    def answered() -> None:
        clock.now += QUIET_PING_NS
        driver.channel.ping(clock.now)
        path.ping.handle_pong(path.asked, clock.now)
        driver.channel._tell(path)

    answered()
    assert told == [True]
    for _ in range(1000):
        driver.channel.suspect(path, clock.now)
        driver.channel.ping(clock.now)
        path.ping.handle_pong(path.asked, clock.now)
        driver.channel._tell(path)
    assert told == [True, False, True]
    clock.now += TRUST_NS
    driver.channel.suspect(path, clock.now)
    assert told == [True, False, True, False]


def test_who_has_much_to_say_is_not_taken_for_dead(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """A busy peer answers a ping late. But one that counts as dead has to answer, whatever else it says."""
    one, _heard, arrive = heard_of(driver, nic)
    path = one.paths[0]
    somebody = PairAddress(bytes(16), 0, 1, 0, 3)

    def time_passes(say: bool) -> None:
        clock.now += QUIET_PING_NS
        if say:
            arrive(22, Arm(ArmStep.RTU, 0, 1, 1, somebody))
        driver.run()

    for _ in range(3 * PINGS_UNTIL_DEAD):
        time_passes(say=True)
    assert path.ping.alive
    for _ in range(2 * PINGS_UNTIL_DEAD):
        time_passes(say=False)
    assert path.ping.alive is False
    for _ in range(2 * PINGS_UNTIL_DEAD):
        time_passes(say=True)
    assert path.ping.alive is False


def test_a_peer_whose_qp_is_gone_here_is_told(driver: Driver, nic: Any) -> None:
    """Our BYE was lost; what the peer says to a QP of before is answered, and a BYE is not."""
    port = with_port(driver.channel, nic)
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), lambda path: None)
    nic.worker.work()
    driver.run()
    peer = Peer(driver, nic)

    def arrives(entry: Entry) -> list[Entry]:
        port.inbox = peer.says(entry)
        port.sent.clear()
        driver.run()
        return [each for each in peer.hears(*port.sent) if each.to]

    somebody = PairAddress(bytes(16), 0, 1, 0, 3)
    answers = arrives(Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, somebody)))
    assert [(each.to, each.sender, each.message.phase) for each in answers] == [(22, 11, Phase.BYE)]  # type: ignore[union-attr]
    assert arrives(answers[0]) == []


ABORT = Sync(99, 0, Phase.ABORT, 1, False, PairAddress(bytes(16), 0, 1, 0, 3), 0)


def forger_of(driver: Driver, nic: Any) -> Peer:
    """Somebody who has seen all that the peer said, but none of the secrets."""
    forger, peer = Peer(driver, nic, "00" * 16), Peer(driver, nic)
    forger.seals.name_out, forger.seals.next_number = peer.seals.name_out, 1 << 40
    return forger


def test_who_forges_or_replays_is_not_heard(driver: Driver, nic: Any, caplog: Any) -> None:
    """What he says does nothing, is no sign of life, and does not keep what the peer says from being heard."""
    one, heard, arrive = heard_of(driver, nic)
    port, path = driver.channel.port(nic), one.paths[0]
    forger = forger_of(driver, nic)
    port.sent.clear()
    for message in (ABORT, Sync(0, 0, Phase.BYE, 0, False, ABORT.address, 0), Arm(ArmStep.REQ, 0, 1, 7, ABORT.address)):
        port.inbox = forger.says(Entry(11, 22, message))
        driver.run()
    assert driver.channel.forged == 3 and heard == [] and not path.heard
    port.inbox = forger.says(Entry(12, 22, Arm(ArmStep.REQ, 0, 1, 7, ABORT.address)))
    driver.run()
    assert port.sent == [], "a stranger's question after a QP is not answered"

    arrive(22, Arm(ArmStep.RTU, 0, 1, 1, ABORT.address))
    kept = list(port.inbox)
    driver.run()
    assert len(heard) == 1 and path.heard
    path.heard = False
    port.inbox = kept * 5
    driver.run()
    assert driver.channel.replayed == 5 and len(heard) == 1 and not path.heard
    lines = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert lines == ["nic0: forged control datagram from QPN 0x7: dropped"]


def test_forged_and_replayed_pings_count_for_nothing(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """They neither keep a dead path alive, nor have an answer to a ping passed off as one to a later ping."""
    one, _heard, _arrive = heard_of(driver, nic)
    port, path = driver.channel.port(nic), one.paths[0]
    forger, peer = forger_of(driver, nic), Peer(driver, nic)

    def asked() -> int:
        return [each.message.number for each in peer.hears(*port.sent) if isinstance(each.message, Ping)][-1]

    clock.now += QUIET_PING_NS
    driver.run()
    first = asked()
    answer = peer.says(Entry(0, 0, Ping(first, True)))
    port.inbox = list(answer)
    driver.run()
    assert path.ping.alive
    for _ in range(2 * PINGS_UNTIL_DEAD):
        clock.now += QUIET_PING_NS
        port.sent.clear()
        driver.run()
        port.inbox = forger.says(Entry(0, 0, Ping(asked(), True)), Entry(0, 0, Ping(1, False))) + answer
        port.sent.clear()
        driver.run()
        assert port.sent == []
    assert path.ping.alive is False
    assert driver.channel.forged == driver.channel.replayed == 2 * PINGS_UNTIL_DEAD


@pytest.mark.parametrize("kept", [0, 1], ids=["forgotten", "kept"])
def test_an_answer_of_before_fits_no_ping_of_a_path_made_again(
    driver: Driver, nic: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """All that was said is known to who listens; the last connection to a peer is closed, and another is made."""
    monkeypatch.setattr(control_channel, "KEPT_SEALS", kept)
    channel, port = driver.channel, with_port(driver.channel, nic)
    endpoint, peer = ControlEndpoint("x", GID, 0, 5, 7, 9, PEER_SECRET), Peer(driver, nic)
    answers: list[Any] = []

    def use(path: Any) -> None:
        pass

    for life in range(2):
        path = channel.open_path(nic, endpoint, use)
        nic.worker.work()
        driver.run()
        for _ in range(3 * PINGS_UNTIL_DEAD):
            clock.now += QUIET_PING_NS
            driver.run()
            if life == 0:
                pings = [each.message for each in peer.hears(*port.sent) if isinstance(each.message, Ping)]
                said = peer.says(*(Entry(0, 0, Ping(each.number, True)) for each in pings))
                answers += said
            port.inbox = list(said if life == 0 else answers)
            port.sent.clear()
            driver.run()
        assert path.ping.alive is (life == 0)
        assert bool(channel.replayed) is bool(life)
        channel.close_path(path, use)
        assert len(channel._kept_seals) == kept


def test_a_process_speaks_for_its_own_qps_only(driver: Driver, nic: Any) -> None:
    """What a message is called by is on the wire, and in the exchanger: that is no proof."""
    one, heard, _arrive = heard_of(driver, nic)
    port = driver.channel.port(nic)
    other = "77" * 16
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 8, 9, other), lambda path: None)
    nic.worker.work()
    driver.run()
    port.sent.clear()
    port.inbox = Peer(driver, nic, other).says(Entry(11, 22, ABORT))
    driver.run()
    assert heard == [] and driver.channel.unknown == 1 and not one.paths[0].heard and port.sent == []


def test_lines_that_somebody_outside_may_cause_are_written_once_a_second(
    driver: Driver, nic: Any, clock: SimpleNamespace, caplog: Any
) -> None:
    """One of each kind, which tells how many there were; none is ever left out for good."""
    _one, _heard, _arrive = heard_of(driver, nic)
    port, forger, peer = driver.channel.port(nic), forger_of(driver, nic), Peer(driver, nic)
    old = b"\x53\x56\x01\x01" + bytes(16) + b"\x05\x09" + bytes(9)

    def flood() -> list[str]:
        caplog.clear()
        broken = bytearray(next(control.encode([Entry(11, 22, ABORT)], peer.seals)))[:-TAG_BYTES] + b"junk"
        broken += peer.seals.tag(bytes(broken))
        port.inbox = arrived(b"x", old, bytes(broken)) * 100
        for _ in range(100):
            port.inbox += forger.says(Entry(11, 22, ABORT))
        driver.run()
        return sorted(record.getMessage().partition(": ")[2] for record in caplog.records)

    kinds = [
        "a process of another release (control QPN 0x7) cannot talk with this one: version 1, this release speaks 2",
        "forged control datagram from QPN 0x7: dropped",
        "malformed control datagram from QPN 0x7: 1 bytes are no header",
    ]
    assert flood() == kinds
    for _ in range(4):
        clock.now += SELDOM_NS // 5
        assert flood() == []
    clock.now += SELDOM_NS // 5
    left_out = zip(kinds, (99 + 400, 99 + 400, 99 + 1 + 4 * 101), strict=True)
    assert flood() == [f"{kind} ({n} more like it since the last such line)" for kind, n in left_out]
    channel = driver.channel
    assert (channel.other_version, channel.forged, channel.malformed) == (600, 600, 606)


class Shadow(SimpleNamespace):
    """A ShadowMR: hashable."""

    __hash__ = object.__hash__


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


def test_what_a_former_life_of_the_peer_said_is_not_for_its_next(driver: Driver, nic: Any) -> None:
    """Its BYE comes between the news of the next life and our looking at that: it ends the new pairing for good."""
    one, heard, arrive = heard_of(driver, nic)
    request = Arm(ArmStep.REQ, 0, 1, 1, PairAddress(bytes(16), 0, 1, 0, 3))

    def found() -> None:
        one.peer = SimpleNamespace(life=f"{33:016x}")

    driver.post(found)
    arrive(22, request)
    driver.run()
    assert heard == [] and not driver._mail
    arrive(33, request)
    driver.run()
    assert len(heard) == 1


def test_an_interrupted_run_goes_on(driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of it: no timer may stay unset, and what was collected must not wait for something new."""
    deadlines: list[int] = []
    monkeypatch.setattr(driver.waiter, "set_deadline", deadlines.append)

    def interrupted() -> None:
        raise KeyboardInterrupt

    told: list[int] = []
    driver.post(interrupted)
    driver.post(lambda: told.append(1))
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert not told and clock.now < deadlines[-1] <= clock.now + WATCH_PERIOD_NS
    driver.run()
    assert told == [1]


def test_what_an_interrupted_run_took_is_found_again(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is withheld and forgotten would be neither hidden nor delivered."""
    one = add(driver, Connection(nic))

    def taken() -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(_core, "take_events", taken)
        driver.run()
    assert "look_again" not in one.told
    driver.run()
    driver.run()
    assert one.told.count("look_again") == 1


def test_a_run_that_fails_is_repeated(driver: Driver, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[int] = []
    monkeypatch.setattr(driver.waiter, "set_deadline", deadlines.append)

    def bug(now: int) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(driver, "_tick", bug)
    driver.run()
    assert clock.now < deadlines[-1] <= clock.now + WATCH_PERIOD_NS


def test_the_collector_may_close_a_qp_wherever_we_are(driver: Driver, nic: Any) -> None:
    """It runs where objects are made, and finalizers where the last reference to something goes."""
    first, second = add(driver, Connection(nic)), add(driver, Connection(nic))
    collect: list[Any] = []

    class Said:
        def __del__(self) -> None:
            if collect:
                driver.drop_backlog(collect.pop())

    for each in (first, second, first, second):
        driver._mail[each] = {("anything",): Said()}  # type: ignore[dict-item, index]
        driver.later(each, print, Said())  # type: ignore[arg-type]
    collect.append(second)
    driver.drop_backlog(first)  # type: ignore[arg-type]
    assert not collect and not driver._backlog and not driver._pending and not driver._mail


def waits(nic: Any) -> list[tuple[str, int]]:
    """Have a command for a QP in that NIC's queue; what is done about it."""
    done: list[tuple[str, int]] = []
    nic.on_worker = lambda: False
    nic.worker.pending = lambda qp: 1
    nic.worker.cancel = lambda qp: done.append(("cancel", qp))
    nic.worker.drain = lambda qp, timeout_s: done.append(("drain", qp)) or True
    return done


def closed_qp(nic: Any) -> Any:
    domain = SimpleNamespace(nic=nic, backups=[])
    return Shadow(connection=object(), closed=True, handle=lambda k: 4096, domain=domain)


def test_no_command_is_under_way_on_a_qp_closed_at_exit(driver: Driver, nic: Any) -> None:
    """By an exit handler of the application's, which comes after ours: the NICs' threads are still at work."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, True, os.getpid()
    waited = waits(nic)
    runtime.qp_closing(closed_qp(nic))
    assert waited == [("cancel", 4096), ("drain", 4096)]


def test_no_command_waits_for_a_qp_closed_on_a_nics_own_thread(driver: Driver, nic: Any) -> None:
    """By the collector, which may run there: none is under way then, but what is queued would find it destroyed."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver, runtime._stopped, runtime.pid = driver, True, os.getpid()
    waited = waits(nic)
    nic.on_worker = lambda: True
    runtime.qp_closing(closed_qp(nic))
    assert waited == [("cancel", 4096)]


@pytest.mark.parametrize(
    ("closed", "state", "expected"),
    [
        ("", SendState.WAIT_SIGNALED, "move_cancel"),
        ("send_is_open", SendState.WAIT_DRAINED, "move_cancel"),
        ("ending", SendState.DEFAULT, "end"),
        ("send_is_open", SendState.DEFAULT, "end"),
        ("recv_is_open", SendState.DEFAULT, "end"),
        ("withheld", SendState.DEFAULT, "end"),
    ],
)
def test_giving_up_opens_the_gates(
    driver: Driver, nic: Any, closed: str, state: SendState, expected: str
) -> None:
    """Amid a MOVE from home, or while errors wait for the pairs to stop: nobody would come back."""
    done: list[str] = []

    class Core(Shadow):
        @property
        def is_plain(self) -> bool:
            return bool(self.send_is_open and self.recv_is_open)

    core = Core(send_is_open=True, recv_is_open=True, send_pair=0, recv_pair=0, guarded=True, ending=False)

    def move_cancel() -> None:
        done.append("move_cancel")
        core.send_is_open = True

    core.move_cancel = move_cancel
    core.first_error = lambda k: (12, 0) if closed == "withheld" else None
    if closed:
        setattr(core, closed, closed == "ending")
    domain = SimpleNamespace(nic=nic, backups=[])
    connection = RealConnection(driver, Shadow(core=core, qp_num=1, domain=domain))
    connection.ending.begin = lambda first: done.append("end")  # type: ignore[method-assign]
    connection.protocol = SimpleNamespace(switching=False, send_state=state, pairs=[])  # type: ignore[assignment]
    connection.give_up("a bug")
    assert done == [expected] and connection.status.value == "FAILED"
    assert core.guarded == (closed == "ending")


def as_the_collector(driver: Driver) -> Any:
    """What a finalizer that closes a QP does, wherever its thread is: takes the driver's lock. And if it began."""
    began = threading.Event()

    def collect() -> None:
        began.set()
        with driver.locked():
            pass

    return collect, began


def ends(call: Any) -> bool:
    """Whether a call returns in another thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


def test_telling_who_waits_waits_for_nobody(driver: Driver, nic: Any) -> None:
    """The collector may close a QP in a thread that waits for a state, while the driver changes that state."""
    connection = RealConnection(driver, Shadow(core=None, qp_num=1, domain=SimpleNamespace(nic=nic, backups=[])))
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
    assert connection.wait_for(lambda: False, time.monotonic() + 0.01) is False and not connection.timeline._waiting


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


def test_a_qp_that_is_closed_while_it_asks_for_looks_gets_none(driver: Driver, nic: Any) -> None:
    """By the collector, for one: its CQs would be looked at two thousand times a second for ever."""
    holder: list[RealConnection] = []

    class Core(Shadow):
        @property
        def send_cq(self) -> Queue:
            if holder:
                holder.pop().close()
            return Queue()

    core = Core(recv_cq=Queue(), remote_keys=None)
    domain = SimpleNamespace(nic=nic, backups=[])
    connection = RealConnection(driver, Shadow(core=core, qp_num=1, domain=domain))
    protocol: Any = SimpleNamespace(over=False, busy=True, handle=lambda event, now: [], pairs=[])
    connection.protocol = protocol
    holder.append(connection)
    connection._look()
    assert connection.closed
    connection.clear_away()
    assert not driver.looks._looks and not driver.looks._looked_at


@pytest.fixture
def alarm() -> Iterator[Any]:
    """A call in the middle of which the application's signal handler raises TimeoutError."""

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the application's")

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda *args: signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_what_a_signal_handler_raises_is_the_applications(
    driver: Driver, nic: Any, alarm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It must get its timeout, when the run is over: nothing in it was broken off."""
    one = add(driver, Connection(nic))
    done: list[int] = []
    for begin in (driver.post, functools.partial(driver.later, None), functools.partial(driver.later, one)):
        begin(lambda: (alarm(), done.append(1)))  # type: ignore[operator]
        driver.post(lambda: done.append(2))
        with pytest.raises(TimeoutError, match="application"):
            driver.run()
        assert sorted(done) == [1, 2]
        done.clear()
    driver.run()
    assert "give_up" not in one.told and "look_again" not in one.told and not caplog.records


def test_a_verb_is_not_broken_off_under_the_lock(driver: Driver, alarm: Any) -> None:
    """However deep, and whoever raises; no other signal's handler either."""
    done: list[int] = []
    with pytest.raises(TimeoutError, match="application"), driver.locked():
        with driver.locked():
            alarm()
            done.append(1)
        done.append(2)
        driver.run()
        done.append(3)
    assert done == [1, 2, 3] and not driver.is_in()
    with pytest.raises(ZeroDivisionError), driver.locked():
        raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        alarm()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL and not driver.is_in()


@pytest.mark.parametrize("verb", ["run", "locked"])
def test_a_signal_between_any_two_bytecodes(driver: Driver, alarm: Any, verb: str) -> None:
    """It leaves no lock taken, and nothing is lost or done by half."""
    done: list[int] = []
    at = seen = 0

    def act() -> None:
        if verb == "run":
            driver.post(lambda: done.extend((1, 2)))
            sys.settrace(tracer)
            driver.run()
        else:
            sys.settrace(tracer)
            with driver.locked():
                done.extend((1, 2))

    def tracer(frame: Any, event: str, arg: object) -> Any:
        nonlocal seen
        if "shiftverbs/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at:
                alarm()
        return tracer

    while seen >= at:
        at, seen = at + (1 if at < 100 else 13), 0
        done.clear()
        try:
            act()
        except TimeoutError:
            pass
        finally:
            sys.settrace(None)
        assert not driver.is_in(), at
        assert done in ([], [1, 2]), at
        driver.run()
        assert verb == "locked" or done == [1, 2], at


def test_who_waits_for_the_lock_can_be_interrupted(driver: Driver) -> None:
    """A NIC hangs under another thread's feet: Ctrl-C still ends the verb, which has not begun."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.locked():
            taken.set()
            assert over.wait(20)

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("the application's")

    before = signal.signal(signal.SIGALRM, handler)
    other = threading.Thread(target=hold)
    other.start()
    try:
        assert taken.wait(10)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError), driver.locked():
            raise AssertionError("it is another's")
        assert time.monotonic() - began < 10
    finally:
        over.set()
        other.join(20)
        signal.signal(signal.SIGALRM, before)
    with driver.locked():
        assert driver.is_in()


def test_a_handler_that_a_handler_sets_stays(driver: Driver) -> None:
    """Handlers that are due run before the driver is entered, and the signals are theirs again behind it."""
    heard: list[str] = []
    was = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    signal.signal(signal.SIGUSR1, lambda *args: heard.append("old"))
    try:
        with driver.locked():
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *args: heard.append("new"))
            signal.signal(signal.SIGUSR2, lambda *args: heard.append("other"))
            assert not heard
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["new", "other", "new"]
        with driver.locked():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN and len(heard) == 3
    finally:
        for number, handler in was.items():
            signal.signal(number, handler)


def test_a_child_of_a_fork_amid_the_driver_hears_its_signals(driver: Driver, alarm: Any) -> None:
    """Another thread forks while the main thread is in the driver: what came to the parent is not the child's."""
    status: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeoutError:
                code = 7
            finally:
                os._exit(code)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    other = threading.Thread(target=fork)
    with pytest.raises(TimeoutError), driver.locked():
        alarm()
        other.start()
        other.join(20)
    assert status == [7]


def test_a_signal_amid_news_of_the_exchanger_is_the_applications_too(
    driver: Driver, alarm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And the others who want that key hear of it all the same."""
    heard: list[Any] = []

    def first(value: Any) -> None:
        heard.append(value)
        alarm()

    driver.directory._wanted["key"] = [first, heard.append]
    driver.later(None, driver.directory._found, Found("key", {"a": 1}))
    with pytest.raises(TimeoutError, match="application"):
        driver.run()
    assert heard == [{"a": 1}] * 2 and not caplog.records


def test_a_signal_loses_nothing_that_a_nic_or_the_exchanger_has_told(
    driver: Driver, nic: Any, alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once. A command whose end is not noted is one that a fence waits for as long as its NIC works."""
    heard: list[Any] = []
    later, told = driver.later, [Found("a", {}), Found("b", {})]
    nic.worker.finished = [(heard.append, number, 0, 0) for number in range(3)]
    monkeypatch.setattr(_nic, "readable", lambda fd: bool(told))
    monkeypatch.setattr(driver.exchanger, "poll_events", lambda: [told.pop(0) for _ in told[:]])
    for key in ("a", "b"):
        driver.directory._wanted[key] = [functools.partial(lambda key, value: heard.append(key), key)]

    def interrupted(*args: Any) -> None:
        alarm()
        later(*args)

    monkeypatch.setattr(driver, "later", interrupted)
    with pytest.raises(TimeoutError):
        driver.run()
    driver.run()
    assert sorted(heard, key=str) == [0, 1, 2, "a", "b"]


def test_a_fence_gives_a_command_again_whose_end_was_lost(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    """In an interrupted run: a NIC that does not hang would be waited for without end."""
    nic.hangs = lambda longer_than_s: False
    fence, ends = fence_of(driver, nic, clock.now + 10**9)
    nic.worker.under_way = 1
    fence.look_again()
    assert len(nic.worker.submitted) == 1
    nic.worker.under_way = 0
    fence.look_again()
    assert len(nic.worker.submitted) == 2
    markers: list[int] = []
    fence._c.core.post_marker = lambda k: markers.append(k) or 0
    fence._erred(0, 0, 1)
    fence._erred(0, 0, 1)
    assert markers == [0] and ends == []
    fence.look_again()
    assert len(nic.worker.submitted) == 3  # the kick


def test_who_was_not_told_that_a_nic_died_finds_out(driver: Driver, nic: Any) -> None:
    """The run that told the QPs was interrupted."""
    core = Shadow(
        seen_rkeys=(), guarded=True, ending=False, first_error=lambda k: None, outstanding=(0, 0), unwired=(0, 0),
        refused=0,
    )  # fmt: skip
    connection = RealConnection(driver, Shadow(core=core, qp_num=1, domain=SimpleNamespace(nic=nic, backups=[])))
    told: list[ev.Event] = []
    pair = SimpleNamespace(dead=False)

    def handle(event: ev.Event, now: int) -> list[ev.Action]:
        told.append(event)
        pair.dead = True
        return []

    protocol: Any = SimpleNamespace(
        over=False, switching=False, busy=False, pairs=[pair], send_pair=0, recv_pair=0, send_state=SendState.DEFAULT,
        next_timeout_ns=None, handle=handle,
    )  # fmt: skip
    connection.protocol = protocol
    connection.look_again()
    assert told == []
    nic.dead = True
    connection.look_again()
    connection.look_again()
    assert told == [ev.NicDead(0)]


def test_a_signal_while_a_qp_is_closed_is_the_applications_too(driver: Driver, nic: Any, alarm: Any) -> None:
    """QP.close raises it, and is carried out."""
    core = Shadow(remote_keys=None)
    connection = RealConnection(driver, Shadow(core=core, qp_num=1, domain=SimpleNamespace(nic=nic, backups=[])))
    protocol: Any = SimpleNamespace(handle=lambda event, now: alarm() or [], pairs=[])
    connection.protocol = protocol
    with pytest.raises(TimeoutError, match="application"), driver.locked():
        connection.close()
    assert connection.closed


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

    def make(*args: Any) -> None:  # something, so that the collector runs
        if not closed.closed:
            closed.closed = True
            driver.drop_backlog(closed)
        later(*args)

    driver.turns._later = make
    driver.turns.admit(0)
    driver.run()
    assert begun == [*many[: UNDER_WAY + 1], many[UNDER_WAY + 2]] and closed not in driver.turns._going


def test_a_context_that_is_closed_when_it_is_to_be_watched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may be another file's by then, which would keep the control thread awake."""
    watched: set[int] = set()
    events: Any = Shadow(closed=False, fd=7)

    def watch(fd: int) -> None:
        events.closed = True
        driver.nic_events.unwatch_events(events)
        watched.add(fd)

    monkeypatch.setattr(driver.waiter, "add", watch)
    monkeypatch.setattr(driver.waiter, "remove", watched.discard)
    driver.nic_events.watch_events(events)
    assert not watched and not driver.nic_events._watched_events


def test_a_qp_that_the_collector_closes_gets_no_command_any_more(driver: Driver, nic: Any) -> None:
    """While its own connection is about to give one: the QP is destroyed by then, and the NIC's thread would crash."""
    one = add(driver, Connection(nic))

    def handle(k: int) -> int:
        one.closed = True
        return 4096

    one.shadow.handle = handle
    driver.command(one, 0, None, lambda err, step: None)  # type: ignore[arg-type]
    assert nic.worker.submitted == [] and not driver._commands


def test_a_qp_that_the_collector_closes_leaves_no_message_behind(driver: Driver, nic: Any) -> None:
    """While a message for it is noted."""
    one = add(driver, Connection(nic))
    said = Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, PairAddress(bytes(16), 0, 1, 0, 3)))
    driver.drop_backlog(one)  # type: ignore[arg-type]
    one.closed = True
    driver._mail[one] = {said.message.about: said}  # type: ignore[index, union-attr]
    driver.run()
    assert not driver._mail and not driver._pending and "handle_message" not in one.told


def test_a_qp_that_the_collector_closes_gets_no_connection(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is made for it: nothing would ever close that, and it would go on with a QP that is destroyed."""
    runtime: Any = Runtime.__new__(Runtime)
    runtime.driver = driver
    shadow = Shadow(core=Shadow(), connection=None, closed=False, qp_num=1)

    def made(*args: Any) -> Any:
        shadow.closed = True
        return RealConnection(*args)

    monkeypatch.setattr(runtime_module, "Connection", made)
    assert runtime.connection_of(shadow) is None and not driver.connections


def test_a_refused_post_that_nobody_was_told_of_is_found(driver: Driver, nic: Any) -> None:
    """Its event was lost among too many: without it the gate would stay closed for ever."""
    cq = SimpleNamespace(drain=lambda k: None)
    core = Shadow(
        seen_rkeys=(), guarded=True, ending=False, first_error=lambda k: None, outstanding=(1, 0), unwired=(1, 0),
        refused=errno.EINVAL, send_pair=0, send_cq=cq, recv_cq=cq,
    )  # fmt: skip
    connection = RealConnection(driver, Shadow(core=core, qp_num=1, domain=SimpleNamespace(nic=nic, backups=[])))
    told: list[ev.Event] = []
    pairs = [SimpleNamespace(dead=False)]
    protocol: Any = SimpleNamespace(
        over=False, switching=True, busy=False, pairs=pairs, send_pair=0, recv_pair=0, send_state=SendState.DEFAULT,
        next_timeout_ns=None, handle=lambda event, now: told.append(event) or [],
    )  # fmt: skip
    connection.protocol = protocol
    connection.look_again()
    assert told == []  # the SWITCH hands it over once more
    protocol.switching = False
    connection.look_again()
    assert [type(event) for event in told] == [ev.WorkRefused] and "Invalid argument" in told[0].reason
    assert connection.ending.original == (2, errno.EINVAL)
