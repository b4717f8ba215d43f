# SPDX-License-Identifier: BSD-3-Clause
"""Verbs beside posting and polling, on a protected QP: at home, on its backup, and when it is home again."""

from __future__ import annotations

from typing import Any

import pytest
from hosts import AWAY, HOME, WHERE, Host, HostError, Network, go


def code_of(host: Host, source: str) -> int | None:
    """The error_code of the error that source raises."""
    with pytest.raises(HostError) as error:
        host(source)
    assert error.value.type == "PyverbsRDMAError", error.value
    return error.value.code


@pytest.mark.parametrize("where", WHERE)
def test_channel_with_several_cqs(network: Network, faults: Any, where: str) -> None:
    """One event for each CQ that was armed and completed something, and no more; acknowledged late, or never."""
    a, b = network.protected(setup="channel=True, split=True")
    go(faults, where, a, b)
    arm = "ep.cq.req_notify(); ep.recv_cq.req_notify()"
    for h in (a, b):
        h(f"ep.channel.fd; import select; {arm}")
    b("ep.recv(1); ep.recv(2)")
    a("ep.recv(3)")
    quiet = "select.select([ep.channel.fd], [], [], 0.1)[0] == []"
    assert a(quiet) and b(quiet)
    a("ep.post('SEND', 0, wr_id=7)")
    b("ep.channel.get_cq_event(ep.recv_cq)")
    a("ep.channel.get_cq_event(ep.cq)")
    assert [wc[:2] for wc in b("ep.poll(1, queue=ep.recv_cq)")] == [[1, "SUCCESS"]]
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "SUCCESS"]]
    # The other CQs are armed still, these are not.
    b("ep.post('SEND', 0, wr_id=8)")
    b("ep.channel.get_cq_event(ep.cq)")
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[8, "SUCCESS"]]
    a("ep.channel.get_cq_event(ep.recv_cq)")
    assert [wc[:2] for wc in a("ep.poll(1, queue=ep.recv_cq)")] == [[3, "SUCCESS"]]
    a("ep.post('SEND', 0, wr_id=9)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[9, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1, queue=ep.recv_cq)")] == [[2, "SUCCESS"]]
    assert a(quiet) and b(quiet)
    # Two events of one CQ, acknowledged at once; b never acknowledges any. Either way the CQs can be destroyed.
    a("ep.cq.ack_events(1); ep.recv_cq.ack_events(1)")
    for h in (a, b):
        h("ep.qp.close(); ep.cq.close(); ep.recv_cq.close(); ep.channel.close()")


def test_the_wrong_cq(network: Network, faults: Any) -> None:
    """An event of another CQ than the expected one is an error, on the backup as on the default NIC."""
    a, b = network.protected(setup="channel=True, split=True")
    codes = []
    for where in ("home", "away"):
        go(faults, where, a, b)
        b("ep.recv(1)")
        a("ep.cq.req_notify(); ep.post('SEND', 0, wr_id=7)")
        codes.append(code_of(a, "ep.channel.get_cq_event(ep.recv_cq)"))
        assert [wc[:2] for wc in a("ep.poll(1)")] == [[7, "SUCCESS"]]
        assert [wc[:2] for wc in b("ep.poll(1, queue=ep.recv_cq)")] == [[1, "SUCCESS"]]
    assert codes[0] == codes[1]
    a("ep.qp.close(); ep.cq.close(); ep.recv_cq.close()")


EVENTS = """
import os
def events():
    'Take every event that is there, then arm again and poll. How many events, and what was in the CQ.'
    taken = 0
    os.set_blocking(ep.channel.fd, False)
    try:
        while True:
            ep.channel.get_cq_event(ep.cq)
            taken += 1
    except Exception as error:
        assert error.error_code == 11, error
    os.set_blocking(ep.channel.fd, True)
    ep.cq.ack_events(taken)
    ep.cq.req_notify()
    return [taken, [wc[:2] for wc in ep.poll(100, 0.05)]]
"""


@pytest.mark.parametrize("victim", ["a", "b"])
def test_events_over_a_failover(network: Network, faults: Any, victim: str) -> None:
    """An armed CQ tells of the next message, on whichever NIC it comes. What failover flushes may raise an event too,
    with nothing in the CQ, as verbs allow; one of each armed NIC at most, and never instead of the message's."""
    a, b = network.protected(setup="channel=True")
    b(EVENTS)
    b("for i in range(4): ep.recv(i)")
    b("ep.cq.req_notify()")
    for turn in range(2):
        faults.down(f"{victim}/soft0")
        for h in (a, b):
            h(f"ep.wait({AWAY!r}, 20)")
        taken, found = b("events()")
        assert taken <= 2 and found == []
        a(f"ep.post('SEND', 0, wr_id={turn})")
        b("ep.channel.get_cq_event(ep.cq); ep.cq.req_notify()")
        assert [wc[:2] for wc in b("ep.poll(1)")] == [[turn, "SUCCESS"]]
        assert [wc[:2] for wc in a("ep.poll(1)")] == [[turn, "SUCCESS"]]
        faults.up(f"{victim}/soft0")
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 20)")
        assert b("events()")[1] == []


@pytest.mark.parametrize("where", WHERE)
def test_resize(network: Network, faults: Any, where: str) -> None:
    """The application's capacity is what it asked for, on both NICs, and nothing that is in the CQ is lost."""
    a, b = network.protected()
    go(faults, where, a, b)
    b("for i in range(8): ep.recv(i, 10 + i)")
    a("for i in range(8): ep.post('SEND', 0, wr_id=i)")
    assert [wc[:2] for wc in a("ep.poll(8)")] == [[i, "SUCCESS"] for i in range(8)]
    for h in (a, b):
        # 16 receives, 16 sends and our own: never below what the QP may complete.
        assert h("ep.cq.resize(200); ep.cq.cqe") >= 200
        assert 20 <= h("ep.cq.resize(20); ep.cq.cqe") < 200
    assert [wc[:2] for wc in b("ep.poll(8)")] == [[10 + i, "SUCCESS"] for i in range(8)]
    b("for i in range(16): ep.recv(i, 30 + i)")
    a("for i in range(16): ep.post('SEND', 0, wr_id=i)")
    assert [wc[:2] for wc in a("ep.poll(16)")] == [[i, "SUCCESS"] for i in range(16)]
    assert [wc[:2] for wc in b("ep.poll(16)")] == [[30 + i, "SUCCESS"] for i in range(16)]
    assert code_of(a, "ep.cq.resize(0)") == code_of(b, "ep.cq.resize(0)")


@pytest.mark.parametrize("where", WHERE)
def test_rereg(network: Network, faults: Any, where: str) -> None:
    """A region with other access, then over other memory: local and remote keys follow on whichever NIC."""
    a, b = network.protected()
    go(faults, where, a, b)
    rights = "e.IBV_ACCESS_LOCAL_WRITE"
    b(f"ep.mr.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, access={rights} | e.IBV_ACCESS_REMOTE_WRITE)")
    a(f"ep.peer = {b('ep.name()')!r}; ep.fill(2, 'over there'); ep.post('RDMA_WRITE', 2, 10, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[1, "SUCCESS"]]
    assert b("ep.text(2, 10)") == "over there"
    for h in (a, b):
        h(
            "import mmap; memory = mmap.mmap(-1, 64 * SLOT)\n"
            "import ctypes; at = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
            "ep.mr.rereg(e.IBV_REREG_MR_CHANGE_TRANSLATION, addr=at, length=64 * SLOT)"
        )
        assert h("ep.mr.buf == at"), h("[ep.mr.buf, at]")
    a(f"ep.peer = {b('ep.name()')!r}; memory[3 * SLOT:3 * SLOT + 9] = b'elsewhere'")
    a("ep.post('RDMA_WRITE', 3, 9, wr_id=2)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[2, "SUCCESS"]]
    assert b("memory[3 * SLOT:3 * SLOT + 9].decode()") == "elsewhere"


CHAIN = """
sges = [wr.SGE(ep.mr.buf, 8, ep.mr.lkey)]
def chain(ids, opcodes=None):
    made = None
    for i in reversed(ids):
        opcode = (opcodes or {}).get(i, e.IBV_WR_SEND)
        made = wr.SendWR(i, opcode=opcode, num_sge=1, sg=sges, send_flags=e.IBV_SEND_SIGNALED, next_wr=made)
        kept.append(made)
    return made
def receives(ids):
    made = None
    for i in reversed(ids):
        made = wr.RecvWR(i, 1, sges, made)
        kept.append(made)
    return made
kept = []
bad, bad_recv = wr.SendWR(999, num_sge=1, sg=sges), wr.RecvWR(999, 1, sges)
"""


@pytest.mark.parametrize("where", WHERE)
def test_chains_and_bad_wr(network: Network, faults: Any, where: str) -> None:
    """Everything before the first WR that is refused is posted, and bad_wr is that one."""
    a, b = network.protected(setup="depth=4")
    go(faults, where, a, b)
    for h in (a, b):
        h(CHAIN)
    b("ep.qp.post_recv(receives([1, 2]), bad_recv)")
    assert b("bad_recv.wr_id") == 999
    assert code_of(b, "ep.qp.post_recv(receives([3, 4, 5, 6]), bad_recv)") == 12
    assert b("bad_recv.wr_id") == 5
    assert code_of(a, "ep.qp.post_send(chain([11, 12, 13, 14, 15, 16]), bad)") == 12
    assert a("bad.wr_id") == 15
    assert [wc[:2] for wc in a("ep.poll(4)")] == [[i, "SUCCESS"] for i in (11, 12, 13, 14)]
    assert [wc[:2] for wc in b("ep.poll(4)")] == [[i, "SUCCESS"] for i in (1, 2, 3, 4)]
    b("ep.qp.post_recv(receives([7]))")
    assert code_of(a, "ep.qp.post_send(chain([21, 22, 23], {22: 99}), bad)") == 22
    assert a("bad.wr_id") == 22
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[21, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1)")] == [[7, "SUCCESS"]]
    assert a("ep.none()") == [] and b("ep.none()") == []
    assert a("ep.qp.shift.status") == b("ep.qp.shift.status") == "PROTECTED"


ATTRIBUTES = """
def seen(q):
    at, ia = q.query(0x1ffff | 1 << 20)
    names = '''qp_state cur_qp_state path_mtu rq_psn sq_psn dest_qp_num qp_access_flags port_num pkey_index
        max_rd_atomic max_dest_rd_atomic min_rnr_timer timeout retry_cnt rnr_retry'''.split()
    found = {name: int(getattr(at, name)) for name in names}
    found['cap'] = [at.cap.max_send_wr, at.cap.max_recv_wr, at.cap.max_send_sge, ia.cap.max_recv_sge]
    gr = at.ah_attr.gr if hasattr(at.ah_attr, 'gr') else at.ah_attr
    found['ah'] = [at.ah_attr.is_global, at.ah_attr.port_num, str(at.ah_attr.dgid), at.ah_attr.sgid_index,
        at.ah_attr.hop_limit]
    found['types'] = [int(ia.qp_type), ia.sq_sig_all]
    return found
"""


@pytest.mark.parametrize("where", ["away", "back"])
def test_query_shows_what_the_application_set(network: Network, faults: Any, where: str) -> None:
    """Every attribute; one that it changes while its QP is elsewhere too, and that one holds at home."""
    a, b = network.protected()
    for h in (a, b):
        h(ATTRIBUTES)
    before = a("seen(ep.qp)"), b("seen(ep.qp)")
    assert before[0]["qp_state"] == 3 and before[0]["timeout"] == 12 and before[0]["sq_psn"] == 77
    go(faults, where, a, b)
    assert (a("seen(ep.qp)"), b("seen(ep.qp)")) == before
    assert a("ep.qp.qp_state") == b("ep.qp.qp_state") == 3
    a("attr = qp.QPAttr(); attr.min_rnr_timer = 5; ep.qp.modify(attr, e.IBV_QP_MIN_RNR_TIMER)")
    assert a("seen(ep.qp)") == {**before[0], "min_rnr_timer": 5}
    faults.clear()
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
    assert a("seen(ep.qp)") == {**before[0], "min_rnr_timer": 5}
    assert b("seen(ep.qp)") == before[1]


TO = "attr = qp.QPAttr(qp_state=e.IBV_QPS_{0}); ep.qp.modify(attr, e.IBV_QP_STATE)"


@pytest.mark.parametrize("switched", [True, False])
def test_err_after_the_nic_died(network: Network, faults: Any, switched: bool) -> None:
    """A protected QP outlives its NIC, so the application may end it as it ends any other: no error, all flushed."""
    a, b = network.protected()
    a("for i in range(3): ep.recv(i)")
    if switched:
        faults.kill("a/soft0")
        a(f"ep.wait({AWAY!r}, 20)")
    else:
        # In one go, so that the verb is as early as it can be.
        a("from shiftverbs.softrnic import faults; faults.kill('a/soft0')")
    a(TO.format("ERR"))
    assert [wc[:2] for wc in a("ep.poll(3)")] == [[i, "WR_FLUSH_ERR"] for i in range(3)]
    assert a("ep.qp.qp_state") == 6
    assert a("ep.qp.query(e.IBV_QP_STATE)[0].qp_state") == 6
    assert a("ep.qp.shift.status") != "PROTECTED"
    assert code_of(a, TO.format("RESET")) == 5  # there is no NIC to begin anew on
    a("ep.qp.close()")


def test_draining_the_send_queue_ends_protection(network: Network, faults: Any) -> None:
    """SQD and back to RTS: the peer has let go, and `shift` says so; traffic goes on, as with plain verbs."""
    a, b = network.protected()
    b("for i in range(3): ep.recv(i)")
    a("ep.post('SEND', 0, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[1, "SUCCESS"]]
    for state in ("SQD", "RTS"):
        a(TO.format(state))
        shift = a("ep.shift()")
        assert shift["status"] == "UNPROTECTED" and "SQD" in shift["why"]
    a("ep.post('SEND', 0, wr_id=2)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[2, "SUCCESS"]]
    b("ep.wait(\"s.status == 'UNPROTECTED'\")")
    # A new connection is protected again.
    for h in (a, b):
        h(TO.format("RESET") + "; ep.poll(3, 0)")
    b("ep.connect(ep.peer)")
    a("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")


def test_sqd_while_a_move_waits(network: Network) -> None:
    """Nothing tells of the end of what was sent, and the peer grants no WRITE: the fence is to be what comes next."""
    a, b = network.protected(setup="access=1")
    for h in (a, b):
        h("[ep.recv(10 + i) for i in range(4)]")
    for x, y in ((a, b), (b, a)):
        x("ep.post('SEND', length=4, wr_id=1, signaled=False)")
        assert [wc[:2] for wc in y("ep.poll()")] == [[10, "SUCCESS"]]
    a("ep.qp.shift.migrate(1)")
    a("ep.wait(\"s.state == 'WAIT_SIGNALED'\")")
    for state in ("SQD", "RTS"):
        a(TO.format(state))
    for i in range(2, 5):
        a(f"ep.post('SEND', length=4, wr_id={i})")
        assert [wc[:2] for wc in a("ep.poll()")] == [[i, "SUCCESS"]], a("ep.shift()")


def test_the_send_queue_cannot_be_drained_on_a_backup(network: Network, faults: Any) -> None:
    """SQD while away is refused, and costs nothing."""
    a, b = network.protected()
    go(faults, "away", a, b)
    assert code_of(a, TO.format("SQD")) == 16
    b("ep.recv(1)")
    a("ep.post('SEND', 0, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[1, "SUCCESS"]]
    assert a("ep.qp.shift.status") == "PROTECTED"


@pytest.mark.parametrize("cap", ["GLOB", "HCA"])
def test_atomics_away_only_where_all_nics_are_atomic_to_each_other(
    network: Network, faults: Any, cap: str
) -> None:
    """b serves the number; each of its NICs says how far its atomics are atomic."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h("ep = Endpoint()")
    names = [h("ep.name()") for h in (a, b)]
    assert b("ep.context.query_device().atomic_caps == e.IBV_ATOMIC_GLOB"), "among all of a process"
    if cap == "HCA":
        b("from shiftverbs.shadows import nic")
        b("[each.limits.update(atomic_cap=e.IBV_ATOMIC_HCA) for each in nic._live]")
    b(f"ep.connect({names[0]!r})")
    a(f"ep.connect({names[1]!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    b("ep.mr.write((5).to_bytes(8, 'little'), 8)")
    add = "ep.post('ATOMIC_FETCH_AND_ADD', slot=1, remote_slot=0, length=8, wr_id=3, compare=2); ep.poll(1)[0][:2]"
    assert a(add) == [3, "SUCCESS"]
    assert (a("ep.number(1)"), b("ep.number(0)")) == (5, 7)
    # Given once more, as to a QP that is connected: it changes nothing.
    b("at = qp.QPAttr(); at.qp_access_flags = ACCESS; ep.qp.modify(at, e.IBV_QP_ACCESS_FLAGS)")
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    assert a(add) == [3, "SUCCESS" if cap == "GLOB" else "REM_INV_REQ_ERR"]
    assert b("ep.number(0)") == (9 if cap == "GLOB" else 7)
