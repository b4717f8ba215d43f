#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Bus bandwidth of torch's allreduce over the shift backend; plain pyverbs, gloo and ib_write_bw -b beside it."""

import sys
from pathlib import Path

# Behind everything else: an installed shiftverbs comes before the one next to this file.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.suite.allreduce import main

if __name__ == "__main__":
    sys.exit(main())
