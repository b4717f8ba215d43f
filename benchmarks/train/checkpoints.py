# SPDX-License-Identifier: BSD-3-Clause
"""A rank's checkpoints: files of its own, so that hosts need no directory in common."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: A rank may have one more than another that died while it saved.
KEPT = 2


class Checkpoints:
    """Those in a directory, which is made.

    :param directory: of one job; ranks may share it
    :param rank: whose
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._prefix = f"rank{rank}-step"
        directory.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """The steps after which there are some, in order."""
        names = self._directory.glob(f"{self._prefix}*.pt")
        return sorted(int(path.stem.removeprefix(self._prefix)) for path in names)

    def save(self, step: int, model: Any, optimizer: Any) -> None:
        """Write one at one stroke, and remove those that nobody needs any more. Raises OSError."""
        path = self._path(step)
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        for old in self.steps()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)

    def load_common(self, model: Any, optimizer: Any) -> int:
        """Load the last one that all ranks have.

        :return: its step; 0 where a rank has none, and nothing was loaded
        :raises FileNotFoundError: this rank has others, but not that one
        """
        mine = self.steps()
        common = torch.tensor([mine[-1] if mine else 0])
        dist.all_reduce(common, op=dist.ReduceOp.MIN)
        step = int(common.item())
        if step:
            with self._path(step).open("rb") as file:
                state = torch.load(file)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return step

    def _path(self, step: int) -> Path:
        return self._directory / f"{self._prefix}{step:08d}.pt"
