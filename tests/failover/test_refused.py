# SPDX-License-Identifier: BSD-3-Clause
"""Work that no NIC takes, and work that no path carries: the application gets its error, and soon."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import pyverbs.wr
from harness import wait_until
from hosts import HOME, WHERE, HostError, Network, go

#: An atomic is 8 bytes long: with 4, every provider refuses it.
REFUSED = "ep.post('ATOMIC_FETCH_AND_ADD', length=4, wr_id=66, swap=1)"


def switches(*hosts: Any) -> list[int]:
    """How many SWITCHes each host's QP went through."""
    return [h("ep.shift()['counters']['switches']") for h in hosts]


def works(a: Any, b: Any) -> None:
    """One message each way."""
    for x, y in ((a, b), (b, a)):
        y("ep.recv(1)")
        x("ep.post('SEND', wr_id=3)")
        assert x("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
        assert y("ep.poll(1)")[0][:2] == [1, "SUCCESS"]


@pytest.mark.parametrize("where", WHERE)
def test_a_post_that_is_refused_raises(network: Network, faults: Any, where: str) -> None:
    """Where the NIC that carries traffic refuses it, its errno is raised, as by pyverbs; nothing else happens."""
    a, b = network.protected()
    go(faults, where, a, b)
    a("ep.post('RDMA_WRITE', wr_id=5)")  # from now on the peer's key is known there
    assert a("ep.poll(1)")[0][:2] == [5, "SUCCESS"]
    before = switches(a, b)
    for _ in range(3):
        with pytest.raises(HostError) as caught:
            a(REFUSED)
        assert (caught.value.type, caught.value.code) == ("PyverbsRDMAError", errno.EINVAL)
    works(a, b)
    assert switches(a, b) == before
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED"


CHAIN = """
def wr_of(wr_id, opcode, length, nxt=None, flags=e.IBV_SEND_SIGNALED):
    w = wr.SendWR(wr_id, opcode=getattr(e, 'IBV_WR_' + opcode), num_sge=1,
                  sg=[wr.SGE(ep.mr.buf, length, ep.mr.lkey)], send_flags=flags, next_wr=nxt)
    if 'ATOMIC' in opcode:
        w.set_wr_atomic(ep.peer['rkey'], ep.peer['addr'], 0, 1)
    return w

def chain(flags):
    last = wr_of(3, 'SEND', 8)  # pyverbs does not keep what is behind a WR
    middle = wr_of(2, 'ATOMIC_FETCH_AND_ADD', 4, last)
    first = wr_of(1, 'SEND', 8, middle, flags)
    bad = wr_of(99, 'SEND', 8)
    try:
        ep.qp.post_send(first, bad)
    except Exception as error:
        return [type(error).__name__, error.error_code, bad.wr_id]
"""


@pytest.mark.parametrize("signaled", [True, False])
@pytest.mark.parametrize("where", ["pyverbs", *WHERE])
def test_what_is_ahead_of_a_refused_wr_stays_posted(
    network: Network, faults: Any, where: str, signaled: bool
) -> None:
    plain = where == "pyverbs"
    if plain and not any(name.endswith("__dealloc") for name in vars(pyverbs.wr.SendWR)):
        pytest.skip(
            "this release of pyverbs frees the list of SGEs that bad_wr shares with the refused WR twice"
        )
    a, b = network.pair("pyverbs") if plain else network.protected()
    if not plain:
        go(faults, where, a, b)
    a(CHAIN)
    a("ep.post('RDMA_WRITE', wr_id=5)")  # from now on the peer's key is known there
    assert a("ep.poll(1)")[0][:2] == [5, "SUCCESS"]
    for slot in range(2):
        b(f"ep.recv({slot})")
    assert a(f"chain({'e.IBV_SEND_SIGNALED' if signaled else 0})") == ["PyverbsRDMAError", errno.EINVAL, 2]
    if signaled:
        assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [0, "SUCCESS", 8]
    assert a("ep.none()") == b("ep.none()") == []
    a("ep.post('SEND', length=5, wr_id=4)")
    assert a("ep.poll(1)")[0][:2] == [4, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]


def between_pairs(faults: Any, *hosts: Any) -> None:
    """A SWITCH that waits for the NIC left behind: what is posted now is journaled only."""
    faults.hang("a/soft0")
    faults.switch_down("rail0")
    hosts[0]("ep.post('SEND', wr_id=9)")
    hosts[0]("ep.wait('not ep.qp._shadow.core.send_is_open')", timeout_s=20)


@pytest.mark.parametrize("blocked", [False, True], ids=["polls", "waits for an event"])
def test_a_journaled_wr_that_the_backup_refuses_fails(network: Network, faults: Any, blocked: bool) -> None:
    """Nobody could refuse it when it was posted: it gets the error of a WR that a NIC cannot carry out."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "20000"  # the fence's deadline with it
    a, b = network.protected(setup="channel=True")
    b("[ep.recv(i) for i in range(8)]")
    between_pairs(faults, a)
    if blocked:
        a("ep.cq.req_notify()")
    a(REFUSED)
    a("ep.post('SEND', wr_id=67, signaled=False)")
    faults.unhang("a/soft0")
    got: list[Any] = []
    while len(got) < 3:
        if blocked:
            assert a("ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.cq.req_notify(); True")
        got += a(f"ep.poll(1, {0.05 if blocked else 10})")
    assert [wc[:2] for wc in got] == [[9, "SUCCESS"], [66, "LOC_QP_OP_ERR"], [67, "WR_FLUSH_ERR"]]
    assert a("ep.shift()['status']") == "FAILED"
    assert "refuses" in a("ep.shift()['why']") and "Invalid argument" in a("ep.shift()['why']")
    wait_until(lambda: b("ep.shift()['status']") == "FAILED", what="the peer is told")
    assert b("ep.poll(1)")[0][:2] == [0, "SUCCESS"]
    assert {wc[1] for wc in b("ep.poll(7)")} == {"WR_FLUSH_ERR"}
    assert max(switches(a, b)) == 1


def test_two_qps_on_one_cq_and_one_refused_wr(network: Network, faults: Any) -> None:
    """The other QP's work goes on: at home, away, and while the WR was journaled."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "20000"
    a, b = network.protected()
    names = [h("two = Endpoint(shared=ep); two.name()") for h in (a, b)]
    for h, name in ((b, names[0]), (a, names[1])):
        h(f"two.connect({name!r})")
    for h in (a, b):
        assert h("two.qp.shift.wait_protected(20)"), h("two.shift()")
    b("[two.recv(i) for i in range(3)]; ep.recv(9)")
    with pytest.raises(HostError):
        a(REFUSED)
    a("two.post('SEND', wr_id=70)")
    assert a("ep.poll(1)")[0][:2] == [70, "SUCCESS"]
    between_pairs(faults, a)
    a(REFUSED)
    a("two.post('SEND', wr_id=71)")
    faults.unhang("a/soft0")
    got = sorted(wc[:2] for wc in a("ep.poll(3, 20)"))
    assert got == [[9, "SUCCESS"], [66, "LOC_QP_OP_ERR"], [71, "SUCCESS"]]
    a("two.post('SEND', wr_id=72)")
    assert a("ep.poll(1)")[0][:2] == [72, "SUCCESS"]
    assert a("two.shift()['status']") == "PROTECTED"


# ---- work that no path carries ---------------------------------------------------------------------------------------


def holes(faults: Any, opcode: str, nics: int = 2, hosts: str = "a") -> None:
    """Every rail loses these packets, and nothing else: pings and small messages pass, as under a wrong MTU."""
    for host in hosts:
        for k in range(nics):
            faults.drop(f"{host}/soft{k}", direction="tx", opcode=opcode, count=0)


OPERATIONS = {
    "write": "ep.post('RDMA_WRITE', wr_id={0}, signaled={1})",
    "RC_SEND_ONLY": "ep.post('SEND', wr_id={0}, signaled={1})",
    "read_request": "ep.post('RDMA_READ', wr_id={0}, signaled={1})",
}


@pytest.mark.parametrize("nics", [2, 3])
@pytest.mark.parametrize("opcode", OPERATIONS)
def test_a_wr_that_no_path_carries_gets_its_error(
    network: Network, faults: Any, opcode: str, nics: int
) -> None:
    a, b = network.protected(nics=str(nics))
    b("[ep.recv(i) for i in range(4)]")
    holes(faults, opcode, nics)
    for wr_id in (5, 6):
        a(OPERATIONS[opcode].format(wr_id, wr_id == 5))
    assert [wc[:2] for wc in a("ep.poll(2, 30)", timeout_s=60)] == [[5, "RETRY_EXC_ERR"], [6, "WR_FLUSH_ERR"]]
    assert a("ep.shift()['status']") == "FAILED"
    assert "every path" in a("ep.shift()['why']")
    wait_until(lambda: b("ep.shift()['status']") == "FAILED", what="the peer is told")
    assert {wc[1] for wc in b("ep.poll(4)")} == {"WR_FLUSH_ERR"}
    # Pings may not have been asked for when the first failure came; a busy machine may answer one late.
    assert max(switches(a, b)) <= 2 * nics + 1


def test_both_sides_have_work_that_no_path_carries(network: Network, faults: Any) -> None:
    a, b = network.protected()
    holes(faults, "write", hosts="ab")
    for h in (a, b):
        h.begin("ep.post('RDMA_WRITE', wr_id=5); ep.poll(1, 30)")
    for h in (a, b):
        assert h.end()[0][:2] == [5, "RETRY_EXC_ERR"]
        assert h("ep.shift()['status']") == "FAILED"
    assert max(switches(a, b)) <= 8


def test_messages_of_the_peer_are_no_progress_of_ours(network: Network, faults: Any) -> None:
    """The other direction works all the time, on every pair: that says nothing about what this one waits for."""
    a, b = network.protected()
    a("[ep.recv(i) for i in range(16)]")
    holes(faults, "write")
    b.begin(
        """
n = 0
while ep.qp.shift.status == 'PROTECTED' and n < 200000:
    ep.post('SEND', wr_id=n)
    n += 1
    ep.poll(1, 20)
ep.shift()['status']
"""
    )
    a("ep.post('RDMA_WRITE', wr_id=100)")
    a(
        """
import time
mine, end = [], time.monotonic() + 30
while not mine and time.monotonic() < end:
    for wc in ep.poll(1, 0.01):
        if wc[0] == 100:
            mine.append(wc)
        elif wc[1] == 'SUCCESS':
            ep.recv(wc[0])
"""
    )
    assert a("mine[0][:2]") == [100, "RETRY_EXC_ERR"]
    assert b.end(timeout_s=60) == "FAILED"
    assert max(switches(a, b)) <= 5


def test_two_qps_on_one_cq_one_of_which_no_path_carries(network: Network, faults: Any) -> None:
    """A thread that waits for an event is woken by the error; the other QP's messages pass all the time."""
    a, b = network.protected(setup="channel=True")
    names = [h("two = Endpoint(shared=ep); two.name()") for h in (a, b)]
    for h, name in ((b, names[0]), (a, names[1])):
        h(f"two.connect({name!r})")
    for h in (a, b):
        assert h("two.qp.shift.wait_protected(20)"), h("two.shift()")
    b("[two.recv(i) for i in range(4)]")
    holes(faults, "write")
    a("ep.cq.req_notify(); ep.post('RDMA_WRITE', wr_id=5, signaled=False)")
    a("ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1)", timeout_s=60)
    assert a("ep.poll(1)")[0][:2] == [5, "RETRY_EXC_ERR"]
    a("two.post('SEND', wr_id=6)")
    assert a("ep.poll(1)")[0][:2] == [6, "SUCCESS"]
    assert a("two.shift()['status']") == "PROTECTED"


def test_a_path_that_loses_one_kind_of_packet_is_left_for_one_that_does_not(
    network: Network, faults: Any
) -> None:
    """Only one rail has the hole: the WR gets through on the other, and its failure on the first is no error."""
    a, b = network.protected()
    for _ in range(2):
        rule = faults.drop("a/soft0", direction="tx", opcode="write", count=0)
        a("ep.post('RDMA_WRITE', wr_id=5)")
        assert a("ep.poll(1, 20)")[0][:2] == [5, "SUCCESS"]
        faults.undrop(rule)
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 30)", timeout_s=40)
        rule = faults.drop("a/soft1", direction="tx", opcode="write", count=0)
        a("ep.post('RDMA_WRITE', wr_id=6)")
        assert a("ep.poll(1, 20)")[0][:2] == [6, "SUCCESS"]
        faults.undrop(rule)
    assert a("ep.shift()['status']") == "PROTECTED"


@pytest.mark.parametrize("times", [1, 2])
def test_rails_that_lose_it_in_turn_cost_no_error(network: Network, faults: Any, times: int) -> None:
    """The hole is where the traffic is, and follows it: at every moment the other rail is well."""
    a, b = network.protected()
    a(
        f"""
from shiftverbs.failover.qp import connection
from shiftverbs.failover.qp import watchdog; from shiftverbs.protocol import events
from shiftverbs.softrnic import faults
plain = connection.Connection._HANDLERS[events.SwitchStarted]
hole = lambda k: faults.drop(f'a/soft{{k}}', direction='tx', opcode='write', count=0)
rules = [hole(0)]
def follow(c, action):
    plain(c, action)
    if len(rules) <= {times}:
        faults.undrop(rules[-1])
        rules.append(hole(action.target))
connection.Connection._HANDLERS[events.SwitchStarted] = follow
c = ep.qp._shadow.connection
watchdog.Watchdog.pings_ns = watchdog.STUCK_PING_NS  # so that each failure counts, the first one too
"""
    )
    wait_until(
        lambda: a("c.driver.run(); [c.evidence.path_answers(k) for k in range(2)]") == [True] * 2,
        what="pings",
    )
    a("ep.post('RDMA_WRITE', wr_id=5); ep.post('SEND', wr_id=6)")
    b("ep.recv(1)")
    assert [wc[:2] for wc in a("ep.poll(2, 20)")] == [[5, "SUCCESS"], [6, "SUCCESS"]], a("ep.shift()")
    assert a("len(rules)") == 1 + times
    assert a("ep.shift()['status']") == b("ep.shift()['status']") == "PROTECTED"
    assert b("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
