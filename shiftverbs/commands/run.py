# SPDX-License-Identifier: BSD-3-Clause
"""Run an unmodified pyverbs program with its imports mapped: `python -m shiftverbs run prog.py args`.

Whoever imports pyverbs in that process gets shiftverbs: the script (or the module, with `-m`), modules beside it,
packages that are installed; only pyverbs itself goes on importing pyverbs (mapping.py). `--except PACKAGE` leaves a
package as it is, `--only PACKAGE` maps the program's own file and that package alone.

Everything else (line numbers, tracebacks, sys.argv, sys.path[0], `__main__`, the exit status) is as with
`python prog.py args`. Not reached: child interpreters that the program starts itself (start those under
`python -m shiftverbs run` too; multiprocessing's "fork" is no problem), and what mapping.py says.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from shiftverbs.commands import mapping

__all__ = ["USAGE", "run"]

USAGE = "shiftverbs run [--only PACKAGE] [--except PACKAGE] (program.py | -m module) [argument ...]"


def _fresh_main(filename: str | None) -> types.ModuleType:
    """Put a new, empty `__main__` in place, as the interpreter has it when a program starts."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    main.__dict__.update(__annotations__={})
    if filename is not None:
        main.__file__ = filename
        main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    return main


def _set_path0(directory: str) -> None:
    """Replace the entry that the interpreter made for us (`-m`: the current directory; a script: its own)."""
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = directory
    else:
        sys.path.insert(0, directory)


def _report(error: BaseException) -> None:
    """Let the program's excepthook print its error without our frames, and only once."""
    ours = (__file__, mapping.__file__, runpy.__file__, "<frozen runpy>")
    kept = []
    traceback = error.__traceback__
    while traceback is not None:
        # A file that does not compile fails below our loader, which the interpreter does not hide as its own.
        if not traceback.tb_frame.f_code.co_filename.startswith((*ours, "<frozen importlib")):
            kept.append(traceback)
        traceback = traceback.tb_next
    for position, here in enumerate(kept):
        here.tb_next = kept[position + 1] if position + 1 < len(kept) else None
    error.__traceback__ = kept[0] if kept else None
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = lambda *_: None


class _Usage(Exception):
    """Wrong usage, in one sentence."""


def _options(arguments: list[str]) -> tuple[list[str], list[str], bool, list[str]]:
    """Take our options off the front: packages to map alone, packages to except, whether -m, the rest.

    Not argparse's: every argument behind the program's name is the program's.
    """
    only: list[str] = []
    excepted: list[str] = []
    rest = list(arguments)
    while rest and rest[0].startswith("--"):
        option, equals, value = rest.pop(0).partition("=")
        if option not in ("--only", "--except"):
            raise _Usage(f"there is no option {option}")
        if not equals:
            if not rest:
                raise _Usage(f"{option} wants the name of a package")
            value = rest.pop(0)
        for name in value.split(","):
            if not all(part.isidentifier() for part in name.split(".")):
                raise _Usage(f"{option}: {name!r} is not the name of a package")
            if name.partition(".")[0] in (mapping.SOURCE, mapping.TARGET):
                raise _Usage(f"{option}: {name}'s own imports are never mapped")
            (only if option == "--only" else excepted).append(name)
    as_module = rest[:1] == ["-m"]
    if as_module:
        rest.pop(0)
    if not rest or (rest[0].startswith("-") and rest[0] != "-"):
        raise _Usage("no program is named" if not rest else f"there is no option {rest[0]}")
    return only, excepted, as_module, rest


def run(arguments: Sequence[str]) -> int:
    """Run a program with mapped imports: [option…, file or directory or "-", args…] or [option…, "-m", module, args…].

    Returns 0 when it ends; its exceptions (SystemExit above all) pass through, others printed already.
    Returns 2, with a message on stderr, where there is no such program or option.
    """
    try:
        only, excepted, as_module, rest = _options(list(arguments))
    except _Usage as wrong:
        print(f"shiftverbs run: {wrong}\nusage: {USAGE}", file=sys.stderr)
        return 2
    if only and as_module:
        # The program itself is always meant.
        only.append(rest[0])
    sys.meta_path.insert(0, mapping.MappingFinder(only, excepted))
    # Whoever holds the old __main__ (the interpreter's command line) goes on needing its globals.
    caller_main = sys.modules["__main__"]
    try:
        if as_module:
            return _run_module(rest[0], rest)
        return _run_file(rest[0], rest)
    finally:
        del caller_main


def _run_module(name: str, arguments: list[str]) -> int:
    _set_path0(os.getcwd())
    sys.argv = ["-m", *arguments[1:]]
    _fresh_main(None)
    try:
        # What python's own -m calls; pdb, trace and coverage use it too. Unlike runpy.run_module it leaves
        # the program's __main__ in place for its exit handlers and threads.
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise
    return 0


def _run_file(program: str, arguments: list[str]) -> int:
    sys.argv = arguments
    if program == "-":
        _set_path0("")
        filename, source = "<stdin>", sys.stdin.buffer.read()
    elif os.path.isdir(program):
        filename = os.path.join(program, "__main__.py")
        if not os.path.exists(filename):
            print(f"shiftverbs run: can't find '__main__' module in {program!r}", file=sys.stderr)
            return 1
        _set_path0(program)
        source = Path(filename).read_bytes()
    else:
        filename = program
        try:
            with io.open_code(os.path.abspath(program)) as stream:
                source = stream.read()
        except OSError as error:
            print(f"shiftverbs run: can't open file {program!r}: {error}", file=sys.stderr)
            return 2
        if b"\0" in source[:4096]:
            print(f"shiftverbs run: {program!r} is not Python source", file=sys.stderr)
            return 2
        _set_path0(os.path.dirname(os.path.realpath(program)))
    main = _fresh_main(None if program == "-" else filename)
    if program != "-":
        main.__loader__ = mapping.MappingLoader("__main__", filename)
    try:
        code = mapping.map_source(source, filename)
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise
    return 0
