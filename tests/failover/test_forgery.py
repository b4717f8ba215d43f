# SPDX-License-Identifier: BSD-3-Clause
"""Somebody on the fabric who reads along: he knows addresses, Q_Keys and every datagram, and none of the secrets."""

from __future__ import annotations

import time
from typing import Any

from harness import wait_until
from hosts import AWAY, HOME, Host, Network, connect, connect_again

from shiftverbs.protocol.messages import Phase

#: Everything that a host says is kept in `said`, as who reads along would keep it.
LISTEN = """
from shiftverbs.protocol import codec as control
said, meant, encode = [], [], control.encode

def heard(*args):
    meant.extend(args[0])
    for datagram in encode(*args):
        said.append(datagram)
        yield datagram

control.encode = heard
channel = lambda: ep.qp._shadow.connection.driver.channel
"""
COUNTS = "c = channel(); [c.malformed, c.other_version, c.forged, c.replayed]"
RECEIVED = "sum(port.received for port in channel()._ports.values())"
ENDS = "[[end.device, end.gid, end.qpn, end.qkey] for end in ep.qp._shadow.connection.pairing._mine.control]"


def listened_to(network: Network) -> tuple[Host, Host]:
    """Two hosts whose datagrams are kept, protected."""
    a, b = network.host("a"), network.host("b")
    for h in (a, b):
        h(LISTEN)
    connect(a, b)
    for h in (a, b):
        assert h("ep.qp.shift.wait_protected(20)"), h("ep.shift()")
    return a, b


def stranger(network: Network, ends: list[Any]) -> Host:
    """A third host, with a function that sends datagrams to all control ports of one of the two."""
    c = network.host("c", SHIFTVERBS_ETCD=None)
    c(f"""
from shiftverbs import _nic; from shiftverbs.protocol import codec as control
from shiftverbs.protocol.messages import *
ways = []
for device, gid, qpn, qkey in {ends!r}:
    port = _nic.ControlPort(_nic.open_device(device), 1, 3, 256)
    ways.append((port, port.create_ah(dgid=bytes.fromhex(gid.replace(":", ""))), qpn, qkey))

def say(datagrams):
    sent = 0
    for port, ah, qpn, qkey in ways:
        for data in datagrams:
            deadline = time.monotonic() + 5
            while not port.send(ah, qpn, qkey, data) and time.monotonic() < deadline:
                pass
            sent += 1
    return sent
""")
    return c


def works(a: Host, b: Host) -> None:
    """A message gets through."""
    b("ep.recv(1)")
    a("ep.post('SEND', length=5, wr_id=7)")
    assert a("ep.poll(1)")[0][:2] == [7, "SUCCESS"]
    assert b("ep.poll(1)")[0][:3] == [1, "SUCCESS", 5]


def test_what_is_forged_does_nothing(network: Network, faults: Any) -> None:
    """ABORT, BYE, READY, START, and answers to pings, with all that can be read on the wire, and no seal of theirs."""
    a, b = listened_to(network)
    c = stranger(network, b(ENDS))
    wait_until(lambda: a("len({each[4:12] for each in said})") == 2, what="something is said on both ways")
    said = [bytes.fromhex(each) for each in a("[each.hex() for each in said]")]
    # The header is as the peer's, the number one that comes next; the QPs' names stand behind it.
    links = {data[4:12] for data in said}
    number = max(int.from_bytes(data[12:20], "big") for data in said)
    message = next(data for data in said if data[20:36] != bytes(16))
    names = [int.from_bytes(message[at : at + 8], "big") for at in (20, 28)]
    sent = c(f"""
import struct
nobody = PairAddress(bytes(16), 0, 1, 2, 3)
where = [(epoch, target) for epoch in (0, 1, 99) for target in (0, 1)]
messages = [Sync(*each, phase, 1, False, nobody, 0) for each in where for phase in Phase]
messages += [Arm(ArmStep.REQ, 0, 1, 77, nobody), Move(MoveStep.MOVE, 0, 1, 1, 1, 0), Prefer(5, 1)]
entries = [control.Entry({names[0]}, {names[1]}, each) for each in messages]
entries += [control.Entry(0, 0, control.Ping(n, True)) for n in range(5)]
say([
    b"SV" + bytes([2, 1]) + link + struct.pack("!Q", {number} + n) + control.encode_entry(entry) + {said[-1][-12:]!r}
    for n, entry in enumerate(entries, 1) for link in {links!r}
])
""")
    began = time.monotonic()
    # Each port knows one of the two links.
    wait_until(lambda: b(COUNTS)[2] + b("channel().unknown") >= sent, what="all of it has arrived")
    assert b(COUNTS) == [0, 0, sent // 2, 0]
    for h in (a, b):
        shift = h("ep.shift()")
        assert (
            shift["status"] == "PROTECTED"
            and shift["counters"]["switches"] == shift["counters"]["aborts"] == 0
        )
    b.child.expect("forged control datagram", 20)  # its output is read in a thread of its own
    lines = [line for line in b.child.output.splitlines() if "forged control datagram" in line]
    assert len(lines) <= 2 * (1 + time.monotonic() - began), "one a second and NIC"
    works(a, b)
    faults.down("a/soft0")
    works(a, b)
    for h in (a, b):
        h(f"ep.wait({AWAY!r})")


def test_what_is_replayed_does_nothing(network: Network, faults: Any) -> None:
    """All that was said in an earlier epoch, and in an earlier life of the QP whose end was an ABORT or a BYE."""
    a, b = listened_to(network)
    works(a, b)
    connect_again(a, b)
    faults.down("a/soft0")
    works(a, b)
    faults.up("a/soft0")
    for h in (a, b):
        h(f"ep.wait({HOME!r}, 20)")
    c = stranger(network, b(ENDS))
    said = a("[each.hex() for each in said]")
    phases = set(a("[getattr(each.message, 'phase', 0) for each in meant]"))
    assert {Phase.START, Phase.READY, Phase.BYE} <= phases
    switches = [h("ep.shift()['counters']['switches']") for h in (a, b)]
    # What was lost on the way may be taken now, as if it were late; what arrived is not taken again.
    for time_over in range(2):
        before, count = b(COUNTS), b(RECEIVED)
        sent = c(f"say([bytes.fromhex(each) for each in {said!r}])")
        wait_until(lambda count=count, sent=sent: b(RECEIVED) - count >= sent, what="all of it has arrived")  # type: ignore[misc]
        malformed, other, forged, replayed = (now - then for now, then in zip(b(COUNTS), before, strict=True))
        assert malformed == other == forged == 0
        # On one port it is what was heard there, on the other it is from nobody who is known.
        assert replayed == sent // 2 if time_over else replayed > sent // 4
    for h, count in zip((a, b), switches, strict=True):
        shift = h("ep.shift()")
        assert shift["status"] == "PROTECTED" and shift["counters"]["switches"] == count
        assert shift["state"] == shift["recv_state"] == "DEFAULT"
    works(a, b)
    faults.down("a/soft0")
    works(a, b)
