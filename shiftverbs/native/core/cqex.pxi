# SPDX-License-Identifier: BSD-3-Clause
# CQCursor: the completion that an application reads field by field on an extended CQ. Included by _core.pyx.

cdef int cq_fill(CQState *c) noexcept nogil:
    """Poll the hardware CQs in turn until one has something for the application. 0, or the first negative errno."""
    cdef int i, n
    cdef int failed = 0
    for i in range(c.n_active):
        n = cq_drain(c, c.order[i])
        if n < 0:
            failed = failed if failed else n
        else:
            c.polled += n
        if c.count:
            break
    return failed


@cython.no_gc
@cython.final
cdef class CQCursor:
    """start_poll … next_poll … end_poll over whichever NICs carry the traffic.

    The completion under the cursor is a copy, so nothing is locked between start_poll and end_poll, and a failover
    may happen there. Its wr_id and status are put where pyverbs' CQEX looks for them.

    :param core: CQCore of the extended CQ.
    :param cq_ex_ptr: address of the default NIC's ibv_cq_ex.
    """

    cdef CQCore core
    cdef ibv_cq_ex *ex
    cdef ibv_wc wc
    cdef object __weakref__

    def __cinit__(self, CQCore core not None, cq_ex_ptr):
        if not cq_ex_ptr:
            raise ValueError('a CQ has an address')
        self.core = core
        self.ex = <ibv_cq_ex *><uintptr_t>cq_ex_ptr
        memset(&self.wc, 0, sizeof(ibv_wc))

    cdef int take(self) except -1:
        cdef CQState *c = &self.core.c
        cdef int failed = 0
        cdef uint64_t before
        if shared.attention and run_driver_inline() == INHERITED:
            return EIO
        if not c.count:
            while True:
                before = c.changes
                failed = cq_fill(c)
                if shared.attention:
                    # What was just polled gave the driver something to do, and that may have made WCs.
                    run_driver_inline()
                if c.count or c.changes == before:
                    break
                # All that was taken is of a QP that was reset or closed meanwhile, or there is another CQ to look at.
            if c.heed and c.count:
                looked(c)
        if not c.count:
            if failed and not self.core.guards():
                return -failed
            return (look_ended(c) if c.heed else 0) or ENOENT
        cq_pop(c, &self.wc)
        self.ex.wr_id = self.wc.wr_id
        self.ex.status = self.wc.status
        return 0

    def start_poll(self, attr) -> int:
        """pyverbs' CQEX.start_poll: go to the oldest completion. 0; ENOENT where there is none; or another errno."""
        if attr is not None:
            if not isinstance(attr, _PollCqAttr):
                raise TypeError(f"Argument 'attr' has incorrect type (expected pyverbs.cq.PollCqAttr, got "
                                f"{type(attr).__name__})")
            if attr.comp_mask:
                return EINVAL
        return self.take()

    def poll_next(self) -> int:
        """pyverbs' CQEX.poll_next: go on to the next completion. Returns as start_poll."""
        return self.take()

    def end_poll(self) -> None:
        """pyverbs' CQEX.end_poll. Nothing is held between the two, so there is nothing to release."""

    def read_opcode(self) -> int:
        """Of the completion under the cursor: IBV_WC_*."""
        return self.wc.opcode

    def read_vendor_err(self) -> int:
        """Of the completion under the cursor: the vendor's code of an error."""
        return self.wc.vendor_err

    def read_byte_len(self) -> int:
        """Of the completion under the cursor: bytes moved."""
        return self.wc.byte_len

    def read_imm_data(self) -> int:
        """Of the completion under the cursor: immediate data as on the wire (big endian), or the invalidated rkey."""
        return self.wc.imm_data

    def read_qp_num(self) -> int:
        """Of the completion under the cursor: the number of the application's QP."""
        return self.wc.qp_num

    def read_src_qp(self) -> int:
        """Of the completion under the cursor: the sender's QP number (UD)."""
        return self.wc.src_qp

    def read_wc_flags(self) -> int:
        """Of the completion under the cursor: IBV_WC_GRH, IBV_WC_WITH_IMM, IBV_WC_WITH_INV."""
        return self.wc.wc_flags

    def read_slid(self) -> int:
        """Of the completion under the cursor: the sender's LID (UD)."""
        return self.wc.slid

    def read_sl(self) -> int:
        """Of the completion under the cursor: the service level (UD)."""
        return self.wc.sl

    def read_dlid_path_bits(self) -> int:
        """Of the completion under the cursor: the low bits of the LID it was sent to (UD)."""
        return self.wc.dlid_path_bits
