# SPDX-License-Identifier: BSD-3-Clause
"""The child's handle on fake_verbs.c, and what the cases share."""

from __future__ import annotations

import ast
import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Call(ctypes.Structure):
    """One command that reached the fake."""

    _fields_ = [
        ("qp", ctypes.c_uint64),
        ("state", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("at_ns", ctypes.c_int64),
    ]


library: Any = None


def install(path: str) -> None:
    """Load the fakes, and the software RNIC behind them where SOFTRNIC asks for it."""
    global library
    # PyDLL keeps the GIL: a test that says the GIL was held must not give it up by looking.
    library = ctypes.PyDLL(path, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    library.fake_last_attr.restype = ctypes.c_char_p
    for name in ("fake_poll", "fake_byte_len", "fake_post_send"):
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_int]
    if os.environ.get("SOFTRNIC"):
        from shiftverbs import softrnic

        real = ctypes.CDLL(str(softrnic.library_path()))
    else:
        real = ctypes.CDLL("libibverbs.so.1")
    library.fake_set_next(
        *(
            ctypes.cast(verb, ctypes.c_void_p)
            for verb in (real.ibv_modify_qp, real.ibv_query_qp, real.ibv_create_ah)
        )
    )


def calls() -> list[tuple[int, int]]:
    """(fake QP, state) of every command that has begun, in order."""
    copy = (Call * 4096)()
    n = library.fake_calls(copy, 4096)
    return [(copy[i].qp, copy[i].state) for i in range(n)]


def last_mask() -> int:
    """The attribute mask of the command that began last."""
    copy = (Call * 4096)()
    return int(copy[library.fake_calls(copy, 4096) - 1].mask)


def n_calls() -> int:
    """How many commands have begun."""
    return int(library.fake_calls(None, 0))


def modify_qp(qp: int, steps: Any) -> None:
    """Take a QP through some transitions as the product does: in the thread of a NIC."""
    from shiftverbs import _nic

    worker = _nic.NicWorker("modify")
    worker.submit(None, qp, steps)
    assert worker.drain(timeout_s=30)
    ((_, err, done, _),) = worker.results()
    assert (err, done) == (0, len(steps)) and worker.stop()


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for a condition, giving up the GIL in between."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.001)


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def fds() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def in_child(check: Callable[[], None]) -> None:
    """Fork, run check in the child, and expect it to exit with 0 within a deadline."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            if status:
                import traceback

                traceback.print_exc()
            os._exit(status)
    status = until(lambda: (lambda r: r if r[0] else None)(os.waitpid(pid, os.WNOHANG)))[1]
    assert status == 0, f"child ended with {status}"


def case_names(path: Path) -> list[str]:
    """Names of the cases in a module, without importing it."""
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]
