# SPDX-License-Identifier: BSD-3-Clause
"""What processes of ranks are started with."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
#: No numpy for torch, whose absence or age it tells in many lines; and no threads that fight for two cores. Debian's
#: torch 2.6 is built without libuv, and has no store for ranks to meet at where it is not told so.
ENV = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "USE_LIBUV": "0"}
