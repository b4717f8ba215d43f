# SPDX-License-Identifier: BSD-3-Clause
"""What etcd, brokers, the control channel and memory cost for many hosts: arithmetic on measured sizes.

    python -m benchmarks.scale

prints the tables of docs/scale.md. Nothing is run: the constants were measured on two processes, and tests hold those
that code decides (tests/benchmarks/test_scale.py).
"""

from __future__ import annotations

from dataclasses import dataclass

#: NICs of a host, a process on each, QPs of a process, and NICs that back up one.
NICS, QPS, BACKUPS = 8, 64, 1
#: A QP's entry in etcd, key and value, in bytes; how often it is written until the QP is PROTECTED.
ENTRY, WRITES = 807, 2
#: What etcd's file grows by for a QP, before it is compacted: both revisions, and its index.
FILE = 1920
#: Operations in one of etcd's transactions (its default of --max-txn-ops).
OPERATIONS = 128
#: Renewals of a process's lease in a second (lease_ttl_s = 10).
RENEWALS = 0.3
#: The datagrams of a ping (a second, each way, on each pair of NICs that two processes share) and of one message, and
#: how much longer each further message of a datagram makes it, in bytes, without RoCE's headers.
PING, MESSAGE, FURTHER = 59, 131, 99
#: RoCE's: Ethernet, IP, UDP, BTH, DETH, ICRC.
HEADERS = 14 + 20 + 8 + 12 + 8 + 4
#: Messages of both sides in a SWITCH, of one QP, and in coming home; how many share a datagram at most.
SWITCH, HOME, TOGETHER = 9, 12, 11
#: Pings in a second where QPs are away from home, on each of their pairs of NICs (else one).
AWAY_PINGS = 20
#: Of a protected QP with room for 4 + 4 WRs, beyond pyverbs' own, in bytes.
QP_MEMORY = 33_000


@dataclass(frozen=True)
class Shape:
    """Who talks with whom. peers: processes that one process has QPs with; watched: how often each entry's writes are
    sent to a broker that watches them."""

    name: str
    peers: int
    watched: int


#: Rings, as collectives make them: 32 QPs to each neighbour, so that a broker watches its whole directory.
RING = Shape("ring", 2, 2)


def mesh(hosts: int) -> Shape:
    """Each QP of a process has another process at its end, as long as there are hosts."""
    return Shape("mesh", min(QPS, hosts - 1), 1)


@dataclass(frozen=True)
class Cost:
    """Of a job; bytes and counts, rates in a second."""

    qps: int
    live: int
    """What etcd holds."""
    file: int
    """Its file, behind a set-up storm and not compacted."""
    transactions: int
    """Of writes, at the least."""
    sent: int
    """What etcd sends to brokers in the storm: each entry read once, and its changes."""
    renewals: float
    pings: float
    """Of a process, sent."""
    ping_bits: float
    """Of a NIC, sent, answers included."""
    away_pings: float
    """Of a process, sent, as long as its NIC or its rail is dead."""
    away_bits: float
    """Of the NIC that is left, which is another process's too, sent, answers included."""
    rail_messages: int
    """Of a process and its peers, all told, when its NIC dies."""
    rail_datagrams: int
    """At least."""
    rail_bytes: int
    home_messages: int
    """When it is back."""
    memory: int
    """Of a host, for its QPs."""


def cost(hosts: int, shape: Shape) -> Cost:
    """What so many hosts cost.

    :param hosts: how many
    :param shape: who talks with whom
    """
    processes = hosts * NICS
    qps = processes * QPS
    pings = shape.peers * (1 + BACKUPS)
    each = QPS // shape.peers  # QPs that share datagrams
    datagrams = -(-each // TOGETHER) * SWITCH
    size = MESSAGE + FURTHER * (min(each, TOGETHER) - 1) + HEADERS
    return Cost(
        qps=qps,
        live=qps * ENTRY,
        file=qps * FILE,
        transactions=-(-qps * WRITES // OPERATIONS),
        sent=qps * ENTRY * (1 + WRITES * shape.watched),
        renewals=processes * RENEWALS,
        pings=pings,
        ping_bits=pings * 2 * (PING + HEADERS) * 8,
        away_pings=pings * AWAY_PINGS,
        away_bits=shape.peers * (AWAY_PINGS + 1) * 2 * (PING + HEADERS) * 8,
        rail_messages=QPS * SWITCH,
        rail_datagrams=shape.peers * datagrams,
        rail_bytes=shape.peers * datagrams * size,
        home_messages=QPS * HOME,
        memory=NICS * QPS * QP_MEMORY,
    )


def _bytes(count: float) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


ROWS = {
    "QPs": lambda c: f"{c.qps:,}",
    "etcd holds": lambda c: _bytes(c.live),
    "its file behind the set-up storm": lambda c: _bytes(c.file),
    "write transactions, at least": lambda c: f"{c.transactions:,}",
    "etcd sends to brokers": lambda c: _bytes(c.sent),
    "leases renewed a second": lambda c: f"{c.renewals:,.0f}",
    "pings of a process a second": lambda c: f"{c.pings:,.0f}",
    "pings and answers on a NIC": lambda c: f"{c.ping_bits / 1000:,.3g} kbit/s",
    "a NIC dies: messages, both sides": lambda c: f"{c.rail_messages:,}",
    "their datagrams, at least": lambda c: f"{c.rail_datagrams:,} ({_bytes(c.rail_bytes)})",
    "until it is back: pings of a process a second": lambda c: f"{c.away_pings:,.0f}",
    "and answers, on the NIC that is left": lambda c: f"{c.away_bits / 1000:,.0f} kbit/s",
    "it is back: messages, both sides": lambda c: f"{c.home_messages:,}",
    "memory of a host's QPs": lambda c: _bytes(c.memory),
}


def table() -> str:
    """The table, in Markdown."""
    sizes = (8, 64, 1024)
    columns = [(f"{hosts} hosts, {s.name}", cost(hosts, s)) for hosts in sizes for s in (RING, mesh(hosts))]
    lines = ["| | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, show in ROWS.items():
        lines.append(f"| {name} | " + " | ".join(show(each) for _, each in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
