# SPDX-License-Identifier: BSD-3-Clause
"""A checker that finds nothing proves nothing: each bug that is put in on purpose is seen.

Where a bug was found before is in found.json, so that it is found again at once; where the schedules have changed, it
is looked for. `python tests/simulator/hunt.py --write` looks for all of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulator.hunt import Hunt

HERE = Path(__file__).parent
WITHIN = 2500  # schedules in which a bug must be found that was not found before, or is not where it was
GROUP = 10
#: Not found by any schedule or story yet: tests of their own hold them.
UNSEEN = frozenset((HERE / "unseen.txt").read_text().split())
NAMES = sorted(set(Hunt().names) - UNSEEN)
GROUPS = [NAMES[at : at + GROUP] for at in range(0, len(NAMES), GROUP)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_each_bug_is_found(names: list[str]) -> None:
    command = [sys.executable, str(HERE / "hunt.py"), "--schedules", str(WITHIN), *names]
    child = subprocess.run(command, capture_output=True, text=True)
    print(child.stdout)
    assert child.returncode == 0, child.stdout + child.stderr
    assert len(child.stdout.splitlines()) == len(names) + 1


def test_there_are_enough_bugs() -> None:
    assert len(NAMES) >= 155
