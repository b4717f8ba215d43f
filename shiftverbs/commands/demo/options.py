# SPDX-License-Identifier: BSD-3-Clause
"""The demo's arguments. Imports nothing heavy: the command line's help needs it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

__all__ = ["FAULTS", "TRAFFIC", "Plan", "add_arguments", "plan_from"]

TRAFFIC = {
    "write_imm": "unsignaled RDMA WRITEs closed by a WRITE_WITH_IMM, both directions at once",
    "send": "SEND/RECV with sequence numbers",
    "read": "RDMA READ",
}
FAULTS = {
    "initiator_port": "host a's port goes down",
    "responder_port": "host b's port goes down",
    "switch": "a switch port goes down: packets vanish, no event anywhere",
    "ack_lost": "the acknowledgement (READ: the response) of one message is dropped, then the port goes down",
}


@dataclass(frozen=True)
class Plan:
    """What one run does. warm_s, fault_s, home_s: seconds of traffic before a fault, on the backup, at home again.

    baseline_s: seconds of traffic with plain pyverbs before its fault. story: it is told first; story_s: seconds of
    each of its phases.
    reconnect: a new connection for each scenario. Otherwise those of one kind of traffic share theirs, and coming
    home takes longer each time: a NIC that fails again soon after it was healed is trusted less.
    device: "soft" or "rxe". retry_cnt: of the QPs, where it is not the usual one.
    """

    traffic: tuple[str, ...]
    faults: tuple[str, ...]
    warm_s: float
    fault_s: float
    home_s: float
    baseline: bool = True
    baseline_s: float = 0.5
    story: bool = False
    story_s: float = 4.0
    device: str = "soft"
    reconnect: bool = True
    seed: int = 1
    retry_cnt: int | None = None
    json_path: str | None = None
    plain: bool = False
    verbose: bool = False


def _names(known: dict[str, str]) -> object:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600 seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's arguments to a parser."""

    def catalogue(known: dict[str, str]) -> str:
        return "; ".join(f"{name}: {what}" for name, what in known.items())

    parser.add_argument(
        "--quick", action="store_true", help="short phases: the whole run stays under a minute"
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="S", help="seconds of traffic per phase (default 2)"
    )
    parser.add_argument("--traffic", type=_names(TRAFFIC), action="append", metavar="NAME[,NAME]",  # type: ignore[arg-type]
                        help="only these kinds of traffic: " + catalogue(TRAFFIC))  # fmt: skip
    parser.add_argument("--fault", type=_names(FAULTS), action="append", metavar="NAME[,NAME]",  # type: ignore[arg-type]
                        help="only these faults: " + catalogue(FAULTS))  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the results there ('-': standard output)")
    parser.add_argument(
        "--device",
        choices=["soft", "rxe"],
        default="soft",
        help="which devices: soft (the software RNIC), rxe (the kernel's soft-RoCE, in a prepared virtual machine)",
    )
    parser.add_argument(
        "--story",
        action=argparse.BooleanOptionalAction,
        help="begin with one cable, before and after, told as it happens (by default where everything is run on the "
        "software RNIC and neither --quick nor a choice is given)",
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave out the runs with plain pyverbs")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the contents of all messages (default 1)"
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument(
        "--verbose", action="store_true", help="show the hosts' logs at the end of each scenario"
    )


def plan_from(parsed: argparse.Namespace) -> Plan:
    """Make the plan of parsed arguments."""

    def chosen(groups: list[tuple[str, ...]] | None, known: dict[str, str]) -> tuple[str, ...]:
        wanted = {name for group in groups for name in group} if groups else set(known)
        return tuple(name for name in known if name in wanted)

    seconds = parsed.seconds or (0.3 if parsed.quick else 2.0)
    everything = not (parsed.quick or parsed.traffic or parsed.fault or parsed.no_baseline)
    return Plan(
        traffic=chosen(parsed.traffic, TRAFFIC),
        faults=chosen(parsed.fault, FAULTS),
        warm_s=seconds,
        fault_s=seconds,
        home_s=seconds,
        baseline=not parsed.no_baseline,
        baseline_s=min(seconds, Plan.baseline_s),
        story=everything and parsed.device == "soft" if parsed.story is None else parsed.story,
        story_s=seconds if parsed.seconds or parsed.quick else Plan.story_s,
        device=parsed.device,
        seed=parsed.seed,
        json_path=parsed.json,
        plain=parsed.plain,
        verbose=parsed.verbose,
    )
