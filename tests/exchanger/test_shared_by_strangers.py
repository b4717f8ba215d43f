# SPDX-License-Identifier: BSD-3-Clause
"""A shared broker that was started by somebody whose end, or whose rights, are no business of the others."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn, stop_process

from exchanger.around import running, wait_until
from exchanger.conftest import GID_A, EtcdWorld, Watched, publish_qp
from exchanger.relay import Relay
from exchanger.test_shared_by_default import config as config
from exchanger.test_shared_by_default import run_dir as run_dir
from exchanger.test_shared_by_default import start
from exchanger.test_tls_login import certificates as certificates
from exchanger.test_tls_login import tls_config
from exchanger.test_tls_login import tls_etcd as tls_etcd
from shiftverbs.config import OWN_BROKER, SHARED_BROKER, Config
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key, socket_path, wire
from shiftverbs.exchanger import etcd as etcd_module
from shiftverbs.exchanger.etcd import EtcdExchanger


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_shared_broker_that_a_scheduler_ends_takes_nobody_elses_keys_away(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path, how: signal.Signals
) -> None:
    """SIGTERM to all that a job's step has started: other jobs' processes notice nothing but a new broker."""
    child, broker = start(spawn, etcd_world, run_dir, "1 2")
    other = etcd_world.make()  # on a broker of its own
    other.next(Connected)
    key = qp_key(etcd_world.job, GID_A, 1)
    other.exchanger.want(key)
    other.next(Found)
    os.kill(broker, how)
    child.send("one.next(Unavailable); one.next(Connected, 60); print('again')")
    child.expect("^again", 60)
    wait_until(etcd_world.keys)
    other.poll(0.5)
    assert all(event.value for event in other.events if isinstance(event, Found))


def test_of_a_job_that_is_ended_with_its_shared_broker_nothing_stays(
    spawn: Spawn, etcd_world: EtcdWorld, run_dir: Path
) -> None:
    """A whole step is sent SIGTERM: its processes' keys go at once, those of others stay."""
    (ended, broker), (other, _) = (start(spawn, etcd_world, run_dir, keys) for keys in ("1 2", "2 1"))
    wait_until(lambda: len(etcd_world.keys()) == 2, what="both keys stand there")
    os.kill(broker, signal.SIGTERM)
    ended.signal(signal.SIGTERM)
    left = [qp_key(etcd_world.job, GID_A, 2)]
    wait_until(lambda: etcd_world.keys() == left, 5, "the lease would last for 10 s")
    other.send("one.next(Unavailable, 20); one.next(Connected, 60); print('again')")
    other.expect("^again", 60)
    assert etcd_world.keys() == left


# May not do what SANDBOX says (as a service that has no use for it), and tells what it hears of etcd first.
CONFINED = """
import ctypes, os, struct, sys
sys.path.insert(0, os.environ["TESTS"])
from exchanger.conftest import Watched
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Unavailable
from shiftverbs.exchanger.etcd import EtcdExchanger
config = Config.from_environ()
libc = ctypes.CDLL(None, use_errno=True)
if os.environ["SANDBOX"] == "sockets":
    # RestrictAddressFamilies=AF_UNIX AF_NETLINK: socket(AF_INET or AF_INET6) is EAFNOSUPPORT.
    def op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
    program = b"".join((
        op(0x20, 0, 0, 0), op(0x15, 0, 4, 41),
        op(0x20, 0, 0, 16), op(0x15, 1, 0, 2), op(0x15, 0, 1, 10),
        op(0x06, 0, 0, 0x00050000 | 97), op(0x06, 0, 0, 0x7FFF0000),
    ))
    buffer = ctypes.create_string_buffer(program, len(program))
    class Fprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    prog = Fprog(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(prog), 0, 0) == 0, ctypes.get_errno()
else:
    # CapabilityBoundingSet=, set by itself: it reads the key as before, and what it starts does not.
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.prctl(24, capability, 0, 0, 0) == 0
    open(config.etcd_key).close()
one = Watched(EtcdExchanger(config.replace(etcd_backoff_max_ms=300)))
one.until(lambda events: events, 60)
print("heard:", one.events[0], flush=True)
one.until(lambda _: False, 600)
"""


def strangers(world: EtcdWorld, run_dir: Path, **extra: str) -> dict[str, str]:
    """The environment of CONFINED."""
    return {
        "SHIFTVERBS_ETCD": world.server.endpoint,
        "SHIFTVERBS_JOB": world.job,
        "SHIFTVERBS_RUN_DIR": str(run_dir),
        "TESTS": str(Path(__file__).resolve().parents[1]),
        **extra,
    }


def test_who_may_make_no_sockets_keeps_nobody_from_etcd(
    spawn: Spawn, etcd_world: EtcdWorld, config: Config, run_dir: Path
) -> None:
    env = strangers(etcd_world, run_dir, SANDBOX="sockets")
    first = spawn("-c", CONFINED, host=None, softrnic=None, env=env)
    assert "Unavailable" in first.expect("^heard: (.*)", 60)[1]
    own = etcd_world.make(etcd_backoff_max_ms=300)
    own.next(Connected, 40)
    one = etcd_world.make(broker=config.broker, run_dir=config.run_dir, etcd_backoff_max_ms=300)
    one.next(Connected, 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to lose")
def test_who_has_lost_capabilities_keeps_nobody_from_etcd(
    spawn: Spawn, tls_etcd: str, certificates: Path, run_dir: Path, job: str
) -> None:
    """The key belongs to another user, as it does where etcd's own is used, and root may read it nevertheless."""
    config = tls_config(tls_etcd, certificates, job).replace(
        broker=SHARED_BROKER, run_dir=str(run_dir), broker_idle_exit_s=60
    )
    key = str(config.etcd_key)
    os.chown(key, 65534, 65534)
    os.chmod(key, 0o600)
    env = {
        "SHIFTVERBS_ETCD": f"https://{tls_etcd}",
        "SHIFTVERBS_ETCD_CA": str(config.etcd_ca),
        "SHIFTVERBS_ETCD_CERT": str(config.etcd_cert),
        "SHIFTVERBS_ETCD_KEY": key,
        "SHIFTVERBS_JOB": job,
        "SHIFTVERBS_RUN_DIR": str(run_dir),
        "SANDBOX": "capabilities",
        "TESTS": str(Path(__file__).resolve().parents[1]),
    }
    first = spawn("-c", CONFINED, host=None, softrnic=None, env=env)
    assert "Permission denied" in first.expect("^heard: (.*)", 60)[1]
    with EtcdExchanger(config.replace(broker=OWN_BROKER)) as exchanger:
        Watched(exchanger).next(Connected, 40)
    with EtcdExchanger(config) as exchanger:
        Watched(exchanger).next(Connected, 40)


def test_a_large_job_that_ends_holds_up_nobody_else(etcd_world: EtcdWorld, config: Config) -> None:
    """Its leases are revoked; where etcd takes a moment for each, others' keys need not wait for all of them."""
    with Relay(etcd_world.server.port, 0.25) as relay:
        etcd = Config.from_environ({"SHIFTVERBS_ETCD": relay.endpoint}).etcd
        changes: dict[str, Any] = {"broker": config.broker, "run_dir": config.run_dir, "etcd": etcd}
        job = [etcd_world.make(**changes) for _ in range(40)]
        for qpn, rank in enumerate(job):
            rank.next(Connected, 60)
            publish_qp(rank, etcd_world.job, 1000 + qpn)
        other = etcd_world.make(**changes)
        other.next(Connected, 60)
        wait_until(lambda: len(etcd_world.keys()) == len(job), what="the large job is there")
        began = time.monotonic()
        key = publish_qp(other, etcd_world.job, 1)
        wait_until(lambda: key in etcd_world.keys())
        usual_s = time.monotonic() - began
        for rank in job:
            rank.exchanger._connection.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        wait_until(lambda: len(etcd_world.keys()) <= len(job), what="its keys go")
        began = time.monotonic()
        key = publish_qp(other, etcd_world.job, 2)
        wait_until(lambda: key in etcd_world.keys())
        took_s = time.monotonic() - began
        assert took_s < 3 * usual_s + 1, (usual_s, took_s)


def test_who_may_put_a_link_beside_a_named_socket_empties_nobodys_file(
    softrnic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's directory that a group may write: the lock is exchanged for a link once it has been opened."""
    path, treasure = str(softrnic_dir / "b.sock"), tmp_path / "treasure"
    treasure.write_text("kept")
    real = socket_path._take

    def exchanged(lock: int, name: str) -> None:
        real(lock, name)
        os.unlink(path + ".lock")
        os.symlink(treasure, path + ".lock")

    monkeypatch.setattr(socket_path, "_take", exchanged)
    with contextlib.suppress(OSError):
        socket_path.bind_socket(path).close()
    assert treasure.read_text() == "kept"


def test_a_broker_that_does_not_answer_pings_is_sent_none_after_one_that_did(
    etcd_world: EtcdWorld, softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an older release started, as on a host where the package has been changed meanwhile."""
    monkeypatch.setattr(etcd_module, "PING_S", 1.0)
    path = str(softrnic_dir / "b.sock")
    heard: list[list[str]] = []
    stop = threading.Event()
    with socket_path.bind_socket(path) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                for answers in (True, False):
                    with listener.accept()[0] as sock:
                        reader = wire.FrameReader()
                        heard.append([])
                        hello = {"ev": "hello", "pid": os.getpid(), "pid_namespace": wire.pid_namespace()}
                        first = True
                        while not stop.is_set():
                            data = sock.recv(1 << 16)
                            if not data:
                                break
                            heard[-1] += [str(frame["op"]) for frame in reader.feed(data)]
                            if first:
                                sock.sendall(wire.encode(hello | ({"answers": True} if answers else {})))
                                sock.sendall(wire.encode({"ev": "up"}))
                                first = False
                            if "ping" in heard[-1]:
                                break

        thread = threading.Thread(target=serve)
        thread.start()
        one = etcd_world.make(broker=path)
        one.next(Connected)
        one.next(Unavailable)
        one.next(Connected)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            one.poll(0.02)
        one.exchanger.close()
        stop.set()
        thread.join()
    assert heard[0] == ["hello", "ping"]
    assert "ping" not in heard[1]


def test_who_comes_to_a_broker_that_stands_still_is_served_before_protection_is_given_up(
    etcd_world: EtcdWorld, config: Config
) -> None:
    """SHIFTVERBS_REQUIRE=1 ends a QP that is not PROTECTED in its 30 s; with a broker of its own it takes one."""
    changes: dict[str, Any] = {"broker": config.broker, "run_dir": config.run_dir, "broker_idle_exit_s": 60}
    first = etcd_world.make(**changes)
    first.next(Connected)
    broker = first.exchanger.broker_pid  # type: ignore[attr-defined]
    first.exchanger.close()
    stop_process(broker)
    try:
        began = time.monotonic()
        one = etcd_world.make(**changes)
        one.next(Connected, 60)
        took_s = time.monotonic() - began
        wait_until(lambda: not running(broker), 60, "it gives way to a successor")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(broker, signal.SIGKILL)
    assert took_s < config.require_deadline_ms / 1000 - 5, took_s
