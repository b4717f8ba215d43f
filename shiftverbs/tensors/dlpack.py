# SPDX-License-Identifier: BSD-3-Clause
"""DLPack's capsules, both ways, after dlpack.h (the DLManagedTensor of versions before 1.0, which all exchange)."""

from __future__ import annotations

import ctypes
from typing import Any

from shiftverbs.tensors.errors import TensorError
from shiftverbs.tensors.metadata import BY_DLPACK, DTYPES, NUMBERS, Metadata, metadata_of

CPU = 1
#: Memory of the CPU, pinned for a GPU's sake (kDLCUDAHost, kDLROCMHost).
ON_CPU = (CPU, 3, 11)
NAME, USED = b"dltensor", b"used_dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)

#: What was handed out, by the address of its struct: the struct, and what keeps the memory.
_handed_out: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _delete(managed: Any) -> None:
    _handed_out.pop(ctypes.addressof(managed.contents), None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """A capsule ends that nobody has taken the tensor out of."""
    if _is_valid(capsule, NAME):
        _handed_out.pop(_get_raw(capsule, NAME), None)


# A consumer may keep its tensor, or its capsule, longer than the interpreter keeps this module.
for _kept in (_delete, _destroy, NAME, USED):
    _api.Py_IncRef(ctypes.py_object(_kept))


class Borrowed:
    """A tensor of another library, until nobody has this object any longer."""

    def __init__(self, capsule: Any) -> None:
        address = _get(capsule, NAME)
        _set_name(capsule, USED)
        self._managed = _Managed.from_address(address)

    @property
    def tensor(self) -> Any:
        """The DLTensor."""
        return self._managed.tensor

    def __del__(self) -> None:
        managed = getattr(self, "_managed", None)
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.pointer(managed))


def take(source: Any) -> tuple[int, Metadata, Borrowed]:
    """The address, the metadata and the owner of the memory of an object with `__dlpack__`.

    :raises TensorError: it is not in the CPU's memory, or there is no dtype for it
    :raises BufferError: what its library raises if it gives none away, too
    """
    device, number = source.__dlpack_device__()
    if device not in ON_CPU:
        raise TensorError(f"a tensor on DLPack's device {int(device)}:{number} is not in the CPU's memory")
    borrowed = Borrowed(source.__dlpack__())
    tensor = borrowed.tensor
    dtype = BY_DLPACK.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TensorError(
            f"there is no dtype for DLPack's {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    metadata = metadata_of(dtype.name, shape)
    if tensor.strides and metadata.nbytes and not _is_dense(shape, tensor.strides[: tensor.ndim]):
        raise TensorError(f"a tensor {metadata} whose elements are not one after the other in memory")
    return (tensor.data or 0) + tensor.byte_offset, metadata, borrowed


def _is_dense(shape: tuple[int, ...], strides: list[int]) -> bool:
    want = 1
    for dimension, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dimension != 1 and stride != want:
            return False
        want *= dimension
    return True


def give(address: int, metadata: Metadata, owner: object) -> Any:
    """A capsule of a tensor in the CPU's memory. owner: is kept as long as whoever takes it keeps it."""
    code, bits = DTYPES[NUMBERS[metadata.dtype]].dlpack
    ndim = len(metadata.shape)
    shape = (ctypes.c_int64 * max(1, ndim))(*metadata.shape)
    tensor = _Tensor(address, CPU, 0, ndim, code, bits, 1, shape, None, 0)
    managed = _Managed(tensor, None, _delete)
    where = ctypes.addressof(managed)
    _handed_out[where] = (managed, shape, owner)
    return _new(where, NAME, ctypes.cast(_destroy, ctypes.c_void_p))
