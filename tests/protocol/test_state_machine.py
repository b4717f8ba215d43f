# SPDX-License-Identifier: BSD-3-Clause
"""Every cell of both transition tables, against a list written by hand from the paper (4.3) and docs/protocol.md."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from shiftverbs import state_machine
from shiftverbs.protocol.messages import Sync
from shiftverbs.protocol.pair import LocalPair, PairProtocol, ProtocolConfig
from shiftverbs.state_machine import (
    IllegalTransition,
    RecvInput,
    RecvState,
    SendInput,
    SendState,
    step_recv,
    step_send,
)

# state, input, next state, steps: one line per legal cell. What is not here must be refused.
SEND = """
DEFAULT        ASKED                DEFAULT        CLOSE_SEND
DEFAULT        ASK_DROPPED_HOME     DEFAULT        REOPEN_SEND
DEFAULT        PATH_FAILED          FALLBACK       CLOSE_SEND
DEFAULT        MOVE_STARTED         WAIT_SIGNALED  BEGIN_FENCE_WR
DEFAULT        ABORTED              DEFAULT        DELIVER_ERRORS
FALLBACK       ASKED                FALLBACK       CLOSE_SEND
FALLBACK       ASK_DROPPED_AWAY     FALLBACK       REOPEN_SEND
FALLBACK       PATH_FAILED          FALLBACK       CLOSE_SEND
FALLBACK       SWITCHED_HOME        DEFAULT        TRIM OPEN_SEND
FALLBACK       SWITCHED_AWAY        FALLBACK       TRIM OPEN_SEND
FALLBACK       MOVE_STARTED         WAIT_SIGNALED  BEGIN_FENCE_WR
FALLBACK       ABORTED              DEFAULT        DELIVER_ERRORS
WAIT_SIGNALED  PATH_FAILED          FALLBACK       CLOSE_SEND
WAIT_SIGNALED  FENCE_WR_POSTED         WAIT_DRAINED
WAIT_SIGNALED  MOVE_CANCELLED_HOME  DEFAULT        CANCEL_MOVE
WAIT_SIGNALED  MOVE_CANCELLED_AWAY  FALLBACK       CANCEL_MOVE
WAIT_SIGNALED  ABORTED              DEFAULT        DELIVER_ERRORS
WAIT_DRAINED   PATH_FAILED          FALLBACK       CLOSE_SEND
WAIT_DRAINED   FENCE_WR_DONE           WAIT_DRAINED   SEND_MOVE
WAIT_DRAINED   MOVED_HOME           DEFAULT        OPEN_SEND
WAIT_DRAINED   MOVED_AWAY           FALLBACK       OPEN_SEND
WAIT_DRAINED   MOVE_CANCELLED_HOME  DEFAULT        CANCEL_MOVE
WAIT_DRAINED   MOVE_CANCELLED_AWAY  FALLBACK       CANCEL_MOVE
WAIT_DRAINED   ABORTED              DEFAULT        DELIVER_ERRORS
"""
RECV = """
DEFAULT   PATH_FAILED  FALLBACK  CLOSE_RECV
DEFAULT   MOVE_HOME    DEFAULT   MOVE_RECEIVES
DEFAULT   MOVE_AWAY    FALLBACK  MOVE_RECEIVES
DEFAULT   RECEIVES_MOVED  DEFAULT  ANSWER_MOVED
DEFAULT   ABORTED      DEFAULT
FALLBACK  PATH_FAILED  FALLBACK  CLOSE_RECV
FALLBACK  READY_HOME   DEFAULT   POST_RECEIVES
FALLBACK  READY_AWAY   FALLBACK  POST_RECEIVES
FALLBACK  MOVE_HOME    DEFAULT   MOVE_RECEIVES
FALLBACK  MOVE_AWAY    FALLBACK  MOVE_RECEIVES
FALLBACK  RECEIVES_MOVED  FALLBACK  ANSWER_MOVED
FALLBACK  ABORTED      DEFAULT
"""


def parse(text: str) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    cells = [line.split() for line in text.strip().splitlines()]
    return {(state, given): (target, tuple(steps)) for state, given, target, *steps in cells}


EXPECTED_SEND, EXPECTED_RECV = parse(SEND), parse(RECV)


@pytest.mark.parametrize(
    ("state", "given"), list(itertools.product(SendState, SendInput)), ids=lambda member: member.value
)
def test_send_cell(state: SendState, given: SendInput) -> None:
    expected = EXPECTED_SEND.get((state.value, given.value))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{given.value} in state {state.value}"):
            step_send(state, given)
        return
    target, steps = step_send(state, given)
    assert (target.value, tuple(step.value for step in steps)) == expected


@pytest.mark.parametrize(
    ("state", "given"), list(itertools.product(RecvState, RecvInput)), ids=lambda member: member.value
)
def test_recv_cell(state: RecvState, given: RecvInput) -> None:
    expected = EXPECTED_RECV.get((state.value, given.value))
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{given.value} in state {state.value}"):
            step_recv(state, given)
        return
    target, steps = step_recv(state, given)
    assert (target.value, tuple(step.value for step in steps)) == expected


def test_no_expected_cell_is_misspelt() -> None:
    assert len(EXPECTED_SEND) == len(state_machine.SEND_TABLE) == 24
    assert len(EXPECTED_RECV) == len(state_machine.RECV_TABLE) == 12


def test_every_send_state_is_reached_and_left() -> None:
    seen, todo = {"DEFAULT"}, ["DEFAULT"]
    while todo:
        now = todo.pop()
        for (state, _), (target, _) in EXPECTED_SEND.items():
            if state == now and target not in seen:
                seen.add(target)
                todo.append(target)
    assert seen == {state.value for state in SendState}


def test_the_wait_states_are_entered_by_move_only() -> None:
    entries = {
        (state, given)
        for (state, given), (target, _) in EXPECTED_SEND.items()
        if target.startswith("WAIT") and not state.startswith("WAIT")
    }
    assert entries == {("DEFAULT", "MOVE_STARTED"), ("FALLBACK", "MOVE_STARTED")}
    drained = {(s, g) for (s, g), (t, _) in EXPECTED_SEND.items() if t == "WAIT_DRAINED" and s != t}
    assert drained == {("WAIT_SIGNALED", "FENCE_WR_POSTED")}


def test_a_broken_path_leads_to_fallback_from_everywhere() -> None:
    for state in SendState:
        assert step_send(state, SendInput.PATH_FAILED)[0] is SendState.FALLBACK
    for state in RecvState:
        assert step_recv(state, RecvInput.PATH_FAILED)[0] is RecvState.FALLBACK


def test_nothing_opens_before_the_trim() -> None:
    for (_, given), (_, steps) in EXPECTED_SEND.items():
        if given.startswith("SWITCHED"):
            assert steps.index("TRIM") < steps.index("OPEN_SEND")


@pytest.mark.parametrize("state", list(SendState), ids=lambda state: state.value)
def test_an_illegal_input_leaves_the_protocol_as_it_was(state: SendState) -> None:
    locals_ = [LocalPair(b"g" * 16, 0, 10 + k, 3) for k in range(2)]
    protocol = PairProtocol(ProtocolConfig(invariants=True), locals_, True, random.Random(0), 0)
    protocol.start(0)
    protocol.state.send_state = state
    for given in SendInput:
        if (state.value, given.value) in EXPECTED_SEND:
            continue
        with pytest.raises(IllegalTransition):
            protocol.directions.send(given, 1)
        assert (protocol.send_state, protocol.send_pair, protocol.state.out) == (state, 0, [])


def test_the_diagram_has_every_cell() -> None:
    command = [sys.executable, "-m", "shiftverbs.state_machine"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == state_machine.mermaid()
    for table in (EXPECTED_SEND, EXPECTED_RECV):
        for (state, given), (target, steps) in table.items():
            assert f"    {state} --> {target}: {given}{' / ' if steps else ''}{', '.join(steps)}\n" in printed


def test_messages_carry_whole_state() -> None:
    """A Sync says everything its receiver needs: no field depends on an earlier message having arrived."""
    assert set(Sync.__slots__) == {
        *(
            "epoch",
            "target",
            "phase",
            "arm",
            "clean",
            "address",
            "rx",
            "ask",
            "seen_phase",
            "seen_arm",
            "settled",
            "keys",
            "receipts_lost",
        )
    }
