# SPDX-License-Identifier: BSD-3-Clause
"""Further lives of the same QPs: their programs reset both ends of a connection, and connect them anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError
from simulator import checks
from simulator.application import Application
from simulator.checks import Violation, ended
from simulator.clock import MS, SECOND
from simulator.network import Network
from simulator.rest import state, waits

#: So many has a QP at most.
LIVES = 4
#: When nothing of a life is on its way any more.
QUIET_NS = 2 * MS


class Lives:
    """Of all QPs of a network.

    qps: how many connections that has. live: has the programs of a new life, the n-th of its host, do something.
    """

    def __init__(self, net: Network, qps: int, live: Callable[[Application, int], None]) -> None:
        self._net, self._qps, self._live = net, qps, live
        self.coming = 0  # so many are to begin, or to be found needless
        self._changing: set[Any] = set()  # QPs that are on their way from one life to the next

    def is_changing(self, app: Application) -> bool:
        """Whether its QP is between two lives, where no program would leave."""
        return app.endpoint in self._changing

    def renew(self, app: Application, delay_ns: int) -> None:
        """Then: another life, if there is to be one."""
        self.coming += 1
        self._net.clock.later(delay_ns, self._renew, app)

    def renew_where_ended(self, app: Application, delay_ns: int) -> None:
        """The same, where one of both programs has seen errors by then, or left; when they have them all."""
        self.coming += 1
        self._net.clock.later(delay_ns, self._await_errors, app, 0)

    def _renew(self, app: Application) -> None:
        """Both programs move their QPs to RESET, if they have not, and, when all of that life is gone, begin anew.

        Not without one of their NICs: a life is to be protected.
        """
        if {app.endpoint, app.peer.endpoint} & self._changing:
            self.coming -= 1
        else:
            self._changing |= {app.endpoint, app.peer.endpoint}
            self._leave(app)

    def _await_errors(self, app: Application, until_ns: int) -> None:
        net = self._net
        ends = app, app.peer
        if not any(ended(end) for end in ends):
            self.coming -= 1
            return
        until_ns = until_ns or net.clock.now + 15 * SECOND
        alive = not any(nic.dead for end in ends for nic in end.device.hardware)
        failed = [end for end in ends if end.failed and not end.left and alive]
        if any(waits(end) or end.poll_due or end.endpoint.buffered for end in failed):
            if net.clock.now > until_ns:
                raise Violation("every posted WR ends", f"no errors come: {[state(end) for end in failed]}")
            net.clock.later(10 * MS, self._await_errors, app, until_ns)
            return
        for end in failed:
            checks.what_failed_is_told(net, end)
        self._renew(app)

    def _leave(self, app: Application, connected: bool = True) -> None:
        """connected: as it is, it may go on where there is to be no further life."""
        net = self._net
        ends = app, app.peer
        lives = len(net.apps_of(app.device.name)) // self._qps
        dead = any(end.closed or nic.dead for end in ends for nic in end.device.hardware)
        last = app.endpoint.app is not app or lives >= LIVES or dead
        if last and connected:
            self._has_come(app)
        elif not all(
            (end.was_reset or end.endpoint.hardware.nic.dead) and not end.endpoint.blocked for end in ends
        ):
            for end in ends:
                end.leave_by_reset()
            net.clock.later(1 * MS, self._leave, app, connected)
        elif any(end.poll_due or end.endpoint.buffered for end in ends):
            # Else its CQ would have the completions of two lives.
            net.clock.later(1 * MS, self._leave, app, connected)
        elif last:
            self._has_come(app)
        else:
            net.clock.later(QUIET_NS, self._begin, app)

    def _begin(self, app: Application) -> None:
        net = self._net
        if any(nic.failing or nic.dead for end in (app, app.peer) for nic in end.device.hardware):
            net.clock.later(1 * MS, self._leave, app)
            return
        net.by_credits = False  # who comes to RTS first may send at once
        self._connect(net.next_life(app)[0])

    def _connect(self, app: Application) -> None:
        """Where a NIC refuses that, yet another life is begun."""
        net = self._net
        ends = app, app.peer
        if any(end.endpoint.blocked for end in ends):
            net.clock.later(1 * MS, self._connect, app)
            return
        life = len(net.apps_of(app.device.name))
        try:
            for end in ends:
                end.endpoint.connect(end.peer.endpoint, psn=life << 16)
        except PyverbsRDMAError:
            net.clock.later(1 * MS, self._leave, app, False)
            return
        self._live(app, life)
        self._has_come(app)

    def _has_come(self, app: Application) -> None:
        self._changing -= {app.endpoint, app.peer.endpoint}
        self.coming -= 1
