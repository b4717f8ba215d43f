# SPDX-License-Identifier: BSD-3-Clause
"""The demo's generator and checker: every mutation of a correct stream must be found."""

import random

import pytest

from shiftverbs.commands.demo.pattern import HEADER, Ledger, Pattern

SIZE = 4096


@pytest.fixture(scope="module")
def pattern():
    return Pattern(seed=1, stream=10, size=SIZE)


def test_two_processes_make_the_same_contents(pattern):
    again = Pattern(seed=1, stream=10, size=SIZE)
    assert all(again.message(n) == pattern.message(n) for n in (0, 1, 17, 10**6, 2**40))


def test_contents_differ_by_seed_stream_and_number(pattern):
    base = pattern.message(5)
    for other in (Pattern(2, 10, SIZE).message(5), Pattern(1, 11, SIZE).message(5), pattern.message(6)):
        same = sum(x == y for x, y in zip(base[HEADER.size :], other[HEADER.size :], strict=True))
        assert same < SIZE * 0.02, "contents must differ in nearly every byte"


@pytest.mark.parametrize("distance", [1, 8, 16, 32, 61, 64])
def test_a_stale_piece_of_any_neighbour_in_the_slot_is_seen(pattern, distance):
    """A segment of 1 KiB that was not overwritten, wherever it is."""
    for start in range(0, SIZE, 1024):
        stale, fresh = pattern.message(100 - distance), pattern.message(100)
        mixed = fresh[:start] + stale[start : start + 1024] + fresh[start + 1024 :]
        assert pattern.verify(100, mixed) is not None


def test_every_single_flipped_bit_is_seen(pattern):
    good = pattern.message(7)
    rng = random.Random(3)
    for at in [0, 15, 16, SIZE - 1, *rng.sample(range(SIZE), 50)]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        fault = pattern.verify(7, bytes(bad))
        assert fault is not None and f"from {at} to {at}" in fault
    assert pattern.verify(7, good) is None


def test_the_fault_names_what_is_there_instead(pattern):
    assert "its header says stream 10, 4096 bytes, message 6" in pattern.verify(7, pattern.message(6))
    assert "4095 bytes instead of 4096" in pattern.verify(7, pattern.message(7)[:-1])


def test_claimed_number(pattern):
    assert pattern.claimed_number(pattern.message(123)) == 123
    assert pattern.claimed_number(Pattern(1, 11, SIZE).message(123)) is None
    assert pattern.claimed_number(b"\0" * 3) is None


def test_long_messages_and_too_small_ones():
    long = Pattern(1, 1, 3_000_000)
    assert len(long.message(2**33)) == 3_000_000
    with pytest.raises(ValueError, match="at least 16"):
        Pattern(1, 1, 15)


def feed(numbers):
    ledger = Ledger()
    for number in numbers:
        ledger.arrived(number)
    return ledger


def counts(ledger, sent):
    return (ledger.lost(sent), ledger.duplicated, ledger.reordered, ledger.corrupt)


@pytest.mark.parametrize(
    ("numbers", "sent", "expected"),
    [
        (range(100), 100, (0, 0, 0, 0)),
        (range(99), 100, (1, 0, 0, 0)),  # the last one
        ([0, 1, 3, 4], 5, (1, 0, 0, 0)),  # one in the middle
        ([1, 2, 3], 4, (1, 0, 0, 0)),  # the first one
        ([], 7, (7, 0, 0, 0)),
        ([0, 1, 1, 2], 3, (0, 1, 0, 0)),  # again at once
        ([0, 1, 2, 0], 3, (0, 1, 0, 0)),  # again later
        ([0, 1, 2, 3, 2, 3], 4, (0, 2, 0, 0)),  # a replayed tail
        ([0, 2, 1, 3], 4, (0, 0, 1, 0)),  # swapped
        ([0, 3, 1, 2, 4], 5, (0, 0, 2, 0)),
        ([0, 2, 1, 1, 3], 4, (0, 1, 1, 0)),  # late, and again
        ([0, 5], 6, (4, 0, 0, 0)),
        ([0, 1 << 60, 1], 2, (0, 0, 0, 1)),  # a damaged number is no gap
    ],
)
def test_ledger(numbers, sent, expected):
    ledger = feed(numbers)
    assert counts(ledger, sent) == expected
    assert (ledger.first_fault is None) == (expected[1:] == (0, 0, 0) and ledger.lost(ledger.expected) == 0)


def test_ledger_against_random_mutations():
    """Drop, repeat and swap at random; what is counted must be what was done."""
    for seed in range(200):
        rng = random.Random(seed)
        stream = list(range(300))
        dropped = set(rng.sample(range(300), rng.randrange(5)))
        stream = [n for n in stream if n not in dropped]
        repeated = rng.sample(range(len(stream)), rng.randrange(5))
        for at in sorted(repeated, reverse=True):
            stream.insert(rng.randrange(at + 1, len(stream) + 1), stream[at])
        ledger = feed(stream)
        assert counts(ledger, 300) == (len(dropped), len(repeated), 0, 0), f"seed {seed}"


def test_more_arrived_than_was_sent():
    assert feed(range(5)).unsent(4) == 1
    assert feed(range(4)).unsent(4) == 0


@pytest.mark.parametrize("at", [0, 1, 31, 63, 64, 1000, 2**33 + 5])
def test_nearest_number_of_an_immediate(at):
    ledger = Ledger()
    ledger.expected = at
    for ahead in range(-31, 33):
        if at + ahead >= 0:
            assert ledger.nearest((at + ahead) % 64, 64) == at + ahead
