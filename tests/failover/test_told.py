# SPDX-License-Identifier: BSD-3-Clause
"""A program whose QPs are not protected is told so, once, with the likely cause, without having set up any logging."""

from __future__ import annotations

from harness import EtcdServer
from hosts import Host, Network

SECONDS = 15


def told(host: Host, text: str) -> None:
    """The host's standard error has a line with `text`, and only one."""
    host.child.expect(text, SECONDS)
    host("1")
    assert len([line for line in host.child.lines if text in line]) == 1, host.child.output


def test_no_backup_nic_at_all(network: Network) -> None:
    a = network.host("a", nics="soft0")
    a("ep, other = Endpoint(), Endpoint()")
    told(a, "soft0 has no backup NIC: QPs on it are not protected")


def test_a_peer_without_a_backup(network: Network) -> None:
    a, b = network.host("a"), network.host("b", nics="soft0")
    for host, other in zip((a, b), [h("ep = Endpoint(); ep.name()") for h in (b, a)], strict=True):
        host(f"ep.connect({other!r})")
    told(a, "is not protected, 5 s after it was connected: the peer has not published its QP")
    told(b, "soft0 has no backup NIC")


def test_a_peer_without_shiftverbs(network: Network) -> None:
    a, b = network.host("a"), network.host("b", package="pyverbs")
    for host, other in zip((a, b), [h("ep = Endpoint(); ep.name()") for h in (b, a)], strict=True):
        host(f"ep.connect({other!r})")
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
    assert [line for host in (a, b) for line in host.child.lines if "not protected" in line] == []
