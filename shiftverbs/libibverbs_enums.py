# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.libibverbs_enums`, re-exported: the constants of libibverbs.

Releases of pyverbs that have it as `enums` only: the constants of that.
"""

from __future__ import annotations

from shiftverbs.mirroring import reexport

reexport.reexport_enums("libibverbs_enums", globals())
