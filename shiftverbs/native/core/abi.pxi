# SPDX-License-Identifier: BSD-3-Clause
# Reading and writing pyverbs' objects, and the check that their layout is the known one. Included by _core.pyx.

def pointer(obj) -> int:
    """Address of the libibverbs object behind a pyverbs one (or an instance of a subclass); 0 when it is closed.

    For an extended CQ that of its ibv_cq. Raises TypeError for anything else.
    """
    if isinstance(obj, QP):
        return <uintptr_t>(<QP>obj).qp
    if isinstance(obj, CQ):
        return <uintptr_t>(<CQ>obj).cq
    if isinstance(obj, MR):
        return <uintptr_t>(<MR>obj).mr
    if isinstance(obj, PD):
        return <uintptr_t>(<PD>obj).pd
    if isinstance(obj, Context):
        return <uintptr_t>(<Context>obj).context
    if isinstance(obj, CompChannel):
        return <uintptr_t>(<CompChannel>obj).cc
    if isinstance(obj, CQEX):
        return <uintptr_t>(<CQEX>obj).ibv_cq
    if isinstance(obj, SRQ):
        return <uintptr_t>(<SRQ>obj).srq
    if isinstance(obj, AH):
        return <uintptr_t>(<AH>obj).ah
    raise TypeError(f'no libibverbs object behind {type(obj).__name__}')


cdef ibv_qp_init_attr *init_attr_of(obj) except NULL:
    if isinstance(obj, QPInitAttr):
        return &(<QPInitAttr>obj).attr
    if isinstance(obj, QPInitAttrEx):
        return &(<QPInitAttrEx>obj).attr
    raise TypeError(f'QPInitAttr or QPInitAttrEx expected, not {type(obj).__name__}')


cdef dict cap_dict(const ibv_qp_cap *cap):
    return {'max_send_wr': cap.max_send_wr, 'max_recv_wr': cap.max_recv_wr, 'max_send_sge': cap.max_send_sge,
            'max_recv_sge': cap.max_recv_sge, 'max_inline_data': cap.max_inline_data}


def read_cap(obj) -> dict:
    """The five capacities in a QPCap, QPInitAttr(Ex) or QPAttr."""
    if isinstance(obj, QPCap):
        return cap_dict(&(<QPCap>obj).cap)
    if isinstance(obj, QPAttr):
        return cap_dict(&(<QPAttr>obj).attr.cap)
    return cap_dict(&init_attr_of(obj).cap)


def write_cap(obj, cap) -> None:
    """Put capacities (a dict as from read_cap, whole or in part) into a QPCap, QPInitAttr(Ex) or QPAttr."""
    cdef ibv_qp_cap *to
    if isinstance(obj, QPCap):
        to = &(<QPCap>obj).cap
    elif isinstance(obj, QPAttr):
        to = &(<QPAttr>obj).attr.cap
    else:
        to = &init_attr_of(obj).cap
    to.max_send_wr = cap.get('max_send_wr', to.max_send_wr)
    to.max_recv_wr = cap.get('max_recv_wr', to.max_recv_wr)
    to.max_send_sge = cap.get('max_send_sge', to.max_send_sge)
    to.max_recv_sge = cap.get('max_recv_sge', to.max_recv_sge)
    to.max_inline_data = cap.get('max_inline_data', to.max_inline_data)


def set_init_attr(obj, send_cq_ptr=None, recv_cq_ptr=None, cap=None) -> None:
    """Write what pyverbs' own constructor refuses for subclasses: CQ addresses and the capacities.

    Args:
        obj: QPInitAttr or QPInitAttrEx, or an instance of a subclass.
        send_cq_ptr, recv_cq_ptr: addresses of ibv_cq, 0 for none; None leaves the field alone.
        cap: QPCap or a dict as from read_cap; None leaves the capacities alone.
    """
    cdef ibv_qp_init_attr *attr = init_attr_of(obj)
    if send_cq_ptr is not None:
        attr.send_cq = <ibv_cq *><uintptr_t>send_cq_ptr
    if recv_cq_ptr is not None:
        attr.recv_cq = <ibv_cq *><uintptr_t>recv_cq_ptr
    if isinstance(cap, QPCap):
        attr.cap = (<QPCap>cap).cap
    elif cap is not None:
        write_cap(obj, cap)


def read_init_attr(obj) -> dict:
    """Everything in a QPInitAttr(Ex) that the two have in common: addresses as ints, capacities as a dict."""
    cdef ibv_qp_init_attr *attr = init_attr_of(obj)
    return {'send_cq': <uintptr_t>attr.send_cq, 'recv_cq': <uintptr_t>attr.recv_cq, 'srq': <uintptr_t>attr.srq,
            'cap': cap_dict(&attr.cap), 'qp_type': <int>attr.qp_type, 'sq_sig_all': attr.sq_sig_all}


cdef dict ah_attr_dict(const ibv_ah_attr *ah):
    return {'dgid': (<const uint8_t *>ah.grh.dgid.raw)[:16], 'flow_label': ah.grh.flow_label,
            'sgid_index': ah.grh.sgid_index, 'hop_limit': ah.grh.hop_limit, 'traffic_class': ah.grh.traffic_class,
            'dlid': ah.dlid, 'sl': ah.sl, 'src_path_bits': ah.src_path_bits, 'static_rate': ah.static_rate,
            'is_global': ah.is_global, 'port_num': ah.port_num}


def read_qp_attr(QPAttr obj not None) -> dict:
    """Every field of a QPAttr, raw: capacities as a dict, address vectors as dicts with 16 bytes of GID."""
    cdef ibv_qp_attr *a = &obj.attr
    return {'qp_state': <int>a.qp_state, 'cur_qp_state': <int>a.cur_qp_state, 'path_mtu': <int>a.path_mtu,
            'path_mig_state': <int>a.path_mig_state, 'qkey': a.qkey, 'rq_psn': a.rq_psn, 'sq_psn': a.sq_psn,
            'dest_qp_num': a.dest_qp_num, 'qp_access_flags': a.qp_access_flags, 'cap': cap_dict(&a.cap),
            'ah_attr': ah_attr_dict(&a.ah_attr), 'alt_ah_attr': ah_attr_dict(&a.alt_ah_attr),
            'pkey_index': a.pkey_index, 'alt_pkey_index': a.alt_pkey_index,
            'en_sqd_async_notify': a.en_sqd_async_notify, 'sq_draining': a.sq_draining,
            'max_rd_atomic': a.max_rd_atomic, 'max_dest_rd_atomic': a.max_dest_rd_atomic,
            'min_rnr_timer': a.min_rnr_timer, 'port_num': a.port_num, 'timeout': a.timeout, 'retry_cnt': a.retry_cnt,
            'rnr_retry': a.rnr_retry, 'alt_port_num': a.alt_port_num, 'alt_timeout': a.alt_timeout,
            'rate_limit': a.rate_limit}


# --- the check -----------------------------------------------------------------------------------------------

cdef int expect(cls, bint ok) except -1:
    if not ok:
        raise ImportError(f'{cls.__module__}.{cls.__name__} of pyverbs {pyverbs_version()} has a layout that '
                          f'shiftverbs does not know: it can read releases 31 to 65')
    return 0


def pyverbs_version() -> str:
    """The release, where pip installed it; else where the package lies."""
    import importlib.metadata

    import pyverbs
    try:
        return importlib.metadata.version('pyverbs')
    except importlib.metadata.PackageNotFoundError:
        return os.path.dirname(pyverbs.__file__ or '') or 'of unknown origin'


def check_abi() -> None:
    """Compare the layouts in pyverbs_abi.pxd with real pyverbs objects; runs at import.

    Values are put in through pyverbs' constructors and read back through our structs. Where an object needs a
    device (Context, PD, CQ, QP ...) the size of its base and its own are what can be checked; a pointer there is
    NULL until the constructor ran.

    Raises ImportError naming the class and the pyverbs release.
    """
    from pyverbs.base import PyverbsCM, PyverbsObject
    expect(PyverbsObject, PyverbsObject.__basicsize__ == 32)
    expect(PyverbsCM, PyverbsCM.__basicsize__ == 40 and PyverbsCM.__base__ is PyverbsObject)
    expect(MR, MR.__basicsize__ == 104)
    for cls in (WC, QPCap, QPAttr, QPInitAttr, QPInitAttrEx):
        expect(cls, cls.__base__ is PyverbsObject)
    for cls in (SGE, SendWR, RecvWR, MR, Context, PD, CompChannel, CQ, CQEX, QP, SRQ, AH, DataBuffer):
        expect(cls, cls.__base__ is PyverbsCM)
    check_wc()
    check_wrs()
    check_qp_objects()


cdef int check_wc() except -1:
    cdef WC wc = WC(wr_id=0x1122334455667788, status=12, opcode=128, vendor_err=0x81, byte_len=4097, qp_num=0x123456,
                    src_qp=0x654321, imm_data=0x01020304, wc_flags=2, pkey_index=7, slid=9, sl=3, dlid_path_bits=5)
    cdef ibv_wc *c = &wc.wc
    expect(WC, WC.__basicsize__ >= 32 + sizeof(ibv_wc))
    expect(WC, c.wr_id == 0x1122334455667788 and c.status == 12 and c.opcode == 128 and c.vendor_err == 0x81)
    expect(WC, c.byte_len == 4097 and c.qp_num == 0x123456 and c.src_qp == 0x654321 and c.wc_flags == 2)
    expect(WC, c.pkey_index == 7 and c.slid == 9 and c.sl == 3 and c.dlid_path_bits == 5)
    expect(WC, wc.wr_id == c.wr_id and wc.status == 12 and wc.qp_num == 0x123456)
    return 0


cdef int check_wrs() except -1:
    cdef DataBuffer buffer = DataBuffer(0x7F0011223344, 4095)
    cdef SGE sge = SGE(0x7F0011223344, 4095, 0xABCDEF)
    cdef SendWR send = SendWR(wr_id=0x8877665544332211, opcode=4, num_sge=1, imm_data=0x55AA, sg=[sge], send_flags=3)
    cdef RecvWR recv = RecvWR(wr_id=0x0102030405060708, num_sge=1, sg=[sge])
    cdef SendWR head
    expect(SGE, sge.sge != NULL and sge.sge.addr == 0x7F0011223344 and sge.sge.length == 4095
           and sge.sge.lkey == 0xABCDEF)
    expect(DataBuffer, <size_t>buffer.data.addr == 0x7F0011223344 and buffer.data.length == 4095)
    expect(SendWR, SendWR.__basicsize__ >= 40 + sizeof(ibv_send_wr))
    expect(SendWR, send.send_wr.wr_id == 0x8877665544332211 and send.send_wr.next == NULL
           and send.send_wr.num_sge == 1 and send.send_wr.opcode == 4 and send.send_wr.send_flags == 3
           and send.send_wr.imm_data == 0x55AA)
    expect(SendWR, send.send_wr.sg_list != NULL and send.send_wr.sg_list.addr == 0x7F0011223344)
    send.set_wr_atomic(0x1234, 0x7F0055667788, 11, 22)
    expect(SendWR, send.send_wr.wr.atomic.rkey == 0x1234 and send.send_wr.wr.atomic.remote_addr == 0x7F0055667788
           and send.send_wr.wr.atomic.compare_add == 11 and send.send_wr.wr.atomic.swap == 22)
    send.set_wr_rdma(0x4321, 0x7F0099887766)
    expect(SendWR, send.send_wr.wr.rdma.rkey == 0x4321 and send.send_wr.wr.rdma.remote_addr == 0x7F0099887766)
    head = SendWR(wr_id=1, num_sge=1, sg=[sge], next_wr=send)
    expect(SendWR, head.send_wr.next == &send.send_wr)
    expect(RecvWR, RecvWR.__basicsize__ >= 40 + sizeof(ibv_recv_wr))
    expect(RecvWR, recv.recv_wr.wr_id == 0x0102030405060708 and recv.recv_wr.next == NULL
           and recv.recv_wr.num_sge == 1 and recv.recv_wr.sg_list.length == 4095)
    return 0


cdef int check_qp_objects() except -1:
    cdef dict want = {'max_send_wr': 101, 'max_recv_wr': 102, 'max_send_sge': 3, 'max_recv_sge': 4,
                      'max_inline_data': 105}
    cap = QPCap(max_send_wr=101, max_recv_wr=102, max_send_sge=3, max_recv_sge=4, max_inline_data=105)
    expect(QPCap, read_cap(cap) == want)
    for cls in (QPInitAttr, QPInitAttrEx):
        init = cls(qp_type=2, cap=cap, sq_sig_all=1)
        attr = read_init_attr(init)
        expect(cls, attr == {'send_cq': 0, 'recv_cq': 0, 'srq': 0, 'cap': want, 'qp_type': 2, 'sq_sig_all': 1})
    qp_attr = QPAttr(qp_state=3, path_mtu=4)
    qp_attr.dest_qp_num = 0x123456
    qp_attr.rq_psn = 0xABCDE
    qp_attr.sq_psn = 0xEDCBA
    qp_attr.qkey = 0x11111111
    qp_attr.timeout = 14
    qp_attr.retry_cnt = 6
    qp_attr.rnr_retry = 5
    qp_attr.min_rnr_timer = 12
    qp_attr.max_rd_atomic = 8
    qp_attr.max_dest_rd_atomic = 9
    attr = read_qp_attr(qp_attr)
    expect(QPAttr, attr['qp_state'] == 3 and attr['path_mtu'] == 4 and attr['dest_qp_num'] == 0x123456)
    expect(QPAttr, attr['rq_psn'] == 0xABCDE and attr['sq_psn'] == 0xEDCBA and attr['qkey'] == 0x11111111)
    expect(QPAttr, attr['timeout'] == 14 and attr['retry_cnt'] == 6 and attr['rnr_retry'] == 5)
    expect(QPAttr, attr['min_rnr_timer'] == 12 and attr['max_rd_atomic'] == 8 and attr['max_dest_rd_atomic'] == 9)
    return 0
