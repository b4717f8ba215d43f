# SPDX-License-Identifier: BSD-3-Clause
"""A short soak run with a fixed plan; and that the judges of a soak run see what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shiftverbs.commands.demo.endpoint import Verbs
from shiftverbs.commands.demo.pattern import Pattern
from soak.campaign import run
from soak.lanes import DRAIN, OPS, SINGLE_OPS, Lane, Shape
from soak.plan import SHAPES, STEPS_PER_ROUND, Plan, plan_of
from soak.stage import SoakError, Stage
from soak.steps import STEPS

GROUP = {
    "lanes": 2, "mode": "spin", "one_cq": True, "depth": 8, "receives": 4, "signal_every": 3, "inline": False,
    "ops": list(OPS), "batch": 4, "nap_s": 0.002,
}  # fmt: skip
NEVER = {"signal_every": 0, "inline": True, "ops": list(SINGLE_OPS), "lanes": 1}
FAULTS = ["port", "ack_lost_at_each_position", "loss", "broker_killed", "stopped", "home_fails_again"]
LIVES = [
    "reset_and_connected",
    "failed_and_drained",
    "closed_under_traffic",
    "patience_changed",
    "right_withdrawn",
]


@pytest.mark.parametrize("story", [FAULTS, LIVES], ids=["faults", "lives"])
def test_short_run(story: list[str]) -> None:
    groups = [GROUP, GROUP | {"mode": "blocked", "one_cq": True, "lanes": 1}, GROUP | NEVER]
    plan = Plan(7, 0, "short", 2, 20000, groups, ["write_imm"], [(name, 7) for name in story])
    messages, story = run(plan, scale=0.25)
    assert story is None, story
    assert messages > 100


def test_everything_comes_up_in_turn() -> None:
    rounds = -(-len(STEPS) // STEPS_PER_ROUND)
    for seed in (1, 2):
        plans = [plan_of(seed, number) for number in range(max(rounds, len(SHAPES)))]
        assert {name for plan in plans for name, _ in plan.steps} == set(STEPS)
        assert {plan.shape for plan in plans} == set(SHAPES)
    assert plan_of(3, 5) == plan_of(3, 5)


# ---- the judges alone ------------------------------------------------------------------------------------------------


class Memory:
    """An MR and a QP without hardware."""

    buf = 1 << 20
    lkey = rkey = 7
    qp_num = 9

    def __init__(self, *unused: object) -> None:
        self.bytes = bytearray(1 << 20)
        self.posted: list[tuple[int, int, int]] = []

    def write(self, data: bytes, length: int, offset: int) -> None:
        self.bytes[offset : offset + length] = data[:length]

    def read(self, length: int, offset: int) -> bytes:
        return bytes(self.bytes[offset : offset + length])

    def post_send(self, wr: Any) -> None:
        self.posted.append((wr.wr_id, wr.opcode, wr.send_flags))

    def post_recv(self, wr: Any) -> None:
        del wr


@pytest.fixture
def lane() -> Lane:
    """Host a's lane 0 of SENDs, every third signaled; b has the same."""
    real = Verbs("pyverbs")
    verbs: Any = SimpleNamespace(
        e=real.e,
        wr=real.wr,
        error=real.error,
        mr=SimpleNamespace(MR=lambda *a: Memory()),
        qp=SimpleNamespace(QP=lambda *a: Memory(), QPCap=dict, QPInitAttr=dict),
    )
    shape = Shape(ops=("send",), signal_every=3, receives=4)
    made = Lane(verbs, None, None, (None, None), shape, 0, 0, 5, Pattern(5, 40, 1024))
    made.peer = {"address": 0, "rkey": 0}
    return made


def arrives(lane: Lane, number: int, **more: Any) -> None:
    """Message `number` of b lies in the next receive, and its WC comes."""
    _, size = lane.plan(1, number)
    contents = lane.pattern.message(lane.stream(1, number))[:size]
    lane.mr.write(contents, size, lane.incoming + lane.received % lane.shape.receives * 1024)
    wc = {
        "wr_id": lane.received | 4096,
        "status": 0,
        "opcode": 128,
        "byte_len": size,
        "wc_flags": 0,
        "imm_data": 0,
    }
    lane.take(SimpleNamespace(**{**wc, **more}))


def completes(lane: Lane, wr_id: int, status: int = 0) -> None:
    lane.take(SimpleNamespace(wr_id=wr_id, status=status, opcode=0))


def test_a_clean_lane_has_no_faults(lane: Lane) -> None:
    assert lane.pump(7) == 7
    completes(lane, 2)
    completes(lane, 5)
    for number in range(9):
        arrives(lane, number)
    assert lane.all_faults() == [] and (lane.sent, lane.confirmed, lane.received) == (7, 6, 9)


def test_a_lost_a_doubled_and_a_wrong_message_are_seen(lane: Lane) -> None:
    arrives(lane, 0)
    arrives(lane, 2)
    assert "message 1" in lane.all_faults()[-1]


def test_a_doubled_message_is_seen(lane: Lane) -> None:
    arrives(lane, 0)
    arrives(lane, 0)
    assert "they are of message 0" in lane.all_faults()[-1]


def test_a_wrong_receive_is_seen(lane: Lane) -> None:
    arrives(lane, 0, wr_id=1 | 4096)
    assert "4096 was due" in lane.all_faults()[0]


@pytest.mark.parametrize("wr_ids", [[5], [2, 2], [5, 2], [0], [1], [9]])
def test_wrong_send_completions_are_seen(lane: Lane, wr_ids: list[int]) -> None:
    lane.pump(7)
    for wr_id in wr_ids:
        completes(lane, wr_id)
    assert lane.all_faults()


def test_errors_come_for_each_wr_in_order(lane: Lane) -> None:
    e = lane.verbs.e
    lane.pump(4)
    completes(lane, 1, e.IBV_WC_RETRY_EXC_ERR)
    completes(lane, 2, e.IBV_WC_WR_FLUSH_ERR)
    completes(lane, 3, e.IBV_WC_WR_FLUSH_ERR)
    assert lane.all_faults() == [] and lane.confirmed == 1 and lane.broken == "RETRY_EXC_ERR"
    lane.pump(4)
    assert lane.sent == 4
    completes(lane, 3, e.IBV_WC_WR_FLUSH_ERR)
    assert lane.all_faults()


def test_success_behind_an_error_is_seen(lane: Lane) -> None:
    lane.pump(4)
    completes(lane, 0, lane.verbs.e.IBV_WC_RETRY_EXC_ERR)
    completes(lane, 2)
    assert lane.all_faults()


def test_what_is_left_of_a_former_life_is_seen(lane: Lane) -> None:
    lane.pump(3)
    former = lane.pattern.message(lane.stream(1, 0))
    lane.begin_life(1)
    lane.pump(3)
    completes(lane, 2)
    assert "life 1: no WC for WR 1533; WR 2 completed" in lane.all_faults()[0]
    lane.faults.clear()
    arrives(lane, 0, wr_id=0 | 4096)
    assert "wr_id 4096" in lane.all_faults()[0]
    lane.begin_life(2)
    lane.faults.clear()
    _, size = lane.plan(1, 0)
    lane.mr.write(former, size, lane.incoming)
    message = {"status": 0, "opcode": 128, "byte_len": size, "wc_flags": 0, "imm_data": 0}
    lane.take(SimpleNamespace(wr_id=lane._id(0) | 4096, **message))
    assert "other bytes" in lane.all_faults()[0]


def test_a_life_behind_another_is_clean(lane: Lane) -> None:
    lane.pump(3)
    arrives(lane, 0)
    first = lane.psn
    lane.begin_life(1)
    assert lane.pump(3) == 3 and lane.psn != first
    completes(lane, lane._id(2))
    arrives(lane, 0, wr_id=lane._id(0) | 4096)
    assert lane.all_faults() == [] and lane.record() == [3, 3, 1]


def drained(lane: Lane, flushed: list[int]) -> Lane:
    """Of seven WRs the first three are done; of those behind them, and the drain's, these and the last were flushed."""
    lane.pump(7)
    completes(lane, 2)
    lane.drain()
    for wr_id in (*flushed, DRAIN):
        completes(lane, wr_id, lane.verbs.e.IBV_WC_WR_FLUSH_ERR)
    return lane


def test_a_drain_ends_with_a_completion_for_each_wr(lane: Lane) -> None:
    lane.receives_posted = 1
    assert not drained(lane, [3, 4, 5, 6]).is_drained
    completes(lane, 0 | 4096, lane.verbs.e.IBV_WC_WR_FLUSH_ERR)
    assert lane.is_drained and lane.all_faults() == [] and lane.record() == [7, 3, 0]


@pytest.mark.parametrize("flushed", [[3, 4, 5], [3, 5, 6], []])
def test_a_drain_that_leaves_something_out_is_seen(lane: Lane, flushed: list[int]) -> None:
    assert drained(lane, flushed).all_faults()


def test_a_message_behind_a_flushed_receive_is_seen(lane: Lane) -> None:
    completes(lane, 0 | 4096, lane.verbs.e.IBV_WC_WR_FLUSH_ERR)
    arrives(lane, 0, wr_id=1 | 4096)
    assert "behind a receive that was flushed" in lane.all_faults()[0]


def test_memory_written_behind_a_close_is_seen(lane: Lane) -> None:
    lane.take_memory()
    lane.check_memory()
    assert lane.all_faults() == []
    lane.memory[lane.landing + 3] = 0
    lane.check_memory()
    assert f"written at {lane.landing + 3}" in lane.all_faults()[0]


def test_records_of_both_ends_are_compared() -> None:
    judge = SimpleNamespace(messages=0)
    ends = {"a": [[5, 3, 2]], "b": [[4, 2, 3]]}
    Stage.judge_records(judge, [0], ends, drained=True)  # type: ignore[arg-type]
    assert judge.messages == 5
    for name, mine in (("a", [2, 1, 2]), ("b", [4, 3, 3]), ("a", [5, 4, 2])):
        with pytest.raises(SoakError, match="lane 0"):
            Stage.judge_records(judge, [0], {**ends, name: [mine]}, drained=True)  # type: ignore[arg-type]
