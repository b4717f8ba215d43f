# SPDX-License-Identifier: BSD-3-Clause
"""Keys that a NIC must not give to the application's memory for now.

A peer that sends to a backup of ours may still have WRs on their way by the key of memory that is gone. Some NICs give
such a key out again at once. It goes to a page of ours then, which nobody may reach, until nothing can come by it.

Such a page is also what a WR names on a backup whose own memory is gone: so the NIC itself refuses it, in its turn.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("shiftverbs.shadow")


class Registering(Protocol):
    """Of a NIC (nic.Nic), what registering takes: its thread for that, raw verbs, a PD of ours there."""

    name: str
    registrar: Any
    verbs: Any
    pd: int


class Plugs:
    """The registrations of that page on one NIC. In the thread that registers only; but `nobodys`, `ask_nobodys`.

    keys: the rkeys that they keep from others, and their handles; nobodys: an lkey that no QP of the application may
    use, for the page is in a PD of ours (IBA 10.6.3): None before `ask_nobodys`, 0 where the NIC registers none.
    """

    def __init__(self, nic: Registering) -> None:
        self._nic = nic
        self._page: mmap.mmap | None = None
        self.keys: dict[int, int] = {}
        self.nobodys: int | None = None
        self._nobodys_handle = 0
        self._asked = False

    def ask_nobodys(self) -> None:
        """Have `nobodys` made."""
        if not self._asked:
            self._asked = True
            self._nic.registrar.post(self._make_nobodys)

    def _make_nobodys(self) -> None:
        try:
            self._nobodys_handle, lkey, _ = self._register()
        except OSError as error:
            logger.debug("%s registers no page of ours: %s", self._nic.name, error)
            lkey = 0
        self.nobodys = lkey

    def _register(self) -> tuple[int, int, int]:
        if self._page is None:
            self._page = mmap.mmap(-1, mmap.PAGESIZE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        made: tuple[int, int, int] = self._nic.verbs.reg_mr(self._nic.pd, address, mmap.PAGESIZE, address, 0)
        return made

    def plug(self, is_held: Callable[[int], bool]) -> None:
        """Take every key that `is_held` and that the NIC would give out next. Raises OSError."""
        while True:  # as often as there are such keys, at most
            handle, _, rkey = self._register()
            if not is_held(rkey):
                self._nic.verbs.dereg_mr(handle)
                return
            self.keys[rkey] = handle

    def release(self, is_held: Callable[[int], bool]) -> None:
        """Release what is not held any more."""
        for rkey in [rkey for rkey in self.keys if not is_held(rkey)]:
            try:
                self._nic.verbs.dereg_mr(self.keys.pop(rkey))
            except OSError as error:
                logger.debug("a key of %s is kept: %s", self._nic.name, error)

    def close(self) -> None:
        """Let go of everything. Raises OSError."""
        self.release(lambda rkey: False)
        handle, self._nobodys_handle, self.nobodys = self._nobodys_handle, 0, 0
        if handle:
            self._nic.verbs.dereg_mr(handle)
