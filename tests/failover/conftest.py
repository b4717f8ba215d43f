# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the failover tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from hosts import faults_of, network_of

__all__ = ["faults_of", "network_of"]
