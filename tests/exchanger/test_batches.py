# SPDX-License-Identifier: BSD-3-Clause
"""How many requests etcd gets for how many keys."""

from __future__ import annotations

from exchanger.around import requests, stopped_broker, wait_until
from exchanger.conftest import GID_A, GID_B, EtcdWorld, found_keys, publish_qp, qp_record
from shiftverbs.exchanger import Connected, Found, qp_key


def test_a_thousand_keys_take_few_requests(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    a, b = world.make(), world.make()
    a.next(Connected)
    b.next(Connected)
    before = requests(world.server)
    keys = {qp_key(world.job, GID_A, qpn) for qpn in range(1000)}
    # While its broker is stopped, an application queues; so this does not depend on who is faster.
    with stopped_broker(b):
        for key in keys:
            b.exchanger.want(key)
    b.until(lambda events: sum(isinstance(event, Found) for event in events) == 1000)
    wants = requests(world.server)
    with stopped_broker(a):
        for qpn in range(1000):
            publish_qp(a, world.job, qpn)
    b.until(lambda events: found_keys(events) == keys)
    puts = requests(world.server)

    def spent(method: str, earlier: dict[str, int], later: dict[str, int]) -> int:
        return later.get(method, 0) - earlier.get(method, 0)

    # 1000 / 120 is 9; the broker reads its socket piecemeal, so a few are not full.
    assert 9 <= spent("Txn", before, wants) <= 30
    assert 9 <= spent("Txn", wants, puts) <= 30
    assert spent("Watch", before, puts) == 1
    assert spent("Put", before, puts) == spent("Range", before, puts) == 0


def test_keys_of_many_peers_get_watches_of_their_own(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one, other = world.make(), world.make()
    one.next(Connected)
    before = requests(world.server)
    keys = {qp_key(world.job, f"fe80::{number:x}", 5): f"fe80::{number:x}" for number in range(1, 101)}
    for key in keys:
        one.exchanger.want(key)
    one.until(lambda events: sum(isinstance(event, Found) for event in events) == 100)
    for key, gid in keys.items():
        other.exchanger.publish(key, qp_record(world.job, 5, gid=gid))
    one.until(lambda events: found_keys(events) == set(keys))
    assert requests(world.server)["Watch"] - before.get("Watch", 0) == 100
    # Cancelled ones are cancelled in etcd, too.
    for key in keys:
        one.exchanger.unwant(key)
    one.until(lambda _: requests(world.server)["Watch"] - before.get("Watch", 0) == 200)


def test_a_key_under_which_nothing_stands_is_let_go_of_as_well(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make()
    one.next(Connected)
    key = qp_key(world.job, GID_B, 5)
    one.exchanger.want(key)
    one.next(Found, key=key, value=None)
    wait_until(lambda: requests(world.server).get("Watch") == 1)
    one.exchanger.unwant(key)
    one.until(lambda _: requests(world.server)["Watch"] == 2, 5)


def test_withdrawals_are_batched_too(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make()
    one.next(Connected)
    keys = [publish_qp(one, world.job, qpn) for qpn in range(500)]
    one.until(lambda _: len(world.keys()) == 500)
    before = requests(world.server)
    with stopped_broker(one):
        for key in keys:
            one.exchanger.withdraw(key)
    one.until(lambda _: not world.keys())
    assert requests(world.server)["Txn"] - before["Txn"] <= 20
