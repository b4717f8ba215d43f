# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.librdmacm_enums`, re-exported: the constants of librdmacm.

Releases of pyverbs that have it as `cm_enums` only: the constants of that.
"""

from __future__ import annotations

from shiftverbs.mirroring import reexport

reexport.reexport_enums("librdmacm_enums", globals())
