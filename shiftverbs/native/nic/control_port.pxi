# SPDX-License-Identifier: BSD-3-Clause
# The UD QP of the control channel. Included by _nic.pyx.
#
# Ownership: the port owns its PD, MR, memory, channel, CQs, QP and the address handles made through it, and
# destroys them in close(), or in __dealloc__ unless the interpreter is ending. The context is the caller's;
# close_device() closes the ports on it first.
#
# Threads: everything but the methods marked "blocks" runs under the GIL without giving it up, so it is
# atomic. Those that block count themselves in `users` while they are without the GIL; a close() meanwhile
# only marks the port, and the last user destroys it. While `busy` (being made again) nothing is sent or
# received.

cdef extern from * nogil:
    """
    #include <infiniband/verbs.h>

    static inline void sv_set_ud(struct ibv_send_wr *wr, uintptr_t ah, uint32_t qpn, uint32_t qkey)
    {
        wr->wr.ud.ah = (struct ibv_ah *)ah;
        wr->wr.ud.remote_qpn = qpn;
        wr->wr.ud.remote_qkey = qkey;
    }
    """
    void sv_set_ud(ibv_send_wr *wr, uintptr_t ah, uint32_t qpn, uint32_t qkey)

cdef enum:
    GRH_BYTES = 40
    MESSAGE_BYTES = 1024
    RECV_SLOT_BYTES = 1088   # GRH and message, rounded up to cache lines
    POLL_BATCH = 16
    WR_GENERATION_SHIFT = 32

CONTROL_MESSAGE_BYTES = MESSAGE_BYTES


cdef int gid_of_grh(const uint8_t *grh, uint8_t *gid) noexcept nogil:
    """Source GID from the 40 bytes in front of a UD message; 0 if they hold none.

    InfiniBand, RoCE v1 and RoCE v2 over IPv6 have a GRH or IPv6 header there, RoCE v2 over IPv4 an IPv4
    header in the last 20 bytes and nothing defined in the first 20 (IBA annex A17). What looks like both is
    IPv4 if its checksum says so.
    """
    cdef uint32_t total = 0
    cdef int i
    cdef bint ipv6 = grh[0] >> 4 == 6
    cdef bint ipv4 = grh[20] == 0x45
    if ipv4 and ipv6:
        for i in range(20, 40, 2):
            total += (<uint32_t>grh[i] << 8) | grh[i + 1]
        while total >> 16:
            total = (total & 0xffff) + (total >> 16)
        ipv4 = total == 0xffff
    if ipv4:
        memset(gid, 0, 10)
        gid[10] = gid[11] = 0xff
        memcpy(gid + 12, grh + 32, 4)
        return 1
    if ipv6:
        memcpy(gid, grh + 8, 16)
        return 1
    return 0


def source_gid(const uint8_t[::1] grh not None):
    """Source GID (16 bytes; IPv4 as ::ffff:a.b.c.d) from the 40 bytes in front of a UD message, or None."""
    cdef uint8_t gid[16]
    if grh.shape[0] != GRH_BYTES:
        raise ValueError(f"{grh.shape[0]} bytes instead of 40")
    if not gid_of_grh(&grh[0], gid):
        return None
    return PyBytes_FromStringAndSize(<char *>gid, 16)


cdef struct PortVerbs:
    # Everything the port owns, so that making and destroying need no Python.
    ibv_context *ctx
    ibv_pd *pd
    ibv_mr *mr
    ibv_comp_channel *channel
    ibv_cq *send_cq
    ibv_cq *recv_cq
    ibv_qp *qp
    uint8_t *memory
    size_t memory_size
    int port_num
    int pkey_index
    int depth
    uint32_t qkey
    uint32_t psn
    uint32_t generation     # in every wr_id: completions from before a RESET are recognised
    const char *verb        # the one that failed


cdef int port_post_recv(PortVerbs *port, int slot) noexcept nogil:
    """Post a receive buffer; errno."""
    cdef ibv_sge sge
    cdef ibv_recv_wr wr
    cdef ibv_recv_wr *bad = NULL
    cdef uint8_t *buffer = port.memory + <size_t>slot * RECV_SLOT_BYTES
    # With IPv4 the NIC may leave these bytes alone: a GRH of an earlier message must not shine through.
    memset(buffer, 0, GRH_BYTES)
    sge.addr = <uintptr_t>buffer
    sge.length = GRH_BYTES + MESSAGE_BYTES
    sge.lkey = port.mr.lkey
    wr.wr_id = (<uint64_t>port.generation << WR_GENERATION_SHIFT) | <uint32_t>slot
    wr.next = NULL
    wr.sg_list = &sge
    wr.num_sge = 1
    return ibv_post_recv(port.qp, &wr, &bad)


cdef int port_connect(PortVerbs *port) noexcept nogil:
    """RESET (or fresh) to RTS with all receive buffers posted; errno, with port.verb set."""
    cdef ibv_qp_attr attr
    cdef int err
    cdef int slot
    port.verb = b"ibv_modify_qp"
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_INIT
    attr.pkey_index = port.pkey_index
    attr.port_num = port.port_num
    attr.qkey = port.qkey
    err = ibv_modify_qp(port.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)
    if err:
        return err
    port.verb = b"ibv_post_recv"
    for slot in range(port.depth):
        err = port_post_recv(port, slot)
        if err:
            return err
    port.verb = b"ibv_modify_qp"
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RTR
    err = ibv_modify_qp(port.qp, &attr, IBV_QP_STATE)
    if err:
        return err
    attr.qp_state = IBV_QPS_RTS
    attr.sq_psn = port.psn
    return ibv_modify_qp(port.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)


cdef int port_create(PortVerbs *port) noexcept nogil:
    """Make everything; errno, with port.verb set. What was made is destroyed by port_destroy either way."""
    cdef ibv_qp_init_attr init
    sv_clear_errno()
    port.verb = b"mmap"
    port.memory_size = <size_t>port.depth * (RECV_SLOT_BYTES + MESSAGE_BYTES)
    port.memory = <uint8_t *>mmap(NULL, port.memory_size, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if <void *>port.memory == MAP_FAILED:
        port.memory = NULL
        return errno
    # A child must not make these pages copy-on-write: the NIC would go on writing to the old ones.
    madvise(port.memory, port.memory_size, MADV_DONTFORK)
    port.verb = b"ibv_alloc_pd"
    port.pd = ibv_alloc_pd(port.ctx)
    if port.pd == NULL:
        return errno if errno else EIO
    port.verb = b"ibv_reg_mr_iova2"
    port.mr = ibv_reg_mr_iova2(port.pd, port.memory, port.memory_size, <uintptr_t>port.memory,
                               IBV_ACCESS_LOCAL_WRITE)
    if port.mr == NULL:
        return errno if errno else EIO
    port.verb = b"ibv_create_comp_channel"
    port.channel = ibv_create_comp_channel(port.ctx)
    if port.channel == NULL:
        return errno if errno else EIO
    fcntl(port.channel.fd, F_SETFL, fcntl(port.channel.fd, F_GETFL) | O_NONBLOCK)
    port.verb = b"ibv_create_cq"
    # Two CQs: taking back send buffers never has to touch messages, and only messages wake the control
    # thread.
    port.send_cq = ibv_create_cq(port.ctx, port.depth, NULL, NULL, 0)
    if port.send_cq == NULL:
        return errno if errno else EIO
    port.recv_cq = ibv_create_cq(port.ctx, port.depth, NULL, port.channel, 0)
    if port.recv_cq == NULL:
        return errno if errno else EIO
    port.verb = b"ibv_create_qp"
    memset(&init, 0, sizeof(init))
    init.send_cq = port.send_cq
    init.recv_cq = port.recv_cq
    init.qp_type = IBV_QPT_UD
    init.sq_sig_all = 1
    init.cap.max_send_wr = port.depth
    init.cap.max_recv_wr = port.depth
    init.cap.max_send_sge = 1
    init.cap.max_recv_sge = 1
    port.qp = ibv_create_qp(port.pd, &init)
    if port.qp == NULL:
        return errno if errno else EIO
    port.verb = b"ibv_req_notify_cq"
    if ibv_req_notify_cq(port.recv_cq, 0) != 0:
        return errno if errno else EIO
    return port_connect(port)


cdef int port_reconnect(PortVerbs *port) noexcept nogil:
    """From any state to RTS again; errno, with port.verb set."""
    cdef ibv_qp_attr attr
    cdef ibv_wc wc[POLL_BATCH]
    cdef int err
    port.verb = b"ibv_modify_qp"
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RESET
    err = ibv_modify_qp(port.qp, &attr, IBV_QP_STATE)
    if err:
        return err
    # Nobody needs what is still in the CQs; make room. Stragglers are known by their generation.
    while ibv_poll_cq(port.send_cq, POLL_BATCH, wc) > 0:
        pass
    while ibv_poll_cq(port.recv_cq, POLL_BATCH, wc) > 0:
        pass
    port.generation = (port.generation + 1) & 0x7fffffff
    err = port_connect(port)
    if err:
        return err
    port.verb = b"ibv_req_notify_cq"
    return EIO if ibv_req_notify_cq(port.recv_cq, 0) != 0 else 0


cdef int port_destroy(PortVerbs *port) noexcept nogil:
    """Destroy what exists, in order; the first errno. Goes on after an error: a dead NIC must not keep the
    rest."""
    cdef int first = 0
    cdef int err
    if port.qp != NULL:
        err = ibv_destroy_qp(port.qp)
        first = first if first else err
    if port.send_cq != NULL:
        err = ibv_destroy_cq(port.send_cq)
        first = first if first else err
    if port.recv_cq != NULL:
        err = ibv_destroy_cq(port.recv_cq)
        first = first if first else err
    if port.channel != NULL:
        err = ibv_destroy_comp_channel(port.channel)
        first = first if first else err
    if port.mr != NULL:
        err = ibv_dereg_mr(port.mr)
        first = first if first else err
    if port.pd != NULL:
        err = ibv_dealloc_pd(port.pd)
        first = first if first else err
    # Memory that could not be deregistered may still be written by the NIC: rather lost than reused.
    if port.memory != NULL and first == 0:
        munmap(port.memory, port.memory_size)
    port.qp = NULL
    port.send_cq = port.recv_cq = NULL
    port.channel = NULL
    port.mr = NULL
    port.pd = NULL
    port.memory = NULL
    return first


cdef class ControlPort:
    """A UD QP with everything it needs, for small datagrams between control channels.

    It never blocks and never fails in send, recv and rearm; what goes wrong is counted, and `state` says when
    it has to be made again. A datagram may be lost, as on any network.

    When `fd` is readable: `recv()`, which makes it readable again for what comes later.

    Blocks: the constructor, create_ah, destroy_ah, revive, close (NIC commands, without the GIL). Call these
    on the NIC's worker.

    `ctx` and `gid_index` are the arguments; `max_message` is the most bytes of one message. Counted since the
    start: `sent` and `received` datagrams, those `dropped` unsent, `send_errors` and `recv_errors`
    (completions in error), `malformed` ones (of an impossible length), and how often it was `revived`.

    :param ctx: ibv_context pointer; stays the caller's
    :param port_num: port, from 1
    :param gid_index: GID table index that address handles use by default
    :param depth: send slots and receive buffers, each
    :param pkey_index: partition
    :raises OSError: a verb failed; what was made before is destroyed
    """

    cdef PortVerbs port
    cdef int pid
    cdef int opened
    cdef int busy
    cdef int users
    cdef int close_wanted
    cdef int failed
    cdef int n_free
    cdef int *free_slots
    cdef set _ahs
    cdef readonly uintptr_t ctx
    cdef readonly int gid_index
    cdef readonly int max_message
    cdef bint left_some         # recv() left something because of its bound
    cdef readonly unsigned long long sent
    cdef readonly unsigned long long received
    cdef readonly unsigned long long dropped
    cdef readonly unsigned long long send_errors
    cdef readonly unsigned long long recv_errors
    cdef readonly unsigned long long malformed
    cdef readonly unsigned long long revived
    cdef object __weakref__

    def __cinit__(self, uintptr_t ctx, int port_num, int gid_index, int depth=64, int pkey_index=0):
        cdef ibv_port_attr attr
        cdef int err
        memset(&self.port, 0, sizeof(self.port))
        self.pid = getpid()
        self._ahs = set()
        self.free_slots = NULL
        need(ctx, "ctx")
        if not 1 <= depth <= 4096:
            raise ValueError(f"depth {depth} is not in 1..4096")
        if not 1 <= port_num <= 255 or not 0 <= gid_index <= 255 or not 0 <= pkey_index <= 65535:
            raise ValueError("port_num, gid_index or pkey_index out of range")
        self.ctx = ctx
        self.gid_index = gid_index
        self.port.ctx = <ibv_context *>ctx
        self.port.port_num = port_num
        self.port.pkey_index = pkey_index
        self.port.depth = depth
        # The top bit means "use the QP's own" and is privileged (IBA 10.2.5); 0 would be guessed first.
        self.port.qkey = int.from_bytes(os.urandom(4), "little") & 0x7fffffff or 1
        self.port.psn = int.from_bytes(os.urandom(3), "little")
        self.free_slots = <int *>malloc(depth * sizeof(int))
        if self.free_slots == NULL:
            raise MemoryError()
        self._free_all_slots()
        with nogil:
            memset(&attr, 0, sizeof(attr))
            self.port.verb = b"ibv_query_port"
            err = ibv_query_port(self.port.ctx, port_num, &attr)
            if not err:
                err = port_create(&self.port)
            if err:
                port_destroy(&self.port)
            back_to_python()
        if err:
            raise verb_error((<bytes>self.port.verb).decode(), err if err > 0 else EIO)
        # enum ibv_mtu counts from 256 = 1; a UD message is one packet.
        self.max_message = MESSAGE_BYTES
        if 1 <= attr.active_mtu <= 5:
            self.max_message = min(MESSAGE_BYTES, 128 << attr.active_mtu)
        self.opened = 1
        _control_ports.add(self)

    def __dealloc__(self):
        if self.pid != getpid():
            return
        if self.opened and not sv_load(&exiting):
            self._destroy()
        free(self.free_slots)

    cdef void _free_all_slots(self) noexcept:
        """All send slots are free: at the start, and after a RESET."""
        cdef int i
        self.n_free = self.port.depth
        for i in range(self.port.depth):
            self.free_slots[i] = i

    cdef int _check(self) except -1:
        """Raise when used in a forked child. Returns whether the QP may be used now."""
        must_be_ours(self.pid, "this ControlPort")
        return self.opened and not self.busy and not self.close_wanted

    cdef int _destroy(self) except -1:
        """Destroy everything, without the GIL; errno of the first verb that failed."""
        cdef int err = 0
        cdef int i
        cdef int n = len(self._ahs)
        cdef uintptr_t *handles = <uintptr_t *>malloc((n + 1) * sizeof(uintptr_t))
        cdef PortVerbs port = self.port
        self.opened = 0
        self.port.qp = NULL
        if handles == NULL:
            n = 0  # leaked with the process; the PD will say EBUSY
        for i in range(n):
            handles[i] = self._ahs.pop()
        with nogil:
            for i in range(n):
                ibv_destroy_ah(<ibv_ah *>handles[i])
            free(handles)
            err = port_destroy(&port)
            back_to_python()
        self.port.channel = NULL
        self.port.pd = NULL
        return err

    cdef int _leave(self) except -1:
        """End of a blocking method: carry out a close() that came meanwhile."""
        self.users -= 1
        if self.users == 0 and self.close_wanted and self.opened:
            self._destroy()
        return 0

    def create_ah(self, **attrs):
        """Make an address handle in this port's PD. Blocks: a neighbour may have to be resolved.

        :param attrs: as for the module's create_ah; port_num and, with a dgid, sgid_index default to this
            port's
        :return: ibv_ah pointer, for send; destroyed with the port at the latest
        :raises OSError: ENODEV = the port is closed; else what ibv_create_ah said
        """
        cdef ibv_ah_attr attr
        cdef ibv_ah *ah
        cdef int err = 0
        must_be_ours(self.pid, "this ControlPort")
        attrs.setdefault("port_num", self.port.port_num)
        if attrs.get("dgid") is not None:
            attrs.setdefault("sgid_index", self.gid_index)
        fill_ah_attr(&attr, attrs)
        if not self.opened or self.close_wanted:
            raise verb_error("ibv_create_ah", ENODEV)
        self.users += 1
        with nogil:
            ah = ibv_create_ah(self.port.pd, &attr)
            if ah == NULL:
                err = errno
            back_to_python()
        if ah != NULL:
            self._ahs.add(<uintptr_t>ah)
        self._leave()
        if ah == NULL:
            raise verb_error("ibv_create_ah", err)
        if not self.opened:
            raise verb_error("ibv_create_ah", ENODEV)
        return <uintptr_t>ah

    def destroy_ah(self, uintptr_t ah):
        """Destroy an address handle; one that is gone, or was never made here, is ignored. Blocks."""
        if self.pid != getpid() or ah not in self._ahs:
            return
        self._ahs.discard(ah)
        self.users += 1
        with nogil:
            ibv_destroy_ah(<ibv_ah *>ah)
            back_to_python()
        self._leave()

    cdef int _reap(self) except -1:
        """Take back the slots of finished sends."""
        cdef ibv_wc wc[POLL_BATCH]
        cdef int n
        cdef int i
        cdef int slot
        while True:
            n = ibv_poll_cq(self.port.send_cq, POLL_BATCH, wc)
            if n < 0:
                self.failed = 1
                self.send_errors += 1
            if n <= 0:
                return 0
            for i in range(n):
                slot = <int>(wc[i].wr_id & 0xffffffff)
                if wc[i].wr_id >> WR_GENERATION_SHIFT != self.port.generation or slot >= self.port.depth:
                    continue
                if wc[i].status != IBV_WC_SUCCESS:
                    # UD sends fail only because of this side, and leave the QP in SQE or ERR.
                    self.send_errors += 1
                    self.failed = 1
                if self.n_free < self.port.depth:
                    self.free_slots[self.n_free] = slot
                    self.n_free += 1
            if n < POLL_BATCH:
                return 0

    def send(self, uintptr_t ah, uint32_t qpn, uint32_t qkey, bytes message not None):
        """Send one datagram (copied). Never blocks.

        :param ah: from create_ah of this port
        :param qpn: the peer's QPN; qkey: its Q_Key
        :param message: at most max_message bytes
        :return: whether it was handed to the NIC; False = dropped and counted (SQ full, QP broken, or port
            closed)
        :raises ValueError: too long, or ah is not (or no longer) an address handle of this port
        """
        cdef ibv_sge sge
        cdef ibv_send_wr wr
        cdef ibv_send_wr *bad = NULL
        cdef Py_ssize_t length = PyBytes_GET_SIZE(message)
        cdef int slot
        cdef int err
        usable = self._check()
        if length > self.max_message:
            raise ValueError(f"message of {length} bytes; {self.max_message} is the most")
        if usable:
            if ah not in self._ahs:
                raise ValueError("not an address handle of this ControlPort")
            if not self.failed:
                self._reap()
        if not usable or self.failed or self.n_free == 0:
            self.dropped += 1
            return False
        self.n_free -= 1
        slot = self.free_slots[self.n_free]
        sge.addr = <uintptr_t>(self.port.memory + <size_t>self.port.depth * RECV_SLOT_BYTES
                               + <size_t>slot * MESSAGE_BYTES)
        sge.length = length
        sge.lkey = self.port.mr.lkey
        memcpy(<void *>sge.addr, PyBytes_AS_STRING(message), length)
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = (<uint64_t>self.port.generation << WR_GENERATION_SHIFT) | <uint32_t>slot
        wr.sg_list = &sge
        wr.num_sge = 1 if length else 0
        wr.opcode = <ibv_wr_opcode>IBV_WR_SEND
        wr.send_flags = IBV_SEND_SIGNALED
        sv_set_ud(&wr, ah, qpn, qkey)
        err = ibv_post_send(self.port.qp, &wr, &bad)
        if err:
            self.free_slots[self.n_free] = slot
            self.n_free += 1
            self.dropped += 1
            if err != ENOMEM:
                self.send_errors += 1
                self.failed = 1
            return False
        self.sent += 1
        return True

    @property
    def more(self) -> bool:
        """Whether the last recv() left datagrams because of its bound."""
        return self.left_some

    def recv(self, int most=0):
        """Take datagrams that have arrived, and post their buffers again. Never blocks, never raises on errors of
        the NIC.

        If `fd` was readable it is not any more, and will be for the next datagram: a driver run in any thread
        needs to call nothing else, unless `more` says that some were left.

        :param most: leave the rest where about so many have arrived (POLL_BATCH more at most); 0 = no such bound
        :return: list of (payload, source QPN, source GID as 16 bytes or None)
        """
        cdef ibv_wc wc[POLL_BATCH]
        cdef uint8_t gid[16]
        cdef uint8_t *buffer
        cdef int n
        cdef int i
        cdef int slot
        cdef int taken = 0
        cdef list messages = []
        self.left_some = 0
        if not self._check():
            return messages
        self.users += 1  # making tuples may run the collector, and that a finalizer that closes this port
        # The CQ is armed or its event is there, always. Armed again before it is drained: what comes later is
        # an event of its own.
        if self._take_events() and ibv_req_notify_cq(self.port.recv_cq, 0) != 0:
            self.failed = 1
        # Bounded, so that a flood cannot keep the driver here. What came before the CQ was armed makes no event: the
        # caller is told of it.
        if most <= 0 or most > 4 * self.port.depth:
            most = 4 * self.port.depth
        self.left_some = 1
        while taken < most:
            n = ibv_poll_cq(self.port.recv_cq, POLL_BATCH, wc)
            if n < 0:
                self.failed = 1
                self.recv_errors += 1
            if n <= 0:
                self.left_some = 0
                break
            taken += n
            for i in range(n):
                slot = <int>(wc[i].wr_id & 0xffffffff)
                if wc[i].wr_id >> WR_GENERATION_SHIFT != self.port.generation or slot >= self.port.depth:
                    continue
                if wc[i].status != IBV_WC_SUCCESS:
                    # The QP is in ERR: a buffer posted there would only be flushed again. revive() posts all.
                    self.recv_errors += 1
                    self.failed = 1
                    continue
                buffer = self.port.memory + <size_t>slot * RECV_SLOT_BYTES
                if GRH_BYTES <= wc[i].byte_len <= GRH_BYTES + MESSAGE_BYTES:
                    source = None
                    if wc[i].wc_flags & IBV_WC_GRH and gid_of_grh(buffer, gid):
                        source = PyBytes_FromStringAndSize(<char *>gid, 16)
                    messages.append((
                        PyBytes_FromStringAndSize(<char *>buffer + GRH_BYTES, wc[i].byte_len - GRH_BYTES),
                        wc[i].src_qp,
                        source,
                    ))
                    self.received += 1
                else:
                    self.malformed += 1
                if port_post_recv(&self.port, slot) != 0:
                    self.recv_errors += 1
                    self.failed = 1
        self._reap()
        self._leave()
        return messages

    cdef int _take_events(self) except -1:
        """Take and acknowledge what made the descriptor readable; how many events that were."""
        cdef ibv_cq *cq = NULL
        cdef void *context = NULL
        cdef pollfd ready
        cdef int n = 0
        while True:
            ready.fd = self.port.channel.fd
            ready.events = POLLIN
            ready.revents = 0
            if poll(&ready, 1, 0) <= 0 or not ready.revents & POLLIN:
                return n
            if ibv_get_cq_event(self.port.channel, &cq, &context) != 0:
                return n
            ibv_ack_cq_events(cq, 1)
            n += 1

    def rearm(self):
        """Take the events that made `fd` readable, and ask for the next one in any case. Never blocks.

        Only needed where recv() is not called at once; call recv() afterwards.
        """
        if self._check():
            self._take_events()
            if ibv_req_notify_cq(self.port.recv_cq, 0) != 0:
                self.failed = 1

    def revive(self):
        """Take the QP through RESET to RTS again: same QPN, same Q_Key. Blocks. Messages under way are lost.

        Must not be called again before it returned (a second call raises).

        :raises OSError: ENODEV = closed, EBUSY = under way already; else of the verb that failed, and `state`
            stays "error"
        """
        cdef int err
        must_be_ours(self.pid, "this ControlPort")
        if not self.opened or self.close_wanted:
            raise verb_error("ControlPort.revive", ENODEV)
        if self.busy:
            raise verb_error("ControlPort.revive", EBUSY)
        self.busy = 1
        self.users += 1
        self.port.psn = int.from_bytes(os.urandom(3), "little")
        with nogil:
            err = port_reconnect(&self.port)
            back_to_python()
        self._free_all_slots()
        self.busy = 0
        self.failed = err != 0
        self._leave()
        if err:
            raise verb_error((<bytes>self.port.verb).decode(), err if err > 0 else EIO)
        self.revived += 1

    def close(self):
        """Destroy everything. Blocks; twice is allowed; a no-op in a forked child.

        If another thread is inside a blocking method, that one destroys it when it ends.

        :raises OSError: EIO = a verb refused; the rest is destroyed all the same
        """
        if self.pid != getpid() or not self.opened or self.close_wanted:
            return
        _control_ports.discard(self)
        self.close_wanted = 1
        if self.users:
            return
        err = self._destroy()
        if err:
            raise verb_error("ControlPort.close", err)

    @property
    def state(self):
        """"ready", "busy" (revive under way), "error" (call revive) or "closed"."""
        if not self.opened or self.close_wanted or self.pid != getpid():
            return "closed"
        if self.busy:
            return "busy"
        return "error" if self.failed else "ready"

    @property
    def qpn(self):
        """QPN, for the peer; 0 when closed."""
        return self.port.qp.qp_num if self.port.qp != NULL and self.pid == getpid() else 0

    @property
    def qkey(self):
        """Q_Key, for the peer."""
        return self.port.qkey

    @property
    def fd(self):
        """Descriptor of the completion channel, for Waiter.add; -1 when closed."""
        return self.port.channel.fd if self.port.channel != NULL and self.pid == getpid() else -1

    @property
    def pd(self):
        """ibv_pd pointer; 0 when closed."""
        return <uintptr_t>self.port.pd

    @property
    def qp(self):
        """ibv_qp pointer; 0 when closed. For tests and async events: a QP_FATAL names it."""
        return <uintptr_t>self.port.qp

    @property
    def port_num(self):
        """Port of the device."""
        return self.port.port_num
