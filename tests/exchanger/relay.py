# SPDX-License-Identifier: BSD-3-Clause
"""A TCP relay in front of etcd that takes its time: what arrives is passed on later, in order, nothing lost."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from types import TracebackType


class Relay:
    """`with Relay(port, delay_s) as relay: relay.endpoint`. delay_s: how long each byte takes, each way; settable."""

    def __init__(self, port: int, delay_s: float) -> None:
        self.delay_s = delay_s
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._due: list[tuple[float, int, socket.socket, bytes]] = []
        self._numbers = itertools.count()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """host:port, as SHIFTVERBS_ETCD takes it."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join(10)
        for sock in [self._listener, *self._peers]:
            sock.close()

    def _run(self) -> None:
        while not self._over:
            wait = 0.05 if not self._due else max(0.0, min(0.05, self._due[0][0] - time.monotonic()))
            for key, _ in self._selector.select(wait):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock in self._peers:
                    self._take(sock)
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, sock, data = heapq.heappop(self._due)
                with contextlib.suppress(OSError):
                    if data:
                        sock.sendall(data)
                    else:
                        sock.shutdown(socket.SHUT_WR)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._port), 5)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _take(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        heapq.heappush(
            self._due, (time.monotonic() + self.delay_s, next(self._numbers), self._peers[sock], data)
        )
        if not data:
            self._selector.unregister(sock)
