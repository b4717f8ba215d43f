# SPDX-License-Identifier: BSD-3-Clause
"""A peer that leaves when it has moved its receives, and was not heard to say so: nothing is sent to those it left."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, HOME, Network

LOSES_MOVED = """
from shiftverbs.protocol.messages import Move, MoveStep
c = ep.qp._shadow.connection
say = c.say
def loses(message, pair, spread=False):
    if not (isinstance(message, Move) and message.step is MoveStep.MOVED):
        say(message, pair, spread)
c.say = loses
"""
ERR = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR; ep.qp.modify(at, e.IBV_QP_STATE)"


@pytest.mark.parametrize("slow", [False, True], ids=["at_once", "slow_verbs"])
def test_what_succeeds_was_received(network: Network, faults: Any, slow: bool) -> None:
    """Who moves its QP to ERR and drains it receives all that was acknowledged."""
    a, b = network.protected()
    b("[ep.recv(10 + i) for i in range(6)]")
    faults.down("b/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    b(LOSES_MOVED)
    a("ep.fill(0, 'lost')")
    faults.up("b/soft0")
    a("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    b(f"ep.wait({HOME!r}, 20)")
    if slow:
        faults.hang("b/soft1")
    a("[ep.post('SEND', slot=0, length=4, wr_id=i) for i in range(3)]")
    b.begin(ERR)
    a("ep.wait(\"s.status != 'PROTECTED'\", 20)")
    ended = a("ep.poll(3, 3)")
    if slow:
        faults.unhang("b/soft1")
    b.end()
    received = [wc for wc in b("ep.poll(6, 10)") if wc[1] == "SUCCESS"]
    told = [wc for wc in ended if wc[1] == "SUCCESS"]
    assert len(told) <= len(received), (
        ended,
        received,
        b("[ep.text(10 + i, 4) for i in range(6)]"),
        a("ep.shift()"),
    )
    assert len(ended + a(f"ep.poll({3 - len(ended)}, 10)")) == 3


def test_who_breaks_off_a_move_that_was_told_sends_nothing_to_what_was_left(
    network: Network, faults: Any
) -> None:
    """Something of ours fails: the QP may not go on where it was, for the peer may have moved its receives."""
    a, b = network.protected()
    # b's own direction stays where it is: there is no receive for this one.
    b("[ep.recv(10 + i) for i in range(3)]; ep.post('SEND', slot=1, length=4, wr_id=9)")
    b(LOSES_MOVED)
    a("ep.fill(0, 'lost'); ep.qp.shift.migrate()")
    b("ep.wait(\"s.recv_path == 'soft1'\", 20)")
    a("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    a("c = ep.qp._shadow.connection; c.driver.post(lambda: c.give_up('the test')); c.driver.run()")
    a("[ep.post('SEND', slot=0, length=4, wr_id=i) for i in range(3)]")
    told = [wc for wc in a("ep.poll(3, 10)") if wc[1] == "SUCCESS"]
    received = [wc for wc in b("ep.poll(3, 1)") if wc[1] == "SUCCESS" and wc[0] != 9]
    assert len(told) <= len(received), (told, received, b("[ep.text(10 + i, 4) for i in range(3)]"))
