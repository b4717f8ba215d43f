# SPDX-License-Identifier: BSD-3-Clause
"""What must not be hidden, and what must not make things worse: atomics, application errors, dead peers, no etcd."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import EtcdServer, Spawn, wait_until
from hosts import AWAY, HOME, HostError, Network, connect, connect_again


def test_atomic_in_flight_gets_its_original_error(network: Network, faults: Any) -> None:
    a, b = network.protected()
    faults.switch_down("rail0")
    a("ep.post('ATOMIC_FETCH_AND_ADD', slot=1, length=8, wr_id=5, swap=1)")
    a("ep.post('SEND', wr_id=6)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[5, "RETRY_EXC_ERR"], [6, "WR_FLUSH_ERR"]]
    assert a("ep.shift()['status']") == "FAILED"
    assert "atomic" in a("ep.shift()['why']").lower()
    wait_until(lambda: b("ep.shift()['status']") == "FAILED", what="the peer is told")
    for h in (a, b):
        h.child.expect("failover gave up", 20)
        assert "traffic is back" not in h.child.output, h.child.output
    # Later use works as with pyverbs: RESET, heal, connect again, protected again.
    faults.switch_up("rail0")
    connect_again(a, b)
    b("ep.recv(3)")
    a("ep.fill(2, 'again'); ep.post('SEND', slot=2, length=5, wr_id=9)")
    assert a("ep.poll(1)")[0][:2] == [9, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [3, "SUCCESS", 5]
    faults.down("a/soft0")
    b("ep.recv(4)")
    a("ep.post('SEND', slot=2, length=5, wr_id=10)")
    assert a("ep.poll(1)")[0][:2] == [10, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [4, "SUCCESS", 5]


def test_application_errors_arrive_unchanged(network: Network) -> None:
    cases = {
        "REM_ACCESS_ERR": "ep.post('RDMA_WRITE', wr_id=1, rkey=0x7777)",
        "LOC_PROT_ERR": "ep.post('SEND', wr_id=1, lkey=0x7777)",
        "RNR_RETRY_EXC_ERR": "ep.post('SEND', wr_id=1)",
    }
    for status, post in cases.items():
        a, b = network.protected(attrs="rnr=1")
        a(post)
        a("ep.post('RDMA_WRITE', wr_id=2)")
        assert [wc[:2] for wc in a("ep.poll(2)")] == [[1, status], [2, "WR_FLUSH_ERR"]]
        assert a("ep.none()") == []
        assert a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)"), a("ep.shift()")
        assert status in a("ep.shift()['why']")
        assert a("ep.shift()['counters']['switches']") == 0
        for h in (a, b):
            h.child.close()


def test_peer_killed_gives_the_original_error_within_the_deadline(network: Network) -> None:
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "500"
    a, b = network.protected()
    b.child.signal(signal.SIGKILL)
    a("ep.post('RDMA_WRITE', wr_id=1); ep.post('RDMA_WRITE', wr_id=2, signaled=False)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[1, "RETRY_EXC_ERR"], [2, "WR_FLUSH_ERR"]]
    assert a("ep.shift()['status']") == "FAILED"


def test_peer_that_closes_leaves_plain_verbs_behind(network: Network) -> None:
    a, b = network.protected()
    b("ep.qp.close()")
    wait_until(lambda: a("ep.shift()['status']") == "UNPROTECTED", what="told by the peer")
    a("ep.post('RDMA_WRITE', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "RETRY_EXC_ERR"]


def test_without_etcd_everything_runs_as_with_pyverbs(spawn: Spawn, network: Network, faults: Any) -> None:
    network.env["SHIFTVERBS_ETCD"] = None
    a, b = network.pair()
    assert a("ep.shift()['status']") == "UNPROTECTED"
    assert "SHIFTVERBS_ETCD" in a("ep.shift()['why']")
    b("ep.recv(1)")
    a("ep.fill(0, 'plain'); ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=8)")
    assert a("ep.poll(1)")[0][:2] == [8, "RETRY_EXC_ERR"]


def test_etcd_that_does_not_answer_leaves_qps_pairing(network: Network) -> None:
    network.env["SHIFTVERBS_ETCD"] = "127.0.0.1:1"
    a, b = network.pair()
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    wait_until(lambda: "etcd" in (a("ep.shift()['why']") or ""), what="why names etcd")
    assert a("ep.shift()['status']") == "PAIRING"


@pytest.mark.parametrize("cause", ["etcd", "shell"])
def test_a_qp_connected_while_etcd_is_away_says_so_and_does_not_blame_the_peer(
    network: Network, cause: str
) -> None:
    network.env |= {"SHIFTVERBS_ETCD": "127.0.0.1:1", "SHIFTVERBS_BROKER": "own"}
    a, b = network.host("a"), network.host("b")
    words = "127.0.0.1:1"
    if cause == "shell":
        words = "cannot start a broker: [Errno 2] No such file or directory: '/nowhere/sh'"
        a("import shiftverbs.exchanger.start as start; start._SHELL = '/nowhere/sh'")
    # The first one hears of it, the second is connected when it is known.
    for _ in range(2):
        connect(a, b)
        wait_until(lambda: words in (a("ep.shift()['why']") or ""), what="why says what is really missing")
        assert "the peer" not in a("ep.shift()['why']")


def test_etcd_dying_after_pairing_does_not_matter(
    network: Network, faults: Any, etcd_server: EtcdServer
) -> None:
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    a, b = network.protected()
    a("ep.post('RDMA_WRITE', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    wait_until(lambda: a("len(ep.qp._shadow.core.remote_keys)") > 0, what="the peer's rkey is resolved ahead")
    etcd_server.kill()
    faults.down("a/soft0")
    a("ep.fill(2, 'still'); ep.post('RDMA_WRITE', slot=2, length=5, wr_id=2)")
    assert a("ep.poll(1)")[0][:2] == [2, "SUCCESS"]
    assert b("ep.text(2, 5)") == "still"
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r})")


def test_etcd_coming_late_protects_late(network: Network, etcd_server: EtcdServer) -> None:
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    etcd_server.stop()
    a, b = network.pair()
    assert a("ep.shift()['status']") == "PAIRING"
    etcd_server.start()
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(30)"), h("ep.shift()")


def test_peer_without_shiftverbs(network: Network, faults: Any) -> None:
    a, b = network.host("a"), network.host("b", "pyverbs")
    connect(a, b)
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    assert a("ep.shift()['status']") == "PAIRING"
    wait_until(lambda: "the peer has not published" in a("ep.shift()['why']"), what="the reason")
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=8); ep.post('SEND', wr_id=9)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[8, "RETRY_EXC_ERR"], [9, "WR_FLUSH_ERR"]]


def test_no_backup_nic_is_exactly_pyverbs(network: Network, faults: Any) -> None:
    a, b = network.pair(nics="soft0")
    assert a("ep.shift()['status']") == "UNPROTECTED"
    assert "backup" in a("ep.shift()['why']")
    faults.down("a/soft0")
    a("ep.post('SEND', wr_id=8); ep.post('SEND', wr_id=9)")
    assert [wc[:2] for wc in a("ep.poll(2)")] == [[8, "RETRY_EXC_ERR"], [9, "WR_FLUSH_ERR"]]


def test_required_protection_is_an_error_where_there_is_none(network: Network) -> None:
    a = network.host("a", nics="soft0", SHIFTVERBS_REQUIRE="1")
    try:
        a("ep = Endpoint()")
    except HostError as error:
        assert error.type == "ShiftError"
        assert "backup" in error.text
    else:
        raise AssertionError("created an unprotected QP")


def test_nic_death(network: Network, faults: Any) -> None:
    a, b = network.protected(nics="3")
    b("[ep.recv(i) for i in range(4)]")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    faults.kill("a/soft0")
    a("ep.post('SEND', wr_id=2)")
    assert a("ep.poll(1)")[0][:2] == [2, "SUCCESS"]
    assert [wc[:2] for wc in b("ep.poll(2)")] == [[0, "SUCCESS"], [1, "SUCCESS"]]
    assert a("ep.shift()['path']") == "soft1"
    faults.down("b/soft1")
    a("ep.post('SEND', wr_id=3)")
    assert a("ep.poll(1)")[0][:2] == [3, "SUCCESS"]
    assert a("ep.shift()['path']") == "soft2"


def test_both_directions_and_all_gone(network: Network, faults: Any) -> None:
    network.env["SHIFTVERBS_PEER_DEADLINE_MS"] = "500"
    a, b = network.protected()
    faults.switch_down("rail0")
    faults.switch_down("rail1")
    a("ep.post('RDMA_WRITE', wr_id=1)")
    b("ep.post('RDMA_WRITE', wr_id=1)")
    for h in (a, b):
        assert h("ep.poll(1)")[0][:2] == [1, "RETRY_EXC_ERR"]
        assert h("ep.shift()['status']") == "FAILED"


def test_migrate_and_restore(network: Network) -> None:
    a, b = network.protected()
    a("ep.qp.shift.migrate()")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]
    b("ep.qp.shift.restore()")
    for h in (a, b):
        h(f"ep.wait({HOME!r})")
        assert h("ep.shift()['counters']['switches']") == 0


def test_posts_while_moving_stay_in_order(network: Network) -> None:
    a, b = network.protected(setup="depth=64")
    b("[ep.recv(i) for i in range(48)]")
    a("ep.qp.shift.migrate(); [ep.post('SEND', length=8, wr_id=i, signaled=i % 3 == 0) for i in range(24)]")
    got = a(f"ep.wait({AWAY!r}, poll=True)")
    a(
        "ep.qp.shift.restore(); [ep.post('SEND', length=8, wr_id=i, signaled=i % 3 == 0) for i in range(24, 48)]"
    )
    got += a(f"ep.poll({16 - len(got)})")
    assert [wc[0] for wc in got] == list(range(0, 48, 3))
    assert [wc[0] for wc in b("ep.poll(48)")] == list(range(48))


def test_default_nic_that_is_back_but_hangs_does_not_hang_the_application(
    network: Network, faults: Any
) -> None:
    """Its port is active and its pings are answered, but no command returns: who asks it anything waits for ever."""
    a, b = network.protected()
    faults.down("a/soft0")
    messages(a, b)
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
    arms = a("ep.shift()['counters']['arm_failures']")
    faults.hang("a/soft0")
    faults.up("a/soft0")
    messages(a, b)
    # Bringing it home was tried, and given up for now.
    a(f"ep.wait('s.counters[\"arm_failures\"] > {arms}', poll=True)")
    messages(a, b)
    assert a("ep.shift()['path']") == "soft1" and a("ep.shift()['status']") == "PROTECTED"
    faults.unhang("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 30)")
    messages(a, b)


def messages(a: Any, b: Any) -> None:
    """One message each way, whichever NIC carries it."""
    for x, y in ((a, b), (b, a)):
        y("ep.recv(1)")
        x("ep.post('SEND', wr_id=3)")
        assert x("ep.poll(1)", timeout_s=20)[0][:2] == [3, "SUCCESS"], x("ep.shift()")
        assert y("ep.poll(1)", timeout_s=20)[0][:2] == [1, "SUCCESS"]


def test_after_an_abort_nothing_gets_through(network: Network, faults: Any) -> None:
    """A side gives up while its default QP, out of use, still works: what is posted then must fail all the same."""
    a, b = network.protected()
    a("ep.qp.shift.migrate()")
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")
        h("ep.wait('ep.qp._shadow.connection.protocol.pairs[0].clean')")  # connected anew
    b("ep.recv(1)")
    for name in ("a", "b"):
        faults.hang(f"{name}/soft0")  # there they stay in RTS for now
    a("from shiftverbs.protocol import events; c = ep.qp._shadow.connection")
    a("c.driver.post(lambda: c.feed(events.KeysMissing('the test'))); c.driver.run()")
    a("""ep.wait("s.status == 'FAILED'")""")
    a("ep.post('SEND', wr_id=9)")
    assert a("ep.poll(1)", timeout_s=20)[0][:2] == [9, "RETRY_EXC_ERR"]
    for name in ("a", "b"):
        faults.unhang(f"{name}/soft0")
    assert b("ep.poll(1)", timeout_s=20)[0][:2] == [1, "WR_FLUSH_ERR"]
