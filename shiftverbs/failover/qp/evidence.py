# SPDX-License-Identifier: BSD-3-Clause
"""What speaks for and against one connection's paths: WCs with errors, refused posts, ports, NICs, pings.

It is weighed here whether what is seen says something about the path, and told to the protocol, which decides. Runs
under the driver's lock, for one connection.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Protocol

from shiftverbs.failover.qp.early_errors import EarlyErrors
from shiftverbs.failover.qp.ending import Ending, EndingQp
from shiftverbs.native.ibv import WcStatus
from shiftverbs.protocol import events as ev
from shiftverbs.protocol.events import Status
from shiftverbs.shadows.nic import GONE

if TYPE_CHECKING:
    from shiftverbs.failover.qp.timeline import Timeline
    from shiftverbs.failover.qp.watchdog import Watchdog
    from shiftverbs.failover.services.control_channel import Path
    from shiftverbs.shadows.nic import Nic


class FailingQp(EndingQp, Protocol):
    """A connection, as failures of its paths concern it."""

    @property
    def early(self) -> EarlyErrors:
        """Its errors before it is protected."""

    @property
    def ending(self) -> Ending:
        """How it ends."""

    @property
    def timeline(self) -> Timeline:
        """When what happened."""

    @property
    def watchdog(self) -> Watchdog:
        """What was seen of its work."""

    def catch_up(self) -> None:
        """Events of the data path were lost, or did not come yet: find out what they may have said."""


class Evidence:
    """What is seen of one connection's pairs."""

    __slots__ = ("_c",)

    def __init__(self, connection: FailingQp) -> None:
        self._c = connection

    def path_failed(
        self, k: int, reason: str, t_ns: int, advisory: bool = False, wr: int | None = None
    ) -> None:
        """Evidence, or a hint, that pair k is broken. t_ns: when it was seen. wr: the send WR that failed there."""
        c = self._c
        p = c.protocol
        if c.ending.is_left_alone_on(k) and not advisory:
            c.ending.lose(k)
            return
        if p is None or p.over or c.status is not Status.PROTECTED:
            return
        if wr is not None:
            c.watchdog.stuck_wr = wr
            if not self.path_answers(k):
                wr = None  # that says why
        unsafe = self.unsafe_soon() if advisory else None
        was = p.switching
        if not was and k in (p.send_pair, p.recv_pair) and not (advisory and unsafe):
            c.timeline.seen(t_ns)
        c.feed(ev.PathFailed(k, reason, advisory, unsafe, wr))

    def found_broken(self, k: int = 0) -> None:
        """Pair k's QP is in ERR, or its NIC gone, and it may be that nothing else has told so yet."""
        c = self._c
        c.drain(k)
        c.catch_up()  # what its WCs say comes first: the error may be the application's own
        p = c.protocol
        if not c.closed and p is not None and not p.fencing and k in (p.send_pair, p.recv_pair):
            self.path_failed(k, f"the QP on {c.device(k)} is broken", c.driver.now_ns())

    def path_answers(self, k: int) -> bool:
        """Whether port and pings of pair k were fine up to now, so that a failure there says something about its WR."""
        c = self._c
        fine = c.driver.nic_events.port_ok(c.nic(k), c.port(k))
        return fine and c.paths[k].ping.answers(c.driver.now_ns())

    def failed_wr(self, k: int) -> int | None:
        """The send WR that failed on pair k. Its WC may not have been looked at, where a receive's came first."""
        c = self._c
        if k != c.send_pair:
            return None
        if c.core.failed_wr(k) is None:
            c.drain(k)
        return c.core.failed_wr(k)

    def post_failed(self, k: int, err: int, t_ns: int) -> None:
        """Pair k's NIC refused what was journaled, or what a healthy NIC would not have refused."""
        c = self._c
        p = c.protocol
        c.drain(k)
        said = os.strerror(err)
        by_path = err in GONE or err == errno.ENOMEM or c.nic(k).dead or c.core.first_error(k) is not None
        if by_path and c.early.waits:
            c.early.failed()
        elif by_path and not (p is None or p.over):
            self.path_failed(k, f"post on {c.device(k)} failed: {said}", t_ns, wr=self.failed_wr(k))
        elif p is None or p.over:
            # Let go of meanwhile: nobody else will deliver it.
            c.ending.begin(c.core.why_sends_fail(k) or (int(WcStatus.LOC_QP_OP_ERR), err))
        elif not p.switching:
            c.ending.original = (int(WcStatus.LOC_QP_OP_ERR), err)
            c.feed(
                ev.WorkRefused(f"the application's own error: {c.device(k)} refuses what was posted: {said}")
            )

    def unsafe_soon(self) -> str | None:
        """What could not be replayed, now or when more of what is outstanding has completed: for a question."""
        return self._c.core.unsafe_reason(cqes_lost=True)

    def path_changed(self, path: Path) -> None:
        """Health of one of the paths."""
        c = self._c
        p = c.protocol
        for k, mine in enumerate(c.paths):
            alive = path.told  # what it was when this was said; it may be unknown for the moment
            if p is None or mine is not path or alive is None:
                continue
            if alive and p.pairs[k].alive is False and p.initiator and not p.switching:
                # The way home, for every QP of the NIC at once: there is no hurry.
                c.driver.turns.begin_in_turn(c, self._paths_alive)
            else:
                c.feed(ev.PathHealth(k, alive))

    def _paths_alive(self) -> None:
        for k, path in enumerate(self._c.paths):
            if path.told:
                self._c.feed(ev.PathHealth(k, True))

    def nic_dead(self, nic: Nic, t_ns: int) -> None:
        """DEVICE_FATAL on `nic`."""
        c = self._c
        for k in range(c.n_pairs):
            if c.nic(k) is nic:
                p = c.protocol
                if p is not None and k in (p.send_pair, p.recv_pair) and not p.switching:
                    c.timeline.seen(t_ns)
                if c.ending.is_left_alone_on(k):
                    c.ending.lose(k)
                c.feed(ev.NicDead(k))
        if c.fence is not None:
            c.fence.tick(t_ns)
