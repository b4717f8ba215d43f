# SPDX-License-Identifier: BSD-3-Clause
"""Are the weights at the end those of a run without a failure, bit for bit?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from benchmarks.suite.lab import Lab
from benchmarks.train.launcher import Job, Progress, Supervisor
from benchmarks.train.record import Run
from benchmarks.train.settings import FAULTS, SETTINGS, Setting

#: Short runs for each failure: of these steps an epoch, and away for so many seconds in a flap.
EPOCH_STEPS, FLAP_S = 20, 0.3
#: What is dead does not come home: its contexts stay dead.
NO_FLAP = ("kill",)


@dataclass(frozen=True)
class Comparison:
    """One run beside the one without a failure.

    :param is_same: all ranks have the same weights, and they are that run's
    :param paths: what carried traffic, in order
    """

    name: str
    fault: str
    is_same: bool
    paths: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """For the JSON file."""
        return asdict(self)


def compare(run: Run, undisturbed: Run) -> Comparison:
    """Compare the weights of all ranks of two runs. Raises ValueError where a run has none."""
    if not run.digests or not undisturbed.digests:
        raise ValueError("a run without weights at its end")
    is_same = set(run.digests) == set(undisturbed.digests) and len(set(run.digests)) == 1
    return Comparison(run.name, run.fault, is_same, tuple(run.paths))


def cases(settings: tuple[Setting, ...] = (SETTINGS[4], SETTINGS[5])) -> list[tuple[Setting, str]]:
    """Which settings with which failures; the traffic on the backup changes no bits, and is left out."""
    return [
        (replace(setting, is_busy=False), fault)
        for setting in settings
        for fault in FAULTS
        if setting.is_fatal or fault not in NO_FLAP
    ]


def run_cases(lab: Lab, job: Job, announce: Callable[[str], Progress]) -> list[Comparison]:
    """Train for a short time with each failure. announce: told of each run, gives what is told of its steps.

    :raises SuiteError: a run does not come to its end
    """
    short = replace(job, epoch_steps=EPOCH_STEPS, flap_s=FLAP_S)
    name = "without a failure"
    undisturbed = Supervisor(lab, SETTINGS[1], short, "", announce(f"weights: {name}")).supervise()
    found = []
    for setting, fault in cases():
        progress = announce(f"weights: ({setting.number}) {fault}")
        found.append(compare(Supervisor(lab, setting, short, fault, progress).supervise(), undisturbed))
    return found
