# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint after a fallback, agreed over torch's store."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from shiftverbs import checkpoint

#: All ranks make the same ones in the same order, as they make groups.
_numbers = itertools.count()


class _Counters:
    """torch's store, under keys of one life of one object. torch keeps threads out of each other's way in it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"shift-checkpoint/{restart}/{next(_numbers)}/"

    def add(self, key: str, amount: int) -> int:
        """As Store.add. Raises RuntimeError where the store is gone."""
        return int(self._store.add(self._prefix + key, amount))


class CheckpointOnFallback(checkpoint.CheckpointOnFallback):
    """`shiftverbs.checkpoint.CheckpointOnFallback` for all ranks of the default process group, of any backend.

    :param save: called without arguments between two steps, while all ranks stand still
    :param savers: the ranks that call save, by default rank 0 as is usual with DDP; None: all of them
    :param timeout_s: how long a rank waits for the others, in seconds: longer than a step takes
    :param save_timeout_s: how long they wait until all is saved, in seconds
    :param min_interval_s: from the end of a pause to the next one, in seconds
    :raises RuntimeError: there is no process group yet
    :raises TypeError, ValueError: as that one
    """

    def __init__(
        self,
        save: Callable[[], object],
        *,
        savers: Sequence[int] | None = (0,),
        timeout_s: float = 30.0,
        save_timeout_s: float = 300.0,
        min_interval_s: float = 60.0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("CheckpointOnFallback needs a process group: call init_process_group first")
        super().__init__(
            save,
            # torch has no public name for it.
            _Counters(dist.distributed_c10d._get_default_store()),  # noqa: SLF001
            dist.get_rank(),
            dist.get_world_size(),
            savers=savers,
            timeout_s=timeout_s,
            save_timeout_s=save_timeout_s,
            min_interval_s=min_interval_s,
        )
