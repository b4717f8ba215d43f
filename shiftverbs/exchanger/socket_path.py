# SPDX-License-Identifier: BSD-3-Clause
"""The UNIX socket of a broker shared by the host: who may create it, and who is trusted at it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator

_PEERCRED = struct.Struct("3i")


class SocketInUse(OSError):
    """A broker serves this path already."""


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock that goes with the socket `path`. Waits for whoever has it, who never holds it for long."""
    lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(lock).st_uid not in (os.geteuid(), 0):
            raise PermissionError(errno.EPERM, "the lock belongs to another user", path + ".lock")
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def bind_socket(path: str) -> socket.socket:
    """Listen on `path`, for this user only. A socket left by a dead broker is replaced.

    Raises SocketInUse when a broker lives there, OSError when the path cannot be used.
    """
    with locked(path):
        return _bind(path)


def connect_or_bind(path: str) -> tuple[socket.socket, bool]:
    """Connect to the broker at `path`, or become the one who starts it.

    Returns (socket, True) when connected, (listening socket, False) when there was nobody.
    """
    with locked(path):
        sock = _connect(path)
        return (sock, True) if sock is not None else (_bind(path), False)


def remove_socket(path: str, listener: socket.socket) -> None:
    """Take `path` away, if it is still the socket of `listener`."""
    with contextlib.suppress(OSError), locked(path):
        # A dead broker's path may have been taken over by a new one, which then listens there.
        listener.close()
        sock = _connect(path)
        if sock is None:
            os.unlink(path)
        else:
            sock.close()


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
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # bind() gives the path the rights that fchmod() set before: at no moment may others connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener
