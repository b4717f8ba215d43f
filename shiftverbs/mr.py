# SPDX-License-Identifier: BSD-3-Clause
"""`pyverbs.mr`: MR, DMMR, DmaBufMR and MW are ours, the rest is re-exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyverbs.mr as _base

from shiftverbs import enums as e
from shiftverbs._core import whole, whole_close, whole_end_anywhere
from shiftverbs.mirroring import lifetime, reexport
from shiftverbs.shadows import pyverbs_objects
from shiftverbs.shadows.mr import ShadowMR


class MR(lifetime.Ended, _base.MR):
    """A memory region, and the same memory registered on each backup NIC."""

    _node: lifetime.Node | None = None
    _shadow: ShadowMR | None = None
    _pd: Any = None
    _unshadowable = ""

    @whole
    def __init__(
        self,
        creator: Any,
        length: int = 0,
        access: int = 0,
        address: Any = None,
        implicit: bool = False,
        **kwargs: Any,
    ) -> None:
        """As pyverbs': verb ibv_reg_mr (ibv_reg_mr_iova2 with iova=), or ibv_import_mr with handle=.

        creator: PD or CMID; length: bytes; access: IBV_ACCESS_* flags; address: of memory of the caller's, None to
        have it allocated; implicit: the whole address space, on demand. Raises PyverbsRDMAError as the verb does.
        The backups' registrations are made by their NICs' threads, later.
        """
        super().__init__(creator, length, access, address, implicit, **kwargs)
        why = ""
        if kwargs.get("handle") is not None:
            why = "an imported MR"
        elif implicit:
            why = "an implicit ODP MR"
        self._record(creator, access, why, kwargs.get("iova"))

    def _record(self, creator: Any, access: int, why: str, iova: int | None = None) -> None:
        self._node = lifetime.Node(self, creator)
        self._pd = creator
        if access & e.IBV_ACCESS_ON_DEMAND:  # type: ignore[attr-defined]
            why = why or "an ODP MR"
        self._unshadowable = why
        self._shade(self.buf, self.length, access, iova)

    def _shade(
        self,
        address: int,
        length: int,
        access: int,
        iova: int | None,
        former: Sequence[int] = (),
        flags: int = 0,
        before: ShadowMR | None = None,
    ) -> bool:
        """Give it shadows, if its PD has some. Returns whether."""
        pd_shadow = getattr(self._pd, "_shadow", None)
        if pd_shadow is None or pd_shadow.is_inherited:
            return False
        address, iova = address or 0, address if iova is None else iova
        made = self._shadow = ShadowMR(
            pd_shadow,
            pyverbs_objects.mr_pointer(self),
            (address, length, iova, access),
            self.lkey,
            self.rkey,
            self._unshadowable,
            former,
            flags,
            before,
        )
        made.domain.runtime.await_peers(made)
        return True

    @whole
    def rereg(self, flags: int, pd: Any = None, addr: int = 0, length: int = 0, access: int = 0) -> None:
        """Verb ibv_rereg_mr, on the backups too; it returns when they have let go of the memory before.

        flags: IBV_REREG_MR_CHANGE_* for what changes; pd: new PD; addr, length: new memory, address and bytes;
        access: new IBV_ACCESS_* flags. Raises PyverbsRDMAError as the verb does.
        """
        old = self._shadow
        if old is None:
            super().rereg(flags, pd, addr, length, access)
            return
        address, size, iova, rights = old.region
        self._shadow = None
        former, changed = old.hand_over(), 0
        try:
            super().rereg(flags, pd, addr, length, access)
            changed = flags
            if flags & e.IBV_REREG_MR_CHANGE_TRANSLATION:  # type: ignore[attr-defined]
                address, size, iova = addr, length, addr
            if flags & e.IBV_REREG_MR_CHANGE_PD:  # type: ignore[attr-defined]
                self._pd = pd
                if self._node is not None:
                    self._node.closed()
                self._node = lifetime.Node(self, pd)
            if flags & e.IBV_REREG_MR_CHANGE_ACCESS:  # type: ignore[attr-defined]
                rights = access
        finally:
            if not changed:
                # Refused: as before, which is a change of nothing to no NIC.
                changed = e.IBV_REREG_MR_CHANGE_ACCESS  # type: ignore[attr-defined]
            shaded = False
            try:
                shaded = self._shade(address, size, rights, iova, former, changed, old)
            finally:
                old.handed_over()
            if not shaded:  # the PD is one without shadows
                self._shadow = old  # as long as it is waited for
                old.take_back(former)
            # The translation that this verb ended may have been the last use of the memory.
            old.wait()
            if not shaded and self._shadow is old:
                self._shadow = None

    @whole_close(pyverbs_objects.MR_POINTER, anew=True, anywhere=True)
    def close(self, _is_open: Any = lifetime.is_open_mr) -> None:
        """Verb ibv_dereg_mr. First the backups' registrations go, since the memory may go with this one.

        A second call does nothing. Raises PyverbsRDMAError as the verb does.
        """
        if not _is_open(self):
            return
        old = self._shadow
        while self._shadow is not None:  # another one, where a signal's handler changed it while this waited
            old = self._shadow
            old.close()  # Ctrl-C while it waits for a NIC: the next close waits, too
            if self._shadow is old:
                self._shadow = None
        try:
            super().close()
        except Exception:
            if old is not None and lifetime.is_open_mr(self):
                address, length, iova, access = old.region
                self._shade(address, length, access, iova)
            raise
        self._pd = None
        if self._node is not None:
            self._node.closed()

    @whole_end_anywhere
    def __del__(self, _finalize: Any = lifetime.finalize, _is_open: Any = lifetime.is_open_mr) -> None:
        _finalize(self, _is_open)


class DMMR(MR, _base.DMMR):
    """A region of device memory: only its own NIC can reach that."""

    @whole
    def __init__(self, pd: Any, length: int, access: int, dm: Any, offset: int) -> None:
        """As pyverbs': verb ibv_reg_dm_mr.

        pd: PD; length, offset: bytes, within dm (DM); access: IBV_ACCESS_* flags.
        Raises PyverbsRDMAError as the verb does.
        """
        _base.DMMR.__init__(self, pd, length, access, dm, offset)
        self._record(pd, access, "device memory")


class DmaBufMR(MR, _base.DmaBufMR):
    """A region of a dma-buf: not shadowed."""

    @whole
    def __init__(
        self,
        pd: Any,
        length: int,
        access: int,
        dmabuf: Any = None,
        offset: int = 0,
        gpu: int = 0,
        gtt: int = 0,
        **kwargs: Any,
    ) -> None:
        """As pyverbs': verb ibv_reg_dmabuf_mr.

        pd: PD; length, offset: bytes, within dmabuf (DmaBuf, or its descriptor; None: one is made on the GPU number
        gpu, in its system memory if gtt); access: IBV_ACCESS_* flags. Raises PyverbsRDMAError as the verb does.
        """
        _base.DmaBufMR.__init__(self, pd, length, access, dmabuf, offset, gpu, gtt, **kwargs)
        self._record(pd, access, "a dma-buf")


class MW(lifetime.Tracked, _base.MW):
    """A memory window, as with pyverbs: not shadowed."""

    @whole
    def __init__(self, pd: Any, mw_type: int) -> None:
        """As pyverbs' (pd: PD; mw_type: IBV_MW_TYPE_1 or _2): verb ibv_alloc_mw.

        Raises PyverbsRDMAError as the verb does.
        """
        super().__init__(pd, mw_type)
        self._node = lifetime.Node(self, pd)

    @whole_close(pyverbs_objects.MW_POINTER, anywhere=True)
    def close(self, _is_open: Any = lifetime.is_open_mw) -> None:
        """Verb ibv_dealloc_mw. Raises PyverbsRDMAError as the verb does."""
        self._close(_is_open)

    @whole_end_anywhere
    def __del__(self, _finalize: Any = lifetime.finalize, _is_open: Any = lifetime.is_open_mw) -> None:
        _finalize(self, _is_open)


reexport.reexport("mr", globals())
