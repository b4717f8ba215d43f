# SPDX-License-Identifier: BSD-3-Clause
"""A node: what a process publishes, its memory, and its channels to others."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
import time
from typing import Any

from shiftverbs._core import without_signals
from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.tensors.channel import Channel, publish, withdraw
from shiftverbs.tensors.engine import Engine
from shiftverbs.tensors.errors import ChannelError, MeetingError, PoolError, TensorsError
from shiftverbs.tensors.meeting import MAX_NAME, Meeting, dial
from shiftverbs.tensors.meeting import listen as open_listener
from shiftverbs.tensors.metadata import metadata_of
from shiftverbs.tensors.pool import Pool
from shiftverbs.tensors.publication import Publication, Published
from shiftverbs.tensors.tensor import Tensor
from shiftverbs.transport import MrCache, Nic, Transport, TransportError

log = logging.getLogger("shiftverbs.tensors")

DEFAULT_POOL_BYTES = 64 << 20
#: What is kept registered of the applications' `out`.
MAX_REGIONS, MAX_REGION_BYTES = 64, 256 << 20
#: Peers that connect at the same time; more wait.
MAX_MEETINGS = 16
MEETING_S = 20.0
#: Within it who connects has to say who it is.
GREETING_S = 3.0
#: Until a listener that cannot accept anybody tries again.
PAUSE_S = 0.5
#: For a transport's wire format: who listens, and who connects.
LISTENS, CONNECTS = 0, 1


class Node:
    """One for a process is enough; it is a context manager.

    :param name: what peers call it; None: host name and process id
    :param listen: host:port where others connect to, on a network they trust; port 0: any; None: nobody connects
    :param pool_bytes: of the registered pool. What it has no room for gets memory of its own, registered each time
    :param limit_bytes: of memory for tensors altogether; None: half of the machine's
    :param device: the NIC; None: SHIFTVERBS_DEVICE, or the first
    :raises TransportError: there is no NIC
    :raises PoolError: there is no memory for the pool
    :raises ValueError: an address to listen at that is none, a name that is too long
    :raises OSError: it cannot listen there
    """

    def __init__(
        self,
        name: str | None = None,
        listen: str | None = None,
        *,
        pool_bytes: int = DEFAULT_POOL_BYTES,
        limit_bytes: int | None = None,
        device: str | None = None,
    ) -> None:
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        if len(self._name) > MAX_NAME:
            raise ValueError(f"a name has at most {MAX_NAME} characters")
        if limit_bytes is None:
            limit_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self._listener = open_listener(listen) if listen is not None else None
        self._device = device
        try:
            self._nic = Nic.of(device)
        except BaseException:
            self._close_listener()
            raise
        try:
            self.pool = Pool(self._nic.register, pool_bytes, max(pool_bytes, limit_bytes))
        except BaseException:
            self._nic.release()
            self._close_listener()
            raise
        self.regions = MrCache(self._nic.register, MAX_REGIONS, MAX_REGION_BYTES)
        self.published = Published(self.pool, lambda address, nbytes: self._nic.register(address, nbytes, 0))
        self.engine = Engine(f"tensors {self._name}")
        self.pool.on_free = self._memory_free
        self._channels: list[Channel] = []
        self._lock = threading.Lock()
        self._closed = False
        self._meetings = threading.Semaphore(MAX_MEETINGS)
        if self._listener is not None:
            listens = f"tensors {self._name} listens"
            without_signals(threading.Thread(target=self._accept, name=listens, daemon=True).start)

    # For the application

    @property
    def name(self) -> str:
        """What peers call it."""
        return self._name

    @property
    def address(self) -> str:
        """Where it listens, as `connect` takes it. Raises TensorsError where it does not."""
        if self._listener is None:
            raise TensorsError(f"the node {self._name} does not listen")
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def channels(self) -> list[Channel]:
        """Those that have not ended."""
        with self._lock:
            return list(self._channels)

    @property
    def waiting(self) -> int:
        """Requests of peers that wait for a tensor to be published."""
        return self.published.waiting

    def publish(self, key: str, step: int, tensor: Any, pulls: int | None = 1) -> Publication:
        """Have a tensor ready for whichever peer pulls it. Arguments, result and errors as of `Channel.publish`."""
        self._check()
        return publish(self.engine, self.published, None, key, step, tensor, pulls)

    def publish_error(self, key: str, step: int, text: str, pulls: int | None = 1) -> Publication:
        """Have an error ready instead. Arguments as of `publish_error` of a channel."""
        self._check()
        return publish(self.engine, self.published, None, key, step, None, pulls, text)

    def withdraw(self, key: str, step: int) -> bool:
        """Take back what was published for any peer. Arguments as of `publish`. Returns whether it was there."""
        return withdraw(self, None, key, step)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor in registered memory, not initialised: what is published from there need not be registered.

        :param dtype: a name such as "float32"
        :param shape: dimensions
        :raises TensorError: there is no such dtype or shape
        :raises PoolError: there is no room for it
        """
        self._check()
        metadata = metadata_of(dtype, tuple(shape))
        if not metadata.nbytes:
            return Tensor(metadata, (ctypes.c_ubyte * 1)())
        block = self.pool.allocate(metadata.nbytes)
        if block is None:
            raise PoolError(f"no room for a tensor {metadata}: {self.pool.text()}")
        return Tensor(metadata, block.array)

    def connect(self, address: str, peer: str | None = None, timeout_s: float = 20.0) -> Channel:
        """A channel to a node that listens. It blocks: in asyncio, call it in a thread.

        :param address: host:port
        :param peer: the name that the node there must have; None: any
        :param timeout_s: seconds that it may take; a node that does not listen yet is waited for
        :raises MeetingError: it cannot be reached, is another one, or no node
        :raises ChannelError: the two could not be connected with each other
        """
        self._check()
        deadline = time.monotonic() + timeout_s
        with dial(address, deadline) as connection:
            try:
                return self._meet(Meeting(connection, deadline), CONNECTS, peer, deadline)
            except MeetingError as error:
                raise MeetingError(f"{address}: {error}") from error
            except TimeoutError as error:
                raise MeetingError(f"{address} did not answer within {timeout_s} s") from error
            except OSError as error:
                raise MeetingError(f"{address}: {error}") from error

    def close(self) -> None:
        """End all channels, and what is published. A second call does nothing. Tensors stay with who has them."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        self._close_listener()
        for channel in channels:
            channel.close()
        self.engine.stop()
        self.published.drop(None, f"the node {self._name} was closed")
        self.regions.clear()
        self.pool.close()
        self._nic.release()

    def __enter__(self) -> Node:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """`close`."""
        self.close()

    def __repr__(self) -> str:
        return f"<Node {self._name!r}>"

    # Inside

    def forget(self, channel: Channel) -> None:
        """As Owner.forget."""
        with self._lock:
            if channel in self._channels:
                self._channels.remove(channel)

    def _check(self) -> None:
        if self._closed:
            raise ChannelError(f"the node {self._name} is closed")

    def _close_listener(self) -> None:
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            except OSError:
                pass
            self._listener.close()

    def _memory_free(self) -> None:
        """In any thread, under any lock: a finalizer."""
        if any(channel.is_starved for channel in self._channels):
            self.engine.submit_later(self._feed)

    def _feed(self) -> None:
        for channel in self.channels:
            self.engine.kick(channel)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            self._meetings.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # No descriptor is free, for example: that may pass.
                log.warning("%s: who connects cannot be accepted: %s", self._name, error)
                self._meetings.release()
                time.sleep(PAUSE_S)
                continue
            threading.Thread(
                target=self._welcome, args=(connection,), name="tensors-meet", daemon=True
            ).start()  # inherits what that one blocks

    def _welcome(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + MEETING_S
        meeting = Meeting(connection, deadline)
        try:
            with connection:
                self._meet(meeting, LISTENS, None, deadline)
        except Exception as error:
            log.info("%s: a peer could not connect: %s", self._name, error)
        finally:
            self._meetings.release()

    def _meet(self, meeting: Meeting, role: int, expected: str | None, deadline: float) -> Channel:
        greeted_by = min(deadline, time.monotonic() + GREETING_S) if role == LISTENS else deadline
        peer = meeting.greet(self._name, expected, greeted_by)
        left = max(0.01, deadline - time.monotonic())
        try:
            transport = Transport(meeting, role, 2, left, nic=Nic.of(self._device), stages=0)
        except (TransportError, PyverbsError, TypeError, ValueError) as error:
            raise ChannelError(f"no connection with {peer}: {meeting.refused(str(error))}") from error
        channel = Channel(self, transport, peer)
        with self._lock:
            if not self._closed:
                self._channels.append(channel)
                with self.engine.lock:
                    self.engine.add(channel)
                return channel
        transport.close()
        raise ChannelError(f"the node {self._name} is closed")
