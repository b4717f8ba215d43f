# SPDX-License-Identifier: BSD-3-Clause
"""What an application holds of a pull: to wait for, in a thread or in asyncio, or to cancel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
from collections.abc import Callable, Generator
from typing import Any

from shiftverbs.tensors.metadata import Metadata
from shiftverbs.tensors.pool import Block
from shiftverbs.tensors.tensor import View
from shiftverbs.transport import Lease


class State(enum.Enum):
    """Where a pull is. STARVED: there is no room for the tensor at the moment."""

    QUEUED = "queued"
    STARVED = "starved"
    REQUESTED = "requested"
    STARVED_AGAIN = "starved again"
    RE_REQUESTED = "re-requested"
    CANCELLING = "cancelling"
    DONE = "done"


class Transfer:
    """One tensor on its way, as the puller has it: its fields are that one's."""

    def __init__(
        self, key: str, step: int, out: View | None, timeout_s: float | None, deadline: float
    ) -> None:
        """It waits for its turn.

        :param key, step: the tag of the tensor
        :param out: where it is to go; None: to new memory
        :param timeout_s: as given, for the text of errors
        :param deadline: in time.monotonic()'s seconds
        """
        self.key, self.step = key, step
        self.out, self.timeout_s, self.deadline = out, timeout_s, deadline
        self.state = State.QUEUED
        self.index = -1
        self.missing = 0  # chunks
        self.give_up_at = 0.0
        self.metadata: Metadata | None = None
        self.block: Block | None = None
        self.lease: Lease | None = None
        self.error: BaseException | None = None
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """It has ended.

        :param value: the tensor, or None for a dead one
        :param error: what it has ended with instead
        """
        self.state = State.DONE
        if self.lease is not None:
            self.lease.end()
        self.lease = self.block = None
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


class Pull:
    """One tensor on its way: `result()` in a thread, `await` in asyncio."""

    def __init__(self, transfer: Transfer, cancel: Callable[[Transfer], None]) -> None:
        """Made by `Channel.pull`.

        :param transfer: what the puller has of it
        :param cancel: ends that
        """
        self.key, self.step = transfer.key, transfer.step
        self._transfer, self._cancel, self._future = transfer, cancel, transfer.future

    def result(self) -> Any:
        """Wait for the tensor, as long as `timeout_s` of `pull` allows.

        :return: `out` if that was given, else a Tensor; None for a dead tensor
        :raises PullTimeout: it did not come in time
        :raises MismatchError: `out` is of another dtype or shape
        :raises RemoteError: the publisher has an error instead
        :raises PoolError: there is no memory for it
        :raises ChannelError: the peer failed, or left
        :raises MessageError: it is none: what it says makes no sense
        :raises PullCancelled: by `cancel`
        """
        return self._future.result()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def cancel(self) -> None:
        """End it. It has ended, and the memory is the application's again, when `done` holds."""
        self._cancel(self._transfer)

    def __await__(self) -> Generator[Any, None, Any]:
        """As `result`, in asyncio. A task that is cancelled here ends when nothing is written to `out` any longer."""
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:
            self.cancel()
            while not self._future.done():
                try:
                    await asyncio.wrap_future(self._future)
                except (Exception, asyncio.CancelledError):
                    pass  # how it ends is said to who asks the pull, and who is cancelled again waits all the same
            raise

    def __repr__(self) -> str:
        return f"<Pull {self.key!r} step {self.step} {self._transfer.state.value}>"
