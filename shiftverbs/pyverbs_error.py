# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.pyverbs_error`, re-exported, and ShiftError."""

from __future__ import annotations

from pyverbs.pyverbs_error import *  # noqa: F403
from pyverbs.pyverbs_error import PyverbsError


class ShiftError(PyverbsError):
    """What shiftverbs itself has to say, where pyverbs has no error for it.

    A QP that cannot be protected, or failover that cannot be started, where SHIFTVERBS_REQUIRE=1; `qp.shift.migrate`
    and `restore` of a QP that is not protected, or has no such pair.
    """
