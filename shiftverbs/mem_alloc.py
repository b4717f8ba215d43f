# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.mem_alloc`, re-exported: memory outside Python's heap."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("mem_alloc", globals())
