# SPDX-License-Identifier: BSD-3-Clause
"""The dashboard and the alert rules speak of metrics and labels that there are."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from harness import ROOT

from shiftverbs import observe
from shiftverbs.failover.services.totals import MOST_REASONS, OTHER, Totals
from shiftverbs.telemetry import metrics

GRAFANA = ROOT / "docs" / "grafana"


@pytest.fixture
def scraped() -> Any:
    """A scrape of a process with one QP that is away, and one that failed."""
    totals = Totals()
    totals.gave_up("rkey 0x17 was refused 3 times")
    totals.slow_path("soft0", "path")
    timeline = SimpleNamespace(away_since_ns=0)
    status = SimpleNamespace(value="PROTECTED")
    connection = SimpleNamespace(
        closed=False, device=lambda k: f"soft{k}", send_pair=1, status=status, timeline=timeline
    )
    driver = SimpleNamespace(
        totals=totals,
        connections={1: connection},
        directory=SimpleNamespace(away="no answer"),
        nic_events=SimpleNamespace(port_ok=lambda nic, port: True),
    )
    nic = SimpleNamespace(name="soft0", dead=True, is_open=True, ports=())
    runtime = SimpleNamespace(
        driver=driver, nics=SimpleNamespace(all=lambda: [nic]), exchanger=SimpleNamespace(broker_pid=None)
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(runtime))  # type: ignore[arg-type]
    with observe.register_prometheus(registry):
        observe.publish(
            observe.Fallback(
                qp_num=1, device="soft0", epoch=1, target="soft1", durations={"fallback_ms": 1.0}
            )
        )
        assert observe.flush()
        yield (
            {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples},
            registry,
        )


def expressions() -> list[str]:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = re.findall(r"^ +expr: (.*)$", (GRAFANA / "alerts.yaml").read_text(), re.MULTILINE)
    assert len(found) >= 8 and len(rules) >= 6
    return [*found, *rules]


def test_every_metric_and_label_in_an_expression_exists(scraped: Any) -> None:
    samples, _ = scraped
    for expression in expressions():
        named = re.findall(r"shiftverbs_\w+", expression)
        assert named and set(named) <= set(samples), expression
        labels = set().union(*(samples[name] for name in named)) | {"instance"}
        used = {
            word.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(",")
        }
        used |= set(re.findall(r"[{,](\w+)=~?\"", expression))
        assert used <= labels, expression


def test_every_metric_is_documented(scraped: Any) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in scraped[0]}
    assert {name for name in names if f"`{name}`" not in text and f"`{name}_total`" not in text} == set()


def test_the_values(scraped: Any) -> None:
    _, registry = scraped
    value = registry.get_sample_value
    assert value("shiftverbs_qps", {"status": "PROTECTED", "device": "soft0", "carrier": "soft1"}) == 1
    assert value("shiftverbs_qps_away") == 1 and value("shiftverbs_away_seconds_total") > 0
    assert value("shiftverbs_failed_qps_total", {"reason": "rkey N was refused N times"}) == 1
    assert value("shiftverbs_slow_paths_total", {"device": "soft0", "fault": "path"}) == 1
    assert value("shiftverbs_straggler_moves_total") == 0
    assert value("shiftverbs_etcd_up") == value("shiftverbs_broker_up") == 0
    assert value("shiftverbs_nic_up", {"device": "soft0"}) == 0


def test_reasons_are_bounded() -> None:
    totals = Totals()
    for number in range(1000):
        totals.gave_up("".join(chr(97 + int(digit)) for digit in str(number)))
    totals.gave_up("")
    assert len(totals.failed) == MOST_REASONS + 1
    assert sum(totals.failed.values()) == 1001 and totals.failed[OTHER] == 1001 - MOST_REASONS
