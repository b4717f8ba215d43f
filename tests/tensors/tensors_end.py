# SPDX-License-Identifier: BSD-3-Clause
"""A process with a node: a publisher, a puller, or a peer that talks nonsense."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from shiftverbs.softrnic import faults
from shiftverbs.tensors import Channel, Node, Pull, TensorsError
from shiftverbs.tensors.meeting import Meeting, dial, listen
from shiftverbs.tensors.messages import Message, encode
from shiftverbs.transport import Link, Nic, Transport
from shiftverbs.transport.link import Kind

assert "torch" not in sys.modules and "numpy" not in sys.modules

node: Any = None
pulls: dict[int, Pull] = {}
kept: dict[Any, Any] = {}


def serve(name: str = "pub", port: int = 0, **options: Any) -> str:
    """A node that listens; its address."""
    global node
    node = Node(name, listen=f"127.0.0.1:{port}", **options)
    return str(node.address)


def join(address: str, peer: str | None = None, timeout_s: float = 20.0, **options: Any) -> str:
    """A node if there is none, and a channel; the peer's name."""
    global node
    node = node or Node("get", **options)
    return str(node.connect(address, peer, timeout_s).peer)


def channel(which: int = -1) -> Channel:
    """The channel; a peer that connects is waited for."""
    until(lambda: node.channels)
    result: Channel = node.channels[which]
    return result


def until(condition: Any, timeout_s: float = 20.0) -> bool:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.002)
    return True


def pattern(step: int, length: int) -> bytes:
    """Bytes that only this step has."""
    return (f"{step}.".encode() * (length // 2 + 1))[:length]


def publish(step: int, length: int, pulls: int | None = 1, wait_s: float = 0.0) -> None:
    """Publish a pattern of a key "k"; wait_s: until its memory may change, and change it then."""
    tensor = bytearray(pattern(step, length))
    publication = kept[step] = node.publish("k", step, tensor, pulls)
    if wait_s:
        publication.wait(wait_s)
        tensor[:] = bytes(length)


def pull(step: int, length: int, into: bool = False, timeout_s: float = 20.0) -> None:
    """Begin a pull; `check` ends it."""
    out = bytearray(length) if into else None
    pulls[step] = channel().pull("k", step, out, timeout_s)


def check(step: int, length: int) -> None:
    """The tensor came, with each byte as published."""
    tensor = pulls.pop(step).result()
    data = tensor if isinstance(tensor, bytearray) else tensor.memory
    assert len(data) == length and data == pattern(step, length)


def get(step: int, length: int, into: bool = False) -> None:
    """`pull` and `check`."""
    pull(step, length, into)
    check(step, length)


def fails(call: Any) -> tuple[str, str, float]:
    """What call raises: its type, its text, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    raise AssertionError("no error")


def gathered(steps: list[int], length: int) -> bool:
    """Pull all of them at once in asyncio."""

    async def all_of_them() -> bool:
        tensors = await asyncio.gather(*(channel().pull("k", step) for step in steps))
        return all(
            bytes(tensor.memory) == pattern(step, length) for step, tensor in zip(steps, tensors, strict=True)
        )

    return asyncio.run(all_of_them())


def task_cancelled(step: int, length: int) -> list[str]:
    """A task that awaits a pull is cancelled; what it and the pull ended with."""

    async def cancel() -> list[str]:
        pull = channel().pull("k", step, bytearray(length))

        async def wait() -> None:
            await pull

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert pull.done(), "its memory is the application's"
            return ["CancelledError", type(pull._future.exception()).__name__]
        return ["nothing"]

    return asyncio.run(cancel())


# ---- the cable ------------------------------------------------------------------------------------------------------


def cable_at(what: str, target: str, count: int = 1) -> None:
    """Have the cable of a NIC pulled when a message is about to be sent: its class, or "content" for a chunk.

    :param count: the how many-th of them
    """
    seen = 0

    def now(kind: str) -> None:
        nonlocal seen
        if kind == what:
            seen += 1
            if seen == count:
                faults.down(target)
                print(f"the cable of {target} is out\n", end="", flush=True)

    for part in (channel()._puller, channel()._publisher):
        send = part._send

        def watched(message: Message, send: Any = send) -> None:
            now(type(message).__name__)
            send(message)

        part._send = watched  # type: ignore[method-assign]
    link: Any = channel()._link
    write = link.write

    def watched_write(*args: Any) -> Any:
        now("content")
        return write(*args)

    link.write = watched_write


def deaf(what: str) -> None:
    """Have messages of that class never sent by the puller."""
    puller = channel()._puller
    send = puller._send
    puller._send = lambda message: None if type(message).__name__ == what else send(message)  # type: ignore[method-assign]


# ---- peers that talk nonsense ---------------------------------------------------------------------------------------

rogue: Any = None
rogue_got: list[Any] = []


def rogue_join(address: str) -> None:
    """Connect as a node does, and be none."""
    global rogue
    deadline = time.monotonic() + 20
    with dial(address, deadline) as connection:
        meeting = Meeting(connection, deadline)
        meeting.greet("rogue", None)
        rogue = Transport(meeting, 1, 2, 20, nic=Nic.of(), stages=0)
    rogue.on_message = rogue_got.append


def rogue_listen() -> str:
    """Listen as a node does; `rogue_accept` is the rest."""
    global rogue
    rogue = listen("127.0.0.1:0")
    return f"127.0.0.1:{rogue.getsockname()[1]}"


def rogue_accept() -> None:
    """As `rogue_join`, of who connects."""
    global rogue
    connection, _ = rogue.accept()
    rogue.close()
    with connection:
        meeting = Meeting(connection, time.monotonic() + 20)
        meeting.greet("rogue", None)
        rogue = Transport(meeting, 0, 2, 20, nic=Nic.of(), stages=0)
    rogue.on_message = rogue_got.append


def rogue_sends(*messages: bytes | Message | int) -> None:
    """Bytes, a message, or content for an index, as soon as the other side has said something if it is to puller."""
    link: Link = rogue.links[0]
    for message in messages:
        if isinstance(message, int):
            target = (link._slots_address, link._slots_rkey)
            link.write(Kind.DATA, message, (link._out_address, 8, link._out_lkey), target)
        else:
            link.send(Kind.MESSAGE, message if isinstance(message, bytes) else encode(message))


def rogue_hears(count: int = 1) -> int:
    """Wait for so many messages."""

    def heard() -> bool:
        rogue.turn()
        return len(rogue_got) >= count

    until(heard)
    return len(rogue_got)


def wait_error(call: Any, timeout_s: float = 20.0) -> str:
    """Wait for a pull, or a channel, to have an error; its text."""
    one = call()
    if isinstance(one, Pull):
        return fails(one.result)[1]
    until(lambda: one.error is not None, timeout_s)
    assert isinstance(one.error, TensorsError)
    return f"{type(one.error).__name__}: {one.error}"
