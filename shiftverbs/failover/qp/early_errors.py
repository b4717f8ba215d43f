# SPDX-License-Identifier: BSD-3-Clause
"""What fails before the QP is protected: its errors wait for that, no longer than for a silent peer.

A cable may be pulled while the QP is being paired, which goes on over the backup's own rail. The journal is there from
the first work request on, so a SWITCH heals that failure as any later one. Runs under the driver's lock, for one
connection.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.qp.ending import Ending, EndingQp
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol.events import Status

if TYPE_CHECKING:
    from shiftverbs.failover.qp.reports import Reports

logger = logging.getLogger("shiftverbs.driver")


class EarlyQp(EndingQp, Protocol):
    """A connection that may fail before it is protected."""

    @property
    def ending(self) -> Ending:
        """How it ends."""

    @property
    def reports(self) -> Reports:
        """What is said of it."""

    @property
    def shown_why(self) -> str | None:
        """For `qp.shift.why`."""

    def look_again(self) -> None:
        """Find out what events may have said."""

    def wake_up(self) -> None:
        """Something is due earlier than before."""


class EarlyErrors:
    """Whether one connection's errors wait for its protection.

    waits: they do. due_ns: when the application gets those that came; None where none did.
    """

    def __init__(self, connection: EarlyQp) -> None:
        self._c = connection
        self.waits = False
        self.due_ns: int | None = None
        self._is_over = False

    def begin_anew(self) -> None:
        """The application moves its QP to RESET or ERR: what fails from now on is its own, until it is connected."""
        self.waits, self.due_ns, self._is_over = False, None, False

    def begin(self) -> None:
        """The QP is connected."""
        c = self._c
        core = c.core
        untouched = not (core.shown_error or core.ending or core.aborted) and core.first_error(0) is None
        if self._is_over or self.waits or c.status is not Status.PAIRING or not untouched:
            return
        self.waits = core.guarded = True

    def failed(self) -> None:
        """Something that a failover heals has failed."""
        c = self._c
        if self.waits and self.due_ns is None:
            self.due_ns = c.driver.now_ns() + c.driver.protocol_config.peer_deadline_ns
            name, why = c.shadow.domain.nic.name, c.shown_why
            logger.info(
                "QP %#x on %s: an error waits for the QP's protection: %s", c.shadow.qp_num, name, why
            )
            c.wake_up()

    def protected(self) -> None:
        """The QP is protected: what has failed is healed now, if it can be."""
        had_failed, self.due_ns = self.due_ns is not None, None
        self.waits, self._is_over = False, True
        if had_failed:
            self._c.driver.later(self._c, self._c.look_again)

    def end(self) -> None:
        """It will not be protected, or not in time: the application has its errors.

        The hardware's, as they came; but what a NIC that has failed refused since is in no queue.
        """
        c = self._c
        waited, self.waits, self.due_ns, self._is_over = self.waits, False, None, True
        if not waited or c.closed or c.core.ending or not c.core.is_plain:
            return
        if c.core.refused:
            c.ending.begin(c.core.first_error(0) or (int(WcStatus.LOC_QP_OP_ERR), c.core.refused))
        else:
            c.core.guarded = False

    def on_time(self, now_ns: int) -> None:
        """The driver's timer."""
        if self.due_ns is not None and now_ns >= self.due_ns:
            c = self._c
            logger.warning(
                "QP %#x on %s failed and was not protected in time (%s): the application gets its errors",
                c.shadow.qp_num,
                c.shadow.domain.nic.name,
                c.shown_why,
            )
            self.end()
