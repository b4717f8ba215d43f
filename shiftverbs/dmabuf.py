# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.dmabuf`, re-exported: dma-buf memory."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("dmabuf", globals())
