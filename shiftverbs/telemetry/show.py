# SPDX-License-Identifier: BSD-3-Clause
"""Letting others see this process, from its failover machinery's start to its end."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shiftverbs._core import without_signals
from shiftverbs.process import run_dir
from shiftverbs.telemetry import publisher, snapshot

if TYPE_CHECKING:
    from shiftverbs.failover.runtime import Runtime

logger = logging.getLogger("shiftverbs.runtime")


def show(runtime: Runtime) -> Callable[[], None] | None:
    """Serve its metrics and its snapshot; nothing of it is needed for failover. Returns what ends the latter."""
    config = runtime.config
    if config.metrics is not None:
        from shiftverbs.telemetry import metrics  # here only: few want it

        host, first, last = config.metrics
        runtime.metrics_port = without_signals(metrics.serve, runtime, host, range(first, last + 1))
    try:
        where = run_dir.directory(config.run_dir)
        return publisher.Publisher(functools.partial(snapshot.take, runtime), runtime.instance, where).close
    except (OSError, RuntimeError) as error:
        level = logging.WARNING if config.run_dir is not None else logging.INFO
        logger.log(level, "shiftverbs status will not see this process: %s", error)
        return None
