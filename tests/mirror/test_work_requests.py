# SPDX-License-Identifier: BSD-3-Clause
"""SGE, SendWR and RecvWR: whatever arguments pyverbs' constructors are given, ours do the same with them."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import pyverbs.wr
from hypothesis import given
from hypothesis import strategies as st

import shiftverbs.wr
from shiftverbs import enums as e

# Behind the object's header, weak references, logger and vtable.
PAYLOAD = 40
SEND_BYTES = {"wr_id": (0, 8), "num_sge to imm_data": (24, 40), "the rest": (40, 128)}
RECV_BYTES = {"wr_id": (0, 8), "num_sge": (24, 28)}
SG_LIST, NUM_SGE, NEXT = 16, 24, 8

MODULES = (pyverbs.wr, shiftverbs.wr)


def word(address: int, size: int = 8) -> int:
    return int.from_bytes(ctypes.string_at(address, size), "little")


def sge_bytes(sge: Any) -> bytes:
    return ctypes.string_at(word(id(sge) + PAYLOAD), 16)


def wr_bytes(wr: Any, fields: dict[str, tuple[int, int]]) -> tuple[Any, ...]:
    """What a WR says, with its SGEs instead of their address and whether there is a next one."""
    base = id(wr) + PAYLOAD
    parts = tuple(ctypes.string_at(base + begin, end - begin) for begin, end in fields.values())
    count = word(base + NUM_SGE, 4)
    sges = ctypes.string_at(word(base + SG_LIST), 16 * count) if count < 100 else b""
    return (*parts, sges, bool(word(base + NEXT)))


def outcome(make: Callable[[Any], Any], read: Callable[[Any], Any], module: Any) -> Any:
    """The bytes of what was made, or the error."""
    try:
        made = make(module)
    except Exception as error:
        # Our classes have the module's name, pyverbs' say pyverbs.wr in front of it.
        return type(error), str(error).replace("pyverbs.wr.", "")
    return read(made)


def same(make: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    theirs, ours = (outcome(make, read, module) for module in MODULES)
    assert ours == theirs


numbers = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1, 2**64, -1]),
)
# pyverbs takes anything that it can make an int of, and refuses the rest.
values = st.one_of(numbers, st.booleans(), st.none(), st.floats(0, 100), st.text(max_size=2))
opcodes = st.one_of(st.integers(0, 12), values)


@given(
    st.lists(values, max_size=4), st.dictionaries(st.sampled_from(["addr", "length", "lkey", "key"]), values)
)
def test_sge(positional: list[Any], keywords: dict[str, Any]) -> None:
    same(lambda module: module.SGE(*positional, **keywords), sge_bytes)


def keywords_of(names: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=names)


@given(
    st.one_of(st.integers(0, 3), st.none(), st.just("x")),
    st.sampled_from([list, tuple, iter, None]),
    keywords_of(
        {"wr_id": values, "opcode": opcodes, "imm_data": values, "send_flags": values, "wrong": values}
    ),
    st.sampled_from([0, 1, 2, 3, 3]),
    st.sampled_from(["none", "absent", "wr", "other"]),
)
def test_send_wr(num_sge: Any, kind: Any, keywords: dict[str, Any], available: int, next_wr: str) -> None:
    def make(module: Any) -> Any:
        sges = [module.SGE(0x1000 + i, 10 + i, 0x20 + i) for i in range(available)]
        chosen = dict(keywords, num_sge=num_sge, sg=None if kind is None else kind(sges))
        if next_wr == "wr":
            make.next = chosen["next_wr"] = module.SendWR(num_sge=1, sg=[module.SGE(1, 2, 3)])  # type: ignore
        elif next_wr == "other":
            chosen["next_wr"] = module.RecvWR(num_sge=1, sg=[module.SGE(1, 2, 3)])
        elif next_wr == "none":
            chosen["next_wr"] = None
        return module.SendWR(**chosen)

    if available < (num_sge if isinstance(num_sge, int) else 0) and kind is list:
        return  # pyverbs reads behind the end of the list, or raises, as its release has it
    same(make, lambda wr: wr_bytes(wr, SEND_BYTES))


@given(values, st.integers(0, 3), st.sampled_from([list, tuple]), st.booleans())
def test_recv_wr(wr_id: Any, num_sge: int, kind: Any, by_name: bool) -> None:
    def make(module: Any) -> Any:
        sges = kind(module.SGE(0x1000 + i, 10 + i, 0x20 + i) for i in range(3))
        if by_name:
            return module.RecvWR(wr_id=wr_id, num_sge=num_sge, sg=sges)
        return module.RecvWR(wr_id, num_sge, sges)

    same(make, lambda wr: wr_bytes(wr, RECV_BYTES))


@pytest.mark.parametrize("opcode", [e.IBV_WR_LOCAL_INV, e.IBV_WR_BIND_MW, e.IBV_WR_SEND_WITH_INV])
def test_opcodes_that_need_no_sge(opcode: int) -> None:
    same(lambda module: module.SendWR(wr_id=3, opcode=opcode), lambda wr: wr_bytes(wr, SEND_BYTES))


def test_too_few_arguments_and_too_many() -> None:
    for arguments in ((), (1,), (1, 2), (1, 2, 3, 4)):
        same(lambda module, a=arguments: module.SGE(*a), sge_bytes)
    same(lambda module: module.SendWR(), lambda wr: None)
    same(lambda module: module.SendWR(*range(8)), lambda wr: None)
    same(lambda module: module.SendWR(1, wr_id=2), lambda wr: None)


def test_they_are_pyverbs_own() -> None:
    sge = shiftverbs.wr.SGE(0x1000, 64, 7)
    send = shiftverbs.wr.SendWR(num_sge=1, sg=[sge])
    recv = shiftverbs.wr.RecvWR(num_sge=1, sg=[sge])
    assert isinstance(sge, pyverbs.wr.SGE)
    assert isinstance(send, pyverbs.wr.SendWR) and isinstance(recv, pyverbs.wr.RecvWR)
    assert [type(x).__name__ for x in (sge, send, recv)] == ["SGE", "SendWR", "RecvWR"]
    assert str(send) == str(pyverbs.wr.SendWR(num_sge=1, sg=[pyverbs.wr.SGE(0x1000, 64, 7)]))
    assert (sge.addr, sge.length, sge.lkey) == (0x1000, 64, 7)
    for thing in (sge, send, recv):
        thing.set_log_level(logging.INFO)
        assert weakref.ref(thing)() is thing
    # Mixed with pyverbs' own, in both directions.
    assert wr_bytes(pyverbs.wr.SendWR(num_sge=1, sg=[sge]), SEND_BYTES) == wr_bytes(send, SEND_BYTES)
    theirs = pyverbs.wr.SGE(0x1000, 64, 7)
    assert wr_bytes(shiftverbs.wr.SendWR(num_sge=1, sg=[theirs]), SEND_BYTES) == wr_bytes(send, SEND_BYTES)


def test_a_programs_subclass_runs_its_own_constructor() -> None:
    class Numbered(shiftverbs.wr.SendWR):
        def __init__(self, number: int, **rest: Any) -> None:
            super().__init__(wr_id=number, **rest)
            self.number = number

    wr = Numbered(5, num_sge=1, sg=[shiftverbs.wr.SGE(1, 2, 3)])
    assert (wr.number, wr.wr_id, wr.num_sge) == (5, 5, 1)


@pytest.mark.skipif(
    importlib.util.find_spec("pyverbs.comp_cntr") is not None,
    reason="pyverbs 65 frees an SGE that was lent to a WR twice, and plain pyverbs dies of it too",
)
def test_an_sge_may_go_before_the_wr_it_was_lent_to() -> None:
    wr = shiftverbs.wr.SendWR(num_sge=1, sg=[shiftverbs.wr.SGE(1, 2, 3)])
    sge = shiftverbs.wr.SGE(0x7000, 8, 9)
    wr.sg_list = sge
    del sge
    gc.collect()
    others = [shiftverbs.wr.SGE(i, i, i) for i in range(100)]
    assert wr_bytes(wr, SEND_BYTES)[3][:8] == (0x7000).to_bytes(8, "little")
    del others


def test_many_leave_no_objects_behind() -> None:
    gc.collect()
    before = len(gc.get_objects())
    for i in range(1000):
        wr = shiftverbs.wr.SendWR(wr_id=i, num_sge=1, sg=[shiftverbs.wr.SGE(i, i, i)])
        wr.close()
    del wr
    gc.collect()
    assert len(gc.get_objects()) - before < 50
