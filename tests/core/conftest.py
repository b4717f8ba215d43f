# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the data path's tests.

The `check_*.py` files run in a child interpreter (see test_data_path.py), where the fake provider is loaded before
libibverbs and no other part of shiftverbs touches the event ring.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fake import World

HERE = Path(__file__).parent
IN_CHILD = "SHIFTVERBS_FAKEVERBS" in os.environ

if IN_CHILD:
    # Before libibverbs, so that its symbols are found first.
    ctypes.CDLL(os.environ["SHIFTVERBS_FAKEVERBS"], mode=ctypes.RTLD_GLOBAL)
    import fake

    LIBRARY = fake.library()

    @pytest.fixture
    def lib() -> ctypes.CDLL:
        """The fake provider."""
        return LIBRARY

    @pytest.fixture
    def make() -> Iterator[Callable[..., World]]:
        """`make(nics=…, max_send=…, …)`: a fake.World; the last made are closed first."""
        from shiftverbs import _core

        made: list[World] = []

        def build(**options: Any) -> World:
            made.append(fake.World(LIBRARY, **options))
            return made[-1]

        _core.set_driver(None)
        _core.clear_attention()
        _core.take_events()
        yield build
        _core.set_driver(None)
        for world in reversed(made):
            world.close()

    @pytest.fixture
    def world(make: Callable[..., World]) -> World:
        """One QP, two NICs, separate CQs, not guarded."""
        return make()

    @pytest.fixture
    def guarded(make: Callable[..., World]) -> World:
        """The same, paired and guarded."""
        w = make()
        w.protect()
        return w


def compile_fake(directory: Path, *flags: str) -> Path:
    """Compile fakeverbs.c into `directory`."""
    path = directory / "libfakeverbs.so"
    command = [
        "gcc",
        "-std=c11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
    ]
    subprocess.run([*command, *flags, str(HERE / "fakeverbs.c"), "-o", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def fakeverbs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake provider's library."""
    return compile_fake(tmp_path_factory.mktemp("fakeverbs"))
