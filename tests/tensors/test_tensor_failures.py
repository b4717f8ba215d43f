# SPDX-License-Identifier: BSD-3-Clause
"""Cables pulled at each message, publishers that die and come again, peers that talk nonsense."""

from __future__ import annotations

import re
import signal
import socket

import pytest
from harness import free_port
from hosts import HostError

from shiftverbs.tensors.puller import CHUNK_BYTES

PLAIN = {"SHIFTVERBS_DISABLE": "1"}
LENGTH = 40 * CHUNK_BYTES + 3


def pulled_first_time(a, b):
    a("publish(1, 70_000)")
    b("get(1, 70_000)")


def pulled_early(a, b):
    b("pull(1, 70_000)")
    a("until(lambda: node.waiting); publish(1, 70_000, wait_s=20)")
    b("check(1, 70_000)")


def content(a, b):
    a(f"publish(1, {LENGTH})")
    b(f"get(1, {LENGTH}, into=True)")


def error(a, b):
    a("node.publish_error('k', 1, 'it burst'); None")
    assert b("fails(lambda: channel().pull('k', 1).result())")[:2] == [
        "RemoteError",
        "'k' of step 1 from pub: it burst",
    ]


def dead(a, b):
    a("node.publish('k', 1, None); None")
    assert b("channel().pull('k', 1).result()") is None


def cancel(a, b):
    b("pull(1, 70_000)")
    a("until(lambda: node.waiting)")
    b("pulls[1].cancel()")
    assert b("fails(pulls.pop(1).result)")[0] == "PullCancelled"
    assert a("node.waiting") == 0


def mismatch(a, b):
    a("publish(1, 70_000)")
    assert b("fails(lambda: channel().pull('k', 1, bytearray(5)).result())")[0] == "MismatchError"
    b("get(1, 70_000)")


@pytest.mark.parametrize(
    "scenario, who, message, count",
    [
        (pulled_first_time, "b", "Request", 1),
        (pulled_early, "b", "Request", 1),
        (pulled_first_time, "a", "MetadataResponse", 1),
        (pulled_early, "a", "MetadataResponse", 1),
        (pulled_first_time, "b", "ReRequest", 1),
        (pulled_first_time, "a", "content", 1),
        (content, "a", "content", 1),
        (content, "a", "content", 20),
        (content, "a", "content", 41),
        (error, "a", "ErrorStatus", 1),
        (dead, "a", "MetadataResponse", 1),
        (cancel, "b", "Cancel", 1),
        (cancel, "a", "Cancelled", 1),
        (mismatch, "b", "Cancel", 1),
        (mismatch, "a", "Cancelled", 1),
    ],
)
def test_the_cable_pulled_at_each_message(joined, faults, scenario, who, message, count):
    """The message is lost with the NIC, and the pull ends as it would have; then home again, and once more."""
    a, b = joined()
    sender = a if who == "a" else b
    sender(f"cable_at({message!r}, 'a/soft0', {count})")
    scenario(a, b)
    sender.child.expect("the cable of a/soft0 is out", 1)
    b("until(lambda: channel().path == 'soft1')")  # what it receives is there before what it sends with
    a("publish(7, 200_000)")
    b("get(7, 200_000)")
    faults.up("a/soft0")
    b("until(lambda: channel().path == 'soft0')")
    a(f"publish(8, {LENGTH})")
    b(f"get(8, {LENGTH}, into=True)")


def test_the_cable_pulled_under_many_pulls(joined, faults):
    a, b = joined()
    b.begin("for i in range(60): pull(i, 2_000_000, into=True)\nfor i in range(60): check(i, 2_000_000)")
    a("cable_at('content', 'a/soft0', 100)")
    a("for i in range(60): publish(i, 2_000_000)")
    b.end(60)
    assert b("channel().path") == "soft1"


@pytest.mark.parametrize("carrier", [{}, PLAIN], ids=["shiftverbs", "pyverbs"])
def test_a_publisher_killed_and_started_again(end, carrier):
    """Pulls from it fail and say who; other peers are not disturbed; it is found again at the same address."""
    b = end("b", **carrier)
    port = free_port()
    a = end("a", **carrier)
    other = end("a", **carrier)
    there, address = other("serve('other')"), a(f"serve(port={port})")
    b(f"join({there!r}); join({address!r})")
    if not carrier:
        assert b("[c.wait_protected(20) for c in node.channels]") == [True, True]
    a("publish(1, 70_000)")
    b("get(1, 70_000)")
    b("pull(2, 70_000, timeout_s=60); gone = channel()")
    a.child.signal(signal.SIGKILL)
    kind, text, _ = b("fails(pulls.pop(2).result)")
    assert kind == "ChannelError" and "the channel to pub failed: " in text, text
    assert b("fails(lambda: gone.pull('k', 1))")[0] == "ChannelError", "it stays so"
    other("publish(5, 70_000)")
    b("get(5, 70_000)")
    again = end("a", **carrier)
    assert again(f"serve(port={port})") == address
    assert b(f"join({address!r}, 'pub')") == "pub"
    again("publish(3, 70_000)")
    b("get(3, 70_000)")
    again("node.close()")
    assert b("until(lambda: len(node.channels) == 1)")


def test_a_puller_killed_in_the_middle(joined, end):
    """What it did not get waits for the next one, and its memory is not held for ever."""
    a, b = joined(**PLAIN)
    a("publish(1, 70_000)")
    a(f"publish(2, {LENGTH})")
    b("deaf('ReRequest')")
    b(f"pull(1, 70_000); pull(2, {LENGTH})")
    a("until(lambda: channel()._publisher.is_busy)")
    b.child.signal(signal.SIGKILL)
    a("until(lambda: not node.channels, 60)")
    c = end("b", **PLAIN)
    c(f"join({a('node.address')!r})")
    c(f"get(1, 70_000); get(2, {LENGTH})")
    a("until(lambda: kept[2].is_taken); import gc; gc.collect()")
    assert a("node.pool.in_use") == 0


def test_a_peer_that_leaves(joined):
    a, b = joined(**PLAIN)
    b("pull(1, 10, timeout_s=60)")
    a(
        "until(lambda: node.waiting); p = channel().publish('k', 2, b'x'); q = node.publish('q', 1, bytes(70_000))"
    )
    a("node.close()")
    kind, text, took = b("fails(pulls.pop(1).result)")
    assert (kind, text) == ("ChannelError", "the channel to pub failed: it has left") and took < 5
    kind, text, _ = a("fails(lambda: q.wait(5))")
    assert (kind, text) == ("ChannelError", "'q' of step 1: the node pub was closed")
    assert a("p.is_taken"), "there was a copy"
    assert b("until(lambda: not node.channels)")
    with pytest.raises(HostError, match="ChannelError: the node pub is closed"):
        a("node.publish('k', 3, b'x')")


def test_a_puller_that_leaves_with_all_it_wanted(joined):
    """What it has got is not there for another pull, however late its acknowledgements are seen."""
    a, b = joined(**PLAIN)
    count = 40
    # Completions are looked at when the peer has left.
    a("t = channel()._transport; look = t.retire; t.retire = lambda: t.links[0].left and look()")
    b(f"for i in range({count}): pull(i, 3, into=True)")
    a(f"for i in range({count}): publish(i, 3)")
    b(f"for i in range({count}): check(i, 3)")
    b("node.close()")
    a("until(lambda: not node.channels)")
    assert a("len(node.published._table)") == 0


# ---- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sends, text",
    [
        ("b''", "a message of 0 bytes makes no sense: it ends after 0 bytes"),
        ("b'\\x09\\0\\0'", "no message of type 9"),
        ("b'\\x02\\0\\0\\0\\0\\2' + b'\\xff' * 16", "more than 2\\^62"),
        ("b'\\x03\\0\\0' + bytes(12)", "request 0 comes again, and nobody asked"),
        ("b'\\x06\\x05\\0'", "Cancelled for request 5, which there is not"),
        ("9", "content for request 9, which is to get none"),
        ("*[b'\\1\\0\\0' + bytes(11) + bytes(12)] * 2", "a second request 0"),
    ],
)
def test_a_peer_that_sends_nonsense(end, sends, text):
    """Its channel ends and says why; other channels, and what is published, do not care."""
    a, b, c = end("a", **PLAIN), end("b", **PLAIN), end("c", **PLAIN)
    address = a("serve()")
    b(f"join({address!r})")
    b("pull(1, 70_000)")
    c(f"rogue_join({address!r})")
    a("until(lambda: len(node.channels) == 2); bad = [c for c in node.channels if c.peer == 'rogue'][0]")
    c(f"rogue_sends({sends})")
    said = a("wait_error(lambda: bad)")
    assert said.startswith("MessageError: the channel to rogue failed: ")
    assert re.search(text, said), said
    a("publish(1, 70_000)")
    b("check(1, 70_000)")


@pytest.mark.parametrize(
    "sends, text",
    [
        ("b'\\x02\\0\\0\\xff\\0\\0'", "MessageError: .*dtype 255"),
        ("b'\\x02\\1\\0\\1\\0\\0'", "MessageError: .*request 1, which there is not"),
        ("b'\\x02\\0\\0\\1\\0\\1' + (1 << 50).to_bytes(8, 'little')", "PoolError: .*more than the limit"),
        ("0", "MessageError: .*content for request 0, which is to get none"),
        ("b'\\x04\\0\\0\\xff\\xfe'", "RemoteError: .*from rogue: "),
    ],
)
def test_a_publisher_that_sends_nonsense(end, sends, text):
    b, c = end("b", **PLAIN), end("c", **PLAIN)
    address = c("rogue_listen()")
    c.begin("rogue_accept()")
    b(f"join({address!r})")
    c.end()
    b("pull(1, 10, timeout_s=30)")
    c("rogue_hears()")
    c(f"rogue_sends({sends})")
    if "PoolError" in text:
        c("rogue_hears(2); rogue_sends(b'\\x06\\0\\0')")
    kind, said, took = b("fails(pulls.pop(1).result)")
    assert re.match(text, f"{kind}: {said}"), (kind, said)
    assert took < 20


def test_memory_that_is_not_there(end):
    """A request names memory that its peer may not write to: the channel ends, and the tensor waits for others."""
    a, b, c = end("a", **PLAIN), end("b", **PLAIN), end("c", **PLAIN)
    address = a("serve()")
    a("publish(1, 70_000); bad = None")
    c(f"rogue_join({address!r})")
    c("from shiftverbs.tensors.messages import *; from shiftverbs.tensors.metadata import Metadata")
    c("rogue_sends(Request(0, 'k', 1, Metadata('uint8', (70_000,)), Target(4096, 12345)))")
    a("until(lambda: not node.channels)")
    b(f"join({address!r})")
    b("get(1, 70_000)")


@pytest.mark.parametrize(
    "address",
    [
        "{}",
        "[]",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': 5})",
        "dict(gid=7, lid=0, mtu=3, size=2, links={'0': link})",
        "dict(gid=gid, lid=0, mtu='x', size=2, links={'0': link})",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': link | dict(qpn=1 << 40)})",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': link | dict(psn=-1)})",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': link | dict(slots=[-1, 1 << 70])})",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': link | dict(slots=[None, []])})",
        "dict(gid=gid, lid=0, mtu=3, size=2, links={'0': link | dict(stage=[])})",
    ],
)
def test_who_listens_and_has_no_address(end, address):
    """`connect` raises one of our errors, or the channel ends; the process lives."""
    b, c = end("b", **PLAIN), end("c", **PLAIN)
    where = c("rogue_listen()")
    c("import json; gid = Nic.of().gid; link = dict(qpn=5, psn=5, slots=[4096, 5], stage=[4096, 5, 0, 4096])")
    address = address.replace("'0'", "'1'")
    c.begin(
        "connection, _ = rogue.accept(); m = Meeting(connection, time.monotonic() + 20); m.greet('rogue', None); "
        f"m.set('address/0', json.dumps({address}).encode()); m.set('ready/0', b'1')"
    )
    kind, text, took = b(f"node = Node('get'); fails(lambda: node.connect({where!r}).pull('k', 1).result())")
    print(kind, text)
    assert kind in ("ChannelError", "MeetingError", "MessageError") and took < 20
    c.end()


def test_a_listener_without_descriptors_for_a_while(end):
    a, b = end("a", **PLAIN), end("b", **PLAIN)
    address = a("serve()")
    host, port = address.split(":")
    a(
        "import os, resource, logging; said = []; heard = logging.Handler(); heard.emit = said.append; "
        "logging.getLogger('shiftverbs.tensors').addHandler(heard); limits = resource.getrlimit(resource.RLIMIT_NOFILE)"
    )
    a("free = os.dup(0); os.close(free); resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))")
    with socket.create_connection((host, int(port))):
        a("until(lambda: said)")
    assert "cannot be accepted" in a("said[0].getMessage()")
    a("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    assert b(f"join({address!r})") == "pub"


def test_who_connects_and_says_nothing_holds_its_place_not_long(end):
    a, b = end("a", **PLAIN), end("b", **PLAIN)
    address = a("from shiftverbs.tensors.node import MAX_MEETINGS; serve()")
    host, port = address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(a("MAX_MEETINGS"))]
    try:
        assert b(f"join({address!r}, timeout_s=15)") == "pub"
    finally:
        for connection in silent:
            connection.close()


def test_who_connects_and_is_no_node(end):
    a, b = end("a", **PLAIN), end("b", **PLAIN)
    address = a("serve()")
    host, port = address.split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(3)]
    connections[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    connections[1].close()
    assert b(f"join({address!r})") == "pub"
    a("publish(1, 10)")
    b("get(1, 10)")
    for connection in connections:
        connection.close()
