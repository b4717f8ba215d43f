# SPDX-License-Identifier: BSD-3-Clause
"""Completion queues and completion channels on the backup NICs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError

from shiftverbs._core import Unbroken
from shiftverbs.shadows.shadow import NotReady, Shadow, Slot, require

logger = logging.getLogger("shiftverbs.shadow")


class ShadowChannel(Shadow):
    """ibv_comp_channel. core: the ChannelCore that merges the NICs' events."""

    kind = "completion channel"

    def __init__(self, domain: Any, default: int, core: Any) -> None:
        super().__init__(domain, default)
        self.core = core
        self.start()

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        slot.handle, slot.number = nic.verbs.create_channel(nic.ctx)
        self.core.attach(k, slot.handle)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.destroy_channel(handle)

    def _detach(self, k: int) -> None:
        self.core.detach(k)


class ShadowCQ(Shadow):
    """ibv_cq. core: the CQCore that the application polls; cqe: its capacity as the application knows it.

    The default CQ and the shadows grow with the QPs that use them: an error completes every outstanding WR,
    signaled or not, and an overrun kills the CQ for all.
    """

    kind = "CQ"

    def __init__(
        self, domain: Any, default: int, core: Any, cqe: int, channel: ShadowChannel | None, vector: int
    ) -> None:
        super().__init__(domain, default)
        self.core = core
        self.channel = channel
        self.application_cqe = cqe
        self._hardware_cqe = cqe
        self._vector = vector
        self._protected = 0
        self._others = 0
        # Across resize_cq. A handler that ran in the wait for it could close the CQ that waits.
        self._lock = Unbroken(threading.RLock(), shut=True)
        self.start()

    @property
    def needed(self) -> int:
        """Entries that must fit: the application's, or the sum of its QPs' queues and our own WCs."""
        return max(self.application_cqe, self._protected + self._others if self._protected else 0)

    def reserve(self, entries: int) -> None:
        """Make room for one more protected QP. Raises OSError where the default NIC has none; then nothing changed."""
        with self._lock:
            self._protected += entries
            try:
                if self.needed > self._hardware_cqe:
                    self._hardware_cqe = self.domain.nic.verbs.resize_cq(self.default, self.needed)
            except OSError:
                self._protected -= entries
                raise
        self._grow()

    def release(self, entries: int) -> None:
        """The protected QP is gone. CQs are not made smaller."""
        if self.is_inherited:  # whoever had the lock may not exist in this process
            return
        with self._lock:
            self._protected -= entries

    def count_other(self, entries: int) -> None:
        """An unprotected QP with this many WRs came (or, negative, went)."""
        if self.is_inherited:
            return
        refused: OSError | None = None
        with self._lock:
            self._others += entries
            if self.needed > self._hardware_cqe:
                try:
                    self._hardware_cqe = self.domain.nic.verbs.resize_cq(self.default, self.needed)
                except OSError as error:
                    refused = error
        # Not under the lock: the program's log handlers may take their time.
        if refused is not None:
            text = (
                "a CQ cannot have more than %d entries (%s): QPs for which that is too few are not protected"
            )
            logger.info(text, self._hardware_cqe, refused)

    def resize(self, cqe: int, resize: Callable[[int], None], granted: Callable[[], int]) -> None:
        """The application's ibv_resize_cq: resize(entries) does it, granted() reads what became of it."""
        if self.is_inherited:
            resize(cqe)
            self.application_cqe = granted()
            return
        with self._lock:
            if cqe < 1 or not self._protected:
                resize(cqe)
                self.application_cqe = self._hardware_cqe = granted()
            else:
                if cqe < self.application_cqe and self._waiting() > cqe:
                    # The hardware's has room. An application's own would have to hold them.
                    raise PyverbsRDMAError("Failed to resize CQ", errno.EINVAL)
                needed = max(cqe, self._protected + self._others)
                resize(needed)
                self._hardware_cqe = granted()
                self.application_cqe = cqe if needed > cqe else self._hardware_cqe
        self._grow()

    def _waiting(self) -> int:
        """How many completions the application has not taken, on whichever NIC they are."""
        for k in range(1 + len(self.slots)):
            if self.core.is_active(k):
                with contextlib.suppress(PyverbsRDMAError):  # a NIC that is gone
                    self.core.drain(k)
        return int(self.core.buffered)

    def _grow(self) -> None:
        """Let the shadows follow."""
        if self.closed or self._pid != os.getpid():
            return
        for k, nic in enumerate(self.domain.backups, 1):
            if self.slots[k - 1].size < self.needed:
                nic.worker.post(self._fit, k, nic)

    def _fit(self, k: int, nic: Any) -> None:
        """On the NIC's thread: make the shadow as deep as needed."""
        slot = self.slots[k - 1]
        if self.closed or not slot.handle or slot.size >= self.needed:
            return
        try:
            slot.size = nic.verbs.resize_cq(slot.handle, self.needed)
        except OSError as error:
            logger.info(
                "a CQ on the backup NIC %s cannot have more than %d entries: %s", nic.name, slot.size, error
            )

    def room(self, k: int, nic: Any) -> None:
        """On the NIC's thread: make sure that shadow k is deep enough. Raises NotReady."""
        slot = self.slots[k - 1]
        while slot.size < self.needed:  # which may go on growing meanwhile
            before = slot.size
            self._fit(k, nic)
            if slot.size <= before:
                raise NotReady(f"its CQ has {slot.size} entries instead of {self.needed}")

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        channel = require(self.channel, k) if self.channel is not None else 0
        vector = self._vector % max(1, int(nic.limits.get("num_comp_vectors", 1)))
        slot.handle, slot.size = nic.verbs.create_cq(nic.ctx, self.needed, channel, vector)
        self.core.attach(k, slot.handle)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.destroy_cq(handle)

    def _detach(self, k: int) -> None:
        self.core.detach(k)
