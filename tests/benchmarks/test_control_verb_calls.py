# SPDX-License-Identifier: BSD-3-Clause
"""How many Python functions of ours a control verb calls in the application's thread: the same on every machine."""

from __future__ import annotations

from benchmarks.suite.lab import Child, Lab

# Where one is exceeded for a good reason, or can be lowered, it is changed here.
MOST = {
    "alloc_pd": 11,
    "reg_mr": 17,
    "create_cq": 13,
    "create_qp": 24,
    "modify to INIT": 5,
    "modify to RTR": 19,
    "modify to RTS": 11,
    "query_qp": 6,
    "destroy_qp": 35,
    "destroy_cq": 8,
    "dereg_mr": 21,
    "dealloc_pd": 8,
}


def test_control_verbs_stay_within_their_budgets() -> None:
    with Lab() as lab:
        env = lab.environment("a", "shiftverbs", lab.job(), softrnic="null")
        with Child("verbs_cost", env, "--rounds", "1", "--control-rounds", "1") as child:
            calls = child.answer(300)["calls"]
    assert calls.keys() == MOST.keys()
    assert {name: count for name, count in calls.items() if count > MOST[name]} == {}
