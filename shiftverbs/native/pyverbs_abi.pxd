# SPDX-License-Identifier: BSD-3-Clause
"""The first fields of pyverbs' own objects, through which _core reads and writes them.

pyverbs ships no .pxd, and its attributes are C fields that Python cannot see. In every release the C payload comes
first: behind PyObject_HEAD, `__weakref__` and `logger` (PyverbsObject, 32 bytes), and behind a vtable pointer too
where the class derives from PyverbsCM (40 bytes). Only these prefixes are declared here; `_core.check_abi()` compares
them at import with values that were put in through pyverbs itself.
"""

from shiftverbs.native.verbs cimport (
    ibv_ah, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_data_buf, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq, ibv_wc,
)


cdef extern from *:
    """
    #include <Python.h>
    #include <infiniband/verbs.h>
    #define SV_OBJECT PyObject_HEAD PyObject *sv_weakrefs; PyObject *sv_logger;
    #define SV_CM SV_OBJECT void *sv_vtable;
    typedef struct { SV_OBJECT struct ibv_wc wc; } sv_wc_object;
    typedef struct { SV_OBJECT struct ibv_qp_cap cap; } sv_qp_cap_object;
    typedef struct { SV_OBJECT struct ibv_qp_attr attr; } sv_qp_attr_object;
    typedef struct { SV_OBJECT struct ibv_qp_init_attr attr; } sv_qp_init_attr_object;
    typedef struct { SV_CM struct ibv_sge *sge; } sv_sge_object;
    typedef struct { SV_CM struct ibv_send_wr send_wr; } sv_send_wr_object;
    typedef struct { SV_CM struct ibv_recv_wr recv_wr; } sv_recv_wr_object;
    typedef struct { SV_CM struct ibv_context *context; } sv_context_object;
    typedef struct { SV_CM struct ibv_pd *pd; } sv_pd_object;
    typedef struct { SV_CM PyObject *pd; PyObject *cmid; struct ibv_mr *mr; } sv_mr_object;
    typedef struct { SV_CM struct ibv_comp_channel *cc; } sv_comp_channel_object;
    typedef struct { SV_CM struct ibv_cq *cq; } sv_cq_object;
    typedef struct { SV_CM struct ibv_cq_ex *cq; struct ibv_cq *ibv_cq; } sv_cqex_object;
    typedef struct { SV_CM struct ibv_qp *qp; } sv_qp_object;
    typedef struct { SV_CM struct ibv_data_buf data; } sv_data_buffer_object;
    typedef struct { SV_CM struct ibv_srq *srq; } sv_srq_object;
    typedef struct { SV_CM struct ibv_ah *ah; } sv_ah_object;
    """
    ctypedef class pyverbs.cq.WC [object sv_wc_object, check_size ignore]:
        cdef ibv_wc wc

    ctypedef class pyverbs.qp.QPCap [object sv_qp_cap_object, check_size ignore]:
        cdef ibv_qp_cap cap

    ctypedef class pyverbs.qp.QPAttr [object sv_qp_attr_object, check_size ignore]:
        cdef ibv_qp_attr attr

    ctypedef class pyverbs.qp.QPInitAttr [object sv_qp_init_attr_object, check_size ignore]:
        cdef ibv_qp_init_attr attr

    # struct ibv_qp_init_attr_ex begins as struct ibv_qp_init_attr does.
    ctypedef class pyverbs.qp.QPInitAttrEx [object sv_qp_init_attr_object, check_size ignore]:
        cdef ibv_qp_init_attr attr

    ctypedef class pyverbs.wr.SGE [object sv_sge_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_sge *sge

    ctypedef class pyverbs.wr.SendWR [object sv_send_wr_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_send_wr send_wr

    ctypedef class pyverbs.wr.RecvWR [object sv_recv_wr_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_recv_wr recv_wr

    ctypedef class pyverbs.device.Context [object sv_context_object, check_size ignore]:
        cdef ibv_context *context

    ctypedef class pyverbs.pd.PD [object sv_pd_object, check_size ignore]:
        cdef ibv_pd *pd

    # The layout of release 31 and later, the only one that check_abi() accepts.
    ctypedef class pyverbs.mr.MR [object sv_mr_object, check_size ignore]:
        cdef ibv_mr *mr

    ctypedef class pyverbs.cq.CompChannel [object sv_comp_channel_object, check_size ignore]:
        cdef ibv_comp_channel *cc

    ctypedef class pyverbs.cq.CQ [object sv_cq_object, check_size ignore]:
        cdef ibv_cq *cq

    ctypedef class pyverbs.cq.CQEX [object sv_cqex_object, check_size ignore]:
        cdef ibv_cq_ex *cq
        cdef ibv_cq *ibv_cq

    ctypedef class pyverbs.qp.QP [object sv_qp_object, check_size ignore]:
        cdef ibv_qp *qp

    ctypedef class pyverbs.qp.DataBuffer [object sv_data_buffer_object, check_size ignore]:
        cdef ibv_data_buf data

    ctypedef class pyverbs.srq.SRQ [object sv_srq_object, check_size ignore]:
        cdef ibv_srq *srq

    ctypedef class pyverbs.addr.AH [object sv_ah_object, check_size ignore]:
        cdef ibv_ah *ah
