# SPDX-License-Identifier: BSD-3-Clause
"""`shiftverbs status`, `top` and the metrics of real processes: before, while and after a cable is out."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn, wait_until
from hosts import HOME, Host, Network, go

from shiftverbs.telemetry import publisher

Show = Callable[..., str]


@pytest.fixture
def run_dir(tmp_path: Path, network: Network) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    network.env["SHIFTVERBS_RUN_DIR"] = str(path)
    return path


@pytest.fixture
def show(spawn: Spawn, run_dir: Path) -> Show:
    """What a command prints on a terminal of 80 columns."""

    def output(*arguments: str) -> str:
        env = {"SHIFTVERBS_RUN_DIR": str(run_dir), "COLUMNS": "80", "NO_COLOR": "1"}
        text = spawn("-m", "shiftverbs", *arguments, softrnic=None, env=env, name=arguments[0]).succeed(20)
        assert arguments[-1] == "--json" or all(len(line) <= 80 for line in text.splitlines()), text
        return text

    return output


def processes(show: Show) -> dict[str, Any]:
    """By host."""
    found = json.loads(show("status", "--json"))
    assert found["silent"] == []
    return {each["host"]: each for each in found["processes"]}


def sample(host: Host, name: str) -> float:
    """One of a host's metrics, over HTTP."""
    with urllib.request.urlopen(f"http://127.0.0.1:{host('port')}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_a_cable_is_pulled_and_put_back(network: Network, faults: Any, run_dir: Path, show: Show) -> None:
    a, b = network.protected()
    text = show("status")
    assert text.count("1 PROTECTED  SWITCHes 0  home again 0") == 2
    assert text.count("soft0 ACTIVE  soft1 ACTIVE") == 2

    go(faults, "away", a, b)
    found = processes(show)
    assert set(found) == {"a", "b"}
    for process in found.values():
        (qp,) = process["qps"]
        assert (qp["status"], qp["device"], qp["path"], qp["pair"]) == ("PROTECTED", "soft0", "soft1", 1)
        assert qp["away_s"] > 0 and qp["last_failure"]["why"].startswith("soft0: ")
        assert process["totals"]["switches"] == 1
        assert process["exchanger"]["answers"] and process["exchanger"]["broker"] is not None
    nics = {nic["name"]: nic["state"] for nic in found["a"]["nics"]}
    assert nics == {"soft0": "DOWN", "soft1": "ACTIVE"}
    text = show("top", "--count", "2", "--interval", "0.1")
    assert "soft0 DOWN" in text and "msg/s" in text and re.search(r"soft1 +PROTECTED +FALLBACK", text)

    faults.up("a/soft0")
    for end in (a, b):
        end(f"ep.wait({HOME!r}, 20)")
    found = processes(show)
    assert found["a"]["totals"]["homecomings"] == 1 and found["a"]["totals"]["away_s"] > 0
    assert show("status").count("home again 1") == 2


def test_a_killed_process_is_gone_and_its_socket_too(network: Network, run_dir: Path, show: Show) -> None:
    a, b = network.protected()
    pid = a.child.pid
    (left,) = run_dir.glob(f"{pid}-*.sock")
    assert stat.S_IMODE(left.stat().st_mode) & 0o077 == 0
    assert not publisher.remove_if_dead(left)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: set(processes(show)) == {"b"}, 20, "only the other process is shown")
    assert not left.exists()
    assert b("1") == 1


def test_a_forked_child_does_not_answer_for_its_parent(network: Network, run_dir: Path, show: Show) -> None:
    """Its copy of the socket would let whoever asks wait for a process that is gone."""
    a = network.host("a")
    a("import os, signal")
    a("context = device.Context(name='soft0'); dom = pd.PD(context)")
    pid = a.child.pid
    (path,) = run_dir.glob(f"{pid}-*.sock")
    a("child = os.fork() or signal.pause()")
    child = a("child")
    try:
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: publisher.remove_if_dead(path), 20, "nobody listens there")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_process_that_ends_takes_its_socket_away(network: Network, run_dir: Path) -> None:
    a = network.host("a")
    a("context = device.Context(name='soft0'); dom = pd.PD(context)")
    assert len(list(run_dir.glob("*.sock"))) == 1
    assert a.child.process.stdin is not None
    a.child.process.stdin.close()
    assert a.child.wait(20) == 0
    assert list(run_dir.glob("*.sock")) == []


def test_a_directory_too_deep_for_a_socket_costs_no_protection(network: Network, tmp_path: Path) -> None:
    network.env["SHIFTVERBS_RUN_DIR"] = str(tmp_path / ("x" * 100))
    a, _ = network.protected()
    a.child.expect("shiftverbs status will not see this process: AF_UNIX path too long")


def test_metrics_over_http(network: Network, faults: Any, run_dir: Path) -> None:
    network.env["SHIFTVERBS_METRICS"] = "0"
    a, b = network.protected()
    for end in (a, b):
        end("from shiftverbs.failover import runtime; port = runtime.current().metrics_port")
    home = 'shiftverbs_qps{carrier="soft0",device="soft0",status="PROTECTED"}'
    away = 'shiftverbs_qps{carrier="soft1",device="soft0",status="PROTECTED"}'
    assert sample(a, home) == 1 and sample(a, "shiftverbs_qps_away") == 0
    assert sample(a, "shiftverbs_etcd_up") == sample(a, "shiftverbs_broker_up") == 1
    go(faults, "away", a, b)
    assert sample(a, away) == 1 and sample(a, "shiftverbs_qps_away") == 1
    assert (
        sample(a, 'shiftverbs_nic_up{device="soft0"}') == 0
        and sample(a, 'shiftverbs_nic_up{device="soft1"}') == 1
    )
    assert sample(a, "shiftverbs_switches_total") == 1
    assert 0 < sample(a, "shiftverbs_away_seconds_total") < sample(a, "shiftverbs_away_seconds_total")
    b.child.close()
    a("ep.qp.close()")
    assert sample(a, "shiftverbs_away_seconds_total") > 0
    assert sample(a, "shiftverbs_qps_away") == 0


def test_two_processes_share_a_range_of_ports(network: Network, run_dir: Path) -> None:
    """And a third that finds none free works without."""
    first = network.host("a", SHIFTVERBS_METRICS="0")
    first("context = device.Context(name='soft0'); dom = pd.PD(context)")
    first("from shiftverbs.failover import runtime; port = runtime.current().metrics_port")
    taken = first("port")
    second = network.host("a", SHIFTVERBS_METRICS=str(taken))
    second("context = device.Context(name='soft0'); dom = pd.PD(context)")
    assert second("__import__('shiftverbs.failover.runtime', fromlist=['']).current().metrics_port is None")
    second.child.expect("no port is free")
