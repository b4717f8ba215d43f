# SPDX-License-Identifier: BSD-3-Clause
"""What a seed stands for: the applications of a round, and what is done to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from soak.lanes import OPS, SINGLE_OPS
from soak.steps import STEPS

STEPS_PER_ROUND = 6
#: Rounds go through these in turn: name, number of NICs, groups, kinds of the demo's traffic.
SHAPES = ("one_qp", "mixed", "sixty_four_qps", "blocked", "never_signal", "slow", "demo")


@dataclass
class Plan:
    """One round. steps: (name, seed) each."""

    seed: int
    number: int
    shape: str
    nics: int
    deadline_ms: int
    groups: list[dict[str, Any]]
    demo: list[str]
    steps: list[tuple[str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        groups = "; ".join(
            "{lanes} {mode} {kind} of {depth} sends and {receives} receives, signaled 1/{signal_every}".format(
                **g, kind="extended lanes" if g.get("extended") else "lanes"
            )
            for g in self.groups
        )
        return f"{self.shape}, {self.nics} NICs, deadline {self.deadline_ms} ms: {groups}; demo {self.demo}"


def group(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """Keyword arguments of a Shape, by chance but for what is fixed."""
    one = {
        "lanes": rng.choice([1, 2, 3]),
        "mode": rng.choice(["spin", "spin", "slow", "blocked", "descriptor"]),
        "one_cq": rng.random() < 0.7,
        "depth": rng.choice([4, 16, 32]),
        "receives": rng.choice([1, 3, 8, 32]),
        "signal_every": rng.choice([1, 1, 3, 4]),
        "inline": rng.random() < 0.25,
        "ops": list(OPS) if rng.random() < 0.7 else rng.sample(OPS, 2),
        "batch": rng.choice([1, 4, 16]),
        "nap_s": rng.choice([0.001, 0.002, 0.005]),
    } | fixed
    if one["mode"] in ("spin", "slow"):  # a CQEX tells of no event in pyverbs
        one.setdefault("extended", rng.random() < 0.4)
    if one["mode"] == "slow":
        one["nap_s"] = 0.01  # times up to 20
    # An unsignaled tail must leave room for the two WRs of a message, or nothing would ever move again.
    one["signal_every"] = min(one["signal_every"], one["depth"] - 1)
    if not one["signal_every"]:
        one |= {"inline": True, "ops": list(SINGLE_OPS)}
    return one


def shape_of(name: str, rng: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups and the demo's traffic of one of SHAPES."""
    match name:
        case "one_qp":
            return [group(rng, lanes=1, mode="spin")], []
        case "sixty_four_qps":
            half = {
                "lanes": 32,
                "depth": 8,
                "receives": 4,
                "nap_s": 0.02,
                "mode": rng.choice(["spin", "descriptor"]),
            }
            return [group(rng, **half, one_cq=True), group(rng, **half, one_cq=False)], []
        case "blocked":
            return [
                group(rng, mode="blocked"),
                group(rng, mode="blocked", lanes=1),
                group(rng, mode="descriptor"),
            ], []
        case "never_signal":
            never = {"signal_every": 0, "receives": 8}
            return [group(rng, mode="spin", **never), group(rng, mode="slow", **never), group(rng)], []
        case "slow":
            return [
                group(rng, mode="slow"),
                group(rng, mode="slow", lanes=1, receives=1),
                group(rng, mode="spin"),
            ], []
        case "demo":
            return [group(rng, lanes=1)], ["write_imm", "send", "read"]
    return [group(rng) for _ in range(rng.choice([2, 3]))], rng.choice([[], ["write_imm"], ["read"]])


def plan_of(seed: int, number: int) -> Plan:
    """Round `number` of a seed. All steps and shapes come up in turn, shuffled anew each time."""
    rng = random.Random(f"{seed}/{number}")
    shapes = list(SHAPES)
    random.Random(f"{seed}/shapes/{number // len(shapes)}").shuffle(shapes)
    shape = shapes[number % len(shapes)]
    groups, demo = shape_of(shape, rng)
    names: list[str] = []
    at = number * STEPS_PER_ROUND
    while len(names) < STEPS_PER_ROUND:
        deck = list(STEPS)
        random.Random(f"{seed}/steps/{at // len(deck)}").shuffle(deck)
        take = deck[at % len(deck) :][: STEPS_PER_ROUND - len(names)]
        names += take
        at += len(take)
    steps = [(name, rng.getrandbits(32)) for name in names]
    nics = 3 if rng.random() < 0.5 or any(STEPS[name].three_nics for name in names) else 2
    return Plan(seed, number, shape, nics, 8000, groups, demo, steps)
