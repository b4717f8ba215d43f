# SPDX-License-Identifier: BSD-3-Clause
"""One side of a plain UDP transfer over loopback: what the software NIC's wire can carry at most.

    python -m benchmarks.suite.udp_host send|receive OWN_PORT OTHER_PORT

Commands: {"bytes": of a datagram, "count": datagrams, "gso": whether the kernel takes many at a time} ->
{"value": MB/s that arrived}, 0 from the sender. The transfer itself is udp.c's, compiled when it is first needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from benchmarks.suite.lab import ROOT

#: Datagrams on the way: what the software NIC has on its way (its window, at this machine's buffers).
WINDOW = 64
SOCKET_BUFFER = 8 << 20
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # socket(7); the module has no names for them
#: Patience with a credit that was lost.
CREDIT_S = 0.02
SOURCE = Path(__file__).with_name("udp.c")


def library() -> ctypes.CDLL:
    """udp.c, compiled.

    :raises subprocess.CalledProcessError: it does not compile
    """
    text = SOURCE.read_bytes()
    path = ROOT / "build" / "bench" / f"udp-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        flags = "-D_GNU_SOURCE -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared".split()
        subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(made)], check=True)
        made.rename(path)
    return ctypes.CDLL(str(path))


def _check(error: int, what: str) -> None:
    if error:
        raise OSError(error, f"{what}: {os.strerror(error)}")


def send(lib: ctypes.CDLL, sock: socket.socket, size: int, count: int, gso: bool) -> float:
    """Send; 0.0 once the receiver knows that this was all."""
    _timeout(sock, CREDIT_S)
    _check(lib.udp_send(sock.fileno(), size, count, WINDOW, gso), "plain UDP")
    while True:  # the end; and what was lost does not matter
        sock.send(b"end")
        try:
            while sock.recv(16) != b"end":
                pass
        except (BlockingIOError, ConnectionRefusedError):
            continue
        return 0.0


def receive(lib: ctypes.CDLL, sock: socket.socket, size: int, gso: bool) -> float:
    """Take what comes until the sender says that this was all; MB/s from the first datagram to the last."""
    _timeout(sock, 20)
    _check(lib.udp_gro(sock.fileno(), gso), "UDP_GRO")
    rate = ctypes.c_double()
    _check(lib.udp_receive(sock.fileno(), size, WINDOW, ctypes.byref(rate)), "plain UDP")
    return rate.value


def _timeout(sock: socket.socket, seconds: float) -> None:
    """As the kernel has it: Python's own would make the socket one that never blocks."""
    value = int(seconds).to_bytes(8, sys.byteorder) + int(seconds % 1 * 1e6).to_bytes(8, sys.byteorder)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


def main() -> int:
    """Serve commands until standard input ends; the exit status."""
    role, own, other = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    lib = library()
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for forced, usual in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, SOCKET_BUFFER)
        except PermissionError:  # as the software NIC does it
            sock.setsockopt(socket.SOL_SOCKET, usual, SOCKET_BUFFER)
    sock.bind(("127.0.0.1", own))
    sock.connect(("127.0.0.1", other))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        size, gso = command["bytes"], command["gso"]
        value = (
            receive(lib, sock, size, gso)
            if role == "receive"
            else send(lib, sock, size, command["count"], gso)
        )
        print(json.dumps({"value": value}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
