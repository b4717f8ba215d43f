# SPDX-License-Identifier: BSD-3-Clause
"""The first fields of pyverbs' own objects, through which _core reads and writes them.

pyverbs ships no .pxd, and its attributes are C fields that Python cannot see. In every release the C payload comes
first: behind PyObject_HEAD, `__weakref__` and `logger` (PyverbsObject, 32 bytes), and behind a vtable pointer too
where the class derives from PyverbsCM (40 bytes). Only these prefixes are declared here; `_core.check_abi()` compares
them at import with values that were put in through pyverbs itself.
"""

from shiftverbs.native.verbs cimport (
    ibv_cq, ibv_data_buf, ibv_mr, ibv_mw, ibv_qp_attr, ibv_qp_init_attr, ibv_qp_init_attr_ex, ibv_recv_wr, ibv_send_wr,
    ibv_sge, ibv_srq_init_attr_ex, ibv_wc,
)


cdef extern from *:
    """
    #include <Python.h>
    #include <stddef.h>
    #include <infiniband/verbs.h>
    #define SV_OBJECT PyObject_HEAD PyObject *sv_weakrefs; PyObject *sv_logger;
    #define SV_CM SV_OBJECT void *sv_vtable;
    typedef struct { SV_OBJECT } sv_object;
    typedef struct { SV_CM } sv_cm;
    typedef struct { SV_OBJECT struct ibv_wc wc; } sv_wc_object;
    typedef struct { SV_OBJECT struct ibv_qp_attr attr; } sv_qp_attr_object;
    typedef struct { SV_OBJECT struct ibv_qp_init_attr attr; } sv_qp_init_attr_object;
    typedef struct { SV_OBJECT struct ibv_qp_init_attr_ex attr; } sv_qp_init_attr_ex_object;
    typedef struct { SV_OBJECT struct ibv_srq_init_attr_ex attr; } sv_srq_init_attr_ex_object;
    typedef struct { SV_CM void *pointer; } sv_cm_object;
    typedef struct { SV_CM struct ibv_sge *sge; } sv_sge_object;
    typedef struct { SV_CM struct ibv_send_wr send_wr; } sv_send_wr_object;
    typedef struct { SV_CM struct ibv_recv_wr recv_wr; } sv_recv_wr_object;
    typedef struct { SV_CM PyObject *pd; PyObject *cmid; struct ibv_mr *mr; } sv_mr_object;
    typedef struct { SV_CM PyObject *pd; struct ibv_mw *mw; } sv_mw_object;
    typedef struct { SV_CM struct ibv_cq_ex *cq; struct ibv_cq *ibv_cq; } sv_cqex_object;
    typedef struct { SV_CM struct ibv_data_buf data; } sv_data_buffer_object;
    #define SV_OBJECT_SIZE sizeof(sv_object)
    #define SV_POINTER offsetof(sv_cm_object, pointer)
    #define SV_MR_POINTER offsetof(sv_mr_object, mr)
    #define SV_MW_POINTER offsetof(sv_mw_object, mw)
    """
    # The first of these is PyverbsObject's size, the second PyverbsCM's: what a class adds comes behind.
    const size_t SV_OBJECT_SIZE
    const size_t SV_POINTER
    const size_t SV_MR_POINTER
    const size_t SV_MW_POINTER

    ctypedef class pyverbs.cq.WC [object sv_wc_object, check_size ignore]:
        cdef ibv_wc wc

    ctypedef class pyverbs.qp.QPAttr [object sv_qp_attr_object, check_size ignore]:
        cdef ibv_qp_attr attr

    ctypedef class pyverbs.qp.QPInitAttr [object sv_qp_init_attr_object, check_size ignore]:
        cdef ibv_qp_init_attr attr

    ctypedef class pyverbs.qp.QPInitAttrEx [object sv_qp_init_attr_ex_object, check_size ignore]:
        cdef ibv_qp_init_attr_ex attr

    ctypedef class pyverbs.srq.SrqInitAttrEx [object sv_srq_init_attr_ex_object, check_size ignore]:
        cdef ibv_srq_init_attr_ex attr

    ctypedef class pyverbs.base.PyverbsCM [object sv_cm, check_size ignore]:
        pass

    # Context, PD, CompChannel, CQ, CQEX, QP, SRQ, AH and XRCD have their pointer first.
    ctypedef struct sv_cm_object:
        void *pointer

    ctypedef class pyverbs.device.Context [object sv_cm_object, check_size ignore]:
        cdef void *pointer

    ctypedef class pyverbs.cq.CompChannel [object sv_cm_object, check_size ignore]:
        cdef void *pointer

    ctypedef class pyverbs.cq.CQ [object sv_cm_object, check_size ignore]:
        cdef void *pointer

    ctypedef class pyverbs.wr.SGE [object sv_sge_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_sge *sge

    ctypedef class pyverbs.wr.SendWR [object sv_send_wr_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_send_wr send_wr

    ctypedef class pyverbs.wr.RecvWR [object sv_recv_wr_object, check_size ignore]:
        cdef object sv_logger
        cdef ibv_recv_wr recv_wr

    # The layout of release 31 and later, the only one that check_abi() accepts.
    ctypedef class pyverbs.mr.MR [object sv_mr_object, check_size ignore]:
        cdef ibv_mr *mr

    ctypedef class pyverbs.mr.MW [object sv_mw_object, check_size ignore]:
        cdef ibv_mw *mw

    ctypedef class pyverbs.cq.CQEX [object sv_cqex_object, check_size ignore]:
        cdef ibv_cq *ibv_cq

    ctypedef class pyverbs.qp.DataBuffer [object sv_data_buffer_object, check_size ignore]:
        cdef ibv_data_buf data
