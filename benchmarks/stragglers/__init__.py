# SPDX-License-Identifier: BSD-3-Clause
"""Stragglers in virtual time: rails that get slow, applications on them, and who decides where traffic goes.

`python -m benchmarks.stragglers`; what it shows: docs/stragglers.md. No sockets, no clock; needs nothing compiled.
"""
