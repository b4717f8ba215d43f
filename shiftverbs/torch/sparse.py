# SPDX-License-Identifier: BSD-3-Clause
"""The sum of sparse tensors, as DistributedDataParallel has it of an Embedding(sparse=True)'s gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from shiftverbs.torch.reduction import Reduction

if TYPE_CHECKING:
    from shiftverbs.torch.collectives import Collectives

#: Dimensions that a sparse tensor may have.
MOST_DIMENSIONS = 16


def allreduce(
    collectives: Collectives, size: int, tensor: Any, reduction: Reduction, deadline: float
) -> None:
    """In place: all ranks' elements are gathered, and added in the order of the ranks, alike on each.

    :param size: how many ranks there are
    :param tensor: COO, on the CPU; each rank has elements of its own
    :raises ValueError: the ranks' tensors are of different shapes
    """
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    shape = [own.sparse_dim(), *own.shape]
    described = torch.tensor([own.dim(), indices.shape[1], *shape] + [0] * (MOST_DIMENSIONS - own.dim()))
    everyone = [torch.zeros_like(described) for _ in range(size)]
    collectives.allgather(everyone, described, deadline)
    for rank, one in enumerate(everyone):
        if not torch.equal(one[[0, *range(2, len(one))]], described[[0, *range(2, len(described))]]):
            raise ValueError(f"rank {rank} has a sparse tensor of another shape")
    counts = [int(one[1]) for one in everyone]
    most = max(counts)
    all_indices = _gather(collectives, size, indices.t().contiguous(), most, deadline)
    all_values = _gather(collectives, size, values.contiguous(), most, deadline)
    parts = [
        torch.sparse_coo_tensor(at[:count].t(), value[:count], own.shape)
        for at, value, count in zip(all_indices, all_values, counts, strict=True)
    ]
    total = functools.reduce(torch.add, parts).coalesce()
    reduction.finish(total.values(), size)
    with torch.no_grad():
        tensor.copy_(total)


def _gather(collectives: Collectives, size: int, own: Any, most: int, deadline: float) -> list[Any]:
    """Each rank's rows, all filled up to `most`."""
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: own.shape[0]] = own
    gathered = [torch.empty_like(padded) for _ in range(size)]
    collectives.allgather(gathered, padded, deadline)
    return gathered
