#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Bandwidth of RDMA WRITE: perftest's ib_write_bw for pyverbs and shiftverbs."""

import sys
from pathlib import Path

# Behind everything else: an installed shiftverbs comes before the one next to this file.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.perftest.options import Test
from benchmarks.perftest.program import main

TEST = Test("ib_write_bw", "RDMA_Write BW Test", "write")

if __name__ == "__main__":
    sys.exit(main(TEST))
