# SPDX-License-Identifier: BSD-3-Clause
"""The pure core touches no socket, clock, thread, file or pyverbs: seen in its imports, and by running without them."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap

import pytest
from harness import ROOT

PACKAGE = ROOT / "shiftverbs"
PURE = (
    "state_machine",
    *sorted(
        f"{room}.{path.stem}"
        for room in ("protocol", "stragglers")
        for path in (PACKAGE / room).glob("[a-z]*.py")
    ),
)
#: All that the pure core may know of the world outside.
ALLOWED = {
    "__future__",
    "collections",
    "enum",
    "hashlib",
    "hmac",
    "math",
    "msgspec",
    "random",
    "struct",
    "typing",
}
FORBIDDEN = (
    *(
        "socket",
        "_socket",
        "ssl",
        "select",
        "selectors",
        "asyncio",
        "threading",
        "_thread",
        "time",
        "datetime",
        "os",
    ),
    *(
        "posix",
        "io",
        "pathlib",
        "subprocess",
        "multiprocessing",
        "signal",
        "ctypes",
        "mmap",
        "logging",
        "concurrent",
    ),
    *("pyverbs", "etcd3", "grpc", "shiftverbs._core", "shiftverbs._nic", "shiftverbs.failover"),
)


def source(module: str) -> ast.Module:
    """The tree of one of our modules, named without the package."""
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def imports(module: str) -> tuple[set[str], set[str]]:
    """What a module imports: (modules of this package, top-level names from outside)."""
    inside, outside = set(), set()
    for node in ast.walk(source(module)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level and node.module is not None, f"{module}: one import style"
            top, _, rest = node.module.partition(".")
            if top != "shiftverbs":
                outside.add(top)
            elif (PACKAGE / rest.replace(".", "/")).is_dir():
                inside |= {f"{rest}.{alias.name}".lstrip(".") for alias in node.names}
            else:
                inside.add(rest)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                (inside if top == "shiftverbs" else outside).add(rest if top == "shiftverbs" else top)
    return inside, outside


@pytest.mark.parametrize("module", PURE)
def test_imports_are_pure(module: str) -> None:
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        inside, outside = imports(name)
        assert outside <= ALLOWED, f"{name} imports {outside - ALLOWED}"
        todo += inside - seen
    assert seen <= set(PURE), f"{module} reaches {seen - set(PURE)}"


@pytest.mark.parametrize("module", PURE)
def test_no_way_around_the_imports(module: str) -> None:
    """No open(), no __import__, no exec: what an import list does not show."""
    names = {n.id for n in ast.walk(source(module)) if isinstance(n, ast.Name)}
    assert not names & {"open", "__import__", "exec", "eval", "compile", "input", "globals"}
    assert module == "state_machine" or "print" not in names


def test_the_core_runs_where_nothing_impure_can_be_imported() -> None:
    """A whole SWITCH setup in a child interpreter in which impure modules raise when imported."""
    program = f"""
        import sys, types, random, msgspec, enum, struct, collections, heapq
        class Wall:
            def find_spec(self, name, path=None, target=None):
                for bad in {FORBIDDEN!r}:
                    if name == bad or name.startswith(bad + "."):
                        raise ImportError("impure: " + name)
        for bad in {FORBIDDEN!r}:
            for name in [n for n in sys.modules if n == bad or n.startswith(bad + ".")]:
                del sys.modules[name]
        sys.meta_path.insert(0, Wall())
        package = types.ModuleType("shiftverbs")
        package.__path__ = [{str(PACKAGE)!r}]
        sys.modules["shiftverbs"] = package
        from shiftverbs import state_machine
        from shiftverbs.protocol import codec, events, messages, pair, path_health, seal
        try:
            import socket
        except ImportError:
            pass
        else:
            raise SystemExit("the wall has a hole")
        locals_ = [pair.LocalPair(b"g" * 16, 0, 10 + k, 3) for k in range(2)]
        a = pair.PairProtocol(pair.ProtocolConfig(), locals_, True, random.Random(1), 0)
        assert any(isinstance(x, events.ResetPair) for x in a.start(0))
        out = a.handle(events.PathFailed(0, "gone"), 1)
        sync = next(x.message for x in out if isinstance(x, events.SendMessage))
        ours, theirs = seal.Seals(b"a" * 16, b"b" * 16), seal.Seals(b"b" * 16, b"a" * 16)
        data = codec.encode([codec.Entry(1, 2, sync)], ours)
        assert codec.decode(data[0], theirs)[0].message == sync
        assert path_health.PingState(10).poll_ping(0) == 1
        from shiftverbs.stragglers import detector, records
        assert detector.Stragglers(records.Settings()).poll(0) == []
        assert "stateDiagram" in state_machine.mermaid()
        print("pure")
    """
    command = [sys.executable, "-I", "-c", textwrap.dedent(program)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert child.stdout == "pure\n", child.stderr


def test_time_and_chance_come_from_outside() -> None:
    """`random` is there for its type only: nothing calls the module's own, unseeded functions."""
    used = {
        node.attr
        for module in PURE
        for node in ast.walk(source(module))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    }
    assert used == {"Random"}
