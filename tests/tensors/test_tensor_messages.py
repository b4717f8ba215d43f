# SPDX-License-Identifier: BSD-3-Clause
"""The bytes of messages, of tensors' metadata, and of what two nodes say when they meet."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shiftverbs.tensors.errors import MeetingError, MessageError, TensorError
from shiftverbs.tensors.meeting import Meeting, parse
from shiftverbs.tensors.messages import (
    INDICES,
    MAX_KEY_BYTES,
    Cancel,
    Cancelled,
    ErrorStatus,
    MetadataResponse,
    Request,
    ReRequest,
    Target,
    decode,
    encode,
)
from shiftverbs.tensors.metadata import DTYPES, Metadata, metadata_of
from shiftverbs.transport import SLOT_BYTES

indices = st.integers(0, INDICES - 1)
keys = st.text(st.characters(codec="utf-8"), max_size=MAX_KEY_BYTES // 4)
steps = st.integers(-(1 << 63), (1 << 63) - 1)
targets = st.builds(Target, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1))
metadata = st.builds(
    Metadata,
    st.sampled_from([dtype.name for dtype in DTYPES]),
    st.lists(st.integers(0, 1000), max_size=5).map(tuple),
    st.booleans(),
)
messages = st.one_of(
    st.builds(Request, indices, keys, steps, st.none() | metadata, targets),
    st.builds(MetadataResponse, indices, metadata),
    st.builds(ReRequest, indices, targets),
    st.builds(ErrorStatus, indices, st.text(st.characters(codec="utf-8"), max_size=100)),
    st.builds(Cancel, indices),
    st.builds(Cancelled, indices),
)


@given(messages)
def test_there_and_back(message):
    data = encode(message)
    assert decode(data) == message and len(data) <= SLOT_BYTES


@given(messages, st.data())
def test_a_message_that_is_cut_or_longer_is_none(message, data):
    whole = encode(message)
    if not isinstance(message, ErrorStatus):
        with pytest.raises(MessageError, match="bytes too many"):
            decode(whole + b"x")
        with pytest.raises(MessageError, match="in the middle"):
            decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data):
    try:
        message = decode(data)
    except MessageError:
        return
    if not isinstance(message, ErrorStatus):
        assert encode(message) == data, "one message has one spelling"


@pytest.mark.parametrize(
    "data, text",
    [
        (b"\x09\0\0", "no message of type 9"),
        (b"\x05\xff\xff", "index is 65535"),
        (b"\x02\0\0\xff\0\0", "dtype 255"),
        (b"\x02\0\0\0\2\0", "dead is 2"),
        (b"\x02\0\0\0\0\x2a" + bytes(8 * 42), "at most 32 dimensions"),
        (b"\x02\0\0\0\0\2" + b"\xff" * 16, "more than 2\\^62"),
        (b"\x01\0\0" + bytes(8) + b"\xff\xff\0", "key has 65535 bytes"),
        (b"\x01\0\0" + bytes(8) + b"\x01\0\0\xff" + bytes(12), "key is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said(data, text):
    with pytest.raises(MessageError, match=text):
        decode(data)


@pytest.mark.parametrize(
    "key, step, text",
    [("x" * 513, 0, "513 bytes"), (7, 0, "a key is text"), ("\ud800", 0, "a key is text"), ("x", 1 << 63, "64 bits"),
     ("x", 1.5, "64 bits")],
)  # fmt: skip
def test_keys_and_steps_have_bounds(key, step, text):
    with pytest.raises(TensorError, match=text):
        encode(Request(0, key, step, None, Target(0, 0)))


def test_metadata_is_checked():
    assert metadata_of("bfloat16", (3, 4)).nbytes == 24
    assert str(metadata_of("int8", ())) == "int8[]"
    for dtype, shape, text in [("float8", (), "float8"), ("int8", (-1,), "0 or more")]:
        with pytest.raises(TensorError, match=text):
            metadata_of(dtype, shape)


# ---- meetings --------------------------------------------------------------------------------------------------------


def talk(said: bytes, expected: str | None = None, patience_s: float = 5.0) -> Meeting:
    """Our side of a meeting with somebody who says that, and then closes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        meeting = Meeting(ours, time.monotonic() + patience_s)
        meeting.greet("me", expected)
        meeting.get("address/0", patience_s)
        return meeting


HELLO = b'{"shiftverbs.tensors": 1, "name": "pub"}\n'


@pytest.mark.parametrize(
    "said, text",
    [
        (b"", "closed the connection"),
        (b"GET / HTTP/1.1\r\n\r\n", "no JSON"),
        (b"[1]\n", "no JSON object"),
        (b'{"name": "pub"}\n', "version is 1 here, and None there"),
        (b'{"shiftverbs.tensors": 1, "name": 7}\n', "a name has"),
        (b'{"error": "go away"}\n', "says: go away"),
        (b"x" * 70_000, "more than 65536 bytes"),
        (b"[" * 60_000 + b"\n", "no JSON"),
        (HELLO + b'{"key": 1, "value": "x"}\n', "no key and value"),
        (HELLO + b"".join(b'{"key": "%d", "value": "x"}\n' % i for i in range(12)), "no key and value"),
        (HELLO, "closed the connection"),
    ],
)
def test_who_does_not_meet_is_told_from_a_node(said, text):
    with pytest.raises(MeetingError, match=text):
        talk(said)


def test_the_wrong_peer():
    with pytest.raises(MeetingError, match="the node there is 'pub', not 'weights'"):
        talk(HELLO, "weights")


def test_who_says_nothing_is_not_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        Meeting(ours, time.monotonic() + 0.05).greet("me", None)


def test_addresses():
    assert parse("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse("[::1]:7") == ("::1", 7)
    assert parse(":7000") == ("", 7000)
    for wrong in ("host", "host:", "host:99999", "a:b:1", ""):
        with pytest.raises(ValueError, match="host:port"):
            parse(wrong)
