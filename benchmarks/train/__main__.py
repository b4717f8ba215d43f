# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.train`."""

import sys

from benchmarks.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
