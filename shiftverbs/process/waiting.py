# SPDX-License-Identifier: BSD-3-Clause
"""Long waits inside a control verb, which puts signals' handlers off (`_core.whole`): they run between two slices.

Not in the middle of a wait: the standard library's own waits are Python, and what is raised there breaks their locks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from shiftverbs import _core

SLICE_S = 0.05


def look_for_signals() -> None:
    """Have due handlers run, which may raise; does nothing in the driver and in a `__del__`, where none may."""
    _core.interruptibly(int)


def in_slices(
    wait: Callable[[float], bool],
    timeout_s: float | None,
    raised: list[BaseException] | None = None,
    to_the_end: bool = True,
) -> bool:
    """Whether wait(seconds) comes true within timeout_s (None: whenever it does). Handlers may raise meanwhile.

    raised: takes what they raise, for `_core.raise_where_it_ends`; to_the_end: that does not end the wait.
    """
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        if wait(max(0.0, min(left, SLICE_S))):
            return True
        if left <= SLICE_S:
            return False
        try:
            look_for_signals()
        except BaseException as error:
            if raised is None:
                raise
            raised.append(error)
            if not to_the_end:
                return False


def while_it_moves(
    wait: Callable[[float], bool], hangs: Callable[[float], bool], longest_s: float, until: float
) -> bool:
    """Whether wait(seconds) comes true, in a thread that others wait for, while each single thing that it waits for
    takes no longer than longest_s, and not behind `until` (time.monotonic()).

    hangs: whether what is under way has taken longer than so many seconds. What waits for its turn does not hang: a
    thread that gets little of a busy machine, say. No handler is run meanwhile.
    """
    while True:
        is_last = hangs(longest_s) or time.monotonic() >= until
        if wait(0.0 if is_last else longest_s / 10):
            return True
        if is_last:
            return False
