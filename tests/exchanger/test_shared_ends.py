# SPDX-License-Identifier: BSD-3-Clause
"""A shared broker that stands still or is told to end: who waits for it leaves nothing behind and errs on no side."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import Child, Spawn, stop_process

from exchanger.around import launch, running, wait_until
from exchanger.conftest import EtcdWorld
from exchanger.test_broker_stuck import pid_of
from exchanger.test_shared_by_default import APPLICATION, make, start
from exchanger.test_shared_by_default import config as config
from exchanger.test_shared_by_default import run_dir as run_dir
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, socket_path
from shiftverbs.exchanger import start as start_module


def waiting() -> list[threading.Thread]:
    """Threads that wait for the end of a broker that stands still."""
    return [thread for thread in threading.enumerate() if "_wait_for_the_end" in thread.name]


def test_a_child_forked_meanwhile_keeps_no_broker_alive(
    etcd_world: EtcdWorld, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a copy of the connection on which its parent waits for the broker's first word."""
    monkeypatch.setattr(start_module, "LOOK_S", 0.3)
    first = make(etcd_world, config)
    first.next(Connected)
    broker = pid_of(first)
    first.exchanger.close()
    stop_process(broker)
    child = 0
    try:
        one = make(etcd_world, config)
        one.next(Connected, 60)
        assert waiting(), "a thread waits"
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        os.kill(broker, signal.SIGCONT)
        wait_until(lambda: not waiting(), 20, "it has answered")
        one.exchanger.close()
        wait_until(lambda: not running(broker), 15, "it ends, 2 s after its last client")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker, signal.SIGKILL)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_who_was_suspended_too_ends_no_broker_for_that(
    spawn: Spawn, etcd_world: EtcdWorld, config: Config, run_dir: Path
) -> None:
    """Looks are counted, not seconds: who was stopped as long saw none of them."""
    first = make(etcd_world, config.replace(broker_idle_exit_s=60))
    first.next(Connected)
    broker = pid_of(first)
    first.exchanger.close()
    stop_process(broker)
    late = APPLICATION.replace("broker_idle_exit_s=2", "broker_idle_exit_s=60")
    child = launch(spawn, etcd_world, late, SHIFTVERBS_BROKER="", SHIFTVERBS_RUN_DIR=str(run_dir), KEYS="1 2")
    try:
        assert int(child.expect(r"^broker (\d+)", 60)[1]) != broker
        child.signal(signal.SIGSTOP)
        time.sleep(24.0)  # it would have waited for 22.5 s
        child.signal(signal.SIGCONT)
        time.sleep(1.0)  # a moment after it, as on a busy host
        assert running(broker), "it was looked at for 7.5 s and a moment"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker, signal.SIGKILL)


def test_one_that_was_started_by_hand_and_stands_still_holds_up_nobody(
    spawn: Spawn, etcd_world: EtcdWorld, config: Config, run_dir: Path
) -> None:
    """Where processes look for the one they share."""
    path = socket_path.of_host(config)
    env = {"SHIFTVERBS_ETCD": etcd_world.server.endpoint, "SHIFTVERBS_JOB": etcd_world.job}
    broker = spawn("-m", "shiftverbs.exchanger.broker", "--socket", path, host=None, softrnic=None, env=env)
    wait_until(lambda: os.path.exists(path), what="it listens")
    first = make(etcd_world, config)
    first.next(Connected)
    assert pid_of(first) == broker.pid
    first.exchanger.close()
    broker.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        make(etcd_world, config).next(Connected, 60)
        took_s = time.monotonic() - began
    finally:
        broker.signal(signal.SIGKILL)
    assert took_s < config.require_deadline_ms / 1000 - 5, took_s


def test_who_reckons_time_otherwise_takes_nobodys_broker_for_ended(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path
) -> None:
    """In a time namespace of its own, when a process began is another number."""
    command = ["--time", "--boottime", "100000"]
    if shutil.which("unshare") is None or subprocess.run(["unshare", *command, "true"]).returncode:
        pytest.skip("this machine allows no time namespaces")
    _, broker = start(spawn, etcd_world, run_dir, "1 2")
    env = {
        "SHIFTVERBS_ETCD": etcd_world.server.endpoint,
        "SHIFTVERBS_JOB": etcd_world.job,
        "SHIFTVERBS_RUN_DIR": str(run_dir),
        "TESTS": str(Path(__file__).resolve().parents[1]),
        "KEYS": "2 1",
    }
    source = [*command, sys.executable, "-c", APPLICATION]
    other: Child = spawn(*source, host=None, softrnic=None, env=env, program="unshare")
    other.expect(r"^broker (\d+)", 60)
    _, third = start(spawn, etcd_world, run_dir, "3 1")
    assert third == broker, "it is there still, and found"


# Is told to end when its socket is there, and before it serves.
TOLD_EARLY = """
import os, signal, sys
from shiftverbs.exchanger import broker
real = broker.bind_socket
def bind(path):
    sock = real(path)
    os.kill(os.getpid(), int(sys.argv[2]))
    return sock
broker.bind_socket = bind
sys.exit(broker.main(["--socket", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_broker_that_is_told_to_end_as_it_starts_takes_its_path_away(
    spawn: Spawn, etcd_world: EtcdWorld, softrnic_dir: Path, number: signal.Signals
) -> None:
    path = str(softrnic_dir / "b.sock")
    env = {"SHIFTVERBS_ETCD": etcd_world.server.endpoint}
    broker = spawn("-c", TOLD_EARLY, path, str(int(number)), host=None, softrnic=None, env=env)
    assert broker.wait() == 0, broker.output
    assert not os.path.exists(path)
