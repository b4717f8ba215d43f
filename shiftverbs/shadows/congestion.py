# SPDX-License-Identifier: BSD-3-Clause
"""What NICs count of congestion and of connections' troubles: real ones in sysfs, software ones in their registry."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shiftverbs import softrnic

if TYPE_CHECKING:
    from shiftverbs.softrnic.faults import Device

#: As mlx5 names them, and what they count. Other drivers have some of them, or none.
COUNTERS = {
    "np_ecn_marked_roce_packets": "Packets received with ECN's mark",
    "np_cnp_sent": "CNPs sent for them",
    "rp_cnp_handled": "CNPs that lowered the rate of a QP",
    "rp_cnp_ignored": "CNPs received and ignored",
    "out_of_sequence": "Requests received before one that is missing",
    "duplicate_request": "Requests received that had come before",
    "out_of_buffer": "Messages that found no receive posted",
    "packet_seq_err": "NAKs for sequence errors received",
    "local_ack_timeout_err": "Retry timers that ran out",
    "rnr_nak_retry_err": "RNR NAKs received",
    "implied_nak_seq_err": "Answers received before one that is missing",
    "req_transport_retries_exceeded": "QPs that ended because retries were used up",
    "req_rnr_retries_exceeded": "QPs that ended because RNR retries were used up",
    "rx_icrc_encapsulated": "Packets received with a wrong ICRC",
}
#: The same for each priority of flow control, which only software NICs tell here: real ones have them in ethtool.
PRIORITY_COUNTERS = {
    "rx_prio_pause": "Pause frames received",
    "rx_prio_pause_duration": "Microseconds for which the NIC was paused",
    "tx_prio_pause": "Pause frames sent",
    "rx_prio_discards": "Packets for the NIC that found no room",
}
PRIORITIES = range(8)
SYSFS = Path("/sys/class/infiniband")


def of_priority(name: str, priority: int) -> str:
    """What mlx5 calls one of `PRIORITY_COUNTERS` for a priority, as `read` does: `rx_prio3_pause`."""
    return name.replace("prio", f"prio{priority}", 1)


def read(devices: Iterable[str]) -> dict[str, dict[str, int]]:
    """The counters of each NIC that has some, since its driver was loaded or its rail was given limits.

    devices: names of NICs. A counter that a NIC does not have is not there: those of CNPs where a software NIC's rail
    has no limits, those of priorities where it has no flow control. Never raises.
    """
    soft = _software_nics()
    found = {name: soft[name] if name in soft else _from_sysfs(name) for name in devices}
    return {name: counters for name, counters in found.items() if counters}


def _from_sysfs(device: str) -> dict[str, int]:
    """Of all ports together."""
    counters: dict[str, int] = {}
    folder = SYSFS / device / "ports"
    try:
        ports = os.listdir(folder)
    except OSError:
        return {}  # a software NIC, or one that goes away
    for port in ports:
        for name in COUNTERS:
            try:
                value = int((folder / port / "hw_counters" / name).read_text())
            except (OSError, ValueError):
                continue  # a NIC that goes away, or a driver that cannot say
            counters[name] = counters.get(name, 0) + value
    return counters


def _software_nics() -> dict[str, dict[str, int]]:
    """Of this host, by name."""
    if not softrnic.is_enabled():
        return {}
    from shiftverbs.softrnic import faults

    try:
        devices = faults.status().devices
    except softrnic.SoftrnicError:
        return {}
    host = os.environ.get("SOFTRNIC_HOST") or "a"
    return {device.device: _of_software(device) for device in devices if device.host == host}


def _of_software(device: Device) -> dict[str, int]:
    counters = dict(device.counters)
    if device.link:
        counters |= {name: getattr(device.link, name) for name in COUNTERS if name not in counters}
        counters |= device.link.prio if device.link.pfc else {}
    return counters
