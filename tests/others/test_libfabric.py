# SPDX-License-Identifier: BSD-3-Clause
"""libfabric's reliable datagrams over verbs' unreliable ones (verbs;ofi_rxd), on the software NIC."""

from __future__ import annotations

import re
import time

from harness import Child, free_port

from others.conftest import Program
from shiftverbs.softrnic import faults

PROVIDER = "verbs;ofi_rxd"


def test_providers_are_found(program: Program) -> None:
    found = program("fi_info", "-p", PROVIDER).succeed(60)
    assert re.findall(r"domain: (\S+)", found) == ["soft0-dgram", "soft1-dgram"]


def pingpong(program: Program, *options: str) -> tuple[Child, Child]:
    """A client on host a and a server on host b; each checks what it gets."""
    port = str(free_port())
    common = ["-p", PROVIDER, "-d", "soft0-dgram", "-e", "rdm", "-c", *options]
    server = program("fi_pingpong", *common, "-B", port, host="b")
    deadline = time.monotonic() + 30
    while True:
        client = program("fi_pingpong", *common, "-P", port, "127.0.0.1", host="a")
        if client.wait(120) == 0 or time.monotonic() > deadline:
            return client, server


def test_lost_datagrams(program: Program) -> None:
    """What libfabric sends again is what was lost."""
    faults.register("a")
    rule = faults.drop("a/soft0", opcode="ud", direction="both", nth=100, count=5)
    client, server = pingpong(program, "-I", "300", "-S", "4096")
    client.succeed(60)
    server.succeed(60)
    assert faults.rule(rule).fired == 5


def test_pingpong(program: Program) -> None:
    client, server = pingpong(program, "-I", "50")
    assert re.search(r"1m +50 +=50", client.succeed(60))
    server.succeed(60)
