#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Pulls of tensors beside gRPC. See `python benchmarks/tensors.py --help`."""

import sys
from pathlib import Path

# Behind everything else: an installed shiftverbs comes before the one next to this file.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.suite.tensors import main

if __name__ == "__main__":
    sys.exit(main())
