# SPDX-License-Identifier: BSD-3-Clause
"""The network loses all there is for a moment, and with it a MOVE and the BYE of one that drains its QP meanwhile."""

from __future__ import annotations

from typing import Any

from hosts import Network

TO = "at = qp.QPAttr(qp_state=e.IBV_QPS_{0}); ep.qp.modify(at, e.IBV_QP_STATE)"


def test_who_waits_in_a_move_goes_on(network: Network, faults: Any) -> None:
    """Another QP between the same hosts is there: what is asked is answered."""
    a, b = network.protected()
    names = [h("other = Endpoint(); other.name()") for h in (a, b)]
    for h, name in ((b, names[0]), (a, names[1])):
        h(f"other.connect({name!r})")
    assert all(h("other.qp.shift.wait_protected(20)") for h in (a, b))
    b("[ep.recv(10 + i) for i in range(3)]")
    rules = [faults.drop(f"b/soft{k}", count=0) for k in range(2)]
    a("ep.qp.shift.migrate(1)")
    a("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    b(TO.format("SQD"))
    for rule in rules:
        faults.undrop(rule)
    b(TO.format("RTS"))
    a("ep.wait(\"s.status != 'PROTECTED'\", 20)")
    for i in range(3):
        a(f"ep.post('SEND', length=4, wr_id={i})")
        assert [wc[:2] for wc in a("ep.poll(1, 5)")] == [[i, "SUCCESS"]], a("ep.shift()")
