# SPDX-License-Identifier: BSD-3-Clause
"""What happened in a run, and where its time went. Nothing here runs anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """A step that rank 0 has ended.

    :param number: from 1, over all epochs
    :param t: when, CLOCK_MONOTONIC in seconds
    :param paths: its NICs that traffic ran on then
    """

    number: int
    t: float
    loss: float
    paths: tuple[str, ...]


@dataclass
class Life:
    """The job's processes from one start to their end.

    :param began: when the first step began; None: it did not come so far
    :param resumed_at: the step of the checkpoint that it went on from
    :param end: done, stopped or died
    :param ended: when the last step, or the checkpoint behind it, was done
    """

    resumed_at: int = 0
    began: float | None = None
    steps: list[Step] = field(default_factory=list)
    checkpoints: list[tuple[int, float]] = field(default_factory=list)
    pauses: list[dict[str, Any]] = field(default_factory=list)
    end: str = ""
    ended: float = 0.0


@dataclass
class Run:
    """One setting, run.

    :param number: of the setting
    :param fault: what failed; "" in the first setting
    :param epoch_steps: steps of an epoch
    :param failed, healed: when; None: not
    :param digests: of the weights at the end, by rank
    """

    number: int
    name: str
    fault: str
    epoch_steps: int
    lives: list[Life] = field(default_factory=list)
    failed: float | None = None
    healed: float | None = None
    digests: list[str] = field(default_factory=list)

    @property
    def began(self) -> float:
        """When the first step began. Raises ValueError where none did."""
        for life in self.lives:
            if life.began is not None:
                return life.began
        raise ValueError(f"{self.name} has no first step")

    @property
    def total_s(self) -> float:
        """From the first step's beginning to the last one's end, seconds."""
        return self.lives[-1].ended - self.began

    @property
    def paths(self) -> list[str]:
        """What carried traffic, in order: each stretch once."""
        found: list[str] = []
        for life in self.lives:
            for step in life.steps:
                name = "+".join(step.paths)
                if not found or found[-1] != name:
                    found.append(name)
        return found

    def progress(self) -> list[tuple[float, float]]:
        """(seconds since the beginning, epochs done); it falls where the job went on from a checkpoint."""
        points: list[tuple[float, float]] = []
        for life in self.lives:
            if life.began is None:
                continue
            points.append((life.began - self.began, life.resumed_at / self.epoch_steps))
            points += [(step.t - self.began, step.number / self.epoch_steps) for step in life.steps]
        return points

    def to_json(self) -> dict[str, Any]:
        """For the JSON file: times are seconds since the first step's beginning."""
        return {
            "setting": self.number,
            "name": self.name,
            "fault": self.fault or None,
            "total_s": self.total_s,
            "failed_s": None if self.failed is None else self.failed - self.began,
            "healed_s": None if self.healed is None else self.healed - self.began,
            "paths": self.paths,
            "lives": [
                {
                    "resumed_at": life.resumed_at,
                    "steps": len(life.steps),
                    "end": life.end,
                    "pauses": life.pauses,
                }
                for life in self.lives
            ],
            "checkpoints": [[step, t - self.began] for life in self.lives for step, t in life.checkpoints],
            "progress": self.progress(),
            "digests": self.digests,
        }


@dataclass(frozen=True)
class Breakdown:
    """Where the time went that a run took longer than the one without a failure (Fig. 8 d), in seconds.

    :param slowdown_s: all of it
    :param rescheduling_s: from the last thing that a life of the job did to the first step of its next one: noticing,
        starting anew, loading
    :param retraining_s: steps that had been done before
    :param slower_s: the rest: all other steps were slower, or there was a pause; below 0, faster
    :param paused_s: of that, agreed pauses
    """

    total_s: float
    slowdown_s: float
    rescheduling_s: float
    retraining_s: float
    slower_s: float
    paused_s: float

    def fraction(self, seconds: float) -> float:
        """Of the whole run."""
        return seconds / self.total_s

    def to_json(self) -> dict[str, float]:
        """Seconds, and fractions of the run."""
        names = ("slowdown", "rescheduling", "retraining", "slower")
        return asdict(self) | {
            f"{name}_fraction": self.fraction(getattr(self, f"{name}_s")) for name in names
        }


def break_down(run: Run, undisturbed_s: float) -> Breakdown:
    """Divide a run's slowdown.

    :param undisturbed_s: what the run without a failure took, in seconds
    """
    rescheduling = retraining = 0.0
    done = 0
    last_end: float | None = None
    for life in run.lives:
        if life.began is None:
            continue
        if last_end is not None:
            rescheduling += life.began - last_end
        before = life.began
        for step in life.steps:
            if step.number <= done:
                retraining += step.t - before
            before = step.t
            done = max(done, step.number)
        last_end = max([before, *(t for _, t in life.checkpoints)])
    slowdown = run.total_s - undisturbed_s
    paused = sum(float(pause["s"]) for life in run.lives for pause in life.pauses)
    rest = slowdown - rescheduling - retraining
    return Breakdown(run.total_s, slowdown, rescheduling, retraining, rest, paused)
