# SPDX-License-Identifier: BSD-3-Clause
"""Congestion and flow control on software NICs' rails: figures and numbers (docs/fabric.md)."""
