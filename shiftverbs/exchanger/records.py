# SPDX-License-Identifier: BSD-3-Clause
"""What stands in the exchanger: keys and values, built, encoded and checked.

Keys::

    /shiftverbs/<job>/qp/<port GID>/<QPN>               a QP by its default route
    /shiftverbs/<job>/qp/<subnet prefix>.<LID>/<QPN>    the same, for a peer that knows only the LID

Values are small JSON objects with a version. Whatever is read is input from outside: unknown fields are passed
over, so that a newer release may add some, but a field that is known has to have the right type and range.
Every refusal is a RecordError that names the key and the field.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

VERSION: Final = 2
# 128 values of this size stay well below etcd's limit of 1.5 MiB a request.
MAX_VALUE_BYTES = 8192
MAX_KEY_BYTES = 256
# More NICs than any host has; keeps a record with full lists below MAX_VALUE_BYTES.
MAX_NICS = 16
MAX_DEPTH = 32
# So many control endpoints that were read are kept, to be one object where they are read again.
KEPT_ENDPOINTS = 1024

_U32 = (1 << 32) - 1
_QPN_MAX = (1 << 24) - 1
_JOB = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_GID = r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}"
_KEY = re.compile(
    rf"/shiftverbs/(?P<job>{_JOB})/qp/"
    rf"(?:(?P<gid>{_GID})|(?P<prefix>[0-9a-f]{{16}})\.(?P<lid>[1-9][0-9]{{0,4}}))/(?P<qpn>0|[1-9][0-9]{{0,7}})"
)

# What a member may be.
_JobName = Annotated[str, Meta(pattern=rf"^{_JOB}\Z")]
_Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Hex128 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Device = Annotated[str, Meta(min_length=1, max_length=64)]
_Lid = Annotated[int, Meta(ge=0, le=0xFFFF)]
_Mtu = Annotated[int, Meta(ge=1, le=5)]
_Qpn = Annotated[int, Meta(ge=0, le=_QPN_MAX)]
_Qkey = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_Rights = Annotated[int, Meta(ge=0, le=_U32)]


class RecordError(ValueError):
    """A key or a value that breaks the schema. `key` says which, `reason` why."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"{_printable(key)}: {reason}")
        self.key = key
        self.reason = reason


# Keys


class Key(msgspec.Struct, frozen=True, gc=False):
    """A key taken apart. For one by LID, gid is None; for one by GID, lid is None."""

    job: str
    gid: str | None
    lid: int | None
    subnet_prefix: int | None
    qpn: int


@functools.lru_cache(maxsize=4096)
def canonical_gid(gid: str) -> str:
    """A GID in the one spelling that keys and records use: eight groups of four lower-case hex digits.

    Raises ValueError for anything that is not a GID.
    """
    if "%" in gid:
        raise ValueError(f"not a GID: {gid!r}")
    # Not .exploded: from Python 3.13 on it writes an IPv4-mapped address, a RoCE port's usual GID, in dotted form.
    return ipaddress.IPv6Address(gid).packed.hex(":", 2)


@functools.lru_cache(maxsize=1024)
def _shared(text: str) -> str:
    """One object for a text that stands in a thousand records."""
    return text


def subnet_prefix(gid: str) -> int:
    """The upper 64 bits of a GID (IBA 4.1.1)."""
    return int(ipaddress.IPv6Address(gid)) >> 64


def job_prefix(job: str) -> str:
    """What every key of a job begins with."""
    if not re.fullmatch(_JOB, job):
        raise ValueError(f"not a job name: {job!r}")
    return f"/shiftverbs/{job}/"


def qp_key(job: str, gid: str, qpn: int) -> str:
    """The key of a QP known by its port's GID."""
    return f"{job_prefix(job)}qp/{canonical_gid(gid)}/{_checked(qpn, _QPN_MAX)}"  # as in _check_place


def qp_lid_key(job: str, gid: str, lid: int, qpn: int) -> str:
    """The key of a QP known by LID only (InfiniBand without GRH).

    gid: any GID of a port on that subnet, the peer's or one's own: only its subnet prefix counts.
    """
    if not 1 <= lid <= 0xFFFF:
        raise ValueError(f"not a LID: {lid}")
    return f"{job_prefix(job)}qp/{subnet_prefix(gid):016x}.{lid}/{_checked(qpn, _QPN_MAX)}"


def parse_key(key: str) -> Key:
    """Take a key apart. Raises RecordError for one that the functions above cannot have made."""
    match = _KEY.fullmatch(key) if isinstance(key, str) and len(key) <= MAX_KEY_BYTES else None
    if match is None:
        raise RecordError(str(key), "not a key of shiftverbs")
    qpn = int(match["qpn"])
    if qpn > _QPN_MAX:
        raise RecordError(key, f"QPN {qpn} has more than 24 bits")
    if match["lid"] is None:
        return Key(match["job"], match["gid"], None, None, qpn)
    lid = int(match["lid"])
    if lid > 0xFFFF:
        raise RecordError(key, f"LID {lid} has more than 16 bits")
    return Key(match["job"], None, lid, int(match["prefix"], 16), qpn)


# Records


class Route(msgspec.Struct, frozen=True, gc=False):
    """One end of an RC connection: what the other side puts into its address vector.

    gid: port GID, None where the peer knows none (InfiniBand without GRH); lid: 0 on Ethernet; qpn: QP number.
    """

    gid: str | None
    lid: _Lid
    qpn: _Qpn

    def __post_init__(self) -> None:
        if self.gid is not None:
            force_setattr(self, "gid", _gid_member(self.gid))

    def matches(self, other: Route) -> bool:
        """Whether both name the same QP: the QPN, and the GID where both know it, else the LID."""
        if self.qpn != other.qpn:
            return False
        if self.gid is not None and other.gid is not None:
            return self.gid == other.gid
        return self.lid == other.lid and self.lid != 0


class ShadowRoute(msgspec.Struct, frozen=True, gc=False):
    """One end of a shadow pair.

    device: the NIC's name (for messages only); mtu: active MTU as in `enum ibv_mtu`, 1 = 256 to 5 = 4096 bytes.
    """

    device: _Device
    gid: str
    lid: _Lid
    mtu: _Mtu
    qpn: _Qpn

    def __post_init__(self) -> None:
        force_setattr(self, "device", _device_member(self.device))
        force_setattr(self, "gid", _gid_member(self.gid))


class ControlEndpoint(msgspec.Struct, frozen=True, gc=False):
    """The UD QP of the control channel on one NIC.

    device, gid, lid, mtu: as in ShadowRoute; qkey: 31 bits, since the top bit marks privileged Q_Keys (IBA 10.2.5);
    secret: the port's half of the key under which peers talk to it (seal.py), 32 hex digits.
    """

    device: _Device
    gid: str
    lid: _Lid
    mtu: _Mtu
    qpn: _Qpn
    qkey: _Qkey
    secret: _Hex128

    def __post_init__(self) -> None:
        force_setattr(self, "device", _device_member(self.device))
        force_setattr(self, "gid", _gid_member(self.gid))

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """All but the secret."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "secret"]

    def __repr__(self) -> str:
        return f"ControlEndpoint({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class QpRecord(msgspec.Struct, frozen=True, gc=False):
    """What a process publishes about one of its QPs.

    job: the namespace it belongs to; instance: the process, 16 hex digits drawn at its start; default: the QP's
    own default route; peer: the route it is connected to, None before RTR; peer_life: the life of the entry
    found there, None until it was read; shadows: pair k is entry k-1, in the order of the publisher's backups;
    control: one UD QP per NIC, entry 0 on the default NIC, entry k on backup k; life: what messages call this QP (no
    secret: it is on the wire), 16 hex digits, other ones each time the application connects it; qp_access_flags: the
    remote rights of the QP (IBV_ACCESS_* bits).
    """

    job: _JobName
    instance: _Hex64
    default: Route
    peer: Route | None
    peer_life: _Hex64 | None
    shadows: Annotated[tuple[ShadowRoute, ...], Meta(max_length=MAX_NICS)]
    control: Annotated[tuple[ControlEndpoint, ...], Meta(max_length=MAX_NICS)]
    life: _Hex64
    qp_access_flags: _Rights

    def names(self, other: QpRecord) -> bool:
        """Whether this entry names `other` as its peer: by default route, and by its present life."""
        return (
            self.job == other.job
            and self.peer is not None
            and self.peer.matches(other.default)
            and self.peer_life == other.life
        )

    def begins_arm(self, other: QpRecord) -> bool:
        """Which of two paired QPs begins ARM; both sides see it alike."""
        return (self.instance, self.life) < (other.instance, other.life)


def mutual(mine: QpRecord, theirs: QpRecord) -> bool:
    """Whether two entries pair: each names the other's default route and life."""
    return mine.names(theirs) and theirs.names(mine)


# Encoding


class _Entry(QpRecord, frozen=True, gc=False, kw_only=True):
    """A record as it stands in the store."""

    kind: Literal["qp"]
    version: Literal[2]


class _Header(msgspec.Struct):
    """What says whether an entry is for this release."""

    kind: msgspec.Raw = msgspec.Raw(b'"qp"')
    version: msgspec.Raw = msgspec.Raw(str(VERSION).encode())


_write = msgspec.json.Encoder(order="sorted").encode
_read = msgspec.json.Decoder(_Entry).decode
_read_header = msgspec.json.Decoder(_Header).decode
# Those that were read. Only sound ones are compared: in them no True stands for a 1.
_endpoints: dict[ControlEndpoint, ControlEndpoint] = {}


def encode_value(key: str, record: QpRecord) -> str:
    """The text that goes into the store for `record`.

    Raises RecordError when key or record break the schema: what we refuse to read we do not write either.
    """
    if not isinstance(record, QpRecord):
        raise RecordError(key, "the value is not a record of a QP")
    entry = _Entry(
        record.job, record.instance, record.default, record.peer, record.peer_life, record.shadows, record.control,
        record.life, record.qp_access_flags, kind="qp", version=VERSION,
    )  # fmt: skip
    try:
        text = _write(entry).decode()
        if not text.isascii():
            text = json.dumps(json.loads(text), separators=(",", ":"))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(key, f"not JSON: {error}") from None
    decode_value(key, text)
    return text


def decode_value(key: str, text: str | bytes) -> QpRecord:
    """The record that stands under `key`.

    Raises RecordError, naming the key, for anything malformed, foreign, of another version or too large.
    """
    if len(text) > MAX_VALUE_BYTES:
        raise RecordError(key, f"the value has {len(text)} bytes, {MAX_VALUE_BYTES} are allowed")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        elif not text.isascii() and len(text.encode("utf-8")) > MAX_VALUE_BYTES:
            raise RecordError(key, f"the value has more than {MAX_VALUE_BYTES} bytes")
        if _depth_exceeds(text, MAX_DEPTH):
            raise RecordError(key, "nested too deeply")
        entry = _read(text)
    except RecordError:
        raise
    except msgspec.ValidationError as error:
        raise RecordError(key, _foreign(text) or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(key, f"not JSON: {error}") from None
    record = QpRecord(
        _shared(entry.job), _shared(entry.instance), entry.default, entry.peer, entry.peer_life, entry.shadows,
        tuple([_kept(endpoint) for endpoint in entry.control]), entry.life, entry.qp_access_flags,
    )  # fmt: skip
    _check_place(key, record)
    return record


def _foreign(text: str | bytes) -> str | None:
    """Why an entry is not for this release. Of one of another version it is no matter what else is different."""
    try:
        header = _read_header(text)
    except (ValueError, RecursionError):
        return None
    version, kind = bytes(header.version).decode(), bytes(header.kind).decode()
    if version != str(VERSION):
        return f"version is {_printable(version, 40)}, this release reads {VERSION}"
    return None if kind == '"qp"' else f'kind is {_printable(kind, 40)}, not "qp"'


def _kept(endpoint: ControlEndpoint) -> ControlEndpoint:
    """The one object for an endpoint, which all QPs of a NIC have."""
    known = _endpoints.get(endpoint)
    if known is not None:
        return known
    if len(_endpoints) >= KEPT_ENDPOINTS:
        _endpoints.clear()
    _endpoints[endpoint] = endpoint
    return endpoint


def _check_place(key: str, record: QpRecord) -> None:
    """Whether a record, sound in itself, belongs under its key."""
    default = record.default
    if default.gid is not None and key == f"/shiftverbs/{record.job}/qp/{default.gid}/{default.qpn}":
        return  # nearly always
    parsed = parse_key(key)
    if record.job != parsed.job:
        raise RecordError(key, f"the value belongs to job {record.job!r}")
    if default.qpn != parsed.qpn:
        raise RecordError(key, f"the value is about QPN {default.qpn}")
    if parsed.gid is not None and default.gid != parsed.gid:
        raise RecordError(key, f"the value is about GID {default.gid}")
    if parsed.lid is not None and default.lid != parsed.lid:
        raise RecordError(key, f"the value is about LID {default.lid}")
    if parsed.subnet_prefix is not None and (
        default.gid is None or subnet_prefix(default.gid) != parsed.subnet_prefix
    ):
        raise RecordError(key, f"the value is about GID {default.gid}, on another subnet")


def _gid_member(gid: str) -> str:
    try:
        return canonical_gid(gid)
    except ValueError:
        raise ValueError("gid is not a GID") from None


@functools.lru_cache(maxsize=1024)
def _device_member(name: str) -> str:
    """The name, one object for all that have it."""
    if not name.isprintable():
        raise ValueError("device is not of printable characters")
    return name


def _depth_exceeds(text: str, limit: int) -> bool:
    # The C scanner recurses per level: it must not be handed thousands of brackets. Brackets inside strings are
    # counted too, which only matters for strings no record contains.
    if text.count("[") + text.count("{") <= limit:
        return False
    depth = 0
    for char in text:
        if char in "[{":
            depth += 1
            if depth > limit:
                return True
        elif char in "]}":
            depth -= 1
    return False


def _checked(number: int, highest: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= highest:
        raise ValueError(f"{number!r} is not a number from 0 to {highest}")
    return number


def _printable(key: object, limit: int = MAX_KEY_BYTES) -> str:
    text = str(key)
    text = text if len(text) <= limit else text[:limit] + "..."
    return text if text.isprintable() else repr(text)
