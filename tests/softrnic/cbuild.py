# SPDX-License-Identifier: BSD-3-Clause
"""Compile the C tests and sources of softrnic with sanitizers, once per session."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT

SOURCES = ROOT / "shiftverbs" / "softrnic" / "src"
TESTS = Path(__file__).parent / "c"
FLAGS = ["-D_GNU_SOURCE", "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer"]
SANITIZERS = "address,undefined"


def compiler() -> str:
    """The system's C compiler.

    :raises AssertionError: there is none (a set-up error, not a reason to skip)
    """
    found = shutil.which("gcc") or shutil.which("cc")
    assert found, "no C compiler"
    return found


def _compile(target: Path, arguments: Sequence[str], sanitizers: str) -> Path:
    command = [compiler(), *FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", *arguments]
    done = subprocess.run([*command, "-o", str(target), "-lpthread", "-ldl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def build(
    target: Path, test_source: str, sources: Sequence[str] | None, sanitizers: str = SANITIZERS
) -> Path:
    """Build one test program with sanitizers.

    :param target: where the program goes
    :param test_source: file in tests/softrnic/c, or anywhere by its full path
    :param sources: files of softrnic that it tests, with their folder; None = all
    :param sanitizers: for -fsanitize
    :raises AssertionError: it does not compile without warnings; the text says why
    """
    names = sorted(str(path) for path in SOURCES.glob("*/*.c")) if sources is None else sources
    files = [str(TESTS / test_source), *(str(SOURCES / name) for name in names)]
    return _compile(target, [f"-I{SOURCES}", *files], sanitizers)


def build_plain(target: Path, test_source: str) -> Path:
    """Build one test program alone, as a distribution would: it meets the library by LD_PRELOAD.

    :param target: where the program goes
    :param test_source: file in tests/softrnic/c
    :raises AssertionError: it does not compile without warnings; the text says why
    """
    command = [compiler(), *FLAGS, str(TESTS / test_source), "-o", str(target), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def build_library(target: Path) -> Path:
    """Build the whole software NIC with AddressSanitizer and UndefinedBehaviorSanitizer.

    :param target: where the shared library goes
    :raises AssertionError: it does not compile without warnings; the text says why
    """
    files = sorted(str(path) for path in SOURCES.glob("*/*.c"))
    return _compile(target, [f"-I{SOURCES}", "-fPIC", "-fvisibility=hidden", "-shared", *files], SANITIZERS)


def runtime_libraries() -> str:
    """The sanitizers' libraries, as LD_PRELOAD for a program that is not built with them."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        done = subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        found.append(done.stdout.strip())
    return " ".join(found)
