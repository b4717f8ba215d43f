# SPDX-License-Identifier: BSD-3-Clause
"""The TCP connection over which server and client exchange what a QP needs, meet, and pass results.

As in perftest a side is described by one line of hexadecimal fields; each message here is one line.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass

BANNER = """
************************************
* Waiting for client to connect... *
************************************"""
MAX_LINE = 512
CONNECT_S = 5.0


class ExchangeError(Exception):
    """The other side is gone or does not speak this protocol."""


@dataclass(frozen=True)
class Destination:
    """How one side's QP and buffer are reached, and how many READs and atomics it can have outstanding."""

    lid: int
    qpn: int
    psn: int
    rkey: int
    vaddr: int
    gid: bytes
    mtu: int
    outs: int = 1

    def encode(self) -> str:
        """Return the line for the other side."""
        return (
            f"{self.lid:04x}:{self.qpn:06x}:{self.psn:06x}:{self.rkey:08x}:{self.vaddr:016x}"
            f":{self.gid.hex()}:{self.mtu:x}:{self.outs:x}"
        )

    @classmethod
    def decode(cls, line: str) -> Destination:
        """Parse the other side's line.

        :raises ExchangeError: it is malformed
        """
        try:
            lid, qpn, psn, rkey, vaddr, gid, mtu, outs = line.split(":")
            raw = bytes.fromhex(gid)
            if len(raw) != 16:
                raise ValueError("a GID has 16 bytes")
            return cls(
                int(lid, 16),
                int(qpn, 16),
                int(psn, 16),
                int(rkey, 16),
                int(vaddr, 16),
                raw,
                int(mtu, 16),
                int(outs, 16),
            )
        except ValueError as error:
            raise ExchangeError(f"malformed address {line!r}: {error}") from None


class Exchange:
    """One established connection. All methods but `pending` block."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    @classmethod
    def listen(cls, port: int) -> Exchange:
        """Wait for one client on a TCP port of this machine."""
        print(BANNER, flush=True)
        with socket.create_server(("", port), backlog=1) as server:
            connection, _ = server.accept()
        return cls(connection)

    @classmethod
    def connect(cls, host: str, port: int) -> Exchange:
        """Connect to a server; one that is just being started is waited for, up to CONNECT_S.

        :raises ExchangeError: nobody answers there
        """
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return cls(socket.create_connection((host, port), timeout=None))
            except ConnectionRefusedError as error:
                if time.monotonic() > deadline:
                    raise ExchangeError(f"Couldn't connect to {host}:{port}: {error}") from None
                time.sleep(0.05)
            except OSError as error:
                raise ExchangeError(f"Couldn't connect to {host}:{port}: {error}") from None

    def send(self, line: str) -> None:
        """Send one message."""
        try:
            self._socket.sendall(line.encode() + b"\n")
        except OSError as error:
            raise ExchangeError(f"the other side is gone: {error}") from None

    def receive(self) -> str:
        """Return the next message."""
        while b"\n" not in self._buffer:
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    def _fill(self) -> None:
        try:
            data = self._socket.recv(4096)
        except OSError as error:
            raise ExchangeError(f"the other side is gone: {error}") from None
        if not data:
            raise ExchangeError("the other side closed the connection")
        self._buffer += data
        if len(self._buffer) > MAX_LINE:
            raise ExchangeError("the other side sends something else")

    def pending(self) -> bool:
        """True if a message (or the end of the connection) is waiting."""
        return b"\n" in self._buffer or bool(select.select([self._socket], [], [], 0)[0])

    def swap(self, line: str) -> str:
        """Send a message and return the other side's."""
        self.send(line)
        return self.receive()

    def barrier(self, name: str) -> None:
        """Return when the other side is at the barrier of this name too.

        :raises ExchangeError: it is somewhere else
        """
        other = self.swap(f"at {name}")
        if other != f"at {name}":
            raise ExchangeError(f"expected the other side at {name!r}, got {other!r}")

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
