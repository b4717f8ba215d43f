# SPDX-License-Identifier: BSD-3-Clause
"""Random faults on two real processes with a real etcd, on the software RNIC, for as long as wanted.

    python tests/soak/campaign.py --minutes 30 [--seed S]      a round follows the other until the time is over
    python tests/soak/campaign.py --seed S --round N           that round again
    python tests/soak/campaign.py --seed S --round N --steps port:123,loss:7    the same shape, other steps

Everything follows from the seed but the order in which the processes get their turns. A failure prints the seed, the
steps and what both hosts said; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import collections
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from soak.plan import Plan, plan_of  # noqa: E402  (found through the lines above)
from soak.stage import Stage  # noqa: E402


def run(plan: Plan, scale: float = 1.0) -> tuple[int, str | None]:
    """Play one round; returns the messages checked and, where it failed, the whole story."""
    story: list[str] = []

    def say(text: str) -> None:
        story.append(text)
        print(text, flush=True)

    say(f"seed {plan.seed} round {plan.number}: {plan}")
    stage = Stage(plan, say, scale)
    try:
        with stage:
            try:
                stage.play()
            except BaseException:
                # Before the hosts are gone: what they said.
                story.append(traceback.format_exc())
                story.append(stage.logs())
                raise
    except KeyboardInterrupt:
        raise
    except Exception as error:
        told = story if len(story) > 1 else [*story, traceback.format_exc()]
        steps = ",".join(f"{name}:{seed}" for name, seed in plan.steps)
        again = f"python tests/soak/campaign.py --seed {plan.seed} --round {plan.number} --steps {steps}"
        return stage.messages, "\n".join([*told, f"{type(error).__name__}: {error}", f"again: {again}"])
    return stage.messages, None


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--round", type=int, default=None)
    parser.add_argument("--steps", default=None, help="name:seed,… instead of the round's own")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed round")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended, what lies about removed
    seed = secrets.randbits(31) if options.seed is None else options.seed
    began = time.monotonic()
    staged: collections.Counter[str] = collections.Counter()
    shapes: collections.Counter[str] = collections.Counter()
    failed: list[int] = []
    messages = 0
    number = options.round or 0
    while True:
        plan = plan_of(seed, number)
        if options.steps:
            plan.steps = [
                (name, int(at)) for name, at in (item.split(":") for item in options.steps.split(","))
            ]
        checked, story = run(plan)
        messages += checked
        shapes[plan.shape] += 1
        staged.update(name for name, _ in plan.steps)
        if story is not None:
            failed.append(number)
            print(f"\n==== FAILED ====\n{story}\n================\n", flush=True)
        number += 1
        if options.round is not None or (failed and not options.keep_going):
            break
        if time.monotonic() - began > options.minutes * 60:
            break
    seconds = time.monotonic() - began
    rounds = sum(shapes.values())
    print(
        f"seed {seed}: {rounds} rounds, {sum(staged.values())} steps, {messages} messages checked in {seconds:.0f} s"
    )
    print("shapes:", ", ".join(f"{name} {count}" for name, count in sorted(shapes.items())))
    print("steps:", ", ".join(f"{name} {count}" for name, count in sorted(staged.items())))
    print(f"failed rounds: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
