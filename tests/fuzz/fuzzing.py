# SPDX-License-Identifier: BSD-3-Clause
"""The fuzzers: libFuzzer harnesses over our C, and one function per decoder in Python; the corpus beside them.

`python tests/fuzz/fuzzing.py SECONDS` (`make fuzz SECONDS=n`) runs all of them that long in turn. New inputs stay in
build/fuzz/, and so does one that fails; what is worth keeping is copied to tests/fuzz/corpus/<target>/.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(HERE.parent)]

from shiftverbs.exchanger import RecordError, records  # noqa: E402
from shiftverbs.protocol import codec  # noqa: E402
from shiftverbs.protocol.seal import Seals  # noqa: E402

CORPUS = HERE / "corpus"
SOURCES = ROOT / "shiftverbs" / "softrnic" / "src"
SANITIZERS = "fuzzer,address,undefined"
FLAGS = ["-D_GNU_SOURCE", "-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-fno-omit-frame-pointer"]
QP_KEY = "/shiftverbs/fuzz/qp/fe80:0000:0000:0000:0000:0000:0000:0001/17"
LID_KEY = "/shiftverbs/fuzz/qp/fe80000000000000.9/17"


@dataclass(frozen=True)
class Harness:
    """One libFuzzer program. sources: files of softrnic that it needs; None is all. max_len: bytes of an input."""

    name: str
    sources: tuple[str, ...] | None
    max_len: int


HARNESSES = (
    Harness("wire", ("wire/wire.c", "wire/icrc.c"), 600),
    Harness("config", ("faults/config.c",), 300),
    Harness("receive", None, 400),
)


def build(harness: Harness, target: Path) -> Path:
    """Build one harness with clang, libFuzzer, AddressSanitizer and UBSan; return the program.

    :raises AssertionError: clang or its runtime is missing (a set-up error), or it does not compile
    """
    clang = shutil.which("clang")
    assert clang, "no clang: `make setup` installs it"
    names = sorted(str(p) for p in SOURCES.glob("*/*.c")) if harness.sources is None else harness.sources
    command = [clang, *FLAGS, f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
    command += [str(HERE / "c" / f"fuzz_{harness.name}.c"), *(str(SOURCES / name) for name in names)]
    done = subprocess.run(
        [*command, "-o", str(target), "-lpthread", "-ldl"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return target


def run_harness(
    program: Path, harness: Harness, work: Path, *arguments: str, grow: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a harness on its corpus.

    :param work: private folder for the software RNIC's registry and for inputs that fail
    :param arguments: libFuzzer's, such as -runs=1000
    :param grow: where new inputs go; None is a folder in `work`
    """
    fresh = grow or work / f"new-{harness.name}"
    registry = work / "registry"
    fresh.mkdir(parents=True, exist_ok=True)
    registry.mkdir(parents=True, exist_ok=True)
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SOFTRNIC")},
        "SOFTRNIC": "1",
        "SOFTRNIC_HOST": "fuzz",
        "SOFTRNIC_DIR": str(registry),
    }
    command = [
        str(program),
        str(fresh),
        str(CORPUS / harness.name),
        f"-max_len={harness.max_len}",
        "-len_control=0",
    ]
    command += [f"-artifact_prefix={work}/{harness.name}-", f"-dict={HERE / 'words.dict'}", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")


# ---- decoders in Python: each takes bytes, returns whether they were accepted, and raises on a bug ------------------


def control_datagram(data: bytes) -> bool:
    """What control.decode accepts is encoded to the same bytes again; all else is MalformedDatagram.

    data: without the seal, which a fuzzer would never find; with it, it is what a peer of ours may send on purpose.
    """
    try:
        codec.decode(data, seals()[1])
    except codec.MalformedDatagram:
        pass
    else:
        raise AssertionError("taken without the peer's seal")
    theirs, ours = seals()
    try:
        entries = codec.decode(theirs.seal(data), ours)
    except codec.MalformedDatagram:
        return False
    again = b"".join(map(codec.encode_entry, entries))
    assert again == data[20:], "encoded again it is something else"
    return True


def seals() -> tuple[Seals, Seals]:
    """(a peer's, ours): always the same, and nothing was said yet."""
    return Seals(b"t" * 16, b"o" * 16), Seals(b"o" * 16, b"t" * 16)


def etcd_value(data: bytes) -> bool:
    """What decode_value accepts can be written again and says the same; all else is RecordError."""
    accepted = False
    for key in (QP_KEY, LID_KEY):
        try:
            record = records.decode_value(key, data)
        except RecordError:
            continue
        accepted = True
        assert records.decode_value(key, records.encode_value(key, record)) == record
    return accepted


def etcd_key(data: bytes) -> bool:
    """parse_key takes a key that the builders could have made, or raises RecordError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        key = records.parse_key(text)
    except RecordError:
        return False
    assert text.startswith(records.job_prefix(key.job))
    if key.gid is not None:
        assert records.qp_key(key.job, key.gid, key.qpn) == text
    return True


DECODERS: dict[str, Callable[[bytes], bool]] = {
    "control": control_datagram,
    "value": etcd_value,
    "key": etcd_key,
}


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One input made of kept ones: bits, bytes, pieces, numbers at their edges, two inputs spliced."""
    data = bytearray(rng.choice(seeds) if seeds else b"")
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(9))
            case 3:
                del data[at : at + rng.randrange(1, 30)]
            case 4:
                other = rng.choice(seeds) if seeds else b""
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case 5:
                piece = data[at : at + rng.randrange(1, 40)]
                data[at:at] = bytes(piece) * rng.choice((1, 2, 50))
            case 6:
                data[at : at + 8] = rng.choice((0, 1, 1 << 63, (1 << 64) - 1)).to_bytes(8, "big")
            case _:
                data[at : at + 1] = rng.choice(
                    (b"null", b"-1", b"1e999", b"true", b'"', b"[", b"{", b"\\u0000", b"NaN")
                )
    return bytes(data[:20_000])


def seeds_of(name: str) -> list[bytes]:
    """The kept inputs of a target, in order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def _run_decoder(name: str, seconds: float, seed: int, failures: Path) -> bool:
    rng, seeds = random.Random(seed), seeds_of(name)
    runs = accepted = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        data = mutate(rng, seeds)
        runs += 1
        try:
            accepted += DECODERS[name](data)
        except Exception as error:
            path = failures / f"{name}-crash"
            path.write_bytes(data)
            print(f"{name}: seed {seed}, run {runs}: {error!r}; the input is in {path}")
            return False
    print(f"{name}: {runs} inputs, {accepted} accepted, seed {seed}")
    return True


def main() -> int:
    """Run everything for a while; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, help="how long each target runs")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    work = ROOT / "build" / "fuzz"
    work.mkdir(parents=True, exist_ok=True)
    good = True
    for name in DECODERS:
        good &= _run_decoder(name, args.seconds, args.seed, work)
    for harness in HARNESSES:
        program = build(harness, work / f"fuzz_{harness.name}")
        done = run_harness(
            program,
            harness,
            work,
            f"-max_total_time={max(1, int(args.seconds))}",
            f"-seed={args.seed & 0x7FFFFFFF}",
            "-print_final_stats=1",
        )
        lines = done.stderr.splitlines()
        if done.returncode == 0:
            stats = [line for line in lines if "DONE" in line or "executed_units" in line]
            print(f"{harness.name}: {'; '.join(stats)}; new inputs are in {work / f'new-{harness.name}'}")
        else:
            good = False
            print(f"{harness.name}: FAILED", *lines[-60:], sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
