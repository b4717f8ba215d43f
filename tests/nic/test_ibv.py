# SPDX-License-Identifier: BSD-3-Clause
"""Every value that our Python uses is the header's."""

from __future__ import annotations

import re
import subprocess
from enum import IntEnum
from pathlib import Path

from harness import ROOT

from shiftverbs.native import ibv

#: The header's prefix of each enum's names.
PREFIXES = {
    ibv.AccessFlag: "IBV_ACCESS_",
    ibv.AtomicCap: "IBV_ATOMIC_",
    ibv.CqInitAttrMask: "IBV_CQ_INIT_ATTR_MASK_",
    ibv.EventType: "IBV_EVENT_",
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


def test_each_enum_is_compared() -> None:
    assert set(ibv.__all__) == {kind.__name__ for kind in PREFIXES}


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


def test_no_value_is_written_down_elsewhere() -> None:
    """Names that look like the header's, given a number."""
    literal = re.compile(
        r"^_?(?:(?:IBV|QPS|QPT|WC|EVENT|ACCESS|PORT|MIG|ATOMIC|LINK_LAYER|REREG)_[A-Z_, ]+|RESET|ERR|RTS|INIT)\b"
        r".*= *\(?[0-9]",
        re.MULTILINE,
    )
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in (ROOT / "shiftverbs").rglob("*.py")
        if path.name != "ibv.py"
        for line in literal.findall(path.read_text())
    ]
    assert not found
