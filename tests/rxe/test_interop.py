# SPDX-License-Identifier: BSD-3-Clause
"""The software RNIC against the kernel's soft-RoCE, both ways, and its packets before judges that are not ours.

The software RNIC is alone in a network namespace (port 4791 there is free), on v0; the kernel's device is on v1, at the
other end of the cable.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from capture import Capture
from softrnic.hosts import HostProcess, Proxy, connect, statuses

from shiftverbs.softrnic import faults

SOFT, KERNEL = "10.9.0.1", "10.9.0.2"
SOFT_MAC, KERNEL_MAC = "02:00:00:00:09:01", "02:00:00:00:09:02"
LIMIT_S = 30
UD_SEEDS = (7, 8, 34)
# retry_cnt 7 has no end on rxe.
ATTRS = {"timeout": 15, "retry_cnt": 6, "rnr_retry": 7, "min_rnr_timer": 14}
SIZES = (0, 1, 3, 1000, 1024, 1025, 20_000)


def sh(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@dataclass
class Ends:
    """An open device on either side, and what is captured in between."""

    soft: Proxy
    kernel: Proxy
    capture: Capture

    def pair(self, direction: str, kind: str = "RC", **attrs: Any) -> tuple[Proxy, Proxy]:
        """Two connected endpoints; the first belongs to the side that sends."""
        sender, receiver = (
            (self.soft, self.kernel) if direction == "soft to kernel" else (self.kernel, self.soft)
        )
        left, right = sender.endpoint(kind=kind), receiver.endpoint(kind=kind)
        if kind == "UD":
            left.ud_ready(), right.ud_ready()
        else:
            connect(left, right, **{**ATTRS, **attrs})
        return left, right


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    directory = tmp_path_factory.mktemp("softrnic")
    directory.chmod(0o700)
    os.environ["SOFTRNIC_DIR"] = str(directory)
    for command in (
        "ip netns add soft",
        f"ip link add v0 address {SOFT_MAC} type veth peer name v1 address {KERNEL_MAC}",
        "ip link set v0 netns soft",
        "ip netns exec soft ip link set lo up",
        f"ip netns exec soft ip addr add {SOFT}/24 dev v0",
        "ip netns exec soft ip link set v0 up",
        f"ip addr add {KERNEL}/24 dev v1",
        "ip link set v1 up",
        "rdma link add rxe_v1 type rxe netdev v1",
        # Neither waits for ARP.
        f"ip neigh replace {SOFT} lladdr {SOFT_MAC} dev v1 nud permanent",
        f"ip netns exec soft ip neigh replace {KERNEL} lladdr {KERNEL_MAC} dev v0 nud permanent",
    ):
        sh(command)
    capture = Capture("v1", directory / "packets.pcap")
    soft = HostProcess(
        directory, "a", "soft0@netdev:v0", log=directory, prefix=["ip", "netns", "exec", "soft"]
    )
    kernel = HostProcess(directory, "b", "soft0@127.0.0.9", log=directory)
    try:
        yield Ends(soft.open("soft0"), kernel.open("rxe_v1"), capture)
    finally:
        soft.kill()
        kernel.kill()
        capture.stop()
        del os.environ["SOFTRNIC_DIR"]


DIRECTIONS = ["soft to kernel", "kernel to soft"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_send(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction)
    for number, size in enumerate(SIZES):
        left.pattern(number, size)
        right.recv(number, 30_000)
        imm = 1000 + number if number % 2 else None
        left.send("SEND_WITH_IMM" if imm else "SEND", number, size, imm=imm or 0)
        assert statuses(left.poll(1, LIMIT_S)) == [(number, "SUCCESS")]
        [received] = right.poll(1, LIMIT_S)
        assert (received["status"], received["byte_len"], received["imm"]) == ("SUCCESS", size, imm)
        assert right.matches(number, size)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_write_and_write_with_imm(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction)
    for number, size in enumerate(SIZES):
        left.pattern(number, size)
        left.send("RDMA_WRITE", number, size, remote_offset=64 * number)
        assert statuses(left.poll(1, LIMIT_S)) == [(number, "SUCCESS")]
        assert right.matches(number, size, 64 * number)
        right.recv(number)
        left.pattern(100 + number, size)
        left.send("RDMA_WRITE_WITH_IMM", number, size, imm=77 + number)
        assert statuses(left.poll(1, LIMIT_S)) == [(number, "SUCCESS")]
        [received] = right.poll(1, LIMIT_S)
        assert (received["status"], received["opcode"]) == ("SUCCESS", "RECV_RDMA_WITH_IMM")
        assert received["imm"] == 77 + number and right.matches(100 + number, size)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_read(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction)
    for number, size in enumerate(SIZES[1:]):
        right.pattern(number, size, 128)
        left.send("RDMA_READ", number, size, remote_offset=128)
        assert statuses(left.poll(1, LIMIT_S)) == [(number, "SUCCESS")]
        assert left.matches(number, size)
    for number in range(4):  # several under way
        left.send("RDMA_READ", number, 5000, 5000 * number, remote_offset=128)
    assert statuses(left.poll(4, LIMIT_S)) == [(number, "SUCCESS") for number in range(4)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_atomics(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction)
    right.put((41).to_bytes(8, "little").hex(), 16)
    left.send("ATOMIC_FETCH_AND_ADD", 1, 8, remote_offset=16, compare_add=1)
    assert statuses(left.poll(1, LIMIT_S)) == [(1, "SUCCESS")]
    assert left.get(8) == (41).to_bytes(8, "little").hex()
    left.send("ATOMIC_CMP_AND_SWP", 2, 8, remote_offset=16, compare_add=7, swap=9)
    left.send("ATOMIC_CMP_AND_SWP", 3, 8, 8, remote_offset=16, compare_add=42, swap=(1 << 63) + 5)
    assert statuses(left.poll(2, LIMIT_S)) == [(2, "SUCCESS"), (3, "SUCCESS")]
    assert left.get(16) == ((42).to_bytes(8, "little") * 2).hex()
    assert right.get(8, 16) == ((1 << 63) + 5).to_bytes(8, "little").hex()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_datagrams(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction, "UD")
    # The dissector guesses at what a datagram carries: these payloads' first bytes look like no protocol.
    for number, size in zip(UD_SEEDS, (1, 100, 1024), strict=True):
        left.pattern(number, size)
        right.recv(number, size + 40)
        imm = 9 if size > 1 else None
        left.send("SEND_WITH_IMM" if imm else "SEND", number, size, imm=imm or 0, to=right.info())
        assert statuses(left.poll(1, LIMIT_S)) == [(number, "SUCCESS")]
        [received] = right.poll(1, LIMIT_S)
        assert (received["status"], received["byte_len"], received["imm"]) == ("SUCCESS", size + 40, imm)
        assert received["src_qp"] == left.info()["qpn"] and right.matches(number, size, 40)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_receiver_not_ready(ends: Ends, direction: str) -> None:
    left, right = ends.pair(direction)
    left.pattern(1, 3000)
    left.send("SEND", 1, 3000)
    assert left.poll(1, 0.3) == [], "the receiver has nothing posted"
    right.recv(5, 3000)
    assert statuses(right.poll(1, LIMIT_S)) == [(5, "SUCCESS")] and right.matches(1, 3000)
    assert statuses(left.poll(1, LIMIT_S)) == [(1, "SUCCESS")]
    left, right = ends.pair(direction, rnr_retry=1, min_rnr_timer=1)
    left.send("SEND", 2, 10)
    assert statuses(left.poll(1, LIMIT_S)) == [(2, "RNR_RETRY_EXC_ERR")]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("operation", "packet", "nth"),
    [
        ("SEND", "request", 1),
        ("SEND", "request", 7),
        ("SEND", "ack", 1),
        ("RDMA_WRITE", "request", 10),
        ("RDMA_READ", "request", 1),
        ("RDMA_READ", "read_response", 5),
        ("ATOMIC_FETCH_AND_ADD", "request", 1),
        ("ATOMIC_FETCH_AND_ADD", "atomic_ack", 1),
    ],
)
def test_lost_packet(ends: Ends, direction: str, operation: str, packet: str, nth: int) -> None:
    """Dropped at the software RNIC, whichever way it goes; whoever sent it sends it again."""
    left, right = ends.pair(direction)
    size = 8 if operation.startswith("ATOMIC") else 20_000
    source, sink = (right, left) if operation == "RDMA_READ" else (left, right)
    source.pattern(3, 20_000)
    if operation == "SEND":
        right.recv(1, size)
    before = int.from_bytes(bytes.fromhex(right.get(8)), "little")
    rule = faults.drop("a/soft0", opcode=packet, nth=nth)
    try:
        left.send(operation, 1, size, compare_add=5)
        assert statuses(left.poll(1, LIMIT_S)) == [(1, "SUCCESS")]
        assert faults.rule(rule).fired == 1, "nothing was dropped"
    finally:
        faults.undrop(rule)
    if operation.startswith("ATOMIC"):
        assert int.from_bytes(bytes.fromhex(right.get(8)), "little") == (before + 5) % (1 << 64), (
            "not exactly once"
        )
    else:
        assert sink.matches(3, size)
    if operation == "SEND":
        assert statuses(right.poll(2, 1.0)) == [(1, "SUCCESS")]


def test_captured_packets(ends: Ends) -> None:
    """All of the above, as a dissector and a checksum of other people see it."""
    from scapy.all import PcapReader
    from scapy.contrib.roce import BTH
    from scapy.layers.inet import IP

    ends.capture.stop()
    path = ends.capture.path
    dissected = subprocess.run(
        ["tshark", "-n", "-r", path, "--disable-protocol", "rpcordma", "-T", "fields", "-e", "ip.src", "-e",
         "infiniband.bth.opcode", "-e", "_ws.malformed", "-e", "_ws.expert.severity", "-Y", "udp.port == 4791"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert dissected.returncode == 0, dissected.stderr
    opcodes = set()
    for number, line in enumerate(dissected.stdout.splitlines(), 1):
        source, opcode, malformed, severity = (line + "\t\t\t").split("\t")[:4]
        assert opcode and not malformed and not severity, f"packet {number}: {line!r}"
        if source == SOFT:
            opcodes.add(int(opcode))
    # SEND, WRITE, READ and atomics with their responses, in all positions, acknowledgements, UD.
    assert {0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 0x64, 0x65} <= opcodes
    checked = {SOFT: 0, KERNEL: 0}
    with PcapReader(str(path)) as packets:
        for packet in packets:
            if BTH in packet:
                bth = packet[BTH]
                assert struct.pack("!I", bth.icrc) == bth.compute_icrc(b""), packet.summary()
                checked[packet[IP].src] += 1
    print(checked)
    assert min(checked.values()) > 100
