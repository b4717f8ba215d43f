# SPDX-License-Identifier: BSD-3-Clause
"""Mooncake's transfer engine on the software NIC; it has a failover of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import Child

from others.conftest import Program
from shiftverbs.softrnic import faults

PACKAGES = Path(sys.prefix) / "others"
PEER = str(Path(__file__).with_name("mooncake_peer.py"))


def pair(program: Program, devices: str, seconds: float) -> Child:
    """A process with memory on host b, and the one that writes into it, on host a."""
    if not (PACKAGES / "mooncake").is_dir():
        pytest.skip("Mooncake is not there: make others")
    env = {"PYTHONPATH": str(PACKAGES)}
    server = program(sys.executable, PEER, devices, host="b", **env)
    at, address = server.expect(r"memory at (\S+) (\d+)", 60).groups()
    return program(sys.executable, PEER, devices, at, address, str(seconds), host="a", **env)


def test_goes_on_over_the_other_nic(program: Program) -> None:
    """It looks at asynchronous events: no write fails."""
    client = pair(program, "soft0,soft1", 6)
    client.expect(r"\d+ writes", 60)
    faults.down("a/soft0")
    said = client.succeed(60)
    assert "all right" in said and "failed" not in said


def test_one_nic(program: Program) -> None:
    """Writes fail as long as there is none."""
    client = pair(program, "soft0", 600)
    client.expect(r"\d+ writes", 60)
    faults.down("a/soft0")
    client.expect(r"write \d+: failed", 60)
