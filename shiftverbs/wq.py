# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.wq`, re-exported: work queues and RSS; not protected."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("wq", globals())
