# SPDX-License-Identifier: BSD-3-Clause
"""Tensors between processes: every way that a pull can go, with failover and as plain pyverbs."""

from __future__ import annotations

import pytest
from hosts import HostError

from shiftverbs.tensors.puller import CHUNK_BYTES

CARRIERS = {"shiftverbs": {}, "pyverbs": {"SHIFTVERBS_DISABLE": "1"}}
PLAIN = CARRIERS["pyverbs"]
LENGTHS = [0, 1, 4096, 70_000, CHUNK_BYTES, 3 * CHUNK_BYTES + 5]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_tensors_of_any_length(joined, carrier):
    """Published before and after they are asked for; to new memory and to the application's."""
    a, b = joined(**CARRIERS[carrier])
    for number, length in enumerate(LENGTHS):
        steps = [4 * number + i for i in range(4)]
        a(f"publish({steps[0]}, {length})")
        b(f"get({steps[0]}, {length})")
        b(f"pull({steps[1]}, {length}, into=True)")
        a(f"until(lambda: node.waiting); publish({steps[1]}, {length}, wait_s=20)")
        b(f"check({steps[1]}, {length})")
        a(f"publish({steps[2]}, {length}, pulls=3)")
        b(f"[get({steps[2]}, {length}) for _ in range(3)]")
        a(f"publish({steps[3]}, {length})")
        b(f"get({steps[3]}, {length}, into=True)")
    assert a("node.waiting") == 0
    b("import gc; gc.collect()")
    assert b("node.pool.in_use") == 0 and a("node.pool.in_use") == 0
    assert b("node.close()") is None and a("until(lambda: not node.channels); node.close()") is None


def test_both_ways_at_once(joined):
    """Either side of a channel publishes and pulls."""
    a, b = joined(**PLAIN)
    for host in (a, b):
        host.begin("for i in range(40): pull(i, 200_000)\nfor i in range(40): publish(i, 200_000)")
    for host in (a, b):
        host.end()
        host.begin("for i in range(40): check(i, 200_000)")
    for host in (a, b):
        host.end()


def test_many_peers(end):
    """One publisher, four pullers; what is for one of them, no other gets."""
    a = end("a", **PLAIN)
    address = a("serve()")
    others = [end("b", **PLAIN) for _ in range(4)]
    for host in others:
        host(f"join({address!r}, 'pub')")
    a("until(lambda: len(node.channels) == 4)")
    for host in others:
        host.begin("for i in range(20): get(i, 600_000, into=True)")
    a("for i in range(20): publish(i, 600_000, pulls=4)")
    for host in others:
        host.end()
    a("channel(2).publish('k', 99, pattern(99, 100)); None")
    for host in others:
        host("pull(99, 100, timeout_s=2.0)")
    ends = []
    for host in others:
        try:
            host("check(99, 100)")
            ends.append("got it")
        except HostError as error:
            ends.append(error.type)
    assert sorted(ends) == ["PullTimeout"] * 3 + ["got it"]


def test_asyncio(joined):
    a, b = joined(**PLAIN)
    b.begin("gathered(list(range(100)), 50_000)")
    a("for i in range(100): publish(i, 50_000)")
    assert b.end() is True
    assert b("task_cancelled(100, 300_000)") == ["CancelledError", "PullCancelled"]
    a("publish(100, 300_000)")
    b("get(100, 300_000)")
    assert a("node.waiting") == 0


def test_more_pulls_than_credits_and_requests(joined):
    """Backpressure: what has no credit waits, at both ends."""
    a, b = joined(**PLAIN)
    b("for i in range(3000): pull(i, 100)")
    a("for i in range(3000): publish(i, 100)")
    b("for i in range(3000): check(i, 100)")


def test_errors_and_dead_tensors(joined):
    a, b = joined(**PLAIN)
    a("node.publish('k', 1, None); node.publish_error('k', 2, 'it burst'); None")
    assert b("channel().pull('k', 1).result()") is None
    with pytest.raises(HostError, match="RemoteError: 'k' of step 2 from pub: it burst"):
        b("channel().pull('k', 2).result()")
    a("publish(3, 70_000)")
    with pytest.raises(HostError, match=r"MismatchError: .* is uint8\[70000\], and out is uint8\[3\]"):
        b("channel().pull('k', 3, bytearray(3)).result()")
    b("get(3, 70_000)")
    with pytest.raises(HostError, match=r"PullTimeout: 'k' of step 4 from pub did not come within 0.3 s"):
        b("channel().pull('k', 4, timeout_s=0.3).result()")
    with pytest.raises(HostError, match="DuplicateError: 'k' of step 5 is published already"):
        a("publish(5, 10); publish(5, 10)")
    assert a("[node.withdraw('k', 5), node.withdraw('k', 5)]") == [True, False]
    with pytest.raises(HostError, match="TensorError: a object has neither"):
        a("node.publish('k', 6, object())")
    with pytest.raises(HostError, match=r"TensorError: .* cannot be written to"):
        b("channel().pull('k', 6, bytes(5))")
    with pytest.raises(HostError, match=r"TimeoutError: 'k' of step 7 was not pulled within 0.1 s"):
        a("publish(7, 70_000, wait_s=0.1)")
    with pytest.raises(HostError, match="ValueError: pulls is 1 or more"):
        a("node.publish('k', 8, b'', 0)")


def test_wrong_peers(end):
    a, b = end("a", **PLAIN), end("b", **PLAIN)
    address = a("serve('weights')")
    with pytest.raises(HostError, match=r"MeetingError: .*: the node there is 'weights', not 'cache'"):
        b(f"join({address!r}, 'cache')")
    with pytest.raises(HostError, match=r"MeetingError: nobody listens at 127.0.0.1:1:"):
        b("join('127.0.0.1:1', timeout_s=0.3)")
    with pytest.raises(HostError, match="ValueError: an address is host:port"):
        b("join('weights')")
    assert b(f"join({address!r}, 'weights')") == "weights"


def test_no_memory(end):
    """At the puller for the tensor, and for the pool itself; at the publisher for a copy. Nothing is lost."""
    a, b = end("a", **PLAIN), end("b", **PLAIN)
    with pytest.raises(HostError, match="PoolError: no memory for"):
        a("Node('x', pool_bytes=1 << 50)")
    address = a("serve(pool_bytes=0)")
    b(f"join({address!r}, pool_bytes=1 << 20, limit_bytes=2 << 20)")
    a("publish(1, 3 << 20); publish(2, 1 << 20); publish(3, 3 << 19); publish(4, 10)")
    with pytest.raises(
        HostError, match="PoolError: 'k' of step 1 from pub: 3145728 bytes are more than the limit"
    ):
        b("get(1, 3 << 20)")
    b("get(1, 3 << 20, into=True)")
    b("held = channel().pull('k', 2).result()")
    with pytest.raises(HostError, match=r"PullTimeout: .* there is no room for it: 1048576 bytes of 2097152"):
        b("pull(3, 3 << 19, timeout_s=0.3); check(3, 3 << 19)")
    b("pull(3, 3 << 19)")
    b("del held")
    b("check(3, 3 << 19)")
    b("get(4, 10)")
    with pytest.raises(HostError, match=r"PoolError: no room for a tensor float32\[500000\]"):
        b("kept = [node.empty('float32', (500_000,)) for _ in range(2)]")


def test_what_is_published_from_the_pool_is_not_registered(joined):
    a, b = joined(**PLAIN)
    a("t = node.empty('uint8', (200_000,)); t.memory[:] = pattern(1, 200_000)")
    a("kept[1] = node.publish('k', 1, t); assert kept[1].source._mr is None")
    b("get(1, 200_000)")
    a("kept[1].wait(5); kept.clear(); del t; import gc; gc.collect(); assert node.pool.in_use == 0")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tensor_of_three_gigabytes(joined):
    """More bytes than 2^31 and a length that no chunk divides; only its ends are looked at."""
    length = 3_000_000_003
    a, b = joined(**PLAIN)
    a(f"import mmap; m = mmap.mmap(-1, {length}); m[:4] = b'head'; m[-4:] = b'tail'")
    a("kept[1] = node.publish('k', 1, m); None")
    b("pulls[1] = channel().pull('k', 1, timeout_s=500); t = pulls.pop(1).result()", timeout_s=520)
    ends = b("[t.nbytes, bytes(t.memory[:4]).decode(), bytes(t.memory[-4:]).decode()]")
    assert ends == [length, "head", "tail"]


def test_no_thread_of_a_node_takes_a_signal(joined):
    """The kernel would choose it for one that the application waits for."""
    a, b = joined(**PLAIN)
    a("publish(0, 4096)")
    b("get(0, 4096)")
    for host in (a, b):
        host("""
import signal, threading
def blocked(thread):
    with open(f"/proc/self/task/{thread.native_id}/status") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
""")
        threads = "[t for t in threading.enumerate() if t.name.startswith('tensors')]"
        assert host(f"len({threads})") > 0
        assert host(f"all(blocked(t) >> signal.SIGTERM - 1 & 1 for t in {threads})")
