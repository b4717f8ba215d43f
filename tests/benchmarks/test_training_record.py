# SPDX-License-Identifier: BSD-3-Clause
"""`make train`: its arithmetic, its figure and its command line, without a training."""

from __future__ import annotations

import pytest

from benchmarks.train import cli, exactness, slow_rail
from benchmarks.train.figure import draw
from benchmarks.train.launcher import Job
from benchmarks.train.record import Life, Run, Step, break_down
from benchmarks.train.settings import FAULTS, SETTINGS, SLOW_RAIL, break_network


def life(began: float, resumed_at: int, last: int, step_s: float = 1.0, end: str = "done") -> Life:
    """Steps of one length each, with a checkpoint after each tenth that takes no time."""
    found = Life(resumed_at, began, end=end)
    for number in range(resumed_at + 1, last + 1):
        found.ended = began + (number - resumed_at) * step_s
        found.steps.append(Step(number, found.ended, 1.0, ("soft0",)))
        if number % 10 == 0:
            found.checkpoints.append((number, found.ended))
    return found


def run(*lives: Life, number: int = 2, **more: object) -> Run:
    return Run(number, SETTINGS[number].name, "down", 10, list(lives), digests=["x", "x"], **more)


def test_a_restart_is_rescheduling_and_retraining():
    """Died behind step 18, went on 7 s later from the checkpoint of step 10: 8 steps are done twice."""
    parts = break_down(run(life(100.0, 0, 18, end="died"), life(125.0, 10, 40)), 40.0)
    assert parts.total_s == 55.0 and parts.slowdown_s == 15.0
    assert (parts.rescheduling_s, parts.retraining_s, parts.slower_s) == (7.0, 8.0, 0.0)
    assert parts.fraction(parts.retraining_s) == pytest.approx(8 / 55)
    assert parts.to_json()["retraining_fraction"] == pytest.approx(8 / 55)


def test_who_stops_at_a_checkpoint_retrains_nothing():
    stopped = life(0.0, 0, 20, end="stopped")
    stopped.checkpoints[-1] = (20, 20.5)  # it took half a second
    stopped.pauses.append({"step": 19, "saved": True, "s": 0.25, "why": ""})
    parts = break_down(run(stopped, life(23.5, 20, 40)), 40.0)
    assert (parts.rescheduling_s, parts.retraining_s, parts.slower_s, parts.paused_s) == (3.0, 0.0, 0.5, 0.25)


def test_slower_steps_are_the_rest_and_may_be_faster():
    assert break_down(run(life(0.0, 0, 40, 1.25)), 40.0).slower_s == 10.0
    assert break_down(run(life(0.0, 0, 40, 0.5)), 40.0).slower_s == -20.0


def test_a_life_without_a_step_is_rescheduling():
    parts = break_down(run(life(0.0, 0, 18, end="died"), Life(end="died"), life(30.0, 10, 40)), 40.0)
    assert parts.rescheduling_s == 12.0


def test_progress_falls_back_to_the_checkpoint():
    points = run(life(100.0, 0, 18, end="died"), life(125.0, 10, 40)).progress()
    assert points[0] == (0.0, 0.0) and points[18] == (18.0, 1.8)
    assert points[19] == (25.0, 1.0) and points[-1] == (55.0, 4.0)


def test_weights_are_the_same_on_all_ranks_or_not_at_all():
    one, other = run(life(0.0, 0, 40)), run(life(0.0, 0, 40))
    assert exactness.compare(other, one).is_same
    other.digests = ["x", "y"]
    assert not exactness.compare(other, one).is_same
    other.digests = ["y", "y"]
    assert not exactness.compare(other, one).is_same
    other.digests = []
    with pytest.raises(ValueError, match="without weights"):
        exactness.compare(other, one)


def test_all_failures_are_compared():
    assert {fault for setting, fault in exactness.cases() if setting.number == 4} == set(FAULTS)
    assert {fault for setting, fault in exactness.cases() if setting.number == 5} == set(FAULTS) - {"kill"}
    with pytest.raises(KeyError):
        break_network("fire")


def test_the_failure_is_where_the_paper_has_it():
    assert Job(epoch_steps=100).fails_at == 178 and Job(epoch_steps=100).last_step == 400


def test_the_figure_is_drawn(tmp_path):
    runs = {
        1: run(life(0.0, 0, 40), number=1),
        2: run(life(0.0, 0, 18, end="died"), life(25.0, 10, 40), failed=18.1),
        **{number: run(life(0.0, 0, 40, 1.1), number=number, failed=19.9) for number in (3, 4, 5)},
    }
    parts = {number: break_down(one, 40.0) for number, one in runs.items()}
    written = draw(tmp_path / "new", runs, parts, "a machine")
    assert [path.name for path in written] == ["training.png", "training.svg"]
    assert all(path.stat().st_size > 10_000 for path in written)
    text = written[1].read_text()
    assert all(setting.title in text for setting in SETTINGS.values())
    assert "rescheduling" in text and "slower steps" in text


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--settings", "1,x"], "'1,x' is no list of numbers"),
        (["--settings", "6"], "there is no setting 6"),
        (["--steps", "1"], "at least 2 epochs of 5 steps"),
        (["--fault", "fire"], "invalid choice: 'fire'"),
    ],
)
def test_a_wrong_command_line_is_named(capsys, arguments, text):
    with pytest.raises(SystemExit):
        cli.parse(arguments)
    assert text in capsys.readouterr().err
    assert cli.parse(["--settings", "5"]).numbers == [1, 5]


def slowed(left_at: int | None) -> Run:
    """Behind step 10 steps take five times as long; from a step on it runs on the other rail, as fast as before."""
    found = Life(began=100.0, end="done")
    now = 100.0
    for number in range(1, 31):
        left = left_at is not None and number >= left_at
        now += 5.0 if 10 < number and not left else 1.0
        path = ("soft0", "soft1") if number == left_at else ("soft1",) if left else ("soft0",)
        found.steps.append(Step(number, now, 1.0, path))
    found.ended = now
    setting = SLOW_RAIL[left_at is not None]
    return Run(setting.number, setting.name, "slow", 10, [found], failed=110.5, digests=["x", "x"])


def test_steps_on_a_slow_rail_and_off_it():
    stays, moves = slow_rail.summarise(slowed(None)), slow_rail.summarise(slowed(15))
    assert (stays.before, stays.slow, stays.moved, stays.until_moved_s) == (1.0, 5.0, None, None)
    # Steps 11 to 14 are slow, in 15 it moves, 16 is the first on the other rail alone.
    assert (moves.before, moves.slow, moves.moved) == (1.0, 5.0, 1.0)
    assert moves.until_moved_s == pytest.approx(4 * 5.0 + 2 * 1.0 - 0.5)
    healthy = slow_rail.summarise(run(life(0.0, 0, 10), number=1))
    assert (healthy.before, healthy.slow, healthy.moved) == (1.0, None, None)
    assert set(healthy.to_json()) == {"before_s", "slow_s", "moved_s", "until_moved_s"}
    early = slowed(None)
    early.failed = 100.0
    with pytest.raises(ValueError, match="no step before"):
        slow_rail.summarise(early)


def test_the_figure_of_step_times(tmp_path):
    runs = {1: run(life(0.0, 0, 30), number=1), 6: slowed(None), 7: slowed(15)}
    written = slow_rail.draw(tmp_path, runs, "a machine")
    assert [path.name for path in written] == ["slow-rail.png", "slow-rail.svg"]
    text = written[1].read_text()
    assert "slow rail, stays, 110 s" in text and "slow rail, moves, 46 s" in text
