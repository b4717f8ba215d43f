# SPDX-License-Identifier: BSD-3-Clause
"""Put bugs in on purpose, one at a time, and look for the first schedule that finds each.

`python tests/simulator/hunt.py [--schedules N] [--first SEED] [--write] [--chance] [NAME …]`: without names, all of
them. The seed that found a bug before (found.json) is tried first, and the stories that are staged for it; then seeds
from SEED on, N at most. --chance: nothing but those seeds. A line for each: its name, what found it, how many
schedules that took, what rule it broke. Exit status 1 if one was not found. --write: keep the seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from simulator.build_mutants import build  # noqa: E402  (found through the line above)

FOUND = HERE / "found.json"
#: A schedule takes a fraction of a second: one that takes so long has a bug that hangs.
HANGS_S = 20
#: What no bug that was put in on purpose may raise.
NOT_A_FIND = (NameError, AttributeError, TypeError, ImportError)


def with_mutants() -> None:
    """Begin anew with the data path that has the mutants in it, unless this is it already."""
    tree = str(build())
    if tree not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tree, os.environ.get("PYTHONPATH")]))
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.path.remove(str(HERE.parents[1]))  # the tree's package, not the one beside it
    sys.path.insert(0, tree)


class Hangs(BaseException):
    """A run does not end."""


def _hangs(*_: Any) -> None:
    raise Hangs


class Hunt:
    """All bugs that there are. names: what each is called, and which duty it drops."""

    def __init__(self) -> None:
        from simulator import (
            driver_mutations,
            protocol_mutations,
            protocol_unmended,
            staged,
            unmended,
            unmended_changes,
        )
        from simulator.mutants import MUTANTS

        self.patches = {
            **protocol_mutations.MUTATIONS,
            **driver_mutations.MUTATIONS,
            **unmended.MUTATIONS,
            **unmended_changes.MUTATIONS,
            **protocol_unmended.MUTATIONS,
        }
        self.names = {mutant.name: mutant.duty for mutant in MUTANTS}
        self.names |= {name: what for name, (what, _) in self.patches.items()}
        self.found: dict[str, dict[str, Any]] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        self.stories = [
            (story, names, judge) for stories, judge in staged.KINDS for story, names in stories.items()
        ]

    @contextlib.contextmanager
    def bug(self, name: str) -> Iterator[None]:
        """It is in, meanwhile."""
        from shiftverbs import _core

        choose: Any = _core.set_mutant  # type: ignore[attr-defined]
        if name in self.patches:
            with self.patches[name][1]():
                yield
            return
        choose(name)
        try:
            yield
        finally:
            choose(None)

    def shows(self, name: str, run: Any) -> str | None:
        """What a run with that bug breaks; None if nothing."""
        signal.signal(signal.SIGALRM, _hangs)
        with self.bug(name):  # one that cannot be put in is no find
            signal.alarm(HANGS_S)
            try:
                run()
            except Hangs:
                return "it hangs"
            except NOT_A_FIND:
                raise  # the bug is wrong itself: what it breaks by that says nothing
            except Exception as error:
                return f"{type(error).__name__} {error}".replace("\n", " ")
            finally:
                signal.alarm(0)
        return None

    @staticmethod
    def tell(story: Any, judge: Any) -> None:
        """A story, judged at its end."""
        from simulator import checks
        from simulator.story import telling

        with telling(story) as net:
            checks.check(net)
            judge(net)

    def look_for(
        self, name: str, first: int, schedules: int, chance: bool = False
    ) -> tuple[str, int, str] | None:
        """(what found it, in how many schedules, what it broke). chance: by seeds from `first` on alone."""
        from simulator.schedule import Schedule

        known = None if chance else self.found.get(name, {}).get("seed")
        if known is not None:
            told = self.shows(name, Schedule(known).run)
            if told is not None:
                return f"seed {known}", int(self.found[name]["schedules"]), told
        for story, names, judge in () if chance else self.stories:
            if name in names:
                told = self.shows(name, functools.partial(self.tell, story, judge))
                if told is not None:
                    return f"story {story.__name__}", 1, told
        for seed in range(first, first + schedules):
            told = self.shows(name, Schedule(seed).run)
            if told is not None:
                self.found[name] = {"seed": seed, "schedules": seed - first + 1}
                return f"seed {seed}", seed - first + 1, told
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--chance", action="store_true")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    with_mutants()
    from simulator import network

    network.INVARIANTS = False  # whoever finds a bug shares no code with what it is in
    hunt = Hunt()
    missing = []
    for name in options.names or hunt.names:
        began = time.monotonic()
        found = hunt.look_for(name, options.first, options.schedules, options.chance)
        took_s = time.monotonic() - began
        if found is None:
            missing.append(name)
            what = f"in {options.schedules} schedules, {took_s:.0f} s ({hunt.names[name]})"
            print(f"{name}: NOT FOUND {what}", flush=True)
        else:
            by, schedules, told = found
            print(f"{name}: {by}, {schedules} schedules, {took_s:.1f} s: {told[:160]}", flush=True)
        if options.write:
            FOUND.write_text(json.dumps(dict(sorted(hunt.found.items())), indent=1) + "\n")
    print(f"{len(missing)} not found: {' '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
