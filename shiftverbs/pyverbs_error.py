# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.pyverbs_error`, re-exported, and ShiftError."""

from __future__ import annotations

from pyverbs.pyverbs_error import PyverbsError

from shiftverbs import mirror


class ShiftError(PyverbsError):
    """What shiftverbs itself has to say: an unprotected QP where SHIFTVERBS_REQUIRE=1, an unknown backup NIC."""


mirror.reexport("pyverbs_error", globals())
