# SPDX-License-Identifier: BSD-3-Clause
"""Somebody on one rail who hears the datagrams to one host's control port, and sends it what he likes.

He is no process of the job: of its secrets he knows nothing, unless a story tells him.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from simulator.network import Network
from simulator.rnic import Datagram

from shiftverbs.protocol.codec import Entry, encode, name_of
from shiftverbs.protocol.seal import SECRET_BYTES, Seals


class Attacker:
    """One that has rail k to host `name`. heard: all datagrams so far."""

    def __init__(self, net: Network, name: str, k: int) -> None:
        self.net = net
        self.nic = net.nics[name][k]
        self.heard: list[Datagram] = []
        self._arrive = self.nic.arrive_datagram
        self.nic.arrive_datagram = self._hear  # type: ignore[method-assign]

    def _hear(self, datagram: Datagram) -> None:
        self.heard.append(datagram)
        self._arrive(datagram)

    def send(self, data: bytes) -> None:
        """Have these bytes arrive, as from who was heard last."""
        last = self.heard[-1]
        self._arrive(Datagram(data, last.qpn, last.qkey, last.source_qpn, last.source_gid))

    def replay(self) -> None:
        """Send once more all that was heard."""
        for datagram in list(self.heard):
            self.send(datagram.data)

    def forge(self, entries: Iterable[Entry]) -> None:
        """Send this as if it were of who was heard last: their name on it, and a seal that is not theirs."""
        seals = Seals(bytes(SECRET_BYTES), bytes(SECRET_BYTES), first=1 << 40)
        seals.name_out = name_of(self.heard[-1].data)
        for data in encode(entries, seals):
            self.send(data)

    def flood(self, data: bytes, every_ns: int, until_ns: int) -> None:
        """Send this again and again."""
        self.send(data)
        if self.net.clock.now + every_ns < until_ns:
            self.net.clock.later(every_ns, self.flood, data, every_ns, until_ns)


def lives(app: Any) -> tuple[int, int]:
    """What the lives of an application's QP and of its peer's are called in messages."""
    connection = app.endpoint.connection
    return connection.pairing.life, int(connection.peer.life, 16)
