# SPDX-License-Identifier: BSD-3-Clause
"""A backup NIC that gives the key of memory that is gone to other memory, while a WR by the old key is on its way."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, Host, Network, go
from test_memory_keys import WRITE, resolved

# What takes the place of m: memory with another rkey at home, which that of a plain MR keeps it from having.
INSTEAD = """
from pyverbs import device as plain_device, mr as plain_mr, pd as plain_pd
def more():
    return mr.MR(ep.pd, SLOT, ACCESS, address=block.buf)
def instead(m):
    rkey = m.rkey
    m.close()
    plugs.append(plain_mr.MR(plain, SLOT, ACCESS))
    n = registered(more())
    assert n.rkey != rkey
    return n
def registered(n):
    while n._shadow.pending:
        time.sleep(0.001)
    return n
def told():
    return ep.qp._shadow.connection.keys._told
plain, plugs = plain_pd.PD(plain_device.Context(name='soft0')), []
block = mr.MR(ep.pd, SLOT, ACCESS)
m = more()
m.rkey, m.buf
"""


def with_memory(network: Network, attrs: str = "") -> tuple[Host, Host, Any]:
    """Two hosts at home; (rkey, address) of b's memory `m`, which a knows."""
    network.env["SOFTRNIC_KEYS"] = "reuse"
    a, b = network.protected(attrs=attrs)
    a(WRITE)
    m = b(INSTEAD)
    a(f"write(ep, {m}, 'old', 1)")
    assert [w[:2] for w in a("ep.poll(1)")] == [[1, "SUCCESS"]]
    resolved(a, m[0], "ep")
    b("block.write(bytes(SLOT), SLOT, 0)")
    return a, b, m


def deaf(a: Host) -> None:
    """What b says of its keys is lost for a; it goes on using what it knows."""
    a("from shiftverbs.failover.services.memory_keys import PeerKeys")
    a("take, PeerKeys.take = PeerKeys.take, lambda keys, m: False")


@pytest.mark.parametrize("times", [1, 3])
def test_a_key_whose_withdrawal_was_not_heard(network: Network, faults: Any, times: int) -> None:
    """However often the memory changes."""
    a, b, m = with_memory(network)
    go(faults, "away", a, b)
    deaf(a)
    b("n = m")
    for _ in range(times):
        b("n = instead(n)")
    a(f"write(ep, {m}, 'WRONG', 2)")
    ended = [w[:2] for w in a("ep.poll(1)")]
    assert b("n.read(5, 0) == bytes(5)"), f"it is in other memory; the WR says {ended}"
    assert ended == [[2, "REM_ACCESS_ERR"]], "as with plain verbs"


def test_a_key_that_a_wr_on_its_way_has(network: Network, faults: Any) -> None:
    """The withdrawal is heard while the WR is on the network."""
    a, b, m = with_memory(network, "timeout=18")
    go(faults, "away", a, b)
    faults.delay("a/soft1", 0.7, direction="tx", opcode="write", count=1)
    a(f"write(ep, {m}, 'WRONG', 2)")
    b("m.close(); m = None")
    wait_until(lambda: b("told().confirmed >= told().version"), what="the withdrawal was heard")
    b("plugs.append(plain_mr.MR(plain, SLOT, ACCESS)); n = registered(more())")
    ended = [w[:2] for w in a("ep.poll(1)")]
    assert b("n.read(5, 0) == bytes(5)"), f"it is in other memory; the WR says {ended}"
    assert ended == [[2, "REM_ACCESS_ERR"]]


def test_a_wr_that_is_posted_while_the_withdrawal_is_heard(network: Network, faults: Any) -> None:
    """The application's thread comes in between: the old key is not used any more, or its WR is known of."""
    a, b, m = with_memory(network, "timeout=18")
    go(faults, "away", a, b)
    faults.delay("a/soft1", 0.7, direction="tx", opcode="write", count=1)
    a(f"""
from shiftverbs.failover.services import memory_keys as mk
leave_behind, posted = mk.PeerKeys._leave_behind, []
def between(keys, rkey, but=None):
    leave_behind(keys, rkey, but)
    if not posted:
        posted.append(rkey)
        write(ep, {m}, 'WRONG', 2)
mk.PeerKeys._leave_behind = between
""")
    b("m.close(); m = None")
    wait_until(lambda: b("told().confirmed >= told().version"), what="the withdrawal was heard")
    assert a("posted") == [m[0]]
    b("plugs.append(plain_mr.MR(plain, SLOT, ACCESS)); n = registered(more())")
    ended = [w[:2] for w in a("ep.poll(1)")]
    assert b("n.read(5, 0) == bytes(5)"), f"it is in other memory; the WR says {ended}"
    assert ended[0][1] != "SUCCESS"


def test_memory_that_goes_before_its_write_is_replayed(network: Network, faults: Any) -> None:
    """It was executed, which the owner saw, and is not proven: the acknowledgements were lost."""
    a, b, m = with_memory(network, "timeout=18")
    faults.drop("a/soft0", direction="rx", opcode="ack", count=0)
    faults.delay("a/soft1", 0.7, direction="tx", opcode="write", count=1)
    a(f"write(ep, {m}, 'done', 2)")
    wait_until(lambda: b("m.read(4, 0) == b'done'"), what="it is executed")
    faults.down("a/soft0")
    b("ep.wait(\"s.recv_path == 'soft1'\"); block.write(bytes(SLOT), SLOT, 0)")
    a("ep.wait(\"s.path == 'soft1'\")")
    b("n = instead(m)")
    ended = [w[:2] for w in a("ep.poll(1)")]
    assert b("n.read(4, 0) == bytes(4)"), f"it is in other memory; the WR says {ended}"
    assert ended == [[2, "REM_ACCESS_ERR"]]


def test_what_was_held_is_let_go_of(network: Network, faults: Any) -> None:
    """When the peer has heard, nothing is kept; and new memory works, by whatever keys."""
    a, b, m = with_memory(network)
    go(faults, "away", a, b)
    for wr_id in range(2, 12):
        b("m = instead(m)")
        m = b("m.rkey, m.buf")
        a(f"write(ep, {m}, 'new{wr_id}', {wr_id})")
        assert [w[:2] for w in a("ep.poll(1)")] == [[wr_id, "SUCCESS"]], a("ep.shift()['why']")
        assert b("m.read(5, 0).decode()").startswith(f"new{wr_id}"[:5])
    wait_until(lambda: b("not told().held"), what="all is settled")
    b("m = instead(m); ep.wait('True')")
    wait_until(
        lambda: b("not told().held and not ep.qp._shadow.domain.backups[0].plugs.keys"), what="no key is kept"
    )


def test_a_wr_that_nobody_signals_holds_up_nobody(network: Network, faults: Any) -> None:
    """Executed long ago, and no completion tells of it: its key is kept from others, by what the NICs have free."""
    a, b, m = with_memory(network)
    go(faults, "away", a, b)
    a(f"write(ep, {m}, 'quiet', 2, False)")
    wait_until(lambda: b("m.read(5, 0) == b'quiet'"), what="it is executed")
    b("m.close(); m = registered(more())")  # the same rkey at home: only that it was heard is awaited
    n = b("m.rkey, m.buf")
    assert n[0] == m[0]
    a(f"write(ep, {n}, 'again', 3, False)")
    wait_until(lambda: b("m.read(5, 0) == b'again'"), what="new memory is reached")
    b("m = instead(m)")
    wait_until(lambda: b("told().confirmed >= told().version"), what="the withdrawal was heard")
    assert b("len(told().held)") == 1, "something may come by it"
    n = b("m.rkey, m.buf")
    a(f"write(ep, {n}, 'known', 4)")
    assert [w[:2] for w in a("ep.poll(1)")] == [[4, "SUCCESS"]], a("ep.shift()['why']")
    wait_until(lambda: b("not told().held"), what="nothing can come any more")
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED"


def test_a_peer_that_is_stopped_costs_little(network: Network, faults: Any) -> None:
    """Memory comes and goes all the same, and what is kept for the peer's sake does not grow."""
    a, b, m = with_memory(network)
    go(faults, "away", a, b)
    a.child.signal(signal.SIGSTOP)
    b("m = instead(m)\nfor _ in range(2000):\n    n = more(); n.close()", timeout_s=60)
    assert b("len(told().held)") <= 1 >= b("len(ep.qp._shadow.domain.backups[0].plugs.keys)")
    a.child.signal(signal.SIGCONT)
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    m = b("m.rkey, m.buf")
    a(f"write(ep, {m}, 'well', 2)")
    assert [w[:2] for w in a("ep.poll(1)")] == [[2, "SUCCESS"]], a("ep.shift()['why']")


def test_a_peer_that_dies_holds_nothing(network: Network, faults: Any) -> None:
    """It was told, and will never confirm: what its QP ends frees the keys."""
    a, b, m = with_memory(network)
    go(faults, "away", a, b)
    deaf(a)
    b("n = instead(m)")
    assert b("len(told().held)") == 1
    a.child.signal(signal.SIGKILL)
    b("ep.qp.close()")
    b("book = n._shadow.domain.runtime.driver.keys")
    wait_until(lambda: b("not book._told"), what="the peer is forgotten")
    b("n.close(); n = more()")
    wait_until(lambda: b("n._shadow.state(1)") == "ready", what="its registration")
    wait_until(lambda: b("not n._shadow.domain.backups[0].plugs.keys"), what="no key is kept")
