# SPDX-License-Identifier: BSD-3-Clause
"""A receive into memory that the backup NIC is still registering, and messages that tell the peer of it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import HOME, Host, Network, go

#: New memory, a receive into it, and a message that lets the peer send there.
CREDIT = """
m = mr.MR(ep.pd, SLOT, ACCESS)
ep.qp.post_recv(wr.RecvWR(5, 1, [wr.SGE(m.buf, SLOT, m.lkey)]))
ep.post('SEND', slot=1, wr_id=1)
"""


def answers(a: Host, timeout_s: float = 20.0) -> list[Any]:
    """What a gets that has a receive posted, and answers what comes there by a message."""
    got = a(f"ep.poll(1, {timeout_s})")
    if got:
        a("ep.post('SEND', slot=2, wr_id=2)")
        got += a("ep.poll(1)")
    return [wc[:2] for wc in got]


@pytest.mark.parametrize("then", ["registered", "home"])
def test_a_message_does_not_overtake_the_receive_it_tells_of(
    network: Network, faults: Any, then: str
) -> None:
    """The peer has no RNR retries. The memory is registered at last, or traffic goes home before it is."""
    a, b = network.protected(attrs="rnr=0")
    go(faults, "away", a, b)
    a("ep.recv(7)")
    b("ep.post('SEND', slot=1, wr_id=3)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "SUCCESS"]] and b("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
    a("ep.recv(7)")
    faults.hang("b/soft1")
    b(CREDIT)
    assert answers(a, 0.5) == [], "the peer heard of a receive that the NIC does not have"
    if then == "registered":
        faults.unhang("b/soft1")
    else:
        faults.up("a/soft0")
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 20)")
    assert answers(a) == [[7, "SUCCESS"], [2, "SUCCESS"]], a("ep.shift()")
    assert sorted(wc[:2] for wc in b("ep.poll(2)")) == [[1, "SUCCESS"], [5, "SUCCESS"]]
    faults.unhang("b/soft1")
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED"


def test_receives_are_withheld_on_both_sides(network: Network, faults: Any) -> None:
    """Each side's sends wait for its own receive: home is well, and neither waits there for the other's."""
    a, b = network.protected(attrs="rnr=0")
    go(faults, "away", a, b)
    for h in (a, b):
        h("ep.recv(7)")
    for name in ("a", "b"):
        faults.hang(f"{name}/soft1")
    for h in (a, b):
        h(CREDIT)
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED", h("ep.shift()['why']")
        assert sorted(wc[:2] for wc in h("ep.poll(2)")) == [[1, "SUCCESS"], [7, "SUCCESS"]]
    for name in ("a", "b"):
        faults.unhang(f"{name}/soft1")
    a("ep.post('SEND', slot=2, wr_id=2)")
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[5, "SUCCESS"]]


def test_the_path_fails_while_a_receive_is_withheld(network: Network, faults: Any) -> None:
    """Away on one backup, the next one has the memory: nothing is withheld there any more, and nothing lost."""
    a, b = network.protected("3", attrs="rnr=0")
    faults.down("a/soft0")

    def backups() -> set[str]:
        """Where the traffic of both is: the first backup, unless it is late; the other one is the next then."""
        return {shift[way] for shift in (a("ep.shift()"), b("ep.shift()")) for way in ("path", "recv_path")}

    wait_until(lambda: len(backups()) == 1 and "soft0" not in backups(), what="both are away on one backup")
    (backup,) = backups()
    a("ep.recv(7)")
    faults.hang(f"b/{backup}")
    b(CREDIT)
    assert answers(a, 0.5) == []
    faults.down(f"a/{backup}")
    faults.unhang(f"b/{backup}")
    assert answers(a) == [[7, "SUCCESS"], [2, "SUCCESS"]], a("ep.shift()")
    assert sorted(wc[:2] for wc in b("ep.poll(2)")) == [[1, "SUCCESS"], [5, "SUCCESS"]]


def test_a_receive_that_is_never_posted_ends_the_qp(network: Network, faults: Any) -> None:
    """Its memory cannot be registered: errors for what waits behind it, too, and not silence."""
    a, b = network.protected(attrs="rnr=0")
    go(faults, "away", a, b)
    a("ep.recv(7)")
    b("from shiftverbs.failover.services import memory_keys; memory_keys.HANGS_S = 0.3")
    faults.hang("b/soft1")
    b(CREDIT)
    b("ep.wait(\"s.status == 'FAILED'\")")
    assert "hangs" in b("ep.shift()['why']")
    faults.unhang("b/soft1")  # before that NIC has stopped no memory is given back
    assert sorted(wc[0] for wc in b("ep.poll(2)")) == [1, 5]
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "WR_FLUSH_ERR"]]
