# SPDX-License-Identifier: BSD-3-Clause
# Raw verbs without the GIL, and async events. Included by _nic.pyx.
#
# The functions here own nothing: who gets a pointer calls the matching destroy. They know no pid either: a
# child that opens its own device may use them on what it made itself.

cdef extern from * nogil:
    """
    #include <endian.h>
    #include <infiniband/verbs.h>

    static inline uintptr_t sv_event_element(const struct ibv_async_event *event)
    {
        switch (event->event_type) {
        case IBV_EVENT_CQ_ERR:
            return (uintptr_t)event->element.cq;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_COMM_EST:
        case IBV_EVENT_SQ_DRAINED:
        case IBV_EVENT_PATH_MIG:
        case IBV_EVENT_PATH_MIG_ERR:
        case IBV_EVENT_QP_LAST_WQE_REACHED:
            return (uintptr_t)event->element.qp;
        case IBV_EVENT_SRQ_ERR:
        case IBV_EVENT_SRQ_LIMIT_REACHED:
            return (uintptr_t)event->element.srq;
        case IBV_EVENT_WQ_FATAL:
            return (uintptr_t)event->element.wq;
        default:
            return (uintptr_t)event->element.port_num;
        }
    }
    static inline uint64_t sv_be64(uint64_t v) { return be64toh(v); }
    """
    uintptr_t sv_event_element(const ibv_async_event *event)
    uint64_t sv_be64(uint64_t v)


cdef uintptr_t need(uintptr_t pointer, str what) except 0:
    """Refuse NULL where a verb needs an object."""
    if pointer == 0:
        raise ValueError(f"{what} is NULL")
    return pointer


# ---- devices


def list_devices():
    """Names of all RDMA devices in libibverbs' order (ibv_get_device_list); none where the kernel has no
    RDMA.

    :raises OSError: the list could not be read
    """
    cdef ibv_device **devices
    cdef int n = 0
    cdef int err = 0
    with nogil:
        devices = ibv_get_device_list(&n)
        if devices == NULL:
            err = errno
        back_to_python()
    if devices == NULL:
        if err == ENOSYS:
            return []
        raise verb_error("ibv_get_device_list", err)
    try:
        return [(<bytes>ibv_get_device_name(devices[i])).decode() for i in range(n)]
    finally:
        ibv_free_device_list(devices)


def open_device(str name):
    """Open a device by name (ibv_open_device); may block on a sick one.

    The async descriptor is made non-blocking: it is ours, and get_async_event must never block.

    :return: ibv_context pointer, for close_device
    :raises OSError: ENODEV = no such device; else what the verb said
    """
    cdef bytes encoded = name.encode()
    cdef const char *wanted = encoded
    cdef ibv_device **devices
    cdef ibv_context *ctx = NULL
    cdef int n = 0
    cdef int err = ENODEV
    cdef int i
    with nogil:
        devices = ibv_get_device_list(&n)
        if devices == NULL:
            err = errno
        else:
            for i in range(n):
                if strcmp(ibv_get_device_name(devices[i]), wanted) == 0:
                    ctx = ibv_open_device(devices[i])
                    if ctx == NULL:
                        err = errno
                    break
            ibv_free_device_list(devices)
        if ctx != NULL:
            fcntl(ctx.async_fd, F_SETFL, fcntl(ctx.async_fd, F_GETFL) | O_NONBLOCK)
        back_to_python()
    if ctx == NULL:
        raise verb_error(f"ibv_open_device({name})", err)
    return <uintptr_t>ctx


# Open control ports, so that closing a context closes those on it first: afterwards they could only crash.
_control_ports = weakref.WeakSet()


def close_device(uintptr_t ctx):
    """Close a context (ibv_close_device) after the ControlPorts still open on it."""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef int err
    for port in list(_control_ports):
        if port.ctx == ctx:
            port.close()
    with nogil:
        err = ibv_close_device(context)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_close_device", err)


def query_device(uintptr_t ctx):
    """Limits of the device (ibv_query_device) as a dict named after ibv_device_attr's fields; node_guid is an
    int in host order."""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_device_attr a
    cdef int err
    with nogil:
        memset(&a, 0, sizeof(a))
        err = ibv_query_device(context, &a)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_query_device", err)
    return {
        "fw_ver": (<bytes>a.fw_ver[:sizeof(a.fw_ver)]).split(b"\0")[0].decode(errors="replace"),
        "node_guid": sv_be64(a.node_guid),
        "max_mr_size": a.max_mr_size, "vendor_id": a.vendor_id, "vendor_part_id": a.vendor_part_id,
        "hw_ver": a.hw_ver, "max_qp": a.max_qp, "max_qp_wr": a.max_qp_wr,
        "device_cap_flags": a.device_cap_flags, "max_sge": a.max_sge, "max_sge_rd": a.max_sge_rd,
        "max_cq": a.max_cq, "max_cqe": a.max_cqe, "max_mr": a.max_mr, "max_pd": a.max_pd,
        "max_qp_rd_atom": a.max_qp_rd_atom, "max_res_rd_atom": a.max_res_rd_atom,
        "max_qp_init_rd_atom": a.max_qp_init_rd_atom, "atomic_cap": a.atomic_cap, "max_ah": a.max_ah,
        "max_pkeys": a.max_pkeys, "local_ca_ack_delay": a.local_ca_ack_delay,
        "phys_port_cnt": a.phys_port_cnt, "num_comp_vectors": context.num_comp_vectors,
    }


def query_port(uintptr_t ctx, uint8_t port_num):
    """State of a port (ibv_query_port) as a dict named after ibv_port_attr's fields; MTUs are enum
    ibv_mtu."""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_port_attr a
    cdef int err
    with nogil:
        memset(&a, 0, sizeof(a))
        err = ibv_query_port(context, port_num, &a)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_query_port", err)
    return {
        "state": a.state, "max_mtu": a.max_mtu, "active_mtu": a.active_mtu, "gid_tbl_len": a.gid_tbl_len,
        "port_cap_flags": a.port_cap_flags, "max_msg_sz": a.max_msg_sz, "pkey_tbl_len": a.pkey_tbl_len,
        "lid": a.lid, "sm_lid": a.sm_lid, "lmc": a.lmc, "sm_sl": a.sm_sl, "active_width": a.active_width,
        "active_speed": a.active_speed, "phys_state": a.phys_state, "link_layer": a.link_layer,
        "flags": a.flags,
    }


def query_pkey(uintptr_t ctx, uint8_t port_num, int index):
    """A P_Key table entry (ibv_query_pkey): 16 bits, the membership bit on top; 0 where it is empty."""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef uint16_t pkey = 0
    cdef uint8_t *octets = <uint8_t *>&pkey
    cdef int err
    with nogil:
        err = ibv_query_pkey(context, port_num, index, &pkey)
        if err < 0:
            err = errno if errno else EINVAL
        back_to_python()
    if err:
        raise verb_error("ibv_query_pkey", err)
    return octets[0] << 8 | octets[1]  # it comes in network order


def query_gid(uintptr_t ctx, uint8_t port_num, int index):
    """A GID table entry (ibv_query_gid), 16 bytes in network order."""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_gid gid
    cdef int err
    with nogil:
        memset(&gid, 0, sizeof(gid))
        err = ibv_query_gid(context, port_num, index, &gid)
        if err < 0:
            err = errno if errno else EINVAL
        back_to_python()
    if err:
        raise verb_error("ibv_query_gid", err)
    return PyBytes_FromStringAndSize(<char *>gid.raw, 16)


def query_gid_type(uintptr_t ctx, uint8_t port_num, int index):
    """Type of a GID table entry (ibv_query_gid_ex): 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.

    :raises OSError: ENODATA = the entry is empty
    """
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_gid_entry entry
    cdef int err
    with nogil:
        memset(&entry, 0, sizeof(entry))
        err = ibv_query_gid_ex(context, port_num, index, &entry, 0)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_query_gid_ex", err)
    return entry.gid_type


# ---- PD, MR, channel, CQ


def alloc_pd(uintptr_t ctx):
    """ibv_alloc_pd. :return: ibv_pd pointer"""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_pd *pd
    cdef int err = 0
    with nogil:
        pd = ibv_alloc_pd(context)
        if pd == NULL:
            err = errno
        back_to_python()
    if pd == NULL:
        raise verb_error("ibv_alloc_pd", err)
    return <uintptr_t>pd


def dealloc_pd(uintptr_t pd):
    """ibv_dealloc_pd."""
    cdef ibv_pd *c_pd = <ibv_pd *>need(pd, "pd")
    cdef int err
    with nogil:
        err = ibv_dealloc_pd(c_pd)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_dealloc_pd", err)


def reg_mr(uintptr_t pd, uintptr_t addr, size_t length, uint64_t iova, unsigned int access):
    """Register memory (ibv_reg_mr_iova2), which pins it and takes about a second for 10 GB.

    :param addr: start of the memory; iova is the address that WRs will use for it
    :return: (ibv_mr pointer, lkey, rkey)
    """
    cdef ibv_pd *c_pd = <ibv_pd *>need(pd, "pd")
    cdef ibv_mr *mr
    cdef int err = 0
    with nogil:
        mr = ibv_reg_mr_iova2(c_pd, <void *>addr, length, iova, access)
        if mr == NULL:
            err = errno
        back_to_python()
    if mr == NULL:
        raise verb_error("ibv_reg_mr_iova2", err)
    return <uintptr_t>mr, mr.lkey, mr.rkey


def rereg_mr(uintptr_t mr, int flags, uintptr_t pd, uintptr_t addr, size_t length, int access):
    """Change a registration (ibv_rereg_mr), which may keep its keys. After an error it may be good for dereg_mr only.

    :param flags: IBV_REREG_MR_CHANGE_* for what changes; the other arguments are those of `reg_mr`, 0 where they stay
    :return: (lkey, rkey)
    """
    cdef ibv_mr *c_mr = <ibv_mr *>need(mr, "mr")
    cdef int err
    with nogil:
        err = ibv_rereg_mr(c_mr, flags, <ibv_pd *>pd, <void *>addr, length, access)
        if err:
            err = errno if errno else EIO
        back_to_python()
    if err:
        raise verb_error("ibv_rereg_mr", err)
    return c_mr.lkey, c_mr.rkey


def dereg_mr(uintptr_t mr):
    """ibv_dereg_mr."""
    cdef ibv_mr *c_mr = <ibv_mr *>need(mr, "mr")
    cdef int err
    with nogil:
        err = ibv_dereg_mr(c_mr)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_dereg_mr", err)


def create_channel(uintptr_t ctx):
    """ibv_create_comp_channel. :return: (ibv_comp_channel pointer, its descriptor)"""
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_comp_channel *channel
    cdef int err = 0
    with nogil:
        channel = ibv_create_comp_channel(context)
        if channel == NULL:
            err = errno
        back_to_python()
    if channel == NULL:
        raise verb_error("ibv_create_comp_channel", err)
    return <uintptr_t>channel, channel.fd


def destroy_channel(uintptr_t channel):
    """ibv_destroy_comp_channel; EBUSY while a CQ uses it."""
    cdef ibv_comp_channel *c_channel = <ibv_comp_channel *>need(channel, "channel")
    cdef int err
    with nogil:
        err = ibv_destroy_comp_channel(c_channel)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_destroy_comp_channel", err)


def create_cq(uintptr_t ctx, int cqe, uintptr_t channel=0, int vector=0, uintptr_t cq_context=0):
    """ibv_create_cq.

    :param cqe: entries wanted
    :param channel: ibv_comp_channel pointer, or 0
    :param cq_context: what ibv_get_cq_event gives back with the CQ
    :return: (ibv_cq pointer, entries the device made)
    """
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef ibv_cq *cq
    cdef int err = 0
    with nogil:
        cq = ibv_create_cq(context, cqe, <void *>cq_context, <ibv_comp_channel *>channel, vector)
        if cq == NULL:
            err = errno
        back_to_python()
    if cq == NULL:
        raise verb_error("ibv_create_cq", err)
    return <uintptr_t>cq, cq.cqe


def resize_cq(uintptr_t cq, int cqe):
    """ibv_resize_cq. :return: entries the device made"""
    cdef ibv_cq *c_cq = <ibv_cq *>need(cq, "cq")
    cdef int err
    with nogil:
        err = ibv_resize_cq(c_cq, cqe)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_resize_cq", err)
    return c_cq.cqe


def destroy_cq(uintptr_t cq):
    """ibv_destroy_cq. Blocks until every event taken from its channel is acknowledged."""
    cdef ibv_cq *c_cq = <ibv_cq *>need(cq, "cq")
    cdef int err
    with nogil:
        err = ibv_destroy_cq(c_cq)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_destroy_cq", err)


# ---- QP

CAP_FIELDS = ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data")


cdef int fill_cap(ibv_qp_cap *cap, object caps) except -1:
    """Read a 5-tuple or a mapping in the order of, or named by, CAP_FIELDS."""
    if hasattr(caps, "keys"):
        unknown = set(caps.keys()) - set(CAP_FIELDS)
        if unknown:
            raise TypeError(f"not a QP capability: {sorted(unknown)}")
        caps = [caps.get(field, 0) for field in CAP_FIELDS]
    cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data = caps
    return 0


cdef object cap_like(object caps, ibv_qp_cap *cap):
    """The capabilities in the form the caller used."""
    values = (cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data)
    return dict(zip(CAP_FIELDS, values)) if hasattr(caps, "keys") else values


def create_qp(uintptr_t pd, uintptr_t send_cq, uintptr_t recv_cq, caps, int sq_sig_all=0,
              int qp_type=IBV_QPT_RC):
    """ibv_create_qp.

    :param caps: (max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data) or a mapping of these
    :return: (ibv_qp pointer, QPN, what the device granted in the same form as caps)
    """
    cdef ibv_pd *c_pd = <ibv_pd *>need(pd, "pd")
    cdef ibv_qp_init_attr init
    cdef ibv_qp *qp
    cdef int err = 0
    need(send_cq, "send_cq")
    need(recv_cq, "recv_cq")
    memset(&init, 0, sizeof(init))
    init.send_cq = <ibv_cq *>send_cq
    init.recv_cq = <ibv_cq *>recv_cq
    init.qp_type = <ibv_qp_type>qp_type
    init.sq_sig_all = sq_sig_all
    fill_cap(&init.cap, caps)
    with nogil:
        qp = ibv_create_qp(c_pd, &init)
        if qp == NULL:
            err = errno
        back_to_python()
    if qp == NULL:
        raise verb_error("ibv_create_qp", err)
    return <uintptr_t>qp, qp.qp_num, cap_like(caps, &init.cap)


def destroy_qp(uintptr_t qp):
    """ibv_destroy_qp. Blocks until its async events are acknowledged."""
    cdef ibv_qp *c_qp = <ibv_qp *>need(qp, "qp")
    cdef int err
    with nogil:
        err = ibv_destroy_qp(c_qp)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_destroy_qp", err)


def query_qp_state(uintptr_t qp):
    """State of a QP as the device has it (ibv_query_qp): enum ibv_qp_state."""
    cdef ibv_qp *c_qp = <ibv_qp *>need(qp, "qp")
    cdef ibv_qp_attr attr
    cdef ibv_qp_init_attr init
    cdef int err
    with nogil:
        memset(&attr, 0, sizeof(attr))
        memset(&init, 0, sizeof(init))
        err = ibv_query_qp(c_qp, &attr, IBV_QP_STATE, &init)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_query_qp", err)
    return attr.qp_state


# ---- address handles


def create_ah(uintptr_t pd, **attrs):
    """ibv_create_ah; may block for a second while a neighbour is resolved.

    :param attrs: ibv_ah_attr's fields: port_num, dlid, sl, src_path_bits, static_rate, dgid (16 bytes; makes
        it global), sgid_index, hop_limit (default 64), traffic_class, flow_label
    :return: ibv_ah pointer
    """
    cdef ibv_pd *c_pd = <ibv_pd *>need(pd, "pd")
    cdef ibv_ah_attr attr
    cdef ibv_ah *ah
    cdef int err = 0
    fill_ah_attr(&attr, attrs)
    with nogil:
        ah = ibv_create_ah(c_pd, &attr)
        if ah == NULL:
            err = errno
        back_to_python()
    if ah == NULL:
        raise verb_error("ibv_create_ah", err)
    return <uintptr_t>ah


def destroy_ah(uintptr_t ah):
    """ibv_destroy_ah."""
    cdef ibv_ah *c_ah = <ibv_ah *>need(ah, "ah")
    cdef int err
    with nogil:
        err = ibv_destroy_ah(c_ah)
        if err < 0:
            err = errno
        back_to_python()
    if err:
        raise verb_error("ibv_destroy_ah", err)


# ---- async events


cdef class AsyncEventRaw:
    """One async event. It must be acknowledged before its QP, CQ or SRQ can be destroyed; at the latest its
    deallocation does so (not in a forked child).

    `type` is enum ibv_event_type; `element` the ibv_qp, ibv_cq or ibv_srq pointer, or the port number.
    """

    cdef ibv_async_event event
    cdef int pid
    cdef int unacked
    cdef readonly int type
    cdef readonly object element

    def __dealloc__(self):
        if self.unacked and self.pid == getpid():
            ibv_ack_async_event(&self.event)

    def ack(self):
        """Acknowledge it (ibv_ack_async_event); a second time does nothing."""
        if self.unacked and self.pid == getpid():
            self.unacked = 0
            ibv_ack_async_event(&self.event)

    def __repr__(self):
        return f"<AsyncEventRaw type={self.type} element={self.element:#x}>"


def async_fd(uintptr_t ctx):
    """Descriptor that is readable when get_async_event has something."""
    return (<ibv_context *>need(ctx, "ctx")).async_fd


def readable(int fd):
    """Whether a descriptor can be read now. Unlike select.poll this keeps the GIL, and is back at once."""
    cdef pollfd ready
    ready.fd = fd
    ready.events = POLLIN
    ready.revents = 0
    return poll(&ready, 1, 0) > 0


def get_async_event(uintptr_t ctx):
    """Take one async event of a context without blocking (poll, then ibv_get_async_event).

    It keeps the GIL: on a context of the application, whose descriptor may be blocking, nobody who goes
    through pyverbs can take the event between the two.

    :return: AsyncEventRaw, or None if there is none
    :raises OSError: the descriptor is broken, as after the device was removed
    """
    cdef ibv_context *context = <ibv_context *>need(ctx, "ctx")
    cdef AsyncEventRaw result = AsyncEventRaw.__new__(AsyncEventRaw)
    cdef pollfd ready
    cdef int n
    cdef int err = 0
    ready.fd = context.async_fd
    ready.events = POLLIN
    ready.revents = 0
    result.pid = getpid()
    n = poll(&ready, 1, 0)
    if n > 0:
        n = ibv_get_async_event(context, &result.event)
        result.unacked = n >= 0
    if n < 0:
        err = errno
    if result.unacked:
        result.type = result.event.event_type
        result.element = sv_event_element(&result.event)
        return result
    if err and err != EAGAIN and err != EINTR:
        raise verb_error("ibv_get_async_event", err)
    return None
