# SPDX-License-Identifier: BSD-3-Clause
"""The state of this process as plain data, as `shiftverbs status --json` shows it.

Read without the driver's lock, like `qp.shift`: each value is one that was true a moment ago.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from shiftverbs.process.releases import release

if TYPE_CHECKING:
    from shiftverbs.failover.driver import Driver
    from shiftverbs.failover.qp.connection import Connection
    from shiftverbs.failover.runtime import Runtime
    from shiftverbs.shadows.nic import Nic

#: Of what `take` returns. A reader of another version shows what it knows.
VERSION = 1
_TRIES = 8


def connections_of(driver: Driver) -> list[Connection]:
    """All connections; the application makes and closes QPs meanwhile."""
    for _ in range(_TRIES):
        try:
            return list(driver.connections.values())
        except RuntimeError:  # changed while it was read
            continue
    return []


def take(runtime: Runtime) -> dict[str, Any]:
    """Everything about this process, fit for JSON. Times are seconds; those of day since 1970."""
    driver = runtime.driver
    import shiftverbs

    away = driver.directory.away
    now_ns = time.monotonic_ns()
    return {
        "version": VERSION,
        "pid": os.getpid(),
        "command": list(sys.orig_argv),
        "host": os.environ.get("SOFTRNIC_HOST") or socket.gethostname(),
        "instance": runtime.instance,
        "job": runtime.config.job,
        "started": time.time() - (now_ns - runtime.started_ns) / 1e9,
        "releases": {"shiftverbs": shiftverbs.__version__, "pyverbs": release()},
        "exchanger": {
            "etcd": [endpoint.url for endpoint in runtime.config.etcd],
            "answers": away is None,
            "why": away,
            "broker": runtime.exchanger.broker_pid,
        },
        "totals": {
            "switches": driver.totals.switches,
            "homecomings": driver.totals.homecomings,
            "away_s": driver.totals.away_ns / 1e9,
            "failed": dict(driver.totals.failed),
            "straggler_moves": driver.totals.straggler_moves,
        },
        "stragglers": stragglers(driver, now_ns),
        "nics": [
            {
                "name": nic.name,
                "state": nic_state(driver, nic),
                "error": nic.error or None,
            }
            for nic in runtime.nics.all()
        ],
        "qps": [qp(connection, now_ns) for connection in connections_of(driver) if not connection.closed],
    }


def stragglers(driver: Driver, now_ns: int) -> dict[str, Any]:
    """What is known of slow paths. now_ns: CLOCK_MONOTONIC."""
    measures = driver.measures
    if measures is None:
        return {"mode": "off", "works": True, "slow": []}
    return {
        "mode": measures.mode.value,
        "works": not measures.failed,
        "slow": [
            {
                "path": each.device,
                "peer": each.peer,
                "ratio": each.evidence.ratio,
                "since_s": (now_ns - each.evidence.since_ns) / 1e9,
                "samples": each.evidence.samples,
                "lost_s": each.evidence.lost_ns / 1e9,
                "fault": each.evidence.attribution.name.lower(),
                "why": each.evidence.attribution.value,
                "qps": each.qps,
            }
            for each in measures.slow
        ],
    }


def nic_state(driver: Driver, nic: Nic) -> str:
    """DEAD (DEVICE_FATAL was seen), CLOSED (it cannot be opened), ACTIVE (one of its ports is), or DOWN."""
    if nic.dead:
        return "DEAD"
    if not nic.is_open:
        return "CLOSED"
    # The ports are read when something changes; what events told since then is newer.
    usable = any(port.active and driver.nic_events.port_ok(nic, port.number) for port in nic.ports)
    return "ACTIVE" if usable else "DOWN"


def qp(connection: Connection, now_ns: int) -> dict[str, Any]:
    """One QP, as `qp.shift` shows it. now_ns: CLOCK_MONOTONIC."""
    timeline = connection.timeline
    durations = timeline.durations()
    away_since_ns, failure = timeline.away_since_ns, timeline.last_failure
    peer = connection.describe_pairing()
    return {
        "qp_num": connection.shadow.qp_num,
        "device": connection.device(0),
        "status": connection.status.value,
        "why": connection.shown_why,
        "state": connection.send_state,
        "recv_state": connection.recv_state,
        "path": connection.device(connection.send_pair),
        "recv_path": connection.device(connection.recv_pair),
        "pair": connection.send_pair,
        "preferred": connection.preferred,
        "peer": None if peer is None else {"gid": peer["gid"], "lid": peer["lid"], "qpn": peer["qpn"]},
        "devices": [connection.device(0)] if peer is None else peer["devices"],
        "away_s": (now_ns - away_since_ns) / 1e9 if away_since_ns is not None else None,
        "fallback_ms": durations["fallback_ms"],
        "away_ms": durations["away_ms"],
        "last_failure": None
        if failure is None
        else {"ago_s": (now_ns - failure[0]) / 1e9, "why": failure[1]},
        "counters": connection.counters(),
    }
