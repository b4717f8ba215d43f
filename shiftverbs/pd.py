# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.pd`: PD and ParentDomain are ours, the rest is re-exported."""

from __future__ import annotations

from typing import Any

import pyverbs.pd as _base

from shiftverbs._core import whole, whole_close, whole_end
from shiftverbs.mirroring import eligibility, lifetime, reexport
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.pd import ShadowPD


class PD(lifetime.Ended, _base.PD):
    """A protection domain, and one on each backup NIC."""

    _node: lifetime.Node | None = None
    _shadow: ShadowPD | None = None
    _why = ""

    @whole
    def __init__(self, creator: Any, **kwargs: Any) -> None:
        """As pyverbs' (creator: Context or CMID): verb ibv_alloc_pd, or ibv_import_pd with handle=.

        Raises PyverbsRDMAError as the verb does. The backups' PDs are made by their NICs' threads.
        """
        super().__init__(creator, **kwargs)
        self._record(creator, "its PD was imported" if kwargs.get("handle") is not None else "")

    def _record(self, creator: Any, why: str) -> None:
        self._node = lifetime.Node(self, creator)
        domain, reason = eligibility.domain_of(creator)
        self._why = why or reason
        if domain is not None and not self._why:
            self._shadow = ShadowPD(domain, pyverbs_objects.pointer(self))

    @whole_close(pyverbs_objects.POINTER)
    def close(self, _is_open: Any = lifetime.is_open) -> None:
        """Verb ibv_dealloc_pd, after closing everything made from this PD.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        try:
            super().close()
        finally:
            if not _is_open(self):
                if self._shadow is not None:
                    self._shadow.close()
                if self._node is not None:
                    self._node.closed()

    @whole_end
    def __del__(self, _finalize: Any = lifetime.finalize) -> None:
        _finalize(self)


class ParentDomain(PD, _base.ParentDomain):
    """A parent domain: not shadowed, because its allocators and thread domains belong to one NIC."""

    @whole
    def __init__(self, context: Any, attr: Any) -> None:
        """As pyverbs' (context: Context; attr: ParentDomainInitAttr): verb ibv_alloc_parent_domain.

        Raises PyverbsRDMAError as the verb does.
        """
        _base.ParentDomain.__init__(self, context, attr)
        self._record(context, "its PD is a parent domain")


reexport.reexport("pd", globals())
