# SPDX-License-Identifier: BSD-3-Clause
"""What the application changes of a connected QP holds on every pair; what it is told of its QP is true on any."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from harness import wait_until
from hosts import AWAY, HOME, WHERE, Host, HostError, Network, go

from shiftverbs.failover.qp import changes
from shiftverbs.protocol.timers import Timer
from shiftverbs.shadows.nic import Nic

FLAGS = "attr = qp.QPAttr(); attr.qp_access_flags = {}; ep.qp.modify(attr, e.IBV_QP_ACCESS_FLAGS)"
LOCAL = "e.IBV_ACCESS_LOCAL_WRITE"
SHOWN = "ep.qp.query(e.IBV_QP_ACCESS_FLAGS)[0].qp_access_flags"
STATE = "int(ep.qp.query(e.IBV_QP_STATE)[0].qp_state)"
RTR, RTS, ERR = 2, 3, 6


def second_pair(a: Host, b: Host) -> None:
    """Another QP on the same CQ on each host."""
    names = [h("second = Endpoint(shared=ep); second.name()") for h in (a, b)]
    b(f"second.connect({names[0]!r})")
    a(f"second.connect({names[1]!r})")
    for h in (a, b):
        assert h("second.qp.shift.wait_protected(20)"), h("second.shift()")


def written(a: Host) -> str:
    """What becomes of a WRITE into b."""
    a("ep.post('RDMA_WRITE', slot=3, length=6, wr_id=9)")
    return str(a("ep.poll(1, 20)")[0][1])


@pytest.mark.parametrize("when", ["home", "away", "back", "before"])
def test_a_right_that_is_withdrawn_is_gone_on_every_pair(network: Network, faults: Any, when: str) -> None:
    """before: withdrawn at home, tried away. The other QP of the CQ, whose rights stay, goes on."""
    a, b = network.protected()
    second_pair(a, b)
    if when != "before":
        go(faults, when, a, b)
    b("ep.fill(3, 'before')")
    b(FLAGS.format(LOCAL))
    assert b(SHOWN) == 1
    if when == "before":
        go(faults, "away", a, b)
        assert b(SHOWN) == 1
    a("ep.fill(3, 'intrud')")
    assert written(a) in ("REM_INV_REQ_ERR", "REM_ACCESS_ERR")
    assert b("ep.text(3, 6)") == "before"
    assert a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), a("ep.shift()")
    a("second.post('RDMA_WRITE', slot=4, length=6, wr_id=10)")
    wcs = a("second.poll(1, 20)")
    assert [wc[:2] for wc in wcs] == [[10, "SUCCESS"]], a("second.shift()")


def test_two_threads_leave_a_qp_with_what_its_nic_was_told_last(network: Network, faults: Any) -> None:
    """The second comes between the first's verb and the note of it: the pairs have what the default QP has."""
    a, b = network.protected()
    b(
        f"""
import threading
attributes = type(ep.qp._shadow._attributes)
note, amid, over = attributes.note, threading.Event(), threading.Event()
def slow(*args):
    if threading.current_thread().name == "first":
        amid.set()
        over.wait(1)
    note(*args)
attributes.note = slow
def change(flags):
    {FLAGS.format("flags")}
first = threading.Thread(target=change, args=(ACCESS,), name="first")
first.start()
assert amid.wait(20)
change({LOCAL})
over.set()
first.join(20)
attributes.note = note
"""
    )
    told = b(SHOWN)
    assert b("ep.qp._shadow.attrs['qp_access_flags']") == told
    go(faults, "away", a, b)
    assert b(SHOWN) == told


def test_a_handler_closes_the_qp_while_another_threads_modify_is_waited_for(
    network: Network, faults: Any
) -> None:
    """As with plain verbs, where it runs behind the verb: that is not carried out on what is there no more."""
    _, b = network.protected()
    ended = b(
        f"""
import signal, threading
def run():
    has, closed = threading.Event(), threading.Event()
    def other():
        with ep.qp._shadow._changing:
            has.set()
            closed.wait(20)
    thread = threading.Thread(target=other)
    thread.start()
    assert has.wait(20)
    def handler(*_):
        ep.qp.close()
        closed.set()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    {FLAGS.format(LOCAL)}
    thread.join(20)
    signal.signal(signal.SIGALRM, before)
    return closed.is_set() and not thread.is_alive()
""",
    )
    assert ended is None
    assert b("run()", timeout_s=60) is True


@pytest.mark.parametrize("when", ["home", "away", "back", "before"])
def test_a_right_that_is_given_holds_on_every_pair(network: Network, faults: Any, when: str) -> None:
    a, b = network.protected(setup=f"access={LOCAL}", attrs="")
    for h in (a, b):
        h("ep.mr = mr.MR(ep.pd, SLOT * 64, ACCESS)")
    for x, y in ((a, b), (b, a)):
        x(f"ep.peer = {y('ep.name()')!r}")
    if when != "before":
        go(faults, when, a, b)
    b(FLAGS.format("ACCESS"))
    assert b(SHOWN) == b("ACCESS")
    if when == "before":
        go(faults, "away", a, b)
    a("ep.fill(3, 'thanks')")
    assert written(a) == "SUCCESS"
    assert b("ep.text(3, 6)") == "thanks"
    if when in ("away", "before"):
        faults.up("a/soft0")
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 20)")
        a("ep.fill(3, 'again!')")
        assert written(a) == "SUCCESS"
        assert b("ep.text(3, 6)") == "again!"
        assert b(SHOWN) == b("ACCESS")


@pytest.mark.parametrize("where", WHERE)
def test_what_is_refused_changes_nothing(network: Network, faults: Any, where: str) -> None:
    """The error is that of plain verbs, wherever the QP is; rights, `query` and the pairs stay as they were."""
    a, b = network.protected()
    go(faults, where, a, b)
    for change, mask in (
        ("attr.qp_access_flags = 1 << 19 | 1", "e.IBV_QP_ACCESS_FLAGS"),  # no such right
        (
            "attr.timeout = 3; attr.qp_access_flags = 1",
            "e.IBV_QP_TIMEOUT | e.IBV_QP_ACCESS_FLAGS",
        ),  # not in RTS
        (
            "attr.min_rnr_timer = 32; attr.qp_access_flags = 1",
            "e.IBV_QP_MIN_RNR_TIMER | e.IBV_QP_ACCESS_FLAGS",
        ),
        ("attr.cur_qp_state = 2; attr.qp_access_flags = 1", "e.IBV_QP_CUR_STATE | e.IBV_QP_ACCESS_FLAGS"),
    ):
        with pytest.raises(HostError) as error:
            b(f"attr = qp.QPAttr(); {change}; ep.qp.modify(attr, {mask})")
        assert (error.value.type, error.value.code) == ("PyverbsRDMAError", 22), change
    assert b(SHOWN) == b("ACCESS")
    b("attr = qp.QPAttr(); attr.qp_state = attr.cur_qp_state = 3; attr.min_rnr_timer = 4")
    b("ep.qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_CUR_STATE | e.IBV_QP_MIN_RNR_TIMER)")
    assert b("ep.qp.query(0x1ffff)[0].min_rnr_timer") == 4
    assert written(a) == "SUCCESS"
    go(faults, "away" if where == "home" else where, a, b)
    assert written(a) == "SUCCESS"


HARDWARE = "int(pyverbs.qp.QP.query(ep.qp, e.IBV_QP_STATE)[0].qp_state)"


def breaks_unseen(faults: Any, a: Host) -> None:
    """a's default QP is in ERR, no acknowledgement of a WRITE having come, and the driver has not looked."""
    a("import pyverbs.qp; ep.qp._shadow.connection.watchdog.watch = lambda now_ns: None")
    faults.drop("a/soft0", direction="rx", opcode="ack", count=0)
    a("ep.fill(3, 'thanks'); ep.post('RDMA_WRITE', slot=3, length=6, wr_id=9)")
    wait_until(lambda: a(HARDWARE) == ERR, what="retries are exceeded")
    assert a("ep.shift()['state']") == "DEFAULT"


@pytest.mark.parametrize("setting", ["rights", "timer"])
def test_a_change_of_a_qp_that_has_just_broken(network: Network, faults: Any, setting: str) -> None:
    """Nobody has looked at the failure yet, which is ours to hide: the change is made, on every pair."""
    a, b = network.protected()
    breaks_unseen(faults, a)
    if setting == "rights":
        a(FLAGS.format(LOCAL))
        assert a(SHOWN) == 1
    else:
        a("attr = qp.QPAttr(); attr.min_rnr_timer = 4; ep.qp.modify(attr, e.IBV_QP_MIN_RNR_TIMER)")
        assert a("ep.qp.query(0x1ffff)[0].min_rnr_timer") == 4
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[9, "SUCCESS"]], a("ep.shift()")
    assert b("ep.text(3, 6)") == "thanks"
    for h in (a, b):
        h("ep.wait(\"s.path == 'soft1' and s.recv_path == 'soft1'\", 20)")
    b("ep.post('RDMA_WRITE', slot=4, length=6, wr_id=10)")
    wanted = ("REM_INV_REQ_ERR", "REM_ACCESS_ERR") if setting == "rights" else ("SUCCESS",)
    assert b("ep.poll(1, 20)")[0][1] in wanted


def test_sqd_of_a_qp_that_has_just_broken(network: Network, faults: Any) -> None:
    """It is about to be away, where none can be drained: refused as there, and nothing is given up for it."""
    a, b = network.protected()
    breaks_unseen(faults, a)
    with pytest.raises(HostError) as error:
        a("attr = qp.QPAttr(); attr.qp_state = e.IBV_QPS_SQD; ep.qp.modify(attr, e.IBV_QP_STATE)")
    assert error.value.code == 16
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[9, "SUCCESS"]], a("ep.shift()")
    assert b("ep.text(3, 6)") == "thanks" and a(STATE) == RTS


def test_a_bad_change_of_a_qp_that_has_just_broken(network: Network, faults: Any) -> None:
    """Is refused, and the QP fails over all the same."""
    a, _ = network.protected()
    breaks_unseen(faults, a)
    with pytest.raises(HostError) as error:
        a("attr = qp.QPAttr(); attr.min_rnr_timer = 32; ep.qp.modify(attr, e.IBV_QP_MIN_RNR_TIMER)")
    assert error.value.code == 22
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[9, "SUCCESS"]], a("ep.shift()")
    assert a(SHOWN) == a("ACCESS")


def test_a_change_behind_an_own_error_that_nobody_has_polled(network: Network, faults: Any) -> None:
    """The application's own error is not ours to hide: as with plain verbs."""
    a, b = network.protected()
    a("import pyverbs.qp; ep.qp._shadow.connection.watchdog.watch = lambda now_ns: None")
    b("ep.recv(1, length=8)")
    a("ep.post('SEND', length=64, wr_id=1)")
    wait_until(lambda: a(HARDWARE) == ERR, what="the peer refuses")
    with pytest.raises(HostError) as error:
        a(FLAGS.format(LOCAL))
    assert error.value.code == 22
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[1, "REM_INV_REQ_ERR"]]


def told(age_s: float, answers: bool) -> tuple[Any, Any, list[float]]:
    """A change that waits for one NIC, whose command under way is so old; that NIC; how it was waited for."""
    nic, waits = object.__new__(Nic), []

    def drain(_qp: int, timeout_s: float) -> bool:
        waits.append(timeout_s)
        return answers

    began_ns = time.monotonic_ns() - int(age_s * 1e9)
    nic.worker = SimpleNamespace(busy_since_ns=began_ns, drain=drain, pending=lambda _qp: not answers)
    nic._threads, nic._in_vain_ns = {}, 0
    connection = SimpleNamespace(
        nic=lambda k: nic,
        shadow=SimpleNamespace(handle=lambda k: 1),
        driver=SimpleNamespace(run=lambda: None, is_in=lambda: False),
        closed=False,
        given={},
        wait_for=lambda done, deadline: None,
    )
    change = changes._Told(connection)
    change.pointers[1] = 1
    return change, nic, waits


def test_a_nic_that_is_slow_has_all_its_time() -> None:
    """Whoever gave it up early would put a pair out of use that is to answer within the bound."""
    change, nic, waits = told(age_s=9.5, answers=True)
    assert change.wait(10) == []
    assert waits and not nic.is_known_to_wait()


def test_a_nic_that_was_waited_for_in_vain_is_not_waited_for_again() -> None:
    change, nic, waits = told(age_s=0.0, answers=False)
    assert change.wait(0.05) == [1]
    before = len(waits)
    assert change.wait(10) == [1]
    assert before and len(waits) == before
    nic.worker.busy_since_ns = time.monotonic_ns()  # it has begun another command
    change.wait(0.05)
    assert len(waits) > before


def test_a_backup_that_does_not_follow_is_out_of_use(network: Network, faults: Any) -> None:
    """Its NIC carries out no commands: the verb ends within its bound, and no traffic goes there before a RESET."""
    a, b = network.protected(nics="3")
    faults.hang("b/soft1")
    took_s = b(f"began = time.monotonic(); {FLAGS.format(LOCAL)}; time.monotonic() - began")
    assert took_s < 5, took_s
    assert b("ep.qp._shadow.connection.protocol.pairs[1].works") is False
    # Nobody waits for it again and again.
    more = FLAGS.format(f"{LOCAL} | e.IBV_ACCESS_REMOTE_READ")
    took_s = b(f"began = time.monotonic(); {more}; time.monotonic() - began")
    assert took_s < 0.5, took_s
    faults.down("a/soft0")
    a("ep.wait(\"s.path == 'soft2' and s.recv_path == 'soft2'\", 20)")
    faults.unhang("b/soft1")
    fit = "ep.wait('ep.qp._shadow.connection.protocol.pairs[1].clean', 20)"
    a(fit)
    b(fit)
    faults.down("a/soft2")
    a("ep.wait(\"s.path == 'soft1' and s.recv_path == 'soft1'\", 20)")
    b("ep.fill(3, 'before')")
    assert written(a) in ("REM_INV_REQ_ERR", "REM_ACCESS_ERR")
    assert b("ep.text(3, 6)") == "before"


def test_a_right_withdrawn_on_a_hung_nic_that_carries_traffic(network: Network, faults: Any) -> None:
    """It cannot be told to stop serving the peer. So the peer is told to stop: both ends give that pair up."""
    a, b = network.protected()
    go(faults, "away", a, b)
    faults.hang("b/soft1")
    b("ep.fill(3, 'before')")
    took_s = b(f"began = time.monotonic(); {FLAGS.format(LOCAL)}; time.monotonic() - began")
    assert took_s < 10, took_s
    a("ep.wait(\"s.status == 'FAILED'\", 20)")
    assert written(a) != "SUCCESS"
    assert b("ep.text(3, 6)") == "before"
    faults.unhang("b/soft1")


def test_a_change_while_a_pair_is_being_connected(network: Network, faults: Any) -> None:
    """ARM's commands may wait in the NIC's thread, composed with the old rights: the change comes behind them."""
    a, b = network.protected()
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    # b's default QP is reset as soon as the path answers; how far it is when the rights go is left to chance, often.
    for turn in range(6):
        b(FLAGS.format("ACCESS"))
        faults.up("a/soft0")
        a(f"ep.wait('ep.qp._shadow.connection.protocol.pairs[0].arm > {turn}', 20)")
        b(FLAGS.format(f"{LOCAL} | e.IBV_ACCESS_REMOTE_READ"))
        for h in (a, b):
            h(f"ep.wait({HOME!r}, 20)")
        # What the hardware has, on both pairs.
        b("import pyverbs.qp")
        assert b("int(pyverbs.qp.QP.query(ep.qp, e.IBV_QP_ACCESS_FLAGS)[0].qp_access_flags)") == 5
        faults.down("a/soft0")
        for h in (a, b):
            h(f"ep.wait({AWAY!r}, 20)")
    assert written(a) in ("REM_INV_REQ_ERR", "REM_ACCESS_ERR")


def test_the_published_rights_follow(network: Network, faults: Any) -> None:
    """The fence of a MOVE is a WRITE where nothing else will come; without the right to it, MOVE waits for a post."""
    a, b = network.protected()
    rights = "ep.qp._shadow.connection.peer.qp_access_flags"
    b(FLAGS.format(LOCAL))
    wait_until(lambda: a(rights) == 1, what="the peer is told")
    for h in (a, b):
        h("[ep.recv(i, 50 + i) for i in range(4)]")
    a("ep.post('SEND', wr_id=1, signaled=False); ep.qp.shift.migrate()")
    a("ep.wait(\"s.state == 'WAIT_SIGNALED'\")")
    b(FLAGS.format("ACCESS"))
    wait_until(lambda: a(rights) == b("ACCESS"), what="the peer is told again")
    a("ep.post('SEND', wr_id=2)")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    assert [wc[:2] for wc in a("ep.poll(1)")] == [[2, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[50, "SUCCESS"], [51, "SUCCESS"]]
    assert a("ep.shift()['counters']['switches']") == 0


def late_news(a: Host, b: Host) -> None:
    """b withdraws the right to WRITE, and a, which moves with an unsignaled SEND outstanding, has not heard of it."""
    b("ep.qp._shadow.connection.pairing.rights_changed = lambda *_: None")
    b(FLAGS.format(LOCAL))
    a("ep.post('SEND', wr_id=1, signaled=False); ep.qp.shift.migrate()")


def test_a_fence_that_the_peer_refuses_is_our_affair(network: Network, faults: Any) -> None:
    """The pair breaks, and nothing of it reaches the application. That way of fencing is not tried again."""
    a, b = network.protected()
    second_pair(a, b)
    b("[ep.recv(i, 50 + i) for i in range(8)]")
    late_news(a, b)
    a("ep.wait(\"s.counters['switches'] == 1\")")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    a("ep.wait('ep.qp._shadow.connection.protocol.pairs[0].clean', 20)")
    a("ep.post('SEND', wr_id=2, signaled=False); ep.qp.shift.restore()")
    state = "ep.qp._shadow.connection.protocol.state"
    due = f"({state}.timers.due_ns({int(Timer.FENCE_WRITE)}) or 0)"
    now = "ep.qp._shadow.connection.driver.now_ns()"
    # It was tried, and will be again.
    a(f"ep.wait('{state}.move_out is not None and {due} - {now} > 100_000_000')")
    a("ep.post('SEND', wr_id=3)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[3, "SUCCESS"]], a("ep.shift()")
    assert [wc[:2] for wc in b("ep.poll(3, 20)")] == [[50 + i, "SUCCESS"] for i in range(3)]
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
        assert h("ep.none(0.1)") == []
        assert h("ep.qp.shift.status") == "PROTECTED"
        assert h("second.qp.shift.status") == "PROTECTED" and h("second.shift()['counters']['switches']") == 0
    assert a("ep.shift()['counters']['switches']") == 1


def test_a_refused_fence_is_not_the_error_that_is_delivered(network: Network, faults: Any) -> None:
    """The peer has an atomic outstanding, so both give up: with the errors of a broken path, or flushed behind its end.

    The message before the fence was complete when that was refused: unsignaled, it says nothing.
    """
    a, b = network.protected(attrs="timeout=20")
    b("ep.recv(1)")
    faults.drop("b/soft0", direction="rx", opcode="atomic_ack", count=0)
    b("ep.post('ATOMIC_FETCH_AND_ADD', slot=1, length=8, wr_id=5, swap=1)")
    late_news(a, b)
    a("ep.wait(\"s.state not in ('DEFAULT', 'WAIT_SIGNALED') or s.status == 'FAILED'\")")
    a("ep.post('SEND', wr_id=6)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] in ([[6, "RETRY_EXC_ERR"]], [[6, "WR_FLUSH_ERR"]])
    assert [wc[:2] for wc in b("ep.poll(2, 20)")] in (
        [[1, "SUCCESS"], [5, "RETRY_EXC_ERR"]],
        [[1, "SUCCESS"], [5, "WR_FLUSH_ERR"]],  # its own NIC broke the QP, having refused
    )
    for h in (a, b):
        assert h("ep.qp.shift.status") == "FAILED"


RECEIVER = """
ep.peer = {peer!r}
ep.qp.to_rtr(ep.attr())
"""


def receiver(network: Network) -> tuple[Host, Host]:
    """b only receives: it stays in RTR, which verbs permit; both are protected."""
    a, b = network.host("a"), network.host("b")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    b(RECEIVER.format(peer=names[0]))
    a(f"ep.connect({names[1]!r})")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    return a, b


@pytest.mark.parametrize("verb", ["to_rts", "modify"])
@pytest.mark.parametrize("where", ["home", "away", "back", "left"])
def test_a_receiver_becomes_a_sender(network: Network, faults: Any, where: str, verb: str) -> None:
    """RTR to RTS wherever the traffic is, and after the peer has left; READs work at once, and after a failover."""
    a, b = receiver(network)
    go(faults, "back" if where == "left" else where, a, b)
    assert b("ep.qp.qp_state") == RTR and b(STATE) == RTR
    if where == "left":
        a("at = qp.QPAttr(qp_state=e.IBV_QPS_ERR); ep.qp.modify(at, e.IBV_QP_STATE)")
        b("ep.wait(\"s.status == 'UNPROTECTED'\")")
    b("ep.recv(1)")
    with pytest.raises(HostError) as error:  # without what RTS needs
        b("at = ep.attr(); at.qp_state = e.IBV_QPS_RTS; ep.qp.modify(at, e.IBV_QP_STATE)")
    assert error.value.code == 22
    if verb == "to_rts":
        b("ep.qp.to_rts(ep.attr())")
    else:
        b("at = ep.attr(); at.qp_state = e.IBV_QPS_RTS; ep.qp.modify(at, ep.qp._get_comp_mask('RTS'))")
    assert b("ep.qp.qp_state") == RTS and b(STATE) == RTS
    shown = b(
        "at = ep.qp.query(0x1ffff)[0]; [int(getattr(at, n)) for n in ('timeout', 'max_rd_atomic', 'sq_psn')]"
    )
    assert shown == [12, 4, 77]
    if where == "left":
        return
    a("ep.fill(5, 'read me'); ep.recv(2)")
    for turn in range(2):
        b(
            "ep.post('RDMA_READ', slot=5, length=7, wr_id=3); ep.post('SEND', wr_id=4)"
            if turn == 0
            else "ep.post('RDMA_READ', slot=5, length=7, wr_id=3)"
        )
        got = [wc[:2] for wc in b(f"ep.poll({2 - turn}, 20)")]
        assert got == [[3, "SUCCESS"], [4, "SUCCESS"]][: 2 - turn], b("ep.shift()")
        assert b("ep.text(5, 7)") == "read me"
        if turn == 0:
            assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[2, "SUCCESS"]]
            if where == "away":
                faults.up("a/soft0")
                for h in (a, b):
                    h(f"ep.wait({HOME!r}, 20)")
            else:
                faults.down("a/soft0")
    a("ep.post('SEND', wr_id=6)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[6, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[1, "SUCCESS"]]


# Until the verb is over no other thread runs; where a NIC is to die first, the program waits for that.
BECOME = """
def become_sender(verb, dies):
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        deadline = time.monotonic() + 20
        while dies and time.monotonic() < deadline:
            try:
                pyverbs.qp.QP.query(ep.qp, e.IBV_QP_STATE)
            except PyverbsRDMAError:
                break
        at = ep.attr()
        if verb == "to_rts":
            ep.qp.to_rts(at)
        else:
            at.qp_state = e.IBV_QPS_RTS
            ep.qp.modify(at, ep.qp._get_comp_mask("RTS"))
    finally:
        sys.setswitchinterval(before)
"""


@pytest.mark.parametrize("verb", ["to_rts", "modify"])
@pytest.mark.parametrize("how", ["in ERR", "NIC dead"])
def test_a_receiver_that_has_just_broken_becomes_a_sender(
    network: Network, faults: Any, how: str, verb: str
) -> None:
    """Nobody has looked at the failure of its default QP yet: it is ours to hide, as in RTS."""
    a, b = receiver(network)
    b("import sys, pyverbs.qp; from pyverbs.pyverbs_error import PyverbsRDMAError; ep.recv(0, 50)")
    b(BECOME)
    if how == "in ERR":
        b("ep.qp._shadow.connection.watchdog.watch = lambda now_ns: None")
        b("at = qp.QPAttr(qp_state=e.IBV_QPS_ERR); pyverbs.qp.QP.modify(ep.qp, at, e.IBV_QP_STATE)")
        b(f"become_sender({verb!r}, False)")
    else:
        b.begin(f"print('waits', flush=True); become_sender({verb!r}, True)")
        b.child.expect("^waits$")
        faults.kill("b/soft0")
        b.end()
    assert b("ep.qp.qp_state") == RTS and b(STATE) == RTS
    b("ep.fill(3, 'thanks'); ep.post('RDMA_WRITE', slot=3, length=6, wr_id=9)")
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[9, "SUCCESS"]], b("ep.shift()")
    assert a("ep.text(3, 6)") == "thanks"
    a("ep.post('SEND', wr_id=6)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[6, "SUCCESS"]]
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[50, "SUCCESS"]]


def test_a_backup_connected_before_rts_is_connected_anew(network: Network, faults: Any) -> None:
    """It was connected when nobody knew how many READs at a time the application wants."""
    a, b = receiver(network)
    arms = b("ep.shift()['counters']['arms']")
    b("at = ep.attr(); at.max_rd_atomic = 1; ep.qp.to_rts(at)")
    b(f"ep.wait(\"s.counters['arms'] > {arms} and ep.qp._shadow.connection.protocol.pairs[1].clean\", 20)")
    assert b("ep.qp._shadow.connection.given[1].attrs['max_rd_atomic']") == 1
    faults.down("a/soft0")
    a("ep.fill(5, 'read me')")
    b("[ep.post('RDMA_READ', slot=5 + i, remote_slot=5, length=7, wr_id=i) for i in range(6)]")
    assert [wc[:2] for wc in b("ep.poll(6, 20)")] == [[i, "SUCCESS"] for i in range(6)]


def own_error(a: Host, b: Host) -> None:
    """a sends more than b's receive takes: an error on both sides."""
    b("ep.recv(1, length=8)")
    a("ep.post('SEND', length=64, wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[1, "REM_INV_REQ_ERR"]]


@pytest.mark.parametrize("where", [*WHERE, "left"])
def test_the_applications_own_error_is_shown(network: Network, faults: Any, where: str) -> None:
    """left: the default QP was connected anew behind the traffic, and works. The other QP of the CQ goes on."""
    a, b = network.protected()
    second_pair(a, b)
    if where == "left":
        a("ep.qp.shift.migrate()")
        for h in (a, b):
            h(f"ep.wait({AWAY!r})")
            h("ep.wait('ep.qp._shadow.connection.protocol.pairs[0].clean', 20)")
    else:
        go(faults, where, a, b)
    assert a(STATE) == RTS
    own_error(a, b)
    assert [wc[:2] for wc in b("ep.poll(1, 20)")] == [[1, "LOC_LEN_ERR"]]
    assert a(STATE) == b(STATE) == ERR
    assert a("ep.qp.qp_state") == ERR or where in ("home", "back")  # as libibverbs saw it last
    with pytest.raises(HostError) as error:
        a(FLAGS.format("ACCESS"))
    assert error.value.code == 22
    assert a("int(second.qp.query(e.IBV_QP_STATE)[0].qp_state)") == RTS
    a("ep.post('SEND', wr_id=2)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[2, "WR_FLUSH_ERR"]]


def test_an_own_error_half_home_ends_both_directions(network: Network, faults: Any) -> None:
    """Sends are home, receives are not: after the error nothing is received, as with the one QP of plain verbs."""
    a, b = network.protected()
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
    b("ep.post('SEND', slot=6, length=5, wr_id=40)")  # a has no receive: b's fence does not end
    faults.up("a/soft0")
    b("ep.wait(\"s.state == 'WAIT_DRAINED'\", 20)")
    a("ep.wait(\"s.state == 'DEFAULT'\", 20)")
    assert a("ep.shift()['recv_path']") == "soft1"
    own_error(a, b)
    assert a(STATE) == ERR and a("ep.qp.qp_state") == ERR
    a("ep.recv(2, 7)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[7, "WR_FLUSH_ERR"]]


@pytest.mark.parametrize("nics_left", [True, False])
def test_after_an_abort_the_qp_is_in_err(network: Network, faults: Any, nics_left: bool) -> None:
    """Wherever it was, and whatever became of its NIC: it has had its errors."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "500"
    a, b = network.protected()
    go(faults, "away", a, b)
    if not nics_left:
        faults.kill("a/soft0")
    faults.switch_down("rail1")
    a("ep.post('RDMA_WRITE', wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[1, "RETRY_EXC_ERR"]]
    assert a("ep.shift()['status']") == "FAILED"
    assert a(STATE) == ERR and a("ep.qp.qp_state") == ERR


@pytest.mark.parametrize("where", ["home", "away", "back"])
def test_after_the_peers_farewell(network: Network, faults: Any, where: str) -> None:
    """The peer closed its QP: ours works on, and breaks when it is used, as with plain verbs."""
    a, b = network.protected()
    for h in (a, b):
        h(ATTRIBUTES)
    before = a("seen(ep.qp)")
    go(faults, where, a, b)
    b("ep.qp.close()")
    a("ep.wait(\"s.status == 'UNPROTECTED'\")")
    assert a("seen(ep.qp)") == before
    assert a("ep.qp.qp_state") == RTS
    a("ep.post('SEND', wr_id=1)")
    assert [wc[:2] for wc in a("ep.poll(1, 20)")] == [[1, "RETRY_EXC_ERR"]]
    assert a(STATE) == ERR


ATTRIBUTES = """
def seen(q):
    at, ia = q.query(0x1ffff | 1 << 20)
    names = '''qp_state cur_qp_state path_mtu rq_psn sq_psn dest_qp_num qp_access_flags port_num pkey_index
        max_rd_atomic max_dest_rd_atomic min_rnr_timer timeout retry_cnt rnr_retry'''.split()
    return {name: int(getattr(at, name)) for name in names}
"""
