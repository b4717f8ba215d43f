# SPDX-License-Identifier: BSD-3-Clause
"""When SHIFTVERBS_REQUIRE ends a QP, in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shiftverbs.config import Config
from shiftverbs.failover.qp.requirement import CATCH_UP_NS, LATE_NS, Requirement
from shiftverbs.protocol.events import Status

S = 1_000_000_000
READY_NS = 100 * S


class Connection:
    """One that only counts how often it was ended; at RTS since READY_NS, with a deadline of 30 s."""

    def __init__(self, **config: Any) -> None:
        self.done: list[str] = []
        directory = SimpleNamespace(explained=lambda why: why)
        self.driver = SimpleNamespace(config=Config(**{"require": True, **config}), directory=directory)
        self.shadow = SimpleNamespace(ready_ns=READY_NS)
        self.core = SimpleNamespace(
            ending=False, aborted=False, error=None, unpolled=None, first_error=lambda k: self.core.error
        )
        self.ending = SimpleNamespace(
            leave_behind=lambda: self.done.append("leave"),
            begin=lambda first: self.done.append(f"begin {first}"),
        )
        self.status, self.shown_why, self.closed = Status.PAIRING, "etcd is away", False

    def drain(self, k: int) -> None:
        self.core.error = self.core.error or self.core.unpolled

    def disconnect(self, why: str) -> None:
        self.done.append("disconnect")

    def set_status(self, status: Status, why: str, what: str) -> None:
        self.status, self.shown_why = status, why


def made(**config: Any) -> tuple[Connection, Requirement]:
    connection: Any = Connection(**config)
    return connection, Requirement(connection)


ENDED = ["leave", "disconnect", "begin (5, 0)"]


def test_at_the_deadline_once() -> None:
    c, requirement = made()
    requirement.watch(READY_NS)
    requirement.watch(READY_NS + 30 * S - 1)
    assert c.done == []
    requirement.watch(READY_NS + 30 * S)
    assert c.done == ENDED and c.status is Status.FAILED
    assert c.shown_why == "SHIFTVERBS_REQUIRE is set, and the QP was not protected within 30 s: etcd is away"
    requirement.watch(READY_NS + 99 * S)
    assert c.done == ENDED


@pytest.mark.parametrize("status", [Status.UNPROTECTED, Status.FAILED])
def test_at_once_where_it_is_certain(status: Status) -> None:
    c, requirement = made()
    c.status = status
    requirement.watch(READY_NS + 1)
    assert c.done == ENDED
    assert c.shown_why == "SHIFTVERBS_REQUIRE is set, and the QP cannot be protected: etcd is away"


def test_who_was_protected_once_is_left_alone_until_it_begins_anew() -> None:
    c, requirement = made()
    requirement.met()
    for c.status in (Status.PROTECTED, Status.UNPROTECTED, Status.PAIRING, Status.FAILED):
        requirement.watch(READY_NS + 31 * S)
    assert c.done == []
    requirement.begin()
    c.status, c.shadow.ready_ns = Status.PAIRING, None
    requirement.watch(READY_NS + 31 * S)
    assert c.done == []
    c.shadow.ready_ns = READY_NS + 40 * S
    requirement.watch(READY_NS + 69 * S)
    assert c.done == []
    requirement.watch(READY_NS + 70 * S)
    assert c.done == ENDED


def test_who_stood_still_reads_what_came_first() -> None:
    c, requirement = made()
    late = READY_NS + 30 * S + LATE_NS + 1
    requirement.watch(late)
    requirement.watch(late + CATCH_UP_NS - 1)
    assert c.done == []
    requirement.watch(late + CATCH_UP_NS)
    assert c.done == ENDED


def test_who_always_looks_late_ends_all_the_same() -> None:
    c, requirement = made()
    for s in range(40, 90, 10):
        requirement.watch(READY_NS + s * S)
    assert c.done == ENDED


@pytest.mark.parametrize(
    "what",
    [
        "nothing is required",
        "it is not at RTS",
        "it is closed",
        "in ERR",
        "in ERR, unpolled",
        "ends",
        "ended",
    ],
)
def test_not(what: str) -> None:
    c, requirement = made(require=what != "nothing is required")
    c.closed = what == "it is closed"
    if what == "it is not at RTS":
        c.shadow.ready_ns = None
    c.core.error = (12, 0) if what == "in ERR" else None
    c.core.unpolled = (12, 0) if what == "in ERR, unpolled" else None
    c.core.ending, c.core.aborted = what == "ends", what == "ended"
    for c.status in (Status.PAIRING, Status.UNPROTECTED):
        requirement.watch(READY_NS + 30 * S)
    assert c.done == []
