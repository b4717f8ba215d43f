# SPDX-License-Identifier: BSD-3-Clause
"""The reductions, by torch's own kernels: each takes (a, b) and writes to out, which may be one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

Kernel = Callable[[Any, Any, Any], None]


def _of(function: Callable[..., Any]) -> Kernel:
    def kernel(a: Any, b: Any, out: Any) -> None:
        function(a, b, out=out)

    return kernel


_ARITHMETIC = {
    "SUM": _of(torch.add),
    "AVG": _of(torch.add),
    "PRODUCT": _of(torch.mul),
    "MIN": _of(torch.minimum),
    "MAX": _of(torch.maximum),
    "BAND": _of(torch.bitwise_and),
    "BOR": _of(torch.bitwise_or),
    "BXOR": _of(torch.bitwise_xor),
}
_LOGICAL = {
    "SUM": _of(torch.logical_or),
    "MAX": _of(torch.logical_or),
    "PRODUCT": _of(torch.logical_and),
    "MIN": _of(torch.logical_and),
    "BAND": _of(torch.logical_and),
    "BOR": _of(torch.logical_or),
    "BXOR": _of(torch.logical_xor),
}
_NAMES = [(getattr(ReduceOp, name), name) for name in _ARITHMETIC if hasattr(ReduceOp, name)]


class Reduction:
    """One op for one dtype.

    name: of the op; adds: whether it is a sum, or an average.

    :param op: ReduceOp
    :raises ValueError: there is none of the kind
    """

    def __init__(self, op: Any, dtype: Any) -> None:
        name = next((name for known, name in _NAMES if op == known), None)
        if name is None:
            raise ValueError(f"the shift backend does not know the reduction {op}")
        if dtype.is_complex and name in ("MIN", "MAX"):
            raise ValueError(f"{name} is not defined for {dtype}")
        if name in ("BAND", "BOR", "BXOR") and (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"{name} is not defined for {dtype}")
        if dtype == torch.bool and name == "AVG":
            raise ValueError(f"AVG is not defined for {dtype}")
        self.into = (_LOGICAL if dtype == torch.bool else _ARITHMETIC)[name]
        self.name = name
        self.adds = name in ("SUM", "AVG")
        self._divides = name == "AVG"
        self._whole = not (dtype.is_floating_point or dtype.is_complex)

    def finish(self, tensor: Any, size: int) -> None:
        """What is left to do with the reduced elements of so many ranks: AVG divides; integers towards zero."""
        if self._divides and size > 1:
            tensor.div_(size, rounding_mode="trunc" if self._whole else None)
