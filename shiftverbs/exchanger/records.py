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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

VERSION = 2
# 128 values of this size stay well below etcd's limit of 1.5 MiB a request.
MAX_VALUE_BYTES = 8192
MAX_KEY_BYTES = 256
# More NICs than any host has; keeps a record with full lists below MAX_VALUE_BYTES.
MAX_NICS = 16
MAX_DEPTH = 32
# Of so many control endpoints that were read it is known what they are, where their text is no longer than usual.
KEPT_ENDPOINTS = 1024
_USUAL_TEXT = 512

_U32 = (1 << 32) - 1
_QPN_MAX = (1 << 24) - 1
_JOB = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_GID = r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}"
_KEY = re.compile(
    rf"/shiftverbs/(?P<job>{_JOB})/qp/"
    rf"(?:(?P<gid>{_GID})|(?P<prefix>[0-9a-f]{{16}})\.(?P<lid>[1-9][0-9]{{0,4}}))/(?P<qpn>0|[1-9][0-9]{{0,7}})"
)
_HEX64 = re.compile(r"[0-9a-f]{16}")
_HEX128 = re.compile(r"[0-9a-f]{32}")


class RecordError(ValueError):
    """A key or a value that breaks the schema. `key` says which, `reason` why."""

    def __init__(self, key: str, reason: str):
        super().__init__(f"{_printable(key)}: {reason}")
        self.key = key
        self.reason = reason


# Keys


@dataclass(frozen=True)
class Key:
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
    return f"{job_prefix(job)}qp/{canonical_gid(gid)}/{_checked(qpn, _QPN_MAX)}"


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


@dataclass(frozen=True)
class Route:
    """One end of an RC connection: what the other side puts into its address vector.

    gid: port GID, None where the peer knows none (InfiniBand without GRH); lid: 0 on Ethernet; qpn: QP number.
    """

    gid: str | None
    lid: int
    qpn: int

    def __post_init__(self) -> None:
        if self.gid is not None:
            object.__setattr__(self, "gid", canonical_gid(self.gid))

    def matches(self, other: Route) -> bool:
        """Whether both name the same QP: the QPN, and the GID where both know it, else the LID."""
        if self.qpn != other.qpn:
            return False
        if self.gid is not None and other.gid is not None:
            return self.gid == other.gid
        return self.lid == other.lid and self.lid != 0

    def to_json(self) -> dict[str, Any]:
        """The route as it stands in a record."""
        return {"gid": self.gid, "lid": self.lid, "qpn": self.qpn}

    @classmethod
    def from_json(cls, value: object, key: str = "route", where: str = "") -> Route:
        """The route out of a record. Raises RecordError."""
        fields = _Fields(key, where, value)
        return cls(fields.gid("gid", optional=True), fields.integer("lid", 0, 0xFFFF), fields.qpn("qpn"))


@dataclass(frozen=True)
class ShadowRoute:
    """One end of a shadow pair.

    device: the NIC's name (for messages only); mtu: active MTU as in `enum ibv_mtu`, 1 = 256 to 5 = 4096 bytes.
    """

    device: str
    gid: str
    lid: int
    mtu: int
    qpn: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "gid", canonical_gid(self.gid))

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in a record."""
        return {"device": self.device, "gid": self.gid, "lid": self.lid, "mtu": self.mtu, "qpn": self.qpn}

    @classmethod
    def from_json(cls, value: object, key: str = "shadow", where: str = "") -> ShadowRoute:
        """The entry out of a record. Raises RecordError."""
        fields = _Fields(key, where, value)
        return cls(
            fields.device("device"), fields.gid("gid"), fields.integer("lid", 0, 0xFFFF),
            fields.integer("mtu", 1, 5), fields.qpn("qpn"),
        )  # fmt: skip


@dataclass(frozen=True)
class ControlEndpoint:
    """The UD QP of the control channel on one NIC.

    device, gid, lid, mtu: as in ShadowRoute; qkey: 31 bits, since the top bit marks privileged Q_Keys (IBA 10.2.5);
    secret: the port's half of the key under which peers talk to it (seal.py), 32 hex digits.
    """

    device: str
    gid: str
    lid: int
    mtu: int
    qpn: int
    qkey: int
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gid", canonical_gid(self.gid))

    def to_json(self) -> dict[str, Any]:
        """The entry as it stands in a record."""
        return {
            "device": self.device, "gid": self.gid, "lid": self.lid, "mtu": self.mtu,
            "qpn": self.qpn, "qkey": self.qkey, "secret": self.secret,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: object, key: str = "control", where: str = "") -> ControlEndpoint:
        """The entry out of a record; all QPs of a NIC have the same one, and it is one object. Raises RecordError."""
        text = repr(value)  # which tells 1 from True, as equality does not
        known = _endpoints.get(text)
        if known is not None:
            return known
        fields = _Fields(key, where, value)
        made = cls(
            fields.device("device"), fields.gid("gid"), fields.integer("lid", 0, 0xFFFF),
            fields.integer("mtu", 1, 5), fields.qpn("qpn"), fields.integer("qkey", 0, (1 << 31) - 1),
            fields.hex128("secret"),
        )  # fmt: skip
        if len(text) <= _USUAL_TEXT:
            if len(_endpoints) >= KEPT_ENDPOINTS:
                _endpoints.clear()
            _endpoints[text] = made
        return made


# Those that were read, by their texts.
_endpoints: dict[str, ControlEndpoint] = {}


@dataclass(frozen=True)
class QpRecord:
    """What a process publishes about one of its QPs.

    job: the namespace it belongs to; instance: the process, 16 hex digits drawn at its start; default: the QP's
    own default route; peer: the route it is connected to, None before RTR; peer_life: the life of the entry
    found there, None until it was read; shadows: pair k is entry k-1, in the order of the publisher's backups;
    control: one UD QP per NIC, entry 0 on the default NIC, entry k on backup k; life: what messages call this QP (no
    secret: it is on the wire), 16 hex digits, other ones each time the application connects it; qp_access_flags: the
    remote rights of the QP (IBV_ACCESS_* bits).
    """

    job: str
    instance: str
    default: Route
    peer: Route | None
    peer_life: str | None
    shadows: tuple[ShadowRoute, ...]
    control: tuple[ControlEndpoint, ...]
    life: str
    qp_access_flags: int

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {
            "version": VERSION,
            "kind": "qp",
            "job": self.job,
            "instance": self.instance,
            "default": self.default.to_json(),
            "peer": None if self.peer is None else self.peer.to_json(),
            "peer_life": self.peer_life,
            "shadows": [shadow.to_json() for shadow in self.shadows],
            "control": [endpoint.to_json() for endpoint in self.control],
            "life": self.life,
            "qp_access_flags": self.qp_access_flags,
        }

    @classmethod
    def from_json(cls, value: object, key: str = "qp record") -> QpRecord:
        """The record out of a JSON object; `key` is named in the RecordError raised for a bad one."""
        fields = _Fields(key, "", value)
        fields.header("qp")
        return cls(
            job=fields.job("job"),
            instance=fields.hex64("instance"),
            default=Route.from_json(fields.take("default"), key, "default"),
            peer=fields.optional("peer", lambda peer: Route.from_json(peer, key, "peer")),
            peer_life=fields.hex64("peer_life", optional=True),
            shadows=tuple(
                ShadowRoute.from_json(entry, key, f"shadows[{i}]") for i, entry in fields.entries("shadows")
            ),
            control=tuple(
                ControlEndpoint.from_json(entry, key, f"control[{i}]")
                for i, entry in fields.entries("control")
            ),
            life=fields.hex64("life"),
            qp_access_flags=fields.integer("qp_access_flags", 0, _U32),
        )

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


def encode_value(key: str, value: dict[str, Any]) -> str:
    """The text that goes into the store for `value`.

    Raises RecordError when key or value break the schema: what we refuse to read we do not write either.
    """
    if not isinstance(value, dict):
        raise RecordError(key, "the value is not an object")
    try:
        text = json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(key, f"not JSON: {error}") from None
    # ASCII, by json.dumps: characters are bytes.
    if len(text) > MAX_VALUE_BYTES:
        raise RecordError(key, f"the value has {len(text)} bytes, {MAX_VALUE_BYTES} are allowed")
    if _depth_exceeds(text, MAX_DEPTH):
        raise RecordError(key, "nested too deeply")
    _check_value(key, value)
    return text


def decode_value(key: str, text: str | bytes) -> dict[str, Any]:
    """Check what stands under `key` and return it as a dict fit for QpRecord.from_json.

    Raises RecordError, naming the key, for anything malformed, foreign, of another version or too large.
    """
    parse_key(key)
    if len(text) > MAX_VALUE_BYTES:
        raise RecordError(key, f"the value has {len(text)} bytes, {MAX_VALUE_BYTES} are allowed")
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        elif len(text.encode("utf-8")) > MAX_VALUE_BYTES:
            raise RecordError(key, f"the value has more than {MAX_VALUE_BYTES} bytes")
        if _depth_exceeds(text, MAX_DEPTH):
            raise RecordError(key, "nested too deeply")
        value = json.loads(text, parse_constant=_no_constant)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(key, f"not JSON: {error}") from None
    _check_value(key, value)
    return value


def _check_value(key: str, value: object) -> None:
    """Whether a record has the right shape and belongs under its key."""
    parsed = parse_key(key)
    qp = QpRecord.from_json(value, key)
    if qp.job != parsed.job:
        raise RecordError(key, f"the value belongs to job {qp.job!r}")
    if qp.default.qpn != parsed.qpn:
        raise RecordError(key, f"the value is about QPN {qp.default.qpn}")
    if parsed.gid is not None and qp.default.gid != parsed.gid:
        raise RecordError(key, f"the value is about GID {qp.default.gid}")
    if parsed.lid is not None and qp.default.lid != parsed.lid:
        raise RecordError(key, f"the value is about LID {qp.default.lid}")
    if parsed.subnet_prefix is not None and (
        qp.default.gid is None or subnet_prefix(qp.default.gid) != parsed.subnet_prefix
    ):
        raise RecordError(key, f"the value is about GID {qp.default.gid}, on another subnet")


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


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _checked(number: int, highest: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= highest:
        raise ValueError(f"{number!r} is not a number from 0 to {highest}")
    return number


def _printable(key: object, limit: int = MAX_KEY_BYTES) -> str:
    text = str(key)
    text = text if len(text) <= limit else text[:limit] + "..."
    return text if text.isprintable() else repr(text)


class _Fields:
    """Checked access to the members of one JSON object."""

    def __init__(self, key: str, where: str, value: object):
        self._key = key
        self._where = where
        if not isinstance(value, dict):
            self.fail("" if where else "the value", f"is {_type_name(value)}, not an object")
        self._value: dict[str, Any] = value

    def fail(self, name: str, problem: str) -> NoReturn:
        place = ".".join(part for part in (self._where, name) if part)
        raise RecordError(self._key, f"{place} {problem}")

    def take(self, name: str) -> Any:
        if name not in self._value:
            self.fail(name, "is missing")
        return self._value[name]

    def header(self, kind: str) -> None:
        version = self.take("version")
        if isinstance(version, bool) or version != VERSION:
            self.fail("version", f"is {_short(version)}, this release reads {VERSION}")
        if self.take("kind") != kind:
            self.fail("kind", f"is {_short(self.take('kind'))}, not {kind!r}")

    def optional(self, name: str, read: Callable[[Any], Any]) -> Any:
        value = self.take(name)
        return None if value is None else read(value)

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(name, f"is {_type_name(value)}, not a whole number")
        if not low <= value <= high:
            self.fail(name, f"is out of range {low} to {high}")
        return value

    def qpn(self, name: str) -> int:
        return self.integer(name, 0, _QPN_MAX)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            self.fail(name, f"is {_type_name(value)}, not a string")
        return value

    def hex64(self, name: str, optional: bool = False) -> Any:
        if optional and self.take(name) is None:
            return None
        value = self.text(name)
        if not _HEX64.fullmatch(value):
            self.fail(name, "is not 16 lower-case hex digits")
        return value

    def hex128(self, name: str) -> str:
        value = self.text(name)
        if not _HEX128.fullmatch(value):
            self.fail(name, "is not 32 lower-case hex digits")
        return value

    def job(self, name: str) -> str:
        value = self.text(name)
        if not re.fullmatch(_JOB, value):
            self.fail(name, "is not a job name")
        return value

    def device(self, name: str) -> str:
        value = self.text(name)
        if not 1 <= len(value) <= 64 or not value.isprintable():
            self.fail(name, "is not a device name of 1 to 64 printable characters")
        return value

    def gid(self, name: str, optional: bool = False) -> Any:
        if optional and self.take(name) is None:
            return None
        value = self.text(name)
        try:
            return canonical_gid(value)
        except ValueError:
            self.fail(name, "is not a GID")

    def entries(self, name: str) -> Iterable[tuple[int, Any]]:
        value = self.take(name)
        if not isinstance(value, list):
            self.fail(name, f"is {_type_name(value)}, not a list")
        if len(value) > MAX_NICS:
            self.fail(name, f"has {len(value)} entries, {MAX_NICS} are allowed")
        return list(enumerate(value))


def _type_name(value: object) -> str:
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
