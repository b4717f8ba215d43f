# SPDX-License-Identifier: BSD-3-Clause
"""QPs that rdma_cm connects, on the kernel's soft-RoCE."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "connected_by_cm.py"


def test_a_qp_connected_by_rdma_cm_is_protected(etcd: str) -> None:
    """It survives a pulled cable and comes home; a CMID's own QPs are unprotected, and say why."""
    env = {
        **os.environ,
        "SHIFTVERBS_ETCD": etcd,
        "SHIFTVERBS_BACKUP": "rxe_a0=rxe_a1;rxe_b0=rxe_b1",
        "SHIFTVERBS_PEER_DEADLINE_MS": "8000",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=240
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "of a CMID's own: UNPROTECTED: its PD is not a shiftverbs PD",
        "protected",
        "away on rxe_a1 rxe_b1",
        "home on rxe_a0 rxe_b0",
        "over",
    ]
