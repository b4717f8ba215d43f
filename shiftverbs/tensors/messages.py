# SPDX-License-Identifier: BSD-3-Clause
"""The messages between two channels, and their bytes. What a peer sends is outside input: all of it is checked.

A tensor's content is no message: it is written where the request says, with the request's index as immediate.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

from shiftverbs.tensors.errors import MessageError, TensorError
from shiftverbs.tensors.metadata import DTYPES, NUMBERS, Metadata, metadata_of

MAX_KEY_BYTES = 512
MAX_TEXT_BYTES = 4096
#: An index has the bits that the transport has for a number in an immediate.
INDICES = 1 << 15


class Type(enum.IntEnum):
    """The first byte."""

    REQUEST = 1
    METADATA = 2
    RE_REQUEST = 3
    ERROR = 4
    CANCEL = 5
    CANCELLED = 6


class Target(NamedTuple):
    """Where the content is to be written: address, rkey."""

    address: int
    rkey: int


@dataclass(frozen=True, slots=True)
class Request:
    """Puller to publisher: a tensor is wanted. metadata: what target was made for; None: it is not known."""

    index: int
    key: str
    step: int
    metadata: Metadata | None
    target: Target


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """Publisher to puller: the tensor is another one. Where it has no bytes, or is dead, nothing more comes."""

    index: int
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class ReRequest:
    """Puller to publisher: a target for what the MetadataResponse said."""

    index: int
    target: Target


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """Publisher to puller: there is an error instead of the tensor."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Puller to publisher: it is not wanted any longer."""

    index: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Publisher to puller: nothing is written for that index from here on. The answer to each Cancel."""

    index: int


Message = Request | MetadataResponse | ReRequest | ErrorStatus | Cancel | Cancelled

_HEAD = struct.Struct("<BH")
_REQUEST = struct.Struct("<qHB")  # step, bytes of the key, whether there is metadata
_TARGET = struct.Struct("<QI")
_METADATA = struct.Struct("<BBB")  # dtype, dead, dimensions


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises TensorError for a key or step that is too long for one."""
    if isinstance(message, Request):
        key = check_key(message.key, message.step)
        known = message.metadata is not None
        return b"".join(
            (
                _HEAD.pack(Type.REQUEST, message.index),
                _REQUEST.pack(message.step, len(key), known),
                key,
                _encode_metadata(message.metadata) if message.metadata is not None else b"",
                _TARGET.pack(*message.target),
            )
        )
    if isinstance(message, MetadataResponse):
        return _HEAD.pack(Type.METADATA, message.index) + _encode_metadata(message.metadata)
    if isinstance(message, ReRequest):
        return _HEAD.pack(Type.RE_REQUEST, message.index) + _TARGET.pack(*message.target)
    if isinstance(message, ErrorStatus):
        text = message.text.encode(errors="replace")[:MAX_TEXT_BYTES]
        return _HEAD.pack(Type.ERROR, message.index) + text
    return _HEAD.pack(Type.CANCEL if isinstance(message, Cancel) else Type.CANCELLED, message.index)


def check_key(key: str, step: int) -> bytes:
    """A key's bytes. Raises TensorError where the key or the step does not fit into a message."""
    try:
        data = key.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise TensorError(f"a key is text, not {key!r}") from error
    if len(data) > MAX_KEY_BYTES:
        raise TensorError(f"the key {key[:40]!r}… has {len(data)} bytes, and {MAX_KEY_BYTES} are possible")
    if not isinstance(step, int) or not -(1 << 63) <= step < 1 << 63:
        raise TensorError(f"a step is an integer of 64 bits, not {step!r}")
    return data


def _encode_metadata(metadata: Metadata) -> bytes:
    shape = metadata.shape
    return _METADATA.pack(NUMBERS[metadata.dtype], metadata.dead, len(shape)) + struct.pack(
        f"<{len(shape)}Q", *shape
    )


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def take(self, length: int) -> bytes:
        piece = self._data[self._at : self._at + length]
        if len(piece) < length:
            raise MessageError(f"it ends after {len(self._data)} bytes, in the middle")
        self._at += length
        return piece

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def end(self) -> None:
        if self._at != len(self._data):
            raise MessageError(f"it has {len(self._data) - self._at} bytes too many")

    def flag(self, value: int, what: str) -> bool:
        if value > 1:
            raise MessageError(f"{what} is {value}, not 0 or 1")
        return bool(value)

    def target(self) -> Target:
        return Target(*self.unpack(_TARGET))

    def text(self, length: int, what: str) -> str:
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise MessageError(f"its {what} is not UTF-8") from error

    def metadata(self) -> Metadata:
        number, dead, dimensions = self.unpack(_METADATA)
        if number >= len(DTYPES):
            raise MessageError(f"it names dtype {number}, and the last one is {len(DTYPES) - 1}")
        shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        try:
            metadata = metadata_of(DTYPES[number].name, shape)
        except TensorError as error:
            raise MessageError(f"{error}") from error
        return metadata._replace(dead=self.flag(dead, "dead"))


def decode(data: bytes) -> Message:
    """The message that bytes are.

    :raises MessageError: they are none; the text says what is wrong
    """
    reader = _Reader(data)
    number, index = reader.unpack(_HEAD)
    if number not in Type.__members__.values():
        raise MessageError(f"there is no message of type {number}")
    if index >= INDICES:
        raise MessageError(f"its index is {index}, and the last one is {INDICES - 1}")
    message: Message
    if number == Type.REQUEST:
        step, length, known = reader.unpack(_REQUEST)
        if length > MAX_KEY_BYTES:
            raise MessageError(f"its key has {length} bytes, and {MAX_KEY_BYTES} are possible")
        key = reader.text(length, "key")
        metadata = reader.metadata() if reader.flag(known, "known") else None
        message = Request(index, key, step, metadata, reader.target())
    elif number == Type.METADATA:
        message = MetadataResponse(index, reader.metadata())
    elif number == Type.RE_REQUEST:
        message = ReRequest(index, reader.target())
    elif number == Type.ERROR:
        message = ErrorStatus(index, reader.rest().decode(errors="replace"))
    else:
        message = Cancel(index) if number == Type.CANCEL else Cancelled(index)
    reader.end()
    return message
