# SPDX-License-Identifier: BSD-3-Clause
"""Failover and recovery in two processes, for each kind of traffic and each fault, every byte checked.

The machinery is the demo's (shiftverbs/demo), with short phases. Unlike there, the four faults of one kind of
traffic hit the same connection, one after the other.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shiftverbs.commands.demo.etcd_server import EtcdServer
from shiftverbs.commands.demo.network import SoftNetwork
from shiftverbs.commands.demo.options import FAULTS, TRAFFIC, Plan
from shiftverbs.commands.demo.scenario import Lab, at_home, away
from shiftverbs.softrnic import faults

PLAN = Plan(
    traffic=tuple(TRAFFIC),
    faults=tuple(FAULTS),
    warm_s=0.1,
    fault_s=0.15,
    home_s=0.1,
    reconnect=False,
    seed=3,
)


@pytest.fixture(scope="module")
def lab():
    with SoftNetwork() as network, EtcdServer() as etcd:
        lab = Lab(PLAN, network, etcd.endpoint, lambda text: print(text, flush=True), lambda pair: None)
        try:
            yield lab
        finally:
            lab.end_hosts()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_traffic_survives_and_comes_home(lab, traffic, fault):
    result = lab.run(traffic, fault)
    assert result.problem is None
    assert result.ok
    assert result.messages > 0 and result.bytes >= result.messages * 32768
    assert (result.lost, result.duplicated, result.reordered, result.corrupt) == (0, 0, 0, 0)
    if result.switches == 1:
        assert result.states == ["DEFAULT", "FALLBACK", "WAIT_SIGNALED", "WAIT_DRAINED", "DEFAULT"]
    else:  # on a machine busy enough to starve a host for 100 ms the backup failed too, and SWITCH came home
        assert result.states[:2] == ["DEFAULT", "FALLBACK"] and result.states[-1] == "DEFAULT"
    assert result.detect_ms > 0 and result.fallback_ms > 0 and result.failback_ms > 0


def packets(rules):
    """Return how many packets each device has handled: rules that count and never drop."""
    return {name: faults.rule(rule).matched for name, rule in rules.items()}


def test_packets_on_the_wire_agree_with_what_shift_says(lab):
    """Counted by the NICs: rail0, rail1 through the failure, rail0 again; and then rail1 is not needed."""
    lab.run("send", "switch")  # a connection that is up and at home, or none
    pair = lab.protected("send")
    devices = [f"{host}/soft{n}" for host in "ab" for n in (0, 1)]

    def busy_during(seconds):
        rules = {name: faults.drop(name, nth=0xFFFFFFFF) for name in devices}
        pair.run_for(seconds)
        counted = packets(rules)
        for rule in rules.values():
            faults.undrop(rule)
        # The NICs' own pings go on everywhere: a few a second, against thousands.
        return {name for name, count in counted.items() if count > 200}

    try:
        pair.ask_both("start")
        assert busy_during(0.3) == {"a/soft0", "b/soft0"}
        faults.down("b/soft0")
        pair.wait_for(lambda a, b: away(a) and away(b), 10, "both on the backup")
        assert busy_during(0.3) == {"a/soft1", "b/soft1"}
        faults.up("b/soft0")
        pair.wait_for(lambda a, b: at_home(a) and at_home(b), 20, "both at home")
        assert busy_during(0.3) == {"a/soft0", "b/soft0"}
        before = pair.b.call("status")
        faults.down("a/soft1")
        pair.run_for(0.3)
        after = pair.b.call("status")
        assert after["checked"] > before["checked"] + 50, "the backup's failure disturbs nobody"
        assert after["shift"]["state"] == "DEFAULT" and after["error"] is None
    finally:
        lab.network.heal()
        lab.end_hosts()


@pytest.mark.parametrize("fault", FAULTS)
def test_plain_pyverbs_dies_of_the_same_fault(lab, fault):
    """The faults are real: without us the same traffic ends with the retry counter exceeded."""
    result = lab.run_baseline("write_imm", fault)
    assert result.ok and result.error == "RETRY_EXC_ERR"


def test_demo_command_end_to_end(tmp_path):
    """The command itself, for one scenario: tables on standard error, the JSON alone on standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs", "demo", "--quick", "--traffic=send", "--fault=switch", "--json=-"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    (scenario,) = content["scenarios"]
    assert scenario["ok"] and scenario["traffic"] == "send" and scenario["fault"] == "switch"
    (baseline,) = content["baseline"]
    assert baseline == {"traffic": "send", "fault": "switch", "survived": False, "error": "RETRY_EXC_ERR"}
    assert "1 of 1 scenarios verified; plain pyverbs died in 1 of 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_demo_command_cleans_up_when_it_is_ended(tmp_path, number):
    """No etcd, no host, no folder is left behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shiftverbs", "demo", "--no-baseline", "--plain", "--seconds=30"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        for line in process.stdout:
            if "MB/s" in line and "traffic on the default NICs" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3, "etcd and two hosts"
        process.send_signal(number)
        output = process.stdout.read()
        assert process.wait(30) == 128 + number, output
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert list(tmp_path.iterdir()) == []
