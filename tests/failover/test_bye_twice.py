# SPDX-License-Identifier: BSD-3-Clause
"""A BYE that says which MOVE was followed, and behind it one that does not know: read together, the first counts."""

from __future__ import annotations

from hosts import Network

SQD = "at = qp.QPAttr(qp_state=e.IBV_QPS_{0}); ep.qp.modify(at, e.IBV_QP_STATE)"
# The MOVE is there before the verb has the driver's lock, and is read when the verb has let go of the QP.
HEARS_LATE = """
c = ep.qp._shadow.connection
runtime = ep.qp._shadow.domain.runtime
touched = runtime.qp_touched
def late(*arguments):
    runtime.qp_touched = touched
    with c.driver.locked():
        print("locked", flush=True)
        time.sleep(0.5)
        return touched(*arguments)
runtime.qp_touched = late
"""
# It says MOVE, and is at something else until both answers are there.
SAYS_AND_IS_BUSY = """
c = ep.qp._shadow.connection
with c.driver.locked():
    c.say = say
    c.protocol.move.say()
    c.execute(c.protocol.state.out.copy())
    c.driver.channel.flush()
    time.sleep(1)
"""
LOSES_MOVE = """
from shiftverbs.protocol.messages import Move, MoveStep, Prefer
c = ep.qp._shadow.connection
say = c.say
def loses(message, pair, spread=False):
    if not isinstance(message, Prefer) and getattr(message, "step", None) is not MoveStep.MOVE:
        say(message, pair, spread)
c.say = loses
"""


def test_who_is_told_twice_goes_by_what_says_more(network: Network) -> None:
    a, b = network.protected()
    names = [h("other = Endpoint(); other.name()") for h in (a, b)]  # so that who has left can be heard
    for h, name in ((b, names[0]), (a, names[1])):
        h(f"other.connect({name!r})")
    assert all(h("other.qp.shift.wait_protected(20)") for h in (a, b))
    b("[ep.recv(10 + i) for i in range(3)]")
    a(LOSES_MOVE)
    a("ep.qp.shift.migrate(1)")
    a("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    b(HEARS_LATE)
    b.begin(SQD.format("SQD"))
    b.child.expect("^locked$", 20)
    a(SAYS_AND_IS_BUSY)
    b.end()
    b(SQD.format("RTS"))
    a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
    for i in range(3):
        a(f"ep.post('SEND', length=4, wr_id={i})")
        assert [wc[:2] for wc in a("ep.poll(1, 5)")] == [[i, "SUCCESS"]], a("ep.shift()")
