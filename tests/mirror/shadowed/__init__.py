# SPDX-License-Identifier: BSD-3-Clause
"""Tests of the mirror with failover running, each in a process of its own: see ../test_shadowed.py."""
