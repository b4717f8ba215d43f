# SPDX-License-Identifier: BSD-3-Clause
"""What NICs count of congestion, for Prometheus."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from shiftverbs import softrnic
from shiftverbs.failover.services.totals import Totals
from shiftverbs.shadows import congestion
from shiftverbs.softrnic import fabric, faults
from shiftverbs.telemetry import metrics


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two NICs: mlx5_0 with two ports, and one whose driver has no such counters."""
    monkeypatch.setattr(congestion, "SYSFS", tmp_path)
    for port, values in (
        ("1", {"np_cnp_sent": "5\n", "rp_cnp_handled": "7\n"}),
        ("2", {"np_cnp_sent": "1\n"}),
    ):
        folder = tmp_path / "mlx5_0" / "ports" / port / "hw_counters"
        folder.mkdir(parents=True)
        for name, value in values.items():
            (folder / name).write_text(value)
    (tmp_path / "other0" / "ports" / "1").mkdir(parents=True)
    return tmp_path


def test_real_nics(sysfs: Path) -> None:
    names = ["mlx5_0", "other0", "gone0"]
    assert congestion.read(names) == {"mlx5_0": {"np_cnp_sent": 6, "rp_cnp_handled": 7}}
    (sysfs / "mlx5_0/ports/1/hw_counters/rp_cnp_handled").write_text("nonsense")
    assert congestion.read(names) == {"mlx5_0": {"np_cnp_sent": 6}}


def test_a_nic_that_goes_away_in_the_middle(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder was there, and is not any more when it is listed."""

    def gone(*args: Any) -> Any:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "listdir", gone)
    assert congestion.read(["mlx5_0"]) == {}


def test_software_nics(sysfs: Path, softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process's host, by their rails; a real NIC beside them is read as ever."""
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))
    monkeypatch.setenv("SOFTRNIC_HOST", "b")
    monkeypatch.setattr(softrnic, "is_enabled", lambda: True)
    faults.register("a"), faults.register("b")
    fabric.limit("b/rail0", 1e9)
    assert congestion.read(["soft0", "soft1", "mlx5_0"]) == {
        "soft0": dict.fromkeys(congestion.COUNTERS, 0),
        "soft1": dict.fromkeys(faults.DEVICE_COUNTERS, 0),
        "mlx5_0": {"np_cnp_sent": 6, "rp_cnp_handled": 7},
    }
    fabric.limit("b/rail1", 1e9, pfc=True)
    names = {congestion.of_priority(name, 7) for name in congestion.PRIORITY_COUNTERS}
    assert names == {"rx_prio7_pause", "tx_prio7_pause", "rx_prio7_pause_duration", "rx_prio7_discards"}
    [found] = congestion.read(["soft1"]).values()
    assert found.keys() >= names and len(found) == len(congestion.COUNTERS) + 8 * 4
    monkeypatch.setenv("SOFTRNIC_DIR", "/nowhere/at/all")
    assert congestion.read(["soft0"]) == {}


def test_prometheus(sysfs: Path) -> None:
    nic = SimpleNamespace(name="mlx5_0", dead=True)
    driver = SimpleNamespace(connections={}, totals=Totals(), directory=SimpleNamespace(away=None))
    runtime: Any = SimpleNamespace(
        driver=driver, nics=SimpleNamespace(all=lambda: [nic]), exchanger=SimpleNamespace(broker_pid=None)
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(runtime))  # type: ignore[arg-type]
    value = registry.get_sample_value
    assert value("shiftverbs_nic_np_cnp_sent_total", {"device": "mlx5_0"}) == 6
    assert value("shiftverbs_nic_rp_cnp_handled_total", {"device": "mlx5_0"}) == 7
    assert value("shiftverbs_nic_rp_cnp_ignored_total", {"device": "mlx5_0"}) is None
    assert value("shiftverbs_nic_rx_prio_pause_total", {"device": "mlx5_0", "priority": "3"}) is None


def test_priorities_for_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"soft0": {"rx_prio3_pause": 5, "rx_prio3_pause_duration": 70}}
    monkeypatch.setattr(congestion, "read", lambda _: counted)
    driver = SimpleNamespace(connections={}, totals=Totals(), directory=SimpleNamespace(away=None))
    runtime: Any = SimpleNamespace(
        driver=driver, nics=SimpleNamespace(all=list), exchanger=SimpleNamespace(broker_pid=None)
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(runtime))  # type: ignore[arg-type]
    labels = {"device": "soft0", "priority": "3"}
    assert registry.get_sample_value("shiftverbs_nic_rx_prio_pause_total", labels) == 5
    assert registry.get_sample_value("shiftverbs_nic_rx_prio_pause_duration_total", labels) == 70
    assert registry.get_sample_value("shiftverbs_nic_tx_prio_pause_total", labels) is None


def test_the_names_are_the_software_nics_own() -> None:
    assert tuple(congestion.COUNTERS) == faults.NIC_COUNTERS + faults.DEVICE_COUNTERS
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert all(
        f"`shiftverbs_nic_{name}_total`" in text
        for name in (*congestion.COUNTERS, *congestion.PRIORITY_COUNTERS)
    )
