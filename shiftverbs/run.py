# SPDX-License-Identifier: BSD-3-Clause
"""Run an unmodified pyverbs program with its imports mapped: `python -m shiftverbs run prog.py args`.

Only the *program's* imports are mapped: those of the script (or of the module, with `-m`) and of the modules
that it imports from its own directory. Aliasing `sys.modules["pyverbs"]` would not do: pyverbs' own modules
import each other by that name and must go on getting the originals.

The mapping rewrites the syntax tree of each such file before it is compiled:

    import pyverbs                     ->  import shiftverbs as pyverbs
    import pyverbs.qp as q             ->  import shiftverbs.qp as q
    import pyverbs.qp                  ->  pyverbs = __import__("shiftverbs.qp")
    from pyverbs.qp import QP          ->  from shiftverbs.qp import QP
    importlib.import_module(name), __import__(name)      the same with the name mapped at run time

Everything else (line numbers, tracebacks, sys.argv, sys.path[0], `__main__`, the exit status) is as with
`python prog.py args`. Not reached: source run by exec(), child interpreters that the program starts itself
(start those under `python -m shiftverbs run` too; multiprocessing's "fork" is no problem), and files that
another import hook compiles (pytest: use `--assert=plain`).
"""

from __future__ import annotations

import ast
import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MappingFinder", "MappingLoader", "map_source", "mapped_name", "run"]

SOURCE = "pyverbs"
TARGET = "shiftverbs"
# What these hold was installed, so it is not the program's own.
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def mapped_name(name: object) -> object:
    """Return the mapped module name: "pyverbs.qp" gives "shiftverbs.qp"; all else comes back unchanged."""
    if isinstance(name, str) and (name == SOURCE or name.startswith(SOURCE + ".")):
        return TARGET + name[len(SOURCE) :]
    return name


def _mapped(name: str) -> str:
    return str(mapped_name(name))


def _is_source(name: str | None) -> bool:
    return name is not None and _mapped(name) != name


class _Rewriter(ast.NodeTransformer):
    """Maps the imports of one module. New nodes take the old one's place in the source."""

    def visit_Import(self, node: ast.Import) -> ast.stmt | list[ast.stmt]:
        """`import pyverbs…`, alone or among others; the order of execution stays."""
        if not any(_is_source(alias.name) for alias in node.names):
            return node
        statements: list[ast.stmt] = []
        for alias in node.names:
            statement: ast.stmt
            if not _is_source(alias.name):
                statement = ast.Import([alias])
            elif alias.asname is not None or "." not in alias.name:
                statement = ast.Import([ast.alias(_mapped(alias.name), alias.asname or SOURCE)])
            else:
                # Binds the package under the name that the program uses, and nothing else.
                call = ast.Call(ast.Name("__import__", ast.Load()), [ast.Constant(_mapped(alias.name))], [])
                statement = ast.Assign([ast.Name(SOURCE, ast.Store())], call)
            statements.append(ast.fix_missing_locations(ast.copy_location(statement, node)))
        return statements

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        """`from pyverbs… import …`; a relative import is the program's own affair."""
        if node.level == 0 and _is_source(node.module):
            assert node.module is not None
            node.module = _mapped(node.module)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """`importlib.import_module(name)`, `import_module(name)` and `__import__(name)`."""
        self.generic_visit(node)
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        if name not in ("import_module", "__import__"):
            return node
        if node.args and not isinstance(node.args[0], ast.Starred):
            node.args[0] = self._wrap(node.args[0])
        for keyword in node.keywords:
            if keyword.arg == "name":
                keyword.value = self._wrap(keyword.value)
        return node

    @staticmethod
    def _wrap(argument: ast.expr) -> ast.expr:
        if isinstance(argument, ast.Constant):
            if isinstance(argument.value, str):
                argument.value = _mapped(argument.value)
            return argument
        wrapped = ast.parse(f"__import__('{__name__}', fromlist=['']).mapped_name(0)", mode="eval").body
        assert isinstance(wrapped, ast.Call)
        for part in ast.walk(wrapped):
            if isinstance(part, ast.expr):
                ast.copy_location(part, argument)
        wrapped.args = [argument]
        return wrapped


def map_source(source: bytes | str, filename: str) -> types.CodeType:
    """Compile one module's source with its pyverbs imports mapped.

    Raises what compile() raises (SyntaxError with the file's own lines).
    """
    tree = compile(source, filename, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    tree = ast.fix_missing_locations(_Rewriter().visit(tree))
    code = compile(tree, filename, "exec", dont_inherit=True)
    assert isinstance(code, types.CodeType)
    return code


class MappingLoader(importlib.machinery.SourceFileLoader):
    """Loads one of the program's own files with its imports mapped.

    The byte code cache is left alone: it belongs to the unmapped program.
    """

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Compile the file; from the ordinary cache where it never names pyverbs."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if SOURCE.encode() not in source:
            return super().get_code(fullname)
        return map_source(source, path)


class MappingFinder:
    """First on sys.meta_path: the program's own source files get the mapping loader, no others."""

    def __init__(self) -> None:
        self.roots: list[Path] = []

    def add_root(self, directory: str | Path) -> None:
        """Count the files below this directory as the program's own."""
        self.roots.append(Path(directory).resolve())

    def is_programs_own(self, fullname: str, origin: str | None) -> bool:
        """Whether module fullname, found at origin, belongs to the program."""
        if origin is None or fullname.partition(".")[0] in (SOURCE, TARGET):
            return False
        path = Path(origin).resolve()
        for root in self.roots:
            if path.is_relative_to(root) and not _INSTALLED.intersection(path.relative_to(root).parts):
                return True
        return False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Meta path protocol: None leaves the module to the finders after this one."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not self.is_programs_own(fullname, spec.origin):
            return None
        assert spec.origin is not None
        spec.loader = MappingLoader(fullname, spec.origin)
        return spec


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
    ours = (__file__, runpy.__file__, "<frozen runpy>")
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


def run(arguments: Sequence[str]) -> int:
    """Run a program with mapped imports: [file or directory or "-", args…] or ["-m", module, args…].

    Returns 0 when it ends; its exceptions (SystemExit above all) pass through, others printed already.
    Returns 2, with a message on stderr, where there is no such program.
    """
    arguments = list(arguments)
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments.pop(0)
    if not arguments or (arguments[0].startswith("-") and arguments[0] != "-"):
        print("usage: shiftverbs run program.py [argument ...]", file=sys.stderr)
        print("       shiftverbs run -m module [argument ...]", file=sys.stderr)
        return 2
    program = arguments[0]
    finder = MappingFinder()
    sys.meta_path.insert(0, finder)
    # Whoever holds the old __main__ (the interpreter's command line) goes on needing its globals.
    caller_main = sys.modules["__main__"]
    try:
        if as_module:
            return _run_module(finder, program, arguments)
        return _run_file(finder, program, arguments)
    finally:
        del caller_main


def _run_module(finder: MappingFinder, name: str, arguments: list[str]) -> int:
    directory = os.getcwd()
    _set_path0(directory)
    finder.add_root(directory)
    top = importlib.machinery.PathFinder.find_spec(name.partition(".")[0])
    if top is not None and top.submodule_search_locations:
        for location in top.submodule_search_locations:
            finder.add_root(location)
    elif top is not None and top.origin and not top.origin.startswith(("built-in", "frozen")):
        # A single file: itself, not whatever else is installed beside it.
        finder.roots.append(Path(top.origin).resolve())
    sys.argv = ["-m", *arguments[1:]]
    _fresh_main(None)
    try:
        # What python's own -m calls; pdb, trace and coverage use it too. Unlike runpy.run_module it leaves
        # the program's __main__ in place for its exit handlers and threads.
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise
    return 0


def _run_file(finder: MappingFinder, program: str, arguments: list[str]) -> int:
    sys.argv = arguments
    if program == "-":
        _set_path0("")
        finder.add_root(os.getcwd())
        filename, source = "<stdin>", sys.stdin.buffer.read()
    elif os.path.isdir(program):
        filename = os.path.join(program, "__main__.py")
        if not os.path.exists(filename):
            print(f"shiftverbs run: can't find '__main__' module in {program!r}", file=sys.stderr)
            return 1
        _set_path0(program)
        finder.add_root(program)
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
        directory = os.path.dirname(os.path.realpath(program))
        _set_path0(directory)
        finder.add_root(directory)
    main = _fresh_main(None if program == "-" else filename)
    if program != "-":
        main.__loader__ = MappingLoader("__main__", filename)
    try:
        code = map_source(source, filename)
        exec(code, main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise
    return 0
