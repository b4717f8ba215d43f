# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the differential tests: the hosts on strings of the failover tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import EtcdServer, Spawn

sys.path.insert(0, str(Path(__file__).parent.parent / "failover"))

from hosts import Network


@pytest.fixture
def network(spawn: Spawn, shared_etcd: EtcdServer, job: str, softrnic_dir: Path) -> Network:
    """Two hosts to be, with etcd."""
    return Network(spawn, {"SHIFTVERBS_ETCD": shared_etcd.endpoint, "SHIFTVERBS_JOB": job}, softrnic_dir)


@pytest.fixture
def faults(network: Network) -> Iterator[Any]:
    """The software RNIC's faults, on this test's network."""
    with network.faults() as functions:
        yield functions
