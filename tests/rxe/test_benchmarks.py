# SPDX-License-Identifier: BSD-3-Clause
"""perftest's programs on the kernel's soft-RoCE: the same scripts as on the software NIC."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ROW = re.compile(r"^ \d+ +\d+(?:[ \t]+\d+\.\d+){3,7}[ \t]*$", re.MULTILINE)
BACKUP = "rxe_a0=rxe_a1;rxe_b0=rxe_b1"
PROTECTED_ENV = {"SHIFTVERBS_BACKUP": BACKUP, "SHIFTVERBS_PEER_DEADLINE_MS": "8000"}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def run(program: str, env: dict[str, str], *options: str) -> tuple[str, str]:
    """Server on host a, client on host b. Returns their outputs."""
    port = free_port()
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / f"{program}.py"),
        "-F",
        "-x",
        "1",
        "-p",
        port,
        *options,
    ]
    both = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": {**os.environ, **env},
    }
    with subprocess.Popen([*command, "-d", "rxe_a0"], **both) as server:  # type: ignore[call-overload]
        assert server.stdout is not None
        said = ""
        for line in server.stdout:
            said += line
            if "Waiting for client" in line:
                break
        try:
            client = subprocess.run([*command, "-d", "rxe_b0", "127.0.0.1"], timeout=120, **both)  # type: ignore[call-overload]
            print(client.stdout)
            assert client.returncode == 0
            said += server.communicate(timeout=60)[0]
        finally:
            server.kill()
            print(said)
    assert server.returncode == 0
    return said, client.stdout


@pytest.mark.parametrize("module", ["pyverbs", "shiftverbs"])
@pytest.mark.parametrize(
    "program, options",
    [
        ("ib_write_bw", ("-s", "65536", "-n", "100")),
        ("ib_send_bw", ("-s", "4096", "-n", "200", "-r", "64")),
        ("ib_read_bw", ("-s", "4096", "-n", "200", "-q", "2")),
        ("ib_write_lat", ("-s", "8", "-n", "100")),
        ("ib_send_lat", ("-s", "8", "-n", "100")),
        ("ib_read_lat", ("-s", "64", "-n", "100")),
        ("ib_atomic_lat", ("-n", "100")),
    ],
)
def test_perftests_programs(program: str, options: tuple[str, ...], module: str) -> None:
    _, client = run(program, {}, "--module", module, *options)
    assert len(ROW.findall(client)) == 1


def test_a_protected_run(etcd: str) -> None:
    env = {"SHIFTVERBS_ETCD": etcd, "SHIFTVERBS_JOB": "protected", **PROTECTED_ENV}
    _, client = run("ib_write_lat", env, "--module", "shiftverbs", "--protected", "-s", "8", "-n", "100")
    assert len(ROW.findall(client)) == 1
