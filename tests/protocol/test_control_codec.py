# SPDX-License-Identifier: BSD-3-Clause
"""The control channel's datagrams: what is encoded is decoded, and nothing from outside gets past the checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.protocol import messages as msg
from shiftverbs.protocol.codec import (
    MAX_DATAGRAM_BYTES,
    Entry,
    Forged,
    MalformedDatagram,
    OtherVersion,
    Ping,
    Replayed,
    decode,
    encode,
    name_of,
)
from shiftverbs.protocol.seal import TAG_BYTES, WINDOW, Seals, Window

U64, U24, U8, U16 = (
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 255),
    st.integers(0, 65535),
)
ADDRESSES = st.builds(msg.PairAddress, st.binary(min_size=16, max_size=16), U16, U24, U24, st.integers(1, 5))
SYNCS = st.builds(
    msg.Sync,
    *(U64, U8, st.sampled_from(msg.Phase), U64, st.booleans(), ADDRESSES, U64, U64),
    st.sampled_from([-1, *map(int, msg.Phase)]),
    st.integers(-1, 2**63 - 1),
    st.booleans(),
    U64,
    st.booleans(),
)
ARMS = st.builds(msg.Arm, st.sampled_from(msg.ArmStep), U64, U8, U64, ADDRESSES, U64)
MOVES = st.builds(msg.Move, st.sampled_from(msg.MoveStep), U64, U64, U8, U64, U64, U64)
PREFERS = st.builds(msg.Prefer, U64, U8, st.booleans())
PINGS = st.builds(Ping, U64, st.booleans())
U32 = st.integers(0, 2**32 - 1)
WANTS = st.builds(
    lambda versions, *rest: msg.WantKeys(max(versions), *rest, min(versions)),
    st.tuples(U64, U64),
    st.lists(U32, max_size=59).map(tuple),
    st.booleans(),
)
FOUND = st.builds(
    msg.FoundKey, U32, st.lists(st.tuples(st.sampled_from(msg.KeyState), U32), max_size=15).map(tuple)
)
KEYS = st.builds(
    lambda versions, *rest: msg.Keys(max(versions), min(versions), *rest),
    st.tuples(U64, U64),
    st.lists(U32, max_size=40).map(tuple),
    st.lists(FOUND, max_size=3).map(tuple),
    st.booleans(),
).filter(lambda keys: keys.size <= 255)
ENTRIES = st.builds(Entry, U64, U64, st.one_of(SYNCS, ARMS, MOVES, PREFERS, PINGS, WANTS, KEYS))

ADDRESS = msg.PairAddress(b"\xfe\x80" + bytes(13) + b"\x01", 7, 0x123456, 0xABCDEF, 5)
EXAMPLES = {
    "sync": msg.Sync(3, 1, msg.Phase.READY, 9, True, ADDRESS, 1234, 2, 2, 9, True, True),
    "arm": msg.Arm(msg.ArmStep.REP, 3, 1, 9, ADDRESS, 8),
    "move": msg.Move(msg.MoveStep.MOVED, 3, 4, 0, 9, 77),
    "prefer": msg.Prefer(2, 1, True),
    "ping": Ping(17, False),
    "want_keys": msg.WantKeys(7, (5, 1 << 31), True, 6),
    "keys": msg.Keys(
        9,
        7,
        (3,),
        (msg.FoundKey(5, ((msg.KeyState.READY, 6), (msg.KeyState.NEVER, 0))), msg.FoundKey(8, ())),
        False,
    ),
}


def seals() -> tuple[Seals, Seals]:
    """Those of a peer, and ours; nothing was said yet."""
    return Seals(b"theirs..........", b"ours............"), Seals(b"ours............", b"theirs..........")


def one(entries: list[Entry]) -> bytes:
    """The one datagram that a peer makes of entries."""
    (data,) = encode(entries, seals()[0])
    return data


def read(data: bytes) -> list[Entry]:
    """What we make of it."""
    return decode(data, seals()[1])


def sealed(data: bytes) -> bytes:
    """What a peer of ours sends that puts anything under its seal."""
    return seals()[0].seal(data)


def bare(data: bytes) -> bytes:
    """A datagram without its seal."""
    return data[:-TAG_BYTES]


def again(entries: list[Entry], number: int = 1) -> bytes:
    """What was read, written as under that number, without limit."""
    theirs = seals()[0]
    theirs.next_number = number
    return b"".join(encode(entries, theirs, 1 << 20))


@given(st.lists(ENTRIES, max_size=30))
def test_round_trip(entries: list[Entry]) -> None:
    theirs, ours = seals()
    datagrams = encode(entries, theirs)
    assert all(len(data) <= MAX_DATAGRAM_BYTES for data in datagrams)
    assert [entry for data in datagrams for entry in decode(data, ours)] == entries


@given(st.lists(ENTRIES, min_size=1, max_size=600), st.integers(1, 200))
def test_batches_stay_within_the_limit_and_keep_the_order(entries: list[Entry], most: int) -> None:
    theirs, ours = seals()
    datagrams = encode(entries, theirs, most)
    parts = [decode(data, ours) for data in datagrams]
    assert [entry for part in parts for entry in part] == entries
    for data, part in zip(datagrams, parts, strict=True):
        assert len(data) <= most or len(part) == 1


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_never_crash(data: bytes, under_seal: bool) -> None:
    try:
        entries = read(sealed(data) if under_seal else data)
    except MalformedDatagram as error:
        assert str(error)
    else:
        assert under_seal and (again(entries) == sealed(data) or not entries)


@given(st.binary(max_size=120), st.integers(0, 8), U8)
def test_arbitrary_bodies_behind_a_good_header_never_crash(body: bytes, kind: int, count: int) -> None:
    head = b"\x53\x56\x02" + bytes([count]) + seals()[0].name_out.to_bytes(8, "big") + (1).to_bytes(8, "big")
    data = head + bytes(16) + bytes([kind, len(body)]) + body
    for attempt in (data, sealed(data)):
        try:
            read(attempt)
        except MalformedDatagram as error:
            assert str(error)
        else:
            assert attempt is not data


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_corrupted_byte_is_refused(name: str) -> None:
    data = one([Entry(11, 22, EXAMPLES[name])])
    for at in range(len(data)):
        for value in range(256):
            if value != data[at]:
                with pytest.raises(MalformedDatagram, match=r"."):
                    read(data[:at] + bytes([value]) + data[at + 1 :])


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_corrupted_byte_under_a_good_seal_is_refused_or_read_as_something_valid(name: str) -> None:
    data = bare(one([Entry(11, 22, EXAMPLES[name])]))
    refused = 0
    for at in range(len(data)):
        for value in range(256):
            if value == data[at]:
                continue
            bad = sealed(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                entries = read(bad)
            except MalformedDatagram as error:
                assert str(error)
                refused += 1
            else:
                number = int.from_bytes(bad[12:20], "big")
                assert number != 1 or entries != read(sealed(data))
                assert again(entries, number) == bad, "read as something it does not say"
    assert refused >= 12 * 255 - 5  # at least every damaged header, but for its number


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_truncation_is_refused(name: str) -> None:
    data = one([Entry(11, 22, EXAMPLES[name]), Entry(11, 22, EXAMPLES["ping"])])
    for length in range(len(data)):
        with pytest.raises(MalformedDatagram, match=r"header|not the peer's"):
            read(data[:length])
    data = bare(data)
    for length in range(20, len(data)):
        with pytest.raises(MalformedDatagram, match=r"cut off"):
            read(sealed(data[:length]))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: b"XX" + d[2:], "magic 0x5858"),
        (lambda d: d[:2] + b"\x01" + d[3:], "version 1, this release speaks 2"),
        (lambda d: d + b"junk", "4 bytes behind the last entry"),
        (lambda d: d[:36] + b"\x09" + d[37:], "unknown kind 9"),
        (lambda d: d[:37] + bytes([d[37] - 1]) + d[38:-1], "bytes, .* expected"),
        (lambda d: d[:47] + b"\x63" + d[48:], "99 is not a valid Phase"),
        (lambda d: d[:56] + b"\x02" + d[57:], "clean is 2, not 0 or 1"),
    ],
)
def test_the_error_names_what_is_wrong(damage: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(MalformedDatagram, match=says):
        read(sealed(damage(bare(one([Entry(1, 2, EXAMPLES["sync"])])))))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda keys: keys[:17], "17 bytes are no keys"),
        (lambda keys: keys[:8] + b"\xff" + keys[9:], "withdrawals since"),
        (lambda keys: keys[:16] + b"\x02" + keys[17:], "push is 2"),
        (lambda keys: keys[:17] + b"\xff" + keys[18:], "an rkey is cut off"),
        (lambda keys: keys[:26] + b"\x10" + keys[27:], "a key on 16 backups"),
        (lambda keys: keys[:26] + b"\x09" + keys[27:], "a key on 9 backups"),
        (lambda keys: keys[:27] + b"\x04" + keys[28:], "4 is not a valid KeyState"),
        (lambda keys: keys[:-1], "a key is cut off"),
    ],
)
def test_keys_are_checked_field_by_field(body: Callable[[bytes], bytes], says: str) -> None:
    data = bare(one([Entry(1, 2, EXAMPLES["keys"])]))
    bad = body(data[38:])
    with pytest.raises(MalformedDatagram, match=says):
        read(sealed(data[:37] + bytes([len(bad)]) + bad))


def test_a_question_for_keys_is_checked() -> None:
    data = bare(one([Entry(1, 2, EXAMPLES["want_keys"])]))
    for bad, says in ((data[38:46], "8 bytes are no question"), (data[38:-1], "an rkey is cut off")):
        with pytest.raises(MalformedDatagram, match=says):
            read(sealed(data[:37] + bytes([len(bad)]) + bad))


def test_fields_that_do_not_fit_are_refused() -> None:
    cases = [("qpn", 1 << 24, "24 bits"), ("psn", 1 << 31, "24 bits"), ("mtu", 0, "MTU"), ("mtu", 6, "MTU")]
    for field, value, says in cases:
        parts = {"gid": bytes(16), "lid": 0, "qpn": 1, "psn": 1, "mtu": 1, field: value}
        arm = msg.Arm(msg.ArmStep.REQ, 0, 0, 0, msg.PairAddress(**parts))
        with pytest.raises(MalformedDatagram, match=says):
            read(one([Entry(1, 2, arm)]))


def test_what_is_no_message_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="not a message"):
        encode([Entry(1, 2, "hello")], seals()[0])  # type: ignore[arg-type]


# ---- who may say it -------------------------------------------------------------------------------------------------

ABORT = [Entry(11, 22, msg.Sync(9, 0, msg.Phase.ABORT, 1, False, ADDRESS, 0))]


def test_what_an_older_release_says_is_refused_by_its_version() -> None:
    old = b"\x53\x56\x01\x01" + bytes(16) + b"\x05\x09" + bytes(9)  # its shortest: a ping
    for data in (old, old[:4]):
        with pytest.raises(OtherVersion, match="version 1, this release speaks 2"):
            name_of(data)


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [(b"?", b"ours"), (b"theirs", b"?"), (b"?", b"?"), (b"ours", b"theirs"), (b"", b"")],
    ids=["not the peer", "to somebody else", "neither", "our own, reflected", "nothing"],
)
def test_who_does_not_know_both_secrets_is_not_heard(sender: bytes, receiver: bytes) -> None:
    """Also where he says that he is the peer: that is on the wire for everybody to see."""
    theirs, ours = seals()
    forger = Seals(sender.ljust(16, b"."), receiver.ljust(16, b"."))
    for name in (forger.name_out, theirs.name_out):
        forger.name_out = name
        (data,) = encode(ABORT, forger)
        with pytest.raises(Forged, match="not the peer's"):
            decode(data, ours)
    assert decode(encode(ABORT, theirs)[0], ours) == ABORT, "what was forged took no number"


def test_what_was_taken_is_not_taken_again() -> None:
    theirs, ours = seals()
    said = [encode(ABORT, theirs)[0] for _ in range(5)]
    assert decode(said[3], ours) == ABORT
    assert decode(said[1], ours) == ABORT, "UD reorders"
    for data in (said[3], said[1]):
        with pytest.raises(Replayed, match="was taken before"):
            decode(data, ours)
    assert decode(said[4], ours) == decode(said[0], ours) == ABORT


def test_what_is_very_late_is_not_taken() -> None:
    theirs, ours = seals()
    said = [encode(ABORT, theirs)[0] for _ in range(WINDOW + 2)]
    decode(said[-1], ours)
    for data in said[:2]:
        with pytest.raises(Replayed, match="too old"):
            decode(data, ours)
    assert decode(said[2], ours) == ABORT


def test_seals_made_again_go_on_with_the_numbers() -> None:
    """The last connection to a peer is closed, and another is made: what was said before is not new to either."""
    theirs, ours = seals()
    before = encode(ABORT, theirs)[0]
    decode(before, ours)
    later = Seals(b"theirs..........", b"ours............", theirs.next_number)
    assert decode(encode(ABORT, later)[0], ours) == ABORT
    with pytest.raises(Replayed):
        decode(before, ours)


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=300))
def test_a_window_takes_each_number_once(numbers: list[int]) -> None:
    window, taken, top = Window(), {0}, 0
    for number in numbers:
        fresh = number not in taken and number > top - WINDOW
        assert window.take(number) == fresh
        if fresh:
            taken.add(number)
            top = max(top, number)


def test_a_window_takes_the_greatest_number() -> None:
    window = Window()
    assert window.take((1 << 64) - 1) and not window.take((1 << 64) - 1) and not window.take(5)


def test_secrets_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 15 and 16"):
        Seals(bytes(15), bytes(16))
