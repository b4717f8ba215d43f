# SPDX-License-Identifier: BSD-3-Clause
"""A script that knows nothing of failures, through each kind of failure: its weights, bit for bit."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Child, free_port, wait_until
from ranks_env import ENV, HERE

from shiftverbs.telemetry import reader

pytestmark = pytest.mark.usefixtures("needs_torch")

STEPS = 250
#: What each fault does, given the fault functions.
FAULTS: dict[str, Any] = {
    "down": lambda faults: faults.down("a/soft0"),
    "switch": lambda faults: faults.switch_down("rail0"),
    "switch port": lambda faults: faults.switch_down("rail0", "b"),
    "killed NIC": lambda faults: faults.kill("a/soft0"),
    "lost ACK": lambda faults: faults.drop("a/soft0", direction="rx", opcode="ack", then="down"),
    "all ACKs lost": lambda faults: faults.drop("a/soft0", direction="rx", opcode="ack", count=0),
}
UNDISTURBED: list[str] = []


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Where the ranks show their state; a short path, for sockets."""
    directory = tempfile.mkdtemp(prefix="sv-torch-")
    yield Path(directory)
    shutil.rmtree(directory, ignore_errors=True)


def begin(network: Any, run_dir: Path, pause_s: float) -> list[Child]:
    """The script on two hosts."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env = {**network.env, **ENV, **meet, "SHIFTVERBS_RUN_DIR": str(run_dir)}
    script = [str(HERE / "ddp_script.py"), "shift", str(STEPS), str(pause_s)]
    return [
        network._spawn(*script, host="ab"[rank], softrnic="2", env={**env, "RANK": str(rank)})
        for rank in range(2)
    ]


def end(children: list[Child]) -> str:
    """The weights of both ranks, which are the same."""
    both = [re.findall(r"^weights (\w+)$", child.succeed(120), re.MULTILINE) for child in children]
    assert len(both[0]) == 1 and both[0] == both[1]
    return str(both[0][0])


def protected(run_dir: Path) -> bool:
    """Whether each rank's QP is."""
    qps = [qp for process in reader.ask(run_dir).processes for qp in process["qps"]]
    return len(qps) == 2 and all(qp["status"] == "PROTECTED" for qp in qps)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_script_trains_through(network, faults, run_dir, fault):
    if not UNDISTURBED:
        UNDISTURBED.append(end(begin(network, run_dir, 0.0)))
    children = begin(network, run_dir, 0.02)
    for child in children:
        # By then DDP has made its buckets anew: a NIC that is dead takes no new memory.
        child.expect(r"^step 2 on \['soft0'\]$", 60)
    wait_until(lambda: protected(run_dir), 30, "both QPs protected")
    FAULTS[fault](faults)
    for child in children:
        child.expect(r"^step \d+ on \['soft1'\]$", 60)
    assert end(children) == UNDISTURBED[0]
