# SPDX-License-Identifier: BSD-3-Clause
"""A peer that is gone: its entry in etcd is, and none of its NICs answers. This is only reported.

A peer that lost etcd for a while has lost its entry too, and works; one whose host stood still comes back. So what
becomes of the QP is left to its traffic, as with plain verbs. Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shiftverbs.failover.services.host import ProtectedQp

# A peer whose entry still stands is told of then: by now the lease of a host that died is over.
SILENT_NS = 15_000_000_000


class Absence:
    """What is known of the whereabouts of one connection's peer.

    text: a sentence while the peer seems to be gone.
    """

    __slots__ = ("_c", "_left_at", "_silent_since_ns", "text")

    def __init__(self, connection: ProtectedQp) -> None:
        self._c = connection
        self.forget()

    def forget(self) -> None:
        """Another peer, or none."""
        self._left_at: str | None = None  # time of day
        self._silent_since_ns: int | None = None
        self.text: str | None = None

    def entry_left(self) -> None:
        """The entry of the peer's QP is gone from etcd, or is another life's."""
        self._left_at = self._left_at or time.strftime("%H:%M:%S")

    def entry_stands(self) -> None:
        """It is there."""
        self._left_at = None

    @property
    def entry(self) -> str | None:
        """That the entry is gone, and what this can mean; None while it stands."""
        if self._left_at is None:
            return None
        means = "its QP was closed, its process has ended, or it lost etcd"
        return f"the peer's entry left etcd at {self._left_at}: {means}"

    def watch(self, now_ns: int) -> None:
        """The driver's periodic look. Not during a SWITCH, when paths are doubted that may be well."""
        answers = self._answers()
        if answers is not False:
            self._silent_since_ns = None
            if answers and self.text is not None:
                self.text = None
                self._say(logging.INFO, "the peer answers again")
            return
        since_ns = self._silent_since_ns = self._silent_since_ns or now_ns
        if self.text is not None:
            return
        if self._left_at is not None:
            self.text = (
                f"the peer is gone: its entry left etcd at {self._left_at}, and none of its NICs answers pings; "
                "its process or its host has ended, or is cut off from both"
            )
        elif now_ns - since_ns >= SILENT_NS:
            away = self._c.driver.directory.away
            entry = (
                f"its entry cannot be looked up ({away})"
                if away is not None
                else "its entry in etcd still stands"
            )
            self.text = (
                f"the peer may be gone: none of its NICs has answered a ping for {SILENT_NS // 10**9} s, and {entry}; "
                "it hangs, its process or its host has ended, or all paths to it are cut"
            )
        if self.text is not None:
            self._say(logging.WARNING, f"{self.text}. The QP stays as it is until a work request fails")

    def _say(self, level: int, text: str) -> None:
        self._c.driver.announcements.say(level, self._c.shadow.qp_num, text)

    def _answers(self) -> bool | None:
        """Whether pings are answered on a path that our own end of is well; None where that is not known.

        Not known is not answered: with our own ports down a peer that is gone has not come back.
        """
        c = self._c
        port_ok = c.driver.nic_events.port_ok
        alive = [
            path.ping.alive for k, path in enumerate(c.paths) if path.ready and port_ok(c.nic(k), c.port(k))
        ]
        if any(alive):
            return True
        return False if alive and None not in alive else None
