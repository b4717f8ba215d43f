# SPDX-License-Identifier: BSD-3-Clause
"""The golden scenarios of docs/protocol.md, as far as the software RNIC can stage them, between real processes."""

from __future__ import annotations

from typing import Any

from harness import wait_until
from hosts import AWAY, HOME, Host, Network


def both_home(*hosts: Host) -> None:
    """Wait until everything is on the default NICs again."""
    for h in hosts:
        h(f"ep.wait({HOME!r}, 20)")


def statuses(wcs: list[Any]) -> list[Any]:
    """[wr_id, status] of each WC; qp_num must be the default QP's."""
    assert all(wc[3] for wc in wcs), wcs
    return [wc[:2] for wc in wcs]


def test_read_response_lost_send_counted(network: Network, faults: Any) -> None:
    a, b = network.protected()
    b("ep.fill(3, 'from b'); ep.recv(1); ep.recv(2)")
    faults.drop("a/soft0", direction="rx", opcode="read_response", count=0)
    a("ep.post('RDMA_READ', slot=3, length=6, wr_id=1)")
    a("ep.fill(4, 'hello'); ep.post('SEND', slot=4, length=5, wr_id=2)")
    assert statuses(b("ep.poll(1)")) == [[1, "SUCCESS"]]  # counted at b, while a's READ has no answer
    faults.down("a/soft0")
    assert statuses(a("ep.poll(2)")) == [[1, "SUCCESS"], [2, "SUCCESS"]]
    assert a("ep.text(3, 6)") == "from b"
    assert b("ep.none()") == []
    assert a("ep.shift()['path']") == "soft1"


def test_acked_but_receive_cqe_lost(network: Network, faults: Any) -> None:
    a, b = network.protected()
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=1)")
    assert statuses(a("ep.poll(1)")) == [[1, "SUCCESS"]]
    # b's completion is taken away behind our back, as if its NIC had died between the ACK and the CQE.
    assert b("import pyverbs.cq; pyverbs.cq.CQ.poll(ep.cq, 1)[0]") == 1
    a("ep.post('SEND', length=5, wr_id=2)")  # outstanding: b has no receive for it
    faults.kill("b/soft0")
    assert statuses(a("ep.poll(1)")) == [[2, "RETRY_EXC_ERR"]]
    for h in (a, b):
        wait_until(lambda h=h: h("ep.shift()['status']") == "FAILED", what="both sides know")
    whys = [h("ep.shift()['why']") for h in (a, b)]
    assert any("acknowledged and lost" in why for why in whys), whys
    assert statuses(b("ep.poll(1)")) == [[1, "WR_FLUSH_ERR"]]


def test_unsignaled_tail_fence(network: Network, faults: Any) -> None:
    a, b = network.protected()
    a(
        "[(ep.fill(i, 'tail %d' % i), ep.post('RDMA_WRITE', slot=i, length=6, signaled=False)) for i in range(5)]"
    )
    wait_until(lambda: b("ep.text(4, 6)") == "tail 4", what="the tail arrived; nothing will ever say so to a")
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r})")
    a("ep.fill(5, 'behind'); ep.post('RDMA_WRITE', slot=5, length=6, wr_id=9)")
    assert statuses(a("ep.poll(1)")) == [[9, "SUCCESS"]]
    assert b("[ep.text(i, 6) for i in range(6)]") == [f"tail {i}" for i in range(5)] + ["behind"]
    faults.up("a/soft0")
    both_home(a, b)


def test_shared_cq_colliding_wr_ids(network: Network, faults: Any) -> None:
    hosts = a, b = network.host("a"), network.host("b")
    for h in hosts:
        h("one = Endpoint(); two = Endpoint(shared=one)")
    names = {h: h("[one.name(), two.name()]") for h in hosts}
    for h, peer in ((a, b), (b, a)):
        h(f"one.connect({names[peer][0]!r}); two.connect({names[peer][1]!r})")
    for h in hosts:
        assert h("one.qp.shift.wait_protected(20) and two.qp.shift.wait_protected(20)")
    b("[(one.recv(i, 7), two.recv(8 + i, 7)) for i in range(4)]")
    faults.switch_down("rail0")
    a(
        "[(x.fill(i, n + str(i)), x.post('SEND', slot=i, length=2, wr_id=7))"
        " for i in range(4) for n, x in (('p', one), ('q', two))]"
    )
    count = "[(w.wr_id, w.status, w.qp_num == one.qp.qp_num) for w in wcs]"
    a("import collections; wcs = []")
    wait_until(lambda: a("wcs += one.cq.poll(4)[1]; len(wcs)") >= 8, what="eight completions")
    assert sorted(a(count)) == sorted([[7, 0, True]] * 4 + [[7, 0, False]] * 4)
    b("wcs = []")
    wait_until(lambda: b("wcs += one.cq.poll(4)[1]; len(wcs)") >= 8, what="eight messages")
    assert sorted(b(count)) == sorted([[7, 0, True]] * 4 + [[7, 0, False]] * 4)
    assert b("[one.text(i, 2) for i in range(4)]") == [f"p{i}" for i in range(4)]
    assert b("[two.text(8 + i, 2) for i in range(4)]") == [f"q{i}" for i in range(4)]


def test_crossing_sync_different_targets(network: Network, faults: Any) -> None:
    a, b = network.protected(nics="3")
    for h in (a, b):
        h("[ep.recv(i) for i in range(8)]")
    faults.down("a/soft1")  # a will choose pair 2; b does not know and chooses pair 1
    wait_until(
        lambda: a("ep.qp._shadow.connection.protocol.pairs[1].alive") is False, what="a knows its port"
    )
    faults.switch_down("rail0")
    for h in (a, b):
        h.begin("[ep.post('SEND', length=4, wr_id=i) for i in range(4)]; ep.poll(8)")
    for h in (a, b):
        wcs = h.end()
        assert [wc[1] for wc in wcs] == ["SUCCESS"] * 8
        assert h("ep.shift()['path']") == "soft2"
    faults.up("a/soft1")
    faults.switch_up("rail0")
    both_home(a, b)


def test_ack_lost_then_target_dies(network: Network, faults: Any) -> None:
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "1500"
    a, b = network.protected(nics="3")
    b("[ep.recv(i) for i in range(8)]")
    faults.switch_down("rail1")  # the first target is a black hole
    faults.drop("a/soft0", direction="rx", opcode="ack", then="down")
    a("[(ep.fill(i, 'n%d' % i), ep.post('SEND', slot=i, length=2, wr_id=i)) for i in range(8)]")
    assert statuses(a("ep.poll(8)")) == [[i, "SUCCESS"] for i in range(8)]
    assert statuses(b("ep.poll(8)")) == [[i, "SUCCESS"] for i in range(8)]
    assert b("[ep.text(i, 2) for i in range(8)]") == [f"n{i}" for i in range(8)]
    assert a("ep.shift()['path']") == "soft2"
    assert b("ep.none()") == []


def test_half_home_default_fails(network: Network, faults: Any) -> None:
    a, b = network.protected()
    b("ep.recv(1)")
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    # Host a has no receive: b's fence cannot complete.
    b("ep.fill(6, 'waits'); ep.post('SEND', slot=6, length=5, wr_id=40)")
    faults.up("a/soft0")
    b("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    a("ep.wait(\"s.state == 'DEFAULT'\", 20)")
    assert b("ep.shift()['path']") == "soft1"
    assert a("ep.shift()['path']") == "soft0"
    b("ep.post('SEND', slot=6, length=5, wr_id=41)")  # withheld
    faults.down("a/soft0")
    for h in (a, b):
        h("ep.wait(\"s.state == 'FALLBACK' and s.recv_state == 'FALLBACK'\")")
    a("ep.recv(2); ep.recv(3)")
    assert statuses(b("ep.poll(2)")) == [[40, "SUCCESS"], [41, "SUCCESS"]]
    assert statuses(a("ep.poll(2)")) == [[2, "SUCCESS"], [3, "SUCCESS"]]
    assert a("ep.text(2, 5)") == "waits"
    faults.up("a/soft0")
    both_home(a, b)


def test_move_before_last_receive_polled(network: Network, faults: Any) -> None:
    a, b = network.protected()
    b("[ep.recv(i) for i in range(8)]")
    faults.down("a/soft0")
    a(f"ep.wait({AWAY!r})")
    a("[(ep.fill(i, 'm%d' % i), ep.post('SEND', slot=i, length=2, wr_id=i)) for i in range(4)]")
    assert statuses(a("ep.poll(4)")) == [[i, "SUCCESS"] for i in range(4)]
    faults.up("a/soft0")
    both_home(a, b)  # b has polled nothing so far
    a("[(ep.fill(i, 'm%d' % i), ep.post('SEND', slot=i, length=2, wr_id=i)) for i in range(4, 8)]")
    assert statuses(a("ep.poll(4)")) == [[i, "SUCCESS"] for i in range(4, 8)]
    assert statuses(b("ep.poll(8, most=3)")) == [[i, "SUCCESS"] for i in range(8)]
    assert b("[ep.text(i, 2) for i in range(8)]") == [f"m{i}" for i in range(8)]


def test_port_blip_with_atomic(network: Network, faults: Any) -> None:
    for blipping in "ab":
        # Four seconds of tries: a starved machine must not let them run out while the port is down.
        a, b = network.protected(attrs="timeout=17, retry=6")
        b("ep.mr.write((5).to_bytes(8, 'little'), 8)")
        # The answer is lost at the moment the port goes down: executed, and nobody here can know it.
        faults.drop(
            "a/soft0", direction="rx", opcode="atomic_ack", then="down", then_target=f"{blipping}/soft0"
        )
        a("ep.post('ATOMIC_FETCH_AND_ADD', slot=1, remote_slot=0, length=8, wr_id=3, compare=2)")
        assert a("ep.none(0.3)") == []
        faults.up(f"{blipping}/soft0")
        assert statuses(a("ep.poll(1)")) == [[3, "SUCCESS"]]
        assert b("ep.number(0)") == 7
        assert a("ep.number(1)") == 5
        for h in (a, b):
            assert h("ep.shift()['counters']['aborts']") == 0
            assert h("ep.shift()['status']") == "PROTECTED"
            h.child.close()


def test_close_during_wait_drained(network: Network, faults: Any) -> None:
    a, b = network.protected()
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    b("ep.post('SEND', length=5, wr_id=40)")
    faults.up("a/soft0")
    b("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    b("ep.post('SEND', length=5, wr_id=41)")
    b("ep.qp.close(); ep.mr.close(); ep.cq.close(); ep.pd.close(); ep.context.close()")
    wait_until(lambda: a("ep.shift()['status']") == "UNPROTECTED", what="a is told")
    b.child.process.stdin.close()  # type: ignore[union-attr]
    assert b.child.wait() == 0
