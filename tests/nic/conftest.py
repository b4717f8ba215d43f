# SPDX-License-Identifier: BSD-3-Clause
"""Each case runs in a child of its own: what stands before libibverbs is process-wide, and cases fork, hang
and exit without closing anything."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Spawn

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def fake_verbs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fake_verbs.c, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "no C compiler (it built the package, so it should be there)"
    library = tmp_path_factory.mktemp("fake") / "libfake_verbs.so"
    subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-g",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            str(HERE / "fake_verbs.c"),
            "-o",
            str(library),
        ],
        check=True,
    )
    return library


@pytest.fixture
def run_case(spawn: Spawn, fake_verbs: Path) -> Callable[..., str]:
    """Run one case of a module of this directory to its end and return its output."""

    def run(module: str, case: str, softrnic: str | None = None, timeout_s: float = 60.0) -> str:
        child = spawn(
            str(HERE / "run_case.py"),
            module,
            case,
            softrnic=softrnic,
            env={"FAKE_VERBS": str(fake_verbs)},
            name=case,
        )
        output = child.succeed(timeout_s)
        assert f"case {case} done" in output, f"{case} ended early; its output:\n{output}"
        return output

    return run
