# SPDX-License-Identifier: BSD-3-Clause
# The check that the layout of pyverbs' objects is the known one. Included by _core.pyx.

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
    from pyverbs.addr import AH
    from pyverbs.base import PyverbsObject
    from pyverbs.pd import PD
    from pyverbs.qp import QP
    from pyverbs.srq import SRQ
    from pyverbs.xrcd import XRCD
    expect(PyverbsObject, PyverbsObject.__basicsize__ == SV_OBJECT_SIZE)
    expect(PyverbsCM, PyverbsCM.__basicsize__ == SV_POINTER and PyverbsCM.__base__ is PyverbsObject)
    for cls, size in ((MR, 104), (QP, 128), (CQ, 96), (QPAttr, 176), (QPInitAttr, 120), (QPInitAttrEx, 216)):
        expect(cls, cls.__basicsize__ == size)
    for cls in (WC, QPAttr, QPInitAttr, QPInitAttrEx, SrqInitAttrEx):
        expect(cls, cls.__base__ is PyverbsObject)
    for cls in (SGE, SendWR, RecvWR, MR, MW, Context, PD, CompChannel, CQ, CQEX, QP, SRQ, AH, XRCD, DataBuffer):
        expect(cls, cls.__base__ is PyverbsCM)
    check_wc()
    check_wrs()
    check_init_attrs()
    check_qp_attr()


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


cdef int check_init_attrs() except -1:
    from pyverbs.qp import QPCap
    cap = QPCap(max_send_wr=101, max_recv_wr=102, max_send_sge=3, max_recv_sge=4, max_inline_data=105)
    for cls in (QPInitAttr, QPInitAttrEx):
        init = cls(qp_type=2, cap=cap, sq_sig_all=1)
        attr = init_attr(init)
        expect(cls, cap_tuple(attr.cap) == (101, 102, 3, 4, 105) and attr.qp_type == 2 and attr.sq_sig_all == 1)
        expect(cls, attr.send_cq == 0 and attr.recv_cq == 0 and attr.srq == 0)
    init = QPInitAttrEx(comp_mask=18, create_flags=19, source_qpn=20, send_ops_flags=21)
    attr = init_attr(init)
    expect(QPInitAttrEx, attr.comp_mask == 18 and attr.create_flags == 19)
    expect(QPInitAttrEx, attr.source_qpn == 20 and attr.send_ops_flags == 21)
    cdef SrqInitAttrEx srq = SrqInitAttrEx(max_wr=22)
    expect(SrqInitAttrEx, srq.attr.attr.max_wr == 22 and srq.attr.cq == NULL)
    expect(SrqInitAttrEx, SrqInitAttrEx.__basicsize__ >= SV_OBJECT_SIZE + sizeof(ibv_srq_init_attr_ex))
    return 0


cdef int check_qp_attr() except -1:
    from pyverbs.addr import AHAttr
    from pyverbs.qp import QPCap
    attr = QPAttr()
    seen = qp_attr(attr)
    names = [name for name in layouts[Attr][1] if name not in inner]
    for number, name in enumerate(names):
        setattr(attr, name, number)
    for number, name in enumerate(names):
        expect(QPAttr, getattr(seen, name) == number)
    attr.cap = QPCap(max_send_wr=101, max_recv_wr=102, max_send_sge=3, max_recv_sge=4, max_inline_data=105)
    attr.ah_attr = AHAttr(dlid=106, sl=7, port_num=8)
    attr.alt_ah_attr = AHAttr(dlid=109, sl=10, port_num=11)
    expect(QPAttr, cap_tuple(seen.cap) == (101, 102, 3, 4, 105))
    expect(QPAttr, (seen.ah_attr.dlid, seen.ah_attr.sl, seen.ah_attr.port_num) == (106, 7, 8))
    expect(QPAttr, (seen.alt_ah_attr.dlid, seen.alt_ah_attr.sl, seen.alt_ah_attr.port_num) == (109, 10, 11))
    return 0
