# SPDX-License-Identifier: BSD-3-Clause
"""The same checks with the data path compiled under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from test_data_path import CHECKS, run_check

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package shiftverbs whose _core is sanitized, the rest being this checkout's."""
    directory = tmp_path_factory.mktemp("sanitized")
    package = directory / "shiftverbs"
    package.mkdir()
    for path in (ROOT / "shiftverbs").iterdir():
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            (package / path.name).symlink_to(path)
    source = directory / "_core.c"
    cython = [
        sys.executable,
        "-m",
        "cython",
        "-3",
        "--module-name",
        "shiftverbs._core",
        "shiftverbs/_core.pyx",
    ]
    subprocess.run([*cython, "-o", str(source)], cwd=ROOT, check=True)
    target = package / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    gcc = ["gcc", "-O0", "-g1", "-fPIC", "-shared", "-w", *FLAGS, f"-I{sysconfig.get_path('include')}"]
    subprocess.run([*gcc, str(source), "-o", str(target), "-libverbs"], check=True)
    return directory


def runtime(name: str) -> str:
    """Path of a sanitizer's library, to be loaded before the interpreter."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", [c for c in CHECKS if c != "check_abi.py"])
def test_sanitized(name: str, sanitized: Path, fakeverbs: Path) -> None:
    """No check touches memory that it may not, or does anything undefined."""
    env = {
        "PYTHONPATH": str(sanitized),
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter and pyverbs keep theirs
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SHIFTVERBS_MODEL_EXAMPLES": "15",
    }
    # Freed memory is kept by the sanitizer: growth says nothing here.
    output = run_check(name, fakeverbs, env, "-k", "not no_memory_grows", cwd=sanitized)
    print(output)


def test_the_sanitized_one_is_what_runs(sanitized: Path) -> None:
    """Not the checkout's: the directory it runs in and PYTHONPATH decide."""
    program = "import shiftverbs._core as c; print(c.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=sanitized,
        env={
            "PYTHONPATH": str(sanitized),
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert str(sanitized) in result.stdout, result.stdout + result.stderr
