# SPDX-License-Identifier: BSD-3-Clause
"""docs/protocol.md says what the code says."""

from __future__ import annotations

import sys

import pytest
from harness import ROOT

from shiftverbs.protocol.messages import ArmStep, MoveStep, Phase
from shiftverbs.protocol.pair import MS, ProtocolConfig

sys.path.insert(0, str(ROOT / "tools"))
import protocol_diagrams

PAGE = ROOT / "docs" / "protocol.md"


@pytest.mark.parametrize("name", protocol_diagrams.DIAGRAMS)
def test_each_diagram_is_the_generated_one(name: str) -> None:
    text = PAGE.read_text()
    assert protocol_diagrams.filled(text, name) == text, "run: python tools/protocol_diagrams.py"


def test_every_word_of_the_protocol_is_explained() -> None:
    text = PAGE.read_text()
    for word in (*Phase, *ArmStep, *MoveStep):
        name = word.name if word is not ArmStep.REJ else "REJ"
        assert name in text, f"{name} is not in docs/protocol.md"


def test_times_are_the_defaults() -> None:
    config = ProtocolConfig()
    table = PAGE.read_text().split("## Times")[1].split("##")[0]
    for value, unit in [
        (config.peer_deadline_ns // (1000 * MS), "s"),
        (config.fence_deadline_ns // (1000 * MS), "s"),
        (config.resend_first_ns // MS, "ms"),
        (config.resend_most_ns // MS, "ms"),
        (config.ask_retry_ns // MS, "ms"),
        (config.arm_timeout_ns // MS, "ms"),
        (config.arm_backoff_first_ns // MS, "ms"),
        (config.arm_backoff_most_ns // (1000 * MS), "s"),
        (config.move_grace_ns // MS, "ms"),
        (config.move_timeout_ns // MS, "ms"),
        (config.flap_window_ns // (1000 * MS), "s"),
        (config.flap_backoff_first_ns // MS, "ms"),
        (config.flap_backoff_most_ns // (1000 * MS), "s"),
        (config.in_vain_backoff_most_ns // (1000 * MS), "s"),
        (config.bye_deadline_ns // MS, "ms"),
    ]:
        assert f"{value} {unit}" in table, f"{value} {unit} is not in the table of times"
