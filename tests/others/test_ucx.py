# SPDX-License-Identifier: BSD-3-Clause
"""UCX on the software NIC: what it finds, and what it moves."""

from __future__ import annotations

import re
import time

import pytest
from harness import Child, free_port, wait_until

from others.conftest import Program, retries
from shiftverbs.softrnic import faults

#: What UCX says when a connection's retries are used up.
RETRIES_EXCEEDED = "transport retry counter exceeded"


def test_devices_are_found(program: Program) -> None:
    found = program("ucx_info", "-d").succeed(60)
    transports = re.findall(r"Transport: (\w+)\n#\s+Device: (soft\d:1)\n", found)
    assert {(t, d) for t in ("rc_verbs", "ud_verbs") for d in ("soft0:1", "soft1:1")} <= set(transports)
    assert "UCX  WARN" not in found and "UCX  ERROR" not in found


def perftest(program: Program, transports: str, *options: str, **env: str) -> tuple[Child, Child]:
    """A client on host a and a server on host b, on soft0 alone."""
    common = [*options, "-p", str(free_port())]
    env |= {"UCX_TLS": transports, "UCX_NET_DEVICES": "soft0:1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    server = program("ucx_perftest", *common, host="b", **env)
    # That the server listens is only seen by connecting.
    deadline = time.monotonic() + 30
    while True:
        client = program("ucx_perftest", "127.0.0.1", *common, host="a", **env)
        try:
            client.expect(r"Stage", 60)
        except AssertionError:
            if "Connection refused" not in client.output or time.monotonic() > deadline:
                raise
        else:
            return client, server


@pytest.mark.parametrize(
    ("transports", "options"),
    [
        ("rc", ["-t", "tag_bw", "-s", "65536"]),
        ("rc", ["-t", "ucp_get", "-s", "1000000", "-n", "20"]),
        ("rc", ["-t", "ucp_fadd", "-s", "8"]),
        ("ud_verbs", ["-t", "tag_lat", "-s", "4096"]),
        ("rc_verbs", ["-d", "soft0:1", "-x", "rc_verbs", "-t", "am_lat", "-s", "8"]),
        ("rc_verbs", ["-d", "soft0:1", "-x", "rc_verbs", "-t", "put_bw", "-D", "zcopy", "-s", "65536"]),
        ("ud_verbs", ["-d", "soft0:1", "-x", "ud_verbs", "-t", "am_bw", "-D", "bcopy", "-s", "1024"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_perftest(program: Program, transports: str, options: list[str]) -> None:
    client, server = perftest(program, transports, "-n", "200", "-w", "10", *options)
    assert re.search(r"Final: +\d+ ", client.succeed(60))
    server.succeed(60)


@pytest.mark.parametrize("index", range(4))
def test_datagrams_by_each_gid(program: Program, index: int) -> None:
    """UCX looks for the address in a datagram's first 40 bytes by what the WC says of the network header."""
    client, server = perftest(
        program, "ud_verbs", "-n", "200", "-w", "10", "-t", "tag_lat", UCX_IB_GID_INDEX=str(index)
    )
    client.succeed(60)
    server.succeed(60)


def test_pulled_cable(program: Program) -> None:
    """UCX does not go over to another NIC: who has sent last ends when the retries are used up, the other one waits."""
    client, server = perftest(program, "rc", "-t", "tag_lat", "-n", "100000000")
    client.expect(r"^\[thread 0\]", 60)
    faults.down("a/soft0")
    ended = wait_until(
        lambda: [end for end in (client, server) if end.process.poll() is not None], 120, "an end"
    )[0]
    assert ended.wait() != 0
    assert RETRIES_EXCEEDED in ended.output


def test_cable_comes_back(program: Program) -> None:
    """Before that, nothing has happened."""
    client, _server = perftest(program, "rc", "-t", "tag_lat", "-n", "100000000", UCX_RC_TIMEOUT="4s")
    client.expect(r"^\[thread 0\]", 60)
    faults.down("a/soft0")
    wait_until(lambda: retries("a/soft0") + retries("b/soft0"), 60, "a retry")
    before = len(client.lines)
    faults.up("a/soft0")
    client.expect(r"^\[thread 0\]", 60, start=before)
