# SPDX-License-Identifier: BSD-3-Clause
"""Contiguous tensors for collectives, in place of those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shiftverbs.torch.runner import Action
from shiftverbs.torch.tensors import is_dense

#: A tensor, and the contiguous one that stands for it.
Copy = tuple[Any, Any]


def dense_of(tensors: Sequence[Any]) -> tuple[list[Any], list[Copy]]:
    """Contiguous tensors in place of those that are not, still empty, and for each of these both.

    They are filled in the group's thread: what was called before may still write to the tensors.
    """
    copies = [(t.detach(), torch.empty(t.shape, dtype=t.dtype)) for t in tensors if not is_dense(t)]
    found = iter(copies)
    return [t.detach() if is_dense(t) else next(found)[1] for t in tensors], copies


def fill(copies: Sequence[Copy]) -> None:
    """Give each contiguous one the tensor's elements."""
    for tensor, copy in copies:
        copy.copy_(tensor)


def with_copies(action: Action, copies: Sequence[Copy], inputs: Sequence[Copy]) -> Action:
    """An action that fills both before, and writes those that it may write to back afterwards."""

    def act(collectives: Any, until: float) -> None:
        fill(inputs)
        fill(copies)
        action(collectives, until)
        for tensor, copy in copies:
            tensor.copy_(copy)

    return act
