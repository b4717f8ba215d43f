"""The life of the broker and of what hangs on it: crashes on every side, outages, batches, one broker for many."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn, free_port
from harness import wait_until as wait_until_within

from shiftverbs.config import Config
from shiftverbs.exchanger import (
    Connected,
    Exchanger,
    Found,
    Rejected,
    Unavailable,
    open_exchanger,
    qp_key,
    wire,
)
from shiftverbs.exchanger import start as start_module
from shiftverbs.exchanger.etcd import EtcdExchanger
from shiftverbs.exchanger.settings import store_identity

from .conftest import GID_A, GID_B, EtcdWorld, Watched, found_keys, publish_qp, qp_record

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


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    """As harness.wait_until; a broker's start takes seconds on a machine that is busy otherwise."""
    wait_until_within(condition, timeout_s, what)


def running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def leases(server: EtcdServer) -> set[str]:
    """The ids of all leases."""
    answer = server.call("lease/leases", {})
    found = answer.get("leases", [])
    assert isinstance(found, list)
    return {entry["ID"] for entry in found}


def requests(server: EtcdServer) -> dict[str, int]:
    """How many messages each method of etcd's gRPC interface has received so far."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{server.endpoint}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    counts: dict[str, int] = {}
    for method, count in re.findall(r'^grpc_server_msg_received_total\{grpc_method="(\w+)".*\} (\S+)$', text, re.M):
        counts[method] = counts.get(method, 0) + int(float(count))
    return counts


@contextlib.contextmanager
def stopped_broker(watched: Watched) -> Iterator[None]:
    """Hold an exchanger's broker still for a while."""
    pid = watched.exchanger.broker_pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def application(spawn: Spawn, etcd_world: EtcdWorld) -> Callable[..., object]:
    """Start APPLICATION as a process of its own."""

    def start(**extra: str | None):
        env = {
            "SHIFTVERBS_ETCD": etcd_world.server.endpoint,
            "SHIFTVERBS_JOB": etcd_world.job,
            "TESTS": str(Path(__file__).resolve().parents[1]),
            **extra,
        }
        return spawn("-c", APPLICATION, host=None, softrnic=None, env=env)

    return start


# The application's process


def test_neither_grpc_nor_protobuf_reaches_the_application(application, etcd_world: EtcdWorld) -> None:
    app = application()
    app.expect("^broker")
    app.send("print('loaded', sorted(m for m in sys.modules if m.split('.')[0] in ('grpc', 'etcd3', 'google')))")
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


def test_killed_application_leaves_nothing_though_a_forked_child_lives_on(application, etcd_world: EtcdWorld) -> None:
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


# The broker's death


def test_a_killed_broker_is_replaced_and_everything_republished(etcd_world: EtcdWorld) -> None:
    one = etcd_world.make(lease_ttl_s=2)
    reader = etcd_world.make()
    before = leases(etcd_world.server)
    one.next(Connected)
    keys = {publish_qp(one, etcd_world.job, qpn) for qpn in range(20)}
    gone = publish_qp(one, etcd_world.job, 99)
    for key in keys:
        reader.exchanger.want(key)
    reader.until(lambda events: found_keys(events) == keys)
    one.exchanger.want(qp_key(etcd_world.job, GID_B, 5))
    one.next(Found)
    (lease,) = leases(etcd_world.server) - before - {""} if len(leases(etcd_world.server) - before) == 1 else {""}
    exchanger = one.exchanger
    assert isinstance(exchanger, EtcdExchanger)
    pid = exchanger.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    one.next(Unavailable)
    # Meanwhile life goes on.
    exchanger.withdraw(gone)
    added = publish_qp(one, etcd_world.job, 100)
    one.next(Connected)
    assert exchanger.broker_pid not in (pid, None)
    wait_until(lambda: added in etcd_world.keys())
    # The dead broker's lease runs out; what was republished does not go with it.
    if lease:
        wait_until(lambda: lease not in leases(etcd_world.server))
    wait_until(lambda: gone not in etcd_world.keys())
    assert set(etcd_world.keys()) == keys | {added}
    # What was wanted still is, and its unchanged state is no news.
    assert not [event for event in one.events if isinstance(event, Found)]
    value = qp_record(etcd_world.job, 5, GID_B).to_json()
    reader.exchanger.publish(qp_key(etcd_world.job, GID_B, 5), value)
    assert one.next(Found).value == value


def test_a_broker_that_cannot_start_says_why(
    etcd_world: EtcdWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "etcd3.py").write_text("raise ImportError('no etcd3 in this test')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "shiftverbs.exchanger"):
        one = etcd_world.make()
        assert "no etcd3 in this test" in one.next(Unavailable).reason
        one.poll(0.5)
        assert len(caplog.records) == 1
    # It is tried again for ever: once etcd3 is there, all is well.
    (tmp_path / "etcd3.py").unlink()
    one.next(Connected, timeout_s=60)


def test_a_broker_that_dies_of_its_python_says_why(
    etcd_world: EtcdWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'shiftverbs.exchanger.broker' in ' '.join(sys.orig_argv): raise SystemExit('broken python')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = etcd_world.make()
    assert "broken python" in one.next(Unavailable).reason


# Run in every broker that a test starts: holds up the import of a module until a file says how it shall go on.
GATE = """
import os, sys, time
class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            while not os.path.exists({file!r}) and os.path.exists({directory!r}):
                time.sleep(0.01)
            if os.path.exists({file!r}) and os.stat({file!r}).st_size:
                raise ImportError(open({file!r}).read())
if "shiftverbs.exchanger.broker" in sys.orig_argv:
    sys.meta_path.insert(0, Gate())
"""


@pytest.fixture
def gate(softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[str], object]]:
    """Shut a module's import in brokers. The result opens it again, or has it fail: for the reason it is given."""

    def shut(module: str) -> Callable[[str], object]:
        file = softrnic_dir / "go-on"
        text = GATE.format(module=module, file=str(file), directory=str(softrnic_dir))
        (softrnic_dir / "sitecustomize.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(softrnic_dir))

        def open_(reason: str = "") -> None:
            (softrnic_dir / "go-on.new").write_text(reason)
            (softrnic_dir / "go-on.new").rename(file)

        return open_

    return shut


def test_a_broker_says_hello_before_it_loads_what_takes_long(etcd_world: EtcdWorld, gate) -> None:
    go_on = gate("grpc")
    one = etcd_world.make()
    key = publish_qp(one, etcd_world.job, 1)
    withdrawn = publish_qp(one, etcd_world.job, 2)
    one.exchanger.want(key)
    wait_until(lambda: one.poll() or one.exchanger.broker_pid, what="hello")  # type: ignore[attr-defined]
    one.exchanger.withdraw(withdrawn)
    wait_until(lambda: one.poll() or "loads gRPC and etcd3, for " in one.exchanger.progress, what="the phase is told")
    assert one.events == []
    # What was asked for meanwhile is done in one go.
    go_on("")
    one.next(Connected)
    assert one.exchanger.progress == ""
    one.until(lambda events: found_keys(events) == {key})
    assert etcd_world.keys() == [key]


def test_who_leaves_while_the_broker_loads_does_not_wait(etcd_world: EtcdWorld, gate) -> None:
    gate("grpc")
    one = etcd_world.make(exchanger_close_ms=60_000)
    publish_qp(one, etcd_world.job, 1)
    pid = wait_until_within(lambda: one.poll() or one.exchanger.broker_pid, 30)  # type: ignore[attr-defined]
    started = time.monotonic()
    one.exchanger.close()
    assert time.monotonic() - started < 30
    wait_until(lambda: not running(pid), what="it ends without having loaded anything")


def test_all_that_a_shared_broker_cannot_serve_hear_why(etcd_world: EtcdWorld, shared_config: Config, gate) -> None:
    go_on = gate("etcd3")
    ones = [Watched(EtcdExchanger(shared_config)) for _ in range(3)]
    try:
        for one in ones:
            wait_until(lambda one=one: one.poll() or one.exchanger.broker_pid, what="hello")
        go_on("no etcd3 in this test")
        for one in ones:
            assert "the broker cannot start: ImportError: no etcd3 in this test" in one.next(Unavailable).reason
        go_on("")
        for one in ones:
            one.next(Connected)
    finally:
        for one in ones:
            one.exchanger.close()


def test_a_broker_that_says_nothing_is_told_of(etcd_world: EtcdWorld, gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "START_TIMEOUT_S", 1.0)
    go_on = gate("shiftverbs")
    one = etcd_world.make()
    wait_until(lambda: re.fullmatch(r"the broker, process \d+, has not said hello, for .* s", one.exchanger.progress))
    reason = one.next(Unavailable).reason
    assert re.fullmatch(
        r"the broker does not say hello in 1 s; process \d+ \(state [SRD]\) has had \d+\.\d s of a processor, "
        r"the load is \d+\.\d",
        reason,
    ), reason
    assert one.exchanger.progress == ""
    monkeypatch.undo()  # the time limit, too
    go_on("")
    one.next(Connected)


# etcd's death


def test_an_absent_etcd_is_told_and_hangs_nothing(job: str, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    config = Config.from_environ({"SHIFTVERBS_ETCD": endpoint, "SHIFTVERBS_JOB": job})
    with caplog.at_level(logging.WARNING, "shiftverbs.exchanger"):
        one = Watched(EtcdExchanger(config.replace(etcd_backoff_max_ms=100)))
        started = time.monotonic()
        publish_qp(one, job, 1)
        one.exchanger.want(qp_key(job, GID_B, 2))
        assert time.monotonic() - started < 1
        assert endpoint in one.next(Unavailable).reason
        one.poll(1.0)
        assert not [event for event in one.events if isinstance(event, Found | Connected)]
        started = time.monotonic()
        one.exchanger.close()
        assert time.monotonic() - started < 3
    assert len(caplog.records) == 1


def test_an_etcd_that_comes_late_gets_everything(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    world.server.stop()
    one = world.make(etcd_backoff_max_ms=500)
    key = publish_qp(one, world.job, 1)
    one.next(Unavailable)
    world.server.start()
    one.next(Connected)
    wait_until(lambda: world.keys() == [key])


@pytest.mark.parametrize("data_lost", [False, True])
def test_an_etcd_that_comes_back_gets_everything_again(own_etcd_world: EtcdWorld, data_lost: bool) -> None:
    world = own_etcd_world
    one, reader = (world.make(etcd_backoff_max_ms=500) for _ in range(2))
    keys = {publish_qp(one, world.job, qpn) for qpn in range(150)}
    missing = qp_key(world.job, GID_B, 7)
    for key in [*keys, missing]:
        reader.exchanger.want(key)
    reader.until(lambda events: found_keys(events) == keys)
    reader.until(lambda events: Found(missing, None) in events)
    world.server.kill()
    one.next(Unavailable)
    reader.next(Unavailable)
    reader.events.clear()
    late = publish_qp(one, world.job, 999)
    one.exchanger.withdraw(min(keys))
    if data_lost:
        old, world.server = world.server, EtcdServer()
        world.server.port, world.server._peer_port = old.port, old._peer_port
    try:
        world.server.start()
        one.next(Connected)
        reader.next(Connected)
        expected = sorted((keys | {late}) - {min(keys)})
        one.until(lambda _: world.keys() == expected)
        reader.until(lambda events: Found(min(keys), None) in events)
        # And changes are seen again.
        one.exchanger.publish(
            missing, qp_record(world.job, 7, default=qp_record(world.job, 7, gid=GID_B).default).to_json()
        )
        reader.until(lambda events: missing in found_keys(events))
    finally:
        if data_lost:
            world.close()
            world.server.close()


def test_a_lost_lease_is_replaced(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make(lease_ttl_s=3)
    keys = sorted(publish_qp(one, world.job, qpn) for qpn in range(3))
    wait_until(lambda: world.keys() == keys)
    for lease in leases(world.server):
        world.server.call("lease/revoke", {"ID": lease})
    assert world.keys() == []
    # The next keep-alive finds out.
    wait_until(lambda: world.keys() == keys)
    for lease in leases(world.server):
        world.server.call("lease/revoke", {"ID": lease})
    # So does the next put, at once.
    key = publish_qp(one, world.job, 77)
    wait_until(lambda: world.keys() == sorted([*keys, key]))


def test_a_hanging_etcd_is_noticed_and_does_not_hold_up_close(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make(lease_ttl_s=2, etcd_timeout_ms=500)
    publish_qp(one, world.job, 1)
    wait_until(world.keys)
    assert world.server.process is not None
    world.server.process.send_signal(signal.SIGSTOP)
    try:
        assert "DEADLINE_EXCEEDED" in one.next(Unavailable).reason
        started = time.monotonic()
        one.exchanger.close()
        assert time.monotonic() - started < 3
    finally:
        world.server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not world.keys(), what="the lease runs out")


def test_the_next_endpoint_is_tried(etcd_world: EtcdWorld) -> None:
    endpoints = f"127.0.0.1:{free_port()},{etcd_world.server.endpoint}"
    config = Config.from_environ({"SHIFTVERBS_ETCD": endpoints, "SHIFTVERBS_JOB": etcd_world.job})
    with EtcdExchanger(config) as exchanger:
        one = Watched(exchanger)
        one.next(Connected)
        key = publish_qp(one, etcd_world.job, 1)
        wait_until(lambda: etcd_world.keys() == [key])


def test_one_outage_of_many_endpoints_is_told_once(job: str) -> None:
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    config = Config.from_environ({"SHIFTVERBS_ETCD": ",".join(endpoints), "SHIFTVERBS_JOB": job})
    with EtcdExchanger(config.replace(etcd_backoff_min_ms=10, etcd_backoff_max_ms=50)) as exchanger:
        one = Watched(exchanger)
        reason = one.next(Unavailable).reason
        assert all(endpoint in reason for endpoint in endpoints)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            one.poll(0.1)
        assert one.events == []


def test_changes_arrive_after_a_compaction(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one, reader = world.make(), world.make()
    key = publish_qp(one, world.job, 1)
    reader.exchanger.want(key)
    reader.until(lambda events: found_keys(events) == {key})
    # While the reader's broker is stopped, its watch falls behind what etcd keeps.
    with stopped_broker(reader):
        for instance in range(20):
            one.exchanger.publish(key, qp_record(world.job, 1, instance=f"{instance:016x}").to_json())
            wait_until(lambda wanted=f"{instance:016x}": wanted in _raw(world, key))
        revision = world.server.call("kv/range", {"key": "YQ=="})["header"]["revision"]  # type: ignore[index]
        world.server.call("kv/compaction", {"revision": revision, "physical": True})
    reader.next(Found, value=qp_record(world.job, 1, instance=f"{19:016x}").to_json())


def _raw(world: EtcdWorld, key: str) -> str:
    answer = world.server.call("kv/range", {"key": base64.b64encode(key.encode()).decode()})
    found = answer.get("kvs", [])
    assert isinstance(found, list)
    return base64.b64decode(found[0]["value"]).decode() if found else ""


# Batches


def test_a_thousand_keys_take_few_requests(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    a, b = world.make(), world.make()
    a.next(Connected)
    b.next(Connected)
    before = requests(world.server)
    keys = {qp_key(world.job, GID_A, qpn) for qpn in range(1000)}
    # While its broker is stopped, an application queues; so this does not depend on who is faster.
    with stopped_broker(b):
        for key in keys:
            b.exchanger.want(key)
    b.until(lambda events: sum(isinstance(event, Found) for event in events) == 1000)
    wants = requests(world.server)
    with stopped_broker(a):
        for qpn in range(1000):
            publish_qp(a, world.job, qpn)
    b.until(lambda events: found_keys(events) == keys)
    puts = requests(world.server)

    def spent(method: str, earlier: dict[str, int], later: dict[str, int]) -> int:
        return later.get(method, 0) - earlier.get(method, 0)

    # 1000 / 120 is 9; the broker reads its socket piecemeal, so a few are not full.
    assert 9 <= spent("Txn", before, wants) <= 30
    assert 9 <= spent("Txn", wants, puts) <= 30
    assert spent("Watch", before, puts) == 1
    assert spent("Put", before, puts) == spent("Range", before, puts) == 0


def test_keys_of_many_peers_get_watches_of_their_own(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one, other = world.make(), world.make()
    one.next(Connected)
    before = requests(world.server)
    keys = {qp_key(world.job, f"fe80::{number:x}", 5): f"fe80::{number:x}" for number in range(1, 101)}
    for key in keys:
        one.exchanger.want(key)
    one.until(lambda events: sum(isinstance(event, Found) for event in events) == 100)
    for key, gid in keys.items():
        other.exchanger.publish(key, qp_record(world.job, 5, gid=gid).to_json())
    one.until(lambda events: found_keys(events) == set(keys))
    assert requests(world.server)["Watch"] - before.get("Watch", 0) == 100
    # Cancelled ones are cancelled in etcd, too.
    for key in keys:
        one.exchanger.unwant(key)
    wait_until(lambda: requests(world.server)["Watch"] - before.get("Watch", 0) == 200)


def test_a_key_under_which_nothing_stands_is_let_go_of_as_well(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make()
    one.next(Connected)
    key = qp_key(world.job, GID_B, 5)
    one.exchanger.want(key)
    one.next(Found, key=key, value=None)
    wait_until(lambda: requests(world.server).get("Watch") == 1)
    one.exchanger.unwant(key)
    wait_until(lambda: requests(world.server)["Watch"] == 2, 5, "the watch is cancelled")


def test_withdrawals_are_batched_too(own_etcd_world: EtcdWorld) -> None:
    world = own_etcd_world
    one = world.make()
    one.next(Connected)
    keys = [publish_qp(one, world.job, qpn) for qpn in range(500)]
    one.until(lambda _: len(world.keys()) == 500)
    before = requests(world.server)
    with stopped_broker(one):
        for key in keys:
            one.exchanger.withdraw(key)
    one.until(lambda _: not world.keys())
    assert requests(world.server)["Txn"] - before["Txn"] <= 20


# One broker for the host


@pytest.fixture
def shared_config(etcd_world: EtcdWorld, softrnic_dir: Path) -> Config:
    """A configuration with a shared broker's socket (in a directory with a short name)."""
    return etcd_world.config(broker=str(softrnic_dir / "b.sock"), broker_idle_exit_s=1)


def test_processes_share_a_broker_and_its_socket_is_private(etcd_world: EtcdWorld, shared_config: Config) -> None:
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


def test_a_broker_started_by_hand(etcd_world: EtcdWorld, softrnic_dir: Path, spawn: Spawn) -> None:
    path = str(softrnic_dir / "hand.sock")
    env = {"SHIFTVERBS_ETCD": etcd_world.server.endpoint}
    command = ("-m", "shiftverbs.exchanger.broker", "--socket", path)
    broker = spawn(*command, host=None, softrnic=None, env=env, name="broker")
    wait_until(lambda: os.path.exists(path))
    with EtcdExchanger(etcd_world.config(broker=path)) as exchanger:
        one = Watched(exchanger)
        one.next(Connected)
        assert exchanger.broker_pid == broker.pid
        second = spawn(*command, host=None, softrnic=None, env=env, name="second broker")
        assert second.wait() == 1
        assert "serves this socket already" in second.output
        publish_qp(one, etcd_world.job, 1)
        wait_until(etcd_world.keys)
        # Its end withdraws what it held.
        broker.signal(signal.SIGTERM)
        assert broker.wait() == 0
        assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ((), {"SHIFTVERBS_ETCD": "a:1"}, "SHIFTVERBS_BROKER"),
        (("--socket", "/tmp/never.sock"), {}, "SHIFTVERBS_ETCD"),
        (("--socket", "/tmp/never.sock"), {"SHIFTVERBS_ETCD": "a:x"}, "SHIFTVERBS_ETCD='a:x'"),
        (("--socket", "/nowhere/never.sock"), {"SHIFTVERBS_ETCD": "a:1"}, "/nowhere/never.sock"),
    ],
)
def test_a_broker_started_wrongly_says_so(
    spawn: Spawn, arguments: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    broker = spawn("-m", "shiftverbs.exchanger.broker", *arguments, host=None, softrnic=None, env=env)
    assert broker.wait() == 1
    assert words in broker.output
    assert "Traceback" not in broker.output


def test_what_is_in_the_sockets_way_is_not_removed(etcd_world: EtcdWorld, softrnic_dir: Path) -> None:
    path = softrnic_dir / "precious"
    path.write_text("data")
    with EtcdExchanger(etcd_world.config(broker=str(path))) as exchanger:
        reason = Watched(exchanger).next(Unavailable).reason
    assert path.read_text() == "data"
    assert str(path) in reason


# The rest


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


def test_the_store_refusing_a_value_is_told(own_etcd_world: EtcdWorld) -> None:
    """Somebody fills etcd until it raises its no-space alarm: an outage with a reason, no flood, no loss."""
    world = own_etcd_world
    one = world.make(etcd_backoff_max_ms=300)
    one.next(Connected)
    world.server.call("maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"})
    key = publish_qp(one, world.job, 1)
    assert "space" in one.next(Unavailable).reason
    world.server.call("maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE"})
    wait_until(lambda: world.keys() == [key])
    assert not [event for event in one.events if isinstance(event, Rejected)]


def test_an_etcd_without_space_is_still_read_and_watched(own_etcd_world: EtcdWorld, softrnic_dir: Path) -> None:
    """What cannot be written keeps nobody from reading, nor anybody's keys from living on."""
    world = own_etcd_world
    shared = {"broker": str(softrnic_dir / "b.sock"), "broker_idle_exit_s": 1, "lease_ttl_s": 2}
    one, two = world.make(**shared), world.make(**shared)
    one.next(Connected)
    two.next(Connected)
    first, gone = publish_qp(one, world.job, 1), publish_qp(one, world.job, 2)
    two.exchanger.want(gone)
    two.next(Found, key=gone, value=qp_record(world.job, 2).to_json())
    before = requests(world.server)
    world.server.call("maintenance/alarm", {"action": "ACTIVATE", "alarm": "NOSPACE"})
    late = publish_qp(two, world.job, 3)
    assert "space" in two.next(Unavailable).reason
    # One that comes now has not even a lease; it reads all the same.
    three = world.make(**shared)
    three.exchanger.want(first)
    three.next(Found, key=first, value=qp_record(world.job, 1).to_json())
    blocked = publish_qp(three, world.job, 4)
    assert "space" in three.next(Unavailable).reason
    # Withdrawals go through, they make room; watches tell of them.
    one.exchanger.withdraw(gone)
    two.next(Found, key=gone, value=None)
    # Leases outlive their time to live.
    renewed = requests(world.server).get("LeaseKeepAlive", 0)
    wait_until(lambda: requests(world.server)["LeaseKeepAlive"] >= renewed + 8)
    assert world.keys() == [first]
    assert not [event for event in one.events if isinstance(event, Unavailable)]
    # All on one watch stream: no session was given up.
    assert requests(world.server)["LeaseGrant"] - before["LeaseGrant"] < 30
    world.server.call("maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE"})
    two.next(Connected)
    three.next(Connected)
    wait_until(lambda: world.keys() == sorted([first, late, blocked]))


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
