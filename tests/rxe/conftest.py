# SPDX-License-Identifier: BSD-3-Clause
"""Tests that run in a guest with the kernel's soft-RoCE (tools/rxe/run.py starts them there), and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

# Not skipped but not there: `make test` has nothing to do with them.
if os.environ.get("RXE_GUEST") != "1":
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a failure at once: the guest may not live to see the end of the run."""
    if report.failed:
        print(f"\n{report.longreprtext}\n{report.capstdout}", file=sys.__stdout__, flush=True)


@pytest.fixture(scope="session")
def etcd() -> Iterator[str]:
    """Endpoint of the guest's etcd."""
    from shiftverbs.commands.demo.etcd_server import EtcdServer

    server = EtcdServer()
    try:
        yield server.start(120).endpoint
    finally:
        server.close()
