# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for other people's programs, which Debian has: `make others`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Child, Spawn

from shiftverbs.softrnic import faults, library_path

Program = Callable[..., Child]


@pytest.fixture
def program(spawn: Spawn, softrnic_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Start a program on a host, with the library: `program("ucx_info", "-d", host="b", UCX_TLS="rc")`.

    Skips where the program is not installed. Faults given in this process act on its network.
    """
    monkeypatch.setenv("SOFTRNIC_DIR", str(softrnic_dir))

    def start(name: str, *args: str, host: str | None = "a", **env: str) -> Child:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not there: make others")
        env["LD_PRELOAD"] = str(library_path())
        return spawn(*args, program=name, host=host, env=env, name=f"{name} {host}")

    return start


def retries(device: str) -> int:
    """How often a retry timer of this device's ran out, in all processes."""
    return faults.device(device).counters["local_ack_timeout_err"]
