# SPDX-License-Identifier: BSD-3-Clause
"""A program that moves its QPs to ERR, and then deregisters the memory of one: as with plain verbs, nothing meets that.

The traffic is on the backup, whose NIC needs a moment for each command. Who has a QP in ERR may deregister: no NIC
uses that memory any more, and so no peer is told that there is none.
"""

from __future__ import annotations

from simulator.application import WcStatus
from simulator.clock import MS, US
from simulator.network import Network
from simulator.rnic import ERR
from simulator.story import on, plan, sends, until, wait
from simulator.world import World


def test_no_nic_uses_memory_whose_end_has_returned() -> None:
    net = Network(1, 2, 64, 64, qps=2)
    try:
        wait(net, 30)
        assert net.protected()
        ours, theirs = net.apps_of("a"), net.apps_of("b")[1]
        for app in ours:
            app.endpoint.prefer(1)
        until(net, lambda: all(on(app, 1) and not app.endpoint.protocol.busy for app in net.apps), ms=300)
        wait(net, 5)
        net.nics["a"][1].command_ns = 2 * MS
        for n in range(30):
            plan(theirs, "SEND", signaled=True)
            net.clock.later(n * 400 * US, theirs.due)
        wait(net, 1)
        for app in ours:
            app.err()
        ours[1].own_error = "its QP is in ERR, and its memory is its own"
        ours[1].buffers.close()
        backup = ours[1].endpoint.qp(1)
        assert backup is not None
        state = backup.state
        wait(net, 3000)
        failed = [status for status in sends(theirs) if status != "SUCCESS"]
        assert "REM_OP_ERR" not in failed, failed
        own = {WcStatus(status).name for _, _, status in ours[1].wcs}
        assert own <= {"SUCCESS", "WR_FLUSH_ERR"}, own
        assert state == ERR, "the backup's QP works, and what its receives name is deregistered"
    finally:
        if World.current is not None:
            World.current.end()
