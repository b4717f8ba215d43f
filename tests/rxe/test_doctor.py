# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs doctor` on the kernel's soft-RoCE: real traffic over each NIC, to its backup and home; a cut cable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MAP = "rxe_a0=rxe_a1;rxe_a1=rxe_a0"


def examine(etcd: str, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run it; returns (exit status, {name: check})."""
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "doctor", "--json"],
        env=os.environ | {"SHIFTVERBS_ETCD": etcd, "SHIFTVERBS_BACKUP": MAP, **env},
        stdout=subprocess.PIPE,
        timeout=250,
    )
    print(done.stdout.decode())
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def red(checks: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in checks.items() if check["ok"] is False}


def test_traffic_moves_to_the_backup_and_home(etcd: str, tmp_path: Path) -> None:
    _, checks = examine(etcd, SHIFTVERBS_PEER_DEADLINE_MS="8000", SHIFTVERBS_BROKER=str(tmp_path / "broker"))
    # The devices of the other host have no backup in this host's map, and the doctor says so.
    assert not {name for name in red(checks) if "rxe_a" in name or "rxe" not in name}
    for one, other in (("rxe_a0", "rxe_a1"), ("rxe_a1", "rxe_a0")):
        steps = checks[f"traffic {one} to {other} and back"]["found"]
        assert steps == f"512 KiB on {one}, then 512 KiB on {other}, then 512 KiB on {one}"


def test_cut_cable_is_red(etcd: str, tmp_path: Path) -> None:
    subprocess.run(["ip", "link", "set", "sa1", "down"], check=True)
    try:
        status, checks = examine(etcd, SHIFTVERBS_BROKER=str(tmp_path / "broker"))
    finally:
        subprocess.run(["ip", "link", "set", "sa1", "up"], check=True)
    assert status == 1
    assert {"device rxe_a1", "backup of rxe_a0"} <= red(checks)
    assert checks["device rxe_a1"]["remedy"]
