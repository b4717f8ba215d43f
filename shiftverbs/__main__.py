# SPDX-License-Identifier: BSD-3-Clause
"""`python -m shiftverbs`: the same as the console command `shiftverbs`."""

import sys

from shiftverbs.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
