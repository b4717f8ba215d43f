# SPDX-License-Identifier: BSD-3-Clause
"""Children forked at the worst moment: while a broker is started, or a shared broker's socket made."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Child, Spawn

from exchanger.around import launch, running, wait_until
from exchanger.conftest import EtcdWorld, publish_qp
from shiftverbs.exchanger import Connected, Unavailable, socket_path

# Publishes one key; its main thread forks a child that lives on, in the very moment that MOMENT names.
APPLICATION = """
import ctypes, os, signal, sys, threading
sys.path.insert(0, os.environ["TESTS"])
from exchanger.conftest import publish_qp, Watched
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Unavailable, socket_path, start
from shiftverbs.exchanger.etcd import EtcdExchanger

fork = ctypes.CDLL(None).fork if os.environ.get("FORK") == "C" else os.fork
module, name = {"spawn": (start, "_spawn"), "locked": (socket_path, "_bind")}[os.environ["MOMENT"]]
real, reached, forked = getattr(module, name), threading.Event(), threading.Event()

def instead(*arguments):
    reached.set()
    assert forked.wait(20)
    return real(*arguments)

setattr(module, name, instead)
config = Config.from_environ()
one = Watched(EtcdExchanger(config.replace(lease_ttl_s=600, broker_idle_exit_s=1)))
assert reached.wait(20)
child = fork()
if child == 0:
    while True:
        signal.pause()
print("child", child)
forked.set()
setattr(module, name, real)
one.next(Connected, timeout_s=60)
publish_qp(one, config.job, 1)
print("broker", one.exchanger.broker_pid)
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""


@pytest.fixture
def forking(spawn: Spawn, etcd_world: EtcdWorld) -> Iterator[Callable[..., tuple[Child, int]]]:
    """Start APPLICATION as a process of its own; gives it and its broker's pid. Ends the forked children."""
    children: list[int] = []

    def start(**extra: str) -> tuple[Child, int]:
        app = launch(spawn, etcd_world, APPLICATION, PYTHONUNBUFFERED="1", **extra)
        children.append(int(app.expect(r"^child (\d+)")[1]))
        return app, int(app.expect(r"^broker (\d+)")[1])

    yield start
    for child in children:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("fork", ["Python", "C"])
def test_a_brokers_death_is_noticed_though_a_child_was_forked_at_its_start(
    forking: Callable[..., tuple[Child, int]], etcd_world: EtcdWorld, fork: str
) -> None:
    app, broker = forking(MOMENT="spawn", FORK=fork)
    wait_until(etcd_world.keys)
    os.kill(broker, signal.SIGKILL)
    app.send("print('lost', one.next(Unavailable, timeout_s=10).reason)")
    app.expect("^lost", 15)
    app.send("one.next(Connected); print('again', one.exchanger.broker_pid)")
    assert int(app.expect(r"^again (\d+)")[1]) != broker


@pytest.mark.parametrize("fork", ["Python", "C"])
def test_a_shared_brokers_successor_is_found_though_a_child_was_forked_at_its_start(
    forking: Callable[..., tuple[Child, int]], etcd_world: EtcdWorld, softrnic_dir: Path, fork: str
) -> None:
    path = str(softrnic_dir / "b.sock")
    app, broker = forking(MOMENT="spawn", SHIFTVERBS_BROKER=path, FORK=fork)
    os.kill(broker, signal.SIGKILL)
    app.send("one.next(Unavailable, timeout_s=10); one.next(Connected, timeout_s=10); print('again')")
    app.expect("^again", 25)
    # And by processes that come now.
    fresh = etcd_world.make(broker=path, broker_idle_exit_s=1)
    fresh.next(Connected, timeout_s=10)
    publish_qp(fresh, etcd_world.job, 2)
    wait_until(lambda: len(etcd_world.keys()) == 2)


def test_a_broker_that_ends_takes_its_path_away_though_somebody_else_listens_there(
    etcd_world: EtcdWorld, softrnic_dir: Path
) -> None:
    """A copy of its socket, as a forked child may hold it, is no new broker."""
    path = str(softrnic_dir / "b.sock")
    listener = socket_path.bind_socket(path)
    bound = socket_path.identity(path)
    copy = listener.dup()
    try:
        socket_path.remove_socket(path, listener, bound)
        assert not os.path.exists(path)
        # Whereas the socket of a successor stays.
        with socket_path.bind_socket(path) as successor:
            socket_path.remove_socket(path, listener, bound)
            assert os.path.exists(path)
            socket_path.connect(path).close()
            assert successor.fileno() >= 0
    finally:
        copy.close()


def test_a_child_forked_under_the_lock_does_not_keep_it(
    forking: Callable[..., tuple[Child, int]], etcd_world: EtcdWorld, softrnic_dir: Path
) -> None:
    path = str(softrnic_dir / "b.sock")
    forking(MOMENT="locked", SHIFTVERBS_BROKER=path)
    fresh = etcd_world.make(broker=path, broker_idle_exit_s=1)
    fresh.next(Connected, timeout_s=10)


def test_a_lock_that_stays_taken_is_told_with_its_holder(
    etcd_world: EtcdWorld, softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_path, "LOCK_TIMEOUT_S", 0.3)
    path = str(softrnic_dir / "b.sock")
    with open(path + ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        one = etcd_world.make(broker=path, broker_backoff_max_ms=200, broker_idle_exit_s=1)
        reason = one.next(Unavailable, timeout_s=10).reason
        assert path + ".lock" in reason
        assert f"process {os.getpid()}" in reason
    one.next(Connected)
    assert running(one.exchanger.broker_pid)  # type: ignore[attr-defined]
