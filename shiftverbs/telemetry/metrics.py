# SPDX-License-Identifier: BSD-3-Clause
"""This process for Prometheus: gauges and counters made when it is scraped, and an HTTP port for the scraper.

The names and labels are in docs/metrics.md, with a dashboard and alert rules.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shiftverbs.shadows import congestion
from shiftverbs.telemetry.snapshot import connections_of, nic_state

if TYPE_CHECKING:
    from shiftverbs.failover.runtime import Runtime

logger = logging.getLogger("shiftverbs.telemetry")


class Collector:
    """What prometheus_client's registries collect. runtime: this process's failover machinery."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Any]:
        """Prometheus' collector protocol: one metric family after the other."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        driver = self._runtime.driver
        totals = driver.totals
        now_ns = time.monotonic_ns()
        by_status: collections.Counter[tuple[str, str, str]] = collections.Counter()
        away_ns = totals.away_ns
        away = 0
        for connection in connections_of(driver):
            if connection.closed:
                continue
            carrier = connection.device(connection.send_pair)
            by_status[connection.status.value, connection.device(0), carrier] += 1
            since_ns = connection.timeline.away_since_ns
            if since_ns is not None:
                away += 1
                away_ns += max(0, now_ns - since_ns)
        qps = GaugeMetricFamily(
            "shiftverbs_qps",
            "QPs by protection status, default NIC, and the NIC that carries their sends",
            labels=["status", "device", "carrier"],
        )
        for labels, count in sorted(by_status.items()):
            qps.add_metric(labels, count)
        yield qps
        yield GaugeMetricFamily(
            "shiftverbs_qps_away", "QPs whose traffic is not on its default NIC", value=away
        )
        yield CounterMetricFamily(
            "shiftverbs_away_seconds", "Time that QPs were away from their default NICs", value=away_ns / 1e9
        )
        yield CounterMetricFamily(
            "shiftverbs_switches", "SWITCHes to another NIC begun", value=totals.switches
        )
        yield CounterMetricFamily("shiftverbs_homecomings", "QPs come home", value=totals.homecomings)
        failed = CounterMetricFamily(
            "shiftverbs_failed_qps",
            "QPs whose failure could not be hidden (ABORT), by reason",
            labels=["reason"],
        )
        for reason, count in sorted(totals.failed.items()):
            failed.add_metric([reason], count)
        yield failed
        nics = GaugeMetricFamily(
            "shiftverbs_nic_up", "Whether a port of the NIC is active", labels=["device"]
        )
        for nic in self._runtime.nics.all():
            nics.add_metric([nic.name], int(nic_state(driver, nic) == "ACTIVE"))
        yield nics
        counted = congestion.read(nic.name for nic in self._runtime.nics.all())
        for name, meaning in congestion.COUNTERS.items():
            family = CounterMetricFamily(f"shiftverbs_nic_{name}", meaning, labels=["device"])
            for device, counters in counted.items():
                if name in counters:
                    family.add_metric([device], counters[name])
            yield family
        for name, meaning in congestion.PRIORITY_COUNTERS.items():
            family = CounterMetricFamily(f"shiftverbs_nic_{name}", meaning, labels=["device", "priority"])
            for device, counters in counted.items():
                for priority in congestion.PRIORITIES:
                    if (value := counters.get(congestion.of_priority(name, priority))) is not None:
                        family.add_metric([device, str(priority)], value)
            yield family
        yield GaugeMetricFamily(
            "shiftverbs_etcd_up", "Whether etcd answers: where not, no QP becomes protected",
            value=int(driver.directory.away is None),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "shiftverbs_broker_up", "Whether this process has a broker to speak to etcd",
            value=int(self._runtime.exchanger.broker_pid is not None),
        )  # fmt: skip
        slow = CounterMetricFamily(
            "shiftverbs_slow_paths",
            "Verdicts that a path works and is slow, by NIC and whose fault that is",
            labels=["device", "fault"],
        )
        for (device, fault), count in sorted(totals.slow_paths.items()):
            slow.add_metric([device, fault], count)
        yield slow
        yield CounterMetricFamily(
            "shiftverbs_straggler_moves", "Moves off slow paths, and home", value=totals.straggler_moves
        )


def serve(runtime: Runtime, host: str, ports: range) -> int | None:
    """Serve this process's metrics over HTTP on the first port that is free. Returns it; None, logged, where none is.

    host: the address to listen on; ports: to be tried in this order (0: any).
    """
    try:
        import prometheus_client
    except ImportError:
        logger.warning("SHIFTVERBS_METRICS needs prometheus_client: pip install 'shiftverbs[metrics]'")
        return None
    from shiftverbs import observe

    registry = prometheus_client.CollectorRegistry()
    error: OSError | None = None
    for port in ports:
        try:
            server, _thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as taken:
            error = taken
            continue
        registry.register(Collector(runtime))
        observe.register_prometheus(registry)
        found = int(server.server_address[1])
        logger.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, found)
        return found
    logger.warning("SHIFTVERBS_METRICS: no metrics, no port is free on %s: %s", host, error)
    return None
