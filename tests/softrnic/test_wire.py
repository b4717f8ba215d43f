# SPDX-License-Identifier: BSD-3-Clause
"""The wire format, in C under the sanitizers: known answers, malformed packets, an independent encoder."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from softrnic.cbuild import build
from softrnic.rocev2 import OPCODES, UDP_PORT, Packet

SEED = 20250701


@pytest.fixture(scope="session")
def wire_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C unit tests, built with sanitizers."""
    return build(tmp_path_factory.mktemp("wire") / "test_wire", "test_wire.c", ["wire/wire.c", "wire/icrc.c"])


def run(program: Path, *args: str, stdin: str = "") -> str:
    done = subprocess.run([str(program), *args], input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_c_unit_tests(wire_program: Path) -> None:
    output = run(wire_program, str(SEED))
    assert f"seed={SEED}" in output and "failures=0" in output
    assert int(output.split("checks=")[1].split()[0]) > 10_000


def random_packet(rng: random.Random, opcode: int) -> Packet:
    """A packet of this opcode with random fields; edge values are likely."""

    def field(bits: int) -> int:
        return rng.choice([0, 1, (1 << bits) - 1, rng.getrandbits(bits), rng.getrandbits(bits)])

    size = rng.choice([0, 1, 2, 3, 4, 63, 64, 65, 255, 256, 1024, 4095, 4096]) if OPCODES[opcode][2] else 0
    return Packet(
        opcode,
        dest_qpn=field(24),
        psn=field(24),
        payload=rng.randbytes(size),
        pkey=field(16),
        solicited=bool(field(1)),
        migreq=bool(field(1)),
        fecn=bool(field(1)),
        becn=bool(field(1)),
        reserved=field(6),
        ack_req=bool(field(1)),
        va=field(64),
        rkey=field(32),
        length=field(32),
        syndrome=field(8),
        msn=field(24),
        swap_add=field(64),
        compare=field(64),
        atomic_ack=field(64),
        imm=field(32),
        qkey=field(32),
        src_qpn=field(24),
    )


def test_against_independent_encoder(wire_program: Path) -> None:
    """Every opcode, random fields: packed to the same bytes, parsed to the same fields."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    lines = []
    for opcode in OPCODES:
        for _ in range(15):
            packet = random_packet(rng, opcode)
            src = (
                f"127.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)}",
                rng.randrange(1, 65536),
            )
            dst = (f"10.1.2.{rng.randrange(256)}", UDP_PORT)
            flags = (
                packet.solicited
                | packet.migreq << 1
                | packet.fecn << 2
                | packet.becn << 3
                | packet.ack_req << 4
                | packet.reserved << 5
            )
            numbers = [
                opcode, flags, packet.dest_qpn, packet.psn, packet.pkey, packet.va, packet.rkey, packet.length,
                packet.syndrome, packet.msn, packet.swap_add, packet.compare, packet.atomic_ack, packet.imm,
                packet.qkey, packet.src_qpn,
            ]  # fmt: skip
            fields = [src[0], str(src[1]), dst[0], str(dst[1]), *(f"{number:x}" for number in numbers)]
            lines.append(" ".join([*fields, packet.payload.hex() or "-", packet.datagram(src, dst).hex()]))
    output = run(wire_program, "vectors", stdin="\n".join(lines) + "\n")
    assert f"vectors={len(lines)}" in output and "failures=0" in output


def test_icrc_of_captured_packet() -> None:
    """The independent encoder itself, on a congestion notification captured on a ConnectX-4 Lx."""
    from softrnic.rocev2 import icrc

    body = bytes.fromhex("8100ffff4000011800000000") + bytes(16)
    assert icrc(body, ("10.0.17.1", 0), ("10.0.18.1", UDP_PORT), ip_id=0x718C).hex() == "82fd002a"
