# SPDX-License-Identifier: BSD-3-Clause
"""Mapping the imports of pyverbs to shiftverbs, whoever imports it: the program, its libraries, what is installed.

Aliasing `sys.modules["pyverbs"]` would not do: pyverbs' own modules import each other by that name and must go on
getting the originals, as shiftverbs' do. So the syntax tree of each other source file that names pyverbs is rewritten
before it is compiled:

    import pyverbs                     ->  import shiftverbs as pyverbs
    import pyverbs.qp as q             ->  import shiftverbs.qp as q
    import pyverbs.qp                  ->  pyverbs = __import__("shiftverbs.qp")
    from pyverbs.qp import QP          ->  from shiftverbs.qp import QP
    importlib.import_module(name), __import__(name)      the same with the name mapped at run time

Not reached: compiled modules (each that names pyverbs is warned of), source run by exec(), and files that another
import hook compiles (pytest: use `--assert=plain`).
"""

from __future__ import annotations

import ast
import importlib.machinery
import logging
import mmap
import sys
import types
from collections.abc import Sequence

__all__ = ["MappingFinder", "MappingLoader", "map_source", "mapped_name"]

_log = logging.getLogger("shiftverbs.run")

SOURCE = "pyverbs"
TARGET = "shiftverbs"


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
    """Loads one source file with its imports mapped.

    The byte code cache is left alone: it belongs to the unmapped program.
    """

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Compile the file; from the ordinary cache where it never names pyverbs."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if SOURCE.encode() not in source:
            return super().get_code(fullname)
        return map_source(source, path)


def _names_pyverbs(path: str) -> bool:
    """Whether a compiled module names pyverbs: the names that it imports stand in it as they are."""
    try:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(SOURCE.encode()) >= 0
    except (OSError, ValueError):
        return False


def _source_of(loader: object, fullname: str) -> str | None:
    """The source behind another kind of loader (a zip file's, say); None where it cannot or will not tell."""
    try:
        source = loader.get_source(fullname)  # type: ignore[attr-defined]
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    return source if isinstance(source, str) else None


class MappingFinder:
    """First on sys.meta_path: source files get the mapping loader, except pyverbs' own, ours, and what was excepted.

    only: names of packages or modules; if there are any, nothing but these (and what is below them) is mapped.
    excepted: the same, never mapped.
    """

    def __init__(self, only: Sequence[str] = (), excepted: Sequence[str] = ()) -> None:
        self._only = tuple(only)
        self._excepted = tuple(excepted)

    def maps(self, fullname: str) -> bool:
        """Whether the imports of module fullname are mapped."""

        def among(names: Sequence[str]) -> bool:
            return any(fullname == name or fullname.startswith(name + ".") for name in names)

        if among((SOURCE, TARGET)) or among(self._excepted):
            return False
        return not self._only or among(self._only)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Meta path protocol: None leaves the module to the finders after this one."""
        if not self.maps(fullname):
            return None
        spec = self._found_by_others(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        kind = type(spec.loader)
        if kind is importlib.machinery.SourceFileLoader:
            spec.loader = MappingLoader(fullname, spec.origin)
            return spec
        if kind in (importlib.machinery.ExtensionFileLoader, importlib.machinery.SourcelessFileLoader):
            unmapped = _names_pyverbs(spec.origin)
        else:
            unmapped = SOURCE in (_source_of(spec.loader, fullname) or "")
        if unmapped:
            _log.warning(
                "%s (%s, loaded by %s) uses pyverbs, and its imports cannot be mapped: what it makes is not protected; "
                "--except %s if that is meant", fullname, spec.origin, kind.__name__, fullname,
            )  # fmt: skip
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the import would find without us; not only on sys.path: editable installs have finders of their own."""
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None
