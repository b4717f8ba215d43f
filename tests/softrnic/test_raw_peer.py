# SPDX-License-Identifier: BSD-3-Clause
"""RC against a peer made of a bare UDP socket: what is on the wire, and what malformed or hostile packets do."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from softrnic.hosts import Proxy, connect, statuses
from softrnic.rocev2 import OPCODES, UDP_PORT, Packet, icrc, parse

SEND_FIRST, SEND_MIDDLE, SEND_LAST, SEND_ONLY = 0x00, 0x01, 0x02, 0x04
WRITE_FIRST, WRITE_MIDDLE, WRITE_LAST, WRITE_ONLY = 0x06, 0x07, 0x08, 0x0A
READ_REQUEST, RESP_FIRST, RESP_LAST, RESP_ONLY, ACK = 0x0C, 0x0D, 0x0F, 0x10, 0x11
ATOMIC_ACK, CMP_SWAP, FETCH_ADD = 0x12, 0x13, 0x14
ACK_OK, NAK_SEQUENCE, NAK_INVALID, NAK_ACCESS, NAK_OPERATION = 0x1F, 0x60, 0x61, 0x62, 0x63
QPN, PSN, MTU = 0x4711, 0xFFFFFE, 256  # the peer's; its PSNs wrap at once


class RawPeer:
    """A RoCEv2 peer whose every packet is written by hand."""

    def __init__(self, endpoint: Proxy, address: str, **attributes: Any) -> None:
        self.address = (address, UDP_PORT)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(self.address)
        self.socket.settimeout(5)
        self.endpoint = endpoint
        info = endpoint.info()
        self.va, self.rkey, self.qpn = info["addr"], info["rkey"], info["qpn"]
        self.psn, self.their_psn = PSN, info["psn"]
        words = info["gid"].split(":")
        self.to = (".".join(str(int(words[6 + i // 2][i % 2 * 2 :][:2], 16)) for i in range(4)), UDP_PORT)
        mapped = "0000:0000:0000:0000:0000:ffff:" + socket.inet_aton(address).hex(":", 2)
        remote = {"gid": mapped, "qpn": QPN, "psn": PSN, "addr": 0, "rkey": 0}
        endpoint.connect(remote, **{"mtu": MTU, "timeout": 0, **attributes})

    def send(self, opcode: int, offset: int = 0, **fields: Any) -> None:
        """Send one packet with the current PSN plus offset."""
        fields.setdefault("dest_qpn", self.qpn)
        packet = Packet(opcode, psn=(self.psn + offset) % (1 << 24), **fields)
        self.send_raw(packet.datagram(self.address, self.to))

    def send_raw(self, data: bytes) -> None:
        self.socket.sendto(data, self.to)

    def receive(self) -> Packet:
        """The next packet; its ICRC must be right."""
        data, sender = self.socket.recvfrom(65536)
        assert sender[0] == self.to[0] and len(data) % 4 == 0
        assert data[-4:] == icrc(data[:-4], sender, self.address), "ICRC"
        packet = parse(data[:-4])
        assert packet.dest_qpn == QPN and packet.pkey == 0xFFFF
        return packet

    def silent(self, timeout_s: float = 0.05) -> bool:
        """Whether nothing comes."""
        self.socket.settimeout(timeout_s)
        try:
            self.receive()
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(5)
        return False

    def expect_ack(self, offset: int, msn: int, syndrome: int = ACK_OK) -> None:
        """The next packet acknowledges (or refuses) the PSN at offset."""
        packet = self.receive()
        wanted = (ACK, (self.psn + offset) % (1 << 24), syndrome, msn)
        assert (packet.opcode, packet.psn, packet.syndrome, packet.msn) == wanted

    def alive(self) -> None:
        """The endpoint still works, for the next PSN."""
        self.endpoint.recv(99, 100)
        self.send(SEND_ONLY, payload=b"alive", ack_req=True)
        packet = self.receive()
        assert (packet.opcode, packet.syndrome) == (ACK, ACK_OK)
        assert statuses(self.endpoint.poll()) == [(99, "SUCCESS")]
        self.psn = (self.psn + 1) % (1 << 24)


@pytest.fixture
def peer(hosts: Callable[..., Any]) -> Iterator[Callable[..., RawPeer]]:
    """Connect an endpoint of host a with a raw peer."""
    peers: list[RawPeer] = []

    def make(**attributes: Any) -> RawPeer:
        endpoint = hosts("a").open("soft0").endpoint()
        # An address of this test process: other runs on this machine have other process ids.
        address = f"127.{100 + len(peers)}.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF or 1}"
        peers.append(RawPeer(endpoint, address, **attributes))
        return peers[-1]

    yield make
    for made in peers:
        made.socket.close()


# -- peers that are no softrnic --
def test_any_identification(peer: Callable[..., RawPeer]) -> None:
    """The kernel's soft-RoCE numbers its packets, which the ICRC covers and a UDP socket does not show."""
    p = peer()
    for offset, ip_id in enumerate([0, 1, 0x8000, 0xFFFF, 0x1234]):
        p.endpoint.recv(offset, 100)
        body = Packet(
            SEND_ONLY, dest_qpn=p.qpn, psn=(PSN + offset) % (1 << 24), payload=b"x" * 20, ack_req=True
        )
        data = body.datagram(p.address, p.to)[:-4]
        p.send_raw(data + icrc(data, p.address, p.to, ip_id=ip_id))
        p.expect_ack(offset, offset + 1)
        assert statuses(p.endpoint.poll()) == [(offset, "SUCCESS")]


# -- what a requester sends --
def test_requests_on_the_wire(peer: Callable[..., RawPeer]) -> None:
    p = peer()
    p.endpoint.pattern(1, 600)
    p.endpoint.send("SEND", 1, 600, flags="signaled solicited")
    packets = [p.receive() for _ in range(3)]
    assert [x.opcode for x in packets] == [SEND_FIRST, SEND_MIDDLE, SEND_LAST]
    assert [(x.psn - p.their_psn) % (1 << 24) for x in packets] == [0, 1, 2]
    assert [len(x.payload) for x in packets] == [256, 256, 88] and packets[2].ack_req
    assert [x.solicited for x in packets] == [False, False, True]
    assert b"".join(x.payload for x in packets).hex() == p.endpoint.get(600)
    p.endpoint.send("RDMA_WRITE_WITH_IMM", 2, 5, remote_addr=0x123456789ABCDEF0, rkey=0xCAFE, imm=0x01020304)
    x = p.receive()
    assert (x.opcode, x.va, x.rkey, x.length, len(x.payload)) == (0x0B, 0x123456789ABCDEF0, 0xCAFE, 5, 5)
    p.endpoint.send("ATOMIC_CMP_AND_SWP", 3, 8, remote_addr=64, rkey=7, compare_add=11, swap=22)
    x = p.receive()
    assert (x.opcode, x.va, x.rkey, x.compare, x.swap_add) == (CMP_SWAP, 64, 7, 11, 22)
    p.endpoint.send("RDMA_READ", 4, 700, remote_addr=128, rkey=8)
    x = p.receive()
    assert (x.opcode, x.va, x.rkey, x.length) == (READ_REQUEST, 128, 8, 700)
    # READ takes one PSN per response packet.
    p.endpoint.send("SEND", 5, 0)
    assert (p.receive().psn - x.psn) % (1 << 24) == 3


def test_one_acknowledgement_for_many(peer: Callable[..., RawPeer]) -> None:
    p = peer()
    p.endpoint.send_many(5, op="SEND", length=4)
    for _ in range(5):
        p.receive()
    # Acknowledges nothing that was sent: out of the window on either side.
    for stray in (p.their_psn - 1, p.their_psn + 5, p.their_psn + 5000):
        answer = Packet(ACK, dest_qpn=p.qpn, psn=stray % (1 << 24), syndrome=ACK_OK, msn=5)
        p.send_raw(answer.datagram(p.address, p.to))
    assert p.endpoint.poll(1, 0.05) == []
    for offset, done in ((2, [1, 2, 3]), (2, []), (4, [4, 5])):
        answer = Packet(
            ACK, dest_qpn=p.qpn, psn=(p.their_psn + offset) % (1 << 24), syndrome=ACK_OK, msn=offset + 1
        )
        p.send_raw(answer.datagram(p.address, p.to))
        assert statuses(p.endpoint.poll(len(done) or 1, 5 if done else 0.05)) == [
            (i, "SUCCESS") for i in done
        ]


@pytest.mark.parametrize(
    ("syndrome", "status"),
    [(NAK_INVALID, "REM_INV_REQ_ERR"), (NAK_ACCESS, "REM_ACCESS_ERR"), (NAK_OPERATION, "REM_OP_ERR")],
)
def test_refusals(peer: Callable[..., RawPeer], syndrome: int, status: str) -> None:
    p = peer()
    for wr_id in (1, 2, 3):
        p.endpoint.send("SEND", wr_id, 4)
        p.receive()
    answer = Packet(ACK, dest_qpn=p.qpn, psn=(p.their_psn + 1) % (1 << 24), syndrome=syndrome, msn=1)
    p.send_raw(answer.datagram(p.address, p.to))
    assert statuses(p.endpoint.poll(3)) == [(1, "SUCCESS"), (2, status), (3, "WR_FLUSH_ERR")]


def test_sequence_nak_and_rnr_nak_repeat(peer: Callable[..., RawPeer]) -> None:
    p = peer(rnr_retry=7)
    for wr_id in range(4):
        p.endpoint.send("SEND", wr_id, 4)
    first = [p.receive() for _ in range(4)]
    for syndrome in (NAK_SEQUENCE, 0x20 | 5):
        answer = Packet(ACK, dest_qpn=p.qpn, psn=first[2].psn, syndrome=syndrome, msn=2)
        p.send_raw(answer.datagram(p.address, p.to))
        assert [p.receive().psn for _ in range(2)] == [first[2].psn, first[3].psn]
    done = Packet(ACK, dest_qpn=p.qpn, psn=first[3].psn, syndrome=ACK_OK, msn=4)
    p.send_raw(done.datagram(p.address, p.to))
    assert len(p.endpoint.poll(4)) == 4


def test_read_response_that_does_not_fit(peer: Callable[..., RawPeer]) -> None:
    """More, less or other data than was asked for: nothing is written outside the buffer."""
    wrong = ((RESP_ONLY, bytes(256)), (RESP_ONLY, b""), (RESP_FIRST, bytes(256)), (RESP_LAST, b"9 bytes!!"))
    for opcode, payload in wrong:
        p = peer()
        p.endpoint.pattern(1, 4096)
        p.endpoint.send("RDMA_READ", 1, 8, 1000, remote_addr=0, rkey=0)
        asked = p.receive()
        answer = Packet(opcode, dest_qpn=p.qpn, psn=asked.psn, syndrome=ACK_OK, msn=1, payload=payload)
        p.endpoint.recv(2, 0)
        p.send_raw(answer.datagram(p.address, p.to))
        p.send(SEND_ONLY)  # looked at after the answer: whichever completion comes first, that was judged
        first = p.endpoint.poll()[0]
        assert p.endpoint.matches(1, 4096)
        if first["wr_id"] == 1:
            assert first["status"] in ("BAD_RESP_ERR", "LOC_LEN_ERR")
        else:
            good = Packet(
                RESP_ONLY, dest_qpn=p.qpn, psn=asked.psn, syndrome=ACK_OK, msn=1, payload=b"8 bytes!"
            )
            p.send_raw(good.datagram(p.address, p.to))
            assert statuses(p.endpoint.poll()) == [(1, "SUCCESS")]


# -- what a responder answers --
def test_acknowledgements_on_the_wire(peer: Callable[..., RawPeer]) -> None:
    p = peer()
    for wr_id in range(4):
        p.endpoint.recv(wr_id, 1000)
    p.send(SEND_ONLY, payload=b"one", ack_req=True)
    p.expect_ack(0, 1)
    p.send(SEND_FIRST, 1, payload=bytes(MTU))
    p.send(SEND_LAST, 2, payload=b"two", ack_req=True)
    p.expect_ack(2, 2)
    p.send(WRITE_ONLY, 3, va=p.va, rkey=p.rkey, length=5, payload=b"three", ack_req=True)
    p.expect_ack(3, 3)
    assert bytes.fromhex(p.endpoint.get(5)) == b"three"
    done = p.endpoint.poll(3, 0.1)
    assert [(wc["wr_id"], wc["byte_len"]) for wc in done] == [(0, 3), (1, MTU + 3)]


def test_duplicates(peer: Callable[..., RawPeer]) -> None:
    """Acknowledged again and not executed again; READ and atomic answered again with what they had."""
    p = peer()
    p.endpoint.recv_many(1, 100)
    for _ in range(3):
        p.send(SEND_ONLY, payload=b"one", ack_req=True)
        p.expect_ack(0, 1)
    assert len(p.endpoint.poll(2, 0.05)) == 1, "and no RNR NAK for the others"
    p.endpoint.put((5).to_bytes(8, "little").hex())
    for _ in range(3):
        p.send(FETCH_ADD, 1, va=p.va, rkey=p.rkey, swap_add=10)
        answer = p.receive()
        assert (answer.opcode, answer.atomic_ack, answer.msn) == (ATOMIC_ACK, 5, 2)
    assert p.endpoint.get(8) == (15).to_bytes(8, "little").hex()
    p.endpoint.pattern(7, 600, 4096)
    for start, size in ((0, 600), (0, 600), (256, 344), (512, 88)):
        p.send(READ_REQUEST, 2 + start // MTU, va=p.va + 4096 + start, rkey=p.rkey, length=size)
        data = b""
        while len(data) < size:
            answer = p.receive()
            assert (answer.psn - p.psn) % (1 << 24) == 2 + (start + len(data)) // MTU
            data += answer.payload
        assert data.hex() == p.endpoint.get(size, 4096 + start)
    p.psn = (p.psn + 5) % (1 << 24)
    p.alive()


def test_gap_is_told_once(peer: Callable[..., RawPeer]) -> None:
    p = peer()
    p.endpoint.recv_many(5, 100)
    for offset in (2, 3, 4):
        p.send(SEND_ONLY, offset, payload=b"too early", ack_req=True)
    p.expect_ack(0, 0, NAK_SEQUENCE)
    assert p.silent(), "one NAK per gap"
    for offset in range(3):
        p.send(SEND_ONLY, offset, payload=b"in order", ack_req=offset == 2)
    p.expect_ack(2, 3)
    assert len(p.endpoint.poll(4, 0.05)) == 3


def test_rnr_nak_on_the_wire(peer: Callable[..., RawPeer]) -> None:
    p = peer(min_rnr_timer=17)
    p.send(SEND_ONLY, payload=b"nobody home", ack_req=True)
    p.expect_ack(0, 0, 0x20 | 17)
    p.alive()


@pytest.mark.parametrize(
    ("why", "packets", "syndrome"),
    [
        ("last without first", [(SEND_LAST, {"payload": b"x"})], NAK_INVALID),
        ("middle without first", [(WRITE_MIDDLE, {"payload": bytes(MTU)})], NAK_INVALID),
        ("first twice", [(SEND_FIRST, {"payload": bytes(MTU)}), (SEND_FIRST, {"payload": bytes(MTU)})], NAK_INVALID),
        ("write in send", [(SEND_FIRST, {"payload": bytes(MTU)}), (WRITE_LAST, {"payload": b"x"})], NAK_INVALID),
        ("short first", [(SEND_FIRST, {"payload": bytes(MTU - 4)})], NAK_INVALID),
        ("over the MTU", [(SEND_ONLY, {"payload": bytes(MTU + 4)})], NAK_INVALID),
        ("empty last", [(SEND_FIRST, {"payload": bytes(MTU)}), (SEND_LAST, {"payload": b""})], NAK_INVALID),
        ("write longer than said", [(WRITE_ONLY, {"length": 4, "payload": b"12345678"})], NAK_INVALID),
        ("write shorter than said", [(WRITE_ONLY, {"length": 12, "payload": b"12345678"})], NAK_INVALID),
        ("write goes on too long", [
            (WRITE_FIRST, {"length": MTU + 4, "payload": bytes(MTU)}), (WRITE_MIDDLE, {"payload": bytes(MTU)}),
        ], NAK_INVALID),
        ("absurd length", [(WRITE_FIRST, {"length": 0xFFFFFFFF, "payload": bytes(MTU)})], None),
        ("absurd read", [(READ_REQUEST, {"length": 0xFFFFFFFF})], None),
        ("odd atomic", [(FETCH_ADD, {})], NAK_INVALID),
        ("wrong key", [(WRITE_ONLY, {"rkey": 1, "length": 4, "payload": b"1234"})], NAK_ACCESS),
        ("wrong address", [(WRITE_ONLY, {"va": 1 << 60, "length": 4, "payload": b"1234"})], NAK_ACCESS),
        ("range wraps around", [(READ_REQUEST, {"va": (1 << 64) - 8, "length": 64})], NAK_ACCESS),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(
    peer: Callable[..., RawPeer], why: str, packets: list[tuple[int, dict[str, Any]]], syndrome: int | None
) -> None:
    p = peer()
    p.endpoint.pattern(1, 1 << 16)
    p.endpoint.recv(1, 1000, 60_000)
    for offset, (opcode, fields) in enumerate(packets):
        if {"reth", "atomic"} & set(OPCODES[opcode][1]):
            fields = {"rkey": p.rkey, "va": p.va, **fields}
            if opcode == FETCH_ADD:
                fields["va"] = p.va + 4
        p.send(opcode, offset, **fields, ack_req=offset == len(packets) - 1)
    answer = p.receive()
    assert answer.opcode == ACK and answer.psn == (p.psn + len(packets) - 1) % (1 << 24), why
    assert answer.syndrome in ((syndrome,) if syndrome else (NAK_INVALID, NAK_ACCESS))
    assert p.endpoint.matches(1, 60_000 - MTU - 4, MTU + 4, MTU + 4), "only the announced range was written"


def test_strangers_and_garbage_change_nothing(peer: Callable[..., RawPeer]) -> None:
    p = peer()
    p.endpoint.recv_many(2, 100)
    good = Packet(SEND_ONLY, dest_qpn=p.qpn, psn=p.psn, payload=b"real", ack_req=True)
    data = good.datagram(p.address, p.to)
    for bad in (b"", b"x", data[:11], data[:15], data[:-1], data[:-4], data + b"1234", bytes(5000)):
        p.send_raw(bad)
    for position in (0, 1, 6, 10, 13, len(data) - 1):
        p.send_raw(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    # Right in every bit, but from another address, for another queue pair, another partition.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.sendto(good.datagram(stranger.getsockname(), p.to), p.to)
    p.send(SEND_ONLY, payload=b"real", dest_qpn=p.qpn ^ 1, ack_req=True)
    p.send(SEND_ONLY, payload=b"real", pkey=0x1234, ack_req=True)
    p.send(0x24, payload=b"of UC", ack_req=True)
    p.send(0x64, payload=b"of UD", qkey=1, src_qpn=3)
    assert p.silent() and p.endpoint.poll(1, 0.02) == [] and p.endpoint.state() == "RTS"
    p.send_raw(data)
    p.expect_ack(0, 1)
    [done] = p.endpoint.poll()
    assert done["byte_len"] == 4 and bytes.fromhex(p.endpoint.get(4)) == b"real"


def test_random_packets(peer: Callable[..., RawPeer]) -> None:
    """Well-formed packets of every opcode with random contents, while the endpoint has work of its own."""
    seed = 99
    print(f"seed {seed}")
    rng = random.Random(seed)
    p = peer(rnr_retry=7)
    device = Proxy(p.endpoint._host, "device1")
    for life in range(6):
        p.endpoint.pattern(2, 1000, 60_000)
        for wr_id in range(4):
            p.endpoint.recv(wr_id, 500, wr_id * 500)
            p.endpoint.send("RDMA_READ", wr_id, 300, 10_000, remote_addr=0, rkey=0)
            p.endpoint.send("ATOMIC_FETCH_AND_ADD", wr_id, 8, 20_000, remote_addr=0, rkey=0)
            p.endpoint.send("SEND", wr_id, 600)
        for _ in range(400):
            opcode = rng.choice(list(OPCODES))
            base = rng.choice([PSN, p.their_psn])
            packet = Packet(
                opcode,
                dest_qpn=p.qpn,
                psn=(base + rng.choice([-1, 0, 0, 0, 1, 2, 3, 7, 1000])) % (1 << 24),
                payload=rng.randbytes(rng.choice([0, 1, 4, 88, MTU, MTU + 1, 4096]))
                if OPCODES[opcode][2]
                else b"",
                ack_req=rng.random() < 0.5,
                va=rng.choice([p.va, p.va + 65_000, 0, rng.getrandbits(64)]),
                rkey=rng.choice([p.rkey, p.rkey, rng.getrandbits(32)]),
                length=rng.choice([0, 8, 300, 1000, 1 << 31, rng.getrandbits(32)]),
                syndrome=rng.choice([ACK_OK, 0, NAK_SEQUENCE, NAK_INVALID, 0x21, 0x7F, rng.getrandbits(8)]),
                msn=rng.choice([0, 1, 2, rng.getrandbits(24)]),
            )
            p.send_raw(packet.datagram(p.address, p.to))
        p.endpoint.poll(100, 0.02)
        assert p.endpoint.state() in ("RTS", "ERR"), life
        p.endpoint.modify("RESET")
        p.endpoint.connect(
            {"gid": device.gid(), "qpn": p.qpn, "psn": p.their_psn, "addr": p.va, "rkey": p.rkey}
        )
        # Connected with itself now: everything still works.
        p.endpoint.poll(100, 0.02)
        p.endpoint.recv(7, 100)
        p.endpoint.send("SEND", 8, 50)
        assert sorted(statuses(p.endpoint.poll(2))) == [(7, "SUCCESS"), (8, "SUCCESS")]
        p.endpoint.modify("RESET")
        peer_gid = "0000:0000:0000:0000:0000:ffff:" + socket.inet_aton(p.address[0]).hex(":", 2)
        remote = {"gid": peer_gid, "qpn": QPN, "psn": PSN, "addr": 0, "rkey": 0}
        p.endpoint.connect(remote, mtu=MTU, timeout=10, retry_cnt=7, rnr_retry=7)
    one, two = device.endpoint(), device.endpoint()
    connect(one, two)
    one.send("RDMA_WRITE", 1, 5000)
    assert statuses(one.poll()) == [(1, "SUCCESS")]
