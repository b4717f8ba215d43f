# SPDX-License-Identifier: BSD-3-Clause
"""A channel: one node's connection to another. Both may publish and pull."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from shiftverbs._core import without_signals
from shiftverbs.tensors.engine import Engine
from shiftverbs.tensors.errors import ChannelError, MessageError, TensorsError
from shiftverbs.tensors.messages import (
    Cancel,
    Message,
    Request,
    ReRequest,
    check_key,
    decode,
    encode,
)
from shiftverbs.tensors.pool import Pool
from shiftverbs.tensors.publication import Publication, Published
from shiftverbs.tensors.publisher import Publisher, serve
from shiftverbs.tensors.pull import Pull, Transfer
from shiftverbs.tensors.puller import Puller, cancelled
from shiftverbs.tensors.tensor import view_of
from shiftverbs.transport import Message as Arrived
from shiftverbs.transport import MrCache, Transport
from shiftverbs.transport.link import Kind

#: How long a peer that is waited for is silent before the NIC is asked whether it is there; and one that is not.
PROBE_S, IDLE_PROBE_S = 0.25, 10.0
DEFAULT_TIMEOUT_S = 30.0


class Owner(Protocol):
    """What a channel needs of its node."""

    engine: Engine
    pool: Pool
    published: Published
    regions: MrCache

    def forget(self, channel: Channel) -> None:
        """It has ended."""


def publish(
    engine: Engine, published: Published, scope: Channel | None, key: str, step: int, tensor: Any,
    pulls: int | None, error: str | None = None,
) -> Publication:  # fmt: skip
    """Add to a tag table, and serve who waited for it. Arguments and errors as of `Published.publish`."""
    publication, requests = published.publish(scope, key, step, tensor, pulls, error)
    for response in requests:
        engine.submit(lambda response=response: serve_and_kick(response, publication))  # type: ignore[misc]
    return publication


def serve_and_kick(response: Any, publication: Publication) -> None:
    """As `publisher.serve`, with the engine told. The lock is held."""
    channel: Channel = response.publisher.scope
    channel.attend(lambda: serve(response, publication))


class Channel:
    """The connection to one peer, made by `Node.connect`, or by a peer that connected: `Node.channels`."""

    def __init__(self, owner: Owner, transport: Transport, peer: str) -> None:
        """Made by Node.

        :param transport: of two ranks
        :param peer: the other node's name
        """
        self._owner, self._transport, self._peer = owner, transport, peer
        self._link = transport.links[0]
        self._error: TensorsError | None = None
        self._heard_at = time.monotonic()
        self._probed_at = 0.0
        self._ended = threading.Event()
        transport.on_message = self._arrived
        self._puller = Puller(peer, self._send, owner.pool, owner.regions)
        self._publisher = Publisher(self, owner.published, self._send)

    # For the application

    @property
    def peer(self) -> str:
        """The name of the node at the other end."""
        return self._peer

    @property
    def error(self) -> TensorsError | None:
        """Why the channel has ended; None: it has not."""
        return self._error

    @property
    def path(self) -> str | None:
        """The NIC that carries what is sent; None where nothing is protected."""
        shift = getattr(self._link.qp, "shift", None)
        return None if shift is None else shift.path

    def publish(self, key: str, step: int, tensor: Any, pulls: int | None = 1) -> Publication:
        """Have a tensor ready for this peer alone. Nothing is sent until the peer pulls it.

        :param key: its name, at most 512 bytes in UTF-8
        :param step: which of the tensors of that name, an integer of 64 bits
        :param tensor: anything with the buffer protocol or `__dlpack__` in the CPU's memory; None: a dead tensor. Up to
            64 KiB are copied; longer ones are written from where they are
        :param pulls: by how many pulls it may be taken; None: by any number, until `withdraw`. Where a channel fails, a
            pull whose tensor was not acknowledged does not count, though its peer may have it
        :return: what tells when the tensor's memory may change
        :raises TensorError: it cannot be published
        :raises PoolError: its memory cannot be registered
        :raises DuplicateError: key and step are published already
        :raises ChannelError: the channel has ended
        """
        self._check()
        return publish(self._owner.engine, self._owner.published, self, key, step, tensor, pulls)

    def publish_error(self, key: str, step: int, text: str, pulls: int | None = 1) -> Publication:
        """Have an error ready instead of a tensor: pulls of it raise RemoteError. Arguments as of `publish`.

        :param text: what the error says
        """
        self._check()
        return publish(self._owner.engine, self._owner.published, self, key, step, None, pulls, text)

    def withdraw(self, key: str, step: int) -> bool:
        """Take back what was published for this peer. Arguments as of `publish`. Returns whether it was there."""
        return withdraw(self._owner, self, key, step)

    def pull(self, key: str, step: int, out: Any = None, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Pull:
        """Start the transfer of a tensor that the peer publishes, now or later.

        :param key, step: as the peer publishes it
        :param out: where it goes: a tensor as of `publish` that can be written to, of the same dtype and shape. It is
            the transfer's until the pull has ended. None: memory of the pool
        :param timeout_s: seconds until it fails; None: never
        :return: `result()` or `await` gives the tensor
        :raises TensorError: `out` is not such memory, or key or step are none
        :raises ChannelError: the channel has ended
        """
        self._check()
        check_key(key, step)
        view = None if out is None else view_of(out, writable=True)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        transfer = Transfer(key, step, view, timeout_s, deadline)
        if self._puller.is_full:
            raise TensorsError(f"{self._peer} is asked for too much: too many pulls wait for their turn")
        self._owner.engine.submit(lambda: self._start(transfer))
        return Pull(transfer, self._cancel)

    def wait_protected(self, timeout_s: float) -> bool:
        """Whether the channel would survive the loss of a NIC, waiting for it for so many seconds."""
        return self._transport.wait_protected(timeout_s)

    def close(self) -> None:
        """End the channel. Pulls that have no tensor fail; what the peer has asked for and not got stays published."""
        with self._owner.engine.lock:
            mine = self._owner.engine.remove(self)
            if mine:
                self._error = ChannelError(f"the channel to {self._peer} is closed")
        if mine:
            self._finish(self._error)
        self._ended.wait()

    def __enter__(self) -> Channel:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """`close`."""
        self.close()

    def __repr__(self) -> str:
        return f"<Channel to {self._peer!r}{' ended' if self._error else ''}>"

    # For the engine, under its lock

    @property
    def fds(self) -> tuple[int, ...]:
        """As Served.fds."""
        return self._transport.fds

    def turn(self) -> bool:
        """As Served.turn."""
        some = self._transport.turn()
        link = self._link
        if some:
            self._heard_at = time.monotonic()
            if link.chunks or link.small or link.ready:
                raise MessageError("a message of a collective came")
        some = self._publisher.retire(link.completed) or some
        if self._puller.is_starved:
            self._puller.handle_memory()
        some = self._publisher.pump(link) or some
        if link.left and not some:  # nothing is left to hear of what it has got
            raise ChannelError("it has left")
        return some

    def arm(self) -> bool:
        """As Served.arm."""
        return self._transport.arm(sends=True)

    def take_event(self, fd: int) -> None:
        """As Served.take_event."""
        self._transport.take_event(fd)

    def tick(self) -> float:
        """As Served.tick: deadlines of pulls, and whether the peer is there."""
        at = self._puller.handle_time()
        now = time.monotonic()
        silence_s = PROBE_S if self._puller.is_busy or self._publisher.is_busy else IDLE_PROBE_S
        probe_at = max(self._heard_at, self._probed_at) + silence_s
        if now >= probe_at:
            self._link.probe()
            self._probed_at = now
            probe_at = now + silence_s
        return min(at, probe_at)

    def failed(self, error: Exception) -> None:
        """As Served.failed."""
        kind = type(error) if isinstance(error, MessageError | ChannelError) else ChannelError
        self._error = kind(f"the channel to {self._peer} failed: {error}")
        if not isinstance(error, TensorsError):
            self._error.__cause__ = error
        # Destroying a QP may take its time, and others are to be served meanwhile.
        thread = threading.Thread(target=self._finish, args=(self._error,), name="tensors-end", daemon=True)
        without_signals(thread.start)

    @property
    def is_starved(self) -> bool:
        """Whether a pull waits for memory. Any thread."""
        return self._puller.is_starved

    def attend(self, call: Callable[[], None]) -> None:
        """call(), which may send; then the engine looks at the channel. What it raises ends the channel."""
        if self._error is not None:
            call()  # its results go nowhere, and what it was given goes back
            return

        def served() -> bool:
            call()
            return self._publisher.pump(self._link)

        if self._owner.engine.guard(self, served):
            self._owner.engine.kick(self)

    # Inside

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error.__cause__

    def _send(self, message: Message) -> None:
        if self._error is None:
            self._link.send(Kind.MESSAGE, encode(message))

    def _arrived(self, arrived: Arrived) -> None:
        if arrived.data is None:
            self._puller.handle_content(arrived.number)
            return
        try:
            message = decode(arrived.data)
        except MessageError as error:
            raise MessageError(f"a message of {len(arrived.data)} bytes makes no sense: {error}") from error
        if isinstance(message, Request | ReRequest | Cancel):
            self._publisher.handle_message(message)
        else:
            self._puller.handle_message(message)

    def _start(self, pull: Transfer) -> None:
        if self._error is not None:
            pull.settle(None, self._error)
            return
        self.attend(lambda: self._puller.start(pull))
        now = time.monotonic()
        self._owner.engine.kick(self, min(pull.deadline, now + PROBE_S))

    def _cancel(self, pull: Transfer) -> None:
        def cancel() -> None:
            if self._error is None:
                self.attend(lambda: self._puller.cancel(pull, cancelled(pull)))
                self._owner.engine.kick(self)

        self._owner.engine.submit(cancel)

    def _finish(self, error: TensorsError | None) -> None:
        """The engine serves it no longer: let the peer have what was sent, release all, and tell who waits."""
        assert error is not None
        try:
            self._transport.close()
        finally:
            with self._owner.engine.lock:
                self._puller.fail(error)
                # Of what the peer has got, some may have been heard of and not looked at.
                self._publisher.retire(self._link.completed)
                self._publisher.end(str(error))
            self._owner.forget(self)
            self._ended.set()


def withdraw(owner: Owner, scope: Channel | None, key: str, step: int) -> bool:
    """As `Channel.withdraw`."""
    publication = owner.published.withdraw(scope, key, step)
    if publication is not None:
        owner.engine.submit(publication.withdrawn)
    return publication is not None
