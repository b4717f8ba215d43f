# SPDX-License-Identifier: BSD-3-Clause
"""However a QP ends: what a NIC completed is delivered as that, and no NIC touches memory that was given back."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, HOME, Host, HostError, Network, connect_again

FLUSHED = "WR_FLUSH_ERR"
GIVE_UP = """
from shiftverbs.protocol import events
c = ep.qp._shadow.connection
c.driver.post(lambda: c.feed(events.KeysMissing('the test'))); c.driver.run()
"""
ERR = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR; ep.qp.modify(at, e.IBV_QP_STATE)"


def statuses(wcs: list[Any]) -> list[Any]:
    """[wr_id, status] of each WC."""
    return [wc[:2] for wc in wcs]


def three_unpolled(a: Host, b: Host) -> None:
    """Three messages of b's lie in a's CQ, acknowledged; two receives are left."""
    a("[ep.recv(i) for i in range(5)]")
    b("[(ep.fill(i, 'm%d' % i), ep.post('SEND', slot=i, length=2, wr_id=i)) for i in range(3)]")
    assert statuses(b("ep.poll(3)")) == [[i, "SUCCESS"] for i in range(3)]


def gets_them_all(a: Host) -> None:
    """The three messages arrive, and only the two receives behind them are flushed."""
    wcs = a("ep.poll(5, 20)")
    assert statuses(wcs) == [[0, "SUCCESS"], [1, "SUCCESS"], [2, "SUCCESS"], [3, FLUSHED], [4, FLUSHED]]
    assert a("[ep.text(i, 2) for i in range(3)]") == ["m0", "m1", "m2"]
    assert a("ep.none()") == []


def away(faults: Any, *hosts: Host) -> None:
    """Both directions run over soft1."""
    faults.down("a/soft0")
    for h in hosts:
        h(f"ep.wait({AWAY!r})")


SETUPS = pytest.mark.parametrize("setup", ["", "split=True"], ids=["one_cq", "two_cqs"])


@SETUPS
def test_messages_in_the_cq_outlive_the_peers_giving_up(network: Network, faults: Any, setup: str) -> None:
    a, b = network.protected(setup=setup)
    queue = ", queue=ep.recv_cq" if setup else ""
    three_unpolled(a, b)
    faults.drop("b/soft0", direction="rx", opcode="atomic_ack", count=0)
    # What a hears first of b's failure is that b has given up.
    faults.drop("b/soft1", direction="tx", opcode="ud", count=1)
    b("ep.post('ATOMIC_FETCH_AND_ADD', slot=9, length=8, wr_id=7)")
    assert statuses(b("ep.poll(1)")) == [[7, "RETRY_EXC_ERR"]]
    wait_until(lambda: a("ep.shift()['status']") == "FAILED", what="a is told")
    wcs = a(f"ep.poll(5, 20{queue})")
    assert statuses(wcs) == [[0, "SUCCESS"], [1, "SUCCESS"], [2, "SUCCESS"], [3, FLUSHED], [4, FLUSHED]]
    assert a("[ep.text(i, 2) for i in range(3)]") == ["m0", "m1", "m2"]


def test_messages_in_the_cq_outlive_the_last_nic(network: Network, faults: Any) -> None:
    a, b = network.protected()
    three_unpolled(a, b)
    faults.kill("a/soft1")
    wait_until(lambda: a("ep.qp._shadow.connection.nic(1).dead"), what="the backup's death is noticed")
    faults.kill("a/soft0")
    wait_until(lambda: a("ep.shift()['status']") == "FAILED", what="no NIC is left")
    gets_them_all(a)


def test_messages_in_the_cq_outlive_a_dead_nic_and_err(network: Network, faults: Any) -> None:
    """The application moves the QP to ERR before anybody has looked at its NIC's death."""
    a, b = network.protected()
    three_unpolled(a, b)
    faults.kill("a/soft0")
    a(ERR)
    gets_them_all(a)


def two_qps(network: Network) -> tuple[Host, Host]:
    """Two hosts with two protected QPs each, on one CQ: `ep` and `other`."""
    a, b = network.host("a"), network.host("b")
    names = [h("ep = Endpoint(); other = Endpoint(shared=ep); [ep.name(), other.name()]") for h in (a, b)]
    for h, (one, other) in zip((a, b), reversed(names), strict=True):
        h(f"ep.connect({one!r}); other.connect({other!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20) and other.qp.shift.wait_protected(20)")
    return a, b


@pytest.mark.parametrize("who", ["itself", "peer"])
def test_messages_in_the_backups_cq_outlive_giving_up(network: Network, faults: Any, who: str) -> None:
    a, b = two_qps(network)
    away(faults, a, b)
    for h in (a, b):
        h(f"other.wait({AWAY!r})")
    three_unpolled(a, b)
    gives_up = a if who == "itself" else b
    # A window's key cannot be moved: whoever posts this away from home has to give up.
    gives_up("ep.post('SEND_WITH_INV', length=2, wr_id=8, imm=0x7777)")
    wait_until(lambda: a("ep.shift()['status']") == "FAILED", what="both know")
    wcs = a(f"ep.poll({6 if gives_up is a else 5}, 20)")
    assert statuses([wc for wc in wcs if wc[0] != 8]) == [
        [0, "SUCCESS"], [1, "SUCCESS"], [2, "SUCCESS"], [3, FLUSHED], [4, FLUSHED]
    ]  # fmt: skip
    assert [wc[1] for wc in wcs if wc[0] == 8] == (["RETRY_EXC_ERR"] if gives_up is a else [])
    assert a("[ep.text(i, 2) for i in range(3)]") == ["m0", "m1", "m2"]


def test_all_that_was_acknowledged_is_received(network: Network, faults: Any) -> None:
    """b streams while a gives up, away from home: a gets every message that b's NIC had acknowledged."""
    a, b = network.protected(setup="depth=256")
    away(faults, a, b)
    a("[ep.recv(i % 64, wr_id=i, length=64) for i in range(256)]")
    b.begin(
        "got = []\n"
        "for i in range(256):\n"
        "    ep.post('SEND', length=64, wr_id=i)\n"
        "    got += [wc for wc in ep.poll(1, 0)]\n"
        "got += ep.poll(256 - len(got), 20)\n"
        "sum(wc[1] == 'SUCCESS' for wc in got)"
    )
    streams = "ep.qp._shadow.core.recv_cq.drain(1); ep.qp._shadow.core.counters()[0] > 20"
    wait_until(lambda: a(streams), what="it streams")
    a(GIVE_UP)
    wcs = a("ep.poll(256, 20)")
    acknowledged = b.end()
    received = [wc[0] for wc in wcs if wc[1] == "SUCCESS"]
    assert received == list(range(len(received)))
    assert len(received) >= acknowledged
    assert statuses(wcs[len(received) :]) == [[i, FLUSHED] for i in range(len(received), 256)]


def on_a_slow_backup(network: Network, faults: Any) -> tuple[Host, Host]:
    """Traffic on a backup where a's commands hang, receives posted, and b hears nothing of a's."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(4)]")
    faults.hang("a/soft1")
    for device in ("a/soft0", "a/soft1"):
        faults.drop(device, direction="tx", opcode="ud", count=0)
    return a, b


def test_nothing_arrives_behind_a_flush(network: Network, faults: Any) -> None:
    """The backup's commands are slow, and b hears nothing: what b still sends must not reach memory given back."""
    a, b = on_a_slow_backup(network, faults)
    a(GIVE_UP)
    a("ep.wait(\"s.status == 'FAILED'\")")
    flushed = a("ep.poll(1, 1.5)")
    if flushed:
        a("ep.fill(0, 'mine again')")
    b("ep.fill(0, 'from b'); ep.post('SEND', length=6, wr_id=1)")
    sent = statuses(b("ep.poll(1)"))
    if flushed:
        assert (sent, a("ep.text(0, 10)")) == ([[1, "RETRY_EXC_ERR"]], "mine again")
    faults.unhang("a/soft1")
    wcs = flushed + a(f"ep.poll({4 - len(flushed)}, 20)")
    received = [wc[0] for wc in wcs if wc[1] == "SUCCESS"]
    assert received == ([0] if sent == [[1, "SUCCESS"]] else [])
    assert statuses(wcs[len(received) :]) == [[i, FLUSHED] for i in range(len(received), 4)]


def half_home(faults: Any, a: Host, b: Host) -> None:
    """a's sends are at home; b's wait on soft1 for a receive of a's."""
    away(faults, a, b)
    b("ep.fill(6, 'waits'); ep.post('SEND', slot=6, length=5, wr_id=40)")
    faults.up("a/soft0")
    b("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    a("ep.wait(\"s.state == 'DEFAULT'\", 20)")


def test_own_error_half_home_ends_the_other_half(network: Network, faults: Any) -> None:
    """b's own error on the default NIC while its receives are on the backup: a drain loop ends all the same."""
    a, b = network.protected()
    half_home(faults, b, a)  # b's sends are home, b receives from soft1: a's message waits for a receive
    b("ep.post('RDMA_WRITE', wr_id=1, rkey=0x7777); ep.post('RDMA_WRITE', wr_id=2)")
    assert statuses(b("ep.poll(1)")) == [[1, "REM_ACCESS_ERR"]]
    b("[ep.recv(i) for i in range(8, 12)]")
    wcs = b("ep.poll(5, 20)")
    received = [wc[0] for wc in wcs if wc[1] == "SUCCESS"]
    assert sorted(statuses([wc for wc in wcs if wc[0] == 2])) == [[2, FLUSHED]]
    assert received in ([], [8]), wcs
    assert statuses([wc for wc in wcs if wc[0] >= 8 and wc[0] not in received]) == [
        [i, FLUSHED] for i in range(8, 12) if i not in received
    ]
    assert b("ep.qp.qp_state") == b("e.IBV_QPS_ERR")


def test_err_half_home_ends_both_halves(network: Network, faults: Any) -> None:
    a, b = network.protected()
    half_home(faults, b, a)
    b(ERR)
    b("[ep.recv(i) for i in range(8, 12)]; ep.post('RDMA_WRITE', wr_id=2)")
    assert sorted(statuses(b("ep.poll(5, 20)"))) == [[2, FLUSHED], *([i, FLUSHED] for i in range(8, 12))]


def test_err_away_gives_nothing_back_before_the_backup_has_stopped(network: Network, faults: Any) -> None:
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(4)]")
    faults.hang("a/soft1")
    faults.drop("a/soft1", direction="tx", opcode="ud", count=0)
    faults.drop("a/soft0", direction="tx", opcode="ud", count=0)
    a.begin(ERR + "; ep.poll(1, 1.0)")
    b("ep.fill(0, 'from b'); ep.post('SEND', length=6, wr_id=1)")
    sent = statuses(b("ep.poll(1)"))
    flushed = []
    try:
        flushed = a.end(1.5)
    except AssertionError:
        pass  # the verb waits for the NIC
    if flushed:
        assert sent != [[1, "SUCCESS"]] or flushed[0][1] == "SUCCESS"
    faults.unhang("a/soft1")
    wcs = flushed or []
    wcs += a(f"ep.poll({4 - len(wcs)}, 20)")
    received = [wc[0] for wc in wcs if wc[1] == "SUCCESS"]
    assert received == ([0] if sent == [[1, "SUCCESS"]] else [])


def test_err_while_a_move_waits_for_its_fence(network: Network) -> None:
    """What is posted behind the verb would have been that fence, and have closed the gate: all of it is flushed."""
    a, _ = network.protected(
        setup="access=e.IBV_ACCESS_LOCAL_WRITE"
    )  # nor is there a WRITE of ours that could be
    a("ep.post('SEND', length=4, wr_id=0, signaled=False)")  # for which there is no receive
    a("ep.qp.shift.migrate(1)")
    a("ep.wait(\"s.state == 'WAIT_SIGNALED'\", 20)")
    a(ERR)
    a("[ep.post('SEND', length=4, wr_id=i) for i in (1, 2, 3)]")
    assert statuses(a("ep.poll(4)")) == [[i, FLUSHED] for i in range(4)]
    assert a("ep.none()") == []


def test_peer_that_leaves_half_home_does_not_halve_the_end(network: Network, faults: Any) -> None:
    """b closed while a was half home: when a's sends fail, its receives on the other NIC are flushed too."""
    a, b = network.protected()
    half_home(faults, a, b)
    b("ep.qp.close()")
    wait_until(lambda: a("ep.shift()['status']") == "UNPROTECTED", what="a is told")
    a("[ep.recv(i) for i in range(8, 12)]; ep.post('RDMA_WRITE', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)")
    wcs = a("ep.poll(6, 20)")
    received = [wc[0] for wc in wcs if wc[1] == "SUCCESS"]
    assert statuses([wc for wc in wcs if wc[0] < 8]) == [[1, "RETRY_EXC_ERR"], [2, FLUSHED]]
    assert received in ([], [8]), wcs
    assert len(wcs) == 6
    assert a("ep.qp.qp_state") == a("e.IBV_QPS_ERR")


@pytest.mark.parametrize("how", ["nic", "peer"])
def test_left_alone_away_it_still_ends(network: Network, faults: Any, how: str) -> None:
    """b closed while a was away, and stays there: what ends it then, ends all of it."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(8, 12)]")
    b("ep.qp.close()")
    wait_until(lambda: a("ep.shift()['status']") == "UNPROTECTED", what="a is told")
    if how == "nic":
        faults.kill("a/soft1")
        assert statuses(a("ep.poll(4, 20)")) == [[i, FLUSHED] for i in range(8, 12)]
    else:
        a("ep.post('RDMA_WRITE', wr_id=1); ep.post('RDMA_WRITE', wr_id=2)")
        wcs = sorted(statuses(a("ep.poll(6, 20)")))
        assert wcs == [[1, "RETRY_EXC_ERR"], [2, FLUSHED], *([i, FLUSHED] for i in range(8, 12))]


RESET = ERR.replace("ERR", "RESET")


def kill_default(faults: Any, a: Host) -> None:
    """a's default NIC dies, and a knows."""
    faults.kill("a/soft0")
    wait_until(lambda: a("ep.qp._shadow.connection.nic(0).dead"), what="the death is noticed")


@pytest.mark.parametrize("where", ["away", "home"])
def test_what_is_posted_behind_the_end_is_flushed_without_a_nic(
    network: Network, faults: Any, where: str
) -> None:
    """The usual drain, ERR and one more WR whose flush is awaited, with a default NIC that is dead."""
    a, b = network.protected()
    if where == "away":
        away(faults, a, b)
    a("[ep.recv(i) for i in range(3)]")
    kill_default(faults, a)
    a(f"ep.wait({AWAY!r})")
    a(ERR)
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]
    a("ep.post('SEND', wr_id=99)")
    assert statuses(a("ep.poll(1)")) == [[99, FLUSHED]]
    a("ep.recv(4)")
    assert statuses(a("ep.poll(1)")) == [[4, FLUSHED]]


def test_a_reset_that_a_dead_nic_refuses_ends_the_qp(network: Network, faults: Any) -> None:
    """Its backup has been stopped: it must not live on as a QP from which nothing ever comes."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(3)]")
    kill_default(faults, a)
    with pytest.raises(HostError):
        a(RESET)
    a(ERR)
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]


@pytest.mark.parametrize("state", ["ERR", "RESET"])
def test_a_modify_that_is_refused_ends_nothing(network: Network, faults: Any, state: str) -> None:
    a, b = network.protected()
    away(faults, a, b)
    a("ep.recv(1)")
    with pytest.raises(HostError):
        a(
            f"at = qp.QPAttr(); at.qp_state = e.IBV_QPS_{state}; ep.qp.modify(at, e.IBV_QP_STATE | e.IBV_QP_PATH_MTU)"
        )
    b("ep.post('SEND', wr_id=5)")
    assert statuses(b("ep.poll(1)")) == [[5, "SUCCESS"]]
    assert statuses(a("ep.poll(1)")) == [[1, "SUCCESS"]]
    assert a("ep.shift()['status']") == "PROTECTED" and a("ep.qp.qp_state == e.IBV_QPS_RTS")


def test_an_interrupted_reset_loses_no_end(network: Network, faults: Any) -> None:
    """Ctrl-C while RESET waits for a hung backup, amid an end: the end goes on."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(3)]")
    faults.hang("a/soft1")
    a(GIVE_UP)
    a("signal.signal(signal.SIGINT, signal.default_int_handler); when_it_waits(lambda: ring(signal.SIGINT))")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a(RESET)
    faults.unhang("a/soft1")
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]


def test_a_reset_that_is_interrupted_behind_its_backups_ends_what_was_there(
    network: Network, faults: Any
) -> None:
    """Ctrl-C while RESET waits for a command on the default QP, whose backup has been let go of."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(3)]; nic = ep.qp._shadow.connection.nic(0); go = threading.Event()")
    a("job = nic.worker.call(go.wait, 30)")
    wait_until(lambda: a("nic.worker.busy_since_ns"), what="its thread is at something")
    a("nic.worker.submit(None, ep.qp._shadow.default, nic.verbs.ModifySteps().add(state=6))")
    a("signal.signal(signal.SIGINT, signal.default_int_handler); when_it_waits(lambda: ring(signal.SIGINT))")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a(RESET)
    a("go.set()")
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]


# Somebody else has the driver's lock, until `go`; Ctrl-C, once or again and again, which raises in the verb alone.
HELD = """
import contextlib
go, begun = threading.Event(), threading.Event()

def hold():
    with ep.qp._shadow.connection.driver.locked():
        begun.set()
        go.wait(20)

came = []

def modify(state):
    # What is raised comes out one after the other: in the verb, and where the former one is handled.
    at = qp.QPAttr()
    at.qp_state = state
    no = [contextlib.suppress(KeyboardInterrupt) for _ in range(8)]
    with no[0], no[1], no[2], no[3], no[4], no[5], no[6], no[7]:
        ep.qp.modify(at, e.IBV_QP_STATE)
    return len(came)

def interrupt(times):
    for n in range(times):
        ring(signal.SIGINT)
        until = time.monotonic() + 10
        while len(came) <= n and time.monotonic() < until:
            time.sleep(0.002)
    go.set()

def raises(number, frame):
    while frame is not None:
        if frame.f_code.co_name == "leaving":
            came.append(number)
            raise KeyboardInterrupt
        frame = frame.f_back

signal.signal(signal.SIGINT, raises)
holder = threading.Thread(target=hold)
"""


# A command on the default QP is under way, until `go`.
DEFAULT_IS_BUSY = """
nic, at_work = ep.qp._shadow.connection.nic(0), threading.Event()
nic.worker.call(lambda: (at_work.set(), go.wait(30)))
at_work.wait(10)
nic.worker.submit(None, ep.qp._shadow.default, nic.verbs.ModifySteps().add(state=e.IBV_QPS_ERR))
"""


@pytest.mark.parametrize("state", ["ERR", "RESET"])
@pytest.mark.parametrize("where", ["home", "away"])
def test_a_modify_that_is_interrupted_before_it_has_begun_changes_nothing(
    network: Network, faults: Any, where: str, state: str
) -> None:
    """Ctrl-C while it waits for the driver's lock: the QP is protected as before, for its peer, too."""
    a, b = network.protected()
    if where == "away":
        away(faults, a, b)
    for h in (a, b):
        h("[ep.recv(i) for i in range(4)]")
    a(HELD)
    a("holder.start(); begun.wait(10); when_it_waits(lambda: interrupt(1), where='qp_touched')")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a(ERR.replace("ERR", state))
    a("holder.join(20)")
    assert a("ep.qp._shadow.core.guarded and ep.qp._shadow.is_connected")
    assert a("ep.qp.qp_state == e.IBV_QPS_RTS")
    if where == "home":
        faults.switch_down("rail0")
    for one, other in ((a, b), (b, a)):
        one("[ep.post('SEND', wr_id=7 + i) for i in range(3)]")
        assert statuses(one("ep.poll(3)")) == [[7 + i, "SUCCESS"] for i in range(3)]
        assert statuses(other("ep.poll(3)")) == [[i, "SUCCESS"] for i in range(3)]
    assert [h("ep.shift()['status']") for h in (a, b)] == ["PROTECTED"] * 2


@pytest.mark.parametrize("state", ["ERR", "RESET"])
def test_interrupted_again_and_again_it_ends_what_was_there(
    network: Network, faults: Any, state: str
) -> None:
    """Ctrl-C while it waits for its backup (RESET) or for the default NIC, and others while it waits to end the QP."""
    a, b = network.protected()
    away(faults, a, b)
    for h in (a, b):
        h("[ep.recv(i) for i in range(3)]")
    a(HELD)
    if state == "RESET":
        faults.hang("a/soft1")
    else:
        a(DEFAULT_IS_BUSY)
    a("when_it_waits(lambda: (holder.start(), begun.wait(10), interrupt(5)))")
    assert a(f"modify(e.IBV_QPS_{state})") == 5
    a("holder.join(20)")
    if state == "RESET":
        faults.unhang("a/soft1")
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]
    b("ep.post('SEND', wr_id=9)")
    assert sorted(statuses(b("ep.poll(4)"))) == [*([i, FLUSHED] for i in range(3)), [9, "RETRY_EXC_ERR"]]


def test_who_holds_up_an_end_may_wait_for_a_handler(network: Network, faults: Any) -> None:
    """The driver's lock is another thread's, which goes on when a signal's handler has run in the main thread."""
    a, b = network.protected()
    away(faults, a, b)
    a("[ep.recv(i) for i in range(3)]")
    a(HELD)
    a(DEFAULT_IS_BUSY)
    a(
        """
def ring_twice():
    ring(signal.SIGINT)
    while not came:
        time.sleep(0.002)
    ring(signal.SIGINT)

def handler(number, frame):
    came.append(number)
    if len(came) == 1:
        raise KeyboardInterrupt
    go.set()

signal.signal(signal.SIGINT, handler)
when_it_waits(lambda: (holder.start(), begun.wait(10), ring_twice()))
"""
    )
    assert a("modify(e.IBV_QPS_ERR)", 10) == 2
    assert statuses(a("ep.poll(3)")) == [[i, FLUSHED] for i in range(3)]


def test_a_close_that_is_interrupted_before_it_has_begun_changes_nothing(
    network: Network, faults: Any
) -> None:
    """Ctrl-C while it waits for the driver's lock: the QP can be used on, and connected anew."""
    a, b = network.protected()
    a(HELD.replace('"leaving"', '"closing"'))
    a("holder.start(); begun.wait(10); when_it_waits(lambda: interrupt(1), where='qp_closing')")
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.qp.close()")
    a("holder.join(20)")
    for h in (a, b):
        h(RESET)
        h("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)")
    b("ep.recv(0)")
    faults.switch_down("rail0")
    a("ep.post('SEND', wr_id=7)")
    assert statuses(a("ep.poll(1)")) == [[7, "SUCCESS"]] and statuses(b("ep.poll(1)")) == [[0, "SUCCESS"]]
    a("ep.qp.close()")


def test_an_interrupted_rtr_is_protected(network: Network, faults: Any) -> None:
    """Ctrl-C while the attributes are carried to the backups: the default QP is in RTR all the same."""
    a, b = network.protected()
    for h in (a, b):
        h(ERR.replace("ERR", "RESET"))
    a(
        """
runtime = ep.qp._shadow.domain.runtime
def interrupted(shadow, said):
    if shadow.app_state == e.IBV_QPS_RTR:
        raise KeyboardInterrupt
runtime.qp_changed = interrupted
"""
    )
    with pytest.raises(HostError, match="KeyboardInterrupt"):
        a("ep.connect(ep.peer)")
    a("del runtime.qp_changed; at = ep.attr(); at.qp_state = e.IBV_QPS_RTS")
    masks = ("STATE", "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "SQ_PSN", "MAX_QP_RD_ATOMIC")
    a(f"ep.qp.modify(at, {' | '.join('e.IBV_QP_' + name for name in masks)})")
    b("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)")


def test_an_arm_that_waits_for_its_nic_does_not_revive_an_ended_qp(network: Network, faults: Any) -> None:
    """The default NIC is being looked at, for an ARM, when the QP ends: the default QP stays in ERR."""
    a, b = network.protected()
    away(faults, a, b)
    a("n = ep.qp._shadow.connection.nic(0); real = n.look_again; late = []")
    a("n.look_again = lambda then: late.append(then) if 'Rebuild' in then.__qualname__ else real(then)")
    faults.up("a/soft0")
    wait_until(lambda: a("len(late)") > 0, what="a's default pair is to be armed")
    a("ep.recv(1)")
    a(GIVE_UP)
    assert statuses(a("ep.poll(1)")) == [[1, FLUSHED]]
    wait_until(lambda: not a("ep.qp._shadow.core.ending"), what="the end is over")
    a("looked = []; [real(lambda then=then: (then(), looked.append(1))) for then in late]")
    wait_until(lambda: a("len(looked) == len(late)"), what="the NIC was looked at")
    a("d = ep.qp._shadow.connection.driver; d.run()")
    wait_until(lambda: a("n.worker.pending() == 0"), what="nothing is under way on the NIC")
    a("ep.recv(2); ep.post('SEND', wr_id=3)")
    assert sorted(statuses(a("ep.poll(2)"))) == [[2, FLUSHED], [3, FLUSHED]]


def test_who_is_collected_in_the_driver_waits_for_no_nic(network: Network, faults: Any) -> None:
    """A QP away on a hung backup, dropped in the middle of a run: the others can fail over meanwhile."""
    a, b = two_qps(network)
    away(faults, a, b)
    for h in (a, b):
        h(f"other.wait({AWAY!r})")
    a("ep.recv(1); other.recv(2)")
    faults.hang("a/soft1")
    a(
        "d = ep.qp._shadow.connection.driver; box = [ep.qp]; beside = ep.beside; ep.qp = None; del ep; gone = []"
    )
    a("d.post(lambda: (box.clear(), gone.append(1))); d.run()")
    wait_until(lambda: a("len(gone)"), timeout_s=5, what="it is dropped, and the driver goes on")
    faults.unhang("a/soft1")


def test_closed_means_that_no_nic_writes_any_more(network: Network, faults: Any) -> None:
    """close() on a QP whose traffic is on a slow backup: what is sent afterwards must not reach the memory."""
    a, b = on_a_slow_backup(network, faults)
    a.begin("ep.qp.close(); ep.fill(0, 'mine again')")
    try:
        a.end(1.0)
        closed = True
    except AssertionError:
        closed = False
    b("ep.fill(0, 'from b'); ep.post('SEND', length=6, wr_id=1)")
    b("ep.poll(1)")
    faults.unhang("a/soft1")
    if not closed:
        a.end(20)
    assert a("ep.text(0, 10)") == "mine again"


def four_unsignaled(a: Host, b: Host) -> None:
    """Three messages and a READ behind them, all of them complete, and none with a completion."""
    b("[ep.recv(i) for i in range(3)]; ep.fill(5, 'there')")
    a("[ep.post('SEND', slot=i, wr_id=i, signaled=False) for i in range(3)]")
    a("ep.post('RDMA_READ', slot=6, remote_slot=5, length=5, wr_id=3, signaled=False)")
    assert statuses(b("ep.poll(3)")) == [[i, "SUCCESS"] for i in range(3)]
    wait_until(lambda: a("ep.text(6, 5)") == "there", what="the READ's response has come")


@pytest.mark.parametrize("package", ["pyverbs", "shiftverbs"])
def test_what_was_complete_gets_no_error(network: Network, faults: Any, package: str) -> None:
    """The first error of a send queue says that all before it is complete (IBA 10.8.5): unsignaled, it has no WC."""
    a, b = network.protected() if package == "shiftverbs" else network.pair(package)
    four_unsignaled(a, b)
    for rail in ("rail0", "rail1"):
        faults.switch_down(rail)
    a("[ep.post('SEND', wr_id=i, signaled=False) for i in (10, 11)]")
    assert statuses(a("ep.poll(2, 20)")) == [[10, "RETRY_EXC_ERR"], [11, FLUSHED]]
    assert a("ep.none()") == []


@pytest.mark.parametrize("where", ["pyverbs", "home", "away"])
def test_a_queue_that_is_complete_flushes_nothing(network: Network, faults: Any, where: str) -> None:
    """ERR when all is complete: what a marker behind it shows is an empty queue."""
    a, b = network.pair(where) if where == "pyverbs" else network.protected()
    if where == "away":
        away(faults, a, b)
    four_unsignaled(a, b)
    a("ep.recv(8)")
    a(ERR)
    assert statuses(a("ep.poll(1)")) == [[8, FLUSHED]]
    assert a("ep.none()") == []
    a("ep.post('SEND', wr_id=9, signaled=False)")
    assert statuses(a("ep.poll(1)")) == [[9, FLUSHED]]


def test_what_a_nic_shows_to_be_complete_is_not_replayed(network: Network, faults: Any) -> None:
    """A WRITE from where a READ landed behind it: repeated, it would write something else, and nothing is."""
    a, b = network.protected()
    a("ep.fill(1, 'mine '); ep.post('RDMA_WRITE', slot=1, remote_slot=7, length=5, wr_id=1, signaled=False)")
    b("ep.fill(5, 'there'); ep.recv(0)")
    a("ep.post('RDMA_READ', slot=1, remote_slot=5, length=5, wr_id=2, signaled=False)")
    wait_until(lambda: a("ep.text(1, 5)") == "there", what="the READ's response has come")
    faults.switch_down("rail0")
    a("ep.post('SEND', slot=2, wr_id=9)")
    assert statuses(a("ep.poll(1, 20)")) == [[9, "SUCCESS"]], a("ep.shift()")
    assert b("ep.text(7, 5)") == "mine "
    assert a("ep.shift()['status']") == "PROTECTED"


def close_all(a: Host, name: str) -> float:
    """Close a list of endpoints' QPs; returns how long that took, in seconds."""
    return float(a(f"t = time.monotonic(); [x.qp.close() for x in {name}]; time.monotonic() - t"))


# The application's thread polls just when the driver has looked for events and has the peer's BYE in its hands.
POLLS_AT_THE_BYE = """
from shiftverbs.protocol.messages import Phase, Sync
c = ep.qp._shadow.connection
receive = c.driver.channel.receive
def polls(now):
    said = list(receive(now))
    if any(isinstance(entry.message, Sync) and entry.message.phase is Phase.BYE for _, entry in said):
        time.sleep(0.3)
        ep.cq.poll(1)
    return said
c.driver.channel.receive = polls
"""


@pytest.mark.parametrize("many", [1, 3])
def test_an_error_withheld_as_the_peer_leaves_is_told(network: Network, faults: Any, many: int) -> None:
    a, b = network.protected()
    faults.switch_down("rail0")
    a(POLLS_AT_THE_BYE)
    a("ep.recv(9)")
    a(f"[ep.post('SEND', length=2, wr_id=i) for i in range({many})]")
    b("ep.qp.close()")
    expected = [[0, "RETRY_EXC_ERR"], *([i, FLUSHED] for i in range(1, many)), [9, FLUSHED]]
    got = statuses(a(f"ep.poll({many + 1}, 10)"))
    assert sorted(got) == expected, a("ep.shift()")
    assert [wc for wc in got if wc[0] != 9] == expected[:-1]


def test_many_qps_on_a_hung_nic_are_closed_at_the_cost_of_one(network: Network, faults: Any) -> None:
    """What it let one of them wait for in vain, it is not waited for again, as long as it carries out nothing."""
    a, b = network.protected()
    for h in (a, b):
        h("more = [Endpoint(shared=ep, depth=4) for _ in range(5)]")
    names = {h: h("[x.name() for x in more]") for h in (a, b)}
    for h, peer in ((a, b), (b, a)):
        h(f"[x.connect(n) for x, n in zip(more, {names[peer]!r})]")
    for h in (a, b):
        assert h("[x.qp.shift.wait_protected(20) for x in more]") == [True] * 5
    away(faults, a, b)
    for h in (a, b):
        h(f"[x.wait({AWAY!r}) for x in more]")
    a(
        "from shiftverbs.failover import runtime; runtime.STOP_DMA_S = 2.0; w = ep.qp._shadow.connection.nic(1).worker"
    )
    a("[x.recv(1) for x in more]")
    faults.hang("a/soft1")
    assert 2.0 <= close_all(a, "more[:4]") < 4.0
    assert a.child.output.count("is not waited for") == 1, a.child.output
    faults.unhang("a/soft1")
    assert a("w.drain(0, 20)")
    faults.hang("a/soft1")
    assert 2.0 <= close_all(a, "more[4:]") < 4.0, "it has carried out commands since: so it may again"
    faults.unhang("a/soft1")


def test_everything_still_works_at_home(network: Network, faults: Any) -> None:
    """ERR at home, RESET, and the same QPs again: nothing of the end is left behind."""
    a, b = network.protected()
    away(faults, a, b)
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
    three_unpolled(a, b)
    a(ERR)
    gets_them_all(a)
    connect_again(a, b)
    three_unpolled(a, b)
