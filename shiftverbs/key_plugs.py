# SPDX-License-Identifier: BSD-3-Clause
"""Keys that a NIC must not give to the application's memory for now.

A peer that sends to a backup of ours may still have WRs on their way by the key of memory that is gone. Some NICs give
such a key out again at once. It goes to a page of ours then, which nobody may reach, until nothing can come by it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backup import Nic

logger = logging.getLogger("shiftverbs.shadow")


class Plugs:
    """The registrations of that page on one NIC. In the NIC's thread only.

    keys: the rkeys that they keep from others, and their handles.
    """

    def __init__(self, nic: Nic) -> None:
        self._nic = nic
        self._page: mmap.mmap | None = None
        self.keys: dict[int, int] = {}

    def plug(self, is_held: Callable[[int], bool]) -> None:
        """Take every key that `is_held` and that the NIC would give out next. Raises OSError."""
        verbs, pd = self._nic.verbs, self._nic.pd
        if self._page is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        while True:  # as often as there are such keys, at most
            handle, _, rkey = verbs.reg_mr(pd, address, mmap.PAGESIZE, address, 0)
            if not is_held(rkey):
                verbs.dereg_mr(handle)
                return
            self.keys[rkey] = handle

    def release(self, is_held: Callable[[int], bool]) -> None:
        """Let go of what is not held any more."""
        for rkey in [rkey for rkey in self.keys if not is_held(rkey)]:
            try:
                self._nic.verbs.dereg_mr(self.keys.pop(rkey))
            except OSError as error:
                logger.debug("a key of %s is kept: %s", self._nic.name, error)
