# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that do not make the same calls, and what becomes of their memory."""

from __future__ import annotations

import datetime
from typing import Any

import rank as base
import torch
import torch.distributed as dist
from rank import start, world  # noqa: F401

ops = dist.ReduceOp
#: What two ranks call that do not agree: each its own.
CALLS: dict[str, tuple[Any, Any]] = {
    "sizes": (lambda: _reduce(100_000), lambda: _reduce(200_000)),
    "small sizes": (lambda: _reduce(10), lambda: _reduce(20)),
    "a small one and a large one": (lambda: _reduce(10), lambda: _reduce(200_000)),
    "dtypes": (lambda: _reduce(50_000, torch.int32), lambda: _reduce(50_000)),
    "small dtypes": (lambda: _reduce(5, torch.int32), lambda: _reduce(5)),
    "operations": (lambda: _reduce(50_000, op=ops.MAX), lambda: _reduce(50_000)),
    "roots of a reduce": (lambda: _reduce_to(0), lambda: _reduce_to(1)),
    "roots": (lambda: _broadcast(0), lambda: _broadcast(1)),
    "collectives": (lambda: _broadcast(0), lambda: _reduce(50_000)),
    "small collectives": (lambda: dist.barrier(GROUP), lambda: _reduce(5)),
    "one more": (
        lambda: (_reduce(5), _reduce(5), dist.barrier(GROUP)),
        lambda: (_reduce(5), dist.barrier(GROUP)),
    ),
    "parts": (lambda: _exchange(50_000, 70_000), lambda: _exchange(50_000, 60_000)),
}


def _reduce(count: int, dtype: Any = torch.float32, op: Any = ops.SUM) -> None:
    dist.all_reduce(torch.ones(count, dtype=dtype), op, group=GROUP)


def _reduce_to(root: int) -> None:
    dist.reduce(torch.ones(5), root, group=GROUP)


def _broadcast(root: int) -> None:
    dist.broadcast(torch.ones(50_000), root, group=GROUP)


def _exchange(to_0: int, to_1: int) -> None:
    rows = [to_0, to_1]
    came = [50_000, 60_000]  # of which each sends itself its own, and the other one something else
    dist.all_to_all_single(torch.zeros(sum(came)), torch.ones(sum(rows)), came, rows, group=GROUP)


GROUP: Any = None


def disagree(what: str, timeout_s: float) -> str:
    """Make a call of CALLS in a group of its own; its error."""
    global GROUP
    GROUP = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=timeout_s))
    try:
        CALLS[what][base.RANK]()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def closed_before_it_fails() -> list[bool]:
    """A collective that a peer is late for: whether it had failed already when the group's QPs were closed."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.3))
    if base.RANK == 1:
        return []
    found = []
    # Not only the C++ half of it.
    transport = group.transport
    work = group.allreduce([torch.ones(100_000)], torch._C._distributed_c10d.AllreduceOptions())
    message = group.recv([torch.ones(100_000)], 1, 0)
    close = transport.close

    def closing() -> None:
        found.extend([work.is_completed(), message.is_completed()])
        close()

    transport.close = closing
    for one in (work, message):
        try:
            one.wait()
        except RuntimeError:
            continue
        raise AssertionError("no error")
    return found


def beyond(count_0: int, count_1: int) -> list[Any]:
    """allreduce of parts of larger tensors, of different sizes: the error, and how much of the rest has changed."""
    count = (count_0, count_1)[base.RANK]
    whole = torch.zeros(2 * max(count_0, count_1))
    try:
        dist.all_reduce(whole[:count])
    except (RuntimeError, ValueError) as error:
        return [str(error), int((whole[count:] != 0).sum())]
    return ["", int((whole[count:] != 0).sum())]
