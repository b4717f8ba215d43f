# SPDX-License-Identifier: BSD-3-Clause
"""The demo's conversation with its hosts: every wait ends, and says what did not happen."""

import os
import signal
import sys

import pytest
from harness import stop_process

from shiftverbs.commands.demo.host import DemoError, Host, HostPair
from shiftverbs.commands.demo.network import SoftNetwork


@pytest.fixture
def pair():
    with (
        SoftNetwork() as network,
        HostPair("pyverbs", lambda host: network.environment(host, os.environ), print) as pair,
    ):
        yield pair


def test_a_host_that_dies_is_named(pair):
    os.kill(pair.a.pid, signal.SIGKILL)
    with pytest.raises(DemoError, match="host a ended with status -9"):
        pair.a.call("status", timeout_s=10)
    with pytest.raises(DemoError, match="host a ended with status -9"):
        pair.run_for(10)


def test_a_host_that_does_not_answer_is_named(pair):
    stop_process(pair.b.pid)
    try:
        with pytest.raises(DemoError, match="gave no answer to 'status' within"):
            pair.b.call("status", timeout_s=0.3)
    finally:
        os.kill(pair.b.pid, signal.SIGCONT)


def test_a_failing_command_is_shown_with_the_hosts_traceback(pair):
    with pytest.raises(
        DemoError, match=r"(?s)host a 'open' failed: .*soft9.*standard error ends:.*Traceback"
    ) as failed:
        pair.a.call("open", traffic="send", device="soft9", role=0, seed=1)
    assert "workload.py" in str(failed.value)
    assert pair.a.call("status")["error"] is None, "the program goes on"


def test_waiting_has_a_deadline_and_tells_both_hosts_stories(pair):
    pair.connect("send", lambda host: "soft0", 1)
    pair.ask_both("start")
    with pytest.raises(
        DemoError, match=r"(?s)pigs fly: not within 0.2 s.*host a: .*\"sent\".*host b: "
    ) as failed:
        pair.wait_for(lambda a, b: False, 0.2, "pigs fly")
    assert "checked" in str(failed.value)


def test_close_ends_a_host_that_hangs():
    host = Host("a", "pyverbs", os.environ)
    host.wait_ready()
    stop_process(host.pid)
    host.close(timeout_s=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(host.pid, 0)


def test_program_refuses_other_packages():
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "shiftverbs.commands.demo.workload", "os"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and "usage" in done.stderr


def test_the_networks_environment_is_our_own():
    with SoftNetwork() as network:
        base = {"PATH": "/bin", "SHIFTVERBS_DISABLE": "1", "SOFTRNIC": "null", "SOFTRNIC_LIBRARY": "/x.so"}
        env = network.environment("b", base)
        assert env == {
            "PATH": "/bin", "SOFTRNIC": "1", "SOFTRNIC_HOST": "b", "SOFTRNIC_DIR": network.directory,
            "SOFTRNIC_LIBRARY": "/x.so", "SHIFTVERBS_RUN_DIR": os.path.join(network.directory, "run"),
        }  # fmt: skip
        assert os.environ["SOFTRNIC_DIR"] == network.directory
    assert os.environ.get("SOFTRNIC_DIR") != network.directory
    assert not os.path.exists(network.directory)
