# SPDX-License-Identifier: BSD-3-Clause
"""Rails with limits: each host's link has a rate and a delay, and the switch's queue towards the host a buffer.

Without it packets take no time but the machine's own. With it a rail can be slow, busy, or congested by others, and a
queue that is full drops. With DCQCN switches mark packets as their queues grow (ECN), and NICs lower the rates of queue
pairs whose packets are marked. With PFC switches pause hosts before anything is dropped.

It holds for all processes that share `SOFTRNIC_DIR`, until it is changed;
`faults.clear` leaves it alone. `SOFTRNIC_FABRIC` sets it when a program opens its first device.

`faults.device("a/soft0").link` tells what a port is like and what it counted.
"""

from __future__ import annotations

from shiftverbs.softrnic import faults
from shiftverbs.softrnic.control import FaultError, call, text

__all__ = ["apply", "limit", "port", "unlimit"]


def limit(
    where: str,
    rate: float,
    *,
    delay_s: float = 1e-6,
    buffer: int = 1_000_000,
    dcqcn: str | None = None,
    kmin: int | None = None,
    kmax: int | None = None,
    pmax: float | None = None,
    pfc: bool = False,
    xoff: int | None = None,
    xon: int | None = None,
    headroom: int | None = None,
    watchdog_s: float | None = None,
    dilation: int = 1,
) -> None:
    """Give ports limits, in force for the next packet; what is on its way goes on as before.

    :param where: `"rail0"`, `"*"` (all rails), `"b/rail0"` or `"b/soft0"` (one host's port). A rail's limits are
        those of hosts that come later, too.
    :param rate: bits per second of a host's link, 1e3 to 1e12.
    :param delay_s: propagation from another host to this one, in seconds; at most 10.
    :param buffer: bytes that may wait in the switch for the host; at least 8192.
    :param dcqcn: congestion control with the parameters of this name: `"sigcomm15"` (Zhu et al., SIGCOMM 2015) or
        `"connectx"` (the defaults of a ConnectX); None = there is none.
    :param kmin: up to so many bytes in the queue the switch marks no packet; None = as dcqcn has it, else 0.
    :param kmax: above so many it marks all; None = as dcqcn has it, else none is ever marked.
    :param pmax: the share that is marked at kmax, 0 to 1, and in proportion between; None = as dcqcn has it, else 1.
    :param pfc: priority flow control (IEEE 802.1Qbb): the switch pauses a host's priority instead of dropping.
    :param xoff: so many bytes of a priority in the switch pause it; None = a quarter of buffer.
    :param xon: at so many it goes on; None = 3000 below xoff.
    :param headroom: bytes above xoff that are not dropped; None = 3 times rate and delay, and 8192.
    :param watchdog_s: a host that pauses the switch for longer, in seconds, has its packets dropped; 1e-6 to 10, 0 =
        never, None = 0.2.
    :param dilation: divides the rate and all that dcqcn has, and multiplies times; 1 to 1,000,000.
    :raises FaultError: no such rail or host, or a value out of range.
    :raises SoftrnicError: the registry cannot be used.
    """
    settings = {
        "rate": round(rate),
        "delay": f"{round(delay_s * 1e9)}ns",
        "buffer": buffer,
        "dcqcn": dcqcn,  # before what changes a part of it
        "kmin": kmin,
        "kmax": kmax,
        "pmax": None if pmax is None else f"{pmax * 100:.3f}%",
        "pfc": "on" if pfc else None,
        "xoff": xoff,
        "xon": xon,
        "headroom": headroom,
        "watchdog": None if watchdog_s is None else f"{round(watchdog_s * 1e9)}ns" if watchdog_s else "off",
        "dilation": dilation,
    }
    given = ",".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    apply(f"{port(where)}:{given}")


def unlimit(where: str = "*") -> None:
    """Take the limits away again. Arguments and errors as `limit`."""
    apply(f"{port(where)}:off")


def apply(entries: str) -> None:
    """What `SOFTRNIC_FABRIC` would say.

    :param entries: such as `"rail0:rate=10G,delay=5us,buffer=1M;b/rail0:rate=1G"`. All of it is in force, or none.
    :raises FaultError: it is wrong; the message says where.
    :raises SoftrnicError: the registry cannot be used.
    """
    call("softrnic_ctl_fabric", text(entries))


def port(where: str) -> str:
    """How entries name a port.

    :param where: as for `limit`.
    :return: `"b/rail0"` for `"b/soft0"`; all else as it is.
    :raises FaultError: it cannot be the name of one.
    """
    if any(separator in where for separator in ":;\n#"):
        raise FaultError(f"{where!r} is no rail and no port: rail0, *, b/rail0 or b/soft0")
    host, slash, name = where.partition("/")
    for device in faults.status().devices if slash else ():
        if (device.host, device.device) == (host, name):
            return f"{host}/{device.rail}"
    return where
