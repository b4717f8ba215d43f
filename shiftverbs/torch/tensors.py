# SPDX-License-Identifier: BSD-3-Clause
"""Tensors as the transport sees them: addresses of memory, and regions that hold their storages."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from shiftverbs.pyverbs_error import PyverbsError
from shiftverbs.transport import Lease, TransportError


def nbytes(tensor: Any) -> int:
    """Bytes of its elements; of a sparse one, of those that it has."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()  # noqa: SLF001  (values() refuses one that is not coalesced)
    return int(tensor.numel() * tensor.element_size())


def storage_of(tensor: Any) -> Any:
    """What owns its memory. torch 2 has untyped_storage; storage there warns."""
    get = getattr(tensor, "untyped_storage", None)
    return get() if get is not None else tensor.storage()


def _where(storage: Any) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def region(lease: Lease, tensor: Any) -> tuple[int, int, int]:
    """(address, lkey, rkey) of a tensor with elements; its whole storage is registered.

    :raises TransportError: ibv_reg_mr fails
    """
    storage = storage_of(tensor)
    try:
        mr = lease.get(storage.data_ptr(), storage.nbytes(), storage, functools.partial(_where, storage))
    except PyverbsError as error:
        raise TransportError(
            f"a tensor's memory cannot be registered: {error} (a NIC that has died takes no new memory; what was "
            "registered before goes on, on the backup)"
        ) from error
    return tensor.data_ptr(), mr.lkey, mr.rkey


def to_bytes(tensor: Any) -> bytes:
    """A copy of a contiguous tensor's memory."""
    length = nbytes(tensor)
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def from_bytes(tensor: Any, data: bytes) -> None:
    """Copy bytes into a contiguous tensor of that many bytes.

    :raises ValueError: it has another number of them
    """
    if len(data) != nbytes(tensor):
        raise ValueError(
            f"a tensor of {nbytes(tensor)} bytes gets {len(data)}: do all ranks pass the same sizes?"
        )
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))


def is_dense(tensor: Any) -> bool:
    """Whether its memory is its elements, in order, and not what has to be negated or conjugated first."""
    return bool(tensor.is_contiguous()) and not (tensor.is_neg() or tensor.is_conj())


def overlaps(tensor: Any) -> bool:
    """Whether several of its elements are known to be in one place, as those of an expanded one."""
    return bool(torch._debug_has_internal_overlap(tensor) == 1)  # noqa: SLF001  (torch has no other)


def check(tensor: Any) -> None:
    """Raise ValueError for a tensor that cannot be sent: sparse, or not in the CPU's memory."""
    if tensor.is_sparse or tensor.layout.__str__() != "torch.strided":
        raise ValueError("the shift backend takes dense tensors only, but for allreduce")
    check_device(tensor)


def check_device(tensor: Any) -> None:
    """Raise ValueError for a tensor that is not in the CPU's memory."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the shift backend takes tensors of the CPU only, not of {tensor.device}")
