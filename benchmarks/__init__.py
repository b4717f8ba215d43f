# SPDX-License-Identifier: BSD-3-Clause
"""perftest's programs for pyverbs and shiftverbs. See `python benchmarks/ib_write_bw.py --help`."""
