# SPDX-License-Identifier: BSD-3-Clause
"""Hostile and broken input from outside: the exchanger's values, control datagrams, the environment."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from harness import EtcdServer, wait_until
from hosts import HostError, Network


def works(a: Any, b: Any) -> None:
    """A message gets through."""
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]


BAD_VALUES = {
    "not JSON": b"\xff\xfe{",
    "a list": b"[]",
    "another version": json.dumps({"version": 99, "kind": "qp"}).encode(),
    "huge": b'{"version": 2, "kind": "qp", "x": "' + b"a" * 100_000 + b'"}',
    "another kind": json.dumps({"version": 2, "kind": "mr"}).encode(),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_bad_value_under_the_peers_key(
    network: Network, shared_etcd: EtcdServer, job: str, faults: Any, what: str
) -> None:
    """The peer runs plain pyverbs; somebody else writes rubbish where its entry would be."""
    a, b = network.host("a"), network.host("b", "pyverbs")
    names = [h("ep = Endpoint(); ep.name()") for h in (a, b)]
    key = f"/shiftverbs/{job}/qp/{names[1]['gid']}/{names[1]['qpn']}"
    shared_etcd.put(key, BAD_VALUES[what])
    b(f"ep.connect({names[0]!r})")
    a(f"ep.connect({names[1]!r})")
    wait_until(lambda: key in (a("ep.shift()['why']") or ""), what="why names the key")
    assert a("ep.shift()['status']") == "PAIRING"
    works(a, b)


def test_entry_of_another_peer(network: Network, shared_etcd: EtcdServer, job: str) -> None:
    """A well-formed entry that names somebody else as its peer, as a ghost of a reused QPN would, pairs with nobody."""
    a, b = network.protected()
    key, value = next(
        (k, v)
        for k, v in shared_etcd.items(f"/shiftverbs/{job}/qp/").items()
        if k.endswith(f"/{b('ep.qp.qp_num')}")
    )
    ghost = json.loads(value)
    c, d = network.host("c"), network.host("d", "pyverbs")
    names = [h("ep = Endpoint(); ep.name()") for h in (c, d)]
    ghost["default"] = {"gid": names[1]["gid"], "lid": 0, "qpn": names[1]["qpn"]}
    shared_etcd.put(f"/shiftverbs/{job}/qp/{names[1]['gid']}/{names[1]['qpn']}", json.dumps(ghost))
    d(f"ep.connect({names[0]!r})")
    c(f"ep.connect({names[1]!r})")
    wait_until(lambda: "names another QP" in (c("ep.shift()['why']") or ""), what="refused")
    works(c, d)
    works(a, b)
    assert key


def test_malformed_control_datagrams(
    network: Network, shared_etcd: EtcdServer, job: str, faults: Any
) -> None:
    """Anybody on the fabric who knows QPN and Q_Key may send anything: counted, logged, nothing else.

    Where he knows the peer's secrets too, what does not say what a message says is counted and logged all the same.
    """
    a, b = network.protected()
    records = [json.loads(v) for v in shared_etcd.items(f"/shiftverbs/{job}/qp/").values()]
    target = next(r for r in records if r["default"]["qpn"] == b("ep.qp.qp_num"))
    source = next(r for r in records if r is not target)
    c = network.host("c", SHIFTVERBS_ETCD=None)
    began = time.monotonic()
    c(
        f"""
import os, random
from shiftverbs import _nic; from shiftverbs.protocol import codec as control, seal
from shiftverbs.protocol.messages import *
ends = {target["control"]!r}
address = PairAddress(bytes(16), 0, 1, 2, 3)
good = control.Entry({int(target["life"], 16)}, 12345, Sync(99, 1, Phase.ABORT, 1, False, address, 0))
rng = random.Random(5)
for end, their_end in zip(ends, {source["control"]!r}):
    # Numbers a little ahead of the peer's own, which are still taken afterwards.
    theirs = seal.Seals(*(bytes.fromhex(each["secret"]) for each in (their_end, end)), 500)
    def under_seal(data):
        data = data[:4] + whole[4:12] + theirs.next_number.to_bytes(8, "big") + data[20:-seal.TAG_BYTES]
        return theirs.seal(data)
    whole = control.encode([good], theirs)[0]
    rubbish = [b"", b"x", os.urandom(64), whole, whole[:-1], whole + b"y", bytes(1024)] + [whole] * 20
    damaged = [bytes(x ^ (rng.random() < .02) * rng.randrange(256) for x in whole) for _ in range(200)]
    rubbish += damaged + [under_seal(x) for x in damaged] + [b"SV\\x01\\x01" + bytes(80)]
    ctx = _nic.open_device(end["device"])
    port = _nic.ControlPort(ctx, 1, 3, 256)
    ah = port.create_ah(dgid=bytes.fromhex(end["gid"].replace(":", "")))
    for data in rubbish:
        port.send(ah, end["qpn"], end["qkey"], data)
"""
    )
    wait_until(
        lambda: b(
            "c = ep.qp._shadow.connection.driver.channel;"
            "min(c.malformed, c.forged, c.replayed) > 20 and c.unknown > 2 and c.other_version > 1"
        ),
        what="counted",
    )
    for h in (a, b):
        assert h("ep.shift()['status']") == "PROTECTED"
    works(a, b)
    faults.down("a/soft0")
    works(a, b)
    assert a("ep.shift()['path']") == "soft1"
    log = [line for line in b.child.output.splitlines() if "malformed control datagram" in line]
    assert 0 < len(log) <= 2 * (time.monotonic() - began + 1), "one a second and NIC"


def test_unknown_backup_device(network: Network) -> None:
    network.env["SHIFTVERBS_BACKUP"] = "soft0=mlx5_7"
    a, b = network.pair()
    assert a("ep.shift()['status']") == "UNPROTECTED"
    for name in ("mlx5_7", "soft0", "soft1"):
        assert name in a("ep.shift()['why']")
    works(a, b)


def test_unknown_backup_device_where_protection_is_required(network: Network) -> None:
    a = network.host("a", SHIFTVERBS_BACKUP="soft0=mlx5_7", SHIFTVERBS_REQUIRE="1")
    with pytest.raises(HostError, match="mlx5_7"):
        a("ep = Endpoint()")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SHIFTVERBS_PEER_DEADLINE_MS", "soon"),
        ("SHIFTVERBS_ETCD", "http://"),
        ("SHIFTVERBS_DISABLE", "perhaps"),
    ],
)
def test_bad_environment_value(network: Network, variable: str, value: str) -> None:
    """Named in a warning and in qp.shift, and the program runs as with pyverbs."""
    network.env[variable] = value
    a, b = network.pair()
    assert a("ep.shift()['status']") == "UNPROTECTED"
    assert variable in a("ep.shift()['why']") and value in a("ep.shift()['why']")
    assert variable in a.child.output
    works(a, b)


def test_unknown_variable_is_named(network: Network) -> None:
    network.env["SHIFTVERBS_PEER_DEADLIN_MS"] = "5"
    a, _b = network.pair()
    assert "SHIFTVERBS_PEER_DEADLIN_MS" in a.child.output
    assert "SHIFTVERBS_PEER_DEADLINE_MS" in a.child.output


def test_disabled(network: Network) -> None:
    network.env["SHIFTVERBS_DISABLE"] = "1"
    a, b = network.pair()
    assert a("ep.shift()['status']") == "UNPROTECTED"
    assert "SHIFTVERBS_DISABLE" in a("ep.shift()['why']")
    works(a, b)
