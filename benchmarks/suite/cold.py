# SPDX-License-Identifier: BSD-3-Clause
"""What the caches have to do with fallback: the protocol's first step, just run before, and after something else.

A failure comes when nothing of what handles it has run for long. The pure core is the part of that which can be run
by itself: no NIC, no thread, no system call in it.
"""

from __future__ import annotations

import random
import time

from shiftverbs.protocol import events as ev
from shiftverbs.protocol.pair import LocalPair, PairProtocol, ProtocolConfig

#: Idle between two steps, in seconds, as before the failures that are measured.
IDLE_S = 0.05
STEPS = 40


def _protected() -> PairProtocol:
    pairs = [LocalPair(bytes(16), 0, qpn, 5) for qpn in (1, 2)]
    made = PairProtocol(ProtocolConfig(), pairs, True, random.Random(1), 0)
    made.pairs[1].works = made.pairs[1].clean = True
    return made


def first_steps(idle_s: float) -> list[float]:
    """Take the first step of a SWITCH on fresh QPs.

    :param idle_s: how long nothing is done before each, in seconds
    :return: microseconds
    :raises RuntimeError: what is measured is no SWITCH
    """
    took = []
    for protocol in [_protected() for _ in range(STEPS)]:
        time.sleep(idle_s)
        begun = time.perf_counter_ns()
        actions = protocol.handle(ev.PathFailed(0, "its port is down", False, None), 1)
        took.append((time.perf_counter_ns() - begun) / 1000)
        if not any(isinstance(action, ev.SwitchStarted) for action in actions):
            raise RuntimeError(f"no SWITCH: {actions}")
    return took
