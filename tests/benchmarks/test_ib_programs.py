# SPDX-License-Identifier: BSD-3-Clause
"""The ib_* programs, server and client, over the software RNIC, with each package."""

from __future__ import annotations

import re

import pytest
from harness import Child, EtcdServer, Spawn, free_port

NUMBER = r"\d+\.\d+"
BANDWIDTH_ROW = re.compile(rf"^ (\d+) +(\d+) +({NUMBER}) +({NUMBER})\s+({NUMBER}) *$", re.MULTILINE)
LATENCY_ROW = re.compile(r"^ (\d+) +(\d+)" + rf"\s+({NUMBER})" * 7 + r" *$", re.MULTILINE)
MODULES = ("pyverbs", "shiftverbs")


def start(
    spawn: Spawn, program: str, module: str, *options: str, env: dict[str, str | None] | None = None
) -> tuple[Child, Child]:
    """Start the server as host a and, once it listens, the client as host b."""
    port = str(free_port())
    common = (f"benchmarks/{program}.py", "--module", module, "-p", port, "-F", *options)
    server = spawn(*common, host="a", name=f"{program} server", env=env)
    server.expect("Waiting for client")
    return server, spawn(*common, "127.0.0.1", host="b", name=f"{program} client", env=env)


def run(spawn: Spawn, program: str, module: str, *options: str) -> tuple[str, str]:
    """Run both sides to a good end and return their outputs."""
    server, client = start(spawn, program, module, *options)
    return server.succeed(60), client.succeed(60)


@pytest.mark.parametrize("module", MODULES)
def test_write_bw_prints_the_clients_figures_on_both_sides(spawn: Spawn, module: str) -> None:
    server, client = run(spawn, "ib_write_bw", module, "-d", "soft0", "-s", "4096", "-n", "500", "-t", "64")
    (row,) = BANDWIDTH_ROW.findall(client)
    assert BANDWIDTH_ROW.findall(server) == [row]
    size, iters, peak, average, rate = row
    assert (size, iters) == ("4096", "500")
    assert float(peak) >= float(average) > 0
    assert float(rate) * 1e6 * 4096 / 2**20 == pytest.approx(float(average), rel=0.01)
    assert "RDMA_Write BW Test" in client and "CQ Moderation   : 64" in client


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("how", [("-n", "300"), ("-D", "0.4")], ids=["count", "time"])
def test_write_bw_in_both_directions_prints_their_sum_on_both_sides(
    spawn: Spawn, module: str, how: tuple[str, ...]
) -> None:
    server, client = run(spawn, "ib_write_bw", module, "-b", "-s", "16384", *how)
    (theirs,), (ours,) = BANDWIDTH_ROW.findall(server), BANDWIDTH_ROW.findall(client)
    assert theirs[3] == ours[3] and float(ours[3]) > 0  # both averages are the same sum
    assert "RDMA_Write Bidirectional BW Test" in client and "TX depth        : 128" in server
    if how[0] == "-n":
        assert (theirs[1], ours[1]) == ("300", "300")  # of one side, as perftest has it
        assert float(ours[2]) >= float(ours[3])


@pytest.mark.parametrize("module", MODULES)
def test_send_bw_counts_at_the_receiver(spawn: Spawn, module: str) -> None:
    server, client = run(spawn, "ib_send_bw", module, "-s", "1024", "-n", "600", "-r", "32")
    assert [row[:2] for row in BANDWIDTH_ROW.findall(server)] == [("1024", "600")]
    assert [row[:2] for row in BANDWIDTH_ROW.findall(client)] == [("1024", "600")]


def check_latency(row: tuple[str, ...], size: int, count: int) -> None:
    least, most, typical, average = (float(field) for field in row[2:6])
    assert row[:2] == (str(size), str(count))
    assert 0 < least <= typical <= most and least <= average <= most


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("program", ["ib_write_lat", "ib_send_lat"])
def test_messages_go_there_and_back(spawn: Spawn, program: str, module: str) -> None:
    server, client = run(spawn, program, module, "-s", "8", "-n", "200")
    (row,) = LATENCY_ROW.findall(client)
    check_latency(row, 8, 200)
    # The server's first message starts its clock.
    (row,) = LATENCY_ROW.findall(server)
    check_latency(row, 8, 199)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "program, options, size, title",
    [
        ("ib_read_lat", ("-s", "64"), 64, "RDMA_Read Latency Test"),
        ("ib_atomic_lat", (), 8, "Atomic FETCH_AND_ADD Latency Test"),
        ("ib_atomic_lat", ("-A", "CMP_AND_SWAP"), 8, "Atomic CMP_AND_SWAP Latency Test"),
    ],
)
def test_the_client_alone_measures_reads_and_atomics(
    spawn: Spawn, program: str, module: str, options: tuple[str, ...], size: int, title: str
) -> None:
    server, client = run(spawn, program, module, "-n", "100", "-o", "4", *options)
    assert title in client and " Outstand reads  : 4" in client
    (row,) = LATENCY_ROW.findall(client)
    check_latency(row, size, 100)
    assert not LATENCY_ROW.search(server)


@pytest.mark.parametrize("module", MODULES)
def test_read_bw_on_several_qps(spawn: Spawn, module: str) -> None:
    server, client = run(spawn, "ib_read_bw", module, "-s", "2048", "-n", "100", "-q", "3", "-t", "8")
    (row,) = BANDWIDTH_ROW.findall(client)
    assert BANDWIDTH_ROW.findall(server) == [row]
    assert row[:2] == ("2048", "300")
    assert client.count("local address") == client.count("remote address") == 3


def test_a_timed_run_on_several_qps_counts_every_message(spawn: Spawn) -> None:
    options = ("-q", "4", "-D", "0.3", "-f", "0", "-s", "512", "-Q", "7", "-t", "16", "-r", "32")
    server, client = run(spawn, "ib_send_bw", "shiftverbs", *options)
    (sent,) = BANDWIDTH_ROW.findall(client)
    (received,) = BANDWIDTH_ROW.findall(server)
    assert int(sent[1]) > 0 and int(received[1]) > 0


def test_idle_qps_are_connected_and_stay_idle(spawn: Spawn) -> None:
    _, client = run(spawn, "ib_write_lat", "shiftverbs", "-n", "50", "--idle-qps", "20")
    assert "Idle qps        : 20" in client
    (row,) = LATENCY_ROW.findall(client)
    check_latency(row, 2, 50)


def test_a_timed_run_with_immediates_on_the_second_rail(spawn: Spawn) -> None:
    options = ("-d", "soft1", "-i", "1", "-x", "0", "-D", "0.5", "--use-imm", "-s", "2048")
    server, client = run(spawn, "ib_write_bw", "pyverbs", *options)
    (received,) = BANDWIDTH_ROW.findall(server)
    (sent,) = BANDWIDTH_ROW.findall(client)
    assert int(received[1]) > 0 and int(sent[1]) > 0


def test_a_dead_path_is_reported_as_perftest_does(spawn: Spawn) -> None:
    server, client = start(
        spawn, "ib_write_bw", "pyverbs", "-D", "60", "-f", "0.1", "-u", "8", "--retry_count", "1"
    )
    server.expect("#bytes")
    client.expect("#bytes")
    spawn("-m", "shiftverbs.softrnic", "switch-down", "rail0", host=None, softrnic=None).succeed()
    assert client.wait(30) == 1
    assert "Completion with error at client" in client.output
    assert "Failed status 12" in client.output  # RETRY_EXC_ERR
    assert server.wait(30) == 1


@pytest.mark.parametrize("victim", ["a/soft0", "b/soft0"])
def test_a_protected_run_survives_a_pulled_cable(
    spawn: Spawn, shared_etcd: EtcdServer, job: str, victim: str
) -> None:
    env: dict[str, str | None] = {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job}
    options = ("-D", "2", "--protected", "--use-imm", "-s", "8192", "-u", "10")
    server, client = start(spawn, "ib_write_bw", "shiftverbs", *options, env=env)
    client.expect("#bytes")
    spawn("-m", "shiftverbs.softrnic", "down", victim, host=None, softrnic=None).succeed()
    assert BANDWIDTH_ROW.search(server.succeed(60))
    assert BANDWIDTH_ROW.search(client.succeed(60))


def test_an_unknown_device_is_named(spawn: Spawn) -> None:
    child = spawn("benchmarks/ib_write_bw.py", "--module", "pyverbs", "-d", "mlx5_7")
    assert child.wait() == 1
    assert "mlx5_7" in child.output and "soft0, soft1" in child.output
    assert "Traceback" not in child.output
