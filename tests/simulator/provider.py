# SPDX-License-Identifier: BSD-3-Clause
"""Python side of provider.c, which is compiled when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "simulator"
#: wr_id, remote_addr, addr, compare_add, swap, data; qp, opcode, flags, imm, rkey, length, lkey, num_sge
POST = struct.Struct("=6Q8I")
POSTS_AT = 8
RECV = 0xFFFF
FLAGS = "-std=c11 -O2 -g -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden".split()

_VOID, _INT, _U32, _U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sv_posts": (_VOID, []),
    "sv_context": (_VOID, []),
    "sv_cq": (_VOID, [_VOID, _INT]),
    "sv_qp": (_VOID, [_VOID, _VOID, _VOID, _U32, _U32, _U32, _U32]),
    "sv_shared": (_VOID, [_VOID]),
    "sv_push": (_U32, [_VOID, _U64, _INT, _INT, _U32, _U32, _U32, _INT]),
    "sv_hide": (None, [_VOID, _U32]),
    "sv_free_cq": (None, [_VOID]),
    "sv_free": (None, [_VOID]),
}


class Shared(ctypes.Structure):
    """struct shared: what the model and the provider share of one QP; by queue, 0 sends, 1 receives."""

    _fields_ = [
        ("refusal", _INT * 2),
        ("posted", _U32 * 2),
        ("freed", _U32 * 2),
        ("depth", _U32 * 2),
        ("refuse_at", _INT * 2),
        ("refuse_err", _INT * 2),
        ("refuse_more", _INT * 2),
        ("overflows", _U32 * 2),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The provider."""
    source = HERE / "provider.c"
    name = f"provider-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    path = BUILD / name
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        made = BUILD / f"{name}.{os.getpid()}"
        subprocess.run(["gcc", *FLAGS, str(source), "-o", str(made)], check=True)
        made.rename(path)
    lib = ctypes.CDLL(str(path))
    for function, (result, arguments) in _SIGNATURES.items():
        one = getattr(lib, function)
        one.restype, one.argtypes = result, arguments
    return lib


class Posts:
    """The list of what was handed over to any NIC and is not taken yet."""

    def __init__(self) -> None:
        at = library().sv_posts()
        self.count = ctypes.c_uint32.from_address(at)
        self._all = (ctypes.c_char * (POST.size * 8192)).from_address(at + POSTS_AT)

    def take(self) -> list[tuple[int, ...]]:
        """All of it, in order, each as POST has it."""
        n = self.count.value
        found = list(POST.iter_unpack(self._all[: n * POST.size]))
        self.count.value = 0
        return found
