# SPDX-License-Identifier: BSD-3-Clause
"""What passes an interface, kept in a pcap file: a packet socket and a thread."""

from __future__ import annotations

import socket
import struct
import threading
import time
from pathlib import Path

ETH_P_ALL = 3
SNAP = 65535
LINKTYPE_ETHERNET = 1


class Capture:
    """Write every frame of an interface, both directions, to a file until stop()."""

    def __init__(self, netdev: str, path: Path) -> None:
        self.path = path
        self.count = 0
        self._stopping = False
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._socket.bind((netdev, 0))
        self._socket.settimeout(0.1)
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self.path.open("wb") as file:
            file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, SNAP, LINKTYPE_ETHERNET))
            while True:
                try:
                    frame = self._socket.recv(SNAP)
                except TimeoutError:
                    if self._stopping:
                        return
                    continue
                now = time.time()
                file.write(struct.pack("<IIII", int(now), int(now % 1 * 1e6), len(frame), len(frame)) + frame)
                self.count += 1

    def stop(self) -> None:
        """Take what is still there, close the file."""
        self._stopping = True
        self._thread.join(20)
        self._socket.close()
