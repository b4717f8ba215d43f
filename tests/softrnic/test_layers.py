# SPDX-License-Identifier: BSD-3-Clause
"""The software NIC's layers: nothing includes or calls what is above it, and no two files need each other."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from softrnic.cbuild import FLAGS, SOURCES, compiler

#: From the bottom up.
LAYERS = ("fabric", "wire", "faults", "objects", "transport", "system", "verbs")


def layer(path: Path | str) -> int:
    """Which layer a file is in, by its folder."""
    return LAYERS.index(Path(path).parts[-2])


def test_every_source_is_in_a_layer() -> None:
    assert {path.parent.name for path in SOURCES.rglob("*.[ch]")} == set(LAYERS)
    assert not list(SOURCES.glob("*.[ch]"))


def test_nothing_includes_what_is_above_it() -> None:
    upward = []
    for path in sorted(SOURCES.rglob("*.[ch]")):
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            assert (SOURCES / name).exists(), f"{path.relative_to(SOURCES)}: {name} is named with its folder"
            if layer(name) > layer(path):
                upward.append(f"{path.relative_to(SOURCES)} includes {name}")
    assert not upward


def symbols(path: Path, folder: Path) -> tuple[str, set[str], set[str]]:
    """(name of the source, what it defines, what it needs from others)."""
    name = path.relative_to(SOURCES).as_posix()
    target = folder / name.replace("/", "-")
    command = [compiler(), *FLAGS, "-O0", "-fPIC", f"-I{SOURCES}", "-c", str(path), "-o", str(target)]
    subprocess.run(command, check=True)
    listed = subprocess.run(["nm", str(target)], check=True, capture_output=True, text=True).stdout
    found = [(line.split()[-2], line.split()[-1]) for line in listed.splitlines()]
    return name, {s for kind, s in found if kind in "TDBRC"}, {s for kind, s in found if kind == "U"}


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Which sources each source calls, or reads variables of."""
    folder = tmp_path_factory.mktemp("objects")
    with ThreadPoolExecutor(2) as pool:
        all_symbols = list(pool.map(lambda path: symbols(path, folder), sorted(SOURCES.rglob("*.c"))))
    # system/ stands before functions of the C library's: who calls those means the C library.
    home = {
        symbol: name
        for name, defined, _ in all_symbols
        for symbol in defined
        if layer(name) != LAYERS.index("system") or symbol.startswith(("system_", "tree_"))
    }
    return {
        name: {home[symbol] for symbol in wanted if symbol in home} - {name}
        for name, _, wanted in all_symbols
    }


def test_nothing_calls_what_is_above_it(needs: dict[str, set[str]]) -> None:
    calls = [(name, other) for name, others in needs.items() for other in others]
    assert len(calls) > 100, "that is how many there are, about"
    assert not [f"{name} calls {other}" for name, other in calls if layer(other) > layer(name)]


def test_no_two_files_need_each_other(needs: dict[str, set[str]]) -> None:
    order = list(TopologicalSorter(needs).static_order())  # graphlib.CycleError shows the circle
    assert len(order) == len(needs) == len(list(SOURCES.rglob("*.c")))
