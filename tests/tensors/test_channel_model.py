# SPDX-License-Identifier: BSD-3-Clause
"""Puller and publisher step by step, joined by lists: no NIC, no thread, no time but the test's."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shiftverbs.tensors import dlpack
from shiftverbs.tensors.errors import (
    ChannelError,
    MessageError,
    MismatchError,
    PoolError,
    PullCancelled,
    PullTimeout,
    RemoteError,
    TensorsError,
)
from shiftverbs.tensors.messages import (
    Cancel,
    Cancelled,
    ErrorStatus,
    MetadataResponse,
    Request,
    ReRequest,
    Target,
)
from shiftverbs.tensors.metadata import Metadata
from shiftverbs.tensors.pool import Pool
from shiftverbs.tensors.publication import COPY_BYTES, Published
from shiftverbs.tensors.publisher import Publisher, serve
from shiftverbs.tensors.pull import Pull, State, Transfer
from shiftverbs.tensors.puller import CANCEL_S, CHUNK_BYTES, Puller, cancelled
from shiftverbs.tensors.tensor import view_of
from shiftverbs.transport import MrCache


class Region:
    """An MR, with its keys."""

    lkey, rkey = 7, 8
    open = 0

    def __init__(self, address: int, nbytes: int) -> None:
        Region.open += 1

    def close(self) -> None:
        Region.open -= 1


class Side:
    """A node of one channel, in both roles. Its link's writes are done when the wire is carried on."""

    def __init__(self, pool_bytes: int, limit_bytes: int, max_requests: int = 4) -> None:
        self.wire: deque[Any] = deque()
        self.now = 0.0
        self.pool = Pool(Region, pool_bytes, limit_bytes)
        self.published = Published(self.pool, Region)
        self.puller = Puller(
            "pub", self.wire.append, self.pool, MrCache(Region), lambda: self.now, max_requests
        )
        self.publisher = Publisher(self, self.published, self.wire.append)
        self.posted = self.completed = 0
        self.credits = 100

    # As a link

    def room(self) -> bool:
        return self.credits > 0

    def write(self, kind: int, number: int, source: tuple[int, int, int], target: tuple[int, int]) -> int:
        assert source[2] == 7 and target[1] == 8
        self.credits -= 1
        self.posted += 1
        self.wire.append((number, source[0], source[1], target[0]))
        return self.posted

    # As a channel

    def publish(self, step: int, tensor: Any, pulls: int | None = 1, error: str | None = None) -> Any:
        publication, requests = self.published.publish(None, "k", step, tensor, pulls, error)
        for response in requests:
            serve(response, publication)
        return publication

    def pull(self, step: int, out: Any = None, timeout_s: float = 10.0) -> Pull:
        view = None if out is None else view_of(out, writable=True)
        transfer = Transfer("k", step, view, timeout_s, self.now + timeout_s)
        self.puller.start(transfer)
        return Pull(transfer, lambda each: self.puller.cancel(each, cancelled(each)))


class Pair:
    """A puller's side and a publisher's."""

    def __init__(self, pool_bytes: int = 1 << 20, limit_bytes: int = 1 << 24, max_requests: int = 4) -> None:
        self.a, self.b = Side(1 << 18, 1 << 24), Side(pool_bytes, limit_bytes, max_requests)

    def to_publisher(self) -> bool:
        if not self.b.wire:
            return False
        self.a.publisher.handle_message(self.b.wire.popleft())
        return True

    def to_puller(self) -> bool:
        a, b = self.a, self.b
        if not a.wire:
            return False
        one = a.wire.popleft()
        if isinstance(one, tuple):
            number, source, length, target = one
            ctypes.memmove(target, source, length)
            a.completed += 1
            a.credits += 1
            b.puller.handle_content(number)
        else:
            b.puller.handle_message(one)
        return True

    def step(self) -> bool:
        some = self.a.publisher.pump(self.a)
        some = self.a.publisher.retire(self.a.completed) or some
        self.b.puller.handle_memory()
        some = self.to_publisher() or some
        return self.to_puller() or some

    def settle(self) -> None:
        while self.step():
            pass


@pytest.fixture
def pair():
    Region.open = 0
    return Pair()


def content(pull: Pull) -> bytes:
    return bytes(pull.result().memory)


def kinds(wire: deque[Any]) -> list[str]:
    return ["content" if isinstance(one, tuple) else type(one).__name__ for one in wire]


BIG = bytes(range(256)) * (COPY_BYTES // 128)


def test_the_seeds_first_time_and_the_next(pair):
    """The first request asks what it is; the next one gets it at once."""
    a, b = pair.a, pair.b
    first = b.pull(1)
    assert kinds(b.wire) == ["Request"] and b.wire[0].metadata is None
    pair.to_publisher()
    assert not a.wire and a.published.waiting == 1, "it waits in the tag table"
    publication = a.publish(1, BIG)
    assert kinds(a.wire) == ["MetadataResponse"]
    assert publication.is_taken, "the sender keeps a copy"
    pair.to_puller()
    assert kinds(b.wire) == ["ReRequest"]
    pair.settle()
    assert content(first) == BIG
    publication = a.publish(2, BIG)
    b.pull(2)
    assert b.wire[0].metadata == Metadata("uint8", (len(BIG),))
    pair.to_publisher()
    assert not a.wire and not publication.is_taken
    a.publisher.pump(a)
    assert kinds(a.wire) == ["content"] and a.wire[0][0] == b.puller._pending.popitem()[0]


def test_changed_metadata_is_asked_for_again(pair):
    a, b = pair.a, pair.b
    a.publish(1, BIG)
    pair.b.pull(1)
    pair.settle()
    a.publish(2, BIG * 2)
    pull = b.pull(2)
    pair.settle()
    assert content(pull) == BIG * 2
    assert b.puller.cache.get("k") == Metadata("uint8", (2 * len(BIG),))


def test_where_there_is_no_room_for_a_copy_the_tensor_waits(pair):
    a, b = pair.a, pair.b
    tensor = bytes(1 << 19)  # more than the publisher's pool
    publication = a.publish(1, tensor)
    pull = b.pull(1)
    pair.to_publisher()
    assert kinds(a.wire) == ["MetadataResponse"] and not publication.is_taken
    pair.settle()
    assert content(pull) == tensor and publication.is_taken
    assert Region.open == 2, "only the pools are registered"


def test_no_bytes_no_tensor_and_errors_are_said(pair):
    a, b = pair.a, pair.b
    empty, dead, error = b.pull(1), b.pull(2), b.pull(3)
    a.publish(1, b"")
    assert a.publish(2, None).is_taken is False
    a.publish(3, None, error="it burst")
    pair.settle()
    assert empty.result().shape == (0,) and dead.result() is None
    with pytest.raises(RemoteError, match="'k' of step 3 from pub: it burst"):
        error.result()
    again = b.pull(4)
    a.publish(4, None)
    pair.settle()
    assert again.result() is None, "with dead metadata in the cache, too"


def test_an_out_that_does_not_fit_loses_nothing(pair):
    a, b = pair.a, pair.b
    publication = a.publish(1, BIG)
    wrong = b.pull(1, bytearray(len(BIG) - 1))
    pair.settle()
    with pytest.raises(MismatchError, match=rf"is uint8\[{len(BIG)}\], and out is uint8\[{len(BIG) - 1}\]"):
        wrong.result()
    assert publication.is_taken, "there is a copy"
    out = bytearray(len(BIG))
    right = b.pull(1, out)
    pair.settle()
    assert right.result() is out and out == BIG
    assert a.pool.in_use == 0 and len(a.published._table) == 0


class Movable:
    """A tensor with `__dlpack__`, whose library can give it other memory, as torch's resize_ does."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    def __dlpack__(self) -> Any:
        metadata = Metadata("uint8", (len(self.memory),))
        return dlpack.give(ctypes.addressof(self.memory), metadata, self.memory)


def test_an_out_that_moved_is_registered_anew(pair):
    """Other memory may be where it was, and what was registered there are other pages."""
    a, b = pair.a, pair.b
    memory = (ctypes.c_ubyte * len(BIG))()
    first, second = Movable(memory), Movable(memory)
    registered = []
    register = b.puller._regions._register
    b.puller._regions._register = lambda *where: (registered.append(where), register(*where))[1]
    for step, out in enumerate((first, first, second)):
        if out is second:
            first.memory = (ctypes.c_ubyte * len(BIG))()
        a.publish(step, BIG)
        pull = b.pull(step, out)
        pair.settle()
        assert pull.result() is out and bytes(memory) == BIG
    assert registered == [(ctypes.addressof(memory), len(BIG))] * 2


def test_many_pulls_of_one_tensor_until_it_is_withdrawn(pair):
    a, b = pair.a, pair.b
    publication = a.publish(1, BIG, pulls=None)
    pulls = [b.pull(1) for _ in range(7)]
    pair.settle()
    assert all(content(pull) == BIG for pull in pulls)
    assert not publication.is_taken
    late = b.pull(1)
    pair.to_publisher()
    a.publisher.pump(a)
    assert a.published.withdraw(None, "k", 1) is publication
    publication.withdrawn()
    assert not publication.is_taken, "it is being read"
    pair.settle()
    assert content(late) == BIG and publication.is_taken


def test_memory_that_is_not_there_is_waited_for():
    pair = Pair(pool_bytes=2 * len(BIG), limit_bytes=2 * len(BIG))
    a, b = pair.a, pair.b
    for step in range(4):
        a.publish(step, BIG)
    first, second, third, fourth = (b.pull(step) for step in range(4))
    pair.settle()
    assert first.done() and second.done() and not third.done()
    assert third._transfer.state is State.STARVED_AGAIN
    with pytest.raises(TensorsError, match=r"there is no room for it: \d+ bytes of"):
        b.now = 10.0
        b.puller.handle_time()
        pair.settle()
        third.result()
    assert fourth._transfer.state is State.DONE
    del first, second
    assert b.pool.in_use == 0, "nobody else holds them"
    a.publish(9, BIG)
    last = b.pull(9)
    pair.settle()
    assert content(last) == BIG


def test_a_tensor_beyond_the_limit_is_an_error_and_loses_nothing():
    pair = Pair(pool_bytes=1 << 16, limit_bytes=1 << 17)
    a, b = pair.a, pair.b
    a.publish(1, bytes(1 << 18))
    pull = b.pull(1)
    pair.settle()
    with pytest.raises(PoolError, match="'k' of step 1 from pub: 262144 bytes are more than the limit"):
        pull.result()
    cached = b.pull(1)
    pair.settle()
    with pytest.raises(PoolError):
        cached.result()
    out = bytearray(1 << 18)
    assert pair.settle() is None and b.pull(1, out) and pair.settle() is None
    assert len(a.published._table) == 0, "it went to out"


def test_more_pulls_than_requests_wait_for_their_turn(pair):
    a, b = pair.a, pair.b
    pulls = [b.pull(step) for step in range(10)]
    assert kinds(b.wire) == ["Request"] * 4
    for step in reversed(range(10)):
        a.publish(step, b"%d" % step)
    pair.settle()
    assert [content(pull) for pull in pulls] == [b"%d" % step for step in range(10)]


def test_what_was_published_anew_meanwhile_displaces_what_comes_back(pair):
    """Who published the first one is not kept waiting for ever, and its memory is let go of."""
    a, b = pair.a, pair.b
    old = a.publish(1, BIG * 8)
    gone = b.pull(1, bytearray(len(BIG) * 8))
    pair.to_publisher()
    new = a.publish(1, BIG)
    assert not old.is_taken
    a.credits = 0
    gone.cancel()
    pair.settle()
    a.credits = 100
    with pytest.raises(PullCancelled):
        gone.result()
    assert old.is_taken and not new.is_taken
    pull = b.pull(1)
    pair.settle()
    assert content(pull) == BIG


def test_memory_that_comes_free_while_it_is_asked_for(pair):
    """The garbage collector of another thread may let go of a tensor between the look and the wait."""
    pair = Pair(pool_bytes=len(BIG), limit_bytes=len(BIG))
    a, b = pair.a, pair.b
    held = [b.pool.allocate(len(BIG))]
    allocate = b.pool.allocate

    def allocate_and_free(nbytes: int, apart: bool = True) -> Any:
        block = allocate(nbytes, apart)
        held.clear()
        return block

    b.pool.allocate = allocate_and_free
    a.publish(1, BIG)
    pull = b.pull(1)
    while pair.to_publisher() or pair.to_puller() or a.publisher.pump(a):
        b.puller.handle_time()  # all that a channel does while nothing comes
    assert pull.done()
    assert content(pull) == BIG


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelled_while_it_waits(pair):
    pull = pair.b.pull(1)
    pair.to_publisher()
    pull.cancel()
    pull.cancel()
    assert not pull.done(), "the publisher may be writing"
    pair.settle()
    with pytest.raises(PullCancelled):
        pull.result()
    assert pair.a.published.waiting == 0


def test_cancelled_in_the_middle_of_the_content(pair):
    """No chunk comes after Cancelled, and somebody else gets the tensor."""
    a, b = pair.a, pair.b
    tensor = bytes(range(256)) * (3 * CHUNK_BYTES // 256)
    out = bytearray(len(tensor))
    a.credits = 1
    publication = a.publish(1, tensor)
    pull = b.pull(1, out)
    pair.to_publisher()
    a.publisher.pump(a)
    pull.cancel()
    pair.to_publisher()
    assert kinds(a.wire) == ["content", "Cancelled"]
    assert not publication.is_taken
    a.credits = 0
    pair.settle()
    with pytest.raises(PullCancelled):
        pull.result()
    a.credits = 9
    again = b.pull(1, out)
    pair.settle()
    assert again.result() is out and out == tensor and publication.is_taken


def test_a_task_that_is_cancelled_again(pair):
    """As a loop does with what is left when it ends: its memory is still not the application's."""

    async def cancel_twice() -> None:
        pull = pair.b.pull(1, bytearray(len(BIG)))
        pair.to_publisher()

        async def wait() -> None:
            await pull

        task = asyncio.create_task(wait())
        for _ in range(2):
            for _ in range(5):
                await asyncio.sleep(0)
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done(), "the publisher may be writing"
        pair.settle()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pull.done()

    asyncio.run(cancel_twice())


def test_cancelled_too_late(pair):
    """All of it was on its way: it is delivered, and the index is free when the publisher has answered."""
    a, b = pair.a, pair.b
    a.publish(1, BIG)
    pull = b.pull(1, bytearray(len(BIG)))
    pair.to_publisher()
    a.publisher.pump(a)
    pull.cancel()
    pair.to_puller()
    assert pull.result() == BIG and b.puller.is_busy
    pair.settle()
    assert not b.puller.is_busy


def test_a_publisher_that_answers_no_cancel(pair):
    b = pair.b
    pull = b.pull(1, timeout_s=3.0)
    assert b.puller.handle_time() == 3.0
    b.now = 3.0
    assert b.puller.handle_time() == 3.0 + CANCEL_S
    assert kinds(b.wire) == ["Request", "Cancel"] and not pull.done()
    b.now += CANCEL_S
    with pytest.raises(ChannelError, match=r"did not answer a cancel within 5.0 s"):
        b.puller.handle_time()
    b.puller.fail(ChannelError("gone"))
    with pytest.raises(ChannelError, match="gone"):
        pull.result()


def test_too_late(pair):
    pull = pair.b.pull(1, timeout_s=3.0)
    pair.settle()
    pair.b.now = 3.5
    pair.b.puller.handle_time()
    pair.settle()
    with pytest.raises(
        PullTimeout, match=r"'k' of step 1 from pub did not come within 3.0 s: the publisher has not"
    ):
        pull.result()


# ---- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages, text",
    [
        ([Cancelled(0)], "not being cancelled"),
        ([Cancelled(9)], "request 9, which there is not"),
        ([ErrorStatus(9, "x")], "request 9, which there is not"),
        ([MetadataResponse(0, Metadata("int8", (9,)))] * 2, "metadata for request 0, which is re-requested"),
        ([0], "content for request 0, which is to get none"),
        ([9], "content for request 9"),
    ],
)
def test_a_publisher_that_talks_nonsense(pair, messages, text):
    pair.b.pull(1)
    with pytest.raises(MessageError, match=text):
        for message in messages:
            if isinstance(message, int):
                pair.b.puller.handle_content(message)
            else:
                pair.b.puller.handle_message(message)


def test_metadata_that_was_known(pair):
    b = pair.b
    b.pull(1, bytearray(5))
    with pytest.raises(MessageError, match="metadata for request 0 that it had"):
        b.puller.handle_message(MetadataResponse(0, Metadata("uint8", (5,))))


@pytest.mark.parametrize(
    "messages, text",
    [
        ([Request(1, "k", 0, None, Target(0, 0))] * 2, "second request 1"),
        ([ReRequest(1, Target(0, 0))], "comes again, and nobody asked"),
        ([Request(1, "k", 0, Metadata("int8", (5,)), Target(0, 0))], "names no memory"),
    ],
)
def test_a_puller_that_talks_nonsense(pair, messages, text):
    with pytest.raises(MessageError, match=text):
        for message in messages:
            pair.a.publisher.handle_message(message)


def test_a_cancel_for_nothing_is_answered(pair):
    pair.a.publisher.handle_message(Cancel(5))
    assert list(pair.a.wire) == [Cancelled(5)]


# ---- at random -------------------------------------------------------------------------------------------------------

SIZES = st.sampled_from([0, 1, 1000, COPY_BYTES, COPY_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
ACTIONS = st.one_of(
    st.tuples(st.just("publish"), SIZES),
    st.tuples(st.just("dead"), st.just(0)),
    st.tuples(st.just("pull"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("drop results"), st.just(0)),
    st.tuples(st.just("to publisher"), st.integers(1, 3)),
    st.tuples(st.just("to puller"), st.integers(1, 3)),
    st.tuples(st.just("pump"), st.integers(0, 3)),
    st.tuples(st.just("later"), st.floats(0.1, 3.0)),
)


@settings(max_examples=40)
@given(st.lists(ACTIONS, max_size=60), st.integers(1 << 17, 1 << 21))
def test_any_schedule(actions, limit_bytes):
    """Whatever the order: each pull ends once, with all of the bytes of its step or with an error that fits; nothing
    is written after a pull has ended; all memory comes back."""
    Region.open = 0
    pair = Pair(pool_bytes=1 << 17, limit_bytes=limit_bytes)
    a, b = pair.a, pair.b
    tensors: dict[int, bytes | None] = {}
    pulls: list[Pull] = []
    outs: list[tuple[Pull, bytearray]] = []
    frozen: dict[int, bytes] = {}  # what was in the memory of a pull when it ended
    numbers = itertools.count()
    wanted = itertools.count()

    def look() -> None:
        for pull, out in outs:
            if not pull.done():
                continue
            assert frozen.setdefault(pull.step, bytes(out)) == out, "written to after its end"
            error = pull._future.exception()
            value = None if error is not None else pull.result()
            if value is out:
                assert out == tensors[pull.step]
            elif error is None:
                assert value is None and tensors[pull.step] is None
        for pull in pulls:
            if pull.done() and pull._transfer.out is None:
                error = pull._future.exception()
                if error is None:
                    value = pull.result()
                    assert (None if value is None else bytes(value.memory)) == tensors[pull.step]
                else:
                    assert isinstance(error, PullCancelled | PullTimeout | PoolError), error

    for action, number in actions:
        if action == "publish":
            step = next(numbers)
            tensors[step] = bytes([step % 251 + 1]) * number
            a.publish(step, tensors[step])
        elif action == "dead":
            step = next(numbers)
            tensors[step] = None
            a.publish(step, None)
        elif action == "pull":
            step = next(wanted)
            out = bytearray(COPY_BYTES + 1) if number else None
            pull = b.pull(step, out)
            pulls.append(pull)
            if out is not None:
                outs.append((pull, out))
        elif action == "cancel" and number < len(pulls):
            pulls[number].cancel()
        elif action == "drop results":
            pulls = [pull for pull in pulls if not pull.done()]
            outs = [one for one in outs if not one[0].done()]
        elif action == "to publisher":
            for _ in range(number):
                pair.to_publisher()
        elif action == "to puller":
            for _ in range(number):
                pair.to_puller()
        elif action == "pump":
            a.credits = number
            a.publisher.pump(a)
            a.publisher.retire(a.completed)
        elif action == "later":
            b.now += number
            b.puller.handle_time()
        b.puller.handle_memory()
        look()
    a.credits = 1000
    pair.settle()
    b.now += 20.0
    b.puller.handle_time()
    pair.settle()
    assert all(pull.done() for pull in pulls)
    look()
    assert not b.puller.is_busy and not b.puller.is_starved and not a.publisher.is_busy
    assert a.published.waiting == 0
    pulls.clear()
    outs.clear()
    pull = out = None
    gc.collect()
    assert b.pool.in_use == 0
    # What is published still has memory; all else has none.
    left = [entry.item for entry in a.published._table._entries.values()]
    assert all(item.source is None or not item.source.readers for item in left)
    for item in left:
        item.fail(ChannelError("over"))
    b.puller._regions.clear()
    del left
    gc.collect()
    assert a.pool.in_use == 0 and Region.open <= 2
    a.publisher.end("over")
