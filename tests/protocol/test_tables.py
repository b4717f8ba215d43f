# SPDX-License-Identifier: BSD-3-Clause
"""Every cell of the tables of SWITCH and ARM, against a list written by hand from docs/protocol.md."""

from __future__ import annotations

import itertools

import pytest

from shiftverbs.protocol import tables
from shiftverbs.protocol.messages import Phase
from shiftverbs.protocol.tables import (
    ArmInput,
    ArmState,
    SwitchInput,
    SwitchState,
    step_arm,
    step_switch,
)
from shiftverbs.state_machine import IllegalTransition

# state, input, next state, steps: one line per legal cell. What is not here must be refused.
SWITCH = """
IDLE     HINTED           ASK      SAY
IDLE     PATH_FAILED      START    FENCE
IDLE     JOINED           START    FENCE
IDLE     ENDED            IDLE
ASK      PATH_FAILED      START    FENCE
ASK      PEER_AGREED      START    FENCE
ASK      JOINED           START    FENCE
ASK      DROPPED          IDLE     REOPEN
ASK      ENDED            IDLE
START    UNFIT            START    RESET
START    WAS_RESET        FENCED   SAY
START    CLEAN            POSTING  POST_RECEIVES
START    NEXT_PAIR        START    FENCE
START    JOINED           START    FENCE
START    ENDED            IDLE
FENCED   UNFIT            START    RESET
FENCED   CONNECTED        POSTING  POST_RECEIVES
FENCED   NEXT_PAIR        START    FENCE
FENCED   JOINED           START    FENCE
FENCED   ENDED            IDLE
POSTING  RECEIVES_POSTED  READY    SAY
POSTING  UNFIT            START    CLOSE_RECV RESET
POSTING  NEXT_PAIR        START    FENCE
POSTING  JOINED           START    FENCE
POSTING  ENDED            IDLE
READY    PEER_READY       IDLE     HAND_OVER SAY
READY    UNFIT            START    CLOSE_RECV RESET
READY    NEXT_PAIR        START    FENCE
READY    JOINED           START    FENCE
READY    ENDED            IDLE
"""
ARM = """
IDLE        BEGUN             RESETTING   RESET
IDLE        REQUESTED         RESETTING   RESET
IDLE        FAILED            IDLE
IDLE        ENDED             IDLE
RESETTING   RESET_TO_REQUEST  WAIT_PEER   SAY_REQ
RESETTING   RESET_TO_REPLY    CONNECTING  RTR
RESETTING   REQUESTED         RESETTING   RESET
RESETTING   FAILED            IDLE
RESETTING   ENDED             IDLE
WAIT_PEER   REPLIED           CONNECTING  RTR_RTS
WAIT_PEER   PROBED            PROBING     RTS
WAIT_PEER   REQUESTED         RESETTING   RESET
WAIT_PEER   FAILED            IDLE
WAIT_PEER   ENDED             IDLE
CONNECTING  RTS_TO_PROBE      PROBING     POST_SEND
CONNECTING  RTR_TO_REPLY      WAIT_PEER   SAY_REP
CONNECTING  REQUESTED         RESETTING   RESET
CONNECTING  FAILED            IDLE
CONNECTING  ENDED             IDLE
PROBING     RTS_TO_ANSWER     PROBING     POST_SEND
PROBING     ALL_SEEN          IDLE        MARK_CLEAN
PROBING     REQUESTED         RESETTING   RESET
PROBING     FAILED            IDLE
PROBING     ENDED             IDLE
"""
Cells = dict[tuple[str, str], tuple[str, tuple[str, ...]]]


def parse(text: str) -> Cells:
    cells = [line.split() for line in text.strip().splitlines()]
    return {(state, given): (target, tuple(steps)) for state, given, target, *steps in cells}


EXPECTED_SWITCH, EXPECTED_ARM = parse(SWITCH), parse(ARM)


@pytest.mark.parametrize(
    ("state", "given"), list(itertools.product(SwitchState, SwitchInput)), ids=lambda member: member.value
)
def test_switch_cell(state: SwitchState, given: SwitchInput) -> None:
    expected = EXPECTED_SWITCH.get((state.value, given.value))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"SWITCH: {given.value} in state {state.value}"):
            step_switch(state, given)
        return
    target, steps = step_switch(state, given)
    assert (target.value, tuple(step.value for step in steps)) == expected


@pytest.mark.parametrize(
    ("state", "given"), list(itertools.product(ArmState, ArmInput)), ids=lambda member: member.value
)
def test_arm_cell(state: ArmState, given: ArmInput) -> None:
    expected = EXPECTED_ARM.get((state.value, given.value))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"ARM: {given.value} in state {state.value}"):
            step_arm(state, given)
        return
    target, steps = step_arm(state, given)
    assert (target.value, tuple(step.value for step in steps)) == expected


def test_no_expected_cell_is_misspelt() -> None:
    assert len(EXPECTED_SWITCH) == len(tables.SWITCH_TABLE) == 30
    assert len(EXPECTED_ARM) == len(tables.ARM_TABLE) == 24


@pytest.mark.parametrize("cells", [EXPECTED_SWITCH, EXPECTED_ARM], ids=["SWITCH", "ARM"])
def test_every_state_is_reached_and_left_and_can_end(cells: Cells) -> None:
    states = {state for state, _ in cells}
    seen, todo = {"IDLE"}, ["IDLE"]
    while todo:
        now = todo.pop()
        todo += [t for (s, _), (t, _) in cells.items() if s == now and t not in seen]
        seen |= {t for (s, _), (t, _) in cells.items() if s == now}
    assert seen == states
    assert all(cells[state, "ENDED"] == ("IDLE", ()) for state in states)


def test_the_states_of_a_switch_are_what_the_peer_is_told() -> None:
    said = {phase.name for phase in Phase} - {"REFUSE", "ABORT", "BYE"}
    assert {state.value for state in SwitchState} == said | {"IDLE"}


def test_behind_the_fence_there_is_no_way_back() -> None:
    """A SWITCH that fences hands over, or the pairing ends."""
    for (state, given), (target, steps) in EXPECTED_SWITCH.items():
        if state not in ("IDLE", "ASK"):
            assert target != "ASK"
            assert target != "IDLE" or given == "ENDED" or steps[0] == "HAND_OVER"
        assert (target == "START") == ("FENCE" in steps or "RESET" in steps)


def test_ready_is_said_behind_the_receives_only() -> None:
    assert [g for (_, g), (t, _) in EXPECTED_SWITCH.items() if t == "READY"] == ["RECEIVES_POSTED"]
    assert {g for (_, g), (t, _) in EXPECTED_SWITCH.items() if t == "POSTING"} == {"CLEAN", "CONNECTED"}


def test_the_diagrams_have_every_cell() -> None:
    drawn = tables.mermaid()
    for cells in (EXPECTED_SWITCH, EXPECTED_ARM):
        for (state, given), (target, steps) in cells.items():
            assert f"    {state} --> {target}: {given}{' / ' if steps else ''}{', '.join(steps)}\n" in drawn
