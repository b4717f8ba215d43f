# SPDX-License-Identifier: BSD-3-Clause
"""The broker that processes share unasked: which of them do, and that without it all is as it should be."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Child, Spawn

from exchanger.around import launch, running, wait_until
from exchanger.conftest import GID_A, EtcdWorld, Watched, publish_qp
from shiftverbs.config import SHARED_BROKER, Config
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key, socket_path, wire
from shiftverbs.exchanger import start as start_module

# Tells its broker, publishes one key and wants another's.
APPLICATION = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
from exchanger.conftest import GID_A, publish_qp, Watched
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key
from shiftverbs.exchanger.etcd import EtcdExchanger

config = Config.from_environ()
one = Watched(EtcdExchanger(config.replace(broker_idle_exit_s=2)))
one.next(Connected, timeout_s=60)
own, other = (int(word) for word in os.environ["KEYS"].split())
publish_qp(one, config.job, own)
one.exchanger.want(qp_key(config.job, GID_A, other))
print("broker", one.exchanger.broker_pid, flush=True)
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""
MEET = "one.until(lambda events: any(isinstance(e, Found) and e.value for e in events)); print('met')"


@pytest.fixture
def run_dir(softrnic_dir: Path) -> Path:
    """Where the processes of a test have their sockets; nobody made it yet."""
    return softrnic_dir / "run"


@pytest.fixture
def config(etcd_world: EtcdWorld, run_dir: Path) -> Config:
    """What a process has that was told nothing of brokers."""
    return etcd_world.config(broker=SHARED_BROKER, run_dir=str(run_dir), broker_idle_exit_s=2)


def start(spawn: Spawn, world: EtcdWorld, run_dir: Path, keys: str, **extra: str) -> tuple[Child, int]:
    """A process as any; and its broker."""
    env = {"SHIFTVERBS_BROKER": "", "SHIFTVERBS_RUN_DIR": str(run_dir), "KEYS": keys, **extra}
    child = launch(spawn, world, APPLICATION, **env)
    return child, int(child.expect(r"^broker (\d+)", 60)[1])


def make(world: EtcdWorld, config: Config) -> Watched:
    """An exchanger with this configuration."""
    return world.make(
        broker=config.broker, run_dir=config.run_dir, broker_idle_exit_s=config.broker_idle_exit_s
    )


def test_processes_of_a_host_share_a_broker_that_is_this_users_alone(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path
) -> None:
    (a, broker), (b, same) = (start(spawn, etcd_world, run_dir, keys) for keys in ("1 2", "2 1"))
    assert broker == same
    for child in (a, b):
        child.send(MEET)
        child.expect("^met")
    (path,) = (entry for entry in run_dir.iterdir() if entry.is_socket())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    for child in (a, b):
        child.signal(signal.SIGKILL)
    # It outlives them for the next one, but not for ever.
    wait_until(lambda: not etcd_world.keys(), what="their keys are withdrawn")
    wait_until(lambda: not running(broker) and not path.exists(), what="the broker ends")


def test_a_shared_broker_that_dies_has_one_successor(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path
) -> None:
    (a, broker), (b, _) = (start(spawn, etcd_world, run_dir, keys) for keys in ("1 2", "2 1"))
    os.kill(broker, signal.SIGKILL)
    pids = []
    for child in (a, b):
        child.send("one.next(Unavailable); one.next(Connected, 60); print('again', one.exchanger.broker_pid)")
        pids.append(int(child.expect(r"^again (\d+)", 60)[1]))
    assert len(set(pids)) == 1
    assert pids[0] != broker
    wait_until(lambda: len(etcd_world.keys()) == 2, what="both keys stand there")


@pytest.mark.parametrize("what", ["host", "user", "lease"])
def test_who_would_start_another_broker_shares_none(
    etcd_world: EtcdWorld, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    path = socket_path.of_host(config)
    assert socket_path.of_host(config.replace(job="another")) == path
    other = config
    if what == "host":
        monkeypatch.setenv("SOFTRNIC_HOST", "b")
    elif what == "user":
        password = tmp_path / "password"
        password.write_text("secret")
        other = config.replace(etcd_user="somebody", etcd_password_file=str(password))
    else:
        other = config.replace(lease_ttl_s=5)
    assert socket_path.of_host(other) != path
    assert os.path.dirname(socket_path.of_host(other)) == os.path.dirname(path)


def in_the_way(run_dir: Path, config: Config, kind: str) -> Iterator[None]:
    """Have something that no broker can be shared with."""
    if kind == "directory":
        run_dir.mkdir()
        run_dir.chmod(0o777)
        yield
        return
    if kind == "name":
        Path(socket_path.of_host(config)).mkdir()
        yield
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path.of_host(config))
        listener.listen()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        if kind == "full":
                            sock.sendall(
                                wire.encode({"ev": "fatal", "reason": "the broker serves 9 processes"})
                            )
                        elif kind == "nonsense":
                            sock.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=answer) if kind != "silent" else None
        if thread is not None:
            thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        if thread is not None:
            thread.join()


@pytest.mark.parametrize("kind", ["directory", "name", "full", "nonsense", "silent", "closes"])
def test_where_none_can_be_shared_a_process_has_its_own(
    etcd_world: EtcdWorld,
    config: Config,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.exchanger")
    monkeypatch.setattr(start_module, "START_TIMEOUT_S", 20.0 if kind != "silent" else 5.0)
    with contextlib.contextmanager(in_the_way)(run_dir, config, kind):
        one = make(etcd_world, config)
        one.next(Connected, timeout_s=60)
        publish_qp(one, etcd_world.job, 1)
        wait_until(etcd_world.keys)
    words = {
        "directory": "others may write there",
        "name": str(run_dir),
        "full": "serves 9 processes",
        "nonsense": "no hello",
        "silent": "does not say hello in 5 s",
        "closes": "hello",
    }[kind]
    (told,) = [record for record in caplog.records if "no broker to share" in record.getMessage()]
    assert words in told.getMessage()
    assert told.levelno == logging.INFO


def test_one_that_fails_again_and_again_is_not_shared_for_ever(etcd_world: EtcdWorld, config: Config) -> None:
    """It says hello, and that it cannot go on: what its first client's environment makes of each that it starts."""
    served = []
    with socket_path.bind_socket(socket_path.of_host(config)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        served.append(sock.recv(1 << 16))
                        sock.sendall(wire.encode({"ev": "hello", "pid": os.getpid(), "pid_namespace": None}))
                        sock.sendall(wire.encode({"ev": "fatal", "reason": "no module named grpc"}))

        thread = threading.Thread(target=serve)
        thread.start()
        one = make(etcd_world, config)
        assert "no module named grpc" in one.next(Unavailable).reason
        one.next(Connected, timeout_s=60)
        publish_qp(one, etcd_world.job, 1)
        wait_until(etcd_world.keys)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(served) == 3


def test_a_broker_that_takes_its_leave_at_this_very_moment_is_followed_by_another(
    etcd_world: EtcdWorld, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shiftverbs.exchanger")
    path = socket_path.of_host(config)
    listener = socket_path.bind_socket(path)
    bound = socket_path.identity(path)

    def leave() -> None:
        sock, _ = listener.accept()
        socket_path.remove_socket(path, listener, bound)
        sock.close()

    thread = threading.Thread(target=leave)
    thread.start()
    ones = [make(etcd_world, config)]
    thread.join()
    ones[0].next(Connected)
    ones.append(make(etcd_world, config))
    ones[1].next(Connected)
    assert len({one.exchanger.broker_pid for one in ones}) == 1
    assert "no broker to share" not in caplog.text


def test_a_broker_whose_path_is_gone_serves_its_clients_and_ends_after_them(
    etcd_world: EtcdWorld, config: Config
) -> None:
    patient = config.replace(broker_idle_exit_s=600)
    first = make(etcd_world, patient)
    first.next(Connected)
    broker = first.exchanger.broker_pid
    assert broker is not None
    os.unlink(socket_path.of_host(patient))
    second = make(etcd_world, patient)
    second.next(Connected)
    key = publish_qp(first, etcd_world.job, 1)
    second.exchanger.want(key)
    second.until(lambda events: any(isinstance(event, Found) and event.value for event in events))
    assert second.exchanger.broker_pid not in (None, broker)
    first.exchanger.close()
    wait_until(lambda: not running(broker), what="nobody can find it any more")
    # The other one would wait ten minutes for a next process: it is found, and need not.
    left = second.exchanger.broker_pid
    second.exchanger.close()
    os.unlink(socket_path.of_host(patient))
    wait_until(lambda: not running(left or 0), what="nobody can find this one either")


def test_a_broker_started_by_hand_is_found(spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path) -> None:
    env = {"SHIFTVERBS_ETCD": etcd_world.server.endpoint, "SHIFTVERBS_RUN_DIR": str(run_dir)}
    by_hand = spawn("-m", "shiftverbs.exchanger.broker", host=None, softrnic=None, env=env, name="broker")
    wait_until(
        lambda: run_dir.exists() and any(entry.is_socket() for entry in run_dir.iterdir()), what="it listens"
    )
    config = Config.from_environ(env | {"SHIFTVERBS_JOB": etcd_world.job})
    one = etcd_world.make(broker=config.broker, run_dir=config.run_dir)
    one.next(Connected)
    assert one.exchanger.broker_pid == by_hand.pid


def test_a_key_of_a_process_whose_shared_broker_is_killed_comes_back_before_anybody_misses_it(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path, config: Config
) -> None:
    """A lease outlives its broker; the next broker puts the keys under a lease of its own."""
    child, broker = start(spawn, etcd_world, run_dir, "1 2")
    other = etcd_world.make()  # on a broker of its own
    other.next(Connected)
    key = qp_key(etcd_world.job, GID_A, 1)
    other.exchanger.want(key)
    other.next(Found)
    os.kill(broker, signal.SIGKILL)
    child.send("one.next(Unavailable); one.next(Connected, 60); print('again')")
    child.expect("^again", 60)
    other.poll()
    assert all(event.value for event in other.events if isinstance(event, Found))
