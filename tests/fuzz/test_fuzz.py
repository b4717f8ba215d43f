# SPDX-License-Identifier: BSD-3-Clause
"""Input from outside: every kept input again, and a short search for new ones (`make fuzz` searches longer)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import fuzzing
from shiftverbs.protocol import codec
from shiftverbs.protocol.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync
from shiftverbs.protocol.seal import TAG_BYTES

SEED = 20250711
RUNS = {"wire": 60_000, "config": 40_000, "receive": 2_000}
ACCEPTED_AT_LEAST = {"control": 2, "value": 2, "key": 2}


@pytest.mark.parametrize("harness", fuzzing.HARNESSES, ids=lambda harness: harness.name)
def test_libfuzzer(harness: fuzzing.Harness, tmp_path: Path) -> None:
    """The corpus and some thousand inputs more, under AddressSanitizer and UBSan."""
    kept = list((fuzzing.CORPUS / harness.name).iterdir())
    assert kept, "the corpus is missing"
    program = fuzzing.build(harness, tmp_path / harness.name)
    done = fuzzing.run_harness(
        program, harness, tmp_path, f"-runs={RUNS[harness.name]}", "-max_total_time=8", f"-seed={SEED}"
    )
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-80:])
    assert f"{len(kept)} files found in {fuzzing.CORPUS / harness.name}" in done.stderr
    print(f"{harness.name}, seed {SEED}:", [line for line in done.stderr.splitlines() if "DONE" in line])


@pytest.mark.parametrize("name", fuzzing.DECODERS)
def test_kept_inputs(name: str) -> None:
    accepted = sum(map(fuzzing.DECODERS[name], fuzzing.seeds_of(name)))
    assert accepted >= ACCEPTED_AT_LEAST[name], "nearly nothing of the corpus is accepted: it is out of date"


@pytest.mark.parametrize("name", fuzzing.DECODERS)
def test_mutated_inputs(name: str) -> None:
    rng, seeds = random.Random(SEED), fuzzing.seeds_of(name)
    accepted = 0
    for run in range(15_000):
        data = fuzzing.mutate(rng, seeds)
        try:
            accepted += fuzzing.DECODERS[name](data)
        except Exception as error:
            raise AssertionError(f"seed {SEED}, run {run}: {error!r}: {data!r}") from error
    print(f"{name}, seed {SEED}: {accepted} of 15000 accepted")
    assert accepted > 50, "mutations that are all refused at once look at nothing"


u8, u64 = st.integers(0, 255), st.integers(0, (1 << 64) - 1)
u24 = st.integers(0, (1 << 24) - 1)
addresses = st.builds(
    PairAddress, st.binary(min_size=16, max_size=16), st.integers(0, 0xFFFF), u24, u24, st.integers(1, 5)
)
phases = st.sampled_from(Phase)
seen = st.just(-1) | phases.map(int)
syncs = st.builds(
    Sync,
    u64,
    u8,
    phases,
    u64,
    st.booleans(),
    addresses,
    u64,
    u64,
    seen,
    st.integers(-1, 1 << 40),
    st.booleans(),
)
arms = st.builds(Arm, st.sampled_from(ArmStep), u64, u8, u64, addresses, u64)
moves = st.builds(Move, st.sampled_from(MoveStep), u64, u64, u8, u64, u64)
prefers = st.builds(Prefer, u64, u8, st.booleans())
pings = st.builds(codec.Ping, u64, st.booleans())
entries = st.builds(codec.Entry, u64, u64, syncs | arms | moves | prefers | pings)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.lists(entries, max_size=12), st.integers(0, 1 << 20), u8)
def test_datagrams_damaged_in_one_byte(messages: list[codec.Entry], at: int, value: int) -> None:
    """What was said comes out as it went in; with one byte changed it is something else that is valid, or refused."""
    theirs, ours = fuzzing.seals()
    out = []
    for sealed in codec.encode(messages, theirs):
        out += codec.decode(sealed, ours)
        assert len(sealed) <= codec.MAX_DATAGRAM_BYTES
        datagram = sealed[:-TAG_BYTES]
        assert fuzzing.control_datagram(datagram)
        damaged = bytearray(datagram)
        damaged[at % len(damaged)] = value
        fuzzing.control_datagram(bytes(damaged))
        assert not fuzzing.control_datagram(datagram[: at % len(datagram)])
    assert out == messages
