# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.base`, re-exported: the base classes."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("base", globals())
