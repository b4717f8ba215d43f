# SPDX-License-Identifier: BSD-3-Clause
"""An extended QP's send operations: `wr_start`, a batch of WRs written piece by piece, `wr_complete`.

pyverbs writes into the provider's send queue, through function pointers of the ibv_qp_ex. A protected QP gathers the
batch beside it and enters it into the journal, which posts it with ibv_post_send: ibv_wr_post(3) lets the two mix. Like
there, a batch is posted whole or not at all, and what is wrong with a WR is told by wr_complete.
"""

from __future__ import annotations

import errno
from typing import Any

import pyverbs.qp

from shiftverbs import _core
from shiftverbs.mirroring import eligibility
from shiftverbs.shadows import pyverbs_objects

_METHODS = (
    "wr_start",
    "wr_complete",
    "wr_abort",
    "wr_send",
    "wr_send_imm",
    "wr_send_inv",
    "wr_local_inv",
    "wr_rdma_read",
    "wr_rdma_write",
    "wr_rdma_write_imm",
    "wr_atomic_cmp_swp",
    "wr_atomic_fetch_add",
    "wr_set_sge",
    "wr_set_sge_list",
    "wr_set_inline_data",
    "wr_set_inline_data_list",
)


class SendOperations:
    """The ibv_wr_* methods, for QPEx: the builder's where the QP is protected, else pyverbs'.

    Each WR takes `wr_id` and `wr_flags` as they are when it is begun.
    """

    _builder: Any = None

    def _begin_operations(self, core: Any, send_ops_flags: int, cls: type) -> None:
        """Post to core, the QPCore, from now on; cls: the class whose methods are those below."""
        self._builder = _core.WrBuilder(core, pyverbs_objects.pointer(self), send_ops_flags)
        eligibility.shortcut(self, self._builder, cls, *_METHODS)

    def _end_operations(self) -> None:
        """Go on with pyverbs'."""
        self._builder = None
        eligibility.undo_shortcut(self, *_METHODS)

    def _writer(self) -> Any:
        return super() if self._builder is None else self._builder

    def wr_start(self) -> None:
        """Verb ibv_wr_start: begin a batch. One begun and not completed is forgotten."""
        self._writer().wr_start()

    def wr_complete(self) -> None:
        """Verb ibv_wr_complete: post the batch.

        Raises PyverbsRDMAError as the verb does: ENOMEM where the send queue has no room for all of it, EINVAL for a
        bad WR or state, EOPNOTSUPP for an operation that send_ops_flags does not name. Then nothing is posted.
        """
        self._writer().wr_complete()

    def wr_abort(self) -> None:
        """Verb ibv_wr_abort: forget the batch."""
        self._writer().wr_abort()

    def wr_send(self) -> None:
        """Verb ibv_wr_send."""
        self._writer().wr_send()

    def wr_send_imm(self, data: int) -> None:
        """Verb ibv_wr_send_imm. data: immediate data, in host order."""
        self._writer().wr_send_imm(data)

    def wr_send_inv(self, invalidate_rkey: int) -> None:
        """Verb ibv_wr_send_inv. invalidate_rkey: of the peer's memory window. It is not moved to a backup NIC."""
        self._writer().wr_send_inv(invalidate_rkey)

    def wr_local_inv(self, invalidate_rkey: int) -> None:
        """Verb ibv_wr_local_inv. invalidate_rkey: of our own memory window. It is not moved to a backup NIC."""
        self._writer().wr_local_inv(invalidate_rkey)

    def wr_rdma_read(self, rkey: int, remote_addr: int) -> None:
        """Verb ibv_wr_rdma_read. rkey, remote_addr: the peer's memory."""
        self._writer().wr_rdma_read(rkey, remote_addr)

    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None:
        """Verb ibv_wr_rdma_write. rkey, remote_addr: the peer's memory."""
        self._writer().wr_rdma_write(rkey, remote_addr)

    def wr_rdma_write_imm(self, rkey: int, remote_addr: int, data: int) -> None:
        """Verb ibv_wr_rdma_write_imm. rkey, remote_addr: the peer's memory; data: immediate data, in host order."""
        self._writer().wr_rdma_write_imm(rkey, remote_addr, data)

    def wr_atomic_cmp_swp(self, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
        """Verb ibv_wr_atomic_cmp_swp. rkey, remote_addr: 8 bytes of the peer's; compare, swap: 64-bit numbers."""
        self._writer().wr_atomic_cmp_swp(rkey, remote_addr, compare, swap)

    def wr_atomic_fetch_add(self, rkey: int, remote_addr: int, add: int) -> None:
        """Verb ibv_wr_atomic_fetch_add. rkey, remote_addr: 8 bytes of the peer's; add: 64-bit number."""
        self._writer().wr_atomic_fetch_add(rkey, remote_addr, add)

    def wr_set_sge(self, sge: Any) -> None:
        """Verb ibv_wr_set_sge: the buffer of the WR begun last. sge: SGE."""
        self._writer().wr_set_sge(sge)

    def wr_set_sge_list(self, num_sge: int, sg_list: Any) -> None:
        """Verb ibv_wr_set_sge_list: the buffers of the WR begun last. num_sge: how many of sg_list, SGEs, count."""
        self._writer().wr_set_sge_list(num_sge, sg_list)

    def wr_set_inline_data(self, addr: int, length: int) -> None:
        """Verb ibv_wr_set_inline_data: the data of the WR begun last, copied at once. addr: address; length: bytes."""
        self._writer().wr_set_inline_data(addr, length)

    def wr_set_inline_data_list(self, num_buf: int, buf_list: Any) -> None:
        """Verb ibv_wr_set_inline_data_list: the same from several places.

        num_buf: how many of buf_list, DataBuffers, count.
        """
        self._writer().wr_set_inline_data_list(num_buf, buf_list)

    def _not_protected(self, error: int, name: str, *args: Any) -> None:
        """Have pyverbs do it; of a protected QP, have wr_complete tell that it is not possible."""
        if self._builder is None:
            getattr(super(), name)(*args)
        else:
            self._builder.refuse(error)

    def wr_bind_mw(self, mw: Any, rkey: int, bind_info: Any) -> None:
        """Verb ibv_wr_bind_mw. mw: MW of type 2; rkey: its new rkey; bind_info: MWBindInfo. EOPNOTSUPP if protected."""
        self._not_protected(errno.EOPNOTSUPP, "wr_bind_mw", mw, rkey, bind_info)

    def wr_send_tso(self, hdr: int, hdr_sz: int, mss: int) -> None:
        """Verb ibv_wr_send_tso. hdr: address; hdr_sz, mss: bytes. EOPNOTSUPP if protected."""
        self._not_protected(errno.EOPNOTSUPP, "wr_send_tso", hdr, hdr_sz, mss)

    def wr_atomic_write(self, rkey: int, remote_addr: int, atomic_wr: bytes) -> None:
        """Verb ibv_wr_atomic_write. rkey, remote_addr: 8 bytes of the peer's; atomic_wr: 8 bytes. As wr_send_tso."""
        self._not_protected(errno.EOPNOTSUPP, "wr_atomic_write", rkey, remote_addr, atomic_wr)

    if hasattr(pyverbs.qp.QPEx, "wr_flush"):

        def wr_flush(self, rkey: int, remote_addr: int, length: int, ptype: int, level: int) -> None:
            """Verb ibv_wr_flush. rkey, remote_addr, length: the peer's memory; ptype, level: enums. As wr_send_tso."""
            self._not_protected(errno.EOPNOTSUPP, "wr_flush", rkey, remote_addr, length, ptype, level)

    def wr_set_ud_addr(self, ah: Any, remote_qpn: int, remote_rkey: int) -> None:
        """Verb ibv_wr_set_ud_addr. ah: AH; remote_qpn: QP number; remote_rkey: Q_Key. EINVAL if protected, being RC."""
        self._not_protected(errno.EINVAL, "wr_set_ud_addr", ah, remote_qpn, remote_rkey)

    def wr_set_xrc_srqn(self, remote_srqn: int) -> None:
        """Verb ibv_wr_set_xrc_srqn. remote_srqn: number of the peer's SRQ. EINVAL if protected, being RC."""
        self._not_protected(errno.EINVAL, "wr_set_xrc_srqn", remote_srqn)
