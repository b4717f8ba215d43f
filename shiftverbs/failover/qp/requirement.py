# SPDX-License-Identifier: BSD-3-Clause
"""SHIFTVERBS_REQUIRE: a QP that is at work is protected soon, or it ends.

It concerns the beginning, from RTS until the QP was protected once (docs/protocol.md, "Protection that is required").
Runs under the driver's lock, for one connection.
"""

from __future__ import annotations

from typing import Protocol

from shiftverbs.failover.qp.ending import FLUSHED, Ending
from shiftverbs.failover.services.host import ProtectedQp
from shiftverbs.protocol.events import Status

# Who looks later than this after the deadline stood still, or its host did, and what came meanwhile is read first.
LATE_NS = 1_000_000_000
# How long it then has for that.
CATCH_UP_NS = 5_000_000_000


class RequiredQp(ProtectedQp, Protocol):
    """A connection whose protection may be required."""

    @property
    def ending(self) -> Ending:
        """How it ends."""

    @property
    def shown_why(self) -> str | None:
        """For `qp.shift.why`."""

    def disconnect(self, reason: str) -> None:
        """Tell the peer, withdraw, forget the pairing."""


class Requirement:
    """What is required of one connection's QP."""

    __slots__ = ("_c", "_caught_up", "_due_ns", "_is_settled")

    def __init__(self, connection: RequiredQp) -> None:
        self._c = connection
        self.begin()

    def begin(self) -> None:
        """The application has its QP begin anew (RESET, ERR): what is required is required again."""
        self._is_settled = False
        self._due_ns: int | None = None
        self._caught_up = False

    @property
    def is_open(self) -> bool:
        """Whether the QP was neither protected yet nor ended here."""
        return not self._is_settled

    def met(self) -> None:
        """The QP is protected."""
        self._is_settled = True

    def watch(self, now_ns: int) -> None:
        """The driver's periodic look: end the QP where it will not be protected, or is not by the deadline."""
        c = self._c
        config, ready_ns = c.driver.config, c.shadow.ready_ns
        if not config.require or self._is_settled or ready_ns is None or c.closed:
            return
        if self._is_in_err():
            return
        if c.status is Status.PAIRING and not self._is_over(
            now_ns, ready_ns + config.require_deadline_ms * 1_000_000
        ):
            return
        c.drain(0)  # an error that nobody has polled yet is the application's all the same
        if not self._is_in_err():
            self._end()

    def _is_in_err(self) -> bool:
        """Whether the QP has failed already, of which the application is told."""
        core = self._c.core
        return core.first_error(0) is not None or core.ending or core.aborted

    def _is_over(self, now_ns: int, deadline_ns: int) -> bool:
        due_ns = self._due_ns or deadline_ns
        if now_ns - due_ns > LATE_NS and not self._caught_up:
            self._caught_up = True
            self._due_ns = due_ns = now_ns + CATCH_UP_NS
        return now_ns >= due_ns

    def _end(self) -> None:
        c = self._c
        self._is_settled = True
        within = f"was not protected within {c.driver.config.require_deadline_ms / 1000:g} s"
        failed = within if c.status is Status.PAIRING else "cannot be protected"
        reason = c.driver.directory.explained(c.shown_why)
        why = f"SHIFTVERBS_REQUIRE is set, and the QP {failed}: {reason}"
        c.ending.leave_behind()
        c.disconnect(why)
        c.ending.begin(FLUSHED)
        c.set_status(Status.FAILED, why, "it ends in errors")
