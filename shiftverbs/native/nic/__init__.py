# SPDX-License-Identifier: BSD-3-Clause
"""Access to the NICs: see `_nic.pyx`."""
