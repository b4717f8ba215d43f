# SPDX-License-Identifier: BSD-3-Clause
"""What can happen to a software NIC from outside: cables, switches, sudden death, standstill, lost or late packets.

Every function acts on all processes that share `SOFTRNIC_DIR` and is in force for the next packet when it
returns. A device is named `"a/soft0"`: host and device, by the name that `SOFTRNIC` gives it there. Reverse
everything with `clear`.

The names of packets for `drop`, `delay`, `duplicate` and `reorder` are classes (`any`,
`send`, `send_imm`, `write`, `write_imm`, `read_request`, `read_response`, `ack`, `nak`, `rnr_nak`,
`atomic`, `atomic_ack`, `ud`, `request`, `response`) or single opcodes of the InfiniBand specification
(`"RC_SEND_ONLY"`, `"0x04"`).
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from shiftverbs.softrnic.control import FaultError, call, text
from shiftverbs.softrnic.counters import DEVICE_COUNTERS, NIC_COUNTERS

__all__ = [
    "DEVICE_COUNTERS",
    "NIC_COUNTERS",
    "Device",
    "FaultError",
    "Link",
    "Process",
    "Rule",
    "Status",
    "Which",
    "clear",
    "delay",
    "device",
    "down",
    "drop",
    "duplicate",
    "hang",
    "kill",
    "register",
    "reorder",
    "revive",
    "rule",
    "slow",
    "stall",
    "status",
    "switch_down",
    "switch_up",
    "undrop",
    "unhang",
    "unstall",
    "up",
]


@dataclass(frozen=True)
class Process:
    """A process that has a device open."""

    pid: int
    address: str
    """Its IPv4 address on the rail; empty for a device without a network."""


@dataclass(frozen=True)
class Link:
    """A device's port of a rail that has limits: its link to the switch, and the switch's queue towards it."""

    rate: int
    """Bits per second, both ways."""
    delay_ns: int
    """Propagation from any host to this one."""
    buffer: int
    """Bytes that may wait in the switch."""
    kmin: int
    """Up to so many bytes in the queue no packet gets ECN's mark."""
    kmax: int
    """Above so many every packet does; 0 = none is ever marked."""
    pmax: float
    """The share of packets that are marked at kmax, 0 to 1."""
    dcqcn: bool
    """Whether the NIC answers marked packets with CNPs, and lowers a queue pair's rate for those it gets."""
    dilation: int
    """What rates and times are slowed down by; those shown here are so already."""
    queue: int
    """Bytes that wait there now."""
    queue_peak: int
    """Bytes that waited there, at most."""
    packets: int
    """Packets that went through the switch's queue."""
    bytes: int
    """Their size, with Ethernet, IP and UDP headers."""
    dropped: int
    """Packets that found the buffer full."""
    marked: int
    """Packets that got the mark."""
    np_ecn_marked_roce_packets: int
    """Marked packets that the NIC received; this and the following as mlx5 counts them."""
    np_cnp_sent: int
    """CNPs that it sent."""
    rp_cnp_handled: int
    """CNPs that lowered the rate of a queue pair."""
    rp_cnp_ignored: int
    """CNPs for no connected queue pair, or while its port has no congestion control."""
    pfc: bool
    """Whether the switch pauses the host, and the host the switch, priority by priority (IEEE 802.1Qbb)."""
    xoff: int
    """Bytes of one priority that the host has in the switch when it is paused."""
    xon: int
    """Bytes of it at which the host goes on."""
    headroom: int
    """Bytes above xoff that are not dropped: they were under way."""
    watchdog_ns: int
    """What is longer than this is a storm, if the host pauses the switch; 0 = nobody watches."""
    prio: dict[str, int]
    """Of each priority N, as mlx5's ethtool names them: `rx_prioN_pause` and `tx_prioN_pause`, frames that the NIC
    received and sent, without those that only repeat; `rx_prioN_pause_duration`, microseconds; `rx_prioN_discards`,
    packets for it that found no room (the model's one buffer is the switch's)."""
    storms: int
    """How often the watchdog found one."""
    watchdog_dropped: int
    """Packets for this host that were dropped for it."""


@dataclass(frozen=True)
class Device:
    """One device of one host."""

    host: str
    device: str
    rail: str
    link_up: bool
    dead: bool
    switch_up: bool
    """The switch's port towards this device."""
    stalled: bool
    """Its data path stands still, see `stall`."""
    commands_hang: bool
    """Its commands do not return, see `hang`."""
    command_us: int
    """Microseconds that each of its commands takes at least, see `slow`."""
    link_changes: int
    """How often the link went down or up."""
    kills: int
    changed_ns: int
    """CLOCK_MONOTONIC, nanoseconds, of the last change of link or life; 0 = never."""
    processes: tuple[Process, ...]
    counters: dict[str, int]
    """`DEVICE_COUNTERS`, of all its processes since the directory was made."""
    link: Link | None
    """The limits of its port, see `shiftverbs.softrnic.fabric`; None = it has none."""

    @property
    def name(self) -> str:
        """`host/device`, as the functions here take it."""
        return f"{self.host}/{self.device}"


@dataclass(frozen=True)
class Rule:
    """A rule made by `drop` and its like, with what it has done so far."""

    id: int
    action: str
    """`"drop"`, `"delay"`, `"duplicate"` or `"reorder"`."""
    delay_us: int
    """Microseconds that the packet, or its copy, is late; for reorder, at most."""
    target: str
    direction: str
    opcode: str
    peer: str
    qpn: int
    msn: int
    per_message: bool
    nth: int
    count: int
    probability: float
    seed: int
    then: str
    then_target: str
    matched: int
    """Packets (or messages) that fitted."""
    fired: int
    """How many of them it was done to."""
    fired_ns: int
    """CLOCK_MONOTONIC, nanoseconds, of the last time; 0 = not yet."""

    @property
    def done(self) -> bool:
        """Whether it will never fire again."""
        return self.count != 0 and self.fired >= self.count


@dataclass(frozen=True)
class Status:
    """Everything the registry knows."""

    directory: str
    devices: tuple[Device, ...]
    rules: tuple[Rule, ...]


class Which(TypedDict, total=False):
    """Which packets a rule is about, and what happens behind it: the keyword arguments of `drop`."""

    direction: str
    opcode: str
    nth: int
    count: int
    probability: float
    seed: int
    per_message: bool
    peer: str | None
    qpn: int
    msn: int
    then: str | None
    then_target: str | None


class _Drop(ctypes.Structure):
    """struct softrnic_drop of ctl.h."""

    _fields_ = [
        ("target", ctypes.c_char_p),
        ("direction", ctypes.c_char_p),
        ("opcode", ctypes.c_char_p),
        ("peer", ctypes.c_char_p),
        ("then", ctypes.c_char_p),
        ("then_target", ctypes.c_char_p),
        ("qpn", ctypes.c_uint32),
        ("msn", ctypes.c_uint32),
        ("nth", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("per_message", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("probability", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("action", ctypes.c_char_p),
        ("delay_us", ctypes.c_uint32),
        ("reserved2", ctypes.c_uint32),
    ]


def down(target: str) -> None:
    """Pull the cable: packets vanish at once, IBV_EVENT_PORT_ERR in every process that has the device open.

    :param target: `"a/soft0"`.
    :raises FaultError: no such host or device.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_port", text(target), b"down")


def up(target: str) -> None:
    """Plug it in again: IBV_EVENT_PORT_ACTIVE. Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"up")


def kill(target: str) -> None:
    """The NIC dies: IBV_EVENT_DEVICE_FATAL, and every verb on the contexts open now fails for ever.

    New contexts cannot be opened before `revive`. Arguments and errors as `down`.
    """
    call("softrnic_ctl_port", text(target), b"kill")


def revive(target: str) -> None:
    """A replacement NIC: the device can be opened again. Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"revive")


def stall(target: str) -> None:
    """The data path stands still: work is accepted and not done, no completion comes, packets that arrive are lost.
    No event tells of it, commands work. What stood still goes on after `unstall`, except on null devices.
    Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"stall")


def unstall(target: str) -> None:
    """The data path moves again. Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"unstall")


def hang(target: str) -> None:
    """Commands do not return: creating, modifying, querying and destroying objects blocks until `unhang`, or
    until the NIC is killed. Data moves. Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"hang")


def unhang(target: str) -> None:
    """Commands return again, those under way too. Arguments and errors as `down`."""
    call("softrnic_ctl_port", text(target), b"unhang")


def slow(target: str, command_s: float) -> None:
    """Commands take their time, as those of a NIC of hardware do: each verb that creates, modifies, queries or destroys
    waits for it. Data moves.

    :param target: `"a/soft0"`.
    :param command_s: how long each takes at least, in seconds, at most 60; 0: as long as it takes.
    :raises FaultError: no such host or device, or no such time.
    :raises SoftrnicError: the registry cannot be used.
    """
    if not 0 <= command_s <= 60:  # which no NaN is
        raise FaultError(f"a command of {command_s} s is none: 0 to 60")
    call("softrnic_ctl_slow", text(target), ctypes.c_uint32(round(command_s * 1e6)))


def switch_down(rail: str, host: str | None = None) -> None:
    """The switch loses all packets; no NIC notices anything.

    :param rail: `"rail0"`, which connects the first devices of all hosts.
    :param host: only the switch's port towards this host.
    :raises FaultError: no such rail or host.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_switch", text(rail), text(host), ctypes.c_int(0))


def switch_up(rail: str, host: str | None = None) -> None:
    """The switch forwards packets again. Arguments and errors as `switch_down`."""
    call("softrnic_ctl_switch", text(rail), text(host), ctypes.c_int(1))


def drop(
    target: str,
    *,
    direction: str = "both",
    opcode: str = "any",
    nth: int = 1,
    count: int = 1,
    probability: float = 1.0,
    seed: int = 0,
    per_message: bool = False,
    peer: str | None = None,
    qpn: int = 0,
    msn: int = 0,
    then: str | None = None,
    then_target: str | None = None,
) -> int:
    """Lose packets of one device.

    :param target: `"a/soft0"`: whose packets; one rule counts over all processes that use the device.
    :param direction: `"tx"`, `"rx"` or `"both"`, as seen from target.
    :param opcode: a class or an opcode, see the module's docstring.
    :param nth: the first match that is lost, from 1. Retransmissions count.
    :param count: how many are lost from there on; 0 = all.
    :param probability: of each match from the nth on, above 0 and at most 1.
    :param seed: of the random numbers for probability.
    :param per_message: count and lose whole messages (their last packets), not packets.
    :param peer: only packets to or from this host.
    :param qpn: only this queue pair of target.
    :param msn: only packets that acknowledge the msn-th message of a connection or a later one. ACKs are
        coalesced, so "the acknowledgement of the 3rd message" is `opcode="ack", msn=3`.
    :param then: `"down"`, `"kill"` or `"switch-down"` in the same instant as the last loss (the first,
        if count is 0), before any other packet passes.
    :param then_target: the device that it happens to, if not target.
    :return: the rule's id.
    :raises FaultError: something unknown or out of range, or too many rules.
    :raises SoftrnicError: the registry cannot be used.
    """
    return _rule(
        "drop",
        target,
        0,
        direction=direction,
        opcode=opcode,
        nth=nth,
        count=count,
        probability=probability,
        seed=seed,
        per_message=per_message,
        peer=peer,
        qpn=qpn,
        msn=msn,
        then=then,
        then_target=then_target,
    )


def delay(target: str, delay_s: float, **which: Unpack[Which]) -> int:
    """Make packets of one device late; others overtake them.

    :param target: `"a/soft0"`.
    :param delay_s: how late, in seconds; above 0, at most 60.
    :param which: as for `drop`, which has the errors too.
    :return: the rule's id.
    """
    return _rule("delay", target, delay_s, **which)


def duplicate(target: str, *, delay_s: float = 0.0, **which: Unpack[Which]) -> int:
    """Double packets of one device.

    :param target: `"a/soft0"`.
    :param delay_s: how long after the packet its copy follows, in seconds; at most 60.
    :param which: as for `drop`, which has the errors too.
    :return: the rule's id.
    """
    return _rule("duplicate", target, delay_s, **which)


def reorder(target: str, *, wait_s: float = 0.02, **which: Unpack[Which]) -> int:
    """Put packets of one device behind the next packet of their direction.

    :param target: `"a/soft0"`.
    :param wait_s: go on without a next packet after this time in seconds; above 0, at most 60.
    :param which: as for `drop`, which has the errors too.
    :return: the rule's id.
    """
    return _rule("reorder", target, wait_s, **which)


def _rule(action: str, target: str, delay_s: float, **which: Unpack[Which]) -> int:
    if not math.isfinite(delay_s):
        raise FaultError(f"a delay of {delay_s} s is none")
    numbers = {"nth": which.get("nth", 1), "count": which.get("count", 1), "qpn": which.get("qpn", 0)}
    numbers |= {"msn": which.get("msn", 0), "seed": which.get("seed", 0), "delay_us": round(delay_s * 1e6)}
    for name, bits in (("nth", 32), ("count", 32), ("qpn", 24), ("msn", 24), ("seed", 64), ("delay_us", 32)):
        if not 0 <= numbers[name] < 1 << bits:
            raise FaultError(f"{name}={numbers[name]} is not in 0 .. 2^{bits}-1")
    request = _Drop(
        target=text(target),
        direction=text(which.get("direction", "both")),
        opcode=text(which.get("opcode", "any")),
        peer=text(which.get("peer")),
        then=text(which.get("then")),
        then_target=text(which.get("then_target")),
        per_message=which.get("per_message", False),
        probability=which.get("probability", 1.0),
        action=action.encode(),
        **numbers,
    )
    return call("softrnic_ctl_drop", ctypes.byref(request))


def undrop(rule_id: int) -> None:
    """Remove one rule.

    :param rule_id: what `drop` returned.
    :raises FaultError: there is no such rule.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_undrop", ctypes.c_int(rule_id))


def clear(target: str | None = None, *, rules_only: bool = False) -> None:
    """Heal everything: rules removed, cables in, switches forwarding, dead devices replaced.

    :param target: only this device; None = all.
    :param rules_only: only remove rules.
    :raises FaultError: no such host or device.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_clear", text(target), ctypes.c_int(rules_only))


def register(host: str, config: str = "1") -> None:
    """Make a host and its devices known before a process of it runs, so that faults can be set ahead.

    :param host: its name.
    :param config: its devices, as in `shiftverbs.softrnic.enable`.
    :raises FaultError: a bad name or description.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_register", text(host), text(config))


def status() -> Status:
    """What there is: devices, the processes that use them, rules with their counts.

    :raises SoftrnicError: the registry cannot be used.
    """
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = call("softrnic_ctl_list", buffer, ctypes.c_size_t(size))
        if needed < size:
            break
        size = needed + 4096
    raw: dict[str, Any] = json.loads(buffer.value.decode(errors="surrogateescape"))
    devices = []
    for entry in raw["devices"]:
        processes = tuple(Process(**process) for process in entry.pop("processes"))
        link = entry.pop("link")
        devices.append(Device(processes=processes, link=link and Link(**link), **entry))
    for entry in raw["rules"]:
        entry["probability"] = float(f"{entry['probability'] / 0xFFFF_FFFF:.9g}")
    return Status(raw["directory"], tuple(devices), tuple(Rule(**entry) for entry in raw["rules"]))


def device(target: str) -> Device:
    """One device of `status`.

    :param target: `"a/soft0"`.
    :raises FaultError: no such host or device.
    """
    known = status().devices
    for found in known:
        if found.name == target:
            return found
    raise FaultError(f"unknown device '{target}'; there are: {', '.join(d.name for d in known) or 'none'}")


def rule(rule_id: int) -> Rule:
    """One rule of `status`.

    :param rule_id: what `drop` returned.
    :raises FaultError: there is no such rule.
    """
    for found in status().rules:
        if found.id == rule_id:
            return found
    raise FaultError(f"there is no rule {rule_id}")
