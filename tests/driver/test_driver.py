# SPDX-License-Identifier: BSD-3-Clause
"""The driver's own duties, with NICs and connections that only remember: isolation, bounded looks, late answers."""

from __future__ import annotations

import errno
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shiftverbs import _core, _nic
from shiftverbs import driver as driver_module
from shiftverbs.config import Config
from shiftverbs.control import Entry
from shiftverbs.control_channel import RETRY_FIRST_NS, ControlChannel
from shiftverbs.driver import WATCH_AT_ONCE, WATCH_PERIOD_NS, Driver
from shiftverbs.exchanger.memory import MemoryExchanger, MemoryStore
from shiftverbs.exchanger.records import ControlEndpoint
from shiftverbs.messages import Arm, ArmStep, PairAddress, Phase
from shiftverbs.runtime import Runtime

GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"


class Worker:
    """A NIC's thread that does what it is told when `work` is called."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.submitted: list[Any] = []
        self.finished: list[tuple[Any, int, int, int]] = []

    def call(self, fn: Any, *args: Any) -> None:
        self.jobs.append((fn, args))

    def work(self) -> None:
        jobs, self.jobs = self.jobs, []
        for fn, args in jobs:
            fn(*args)

    def submit(self, tag: Any, qp: int, steps: Any) -> None:
        self.submitted.append(tag)

    def results(self) -> list[tuple[Any, int, int, int]]:
        found, self.finished = self.finished, []
        return found


def make_nic(name: str = "nic0") -> Any:
    return SimpleNamespace(
        name=name, ctx=1, port=1, gid_index=0, dead=False, uses_grh=True, worker=Worker(), seen_gids=set(),
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
        add=lambda fd: None, remove=lambda fd: None, wake=lambda: None, set_deadline=lambda at: None
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


def test_a_removed_device_stops_nobody_else(
    driver: Driver, nic: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading its events fails for ever: it counts as dead, once, and the driver goes on."""
    bad, good = add(driver, Connection(nic, bug=True)), add(driver, Connection(nic))

    def broken(ctx: int) -> None:
        raise OSError(errno.EIO, "removed")

    driver.watch_nic(nic)
    monkeypatch.setattr(_nic, "get_async_event", broken)
    for _ in range(3):
        driver.run()
    assert nic.dead
    assert good.told.count("nic_dead") == 1 and bad.told[:2] == ["nic_dead", "give_up"]
    done: list[bool] = []
    driver.post(lambda: done.append(True))
    driver.run()
    assert done and "the failover driver failed" not in caplog.text
    driver.watch_nic(nic)  # another Context on it
    driver.run()
    assert good.told.count("nic_dead") == 1


def test_a_bug_in_one_connection_costs_the_others_nothing(driver: Driver, nic: Any) -> None:
    both = [add(driver, Connection(nic, bug=True)), add(driver, Connection(nic))]
    driver._on_async(nic, driver_module.EVENT_PORT_ERR, 1)
    assert all("path_failed" in each.told for each in both)
    assert "give_up" in both[0].told and "give_up" not in both[1].told


def test_a_port_event_is_about_its_own_port(driver: Driver, nic: Any) -> None:
    """One NIC with two ports, a QP on each: the other one's path has not failed."""
    first, second = add(driver, Connection(nic)), add(driver, Connection(nic, port=2))
    driver._on_async(nic, driver_module.EVENT_PORT_ERR, 2)
    assert "path_failed" in second.told and "path_failed" not in first.told
    assert driver.port_ok(nic, 1) and not driver.port_ok(nic, 2)
    driver._on_async(nic, driver_module.EVENT_PORT_ACTIVE, 2)
    assert driver.port_ok(nic, 2)


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

    def create_ah(self, **attrs: Any) -> int:
        if not self.ah:
            raise OSError(errno.ETIMEDOUT, "no neighbour")
        return self.ah

    def destroy_ah(self, ah: int) -> None:
        self.gone.append(ah)

    def send(self, ah: int, qpn: int, qkey: int, message: bytes) -> bool:
        self.sent.append(message)
        return True

    def recv(self) -> list[Any]:
        found, self.inbox = self.inbox, []
        return found


def with_port(channel: ControlChannel, nic: Any) -> Port:
    port = channel._ports[nic.name] = Port()
    return port


def test_an_address_handle_is_made_again(driver: Driver, nic: Any, clock: SimpleNamespace) -> None:
    channel, port = driver.channel, with_port(driver.channel, nic)
    path = channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9), lambda path: None)

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


def test_a_peer_whose_qp_is_gone_here_is_told(driver: Driver, nic: Any) -> None:
    """Our BYE was lost; what the peer says to a QP of before is answered, and a BYE is not."""
    from shiftverbs import control

    port = with_port(driver.channel, nic)
    driver.channel.open_path(nic, ControlEndpoint("x", GID, 0, 5, 7, 9), lambda path: None)
    nic.worker.work()
    driver.run()
    port.sent.clear()

    def arrives(entry: Entry) -> list[Entry]:
        port.inbox = [
            (data, 7, bytes.fromhex(GID.replace(":", ""))) for data in control.encode([entry], 4096)
        ]
        port.sent.clear()
        driver.run()
        return [each for data in port.sent for each in control.decode(data) if each.to]

    somebody = PairAddress(bytes(16), 0, 1, 0, 3)
    answers = arrives(Entry(11, 22, Arm(ArmStep.REQ, 0, 1, 1, somebody)))
    assert [(each.to, each.sender, each.message.phase) for each in answers] == [(22, 11, Phase.BYE)]  # type: ignore[union-attr]
    assert arrives(answers[0]) == []


class Shadow(SimpleNamespace):
    """A ShadowMR: hashable."""

    __hash__ = object.__hash__


def test_memory_is_published_under_a_gid_that_came_later(nic: Any) -> None:
    """A QP connected after a flap names our new GID; its peer looks for our older memory there."""
    runtime: Any = Runtime.__new__(Runtime)
    keys: list[str] = []
    runtime.config, runtime.instance, runtime._mr_keys = Config(), "0" * 16, {}
    runtime.driver = SimpleNamespace(
        connections={}, publish_mr=lambda gid, rkey, record: keys.append(f"{gid.hex()}/{rkey}") or keys[-1]
    )
    table = [b"a" * 16]
    nic.ports = (SimpleNamespace(number=1),)
    nic.gids = lambda port: [SimpleNamespace(raw=raw) for raw in table]
    domain = SimpleNamespace(nic=nic, backups=[1])
    shadow = Shadow(closed=False, region=(0, 8, 0, 0), domain=domain, rkey=5, keys=lambda k: (6, 7))
    runtime._publish_mr(shadow)
    assert keys == [f"{b'a'.hex() * 16}/5"]
    table[0] = b"b" * 16
    runtime._gids_changed(nic)
    assert set(keys) == {f"{b'a'.hex() * 16}/5", f"{b'b'.hex() * 16}/5"} == runtime._mr_keys[shadow]


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
