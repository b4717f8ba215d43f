# SPDX-License-Identifier: BSD-3-Clause
"""`make train` with a very small model: the five settings to their ends, and what their ranks say by hand."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from harness import free_port

from benchmarks.suite.lab import Lab, SuiteError
from benchmarks.train import cli, launcher
from benchmarks.train.record import Run
from benchmarks.train.settings import SETTINGS


@pytest.fixture(scope="module", autouse=True)
def needs_torch() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # tests/torch has that name, too
        pytest.skip("torch is not there: apt-get install python3-torch libopenblas0-pthread")


JOB = launcher.Job("tiny", epochs=3, epoch_steps=60, flap_s=0.3)


@pytest.fixture(scope="module")
def lab():
    with Lab() as one:
        yield one


def supervise(lab: Lab, number: int, fault: str = "down", job: launcher.Job = JOB) -> Run:
    return launcher.Supervisor(lab, SETTINGS[number], job, fault, lambda *_: None).supervise()


@pytest.fixture(scope="module")
def undisturbed(lab):
    run = supervise(lab, 1)
    assert len(run.lives) == 1 and run.failed is None and run.paths == ["soft0"]
    assert [step for step, _ in run.lives[0].checkpoints] == [60, 120, 180]
    assert len(set(run.digests)) == 1 and len(run.digests) == 2
    losses = [step.loss for step in run.lives[0].steps]
    assert losses[-1] < losses[0]
    return run


@pytest.mark.slow
def test_plain_pyverbs_dies_and_goes_on_from_its_checkpoint(lab, undisturbed):
    run = supervise(lab, 2)
    died, done = run.lives
    assert died.end == "died" and done.end == "done"
    assert JOB.fails_at <= died.steps[-1].number < 120
    assert done.resumed_at == 60 and done.steps[0].number == 61
    assert run.digests == undisturbed.digests


@pytest.mark.slow
def test_a_busy_backup_carries_it_to_the_next_checkpoint(lab, undisturbed):
    run = supervise(lab, 3)
    stopped, done = run.lives
    assert stopped.end == "stopped" and done.end == "done"
    (pause,) = stopped.pauses
    assert pause["saved"] and JOB.fails_at <= pause["step"]
    assert stopped.steps[-1].number == done.resumed_at and done.resumed_at % 60 == 0
    assert run.paths[:2] == ["soft0", "soft1"] and run.paths[-1] == "soft0"
    assert run.digests == undisturbed.digests


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "lost-ack"])
def test_an_idle_backup_carries_it_to_its_end(lab, undisturbed, fault):
    run = supervise(lab, 4, fault)
    assert len(run.lives) == 1 and run.paths == ["soft0", "soft1"]
    assert run.digests == undisturbed.digests


@pytest.mark.slow
def test_after_a_flap_it_comes_home(lab, undisturbed):
    job = launcher.Job("tiny", epochs=3, epoch_steps=300, flap_s=0.3)
    run = supervise(lab, 5, job=job)
    assert len(run.lives) == 1 and run.paths[0] == run.paths[-1] == "soft0" and "soft1" in run.paths
    assert run.healed - run.failed < 5


@pytest.mark.slow
def test_four_ranks_on_two_hosts(lab):
    job = launcher.Job("tiny", ranks=4, epochs=2, epoch_steps=20)
    run = supervise(lab, 4, job=job)
    assert len(run.digests) == 4 and len(set(run.digests)) == 1


def test_a_job_that_cannot_start_says_what_its_ranks_said(lab):
    with pytest.raises(SuiteError, match=r"(?s)ended with .*invalid choice: 'huge'"):
        supervise(lab, 1, job=launcher.Job("huge"))


@pytest.mark.slow
def test_the_command_writes_table_json_and_figure(tmp_path, capsys):
    arguments = [
        "--model",
        "tiny",
        "--steps",
        "20",
        "--settings",
        "4",
        "--no-weights",
        "--output",
        str(tmp_path),
    ]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert re.search(r"\(4\) fatal, shift, idle backup +[\d.]+ s +-?[\d.]+ s \(-?[\d.]+%\)", said)
    assert re.search(r"\(4\) .*down +bit for bit +soft0 → soft1", said)
    record = json.loads((tmp_path / "training.json").read_text())
    assert set(record["breakdown"]) == {"1", "4"} and record["weights"][0]["is_same"] is True
    assert [run["paths"] for run in record["runs"]] == [["soft0"], ["soft0", "soft1"]]
    assert (tmp_path / "training.svg").exists() and (tmp_path / "training.png").exists()


@pytest.mark.slow
def test_ranks_by_hand(spawn_ranks, tmp_path):
    """As on real NICs: one command per host, and again after its end."""
    for expected in (10, 20):
        for child in spawn_ranks(["--epochs", str(expected // 10), "--steps=10", "--model=tiny"], tmp_path):
            text = child.succeed(60)
            assert re.search(rf"step {expected} on soft0, loss [\d.]+, \d+ ms", text)
            assert f"done step={expected} digest=" in text
    assert "begin step=10" in text
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "rank0-step00000010.pt",
        "rank0-step00000020.pt",
    ]


@pytest.fixture
def spawn_ranks(spawn, shared_etcd):
    def start(arguments: list[str], directory: Path):
        port = str(free_port())
        return [
            spawn(
                *("-m", "benchmarks.train.rank", f"--port={port}", "--device=soft0", *arguments),
                *(f"--checkpoints={directory / host}", *where),
                host=host,
                softrnic="2",
                env={"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": f"hand-{port}"},
            )
            for host, where in (("a", []), ("b", ["--server=127.0.0.1"]))
        ]

    return start
