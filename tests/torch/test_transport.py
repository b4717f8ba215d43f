# SPDX-License-Identifier: BSD-3-Clause
"""The transport by itself, without torch: credits, chunks, peers that are late, gone or dead."""

from __future__ import annotations

import gc
import signal
import time

import pytest
from hosts import HostError
from ranks_env import ENV

from shiftverbs.transport import SMALL_BYTES
from shiftverbs.transport.link import SLOTS
from shiftverbs.transport.memory import Buffer, MrCache

CARRIERS = {"shiftverbs": {}, "pyverbs": {"SHIFTVERBS_DISABLE": "1"}}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_messages_and_chunks(ranks, carrier):
    """With failover and as plain pyverbs: more messages than credits, more chunks than places, each byte as sent."""
    both = ranks(3, "transport_end", **CARRIERS[carrier])
    assert both("t.wait_protected(20)") == [carrier == "shiftverbs"] * 3
    both(f"small({4 * SLOTS}, 100)")
    both(f"small(3, {SMALL_BYTES})")
    both("small(1, 0)")
    both("ring(20, 4096)")
    both("ring(20, STAGE_BYTES)")
    both("t.close()")


def test_nobody_is_sent_more_than_there_is_room_for(ranks):
    """A peer that takes nothing in is sent as many messages as it has slots; the rest waits, and comes."""
    both = ranks(2, "transport_end", SHIFTVERBS_DISABLE="1")
    a, b = both.hosts
    a(f"for i in range({3 * SLOTS}): t.send_small(1, pattern(0, i, 64))")
    assert a("[t.link(1).credits, t.link(1).posted, t.link(1).is_waiting]") == [0, SLOTS, True]
    kind, text, ranks_, took = a("fails(lambda: t.settle(soon(0.3)))")
    assert (kind, ranks_) == ("PeerTimeout", [1]) and "rank 1" in text and took < 2


def test_a_slow_peer_gets_all(ranks):
    both = ranks(2, "transport_end", SHIFTVERBS_DISABLE="1")
    a, b = both.hosts
    a(f"for i in range({3 * SLOTS}): t.send_small(1, pattern(0, i, 64))")
    a.begin("t.settle(soon())")
    b(f"for i in range({3 * SLOTS}): assert t.recv_small(0, soon()) == pattern(0, i, 64)")
    a.end()


def test_a_late_peer_is_named(ranks):
    both = ranks(2, "transport_end")
    kind, text, names, took = both.hosts[0]("fails(lambda: t.recv_small(1, soon(0.5)))")
    assert (kind, names) == ("PeerTimeout", [1]) and "rank 1" in text and 0.4 < took < 2
    assert both.hosts[0]("fails(lambda: t.send_small(1, b''))")[0] == "PeerTimeout", "it stays broken"
    kind, text, names, _ = both.hosts[1]("fails(lambda: t.recv_small(0, soon()))")
    assert "rank 0 waited for rank 1" in text


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_dead_peer_is_named_by_all(ranks, carrier):
    """Those who wait for it, and those who wait for somebody else; long before the deadline."""
    three = ranks(3, "transport_end", **CARRIERS[carrier])
    three("t.wait_protected(20)")
    victim = three.hosts.pop()
    three.hosts[0].begin("fails(lambda: t.recv_small(2, soon(30)))")
    three.hosts[1].begin("fails(lambda: t.recv_small(0, soon(30)))")
    victim.child.signal(signal.SIGKILL)
    for kind, text, names, took in three.end():
        assert kind == "PeerFailed" and names == [2] and "rank 2" in text, text
        assert took < 15
    assert three("fails(lambda: t.check())")[0][0] == "PeerFailed"
    three("t.close()")


def test_a_peer_that_leaves_is_named(ranks):
    both = ranks(2, "transport_end")
    a, b = both.hosts
    b("t.send_small(0, b'last words')")
    b("t.close(); t.close()")
    assert a("bytes(t.recv_small(1, soon())).decode()") == "last words"
    kind, text, names, took = a("fails(lambda: t.recv_small(1, soon()))")
    assert (kind, names) == ("PeerLeft", [1]) and took < 2


def test_a_peer_that_never_comes_is_named(network, tmp_path):
    host = network.host("a", **ENV, SHIFTVERBS_DISABLE="1")
    with pytest.raises(HostError, match="PeerTimeout: rank 1 did not publish its address"):
        host(f"from transport_end import *; start(0, 2, {str(tmp_path)!r}, 0.3)")


def test_cable_pulled_under_chunks(ranks, faults):
    """A ring that runs while the default NIC's cable is out, and in again: all bytes as sent."""
    both = ranks(2, "transport_end")
    assert both("t.wait_protected(20)") == [True, True]
    both("ring(40, STAGE_BYTES)")
    both.begin("ring(400, STAGE_BYTES)")
    time.sleep(0.2)
    faults.down("a/soft0")
    both.end()
    both("ring(40, STAGE_BYTES)")
    assert "soft1" in both("t.links[0].qp.shift.path")
    faults.up("a/soft0")
    both("ring(40, STAGE_BYTES)")


class Region:
    """An MR that says when it is closed."""

    def __init__(self, address: int, length: int) -> None:
        self.key, self.is_open = (address, length), True

    def close(self) -> None:
        self.is_open = False


class Owner:
    """A storage: it has memory, which can move."""

    alive = 0

    def __init__(self, address: int, length: int) -> None:
        self.where = (address, length)
        Owner.alive += 1

    def __del__(self) -> None:
        Owner.alive -= 1


class TestMrCache:
    """The cache of MRs holds the owners of their memory, and has a bound."""

    def cache(self, **limits: int) -> tuple[MrCache, list[Region]]:
        made: list[Region] = []

        def register(address: int, length: int) -> Region:
            made.append(Region(address, length))
            return made[-1]

        Owner.alive = 0
        return MrCache(register, **limits), made

    def use(self, cache: MrCache, owner: Owner) -> Region:
        lease = cache.lease()
        try:
            return lease.get(*owner.where, owner, lambda: owner.where)
        finally:
            lease.end()

    def test_a_region_is_made_once_and_holds_its_owner(self) -> None:
        cache, made = self.cache()
        owner = Owner(4096, 100)
        assert self.use(cache, owner) is self.use(cache, owner)
        assert len(made) == 1
        del owner
        gc.collect()
        assert Owner.alive == 1, "a NIC may write there"
        cache.clear()
        gc.collect()
        assert Owner.alive == 0 and not made[0].is_open and len(cache) == 0

    def test_the_least_recently_used_go_first(self) -> None:
        cache, made = self.cache(max_entries=2)
        for address in (1, 2, 1, 3):
            self.use(cache, Owner(address, 10))
        gc.collect()
        assert [region.key[0] for region in made if region.is_open] == [1, 3]
        assert Owner.alive == 2 and cache.nbytes == 20

    def test_bytes_are_bounded(self) -> None:
        cache, made = self.cache(max_bytes=100)
        for address in range(5):
            self.use(cache, Owner(address, 40))
        assert cache.nbytes <= 100 and sum(region.is_open for region in made) == 2

    def test_what_is_in_use_stays(self) -> None:
        cache, made = self.cache(max_entries=1)
        lease = cache.lease()
        owners = [Owner(address, 10) for address in range(3)]
        for owner in owners:
            lease.get(*owner.where, owner, lambda: None)
        assert all(region.is_open for region in made)
        lease.end()
        assert sum(region.is_open for region in made) == 1

    def test_an_owner_that_moved_is_registered_anew(self) -> None:
        cache, made = self.cache()
        owner = Owner(4096, 100)
        lease = cache.lease()
        lease.get(4096, 100, owner, lambda: owner.where)
        owner.where = (8192, 200)
        other = Owner(4096, 100)
        assert self.use(cache, other) is made[1]
        assert made[0].is_open, "an operation still uses it"
        lease.end()
        assert not made[0].is_open and made[1].is_open


def test_memory_is_where_it_says() -> None:
    buffer = Buffer(5000)
    buffer.view[4999] = 7
    assert buffer.length == 5000 and buffer.address % 4096 == 0
