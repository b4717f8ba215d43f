# SPDX-License-Identifier: BSD-3-Clause
"""What NICs count of congestion: real ones in sysfs, software ones on rails that have limits."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from shiftverbs import softrnic

#: As mlx5 names them, and what they count. Other drivers have some of them, or none.
COUNTERS = {
    "np_ecn_marked_roce_packets": "Packets received with ECN's mark",
    "np_cnp_sent": "CNPs sent for them",
    "rp_cnp_handled": "CNPs that lowered the rate of a QP",
    "rp_cnp_ignored": "CNPs received and ignored",
}
SYSFS = Path("/sys/class/infiniband")


def read(devices: Iterable[str]) -> dict[str, dict[str, int]]:
    """The counters of each NIC that has some, since its driver was loaded or its rail was given limits.

    devices: names of NICs. A counter that a NIC does not have is not there. Never raises.
    """
    soft = _software_nics()
    found = {name: soft[name] if name in soft else _from_sysfs(name) for name in devices}
    return {name: counters for name, counters in found.items() if counters}


def _from_sysfs(device: str) -> dict[str, int]:
    """Of all ports together."""
    counters: dict[str, int] = {}
    for name in COUNTERS:
        for file in (SYSFS / device).glob(f"ports/*/hw_counters/{name}"):
            try:
                counters[name] = counters.get(name, 0) + int(file.read_text())
            except (OSError, ValueError):
                continue  # a NIC that goes away, or a driver that cannot say
    return counters


def _software_nics() -> dict[str, dict[str, int]]:
    """Of this host, by name; without counters where the rail has no limits."""
    if not softrnic.is_enabled():
        return {}
    from shiftverbs.softrnic import faults

    try:
        devices = faults.status().devices
    except softrnic.SoftrnicError:
        return {}
    host = os.environ.get("SOFTRNIC_HOST") or "a"
    return {
        device.device: {name: getattr(device.link, name) for name in COUNTERS} if device.link else {}
        for device in devices
        if device.host == host
    }
