# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.dma_util`, re-exported: memory barriers and MMIO."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("dma_util", globals())
