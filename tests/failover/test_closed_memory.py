# SPDX-License-Identifier: BSD-3-Clause
"""Memory that was deregistered under work that names it: what plain verbs say, wherever traffic is."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, WHERE, Host, Network, go

#: Posts of one WR from memory of its own, which is closed at once.
CLOSED = """
def closed(wr_id, opcode='SEND', length=3000):
    m = mr.MR(ep.pd, SLOT, ACCESS)
    w = wr.SendWR(
        wr_id, opcode=getattr(e, 'IBV_WR_' + opcode), num_sge=1, sg=[wr.SGE(m.buf, length, m.lkey)],
        send_flags=e.IBV_SEND_SIGNALED,
    )
    if opcode != 'SEND':
        w.set_wr_rdma(ep.peer['rkey'], ep.peer['addr'])
    ep.qp.post_send(w)
    m.close()
"""


def hosts(network: Network, faults: Any, where: str) -> tuple[Host, Host]:
    """Two hosts; `where` is "plain": with pyverbs."""
    a, b = network.pair("pyverbs") if where == "plain" else network.protected()
    if where != "plain":
        go(faults, where, a, b)
    a(CLOSED)
    return a, b


@pytest.mark.parametrize("where", ["plain", *WHERE])
@pytest.mark.parametrize("opcode", ["SEND", "RDMA_WRITE", "RDMA_READ"])
def test_closed_right_after_its_post(network: Network, faults: Any, where: str, opcode: str) -> None:
    """A race: the NIC had read it, or finds it gone. What is ahead completes; what is behind is flushed then."""
    a, b = hosts(network, faults, where)
    b("ep.recv(1); ep.recv(2); ep.recv(3)")
    a(f"ep.post('RDMA_WRITE', wr_id=1, signaled=False); ep.post('SEND', wr_id=2); closed(3, {opcode!r})")
    a("ep.post('RDMA_WRITE', wr_id=4)")
    got = [wc[:2] for wc in a("ep.poll(3)")]
    assert got in (
        [[2, "SUCCESS"], [3, "SUCCESS"], [4, "SUCCESS"]],
        [[2, "SUCCESS"], [3, "LOC_PROT_ERR"], [4, "WR_FLUSH_ERR"]],
    )


@pytest.mark.parametrize("where", ["plain", *WHERE])
def test_gone_when_it_is_posted(network: Network, faults: Any, where: str) -> None:
    """No race: LOC_PROT_ERR. The QP ends as by any error of the application's, and no path is to blame."""
    a, b = hosts(network, faults, where)
    b("ep.recv(1)")
    a("m = mr.MR(ep.pd, SLOT, ACCESS); lkey = m.lkey; m.close()")
    a(
        "ep.post('SEND', wr_id=1, signaled=False); ep.post('RDMA_WRITE', wr_id=2, lkey=lkey); ep.post('SEND', wr_id=3)"
    )
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[2, "LOC_PROT_ERR"], [3, "WR_FLUSH_ERR"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[1, "SUCCESS"]]
    if where != "plain":
        assert "the application's own error: LOC_PROT_ERR" in a("ep.shift()['why']")


@pytest.mark.parametrize("where", ["plain", *WHERE])
def test_a_receive_whose_memory_is_gone(network: Network, faults: Any, where: str) -> None:
    """It is in nobody's way before its message comes."""
    a, b = hosts(network, faults, where)
    b("m = mr.MR(ep.pd, SLOT, ACCESS); ep.recv(1)")
    b("ep.qp.post_recv(wr.RecvWR(2, 1, [wr.SGE(m.buf, SLOT, m.lkey)])); m.close()")
    b("ep.post('RDMA_WRITE', wr_id=3)")
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[3, "SUCCESS"]]
    a("ep.post('SEND', wr_id=4)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[4, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[1, "SUCCESS"]]
    a("ep.post('SEND', wr_id=5)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[5, "REM_OP_ERR"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[2, "LOC_PROT_ERR"]]


@pytest.mark.parametrize("where", ["plain", *WHERE])
@pytest.mark.parametrize("opcode", ["RDMA_WRITE", "RDMA_READ", "ATOMIC_FETCH_AND_ADD"])
def test_the_peer_closed_its_memory(network: Network, faults: Any, where: str, opcode: str) -> None:
    """REM_ACCESS_ERR of the WR that names it; what is ahead completes, what is behind is flushed."""
    a, b = hosts(network, faults, where)
    b("ep.recv(1)")
    rkey = b("m = mr.MR(ep.pd, SLOT, ACCESS); m.rkey")
    b("m.close()")
    a("ep.post('RDMA_WRITE', wr_id=1, signaled=False); ep.post('SEND', wr_id=2)")
    a(f"ep.post({opcode!r}, wr_id=3, length=8, rkey={rkey}); ep.post('SEND', wr_id=4)")
    got = [wc[:2] for wc in a("ep.poll(3)")]
    assert got == [[2, "SUCCESS"], [3, "REM_ACCESS_ERR"], [4, "WR_FLUSH_ERR"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[1, "SUCCESS"]]


def test_what_is_ahead_and_silent_completes(network: Network, faults: Any) -> None:
    """Nothing but unsignaled work is ahead of the WR whose memory the peer has not."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "500"
    a, b = hosts(network, faults, "away")
    b("ep.recv(1); ep.recv(2)")
    a("ep.fill(5, 'ahead'); ep.post('SEND', wr_id=1, signaled=False)")
    a("ep.post('RDMA_WRITE', slot=5, wr_id=2, signaled=False); ep.post('RDMA_WRITE', wr_id=3, rkey=0x7777)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[3, "REM_ACCESS_ERR"]]
    assert b("ep.text(5, 5)") == "ahead"
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[1, "SUCCESS"], [2, "WR_FLUSH_ERR"]]


def test_closed_between_two_attempts(network: Network, faults: Any) -> None:
    """The default NIC could not deliver it, and its memory is gone before the backup can: as a repeat of that NIC's."""
    a, b = network.protected()
    a(CLOSED)
    b("ep.recv(1)")
    faults.switch_down("rail0")
    a("ep.post('RDMA_WRITE', wr_id=1); closed(2); ep.post('RDMA_WRITE', wr_id=3)")
    assert [wc[:2] for wc in a("ep.poll(3)")] == [[1, "SUCCESS"], [2, "LOC_PROT_ERR"], [3, "WR_FLUSH_ERR"]]
    assert a("ep.shift()['counters']['switches']") == 1


def test_a_key_that_is_used_again_is_memory(network: Network, faults: Any) -> None:
    """What once had a WR fail is no other MR's business."""
    network.env["SOFTRNIC_KEYS"] = "reuse"
    a, b = network.protected()
    a(CLOSED)
    go(faults, "away", a, b)
    names = [h("two = Endpoint(shared=ep); two.name()") for h in (a, b)]
    b(f"two.connect({names[0]!r})")
    a(f"two.connect({names[1]!r})")
    for h in (a, b):
        assert h("two.qp.shift.wait_protected(20)"), h("two.shift()")
    lkey = a("m = mr.MR(ep.pd, SLOT, ACCESS); lkey = m.lkey; m.close(); lkey")
    a("ep.post('RDMA_WRITE', wr_id=1, lkey=lkey)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[1, "LOC_PROT_ERR"]]
    for h in (a, b):
        h(f"two.wait({AWAY!r}, 20)")
    assert a("m = mr.MR(ep.pd, SLOT, ACCESS); m.lkey") == lkey
    a("two.post('RDMA_WRITE', wr_id=2)")
    a("w = wr.SendWR(3, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[wr.SGE(m.buf, 8, m.lkey)], send_flags=2)")
    a("w.set_wr_rdma(two.peer['rkey'], two.peer['addr']); two.qp.post_send(w)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[2, "SUCCESS"], [3, "SUCCESS"]], a("two.shift()")
