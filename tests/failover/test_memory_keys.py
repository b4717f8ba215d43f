# SPDX-License-Identifier: BSD-3-Clause
"""The keys of memory on the backups: registered late, looked up late, withdrawn, used again."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import EtcdServer, wait_until
from hosts import AWAY, HOME, Host, Network, go

# A second QP on the first one's CQ and channel, memory beside the endpoint's own, and a thread that sleeps on the CQ.
TWO = """
import threading
two = Endpoint(shared=ep)
def more():
    return mr.MR(ep.pd, SLOT, ACCESS)
def recv_into(p, m, wr_id):
    p.qp.post_recv(wr.RecvWR(wr_id, 1, [wr.SGE(m.buf, SLOT, m.lkey)]))
came = []
def sleep_for(n):
    while len(came) < n:
        ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.cq.req_notify()
        while wcs := ep.cq.poll(16)[1]:
            wcs = [wc for wc in wcs if ep.beside is None or wc.qp_num != ep.beside.qp_num]
            came.extend([wc.wr_id, STATUS.get(wc.status, wc.status)] for wc in wcs)
def sleeper(n):
    global thread
    ep.cq.req_notify()
    thread = threading.Thread(target=sleep_for, args=(len(came) + n,), daemon=True)
    thread.start()
def slept(timeout_s=20):
    thread.join(timeout_s)
    got, came[:] = sorted(came), []
    return got
"""


def two_each(network: Network, attrs: str = "") -> tuple[Host, Host]:
    """Two hosts with two protected QPs each, `ep` and `two`, on one CQ with a channel."""
    a, b = network.pair(setup="channel=True", attrs=attrs)
    names = [h(TWO + "two.name()") for h in (a, b)]
    b(f"two.connect({names[0]!r}{', ' + attrs if attrs else ''})")
    a(f"two.connect({names[1]!r}{', ' + attrs if attrs else ''})")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.qp.shift.wait_protected(20)"), h(f"{p}.shift()")
    return a, b


def leave(by: str, faults: Any, host: Host) -> None:
    """Have both QPs leave for the backup, because of a failure or on purpose."""
    if by == "failure":
        faults.down("a/soft0")
    else:
        host("ep.qp.shift.migrate(); two.qp.shift.migrate()")


@pytest.mark.parametrize("by", ["failure", "move"])
def test_nothing_is_sent_before_the_receives_are_posted(network: Network, faults: Any, by: str) -> None:
    """Their memory is still being registered on the backup: a peer with one RNR retry must not notice."""
    a, b = two_each(network, attrs="rnr=1")
    faults.hang("b/soft1")
    b("m = more(); recv_into(ep, m, 5); recv_into(two, m, 6); sleeper(2)")
    leave(by, faults, a)
    for p in ("ep", "two"):
        b(f"{p}.wait(\"s.recv_path == 'soft1'\")")
    a("sleeper(2); ep.post('SEND', wr_id=1)")
    a("two.post('SEND', wr_id=2, signaled=False); two.post('RDMA_WRITE', wr_id=3)")
    # The peer says all the while that it is at it, for longer than a silent one would be waited for.
    for p in ("ep", "two"):
        heard = a(f"{p}.shift()['counters']['messages_in']")
        a(f'{p}.wait(\'s.counters["messages_in"] >= {heard + 12} or ep.qp.shift.status != "PROTECTED"\')')
    assert a("came") == [], a("ep.shift()")
    faults.unhang("b/soft1")
    assert a("slept()") == [[1, "SUCCESS"], [3, "SUCCESS"]], a("ep.shift()")
    assert b("slept()") == [[5, "SUCCESS"], [6, "SUCCESS"]], b("ep.shift()")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.shift()['status']") == "PROTECTED"
            assert h(f"{p}.shift()['counters']['switches']") == (1 if by == "failure" else 0)
            h(f"{p}.wait({AWAY!r})")
    faults.up("a/soft0")
    a("ep.qp.shift.restore(); two.qp.shift.restore()")
    for h in (a, b):
        for p in ("ep", "two"):
            h(f"{p}.wait({HOME!r}, 20)")


# What stands for the memory of a key that is given out again, and what has its key on the backup now.
AGAIN = """
from pyverbs import device as plain_device, mr as plain_mr, pd as plain_pd
def again(m):
    rkey = m.rkey
    m.close()
    global other
    other = plain_mr.MR(plain_pd.PD(plain_device.Context(name='soft1')), SLOT, ACCESS)
    n = more()
    assert n.rkey == rkey, (n.rkey, rkey)
    return n
"""
WRITE = """
def write(p, m, text, wr_id, signaled=True):
    rkey, address = m
    p.fill(9, text)
    w = wr.SendWR(
        wr_id, opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[wr.SGE(p.mr.buf + 9 * SLOT, len(text), p.mr.lkey)],
        send_flags=e.IBV_SEND_SIGNALED * signaled,
    )
    w.set_wr_rdma(rkey, address)
    p.qp.post_send(w)
"""


def resolved(a: Host, rkey: int, *names: str) -> None:
    """Wait until host a knows what `rkey` is on the backup."""
    for p in names or ("ep", "two"):
        wait_until(
            lambda p=p: a(f"{p}.qp._shadow.connection.keys._theirs.knows({rkey}, 1)"),
            what=f"{rkey:#x} is resolved",
        )


def test_what_a_peer_said_is_good_without_etcd(
    network: Network, faults: Any, etcd_server: EtcdServer
) -> None:
    """The peer's lease runs out, then etcd dies; keys used before, and keys of memory that is newer than that."""
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    a, b = two_each(network)
    a(WRITE)
    a("ep.post('RDMA_WRITE', wr_id=1); two.post('RDMA_WRITE', wr_id=2)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[1, "SUCCESS"], [2, "SUCCESS"]]
    for key in etcd_server.items("/shiftverbs/"):
        etcd_server.delete(key)
    assert a("ep.none()") == [] == b("ep.none()")
    etcd_server.kill()
    m = b("m = more(); m.rkey, m.buf")
    a("sleeper(2)")
    faults.switch_down("rail0")
    a(
        f"ep.fill(2, 'still'); ep.post('RDMA_WRITE', slot=2, length=5, wr_id=3); write(two, {m}, 'first', 4, False)"
    )
    a(f"write(two, {m}, 'first', 5)")
    assert a("slept()") == [[3, "SUCCESS"], [5, "SUCCESS"]], a("ep.shift()")
    assert b("ep.text(2, 5)") == "still"
    assert b("m.read(5, 0).decode()") == "first"
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.shift()['status']") == "PROTECTED"


@pytest.mark.parametrize("where", ["home", "away"])
def test_a_key_that_is_used_again_means_the_new_memory(
    network: Network, faults: Any, etcd_server: EtcdServer, where: str
) -> None:
    """At home the path fails next; away, WRs go to the backup at once, by an rkey received a moment ago."""
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    network.env["SOFTRNIC_KEYS"] = "reuse"
    a, b = two_each(network)
    a(WRITE)
    b(AGAIN)
    m = b("m = more(); m.rkey, m.buf")
    a(f"write(ep, {m}, 'old', 1); write(two, {m}, 'old', 2)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[1, "SUCCESS"], [2, "SUCCESS"]]
    resolved(a, m[0])
    etcd_server.kill()
    if where == "away":
        go(faults, "away", a, b)
        for h in (a, b):
            h(f"two.wait({AWAY!r}, 20)")
        a(f"write(ep, {m}, 'older', 3); write(two, {m}, 'older', 4)")
        assert sorted(wc[:2] for wc in a("ep.poll(2)")) == [[3, "SUCCESS"], [4, "SUCCESS"]]
    a("sleeper(2)")
    n = b("n = again(m); n.rkey, n.buf")
    if where == "home":
        faults.switch_down("rail0")
    a(
        f"write(ep, {n}, 'new memory', 5, False); write(ep, {n}, 'new memory', 6); write(two, {n}, 'new memory', 7)"
    )
    assert a("slept()") == [[6, "SUCCESS"], [7, "SUCCESS"]], a("ep.shift()")
    assert b("n.read(10, 0).decode()") == "new memory"
    assert b("other.read(10, 0) == bytes(10)")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.shift()['status']") == "PROTECTED"


def test_a_peer_that_does_not_confirm_gets_errors_and_not_other_memory(network: Network, faults: Any) -> None:
    """It sends to a backup and is stopped: nobody knows by what key it will write when it goes on."""
    network.env["SOFTRNIC_KEYS"] = "reuse"
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "500"
    a, b = two_each(network)
    a(WRITE)
    b(AGAIN)
    m = b("m = more(); m.rkey, m.buf")
    go(faults, "away", a, b)
    for h in (a, b):
        h(f"two.wait({AWAY!r}, 20)")
    a(f"write(ep, {m}, 'old', 1); write(two, {m}, 'old', 2)")
    assert sorted(wc[:2] for wc in a("ep.poll(2)")) == [[1, "SUCCESS"], [2, "SUCCESS"]]
    a.child.signal(signal.SIGSTOP)
    b("n = again(m)")
    for p in ("ep", "two"):
        b(f"{p}.wait(\"s.status == 'FAILED'\")")
        assert "does not confirm" in b(f"{p}.shift()['why']")
    a.child.signal(signal.SIGCONT)
    a(f"write(ep, {m}, 'wrong', 3); write(two, {m}, 'wrong', 4, False)")
    # The first of each QP fails on its way, or is flushed where the peer's ABORT was heard before it was posted.
    ended = {wr_id: status for wr_id, status, *_ in a("ep.poll(2)")}
    assert sorted(ended) == [3, 4] and set(ended.values()) <= {"RETRY_EXC_ERR", "WR_FLUSH_ERR"}
    assert b("n.read(5, 0) == bytes(5)")


@pytest.mark.parametrize("whose", ["peer", "own"])
def test_memory_that_is_being_registered_is_waited_for(network: Network, faults: Any, whose: str) -> None:
    """For longer than a silent peer would be: every path is healthy."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "300"
    a, b = two_each(network)
    a(WRITE)
    slow = "b/soft1" if whose == "peer" else "a/soft1"
    faults.hang(slow)
    a("sleeper(2)")
    if whose == "peer":
        m = b("m = more(); m.rkey, m.buf")
        faults.down("a/soft0")
        a(f"write(ep, {m}, 'late', 1); write(two, {m}, 'late', 2, False); write(two, {m}, 'late', 3)")
    else:
        b("ep.recv(1); two.recv(2); two.recv(3)")
        faults.down("a/soft0")
        a("m = more(); sge = lambda: wr.SGE(m.buf, 8, m.lkey)")
        a("ep.qp.post_send(wr.SendWR(1, num_sge=1, sg=[sge()]))")
        a("two.qp.post_send(wr.SendWR(2, num_sge=1, sg=[sge()], send_flags=0))")
        a("two.qp.post_send(wr.SendWR(3, num_sge=1, sg=[sge()]))")
    for p in ("ep", "two"):
        a(f"{p}.wait('ep.qp._shadow.connection.awaits_keys')")
    assert b("ep.none(1.0)") == []
    assert a("came") == [], a("ep.shift()")
    faults.unhang(slow)
    assert a("slept()") == [[1, "SUCCESS"], [3, "SUCCESS"]], a("ep.shift()")
    for h in (a, b):
        for p in ("ep", "two"):
            assert h(f"{p}.shift()['status']") == "PROTECTED"


@pytest.mark.parametrize("whose", ["peer", "own"])
def test_a_nic_that_hangs_is_not_waited_for(network: Network, faults: Any, whose: str) -> None:
    """The error says which, and what it did not register."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "300"
    a, b = two_each(network)
    a(WRITE)
    for h in (a, b):
        h("from shiftverbs.failover.services import memory_keys; memory_keys.HANGS_S = 0.5")
    a("sleeper(2)")
    if whose == "peer":
        faults.hang("b/soft1")
        m = b("m = more(); m.rkey, m.buf")
        faults.down("a/soft0")
        a(f"write(ep, {m}, 'never', 1); write(two, {m}, 'never', 2)")
    else:
        faults.hang("a/soft1")
        faults.down("a/soft0")
        a("m = more(); sge = lambda: wr.SGE(m.buf, 8, m.lkey)")
        a(
            "ep.qp.post_send(wr.SendWR(1, num_sge=1, sg=[sge()]));"
            " two.qp.post_send(wr.SendWR(2, num_sge=1, sg=[sge()]))"
        )
    for p in ("ep", "two"):
        a(f"{p}.wait(\"s.status == 'FAILED'\")")
        why = a(f"{p}.shift()['why']")
        assert "hangs" in why and "key" in why, why
    if whose == "own":  # no error before the last WR is known to be at its end, also on that NIC
        faults.unhang("a/soft1")
    assert a("slept()") == [[1, "RETRY_EXC_ERR"], [2, "RETRY_EXC_ERR"]]


def test_an_rkey_of_no_memory_ends_at_once(network: Network, faults: Any) -> None:
    """The peer knows that it has none; with plain verbs it would be an error too."""
    a, b = two_each(network)
    a(WRITE)
    go(faults, "away", a, b)
    a("write(ep, (0x7777, 0), 'x', 1)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[1, "REM_ACCESS_ERR"]]
    assert "no memory region of rkey 0x7777" in a("ep.shift()['why']")
