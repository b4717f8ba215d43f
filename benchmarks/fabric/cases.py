# SPDX-License-Identifier: BSD-3-Clause
"""What is run: incasts of 2, 4 and 8 hosts with DCQCN, with PFC alone, without either; and what is measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fabric import rail
from benchmarks.fabric.rail import Run

SENDERS = (2, 4, 8)
SEED = 20150817
#: Bits per second, undilated.
LINE = 40e9
#: Ethernet, IP, UDP, BTH and ICRC; with 938 a packet has 1000 bytes.
HEADERS = 46 + 16
PAYLOAD, LARGE_PAYLOAD = 938, 4096
XOFF = 250_000
BUFFER = 1_000_000
#: What softrnic lets a connection have unacknowledged, packets.
WINDOW = 128
#: Of the incast with a buffer that is too small.
SMALL_BUFFER = "buffer=300K"
SMALL_MS = 300


@dataclass(frozen=True)
class Case:
    """One run in virtual time."""

    control: str
    """Key of `ENTRIES`."""
    senders: int
    run: Run

    @property
    def queue(self) -> float:
        """Mean bytes in the queue towards the receiver."""
        return self.run.ports[self.senders].queue

    @property
    def incast(self) -> list[float]:
        """Bits per second of the flows to the receiver that came in order."""
        return [flow.rate for flow in self.run.flows if flow.to == self.senders]

    @property
    def throughput(self) -> float:
        """The incast's share of the link: 1 = all of it."""
        return sum(self.incast) / LINE

    @property
    def unfairness(self) -> float:
        """How far the flow is from an equal share that is farthest from it: 0 = all have the same."""
        share = sum(self.incast) / len(self.incast)
        return max(abs(rate / share - 1) for rate in self.incast) if share else 0.0

    @property
    def again(self) -> float:
        """The share of packets that were sent not for the first time."""
        return sum(flow.again for flow in self.run.flows) / sum(flow.sent for flow in self.run.flows)

    @property
    def dropped(self) -> int:
        """Packets of the whole run."""
        return self.run.ports[self.senders].dropped

    @property
    def pauses(self) -> int:
        """Pause frames to all senders in the whole run."""
        return sum(port.rx_pause for port in self.run.ports.values())


#: What the rail has, and how long each half of a run is, milliseconds, and how often its queue is looked at, us.
ENTRIES = {
    "DCQCN": ("rate=40G,buffer=10M,dcqcn=sigcomm15", 1000, 250),
    "PFC": ("rate=40G,pfc=on", 10, 20),
    "PFC and DCQCN": ("rate=40G,pfc=on,dcqcn=sigcomm15", 1000, 250),
    "none": ("rate=40G", 200, 40),
}


def incast(senders: int) -> list[str]:
    """Hosts 0 to senders - 1 all write to the next one."""
    return [f"{i}-{senders}" for i in range(senders)]


def fixed_point(senders: int, packet: int) -> float:
    """The queue of an N:1 incast with sigcomm15's parameters, bytes (Zhu et al., CoNEXT 2016).

    :param packet: bytes on the wire
    """
    line, increase = LINE / 8 / packet, 40e6 / 8 / packet  # packets per second
    by_bytes, by_time = packet / 10e6, senders / (55e-6 * line)
    marked = (increase * senders**2 / (55e-6 * line**2) * (by_bytes + by_time) ** 2) ** (1 / 3)
    return 5000 + (200_000 - 5000) * marked / 0.01


def run_incasts(program: Path) -> Iterator[Case]:
    """Every control with every number of senders, the queue all along."""
    for control, (entry, ms, every_us) in ENTRIES.items():
        for senders in SENDERS:
            yield run_case(program, control, senders, incast(senders), entry, ms, f"series={every_us}")


def run_case(
    program: Path,
    control: str,
    senders: int,
    flows: Sequence[str],
    entry: str,
    ms: int,
    *options: str,
    payload: int = PAYLOAD,
) -> Case:
    """One run. Arguments as `rail.run` has them."""
    done = rail.run(program, f"rail0:{entry}", ms, flows, *options, payload=payload, seed=SEED)
    return Case(control, senders, done)


@dataclass(frozen=True)
class Unfair:
    """What PFC does to flows that share a port, bits per second."""

    senders: int
    alone: float
    """A flow by a port of its own, where the others, senders - 1, share another one: the parking lot."""
    shared: float
    """One of those others, their mean."""
    victim: float
    """A flow from one of the incast's hosts to a host that nobody else sends to."""
    spared: float
    """The same with DCQCN too."""


def run_unfair(program: Path, senders: int) -> Unfair:
    """Measure it."""
    entry, ms, _ = ENTRIES["PFC"]
    lot = ["0-2", *["1-2"] * (senders - 1)]
    victim = [*incast(senders), f"0-{senders + 1}"]
    alone, *shared = (flow.rate for flow in run_case(program, "PFC", 2, lot, entry, ms).run.flows)
    blocked = run_case(program, "PFC", senders, victim, entry, ms).run.flows[-1].rate
    both, ms, _ = ENTRIES["PFC and DCQCN"]
    spared = run_case(program, "PFC and DCQCN", senders, victim, both, ms).run.flows[-1].rate
    return Unfair(senders, alone, sum(shared) / len(shared), blocked, spared)


def run_small_buffer(program: Path) -> Iterator[Case]:
    """Four senders with windows and packets as softrnic has them, and a buffer that holds a third of them."""
    for control, setting in (
        ("none", ""),
        ("DCQCN", ",dcqcn=sigcomm15"),
        ("PFC", ",pfc=on"),
        ("PFC and DCQCN", ",pfc=on,dcqcn=sigcomm15"),
    ):
        entry = f"rate=40G,{SMALL_BUFFER}{setting}"
        yield run_case(
            program, control, 4, incast(4), entry, SMALL_MS, f"window={WINDOW}", payload=LARGE_PAYLOAD
        )
