# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `shiftverbs run`, `doctor`, `status`, `top`, `demo`."""
