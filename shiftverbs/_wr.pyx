# SPDX-License-Identifier: BSD-3-Clause
"""SGE, SendWR and RecvWR: pyverbs' own, made without their Python-level constructors.

A program makes a pair of these for each message, and pyverbs' constructors cost more than posting and polling
together: a look-up of a logger, a list of opcodes, argument parsing through three levels. Each class here is a Python
subclass of pyverbs' with nothing added, so the objects are accepted wherever pyverbs' are, and with a C function of
its own where Python calls the class (`tp_vectorcall`). That function takes the usual case: integers in range, SGEs
that are SGEs. Anything else it leaves to pyverbs' constructor, whose errors are therefore pyverbs' own. A subclass of
these goes through pyverbs' constructor too, since `tp_vectorcall` is not inherited.

The layout of pyverbs' objects is checked when `_core` is imported, which wr.py does first.

Memory is pyverbs' business as before: what an SGE points to, and a WR's list of SGEs, is freed by `close()` and,
from release 65 on, with the object. Programs rely on that (`wr.sg_list = sge` lends the memory without a reference).
"""

from cpython.list cimport PyList_CheckExact
from cpython.object cimport PyObject, PyTypeObject
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport UINT32_MAX, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shiftverbs.native.verbs cimport (
    IBV_SEND_SIGNALED, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, ibv_sge, ibv_wr_opcode,
)
from shiftverbs.native.pyverbs_abi cimport SGE as BaseSGE, RecvWR as BaseRecvWR, SendWR as BaseSendWR

import logging


cdef extern from *:
    """
    #include <Python.h>
    #include <stdint.h>
    #define SV_SET_VECTORCALL(type, function) (((PyTypeObject *)(type))->tp_vectorcall = (vectorcallfunc)(function))
    #define SV_NARGS(n) PyVectorcall_NARGS(n)
    #define SV_TYPE_CALL(type, args, kwargs) (PyType_Type.tp_call((PyObject *)(type), args, kwargs))
    /* An int between 0 and the limit; false, and no error set, for anything else. */
    static inline int sv_number(PyObject *value, uint64_t limit, uint64_t *result)
    {
        unsigned long long got;

        if (!PyLong_Check(value))
            return 0;
        got = PyLong_AsUnsignedLongLong(value);
        if (got == (unsigned long long)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        *result = got;
        return got <= limit;
    }
    """
    bint number "sv_number"(PyObject *value, uint64_t limit, uint64_t *result) noexcept
    void SV_SET_VECTORCALL(object cls, void *function)
    Py_ssize_t SV_NARGS(size_t n)
    object SV_TYPE_CALL(PyObject *cls, object args, object kwargs)

ctypedef object (*new_function)(PyTypeObject *, PyObject *, PyObject *)

cdef tuple no_args = ()
cdef object sge_logger = logging.getLogger('SGE')
cdef object send_logger = logging.getLogger('SendWR')
cdef object recv_logger = logging.getLogger('RecvWR')

cdef enum:
    MAX_ARGS = 7

# The names of the arguments in pyverbs' order; interned, as those of a call are.
cdef tuple sge_names = ('addr', 'length', 'lkey')
cdef tuple send_names = ('wr_id', 'opcode', 'num_sge', 'imm_data', 'sg', 'send_flags', 'next_wr')
cdef tuple recv_names = ('wr_id', 'num_sge', 'sg', 'next_wr')


cdef inline object bare(PyObject *cls):
    """An object of this class, no constructor run."""
    cdef PyTypeObject *t = <PyTypeObject *>cls
    return (<new_function>t.tp_new)(t, <PyObject *>no_args, NULL)


cdef object as_pyverbs(PyObject *cls, PyObject **args, Py_ssize_t n, PyObject *names):
    """The call as Python makes it: pyverbs' constructor decides."""
    cdef Py_ssize_t i
    cdef tuple positional = tuple([<object>args[i] for i in range(n)])
    cdef dict keywords = {}
    if names != NULL:
        for i, name in enumerate(<tuple>names):
            keywords[name] = <object>args[n + i]
    return SV_TYPE_CALL(cls, positional, keywords)


cdef inline bint sort_out(PyObject **args, Py_ssize_t n, PyObject *names, tuple known, PyObject **by_place) except -1:
    """Put the arguments into their places. False: pyverbs must look at them."""
    cdef Py_ssize_t count = len(known)
    cdef Py_ssize_t i, j
    cdef PyObject *name
    if n > count:
        return False
    for i in range(count):
        by_place[i] = args[i] if i < n else NULL
    if names == NULL:
        return True
    for i in range(len(<tuple>names)):
        name = <PyObject *>(<tuple>names)[i]
        for j in range(n, count):
            if name == <PyObject *>known[j]:
                by_place[j] = args[n + i]
                break
        else:
            return False
    return True


cdef inline bint plain(uint64_t opcode) noexcept:
    """An opcode that needs SGEs; the others are pyverbs' to look at."""
    return (opcode == IBV_WR_RDMA_WRITE or opcode == IBV_WR_SEND or opcode == IBV_WR_RDMA_READ
            or opcode == IBV_WR_RDMA_WRITE_WITH_IMM or opcode == IBV_WR_SEND_WITH_IMM
            or opcode == IBV_WR_ATOMIC_CMP_AND_SWP or opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)


cdef inline ibv_sge *copy_sges(PyObject *sg, uint64_t count) except? NULL:
    """The SGEs as an array of their own. NULL without an error: pyverbs must look at them."""
    cdef ibv_sge *copied
    cdef uint64_t i
    if sg == NULL or not (PyList_CheckExact(<object>sg) or PyTuple_CheckExact(<object>sg)):
        return NULL
    if count == 0 or count > <uint64_t>len(<object>sg):
        return NULL
    copied = <ibv_sge *>malloc(count * sizeof(ibv_sge))
    if copied == NULL:
        raise MemoryError
    for i in range(count):
        item = (<object>sg)[i]
        if not isinstance(item, BaseSGE) or (<BaseSGE>item).sge == NULL:
            free(copied)
            return NULL
        copied[i] = (<BaseSGE>item).sge[0]
    return copied


cdef object new_sge(PyObject *cls, PyObject **args, size_t flags, PyObject *names):
    """SGE(addr, length, lkey)."""
    cdef Py_ssize_t n = SV_NARGS(flags)
    cdef PyObject *at[MAX_ARGS]
    cdef uint64_t addr = 0
    cdef uint64_t length = 0
    cdef uint64_t lkey = 0
    cdef BaseSGE made
    if (not sort_out(args, n, names, sge_names, at) or at[0] == NULL or at[1] == NULL or at[2] == NULL
            or not number(at[0], <uint64_t>-1, &addr) or not number(at[1], UINT32_MAX, &length)
            or not number(at[2], UINT32_MAX, &lkey)):
        return as_pyverbs(cls, args, n, names)
    made = <BaseSGE>bare(cls)
    made.sv_logger = sge_logger
    made.sge = <ibv_sge *>malloc(sizeof(ibv_sge))
    if made.sge == NULL:
        raise MemoryError
    made.sge.addr = addr
    made.sge.length = <uint32_t>length
    made.sge.lkey = <uint32_t>lkey
    return made


cdef object new_send_wr(PyObject *cls, PyObject **args, size_t flags, PyObject *names):
    """SendWR(wr_id=0, opcode=IBV_WR_SEND, num_sge=0, imm_data=0, sg=None, send_flags=…, next_wr=None)."""
    cdef Py_ssize_t n = SV_NARGS(flags)
    cdef PyObject *at[MAX_ARGS]
    cdef uint64_t wr_id = 0
    cdef uint64_t opcode = IBV_WR_SEND
    cdef uint64_t num_sge = 0
    cdef uint64_t imm_data = 0
    cdef uint64_t send_flags = IBV_SEND_SIGNALED
    cdef ibv_sge *sges = NULL
    cdef BaseSendWR made
    if (sort_out(args, n, names, send_names, at)
            and (at[0] == NULL or number(at[0], <uint64_t>-1, &wr_id))
            and (at[1] == NULL or number(at[1], UINT32_MAX, &opcode)) and plain(opcode)
            and at[2] != NULL and number(at[2], UINT32_MAX, &num_sge)
            and (at[3] == NULL or number(at[3], UINT32_MAX, &imm_data))
            and (at[5] == NULL or number(at[5], UINT32_MAX, &send_flags))
            and (at[6] == NULL or at[6] == <PyObject *>None or isinstance(<object>at[6], BaseSendWR))):
        sges = copy_sges(at[4], num_sge)
    if sges == NULL:
        return as_pyverbs(cls, args, n, names)
    try:
        made = <BaseSendWR>bare(cls)
    except BaseException:
        free(sges)
        raise
    made.sv_logger = send_logger
    made.send_wr.wr_id = wr_id
    made.send_wr.opcode = <ibv_wr_opcode>opcode
    made.send_wr.send_flags = <unsigned int>send_flags
    made.send_wr.imm_data = <uint32_t>imm_data
    made.send_wr.num_sge = <int>num_sge
    made.send_wr.sg_list = sges
    if at[6] != NULL and at[6] != <PyObject *>None:
        made.send_wr.next = &(<BaseSendWR>at[6]).send_wr
    return made


cdef object new_recv_wr(PyObject *cls, PyObject **args, size_t flags, PyObject *names):
    """RecvWR(wr_id=0, num_sge=0, sg=None, next_wr=None)."""
    cdef Py_ssize_t n = SV_NARGS(flags)
    cdef PyObject *at[MAX_ARGS]
    cdef uint64_t wr_id = 0
    cdef uint64_t num_sge = 0
    cdef ibv_sge *sges = NULL
    cdef BaseRecvWR made
    if (sort_out(args, n, names, recv_names, at)
            and (at[0] == NULL or number(at[0], <uint64_t>-1, &wr_id))
            and at[1] != NULL and number(at[1], UINT32_MAX, &num_sge)
            and (at[3] == NULL or at[3] == <PyObject *>None or isinstance(<object>at[3], BaseRecvWR))):
        sges = copy_sges(at[2], num_sge)
    if sges == NULL:
        return as_pyverbs(cls, args, n, names)
    try:
        made = <BaseRecvWR>bare(cls)
    except BaseException:
        free(sges)
        raise
    made.sv_logger = recv_logger
    made.recv_wr.wr_id = wr_id
    made.recv_wr.num_sge = <int>num_sge
    made.recv_wr.sg_list = sges
    if at[3] != NULL and at[3] != <PyObject *>None:
        made.recv_wr.next = &(<BaseRecvWR>at[3]).recv_wr
    return made


def _subclass(base, doc):
    """A subclass with nothing added, under the name that programs know."""
    return type(base.__name__, (base,), {'__slots__': (), '__module__': 'shiftverbs.wr', '__doc__': doc})


SGE = _subclass(BaseSGE, 'A scatter/gather entry, struct ibv_sge: SGE(addr, length in bytes, lkey).')
SendWR = _subclass(BaseSendWR, 'A send work request, struct ibv_send_wr; arguments as pyverbs\'.')
RecvWR = _subclass(BaseRecvWR, 'A receive work request, struct ibv_recv_wr; arguments as pyverbs\'.')
SV_SET_VECTORCALL(SGE, <void *>new_sge)
SV_SET_VECTORCALL(SendWR, <void *>new_send_wr)
SV_SET_VECTORCALL(RecvWR, <void *>new_recv_wr)
