# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.cmid`, re-exported: the connection manager; its QPs are not protected."""

from __future__ import annotations

from shiftverbs import mirror

mirror.reexport("cmid", globals())
