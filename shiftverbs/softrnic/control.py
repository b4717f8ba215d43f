# SPDX-License-Identifier: BSD-3-Clause
"""How this package's Python asks the library to change the network; for `faults` and `fabric`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from shiftverbs.softrnic import SoftrnicError, library_path


class FaultError(SoftrnicError):
    """The request names something that does not exist; the message says what, and what there is."""


def text(value: str | None) -> bytes | None:
    """A name as the library takes it. FaultError if it can be none."""
    if value is None:
        return None
    if "\0" in value:
        raise FaultError(f"{value!r} is no name")
    return value.encode(errors="surrogateescape")


@functools.cache
def _library() -> ctypes.CDLL:
    # Only for the functions below: does not put softrnic in front of libibverbs.
    return ctypes.CDLL(str(library_path()))


def call(function: str, *args: Any) -> int:
    """Call a softrnic_ctl function with an error buffer behind its arguments.

    What it returns, or FaultError (the request is wrong), or SoftrnicError (the registry cannot be used).
    """
    err = ctypes.create_string_buffer(1024)
    result: int = getattr(_library(), function)(*args, err, ctypes.c_size_t(len(err)))
    if result < 0:
        message = err.value.decode(errors="replace")
        raise (FaultError if result == -1 else SoftrnicError)(message)
    return result
