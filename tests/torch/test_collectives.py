# SPDX-License-Identifier: BSD-3-Clause
"""Each collective, against gloo or a local computation, in groups of one to four ranks of four processes."""

from __future__ import annotations

import pytest

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "what", ["allreduce", "allreduce_large", "coalesced", "sparse", "broadcast", "allgather"]
)
def test_every_rank_has_the_same_bits(four_ranks, what, size):
    digests = four_ranks(f"{what}({size})")
    assert len(set(digests[:size])) == 1 and digests[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ["reduce_scatter", "alltoall", "rooted"])
def test_results(four_ranks, what, size):
    four_ranks(f"{what}({size})")


@pytest.mark.parametrize(
    "what", ["messages", "asynchronous", "chained", "overlapping", "negated", "refused", "subgroups"]
)
def test_beside_the_collectives(four_ranks, what):
    four_ranks(f"{what}()")


def test_everything_is_protected(four_ranks):
    assert four_ranks("world().wait_protected(20)") == [True] * 4
