# SPDX-License-Identifier: BSD-3-Clause
"""A shared broker and the worst that one of its processes, or its host, can do to it: the others hardly notice."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn, free_port, stop_process

from exchanger.around import running, wait_until
from exchanger.conftest import EtcdWorld, Watched, publish_qp
from exchanger.test_broker_start import gate as gate
from exchanger.test_broker_stuck import pid_of
from exchanger.test_shared_by_default import config as config
from exchanger.test_shared_by_default import make, start
from exchanger.test_shared_by_default import run_dir as run_dir
from exchanger.test_shared_limits import ByHand
from exchanger.test_shared_limits import by_hand as by_hand
from exchanger.test_tls_login import certificates as certificates
from exchanger.test_tls_login import tls_config
from exchanger.test_tls_login import tls_etcd as tls_etcd
from shiftverbs.config import SHARED_BROKER, Config
from shiftverbs.exchanger import Connected, Unavailable, records, socket_path, wire
from shiftverbs.exchanger import etcd as etcd_module
from shiftverbs.exchanger.etcd import EtcdExchanger


def test_one_that_fails_late_again_and_again_is_not_shared_for_ever(
    etcd_world: EtcdWorld, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow host gRPC's loading takes longer than a broker needs to be called stable."""
    monkeypatch.setattr(etcd_module, "STABLE_S", 0.1)
    with socket_path.bind_socket(socket_path.of_host(config)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        sock.recv(1 << 16)
                        for frame in (
                            {"ev": "hello", "pid": os.getpid(), "pid_namespace": None},
                            {"ev": "starting", "phase": "the broker loads gRPC and etcd3"},
                        ):
                            sock.sendall(wire.encode(frame))
                        time.sleep(0.2)  # what is called long here
                        sock.sendall(wire.encode({"ev": "fatal", "reason": "no module named grpc"}))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            one = make(etcd_world, config)
            one.next(Unavailable)
            one.next(Connected, timeout_s=20)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("what", ["mounts", "root", "groups", "limits", "turns", "records"])
def test_whose_broker_would_fare_otherwise_shares_none(
    config: Config, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A broker reads files, has limits, a priority and a release's records, which are those of who starts it."""
    path = socket_path.of_host(config)
    real_namespace, real_stat, real_limit = wire.namespace, os.stat, resource.getrlimit
    if what == "mounts":
        monkeypatch.setattr(wire, "namespace", lambda kind: 1 if kind == "mnt" else real_namespace(kind))
    elif what == "root":

        def other_root(name: Any, *args: Any, **options: Any) -> os.stat_result:
            return real_stat("/proc/self" if name == "/" else name, *args, **options)

        monkeypatch.setattr(os, "stat", other_root)
    elif what == "groups":
        monkeypatch.setattr(os, "getgroups", lambda: [4711])
    elif what == "limits":
        monkeypatch.setattr(
            resource,
            "getrlimit",
            lambda kind: (1 << 33, 1 << 33) if kind == resource.RLIMIT_AS else real_limit(kind),
        )
    elif what == "turns":
        monkeypatch.setattr(os, "getpriority", lambda *_: 19)
    else:
        monkeypatch.setattr(records, "VERSION", records.VERSION + 1)
    assert socket_path.of_host(config) != path


# Loses sight of the certificates (its settings are read before), and tells what it hears of etcd first.
BLIND = """
import os, subprocess, sys
sys.path.insert(0, os.environ["TESTS"])
from exchanger.conftest import Watched
from shiftverbs.config import Config
from shiftverbs.exchanger import Unavailable
from shiftverbs.exchanger.etcd import EtcdExchanger
config = Config.from_environ()
subprocess.run(["mount", "-t", "tmpfs", "none", os.path.dirname(config.etcd_ca)], check=True)
one = Watched(EtcdExchanger(config.replace(etcd_backoff_max_ms=300)))
print("unavailable:", one.next(Unavailable, 60).reason, flush=True)
one.until(lambda _: False, 600)
"""


def test_who_cannot_read_the_certificates_keeps_nobody_from_etcd(
    spawn: Spawn, tls_etcd: str, certificates: Path, run_dir: Path, job: str
) -> None:
    """A container without them, in the host's networks and process ids, came first."""
    command = ["--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run(["unshare", *command, "true"]).returncode:
        pytest.skip("this machine allows no mount namespaces")
    run_dir.mkdir(mode=0o700)
    config = tls_config(tls_etcd, certificates, job).replace(
        broker=SHARED_BROKER, run_dir=str(run_dir), broker_idle_exit_s=60
    )
    env = {
        "SHIFTVERBS_ETCD": f"https://{tls_etcd}",
        "SHIFTVERBS_ETCD_CA": config.etcd_ca,
        "SHIFTVERBS_ETCD_CERT": config.etcd_cert,
        "SHIFTVERBS_ETCD_KEY": config.etcd_key,
        "SHIFTVERBS_JOB": job,
        "SHIFTVERBS_RUN_DIR": str(run_dir),
        "TESTS": str(Path(__file__).resolve().parents[1]),
    }
    first = spawn(*command, sys.executable, "-c", BLIND, host=None, softrnic=None, env=env, program="unshare")
    assert "No such file" in first.expect("^unavailable: (.*)", 60)[1]
    with EtcdExchanger(config) as exchanger:
        Watched(exchanger).next(Connected, 40)


def test_a_shared_broker_that_stands_still_is_replaced(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path
) -> None:
    """A job is suspended, and the broker that it happened to start: the others' keys would vanish with their leases."""
    (a, broker), (b, _) = (start(spawn, etcd_world, run_dir, keys) for keys in ("1 2", "2 1"))
    a.signal(signal.SIGSTOP)
    stop_process(broker)
    try:
        b.send("one.next(Unavailable, 70); one.next(Connected, 60); print('again', one.exchanger.broker_pid)")
        assert int(b.expect(r"^again (\d+)", 100)[1]) != broker
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker, signal.SIGCONT)
        a.signal(signal.SIGCONT)
    a.send(f"one.until(lambda _: one.exchanger.broker_pid not in (None, {broker}), 60); print('again')")
    a.expect("^again", 70)
    wait_until(lambda: len(etcd_world.keys()) == 2, what="both keys stand there")
    wait_until(lambda: not running(broker), what="it ends")


def test_a_broker_that_is_asked_twice_to_stop_withdraws_what_it_holds(
    etcd_world: EtcdWorld, by_hand: ByHand
) -> None:
    """Who ends a session sends SIGHUP after SIGTERM."""
    broker, path = by_hand("")
    one = etcd_world.make(
        broker=path, lease_ttl_s=600, broker_backoff_min_ms=60_000, broker_backoff_max_ms=60_000
    )
    one.next(Connected)
    publish_qp(one, etcd_world.job, 1)
    wait_until(etcd_world.keys)
    broker.signal(signal.SIGSTOP)
    broker.signal(signal.SIGTERM)
    broker.signal(signal.SIGHUP)
    broker.signal(signal.SIGCONT)
    assert broker.wait() == 0, broker.output
    assert not etcd_world.keys()


def test_a_broker_whose_other_thread_is_given_the_signal_stops(
    etcd_world: EtcdWorld, by_hand: ByHand
) -> None:
    """Whichever comes first of a process that was stopped and goes on is given it; the main thread may be waiting."""
    broker, path = by_hand("""
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
""")
    one = etcd_world.make(
        broker=path, lease_ttl_s=600, broker_backoff_min_ms=60_000, broker_backoff_max_ms=60_000
    )
    one.next(Connected)
    publish_qp(one, etcd_world.job, 1)
    wait_until(etcd_world.keys)
    broker.signal(signal.SIGTERM)
    assert broker.wait() == 0, broker.output
    assert not etcd_world.keys()


def test_who_lets_nobody_read_its_files_shares_all_the_same(
    etcd_world: EtcdWorld, config: Config, run_dir: Path
) -> None:
    """A umask that takes rights from the user, too, would keep the directory from all its other processes for ever."""
    before = os.umask(0o777)
    try:
        path = socket_path.of_host(config)
        sock = socket_path.bind_socket(path)
    finally:
        os.umask(before)
    with sock:
        modes = {name: stat.S_IMODE(os.stat(name).st_mode) for name in (run_dir, path, path + ".lock")}
    assert modes == {run_dir: 0o700, path: 0o600, path + ".lock": 0o600}


def test_a_broker_does_not_take_away_a_path_that_became_anothers_before_it_looked(
    etcd_world: EtcdWorld, config: Config, gate: Callable[[str], Callable[[str], object]]
) -> None:
    go_on = gate("shiftverbs")
    path = socket_path.of_host(config)
    one = make(etcd_world, config)
    wait_until(lambda: "has not said hello" in one.exchanger.progress, what="one asks")
    os.unlink(path)
    with socket_path.bind_socket(path):
        go_on("")
        one.next(Connected)
        broker = pid_of(one)
        one.exchanger.close()
        wait_until(lambda: not running(broker), what="nobody can find it")
        assert os.path.exists(path)


def test_very_many_may_come_before_a_broker_takes_the_first(etcd_world: EtcdWorld, config: Config) -> None:
    """As many as a large host has processors; and none of them finds the door shut."""
    path = socket_path.of_host(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket_path.bind_socket(path))
        for _ in range(500):
            stack.enter_context(socket_path.connect(path))


def test_who_is_not_polled_takes_nobodys_broker_away(
    etcd_world: EtcdWorld, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its program has had no turn for long: the answers of the broker wait, and so does what it hears meanwhile."""
    # A broker that is starved for three of these is another story.
    monkeypatch.setattr(etcd_module, "PING_S", 0.25)
    one = make(etcd_world, config)
    one.next(Connected)
    broker = pid_of(one)
    time.sleep(2.0)  # nothing is to happen in it
    assert running(broker)
    for _ in range(20):
        one.poll(0.25)  # looks at it anew each time
    assert pid_of(one) == broker
    assert not one.events


def test_a_broker_leaves_though_etcd_is_away(run_dir: Path) -> None:
    """What it tells itself of etcd, again and again, is nobody at its door."""
    absent = Config.from_environ(
        {"SHIFTVERBS_ETCD": f"127.0.0.1:{free_port()}", "SHIFTVERBS_RUN_DIR": str(run_dir)}
    )
    impatient = absent.replace(broker_idle_exit_s=1, etcd_backoff_max_ms=100)
    with EtcdExchanger(impatient) as exchanger:
        one = Watched(exchanger)
        one.next(Unavailable)
        broker = pid_of(one)
    assert broker
    wait_until(lambda: not running(broker), what="it has nobody left")
