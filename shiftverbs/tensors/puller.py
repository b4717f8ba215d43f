# SPDX-License-Identifier: BSD-3-Clause
"""The puller's side of a channel: its pulls, and what it does with the publisher's messages.

    QUEUED -> REQUESTED -> DONE                              the cache was right, or there is nothing to write
    QUEUED -> REQUESTED -> RE_REQUESTED -> DONE              it was not: new memory, asked again
    any of them but the first -> CANCELLING -> DONE          until the publisher says that it writes no more

Where there is no room for the tensor, a pull is STARVED before it is REQUESTED, or STARVED_AGAIN after it.
It neither waits nor sleeps: messages and the time come in, messages go out through `send`.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable

from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.tensors.errors import (
    ChannelError,
    MessageError,
    MismatchError,
    PoolError,
    PullCancelled,
    PullTimeout,
    RemoteError,
)
from shiftverbs.tensors.messages import (
    INDICES,
    Cancel,
    Cancelled,
    ErrorStatus,
    Message,
    MetadataResponse,
    Request,
    ReRequest,
    Target,
)
from shiftverbs.tensors.metadata import Metadata, MetadataCache
from shiftverbs.tensors.pool import Pool
from shiftverbs.tensors.pull import State, Transfer
from shiftverbs.tensors.tensor import Tensor
from shiftverbs.transport import MrCache

#: Bytes of one write of a tensor: both sides count in them.
CHUNK_BYTES = 512 * 1024
#: Requests without an answer on one channel; more pulls wait for their turn, up to so many.
MAX_REQUESTS = 1024
MAX_QUEUED = 1 << 16
#: How long a publisher may take to say that it writes no more. After that the channel is given up.
CANCEL_S = 5.0
NOWHERE = Target(0, 0)


class Puller:
    """The pulls of one channel.

    :param peer: the publisher's name, for errors
    :param send: sends a message to it
    :param pool: memory for tensors
    :param regions: MRs of what applications give as `out`
    :param clock: seconds, as time.monotonic
    :param max_requests: how many may be without an answer
    """

    def __init__(
        self,
        peer: str,
        send: Callable[[Message], None],
        pool: Pool,
        regions: MrCache,
        clock: Callable[[], float] = time.monotonic,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._peer, self._send, self._pool, self._regions, self._clock = peer, send, pool, regions, clock
        self._max_requests = max_requests
        self.cache = MetadataCache()
        self._pending: dict[int, Transfer] = {}
        self._queued: deque[Transfer] = deque()
        self._starved: deque[Transfer] = deque()
        self._next = 0
        # Weak: a pull that has ended has a tensor, and that is its application's to keep.
        self._deadlines: list[tuple[float, int, weakref.ref[Transfer]]] = []
        self._count = itertools.count()

    @property
    def is_busy(self) -> bool:
        """Whether the publisher is waited for."""
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether no more pulls may wait for their turn."""
        return len(self._queued) >= MAX_QUEUED

    @property
    def is_starved(self) -> bool:
        """Whether a pull waits for memory."""
        return bool(self._starved)

    def start(self, pull: Transfer) -> None:
        """Begin a pull, now or when it is its turn."""
        self._watch(pull, pull.deadline)
        self._queued.append(pull)
        self._begin_queued()

    def cancel(self, pull: Transfer, error: BaseException) -> None:
        """End a pull with an error, as soon as nothing can be written to its memory any longer."""
        if pull.state in (State.CANCELLING, State.DONE):
            return
        if pull.state is State.QUEUED:
            self._queued.remove(pull)
            pull.settle(None, error)
            return
        was = pull.state
        if was in (State.STARVED, State.STARVED_AGAIN):
            self._starved.remove(pull)
        if was is State.STARVED:
            self._finish(pull, None, error)
            return
        self._give_up(pull, error)

    def handle_message(self, message: Message) -> None:
        """One that a publisher sends. Raises MessageError where it makes no sense."""
        pull = self._pending.get(message.index)
        if pull is None:
            raise MessageError(f"{type(message).__name__} for request {message.index}, which there is not")
        if isinstance(message, Cancelled):
            if pull.error is None:
                raise MessageError(f"Cancelled for request {message.index}, which is not being cancelled")
            self._finish(pull, None, pull.error)
        elif pull.error is not None:
            pass  # Cancelled comes
        elif isinstance(message, ErrorStatus):
            self._forget_starved(pull)
            self._finish(pull, None, RemoteError(f"{self._about(pull)}: {message.text}"))
        elif isinstance(message, MetadataResponse):
            self._metadata_came(pull, message.metadata)

    def handle_content(self, index: int) -> None:
        """A chunk was written for a request. Raises MessageError where none was to come."""
        pull = self._pending.get(index)
        if pull is None or not pull.missing:
            raise MessageError(f"content for request {index}, which is to get none")
        pull.missing -= 1
        if pull.missing:
            return
        if pull.error is not None:
            # All of it is there, before the publisher heard. Its index is free when Cancelled has come.
            self._deliver(pull)
            return
        self._finish_well(pull)

    def handle_memory(self) -> None:
        """Memory was let go of: go on with those who wait for some, in order."""
        while self._starved:
            pull = self._starved[0]
            before = pull.state
            self._starved.popleft()
            self._ask(pull, again=before is State.STARVED_AGAIN, first=True)
            if pull.state in (State.STARVED, State.STARVED_AGAIN) and not self._pool.has_gained:
                return

    def handle_time(self) -> float:
        """End what is too late. Returns when to come again.

        :raises ChannelError: the publisher does not say that it writes no more
        """
        deadlines, now = self._deadlines, self._clock()
        while deadlines and (deadlines[0][0] <= now or _is_over(deadlines[0][2])):
            pull = heapq.heappop(deadlines)[2]()
            if pull is None:
                continue
            if pull.error is not None:
                if pull.give_up_at <= now and self._pending.get(pull.index) is pull:
                    raise ChannelError(f"it did not answer a cancel within {CANCEL_S} s")
            elif pull.state is not State.DONE:
                self.cancel(pull, self._too_late(pull))
        return deadlines[0][0] if deadlines else math.inf

    def fail(self, error: BaseException) -> None:
        """All pulls fail: nothing can be written any longer."""
        pulls = [*self._pending.values(), *self._queued]
        self._pending.clear()
        self._queued.clear()
        self._starved.clear()
        self._deadlines.clear()
        for pull in pulls:
            pull.settle(None, pull.error if isinstance(pull.error, MismatchError) else error)

    # Inside

    def _about(self, pull: Transfer) -> str:
        return f"{pull.key!r} of step {pull.step} from {self._peer}"

    def _too_late(self, pull: Transfer) -> PullTimeout:
        why = {
            State.QUEUED: f"{self._max_requests} requests before it have no answer",
            State.STARVED: f"there is no room for it: {self._pool.text()}",
            State.STARVED_AGAIN: f"there is no room for it: {self._pool.text()}",
        }.get(pull.state, "the publisher has not published it, or not sent all of it")
        return PullTimeout(f"{self._about(pull)} did not come within {pull.timeout_s} s: {why}")

    def _watch(self, pull: Transfer, at: float) -> None:
        if at != math.inf:
            heapq.heappush(self._deadlines, (at, next(self._count), weakref.ref(pull)))

    def _begin_queued(self) -> None:
        while self._queued and len(self._pending) < self._max_requests:
            pull = self._queued.popleft()
            while self._next in self._pending:
                self._next = (self._next + 1) % INDICES
            # The next index is another one, so that a late message finds nothing rather than another pull.
            pull.index, self._next = self._next, (self._next + 1) % INDICES
            self._pending[pull.index] = pull
            pull.metadata = self.cache.get(pull.key) if pull.out is None else pull.out.metadata
            self._ask(pull, again=False)

    def _ask(self, pull: Transfer, again: bool, first: bool = False) -> None:
        """Send the request, or the re-request, if there is memory. first: it is its turn to get some."""
        try:
            target = self._target(pull, first)
        except PoolError as error:
            if not again and pull.out is None:
                # What the cache says is too large; this one may be smaller.
                pull.metadata, target = None, NOWHERE
            else:
                error = PoolError(f"{self._about(pull)}: {error}")
                if again:
                    self._give_up(pull, error)
                else:
                    self._finish(pull, None, error)
                return
        if target is None:
            pull.state = State.STARVED_AGAIN if again else State.STARVED
            (self._starved.appendleft if first else self._starved.append)(pull)
            # What another thread let go of before it could see that somebody waits.
            if self._pool.has_gained and not first:
                self.handle_memory()
        elif again:
            pull.state = State.RE_REQUESTED
            self._send(ReRequest(pull.index, target))
        else:
            pull.state = State.REQUESTED
            self._send(Request(pull.index, pull.key, pull.step, pull.metadata, target))

    def _target(self, pull: Transfer, first: bool) -> Target | None:
        nbytes = pull.metadata.nbytes if pull.metadata is not None else 0
        if not nbytes:
            return NOWHERE
        if pull.out is not None:
            if pull.lease is None:
                pull.lease = self._regions.lease()
            try:
                mr = pull.lease.get(pull.out.address, nbytes, pull.out.owner, pull.out.where)
            except PyverbsError as error:
                raise PoolError(f"its memory cannot be registered: {error}") from error
            target = Target(pull.out.address, int(mr.rkey))
        else:
            # Who waits already comes first.
            pull.block = self._pool.allocate(nbytes) if first or not self._starved else None
            if pull.block is None:
                return None
            target = Target(pull.block.address, pull.block.rkey)
        pull.missing = -(-nbytes // CHUNK_BYTES)
        return target

    def _metadata_came(self, pull: Transfer, metadata: Metadata) -> None:
        if pull.state is not State.REQUESTED:
            raise MessageError(f"metadata for request {pull.index}, which is {pull.state.value}")
        self.cache.put(pull.key, metadata)
        if metadata.dead:
            self._finish(pull, None)
        elif pull.out is not None and metadata != pull.out.metadata:
            text = f"{self._about(pull)} is {metadata}, and out is {pull.out.metadata}"
            if metadata.nbytes:
                self._give_up(pull, MismatchError(text))
            else:
                self._finish(pull, None, MismatchError(text))
        elif not metadata.nbytes:
            pull.metadata = metadata
            self._finish_well(pull)
        elif metadata == pull.metadata:
            raise MessageError(f"metadata for request {pull.index} that it had")
        else:
            pull.metadata, pull.block, pull.missing = metadata, None, 0  # the old memory is free first
            self._ask(pull, again=True)

    def _give_up(self, pull: Transfer, error: BaseException) -> None:
        """The publisher knows of it, and must say that it writes no more."""
        pull.state, pull.error, pull.give_up_at = State.CANCELLING, error, self._clock() + CANCEL_S
        self._watch(pull, pull.give_up_at)
        self._send(Cancel(pull.index))

    def _forget_starved(self, pull: Transfer) -> None:
        if pull.state in (State.STARVED, State.STARVED_AGAIN):
            self._starved.remove(pull)

    def _deliver(self, pull: Transfer) -> None:
        if pull.out is not None:
            pull.settle(pull.out.tensor)
        else:
            assert pull.metadata is not None
            array = pull.block.array if pull.block is not None else (ctypes.c_ubyte * 1)()
            pull.settle(Tensor(pull.metadata, array))

    def _finish_well(self, pull: Transfer) -> None:
        if pull.metadata is not None:
            self.cache.put(pull.key, pull.metadata)
        self._deliver(pull)
        self._free_index(pull)

    def _finish(self, pull: Transfer, value: object, error: BaseException | None = None) -> None:
        pull.settle(value, error)
        self._free_index(pull)

    def _free_index(self, pull: Transfer) -> None:
        del self._pending[pull.index]
        self._begin_queued()


def _is_over(reference: weakref.ref[Transfer]) -> bool:
    pull = reference()
    return pull is None or (pull.state is State.DONE and pull.error is None)


def cancelled(pull: Transfer) -> PullCancelled:
    """What a cancelled pull ends with."""
    return PullCancelled(f"the pull of {pull.key!r} of step {pull.step} was cancelled")
