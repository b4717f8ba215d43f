# SPDX-License-Identifier: BSD-3-Clause
"""Objects that are dropped where nothing may be closed, with failover running. Programs: dropped.py."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from harness import EtcdServer, Spawn

SCRIPT = Path(__file__).parent / "dropped.py"
PROGRAMS = re.findall(r"\n@check\ndef (\w+)\(", SCRIPT.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(spawn: Spawn, shared_etcd: EtcdServer, job: str, name: str) -> None:
    path = os.pathsep.join([*map(str, SCRIPT.parents[:2]), os.environ.get("PYTHONPATH", "")])
    env = {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job, "PYTHONPATH": path}
    started = time.monotonic()
    child = spawn(str(SCRIPT), name, env=env, softrnic="1", name=name)
    child.succeed(60)
    assert child.printed[-1:] == ["passed"], child.output
    if name.startswith("left_to_the_exit"):
        assert time.monotonic() - started < 20
    for bad in ("Traceback", "Exception ignored"):
        assert bad not in child.output, child.output
