# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.flow`, re-exported: flow steering."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("flow", globals())
