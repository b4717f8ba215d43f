# SPDX-License-Identifier: BSD-3-Clause
"""Which path is slow, whose fault that is, and whether moving pays: pure, no I/O, no clock. Samples in, actions out.

`detector` is the door: `Stragglers.handle_sample`, `handle_ping`, `poll`. Nothing of ours is imported here.
"""
