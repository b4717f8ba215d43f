# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.cm_enums`, re-exported: the constants of librdmacm.

Releases of pyverbs that have it as `librdmacm_enums` only: the constants of that.
"""

from __future__ import annotations

from shiftverbs.mirroring import reexport

reexport.reexport_enums("cm_enums", globals())
