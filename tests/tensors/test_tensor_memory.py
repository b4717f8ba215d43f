# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of others as memory, and ours as theirs: the buffer protocol, DLPack, numpy, torch. Nothing is copied."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref

import pytest
from harness import ROOT

from shiftverbs.tensors import dlpack
from shiftverbs.tensors.errors import TensorError
from shiftverbs.tensors.metadata import DTYPES, Metadata, dtype_of_format
from shiftverbs.tensors.tensor import Tensor, view_of


def tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    metadata = Metadata(dtype, shape)
    return Tensor(metadata, (ctypes.c_ubyte * max(1, metadata.nbytes))())


def test_buffers():
    for source, dtype, shape in [
        (b"abc", "uint8", (3,)),
        (bytearray(4), "uint8", (4,)),
        (array.array("d", [1, 2]), "float64", (2,)),
        (array.array("l", [1]), "int64", (1,)),
        (memoryview(bytearray(24)).cast("f", (2, 3)), "float32", (2, 3)),
        ((ctypes.c_int16 * 3 * 2)(), "int16", (2, 3)),
        (memoryview(b"x").cast("?"), "bool", (1,)),
        (mmap.mmap(-1, 4096), "uint8", (4096,)),
        (memoryview(b""), "uint8", (0,)),
    ]:
        view = view_of(source)
        assert view.metadata == Metadata(dtype, shape), source
    data = bytearray(b"0123456789")
    view = view_of(memoryview(data)[3:7], writable=True)
    ctypes.memmove(view.address, b"abcd", view.nbytes)
    assert data == b"012abcd789"
    with pytest.raises(BufferError):
        data.extend(b"x")  # its memory stays where it is


@pytest.mark.parametrize(
    "source, text",
    [
        (7, "a int has neither the buffer protocol nor __dlpack__"),
        (memoryview(bytes(8))[::2], "not one after the other"),
        (memoryview(b"ab").cast("c"), "no dtype for a buffer of format 'c'"),
        ("text", "a str has neither"),
    ],
)
def test_what_is_no_tensor(source, text):
    with pytest.raises(TensorError, match=text):
        view_of(source)


def test_what_cannot_be_written_to():
    with pytest.raises(TensorError, match="cannot be written to"):
        view_of(b"abc", writable=True)


def test_formats():
    assert dtype_of_format("<f", 4) == "float32"
    assert dtype_of_format("<l", 4) == "int32" and dtype_of_format("l", 8) == "int64"
    assert dtype_of_format("Zd", 16) == "complex128"
    assert dtype_of_format(">B", 1) == "uint8"
    for format_, size in [(">f", 4), ("T{i:x:}", 4), ("P", 8), ("g", 16), ("s", 1), ("", 1)]:
        with pytest.raises(TensorError, match="no dtype"):
            dtype_of_format(format_, size)


def test_dlpack_there_and_back():
    """Whoever takes a tensor from us keeps its memory, and lets go of it."""
    for dtype in DTYPES:
        ours = tensor(dtype.name, (2, 3))
        gone = weakref.ref(ours._array)
        address, metadata, borrowed = dlpack.take(ours)
        assert (address, metadata) == (ctypes.addressof(ours._array), Metadata(dtype.name, (2, 3)))
        del ours
        gc.collect()
        assert gone() is not None
        del borrowed
        gc.collect()
        assert gone() is None
    assert not dlpack._handed_out


def test_a_capsule_that_nobody_takes():
    ours = tensor("int8", (3,))
    capsule = ours.__dlpack__()
    assert len(dlpack._handed_out) == 1
    del capsule
    gc.collect()
    assert not dlpack._handed_out


class Foreign:
    """Another library's tensor: ours, with something wrong."""

    def __init__(self, of: Tensor, device: int = 1, refuse: bool = False) -> None:
        self._of, self._device, self._refuse = of, device, refuse

    def __dlpack__(self):
        if self._refuse:
            raise BufferError("it requires grad")
        return self._of.__dlpack__()

    def __dlpack_device__(self):
        return (self._device, 0)


def test_foreign_tensors():
    ours = tensor("bfloat16", (4,))
    assert view_of(Foreign(ours)).metadata == Metadata("bfloat16", (4,))
    with pytest.raises(TensorError, match="device 2:0 is not in the CPU's memory"):
        view_of(Foreign(ours, device=2))
    with pytest.raises(TensorError, match="a Foreign gives no DLPack capsule: it requires grad"):
        view_of(Foreign(ours, refuse=True))


def test_numpy():
    numpy = pytest.importorskip("numpy")
    ours = tensor("float32", (2, 3))
    theirs = numpy.asarray(ours)
    theirs[1, 2] = 7
    assert theirs.shape == (2, 3) and ours.memory.cast("f")[5] == 7
    view = view_of(theirs)
    assert (view.address, view.metadata) == (ctypes.addressof(ours._array), Metadata("float32", (2, 3)))
    assert numpy.from_dlpack(ours)[1, 2] == 7
    gone = weakref.ref(ours._array)
    del ours, view
    gc.collect()
    assert gone() is not None and theirs[1, 2] == 7
    for dtype in ("float16", "complex64", "bool", "uint64"):
        assert view_of(numpy.zeros((2, 2), dtype)).metadata == Metadata(dtype, (2, 2))
    assert view_of(numpy.float64(3)).metadata == Metadata("float64", ())
    with pytest.raises(TensorError, match="not one after the other"):
        view_of(numpy.zeros((4, 4))[:, 1])
    with pytest.raises(TensorError, match="no dtype"):
        view_of(numpy.zeros(3, ">f4"))


def test_torch():
    """In a process of its own: torch of another age than numpy says so, loudly."""
    code = """
try:
    import torch
except ImportError:
    print("no torch"); raise SystemExit
from shiftverbs.tensors.tensor import Tensor, view_of
from shiftverbs.tensors.metadata import Metadata
import ctypes
theirs = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
view = view_of(theirs, writable=True)
assert view.metadata == Metadata("bfloat16", (2, 3)) and view.address == theirs.data_ptr()
ours = Tensor(Metadata("bfloat16", (2, 3)), (ctypes.c_ubyte * 12)())
ctypes.memmove(view_of(ours).address, view.address, 12)
copy = torch.from_dlpack(ours)
assert copy.dtype == torch.bfloat16 and torch.equal(copy, theirs)
copy[0, 0] = 9
assert bytes(ours.memory[:2]) != bytes(2)
for wrong in (theirs.t(), torch.zeros(2, requires_grad=True)):
    try:
        view_of(wrong)
    except ValueError as error:
        print(error)
    else:
        raise SystemExit("no error")
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    if "no torch" in done.stdout:
        pytest.skip("torch is not there: apt-get install python3-torch")
    assert done.stdout.endswith("fine\n")
