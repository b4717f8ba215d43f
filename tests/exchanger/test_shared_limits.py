# SPDX-License-Identifier: BSD-3-Clause
"""What one client of a shared broker can do to the others: nothing; and what a broker that meets its limits says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Child, Spawn

from exchanger.around import wait_until
from exchanger.conftest import GID_A, EtcdWorld, as_json, publish_qp, qp_record
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key, start, wire
from shiftverbs.exchanger.settings import store_identity
from shiftverbs.failover.services.directory import Directory

# Starts BROKER with a setup; returns its process and its socket's path.
ByHand = Callable[[str], tuple[Child, str]]

# A broker started by hand, after SETUP in its process.
BROKER = """
import os, resource, runpy, sys
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
from shiftverbs.exchanger import broker
SETUP
sys.exit(broker.main(["--socket", sys.argv[1]]))
"""


@pytest.fixture
def by_hand(spawn: Spawn, etcd_world: EtcdWorld, softrnic_dir: Path) -> ByHand:
    """A broker is started with what the test does to it."""

    def start(setup: str) -> tuple[Child, str]:
        path = str(softrnic_dir / "hand.sock")
        env = {"SHIFTVERBS_ETCD": etcd_world.server.endpoint}
        source = BROKER.replace("SETUP", setup)
        broker = spawn("-c", source, path, host=None, softrnic=None, env=env, name="broker")
        wait_until(lambda: os.path.exists(path))
        return broker, path

    return start


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_frame(sock: socket.socket, job: str, world: EtcdWorld) -> dict[str, Any]:
    """Say hello; the broker's first answer."""
    hello = {"op": "hello", "protocol": 1, "job": job, "store": store_identity(world.config())}
    with contextlib.suppress(ConnectionError):  # refused already, and told why
        sock.sendall(wire.encode(hello))
    answer = b""
    while b"\n" not in answer:
        data = sock.recv(1 << 16)
        assert data, "closed without a word"
        answer += data
    return dict(json.loads(answer.split(b"\n")[0]))


def test_who_finds_a_broker_out_of_descriptors_is_told_at_once(
    etcd_world: EtcdWorld, by_hand: ByHand
) -> None:
    broker, path = by_hand("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
    one = etcd_world.make(broker=path, lease_ttl_s=2)
    one.next(Connected)
    with contextlib.ExitStack() as stack:
        answers = []
        before = cpu_s(broker.pid)
        for _ in range(40):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(5)
            sock.connect(path)
            answers.append(first_frame(sock, etcd_world.job, etcd_world))
        kinds = [answer["ev"] for answer in answers]
        assert kinds[0] == "hello"
        assert kinds[-1] == "fatal"
        assert "64 descriptors" in answers[-1]["reason"]
        refused = etcd_world.make(broker=path)
        assert "64 descriptors" in refused.next(Unavailable).reason
        # Those who were there first go on, and etcd is at hand.
        keys = [publish_qp(one, etcd_world.job, qpn) for qpn in range(1, 50)]
        wait_until(lambda: set(keys) <= set(etcd_world.keys()))
        assert cpu_s(broker.pid) - before < 1.5
        assert broker.output.count("descriptors") == 1
    # They left.
    refused.next(Connected)


def test_a_broker_takes_as_many_descriptors_as_it_may(by_hand: ByHand) -> None:
    broker, _ = by_hand("resource.setrlimit(resource.RLIMIT_NOFILE, (64, 500))")
    limits = Path(f"/proc/{broker.pid}/limits").read_text()
    assert re.search(r"^Max open files +500 +500 ", limits, re.M)


def test_descriptors_that_run_out_all_the_same_stop_accepting_for_a_while(
    etcd_world: EtcdWorld, by_hand: ByHand
) -> None:
    """Something else took them: the broker pauses, says so, and takes who waits when there are some again."""
    broker, path = by_hand(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "class Greedy(broker.Broker):\n"
        "    def _handle_key(self, client, operation, key, frame):\n"
        "        super()._handle_key(client, operation, key, frame)\n"
        "        if operation == 'want':\n"
        "            self.taken = []\n"
        "            try:\n"
        "                while True: self.taken.append(os.dup(0))\n"
        "            except OSError: pass\n"
        "        elif operation == 'unwant':\n"
        "            for descriptor in self.taken: os.close(descriptor)\n"
        "broker.Broker = Greedy"
    )
    one = etcd_world.make(broker=path)
    one.next(Connected)
    key = qp_key(etcd_world.job, GID_A, 1)
    one.exchanger.want(key)
    one.next(Found)
    before = cpu_s(broker.pid)
    late = etcd_world.make(broker=path)
    broker.expect("cannot take another process.*Too many open files", 10)
    other = publish_qp(one, etcd_world.job, 2)
    wait_until(lambda: other in etcd_world.keys())
    # So long nothing comes: a broker that spins would use up all of it.
    with pytest.raises(AssertionError):
        late.next(Connected, timeout_s=1.5)
    assert cpu_s(broker.pid) - before < 0.7
    assert broker.output.count("cannot take another process") == 1
    one.exchanger.unwant(key)
    late.next(Connected, timeout_s=10)


def test_what_is_no_record_is_refused_to_its_client_alone(etcd_world: EtcdWorld, by_hand: ByHand) -> None:
    _, path = by_hand("")
    one = etcd_world.make(broker=path)
    one.next(Connected)
    good = as_json(qp_record(etcd_world.job, 1))
    bad = {
        "surrogate": "\ud800",
        "surrogate inside": json.dumps({**good, "extra": "x"}).replace('"x"', '"\ud800"'),
        "not JSON": "{",
        "no record": "{}",
        "of another QP": json.dumps({**good, "default": {"gid": GID_A, "lid": 0, "qpn": 2}}),
    }
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        assert first_frame(sock, etcd_world.job, etcd_world)["ev"] == "hello"
        reader = wire.FrameReader()
        for qpn, (name, text) in enumerate(bad.items(), 100):
            key = qp_key(etcd_world.job, GID_A, qpn)
            sock.sendall(wire.encode({"op": "put", "key": key, "value": text}))
            frames: list[dict[str, Any]] = []
            while not any(frame["ev"] == "refused" and frame["key"] == key for frame in frames):
                assert all(frame["ev"] == "up" for frame in frames), (name, frames)
                frames = reader.feed(sock.recv(1 << 16))
            assert any(key in str(frame.get("reason")) for frame in frames)
    key = publish_qp(one, etcd_world.job, 1)
    wait_until(lambda: etcd_world.keys() == [key])
    assert not [event for event in one.events if isinstance(event, Unavailable)]


def test_a_mistake_in_the_link_to_etcd_ends_a_session_and_not_the_link(
    etcd_world: EtcdWorld, by_hand: ByHand
) -> None:
    broker, path = by_hand(
        "from shiftverbs.exchanger import etcd_link\n"
        "real = etcd_link.EtcdLink._read\n"
        "def wrong(self):\n"
        "    if self._to_get and self._session < 3: raise TypeError('a mistake')\n"
        "    return real(self)\n"
        "etcd_link.EtcdLink._read = wrong"
    )
    one = etcd_world.make(broker=path)
    key = qp_key(etcd_world.job, GID_A, 1)
    one.next(Connected)
    one.exchanger.want(key)
    assert "a mistake" in one.next(Unavailable).reason
    one.next(Found, key=key)
    assert broker.output.count("Traceback") == 1


def test_a_mistake_in_a_brokers_main_thread_ends_it(etcd_world: EtcdWorld, by_hand: ByHand) -> None:
    broker, path = by_hand(
        "def wrong(self, *_): raise TypeError('a mistake')\nbroker.Broker._handle_key = wrong"
    )
    one = etcd_world.make(broker=path, broker_idle_exit_s=1)
    one.next(Connected)
    one.exchanger.want(qp_key(etcd_world.job, GID_A, 1))
    one.poll()
    assert broker.wait() == 1
    assert broker.output.count("Traceback") == 1
    # Its clients start one themselves.
    one.next(Found)


def test_a_key_that_is_spoiled_again_and_again_is_told_of_once_a_second(
    etcd_world: EtcdWorld, caplog: pytest.LogCaptureFixture
) -> None:
    one = etcd_world.make()
    driver = SimpleNamespace(connections={}, stopped=False, now_ns=time.monotonic_ns)
    driver.later = lambda _, call, event: call(event)
    heard: list[object] = []
    directory = Directory(driver, one.exchanger)  # type: ignore[arg-type]
    key = qp_key(etcd_world.job, GID_A, 1)
    directory.want(key, heard.append)
    wait_until(lambda: directory.take() or heard)
    caplog.set_level(logging.INFO, "shiftverbs")
    began = time.monotonic_ns()
    rejected = one.exchanger._answer  # type: ignore[attr-defined]
    seen = []
    one.exchanger._answer = lambda *a: (seen.append(a), rejected(*a))  # type: ignore[attr-defined]
    number = 0
    while len(seen) < 60:
        number += 1
        etcd_world.write(key, f"nonsense {number}")
        directory.take()
    took_s = (time.monotonic_ns() - began) / 1e9
    assert 1 <= len(caplog.messages) <= 2 + took_s
    assert key in caplog.text


def test_a_broker_that_no_shell_starts_says_so(
    etcd_world: EtcdWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "_SHELL", "/nowhere/sh")
    one = etcd_world.make(broker_backoff_max_ms=100)
    reason = one.next(Unavailable).reason
    assert "cannot start a broker" in reason
    assert "/nowhere/sh" in reason
