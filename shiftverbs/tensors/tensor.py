# SPDX-License-Identifier: BSD-3-Clause
"""Tensors as memory: those of other libraries as they come, and the plain one that a pull gives."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from shiftverbs.tensors import dlpack
from shiftverbs.tensors.errors import TensorError
from shiftverbs.tensors.metadata import DTYPES, NUMBERS, Metadata, dtype_of_format, metadata_of


class Tensor:
    """Memory with a dtype and a shape, which other libraries look at without copying: `numpy.asarray(tensor)`,
    `torch.from_dlpack(tensor)`, `memoryview(tensor.memory)`. The memory is free when nobody looks at it any longer.
    """

    def __init__(self, metadata: Metadata, array: Any) -> None:
        """Made by `pull` and `empty`.

        :param metadata: dtype and shape
        :param array: its memory: a ctypes array
        """
        self._metadata, self._array = metadata, array

    @property
    def dtype(self) -> str:
        """The name of its elements' type, such as "float32"."""
        return self._metadata.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self._metadata.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._metadata.nbytes

    @property
    def memory(self) -> memoryview:
        """Its bytes, one after the other, to read and write."""
        return memoryview(self._array).cast("B")[: self.nbytes]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For numpy. Raises AttributeError where numpy has no such dtype."""
        typestr = DTYPES[NUMBERS[self.dtype]].typestr
        if not typestr:
            raise AttributeError(f"numpy has no {self.dtype}")
        return {
            "version": 3,
            "typestr": typestr,
            "shape": self.shape,
            "data": (ctypes.addressof(self._array), False),
        }

    def __dlpack__(self, *, stream: None = None, **_: Any) -> Any:
        """A capsule, as DLPack has it."""
        return dlpack.give(ctypes.addressof(self._array), self._metadata, self._array)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, as DLPack has it."""
        return (dlpack.CPU, 0)

    def __repr__(self) -> str:
        return f"<Tensor {self._metadata}>"


class View(NamedTuple):
    """The memory of somebody's tensor.

    :param address: of its first element
    :param owner: while it is held, the memory stays
    :param tensor: what it is of
    :param can_move: its library may give it other memory while the owner is held, as torch's resize_ does
    """

    address: int
    metadata: Metadata
    owner: object
    tensor: Any
    can_move: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.metadata.nbytes

    def where(self) -> tuple[int, int]:
        """Address and bytes of its memory now; (0, 0) where it is none any longer."""
        if not self.can_move:
            return self.address, self.nbytes
        try:
            address, metadata, _ = dlpack.take(self.tensor)
        except Exception:
            return 0, 0
        return address, metadata.nbytes


def view_of(tensor: Any, writable: bool = False) -> View:
    """What has the buffer protocol or `__dlpack__`, as memory. Nothing is copied.

    :param writable: it is written to
    :raises TensorError: it has neither, cannot be written to, is not contiguous, not in the CPU's memory, or has
        elements that there is no dtype for
    """
    if isinstance(tensor, Tensor):
        array, metadata = tensor._array, tensor._metadata  # noqa: SLF001  (no program needs their names)
        return View(ctypes.addressof(array), metadata, array, tensor)
    try:
        view = memoryview(tensor)
    except (TypeError, ValueError, BufferError) as error:
        if not hasattr(tensor, "__dlpack__"):
            kind = type(tensor).__name__
            raise TensorError(f"a {kind} has neither the buffer protocol nor __dlpack__: {error}") from error
        try:
            address, metadata, borrowed = dlpack.take(tensor)
        except (RuntimeError, BufferError, TypeError) as refused:
            if isinstance(refused, TensorError):
                raise
            raise TensorError(f"a {type(tensor).__name__} gives no DLPack capsule: {refused}") from refused
        return View(address, metadata, borrowed, tensor, can_move=True)
    metadata = metadata_of(dtype_of_format(view.format, view.itemsize), view.shape or ())
    if not view.c_contiguous:
        raise TensorError(f"a tensor {metadata} whose elements are not one after the other in memory")
    if writable and view.readonly:
        raise TensorError(f"a tensor {metadata} that cannot be written to")
    return View(_address(view), metadata, view, tensor)


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def _address(view: memoryview) -> int:
    """Where a buffer's memory is. ctypes' from_buffer would want it writable."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0x18)  # PyBUF_STRIDES
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
