# SPDX-License-Identifier: BSD-3-Clause
"""Builds a data path with all bugs of mutants.py in it: `python tests/simulator/build_mutants.py` prints where.

That is build/mutants/tree, to be put in front of PYTHONPATH: the package as it stands, with a `_core` of its own. None
of the bugs is on until one is chosen: by `_core.set_mutant(NAME)` (None: none) or, before `_core` is imported, by
SHIFTVERBS_MUTANT=NAME. `_core.mutants()` are their names.

Each edit of a source becomes `NEW if is_mutant(n) else OLD`, or the same in lines, in a copy of it. Edits may lie
within one another, or be of the same text. Built once for the same sources; `make build` comes first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulator.mutants import MUTANTS, Edit

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shiftverbs"
BUILD = ROOT / "build" / "mutants"
TREE = BUILD / "tree"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
DECLARATIONS = "native/core/mutant.pxd"
CIMPORT = "from shiftverbs.native.core.mutant cimport is_mutant\n"

DECLARED = '''\
cdef extern from *:
    """
    #ifndef SV_MUTANT
    #define SV_MUTANT
    static int sv_mutant;
    #define sv_is_mutant(n) (sv_mutant == (n))
    #define sv_set_mutant(n) ((void)(sv_mutant = (n)))
    #endif
    """
    bint is_mutant "sv_is_mutant"(int n) noexcept nogil
    void choose_mutant "sv_set_mutant"(int n) noexcept nogil
'''

APPENDED = """

from shiftverbs.native.core.mutant cimport choose_mutant

cdef dict mutant_numbers = {numbers}


def mutants() -> list:
    return list(mutant_numbers)


def set_mutant(name) -> None:
    choose_mutant(0 if name is None else mutant_numbers[name])


set_mutant(os.environ.get('SHIFTVERBS_MUTANT') or None)
"""


class NotFound(Exception):
    """What is to be replaced is not there, or not once, or overlaps with what another edit replaces."""


@dataclass
class Span:
    """A piece of a source that some edits replace; inner: those that lie within it."""

    start: int
    end: int
    edits: list[tuple[int, Edit]]
    inner: list[Span] = field(default_factory=list)


def only(text: str, wanted: str, what: str) -> int:
    """Where the only `wanted` is."""
    found = text.count(wanted)
    if found != 1:
        raise NotFound(f"{what}: found {found} times:\n{wanted}")
    return text.index(wanted)


def body(text: str, function: str, what: str) -> tuple[int, int]:
    """Where the function is whose first line begins with `function`, as far as lines are indented more."""
    at = only(text, f"{function}(", what) if function else 0
    if not function:
        return 0, len(text)
    start = text.rfind("\n", 0, at) + 1
    indent = len(text[start:]) - len(text[start:].lstrip(" "))
    end = text.index("\n", at) + 1
    while end < len(text):
        line = text[end : text.find("\n", end) + 1 or len(text)]
        if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
            break
        end += len(line)
    return start, end


def find(text: str, edit: Edit, what: str) -> tuple[int, int]:
    """Where `edit.old` is. Raises NotFound."""
    first, last = body(text, edit.function, what)
    part = text[first:last]
    if not edit.whole_lines:
        start = first + only(part, edit.old, what)
        return start, start + len(edit.old)
    lines = textwrap.dedent(edit.old).strip("\n").split("\n")
    indents = {" " * n for n in range(0, 40, 4)}
    matches = []
    for indent in indents:
        wanted = "".join(f"{indent}{line}".rstrip() + "\n" for line in lines)
        at = part.find(wanted)
        while at >= 0:
            if at == 0 or part[at - 1] == "\n":
                matches.append((first + at, first + at + len(wanted)))
            at = part.find(wanted, at + 1)
    if len(matches) != 1:
        raise NotFound(f"{what}: found {len(matches)} times:\n{edit.old}")
    return matches[0]


def nested(spans: list[Span], what: str) -> list[Span]:
    """Those that lie in no other, with the rest inside."""
    outer: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if outer and span.start < outer[-1].end:
            if span.end > outer[-1].end:
                raise NotFound(f"{what}: two edits overlap near {span.edits[0][1].old!r}")
            outer[-1].inner.append(span)
        else:
            outer.append(span)
    for span in outer:
        span.inner = nested(span.inner, what)
    return outer


def render(text: str, start: int, end: int, spans: list[Span]) -> str:
    """text[start:end] with the spans replaced."""
    result, at = [], start
    for span in spans:
        result.append(text[at : span.start])
        old = render(text, span.start, span.end, span.inner)
        for number, edit in span.edits:
            old = in_lines(number, edit, old) if edit.whole_lines else in_line(number, edit, old)
        result.append(old)
        at = span.end
    return "".join([*result, text[at:end]])


def in_line(number: int, edit: Edit, old: str) -> str:
    if edit.new == "True":  # no choice between a C value and a Python object
        return f"(is_mutant({number}) or ({old}))"
    if edit.new == "False":
        return f"(not is_mutant({number}) and ({old}))"
    return f"(({edit.new}) if is_mutant({number}) else ({old}))"


def in_lines(number: int, edit: Edit, old: str) -> str:
    indent = old[: len(old) - len(old.lstrip(" "))]
    new = textwrap.indent(textwrap.dedent(edit.new).strip("\n") or "pass", f"{indent}    ")
    return f"{indent}if is_mutant({number}):\n{new}\n{indent}else:\n{textwrap.indent(old, '    ')}"


def mutated(name: str, text: str) -> str:
    """The source `name`, with all edits of it. Raises NotFound."""
    spans: dict[tuple[int, int, bool], Span] = {}
    for number, mutant in enumerate(MUTANTS, start=1):
        for edit in mutant.edits:
            if edit.file == name:
                start, end = find(text, edit, f"{mutant.name}, in {name} {edit.function}".rstrip())
                span = spans.setdefault((start, end, edit.whole_lines), Span(start, end, []))
                span.edits.append((number, edit))
    return render(text, 0, len(text), nested(list(spans.values()), name))


def with_cimport(text: str) -> str:
    """Behind the last line before the first cimport."""
    lines = text.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(("from ", "cimport ")))
    return "".join([*lines[:at], CIMPORT, *lines[at:]])


def sources() -> dict[str, str]:
    """All that `_core` is compiled from, mutated, by name below the package."""
    names = [
        "_core.pyx",
        "native/posix.pxd",
        "native/verbs.pxd",
        "native/pyverbs_abi.pxd",
        "native/__init__.py",
    ]
    names += sorted(f"native/core/{path.name}" for path in (PACKAGE / "native/core").glob("*.p*"))
    result = {}
    for name in names:
        text = mutated(name, (PACKAGE / name).read_text())
        result[name] = with_cimport(text) if name == "_core.pyx" or name.endswith(".pxd") else text
    files = {edit.file for mutant in MUTANTS for edit in mutant.edits}
    if not files <= result.keys():
        raise NotFound(f"no source of the data path: {', '.join(sorted(files - result.keys()))}")
    numbers = {mutant.name: number for number, mutant in enumerate(MUTANTS, start=1)}
    if len(numbers) < len(MUTANTS):
        raise ValueError("two mutants have one name")
    result["_core.pyx"] += APPENDED.format(numbers=numbers)
    result[DECLARATIONS] = DECLARED
    result["__init__.py"] = ""
    return result


def link_the_rest() -> None:
    """The tree: the package, but for `_core`, by links."""
    package = TREE / "shiftverbs"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {
        path.name: path
        for path in PACKAGE.iterdir()
        if path.name != "__pycache__"
        and (
            path.suffix == ".py" or path.is_dir() or (path.suffix == ".so" and path.name != f"_core{SUFFIX}")
        )
    }
    if f"_nic{SUFFIX}" not in wanted:
        raise FileNotFoundError("the package is not built: make build")
    for path in package.iterdir():
        if path.is_symlink() and (path.name not in wanted or path.readlink() != wanted[path.name]):
            path.unlink()
    for name, path in wanted.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(path)


def compile_core(texts: dict[str, str]) -> None:
    """The tree's `_core`, from these sources."""
    copy = BUILD / "source"
    shutil.rmtree(copy, ignore_errors=True)
    for name, text in texts.items():
        path = copy / "shiftverbs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    cython = [
        sys.executable,
        "-m",
        "cython",
        "-3",
        "--module-name",
        "shiftverbs._core",
        "shiftverbs/_core.pyx",
    ]
    subprocess.run([*cython, "-o", "_core.c"], cwd=copy, check=True)
    built = copy / f"_core{SUFFIX}"
    gcc = ["gcc", "-std=gnu11", "-O1", "-g1", "-fPIC", "-shared", "-w", f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*gcc, str(copy / "_core.c"), "-o", str(built), "-libverbs"], check=True)
    os.replace(built, TREE / "shiftverbs" / built.name)


def build() -> Path:
    """The tree, built anew where a source has changed. Raises NotFound, CalledProcessError."""
    texts = sources()
    state = hashlib.sha256(repr((sys.version, sorted(texts.items()), Path(__file__).read_text())).encode())
    BUILD.mkdir(parents=True, exist_ok=True)
    stamp = BUILD / "stamp"
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        link_the_rest()
        built = TREE / "shiftverbs" / f"_core{SUFFIX}"
        if not (built.exists() and stamp.exists() and stamp.read_text() == state.hexdigest()):
            stamp.unlink(missing_ok=True)
            compile_core(texts)
            stamp.write_text(state.hexdigest())
    return TREE


if __name__ == "__main__":
    print(build())
