# SPDX-License-Identifier: BSD-3-Clause
"""CheckpointOnFallback under training: a cable is pulled, and ranks are late, dead, or die while they save."""

from __future__ import annotations

import signal

import pytest
from hosts import HostError

pytestmark = pytest.mark.usefixtures("needs_torch")


@pytest.mark.parametrize("count", [2, 3])
def test_a_fallback_has_all_ranks_save_the_same_step(ranks, faults, count):
    """Fallbacks of both ends, and of each QP, are one pause."""
    all_ranks = ranks(count, "training")
    all_ranks("world().wait_protected(20)")
    all_ranks.begin("checkpointed(60, 0.02)")
    first = all_ranks.hosts[0]
    first.child.expect("at step 10$", 30, first._seen)
    faults.down("a/soft0")
    (*pauses, saved), *others = all_ranks.end()
    assert len(pauses) == 1
    (step, was_saved, why, _) = pauses[0]
    assert was_saved and not why and 10 <= step <= 60
    assert saved == [step]
    for *theirs, theirs_saved in others:
        assert theirs == pauses  # the same weights, too
        assert theirs_saved == []


def test_a_rank_that_is_late_makes_all_resume(ranks):
    both = ranks(2, "training")
    a, b = both.hosts
    options = "timeout_s=0.4, min_interval_s=600"
    a.begin(f"checkpointed(60, {options}, late_s=0)")
    b.begin(f"checkpointed(60, {options}, late_s=3)")
    (pause, saved), (saved_by_b) = a.end(), b.end()
    assert pause[:3] == [20, False, "rank 1 did not pause in time"]
    assert saved == [] and saved_by_b == [[]]  # to b it is over before it comes


def test_a_rank_that_dies_while_it_saves(ranks, faults):
    both = ranks(2, "training")
    a, b = both.hosts
    both("world().wait_protected(20)")
    b.begin("checkpointed(25, 0.02, save_timeout_s=1.0)")
    a.begin("checkpointed(25, 0.02, save_timeout_s=1.0, hang=True)")
    a.child.expect("at step 10$", 30, a._seen)
    faults.down("a/soft0")
    a.child.expect("saving$", 30, a._seen)
    a.child.signal(signal.SIGKILL)
    b.child.expect("paused at", 30, b._seen)
    with pytest.raises(Exception, match="rank 0"):  # its next collective names who is gone
        b.end()
    assert b("1 + 1") == 2


def test_without_a_process_group_it_says_so(ranks):
    both = ranks(2, "training", SHIFTVERBS_DISABLE="1")
    both("dist.destroy_process_group()")
    both("import shiftverbs.torch as backend")
    with pytest.raises(HostError, match="call init_process_group first"):
        both("backend.CheckpointOnFallback(print)")
