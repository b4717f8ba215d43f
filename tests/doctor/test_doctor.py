# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs doctor` on the software RNIC: green where all is well, red with a remedy for each thing that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import EtcdServer, Spawn, free_port, wait_until

from shiftverbs.softrnic import faults


@pytest.fixture
def examine(spawn: Spawn, softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run the doctor with these variables; returns (exit status, {name: check})."""
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))

    def run(softrnic: str | None = "1", **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
        child = spawn("-m", "shiftverbs", "doctor", "--json", softrnic=softrnic, env=env)
        status = child.wait(120)
        content = json.loads(child.output[child.output.index("{") :])
        assert content["ok"] == (status == 0)
        for check in content["checks"]:
            assert bool(check["remedy"]) == (check["ok"] is False), check
        return status, {check["name"]: check for check in content["checks"]}

    return run


def red(checks: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in checks.items() if check["ok"] is False}


def test_healthy_machine_is_green(examine: Callable[..., Any], shared_etcd: EtcdServer, job: str) -> None:
    status, checks = examine(SHIFTVERBS_ETCD=shared_etcd.endpoint, SHIFTVERBS_JOB=job)
    assert status == 0 and not red(checks)
    assert checks["devices"]["found"] == "soft0, soft1"
    assert checks["backup of soft0"]["found"] == "soft1"
    steps = checks["traffic soft0 to soft1 and back"]["found"]
    assert steps == "512 KiB on soft0, then 512 KiB on soft1, then 512 KiB on soft0"
    assert "traffic soft1 to soft0 and back" in checks
    # By the broker, which is told at the end; a lease would last longer.
    wait_until(lambda: not shared_etcd.items(f"/shiftverbs/{job}/"), 5, "nothing is left behind")


def test_port_down_and_no_etcd(examine: Callable[..., Any]) -> None:
    faults.register("a", "1")
    faults.down("a/soft1")
    status, checks = examine()
    assert status == 1
    assert red(checks) == {"device soft1", "backup of soft0", "etcd"}
    assert "DOWN" in checks["device soft1"]["found"]
    assert checks["traffic on soft0"]["ok"], "the NIC itself is well"


def test_nic_that_loses_everything_and_etcd_away(examine: Callable[..., Any]) -> None:
    faults.register("a", "1")
    faults.drop("a/soft0", count=0)
    status, checks = examine(SHIFTVERBS_ETCD=f"127.0.0.1:{free_port()}")
    assert status == 1
    assert red(checks) == {"etcd", "traffic on soft0"}
    assert "RETRY_EXC_ERR" in checks["traffic on soft0"]["found"]
    assert checks["traffic on soft1"]["ok"]


def test_dead_nic_and_a_backup_that_does_not_exist(examine: Callable[..., Any]) -> None:
    faults.register("a", "1")
    faults.kill("a/soft1")
    status, checks = examine(SHIFTVERBS_BACKUP="soft0=soft7")
    assert status == 1
    assert {"device soft1", "backups", "etcd"} <= red(checks)
    assert "soft7" in checks["backups"]["found"]


def test_no_device_and_a_bad_variable(examine: Callable[..., Any]) -> None:
    status, checks = examine(softrnic=None, SHIFTVERBS_PEER_DEADLINE_MS="soon")
    assert status == 1
    assert {"configuration", "devices"} <= red(checks)
    assert "SHIFTVERBS_PEER_DEADLINE_MS" in checks["configuration"]["found"]
    assert checks["etcd"]["ok"] is None


def test_people_get_words(spawn: Spawn) -> None:
    child = spawn("-m", "shiftverbs", "doctor", softrnic=None)
    assert child.wait(60) == 1
    assert "RED    devices: there is no RDMA device" in child.output
    assert "remedy: failover needs two" in child.output and "findings are red" in child.output
