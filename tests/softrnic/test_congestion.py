# SPDX-License-Identifier: BSD-3-Clause
"""ECN, CNPs and DCQCN: the model in virtual time against its theory, then between processes and on the wire."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import wait_until

from shiftverbs.softrnic import fabric, faults
from shiftverbs.softrnic.__main__ import main
from softrnic import test_fabric, test_raw_peer
from softrnic.cbuild import build
from softrnic.hosts import HostProcess, Proxy, connect, statuses
from softrnic.rocev2 import Packet
from softrnic.test_fabric import link
from softrnic.test_raw_peer import SEND_ONLY, RawPeer

SEED = 20150817
LINE = 40e9
HEADERS = 46 + 12 + 4
CNP, CE, ECT0 = 0x81, 3, 2

hosts_known, peer = test_fabric.hosts_known, test_raw_peer.peer


# -- in virtual time --
@dataclass
class Result:
    """What the second half of a run was like."""

    rates: dict[tuple[int, int], float]
    """By source and destination, bits per second, undilated."""
    closest_ns: int
    """The two CNPs of one flow that were closest to each other."""
    ports: dict[int, dict[str, float]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """c/dcqcn.c with the model, built with sanitizers."""
    sources = ["fabric/dcqcn.c", "fabric/params.c", "fabric/port.c"]
    return build(tmp_path_factory.mktemp("dcqcn") / "dcqcn", "dcqcn.c", sources)


def run(
    program: Path, entry: str, ms: int, flows: Sequence[tuple[int, int]], payload: int = 938, seed: int = SEED
) -> Result:
    print(f"seed {seed}")
    command = [str(program), entry, str(ms), str(seed), str(payload), *(f"{a}-{b}" for a, b in flows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = Result({}, 1 << 63, {})
    for line in done.stdout.splitlines():
        kind, *pairs = line.split()
        values = {key: float(value) for key, value in (pair.split("=") for pair in pairs)}
        if kind == "flow":
            result.rates[int(values["from"]), int(values["to"])] = values["rate"]
            result.closest_ns = min(result.closest_ns, int(values["closest_ns"]))
        else:
            result.ports[int(values.pop("at"))] = values
    return result


def fixed_point(senders: int, packet: int) -> float:
    """The queue of an N:1 incast with sigcomm15's parameters at 40 Gb/s, bytes (Zhu et al., CoNEXT 2016)."""
    line, increase = LINE / 8 / packet, 40e6 / 8 / packet  # packets per second
    by_bytes, by_time = packet / 10e6, senders / (55e-6 * line)
    marked = (increase * senders**2 / (55e-6 * line**2) * (by_bytes + by_time) ** 2) ** (1 / 3)
    return 5000 + (200_000 - 5000) * marked / 0.01


def test_steps(model: Path) -> None:
    """CNP, alpha, fast recovery, additive and hyper increase of one sender."""
    done = subprocess.run([str(model), "steps"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("senders", "payload", "steady"),
    [(2, 938, True), (2, 4096, True), (4, 938, True), (4, 4096, False), (8, 938, False), (8, 4096, False)],
)
def test_incast(model: Path, senders: int, payload: int, steady: bool) -> None:
    """Throughput, shares, and the queue; without a steady state that runs full and empty by turns."""
    entry = "rail0:rate=40G,buffer=10M,dcqcn=sigcomm15,dilation=500"
    found = run(model, entry, 1000, [(i, senders) for i in range(senders)], payload)
    share = sum(found.rates.values()) / senders
    assert share * senders >= 0.95 * LINE
    assert all(abs(rate / share - 1) <= 0.05 for rate in found.rates.values())
    queue = found.ports[senders]
    assert queue["dropped"] == 0 and queue["marked"] > 0 and found.closest_ns >= 50_000 * 500
    swings = queue["variance"] / queue["queue"] ** 2
    if steady:
        assert abs(queue["queue"] / fixed_point(senders, payload + HEADERS) - 1) <= 0.25
        assert swings < 0.75
    else:
        assert swings > 0.75 and queue["queue"] < 200_000, "of kmax"


def test_connectx(model: Path) -> None:
    found = run(model, "rail0:rate=40G,buffer=10M,dcqcn=connectx", 300, [(0, 2), (1, 2)])
    assert sum(found.rates.values()) >= 0.95 * LINE
    assert found.ports[2]["queue"] < 1_000_000 and found.closest_ns >= 4000
    assert abs(found.rates[0, 2] / found.rates[1, 2] - 1) <= 0.1


def test_dilation_changes_nothing_else(model: Path) -> None:
    """Bytes are what they were: nearly all of the propagation is the packets' own."""
    flows = [(0, 2), (1, 2)]
    fast, slow = (
        run(model, f"rail0:rate=40G,buffer=10M,dcqcn=sigcomm15,dilation={d}", 300, flows) for d in (1, 1000)
    )
    assert abs(slow.ports[2]["queue"] / fast.ports[2]["queue"] - 1) <= 0.25
    assert abs(sum(slow.rates.values()) / sum(fast.rates.values()) - 1) <= 0.02


def test_without_control(model: Path) -> None:
    """The queue is as long as the buffer, and drops."""
    found = run(model, "rail0:rate=40G,buffer=1M", 5, [(0, 2), (1, 2)])
    assert found.ports[2]["marked"] == 0 and found.ports[2]["dropped"] > 0
    assert found.ports[2]["queue"] > 900_000


def test_marking_alone(model: Path) -> None:
    """By a step at kmax == kmin: all packets that find more in the queue, and no sender cares."""
    found = run(model, "rail0:rate=40G,buffer=1M,kmin=500K,kmax=500K", 5, [(0, 2), (1, 2)])
    queue = found.ports[2]
    assert 0 < queue["marked"] < queue["packets"] and queue["dropped"] > 0


def test_sixty_four_ports(model: Path) -> None:
    """Eight incasts of four, and pairs that share nothing with them: these keep their line."""
    flows = []
    for first in range(0, 64, 8):
        flows += [(first + i, first + 4) for i in range(4)]
        flows += [(first + 5, first + 6), (first + 6, first + 7)]
    entry = "rail0:rate=40G,buffer=10M,dcqcn=sigcomm15"
    found = run(model, entry, 60, flows)
    assert found == run(model, entry, 60, flows), "the same seed, another run"
    for first in range(0, 64, 8):
        incast = [found.rates[first + i, first + 4] for i in range(4)]
        assert sum(incast) >= 0.95 * LINE and found.ports[first + 4]["marked"] > 0
        for a, b in ((first + 5, first + 6), (first + 6, first + 7)):
            assert found.rates[a, b] >= 0.999 * LINE and found.ports[b]["marked"] == 0
    assert len({found.ports[first + 4]["marked"] for first in range(0, 64, 8)}) > 1, (
        "ports mark by chances of their own"
    )


# -- between processes --
def incast(hosts: Callable[..., HostProcess], op: str) -> list[tuple[Proxy, Proxy]]:
    """Much work from a and b to c; the endpoint that posted it first."""
    target = hosts("c").open("soft0")
    pairs = []
    for host in "ab":
        sender, receiver = (
            end.endpoint(size=1 << 20, send_wr=64) for end in (hosts(host).open("soft0"), target)
        )
        connect(sender, receiver, timeout=19, mtu=4096)
        pairs.append((sender, receiver) if op == "RDMA_WRITE" else (receiver, sender))
    for poster, _ in pairs:
        poster.send_many(64, op=op, length=1 << 20, wr_id=1)
    return pairs


def cnps(name: str) -> tuple[int, int]:
    """(handled, ignored) of all senders."""
    found = link(name)
    return found.rp_cnp_handled, found.rp_cnp_ignored


@pytest.mark.parametrize("op", ["RDMA_WRITE", "RDMA_READ"])
def test_marks_lead_to_a_lower_rate(hosts: Callable[..., HostProcess], op: str) -> None:
    """The queue, which without it is as long as the windows, drains; all CNPs arrive, and are fewer than marks."""
    for host in "abc":
        faults.register(host)
    fabric.limit("rail0", LINE, buffer=10_000_000, dcqcn="sigcomm15", dilation=500)
    pairs = incast(hosts, op)
    wait_until(lambda: link("c/soft0").queue_peak > 200_000, 20)
    wait_until(lambda: link("c/soft0").np_cnp_sent >= 2, 20)
    wait_until(lambda: link("c/soft0").queue < 50_000, 20)
    for poster, _ in pairs:
        found = poster.poll(64, 0)
        assert len(found) < 64, "it still has work"
        assert all(wc["status"] == "SUCCESS" for wc in [*found, *poster.poll(2, 30)])
    port = link("c/soft0")
    assert port.marked >= port.np_ecn_marked_roce_packets > port.np_cnp_sent >= 2 and port.dropped == 0
    wait_until(lambda: sum(cnps("a/soft0") + cnps("b/soft0")) == link("c/soft0").np_cnp_sent, 20)
    assert cnps("a/soft0")[1] == cnps("b/soft0")[1] == 0


def test_data_is_right_under_control(hosts: Callable[..., HostProcess]) -> None:
    """And done in time, also where control is switched off with packets waiting for a rate."""
    for host in "abc":
        faults.register(host)
    fabric.limit("rail0", LINE, buffer=10_000_000, dcqcn="connectx", kmin=0, kmax=1, dilation=1000)
    target = hosts("c").open("soft0")
    pairs = []
    for host, seed in (("a", 1), ("b", 2)):
        pair = hosts(host).open("soft0").endpoint(size=1 << 20), target.endpoint(size=1 << 20)
        connect(*pair, timeout=19, mtu=4096)
        pair[0].pattern(seed, 1_000_000)
        pairs.append(pair)
    for left, _ in pairs:
        left.send("RDMA_WRITE", 1, 1_000_000)
    wait_until(lambda: min(cnps("a/soft0")[0], cnps("b/soft0")[0]) > 3, 20)
    fabric.limit("rail0", LINE, buffer=10_000_000, dilation=1000)
    for seed, (left, right) in enumerate(pairs, 1):
        assert statuses(left.poll(1, 30)) == [(1, "SUCCESS")]
        assert right.matches(seed, 1_000_000)


def test_unreliable_connections_are_paced_too(hosts: Callable[..., HostProcess]) -> None:
    """What they complete early waits in the NIC, in order."""
    for host in "ab":
        faults.register(host)
    fabric.limit("rail0", LINE, dcqcn="sigcomm15", kmin=0, kmax=1, dilation=1000)
    left, right = (hosts(host).open("soft0").endpoint(kind="UC", size=1 << 20) for host in "ab")
    connect(left, right, mtu=4096)
    left.pattern(3, 400_000)
    for i in range(4):
        right.recv(i, 100_000, i * 100_000)
        left.send("SEND", i, 100_000, i * 100_000)
    assert statuses(right.poll(4, 30)) == [(i, "SUCCESS") for i in range(4)]
    assert right.matches(3, 400_000) and cnps("a/soft0")[0] > 0


# -- on the wire --
@pytest.fixture
def marking(network: Path, peer: Callable[..., RawPeer]) -> Iterator[RawPeer]:
    """A raw peer that sees the TOS byte, of an endpoint whose rail has congestion control."""
    faults.register("a")
    fabric.limit("rail0", 10e9, dcqcn="sigcomm15", dilation=4000)
    made = peer()
    made.socket.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
    yield made


def receive(peer: RawPeer) -> tuple[bytes, int]:
    """A datagram's bytes and its TOS."""
    data, control, _flags, _sender = peer.socket.recvmsg(65536, 64)
    [(_level, kind, value)] = control
    assert kind == socket.IP_TOS
    return data, value[0]


def send(peer: RawPeer, tos: int, offset: int) -> None:
    peer.socket.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    peer.endpoint.recv(offset, 100)
    peer.send(SEND_ONLY, offset, payload=b"x" * 20, ack_req=True)


def test_cnp_on_the_wire(marking: RawPeer) -> None:
    """BTH with BECN, 16 bytes of 0, DSCP 48; one for all marks of 50 us (here 200 ms), none for what has none."""
    send(marking, ECT0, 0)
    assert receive(marking)[0][0] == 0x11, "an ACK alone"
    send(marking, CE, 1)
    got = {data[0]: (data, tos) for data, tos in (receive(marking), receive(marking))}
    assert set(got) == {0x11, CNP}
    data, tos = got[CNP]
    wanted = Packet(CNP, dest_qpn=test_raw_peer.QPN, becn=True, payload=bytes(16))
    assert data == wanted.datagram(marking.to, marking.address) and data[:5].hex() == "8100ffff40"
    assert tos == 48 << 2 and got[0x11][1] & 3 == 0, "neither is for ECN to mark"
    send(marking, CE, 2)
    assert receive(marking)[0][0] == 0x11
    port = link("a/soft0")
    assert (port.np_ecn_marked_roce_packets, port.np_cnp_sent) == (2, 1)


def test_what_a_sender_makes_of_cnps(marking: RawPeer) -> None:
    """Only the right ones count. Data says that it can be marked."""
    endpoint = marking.endpoint
    for becn, payload, qpn in ((False, 16, None), (True, 12, None), (True, 16, 0x123456)):
        marking.send(CNP, becn=becn, payload=bytes(payload), dest_qpn=marking.qpn if qpn is None else qpn)
    wait_until(lambda: cnps("a/soft0") == (0, 3), 5)
    endpoint.send("SEND", 1, 1000)
    for _ in range(4):
        data, tos = receive(marking)
        assert data[0] in (0, 1, 2) and tos == ECT0
    marking.send(CNP, becn=True, payload=bytes(16))
    wait_until(lambda: cnps("a/soft0") == (1, 3), 5)
    fabric.unlimit()
    marking.send(CNP, becn=True, payload=bytes(16))
    fabric.limit("rail0", 10e9)
    wait_until(lambda: cnps("a/soft0") == (1, 4), 5)


# -- who sets it --
def test_named_sets(hosts_known: None) -> None:
    fabric.limit("rail0", LINE, delay_s=2e-6, dcqcn="sigcomm15", kmax=100_000, pmax=0.05, dilation=500)
    found = link("a/soft0")
    assert (found.rate, found.delay_ns, found.buffer) == (80_000_000, 1_000_000, 1_000_000)
    assert (found.kmin, found.kmax, found.pmax) == (5000, 100_000, 0.05)
    assert found.dcqcn and found.dilation == 500
    fabric.apply("rail0:rate=100G,kmin=10K,kmax=20K")
    found = link("b/soft0")
    assert (found.kmin, found.kmax, found.pmax, found.dcqcn) == (10_000, 20_000, 1, False)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("rail0:rate=1G,dcqcn=best", "'dcqcn=best': expected sigcomm15 or connectx"),
        ("rail0:rate=1G,kmin=some", "'kmin=some': expected 0 to 1000G bytes"),
        ("rail0:rate=1G,kmax=2000G", "'kmax=2000G': expected 0 to 1000G bytes"),
        ("rail0:rate=1G,kmin=2K,kmax=1K", "expected a kmin that is not above kmax"),
        ("rail0:rate=1G,pmax=101%", "'pmax=101%': expected 0 to 100 percent"),
        ("rail0:rate=1G,dilation=0", "'dilation=0': expected 1 to 1000000"),
        ("rail0:rate=1G,dilation=0.5", "'dilation=0.5': expected 1 to 1000000"),
        ("rail0:rate=1G,dilation=1000001", "'dilation=1000001': expected 1 to 1000000"),
        ("rail0:rate=1M,dilation=1001", "expected a rate that dilation leaves 1K bits per second of"),
    ],
)
def test_wrong_entries(hosts_known: None, entries: str, told: str) -> None:
    with pytest.raises(faults.FaultError) as caught:
        fabric.apply(entries)
    assert told in str(caught.value)
    assert all(device.link is None for device in faults.status().devices)


def test_from_a_shell(hosts_known: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("fabric rail0 rate=40G dcqcn=sigcomm15 dilation=500".split()) == 0
    assert main("fabric b/soft0 rate=1G kmin=1K kmax=2K".split()) == 0
    capsys.readouterr()
    assert main(["fabric"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[4][7:] == list(faults.NIC_COUNTERS)
    assert rows[5] == ["a/soft0", "dcqcn", "5000", "200000", "1%", "500", *"00000"]
    assert rows[6] == ["b/soft0", "ecn", "1000", "2000", "100%", "1", *"00000"]
