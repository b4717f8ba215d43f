# SPDX-License-Identifier: BSD-3-Clause
"""Every value that our Python uses is the header's."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest
from harness import ROOT

import shiftverbs.enums as e
from shiftverbs.native import ibv

#: The header's prefix of each enum's names.
PREFIXES = {
    ibv.AccessFlag: "IBV_ACCESS_",
    ibv.AtomicCap: "IBV_ATOMIC_",
    ibv.CqInitAttrMask: "IBV_CQ_INIT_ATTR_MASK_",
    ibv.CreateCqAttr: "IBV_CREATE_CQ_ATTR_",
    ibv.EventType: "IBV_EVENT_",
    ibv.GidType: "IBV_GID_TYPE_",
    ibv.LinkLayer: "IBV_LINK_LAYER_",
    ibv.MigState: "IBV_MIG_",
    ibv.PortState: "IBV_PORT_",
    ibv.QpAttrMask: "IBV_QP_",
    ibv.QpCreateSendOp: "IBV_QP_EX_WITH_",
    ibv.QpInitAttrMask: "IBV_QP_INIT_ATTR_",
    ibv.QpState: "IBV_QPS_",
    ibv.QpType: "IBV_QPT_",
    ibv.ReregMrFlag: "IBV_REREG_MR_",
    ibv.WcStatus: "IBV_WC_",
}


#: Those of a header that rdma-core does not install: compared with pyverbs, which was built with it.
PYVERBS_PREFIXES = {ibv.GidTypeSysfs: "IBV_GID_TYPE_SYSFS_"}


def test_each_enum_is_compared() -> None:
    assert set(ibv.__all__) == {kind.__name__ for kind in [*PREFIXES, *PYVERBS_PREFIXES]}


def test_values_are_those_of_pyverbs() -> None:
    for kind, prefix in PYVERBS_PREFIXES.items():
        assert {member.name: getattr(e, prefix + member.name) for member in kind} == dict(kind.__members__)


def test_values_are_the_headers(tmp_path: Path) -> None:
    members: list[IntEnum] = [member for kind in PREFIXES for member in kind]
    assert len(members) > 90
    names = [PREFIXES[type(member)] + member.name for member in members]
    lines = "".join(f'    printf("%llu\\n", (unsigned long long){name});\n' for name in names)
    source = tmp_path / "values.c"
    source.write_text(f"#include <infiniband/verbs.h>\n#include <stdio.h>\n\nint main(void) {{\n{lines}}}\n")
    subprocess.run(["gcc", "-Wall", "-Werror", "-o", tmp_path / "values", source], check=True)
    printed = subprocess.run([tmp_path / "values"], check=True, capture_output=True, text=True).stdout
    assert [int(line) for line in printed.split()] == [int(member) for member in members]


#: Names that look like the header's, of constants and of fields that have an enum's value.
NAMES = re.compile(
    r"_?(?:IBV|QPS|QPT|WC|EVENT|ACCESS|PORT|MIG|ATOMIC|LINK|GID_TYPE|REREG)_[A-Z0-9_]+|RESET|ERR|RTS|INIT"
    r"|(?:[A-Z0-9_]*_)?FLAGS"
    r"|(?:\w+_)?(?:qp_type|qp_state|mig_state|gid_type|link_layer|event_type|wc_status)"
)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_number(node: ast.AST | None) -> bool:
    """2, or 1 << 2."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant) and type(node.value) is int


def _given(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Names and what they are given, or are compared with."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(map(_name, target.elts), node.value.elts, strict=False)
            else:
                yield _name(target), node.value
    elif isinstance(node, ast.AnnAssign):
        yield _name(node.target), node.value
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for one, other in itertools.pairwise(sides):
            yield _name(one), other
            yield _name(other), one


def written_down(source: str) -> list[int]:
    """The lines in which such a name is given a number."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        for name, value in _given(node)
        if NAMES.fullmatch(name) and _is_number(value)
    ]


def test_no_value_is_written_down_elsewhere() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / "shiftverbs").rglob("*.py")
        if path.name != "ibv.py"
        for line in written_down(path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "GID_TYPE_IB, GID_TYPE_ROCE_V1 = 0, 1",
        "LINK_ETHERNET: int = 2",
        "_FLAGS = 1 << 0",
        "init.sq_sig_all, init.qp_type = self.sq_sig_all, 2",
        "QPInitAttr(qp_type=2)",
        "ethernet = 2 == port.link_layer",
    ],
)
def test_a_number_is_found(source: str) -> None:
    assert written_down(source)


def test_names_are_not_numbers() -> None:
    assert not written_down("init.sq_sig_all, init.qp_type = 1, QpType.RC\nPORT = 1\n_FLAGS = os.O_CLOEXEC")
