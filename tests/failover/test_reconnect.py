# SPDX-License-Identifier: BSD-3-Clause
"""The application itself resets, fails and reconnects its QP, away from the default NIC too."""

from __future__ import annotations

from typing import Any

from hosts import AWAY, HOME, Host, Network

STATE = "at = qp.QPAttr(); at.qp_state = e.IBV_QPS_{}; ep.qp.modify(at, e.IBV_QP_STATE)"


def work(a: Host, b: Host) -> None:
    """One message each way."""
    for x, y in ((a, b), (b, a)):
        y("ep.recv(1)")
        x("ep.post('SEND', wr_id=3)")
        assert x("ep.poll(1)")[0][:2] == [3, "SUCCESS"], x("ep.shift()")
        assert y("ep.poll(1)")[0][:2] == [1, "SUCCESS"]


def away(network: Network, faults: Any) -> tuple[Host, Host]:
    """Two hosts whose QPs have left soft0."""
    a, b = network.protected()
    faults.down("a/soft0")
    b("ep.recv(0)")
    a("ep.post('SEND', wr_id=0)")
    assert a("ep.poll(1)")[0][:2] == [0, "SUCCESS"] and b("ep.poll(1)")[0][:2] == [0, "SUCCESS"]
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    return a, b


def test_one_side_reconnects_first(network: Network, faults: Any) -> None:
    """The first to reconnect finds its peer's old entry, which names its route: only the new one pairs."""
    a, b = network.protected()
    again = STATE.format("RESET") + "; ep.connect(ep.peer)"
    a(again)
    a("""ep.wait("'does not name this connection' in (s.why or '')")""")
    b(again)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(10)"), h("ep.shift()")
    work(a, b)
    faults.down("a/soft0")
    work(a, b)
    assert a("ep.shift()['path']") == "soft1"


def test_err_while_away_flushes(network: Network, faults: Any) -> None:
    a, b = away(network, faults)
    a("[ep.recv(i, 100 + i) for i in range(4)]; ep.post('SEND', wr_id=7)")  # b has no receive: it waits
    a(STATE.format("ERR"))
    seen = a("ep.poll(5)")
    assert sorted(wc[:2] for wc in seen) == [
        [7, "WR_FLUSH_ERR"],
        *([100 + i, "WR_FLUSH_ERR"] for i in range(4)),
    ]
    a("ep.recv(1, 9)")
    assert a("ep.poll(1)")[0][:2] == [9, "WR_FLUSH_ERR"]


def test_reset_while_away_takes_nothing_in(network: Network, faults: Any) -> None:
    """After RESET the memory is the application's again, whatever the peer goes on sending."""
    a, b = away(network, faults)
    a("ep.fill(2, 'mine'); ep.recv(2)")
    a(STATE.format("RESET"))
    b("ep.fill(5, 'late'); ep.post('SEND', slot=5, length=4, wr_id=1)")
    assert b("ep.poll(1)")[0][1] != "SUCCESS"
    assert a("ep.text(2, 4)") == "mine" and a("ep.none(0.1)") == []
    assert a("ep.shift()['state']") == "DEFAULT" and a("ep.shift()['durations']['trigger_ns']") is None
    faults.up("a/soft0")
    b(STATE.format("RESET"))
    for h in (a, b):
        h("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(10)"), h("ep.shift()")
        h(f"ep.wait({HOME!r})")
    work(a, b)


def test_memory_that_no_backup_reaches_fails_its_wr(network: Network, faults: Any) -> None:
    """A WR posted while away whose lkey has no counterpart gets an error; it does not wait for ever."""
    a, b = away(network, faults)
    a("ep.qp._shadow.domain.keymap.set_local(ep.mr.lkey, 1, None)")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=4)")
    seen = a("ep.poll(1)")
    assert seen and seen[0][0] == 4 and seen[0][1] != "SUCCESS", a("ep.shift()")
    assert "counterpart" in a("ep.shift()['why']")


def test_what_an_own_error_left_in_the_cq_goes_with_a_reset(network: Network, faults: Any) -> None:
    """A program that polls to its first error alone, and begins anew: it finds nothing of before, as with one NIC."""
    a, b = away(network, faults)
    a("[ep.recv(i, 100 + i) for i in range(4)]")
    a("ep.post('RDMA_WRITE', wr_id=1, rkey=0x7777); ep.post('SEND', wr_id=2)")
    assert a("ep.poll(1)")[0][:2] == [1, "REM_ACCESS_ERR"]
    a("ep.wait('ep.cq._core.buffered == 5')")  # the flushes
    for h in (a, b):
        h(STATE.format("RESET"))
    assert a("ep.none(0.1)") == []
    for h in (a, b):
        h("ep.connect(ep.peer)")
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(10)"), h("ep.shift()")
    work(a, b)
