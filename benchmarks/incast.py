#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""N hosts that all write to one, on software NICs whose rail has limits: what becomes of the switch's queue.

    python benchmarks/incast.py --senders 4 rate=40G,buffer=10M,dcqcn=sigcomm15,dilation=250

The load is ib_write_bw's, a pair of processes for each sender. Times and rates are the machine's, not undilated.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Behind everything else: an installed shiftverbs comes before the one next to this file.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from shiftverbs import softrnic
from shiftverbs.softrnic import fabric, faults

TARGET = "target"
SAMPLE_S = 0.01
PROGRAM = Path(__file__).with_name("ib_write_bw.py")


def link() -> faults.Link:
    """The port that all of them send to."""
    found = faults.device(f"{TARGET}/soft0").link
    assert found is not None
    return found


def start(
    directory: str, host: str, settings: argparse.Namespace, *arguments: str
) -> subprocess.Popen[bytes]:
    """One end of a pair.

    :param host: its host on the network.
    :param settings: the command line's.
    :param arguments: the server's port, and for a client where it is.
    """
    # A queue pair's timeout is not dilated: 21 is 8.6 s.
    options = ["-F", "-d", "soft0", "-s", str(settings.size), "-m", "4096", "-u", "21", "--module", "pyverbs"]
    options += ["-D", str(round(settings.settle + settings.seconds) + 60)]
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *options, *arguments],
        env=softrnic.environment(host, "1", directory),
        stdout=subprocess.DEVNULL,
    )


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens on this TCP port, without connecting."""
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    return any(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        for line in lines[1:]
        if ":" in line
    )


def measure(seconds: float) -> list[int]:
    """The queue's length, bytes, all along."""
    queues = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        queues.append(link().queue)
        time.sleep(SAMPLE_S)
    return queues


@dataclass(frozen=True)
class Incast:
    """What was measured; counts are of the measured time, of the port that all send to where nothing else is said."""

    senders: int
    throughput: float
    """The share of the link that was used: 1 = all of it."""
    queue: float
    """Bytes, mean, with their standard deviation."""
    deviation: float
    marked: int
    cnps: int
    dropped: int
    pauses: int
    """Pause frames to the senders, of all priorities, since the beginning."""

    def __str__(self) -> str:
        return (
            f"senders={self.senders} throughput={self.throughput:.1%} queue={self.queue:.0f} "
            f"deviation={self.deviation:.0f} marked={self.marked} cnps={self.cnps} dropped={self.dropped} "
            f"pauses={self.pauses}"
        )


def pauses() -> int:
    """Pause frames that NICs received."""
    links = (device.link for device in faults.status().devices)
    return sum(
        count
        for found in links
        if found
        for name, count in found.prio.items()
        if name.startswith("rx_") and name.endswith("_pause")
    )


def run(settings: argparse.Namespace) -> Incast | None:
    """Run it; None where a process ended early, which said why.

    :param settings: of `parser`
    """
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["SOFTRNIC_DIR"] = directory
        os.chmod(directory, 0o700)
        faults.register(TARGET)
        fabric.apply(f"rail0:{settings.limits}")
        try:
            for sender in range(settings.senders):
                port = free_port()
                started.append(start(directory, TARGET, settings, "-p", str(port)))
                while not listens(port):
                    if started[-1].poll() is not None:
                        return None
                    time.sleep(SAMPLE_S)
                started.append(start(directory, f"sender{sender}", settings, "-p", str(port), "127.0.0.1"))
            time.sleep(settings.settle)
            before, since = link(), time.monotonic()
            queues = measure(settings.seconds)
            after, took = link(), time.monotonic() - since
            if any(process.poll() is not None for process in started):
                return None
            return Incast(
                settings.senders,
                (after.bytes - before.bytes) * 8 / took / after.rate,
                statistics.mean(queues),
                statistics.pstdev(queues),
                after.marked - before.marked,
                after.np_cnp_sent - before.np_cnp_sent,
                after.dropped - before.dropped,
                pauses(),
            )
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


def parser() -> argparse.ArgumentParser:
    """The command line's."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("limits", help="of the rail, as `python -m shiftverbs.softrnic fabric rail0` takes them, with commas")
    add("--senders", type=int, default=2, help="hosts that write (default %(default)s)")
    add("--size", type=int, default=1 << 20, help="bytes of a WRITE (default %(default)s)")
    add("--settle", type=float, default=10, help="seconds before it is measured (default %(default)s)")
    add("--seconds", type=float, default=8, help="seconds that are measured (default %(default)s)")
    return made


def main() -> int:
    """Run it, print one line of numbers, return the exit status."""
    measured = run(parser().parse_args())
    print(measured or "a process ended early", file=sys.stdout if measured else sys.stderr)
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
