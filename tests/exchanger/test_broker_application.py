# SPDX-License-Identifier: BSD-3-Clause
"""The application beside its broker: what reaches it, what it leaves when it ends, and its threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from harness import Child, Spawn, readable

from exchanger.around import launch, running, wait_until
from exchanger.conftest import GID_A, EtcdWorld, Watched, found_keys, publish_qp, qp_record
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Exchanger, open_exchanger, qp_key
from shiftverbs.exchanger.etcd import EtcdExchanger

# A process that publishes one key and then does what its arguments say, line by line from standard input.
APPLICATION = """
import os, select, sys
sys.path.insert(0, os.environ["TESTS"])
from exchanger.conftest import publish_qp, Watched
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected
from shiftverbs.exchanger.etcd import EtcdExchanger

config = Config.from_environ()
one = Watched(EtcdExchanger(config.replace(lease_ttl_s=600)))
one.next(Connected, timeout_s=60)
publish_qp(one, config.job, 1)
print("broker", one.exchanger.broker_pid)
for line in sys.stdin:
    exec(line)
    sys.stdout.flush()
"""


@pytest.fixture
def application(spawn: Spawn, etcd_world: EtcdWorld) -> Callable[[], Child]:
    """Start APPLICATION as a process of its own."""
    return lambda: launch(spawn, etcd_world, APPLICATION)


def test_neither_grpc_nor_protobuf_reaches_the_application(application, etcd_world: EtcdWorld) -> None:
    app = application()
    app.expect("^broker")
    app.send(
        "print('loaded', sorted(m for m in sys.modules if m.split('.')[0] in ('grpc', 'etcd3', 'google')))"
    )
    app.expect(r"^loaded \[\]$")
    app.send("import threading; print('threads', [t.name for t in threading.enumerate()])")
    app.expect(r"^threads \['MainThread'\]$")


def test_the_broker_is_no_child_the_application_meets(application, etcd_world: EtcdWorld) -> None:
    app = application()
    app.expect("^broker")
    app.send("os.wait()")
    assert "ChildProcessError" in app.expect("ChildProcessError", 10).string


def test_killed_application_leaves_nothing(application, etcd_world: EtcdWorld) -> None:
    app = application()
    broker = int(app.expect(r"^broker (\d+)")[1])
    wait_until(etcd_world.keys)
    app.signal(signal.SIGKILL)
    # The lease has ten minutes to go: this is the broker's doing.
    wait_until(lambda: not etcd_world.keys(), what="keys of a killed process are withdrawn")
    wait_until(lambda: not running(broker), what="its broker ends")


def test_killed_application_leaves_nothing_though_a_forked_child_lives_on(
    application, etcd_world: EtcdWorld
) -> None:
    app = application()
    broker = int(app.expect(r"^broker (\d+)")[1])
    wait_until(etcd_world.keys)
    # The child inherits every descriptor and keeps the connection open.
    app.send("child = os.fork() or (__import__('time').sleep(60), os._exit(0))")
    app.send("print('child', child)")
    child = int(app.expect(r"^child (\d+)")[1])
    try:
        app.signal(signal.SIGKILL)
        wait_until(lambda: not etcd_world.keys())
        wait_until(lambda: not running(broker))
        assert running(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_application_that_just_exits_leaves_nothing(application, etcd_world: EtcdWorld) -> None:
    app = application()
    app.expect("^broker")
    wait_until(etcd_world.keys)
    app.send("sys.exit(0)")
    app.succeed()
    wait_until(lambda: not etcd_world.keys())


def test_the_broker_holds_none_of_the_applications_descriptors(application, etcd_world: EtcdWorld) -> None:
    app = application()
    broker = int(app.expect(r"^broker (\d+)")[1])
    links = {fd: os.readlink(f"/proc/{broker}/fd/{fd}") for fd in os.listdir(f"/proc/{broker}/fd")}
    assert {links[fd] for fd in ("0", "1", "2")} == {"/dev/null"}
    outputs = {os.readlink(f"/proc/{app.pid}/fd/{fd}") for fd in (0, 1, 2)}
    assert not outputs & set(links.values())
    assert os.readlink(f"/proc/{broker}/cwd") == "/"


def test_ctrl_c_lets_the_application_withdraw_first(application, etcd_world: EtcdWorld) -> None:
    app = application()
    broker = int(app.expect(r"^broker (\d+)")[1])
    wait_until(etcd_world.keys)
    assert os.getsid(broker) != os.getsid(app.pid)
    os.kill(broker, signal.SIGINT)
    app.send("print('still', one.exchanger.poll_events())")
    app.expect(r"^still \[\]")
    # Ctrl-C reaches the terminal's foreground group: the application, not the broker.
    app.send("import signal")
    app.send("signal.signal(signal.SIGINT, lambda *_: (one.exchanger.close(), print('left')))")
    app.send("os.kill(os.getpid(), signal.SIGINT)")
    app.expect("^left")
    assert etcd_world.keys() == []


def test_open_exchanger_follows_the_configuration(etcd_world: EtcdWorld) -> None:
    assert open_exchanger(Config()) is None
    with open_exchanger(etcd_world.config()) or pytest.fail("no exchanger") as exchanger:
        assert isinstance(exchanger, Exchanger)
        Watched(exchanger).next(Connected)


def test_publishing_from_many_threads(etcd_world: EtcdWorld) -> None:
    one = etcd_world.make()

    def publish(first: int) -> None:
        for qpn in range(first, first + 50):
            publish_qp(one, etcd_world.job, qpn)

    threads = [threading.Thread(target=publish, args=(100 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.next(Connected)
    one.until(lambda _: len(etcd_world.keys()) == 400)


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Everything that rings a bell."""
    made: list[int] = []
    ring = os.eventfd_write

    def count(descriptor: int, value: int) -> None:
        made.append(descriptor)
        ring(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", count)
    return made


def test_many_commands_are_one_wake_up(etcd_world: EtcdWorld, rung: list[int]) -> None:
    one = etcd_world.make()
    one.next(Connected)
    one.until(lambda _: not readable(one.exchanger.fileno(), 0.1))
    rung.clear()
    keys = [qp_key(etcd_world.job, GID_A, qpn) for qpn in range(100)]
    for qpn, key in enumerate(keys):
        one.exchanger.publish(key, qp_record(etcd_world.job, qpn))
        one.exchanger.want(key)
    assert len(rung) == 1
    one.until(lambda events: found_keys(events) == set(keys))
    for key in keys:
        one.exchanger.withdraw(key)
        one.exchanger.unwant(key)
    assert len(rung) == 2
    one.until(lambda _: not etcd_world.keys())


@pytest.mark.parametrize("moment", ["while the bell is read", "once commands are taken"])
def test_a_command_amid_polling_wakes_or_is_taken(
    etcd_world: EtcdWorld, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever the moment at which another thread leaves it."""
    one = etcd_world.make()
    exchanger = one.exchanger
    assert isinstance(exchanger, EtcdExchanger)
    one.next(Connected)
    qpns = iter(range(1, 100))
    keys: list[str] = []

    def command() -> None:
        qpn = next(qpns)
        keys.append(qp_key(etcd_world.job, GID_A, qpn))
        exchanger.publish(keys[-1], qp_record(etcd_world.job, qpn))

    command()
    if moment == "once commands are taken":
        take = exchanger._take_commands
        monkeypatch.setattr(exchanger, "_take_commands", lambda: (take(), command()))
    else:
        read = os.eventfd_read
        monkeypatch.setattr(os, "eventfd_read", lambda descriptor: (command(), read(descriptor), command()))
    exchanger.poll_events()
    monkeypatch.undo()
    assert len(keys) > 1
    left = list(exchanger._commands)
    assert not left or readable(exchanger.fileno(), 0)
    command()
    assert readable(exchanger.fileno(), 0)
    one.until(lambda _: set(etcd_world.keys()) == set(keys))


@pytest.mark.parametrize("where", ["the bell is read", "a command is taken", "all are sent"])
@pytest.mark.parametrize("what", ["publish", "withdraw", "want"])
def test_what_interrupts_polling_loses_neither_wake_up_nor_command(
    etcd_world: EtcdWorld, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    one = etcd_world.make()
    exchanger = one.exchanger
    assert isinstance(exchanger, EtcdExchanger)
    one.next(Connected)
    key = qp_key(etcd_world.job, GID_A, 1)
    if what != "publish":
        exchanger.publish(key, qp_record(etcd_world.job, 1))
        one.until(lambda _: etcd_world.keys() == [key])
    if what == "publish":
        exchanger.publish(key, qp_record(etcd_world.job, 1))
    elif what == "withdraw":
        exchanger.withdraw(key)
    else:
        exchanger.want(key)
    read = os.eventfd_read

    def interrupted(descriptor: object) -> None:
        if where == "the bell is read":
            read(exchanger._bell)
        raise KeyboardInterrupt

    if where == "the bell is read":
        monkeypatch.setattr(os, "eventfd_read", interrupted)
    else:
        name = {"a command is taken": "_tell", "all are sent": "_send"}[where]
        monkeypatch.setattr(exchanger, name, lambda *_: interrupted(None))
    with pytest.raises(KeyboardInterrupt):
        exchanger.poll_events()
    monkeypatch.undo()
    assert readable(exchanger.fileno(), 0)
    if what == "want":
        one.until(lambda events: found_keys(events) == {key})
    else:
        one.until(lambda _: etcd_world.keys() == [key] * (what == "publish"))


def test_who_is_interrupted_before_the_bell_rings_it_for_others(
    etcd_world: EtcdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's command has relied on it."""
    one = etcd_world.make()
    exchanger = one.exchanger
    assert isinstance(exchanger, EtcdExchanger)
    one.next(Connected)
    keys = [qp_key(etcd_world.job, GID_A, qpn) for qpn in (1, 2)]
    ring = exchanger._ring

    def interrupted() -> None:
        monkeypatch.setattr(exchanger, "_ring", ring)
        exchanger.publish(keys[1], qp_record(etcd_world.job, 2))
        raise KeyboardInterrupt

    one.until(lambda _: not readable(exchanger.fileno(), 0.1))
    monkeypatch.setattr(exchanger, "_ring", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchanger.publish(keys[0], qp_record(etcd_world.job, 1))
    assert readable(exchanger.fileno(), 0)
    one.until(lambda _: sorted(etcd_world.keys()) == keys)


def test_polling_does_not_wait_for_who_gets_a_broker(etcd_world: EtcdWorld) -> None:
    """The collector may close a QP in that thread, which takes the lock under which we are polled.."""
    one = etcd_world.make()
    exchanger = one.exchanger
    assert isinstance(exchanger, EtcdExchanger)
    polled = threading.Event()

    def poll() -> None:
        one.poll()
        polled.set()

    with exchanger._lock:
        threading.Thread(target=poll, daemon=True).start()
        assert polled.wait(5)
    one.next(Connected)


def test_nothing_is_left_open(etcd_world: EtcdWorld) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        one = Watched(EtcdExchanger(etcd_world.config()))
        one.next(Connected)
        publish_qp(one, etcd_world.job, 1)
        one.exchanger.close()
    wait_until(lambda: descriptors() <= before)
    wait_until(lambda: threading.active_count() <= threads)
    assert sys.modules.get("grpc") is None
    assert subprocess._active == []  # type: ignore[attr-defined]
