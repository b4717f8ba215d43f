# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.xrcd`: XRC domains, re-exported, not protected; XRCD is closed in good order by the collector too."""

from __future__ import annotations

from typing import Any

import pyverbs.xrcd as _base

from shiftverbs._core import whole
from shiftverbs.mirroring import lifetime, reexport


class XRCD(lifetime.Tracked, _base.XRCD):
    """An XRC domain, as with pyverbs."""

    @whole
    def __init__(self, context: Any, init_attr: Any) -> None:
        """As pyverbs' (context: Context; init_attr: XRCDInitAttr): verb ibv_open_xrcd.

        Raises PyverbsRDMAError as the verb does.
        """
        super().__init__(context, init_attr)
        self._node = lifetime.Node(self, context)


reexport.reexport("xrcd", globals())
