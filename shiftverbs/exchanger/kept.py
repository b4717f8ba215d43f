# SPDX-License-Identifier: BSD-3-Clause
"""What a forked child must not keep open: its copy would stand in for a broker that has died, or hold a lock.

Such descriptors are there for moments only, while a broker is started; but programs fork in any moment. The child
closes them before anything else of its own runs.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol


class Closable(Protocol):
    """A socket or a file."""

    def close(self) -> object:
        """Close the descriptor; may be called again."""


# Held while descriptors are made and noted here, and during a fork: no fork comes in between. Reentrant, because a
# signal's handler may fork in a thread that has it.
making = threading.RLock()
_kept: dict[int, Closable] = {}


def keep(*closables: Closable) -> None:
    """Have these closed in every child that is forked from now on. To be called under `making`, where they are made."""
    for each in closables:
        _kept[id(each)] = each


def let_go(*closables: Closable) -> None:
    """These are closed, or children are told of them otherwise."""
    for each in closables:
        _kept.pop(id(each), None)


def _in_child() -> None:
    for each in list(_kept.values()):
        try:
            each.close()
        except OSError:
            pass
    _kept.clear()
    making.release()


os.register_at_fork(before=making.acquire, after_in_parent=making.release, after_in_child=_in_child)
