# SPDX-License-Identifier: BSD-3-Clause
"""The control channel's datagrams: what is encoded is decoded, and nothing from outside gets past the checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.control import MAX_DATAGRAM_BYTES, Entry, MalformedDatagram, Ping, decode, encode
from shiftverbs.messages import Arm, ArmStep, Move, MoveStep, PairAddress, Phase, Prefer, Sync

U64, U24, U8, U16 = (
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 255),
    st.integers(0, 65535),
)
ADDRESSES = st.builds(PairAddress, st.binary(min_size=16, max_size=16), U16, U24, U24, st.integers(1, 5))
SYNCS = st.builds(
    Sync,
    *(U64, U8, st.sampled_from(Phase), U64, st.booleans(), ADDRESSES, U64, U64),
    st.sampled_from([-1, *map(int, Phase)]),
    st.integers(-1, 2**63 - 1),
    st.booleans(),
)
ARMS = st.builds(Arm, st.sampled_from(ArmStep), U64, U8, U64, ADDRESSES, U64)
MOVES = st.builds(Move, st.sampled_from(MoveStep), U64, U64, U8, U64, U64)
PREFERS = st.builds(Prefer, U64, U8, st.booleans())
PINGS = st.builds(Ping, U64, st.booleans())
ENTRIES = st.builds(Entry, U64, U64, st.one_of(SYNCS, ARMS, MOVES, PREFERS, PINGS))

ADDRESS = PairAddress(b"\xfe\x80" + bytes(13) + b"\x01", 7, 0x123456, 0xABCDEF, 5)
EXAMPLES = {
    "sync": Sync(3, 1, Phase.READY, 9, True, ADDRESS, 1234, 2, 2, 9, True),
    "arm": Arm(ArmStep.REP, 3, 1, 9, ADDRESS, 8),
    "move": Move(MoveStep.MOVED, 3, 4, 0, 9, 77),
    "prefer": Prefer(2, 1, True),
    "ping": Ping(17, False),
}


def one(entries: list[Entry]) -> bytes:
    (data,) = encode(entries)
    return data


@given(st.lists(ENTRIES, max_size=30))
def test_round_trip(entries: list[Entry]) -> None:
    datagrams = list(encode(entries))
    assert all(len(data) <= MAX_DATAGRAM_BYTES for data in datagrams)
    assert [entry for data in datagrams for entry in decode(data)] == entries


@given(st.lists(ENTRIES, min_size=1, max_size=600), st.integers(1, 200))
def test_batches_stay_within_the_limit_and_keep_the_order(entries: list[Entry], most: int) -> None:
    datagrams = list(encode(entries, most))
    assert [entry for data in datagrams for entry in decode(data)] == entries
    for data in datagrams:
        assert len(data) <= most or len(decode(data)) == 1


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    try:
        entries = decode(data)
    except MalformedDatagram as error:
        assert str(error)
    else:
        assert b"".join(encode(entries, 1 << 20)) == data or not entries


@given(st.binary(max_size=120), st.integers(0, 6), U8)
def test_arbitrary_bodies_behind_a_good_header_never_crash(body: bytes, kind: int, count: int) -> None:
    data = b"\x53\x56\x01" + bytes([count]) + bytes(16) + bytes([kind, len(body)]) + body
    try:
        decode(data)
    except MalformedDatagram as error:
        assert str(error)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_corrupted_byte_is_refused_or_read_as_something_valid(name: str) -> None:
    data = one([Entry(11, 22, EXAMPLES[name])])
    refused = 0
    for at in range(len(data)):
        for value in range(256):
            if value == data[at]:
                continue
            bad = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                entries = decode(bad)
            except MalformedDatagram as error:
                assert str(error)
                refused += 1
            else:
                assert entries != decode(data)
                assert b"".join(encode(entries, 1 << 20)) == bad, "read as something it does not say"
    assert refused >= 4 * 255 - 5  # at least every damaged header


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_truncation_is_refused(name: str) -> None:
    data = one([Entry(11, 22, EXAMPLES[name]), Entry(11, 22, EXAMPLES["ping"])])
    for length in range(len(data)):
        with pytest.raises(MalformedDatagram, match=r"header|cut off"):
            decode(data[:length])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: b"XX" + d[2:], "magic 0x5858"),
        (lambda d: d[:2] + b"\x02" + d[3:], "version 2, this release speaks 1"),
        (lambda d: d + b"junk", "4 bytes behind the last entry"),
        (lambda d: d[:20] + b"\x09" + d[21:], "unknown kind 9"),
        (lambda d: d[:21] + bytes([d[21] - 1]) + d[22:-1], "bytes, .* expected"),
        (lambda d: d[:31] + b"\x63" + d[32:], "99 is not a valid Phase"),
        (lambda d: d[:40] + b"\x02" + d[41:], "clean is 2, not 0 or 1"),
    ],
)
def test_the_error_names_what_is_wrong(damage: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(MalformedDatagram, match=says):
        decode(damage(one([Entry(1, 2, EXAMPLES["sync"])])))


def test_fields_that_do_not_fit_are_refused() -> None:
    cases = [("qpn", 1 << 24, "24 bits"), ("psn", 1 << 31, "24 bits"), ("mtu", 0, "MTU"), ("mtu", 6, "MTU")]
    for field, value, says in cases:
        parts = {"gid": bytes(16), "lid": 0, "qpn": 1, "psn": 1, "mtu": 1, field: value}
        arm = Arm(ArmStep.REQ, 0, 0, 0, PairAddress(**parts))
        with pytest.raises(MalformedDatagram, match=says):
            decode(one([Entry(1, 2, arm)]))


def test_what_is_no_message_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="not a message"):
        list(encode([Entry(1, 2, "hello")]))  # type: ignore[arg-type]
