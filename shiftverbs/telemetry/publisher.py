# SPDX-License-Identifier: BSD-3-Clause
"""This process's socket: whoever of the same user, or root, connects to it gets a snapshot as JSON.

A thread sleeps in accept(); it reads nothing of the process before somebody asks. No forked child keeps the socket.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shiftverbs._core import without_signals
from shiftverbs.exchanger import kept
from shiftverbs.process.run_dir import own_directory

logger = logging.getLogger("shiftverbs.telemetry")

SEND_TIMEOUT_S = 2.0
ACCEPT_PAUSE_S = 0.5
_PEERCRED = struct.Struct("3i")


def remove_if_dead(path: Path) -> bool:
    """Remove a socket that nobody listens on any more. Returns whether it is gone. Never waits."""
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    ) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink()
            return True
        except OSError as error:
            return error.errno == errno.ENOENT
    return False


def _sweep(where: Path) -> None:
    """Take away what processes left that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir(where):
            pid = name.partition("-")[0]
            if pid.isdecimal() and name.endswith(".sock") and not os.path.exists(f"/proc/{pid}"):
                remove_if_dead(where / name)


class Publisher:
    """Serves snapshots until `close`.

    take: makes one; instance: this process's id, part of the socket's name, since containers share directories, and not
    process ids; where: the directory. Raises OSError where there can be no socket.
    """

    def __init__(self, take: Callable[[], dict[str, Any]], instance: str, where: Path) -> None:
        self._take = take
        own_directory(where)
        self.path = where / f"{os.getpid()}-{instance[:8]}.sock"
        self._pid = os.getpid()
        with kept.making:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            kept.keep(self._listener)
        try:
            os.fchmod(self._listener.fileno(), 0o600)
            self._listener.bind(os.fspath(self.path))
            self._listener.listen(8)
            thread = threading.Thread(target=self._serve, name="shiftverbs-status", daemon=True)
            without_signals(thread.start)
        except BaseException:
            self.close()
            raise

    def _serve(self) -> None:
        _sweep(self.path.parent)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):  # closed
                    return
                # No descriptor is free, say; whoever asks still waits to be accepted.
                time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                self._answer(connection)
            except OSError:  # whoever asked has gone, or does not read
                pass
            except Exception:
                logger.exception("shiftverbs status gets no answer from this process")
            finally:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        _, uid, _ = _PEERCRED.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        )
        if uid in (os.geteuid(), 0):
            connection.sendall(json.dumps(self._take()).encode() + b"\n")

    def close(self) -> None:
        """Take the socket away. May be repeated; in a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        kept.let_go(self._listener)
