# SPDX-License-Identifier: BSD-3-Clause
"""Reading and writing pyverbs' objects, and refusing an unknown layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CQEX, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from pyverbs.srq import SRQ
from pyverbs.wr import SGE

from shiftverbs import _core

CAP = {"max_send_wr": 11, "max_recv_wr": 12, "max_send_sge": 3, "max_recv_sge": 4, "max_inline_data": 15}


def test_the_installed_pyverbs_is_known() -> None:
    _core.check_abi()
    assert _core.pyverbs_version()


@pytest.mark.parametrize(
    ("cls", "offset"),
    [
        *((Context, 40), (PD, 40), (MR, 56), (CompChannel, 40), (CQ, 40), (CQEX, 48)),
        *((QP, 40), (QPEx, 40), (SRQ, 40), (AH, 40)),
    ],
)
def test_pointer(cls: type, offset: int) -> None:
    class Sub(cls):  # type: ignore[misc]
        pass

    for c in (cls, Sub):
        obj = c.__new__(c)
        assert _core.pointer(obj) == 0
        field = ctypes.c_uint64.from_address(id(obj) + offset)
        field.value = 0x7F0012345678
        assert _core.pointer(obj) == 0x7F0012345678
        field.value = 0


@pytest.mark.parametrize("bad", [None, 3, "x", SGE(1, 2, 3), QPCap()])
def test_pointer_of_something_else(bad: object) -> None:
    with pytest.raises(TypeError, match="no libibverbs object behind"):
        _core.pointer(bad)


@pytest.mark.parametrize("cls", [QPInitAttr, QPInitAttrEx])
def test_init_attr(cls: type) -> None:
    class Sub(cls):  # type: ignore[misc]
        pass

    attr = Sub(qp_type=2, sq_sig_all=1)
    _core.set_init_attr(attr, 0x1000, 0x2000, QPCap(*(CAP[k] for k in CAP)))
    read = _core.read_init_attr(attr)
    assert read == {"send_cq": 0x1000, "recv_cq": 0x2000, "srq": 0, "cap": CAP, "qp_type": 2, "sq_sig_all": 1}
    _core.set_init_attr(attr, recv_cq_ptr=0, cap={"max_send_wr": 99})
    read = _core.read_init_attr(attr)
    assert (read["send_cq"], read["recv_cq"], read["cap"]) == (0x1000, 0, {**CAP, "max_send_wr": 99})
    assert _core.read_cap(attr)["max_send_wr"] == 99 and attr.max_send_wr == 99
    _core.set_init_attr(attr, 0, 0)


@pytest.mark.parametrize("call", [_core.read_init_attr, _core.read_cap, _core.set_init_attr])
@pytest.mark.parametrize("bad", [None, 3, SGE(1, 2, 3)])
def test_init_attr_of_something_else(call: Callable[[object], object], bad: object) -> None:
    with pytest.raises(TypeError, match="QPInitAttr or QPInitAttrEx expected"):
        call(bad)


def test_caps() -> None:
    for obj in (QPCap(), QPAttr(), QPInitAttr(), QPInitAttrEx()):
        _core.write_cap(obj, CAP)
        assert _core.read_cap(obj) == CAP
        _core.write_cap(obj, {"max_recv_sge": 9})
        assert _core.read_cap(obj) == {**CAP, "max_recv_sge": 9}
    with pytest.raises(OverflowError):
        _core.write_cap(QPCap(), {"max_recv_sge": -1})


def test_qp_attr() -> None:
    gid = "fe80:0000:0000:0000:0211:22ff:fe33:4455"
    route = GlobalRoute(dgid=_gid(gid), sgid_index=3)
    route.flow_label, route.hop_limit, route.traffic_class = 0xABCDE, 7, 9
    ah = AHAttr(dlid=0x1234, sl=2, port_num=1, is_global=1, gr=route)
    ah.src_path_bits, ah.static_rate = 5, 6
    attr = QPAttr()
    attr.ah_attr = ah
    attr.qp_state, attr.path_mtu, attr.port_num, attr.pkey_index = 3, 4, 2, 8
    attr.qp_access_flags = 15
    read = _core.read_qp_attr(attr)
    assert read["ah_attr"] == {
        "dgid": bytes.fromhex(gid.replace(":", "")),
        "flow_label": 0xABCDE,
        "sgid_index": 3,
        "hop_limit": 7,
        "traffic_class": 9,
        "dlid": 0x1234,
        "sl": 2,
        "src_path_bits": 5,
        "static_rate": 6,
        "is_global": 1,
        "port_num": 1,
    }
    assert (read["qp_state"], read["path_mtu"], read["port_num"], read["pkey_index"]) == (3, 4, 2, 8)
    assert read["qp_access_flags"] == 15
    with pytest.raises(TypeError):
        _core.read_qp_attr(None)


def _gid(text: str) -> object:
    from pyverbs.addr import GID

    return GID(text)


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


@pytest.mark.parametrize("name", ["WC", "SGE", "SendWR", "QPInitAttr", "MR"])
def test_an_unknown_layout_is_refused_by_name(name: str) -> None:
    """A pyverbs whose class derives from something else, or has another size, is not read at all."""
    import subprocess
    import sys

    # The type object's own fields are changed before _core looks at them, in an interpreter that dies afterwards.
    program = f"""
import ctypes, pyverbs.cq, pyverbs.wr, pyverbs.qp, pyverbs.mr
for module in (pyverbs.cq, pyverbs.wr, pyverbs.qp, pyverbs.mr):
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
