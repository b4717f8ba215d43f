# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that do not make the same calls: an error that names who, and no byte where none was to go."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("needs_torch")

PLAIN = {"SHIFTVERBS_DISABLE": "1"}


def test_ranks_that_do_not_agree_are_named(ranks):
    """On both; and other groups do not care."""
    both = ranks(2, "disagreeing", **PLAIN)
    for what in both.hosts[0]("list(CALLS)"):
        both.begin(f"disagree({what!r}, 2.0)")
        for rank, text in enumerate(both.end(20)):
            assert f"rank {1 - rank}" in text, (what, rank, text)
        both("dist.barrier()")


def test_what_has_failed_is_written_to_no_longer(ranks):
    both = ranks(2, "disagreeing", **PLAIN)
    assert both("closed_before_it_fails()") == [[False, False], []]


@pytest.mark.parametrize("counts", [(100_000, 200_000), (200_000, 100_000)])
def test_nothing_is_written_beyond_a_tensor(ranks, counts):
    both = ranks(2, "disagreeing", **PLAIN)
    both.begin(f"beyond{counts}")
    for rank, (text, changed) in enumerate(both.end(20)):
        assert f"rank {1 - rank}" in text and not changed, (rank, text, changed)
