# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: see benchmarks/suite."""

import sys

from benchmarks.suite.cli import main

if __name__ == "__main__":
    sys.exit(main())
