# SPDX-License-Identifier: BSD-3-Clause
"""The data path: see `_core.pyx`."""
