# SPDX-License-Identifier: BSD-3-Clause
"""rail.c: a rail with flow control in virtual time, and what a run of it was like."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: The program, and what it is made of, below shiftverbs/softrnic/src.
PROGRAM = Path(__file__).with_name("rail.c")
SOURCES = ("fabric/dcqcn.c", "fabric/events.c", "fabric/params.c", "fabric/port.c", "fabric/switch.c")
TIMEOUT_S = 120


def build(target: Path) -> Path:
    """Compile the program, without sanitizers.

    :param target: where it goes
    :raises subprocess.CalledProcessError: it does not compile
    """
    sources = Path(__file__).parents[2] / "shiftverbs" / "softrnic" / "src"
    files = [str(PROGRAM), *(str(sources / name) for name in SOURCES)]
    flags = ["-D_GNU_SOURCE", "-std=gnu11", "-O2", f"-I{sources}"]
    subprocess.run(["gcc", *flags, *files, "-o", str(target)], check=True)
    return target


@dataclass(frozen=True)
class Flow:
    """What one flow did; rates are of the second half."""

    source: int
    to: int
    priority: int
    rate: float
    """Bits per second on the wire of packets that came in order, undilated."""
    sent: int
    again: int
    """Of those, sent not for the first time."""
    timeouts: int
    cnps: int


@dataclass(frozen=True)
class Port:
    """What one host's port counted; pauses and storms of all priorities together."""

    queue: float
    """Bytes, mean of the second half, with their variance."""
    variance: float
    peak: int
    packets: int
    marked: int
    dropped: int
    rx_pause: int
    tx_pause: int
    paused: float
    """The share of time in which the host was paused, of pauses that ended."""
    watchdog_dropped: int
    storms: int


@dataclass
class Run:
    """One run of the program."""

    flows: list[Flow] = field(default_factory=list)
    ports: dict[int, Port] = field(default_factory=dict)
    queue: list[tuple[float, int]] = field(default_factory=list)
    """(us, bytes) of the first flow's destination, where a series was asked for."""

    @property
    def throughput(self) -> float:
        """Of all flows, bits per second."""
        return sum(flow.rate for flow in self.flows)


def run(
    program: Path, entry: str, ms: int, flows: Sequence[str], *options: str, payload: int = 938, seed: int
) -> Run:
    """Run it.

    :param program: built of rail.c
    :param entry: as in `SOFTRNIC_FABRIC`, for all ports
    :param ms: milliseconds, undilated, of each half
    :param flows: `"0-8"`, `"0-8/3"`
    :param options: as the program has them
    :param payload: bytes of a packet
    :param seed: of the switch's marks
    :raises subprocess.CalledProcessError: it does not understand, or finds that it has an error
    """
    command = [str(program), entry, str(ms), str(seed), str(payload), *options, *flows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = Run()
    for line in done.stdout.splitlines():
        kind, *pairs = line.split()
        values = dict(pair.split("=") for pair in pairs)
        if kind == "at":
            found.queue.append((float(values["us"]), int(values["queue"])))
        elif kind == "flow":
            source, to, priority, rate, *rest = values.values()
            found.flows.append(Flow(int(source), int(to), int(priority), float(rate), *map(int, rest)))
        else:
            at = int(values.pop("at"))
            floats = ("queue", "variance", "paused")
            read = {key: float(value) if key in floats else int(value) for key, value in values.items()}
            found.ports[at] = Port(**read)  # type: ignore[arg-type]
    return found
