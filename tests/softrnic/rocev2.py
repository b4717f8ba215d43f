# SPDX-License-Identifier: BSD-3-Clause
"""An independent RoCEv2 encoder: what the wire code is checked against, and a source of malformed packets.

Written from the InfiniBand specification's tables with struct and zlib alone; shares nothing with the C code.
"""

from __future__ import annotations

import socket
import struct
import zlib
from dataclasses import dataclass

UDP_PORT = 4791

# opcode: (name, headers after BTH, may carry payload)
OPCODES: dict[int, tuple[str, tuple[str, ...], bool]] = {
    0x00: ("RC_SEND_FIRST", (), True),
    0x01: ("RC_SEND_MIDDLE", (), True),
    0x02: ("RC_SEND_LAST", (), True),
    0x03: ("RC_SEND_LAST_IMM", ("imm",), True),
    0x04: ("RC_SEND_ONLY", (), True),
    0x05: ("RC_SEND_ONLY_IMM", ("imm",), True),
    0x06: ("RC_WRITE_FIRST", ("reth",), True),
    0x07: ("RC_WRITE_MIDDLE", (), True),
    0x08: ("RC_WRITE_LAST", (), True),
    0x09: ("RC_WRITE_LAST_IMM", ("imm",), True),
    0x0A: ("RC_WRITE_ONLY", ("reth",), True),
    0x0B: ("RC_WRITE_ONLY_IMM", ("reth", "imm"), True),
    0x0C: ("RC_READ_REQUEST", ("reth",), False),
    0x0D: ("RC_READ_RESP_FIRST", ("aeth",), True),
    0x0E: ("RC_READ_RESP_MIDDLE", (), True),
    0x0F: ("RC_READ_RESP_LAST", ("aeth",), True),
    0x10: ("RC_READ_RESP_ONLY", ("aeth",), True),
    0x11: ("RC_ACK", ("aeth",), False),
    0x12: ("RC_ATOMIC_ACK", ("aeth", "atomicack"), False),
    0x13: ("RC_CMP_SWAP", ("atomic",), False),
    0x14: ("RC_FETCH_ADD", ("atomic",), False),
    0x16: ("RC_SEND_LAST_INV", ("imm",), True),
    0x17: ("RC_SEND_ONLY_INV", ("imm",), True),
    0x20: ("UC_SEND_FIRST", (), True),
    0x24: ("UC_SEND_ONLY", (), True),
    0x25: ("UC_SEND_ONLY_IMM", ("imm",), True),
    0x2A: ("UC_WRITE_ONLY", ("reth",), True),
    0x64: ("UD_SEND_ONLY", ("deth",), True),
    0x65: ("UD_SEND_ONLY_IMM", ("deth", "imm"), True),
    0x81: ("CNP", (), True),
}


@dataclass
class Packet:
    """One packet; which extension headers count is told by the opcode."""

    opcode: int
    dest_qpn: int = 0
    psn: int = 0
    payload: bytes = b""
    pkey: int = 0xFFFF
    solicited: bool = False
    migreq: bool = False
    fecn: bool = False
    becn: bool = False
    reserved: int = 0
    ack_req: bool = False
    va: int = 0
    rkey: int = 0
    length: int = 0
    syndrome: int = 0
    msn: int = 0
    swap_add: int = 0
    compare: int = 0
    atomic_ack: int = 0
    imm: int = 0
    qkey: int = 0
    src_qpn: int = 0

    def headers(self) -> bytes:
        """BTH and what follows it, without payload."""
        out = struct.pack(
            "!BBHII",
            self.opcode,
            self.solicited << 7 | self.migreq << 6 | (-len(self.payload) % 4) << 4,
            self.pkey,
            (self.fecn << 7 | self.becn << 6 | self.reserved) << 24 | self.dest_qpn,
            self.ack_req << 31 | self.psn,
        )
        for header in OPCODES[self.opcode][1]:
            out += {
                "deth": lambda: struct.pack("!II", self.qkey, self.src_qpn),
                "reth": lambda: struct.pack("!QII", self.va, self.rkey, self.length),
                "atomic": lambda: struct.pack("!QIQQ", self.va, self.rkey, self.swap_add, self.compare),
                "aeth": lambda: struct.pack("!I", self.syndrome << 24 | self.msn),
                "atomicack": lambda: struct.pack("!Q", self.atomic_ack),
                "imm": lambda: struct.pack("!I", self.imm),
            }[header]()
        return out

    def datagram(self, src: tuple[str, int], dst: tuple[str, int]) -> bytes:
        """The whole UDP payload, padded, with ICRC, for a sender that uses identification 0 and DF."""
        body = self.headers() + self.payload + bytes(-len(self.payload) % 4)
        return body + icrc(body, src, dst)


def icrc(
    body: bytes, src: tuple[str, int], dst: tuple[str, int], ip_id: int = 0, frag: int = 0x4000
) -> bytes:
    """The four ICRC bytes for a UDP payload without them (IBA annex A17.3.3)."""
    udp_len = 8 + len(body) + 4
    ip = struct.pack("!BBHHHBBH", 0x45, 0xFF, 20 + udp_len, ip_id, frag, 0xFF, 17, 0xFFFF)
    ip += socket.inet_aton(src[0]) + socket.inet_aton(dst[0])
    udp = struct.pack("!HHHH", src[1], dst[1], udp_len, 0xFFFF)
    masked = body[:4] + b"\xff" + body[5:]
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + ip + udp + masked))


def parse(body: bytes) -> Packet:
    """Take a UDP payload without ICRC apart.

    :raises KeyError: an opcode that is not in OPCODES
    """
    opcode, bits, pkey, word, last = struct.unpack_from("!BBHII", body)
    packet = Packet(opcode, dest_qpn=word & 0xFFFFFF, psn=last & 0xFFFFFF, pkey=pkey)
    packet.solicited, packet.migreq = bool(bits & 0x80), bool(bits & 0x40)
    packet.fecn, packet.becn, packet.ack_req = bool(word >> 31), bool(word >> 30 & 1), bool(last >> 31)
    packet.reserved = word >> 24 & 0x3F
    offset = 12
    for header in OPCODES[opcode][1]:
        form = {
            "deth": "!II",
            "reth": "!QII",
            "atomic": "!QIQQ",
            "aeth": "!I",
            "atomicack": "!Q",
            "imm": "!I",
        }[header]
        values = struct.unpack_from(form, body, offset)
        offset += struct.calcsize(form)
        if header == "deth":
            packet.qkey, packet.src_qpn = values
        elif header == "reth":
            packet.va, packet.rkey, packet.length = values
        elif header == "atomic":
            packet.va, packet.rkey, packet.swap_add, packet.compare = values
        elif header == "aeth":
            packet.syndrome, packet.msn = values[0] >> 24, values[0] & 0xFFFFFF
        elif header == "atomicack":
            (packet.atomic_ack,) = values
        else:
            (packet.imm,) = values
    packet.payload = body[offset : len(body) - (bits >> 4 & 3)]
    return packet
