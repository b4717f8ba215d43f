# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.fork`, re-exported: fork support."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("fork", globals())
