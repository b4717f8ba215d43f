# SPDX-License-Identifier: BSD-3-Clause
"""The BYE of one that drains its QP is lost, on every path, amid the peer's MOVE: it is said again."""

from __future__ import annotations

import pytest
from hosts import Network

TO = "at = qp.QPAttr(qp_state=e.IBV_QPS_{0}); ep.qp.modify(at, e.IBV_QP_STATE)"
LOSES_MOVE = """
from shiftverbs.messages import Move, MoveStep, Prefer
c = ep.qp._shadow.connection
say = c.say
def loses(message, pair, spread=False):
    if not isinstance(message, Prefer) and getattr(message, "step", None) is not MoveStep.MOVE:
        say(message, pair, spread)
c.say = loses
"""
# What is said while the verb has the driver's lock the first time is lost, as where both cables are out for a moment.
LOSES_BYE = """
from shiftverbs.messages import Sync, Phase
channel = ep.qp._shadow.domain.runtime.driver.channel
send = channel.send
lost = []
def loses(path, entry):
    if isinstance(entry.message, Sync) and entry.message.phase is Phase.BYE and len(lost) < 2:
        lost.append(entry)
    else:
        send(path, entry)
channel.send = loses
"""


@pytest.mark.parametrize("others", [0, 1])
def test_who_waits_in_a_move_goes_on(network: Network, others: int) -> None:
    a, b = network.protected()
    for _ in range(others):
        names = [h("other = Endpoint(); other.name()") for h in (a, b)]
        for h, name in ((b, names[0]), (a, names[1])):
            h(f"other.connect({name!r})")
        assert all(h("other.qp.shift.wait_protected(20)") for h in (a, b))
    b("[ep.recv(10 + i) for i in range(3)]")
    a(LOSES_MOVE)
    a("ep.qp.shift.migrate(1)")
    a("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    b(LOSES_BYE)
    b(TO.format("SQD"))
    a("c.say = say")
    assert b("len(lost)") == 2
    b(TO.format("RTS"))
    a("ep.wait(\"s.status != 'PROTECTED'\", 20)")
    for i in range(3):
        a(f"ep.post('SEND', length=4, wr_id={i})")
        assert [wc[:2] for wc in a("ep.poll(1, 5)")] == [[i, "SUCCESS"]], a("ep.shift()")
