# SPDX-License-Identifier: BSD-3-Clause
"""What a QP remembers of its transitions, read when somebody asks."""

from __future__ import annotations

import random

from shiftverbs.shadows.pyverbs_objects import Attr
from shiftverbs.shadows.qp_attributes import INIT, RESET, RTR, RTS, SQD, QpAttributes

STATE, ACCESS, PORT, TIMEOUT, RNR_TIMER, AV = 1, 1 << 3, 1 << 5, 1 << 9, 1 << 15, 1 << 7


def attr(**fields: int) -> Attr:
    made = Attr()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def connected() -> QpAttributes:
    made = QpAttributes()
    made.note(attr(port_num=1, qp_access_flags=3), STATE | PORT | ACCESS, RESET, INIT)
    made.note(attr(min_rnr_timer=9), STATE | RNR_TIMER, INIT, RTR)
    made.note(attr(timeout=14), STATE | TIMEOUT, RTR, RTS)
    return made


def test_each_transition_and_all_together() -> None:
    made = connected()
    assert made.transitions == {
        "INIT": {"port_num": 1, "qp_access_flags": 3},
        "RTR": {"min_rnr_timer": 9},
        "RTS": {"timeout": 14},
    }
    assert made.merged == {"port_num": 1, "qp_access_flags": 3, "min_rnr_timer": 9, "timeout": 14}
    # Changed in RTS, and back from SQD: added to what RTS was given.
    made.note(attr(min_rnr_timer=20), RNR_TIMER, RTS, RTS)
    made.note(attr(), STATE, RTS, SQD)
    made.note(attr(qp_access_flags=1), STATE | ACCESS, SQD, RTS)
    assert made.transitions["RTS"] == {"timeout": 14, "min_rnr_timer": 20, "qp_access_flags": 1}
    assert made.transitions["RTR"] == {"min_rnr_timer": 9}
    assert made.merged["min_rnr_timer"] == 20 and made.merged["qp_access_flags"] == 1


def test_noted_at_once_read_later() -> None:
    """The application may use its QPAttr again."""
    made = QpAttributes()
    reused = attr(port_num=1)
    reused.ah_attr.is_global = 1
    reused.ah_attr.grh.dgid = bytes(range(16))
    made.note(reused, STATE | PORT | AV, RESET, INIT)
    reused.port_num = 2
    reused.ah_attr.grh.dgid = bytes(16)
    assert made.merged["port_num"] == 1 and made.merged["ah_attr"]["dgid"] == bytes(range(16))
    written = attr()
    made.write_to(written)
    assert written.port_num == 1 and bytes(written.ah_attr.grh.dgid) == bytes(range(16))


def test_what_was_handed_out_never_changes() -> None:
    made = connected()
    transitions, merged = made.transitions, made.merged
    made.note(attr(timeout=2), TIMEOUT, RTS, RTS)
    assert transitions["RTS"] == {"timeout": 14} and merged["timeout"] == 14
    assert made.transitions["RTS"] == {"timeout": 2} and made.merged["timeout"] == 2
    made.note(attr(), STATE, RTS, RESET)
    assert made.transitions == {} and made.merged == {}
    assert transitions["RTS"] == {"timeout": 14}


def test_reading_now_and_then_makes_no_difference_nor_does_their_number() -> None:
    chance = random.Random(7)
    always, never = connected(), connected()
    for number in range(200):
        value = attr(timeout=number % 32, min_rnr_timer=chance.randrange(32))
        mask = chance.choice((TIMEOUT, RNR_TIMER, TIMEOUT | RNR_TIMER))
        for each in (always, never):
            each.note(value, mask, RTS, RTS)
        assert always.merged["timeout"] < 32
    assert always.transitions == never.transitions
    assert len(never._notes) <= 33
    assert never.transitions["RTR"] == {"min_rnr_timer": 9}
