# SPDX-License-Identifier: BSD-3-Clause
"""SQD amid a MOVE or a SWITCH: the QP, and its peer's, go on as with plain verbs, or the verb is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, HOME, HostError, Network, go

TO = "at = qp.QPAttr(qp_state=e.IBV_QPS_{0}); ep.qp.modify(at, e.IBV_QP_STATE)"
LOSES = """
from shiftverbs.protocol.messages import Move, MoveStep, Prefer
c = ep.qp._shadow.connection
say = c.say
def loses(message, pair, spread=False):
    if not isinstance(message, Prefer) and getattr(message, "step", None) is not MoveStep.{0}:
        say(message, pair, spread)
c.say = loses
"""
# The driver is at something else when the verb wants its lock, until this is so.
LATE = """
c = ep.qp._shadow.connection
runtime = ep.qp._shadow.domain.runtime
touched = runtime.qp_touched
def late(*arguments):
    runtime.qp_touched = touched
    deadline = time.monotonic() + 10
    while not ({0}) and time.monotonic() < deadline:
        c.driver.run()
    return touched(*arguments)
runtime.qp_touched = late
"""


@pytest.mark.parametrize("lost", ["MOVE", "MOVED"])
def test_the_peer_of_who_drains_goes_on(network: Network, faults: Any, lost: str) -> None:
    """All of a is at home, and it drains its send queue; b waits for the answer to its MOVE, which never comes."""
    a, b = network.protected()
    for h in (a, b):
        h("[ep.recv(10 + i) for i in range(6)]")
    if lost == "MOVED":
        go(faults, "away", a, b)
        a(LOSES.format("MOVED"))
        faults.up("a/soft0")
        a(f"ep.wait({HOME!r}, 20)")
    else:
        b(LOSES.format("MOVE"))
        b("ep.qp.shift.migrate(1)")
    b("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    for state in ("SQD", "RTS"):
        a(TO.format(state))
    b("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
    for x, y in ((b, a), (a, b)):
        for i in range(3):
            x(f"ep.post('SEND', length=4, wr_id={i})")
            assert [wc[:2] for wc in x("ep.poll()")] == [[i, "SUCCESS"]], (a("ep.shift()"), b("ep.shift()"))
            assert [wc[:2] for wc in y("ep.poll()")] == [[10 + i, "SUCCESS"]]


def drain(host: Any) -> str:
    """What modify to SQD said, from when the driver's lock was free: nothing, or its error."""
    try:
        host.end()
    except HostError as error:
        return str(error)
    return ""


BIND = "info = mr.MWBindInfo(ep.mr, ep.mr.buf, 64, e.IBV_ACCESS_REMOTE_WRITE); ep.qp.bind_mw(w, mr.MWBind(info, 1, 5))"


@pytest.mark.parametrize("verb", [TO.format("SQD"), BIND], ids=["SQD", "bind_mw"])
def test_a_switch_begins_before_the_verb_has_the_lock(network: Network, faults: Any, verb: str) -> None:
    a, b = network.protected(setup="access=ACCESS | e.IBV_ACCESS_MW_BIND")
    a("w = mr.MW(ep.pd, e.IBV_MW_TYPE_1)")
    b("[ep.recv(10 + i) for i in range(4)]")  # none at a, or bind_mw need not look where its traffic is
    a(LATE.format("c.protocol.switching and c.fence is not None"))
    a.begin(verb)
    faults.down("b/soft0")
    said = drain(a)
    assert a("runtime.qp_touched is touched"), said
    a("ep.post('SEND', length=4, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll()")] == [[1, "SUCCESS"]], (said, a("ep.shift()"))
    assert "Errno: 16" in said and a("ep.qp.shift.status") == "PROTECTED"
    assert a(f"ep.wait({AWAY!r}, 20)")


def test_a_move_is_told_before_the_verb_has_the_lock(network: Network) -> None:
    a, b = network.protected()
    for h in (a, b):
        h("[ep.recv(10 + i) for i in range(4)]")
    a(LOSES.format("MOVE") + LATE.format("c.protocol.move_told"))
    a("import threading; threading.Timer(0.05, ep.qp.shift.migrate, (1,)).start()")
    a.begin(TO.format("SQD"))
    said = drain(a)
    a("ep.post('SEND', length=4, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll()")] == [[1, "SUCCESS"]], (said, a("ep.shift()"))
    assert "Errno: 16" in said and a("ep.qp.shift.status") == "PROTECTED"


@pytest.mark.parametrize("where", ["home", "away"])
@pytest.mark.parametrize("what", ["SQE", "SQD_and_more", "SQD_from_RTS"])
def test_what_no_nic_takes_costs_nothing(network: Network, faults: Any, where: str, what: str) -> None:
    """A verb cannot bring a QP to SQE (IBA 11.2.5.2), and SQD takes no other attribute, nor the state before."""
    a, b = network.protected()
    go(faults, where, a, b)
    b("[ep.recv(10 + i) for i in range(3)]")
    more = {"SQE": "", "SQD_and_more": " | e.IBV_QP_TIMEOUT", "SQD_from_RTS": " | e.IBV_QP_CUR_STATE"}
    mask = "e.IBV_QP_STATE" + more[what]
    with pytest.raises(HostError):
        a(
            f"at = qp.QPAttr(qp_state=e.IBV_QPS_{what[:3]}, cur_qp_state=e.IBV_QPS_RTS); ep.qp.modify(at, {mask})"
        )
    for i in range(3):
        a(f"ep.post('SEND', length=4, wr_id={i})")
        assert [wc[:2] for wc in a("ep.poll(1, 5)")] == [[i, "SUCCESS"]], a("ep.shift()")
    assert a("ep.qp.shift.status") == "PROTECTED", a("ep.shift()")
