# SPDX-License-Identifier: BSD-3-Clause
"""Protection domains on the backup NICs."""

from __future__ import annotations

import functools
from typing import Any

from shiftverbs.shadows.shadow import Shadow, Slot


class ShadowPD(Shadow):
    """ibv_pd. behind_memory: set where the thread for memory may have MRs of it when it ends."""

    kind = "PD"

    def __init__(self, domain: Any, default: int) -> None:
        super().__init__(domain, default)
        self.start()

    def _create(self, k: int, nic: Any, slot: Slot) -> None:
        slot.handle = nic.verbs.alloc_pd(nic.ctx)
        self._ready(k, slot)

    def _destroy(self, nic: Any, handle: int) -> None:
        nic.verbs.dealloc_pd(handle)

    def _dispose_later(self, k: int, nic: Any) -> None:
        """Behind its MRs."""
        nic.in_turn((nic.worker, nic.registrar, nic.worker), self._dispose, k, nic)

    def _destroy_later(self, k: int, nic: Any, handle: int) -> None:
        """Behind its MRs."""
        ended = functools.partial(self._destroyed, k, nic)
        nic.in_turn((nic.worker, nic.registrar), nic.worker.destroy, ended, self.kind, handle)
