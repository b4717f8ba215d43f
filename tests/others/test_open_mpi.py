# SPDX-License-Identifier: BSD-3-Clause
"""Open MPI over UCX on the software NIC: four ranks on two hosts, results checked."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import Child, wait_until

from others.conftest import Program, retries
from others.test_ucx import RETRIES_EXCEEDED
from shiftverbs.softrnic import faults


def ranks(
    program: Program, tmp_path: Path, transports: str, seconds: float, nics: str = "soft0:1", **env: str
) -> Child:
    """Ranks 0 and 1 on host a, 2 and 3 on host b; nothing but verbs between any two of them."""
    if find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not there: make others")
    forwarded = [part for name in ("LD_PRELOAD", "SOFTRNIC", "SOFTRNIC_DIR") for part in ("-x", name)]
    forwarded += ["-x", f"UCX_TLS={transports},self", "-x", f"UCX_NET_DEVICES={nics}"]
    command = [sys.executable, "examples/mpi_allreduce.py", "--seconds", str(seconds)]
    hosts = [["-np", "2", *forwarded, "-x", f"SOFTRNIC_HOST={host}", *command] for host in "ab"]
    options = ["--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ucx", "--mca", "osc", "^ucx"]
    # Its sockets and files: a short path, and nobody else's.
    return program("mpirun", *options, *hosts[0], ":", *hosts[1], host=None, TMPDIR=str(tmp_path), **env)


@pytest.mark.parametrize("transports", ["rc", "ud_verbs"])
def test_allreduce(program: Program, tmp_path: Path, transports: str) -> None:
    said = ranks(program, tmp_path, transports, 2).succeed(120)
    assert said.count("all right") == 4


def test_pulled_cable(program: Program, tmp_path: Path) -> None:
    """All ranks end, though the other NIC was given to them too."""
    job = ranks(program, tmp_path, "rc", 600, "soft0:1,soft1:1")
    job.expect("allreduces", 120)
    faults.down("a/soft0")
    assert job.wait(120) != 0
    assert RETRIES_EXCEEDED in job.output


def test_cable_comes_back(program: Program, tmp_path: Path) -> None:
    """Nothing has happened: who finds a wrong result ends the job."""
    job = ranks(program, tmp_path, "rc", 600, UCX_RC_TIMEOUT="4s")  # seven of them, for a busy machine
    job.expect("allreduces", 120)
    before = retries("a/soft0")
    faults.down("a/soft0")
    wait_until(lambda: retries("a/soft0") > before, 60, "a retry")
    before_up = len(job.lines)
    faults.up("a/soft0")
    for _ in range(3):
        job.expect("allreduces", 60, start=before_up)
        before_up = len(job.lines)
    assert job.process.poll() is None
