# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of a group of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Alone:
    """As Collectives."""

    def allreduce(self, tensor: Any, reduction: Any, until: float) -> None:
        """Nothing to do."""

    def broadcast(self, tensor: Any, root: int, until: float) -> None:
        """Nothing to do."""

    def reduce(self, tensor: Any, root: int, reduction: Any, until: float) -> None:
        """Nothing to do."""

    def barrier(self, until: float) -> None:
        """Nothing to do."""

    def allgather(self, outputs: Sequence[Any], own: Any, until: float) -> None:
        """Copy."""
        outputs[0].copy_(own)

    def reduce_scatter(self, output: Any, inputs: Sequence[Any], reduction: Any, until: float) -> None:
        """Copy."""
        output.view(-1).copy_(inputs[0].view(-1))

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], until: float) -> None:
        """Copy."""
        outputs[0].copy_(inputs[0])

    def gather(self, outputs: Sequence[Any], own: Any, root: int, until: float) -> None:
        """Copy."""
        outputs[0].copy_(own)

    def scatter(self, output: Any, inputs: Sequence[Any], root: int, until: float) -> None:
        """Copy."""
        output.copy_(inputs[0])
