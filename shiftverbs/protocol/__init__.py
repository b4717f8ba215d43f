# SPDX-License-Identifier: BSD-3-Clause
"""What two peers agree on about one QP, and when: pure, no I/O, no clock. Events in, actions out.

`pair` is the door: `PairProtocol.handle(event, now)`.
"""
