# SPDX-License-Identifier: BSD-3-Clause
# WrBuilder: work requests written piece by piece between wr_start and wr_complete. Included by _core.pyx.

ctypedef struct BuiltWR:
    ibv_send_wr wr
    size_t at              # its first SGE, or where its inline data begin


cdef int grow(void **memory, size_t *room, size_t wanted, size_t size) noexcept nogil:
    """Room for `wanted` items of `size` bytes. 0 or ENOMEM, nothing changed then."""
    cdef size_t slots = room[0] if room[0] else 16
    cdef void *bigger
    if wanted <= room[0]:
        return 0
    while slots < wanted:
        slots *= 2
    bigger = realloc(memory[0], slots * size)
    if bigger == NULL:
        return ENOMEM
    memory[0] = bigger
    room[0] = slots
    return 0


@cython.no_gc
@cython.final
cdef class WrBuilder:
    """ibv_wr_* of a protected QP. A batch is gathered here and enters the journal whole, or not at all.

    wr_id and wr_flags are taken from where pyverbs' QPEx puts them, when a WR is begun. What is wrong with a WR is
    told by wr_complete, as the first errno (ibv_wr_post(3)). One thread at a time between start and complete; a second
    wr_start begins anew.

    :param core: QPCore of the QP.
    :param qp_ptr: address of the default ibv_qp, created with IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.
    :param send_ops_flags: IBV_QP_EX_WITH_* it was created with; other operations fail with EOPNOTSUPP.
    """

    cdef QPCore core
    cdef ibv_qp_ex *ex
    cdef uint64_t ops
    cdef BuiltWR *built
    cdef size_t n_built
    cdef size_t built_room
    cdef ibv_sge *sges
    cdef size_t n_sges
    cdef size_t sge_room
    cdef char *bytes
    cdef size_t n_bytes
    cdef size_t byte_room
    cdef int error
    cdef object __weakref__

    def __cinit__(self, QPCore core not None, qp_ptr, uint64_t send_ops_flags):
        if not qp_ptr:
            raise ValueError('a QP has an address')
        self.core = core
        self.ops = send_ops_flags
        self.ex = ibv_qp_to_qp_ex(<ibv_qp *><uintptr_t>qp_ptr)
        if self.ex == NULL:
            raise PyverbsRDMAError('Failed to get the extended QP', errno)

    def __dealloc__(self):
        free(self.built)
        free(self.sges)
        free(self.bytes)

    # --- batches

    def wr_start(self) -> None:
        """ibv_wr_start: begin a batch."""
        self.n_built = self.n_sges = self.n_bytes = 0
        self.error = 0

    def wr_abort(self) -> None:
        """ibv_wr_abort: forget the batch."""
        self.wr_start()

    def wr_complete(self) -> None:
        """ibv_wr_complete: post the batch.

        Raises PyverbsRDMAError: ENOMEM where the send queue has no room for all of it, EINVAL or EOPNOTSUPP for a WR
        that is wrong; then nothing is posted. (What only the provider finds wrong leaves what is ahead of it posted.)
        """
        cdef int rc
        cdef bint plainly = shared.attention and run_driver_inline() == INHERITED
        rc = self.post(plainly)
        self.wr_start()
        if shared.attention:
            run_driver_inline()
        if rc:
            raise PyverbsRDMAError('ibv_wr_complete failed.', rc)

    cdef int post(self, bint plainly) noexcept nogil:
        cdef QPState *q = &self.core.q
        cdef ibv_send_wr *bad = NULL
        cdef BuiltWR *b
        cdef ibv_sge *inline_sge
        cdef size_t i
        if self.error or not self.n_built:
            return self.error
        if q.closed:
            return EINVAL
        # Inline data became one SGE each; from now on the memory does not move.
        if grow(<void **>&self.sges, &self.sge_room, self.n_sges + self.n_built, sizeof(ibv_sge)):
            return ENOMEM
        for i in range(self.n_built):
            b = &self.built[i]
            if b.wr.send_flags & IBV_SEND_INLINE:
                if not opcode_in(b.wr.opcode, payload_out_opcodes()):
                    return EINVAL
                inline_sge = &self.sges[self.n_sges + i]
                inline_sge.addr = <uint64_t><size_t>(self.bytes + b.at)
                inline_sge.lkey = 0
                inline_sge.length = <uint32_t>b.wr.num_sge
                b.wr.sg_list = inline_sge
                b.wr.num_sge = 1 if inline_sge.length else 0
            else:
                b.wr.sg_list = self.sges + b.at
            b.wr.next = &self.built[i + 1].wr if i + 1 < self.n_built else NULL
        if not has_room(q, self.n_built):
            make_room(q.scq, q.send_pair)
            if not has_room(q, self.n_built) and not (discount_answered(q) and has_room(q, self.n_built)):
                return ENOMEM
        if plainly:
            return post_send_plainly(q, &self.built[0].wr, &bad)
        return qp_post_send(q, &self.built[0].wr, &bad)

    # --- beginning a WR

    cdef ibv_send_wr *begin(self, int opcode) noexcept nogil:
        """The next WR, empty; NULL where it cannot be, which wr_complete tells."""
        cdef ibv_send_wr *wr
        if self.core.q.pairs[0].qp == NULL:  # closed, and `ex` with it
            self.fail(EINVAL)
            return NULL
        if not self.ops >> opcode & 1:
            self.fail(EOPNOTSUPP)
            return NULL
        if self.n_built >= self.core.q.send_cap or grow(
                <void **>&self.built, &self.built_room, self.n_built + 1, sizeof(BuiltWR)):
            self.fail(ENOMEM)
            return NULL
        wr = &self.built[self.n_built].wr
        memset(wr, 0, sizeof(ibv_send_wr))
        wr.wr_id = self.ex.wr_id
        wr.send_flags = self.ex.wr_flags & ~<unsigned int>IBV_SEND_INLINE  # told by wr_set_inline_data
        wr.opcode = <ibv_wr_opcode>opcode
        self.built[self.n_built].at = self.n_sges
        self.n_built += 1
        return wr

    cdef void fail(self, int error) noexcept nogil:
        if not self.error:
            self.error = error

    cdef BuiltWR *current(self) noexcept nogil:
        """The WR that is being written; NULL where there is none."""
        if not self.n_built:
            self.fail(EINVAL)
            return NULL
        return &self.built[self.n_built - 1]

    cdef void rdma(self, int opcode, uint32_t rkey, uint64_t remote_addr, uint32_t imm) noexcept nogil:
        cdef ibv_send_wr *wr = self.begin(opcode)
        if wr != NULL:
            wr.wr.rdma.rkey = rkey
            wr.wr.rdma.remote_addr = remote_addr
            wr.imm_data = imm

    cdef void atomic(
            self, int opcode, uint32_t rkey, uint64_t remote_addr, uint64_t compare_add, uint64_t swap) noexcept nogil:
        cdef ibv_send_wr *wr = self.begin(opcode)
        if wr != NULL:
            wr.wr.atomic.rkey = rkey
            wr.wr.atomic.remote_addr = remote_addr
            wr.wr.atomic.compare_add = compare_add
            wr.wr.atomic.swap = swap

    def wr_send(self) -> None:
        """ibv_wr_send."""
        self.begin(IBV_WR_SEND)

    def wr_send_imm(self, uint32_t data) -> None:
        """ibv_wr_send_imm. data: immediate data in host order."""
        cdef ibv_send_wr *wr = self.begin(IBV_WR_SEND_WITH_IMM)
        if wr != NULL:
            wr.imm_data = htonl(data)

    def wr_send_inv(self, uint32_t invalidate_rkey) -> None:
        """ibv_wr_send_inv. invalidate_rkey: of a window of the peer's."""
        cdef ibv_send_wr *wr = self.begin(IBV_WR_SEND_WITH_INV)
        if wr != NULL:
            wr.invalidate_rkey = invalidate_rkey

    def wr_local_inv(self, uint32_t invalidate_rkey) -> None:
        """ibv_wr_local_inv. invalidate_rkey: of a window of our own."""
        cdef ibv_send_wr *wr = self.begin(IBV_WR_LOCAL_INV)
        if wr != NULL:
            wr.invalidate_rkey = invalidate_rkey

    def wr_rdma_read(self, uint32_t rkey, uint64_t remote_addr) -> None:
        """ibv_wr_rdma_read."""
        self.rdma(IBV_WR_RDMA_READ, rkey, remote_addr, 0)

    def wr_rdma_write(self, uint32_t rkey, uint64_t remote_addr) -> None:
        """ibv_wr_rdma_write."""
        self.rdma(IBV_WR_RDMA_WRITE, rkey, remote_addr, 0)

    def wr_rdma_write_imm(self, uint32_t rkey, uint64_t remote_addr, uint32_t data) -> None:
        """ibv_wr_rdma_write_imm. data: immediate data in host order."""
        self.rdma(IBV_WR_RDMA_WRITE_WITH_IMM, rkey, remote_addr, htonl(data))

    def wr_atomic_cmp_swp(self, uint32_t rkey, uint64_t remote_addr, uint64_t compare, uint64_t swap) -> None:
        """ibv_wr_atomic_cmp_swp."""
        self.atomic(IBV_WR_ATOMIC_CMP_AND_SWP, rkey, remote_addr, compare, swap)

    def wr_atomic_fetch_add(self, uint32_t rkey, uint64_t remote_addr, uint64_t add) -> None:
        """ibv_wr_atomic_fetch_add."""
        self.atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, remote_addr, add, 0)

    def refuse(self, int error) -> None:
        """An operation that a protected QP has not: wr_complete tells the errno."""
        self.fail(error)

    # --- its data

    cdef ibv_sge *data_sges(self, size_t n) noexcept nogil:
        """Room for the n SGEs of the current WR; NULL where they cannot be."""
        cdef BuiltWR *b = self.current()
        if b == NULL:
            return NULL
        if n > self.core.q.max_send_sge:
            self.fail(EINVAL)
            return NULL
        if grow(<void **>&self.sges, &self.sge_room, self.n_sges + n, sizeof(ibv_sge)):
            self.fail(ENOMEM)
            return NULL
        b.at = self.n_sges
        b.wr.num_sge = <int>n
        b.wr.send_flags &= ~<unsigned int>IBV_SEND_INLINE
        self.n_sges += n
        return self.sges + b.at

    def wr_set_sge(self, SGE sge not None) -> None:
        """ibv_wr_set_sge. sge: SGE, copied."""
        cdef ibv_sge *to = self.data_sges(1)
        if to != NULL:
            to[0] = sge.sge[0]

    def wr_set_sge_list(self, num_sge, sg_list) -> None:
        """ibv_wr_set_sge_list. num_sge: how many of sg_list, SGEs, which are copied, count."""
        cdef size_t n = num_sge
        cdef size_t i
        cdef SGE sge
        cdef ibv_sge *to
        cdef list given = [sg_list[i] for i in range(n)]
        for i in range(n):
            if not isinstance(given[i], SGE):
                item = given[i]
                given[i] = SGE(item.addr, item.length, item.lkey)  # pyverbs asks for no more
        to = self.data_sges(n)
        if to == NULL:
            return
        for i in range(n):
            sge = given[i]
            to[i] = sge.sge[0]

    cdef BuiltWR *begin_inline(self) noexcept nogil:
        cdef BuiltWR *b = self.current()
        if b != NULL:
            b.at = self.n_bytes
            b.wr.num_sge = 0  # bytes, until the batch is posted
            b.wr.send_flags |= IBV_SEND_INLINE
        return b

    cdef void add_inline(self, BuiltWR *b, const void *addr, size_t length) noexcept nogil:
        if length > self.core.q.max_inline - <size_t>b.wr.num_sge:
            self.fail(EINVAL)
        elif grow(<void **>&self.bytes, &self.byte_room, self.n_bytes + length, 1):
            self.fail(ENOMEM)
        elif length:
            memcpy(self.bytes + self.n_bytes, addr, length)
            self.n_bytes += length
            b.wr.num_sge += <int>length

    def wr_set_inline_data(self, addr, length) -> None:
        """ibv_wr_set_inline_data. addr, length: address and bytes, which are copied at once."""
        cdef uintptr_t at = addr
        cdef size_t n = length
        cdef BuiltWR *b = self.begin_inline()
        if b != NULL:
            self.add_inline(b, <const void *>at, n)

    def wr_set_inline_data_list(self, num_buf, buf_list) -> None:
        """ibv_wr_set_inline_data_list. num_buf: how many of buf_list, DataBuffers, which are copied at once, count."""
        cdef size_t n = num_buf
        cdef size_t i
        cdef DataBuffer buffer
        cdef BuiltWR *b
        cdef list given = [buf_list[i] for i in range(n)]
        for item in given:
            if not isinstance(item, DataBuffer):
                raise TypeError(f'a DataBuffer expected, not {type(item).__name__}')
        b = self.begin_inline()
        if b == NULL:
            return
        for i in range(n):
            buffer = given[i]
            self.add_inline(b, buffer.data.addr, buffer.data.length)
