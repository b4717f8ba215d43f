# SPDX-License-Identifier: BSD-3-Clause
"""SHIFTVERBS_REQUIRE: a QP is protected soon after RTS, or it ends in errors that its application sees."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import pytest
from harness import EtcdServer, wait_until
from hosts import AWAY, HOME, Host, HostError, Network, connect, connect_again

ENDED = r"QPs? [0-9a-fx, ]+: it ends in errors: SHIFTVERBS_REQUIRE is set, and the QP "
STATE = "ep.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_ERR and ep.qp.qp_state == e.IBV_QPS_ERR"
#: The driver's looks at its QPs are counted.
LOOKS = """
from shiftverbs.failover.qp import watchdog
if "looked" not in globals():
    looked, watch = [], watchdog.Watchdog.watch
    watchdog.Watchdog.watch = lambda self, now_ns: (watch(self, now_ns), looked.append(now_ns))
looked.clear()
"""


def require(network: Network, deadline_ms: int) -> None:
    """Have all hosts of the network insist."""
    network.env.update(SHIFTVERBS_REQUIRE="1", SHIFTVERBS_REQUIRE_DEADLINE_MS=str(deadline_ms))


def deadline(host: Host, ms: int) -> None:
    """From now on that is its deadline."""
    host(f"runtime = ep.qp._shadow.domain.runtime; d = runtime.driver; d.config = d.config.replace("
         f"require_deadline_ms={ms})")  # fmt: skip


def looks(host: Host, count: int = 5) -> None:
    """Wait until the driver has looked at its connections so often."""
    host(LOOKS)
    wait_until(lambda: host("len(looked)") > count, what="the driver looks")


def ends(host: Host, cause: str, each: str = "ep") -> None:
    """The log says that a QP ended, with the cause; its WRs are flushed, and so is what is posted later."""
    host.child.expect(ENDED + ".*" + re.escape(cause), 40)
    assert host(f"{each}.shift()['status']") == "FAILED"
    assert cause in host(f"{each}.shift()['why']")
    assert host(STATE.replace("ep.", f"{each}.")) is True
    flushed = sorted(wc[:2] for wc in host(f"{each}.poll(2)"))
    assert flushed == [[1, "WR_FLUSH_ERR"], [2, "WR_FLUSH_ERR"]]
    host(f"{each}.recv(3); {each}.post('SEND', wr_id=4)")
    assert sorted(wc[:2] for wc in host(f"{each}.poll(2)")) == [[3, "WR_FLUSH_ERR"], [4, "WR_FLUSH_ERR"]]
    assert not host(f"{each}.qp.shift.wait_protected(20)")
    assert len([line for line in host.child.lines if "it ends in errors" in line]) == 1, host.child.output


def test_etcd_is_away(network: Network, etcd_server: EtcdServer) -> None:
    """The application calls no verb at all before it is over."""
    require(network, 1500)
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    etcd_server.stop()
    hosts = network.pair()
    for h in hosts:
        h("ep.recv(1); ep.recv(2)")
    for h in hosts:
        ends(h, "was not protected within 1.5 s: etcd ")
    # Its next beginning is another one.
    etcd_server.start()
    for h in hosts:
        deadline(h, 40_000)
    connect_again(*hosts)


def test_a_peer_without_shiftverbs(network: Network) -> None:
    require(network, 3_000_000)
    a, b = network.host("a"), network.host("b", package="pyverbs")
    connect(a, b)
    a("ep.recv(1); ep.recv(2)")
    a("ep.wait(\"'has not published' in s.why\", 20)")
    deadline(a, 0)
    ends(a, "does it run shiftverbs, with the same etcd and job")
    b("ep.post('SEND', wr_id=7)")
    assert b("ep.poll(1, 30)")[0][:2] == [7, "RETRY_EXC_ERR"]


def test_a_peer_without_a_backup(network: Network) -> None:
    a, b = network.host("a", SHIFTVERBS_REQUIRE="1"), network.host("b", nics="soft0")
    connect(a, b)
    a("ep.recv(1); ep.recv(2); ep.wait(\"'has not published' in s.why\", 20)")
    deadline(a, 0)
    ends(a, "the peer has not published its QP")


#: The backup NIC has no room for another QP; first it takes its time, until `go` is set.
NO_ROOM = """
import threading
from shiftverbs.shadows import qp as shadow_qp
go = threading.Event()

def create(self, k, nic, slot):
    go.wait(60)
    raise OSError(errno.ENOMEM, "no room")

shadow_qp.ShadowQP._create = create
"""


@pytest.mark.parametrize("verb", ["to_rts", "rtr_to_rts", "modify"])
def test_what_is_certain_at_rts_is_an_error_there(network: Network, verb: str) -> None:
    require(network, 60_000)
    a, b = network.host("a"), network.host("b")
    a(NO_ROOM + "go.set()")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    a(f"ep.peer = {names[1]!r}")
    wait_until(lambda: a("ep.qp._shadow.state(1)") == "failed", what="the backup has refused")
    if verb == "to_rts":
        go = "ep.qp.to_rts(ep.attr())"
    else:
        a("ep.qp.to_rtr(ep.attr())")
        a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
        go = "ep.qp.to_rts(ep.attr())"
    if verb == "modify":
        go = "at = ep.attr(); at.qp_state = e.IBV_QPS_RTS; ep.qp.modify(at, ep.qp._get_comp_mask('RTS'))"
    for _ in range(2):
        with pytest.raises(
            HostError, match=r"would not be protected .*no room.*SHIFTVERBS_REQUIRE is set"
        ) as caught:
            a(go)
        assert caught.value.type == "ShiftError"
        assert a("ep.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_RTR == ep.qp.qp_state")


def test_what_becomes_certain_after_rts_ends_the_qp_at_once(network: Network) -> None:
    require(network, 3_000_000)
    a, b = network.host("a"), network.host("b")
    a(NO_ROOM)
    connect(a, b)
    a("ep.recv(1); ep.recv(2)")
    assert a("ep.shift()['status']") == "PAIRING"
    a("go.set()")
    ends(a, "cannot be protected: no shadow QP: ")


def test_blocked_in_get_cq_event(network: Network) -> None:
    require(network, 1500)
    a = network.host("a")
    b = network.host("b", package="pyverbs")
    connect(a, b, setup="channel=True")
    a("ep.cq.req_notify(); ep.recv(1); ep.recv(2)")
    a.begin("ep.channel.get_cq_event(ep.cq); ep.cq.ack_events(1); ep.poll(2)")
    assert sorted(wc[:2] for wc in a.end(60)) == [[1, "WR_FLUSH_ERR"], [2, "WR_FLUSH_ERR"]]
    a.child.expect(ENDED, 20)


def test_protected_in_time_nothing_happens(network: Network, faults: Any) -> None:
    """Also long after the deadline, away from home, and where the protection is lost for good."""
    require(network, 60_000)
    a, b = network.protected()
    for h in (a, b):
        deadline(h, 0)
        looks(h)
    faults.down("a/soft0")
    for h in (a, b):
        h(f"ep.wait({AWAY!r}, 20)")
        looks(h)
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=2)")
    assert [h("ep.poll(1)")[0][:2] for h in (a, b)] == [[2, "SUCCESS"], [1, "SUCCESS"]]
    b("ep.qp.close()")
    a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
    looks(a)
    assert a("ep.shift()['status']") == "UNPROTECTED"
    assert a("ep.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_RTS")
    assert not [line for h in (a, b) for line in h.child.lines if "SHIFTVERBS_REQUIRE" in line]


def test_only_at_rts(network: Network) -> None:
    """At RTR, and from RESET on, nothing is required; from RTS on the time runs anew."""
    require(network, 3_000_000)
    a = network.host("a")
    b = network.host("b", package="pyverbs")
    connect(a, b)
    a("at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE)")
    deadline(a, 0)
    looks(a)
    assert a("ep.shift()['status']") == "PAIRING"
    a("ep.qp.to_rtr(ep.attr()); ep.recv(1); ep.recv(2)")
    a("ep.wait(\"'has not published' in s.why\", 20)")
    looks(a)
    assert a("ep.shift()['status']") == "PAIRING"
    a("ep.qp.to_rts(ep.attr())")
    ends(a, "was not protected within 0 s: ")
    a("at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR; ep.qp.modify(at, e.IBV_QP_STATE)")
    looks(a)
    assert a("ep.shift()['status']") == "PAIRING"


def test_two_qps_on_one_cq_one_of_them_pairs(network: Network, faults: Any) -> None:
    require(network, 3_000_000)
    a, b = network.protected()
    names = [h("second = Endpoint(shared=ep); second.name()") for h in (a, b)]
    a(f"second.connect({names[1]!r}); second.recv(1); second.recv(2)")  # b's never is
    assert a("second.shift()['status']") == "PAIRING"
    deadline(a, 0)
    ends(a, "the peer has not published its QP", "second")
    assert a("ep.shift()['status']") == "PROTECTED"
    faults.down("a/soft0")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=2)")
    assert a("ep.poll(1, 20)")[0] == [2, "SUCCESS", 0, True] or a("ep.shift()['path']") == "soft1"
    assert b("ep.poll(1, 20)")[0][:2] == [1, "SUCCESS"]


def test_a_forked_child_has_no_unprotected_qp_either(network: Network) -> None:
    require(network, 60_000)
    a = network.host("a")
    a("ep = Endpoint()")
    said = a("""
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        Endpoint()
        os.write(w, b"made")
    except BaseException as error:
        os.write(w, f"{type(error).__name__}: {error}".encode())
    os._exit(0)
os.waitpid(pid, 0)
os.read(r, 1000).decode()
""")
    assert said.startswith("ShiftError: The QP would not be protected (the process was forked"), said


@pytest.mark.parametrize("both", [False, True])
def test_at_the_very_deadline_it_is_one_of_both(network: Network, both: bool) -> None:
    """Wherever it falls between RTS and the last message of ARM: PROTECTED and at work, or FAILED and flushed.

    both: the peer's falls there too. One of the two may be PROTECTED before the other fails; then it hears of that.
    """
    require(network, 60_000)
    a, b = network.protected()
    outcomes = []
    for ms in (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 70, 100):
        for h in (a, b):
            deadline(h, ms if both or h is a else 60_000)
            h(
                "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE); ep.none(0.02)"
            )
        for h in (b, a):
            h("ep.connect(ep.peer); ep.recv(1)")
        checked = (a, b) if both else (a,)
        for h in checked:
            h("ep.wait(\"s.status != 'PAIRING'\", 60)")
            looks(h, 3)
        status = [h("ep.shift()['status']") for h in checked]
        outcomes.append(status)
        if "FAILED" not in status:
            assert status == ["PROTECTED"] * len(checked) and b("ep.qp.shift.wait_protected(20)")
            a("ep.post('SEND', wr_id=2)")
            assert [h("ep.poll(1)")[0][:2] for h in (a, b)] == [[2, "SUCCESS"], [1, "SUCCESS"]]
            continue
        for h in checked:
            h("ep.wait(\"s.status != 'PROTECTED'\", 60)")
            if h("ep.shift()['status']") == "FAILED":
                assert [wc[:2] for wc in h("ep.poll(1)")] == [[1, "WR_FLUSH_ERR"]]
                assert h(STATE) is True
            else:
                assert h("ep.shift()['why']") == "the peer closed its QP"
                assert h("ep.none()") == []
    assert ["FAILED"] * len(checked) in outcomes, outcomes
    for h in (a, b):
        deadline(h, 60_000)
    connect_again(a, b)


def test_a_qp_that_failed_by_itself_keeps_its_error(network: Network, faults: Any) -> None:
    """It was not polled when the deadline came."""
    require(network, 3_000_000)
    a = network.host("a")
    b = network.host("b", package="pyverbs")
    connect(a, b)
    faults.down("b/soft0")
    a("ep.recv(1); ep.post('SEND', wr_id=2); ep.post('SEND', wr_id=3)")
    wait_until(lambda: a("ep.qp.query(e.IBV_QP_STATE)[0].qp_state == e.IBV_QPS_ERR"), 20, "the NIC gives up")
    deadline(a, 0)
    a("from shiftverbs.failover.qp import requirement; requirement.CATCH_UP_NS = 0")
    looks(a)
    seen = sorted(wc[:2] for wc in a("ep.poll(3)"))
    assert seen == [[1, "WR_FLUSH_ERR"], [2, "RETRY_EXC_ERR"], [3, "WR_FLUSH_ERR"]]
    assert "SHIFTVERBS_REQUIRE" not in a.child.output


def test_it_ends_amid_traffic(network: Network) -> None:
    """Each WR has one WC, in order; what the peer received was sent, and what was acknowledged was received."""
    require(network, 3_000_000)
    a, b = network.host("a"), network.host("b", package="pyverbs")
    connect(a, b, setup="depth=64")
    b("[ep.recv(i) for i in range(60)]")
    deadline(a, 3_000_000)
    posted, got = a("""
from shiftverbs.failover.qp import requirement
requirement.CATCH_UP_NS, posted, seen = 0, 0, []
while not seen or seen[-1][1] == "SUCCESS":
    if posted - len(seen) < 32:
        ep.post("SEND", slot=1, wr_id=posted, length=4000)
        posted += 1
    seen += ep.poll(1, 0.0005)
    if len(seen) == 30:
        d.config = d.config.replace(require_deadline_ms=0)
posted, seen + ep.poll(posted - len(seen), 20)
""")
    assert [wc[0] for wc in got] == list(range(posted))
    statuses = [wc[1] for wc in got]
    done = statuses.count("SUCCESS")
    assert statuses == ["SUCCESS"] * done + ["WR_FLUSH_ERR"] * (posted - done) and 30 <= done <= 60, statuses
    received = b("ep.poll(60, 1)")
    assert all(wc[1] == "SUCCESS" for wc in received) and len(received) >= done
    assert a("ep.none()") == []


def test_who_stood_still_over_the_deadline_is_protected_after_all(network: Network) -> None:
    require(network, 60_000)
    a = network.host("a")
    b = network.host("b", SHIFTVERBS_REQUIRE="0")
    a("from shiftverbs.failover.qp import requirement; requirement.CATCH_UP_NS = 60 * 10**9")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    a(f"ep.connect({names[1]!r}); ep.wait(\"'has not published' in s.why\", 20)")
    deadline(a, 60_000)
    deadline(a, a("int((d.now_ns() - ep.qp._shadow.ready_ns) / 1e6)") + 4000)
    a.child.signal(signal.SIGSTOP)
    try:
        since = time.monotonic()
        b(f"ep.connect({names[0]!r})")
        wait_until(lambda: time.monotonic() - since > 6, what="the deadline is long over")
    finally:
        a.child.signal(signal.SIGCONT)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(40)"), h("ep.shift()")
    looks(a)
    assert "SHIFTVERBS_REQUIRE" not in a.child.output


def test_a_memory_window_does_not_get_round_it(network: Network) -> None:
    """It ends a protection; what never began would be left out for ever."""
    require(network, 3_000_000)
    a, b = network.host("a"), network.host("b", package="pyverbs")
    connect(a, b, setup="access=ACCESS | e.IBV_ACCESS_MW_BIND")
    a("window = mr.MW(ep.pd, e.IBV_MW_TYPE_1)")
    a("info = mr.MWBindInfo(ep.mr, ep.mr.buf, 64, e.IBV_ACCESS_REMOTE_WRITE)")
    bind = "ep.qp.bind_mw(window, mr.MWBind(info, e.IBV_SEND_SIGNALED, 5))"
    with pytest.raises(
        HostError, match=r"would not be protected .*memory window.*SHIFTVERBS_REQUIRE is set"
    ) as caught:
        a(bind)
    assert caught.value.type == "ShiftError"
    a("ep.recv(1); ep.recv(2); ep.wait(\"'has not published' in s.why\", 20)")
    deadline(a, 0)
    ends(a, "the peer has not published its QP")


def test_a_memory_window_once_it_was_protected(network: Network) -> None:
    require(network, 60_000)
    a, _ = network.protected(setup="access=ACCESS | e.IBV_ACCESS_MW_BIND")
    a("window = mr.MW(ep.pd, e.IBV_MW_TYPE_1)")
    a("info = mr.MWBindInfo(ep.mr, ep.mr.buf, 64, e.IBV_ACCESS_REMOTE_WRITE)")
    a("ep.qp.bind_mw(window, mr.MWBind(info, e.IBV_SEND_SIGNALED, 5))")
    assert a("ep.poll(1)")[0][:2] == [5, "SUCCESS"]
    assert a("ep.shift()['status']") == "UNPROTECTED"


@pytest.mark.parametrize("verb", ["to_rts", "modify"])
def test_a_forked_child_brings_no_qp_to_rts(network: Network, verb: str) -> None:
    """None that the parent made either: nobody there would keep the deadline."""
    require(network, 60_000)
    a, b = network.host("a"), network.host("b")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    a(f"ep.peer = {names[1]!r}; ep.qp.to_rtr(ep.attr())")
    a("at = ep.attr(); at.qp_state = e.IBV_QPS_RTS")
    go = "ep.qp.to_rts(at)" if verb == "to_rts" else "ep.qp.modify(at, ep.qp._get_comp_mask('RTS'))"
    said = a(f"""
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        {go}
        os.write(w, b"RTS")
    except BaseException as error:
        os.write(w, f"{{type(error).__name__}}: {{error}}".encode())
    os._exit(0)
os.waitpid(pid, 0)
os.read(r, 1000).decode()
""")
    assert said.startswith("ShiftError: The QP would not be protected (the process was forked"), said


ID = "ep.qp._shadow.domain.runtime.instance"


def test_the_peer_is_protected_already_and_fails_over(network: Network, faults: Any) -> None:
    """Our ARM is cut short by its SWITCH, in which we are protected; our own fence is no failure of the QP."""
    require(network, 60_000)
    hosts = {name: network.host(name) for name in "ab"}
    names = {name: h("ep = Endpoint(depth=32); ep.name()") for name, h in hosts.items()}
    # Who begins an ARM ends it last: when its zero-length SEND was acknowledged.
    first, then = sorted(hosts, key=lambda name: str(hosts[name](ID)))
    x, y = hosts[first], hosts[then]
    faults.drop(f"{then}/soft1", direction="tx", opcode="ack", count=0)
    y(f"ep.connect({names[first]!r}); [ep.recv(i) for i in range(4)]")
    x(f"ep.connect({names[then]!r}, timeout=17, retry=7); [ep.recv(i) for i in range(4)]")
    y("ep.wait(\"s.status == 'PROTECTED'\", 20)")
    faults.down(f"{then}/soft0")
    faults.clear(f"{then}/soft1")  # should the SWITCH be so late that ARM has failed, it is armed anew
    for h in (x, y):
        h("ep.wait(\"s.path == s.recv_path == 'soft1'\", 40)")
    for h in (x, y):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
        h("ep.post('SEND', slot=10, wr_id=60)")
    for h in (x, y):
        assert sorted(wc[:2] for wc in h("ep.poll(2, 20)")) == [[0, "SUCCESS"], [60, "SUCCESS"]]
    faults.up(f"{then}/soft0")
    for h in (x, y):
        h(f"ep.wait({HOME!r}, 20)")
        assert h("ep.shift()['status']") == "PROTECTED"


def test_the_peer_connects_anew_amid_its_first_failover(network: Network, faults: Any) -> None:
    """We are not protected yet, take part in its SWITCH, and its BYE is lost: all of our WRs come back."""
    require(network, 60_000)
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "60000"
    hosts = {name: network.host(name) for name in "ab"}
    names = {name: h("ep = Endpoint(depth=32); ep.name()") for name, h in hosts.items()}
    first, then = sorted(hosts, key=lambda name: str(hosts[name](ID)))
    x, y = hosts[first], hosts[then]
    faults.drop(f"{then}/soft1", direction="tx", opcode="ack", count=0)
    y(f"ep.connect({names[first]!r})")
    x(f"ep.connect({names[then]!r}, timeout=17, retry=7); [ep.recv(i) for i in range(4)]")
    y("ep.wait(\"s.status == 'PROTECTED'\", 20)")
    faults.hang(f"{first}/soft0")  # so that its fence is under way
    faults.down(f"{then}/soft0")
    x("ep.wait('ep.qp._shadow.connection.fence is not None', 40)")
    faults.switch_down("rail1")
    y(
        "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_RESET; ep.qp.modify(at, e.IBV_QP_STATE); ep.connect(ep.peer)"
    )
    x("ep.wait(\"s.status == 'FAILED'\", 40)")
    assert x("ep.none()") == []
    faults.unhang(f"{first}/soft0")
    x("ep.post('SEND', wr_id=70)")
    assert sorted(wc[0] for wc in x("ep.poll(5, 30)")) == [0, 1, 2, 3, 70]
    assert x(STATE) is True
    for fault in ("rail0", "rail1"):
        faults.switch_up(fault)
    faults.up(f"{then}/soft0")
    faults.clear(f"{then}/soft1")
    connect_again(x, y)
