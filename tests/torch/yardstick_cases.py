# SPDX-License-Identifier: BSD-3-Clause
"""torch's own DistributedTest with one backend: `BACKEND=shift WORLD_SIZE=4 python yardstick_cases.py [NAME …]`.

They come with torch (torch.testing._internal.distributed.distributed_test); what they need beside it is expecttest.
Each test's ranks are forked from this process, which has loaded torch and nothing else, onto hosts a, b, … Prints one
JSON object for each test: name, how it ended, why.

Which backends a test is for is asked by name there; "shift" is let in wherever "gloo" is, and nothing else is changed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
import unittest
from typing import Any

CASES = "torch.testing._internal.distributed.distributed_test"
#: The questions for the backend's name, and what is asked instead.
GATES = [
    (re.compile(r'BACKEND != "gloo"'), 'BACKEND not in ("gloo", "shift")'),
    (re.compile(r'BACKEND == "gloo"'), 'BACKEND in ("gloo", "shift")'),
    (re.compile(r'require_backend\(\{"gloo"'), 'require_backend({"shift", "gloo"'),
]
BACKEND = os.environ["BACKEND"]


def load() -> Any:
    """The module of the cases, with its gates open.

    :raises RuntimeError: this torch asks in another way
    """
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("cuda", "ddp", "subgroup"):
        DistTestCases.backend_feature[feature].add("shift")
    spec = importlib.util.find_spec(CASES)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    for pattern, instead in GATES:
        source, count = pattern.subn(instead, source)
        if not count:
            raise RuntimeError(f"{CASES} of this torch does not ask {pattern.pattern!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[CASES] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def without_replicated_tensors() -> None:
    """The cases switch on what torch 1.13 tried out then and has not by default: Python 3.11 cannot import it."""
    with contextlib.suppress(ImportError):
        import torch.nn.parallel._replicated_tensor_ddp_utils as utils

        utils._set_ddp_with_replicated_tensor = lambda value: None


class Recorder(unittest.TestResult):
    """Prints how each test ended."""

    def _say(self, test: unittest.TestCase, how: str, why: str = "") -> None:
        print(json.dumps({"name": test.id().rsplit(".", 1)[-1], "how": how, "why": why}), flush=True)

    def startTest(self, test: unittest.TestCase) -> None:
        """It begins: what follows until its end is its own output."""
        super().startTest(test)
        print(f"{test.id()} begins", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        """As unittest's."""
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """As unittest's."""
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        """As unittest's."""
        self._say(test, "failed", str(err[1]))

    addError = addFailure


def cases() -> type[unittest.TestCase]:
    """The test case, whose ranks have hosts."""
    import torch.multiprocessing

    module = load()

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any) -> None:
            os.environ["SOFTRNIC_HOST"] = "abcdefgh"[rank]
            torch.set_num_threads(1)
            without_replicated_tensors()
            if BACKEND == "shift":
                import shiftverbs.torch  # noqa: F401  (the backend)
            super()._run(rank, test_name, file_name, pipe)

    return Forked


def main() -> int:
    """Run them; the exit status is 0 whatever came of them."""
    case = cases()
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(case)
    recorder = Recorder()
    for name in names:
        case(name).run(recorder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
