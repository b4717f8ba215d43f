# SPDX-License-Identifier: BSD-3-Clause
"""What one connection cannot hand over yet, because the counterpart of a key is not known where traffic is.

Which keys those are, and whether there is any hope, connection_keys.py knows. Runs under the driver's lock.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol import events as ev

if TYPE_CHECKING:
    from shiftverbs.failover.qp.connection_keys import ConnectionKeys
    from shiftverbs.failover.qp.ending import Ending

# How often keys that are missing are looked for again, beside the news that some came.
TICK_NS = 20_000_000


class WaitingQp(ProtectedQp, Protocol):
    """A connection whose WRs may have to wait."""

    @property
    def keys(self) -> ConnectionKeys:
        """Its part in memory keys."""

    @property
    def ending(self) -> Ending:
        """How its QP ends."""


class KeyWait:
    """The wait of one connection.

    since_ns: since when a WR waits, or None. posting: the action whose receives are not all where it wants them.
    """

    __slots__ = ("_c", "posting", "since_ns")

    def __init__(self, connection: WaitingQp) -> None:
        self._c = connection
        self.forget()

    def forget(self) -> None:
        """Nothing is waited for any more."""
        self.since_ns: int | None = None
        self.posting: ev.PostReceives | ev.MoveReceives | None = None

    @property
    def due_ns(self) -> int:
        """When `on_time` is to be called next, while a WR lacks a key."""
        return self._c.driver.now_ns() + TICK_NS

    def begin(self) -> None:
        """A WR lacks a key."""
        if self.since_ns is None:
            self.since_ns = self._c.driver.now_ns()
            self._c.keys.begin_wait()

    def arrived(self) -> None:
        """More keys were resolved: go on posting."""
        if not self._c.closed and self.since_ns is not None:
            self._retry()

    def on_time(self, now_ns: int) -> None:
        """Try again; where there is no hope left, give up, or fail the WR as the peer's NIC would."""
        since = self.since_ns
        if since is None:
            return
        self._retry()
        if self.since_ns is not None and not self._c.closed:
            why = self._c.keys.hopeless(since, now_ns)
            if why is not None:
                self.since_ns = None
                self.in_vain(why)
            elif self._c.core.send_is_open:
                self._peer_refuses(self._c.keys.refused(since, now_ns))

    def in_vain(self, why: str) -> None:
        """What was posted cannot be handed over where the traffic is, and never will be."""
        c = self._c
        if c.ending.is_left_alone_on(c.core.send_pair):
            c.ending.begin()
        else:
            c.feed(ev.KeysMissing(why))

    def posted(self, action: ev.PostReceives | ev.MoveReceives, err: int) -> ev.ReceivesPosted | None:
        """The answer to `action` after a try that ended with err; None where keys are awaited."""
        if err == errno.ENOKEY:
            self.posting = action
            self.begin()
            return None
        self.posting = None
        return ev.ReceivesPosted(action.number, f"a receive was refused: {os.strerror(err)}" if err else None)

    def _retry(self) -> None:
        c = self._c
        c.core.pump()
        if self.posting is not None:
            posted = self.posted(self.posting, c.core.open_recv(self.posting.pair))
            if posted is not None:
                c.feed(posted)
        if c.closed:
            return
        local, remote = c.core.missing_keys(c.core.send_pair, c.core.recv_pair)
        if not local and not remote and self.posting is None:
            self.since_ns = None

    def _peer_refuses(self, why: str | None) -> None:
        """All ahead of a WR has completed, and the peer has no memory for it: it fails as its NIC would have it."""
        c, p = self._c, self._c.protocol
        if why is None:
            return
        error = (int(WcStatus.REM_ACCESS_ERR), 0)
        if p is None or p.over:
            c.ending.begin(error)
        elif not p.switching:
            self.since_ns = None
            c.ending.original = error
            c.feed(ev.WorkRefused(f"the application's own error: {c.driver.wc_name(error[0])}: {why}"))
