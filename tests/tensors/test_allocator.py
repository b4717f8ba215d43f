# SPDX-License-Identifier: BSD-3-Clause
"""The pool's allocator, against a plain list of what is in use; and the pool, which hears what nobody holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.tensors.allocator import ALIGNMENT, Allocator
from shiftverbs.tensors.errors import PoolError
from shiftverbs.tensors.pool import Pool

SIZE = 64 * ALIGNMENT


@given(
    st.lists(
        st.one_of(st.integers(1, SIZE // 3), st.integers(-1000, -1)),
        max_size=120,
    )
)
def test_pieces_never_overlap_and_come_back_whole(steps):
    """Positive: allocate so many bytes; negative: free one of those in use."""
    allocator = Allocator(SIZE)
    used: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = allocator.allocate(step)
            if offset is None:
                assert allocator.longest < step
                continue
            assert offset % ALIGNMENT == 0 and offset + step <= SIZE
            assert all(offset + step <= o or o + n <= offset for o, n in used.items())
            used[offset] = step
        elif used:
            offset = sorted(used)[step % len(used)]
            del used[offset]
            allocator.free(offset)
        assert allocator.in_use == sum(-(-n // ALIGNMENT) * ALIGNMENT for n in used.values())
    for offset in used:
        allocator.free(offset)
    assert (allocator.in_use, allocator.longest) == (0, SIZE), "neighbours became one"


def test_what_is_not_in_use_cannot_be_freed():
    allocator = Allocator(SIZE)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(offset)
    with pytest.raises(ValueError):
        allocator.allocate(0)
    assert Allocator(0).allocate(1) is None


class Region:
    """An MR."""

    lkey, rkey = 1, 2
    open = 0

    def __init__(self, address: int, nbytes: int) -> None:
        Region.open += 1

    def close(self) -> None:
        Region.open -= 1


@pytest.fixture
def pool():
    Region.open = 0
    return Pool(Region, SIZE, 3 * SIZE)


def test_memory_is_free_when_nobody_looks_at_it(pool):
    block = pool.allocate(100)
    freed: list[Any] = []
    pool.on_free = lambda: freed.append(1)
    view = memoryview(block.array).cast("B")
    del block
    gc.collect()
    assert pool.in_use == ALIGNMENT and not freed
    view[0] = 1
    view.release()
    del view
    gc.collect()
    assert pool.in_use == 0 and freed


def test_what_the_pool_has_no_room_for_lies_apart(pool):
    big = pool.allocate(2 * SIZE)
    assert (pool.in_use, Region.open) == (2 * SIZE, 2)
    assert pool.keys_of(big.address + 5, SIZE) == (1, 2)
    assert pool.allocate(2 * SIZE) is None, "for now"
    assert pool.allocate(SIZE // 2, apart=False) is not None
    del big
    gc.collect()
    assert pool.in_use == 0 and Region.open == 1
    pool.close()
    assert Region.open == 0


def test_more_than_the_limit_is_an_error(pool):
    with pytest.raises(PoolError, match=f"{3 * SIZE + 1} bytes are more than the limit of {3 * SIZE}"):
        pool.allocate(3 * SIZE + 1)
    assert pool.keys_of(12345, 10) is None


def test_what_the_machine_has_not_is_an_error():
    pool = Pool(Region, SIZE, 1 << 62)
    with pytest.raises(PoolError, match="no memory for"):
        pool.allocate(1 << 61)
    assert pool.in_use == 0
    refusing = Pool(Region, SIZE, 3 * SIZE)
    refusing._register = lambda address, nbytes: (_ for _ in ()).throw(OSError("no more regions"))
    with pytest.raises(PoolError, match="no more regions"):
        refusing.allocate(2 * SIZE)
    assert refusing.in_use == 0


def test_memory_outlives_its_pool(pool):
    block = pool.allocate(64)
    pool.close()
    del pool
    gc.collect()
    memoryview(block.array).cast("B")[63:64] = b"x"
