# SPDX-License-Identifier: BSD-3-Clause
"""A program whose QPs are not protected is told so, once, with the likely cause, without having set up any logging."""

from __future__ import annotations

import signal
from typing import Any

from harness import EtcdServer, wait_until
from hosts import Host, Network, connect

SECONDS = 15
# From here on five seconds count as over: whoever is to be told of is, at the next looks.
AS_IF_LONG_AGO = """
from shiftverbs.failover.qp import watchdog
watchdog.PAIRING_NS, looked, watch = 0, [], watchdog.Watchdog.watch
watchdog.Watchdog.watch = lambda self, now_ns: (watch(self, now_ns), looked.append(now_ns))
"""


def told(host: Host, text: str) -> None:
    """The host's standard error has a line with `text`, and only one."""
    host.child.expect(text, SECONDS)
    host("1")
    assert len([line for line in host.child.lines if text in line]) == 1, host.child.output


def test_one_handler_and_that_is_pyverbs_own(network: Network) -> None:
    """Nothing of the program's logging is changed: the lines go where it sends them, or where pyverbs sends its own."""
    a = network.host("a")
    b = network.host("b", package="pyverbs")
    ask = "import logging; names = 'level handlers filters'.split(); ep = Endpoint()\n"
    ask += "[str([getattr(logging.root, name) for name in names]), logging.lastResort is not None]"
    assert a(ask) == b(ask)
    ours = (
        "[name for name, it in logging.root.manager.loggerDict.items() if name.startswith('shiftverbs') and "
    )
    assert a(ours + "isinstance(it, logging.Logger) and (it.handlers or it.level or not it.propagate)]") == []


def test_no_backup_nic_at_all(network: Network) -> None:
    a = network.host("a", nics="soft0")
    a("ep, other = Endpoint(), Endpoint()")
    told(a, "soft0 has no backup NIC: QPs on it are not protected")


def test_a_peer_without_a_backup(network: Network) -> None:
    a, b = network.host("a"), network.host("b", nics="soft0")
    connect(a, b)
    told(a, "is not protected, 5 s after it was connected: the peer has not published its QP")
    told(b, "soft0 has no backup NIC")


def test_a_peer_without_shiftverbs(network: Network) -> None:
    a, b = network.host("a"), network.host("b", package="pyverbs")
    connect(a, b)
    told(a, "does it run shiftverbs, with the same etcd and job")


def test_etcd_is_away_and_comes_back(network: Network, etcd_server: EtcdServer) -> None:
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    etcd_server.stop()
    a, b = network.pair()
    told(a, "is not protected, 5 s after it was connected: etcd cannot be used")
    etcd_server.start()
    for host in (a, b):
        assert host("ep.qp.shift.wait_protected(40)"), host("ep.shift()")


def test_a_qp_that_is_protected_soon_says_nothing(network: Network) -> None:
    a, b = network.protected()
    b("[ep.recv(i) for i in range(2)]")
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1)")[0][:2] == [1, "SUCCESS"]
    for h in (a, b):
        h(AS_IF_LONG_AGO)
        wait_until(lambda h=h: h("len(looked)") > 2, what="the driver has looked again")
    assert [line for host in (a, b) for line in host.child.lines if "not protected" in line] == []


def why(host: Host, text: str) -> None:
    """`qp.shift.why` says it."""
    host(f"ep.wait({f'{text!r} in str(s.why)'!r}, 40)")


GONE = "the peer is gone: its entry left etcd at "


def test_a_peer_that_was_killed(network: Network) -> None:
    """Nothing is posted but receives, so nothing else would ever tell."""
    a, b = network.protected(setup="channel=True")
    a("ep.recv(1); ep.cq.req_notify()")
    b.child.signal(signal.SIGKILL)
    a.begin("ep.channel.get_cq_event(ep.cq)")
    a.child.expect(GONE + ".*none of its NICs answers pings.*", 40)
    a.child.expect("The QP stays as it is until a work request fails", 5)
    assert len([line for line in a.child.lines if GONE in line]) == 1, a.child.output


def test_why_says_that_the_peer_was_killed(network: Network, faults: Any) -> None:
    """Until its work fails the QP keeps its protection; then it says so as well."""
    a, b = network.protected()
    b.child.signal(signal.SIGKILL)
    why(a, GONE)
    assert a("ep.shift()['status']") == "PROTECTED"
    told(a, GONE)
    a("ep.post('SEND', wr_id=1)")
    assert a("ep.poll(1, 30)")[0][:2] == [1, "RETRY_EXC_ERR"]
    a("ep.wait(\"s.status == 'FAILED'\", 20)")
    assert "the peer's entry left etcd at " in a("ep.shift()['why']")
    told(a, "failover gave up: ")


def test_a_peer_that_lost_its_entry_is_not_gone(network: Network, etcd_server: EtcdServer) -> None:
    network.env["SHIFTVERBS_ETCD"] = etcd_server.endpoint
    a, b = network.protected()
    for key in etcd_server.items("/shiftverbs/"):
        etcd_server.delete(key)
    a("absence = ep.qp._shadow.connection.absence")
    wait_until(lambda: a("absence.entry") is not None, 20, "the entry is gone")
    a(AS_IF_LONG_AGO)
    # Of the pings of this and that, some are answered by now.
    wait_until(lambda: a("len(looked)") > 50, 20, "the driver has looked again")
    assert a("ep.shift()['why']") is None
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=2)")
    assert [h("ep.poll(1)")[0][:2] for h in (a, b)] == [[2, "SUCCESS"], [1, "SUCCESS"]]
    assert "gone" not in a.child.output


def test_a_peer_that_stands_still_may_be_gone(network: Network) -> None:
    a, b = network.protected()
    a("from shiftverbs.failover.qp import absence; absence.SILENT_NS = 0")
    b.child.signal(signal.SIGSTOP)
    try:
        why(a, "the peer may be gone: none of its NICs has answered a ping for ")
    finally:
        b.child.signal(signal.SIGCONT)
    a("ep.wait('s.why is None', 40)")
    assert a("ep.shift()['status']") == "PROTECTED"
    told(a, "the peer may be gone")
    b("ep.recv(1)")
    a("ep.post('SEND', wr_id=2)")
    assert [h("ep.poll(1)")[0][:2] for h in (a, b)] == [[2, "SUCCESS"], [1, "SUCCESS"]]


def test_a_peer_that_closes_its_qp_is_not_gone(network: Network) -> None:
    a, b = network.protected()
    a(AS_IF_LONG_AGO)
    b("ep.qp.close()")
    a("ep.wait(\"s.status == 'UNPROTECTED'\", 20)")
    assert a("ep.shift()['why']") == "the peer closed its QP"
    assert "gone" not in a.child.output


def test_a_peer_that_is_gone_does_not_come_back_by_our_own_cables(network: Network, faults: Any) -> None:
    """With all of our own ports down nobody can answer, and that is no answer."""
    a, b = network.protected()
    a("import logging; logging.getLogger('shiftverbs.driver').setLevel(logging.INFO)")
    b.child.signal(signal.SIGKILL)
    why(a, GONE)
    a.child.expect(GONE, 20)
    a(AS_IF_LONG_AGO)
    for change in (faults.down, faults.up):
        for nic in ("a/soft0", "a/soft1"):
            change(nic)
        a("looked.clear()")
        wait_until(lambda: a("len(looked)") > 20, 20, "the driver has looked again")
        assert GONE in str(a("ep.shift()['why']"))
    assert len([line for line in a.child.lines if "WARNING" in line and GONE in line]) == 1, a.child.output
    assert "answers again" not in a.child.output
