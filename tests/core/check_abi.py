# SPDX-License-Identifier: BSD-3-Clause
"""Reading and writing pyverbs' objects, and refusing an unknown layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from pyverbs.addr import AH, GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CQEX, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR, MW
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from pyverbs.srq import SRQ, SrqInitAttrEx
from pyverbs.wr import SGE
from pyverbs.xrcd import XRCD

from shiftverbs import _core

CAP = (11, 12, 3, 4, 15)
ADDRESS = 0x7F0012345678


def test_the_installed_pyverbs_is_known() -> None:
    _core.check_abi()
    assert _core.pyverbs_version()


@pytest.mark.parametrize(
    ("cls", "read", "offset"),
    [
        *((cls, _core.pointer, 40) for cls in (Context, PD, CompChannel, CQ, CQEX, QP, QPEx, SRQ, AH, XRCD)),
        (CQEX, _core.cqex_pointer, 48),
        (MR, _core.mr_pointer, 56),
        (MW, _core.mw_pointer, 48),
    ],
)
def test_pointer(cls: type, read: Callable[[object], int], offset: int) -> None:
    class Sub(cls):  # type: ignore[misc]
        pass

    for c in (cls, Sub):
        obj = c.__new__(c)
        assert read(obj) == 0
        field = ctypes.c_uint64.from_address(id(obj) + offset)
        field.value = ADDRESS
        assert read(obj) == ADDRESS
        if read is not _core.cqex_pointer:
            _core.forget_pointer(obj)
            assert field.value == 0
        field.value = 0


def test_where_the_pointers_are() -> None:
    assert (_core.POINTER, _core.MR_POINTER, _core.MW_POINTER) == (40, 56, 48)


@pytest.mark.parametrize("bad", [None, 3, "x", QPCap()])
@pytest.mark.parametrize(
    "read",
    [
        *(_core.pointer, _core.mr_pointer, _core.mw_pointer, _core.cqex_pointer, _core.forget_pointer),
        *(_core.async_fd, _core.channel_fd, _core.cq_entries, _core.init_attr, _core.qp_attr),
    ],
)
def test_something_else(read: Callable[[object], object], bad: object) -> None:
    with pytest.raises(TypeError):
        read(bad)


@pytest.mark.parametrize("bad", [SGE(1, 2, 3), QPAttr()])
def test_init_attr_of_something_else(bad: object) -> None:
    with pytest.raises(TypeError, match="expected QPInitAttr or QPInitAttrEx"):
        _core.init_attr(bad)


def test_an_mr_has_no_number_of_entries() -> None:
    with pytest.raises(TypeError, match="CQ or CQEX expected"):
        _core.cq_entries(MR.__new__(MR))


@pytest.mark.parametrize(
    ("cls", "read"),
    [
        (Context, _core.async_fd),
        (CompChannel, _core.channel_fd),
        (CQ, _core.cq_entries),
        (CQEX, _core.cq_entries),
    ],
)
def test_what_a_closed_object_has_not(cls: type, read: Callable[[object], int]) -> None:
    with pytest.raises(ValueError, match=f"a closed {cls.__name__}"):
        read(cls.__new__(cls))


@pytest.mark.parametrize("cls", [QPInitAttr, QPInitAttrEx])
def test_init_attr(cls: type) -> None:
    class Sub(cls):  # type: ignore[misc]
        pass

    obj = Sub(qp_type=2, sq_sig_all=1)
    attr = _core.init_attr(obj)
    assert isinstance(attr, _core.InitAttrEx) == (cls is QPInitAttrEx)
    attr.send_cq, attr.recv_cq = 0x1000, ADDRESS
    _core.set_cap(attr.cap, CAP)
    again = _core.init_attr(obj)
    assert (again.send_cq, again.recv_cq, again.srq) == (0x1000, ADDRESS, 0)
    assert (again.qp_type, again.sq_sig_all) == (2, 1) and _core.cap_tuple(again.cap) == CAP
    assert (obj.max_send_wr, obj.max_inline_data) == (11, 15)
    attr.send_cq = attr.recv_cq = 0


def test_a_struct_keeps_what_it_lies_in() -> None:
    cap = _core.init_attr(QPInitAttr(cap=QPCap(*CAP))).cap
    others = [QPInitAttr() for _ in range(100)]
    assert _core.cap_tuple(cap) == CAP and len(others) == 100


def test_caps() -> None:
    for obj in (_core.qp_attr(QPAttr()), _core.init_attr(QPInitAttr()), _core.init_attr(QPInitAttrEx())):
        _core.set_cap(obj.cap, CAP)
        assert _core.cap_tuple(obj.cap) == CAP
        obj.cap.max_recv_sge = 9
        assert _core.cap_tuple(obj.cap) == (11, 12, 3, 9, 15) and obj.cap.max_recv_sge == 9
        with pytest.raises(OverflowError):
            _core.set_cap(obj.cap, (1, 2, 3, -1, 5))
        with pytest.raises(ValueError, match="unpack"):
            _core.set_cap(obj.cap, (1, 2, 3))  # type: ignore[arg-type]
        assert _core.cap_tuple(obj.cap) == (11, 12, 3, 9, 15)


def test_qp_attr() -> None:
    gid = "fe80:0000:0000:0000:0211:22ff:fe33:4455"
    route = GlobalRoute(dgid=GID(gid), sgid_index=3)
    route.flow_label, route.hop_limit, route.traffic_class = 0xABCDE, 7, 9
    ah = AHAttr(dlid=0x1234, sl=2, port_num=1, is_global=1, gr=route)
    ah.src_path_bits, ah.static_rate = 5, 6
    attr = QPAttr()
    attr.ah_attr = ah
    attr.qp_state, attr.path_mtu, attr.port_num, attr.pkey_index = 3, 4, 2, 8
    attr.qp_access_flags = 15
    read = _core.qp_attr(attr)
    grh = read.ah_attr.grh
    assert grh.dgid == bytes.fromhex(gid.replace(":", ""))
    assert (grh.flow_label, grh.sgid_index, grh.hop_limit, grh.traffic_class) == (0xABCDE, 3, 7, 9)
    vector = read.ah_attr
    assert (vector.dlid, vector.sl, vector.src_path_bits, vector.static_rate) == (0x1234, 2, 5, 6)
    assert (vector.is_global, vector.port_num) == (1, 1)
    assert (read.qp_state, read.path_mtu, read.port_num, read.pkey_index) == (3, 4, 2, 8)
    assert read.qp_access_flags == 15
    read.ah_attr.grh.dgid = bytes(range(16))
    read.timeout = 17
    assert "0001:0203:0405:0607:0809:0a0b:0c0d:0e0f" in str(attr.ah_attr) and attr.timeout == 17


def test_a_struct_of_its_own() -> None:
    attr = _core.Attr()
    assert bytes(attr) == bytes(len(bytes(attr)))
    attr.rq_psn, attr.qp_state = 0xABCDEF, 3
    copy = _core.Attr(bytes(attr))
    attr.rq_psn = 0
    assert (copy.rq_psn, copy.qp_state) == (0xABCDEF, 3)
    _core.copy_struct(attr, copy)
    assert bytes(attr) == bytes(copy)
    with pytest.raises(ValueError, match="bytes, not 3"):
        _core.Attr(b"abc")
    with pytest.raises(TypeError, match="Attr expected, not Cap"):
        _core.copy_struct(attr, _core.Cap())
    with pytest.raises(TypeError, match="no struct"):
        _core.Struct()


def test_fields_take_what_fits() -> None:
    attr = _core.Attr()
    for name, value, error in (
        ("timeout", 256, OverflowError),
        ("timeout", -1, OverflowError),
        ("pkey_index", 1 << 16, OverflowError),
        ("qkey", 1 << 32, OverflowError),
        ("qp_state", "RTS", TypeError),
        ("qp_sate", 1, AttributeError),
        ("cap", CAP, AttributeError),
    ):
        with pytest.raises(error):
            setattr(attr, name, value)
    with pytest.raises(ValueError, match="dgid has 16 bytes, not 3"):
        attr.ah_attr.grh.dgid = b"abc"
    with pytest.raises(AttributeError):
        print(attr.qp_sate)
    assert bytes(attr) == bytes(_core.Attr())


def test_the_cq_of_an_srq() -> None:
    attr = SrqInitAttrEx()
    before = ctypes.string_at(id(attr) + 32, 64)
    _core.set_srq_cq(attr, ADDRESS)
    field = ctypes.c_uint64.from_address(id(attr) + 32 + 48)  # struct ibv_srq_init_attr_ex
    assert field.value == ADDRESS
    field.value = 0
    assert ctypes.string_at(id(attr) + 32, 64) == before


def test_the_stub_names_what_there_is() -> None:
    """_core.pyi and the compiled module have the same functions, constants, classes, methods and attributes."""
    import ast
    import pathlib

    import shiftverbs

    stub = ast.parse((pathlib.Path(shiftverbs.__file__).parent / "_core.pyi").read_text())
    in_stub: dict[str, set[str]] = {"": set()}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            in_stub[""].add(node.name)
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            members |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
            in_stub[node.name] = {m for m in members if not m.startswith("_")}
        elif isinstance(node, ast.FunctionDef):
            in_stub[""].add(node.name)
        elif isinstance(node, ast.AnnAssign):
            in_stub[""].add(node.target.id)  # type: ignore[union-attr]
    for name, members in in_stub.items():
        thing = getattr(_core, name) if name else _core
        there = {m for m in vars(thing) if not m.startswith("_")}
        if not name:
            imported = {"math", "os", "threading", "PyverbsRDMAError", "PyverbsUserError"}
            there -= imported
        assert there == members, name
        for member in members:
            value = getattr(thing, member)
            if callable(value) or not name:
                assert isinstance(value, int) or value.__doc__, f"{name}.{member} says nothing about itself"


@pytest.mark.parametrize("name", ["WC", "SGE", "SendWR", "QPInitAttr", "MR", "MW", "QPAttr", "SrqInitAttrEx"])
def test_an_unknown_layout_is_refused_by_name(name: str) -> None:
    """A pyverbs whose class derives from something else, or has another size, is not read at all."""
    import subprocess
    import sys

    # The type object's own fields are changed before _core looks at them, in an interpreter that dies afterwards.
    program = f"""
import ctypes, pyverbs.cq, pyverbs.wr, pyverbs.qp, pyverbs.mr, pyverbs.srq
for module in (pyverbs.cq, pyverbs.wr, pyverbs.qp, pyverbs.mr, pyverbs.srq):
    if hasattr(module, {name!r}):
        cls = getattr(module, {name!r})
size = ctypes.c_ssize_t.from_address(id(cls) + 32)  # tp_basicsize
assert size.value == cls.__basicsize__
if {name!r} == "MR":
    size.value = 112
else:
    base = ctypes.c_void_p.from_address(id(cls) + 256)  # tp_base
    assert base.value == id(cls.__base__)
    from pyverbs.base import PyverbsCM, PyverbsObject
    base.value = id(PyverbsCM if cls.__base__ is PyverbsObject else PyverbsObject)
import os
try:
    import shiftverbs._core
except ImportError as e:
    print(e, flush=True)
    os._exit(7)
os._exit(0)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert f".{name} of pyverbs" in result.stdout and "layout" in result.stdout
