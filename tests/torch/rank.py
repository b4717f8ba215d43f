# SPDX-License-Identifier: BSD-3-Clause
"""A rank with torch: what the tests of this folder have it do. It raises where something is not as it must be."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import shiftverbs.torch  # noqa: F401  (the backend)

ops = dist.ReduceOp
RANK, WORLD = 0, 1
#: By size: the shift group of the first ranks, and gloo's.
GROUPS: dict[int, tuple[Any, Any]] = {}
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCTIONS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]
#: Elements: a few, what fits a slot, several slots, the ring, and the ring with several chunks of uneven size.
COUNTS = [1, 7, 3001, 12_007, 40_001]


def start(rank: int, count: int, directory: str, timeout_s: float = 30.0) -> None:
    """Join the job; groups of its first 1, 2, … ranks, too."""
    global RANK, WORLD
    RANK, WORLD = rank, count
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "shift", init_method=f"file://{directory}/meet", rank=rank, world_size=count, timeout=timeout
    )
    for size in range(1, count + 1):
        members = list(range(size))
        GROUPS[size] = (
            dist.new_group(members, timeout=timeout),
            dist.new_group(members, timeout=timeout, backend="gloo"),
        )


def world() -> Any:
    """The default group's object."""
    return dist.distributed_c10d._get_default_group()


def data(seed: int, count: int, dtype: Any, low: int = -50, high: int = 50) -> Any:
    """What a rank brings, known to all."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.complex(data(seed, count, torch.float32), data(seed + 1, count, torch.float32)).to(dtype)
    if dtype.is_floating_point:
        return (torch.rand(count, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)
    return torch.randint(
        max(low, 0) if dtype == torch.uint8 else low, high, (count,), generator=generator
    ).to(dtype)


def digest(*tensors: Any) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(
            bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
            if tensor.numel() < 100
            else _raw(tensor)
        )
    return found.hexdigest()[:16]


def _raw(tensor: Any) -> bytes:
    import ctypes

    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or _raw(a) == _raw(b))


def close(a: Any, exact: Any, size: int) -> bool:
    """Within what rounding may do to a reduction over so many ranks; exact: in double precision."""
    eps = torch.finfo(a.dtype).eps
    wide = a.to(exact.dtype)
    return bool(((wide - exact).abs() <= 8 * size * eps * (exact.abs() + 4 * size)).all())


def member(size: int) -> bool:
    """Whether this rank is in the group of this size."""
    return RANK < size


def reduced(op: str, parts: list[Any]) -> Any:
    """By a local computation."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = {
            "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum
        }[op](total, part)  # fmt: skip
    if op == "AVG":
        total = torch.div(total, len(parts), rounding_mode=None if total.dtype.is_floating_point else "trunc")
    return total


def check_reduced(got: Any, op: str, parts: list[Any], what: Any) -> None:
    """Against the local computation."""
    if got.dtype.is_floating_point:
        assert close(got, reduced(op, [part.double() for part in parts]), len(parts)), what
    else:
        assert same(got, reduced(op, parts)), what


def allreduce(size: int) -> str:
    """All ops and dtypes; twice, with the same bits; integers as gloo."""
    if not member(size):
        return ""
    ours, gloo = GROUPS[size]
    seen = []
    for dtype, op, count in itertools.product(INTEGERS + FLOATS, REDUCTIONS, COUNTS):
        if count > 10_000 and dtype not in (torch.float32, torch.int64, torch.bfloat16):
            continue
        parts = [data(r * 7 + count, count, dtype) for r in range(size)]
        first, again = parts[RANK].clone(), parts[RANK].clone()
        dist.all_reduce(first, getattr(ops, op), group=ours)
        dist.all_reduce(again, getattr(ops, op), group=ours)
        what = (size, dtype, op, count)
        assert same(first, again), what
        check_reduced(first, op, parts, what)
        if dtype in INTEGERS and op != "AVG" and size > 1:
            theirs = parts[RANK].clone()
            dist.all_reduce(theirs, getattr(ops, op), group=gloo)
            assert same(first, theirs), what
        seen.append(first)
    for op in ("BAND", "BOR", "BXOR"):
        mine, theirs = data(RANK, 5000, torch.int32), data(RANK, 5000, torch.int32)
        dist.all_reduce(mine, getattr(ops, op), group=ours)
        dist.all_reduce(theirs, getattr(ops, op), group=gloo)
        assert same(mine, theirs), op
        seen.append(mine)
    flags = data(RANK, 100, torch.bool)
    dist.all_reduce(flags, ops.MAX, group=ours)
    assert same(flags, torch.stack([data(r, 100, torch.bool) for r in range(size)]).any(0))
    for count in (100, 30_000):
        waves = data(RANK, count, torch.complex64)
        dist.all_reduce(waves, group=ours)
        exact = sum(data(r, count, torch.complex64).to(torch.complex128) for r in range(size))
        assert bool(((waves - exact).abs() < 1e-4).all())
    return digest(*seen)


def allreduce_large(size: int) -> str:
    """Many chunks, more than there are staging places; and tensors that are not contiguous."""
    if not member(size):
        return ""
    ours, _ = GROUPS[size]
    seen = []
    for count in (1_500_001,):
        mine = data(RANK, count, torch.float32)
        dist.all_reduce(mine, group=ours)
        check_reduced(mine, "SUM", [data(r, count, torch.float32) for r in range(size)], count)
        seen.append(mine)
    for shape in ((10, 7), (300, 200)):
        count = math.prod(shape)
        mine = data(RANK, count, torch.float32).view(shape).t()
        assert not mine.is_contiguous()
        dist.all_reduce(mine, group=ours)
        parts = [data(r, count, torch.float32).view(shape).t().contiguous() for r in range(size)]
        check_reduced(mine.contiguous(), "SUM", parts, shape)
        seen.append(mine)
    empty = torch.empty(0)
    dist.all_reduce(empty, group=ours)
    return digest(*seen)


def coalesced(size: int) -> str:
    """allreduce_coalesced: small ones, large ones, of several dtypes."""
    if not member(size):
        return ""
    ours, _ = GROUPS[size]
    shapes = [
        (3, torch.float32),
        (1000, torch.float32),
        (70_000, torch.float32),
        (5, torch.int64),
        (1, torch.bfloat16),
    ]
    mine = [data(RANK * 31 + i, count, dtype) for i, (count, dtype) in enumerate(shapes)]
    options = c10d.AllreduceCoalescedOptions()
    options.reduceOp = ops.SUM
    ours.allreduce_coalesced(mine, options).wait()
    for i, (count, dtype) in enumerate(shapes):
        check_reduced(mine[i], "SUM", [data(r * 31 + i, count, dtype) for r in range(size)], (count, dtype))
    return digest(*mine)


def sparse_data(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Some rows of a table of 1000, each of three numbers; none of rank 1, and one twice."""
    at = torch.arange(rows * (rank != 1)) * (rank + 2) % 1000
    at = torch.cat([at, at[:1]])
    return torch.sparse_coo_tensor(at[None], data(rank, 3 * len(at), dtype).view(-1, 3), (1000, 3))


def sparse(size: int) -> str:
    """allreduce of sparse tensors, few elements and many, and none at some ranks."""
    if not member(size):
        return ""
    ours, _ = GROUPS[size]
    seen = []
    for dtype, rows in itertools.product([torch.float32, torch.float64, torch.int64], [0, 1, 7, 900]):
        mine = sparse_data(RANK, rows, dtype)
        dist.all_reduce(mine, group=ours)
        want = sum(sparse_data(r, rows, dtype).to_dense() for r in range(size))
        got = mine.to_dense()
        assert torch.allclose(got, want) if dtype.is_floating_point else torch.equal(got, want), (dtype, rows)
        seen.append(got)
    leaf = sparse_data(RANK, 3, torch.float32).requires_grad_()
    dist.all_reduce(leaf, group=ours)
    seen.append(leaf.detach().to_dense())
    return digest(*seen)


def broadcast(size: int) -> str:
    """From each rank, all dtypes."""
    if not member(size):
        return ""
    ours, _ = GROUPS[size]
    seen = []
    for root, dtype, count in itertools.product(
        range(size), [*INTEGERS, *FLOATS, torch.int16, torch.bool, torch.complex64], [1, 5000, 200_003]
    ):
        if count > 10_000 and dtype not in (torch.float32, torch.uint8):
            continue
        mine = data(RANK + 100, count, dtype)
        dist.broadcast(mine, root, group=ours)
        assert same(mine, data(root + 100, count, dtype)), (root, dtype, count)
        seen.append(mine)
    return digest(*seen)


def allgather(size: int) -> str:
    """The list, and the one tensor."""
    if not member(size):
        return ""
    ours, _ = GROUPS[size]
    seen = []
    for dtype, count in itertools.product(
        [torch.float32, torch.int8, torch.bool, torch.bfloat16], [1, 3000, 150_001]
    ):
        want = [data(r, count, dtype) for r in range(size)]
        got = [torch.zeros_like(one) for one in want]
        dist.all_gather(got, want[RANK].clone(), group=ours)
        assert all(map(same, got, want)), (dtype, count)
        whole = torch.zeros(count * size, dtype=dtype)
        ours._allgather_base(whole, want[RANK].clone(), c10d.AllgatherOptions()).wait()
        assert same(whole, torch.cat(want)), (dtype, count)
        seen += [*got, whole]
    shapes = [(3, torch.float32), (70_000, torch.float32), (5, torch.int64)]
    want_lists = [[data(r * 31 + i, *shape) for i, shape in enumerate(shapes)] for r in range(size)]
    got_lists = [[torch.zeros_like(one) for one in wanted] for wanted in want_lists]
    ours.allgather_coalesced(
        got_lists, [one.clone() for one in want_lists[RANK]], c10d.AllgatherOptions()
    ).wait()
    assert all(
        same(*both) for pair in zip(got_lists, want_lists, strict=True) for both in zip(*pair, strict=True)
    )
    return digest(*seen, *itertools.chain(*got_lists))


def reduce_scatter(size: int) -> None:
    """The list, and the one tensor; inputs stay as they are."""
    if not member(size):
        return
    ours, _ = GROUPS[size]
    for dtype, op, count in itertools.product(
        [torch.float32, torch.int64, torch.bfloat16], REDUCTIONS, [1, 3000, 90_001]
    ):
        inputs = [[data(r * 10 + to, count, dtype) for to in range(size)] for r in range(size)]
        mine = [one.clone() for one in inputs[RANK]]
        got, again = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(got, mine, getattr(ops, op), group=ours)
        assert all(map(same, mine, inputs[RANK]))
        check_reduced(got, op, [inputs[r][RANK] for r in range(size)], (dtype, op, count))
        options = c10d.ReduceScatterOptions()
        options.reduceOp = getattr(ops, op)
        ours._reduce_scatter_base(again, torch.cat(mine), options).wait()
        assert same(got, again), (dtype, op, count)


def alltoall(size: int) -> None:
    """Equal and unequal parts."""
    if not member(size):
        return
    ours, _ = GROUPS[size]
    for dtype, count in itertools.product([torch.float32, torch.int16], [1, 2000, 60_001]):
        mine = [data(RANK * 10 + to, count, dtype) for to in range(size)]
        got = [torch.zeros(count, dtype=dtype) for _ in range(size)]
        ours.alltoall(got, mine, c10d.AllToAllOptions()).wait()
        assert all(same(got[r], data(r * 10 + RANK, count, dtype)) for r in range(size)), (dtype, count)
        whole = torch.zeros(count * size, dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(mine), group=ours)
        assert same(whole, torch.cat(got))
        # Rank r has r + to + 1 (times count) rows for rank to, and none for itself.
        rows = [[0 if r == to else (r + to + 1) * count for to in range(size)] for r in range(size)]
        sent = [data(RANK * 10 + to, rows[RANK][to], dtype) for to in range(size)]
        came = [rows[r][RANK] for r in range(size)]
        whole = torch.zeros(sum(came), dtype=dtype)
        dist.all_to_all_single(whole, torch.cat(sent), came, rows[RANK], group=ours)
        assert same(whole, torch.cat([data(r * 10 + RANK, rows[r][RANK], dtype) for r in range(size)]))


def rooted(size: int) -> None:
    """gather, scatter and reduce, at each root."""
    if not member(size):
        return
    ours, _ = GROUPS[size]
    for root, count in itertools.product(range(size), [1, 2000, 60_001]):
        want = [data(r, count, torch.float32) for r in range(size)]
        got = [torch.zeros(count) for _ in range(size)] if root == RANK else None
        dist.gather(want[RANK].clone(), got, dst=root, group=ours)
        assert got is None or all(map(same, got, want))
        one = torch.zeros(count)
        dist.scatter(one, [w.clone() for w in want] if root == RANK else None, src=root, group=ours)
        assert same(one, want[RANK])
        mine = want[RANK].clone()
        dist.reduce(mine, root, ops.MAX, group=ours)
        assert same(mine, reduced("MAX", want) if root == RANK else want[RANK])


def messages() -> None:
    """send and recv: to all, from all at once, with tags out of order, of any source."""
    for count in (1, 4000, 200_003):
        sent = [data(RANK * 10 + to, count, torch.float32) for to in range(WORLD)]
        got = [torch.zeros(count) for _ in range(WORLD)]
        others = [r for r in range(WORLD) if r != RANK]
        works = [dist.isend(sent[r], r) for r in others] + [dist.irecv(got[r], r) for r in others]
        for work in works:
            work.wait()
        assert all(same(got[r], data(r * 10 + RANK, count, torch.float32)) for r in others), count
    peer, first = RANK ^ 1, RANK & 1 == 0
    a, b = torch.full((9,), 1.0 * RANK), torch.full((50_000,), 2.0 * RANK)
    if first:
        dist.send(a, peer, tag=1)
        dist.send(b, peer, tag=2)
    else:
        x, y = torch.zeros(9), torch.zeros(50_000)
        late = dist.irecv(y, peer, tag=2)
        dist.recv(x, peer, tag=1)
        late.wait()
        assert same(x, torch.full((9,), 1.0 * peer)) and same(y, torch.full((50_000,), 2.0 * peer))
    if RANK == 0:
        seen = set()
        for _ in range(WORLD - 1):
            x = torch.zeros(3)
            source = dist.recv(x, tag=5)
            assert same(x, torch.full((3,), float(source)))
            seen.add(source)
        assert seen == set(range(1, WORLD))
    else:
        dist.send(torch.full((3,), float(RANK)), 0, tag=5)
    # What it gets must not depend on the order in which peers call collectives and messages.
    work = dist.all_reduce(torch.ones(5), async_op=True) if first else dist.isend(torch.ones(7), peer)
    other = dist.irecv(torch.zeros(7), peer) if first else dist.all_reduce(torch.ones(5), async_op=True)
    other.wait()
    work.wait()
    if first:
        try:
            dist.send(torch.ones(3), peer, tag=9)
        except (RuntimeError, ValueError) as error:
            assert "receives 8 bytes" in str(error), error
        else:
            raise AssertionError("no error")
    else:
        try:
            dist.recv(torch.zeros(2), peer, tag=9)
        except (RuntimeError, ValueError) as error:
            assert "sends 12" in str(error), error
        else:
            raise AssertionError("no error")


def asynchronous() -> None:
    """Works and futures, many at once, waited for in any order."""
    tensors = [data(RANK + i, 1 + 977 * i, torch.float32) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[::3]]
    for future in futures:
        assert isinstance(future.wait(), list)
    for work in reversed(works):
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    for i, tensor in enumerate(tensors):
        check_reduced(tensor, "SUM", [data(r + i, 1 + 977 * i, torch.float32) for r in range(WORLD)], i)
    done: list[Any] = []
    work = dist.all_reduce(torch.ones(4), async_op=True)
    chained = work.get_future().then(lambda future: done.append(future.value()[0].sum().item()))
    chained.wait()
    assert done == [4.0 * WORLD]
    assert work.get_future().done()
    dist.barrier()
    handle = dist.barrier(async_op=True)
    handle.wait()


def chained() -> None:
    """A future's callback that calls a collective and waits for it, as hooks of DDP do; and again in one of its own."""

    def further(depth: int, future: Any) -> Any:
        if not depth:
            return future.value()[0]
        more = dist.all_reduce(future.value()[0].clone(), async_op=True).get_future()
        return more.then(lambda done: further(depth - 1, done)).wait()

    for depth in range(4):
        future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
        got = future.then(lambda done, depth=depth: further(depth, done)).wait()
        assert same(got, torch.full((3,), float(WORLD) ** (depth + 1))), (depth, got)


def overlapping() -> None:
    """Collectives on views of the same memory, one after the other: each sees what the one before did."""
    for count in (12, 60_000):
        table = torch.arange(float(count)).view(3, -1)
        for work in [dist.all_reduce(table.t(), async_op=True) for _ in range(3)]:
            work.wait()
        assert same(table, torch.arange(float(count)).view(3, -1) * WORLD**3), count
        row = torch.ones(count)
        works = [dist.all_reduce(view, async_op=True) for view in (row, row[::2], row[:4], row[1::2], row)]
        for work in works:
            work.wait()
        want = torch.full((count,), float(WORLD**3))
        want[:4] *= WORLD
        assert same(row, want), count
        row, got = torch.ones(count), [torch.zeros(count // 2) for _ in range(WORLD)]
        works = [dist.all_reduce(row, async_op=True), dist.all_gather(got, row[::2], async_op=True)]
        for work in works:
            work.wait()
        assert all(same(one, torch.full((count // 2,), float(WORLD))) for one in got), count


def negated() -> None:
    """Tensors whose memory is not their elements, but minus these."""
    for count in (5, 60_000):
        for view in (
            torch._neg_view(torch.full((count,), 1.0 + RANK)),
            torch.complex(torch.zeros(count), torch.full((count,), 1.0 + RANK)).conj().imag,
        ):
            assert view.is_neg()
            dist.all_reduce(view)
            assert same(view.clone(), torch.full((count,), -float(sum(range(1, WORLD + 1))))), count
            dist.broadcast(view.mul_(1 + RANK), 1)
            assert same(view.clone(), torch.full((count,), -2.0 * sum(range(1, WORLD + 1)))), count
    peer = RANK ^ 1
    got = torch.zeros(4)
    work = dist.isend(torch._neg_view(torch.full((4,), 1.0 + RANK)), peer)
    dist.recv(got, peer)
    work.wait()
    assert same(got, torch.full((4,), -1.0 - peer))


def refused() -> None:
    """Arguments that cannot be are refused at once, and nothing breaks by it."""
    group = world()

    def mine(count: int) -> list[int]:
        return [count if r == RANK else 0 for r in range(WORLD)]

    for call in (
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), ops.MAX),
        lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.complex64), ops.MAX),
        lambda: dist.all_reduce(torch.ones(3), ops.BAND),
        lambda: dist.all_reduce(torch.ones(1).expand(5)),
        lambda: (RANK == 0 and GROUPS[1][0].recv_anysource([torch.ones(1)], 0)) or group.send([], RANK, 0),
        lambda: group.send([torch.ones(1)], RANK, 0),
        lambda: group.send([torch.ones(1)], 77, 0),
        lambda: group.alltoall([torch.ones(1)], [torch.ones(1)], c10d.AllToAllOptions()),
        lambda: dist.all_to_all_single(torch.ones(WORLD), torch.ones(WORLD, dtype=torch.float64)),
        lambda: dist.all_to_all_single(torch.ones(1), torch.ones(9), mine(1), mine(9)),
        lambda: group.allreduce([torch.ones(1), torch.ones(1)], c10d.AllreduceOptions()),
        lambda: group._allgather_base(torch.ones(3), torch.ones(2), c10d.AllgatherOptions()),
    ):
        try:
            call()
        except (ValueError, RuntimeError):
            continue
        raise AssertionError("no error")
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == WORLD


def subgroups() -> None:
    """Groups that overlap, used in turns and at the same time."""
    pairs = [dist.new_group([a, b]) for a, b in ((0, 1), (2, 3), (1, 2), (0, 3))]
    mine = [(group, {0: (0, 1), 1: (2, 3), 2: (1, 2), 3: (0, 3)}[i]) for i, group in enumerate(pairs)]
    for count in (3, 50_000):
        works = []
        for group, members in mine:
            if RANK in members:
                tensor = torch.full((count,), float(RANK + 1))
                works.append(
                    (dist.all_reduce(tensor, group=group, async_op=True), tensor, sum(members) + 2.0)
                )
        whole = torch.ones(count)
        dist.all_reduce(whole)
        for work, tensor, want in works:
            work.wait()
            assert same(tensor, torch.full((count,), want))
        assert same(whole, torch.full((count,), float(WORLD)))


def collect(call: Any, limit_s: float) -> tuple[str, str, float]:
    """What call raises: its type, its text, and how long it took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        took = time.monotonic() - begin
        assert took < limit_s, f"{took} s: {error}"
        return type(error).__name__, str(error), took
    raise AssertionError("no error")
