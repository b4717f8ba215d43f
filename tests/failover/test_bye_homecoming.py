# SPDX-License-Identifier: BSD-3-Clause
"""A peer that has done its work and closes while we come home: who only waits keeps its receives."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, Host, Network

LOSES_MOVED = (
    "from shiftverbs.protocol.messages import Move, MoveStep\n"
    "c = ep.qp._shadow.connection\n"
    "say = c.say\n"
    "def loses(message, pair, spread=False):\n"
    "    if not (isinstance(message, Move) and message.step is MoveStep.MOVED):\n"
    "        say(message, pair, spread)\n"
    "c.say = loses\n"
)


def away(network: Network, faults: Any) -> tuple[Host, Host]:
    """Two hosts on their backups, each with four receives."""
    a, b = network.protected()
    a("[ep.recv(i) for i in range(4)]")
    b("[ep.recv(10 + i) for i in range(4)]")
    faults.down("b/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    return a, b


@pytest.mark.parametrize("lost", [True, False], ids=["answer_lost", "as_it_comes"])
def test_who_is_idle_is_not_failed(network: Network, faults: Any, lost: bool) -> None:
    a, b = away(network, faults)
    a("ep.post('SEND', slot=0, length=4, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1, 10)")] == [[1, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1, 10)")] == [[10, "SUCCESS"]]
    if lost:
        b(LOSES_MOVED)
    faults.up("b/soft0")
    a("ep.wait(\"s.state in ('WAIT_DRAINED', 'DEFAULT')\", 20)")
    state = a("ep.shift()['state']")
    b("ep.qp.close()")
    a("ep.wait(\"s.status != 'PROTECTED'\", 20)")
    got = [wc[:2] for wc in a("ep.poll(4, 1)")]
    assert got == [], (state, a("ep.shift()"))
    if state == "WAIT_DRAINED" and lost:
        a("ep.post('SEND', slot=0, length=4, wr_id=2); ep.recv(4)")
        ended = [wc[:2] for wc in a("ep.poll(6, 10)")]
        assert ended[0] == [2, "RETRY_EXC_ERR"], a("ep.shift()")
        assert sorted(ended[1:]) == [[i, "WR_FLUSH_ERR"] for i in range(5)]


def test_a_nic_that_has_no_receives_of_the_idle_one_dies(network: Network, faults: Any) -> None:
    """What was sent last went over the backup, what is to be received comes at home: nothing lies on the backup."""
    a, b = away(network, faults)
    b(LOSES_MOVED)
    faults.up("b/soft0")
    a("ep.wait(\"s.state == 'WAIT_DRAINED' and s.recv_path == 'soft0'\", 20)")
    b("ep.qp.close()")
    a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
    faults.kill("a/soft1")
    assert a("ep.none(1)") == [], a("ep.shift()")
    a("ep.post('SEND', slot=0, length=4, wr_id=2)")
    assert [wc[:2] for wc in a("ep.poll(5, 10)")] == [
        [2, "RETRY_EXC_ERR"],
        *([i, "WR_FLUSH_ERR"] for i in range(4)),
    ]
