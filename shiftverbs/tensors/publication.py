# SPDX-License-Identifier: BSD-3-Clause
"""What is published: by whoever publishes it held to wait for, by a node's channels looked up."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import threading
from collections.abc import Callable, Generator, Hashable
from typing import Any

from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.tensors.errors import ChannelError, PoolError
from shiftverbs.tensors.messages import check_key
from shiftverbs.tensors.metadata import DEAD, Metadata
from shiftverbs.tensors.pool import Pool
from shiftverbs.tensors.tag_table import Tag, TagTable
from shiftverbs.tensors.tensor import view_of

#: Up to here copying costs less than registering.
COPY_BYTES = 64 * 1024


class Source:
    """Memory that is written from.

    :param owner: keeps it
    :param mr: is closed with it; None: the pool's
    """

    def __init__(self, address: int, lkey: int, owner: object, mr: Any = None) -> None:
        self.address, self.lkey, self._owner, self._mr = address, lkey, owner, mr
        self.readers = 0

    def close(self) -> None:
        """Let go of it."""
        mr, self._mr, self._owner = self._mr, None, None
        if mr is not None:
            mr.close()


NO_SOURCE = Source(0, 0, None)


class Publication:
    """A tensor that waits to be pulled. Its memory must not change until `wait` or `await` returns."""

    def __init__(
        self,
        scope: Hashable,
        tag: Tag,
        metadata: Metadata,
        source: Source | None,
        pulls: int | None,
        error: str | None = None,
    ) -> None:
        """Made by `publish`.

        :param scope: the channel that it is for; None: any
        :param tag: key and step
        :param source: its memory; None: it has none
        :param pulls: how often it may be taken; None: until it is withdrawn
        :param error: what is said instead
        """
        self.scope, self.tag, self.metadata, self.error = scope, tag, metadata, error
        #: Where it is written from: its own memory, or a copy.
        self.source = self._own = source
        self._left = pulls
        self._withdrawn = False
        self._future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._future.set_running_or_notify_cancel()

    @property
    def is_taken(self) -> bool:
        """Whether its memory may change.

        So it is when every pull that it is for has it or a copy, or it was withdrawn; or when its last pull was broken
        off while another tensor was published by its key and step.
        """
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until `is_taken`.

        :param timeout_s: seconds; None: as long as it takes
        :raises TimeoutError: the time is over
        :raises ChannelError: the node was closed, or the channel that it is for, before somebody had it
        """
        try:
            self._future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"{self.tag[0]!r} of step {self.tag[1]} was not pulled within {timeout_s} s"
            ) from None

    def __await__(self) -> Generator[Any, None, None]:
        """As `wait`, in asyncio."""
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    # For publishers; the engine's lock is held

    def begin(self) -> Source | None:
        """A request gets it. Returns where it is written from; `end` says when that is over."""
        if self._left is not None:
            self._left -= 1
        if self.source is not None:
            self.source.readers += 1
        return self.source

    def keep_copy(self, source: Source, pool: Pool) -> Source:
        """The only request left is going to ask again: where there is room for a copy, its memory is free now.

        :param source: what `begin` gave
        :return: what is to be written from
        """
        if self._left != 0 or source is not self._own or source.readers != 1:
            return source
        copied = copy_of(source.address, self.metadata.nbytes, pool)
        if copied is None:
            return source
        copied.readers, source.readers = 1, 0
        self.source = copied
        self._check()
        return copied

    def end(self, source: Source | None, given_back: bool) -> bool:
        """What `begin` gave is not read any longer.

        :param given_back: it was not needed, and counts for another request
        :return: whether it goes back into the tag table
        """
        given_back = given_back and not self._withdrawn
        if given_back and self._left is not None:
            self._left += 1
        if source is not None:
            source.readers -= 1
        self._check()
        return given_back

    def copied(self) -> None:
        """The application's memory is free from the beginning."""
        self._future.set_result(None)

    def withdrawn(self) -> None:
        """Nobody gets it any more."""
        self._left, self._withdrawn = 0, True
        self._check()

    def _check(self) -> None:
        own, source = self._own, self.source
        if source is not None and source is not own and not source.readers and self._left == 0:
            source.close()
        if (own is None or not own.readers) and (self._left == 0 or source is not own):
            if own is not None:
                own.close()
            if not self._future.done():
                self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """It will not be pulled."""
        if not self._future.done():
            self._future.set_exception(error)
        for source in {self._own, self.source} - {None}:
            assert source is not None
            source.close()


def copy_of(address: int, nbytes: int, pool: Pool) -> Source | None:
    """A copy in the pool, or None where there is no room."""
    try:
        block = pool.allocate(nbytes, apart=False)
    except PoolError:
        return None
    if block is None:
        return None
    ctypes.memmove(block.address, address, nbytes)
    return Source(block.address, block.lkey, block.array)


class Published:
    """A node's tag table, for all threads.

    :param pool: memory for copies
    :param register: makes an MR that is only read, and by us, of (address, bytes)
    """

    def __init__(self, pool: Pool, register: Callable[[int, int], Any]) -> None:
        self.pool, self._register = pool, register
        self._table: TagTable[Publication, Any] = TagTable()
        self._lock = threading.Lock()

    def publish(
        self, scope: Hashable, key: str, step: int, tensor: Any, pulls: int | None, error: str | None = None
    ) -> tuple[Publication, list[Any]]:
        """Add a tensor; None: a dead one. Returns it, and the requests that waited for it.

        :raises TensorError: it cannot be published
        :raises PoolError: its memory cannot be registered
        :raises DuplicateError: key and step are published already
        :raises ValueError: pulls is less than 1
        """
        check_key(key, step)
        if pulls is not None and pulls < 1:
            raise ValueError(f"pulls is 1 or more, or None, not {pulls}")
        tag = (key, step)
        view = None if tensor is None else view_of(tensor)
        metadata = DEAD if view is None else view.metadata
        source = None
        if view is not None and view.nbytes:
            source = self._source(view.address, view.nbytes, view.owner, tag)
        publication = Publication(scope, tag, metadata, source, pulls, error)
        if source is not None and view is not None and source.address != view.address:
            # A copy at once: the application's memory is free.
            publication.copied()
        try:
            with self._lock:
                return publication, self._table.publish(scope, tag, publication, pulls)
        except BaseException:
            if source is not None:
                source.close()
            raise

    def _source(self, address: int, nbytes: int, owner: object, tag: Tag) -> Source:
        keys = self.pool.keys_of(address, nbytes)
        if keys is not None:
            return Source(address, keys[0], owner)
        if nbytes <= COPY_BYTES:
            copied = copy_of(address, nbytes, self.pool)
            if copied is not None:
                return copied
        try:
            mr = self._register(address, nbytes)
        except PyverbsError as error:
            raise PoolError(
                f"the memory of {tag[0]!r} of step {tag[1]}, {nbytes} bytes, cannot be registered: {error}"
            ) from error
        return Source(address, int(mr.lkey), owner, mr)

    def request(self, scope: Hashable, tag: Tag, request: Any) -> Publication | None:
        """As TagTable.request."""
        with self._lock:
            return self._table.request(scope, tag, request)

    def cancel(self, request: Any) -> bool:
        """As TagTable.cancel."""
        with self._lock:
            return self._table.cancel(request)

    def give_back(self, publication: Publication) -> list[Any]:
        """As TagTable.give_back; one whose place another one has counts as withdrawn."""
        with self._lock:
            requests = self._table.give_back(publication.scope, publication.tag, publication)
        if requests is None:
            publication.withdrawn()
        return requests or []

    def withdraw(self, scope: Hashable, key: str, step: int) -> Publication | None:
        """As TagTable.withdraw."""
        with self._lock:
            return self._table.withdraw(scope, (key, step))

    def drop(self, scope: Hashable, why: str) -> list[Any]:
        """A scope ends: its tensors fail. Returns its requests, which wait no longer."""
        with self._lock:
            publications, requests = self._table.drop(scope)
        for publication in publications:
            publication.fail(ChannelError(f"{publication.tag[0]!r} of step {publication.tag[1]}: {why}"))
        return requests

    @property
    def waiting(self) -> int:
        """Requests that wait for a tensor."""
        with self._lock:
            return self._table.waiting
