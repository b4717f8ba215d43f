# SPDX-License-Identifier: BSD-3-Clause
"""What the user configures: the SHIFTVERBS_* variables, read and checked in one place.

`Config.from_environ` is the only reader of the environment. Nothing is read at import, and nothing but the
existence of the named certificate and password files is checked on the file system.

The fields below `# internal` have no variable: they are handed from here to the parts that use them, so that a
test can choose its own.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

logger = logging.getLogger("shiftverbs.config")

DEFAULT_ETCD_PORT = 2379
DEFAULT_JOB = "default"
DEADLINE_RANGE_MS = (10, 3_600_000)
# struct sockaddr_un: 108 bytes with the terminating zero.
MAX_SOCKET_PATH = 107
# Values of SHIFTVERBS_STRAGGLER.
STRAGGLER_MODES = ("off", "observe", "migrate")
# Values of SHIFTVERBS_BROKER that are no paths.
SHARED_BROKER = "shared"
OWN_BROKER = "own"

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_PREFIX = "SHIFTVERBS_"


class ConfigError(ValueError):
    """A variable has a value that cannot be used; the message names variable, value and what is allowed."""

    def __init__(self, variable: str, value: str, allowed: str):
        super().__init__(f"{variable}={value!r}: {allowed}")
        self.variable = variable
        self.value = value
        self.allowed = allowed


class Endpoint(Struct, frozen=True):
    """One etcd server.

    host: name or address (IPv6 without brackets); port: TCP port; tls: whether to speak TLS.
    """

    host: str
    port: int
    tls: bool = False

    @property
    def url(self) -> str:
        """The endpoint as etcd's own tools print it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


class Config(Struct, frozen=True):
    """Everything configurable. Made by `from_environ`, or directly by a test. Units end the names."""

    # SHIFTVERBS_ETCD: empty means no exchanger, so every QP stays unprotected.
    etcd: tuple[Endpoint, ...] = ()
    # SHIFTVERBS_ETCD_CA, _CERT, _KEY: PEM files, absolute paths.
    etcd_ca: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    # SHIFTVERBS_ETCD_USER, _PASSWORD_FILE. The password itself is read by the broker at each login.
    etcd_user: str | None = None
    etcd_password_file: str | None = None
    # SHIFTVERBS_JOB
    job: str = DEFAULT_JOB
    # SHIFTVERBS_BACKUP: ((device, (first backup, second backup, ...)), ...); None means choose by itself.
    backup: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    # SHIFTVERBS_DISABLE, SHIFTVERBS_REQUIRE
    disable: bool = False
    require: bool = False
    # SHIFTVERBS_REQUIRE_DEADLINE_MS: from RTS on, with SHIFTVERBS_REQUIRE.
    require_deadline_ms: int = 30_000
    # SHIFTVERBS_PEER_DEADLINE_MS
    peer_deadline_ms: int = 2000
    # SHIFTVERBS_BROKER: SHARED_BROKER, OWN_BROKER, or the UNIX socket of a broker that somebody looks after.
    broker: str = SHARED_BROKER

    # SHIFTVERBS_STRAGGLER: one of STRAGGLER_MODES.
    straggler: str = "observe"

    # SHIFTVERBS_METRICS: where to serve Prometheus metrics: address, first and last port to try.
    metrics: tuple[str, int, int] | None = None
    # SHIFTVERBS_RUN_DIR: of the sockets that `shiftverbs status` asks; None means telemetry's default.
    run_dir: str | None = None
    # SHIFTVERBS_DEVICE: the NIC of shiftverbs.transport; None means the first.
    device: str | None = None
    # SHIFTVERBS_INVARIANTS: for tests of ours.
    invariants: bool = False

    # internal: exchanger
    lease_ttl_s: int = 10
    etcd_timeout_ms: int = 3000
    etcd_backoff_min_ms: int = 100
    etcd_backoff_max_ms: int = 10_000
    broker_batch_window_us: int = 1000
    broker_backoff_min_ms: int = 100
    broker_backoff_max_ms: int = 10_000
    broker_idle_exit_s: int = 60
    exchanger_close_ms: int = 1000

    def __post_init__(self) -> None:
        """Refuse combinations that no single variable shows to be wrong."""
        if (self.etcd_cert is None) != (self.etcd_key is None):
            given, missing = (
                ("SHIFTVERBS_ETCD_CERT", "SHIFTVERBS_ETCD_KEY")
                if self.etcd_key is None
                else ("SHIFTVERBS_ETCD_KEY", "SHIFTVERBS_ETCD_CERT")
            )
            raise ConfigError(given, str(self.etcd_cert or self.etcd_key), f"needs {missing} too")
        if (self.etcd_user is None) != (self.etcd_password_file is None):
            given, missing = (
                ("SHIFTVERBS_ETCD_USER", "SHIFTVERBS_ETCD_PASSWORD_FILE")
                if self.etcd_password_file is None
                else ("SHIFTVERBS_ETCD_PASSWORD_FILE", "SHIFTVERBS_ETCD_USER")
            )
            raise ConfigError(given, str(self.etcd_user or self.etcd_password_file), f"needs {missing} too")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the SHIFTVERBS_* variables.

        environ: the variables, os.environ when None. An empty value counts as not set.

        Raises ConfigError for a value that cannot be used. A SHIFTVERBS_* variable that does not exist is
        reported once in the log, with the nearest one that does.
        """
        if environ is None:
            environ = os.environ
        for name in unknown_variables(environ):
            logger.warning("%s", _unknown_message(name))
        fields: dict[str, Any] = {
            field: read(variable, environ[variable].strip())
            for variable, (field, read, _, _) in VARIABLES.items()
            if environ.get(variable, "").strip()
        }
        tls = any(fields.get(name) is not None for name in ("etcd_ca", "etcd_cert", "etcd_key"))
        if "etcd" in fields:
            fields["etcd"] = _endpoints("SHIFTVERBS_ETCD", environ["SHIFTVERBS_ETCD"].strip(), tls)
        if any(endpoint.tls for endpoint in fields.get("etcd", ())) and "etcd_ca" not in fields:
            import ssl  # here only: a process without https has no use for OpenSSL

            system_ca = ssl.get_default_verify_paths().cafile
            if system_ca is None:
                raise ConfigError(
                    "SHIFTVERBS_ETCD",
                    environ["SHIFTVERBS_ETCD"],
                    "https needs SHIFTVERBS_ETCD_CA, because this system has no CA file of its own",
                )
            fields["etcd_ca"] = system_ca
        return cls(**fields)

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed. changes: fields by name. Raises ConfigError for a bad combination."""
        return replace(self, **changes)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """The SHIFTVERBS_* names that mean nothing, sorted. environ: the variables, for example os.environ."""
    return sorted(name for name in environ if name.startswith(_PREFIX) and name not in VARIABLES)


def _unknown_message(name: str) -> str:
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)
    return f"{name} is not a variable of shiftverbs and is ignored; did you mean {near[0]}?"


def _boolean(variable: str, value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise ConfigError(variable, value, "must be 1 or 0")


def _job(variable: str, value: str) -> str:
    if not _JOB.fullmatch(value):
        raise ConfigError(
            variable,
            value,
            "must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )
    return value


def _deadline_ms(variable: str, value: str) -> int:
    low, high = DEADLINE_RANGE_MS
    # int() alone would also take "1_000", " 7" and other scripts' digits.
    if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
        raise ConfigError(variable, value, f"must be a whole number of milliseconds from {low} to {high}")
    return int(value)


def _readable_file(variable: str, value: str) -> str:
    path = os.path.abspath(os.path.expanduser(value))
    if not os.path.isfile(path):
        raise ConfigError(variable, value, "must be the path of an existing file")
    if not os.access(path, os.R_OK):
        raise ConfigError(variable, value, "must be a file this user can read")
    return path


def _broker(variable: str, value: str) -> str:
    if value in (SHARED_BROKER, OWN_BROKER):
        return value
    path = os.path.abspath(os.path.expanduser(value))
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(variable, value, f"must be a socket's path of at most {MAX_SOCKET_PATH} bytes")
    if os.path.isdir(path):
        raise ConfigError(variable, value, "must be a socket's path, not a directory")
    return path


def _straggler(variable: str, value: str) -> str:
    if value.lower() not in STRAGGLER_MODES:
        raise ConfigError(variable, value, f"must be one of {', '.join(STRAGGLER_MODES)}")
    return value.lower()


def _metrics(variable: str, value: str) -> tuple[str, int, int]:
    allowed = "must be a port, PORT-PORT, or either behind ADDRESS: (an IPv6 address in brackets); 0 is any free port"
    found = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):)?([0-9]{1,5})(?:-([0-9]{1,5}))?", value)
    if found is None:
        raise ConfigError(variable, value, allowed)
    host, first, last = found[1] or "127.0.0.1", int(found[2]), int(found[3] or found[2])
    if first > last or last > 65535 or (first == 0 and last):
        raise ConfigError(variable, value, allowed)
    return host.strip("[]"), first, last


def _device(variable: str, value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ConfigError(variable, value, "must be the name of one device")
    return value


def _directory(variable: str, value: str) -> str:
    path = os.path.abspath(os.path.expanduser(value))
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(variable, value, "must be a directory")
    return path


def _user(variable: str, value: str) -> str:
    if len(value) > 256 or not value.isprintable():
        raise ConfigError(variable, value, "must be a user name of at most 256 printable characters")
    return value


def _endpoint(variable: str, whole: str, text: str, tls_default: bool) -> Endpoint:
    allowed = "must be host:port, [IPv6]:port or http(s)://host:port, comma separated"

    def wrong(detail: str) -> ConfigError:
        return ConfigError(variable, whole, f"{allowed} ({text!r}: {detail})")

    scheme, separator, rest = text.rpartition("://")
    if separator and scheme.lower() not in ("http", "https"):
        raise wrong(f"unknown scheme {scheme!r}")
    if scheme.lower() == "http" and tls_default:
        raise wrong("http contradicts SHIFTVERBS_ETCD_CA or SHIFTVERBS_ETCD_CERT")
    tls = scheme.lower() == "https" or (not separator and tls_default)
    rest = rest.removesuffix("/")
    if "/" in rest or "@" in rest or "?" in rest:
        raise wrong("neither a path nor a login belongs here")
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or ":" not in host or not _IPV6.fullmatch(host):
            raise wrong("not an IPv6 address in brackets")
        if port and not port.startswith(":"):
            raise wrong("no colon after the bracket")
        port = port[1:] if port else str(DEFAULT_ETCD_PORT)
    else:
        if rest.count(":") > 1:
            raise wrong("an IPv6 address needs brackets")
        host, colon, port = rest.partition(":")
        if not _HOST.fullmatch(host):
            raise wrong("not a host name or address")
        port = port if colon else str(DEFAULT_ETCD_PORT)
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise wrong("the port must be a number from 1 to 65535")
    return Endpoint(host, int(port), tls)


def _endpoints(variable: str, value: str, tls_default: bool = False) -> tuple[Endpoint, ...]:
    found: list[Endpoint] = []
    for text in value.split(","):
        endpoint = _endpoint(variable, value, text.strip(), tls_default)
        if endpoint not in found:
            found.append(endpoint)
    if len({endpoint.tls for endpoint in found}) > 1:
        raise ConfigError(variable, value, "must be all https or all http")
    return tuple(found)


def _backup_map(variable: str, value: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    allowed = "must read device=backup,backup;device=backup"
    found: dict[str, tuple[str, ...]] = {}
    for part in value.split(";"):
        if not part.strip():
            continue
        device, equals, names = part.partition("=")
        device = device.strip()
        backups = tuple(name.strip() for name in names.split(","))
        if not equals or not all(_DEVICE.fullmatch(name) for name in (device, *backups)):
            raise ConfigError(variable, value, f"{allowed} ({part.strip()!r} does not)")
        if device in found:
            raise ConfigError(variable, value, f"{allowed} ({device!r} stands there twice)")
        if device in backups:
            raise ConfigError(variable, value, f"{allowed} ({device!r} cannot back up itself)")
        if len(set(backups)) != len(backups):
            raise ConfigError(variable, value, f"{allowed} ({device!r} names a backup twice)")
        found[device] = backups
    if not found:
        raise ConfigError(variable, value, allowed)
    return tuple(found.items())


class Variable(NamedTuple):
    """One variable, as it is read and as the reference shows it.

    field: of Config; read: checks a value and gives what the field holds; form: how a value is written; meaning: what
    it does, and what holds where it is not set and the field's default does not say so.
    """

    field: str
    read: Callable[[str, str], object]
    form: str
    meaning: str


#: All of them, in the documentation's order: what is read, checked and shown in the reference.
VARIABLES: dict[str, Variable] = {
    "SHIFTVERBS_ETCD": Variable(
        "etcd",
        _endpoints,
        "`host:port`, `[IPv6]:port` or `http(s)://host:port`, comma separated",
        "The etcd servers through which peers find each other's shadow QPs. Not set: no QP is protected.",
    ),
    "SHIFTVERBS_ETCD_CA": Variable(
        "etcd_ca",
        _readable_file,
        "a PEM file",
        "The CA that signed etcd's certificate; turns TLS on. Not set: with https, the system's CA file.",
    ),
    "SHIFTVERBS_ETCD_CERT": Variable(
        "etcd_cert",
        _readable_file,
        "a PEM file",
        "Our certificate, where etcd asks for one; turns TLS on. Needs SHIFTVERBS_ETCD_KEY.",
    ),
    "SHIFTVERBS_ETCD_KEY": Variable(
        "etcd_key",
        _readable_file,
        "a PEM file",
        "Its key. Needs SHIFTVERBS_ETCD_CERT.",
    ),
    "SHIFTVERBS_ETCD_USER": Variable(
        "etcd_user",
        _user,
        "at most 256 printable characters",
        "Log in to etcd as this user. Needs SHIFTVERBS_ETCD_PASSWORD_FILE.",
    ),
    "SHIFTVERBS_ETCD_PASSWORD_FILE": Variable(
        "etcd_password_file",
        _readable_file,
        "a file",
        "Holds that user's password; read again at each login. Needs SHIFTVERBS_ETCD_USER.",
    ),
    "SHIFTVERBS_JOB": Variable(
        "job",
        _job,
        "1 to 64 letters, digits, `.`, `_`, `-`, the first a letter or digit",
        "Keeps jobs on one etcd apart: only processes of the same job find each other.",
    ),
    "SHIFTVERBS_BACKUP": Variable(
        "backup",
        _backup_map,
        "`device=backup,backup;device=backup`",
        "Which NICs back up which, in order. A device that it does not name has no backup. Not set: every other "
        "device with an active port of the same link layer.",
    ),
    "SHIFTVERBS_DISABLE": Variable(
        "disable", _boolean, "`1` or `0`", "1: no failover, as with plain pyverbs."
    ),
    "SHIFTVERBS_REQUIRE": Variable(
        "require",
        _boolean,
        "`1` or `0`",
        "1: a QP that cannot be protected raises ShiftError, when it is made or in the verb that takes it to RTS.",
    ),
    "SHIFTVERBS_REQUIRE_DEADLINE_MS": Variable(
        "require_deadline_ms",
        _deadline_ms,
        f"milliseconds, {DEADLINE_RANGE_MS[0]} to {DEADLINE_RANGE_MS[1]}",
        "With SHIFTVERBS_REQUIRE: how long from RTS on a QP may take to be PROTECTED; then its WRs end in flushes.",
    ),
    "SHIFTVERBS_PEER_DEADLINE_MS": Variable(
        "peer_deadline_ms",
        _deadline_ms,
        f"milliseconds, {DEADLINE_RANGE_MS[0]} to {DEADLINE_RANGE_MS[1]}",
        "How long a silent peer delays the original error. More on machines that stop for seconds.",
    ),
    "SHIFTVERBS_BROKER": Variable(
        "broker",
        _broker,
        f"`{SHARED_BROKER}`, `{OWN_BROKER}`, or a path of at most {MAX_SOCKET_PATH} bytes",
        "Which process speaks to etcd for this one. Not set, or shared: one for all processes of this user and host "
        "with the same settings, started by the first of them, its socket in SHIFTVERBS_RUN_DIR; where none can be "
        "shared, as own. Own: one for this process alone. A path: whoever listens on that socket.",
    ),
    "SHIFTVERBS_STRAGGLER": Variable(
        "straggler",
        _straggler,
        " or ".join(f"`{mode}`" for mode in STRAGGLER_MODES),
        "What is done about a path that works and is slow. Observe: an event, a log line, a line in `shiftverbs top`. "
        "Migrate: QPs are moved off it as well, as `qp.shift.migrate()` does, and home again. Off: nobody measures.",
    ),
    "SHIFTVERBS_METRICS": Variable(
        "metrics",
        _metrics,
        "`PORT` or `PORT-PORT`, either behind `ADDRESS:` (IPv6 in brackets); 0 is any free port",
        "Serve Prometheus metrics there, on the first port that is free; the address is 127.0.0.1 unless named. "
        "Not set: nothing is served.",
    ),
    "SHIFTVERBS_RUN_DIR": Variable(
        "run_dir",
        _directory,
        "a directory",
        "Where processes have the sockets that `shiftverbs status` asks, and the shared broker its. Not set: "
        "`$XDG_RUNTIME_DIR/shiftverbs` if there is such a directory, else `$TMPDIR/shiftverbs-UID`.",
    ),
    "SHIFTVERBS_DEVICE": Variable(
        "device",
        _device,
        "the name of a device",
        "The NIC of a process group of `shiftverbs.torch`, and of what else names none. Not set: the first one.",
    ),
    "SHIFTVERBS_INVARIANTS": Variable(
        "invariants",
        _boolean,
        "`1` or `0`",
        "1: for tests of shiftverbs itself: after each event of a QP's failover, what must always hold of it is "
        "checked. Where it does not hold, that QP loses its protection, and the log says what.",
    ),
}
