# SPDX-License-Identifier: BSD-3-Clause
"""The in-memory store's own means: leases by a given clock, outages, partitions, crashes."""

from __future__ import annotations

from memory_exchanger import MemoryExchanger, MemoryStore

from exchanger.conftest import GID_A, Watched, publish_qp, qp_record
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_killed_process_leaves_nothing_once_its_lease_is_out() -> None:
    clock = Clock()
    store = MemoryStore(clock, lease_ttl_s=10)
    victim, reader = Watched(MemoryExchanger(store)), Watched(MemoryExchanger(store))
    key = publish_qp(victim, "default", 1)
    victim.exchanger.kill()  # type: ignore[attr-defined]
    reader.exchanger.want(key)
    assert reader.next(Found).value is not None
    clock.now += 9.9
    assert store.keys() == [key]
    clock.now += 0.2
    assert store.keys() == []
    assert reader.next(Found) == Found(key, None)
    reader.exchanger.close()


def test_a_live_process_keeps_its_lease() -> None:
    clock = Clock()
    store = MemoryStore(clock, lease_ttl_s=10)
    with MemoryExchanger(store) as one:
        key = publish_qp(Watched(one), "default", 1)
        for _ in range(5):
            clock.now += 8
            assert store.keys() == [key]
    assert store.keys() == []


def test_an_outage_is_told_and_everything_is_made_good_after_it() -> None:
    store = MemoryStore()
    one, reader = Watched(MemoryExchanger(store)), Watched(MemoryExchanger(store))
    gone = publish_qp(one, "default", 1)
    late = qp_key("default", GID_A, 2)
    reader.exchanger.want(gone)
    reader.exchanger.want(late)
    reader.next(Found, key=late)
    store.set_available(False, "maintenance")
    assert one.next(Unavailable) == Unavailable("maintenance")
    reader.next(Unavailable)
    one.exchanger.withdraw(gone)
    publish_qp(one, "default", 2)
    reader.poll()
    assert reader.events == []
    store.set_available(True)
    reader.next(Connected)
    reader.next(Found, key=late, value=qp_record("default", 2))
    one.exchanger.close()
    reader.exchanger.close()


def test_a_partitioned_process_loses_its_lease_and_gets_it_back() -> None:
    clock = Clock()
    store = MemoryStore(clock, lease_ttl_s=10)
    lost, reader = MemoryExchanger(store), Watched(MemoryExchanger(store))
    key = publish_qp(Watched(lost), "default", 1)
    reader.exchanger.want(key)
    assert reader.next(Found).value is not None
    store.partition(lost, True)
    clock.now += 11
    assert reader.next(Found) == Found(key, None)
    store.partition(lost, False)
    assert reader.next(Found).value is not None
    lost.close()
    reader.exchanger.close()


def test_no_lease_runs_out_while_the_store_is_away() -> None:
    clock = Clock()
    store = MemoryStore(clock, lease_ttl_s=10)
    with MemoryExchanger(store) as one:
        key = publish_qp(Watched(one), "default", 1)
        store.set_available(False)
        clock.now += 100
        store.set_available(True)
        assert store.keys() == [key]
