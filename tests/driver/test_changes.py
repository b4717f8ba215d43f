# SPDX-License-Identifier: BSD-3-Clause
"""What the application's modify comes to, where the software RNIC cannot stage it."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from shiftverbs import _nic
from shiftverbs.failover.qp import changes
from shiftverbs.failover.qp.rebuild import Rebuild
from shiftverbs.failover.services.host import LocalPort
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Stage
from shiftverbs.protocol.messages import PairAddress
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.qp_attributes import INIT, RTR, RTS, QpAttributes, refusal

STATE, CUR, ACCESS, ALT, RNR_TIMER, MIG = 1, 2, 8, 1 << 14, 1 << 15, 1 << 18
TO_RTS = 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16
HERE, THERE = bytes(15) + b"\1", bytes(15) + b"\2"


@pytest.mark.parametrize(
    ("before", "attrs", "mask", "code"),
    [
        (RTS, {}, ACCESS | RNR_TIMER | ALT | MIG, 0),
        (RTS, {"qp_state": RTS, "cur_qp_state": RTS}, STATE | CUR | ACCESS, 0),
        (RTS, {"cur_qp_state": RTR}, CUR | ACCESS, errno.EINVAL),
        (RTS, {}, 1 << 9 | ACCESS, errno.EINVAL),
        (RTS, {"min_rnr_timer": 32}, RNR_TIMER, errno.EINVAL),
        (RTS, {"path_mig_state": 3}, MIG, errno.EINVAL),
        (RTS, {"qp_state": INIT}, STATE, errno.EINVAL),
        (RTR, {}, ACCESS, errno.EINVAL),
        (RTR, {"qp_state": RTS}, STATE | TO_RTS | ACCESS, 0),
        (RTR, {"qp_state": RTS}, STATE | TO_RTS & ~(1 << 9), errno.EINVAL),
        (6, {}, ACCESS, errno.EINVAL),
    ],
)
def test_what_a_nic_would_refuse(before: int, attrs: dict[str, int], mask: int, code: int) -> None:
    attr = pyverbs_objects.Attr()
    for name, value in attrs.items():
        setattr(attr, name, value)
    assert refusal(attr, mask, before) == code


ATOMIC_HCA, ATOMIC_GLOB = 1, 2


class Steps:
    """What each of some transitions was given, by name; the true ones take it."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def __len__(self) -> int:
        return len(self.names)

    def add(self, **attrs: Any) -> Steps:
        _nic.ModifySteps().add(**attrs)
        self.names.append(set(attrs))
        return self


class Rebuilt:
    """A connection whose commands are only noted; `attributes`: the application's."""

    n_pairs = 2

    def __init__(self, attributes: QpAttributes, most_reads: int = 16, atomic_cap: int = ATOMIC_HCA) -> None:
        self.shadow = SimpleNamespace(attrs=attributes.merged)
        self.given: dict[int, changes.Given] = {}
        self.commands: list[tuple[Any, Any]] = []
        self.told: list[Any] = []
        self.driver = SimpleNamespace(command=lambda c, k, steps, done: self.commands.append((steps, done)))
        self._nic = SimpleNamespace(
            uses_grh=True,
            limits={"max_qp_init_rd_atom": most_reads, "atomic_cap": atomic_cap},
            verbs=SimpleNamespace(ModifySteps=Steps),
        )

    def local_port(self, k: int) -> LocalPort:
        return LocalPort(1, 1, HERE, 3, 0)

    def nic(self, k: int) -> Any:
        return self._nic

    def device(self, k: int) -> str:
        return f"nic{k}"

    def feed(self, event: Any) -> None:
        self.told.append(event)

    def connect(self, k: int, stage: Stage = Stage.RTR_RTS) -> tuple[list[set[str]], Any]:
        """What the steps were given, and who hears of their end."""
        Rebuild(self).connect(ev.ConnectPair(k, 1, stage, 7, PairAddress(THERE, 0, 9, 5, 3)))  # type: ignore[arg-type]
        steps, done = self.commands.pop()
        return steps.names, done


def attributes(rts: bool = True, alternate: bool = False) -> QpAttributes:
    made, attr = QpAttributes(), pyverbs_objects.Attr()
    attr.qp_access_flags, attr.max_dest_rd_atomic, attr.max_rd_atomic, attr.min_rnr_timer = 7, 4, 2, 12
    attr.alt_ah_attr.is_global, attr.alt_port_num, attr.path_mig_state = 1, 2, 1
    attr.alt_ah_attr.grh.dgid = THERE
    made.note(attr, STATE | ACCESS | 1 << 4 | 1 << 5, 0, INIT)
    made.note(attr, STATE | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 17 | 1 << 20 | RNR_TIMER, INIT, RTR)
    if rts:
        made.note(attr, STATE | TO_RTS, RTR, RTS)
    if alternate:
        made.note(attr, ALT | MIG, RTS, RTS)
    return made


def test_each_step_takes_the_rights_of_then() -> None:
    c = Rebuilt(attributes())
    steps, _ = c.connect(1)
    assert len(steps) == 2 and all({"qp_access_flags", "min_rnr_timer"} <= names for names in steps)
    assert (c.given[1].state, c.given[1].attrs["qp_access_flags"]) == (RTS, 7)
    c.connect(1, Stage.RTR)
    assert c.given[1].state == RTR


def test_the_alternate_path_is_the_default_nics() -> None:
    """It is given again to the default QP alone, and its NIC may refuse: the QP works without."""
    c = Rebuilt(attributes(alternate=True))
    assert len(c.connect(1)[0]) == 2
    steps, done = c.connect(0)
    assert steps[2:] == [{"alt_ah_attr", "alt_pkey_index", "alt_port_num", "alt_timeout"}, {"path_mig_state"}]
    for step in (2, 3):
        done(errno.EINVAL, step)
    assert [event.error for event in c.told] == [None, None]
    done(errno.EINVAL, 1)
    assert "step 1" in c.told[-1].error


def test_reads_before_the_application_said_how_many() -> None:
    """As many as it answers itself, as far as the NIC can."""
    for most, expected in ((16, 4), (1, 1)):
        c = Rebuilt(attributes(rts=False), most)
        c.connect(1)
        assert c.given[1].attrs["max_rd_atomic"] == expected
    c = Rebuilt(attributes())
    c.connect(1)
    assert c.given[1].attrs["max_rd_atomic"] == 2


def test_the_alternate_path_is_shown_again() -> None:
    shown = pyverbs_objects.Attr()
    attributes(alternate=True).write_to(shown)
    assert bytes(shown.alt_ah_attr.grh.dgid) == THERE and (shown.alt_port_num, shown.path_mig_state) == (2, 1)


@pytest.mark.parametrize(
    ("k", "cap", "rights"), [(0, ATOMIC_HCA, 15), (1, ATOMIC_GLOB, 15), (1, ATOMIC_HCA, 7)]
)
def test_a_backup_has_the_right_to_atomics_only_where_all_nics_are_atomic_to_each_other(
    k: int, cap: int, rights: int
) -> None:
    connection = Rebuilt(attributes(), atomic_cap=cap)
    given = {"qp_access_flags": 15, "min_rnr_timer": 12}
    assert changes.on_pair(connection, k, given) == {"qp_access_flags": rights, "min_rnr_timer": 12}  # type: ignore[arg-type]
    assert changes.on_pair(connection, k, {"min_rnr_timer": 12}) == {"min_rnr_timer": 12}  # type: ignore[arg-type]
