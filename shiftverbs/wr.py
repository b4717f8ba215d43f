# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.wr`, re-exported: work requests (SGE, SendWR, RecvWR)."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("wr", globals())
