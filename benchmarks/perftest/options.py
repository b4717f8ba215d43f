# SPDX-License-Identifier: BSD-3-Clause
"""The command line of the ib_* programs: perftest's names and defaults, as far as they apply here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_PORT = 18515
#: Above this many iterations perftest does not look for the peak.
PEAK_LIMIT = 20000
#: Sizes above this get a completion each unless -Q says otherwise; below, one in 100.
SMALL_SIZE = 8192
ATOMIC_TYPES = ("FETCH_AND_ADD", "CMP_AND_SWAP")
#: Atomics work on 64 bits.
ATOMIC_SIZE = 8


@dataclass(frozen=True)
class Test:
    """What distinguishes one program of the suite.

    :param name: the program, for example ib_write_bw
    :param title: its headline
    :param verb: write, send, read or atomic
    :param latency: measures latency, not bandwidth
    """

    name: str
    title: str
    verb: str
    latency: bool = False

    @property
    def one_sided(self) -> bool:
        """True if the server only waits: READ and atomics, whose figures are whole round trips."""
        return self.verb in ("read", "atomic")


@dataclass(frozen=True)
class Options:
    """Parsed and checked options; sizes in bytes, times in seconds unless named otherwise."""

    test: Test
    host: str | None
    module: str
    device: str | None
    ib_port: int
    gid_index: int | None
    size: int
    all_sizes: bool
    iters: int
    duration_s: float | None
    margin_s: float
    tx_depth: int
    num_qps: int
    idle_qps: int
    outs: int | None
    atomic: str
    rx_depth: int
    cq_mod: int | None
    inline_size: int
    mtu: int | None
    qp_timeout: int
    retry_count: int
    port: int
    use_imm: bool
    bidirectional: bool
    no_peak: bool
    gbits: bool
    unsorted_out: bool
    histogram: bool
    protected: bool

    @property
    def is_server(self) -> bool:
        """True for the side started without a host."""
        return self.host is None

    @property
    def uses_receives(self) -> bool:
        """True if each message consumes a receive at the other side."""
        return self.test.verb == "send" or self.use_imm

    @property
    def title(self) -> str:
        """The headline."""
        title = self.test.title.format(atomic=self.atomic)
        return title.replace(" BW ", " Bidirectional BW ") if self.bidirectional else title

    @property
    def sizes(self) -> list[int]:
        """Message sizes to run, in order."""
        return [2**power for power in range(1, 24)] if self.all_sizes else [self.size]

    def moderation(self, size: int) -> int:
        """Return how many sends share one completion for messages of this size."""
        if self.cq_mod is not None:
            return self.cq_mod
        return 1 if size > SMALL_SIZE else min(100, self.tx_depth)


def parse(test: Test, argv: Sequence[str] | None = None) -> Options:
    """Parse a command line for one program; exits with a usage message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"{test.name}.py",
        description=f"{test.title}: a server without a host, a client of the server at <host> with one.",
    )
    add = parser.add_argument
    add("host", nargs="?", help="server to connect to")
    add(
        "--module",
        choices=("pyverbs", "shiftverbs"),
        default="shiftverbs",
        help="package to measure (default %(default)s)",
    )
    add("-d", "--ib-dev", dest="device", metavar="DEV", help="RDMA device (default: the first)")
    add(
        "-i",
        "--ib-port",
        type=int,
        default=1,
        metavar="PORT",
        help="port of the device (default %(default)s)",
    )
    add(
        "-x",
        "--gid-index",
        type=int,
        metavar="INDEX",
        help="GID index (default: none on InfiniBand, 0 on Ethernet)",
    )
    if test.verb != "atomic":
        add(
            "-s",
            "--size",
            type=int,
            default=2 if test.latency else 65536,
            help="message size in bytes (default %(default)s)",
        )
        add("-a", "--all", dest="all_sizes", action="store_true", help="run sizes from 2 to 2^23")
    else:
        add(
            "-A",
            "--atomic_type",
            dest="atomic",
            choices=ATOMIC_TYPES,
            default=ATOMIC_TYPES[0],
            help="which one (default %(default)s)",
        )
    add(
        "-n",
        "--iters",
        type=int,
        default=1000 if test.latency else 5000,
        help="messages, at least 5 (default %(default)s)",
    )
    add(
        "-D",
        "--duration",
        type=float,
        metavar="SECONDS",
        help="run for a time instead of a number of messages",
    )
    add(
        "-f",
        "--margin",
        type=float,
        metavar="SECONDS",
        help="with -D: not measured at both ends (default 2, at most D/4)",
    )
    add(
        "-t",
        "--tx-depth",
        type=int,
        default=1 if test.latency else 128,
        help="send queue depth (default %(default)s)",
    )
    add(
        "--idle-qps",
        type=int,
        default=0,
        metavar="COUNT",
        help="further connected QPs without traffic (default %(default)s)",
    )
    if test.one_sided:
        add(
            "-o",
            "--outs",
            type=int,
            metavar="COUNT",
            help="READs and atomics outstanding at once (default: what the device can)",
        )
    if test.verb in ("send", "write") and (test.verb == "send" or not test.latency):
        add(
            "-r",
            "--rx-depth",
            type=int,
            default=512,
            help="receive queue depth where receives are used (default %(default)s)",
        )
    if not test.latency:
        add("-q", "--qp", dest="num_qps", type=int, default=1, help="QPs (default %(default)s)")
        add("-Q", "--cq-mod", type=int, help="one completion for so many sends (default 100, 1 above 8 KiB)")
        add("-N", "--noPeak", dest="no_peak", action="store_true", help="do not look for the peak")
        add(
            "--report_gbits",
            dest="gbits",
            action="store_true",
            help="report Gb/sec (10^9) instead of MB/sec (2^20)",
        )
        if test.verb in ("write", "read"):
            add(
                "-b",
                "--bidirectional",
                action="store_true",
                help="both sides send at once; the figures are the sum of both directions",
            )
        if test.verb == "write":
            add(
                "--use-imm",
                action="store_true",
                help="RDMA WRITE with immediate, which completes at the server too",
            )
    else:
        add(
            "-H",
            "--report-histogram",
            dest="histogram",
            action="store_true",
            help="print every result, sorted",
        )
        add(
            "-U",
            "--report-unsorted",
            dest="unsorted_out",
            action="store_true",
            help="print every result in order",
        )
    if not test.one_sided:
        add(
            "-I",
            "--inline_size",
            type=int,
            default=0,
            help="largest message sent inline, in bytes (default %(default)s)",
        )
    add("-m", "--mtu", type=int, choices=(256, 512, 1024, 2048, 4096), help="path MTU (default: the port's)")
    add(
        "-u", "--qp-timeout", type=int, default=14, help="ACK timeout: 4.096 usec * 2^n (default %(default)s)"
    )
    add("--retry_count", type=int, default=7, help="transport retries (default %(default)s)")
    add("-p", "--port", type=int, default=DEFAULT_PORT, help="TCP port of the server (default %(default)s)")
    add(
        "-F",
        "--CPU-freq",
        action="store_true",
        help="accepted for perftest's sake: frequencies are never checked",
    )
    add(
        "--protected",
        action="store_true",
        help="shiftverbs: fail unless the QP is PROTECTED before measuring",
    )
    values = vars(parser.parse_args(argv))
    del values["CPU_freq"]
    values.setdefault("size", ATOMIC_SIZE)
    for name in ("no_peak", "gbits", "use_imm", "bidirectional", "histogram", "unsorted_out", "all_sizes"):
        values.setdefault(name, False)
    for name in ("rx_depth", "num_qps"):
        values.setdefault(name, 1)
    for name in ("cq_mod", "outs"):
        values.setdefault(name, None)
    values.setdefault("inline_size", 0)
    values.setdefault("atomic", ATOMIC_TYPES[0])

    def require(condition: bool, complaint: str) -> None:
        if not condition:
            parser.error(complaint)

    require(1 <= values["ib_port"] <= 255, "-i: a port is 1 to 255")
    require(1 <= values["size"] <= 2**30, "-s: a size is 1 to 2^30")
    require(values["iters"] >= 5, "-n: at least 5")
    require(1 <= values["tx_depth"] <= 32768, "-t: a depth is 1 to 32768")
    require(1 <= values["rx_depth"] <= 32768, "-r: a depth is 1 to 32768")
    require(1 <= values["num_qps"] <= 16384, "-q: 1 to 16384 QPs")
    require(0 <= values["idle_qps"] <= 65536, "--idle-qps: 0 to 65536")
    require(values["outs"] is None or 1 <= values["outs"] <= 255, "-o: 1 to 255")
    require(0 < values["port"] < 65536, "-p: a TCP port is 1 to 65535")
    require(0 <= values["qp_timeout"] <= 31, "-u: a timeout is 0 to 31")
    require(0 <= values["retry_count"] <= 7, "--retry_count: 0 to 7")
    require(values["inline_size"] >= 0, "-I: not negative")
    require(values["gid_index"] is None or 0 <= values["gid_index"] <= 255, "-x: an index is 0 to 255")
    duration = values.pop("duration")
    margin = values.pop("margin")
    require(duration is None or duration > 0, "-D: more than 0")
    if margin is None:
        margin = min(2.0, (duration or 0.0) / 4)
    require(
        margin >= 0 and (duration is None or duration > 2 * margin), "-f: twice the margin must be below -D"
    )
    require(duration is None or not values["all_sizes"], "-D and -a exclude each other")
    require(
        not values["protected"] or values["module"] == "shiftverbs", "--protected needs --module shiftverbs"
    )
    require(
        not (values["bidirectional"] and values["use_imm"]),
        "-b and --use-imm exclude each other: no receives",
    )
    moderation = values["cq_mod"]
    require(moderation is None or 1 <= moderation <= values["tx_depth"], "-Q: 1 to the depth of -t")
    return Options(test=test, duration_s=duration, margin_s=margin, **values)
