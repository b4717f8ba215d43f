# SPDX-License-Identifier: BSD-3-Clause
"""A cable that is pulled before the QP is protected: traffic goes on as soon as it is."""

from __future__ import annotations

from typing import Any

import pytest
from harness import wait_until
from hosts import Host, Network, connect
from test_before_protected import half_protected

# The NIC gives up after 8 ms, and nobody has protected anything by then.
SOON = "timeout=9, retry=3"
# Where nothing dies: for who gives up so soon, a peer that has no turn for 8 ms is a dead cable.
PATIENT = "timeout=16, retry=7"
# Posts n messages, and keeps every WC that comes, polled or not.
POST = """
for i in range({n}):
    ep.fill(i, 'm%d' % i)
    ep.post('SEND', slot=i, length=2, wr_id=i)
"""
TAKE = "[wc[:2] for wc in ep.poll({n}, {s})]"


def pulled(
    network: Network, faults: Any, how: str, after_s: float, channel: bool = False
) -> tuple[Host, Host]:
    """Two hosts, connected; the default rail is dead so long after RTS, and nobody waits for protection."""
    a, b = network.host("a"), network.host("b")
    connect(a, b, setup="channel=True" if channel else "", attrs=SOON)
    for host in (a, b):
        host("[ep.recv(32 + i, 100 + i) for i in range(8)]")
    a(f"import time; time.sleep({after_s})")
    {"silent": lambda: faults.switch_down("rail0"), "a": lambda: faults.down("a/soft0"),
     "b": lambda: faults.down("b/soft0")}[how]()  # fmt: skip
    return a, b


@pytest.mark.parametrize("after_s", [0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("how", ["silent", "a", "b"])
def test_a_cable_pulled_early_costs_nothing(network: Network, faults: Any, how: str, after_s: float) -> None:
    a, b = pulled(network, faults, how, after_s)
    for host in (a, b):
        host(POST.format(n=8))
    for host in (a, b):
        got = host(TAKE.format(n=16, s=20))
        assert sorted(got) == [[i, "SUCCESS"] for i in [*range(8), *range(100, 108)]], host("ep.shift()")
        assert [host(f"ep.text({32 + i}, 2)") for i in range(8)] == [f"m{i}" for i in range(8)]
        assert host("ep.shift()['status']") == "PROTECTED"


def held(network: Network, faults: Any, sides: str = "ab", attrs: str = SOON) -> tuple[Host, Host]:
    """Two hosts whose backups cannot be connected, until all rules are dropped."""
    for name in "ab":
        faults.register(name, "2")
    for name in sides:
        faults.drop(f"{name}/soft1", direction="tx", opcode="ack", count=0)
    hosts = network.pair(attrs=attrs)
    for host in hosts:
        host("[ep.recv(32 + i, 100 + i) for i in range(8)]")
        wait_until(lambda host=host: bool(host("ep.qp.shift.pairing")), 20)
    return hosts


FAILED = "c.core.first_error(0) is not None"


def test_errors_wait_for_what_is_still_being_connected(network: Network, faults: Any) -> None:
    a, b = held(network, faults)
    faults.switch_down("rail0")
    for host in (a, b):
        host("c = ep.qp._shadow.connection")
        host(POST.format(n=4))
    for host in (a, b):
        wait_until(lambda host=host: host(f"(ep.qp.shift.status, ep.poll(0, 0), {FAILED})[2]"), 10)
        assert host("ep.cq.poll(8)[0]") == 0, "nothing is shown yet"
        assert host("ep.shift()['status']") == "PAIRING"
        host("ep.post('SEND', slot=9, length=2, wr_id=9)")  # and behind it
    faults.clear(rules_only=True)
    for host in (a, b):
        got = host(TAKE.format(n=10, s=20))
        assert sorted(got) == [[i, "SUCCESS"] for i in [0, 1, 2, 3, 9, *range(100, 105)]], host("ep.shift()")
        assert host("ep.shift()['path']") == "soft1"


def test_they_do_not_wait_for_ever(network: Network, faults: Any) -> None:
    """The original error first, all else is flushed, in order: as with plain verbs, after the deadline."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "700"
    a, b = held(network, faults)
    faults.switch_down("rail0")
    a("import time; t = time.monotonic()")
    a(POST.format(n=3))
    got = a(TAKE.format(n=11, s=20))
    assert a("time.monotonic() - t") > 0.5
    assert [wc for wc in got if wc[0] < 100] == [
        [0, "RETRY_EXC_ERR"],
        [1, "WR_FLUSH_ERR"],
        [2, "WR_FLUSH_ERR"],
    ]
    assert [wc for wc in got if wc[0] >= 100] == [[100 + i, "WR_FLUSH_ERR"] for i in range(8)]
    # What is posted from now on is flushed at once, and protection does not come any more.
    a("ep.post('SEND', slot=9, length=2, wr_id=9)")
    assert a(TAKE.format(n=1, s=5)) == [[9, "WR_FLUSH_ERR"]]
    faults.clear(rules_only=True)
    assert a("ep.qp.shift.wait_protected(3)") is False


@pytest.mark.parametrize("channel", [False, True])
def test_without_a_peer_that_takes_part(network: Network, faults: Any, channel: bool) -> None:
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "700"
    a, b = network.host("a"), network.host("b", SHIFTVERBS_DISABLE="1")
    connect(a, b, setup=f"channel={channel}", attrs=SOON)
    faults.switch_down("rail0")
    if channel:
        a("ep.cq.req_notify()")
    a(POST.format(n=1))
    if channel:
        a("ep.channel.get_cq_event(ep.cq)", 20)
    assert a(TAKE.format(n=1, s=10)) == [[0, "RETRY_EXC_ERR"]]
    assert a("ep.shift()['status']") == "PAIRING"


def test_an_application_that_resets_its_qp_meanwhile_has_it_at_once(network: Network, faults: Any) -> None:
    a, _ = held(network, faults)
    faults.switch_down("rail0")
    a("c = ep.qp._shadow.connection")
    a(POST.format(n=3))
    wait_until(lambda: a(f"ep.cq.poll(1)[0] == 0 and {FAILED}"), 10)
    a("at = qp.QPAttr(); at.qp_state = e.IBV_QPS_ERR; import time; t = time.monotonic()")
    a("ep.qp.modify(at, e.IBV_QP_STATE)")
    got = a(TAKE.format(n=11, s=10))
    assert a("time.monotonic() - t") < 1.5
    assert sorted(wc[0] for wc in got) == [0, 1, 2, *range(100, 108)]
    assert {wc[1] for wc in got} <= {"RETRY_EXC_ERR", "WR_FLUSH_ERR"}


def test_the_applications_own_error_does_not_wait(network: Network, faults: Any) -> None:
    a, _ = held(network, faults, attrs=PATIENT)
    a("import time; t = time.monotonic(); ep.post('RDMA_WRITE', wr_id=1, rkey=ep.peer['rkey'] ^ 0xff00)")
    assert a(TAKE.format(n=1, s=10)) == [[1, "REM_ACCESS_ERR"]]
    assert a("time.monotonic() - t") < 1.5


def test_where_one_side_is_protected_the_other_follows(network: Network, faults: Any) -> None:
    """The peer's ARM is through, ours is not: its SWITCH heals our error too."""
    late, early = half_protected(network, faults)
    for host in (late, early):
        host("[ep.recv(32 + i, 100 + i) for i in range(4)]")
    faults.switch_down("rail0")
    for host in (late, early):
        host(POST.format(n=4))
    faults.clear(rules_only=True)
    for host in (late, early):
        got = host(TAKE.format(n=8, s=20))
        assert sorted(got) == [[i, "SUCCESS"] for i in [*range(4), *range(100, 104)]], host("ep.shift()")


@pytest.mark.parametrize("package", ["shiftverbs", "pyverbs"])
def test_own_receive_error_seen_by_the_flush_of_a_send(network: Network, package: str) -> None:
    """The peer's message is too long; the application looks at its send CQ alone, as where it waits for a send."""
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "8000"
    a, b = (network.host(n, package, SHIFTVERBS_ETCD="127.0.0.1:1") for n in "ab")
    connect(a, b, setup="split=True", attrs=PATIENT)
    a("ep.recv(32, 100, 8)")
    b("ep.post('SEND', length=64, wr_id=1)")
    assert b(TAKE.format(n=1, s=5)) == [[1, "REM_INV_REQ_ERR"]]
    a("import time; t = time.monotonic(); ep.post('SEND', wr_id=5)")
    got = a(TAKE.format(n=1, s=12))
    took = a("time.monotonic() - t")
    assert got == [[5, "WR_FLUSH_ERR"]]
    assert took < 1.5, took
