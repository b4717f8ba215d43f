# SPDX-License-Identifier: BSD-3-Clause
"""For tests that connect and send within a millisecond: their first send waits until failover would work.

The tests are not changed: each protected QP of theirs gets a `post_send` that waits once, and says what it found.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

__all__ = ["Settle"]


class Settle:
    """Counts the QPs that tests make with shiftverbs by their protection when traffic began.

    limit_s: how long a first send waits for QPs that are still pairing, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pairing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._found: dict[int, str] = {}
        self._made = 0

    def install(self) -> None:
        """Look at every QP that is made from now on."""
        from shiftverbs.qp import QP

        create: Any = QP.__init__

        def __init__(qp: Any, *args: Any, **kwargs: Any) -> None:
            create(qp, *args, **kwargs)
            self._new(qp)

        QP.__init__ = __init__  # type: ignore[method-assign]

    def _new(self, qp: Any) -> None:
        self._made += 1
        number = self._made
        if qp._core is None:
            self._found[number] = f"unprotected: {qp.shift.why}"
            return
        self._found[number] = "could be protected, no traffic"
        qp.conformance_number = number
        self._pairing.add(qp)
        if "post_send" in vars(qp):
            here = weakref.ref(qp)

            def post_send(wr: Any, bad_wr: Any = None) -> None:
                first = here()
                assert first is not None
                self._wait()
                first.post_send(wr, bad_wr)

            qp.post_send = post_send

    def _wait(self) -> None:
        """Until no QP in RTS is pairing any more; then each sends as it always does."""
        for qp in list(self._pairing):
            if qp._core is None:
                self._found[qp.conformance_number] = f"unprotected: {qp.shift.why}"
            elif qp.shift.pairing is None and qp.qp_state != 3:
                continue  # not connected: nothing to wait for
            elif qp.shift.wait_protected(self._limit_s):
                self._found[qp.conformance_number] = "protected"
            else:
                self._found[qp.conformance_number] = f"{qp.shift.status.lower()}: {qp.shift.why}"
            if qp._core is not None and "post_send" in vars(qp):
                qp.post_send = qp._core.post_send
            self._pairing.discard(qp)

    def taken(self) -> dict[str, int]:
        """What was found of the QPs made since the last call: how they were protected -> how many."""
        found, self._found = self._found, {}
        self._pairing.clear()
        return dict(collections.Counter(found.values()))
