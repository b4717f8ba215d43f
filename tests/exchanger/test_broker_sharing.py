# SPDX-License-Identifier: BSD-3-Clause
"""One broker for all processes of a host."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
from pathlib import Path

import pytest

from exchanger.around import running, wait_until
from exchanger.conftest import GID_A, EtcdWorld, Watched, found_keys, publish_qp
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key, wire
from shiftverbs.exchanger.etcd import EtcdExchanger
from shiftverbs.exchanger.settings import store_identity


def test_processes_share_a_broker_and_its_socket_is_private(
    etcd_world: EtcdWorld, shared_config: Config
) -> None:
    made: list[Watched] = []
    barrier = threading.Barrier(5)

    def start(number: int) -> None:
        barrier.wait()
        made.append(Watched(EtcdExchanger(shared_config.replace(job=f"{etcd_world.job[:55]}-{number % 2}"))))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        for one in made:
            one.next(Connected)
        pids = {one.exchanger.broker_pid for one in made}  # type: ignore[attr-defined]
        assert len(pids) == 1
        assert shared_config.broker is not None
        assert stat.S_IMODE(os.stat(shared_config.broker).st_mode) == 0o600
        # Each job is a world of its own; within a job, one finds the others.
        by_job: dict[str, list[Watched]] = {}
        for one in made:
            by_job.setdefault(one.exchanger._config.job, []).append(one)  # type: ignore[attr-defined]
        for job, members in by_job.items():
            key = publish_qp(members[0], job, 5)
            members[1].exchanger.want(key)
            members[1].until(lambda events, key=key: found_keys(events) == {key})
        # One that leaves takes only its own keys with it.
        (first_job, first), (second_job, _) = by_job.items()
        first[0].exchanger.close()
        first[1].until(lambda events: isinstance(events[-1], Found) and events[-1].value is None)
        assert etcd_world.server.keys(f"/shiftverbs/{second_job}/") != []
        assert etcd_world.server.keys(f"/shiftverbs/{first_job}/") == []
    finally:
        for one in made:
            one.exchanger.close()
    (pid,) = pids
    wait_until(lambda: not running(pid), what="a broker without clients ends")
    wait_until(lambda: not os.path.exists(shared_config.broker or ""))


def test_a_shared_broker_cannot_be_used_across_jobs(etcd_world: EtcdWorld, shared_config: Config) -> None:
    assert shared_config.broker is not None
    with EtcdExchanger(shared_config) as exchanger:
        Watched(exchanger).next(Connected)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(shared_config.broker)
            hello = {"op": "hello", "protocol": 1, "job": "mine", "store": store_identity(shared_config)}
            sock.sendall(wire.encode(hello))
            sock.sendall(wire.encode({"op": "want", "key": qp_key(etcd_world.job, GID_A, 1)}))
            sock.sendall(wire.encode({"op": "put", "key": qp_key(etcd_world.job, GID_A, 1), "value": "{}"}))
            sock.sendall(wire.encode({"op": "put", "key": qp_key("mine", GID_A, 1), "value": "x" * 9000}))
            sock.sendall(wire.encode({"op": "del", "key": "../../etc"}))
            # Refusals of one key are told once or twice: the broker may have answered in between.
            reasons = _refusals(sock, 3)
        assert "another job" in reasons[qp_key(etcd_world.job, GID_A, 1)]
        assert "too large" in reasons[qp_key("mine", GID_A, 1)]
        assert "not a key" in reasons["../../etc"]
        assert etcd_world.keys() == []


def _refusals(sock: socket.socket, count: int) -> dict[str, str]:
    """Reads until the broker has refused `count` keys, or closed. Returns the reason by key."""
    reader, reasons = wire.FrameReader(), {}
    while len(reasons) < count:
        data = sock.recv(1 << 16)
        if not data:
            break
        reasons |= {frame["key"]: frame["reason"] for frame in reader.feed(data) if frame["ev"] == "refused"}
    return reasons


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[]\n",
        b"\xff\xfe\n",
        b'{"op": "want", "key": "x"}\n',
        b'{"op": "hello", "protocol": 2, "job": "j", "store": {}}\n',
        b'{"op": "hello", "protocol": 1, "job": "a/b", "store": {}}\n',
        b'{"op": "hello", "protocol": 1, "job": 5, "store": {}}\n',
        b'{"op": "hello", "protocol": 1, "job": "j", "store": {}}\n',
        b"x" * 100_000,
        b"[" * 60_000 + b"\n",
    ],
)
def test_nonsense_at_its_socket_does_not_harm_a_broker(
    etcd_world: EtcdWorld, shared_config: Config, nonsense: bytes
) -> None:
    assert shared_config.broker is not None
    with EtcdExchanger(shared_config) as exchanger:
        one = Watched(exchanger)
        one.next(Connected)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(shared_config.broker)
            try:
                sock.sendall(nonsense)
                answer = b""
                while data := sock.recv(1 << 16):
                    answer += data
            except (ConnectionResetError, BrokenPipeError):
                answer = b""
        if answer:
            assert json.loads(answer)["ev"] == "fatal"
        key = publish_qp(one, etcd_world.job, 1)
        wait_until(lambda: etcd_world.keys() == [key])


def test_a_broker_for_another_etcd_is_refused(etcd_world: EtcdWorld, shared_config: Config) -> None:
    elsewhere = Config.from_environ({"SHIFTVERBS_ETCD": "127.0.0.1:1"})
    with EtcdExchanger(shared_config) as exchanger:
        Watched(exchanger).next(Connected)
        with EtcdExchanger(shared_config.replace(etcd=elsewhere.etcd)) as stray:
            reason = Watched(stray).next(Unavailable).reason
    assert "127.0.0.1:1" in reason
    assert etcd_world.server.endpoint in reason


def test_a_killed_shared_broker_is_replaced_for_all(etcd_world: EtcdWorld, shared_config: Config) -> None:
    ones = [Watched(EtcdExchanger(shared_config)) for _ in range(3)]
    try:
        for number, one in enumerate(ones):
            one.next(Connected)
            publish_qp(one, etcd_world.job, number)
        wait_until(lambda: len(etcd_world.keys()) == 3)
        pid = ones[0].exchanger.broker_pid  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        for one in ones:
            one.next(Unavailable)
        for one in ones:
            one.next(Connected)
        pids = {one.exchanger.broker_pid for one in ones}  # type: ignore[attr-defined]
        assert len(pids) == 1
        assert pids != {pid}
        for number, one in enumerate(ones):
            publish_qp(one, etcd_world.job, 10 + number)
        wait_until(lambda: len(etcd_world.keys()) == 6)
    finally:
        for one in ones:
            one.exchanger.close()
    # With the leases of the new broker; those of the dead one have seconds to go, but their keys were taken over.
    assert etcd_world.keys() == []


def test_what_is_in_the_sockets_way_is_not_removed(etcd_world: EtcdWorld, softrnic_dir: Path) -> None:
    path = softrnic_dir / "precious"
    path.write_text("data")
    with EtcdExchanger(etcd_world.config(broker=str(path))) as exchanger:
        reason = Watched(exchanger).next(Unavailable).reason
    assert path.read_text() == "data"
    assert str(path) in reason
