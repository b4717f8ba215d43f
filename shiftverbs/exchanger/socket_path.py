# SPDX-License-Identifier: BSD-3-Clause
"""The UNIX socket of a broker shared by the host: where it is, who may create it, and who is trusted at it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import resource
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from shiftverbs.config import MAX_SOCKET_PATH, Config
from shiftverbs.exchanger import kept, records, wire
from shiftverbs.exchanger.settings import settings_of
from shiftverbs.process import run_dir

_PEERCRED = struct.Struct("3i")
# How long to wait for the lock. Nobody holds it for longer than a connect() may take.
LOCK_TIMEOUT_S = 10.0
_LOCK_PERIOD_S = 0.01
_NOTE_BYTES = 64
# Limits that a broker inherits from the process that starts it, and that may end it. It raises that of descriptors.
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NPROC)
# Clients that come before the broker has loaded wait here: on a large host hundreds at once.
_BACKLOG = 4096


def of_host(config: Config) -> str:
    """Where the broker is that processes share unasked: those of one user on one host that would start the same one.

    Creates its directory. Raises OSError where there is none that is safe, or its path is too long for a socket.
    """
    where = run_dir.directory(config.run_dir)
    run_dir.own_directory(where)
    # Whoever plays several hosts, or lives in a network of its own, reaches etcd by other ways. A broker has the files,
    # rights, confinement, limits and priority of who starts it, and refuses another release's records.
    alike = [
        settings_of(config), wire.PROTOCOL, sys.executable, str(Path(__file__).resolve()),
        os.environ.get("SOFTRNIC_HOST"), wire.namespace("net"), wire.namespace("pid"),
        wire.namespace("mnt"), os.stat("/").st_dev, os.stat("/").st_ino, os.getegid(), sorted(os.getgroups()),
        [resource.getrlimit(kind) for kind in _LIMITS], os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0),
        records.VERSION, wire.namespace("user"), wire.namespace("time"), _confinement(), _host(),
    ]  # fmt: skip
    digest = hashlib.blake2s(json.dumps(alike, sort_keys=True).encode(), digest_size=8).hexdigest()
    path = os.path.abspath(where / f"broker-{digest}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise OSError(errno.ENAMETOOLONG, f"a socket's path has at most {MAX_SOCKET_PATH} bytes", path)
    return path


def _host() -> str:
    """Which kernel this is: a directory may be shared by several, whose name spaces have the same numbers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(errors="replace").strip()
    return socket.gethostname()


def _confinement() -> list[str]:
    """What this thread, and what it starts, may do: capabilities, system calls, and the label of a security module."""
    found = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/thread-self/status").read_text(errors="replace").splitlines()
        found += [line for line in lines if line.startswith(("Cap", "Seccomp"))]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/thread-self/attr/current").read_text(errors="replace"))
    return found


class SocketInUse(OSError):
    """A broker serves this path already."""


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock that goes with the socket `path`. Waits for its holder, which never keeps it for long.

    Raises TimeoutError, naming the file and the holder, when it does not become free.
    """
    with kept.making:
        lock = open(_open_lock(path), "rb")
        kept.keep(lock)
    try:
        if os.fstat(lock.fileno()).st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "the lock belongs to another user", path + ".lock")
        _take(lock.fileno(), path + ".lock")
        try:
            yield
        finally:
            # Not by closing alone: a child that was forked by other means than Python's has a copy.
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        lock.close()
        kept.let_go(lock)


def _open_lock(path: str) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        lock = os.open(path + ".lock", flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path + ".lock", flags | os.O_CREAT, 0o600)
    os.fchmod(lock, 0o600)  # whatever a umask took from the user
    return lock


def _take(lock: int, path: str) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                text = f"the lock does not become free: {_holder(lock)} has it"
                raise TimeoutError(errno.ETIMEDOUT, text, path) from None
            time.sleep(_LOCK_PERIOD_S)
        else:
            return


def _holder(lock: int) -> str:
    """The process that has a lock, as far as the kernel tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 708 00:13:1234 0 EOF; in the lines of those who wait, -> stands before FLOCK.
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[5].split(":")[2]) == os.fstat(lock).st_ino:
                pid = int(fields[4])
                alive = "" if Path(f"/proc/{pid}").exists() else " (which is gone) or a child of it"
                return f"process {pid}{alive}"
    return "somebody"


def bind_socket(path: str) -> socket.socket:
    """Listen on `path`, for this user only. A socket left by a dead broker is replaced.

    Raises SocketInUse when a broker lives there, OSError when the path cannot be used.
    """
    with locked(path):
        return _bind(path)


def connect_or_bind(path: str) -> tuple[socket.socket, bool]:
    """Connect to the broker at `path`, or become the one who starts it.

    Returns (socket, True) when connected, (listening socket, False) when there was nobody. The latter is among what
    children do not keep, until `kept.let_go`.
    """
    with locked(path):
        sock = _connect(path)
        return (sock, True) if sock is not None else (_bind(path), False)


def connect_or_replace(path: str, ended: tuple[int, int]) -> tuple[socket.socket, bool]:
    """As `connect_or_bind`, but the broker that `name_broker` called so has ended, whoever has a copy of its socket."""
    with locked(path):
        if named_broker(path) == ended:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        sock = _connect(path)
        return (sock, True) if sock is not None else (_bind(path), False)


def _numbers() -> str:
    """Within which namespaces a process id, and when that process began, mean something."""
    return f"{wire.pid_namespace()}-{wire.namespace('time')}"


def name_broker(path: str, pid: int, began: int) -> None:
    """Note beside the socket `path` which process is started for it. began: when that began, in ticks since boot."""
    with contextlib.suppress(OSError):
        note = os.open(path + ".lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(note, f"{pid} {began} {_numbers()}\n".ljust(_NOTE_BYTES).encode(), 0)
        finally:
            os.close(note)


def named_broker(path: str) -> tuple[int, int] | None:
    """What `name_broker` noted of the broker that was started last, by a process that numbers processes as we do.

    That broker may be gone, and its number another one's.
    """
    try:
        note = os.open(path + ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(note).st_uid not in (os.geteuid(), 0):
                return None
            pid, began, namespace = os.pread(note, _NOTE_BYTES, 0).decode("ascii").split()
        finally:
            os.close(note)
        return (int(pid), int(began)) if namespace == _numbers() else None
    except (OSError, ValueError):
        return None


def identity(path: str) -> tuple[int, int] | None:
    """Which file `path` is now. As long as a socket bound there is open, no other file is called the same."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove_socket(path: str, listener: socket.socket, bound: tuple[int, int] | None) -> None:
    """Close `listener` and take `path` away, if it is still the file that `identity` told when `listener` was bound."""
    try:
        with contextlib.suppress(OSError), locked(path):
            # A dead broker's path may have been taken over by a new one. To try whether somebody listens there tells
            # nothing: a forked child of an application may still have a copy of our socket.
            if bound is not None and identity(path) == bound:
                os.unlink(path)
    finally:
        listener.close()


def connect(path: str) -> socket.socket:
    """Connect to whoever listens at `path`. Raises OSError, also when that is another user's process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(5)
        sock.connect(path)
        _, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, f"the broker's socket belongs to user {uid}", path)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(path: str) -> socket.socket | None:
    try:
        return connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return None


def _bind(path: str) -> socket.socket:
    sock = _connect(path)
    if sock is not None:
        sock.close()
        raise SocketInUse(errno.EADDRINUSE, "a broker serves this socket already", path)
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISSOCK(status.st_mode):
            raise FileExistsError(errno.EEXIST, "is in the way and not a socket", path)
        os.unlink(path)
    with contextlib.suppress(OSError):
        note = os.open(path + ".lock", os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_TRUNC)
        os.close(note)  # what was noted there was said of another
    with kept.making:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        kept.keep(listener)
    try:
        # bind() gives the path the rights that fchmod() set before: at no moment may others connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        if os.lstat(path).st_mode & 0o600 != 0o600:
            os.chmod(path, 0o600)  # a umask took rights from the user, too
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        kept.let_go(listener)
        raise
    return listener
