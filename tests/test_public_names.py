# SPDX-License-Identifier: BSD-3-Clause
"""Every public name of ours has a docstring, and the stubs of the compiled modules say what these hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT

PACKAGE = ROOT / "shiftverbs"
COMPILED = ["shiftverbs._core", "shiftverbs._nic", "shiftverbs._wr"]
#: What a program calls: here a docstring names each argument.
FOR_PROGRAMS = [
    *("addr.py", "cq.py", "device.py", "mr.py", "pd.py", "qp.py", "srq.py", "xrcd.py"),
    *(
        "failover/qp/status.py",
        "mirroring/qp_init_attr.py",
        "checkpoint/on_fallback.py",
        "observe.py",
        "config.py",
        "pyverbs_error.py",
        "softrnic/__init__.py",
        "softrnic/fabric.py",
        "softrnic/faults.py",
    ),
]
#: "Arguments … as `down`": the docstring of the named function has them.
ELSEWHERE = re.compile(r"Arguments [^.]*\bas `(\w+)`")

Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
}
CLASSES = {
    node.name: node for tree in MODULES.values() for node in tree.body if isinstance(node, ast.ClassDef)
}


def is_public(name: str) -> bool:
    return not name.startswith("_")


def public(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.ClassDef | Function, str]]:
    """Public classes, functions and methods: qualified name, node, name of the class around it."""
    for node in body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield node.name, node, owner
            yield from public(node.body, node.name)
        elif isinstance(node, Function) and (is_public(node.name) or node.name == "__init__"):
            yield f"{owner}.{node.name}".lstrip("."), node, owner


def is_accessor(node: Function) -> bool:
    """A property's setter or deleter: its getter speaks for it."""
    return any(isinstance(d, ast.Attribute) and d.attr in ("setter", "deleter") for d in node.decorator_list)


def docstring(node: ast.ClassDef | Function, owner: str) -> str:
    """The docstring of a class, function or method; of a method that overrides one of ours, the base's."""
    own = ast.get_docstring(node)
    if own is not None or isinstance(node, ast.ClassDef):
        return own or ""
    around = CLASSES.get(owner)
    for base in around.bases if around is not None else []:
        for above in CLASSES[base.id].body if isinstance(base, ast.Name) and base.id in CLASSES else []:
            if isinstance(above, Function) and above.name == node.name:
                return docstring(above, base.id)
    return ""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_public_name_has_a_docstring(module: str) -> None:
    tree = MODULES[module]
    missing = [] if ast.get_docstring(tree) or not tree.body else [module]
    for name, node, owner in public(tree.body):
        # What a constructor does and takes may stand in its class's docstring.
        if isinstance(node, Function) and (is_accessor(node) or node.name == "__init__"):
            continue
        if not docstring(node, owner):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("module", FOR_PROGRAMS)
def test_docstrings_for_programs_name_the_arguments(module: str) -> None:
    tree = MODULES[module]
    texts: dict[str, str] = {}
    for name, node, owner in public(tree.body):
        texts.setdefault(name, docstring(node, owner))  # a property's getter comes before its setter
    missing = []
    for name, node, owner in public(tree.body):
        if not isinstance(node, Function):
            continue
        text = texts[name] + texts.get(owner, "") * (node.name == "__init__")
        for other in ELSEWHERE.findall(text):
            text += texts[other]
        arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
        words = [argument.arg for argument in arguments if is_public(argument.arg)]
        words = [word for word in words if word not in ("self", "cls")]
        missing += [f"{name}({word})" for word in words if not re.search(rf"\b{word}\b", text)]
    assert missing == []


@pytest.mark.parametrize("module", COMPILED)
def test_every_public_name_of_a_compiled_module_has_a_docstring(module: str) -> None:
    __import__(module)
    namespace = vars(sys.modules[module])
    missing = [] if namespace["__doc__"] else [module]
    for name, value in namespace.items():
        if not is_public(name) or getattr(value, "__module__", None) != module:
            continue
        if not value.__doc__:
            missing.append(name)
        for member, held in vars(value).items() if isinstance(value, type) else ():
            # Cython gives a readonly attribute no docstring: the class's names it.
            told = held.__doc__ or re.search(rf"\b{member}\b", value.__doc__ or "")
            if is_public(member) and not told:
                missing.append(f"{name}.{member}")
    assert missing == []


def test_stubs_agree_with_the_compiled_modules(tmp_path: Path) -> None:
    allowed = ROOT / "tests" / "stubtest_allowlist.txt"
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--allowlist", str(allowed), *COMPILED]
    done = subprocess.run(
        [*command, "--ignore-unused-allowlist"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
