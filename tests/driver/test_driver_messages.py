# SPDX-License-Identifier: BSD-3-Clause
"""What peers say, and what is told meanwhile: only the newest counts, floods are bounded, deadlines are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from driver.doubles import GID, PEER_SECRET, Connection, Peer, add, heard_of, peer_of, with_port
from msgspec.structs import replace

from shiftverbs import _core
from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.failover.driver import LATER_NS, MOST_UNREAD, RUN_NS, SLICE, WATCH_PERIOD_NS, Driver
from shiftverbs.failover.services.control_channel import READ_AT_ONCE
from shiftverbs.native.ibv import EventType
from shiftverbs.protocol.codec import Entry, Ping
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync


def slow_work(driver: Driver, nic: Any, clock: SimpleNamespace, count: int, each_ns: int) -> list[Connection]:
    """Have so many connections hear that a port failed, which takes each of them so long."""

    class Slow(Connection):
        def path_failed(self, *args: Any) -> None:
            clock.now += each_ns
            self.told.append("path_failed")

    many = [add(driver, Slow(nic)) for _ in range(count)]
    driver.nic_events._on_async(nic, EventType.PORT_ERR, 1)
    return many


def failed(many: list[Connection]) -> int:
    return sum("path_failed" in each.told for each in many)


def test_pings_are_answered_while_a_thousand_qps_fail(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
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
    one.peer = peer_of(33)
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
def test_what_is_about_something_else_is_not_taken_for_newer(
    driver: Driver, nic: Any, newest: list[Any]
) -> None:
    """An ABORT is not lost in what comes behind it; of each kind the newest is read, in the order of their coming."""
    _one, heard, arrive = heard_of(driver, nic)
    older = [replace(each, **({"number": 1} if hasattr(each, "number") else {"epoch": 0})) for each in newest]
    arrive(22, *older, *newest, *older)
    driver.run()
    assert heard == newest


def test_what_a_peer_says_takes_no_more_room_than_it_can_mean(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
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


def test_who_is_never_silent_does_not_put_off_our_deadlines(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
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


def test_what_came_for_a_life_that_is_over_is_dropped(
    driver: Driver, nic: Any, clock: SimpleNamespace
) -> None:
    first, second = slow_work(driver, nic, clock, 2, 10**6)
    driver.drop_backlog(first)  # type: ignore[arg-type]
    driver.run()
    assert "path_failed" not in first.told and "path_failed" in second.told


def test_what_a_former_life_of_the_peer_said_is_not_for_its_next(driver: Driver, nic: Any) -> None:
    """Its BYE comes between the news of the next life and our looking at that: it ends the new pairing for good."""
    one, heard, arrive = heard_of(driver, nic)
    request = Arm(ArmStep.REQ, 0, 1, 1, PairAddress(bytes(16), 0, 1, 0, 3))

    def found() -> None:
        one.peer = peer_of(33)

    driver.post(found)
    arrive(22, request)
    driver.run()
    assert heard == [] and not driver._mail
    arrive(33, request)
    driver.run()
    assert len(heard) == 1
