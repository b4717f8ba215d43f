# SPDX-License-Identifier: BSD-3-Clause
"""rdma-core's own pyverbs tests, from where Debian put them, run with pyverbs or on shiftverbs.

    python upstream.py --package shiftverbs --dev rxe_a0 --gid 1 [--match test_qp.] [--json FILE]

Nothing of them is copied: their source is read (some of it is gzipped) when a module is imported, and for shiftverbs
the *tests'* imports of pyverbs are rewritten then; pyverbs' own imports stay as they are.
Each outcome is told as a JSON line; a process that dies is started again behind the test that killed it.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["DEBIANS", "DIRECTORY", "Outcomes", "differences", "run"]

DEBIANS = Path("/usr/share/doc/rdma-core/tests")
#: Where they are: Debian's, unless it is another release of pyverbs that is tested.
DIRECTORY = Path(os.environ.get("RDMA_CORE_TESTS", DEBIANS))
# Their package's name, and a module of theirs that lives beside it.
PACKAGE, BESIDE = "tests", "args_parser"
DIED = "died"

Outcomes = dict[str, tuple[str, str]]
"""Test -> (passed | skipped | failed | died, what it said)."""


class _Rewrite(ast.NodeTransformer):
    """Imports of pyverbs.X become imports of `package`.X where that exists (providers are pyverbs' alone)."""

    def __init__(self, package: str) -> None:
        self.package = package

    def _name(self, name: str) -> str:
        root, dot, rest = name.partition(".")
        if root != "pyverbs" or not dot:
            return name
        new = f"{self.package}.{rest}"
        try:
            return new if importlib.util.find_spec(new) is not None else name
        except ModuleNotFoundError:
            return name

    def visit_Import(self, node: ast.Import) -> ast.Import:
        """import pyverbs.enums as e"""
        for alias in node.names:
            new = self._name(alias.name)
            if new != alias.name and alias.asname is None:
                raise NotImplementedError(
                    f"line {node.lineno}: import {alias.name} without a name of its own"
                )
            alias.name = new
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        """from pyverbs.qp import QP"""
        if node.module is not None and not node.level:
            node.module = self._name(node.module)
        return node


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads their modules, gzipped or not. package: what their imports of pyverbs are to be."""

    def __init__(self, package: str, directory: Path = DIRECTORY) -> None:
        self.package = package
        self.directory = directory

    def _source(self, fullname: str) -> Path | None:
        stem = fullname.removeprefix(PACKAGE + ".")
        if stem == fullname and fullname != BESIDE:
            return None
        for path in (self.directory / f"{stem}.py", self.directory / f"{stem}.py.gz"):
            if path.exists():
                return path
        return None

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Their package itself is an empty one: its own __init__ knows nothing of gzip."""
        if fullname == PACKAGE:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        source = self._source(fullname)
        return importlib.util.spec_from_file_location(fullname, source, loader=self) if source else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The usual module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Read, rewrite, compile, execute."""
        source = self._source(module.__name__)
        if source is None:
            return
        raw = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
        tree = ast.parse(raw, str(source))
        if self.package != "pyverbs":
            tree = _Rewrite(self.package).visit(tree)
        exec(compile(tree, str(source), "exec"), module.__dict__)
        if os.environ.get("SOFTRNIC"):
            self._without_kernel(module)

    @staticmethod
    def _without_kernel(module: types.ModuleType) -> None:
        """What later releases ask the kernel about a device; it knows nothing of ours."""
        names = module.__dict__
        if module.__name__ == f"{PACKAGE}.base":
            names["RDMATestCase"].get_net_name = staticmethod(lambda dev, port=None: None)
        elif module.__name__ == f"{PACKAGE}.utils" and "get_pkey_from_kernel" in names:

            def get_pkey(device: str, port: int = 1, index: int = 0) -> int:
                with importlib.import_module("pyverbs.device").Context(name=device) as context:
                    return int(context.query_pkey(port, index))

            names["get_pkey_from_kernel"] = get_pkey

    def test_modules(self) -> list[str]:
        """Names of all modules with tests."""
        return sorted({f"{PACKAGE}.{path.name.split('.')[0]}" for path in self.directory.glob("test_*.py*")})


class _Tell(unittest.TestResult):
    """Writes one JSON line per test begun and ended. qps: asked at each test's end how its QPs were protected."""

    def __init__(self, stream: IO[str], qps: Callable[[], dict[str, int]] = dict) -> None:
        super().__init__()
        self._stream = stream
        self._qps = qps
        self._said = ("passed", "")

    def _line(self, **fields: Any) -> None:
        self._stream.write(json.dumps(fields) + "\n")
        self._stream.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._said = ("passed", "")
        random.seed(test.id())  # several draw attributes at random: the same ones on every run
        self._began = time.monotonic()
        self._line(begin=test.id())

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        status, why = self._said
        seconds = round(time.monotonic() - self._began, 3)
        self._line(end=test.id(), status=status, why=why, seconds=seconds, qps=self._qps())

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._said = ("skipped", reason)

    def _failed(self, test: unittest.TestCase, error: Any) -> None:
        self._said = ("failed", self._exc_info_to_string(error, test))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._failed(test, err)

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._failed(test, err)
        if not isinstance(test, unittest.TestCase):  # a class or module that cannot be set up
            self._line(begin=test.id())
            self._line(end=test.id(), status="failed", why=self._said[1], seconds=0)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(test, err)


def _cases(suite: unittest.TestSuite) -> Iterable[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _cases(each)
        else:
            yield each


def _child(
    package: str, theirs: Sequence[str], match: Sequence[str], done: set[str], settle_s: float | None
) -> int:
    """In the child: run all tests that match and are not done yet."""
    if package != "pyverbs":
        importlib.import_module(package)
    elif os.environ.get("SOFTRNIC"):
        from shiftverbs import softrnic

        softrnic.enable()
    loader = Loader(package)
    sys.meta_path.insert(0, loader)
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no outcome
    sys.argv[1:] = list(theirs)
    importlib.import_module(BESIDE).parser.parse_args()
    suite = unittest.TestSuite()
    for name in loader.test_modules():
        if match and not any(wanted in name + "." or name in wanted for wanted in match):
            continue
        module = importlib.import_module(name)
        for case in _cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
            if case.id() not in done and (not match or any(wanted in case.id() for wanted in match)):
                suite.addTest(case)
    qps: Callable[[], dict[str, int]] = dict
    if settle_s is not None:
        sys.path.append(str(Path(__file__).parent))
        from settle import Settle

        settle = Settle(settle_s)
        settle.install()
        qps = settle.taken
    suite.run(_Tell(stream, qps))
    stream.write(json.dumps({"all": True}) + "\n")
    stream.flush()
    return 0


def run(
    package: str,
    device: str,
    gid: int,
    env: dict[str, str] | None = None,
    match: Sequence[str] = (),
    limit_s: float = 300.0,
    total_s: float = 3600.0,
    settle_s: float | None = None,
    qps: Counter[str] | None = None,
) -> Outcomes:
    """Run their tests in child processes. Returns the outcome of every test.

    package: pyverbs or shiftverbs; device, gid: where; match: parts of names, empty for all; limit_s: seconds without
    any test beginning or ending after which a child is taken for hung; total_s: seconds for all (then TimeoutError);
    settle_s: with shiftverbs, how long a first send waits for its QPs' protection (None: not at all), and then
    qps: where QPs are counted by their protection when traffic began.
    """
    outcomes: Outcomes = {}
    deadline = time.monotonic() + total_s
    while True:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the tests on {package} took more than {total_s:g} s; {len(outcomes)} ended")
        command = [sys.executable, "-B", __file__, "--child", "--package", package]
        command += [f"--match={part}" for part in match] + ["--dev", device, "--port", "1", "--gid", str(gid)]
        command += [f"--settle={settle_s}"] if settle_s is not None else []
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **(env or {})},
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(sorted(outcomes)))
        child.stdin.close()
        running, complete = _listen(child, outcomes, limit_s, deadline, qps)
        if complete and running is None:
            return outcomes
        if running is None:
            raise RuntimeError(f"the tests on {package} ended with {child.returncode} before any test began")
        outcomes[running] = (DIED, f"exit status {child.returncode}")


def _listen(
    child: subprocess.Popen[str],
    outcomes: Outcomes,
    limit_s: float,
    deadline: float,
    qps: Counter[str] | None,
) -> tuple[str | None, bool]:
    """Read a child's lines to their end. Returns the test it died in, and whether it reached its end."""
    import select

    assert child.stdout is not None
    running, complete = None, False
    os.set_blocking(child.stdout.fileno(), False)
    buffer = ""
    with child, child.stdout:
        while True:
            left = max(0.0, min(limit_s, deadline - time.monotonic()))
            readable, _, _ = select.select([child.stdout], [], [], left)
            if not readable:
                child.kill()
                break
            data = os.read(child.stdout.fileno(), 1 << 16).decode()
            if not data:
                break
            *lines, buffer = (buffer + data).split("\n")
            for said in map(json.loads, lines):
                if "begin" in said:
                    running = said["begin"]
                elif "end" in said:
                    outcomes[said["end"]] = (said["status"], said["why"])
                    if qps is not None:
                        qps.update(said.get("qps", {}))
                    running = None
                else:
                    complete = True
        # Objects that tests left behind are torn down here; it must end by itself, too.
        try:
            status = child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        if complete and status:
            outcomes["the interpreter's end"] = (DIED, f"exit status {status}")
    return running, complete


def differences(reference: Outcomes, other: Outcomes) -> list[str]:
    """Tell every test whose status differs, with what was said."""
    lines = []
    for name in sorted({*reference, *other}):
        before, after = reference.get(name, ("absent", "")), other.get(name, ("absent", ""))
        if before[0] != after[0]:
            lines.append(
                f"{name}: {before[0]} with pyverbs, {after[0]} with shiftverbs\n{after[1] or before[1]}"
            )
    return lines


def summary(outcomes: Outcomes) -> str:
    """Count the outcomes."""
    statuses = [status for status, _ in outcomes.values()]
    return ", ".join(f"{statuses.count(name)} {name}" for name in sorted(set(statuses))) or "no test"


def main() -> int:
    """Run one package's tests, or (--child) be the process that does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", choices=["pyverbs", "shiftverbs"], required=True)
    parser.add_argument("--dev", required=True)
    parser.add_argument("--gid", type=int, default=1)
    parser.add_argument("--match", action="append", default=[], help="only tests whose name has this in it")
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument(
        "--settle", type=float, metavar="S", help="first sends wait S seconds for protection at most"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    known, theirs = parser.parse_known_args()
    if known.child:
        return _child(known.package, [f"--dev={known.dev}", f"--gid={known.gid}", *theirs], known.match,
                      set(json.load(sys.stdin)), known.settle)  # fmt: skip
    qps: Counter[str] = Counter()
    outcomes = run(known.package, known.dev, known.gid, match=known.match, settle_s=known.settle, qps=qps)
    for name, (status, why) in outcomes.items():
        if status not in ("passed", "skipped"):
            print(f"{status}: {name}\n{why}")
    print(summary(outcomes))
    for how, number in qps.most_common():
        print(f"{number:5} QPs {how}")
    if known.json:
        known.json.write_text(json.dumps(outcomes, indent=1))
    return int(any(status in ("failed", DIED) for status, _ in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
