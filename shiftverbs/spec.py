# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.spec`, re-exported: flow specifications."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("spec", globals())
