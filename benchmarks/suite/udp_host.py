# SPDX-License-Identifier: BSD-3-Clause
"""One side of a plain UDP transfer over loopback: what the software NIC's wire can carry at most.

    python -m benchmarks.suite.udp_host send|receive PORT

Commands: {"bytes": of a datagram, "count": datagrams} -> {"value": MB/s that arrived}, 0 from the sender.
"""

from __future__ import annotations

import json
import socket
import sys
import time

WINDOW = 64
SOCKET_BUFFER = 4 << 20


def send(sock: socket.socket, size: int, count: int) -> float:
    """Send; after each WINDOW datagrams wait for the receiver, so that few are lost."""
    data = bytes(size)
    for index in range(count):
        sock.send(data)
        if index >= WINDOW and index % WINDOW == 0:
            _credit(sock)
    while True:  # the end; and what was lost does not matter
        sock.send(b"end")
        try:
            if sock.recv(16) == b"end":
                return 0.0
        except (TimeoutError, ConnectionRefusedError):
            pass


def _credit(sock: socket.socket) -> None:
    try:
        sock.recv(16)
    except (TimeoutError, ConnectionRefusedError):
        pass  # lost: go on


def receive(sock: socket.socket, size: int, count: int) -> float:
    """Take what comes until the sender says that this was all; the rate from the first datagram to the last."""
    buffer = bytearray(size)
    got = 0
    start = last = 0.0
    while True:
        length, sender = sock.recvfrom_into(buffer)
        if length != size:
            if got or start:
                sock.sendto(b"end", sender)
                return got * size / max(last - start, 1e-9) / 2**20
            continue  # of the slice before
        got += 1
        if got == 1:
            start = time.perf_counter()
        if got % WINDOW == 0:
            sock.sendto(b"on", sender)
            last = time.perf_counter()
        if got == count:
            last = time.perf_counter()


def main() -> int:
    """Serve commands until standard input ends; the exit status."""
    role, port = sys.argv[1], int(sys.argv[2])
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
    if role == "receive":
        sock.bind(("127.0.0.1", port))
        sock.settimeout(20)
    else:
        sock.connect(("127.0.0.1", port))
        sock.settimeout(0.05)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        work = receive if role == "receive" else send
        print(json.dumps({"value": work(sock, command["bytes"], command["count"])}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
