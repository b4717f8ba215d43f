# SPDX-License-Identifier: BSD-3-Clause
"""Which NIC backs up which, and which port and GID on it."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import queue
import signal
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs import _nic
from shiftverbs.shadows import nic as nic_module
from shiftverbs.shadows.nic import BackupError, Gid, Nic, Nics, Port, best_gid, best_pkey, choose
from shiftverbs.shadows.qp import ShadowQP

V4 = bytes(10) + b"\xff\xff"
ETHERNET = (Port(1, True, True),)
DOWN = (Port(1, False, True),)
INFINIBAND = (Port(1, True, False),)


def lookup(**ports: Sequence[Port]) -> Any:
    return lambda name: ports.get(name, ())


def test_other_active_ports_of_the_same_link_layer_in_device_order() -> None:
    names = ["a", "b", "c", "d", "e"]
    ports = lookup(a=ETHERNET, b=INFINIBAND, c=ETHERNET, d=DOWN, e=ETHERNET)
    assert choose("a", names, {}, ports) == ["c", "e"]
    assert choose("c", names, {}, ports) == ["a", "e"]
    assert choose("b", names, {}, ports) == []
    assert choose("d", names, {}, ports) == ["a", "c", "e"]


def test_a_device_that_cannot_be_opened_is_no_backup_and_has_none() -> None:
    ports = lookup(a=ETHERNET, c=ETHERNET)
    assert choose("a", ["a", "b", "c"], {}, ports) == ["c"]
    assert choose("b", ["a", "b", "c"], {}, ports) == []


def test_second_port_active() -> None:
    ports = lookup(
        a=(Port(1, False, False), Port(2, True, True)), b=(Port(1, False, True), Port(2, True, True))
    )
    assert choose("a", ["a", "b"], {}, ports) == ["b"]


def test_the_map_is_followed_and_asks_no_device() -> None:
    def ask(name: str) -> Sequence[Port]:
        raise AssertionError(name)

    given_map = {"a": ("c", "b"), "b": ("a",)}
    assert choose("a", ["a", "b", "c"], given_map, ask) == ["c", "b"]
    assert choose("b", ["a", "b", "c"], given_map, ask) == ["a"]
    assert choose("c", ["a", "b", "c"], given_map, ask) == []


@pytest.mark.parametrize("given_map", [{"a": ("x",)}, {"x": ("a",)}, {"a": ("b",), "b": ("y", "x")}])
def test_an_unknown_device_is_named_with_those_that_exist(given_map: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(BackupError, match=r"x.*does not exist.*a, b"):
        choose("a", ["a", "b"], given_map, lookup())


def test_no_device_at_all() -> None:
    with pytest.raises(BackupError, match="no device at all"):
        choose("a", [], {"a": ("b",)}, lookup())


def test_at_most_fifteen() -> None:
    names = [f"n{number}" for number in range(40)]
    assert choose("n3", names, {}, lambda name: ETHERNET) == [*names[:3], *names[4:16]]


def test_gid_preference() -> None:
    table = [
        Gid(0, 1, b"\xfe\x80" + bytes(13) + b"\x01"),
        Gid(1, 2, b"\xfe\x80" + bytes(13) + b"\x01"),
        Gid(2, 1, V4 + b"\x0a\0\0\1"),
        Gid(3, 2, V4 + b"\x0a\0\0\1"),
        Gid(4, 2, b"\x20\x01" + bytes(13) + b"\x01"),
    ]

    def pick(entries: list[Gid], like: Gid | None = None) -> int | None:
        found = best_gid(entries, like)
        return None if found is None else found.index

    assert pick(table) == 3
    assert pick([table[i] for i in (0, 1, 2, 4)]) == 4
    assert pick([table[i] for i in (0, 1, 2)]) == 1
    assert pick([table[i] for i in (0, 2)]) == 2
    assert pick([]) is None
    for number, entry in enumerate(table):
        assert pick(table, entry) == number
    assert pick(table[:3], table[3]) == 1  # the type counts before the family
    assert pick(table, Gid(9, 2, V4 + b"\x0b\0\0\1")) == 3


@given(st.lists(st.builds(Gid, st.integers(0, 255), st.integers(0, 2), st.binary(min_size=16, max_size=16))))
def test_gid_choice_does_not_depend_on_order(entries: list[Gid]) -> None:
    unique = list({entry.index: entry for entry in entries}.values())
    chosen = best_gid(unique)
    for shuffled in itertools.islice(itertools.permutations(unique), 20):
        assert best_gid(shuffled) == chosen


@pytest.mark.parametrize(
    ("table", "pkey", "index"),
    [
        ((0xFFFF,), 0xFFFF, 0),
        ((0xFFFF, 0x8001), 0x8001, 1),
        ((0x0001, 0x8001), 0x8001, 1),  # a limited member of the partition reaches less
        ((0x8001, 0x0001), 0x0001, 1),
        ((0xFFFF, 0x8001), 0x0001, 1),  # a full one reaches more
        ((0xFFFF, 0x0001), 0x8001, None),
        ((0xFFFF, 0x0000), 0x8001, None),
        ((0xFFFF, 0x0000, 0x8000), 0x0000, None),  # no P_Key at all
    ],
)
def test_a_partition_is_found_by_its_pkey(table: tuple[int, ...], pkey: int, index: int | None) -> None:
    assert best_pkey(table, pkey) == index


def test_the_pkey_index_of_a_backup() -> None:
    """The application's P_Key, wherever the backup has it, and not its index; none is an error that says which."""

    class Infiniband(Verbs):
        tables: ClassVar[dict[str, list[int]]] = {"a": [0xFFFF, 0, 0x8001], "d": [0x8001, 0xFFFF]}

        def query_port(self, ctx: int, number: int) -> dict[str, int]:
            return {**super().query_port(ctx, number), "link_layer": 1, "pkey_tbl_len": 3}

        def query_pkey(self, ctx: int, port: int, index: int) -> int:
            table = self.tables[chr(ctx)]
            if index >= len(table):
                raise OSError(22, "Invalid argument")
            return table[index]

    verbs = Infiniband()
    nics = Nics(Worker, verbs)
    nic, backups = nics.for_device("a", {"a": ["d"]})
    assert nic.ports[0].pkeys == (0xFFFF, 0, 0x8001) and backups[0].ports[0].pkeys == (0x8001, 0xFFFF, 0)
    attrs = {"port_num": 2}
    held: Any = SimpleNamespace(attrs=attrs, domain=SimpleNamespace(nic=nic, backups=backups))
    for index, found in ((0, 1), (2, 0)):
        attrs["pkey_index"] = index
        assert ShadowQP.pkey_index(held, 0, 2) == index
        assert ShadowQP.pkey_index(held, 1, 1) == found
    attrs["pkey_index"] = 1
    with pytest.raises(OSError, match="a has no P_Key at index 1"):
        ShadowQP.pkey_index(held, 1, 1)
    verbs.tables["d"][0] = 0x8002
    attrs["pkey_index"] = 2
    done = threading.Event()
    backups[0].look_again(done.set)
    assert done.wait(30)
    with pytest.raises(OSError, match="d has no P_Key 0x8001 on port 1"):
        ShadowQP.pkey_index(held, 1, 1)
    nics.close()


def test_on_ethernet_there_is_one_partition() -> None:
    """The table is not read: a provider may show what it likes there."""
    nic = Nic("a", Worker, Verbs())
    assert nic.wait_open(30)
    assert nic.pkey(2, 0) == 0xFFFF and nic.pkey_index(2, 0xFFFF) == 0
    nic.close()


def test_a_nic_that_keeps_keys_from_others_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page that they are kept with has a PD."""
    verbs, left = Verbs(), [70]
    given = iter([70, 71])
    nic = Nic("a", Worker, verbs)
    assert nic.wait_open(30)
    monkeypatch.setattr(verbs, "reg_mr", lambda *args: (key := next(given), key, key), raising=False)
    monkeypatch.setattr(
        verbs, "dereg_mr", lambda handle: handle in left and left.remove(handle), raising=False
    )
    nic.registrar.call(nic.plugs.plug, lambda rkey: rkey == 70).result(30)
    assert list(nic.plugs.keys) == [70] == left
    nic.close()
    assert not nic.plugs.keys and not left


class Worker:
    """A NicWorker of the ordinary kind: one thread, jobs in order."""

    def __init__(self, name: str) -> None:
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)

    def call(self, job: Any, *args: Any) -> _nic.Job[Any]:
        ended: _nic.Job[Any] = _nic.Job()
        self.pool.submit(job, *args).add_done_callback(functools.partial(self._ended, ended))
        return ended

    @staticmethod
    def _ended(job: _nic.Job[Any], future: concurrent.futures.Future[Any]) -> None:
        error = future.exception()
        job.begin()
        job.end(None if error else future.result(), error)

    def stop(self, timeout_s: float) -> bool:
        self.pool.shutdown(wait=True)
        return True


class Verbs:
    """Three devices: b is broken, c hangs until released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.opened: list[str] = []
        self.closed: list[int] = []

    def list_devices(self) -> list[str]:
        return ["a", "b", "c", "d"]

    def open_device(self, name: str) -> int:
        self.opened.append(name)
        if name == "b":
            raise OSError(19, "No such device")
        if name == "c":
            assert self.release.wait(30)
        return ord(name)

    def alloc_pd(self, ctx: int) -> int:
        return ctx + 1000

    def query_device(self, ctx: int) -> dict[str, int]:
        return {"phys_port_cnt": 2}

    def query_port(self, ctx: int, number: int) -> dict[str, int]:
        return {
            "state": 4 if number == 2 else 1,
            "link_layer": 2,
            "gid_tbl_len": 6,
            "active_mtu": 3,
            "lid": 0,
        }

    def query_gid(self, ctx: int, port: int, index: int) -> bytes:
        table = {3: b"\xfe\x80" + bytes(13) + b"\x01", 5: V4 + bytes([10, 0, 0, ctx])}
        return table.get(index, bytes(16))

    def query_gid_type(self, ctx: int, port: int, index: int) -> int:
        if index not in (3, 5):
            raise OSError(61, "No data available")
        return 2

    def dealloc_pd(self, pd: int) -> None:
        self.closed.append(pd)

    def close_device(self, ctx: int) -> None:
        self.closed.append(ctx)


def test_a_broken_or_hanging_nic_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = Verbs()
    nics = Nics(Worker, verbs)
    nic, backups = nics.for_device("a", {}, timeout_s=0.2)
    assert nic.name == "a" and nic.is_open and [other.name for other in backups] == ["d"]
    assert sorted(verbs.opened) == ["a", "b", "c", "d"]
    assert not nics.get("b").is_open and "No such device" in nics.get("b").error
    verbs.release.set()
    assert nics.get("c").wait_open(30)
    assert [other.name for other in nics.for_device("a", {})[1]] == ["c", "d"]
    assert nics.get("a") is nic
    nics.close()
    assert sorted(verbs.closed) == sorted([97, 1097, 99, 1099, 100, 1100])


def test_the_driver_does_not_wait_for_whoever_opens_a_nic() -> None:
    """The collector may run in that thread, and close a QP, which takes the driver's lock."""
    nics = Nics(Worker, Verbs())
    opened = nics.get("a")
    found: list[list[Nic]] = []
    with nics._lock:
        driver = threading.Thread(target=lambda: found.append(nics.all()))
        driver.start()
        driver.join(10)
    assert found == [[opened]]
    nics.close()


def test_a_signal_while_a_nic_is_opened_is_the_applications() -> None:
    """Its handler's TimeoutError is not taken for ours."""

    def handler(number: int, frame: object) -> None:
        raise TimeoutError("the application's")

    verbs = Verbs()
    nic = Nic("c", Worker, verbs)  # it hangs
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="application"):
            nic.wait_open(10)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError, match="application"):
            _nic.Job().wait(10)
    finally:
        signal.signal(signal.SIGALRM, before)
        verbs.release.set()
    assert nic.wait_open(30)
    nic.close()


def test_who_waits_for_a_nic_holds_nobody_up() -> None:
    """The collector may close a QP in that thread, which takes the driver's lock; `look_again` is called under it."""
    verbs = Verbs()
    nic = Nic("c", Worker, verbs)  # it hangs
    found: list[bool] = []
    looked = threading.Event()
    thread = threading.Thread(target=lambda: found.append(nic.wait_open(30)), daemon=True)
    thread.start()
    nic.look_again(looked.set)  # returns at once
    assert not looked.is_set() and not found
    verbs.release.set()
    assert looked.wait(30)
    thread.join(10)
    assert found == [True]
    nic.close()


class HangingLooks(Verbs):
    """Once the device is open, questions for its ports are not answered before `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.hangs = False

    def query_port(self, ctx: int, number: int) -> dict[str, int]:
        if self.hangs:
            self.asked.set()
            assert self.release.wait(30)
        return super().query_port(ctx, number)


class ImpatientWorker(Worker):
    """One that waits no longer for its thread than it is told to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.jobs: list[_nic.Job[Any]] = []

    def call(self, job: Any, *args: Any) -> Any:
        self.jobs.append(super().call(job, *args))
        return self.jobs[-1]

    def stop(self, timeout_s: float) -> bool:
        self.pool.shutdown(wait=False)
        until = time.monotonic() + timeout_s
        return all(job.wait(max(0.0, until - time.monotonic())) for job in self.jobs)


def test_a_look_that_hangs_holds_up_no_command_and_no_close() -> None:
    """The device stays open: the look is in it."""
    verbs = HangingLooks()
    nic = Nic("a", ImpatientWorker, verbs)
    assert nic.wait_open(30)
    verbs.hangs = True
    seen = threading.Event()
    nic.look_again(seen.set)
    try:
        assert verbs.asked.wait(30)
        assert nic.worker.call(lambda: "done").result(30) == "done"
        assert not nic.close(0.01) and not verbs.closed and nic.is_open
    finally:
        verbs.release.set()
    assert seen.wait(30)


def test_a_nic_is_not_looked_at_before_it_is_open() -> None:
    verbs = Verbs()
    nic = Nic("c", Worker, verbs)
    seen: queue.SimpleQueue[tuple[Port, ...]] = queue.SimpleQueue()
    nic.look_again(lambda: seen.put(nic.ports))
    verbs.release.set()
    assert [port.number for port in seen.get(timeout=30)] == [1, 2]
    nic.close()


def test_who_asks_a_nic_that_was_opened_by_half_hears_of_the_look() -> None:
    class Incomplete(Verbs):
        def query_device(self, ctx: int) -> dict[str, int]:
            raise OSError(5, "Input/output error")

    nic = Nic("a", Worker, Incomplete())
    assert not nic.wait_open(30) and nic.ctx
    seen = threading.Event()
    nic.look_again(seen.set)
    assert seen.wait(10) and nic.ports == ()
    nic.close()


class Stuck(Worker):
    """A thread that hangs, on a clock that only waiting for it moves."""

    now = 0.0

    def stop(self, timeout_s: float) -> bool:
        self.pool.shutdown(wait=False)
        Stuck.now += timeout_s
        return False


def test_however_many_nics_hang_the_end_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = [Nic(name, Stuck, Verbs()) for name in "adef"]
    assert all(each.wait_open(30) for each in nics)
    Stuck.now = 0.0
    monkeypatch.setattr(nic_module, "_live", nics)
    monkeypatch.setattr(nic_module, "time", SimpleNamespace(monotonic=lambda: Stuck.now))
    nic_module._stop_threads()
    assert 0 < Stuck.now <= nic_module.STOP_S


def test_port_and_gid_of_a_nic() -> None:
    verbs = Verbs()
    nic = Nic("a", Worker, verbs)
    assert nic.wait_open(30)
    assert (nic.port, nic.gid_index, nic.uses_grh) == (2, 5, True)
    assert nic.gid(2, 0) is None or not any(nic.gid(2, 0).raw)  # type: ignore[union-attr]
    assert nic.route(1, None) == (2, Gid(5, 2, V4 + b"\x0a\0\0a"))
    assert nic.route(2, Gid(1, 2, b"\xfe\x80" + bytes(14)))[1] == Gid(3, 2, b"\xfe\x80" + bytes(13) + b"\x01")
    assert not nic.on_worker()
    assert all(thread.call(nic.on_worker).result(30) for thread in (nic.worker, nic.registrar))
    nic.close()
