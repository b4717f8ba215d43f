# SPDX-License-Identifier: BSD-3-Clause
"""What a tensor is besides its bytes: dtype, shape, or that it is dead; and what a puller remembers of it."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from typing import NamedTuple

from shiftverbs.tensors.errors import TensorError

MAX_DIMENSIONS = 32
MAX_BYTES = 1 << 62
#: Keys that a cache remembers.
MAX_CACHED = 1 << 16


class DType(NamedTuple):
    """A type of elements. Its place in DTYPES is its number in messages.

    :param itemsize: in bytes
    :param dlpack: code and bits in DLPack
    :param typestr: in numpy's array interface; empty where numpy has no such type
    """

    name: str
    itemsize: int
    dlpack: tuple[int, int]
    typestr: str


#: Append only: the places are in messages.
DTYPES = [
    DType("bool", 1, (6, 8), "|b1"),
    *(DType(f"int{bits}", bits // 8, (0, bits), f"<i{bits // 8}") for bits in (8, 16, 32, 64)),
    *(DType(f"uint{bits}", bits // 8, (1, bits), f"<u{bits // 8}") for bits in (8, 16, 32, 64)),
    *(DType(f"float{bits}", bits // 8, (2, bits), f"<f{bits // 8}") for bits in (16, 32, 64)),
    DType("bfloat16", 2, (4, 16), ""),
    *(DType(f"complex{bits}", bits // 8, (5, bits), f"<c{bits // 8}") for bits in (64, 128)),
]
NUMBERS = {dtype.name: number for number, dtype in enumerate(DTYPES)}
BY_DLPACK = {dtype.dlpack: dtype for dtype in DTYPES}
_KINDS = {
    **dict.fromkeys("bhilqn", "int"),
    **dict.fromkeys("BHILQN", "uint"),
    **dict.fromkeys("efd", "float"),
    "?": "bool",
    "Zf": "complex",
    "Zd": "complex",
}


class Metadata(NamedTuple):
    """Of one tensor. dtype: a name of DTYPES; dead: there is none, and dtype and shape mean nothing."""

    dtype: str
    shape: tuple[int, ...]
    dead: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return 0 if self.dead else math.prod(self.shape) * DTYPES[NUMBERS[self.dtype]].itemsize

    def __str__(self) -> str:
        return "dead" if self.dead else f"{self.dtype}{list(self.shape)}"


DEAD = Metadata("uint8", (), dead=True)


def metadata_of(dtype: str, shape: tuple[int, ...]) -> Metadata:
    """Metadata, checked.

    :raises TensorError: there is no such dtype, a dimension is negative, or there are too many
    """
    if dtype not in NUMBERS:
        raise TensorError(f"dtype {dtype!r} is none of {', '.join(NUMBERS)}")
    if len(shape) > MAX_DIMENSIONS or any(dimension < 0 for dimension in shape):
        raise TensorError(
            f"the shape {list(shape)} is not of at most {MAX_DIMENSIONS} dimensions of 0 or more"
        )
    metadata = Metadata(dtype, tuple(shape))
    if metadata.nbytes > MAX_BYTES:
        raise TensorError(f"a tensor {metadata} would have more than 2^62 bytes")
    return metadata


def dtype_of_format(text: str, itemsize: int) -> str:
    """The dtype of a buffer's elements, from its format as of the struct module.

    :param itemsize: in bytes
    :raises TensorError: there is no dtype for it
    """
    match = re.fullmatch(r"([@=<>!|]?)(Z?\w|\?)", text)
    kind = _KINDS.get(match[2]) if match else None
    name = kind if kind == "bool" else f"{kind}{8 * itemsize}"
    if match is None or kind is None or name not in NUMBERS or (match[1] in ("!", ">") and itemsize > 1):
        raise TensorError(
            f"there is no dtype for a buffer of format {text!r} with {itemsize} bytes an element"
        )
    return name


class MetadataCache:
    """What the publisher said of each key last. The keys used longest ago are forgotten.

    :param limit: how many keys it has at most
    """

    def __init__(self, limit: int = MAX_CACHED) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Metadata] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Metadata | None:
        """What is known of a key."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, key: str, metadata: Metadata) -> None:
        """Remember it."""
        self._known[key] = metadata
        self._known.move_to_end(key)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
