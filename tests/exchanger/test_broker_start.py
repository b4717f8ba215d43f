# SPDX-License-Identifier: BSD-3-Clause
"""A broker's start: slow, in vain, wrong, by hand, and once more after it was killed."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Spawn
from harness import wait_until as wait_until_within

from exchanger.around import lease_of, leases, running, wait_until
from exchanger.conftest import GID_B, EtcdWorld, Watched, found_keys, publish_qp, qp_record
from shiftverbs.config import Config
from shiftverbs.exchanger import Connected, Found, Unavailable, qp_key
from shiftverbs.exchanger import start as start_module
from shiftverbs.exchanger.etcd import EtcdExchanger

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


def test_a_killed_broker_is_replaced_and_everything_republished(etcd_world: EtcdWorld) -> None:
    one = etcd_world.make(lease_ttl_s=2)
    reader = etcd_world.make()
    one.next(Connected)
    keys = {publish_qp(one, etcd_world.job, qpn) for qpn in range(20)}
    gone = publish_qp(one, etcd_world.job, 99)
    for key in keys:
        reader.exchanger.want(key)
    reader.until(lambda events: found_keys(events) == keys)
    one.exchanger.want(qp_key(etcd_world.job, GID_B, 5))
    one.next(Found)
    lease = lease_of(etcd_world.server, min(keys))
    assert lease in leases(etcd_world.server)
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
    wait_until(lambda: lease not in leases(etcd_world.server))
    wait_until(lambda: gone not in etcd_world.keys())
    assert set(etcd_world.keys()) == keys | {added}
    # What was wanted still is, and its unchanged state is no news.
    assert not [event for event in one.events if isinstance(event, Found)]
    value = qp_record(etcd_world.job, 5, GID_B)
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


def test_a_broker_says_hello_before_it_loads_what_takes_long(etcd_world: EtcdWorld, gate) -> None:
    go_on = gate("grpc")
    one = etcd_world.make()
    key = publish_qp(one, etcd_world.job, 1)
    withdrawn = publish_qp(one, etcd_world.job, 2)
    one.exchanger.want(key)
    wait_until(lambda: one.poll() or one.exchanger.broker_pid, what="hello")  # type: ignore[attr-defined]
    one.exchanger.withdraw(withdrawn)
    wait_until(
        lambda: one.poll() or "loads gRPC and etcd3, for " in one.exchanger.progress, what="the phase is told"
    )
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


def test_all_that_a_shared_broker_cannot_serve_hear_why(
    etcd_world: EtcdWorld, shared_config: Config, gate
) -> None:
    go_on = gate("etcd3")
    ones = [Watched(EtcdExchanger(shared_config)) for _ in range(3)]
    try:
        for one in ones:
            wait_until(lambda one=one: one.poll() or one.exchanger.broker_pid, what="hello")
        go_on("no etcd3 in this test")
        for one in ones:
            assert (
                "the broker cannot start: ImportError: no etcd3 in this test" in one.next(Unavailable).reason
            )
        go_on("")
        for one in ones:
            one.next(Connected)
    finally:
        for one in ones:
            one.exchanger.close()


def test_a_broker_that_is_killed_while_it_loads_is_told_of(etcd_world: EtcdWorld, gate) -> None:
    go_on = gate("grpc")
    one = etcd_world.make()
    wait_until(lambda: one.poll() or "loads gRPC" in one.exchanger.progress, what="the phase is told")
    os.kill(one.exchanger.broker_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert "the last it said: the broker loads gRPC and etcd3" in one.next(Unavailable).reason
    go_on("")
    one.next(Connected)


def test_a_broker_that_says_nothing_is_told_of(
    etcd_world: EtcdWorld, gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_module, "START_TIMEOUT_S", 1.0)
    go_on = gate("shiftverbs")
    one = etcd_world.make()
    wait_until(
        lambda: re.fullmatch(r"the broker, process \d+, has not said hello, for .* s", one.exchanger.progress)
    )
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
        ((), {"SHIFTVERBS_ETCD": "a:1", "SHIFTVERBS_BROKER": "own"}, "SHIFTVERBS_BROKER='own'"),
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
