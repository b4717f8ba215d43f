# SPDX-License-Identifier: BSD-3-Clause
"""rdma-core's own pyverbs tests on the kernel's soft-RoCE: with shiftverbs each ends as it does with pyverbs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

import upstream

DEVICE, GID = "rxe_a0", 1
# What an undisturbed run passes on this kernel; far fewer would mean that something else is wrong.
AT_LEAST = 80


@pytest.fixture(scope="module")
def with_pyverbs() -> upstream.Outcomes:
    """The reference."""
    outcomes = upstream.run("pyverbs", DEVICE, GID)
    print("with pyverbs:", upstream.summary(outcomes))
    assert [status for status, _ in outcomes.values()].count("passed") >= AT_LEAST
    return outcomes


def compare(reference: upstream.Outcomes, env: dict[str, str]) -> None:
    outcomes = upstream.run("shiftverbs", DEVICE, GID, env)
    print("with shiftverbs:", upstream.summary(outcomes))
    differing = upstream.differences(reference, outcomes)
    assert not differing, "\n".join(differing)


def test_without_an_exchanger(with_pyverbs: upstream.Outcomes) -> None:
    """No etcd: every QP is unprotected."""
    compare(with_pyverbs, {})


def test_with_failover_running(with_pyverbs: upstream.Outcomes, etcd: str) -> None:
    """Shadows on the other NIC, pairing, everything: and no test sees a difference."""
    compare(with_pyverbs, {"SHIFTVERBS_ETCD": etcd, "SHIFTVERBS_BACKUP": "rxe_a0=rxe_a1;rxe_a1=rxe_a0"})
