# SPDX-License-Identifier: BSD-3-Clause
"""ControlPort, in one process (cases in port_cases.py) and between two hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Spawn
from nic.fakes import case_names

HERE = Path(__file__).resolve().parent
CASES = case_names(HERE / "port_cases.py")


@pytest.mark.parametrize("case", CASES)
def test_control_port(run_case: Callable[..., str], case: str) -> None:
    output = run_case("port_cases", case, softrnic="1")
    assert "Traceback" not in output, output


def test_cases_are_found() -> None:
    assert len(CASES) >= 18


def test_two_hosts_exchange(spawn: Spawn, fake_verbs: Path) -> None:
    hosts = [
        spawn(
            str(HERE / "run_case.py"),
            "port_cases",
            "peer_main",
            host=host,
            name=f"host {host}",
            env={"FAKE_VERBS": str(fake_verbs), "SEED": "5"},
        )
        for host in ("a", "b")
    ]
    addresses = [host.expect(r"^me (.*)$", timeout_s=40).group(1) for host in hosts]
    assert addresses[0] != addresses[1]
    for host, other in zip(hosts, reversed(addresses), strict=True):
        host.send(other)
    for host in hosts:
        host.expect("^ready$")
    for host in hosts:
        host.send("go")
    for host in hosts:
        host.expect("^exchanged 200$", timeout_s=40)
    for host in hosts:
        host.send("end")
    for host in hosts:
        host.succeed()
