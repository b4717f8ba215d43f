# SPDX-License-Identifier: BSD-3-Clause
"""Which CQs are polled: by the application, and by us while completions matter that it may not poll for.

Everything here runs under the driver's lock.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pyverbs.pyverbs_error import PyverbsRDMAError

if TYPE_CHECKING:
    from shiftverbs._core import CQCore, QPCore

logger = logging.getLogger("shiftverbs.driver")

# Between two looks for completions that the application may not poll for; and the part of our time that looks may take.
LOOK_NS = 500_000
LOOK_SHARE = 4
# Where nothing comes (keys are late, a NIC hangs) looks grow sparse: what comes is seen late by an eighth of the time
# since anything happened, and never by more than this.
PATIENCE = 8
LONGEST_LOOK_NS = 8_000_000


class Carrier(Protocol):
    """A connection whose work is carried by pairs, and completes in their CQs."""

    @property
    def core(self) -> QPCore:
        """Its part in the data path."""

    def carried(self) -> set[int]:
        """The backup pairs whose CQs need no polling for it any more; forgets them."""


class Looks:
    """Which CQs each connection wants polled. now_ns: the clock.

    due_ns: when `look` is due; None where nobody wants it.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        # The CQs, by pair, where connections have work: the application's polls look there.
        self._active: collections.Counter[tuple[CQCore, int]] = collections.Counter()
        # The CQs that some connection wants polled: what each wants, how many want each.
        self._looks: dict[Carrier, list[tuple[CQCore, int]]] = {}
        self._looked_at: collections.Counter[tuple[CQCore, int]] = collections.Counter()
        self._look_ns = 0
        self.due_ns: int | None = None
        # Since when they found nothing, and nothing happened.
        self._in_vain_ns = 0

    def activate(self, cq: CQCore, k: int) -> None:
        """One more connection carries work on pair k of this CQ: the application's polls look there too."""
        cq.set_active(k, True)
        self._active[cq, k] += 1

    def settle(self, connection: Carrier) -> None:
        """Everything of this connection is on the default pair, or gone: its polls need not look elsewhere."""
        for k in sorted(connection.carried()):
            for cq in dict.fromkeys((connection.core.recv_cq, connection.core.send_cq)):
                self._active[cq, k] -= 1
                if self._active[cq, k] <= 0:
                    del self._active[cq, k]
                    cq.set_active(k, False)

    def look_at(self, connection: Carrier, queues: list[tuple[CQCore, int]]) -> None:
        """From now on look for completions in these (CQ, pair), for this connection's sake, and in none else.

        Connections share CQs: a thousand of them in the middle of something cost one look at each CQ, not a thousand.
        """
        if not self._looked_at.keys() >= set(queues):
            self._in_vain_ns = now = self._now_ns()
            soon = now + LOOK_NS
            self._look_ns = min(self._look_ns, soon) if self._looked_at else soon
        self._looked_at.update(queues)
        for queue in self._looks.pop(connection, ()):
            self._looked_at[queue] -= 1
            if not self._looked_at[queue]:
                del self._looked_at[queue]
        if queues:
            self._looks[connection] = queues
        self.due_ns = self._look_ns if self._looked_at else None

    def expect(self) -> None:
        """Something has happened that may complete soon: looks that had grown sparse are dense again."""
        self._in_vain_ns = now = self._now_ns()
        self._look_ns = min(self._look_ns, now + LOOK_NS)
        if self._looked_at:
            self.due_ns = self._look_ns

    def look(self) -> None:
        """Look at each of them, and let the application's next poll have what is its."""
        began = self._now_ns()
        found = 0
        for cq, k in list(self._looked_at):
            try:
                found += cq.drain(k)
            except PyverbsRDMAError as error:  # a dying NIC's: it holds nothing
                logger.debug("a CQ of pair %d: %s", k, error)
        ended = self._now_ns()
        if found:
            self._in_vain_ns = ended
        sparse = min((ended - self._in_vain_ns) // PATIENCE, LONGEST_LOOK_NS)
        self._look_ns = ended + max(LOOK_NS, sparse, LOOK_SHARE * (ended - began))
        self.due_ns = self._look_ns if self._looked_at else None
