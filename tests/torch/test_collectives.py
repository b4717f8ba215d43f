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


def test_no_thread_of_a_group_takes_a_signal(four_ranks):
    """The kernel would choose it for one that the application waits for. torch's own are no threads of Python's."""
    four_ranks("chained()")
    four_ranks("""
import signal, threading
def blocked(thread):
    with open(f"/proc/self/task/{thread.native_id}/status") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
""")
    threads = "[t for t in threading.enumerate() if t is not threading.main_thread()]"
    assert all(
        any("shift-" in name for name in names) for names in four_ranks(f"[t.name for t in {threads}]")
    )
    assert four_ranks(f"[t.name for t in {threads} if not blocked(t) >> signal.SIGTERM - 1 & 1]") == [[]] * 4
