# SPDX-License-Identifier: BSD-3-Clause
"""docs/protocol.md says what the code says."""

from __future__ import annotations

import re

from harness import ROOT

from shiftverbs import state_machine
from shiftverbs.protocol.messages import ArmStep, MoveStep, Phase
from shiftverbs.protocol.pair import MS, ProtocolConfig

PAGE = ROOT / "docs" / "protocol.md"
BEGIN, END = "<!-- state diagram: generated, do not edit -->\n", "<!-- end of the state diagram -->"


def diagrams() -> str:
    """The generated diagrams as they stand in the page: one Mermaid block per machine."""
    return "".join(
        f"\n```mermaid\n{part.strip()}\n```\n"
        for part in re.split(r"\n\n", state_machine.mermaid())
        if part.strip()
    )


def test_the_state_diagram_is_the_generated_one() -> None:
    text = PAGE.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    assert text[begin:end].strip() == diagrams().strip(), "run: python -m shiftverbs.state_machine, and paste"


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
        (config.bye_deadline_ns // MS, "ms"),
    ]:
        assert f"{value} {unit}" in table, f"{value} {unit} is not in the table of times"
