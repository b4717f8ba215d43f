# SPDX-License-Identifier: BSD-3-Clause
"""What `shiftverbs status` and `top` show of what answers, answers badly or not at all.

On real processes: tests/failover/test_status.py.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Spawn

from shiftverbs.commands import status
from shiftverbs.telemetry import publisher, reader


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


class Fake:
    """A socket in the directory that behaves as told."""

    def __init__(self, run_dir: Path, name: str, serve: Callable[[socket.socket], None] | None) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(run_dir / name))
        self.listener.listen(8)
        if serve is not None:
            self.thread = threading.Thread(target=self._serve, args=(serve,), daemon=True)
            self.thread.start()

    def _serve(self, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (None, "does not answer"),
        (lambda connection: None, "gave no answer"),
        (lambda connection: connection.sendall(b"{\n"), "Expecting"),
        (lambda connection: connection.sendall(b"[1]\n"), "not understood"),
        (lambda connection: connection.sendall(b'{"pid": "1", "qps": []}\n'), "not understood"),
        (lambda connection: connection.sendall(b"\xff\xfe\n"), "codec|Expecting"),
    ],
    ids=["silent", "closes", "broken", "a list", "no pid", "no text"],
)
def test_who_answers_badly_is_named_and_the_others_are_shown(
    run_dir: Path, serve: Callable[[socket.socket], None] | None, why: str
) -> None:
    good = {"pid": 7, "qps": []}
    with (
        Fake(run_dir, "5-0.sock", serve),
        Fake(run_dir, "7-0.sock", lambda connection: connection.sendall(json.dumps(good).encode())),
    ):
        answers = reader.ask(run_dir, 0.5)
    assert answers.processes == [good]
    ((pid, said),) = answers.silent
    assert pid == 5 and re.search(why, said), said


def test_what_is_not_ours_is_left_alone(run_dir: Path) -> None:
    (run_dir / "5-0.sock").write_text("a file")
    (run_dir / "readme").write_text("another")
    assert reader.ask(run_dir) == reader.Answers()
    assert sorted(path.name for path in run_dir.iterdir()) == ["5-0.sock", "readme"]


def test_a_directory_that_others_may_write_to_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o777)
    with pytest.raises(PermissionError) as refused:
        publisher.Publisher(dict, "0123456789abcdef", run_dir)
    assert refused.value.errno == errno.EPERM
    run_dir.chmod(0o700)
    (run_dir / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        publisher.Publisher(dict, "0123456789abcdef", run_dir / "file")


def test_a_snapshot_that_fails_costs_the_asker_alone(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def take() -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no")
        return {"pid": os.getpid(), "qps": []}

    shows = publisher.Publisher(take, "0123456789abcdef", run_dir)
    try:
        ((_, why),) = reader.ask(run_dir).silent
        assert why == "it gave no answer (another user's, or its log says why)"
        assert reader.ask(run_dir).processes == [{"pid": os.getpid(), "qps": []}]
    finally:
        shows.close()
    assert not shows.path.exists()
    assert "gets no answer from this process" in caplog.text


def test_without_a_descriptor_for_who_asks_it_waits_instead_of_spinning(run_dir: Path) -> None:
    shows = publisher.Publisher(lambda: {"pid": os.getpid(), "qps": []}, "0123456789abcdef", run_dir)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            for asks in first, second:
                asks.connect(os.fspath(shows.path))
                asks.settimeout(1.0)
            # accept() takes its descriptor before it waits: that one may go to the first.
            with contextlib.suppress(TimeoutError):
                first.recv(1)
            used_s = time.process_time()
            with pytest.raises(TimeoutError):
                second.recv(1)
            used_s = time.process_time() - used_s
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            second.settimeout(20.0)
            with second.makefile("rb") as answer:
                assert json.loads(answer.read()) == {"pid": os.getpid(), "qps": []}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            shows.close()
    assert used_s < 0.3, "a second of a processor is what spinning takes"


def process(qps: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    made = {
        "pid": 4711, "host": "node-17.cluster.example", "command": ["python", "train.py", "--with", "x" * 90],
        "instance": "0" * 16, "job": "j" * 40, "started": 0.0, "qps": qps,
        "exchanger": {"etcd": ["http://e:2379"], "answers": False, "why": "etcd: " + "y" * 90, "broker": None},
        "totals": {"switches": 123456, "homecomings": 123456, "away_s": 1.0, "failed": {"the fence hung": 2}},
        "nics": [{"name": f"mlx5_bond_{n}", "state": "DOWN", "error": None} for n in range(16)],
    }  # fmt: skip
    return {**made, **changes}


def qp(number: int, **changes: Any) -> dict[str, Any]:
    made = {
        "qp_num": number, "device": "mlx5_bond_0", "status": "PROTECTED", "why": None, "state": "WAIT_SIGNALED",
        "recv_state": "FALLBACK", "path": "mlx5_bond_1", "recv_path": "mlx5_bond_0", "fallback_ms": 12345.678,
        "away_s": 123456.0, "last_failure": {"ago_s": 3.0, "why": "mlx5_bond_0: " + "z" * 70},
        "counters": {"rx": 1, "acked": 2},
    }  # fmt: skip
    return {**made, **changes}


def drawn(answers: reader.Answers, rates: Any = None, each_qp: bool = False) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False).print(status.screen(answers, rates, each_qp))
    return stream.getvalue()


@pytest.mark.parametrize("rates", [None, {("0" * 16, 1): 123456789.0}])
def test_eighty_columns_are_enough_whatever_there_is_to_show(rates: Any) -> None:
    failed = qp(0xFFFFFF, status="FAILED", why="w" * 90)
    answers = reader.Answers([process([qp(1), failed])], [(5, "it does not answer")])
    text = drawn(answers, rates)
    assert all(len(line) <= 80 for line in text.splitlines()), text
    for word in (
        "4711",
        "123456",
        "gave up 2",
        "0xffffff",
        "FAILED",
        "pid 5: it does not answer",
        "3.0 s ago",
    ):
        assert word in text


def test_slow_paths_have_a_line_each_and_a_detector_that_failed_is_told_of() -> None:
    slow = {
        "path": "mlx5_0", "peer": "fe80::1", "ratio": 3.21, "since_s": 65.0, "samples": 40, "lost_s": 12.5,
        "fault": "path", "why": "this path", "qps": 2,
    }  # fmt: skip
    stragglers = {"mode": "observe", "works": False, "slow": [slow]}
    text = " ".join(drawn(reader.Answers([process([qp(1)], stragglers=stragglers)])).split())
    line = "slow: mlx5_0 to fe80::1 (2 QPs), 3.2 times as long for 65 s, 12 s lost in 40 samples: this path"
    assert line in text and "the straggler detector failed" in text


def test_a_thousand_qps_are_summed_up_and_shown_one_by_one_where_that_is_asked_for() -> None:
    many = [qp(number, path="mlx5_bond_0" if number % 4 else "mlx5_bond_1") for number in range(1, 1001)]
    answers = reader.Answers([process(many)])
    text = drawn(answers, {("0" * 16, 1): 1000.0, ("0" * 16, 5): 500.0})
    assert re.search(r"mlx5_bond_0 +mlx5_bond_0 +PROTECTED +750 .*1\.5 k", text), text
    assert re.search(r"mlx5_bond_0 +mlx5_bond_1 +PROTECTED +250", text), text
    assert len(text.splitlines()) < 15
    assert len(drawn(answers, None, True).splitlines()) > 1000


def test_no_process_at_all(spawn: Spawn, run_dir: Path) -> None:
    env = {"SHIFTVERBS_RUN_DIR": str(run_dir)}
    child = spawn("-m", "shiftverbs", "status", softrnic=None, env=env, name="status")
    assert child.wait(20) == 1
    assert "No process runs under shiftverbs" in child.output
