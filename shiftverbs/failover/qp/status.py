# SPDX-License-Identifier: BSD-3-Clause
"""`qp.shift`: what a program can know of, and ask from, the protection of one QP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shiftverbs.failover.qp.connection import Connection
    from shiftverbs.failover.qp.pairing import PeerShown


class ShiftStatus:
    """The protection of one QP. Reading it costs a QP nothing; it never raises.

    Without a connection (why given) it says UNPROTECTED and why.
    """

    def __init__(self, connection: Connection | None = None, why: str | None = None) -> None:
        self._connection = connection
        self._why = why

    @property
    def status(self) -> str:
        """UNPROTECTED, PAIRING (waiting for the peer's shadow resources), PROTECTED, or FAILED."""
        return self._connection.status.value if self._connection is not None else "UNPROTECTED"

    @property
    def why(self) -> str | None:
        """Why the QP is not protected (yet), or why failover gave up; None when it is protected.

        While PROTECTED it says two things: that the peer seems to be gone, and how this is known; and which pair
        nothing can fail over to for 3 s or more, and why: also the default NICs', as long as they are not back.
        """
        connection = self._connection
        return (
            connection.driver.directory.explained(connection.shown_why)
            if connection is not None
            else self._why
        )

    @property
    def state(self) -> str:
        """State of the send queue: DEFAULT, FALLBACK, WAIT_SIGNALED or WAIT_DRAINED."""
        return self._connection.send_state if self._connection is not None else "DEFAULT"

    @property
    def recv_state(self) -> str:
        """State of the receive queue: DEFAULT or FALLBACK."""
        return self._connection.recv_state if self._connection is not None else "DEFAULT"

    @property
    def pair(self) -> int:
        """The pair that carries sends: 0 is the default NICs', k the k-th backups'."""
        return self._connection.send_pair if self._connection is not None else 0

    @property
    def preferred(self) -> int:
        """The pair that traffic is to be on while all is well, as far as this host knows: 0 unless migrated."""
        return self._connection.preferred if self._connection is not None else 0

    @property
    def path(self) -> str | None:
        """Name of the device that carries sends."""
        return self._connection.device(self._connection.send_pair) if self._connection is not None else None

    @property
    def recv_path(self) -> str | None:
        """Name of the device that carries receives."""
        return self._connection.device(self._connection.recv_pair) if self._connection is not None else None

    @property
    def pairing(self) -> PeerShown | None:
        """The peer's default GID and QPN, its instance, and the number of pairs; None before the peer is known."""
        return self._connection.describe_pairing() if self._connection is not None else None

    @property
    def counters(self) -> dict[str, int]:
        """How often what happened: switches, moves, arms, messages, and the two-sided rx, acked and wired."""
        return self._connection.counters() if self._connection is not None else {}

    @property
    def durations(self) -> dict[str, float | int | None]:
        """Of the last failure: trigger_ns, first_wc_ns, home_ns (CLOCK_MONOTONIC), fallback_ms, away_ms."""
        return self._connection.timeline.durations() if self._connection is not None else {}

    @property
    def history(self) -> list[tuple[int, str]]:
        """The last 1000 send states entered: (CLOCK_MONOTONIC ns, state)."""
        return list(self._connection.timeline.history) if self._connection is not None else []

    def wait_protected(self, timeout: float | None = None) -> bool:
        """Wait until the QP is PROTECTED; return whether it is. A pair that is lost after that does not end it.

        timeout: seconds; None waits until the QP is protected, or can no longer be.
        """
        if self._connection is None:
            return False
        return self._connection.wait_protected(timeout)

    def wait_state(self, state: str, timeout: float | None = None) -> bool:
        """Wait until the send queue is in `state`, and the receive queue too for DEFAULT; return whether it is.

        state: DEFAULT, FALLBACK, WAIT_SIGNALED or WAIT_DRAINED; timeout: seconds; None waits for ever.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        connection = self._connection
        if connection is None:
            return state == "DEFAULT"
        return connection.wait_for(
            lambda: connection.send_state == state and (state != "DEFAULT" or connection.recv_state == state),
            deadline,
        )

    def migrate(self, pair: int = 1) -> None:
        """Move both directions to `pair`, in order and without replaying anything, and stay there.

        For a straggling NIC, or maintenance. One host asks for both; the last to ask is followed, and where both ask
        before either has heard of the other (see `preferred`) the greater pair holds.
        Raises ShiftError where the QP is not protected or has no such pair.
        """
        self._prefer(pair)

    def restore(self) -> None:
        """Undo `migrate`: go back to the default NIC. Raises ShiftError where the QP is not protected."""
        self._prefer(0)

    def _prefer(self, pair: int) -> None:
        from shiftverbs.pyverbs_error import ShiftError

        if self._connection is None or self._connection.status.value != "PROTECTED":
            raise ShiftError(f"The QP is not protected: {self.why}")
        if not 0 <= pair < self._connection.n_pairs:
            raise ShiftError(f"There is no pair {pair}: this QP has {self._connection.n_pairs}")
        self._connection.prefer(pair)

    def __repr__(self) -> str:
        text = f"<shift {self.status}"
        if self._connection is not None:
            text += f" {self.state} on {self.path}"
        return text + (f": {self.why}>" if self.why else ">")
