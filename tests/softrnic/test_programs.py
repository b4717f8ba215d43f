# SPDX-License-Identifier: BSD-3-Clause
"""C programs of other people on the software NIC, through LD_PRELOAD."""

from __future__ import annotations

import re
import time

import pytest
from harness import Child, Spawn, free_port

from shiftverbs.softrnic import library_path


def start(spawn: Spawn, program: str, *args: str, host: str = "a") -> Child:
    return spawn(
        *args, program=program, host=host, env={"LD_PRELOAD": str(library_path())}, name=f"{program} {host}"
    )


def test_devices(spawn: Spawn) -> None:
    listing = start(spawn, "ibv_devices").succeed()
    assert "soft0" in listing and "soft1" in listing
    info = start(spawn, "ibv_devinfo", "-v", "-d", "soft1").succeed()
    assert "PORT_ACTIVE" in info and "Ethernet" in info and "::ffff:127.33." in info and "RoCE v2" in info


def test_devices_of_the_users_names(spawn: Spawn) -> None:
    preload = {"LD_PRELOAD": str(library_path())}
    listing = spawn(program="ibv_devices", softrnic="mlx5_0;mlx5_1", env=preload).succeed()
    names = [line.split()[0] for line in listing.splitlines()[2:]]
    assert names[:2] == ["mlx5_0", "mlx5_1"] and not any(name.startswith("soft") for name in names)
    info = spawn("-v", "-d", "mlx5_1", program="ibv_devinfo", softrnic="mlx5_0;mlx5_1", env=preload).succeed()
    assert "hca_id:\tmlx5_1" in info
    address, host, slot = re.search(r"::ffff:127\.33\.((\d+)\.(\d+)),", info).groups()
    half = f"{int(host):02x}{int(slot):02x}"
    assert re.findall(r"GID\[ *(\d)\]:\s+(.*)", info) == [
        ("0", f"fe80:0000:0000:0000:0000:7fff:fe21:{half}, RoCE v1"),
        ("1", f"fe80::7fff:fe21:{int(half, 16):x}, RoCE v2"),
        ("2", f"0000:0000:0000:0000:0000:ffff:7f21:{half}, RoCE v1"),
        ("3", f"::ffff:127.33.{address}, RoCE v2"),
    ]


def run_pair(spawn: Spawn, program: str, options: list[str]) -> tuple[str, str]:
    """A server on host b and a client on host a; what they said."""
    common = ["-d", "soft0", "-p", str(free_port()), *options]
    server = start(spawn, program, *common, host="b")
    # The server's output is buffered: that it listens is only seen by connecting.
    deadline = time.monotonic() + 20
    while True:
        client = start(spawn, program, *common, "127.0.0.1", host="a")
        if client.wait(60) == 0 or "Couldn't connect" not in client.output or time.monotonic() > deadline:
            break
    return client.succeed(), server.succeed()


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("ibv_rc_pingpong", ["-n", "300", "-c"]),
        ("ibv_rc_pingpong", ["-n", "100", "-s", "100001", "-m", "2048"]),
        ("ibv_rc_pingpong", ["-n", "300", "-e", "-c"]),  # sleeps on completion events
        ("ibv_rc_pingpong", ["-n", "300", "-c", "-N"]),  # extended QP
        ("ibv_uc_pingpong", ["-n", "300", "-c"]),
        ("ibv_uc_pingpong", ["-n", "300", "-e", "-c", "-s", "20000"]),
        ("ibv_ud_pingpong", ["-n", "300", "-c", "-s", "1024"]),
        ("ibv_ud_pingpong", ["-n", "300", "-e", "-c"]),
        ("ibv_srq_pingpong", ["-n", "300", "-c"]),
        ("ibv_srq_pingpong", ["-n", "300", "-e", "-c"]),
        ("ibv_rc_pingpong", ["-n", "100", "-c", "-g", "3"]),
        ("ibv_rc_pingpong", ["-n", "100", "-c", "-g", "2"]),
        ("ibv_ud_pingpong", ["-n", "100", "-c", "-g", "3"]),
        ("ibv_ud_pingpong", ["-n", "100", "-c", "-g", "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_pingpong(spawn: Spawn, program: str, options: list[str]) -> None:
    client, server = run_pair(spawn, program, ["-g", "0", *options])
    assert "bytes in" in client and "iters in" in server
    assert "invalid data" not in client + server  # what -c finds; the exit status stays 0


PERFTEST = [
    *[(f"ib_{verb}_bw", []) for verb in ("send", "write", "read", "atomic")],
    *[(f"ib_{verb}_lat", []) for verb in ("send", "write", "read", "atomic")],
    ("ib_send_bw", ["-c", "UD"]),
    ("ib_write_bw", ["-c", "UC", "-q", "2"]),
    ("ib_send_bw", ["--use-srq", "-e"]),
    ("ib_write_bw", ["-b"]),
]


@pytest.mark.parametrize(
    ("program", "options"), PERFTEST, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_perftest(spawn: Spawn, program: str, options: list[str]) -> None:
    """In its default mode: extended QPs and ibv_wr_*. perftest 4.5 has no check of the data that arrived."""
    size = [] if "atomic" in program else ["-s", "4096"]
    client, _server = run_pair(spawn, program, ["-n", "100", *size, *options])
    last = [line.split() for line in client.splitlines() if line[:2] == " 4" or line[:2] == " 8"][-1]
    assert int(last[1]) >= 100 and float(last[-1]) > 0
