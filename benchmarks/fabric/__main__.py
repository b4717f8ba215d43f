# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.fabric`."""

import sys

from benchmarks.fabric.cli import main

if __name__ == "__main__":
    sys.exit(main())
