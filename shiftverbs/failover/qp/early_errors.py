# SPDX-License-Identifier: BSD-3-Clause
"""What fails before the QP is protected: its errors wait for that, no longer than for a silent peer.

A cable may be pulled while the QP is being paired, which goes on over the backup's own rail. The journal is there from
the first work request on, so a SWITCH heals that failure as any later one. Runs under the driver's lock, for one
connection.
"""

from __future__ import annotations

import logging
from typing import Protocol

from shiftverbs.failover.qp.ending import Ending, EndingQp
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol.events import Status

logger = logging.getLogger("shiftverbs.driver")


class EarlyQp(EndingQp, Protocol):
    """A connection that may fail before it is protected."""

    @property
    def ending(self) -> Ending:
        """How it ends."""

    def disconnect(self, reason: str) -> None:
        """Tell the peer, withdraw, forget the pairing."""

    def set_status(self, status: Status, why: str | None, what: str = "failover gave up") -> None:
        """Change what `qp.shift` shows."""

    @property
    def shown_why(self) -> str | None:
        """For `qp.shift.why`."""

    def catch_up(self) -> None:
        """Find out what events may have said."""

    def wake_up(self) -> None:
        """Something is due earlier than before."""


class EarlyErrors:
    """Whether one connection's errors wait for its protection.

    waits: they do. due_ns: when the application gets those that came; None where none did.
    """

    __slots__ = ("_c", "_is_over", "_leaves", "due_ns", "waits")

    def __init__(self, connection: EarlyQp) -> None:
        self._c = connection
        self.waits = False
        self.due_ns: int | None = None
        self._is_over = self._leaves = False

    def begin_anew(self) -> None:
        """The application moves its QP to RESET or ERR: what fails from now on is its own, until it is connected."""
        self.waits, self.due_ns, self._is_over, self._leaves = False, None, False, False

    def over(self) -> None:
        """Nothing waits any more: the QP is protected, or it ends."""
        self.waits, self.due_ns, self._is_over = False, None, True

    def begin(self) -> None:
        """The QP is connected."""
        c = self._c
        core = c.core
        untouched = not (core.shown_error or core.ending or core.aborted) and core.first_error(0) is None
        if self._is_over or self.waits or c.status is not Status.PAIRING or not untouched:
            return
        self.waits = core.guarded = True

    def failed(self) -> None:
        """Something that a failover heals has failed, or seems to have."""
        c = self._c
        if not self.waits or self.due_ns is not None:
            return
        self.due_ns = c.driver.now_ns() + c.driver.protocol_config.peer_deadline_ns
        name, why = c.shadow.domain.nic.name, c.shown_why
        logger.info("QP %#x on %s: an error waits for the QP's protection: %s", c.shadow.qp_num, name, why)
        self.look()
        c.wake_up()

    def look(self) -> None:
        """The application's own error may lie in a CQ that it does not look at, and be why something was flushed."""
        if self.due_ns is not None:
            self._c.drain(0)

    def protected(self) -> None:
        """The QP is protected: what has failed is healed now, if it can be."""
        had_failed = self.due_ns is not None
        self.over()
        if had_failed:
            self._c.driver.later(self._c, self._c.catch_up)

    def end(self) -> None:
        """It will not be protected, or not in time: the application has its errors."""
        c = self._c
        if self._leaves:
            return
        if c.closed or not self.waits:
            self._is_over = True
        elif self._is_switched():
            self.due_ns = None  # the peer is protected, and its SWITCH takes us along, or ends us
        else:
            if not self._is_stranded():
                self.over()
                c.core.guarded = c.core.ending
            # A thread of the application's may have posted meanwhile, and been refused.
            if not c.core.ending and self._is_stranded():
                c.ending.begin(c.core.why_sends_fail(0) or (int(WcStatus.LOC_QP_OP_ERR), c.core.refused))

    def _is_switched(self) -> bool:
        """Whether a SWITCH is under way."""
        p = self._c.protocol
        return p is not None and p.switching

    def _is_stranded(self) -> bool:
        """Whether something is in no queue of the hardware: refused by a NIC that had failed, or waiting for room."""
        core = self._c.core
        return bool(core.refused) or not core.is_plain or core.unwired != (0, 0)

    def on_time(self, now_ns: int) -> None:
        """The driver's timer."""
        c = self._c
        if self.due_ns is None or now_ns < self.due_ns:
            return
        why = f"it failed and was not protected in time: {c.shown_why}"
        name = c.shadow.domain.nic.name
        logger.warning("QP %#x on %s: %s: the application gets its errors", c.shadow.qp_num, name, why)
        if self._is_stranded() and not self._is_switched():
            self.due_ns, self._leaves = None, True  # the peer is told first, and nothing shown meanwhile
            try:
                c.ending.leave_behind()
                c.disconnect(why)
            finally:
                self._leaves = False
            self.end()
            c.set_status(Status.FAILED, why, "it ends in errors")
        else:
            self.end()
