# SPDX-License-Identifier: BSD-3-Clause
"""docs/compatibility.md says of every pyverbs class what becomes of it, and that is so."""

from __future__ import annotations

import ast
import enum
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, EtcdServer, Spawn
from mirror.test_names import MODULES

DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text()
KINDS = ("shadowed", "adapted", "passed through", "unprotected")
# Of later releases than Debian 12's.
LATER = {
    "FdArr", "EfaMR", "EfaDVMRAttr", "DrFlowMeterAttr", "DrActionFlowMeter", "Mlx5DmaBufMR",
    "Buf", "BufMR", "MREx", "DMAHandle", "DmaHandleInitAttr", "CompCntr", "CompCntrCaps", "CompCntrInitAttr",
    "QPRateLimitAttr", "QPAttachCompCntrAttr", "EfaCompCntr", "EfaCompCntrInitAttr", "EfaDVRQDepthAttr",
    "EfaDVSQDepthAttr", "Mlx5DevxCmdComp", "Mlx5ModifyFlowAction", "EventChannel", "EventFD", "EventHeader",
}  # fmt: skip
# Who decides that a QP is not protected, and says why.
DECIDERS = (
    *("mirroring/eligibility.py", "mirroring/extended_cq.py", "qp.py", "pd.py", "device.py"),
    "failover/runtime.py",
)


def rows() -> Iterator[tuple[list[str], str, str]]:
    """(modules, class, kind) of every class in the document."""
    modules: list[str] = []
    for line in DOCUMENT.splitlines():
        if line.startswith("#"):
            modules = line.lstrip("# ").split(", ") if line.startswith("### ") else []
        elif modules and line.startswith("| `"):
            names, kind = line.split("|")[1:3]
            for name in re.findall(r"`(\w+)`", names):
                yield modules, name, kind.strip()


def classes() -> list[tuple[str, str]]:
    """(module, class) of every class of the installed pyverbs. Not enumerations: they hold constants."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"pyverbs.{name}")
        for value in vars(module).values():
            if isinstance(value, enum.EnumMeta):
                continue
            if isinstance(value, type) and value.__module__ == module.__name__:
                found.append((name, value.__name__))
    return sorted(set(found))


def kind_of(module: str, name: str) -> str:
    found = [kind for modules, listed, kind in rows() if listed == name and module in modules]
    assert len(found) == 1, f"docs/compatibility.md lists {module}.{name} {len(found)} times"
    return found[0]


@pytest.mark.parametrize("module, name", classes())
def test_every_class_is_listed_as_what_it_is(module: str, name: str) -> None:
    kind = kind_of(module, name)
    assert kind in KINDS
    theirs = getattr(importlib.import_module(f"pyverbs.{module}"), name)
    ours = getattr(importlib.import_module(f"shiftverbs.{module}"), name)
    keeps_shadow = ours is not theirs and bool({"_shadow", "_domain"} & vars(ours).keys())
    assert (kind == "shadowed") is keeps_shadow
    if kind == "passed through":
        assert ours is theirs
    if kind == "adapted":
        assert ours is not theirs and issubclass(ours, theirs)


def test_nothing_else_is_listed() -> None:
    present = classes()
    for modules, name, _ in rows():
        assert name in LATER or any((module, name) in present for module in modules), name


@pytest.fixture
def made(spawn: Spawn, shared_etcd: EtcdServer, job: str) -> dict[str, dict[str, object]]:
    child = spawn(
        str(Path(__file__).with_name("what_is_shadowed.py")),
        env={"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job},
    )
    child.succeed(60)
    return json.loads(child.printed[-1])


def test_it_is_so(made: dict[str, dict[str, object]]) -> None:
    """On the software RNIC, failover on: objects have a shadow or none, and QPs tell why, as is written."""
    homes = {name: module for module, name in classes() if not module.startswith("providers")}
    assert len(made["shadowed"]) == 12
    for name, shadowed in made["shadowed"].items():
        assert (kind_of(homes[name], name) == "shadowed") is shadowed, name
    qps = made["qps"]
    assert isinstance(qps, dict)
    protected = {name for name, (status, _) in qps.items() if status == "PAIRING"}
    assert protected == {"RC", "QPEx without send operations", "QPEx", "CQEX"}
    for name, (status, why) in qps.items():
        if name not in protected:
            assert status == "UNPROTECTED" and f"`{why}`" in DOCUMENT, (name, why)


def reasons(source: str) -> Iterator[str]:
    """The constant parts of every reason that a decider gives: `return None, "…"`, `…why = "…"`, `_give_up("…")`."""
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            values = node.value.elts[1:]
        elif isinstance(node, ast.Assign):
            targets = [name for target in node.targets for name in ast.walk(target)]
            if any(getattr(name, "attr", getattr(name, "id", "")).endswith("why") for name in targets):
                values = [node.value]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = node.args if called in ("_give_up", "_end_protection", "_record") else []
        for value in values:
            for part in ast.walk(value):
                if (
                    isinstance(part, ast.Constant)
                    and isinstance(part.value, str)
                    and " " in part.value.strip()
                ):
                    yield part.value.strip(" ().:")


def test_every_reason_is_explained() -> None:
    found = [(name, part) for name in DECIDERS for part in reasons((ROOT / "shiftverbs" / name).read_text())]
    assert len(found) > 20
    assert [(name, part) for name, part in found if part not in DOCUMENT] == []
