# SPDX-License-Identifier: BSD-3-Clause
"""The walls that import-linter does not see: what the Cython sources cimport, include and import of ours.

From the top: an entry point (`_core.pyx`, `_nic.pyx`, `_wr.pyx`) is made of its own folder's files and of what is
below; nothing is cimported upward or from another entry point, and none of it imports a Python module of ours.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "shiftverbs"
#: From the top down, without the package's name; those of one line do not know each other.
LAYERS = [
    ["_core", "_nic", "_wr"],
    ["native.core.dispatch", "native.core.replay"],
    ["native.core.sampling"],
    ["native.core.journal"],
    ["native.core.map"],
    ["native.pyverbs_abi"],
    ["native.posix", "native.verbs"],
]
_FROM = re.compile(r"^[ \t]*from shiftverbs(?:\.([\w.]+))? cimport +(?:\(([^)]*)\)|(.*))", re.MULTILINE)
_CIMPORT = re.compile(r"^[ \t]*cimport (.*)", re.MULTILINE)
_INCLUDE = re.compile(r'^include "([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(
    r"^\s*(?:from shiftverbs[\w.]* import|import shiftverbs|from \.+\w* c?import).*", re.MULTILINE
)


def cimported(text: str, modules: Container[str]) -> list[str]:
    """The modules of ours that a source cimports, without the package's name.

    modules: those that there are; what is cimported from another is a module itself.
    """
    found = []
    for package, in_brackets, in_line in _FROM.findall(text):
        if package in modules:
            found.append(package)
        else:
            found += [f"{package}.{name}".lstrip(".") for name in _names(in_brackets or in_line)]
    for line in _CIMPORT.findall(text):
        found += [
            name.removeprefix("shiftverbs.") for name in _names(line) if name.split(".")[0] == "shiftverbs"
        ]
    return found


def _names(text: str) -> list[str]:
    """What stands between commas, without comments and `as`."""
    return [part.split()[0] for part in re.sub(r"#.*", "", text).split(",") if part.split()]


def findings() -> list[str]:
    """What is against the rules, a sentence each."""
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    found = []
    for path in sorted(file for suffix in ("pyx", "pxd", "pxi") for file in PACKAGE.rglob(f"*.{suffix}")):
        where = path.relative_to(PACKAGE)
        text = path.read_text(encoding="utf-8")
        module = ".".join(where.with_suffix("").parts)
        if path.suffix == ".pxi":
            module = f"_{where.parent.name}"  # native/core/*.pxi are parts of _core
        if module not in rank:
            found.append(f"{where} is in no layer of {Path(__file__).name}")
            continue
        for name in cimported(text, rank):
            if rank.get(name, -1) <= rank[module]:
                found.append(f"{where} cimports {name}, which is not below it")
        for name in _INCLUDE.findall(text):
            if path.suffix != ".pyx" or not name.startswith(f"native/{module[1:]}/"):
                found.append(f"{where} includes {name}")
        found += [f"{where}: {line.strip()}" for line in _IMPORT.findall(text)]
    return found


if __name__ == "__main__":
    sys.exit("\n".join(findings()) or 0)
