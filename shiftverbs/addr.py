# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.addr`: addresses and address handles, re-exported; AH is closed in good order by the collector too."""

from __future__ import annotations

from typing import Any

import pyverbs.addr as _base

from shiftverbs.mirroring import lifetime, reexport


class AH(lifetime.Tracked, _base.AH):
    """An address handle, as with pyverbs."""

    def __init__(self, pd: Any, **kwargs: Any) -> None:
        """As pyverbs' (pd: PD; attr=AHAttr, or wc=, grh= and port_num= of a message): verb ibv_create_ah.

        Raises PyverbsRDMAError as the verb does; a route that must be resolved may take a second.
        """
        super().__init__(pd, **kwargs)
        self._node = lifetime.Node(self, pd)


reexport.reexport("addr", globals())
