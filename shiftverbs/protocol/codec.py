# SPDX-License-Identifier: BSD-3-Clause
"""The control channel's datagrams: encoding and decoding. What they mean is in messages.py.

One datagram carries messages from one control port to another: a header, entries, and the seal over both (seal.py). An
entry names the lives of the receiving QP and of the sending one, so that nothing meant for an earlier life of a QPN is
taken for a later one.

All numbers are big-endian. Whatever comes in is input from outside: the seal is checked before anything behind the
header is looked at, then field by field, and what is wrong is refused with `MalformedDatagram`, which says why.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from msgspec import Struct

from shiftverbs.protocol.messages import (
    Arm,
    ArmStep,
    FoundKey,
    Keys,
    KeyState,
    Message,
    Move,
    MoveStep,
    PairAddress,
    Phase,
    Prefer,
    Sync,
    WantKeys,
)
from shiftverbs.protocol.seal import TAG_BYTES, Seals

MAGIC = 0x5356
VERSION = 2
MAX_DATAGRAM_BYTES = 1024
MAX_BACKUPS = 15

_VERSION = struct.Struct("!HB")  # magic, version: what every version begins with
_HEADER = struct.Struct("!HBBQQ")  # magic, version, entries, name of the sender's direction, number
_ENTRY = struct.Struct("!QQBB")  # to, from, kind, body length
_ADDRESS = struct.Struct("!16sHIIB")
_SYNC = struct.Struct("!QBBQBQQbqBQB" + _ADDRESS.format[1:])
_ARM = struct.Struct("!BQBQQ" + _ADDRESS.format[1:])
_MOVE = struct.Struct("!BQQBQQQ")
_PREFER = struct.Struct("!QBB")
_PING = struct.Struct("!QB")
_WANT_KEYS = struct.Struct("!QQB")  # version, settled, again; then rkeys
_KEYS = struct.Struct("!QQBB")  # then so many rkeys that are gone, then found ones
_FOUND = struct.Struct("!IB")  # then for so many backups
_FOUND_ON = struct.Struct("!BI")

# What begins a datagram that only takes up room, whoever sent it, and one such datagram. There is nothing to look at in
# it, so it has no seal.
FILL_HEAD = struct.pack("!H", 0x5346)
FILL = FILL_HEAD.ljust(MAX_DATAGRAM_BYTES, b"\0")

_KIND_SYNC, _KIND_ARM, _KIND_MOVE, _KIND_PREFER, _KIND_PING = 1, 2, 3, 4, 5
_KIND_WANT_KEYS, _KIND_KEYS = 6, 7
_SIZES = {
    _KIND_SYNC: _SYNC.size,
    _KIND_ARM: _ARM.size,
    _KIND_MOVE: _MOVE.size,
    _KIND_PREFER: _PREFER.size,
    _KIND_PING: _PING.size,
}


class MalformedDatagram(ValueError):
    """A datagram that no peer of ours sends; the message says what was wrong with it."""


class OtherVersion(MalformedDatagram):
    """A datagram of another release of ours."""


class Forged(MalformedDatagram):
    """A datagram that is not from whom it says."""


class Replayed(MalformedDatagram):
    """A datagram that was taken already, or is too old to tell."""


class Ping(Struct, frozen=True):
    """Is this NIC pair alive? `answer` is False in the question and True in the reply; number: as in the question."""

    number: int
    answer: bool


class Entry(Struct, frozen=True):
    """One message with the lives of the QPs it goes to and comes from (0 in a Ping)."""

    to: int
    sender: int
    message: Message | Ping | WantKeys | Keys


def encode_entry(entry: Entry) -> bytes:
    """One entry as bytes. Raises TypeError where it is no message."""
    match message := entry.message:
        case Sync():
            m, at = message, message.address
            kind = _KIND_SYNC
            body = _SYNC.pack(
                m.epoch,
                m.target,
                m.phase,
                m.arm,
                m.clean,
                m.rx,
                m.ask,
                m.seen_phase,
                m.seen_arm,
                m.settled,
                m.keys,
                m.receipts_lost,
                at.gid,
                at.lid,
                at.qpn,
                at.psn,
                at.mtu,
            )
        case Arm():
            a, at = message, message.address
            address = (at.gid, at.lid, at.qpn, at.psn, at.mtu)
            kind, body = _KIND_ARM, _ARM.pack(a.step, a.epoch, a.pair, a.arm, a.wanted, *address)
        case Move():
            v = message
            kind, body = _KIND_MOVE, _MOVE.pack(v.step, v.epoch, v.number, v.target, v.arm, v.tx, v.keys)
        case Prefer():
            kind, body = _KIND_PREFER, _PREFER.pack(message.number, message.target, message.seen)
        case Ping():
            kind, body = _KIND_PING, _PING.pack(message.number, message.answer)
        case WantKeys():
            head = _WANT_KEYS.pack(message.version, message.settled, message.again)
            kind, body = _KIND_WANT_KEYS, head + struct.pack(f"!{len(message.rkeys)}I", *message.rkeys)
        case Keys():
            gone = message.gone
            head = _KEYS.pack(message.version, message.since, message.push, len(gone))
            found = b"".join(
                _FOUND.pack(one.rkey, len(one.on)) + b"".join(_FOUND_ON.pack(*on) for on in one.on)
                for one in message.found
            )
            kind, body = _KIND_KEYS, head + struct.pack(f"!{len(gone)}I", *gone) + found
        case _:
            raise TypeError(f"not a message: {message!r}")
    return _ENTRY.pack(entry.to, entry.sender, kind, len(body)) + body


def encode(entries: Iterable[Entry], seals: Seals, most_bytes: int = MAX_DATAGRAM_BYTES) -> list[bytes]:
    """Datagrams of at most most_bytes that carry `entries` in order, under the next numbers of `seals`."""
    groups: list[list[bytes]] = []
    left = -1
    for entry in entries:
        part = encode_entry(entry)
        left -= len(part)
        if left < 0 or len(groups[-1]) == 255:
            groups.append([])
            left = most_bytes - _HEADER.size - TAG_BYTES - len(part)
        groups[-1].append(part)
    datagrams = []
    for parts in groups:
        head = _HEADER.pack(MAGIC, VERSION, len(parts), seals.name_out, seals.next_number)
        datagrams.append(seals.seal(head + b"".join(parts)))
    return datagrams


def _boolean(value: int, what: str) -> bool:
    if value > 1:
        raise MalformedDatagram(f"{what} is {value}, not 0 or 1")
    return bool(value)


def _address(gid: bytes, lid: int, qpn: int, psn: int, mtu: int) -> PairAddress:
    if qpn >> 24 or psn >> 24:
        raise MalformedDatagram(f"QPN {qpn:#x} or PSN {psn:#x} has more than 24 bits")
    if not 1 <= mtu <= 5:
        raise MalformedDatagram(f"MTU {mtu} is not an ibv_mtu")
    return PairAddress(gid, lid, qpn, psn, mtu)


def _rkeys(data: bytes) -> tuple[int, ...]:
    if len(data) % 4:
        raise MalformedDatagram("an rkey is cut off")
    return struct.unpack(f"!{len(data) // 4}I", data)


def _want_keys(body: bytes) -> WantKeys:
    if len(body) < _WANT_KEYS.size:
        raise MalformedDatagram(f"{len(body)} bytes are no question for keys")
    version, settled, again = _WANT_KEYS.unpack_from(body)
    if settled > version:
        raise MalformedDatagram(f"settled up to {settled}, heeded up to {version}")
    return WantKeys(version, _rkeys(body[_WANT_KEYS.size :]), _boolean(again, "again"), settled)


def _keys(body: bytes) -> Keys:
    if len(body) < _KEYS.size:
        raise MalformedDatagram(f"{len(body)} bytes are no keys")
    version, since, push, count = _KEYS.unpack_from(body)
    at = _KEYS.size + 4 * count
    if at > len(body):
        raise MalformedDatagram("an rkey is cut off")
    if since > version:
        raise MalformedDatagram(f"withdrawals since {since} up to {version}")
    found = []
    gone = _rkeys(body[_KEYS.size : at])
    while at < len(body):
        if at + _FOUND.size > len(body):
            raise MalformedDatagram("a key is cut off")
        rkey, backups = _FOUND.unpack_from(body, at)
        at += _FOUND.size
        end = at + backups * _FOUND_ON.size
        if backups > MAX_BACKUPS or end > len(body):
            raise MalformedDatagram(f"a key on {backups} backups")
        on = tuple((KeyState(state), there) for state, there in _FOUND_ON.iter_unpack(body[at:end]))
        found.append(FoundKey(rkey, on))
        at = end
    return Keys(version, since, gone, tuple(found), _boolean(push, "push"))


def _decode_body(kind: int, body: bytes) -> Message | Ping | WantKeys | Keys:
    try:
        if kind == _KIND_WANT_KEYS:
            return _want_keys(body)
        if kind == _KIND_KEYS:
            return _keys(body)
    except MalformedDatagram:
        raise
    except ValueError as error:
        raise MalformedDatagram(str(error)) from None
    size = _SIZES.get(kind)
    if size is None:
        raise MalformedDatagram(f"unknown kind {kind}")
    if len(body) != size:
        raise MalformedDatagram(f"kind {kind} has {len(body)} bytes, {size} expected")
    try:
        if kind == _KIND_SYNC:
            (
                epoch,
                target,
                phase,
                arm,
                clean,
                rx,
                ask,
                seen_phase,
                seen_arm,
                settled,
                keys,
                lost,
                *address,
            ) = _SYNC.unpack(body)
            if clean | settled | lost > 1:
                for value, what in (clean, "clean"), (settled, "settled"), (lost, "receipts_lost"):
                    _boolean(value, what)
            if seen_phase != -1:
                Phase(seen_phase)
            return Sync(
                epoch,
                target,
                Phase(phase),
                arm,
                bool(clean),
                _address(*address),
                rx,
                ask,
                seen_phase,
                seen_arm,
                bool(settled),
                keys,
                bool(lost),
            )
        if kind == _KIND_ARM:
            step, epoch, pair, arm, wanted, *address = _ARM.unpack(body)
            return Arm(ArmStep(step), epoch, pair, arm, _address(*address), wanted)
        if kind == _KIND_MOVE:
            step, epoch, number, target, arm, tx, keys = _MOVE.unpack(body)
            return Move(MoveStep(step), epoch, number, target, arm, tx, keys)
        if kind == _KIND_PREFER:
            number, target, seen = _PREFER.unpack(body)
            return Prefer(number, target, _boolean(seen, "seen"))
        number, answer = _PING.unpack(body)
        return Ping(number, _boolean(answer, "answer"))
    except MalformedDatagram:
        raise
    except ValueError as error:
        raise MalformedDatagram(str(error)) from None


def name_of(data: bytes) -> int:
    """Which direction a datagram says it belongs to (`Seals.name_in`). Nothing is proven yet.

    Raises OtherVersion, or MalformedDatagram where it is none of ours.
    """
    if len(data) < _VERSION.size:
        raise MalformedDatagram(f"{len(data)} bytes are no header")
    magic, version = _VERSION.unpack_from(data)
    if magic != MAGIC:
        raise MalformedDatagram(f"magic {magic:#06x}")
    if version != VERSION:
        raise OtherVersion(f"version {version}, this release speaks {VERSION}")
    if len(data) < _HEADER.size + TAG_BYTES:
        raise MalformedDatagram(f"{len(data)} bytes are no header and seal")
    name: int = _HEADER.unpack_from(data)[3]
    return name


def decode(data: bytes, seals: Seals) -> list[Entry]:
    """The entries of one datagram from the peer of `seals`. Nothing of one that is refused is used.

    Raises Forged where the seal is not the peer's, Replayed where its number was taken before, MalformedDatagram for
    anything else that is wrong.
    """
    end = len(data) - TAG_BYTES
    if end < _HEADER.size or not seals.is_theirs(data[:end], data[end:]):
        name_of(data)  # which may have more to say of it
        raise Forged("the seal is not the peer's")
    magic, version, count, name, number = _HEADER.unpack_from(data)
    if (magic, version, name) != (MAGIC, VERSION, seals.name_in):
        name_of(data)
        raise Forged("it says that it is of another direction than its seal")
    if not seals.take(number):
        raise Replayed(f"number {number} was taken before, or is too old")
    entries = []
    at = _HEADER.size
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise MalformedDatagram("an entry is cut off")
        to, sender, kind, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if at + length > end:
            raise MalformedDatagram("a body is cut off")
        entries.append(Entry(to, sender, _decode_body(kind, data[at : at + length])))
        at += length
    if at != end:
        raise MalformedDatagram(f"{end - at} bytes behind the last entry")
    return entries
