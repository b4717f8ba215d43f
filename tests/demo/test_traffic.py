# SPDX-License-Identifier: BSD-3-Clause
"""The demo's traffic on plain pyverbs and the software RNIC: clean when nothing is wrong, and each deliberate
fault of a sender is found by the receiver's checks."""

import json
from pathlib import Path

import pytest

CHILD = str(Path(__file__).with_name("mutated_traffic.py"))


def run(spawn, kind, mutation):
    child = spawn(CHILD, kind, mutation)
    child.succeed(40)
    return json.loads(child.printed[-1])


@pytest.mark.parametrize("kind", ["write_imm", "send", "read"])
def test_clean_traffic_is_counted_as_such(spawn, kind):
    a, b = run(spawn, kind, "none")
    receiver = a if kind == "read" else b
    assert a["sent"] >= 300 and receiver["checked"] == a["sent"], "everything arrived"
    for side in (a, b):
        assert side["first_fault"] is None
        names = ("lost_of_expected", "duplicated", "reordered", "corrupt", "wc_faults")
        assert [side[name] for name in names] == [0, 0, 0, 0, 0]
    assert receiver["bytes"] == receiver["checked"] * (65536 if kind == "write_imm" else 32768)


@pytest.mark.parametrize(
    ("kind", "mutation", "found"),
    [
        ("write_imm", "lost", "lost_of_expected"),
        ("write_imm", "duplicated", "duplicated"),
        ("write_imm", "reordered", "reordered"),
        ("write_imm", "corrupt", "corrupt"),
        ("write_imm", "chunk missing", "corrupt"),
        ("send", "lost", "lost_of_expected"),
        ("send", "duplicated", "duplicated"),
        ("send", "reordered", "reordered"),
        ("send", "corrupt", "corrupt"),
        ("read", "corrupt", "corrupt"),
        ("read", "lost", "corrupt"),  # a READ that did not happen leaves other bytes in its slot
    ],
)
def test_a_senders_fault_is_found(spawn, kind, mutation, found):
    a, b = run(spawn, kind, mutation)
    receiver = a if kind == "read" else b
    assert receiver[found] >= 1, (a, b)
    assert receiver["first_fault"] is not None
