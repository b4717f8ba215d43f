# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.utils`, re-exported: names of constants."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("utils", globals())
