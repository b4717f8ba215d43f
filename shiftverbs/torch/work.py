# SPDX-License-Identifier: BSD-3-Clause
"""What an operation returns: torch's Work, finished by the group's thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch.distributed import Work

from shiftverbs.torch.futures import Futures

#: torch 1.13 keeps only the C++ half of a returned Work, and whoever waits for that waits for ever. So the last ones
#: stay alive here: at least KEEP, up to MOST while their tensors have no more than KEPT_BYTES.
KEEP, MOST, KEPT_BYTES = 16, 256, 64 << 20


class ShiftWork(Work):
    """One operation.

    :param tensors: its outputs, as the future gives them
    :param futures: of the group
    :param source: the rank that a receive came from, where that is known
    """

    def __init__(self, tensors: list[Any], futures: Futures, source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._futures = futures
        self._source = source
        self._error: BaseException | None = None
        self._done = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._lock = threading.Lock()
        self._base: Any = None
        self._level: Any = None
        self._future: Any = None

    def finish(self, error: BaseException | None = None, source: int | None = None) -> None:
        """It has ended. Those who wait go on, and the future's callbacks run, in a thread of the group's futures."""
        if source is not None:
            self._source = source
        self._error = error
        with self._lock:
            self._done = True
            base = self._base
        self._gate.release()
        if base is not None:
            self._level.complete(base)

    def stand_for(self, tensors: list[Any]) -> None:
        """It is the last one of several, which end in order.

        :param tensors: their outputs
        """
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Until it has ended.

        :param timeout: timedelta; None or zero: as long as the operation may take
        :raises RuntimeError: it failed; the text names the rank
        :raises TimeoutError: it has not ended in that time
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._done:
            if not self._gate.acquire(timeout=seconds if seconds > 0 else -1):
                raise TimeoutError(f"the operation has not ended in {seconds:g} s")
            self._gate.release()
        if self._error is not None:
            raise again(self._error)
        return True

    def synchronize(self) -> None:
        """As wait: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What it failed of."""
        return self._error

    def result(self) -> list[Any]:
        """Its outputs."""
        return self._tensors

    def source_rank(self) -> int:
        """Which rank a receive from any came from."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Its outputs as a torch.futures.Future.

        The error of a failed one is raised in a callback: Future.set_exception crashes DDP's reducer.
        """
        with self._lock:
            if self._future is None:
                base: Any = torch.futures.Future()
                self._future = base.then(self._outcome)
                if not self._done:
                    self._base, self._level = base, self._futures.level()
                    return self._future
            else:
                return self._future
        base.set_result(None)
        return self._future

    def _outcome(self, _: Any) -> list[Any]:
        if self._error is not None:
            raise again(self._error)
        return self._tensors


def again(error: BaseException) -> BaseException:
    """The same error once more: one that was raised already carries another thread's traceback."""
    return (
        RuntimeError(str(error))
        if not isinstance(error, RuntimeError | ValueError)
        else error.with_traceback(None)
    )


class Keeper:
    """Keeps Works alive until nobody asks for them any more."""

    def __init__(self) -> None:
        self._kept: deque[tuple[ShiftWork, int]] = deque()
        self._bytes = 0

    def keep(self, work: ShiftWork, size: int) -> None:
        """One more; size: bytes of its tensors."""
        kept = self._kept
        kept.append((work, size))
        self._bytes += size
        while len(kept) > KEEP and (len(kept) > MOST or self._bytes > KEPT_BYTES):
            if not kept[0][0].is_completed():
                return
            self._bytes -= kept.popleft()[1]
