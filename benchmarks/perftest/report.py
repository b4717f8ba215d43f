# SPDX-License-Identifier: BSD-3-Clause
"""perftest's output: header, addresses, columns, and the statistics in them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.perftest.exchange import Destination
from benchmarks.perftest.options import Options, Test
from benchmarks.perftest.verbs import Endpoint

LINE = "-" * 87
BW_COLUMNS = " #bytes     #iterations    BW peak[{0}/sec]    BW average[{0}/sec]   MsgRate[Mpps]"
LATENCY_COLUMNS = (
    " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]"
    "   99% percentile[usec]   99.9% percentile[usec] "
)
LATENCY_DURATION_COLUMNS = " #bytes        #iterations       t_avg[usec]    tps average"


def header(endpoint: Endpoint, moderation: int) -> str:
    """Return the lines between the title and the addresses."""
    options = endpoint.options
    lines = [
        LINE,
        f"{'':20}{options.title}",
        f" Dual-port       : OFF\t\tDevice         : {endpoint.device_name}",
        f" Number of qps   : {options.num_qps}\t\tTransport type : IB",
        " Connection type : RC\t\tUsing SRQ      : OFF",
        " PCIe relax order: OFF",
        " ibv_wr* API     : OFF",
    ]
    if not options.is_server or options.test.latency or options.bidirectional:
        lines.append(f" TX depth        : {options.tx_depth}")
    if options.uses_receives:
        lines.append(f" RX depth        : {options.rx_depth}")
    if not options.test.latency:
        lines.append(f" CQ Moderation   : {moderation}")
    lines += [f" Mtu             : {endpoint.mtu}[B]", f" Link type       : {endpoint.link}"]
    if endpoint.gid_index is not None:
        lines.append(f" GID index       : {endpoint.gid_index}")
    if options.test.one_sided:
        lines.append(f" Outstand reads  : {endpoint.outs}")
    else:
        lines.append(f" Max inline data : {options.inline_size}[B]")
    if options.idle_qps:
        lines.append(f" Idle qps        : {options.idle_qps}")
    lines += [
        " rdma_cm QPs\t : OFF",
        " Data ex. method : Ethernet",
        f" Module          : {options.module}",
        LINE,
    ]
    return "\n".join(lines)


def c_hex(value: int, width: int) -> str:
    """Return a number as C's %#0<width>x prints it: 0 has no prefix."""
    return f"{value:#0{width}x}" if value else "0" * width


def address(who: str, side: Destination, test: Test) -> str:
    """Return the line (two with a GID) that describes one side, as far as it matters to this test."""
    text = f" {who} address: LID {c_hex(side.lid, 4)} QPN {c_hex(side.qpn, 6)} PSN {c_hex(side.psn, 6)}"
    if test.verb == "read":
        text += f" OUT {c_hex(side.outs, 4)}"
    if test.verb not in ("send", "atomic"):
        text += f" RKey {c_hex(side.rkey, 8)} VAddr {c_hex(side.vaddr, 16)}"
    if any(side.gid):
        text += "\n GID: " + ":".join(f"{byte:02d}" for byte in side.gid)
    return text


@dataclass(frozen=True)
class Bandwidth:
    """One row of a bandwidth table.

    :param size: message size in bytes
    :param iters: messages counted
    :param elapsed_s: time for them in seconds
    :param peak_s: least average time of one message over any stretch, seconds; 0 if not measured
    """

    size: int
    iters: int
    elapsed_s: float
    peak_s: float = 0.0

    def with_other_direction(self, other: Bandwidth) -> Bandwidth:
        """Return the row of -b: as in perftest our own iterations, and the sums of both averages and peaks."""
        elapsed = self.iters / (self.iters / self.elapsed_s + other.iters / other.elapsed_s)
        both = self.peak_s and other.peak_s
        peak = 1 / (1 / self.peak_s + 1 / other.peak_s) if both else 0.0
        return Bandwidth(self.size, self.iters, elapsed, peak)

    def encode(self) -> str:
        """Return one line for the other side."""
        return f"{self.size} {self.iters} {self.elapsed_s!r} {self.peak_s!r}"

    @classmethod
    def decode(cls, line: str) -> Bandwidth:
        """Parse the other side's line."""
        size, iters, elapsed, peak = line.split()
        return cls(int(size), int(iters), float(elapsed), float(peak))

    def row(self, gbits: bool) -> str:
        """Return the row as perftest prints it."""
        unit = 1e9 / 8 if gbits else 2**20
        rate = self.iters / self.elapsed_s
        peak = self.size / self.peak_s / unit if self.peak_s else 0.0
        average = rate * self.size / unit
        return (
            f" {self.size:<7}    {self.iters:<10}       {peak:<7.2f}            {average:<7.2f}"
            f"\t\t   {rate / 1e6:<7.6f}"
        )


def peak_time(posted_ns: Sequence[int], completed_ns: Sequence[int]) -> float:
    """Return the least average time in seconds of one message over any stretch of consecutive ones.

    The time of a stretch is from the posting of its first message to the completion of its last. perftest
    compares all pairs; here Dinkelbach's iteration finds the same minimum in a few linear passes.

    :param posted_ns: when each message was posted
    :param completed_ns: when each was seen completed
    """
    if not posted_ns:
        return 0.0
    best = (completed_ns[-1] - posted_ns[0]) / len(posted_ns)
    while True:
        # Over i <= j, the least of (completed[j] - posted[i]) - best * (j + 1 - i), split by index.
        least = earliest = math.inf
        first = last = start = 0
        for index, (begin, end) in enumerate(zip(posted_ns, completed_ns, strict=True)):
            if best * index - begin < earliest:
                earliest, start = best * index - begin, index
            if end - best * (index + 1) + earliest < least:
                least, first, last = end - best * (index + 1) + earliest, start, index
        better = (completed_ns[last] - posted_ns[first]) / (last + 1 - first)
        if better >= best:
            return best / 1e9
        best = better


@dataclass(frozen=True)
class Latency:
    """One row of a latency table.

    :param size: message size in bytes
    :param trips_us: the half (READ, atomic: whole) round trips in microseconds, in order
    :param whole: they are whole ones
    """

    size: int
    trips_us: Sequence[float]
    whole: bool = False

    def row(self) -> str:
        """Return the row as perftest prints it."""
        ordered = sorted(self.trips_us)
        count = len(ordered)

        def percentile(share: float) -> float:
            return ordered[min(count - 1, math.ceil(count * share) - 1)]

        return (
            f" {self.size:<7} {count}          {ordered[0]:<7.2f}        {ordered[-1]:<7.2f}      "
            f"{statistics.median(ordered):<7.2f}  \t       {statistics.fmean(ordered):<7.2f}     \t"
            f"{statistics.pstdev(ordered):<7.2f}\t\t{percentile(0.99):<7.2f} \t\t{percentile(0.999):<7.2f}"
        )

    def duration_row(self) -> str:
        """Return the row of a run by time, as perftest prints it."""
        average = statistics.fmean(self.trips_us)
        rate = 1e6 / (average if self.whole else 2 * average)
        return f" {self.size:<7}       {len(self.trips_us)}            {average:<7.2f}        {rate:<7.2f}"


def print_header(endpoint: Endpoint, moderation: int) -> None:
    """Print the header."""
    print(header(endpoint, moderation), flush=True)


def print_addresses(locals_: Sequence[Destination], remotes: Sequence[Destination], test: Test) -> None:
    """Print both sides' addresses, one for each QP."""
    for side in locals_:
        print(address("local", side, test))
    for side in remotes:
        print(address("remote", side, test))
    print(LINE, flush=True)


def bandwidth_columns(options: Options) -> str:
    """Return the title line of a bandwidth table."""
    return BW_COLUMNS.format("Gb" if options.gbits else "MB")


def latency_columns(options: Options) -> str:
    """Return the title line of a latency table."""
    return LATENCY_COLUMNS if options.duration_s is None else LATENCY_DURATION_COLUMNS
