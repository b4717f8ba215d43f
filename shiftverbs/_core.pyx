# SPDX-License-Identifier: BSD-3-Clause
"""The data path: what lies between an application's post/poll and the hardware's queues.

The work is done on C records, in five declaration files whose functions are compiled in here:

| part | where |
|---|---|
| hash maps | `core/map.pxd` |
| journal rings, pairs, WC buffer, event ring; appending, handing over, retiring | `core/journal.pxd` |
| one WC between hardware and application; posting | `core/dispatch.pxd` |
| which replays would be seen | `core/replay.pxd` |
| how long what is outstanding takes | `core/sampling.pxd`, and for Python `core/sampling.pxi` |
| attention, events, key maps, CQCore | this file |
| putting off signals | `core/signals.pxi` |
| where an object ends that was dropped | `core/finalizers.pxi` |
| ChannelCore | `core/channel.pxi` |
| QPCore | `core/qp.pxi` |
| CQCursor (extended CQs), WrBuilder (extended QPs) | `core/cqex.pxi`, `core/qpex.pxi` |
| pointers and structs inside pyverbs' objects | `core/objects.pxi` |
| the layout of pyverbs' objects, its check | `pyverbs_abi.pxd`, `core/abi.pxi` |

**The GIL is the lock.** Every method here is atomic under it (the provider's post and poll run with the GIL held, as
in pyverbs); only ChannelCore.wait releases it, and touches nothing while it sleeps. Python code may run wherever an
object is created (garbage collection), so the C state is consistent before any object is.

Pointers are Python ints. Pair and NIC numbers `k`: 0 is the default one, up to MAX_PAIRS - 1.
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.long cimport PyLong_AsLongAndOverflow
from cpython.object cimport PyObject, PyObject_GenericGetAttr, PyTypeObject
from cpython.exc cimport PyErr_CheckSignals, PyErr_Clear, PyErr_Occurred, PyErr_SetObject
from libc.errno cimport EAGAIN, EBUSY, EINTR, EINVAL, EIO, ENOENT, ENOMEM, EOPNOTSUPP, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.fcntl cimport F_GETFL, O_NONBLOCK, fcntl
from posix.unistd cimport close as posix_close, read as posix_read, write as posix_write

from shiftverbs.native.core.dispatch cimport (
    POLL_BATCH, begin_end, cq_drain, dispatch, flushes_itself, give_withheld, is_plain, make_room, qp_post_recv,
    qp_post_send, why_sends_fail,
)
from shiftverbs.native.core cimport journal, replay
from shiftverbs.native.core.journal cimport (
    EVENT_SLOTS, HEED_CLOSED, HEED_FAILED, HEED_SAMPLE, KIND_ARM, KIND_MARKER, MAX_PAIRS, REC_HW_SIGNALED, REC_PROVEN,
    REC_TWO_SIDED, SAMPLE_ENDED, WATCH_FIRST, ChannelState, CQState, Event, Pair, PathSample, QPState, RecvRec, SendRec,
    Siblings, abort_recvs, abort_sends, after_retire, atomic_opcodes, completion_due, cq_clean, cq_pop, cq_push,
    cq_reserve, cq_signal, cq_unpop, discount_answered, emit, forget_events, has_payload, has_room,
    is_answered_elsewhere, join_siblings, key_none, leave_siblings, make_id, now_ns, opcode_in, payload_out_opcodes,
    post_own_fence_write, pump_recv, pump_send, rdma_opcodes, receive_on, recv_rec, send_end, send_rec,
    start_fence_wr,
)
from shiftverbs.native.core.map cimport Map, MapSlot, map_del, map_find, map_free, map_set, map_tombstone
from shiftverbs.native.core.replay cimport Seen, replay_seen
from shiftverbs.native.core.sampling cimport (
    looked, sample_begin, sample_break, sample_now, sample_unlist, sample_want,
)
from shiftverbs.native.posix cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, ENOKEY, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, POLLERR, POLLHUP, POLLIN,
    POLLNVAL, epoll_create1, epoll_ctl, epoll_event, eventfd, htonl, poll, pollfd,
)
from shiftverbs.native.verbs cimport (
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RETRY_EXC_ERR, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_ack_cq_events,
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_cq_ex, ibv_get_cq_event, ibv_global_route, ibv_poll_cq,
    ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_ex, ibv_qp_init_attr, ibv_qp_init_attr_ex,
    ibv_qp_to_qp_ex, ibv_recv_wr, ibv_req_notify_cq, ibv_send_wr, ibv_sge, ibv_srq_init_attr_ex, ibv_wc, ibv_wr_opcode,
)
from shiftverbs.native.pyverbs_abi cimport (
    CQ, CQEX, MR, MW, SGE, SV_MR_POINTER, SV_MW_POINTER, SV_OBJECT_SIZE, SV_POINTER, WC, CompChannel, Context,
    DataBuffer, PyverbsCM, QPAttr, QPInitAttr, QPInitAttrEx, RecvWR, SendWR, SrqInitAttrEx, sv_cm_object,
)

import math
import os
import threading
import weakref as _weakref
from _signal import getsignal as _getsignal
from collections import deque as _deque
from functools import wraps as _wraps
from logging import getLogger as _getLogger
from operator import index as _index
from sys import _getframe
from sys import is_finalizing as _is_finalizing
from time import sleep as _sleep

from pyverbs.cq import PollCqAttr as _PollCqAttr
from pyverbs.pyverbs_error import PyverbsRDMAError, PyverbsUserError


EV_ERROR = journal.EV_ERROR
EV_APP_ERROR = journal.EV_APP_ERROR
EV_POST_FAILED = journal.EV_POST_FAILED
EV_SQ_FENCED = journal.EV_SQ_FENCED
EV_RQ_FENCED = journal.EV_RQ_FENCED
EV_ARM_WC = journal.EV_ARM_WC
EV_FENCE_WR_POSTED = journal.EV_FENCE_WR_POSTED
EV_FENCE_WR_DONE = journal.EV_FENCE_WR_DONE
EV_RX_REACHED = journal.EV_RX_REACHED
EV_NEW_RKEY = journal.EV_NEW_RKEY
EV_KEY_MISSING = journal.EV_KEY_MISSING
EV_FIRST_WC = journal.EV_FIRST_WC
EV_LATE_POST = journal.EV_LATE_POST


cdef int check_pair(int k) except -1:
    if not 0 <= k < MAX_PAIRS:
        raise ValueError(f'pair {k}: there are pairs 0 to {MAX_PAIRS - 1}')
    return 0


cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil
    int PyObject_GC_IsFinalized(PyObject *)
    int Py_AddPendingCall(int (*call)(void *) noexcept, void *argument)
    Py_ssize_t Py_REFCNT(PyObject *)
    void PyErr_WriteUnraisable(PyObject *where)
    # What they raise is not looked for by Cython here: a failure has what was taken to put back first.
    int list_append "PyList_Append"(object taken, PyObject *item) noexcept
    PyObject *list_item "PyList_GET_ITEM"(object taken, Py_ssize_t i) noexcept
    void list_set "PyList_SET_ITEM"(object taken, Py_ssize_t i, PyObject *item) noexcept
    void list_cut "Py_SET_SIZE"(object taken, Py_ssize_t n) noexcept
    PyObject *new_int "PyLong_FromLong"(long value) noexcept
    PyObject *new_tuple "PyTuple_New"(Py_ssize_t n) noexcept
    void tuple_set "PyTuple_SET_ITEM"(PyObject *made, Py_ssize_t i, PyObject *item) noexcept
    void keep_reference "Py_INCREF"(PyObject *held) noexcept
    void drop_reference "Py_DECREF"(PyObject *held) noexcept


include "native/core/finalizers.pxi"
include "native/core/signals.pxi"


# --- attention and events ------------------------------------------------------------------------------------

cdef journal.Shared shared
cdef object driver = None
cdef int driver_busy = 0
cdef int inherited = 0    # forked from a process with a driver
cdef int wake_fd = -1
cdef int forks = 0    # between this process and the one that loaded the module
cdef int sleepers = 0


def attention_address() -> int:
    """Address of a C int that anybody may set non-zero, atomically and without the GIL: the driver has work."""
    return <uintptr_t>&shared.attention


def attention() -> bool:
    """Whether attention is set."""
    return shared.attention != 0


def clear_attention() -> None:
    """Called by the driver before it takes events, so that later ones raise it again."""
    shared.attention = 0


def raise_attention() -> None:
    """Ask for a driver run at the next post, poll or wait, and wake what is blocked in ChannelCore.wait."""
    cdef uint64_t one = 1
    shared.attention = 1
    if sleepers:
        posix_write(wake_fd, &one, sizeof(one))


def wake_descriptor() -> int:
    """The eventfd that blocked ChannelCore.wait calls watch: write 8 bytes after setting attention, any thread."""
    return wake_fd


def set_driver(run) -> None:
    """The callable that post, poll and blocked waits run inline when attention is set; None: nobody.

    It must call clear_attention() before it takes events. An Exception it raises is reported through
    sys.unraisablehook and goes no further: the application's post or poll is not its business. Signals wait until it is
    over, and what their handlers raise comes out of the post, poll or wait.
    """
    global driver, driver_busy
    if run is not None and not callable(run):
        raise TypeError('a callable or None')
    driver = run
    driver_busy = 0
    if run is not None and shared.count:
        shared.attention = 1


cdef enum:
    INHERITED = 2


cdef int run_driver_inline() except -1:
    """One driver run at a time in the process, whichever thread comes first; it goes on while attention is set.

    1: it ran; 0: there is none, or it runs already; INHERITED: it is the parent's, and so is every QP and CQ.
    """
    global driver_busy
    cdef int rounds = 0
    cdef int came
    if driver is None:
        if inherited:
            return INHERITED  # attention stays set: so the data path asks nothing else
        shared.attention = 0
        return 0
    if driver_busy:
        return 0
    signals_off()
    if driver_busy:  # another thread, while handlers ran
        signals_on()
        return 0
    driver_busy = 1
    try:
        while shared.attention and rounds < 4:
            rounds += 1
            run = driver
            if run is None:
                break
            try:
                run()
            except Exception as e:
                driver_failed(e)
    finally:
        driver_busy = 0
        came = signals_on()
    if came:
        PyErr_CheckSignals()
    return 1


cdef void driver_failed(e) noexcept:
    """Through sys.unraisablehook: the application's post or poll is not its business."""
    raise e


def take_events() -> list:
    """All queued events, oldest first: (kind, QPCore, pair, a, b, CLOCK_MONOTONIC in ns at creation)."""
    cdef Event e
    cdef list result = []
    while shared.count:
        e = shared.events[shared.first]
        shared.first = (shared.first + 1) & (EVENT_SLOTS - 1)
        shared.count -= 1
        if e.owner != NULL:
            result.append((e.kind, <object>e.owner, e.k, e.a, e.b, e.t_ns))
    return result


def events_overflowed() -> bool:
    """Whether events were lost since the last call (the driver then looks at every QP)."""
    cdef int lost = shared.overflowed
    shared.overflowed = 0
    return lost != 0


def _after_fork_in_child() -> None:
    """The child has no driver and no NICs; the parent's wake-up descriptor is not its own."""
    global driver, driver_busy, wake_fd, sleepers, forks, inherited
    inherited |= driver is not None
    signals_after_fork()
    forks += 1
    driver = None
    driver_busy = 0
    sleepers = 0
    shared.attention = inherited
    shared.count = 0
    if wake_fd >= 0:
        posix_close(wake_fd)
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)


# --- key maps ------------------------------------------------------------------------------------------------

cdef int map_put(Map *m, uint32_t key, int k, shadow) except -1:
    check_pair(k)
    cdef uint64_t value = key_none()
    if shadow is not None:
        value = <uint32_t>shadow
    if not map_set(m, (<uint64_t>key << 8) | <uint64_t>k, value):
        raise MemoryError
    return 0


cdef object map_get(const Map *m, uint32_t key, int k):
    check_pair(k)
    cdef MapSlot *slot = map_find(m, (<uint64_t>key << 8) | <uint64_t>k)
    if slot == NULL:
        raise KeyError(key)
    return None if slot.value == key_none() else slot.value


@cython.no_gc
@cython.final
cdef class QPGroup:
    """The QPs of one default NIC, on whatever Contexts of it: answers to what one sends may come by another."""

    cdef Siblings siblings
    cdef object __weakref__


@cython.no_gc
@cython.final
cdef class KeyMap:
    """lkeys of one Context and what they are on each backup. Absent: not ready yet; None: never will be.

    group: what the QPs that use them belong to; None: nothing beside this Context.
    """

    cdef Map map
    cdef QPGroup group
    cdef object __weakref__

    def __cinit__(self, QPGroup group=None):
        self.group = group if group is not None else QPGroup()

    def __dealloc__(self):
        map_free(&self.map)

    def set_local(self, uint32_t lkey, int k, shadow_lkey) -> None:
        """`shadow_lkey` on NIC k stands for `lkey`; None: this memory cannot be shadowed there."""
        map_put(&self.map, lkey, k, shadow_lkey)

    def del_local(self, uint32_t lkey) -> None:
        """The MR is gone: forget the key on every NIC."""
        cdef int k
        for k in range(MAX_PAIRS):
            map_del(&self.map, (<uint64_t>lkey << 8) | <uint64_t>k)

    def get_local(self, uint32_t lkey, int k):
        """The key on NIC k, None where it cannot be shadowed; KeyError where it is not known (yet)."""
        return map_get(&self.map, lkey, k)

    def __len__(self):
        return self.map.live


@cython.no_gc
@cython.final
cdef class RemoteKeys:
    """rkeys of one peer's default NIC and what they are on each of its backups."""

    cdef Map map
    cdef object __weakref__

    def __dealloc__(self):
        map_free(&self.map)

    def set_remote(self, uint32_t rkey, int k, shadow_rkey) -> None:
        """`shadow_rkey` on the peer's NIC k stands for `rkey`; None: the peer cannot shadow it there."""
        map_put(&self.map, rkey, k, shadow_rkey)

    def del_remote(self, uint32_t rkey) -> None:
        """The peer withdrew the key: forget it on every NIC."""
        cdef int k
        for k in range(MAX_PAIRS):
            map_del(&self.map, (<uint64_t>rkey << 8) | <uint64_t>k)

    def clear(self) -> None:
        """Forget every key."""
        map_free(&self.map)

    def get_remote(self, uint32_t rkey, int k):
        """The key on the peer's NIC k, None where it cannot be shadowed; KeyError where it is not known (yet)."""
        return map_get(&self.map, rkey, k)

    def __len__(self):
        return self.map.live


# --- completion queues ---------------------------------------------------------------------------------------

cdef tuple no_args = ()
ctypedef PyObject *(*new_function)(PyTypeObject *, PyObject *, PyObject *) noexcept
ctypedef int (*quiet_run)() noexcept

cdef inline bint append_wc(list taken, const ibv_wc *wc) noexcept:
    """A WC without its Python-level constructor, which costs twenty times as much (`logger` is None then).

    False: no memory, and an exception is set.
    """
    cdef PyTypeObject *t = <PyTypeObject *>WC
    cdef PyObject *made = (<new_function>t.tp_new)(t, <PyObject *>no_args, NULL)
    cdef int failed
    if made == NULL:
        return False
    (<WC>made).wc = wc[0]
    failed = list_append(taken, made)
    drop_reference(made)
    return failed == 0


cdef inline PyObject *new_answer(long got, list result) noexcept:
    """(got, result), or NULL: no memory, and an exception is set."""
    cdef PyObject *count = new_int(got)
    cdef PyObject *made = NULL if count == NULL else new_tuple(2)
    if made == NULL:
        if count != NULL:
            drop_reference(count)
        return NULL
    tuple_set(made, 0, count)
    keep_reference(<PyObject *>result)
    tuple_set(made, 1, <PyObject *>result)
    return made


cdef int look_ended(CQState *c) noexcept nogil:
    """A poll that found nothing for the application ended, where that is to be heeded. The errno of a lost WC, or 0."""
    cdef int failed = c.failed
    looked(c)
    c.failed = 0
    c.heed &= ~HEED_FAILED
    return failed


include "native/core/channel.pxi"


@cython.no_gc
@cython.final
cdef class CQCore:
    """One application CQ: the default hardware CQ, those on the backups, and the WCs that wait in between.

    :param default_cq_ptr: address of the default NIC's ibv_cq.
    :param channel: the ChannelCore of the application's CompChannel, if the CQ has one.
    """

    cdef CQState c
    cdef ChannelCore _channel
    cdef object __weakref__

    def __cinit__(self, default_cq_ptr, ChannelCore channel=None):
        memset(&self.c, 0, sizeof(CQState))
        self.c.owner = <PyObject *>self
        self.c.shared = &shared
        self.c.cached_key = map_tombstone()
        if not default_cq_ptr:
            raise ValueError('a CQ has an address')
        self.channel = channel
        self.attach(0, default_cq_ptr)
        self.set_active(0, True)

    def __dealloc__(self):
        self.unlink()
        map_free(&self.c.qps)
        map_free(&self.c.cleaned)
        free(self.c.buffer)

    cdef void unlink(self) noexcept:
        """Out of the channel's tables: C only, for close and dealloc."""
        cdef int k
        for k in range(MAX_PAIRS):
            if self._channel is not None and self.c.hw[k] != NULL:
                map_del(&self._channel.c.cqs, <uintptr_t>self.c.hw[k])
            self.c.hw[k] = NULL
            self.c.active[k] = 0
        self.c.changes += 1
        self.c.n_active = 0
        channel_forget(&self.c)

    def attach(self, int k, cq_ptr) -> None:
        """The hardware CQ on NIC k."""
        check_pair(k)
        if not cq_ptr:
            raise ValueError('a CQ has an address')
        cdef ibv_cq *cq = <ibv_cq *><uintptr_t>cq_ptr
        self.detach(k)
        self.c.hw[k] = cq
        if self._channel is not None and not map_set(&self._channel.c.cqs, <uintptr_t>cq, <uintptr_t>&self.c):
            raise MemoryError

    def detach(self, int k) -> None:
        """Hardware CQ k is about to be destroyed, or is dead: it is not touched any more, not even now."""
        check_pair(k)
        if self.c.hw[k] == NULL:
            return
        if self._channel is not None:
            map_del(&self._channel.c.cqs, <uintptr_t>self.c.hw[k])
        self.activate(k, False)
        self.c.hw[k] = NULL

    cdef void activate(self, int k, bint active) noexcept:
        cdef int i
        self.c.changes += 1
        self.c.active[k] = active
        self.c.n_active = 0
        for i in range(MAX_PAIRS):
            if self.c.active[i]:
                self.c.order[self.c.n_active] = i
                self.c.n_active += 1

    def set_active(self, int k, bint active) -> None:
        """Whether the application's poll looks at hardware CQ k too, and its req_notify arms it."""
        check_pair(k)
        if active and self.c.hw[k] == NULL:
            raise ValueError(f'no CQ on NIC {k}')
        if self.c.active[k] == active:
            return
        if active and self.c.armed:
            # It joins an armed CQ: what is there already would raise no event.
            ibv_req_notify_cq(self.c.hw[k], self.c.solicited_only)
            cq_drain(&self.c, k)
        elif not active:
            # Nobody will look there: what is left comes along.
            cq_drain(&self.c, k)
        self.activate(k, active)

    def is_active(self, int k) -> bool:
        """Whether the application polls hardware CQ k."""
        check_pair(k)
        return self.c.active[k] != 0

    def poll(self, num_entries=1):
        """Take up to `num_entries` WCs: (how many, list of WC). pyverbs' CQ.poll, with its errors."""
        cdef ibv_wc wcs[POLL_BATCH]
        cdef CQState *c = &self.c
        cdef long want
        cdef int overflow = 0
        cdef int at = 0
        cdef int n = 0
        cdef list result = []  # made first: the collector may run there, and what it ends change all of this
        if type(num_entries) is int:
            want = PyLong_AsLongAndOverflow(num_entries, &overflow)
            if overflow:
                want = most_or_none(overflow)
        else:
            want = poll_count(num_entries)
        if shared.attention and run_driver_inline() == INHERITED:
            c.count = 0  # what waited was the parent's
        if want > 0:
            if not c.count:
                while at < c.n_active:
                    n = ibv_poll_cq(c.hw[c.order[at]], POLL_BATCH if want > POLL_BATCH else <int>want, wcs)
                    if n != 0:
                        break
                    at += 1
            if n != 0 or c.count or shared.attention:
                return self.take(want, at, n, wcs, result)
        if c.heed:
            self.heed_poll(0)
        return 0, result

    cdef tuple take(self, long want, int at, int n, ibv_wc *wcs, list result):
        """The rest of a poll that has found something: n WCs, or less than 0, on the hardware CQ in place `at`.

        result: empty. What a signal's handler, or a want of memory, raises amid it loses none of what was taken.
        """
        cdef CQState *c = &self.c
        cdef int batch, i, k, kept
        cdef int made  # of those that are kept
        cdef long got = 0
        cdef uint64_t before = c.changes
        cdef PyObject *made_answer = NULL
        cdef tuple answer
        c.in_hand += 1
        while True:
            if c.changes != before:
                got = self.forget_taken(result, before)
                before = c.changes
                # Others may have had no room beside what is gone, or a CQ came or went, and nothing else tells of that.
                at = 0
            if n > 0:
                k = c.order[at]
                batch = POLL_BATCH if want - got > POLL_BATCH else <int>(want - got)
                if n < batch:
                    at += 1
                # First all decisions, in C; then the objects, whose making can run any code.
                c.quiet += 1
                kept = 0
                for i in range(n):
                    if dispatch(c, k, &wcs[i]):
                        if c.count:
                            cq_push(c, &wcs[i])
                        else:
                            if kept != i:
                                wcs[kept] = wcs[i]
                            kept += 1
                c.quiet -= 1
                c.polled += n
                n = 0
                for made in range(kept):
                    if not append_wc(result, &wcs[made]):
                        self.break_off(result, &wcs[made], kept - made, before)
                got += kept
            elif n < 0:
                if got == 0 and not self.guards():
                    c.in_hand -= 1
                    raise PyverbsRDMAError('Failed to poll CQ', -n)
                at += 1
                n = 0
            elif got < want and c.count:
                cq_pop(c, &wcs[0])
                if not append_wc(result, &wcs[0]):
                    self.break_off(result, &wcs[0], 1, before)
                got += 1
            elif got < want and at < c.n_active:  # a driver run may have taken one away
                batch = POLL_BATCH if want - got > POLL_BATCH else <int>(want - got)
                n = ibv_poll_cq(c.hw[c.order[at]], batch, wcs)
                if n == 0:
                    at += 1
                continue
            elif (shared.attention and self.run_driver_with(result, before)
                  and (c.changes != before or (got < want and c.count))):
                pass  # what was just polled gave the driver something to do, and that made WCs
            else:
                made_answer = new_answer(got, result)
                if made_answer == NULL:
                    self.break_off(result, NULL, 0, before)
                if c.changes == before:
                    break
                drop_reference(made_answer)  # up to Python 3.11 the collector may run there
        c.in_hand -= 1
        answer = <tuple>made_answer
        drop_reference(made_answer)
        if c.heed:
            self.heed_poll(got)
        return answer

    cdef int heed_poll(self, long got) except -1:
        """A poll ended, where that is to be heeded. Not a part of it: it would be in its way."""
        cdef int failed = look_ended(&self.c) if got == 0 else looked(&self.c)
        if failed:
            raise PyverbsRDMAError('Failed to poll CQ', failed)
        return 0

    cdef bint is_forgotten(self, uint32_t qp_num, uint64_t before) noexcept:
        """Whether that QP was reset or closed amid this poll; before: how many changes have been heeded already."""
        cdef MapSlot *slot = map_find(&self.c.cleaned, qp_num)
        return slot != NULL and slot.value > before

    cdef long forget_taken(self, list taken, uint64_t before) noexcept:
        """Amid a poll a QP was reset or closed: nobody has polled what was taken of it. How many are left.

        taken: nothing of it is newer than that; before: as for is_forgotten. Needs no memory, and so fails never.
        """
        cdef Py_ssize_t n = len(taken)
        cdef Py_ssize_t kept = 0
        cdef Py_ssize_t i
        cdef PyObject *item
        for i in range(n):
            item = list_item(taken, i)
            if not self.is_forgotten((<WC>item).wc.qp_num, before):
                list_set(taken, i, list_item(taken, kept))
                list_set(taken, kept, item)
                kept += 1
        list_cut(taken, kept)
        for i in range(kept, n):
            drop_reference(list_item(taken, i))
        return kept

    cdef int run_driver_with(self, list taken, uint64_t before) except -1:
        """A driver run in the middle of a poll, which what a signal's handler raises breaks off.

        taken, before: as for put_back.
        """
        cdef int ran = (<quiet_run>run_driver_inline)()
        if ran == -1:
            self.c.in_hand -= 1
            self.put_back(taken, NULL, 0, before)
            if PyErr_Occurred() == NULL:  # out of memory, where the exception itself was to be made
                raise MemoryError
        return ran

    cdef int break_off(self, list taken, const ibv_wc *more, int n, uint64_t before) except -1:
        """No memory for a WC, or the answer: MemoryError, and what was taken is polled again. As for put_back."""
        PyErr_Clear()
        self.c.in_hand -= 1
        self.put_back(taken, more, n, before)
        raise MemoryError

    cdef void put_back(self, list taken, const ibv_wc *more, int n, uint64_t before) noexcept:
        """A poll was broken off: what it had taken is the first to be polled next, taken before the n of more.

        An exception may be set, and stays.

        before: as for is_forgotten. Where another thread polls or waits meanwhile, it has what is put back; so the
        order of a QP's WCs is kept for who polls alone.
        """
        cdef CQState *c = &self.c
        cdef int i
        cdef Py_ssize_t j
        if c.hw[0] == NULL:  # closed meanwhile
            return
        self.forget_taken(taken, before)
        if not cq_reserve(c, <uint32_t>(len(taken) + n)):
            c.failed = ENOMEM
            c.heed |= HEED_FAILED
            return
        for i in range(n - 1, -1, -1):
            if not self.is_forgotten(more[i].qp_num, before):
                cq_unpop(c, &more[i])
        for j in range(len(taken) - 1, -1, -1):
            cq_unpop(c, &(<WC>taken[j]).wc)
        if c.count:
            cq_signal(c)

    def forget_qp(self, uint32_t qp_num) -> None:
        """A QP without a journal was reset or destroyed: what was taken out of the default NIC's CQ of it goes.

        What lies there still does too, for a NIC that does not clean it would keep the last of the WCs alone. Nothing
        was taken: the rest is the NIC's affair, as with plain verbs.
        """
        if not inherited and (self.c.count or self.c.in_hand):
            cq_drain(&self.c, 0)
            cq_clean(&self.c, qp_num)

    def drain(self, int k) -> int:
        """Poll hardware CQ k to empty into the WC buffer and the event ring; the number of WCs taken.

        Raises PyverbsRDMAError where ibv_poll_cq fails.
        """
        check_pair(k)
        cdef int n = cq_drain(&self.c, k)
        if n < 0:
            raise PyverbsRDMAError('Failed to poll CQ', -n)
        self.c.polled += n
        return n

    def req_notify(self, solicited_only=False) -> None:
        """Arm the CQ: pyverbs' CQ.req_notify, on every NIC that the application polls."""
        cdef int i, rc
        cdef int solicited = solicited_only
        if shared.attention:
            run_driver_inline()
        for i in range(self.c.n_active):
            rc = ibv_req_notify_cq(self.c.hw[self.c.order[i]], solicited)
            if rc != 0 and not self.guards():
                raise PyverbsRDMAError(f'Request notify CQ returned {rc}', rc)
        self.c.solicited_only = solicited and (self.c.solicited_only or not self.c.armed)
        self.c.rearmed += self.c.armed
        if self.c.is_pending:
            self.c.is_pending = 2
        self.c.armed = 1
        if self.c.count:
            cq_signal(&self.c)

    cdef bint guards(self) noexcept:
        return not inherited and cq_guards(&self.c)

    @property
    def channel(self):
        """The ChannelCore that this CQ's events go to, or None."""
        return self._channel

    @channel.setter
    def channel(self, ChannelCore channel):
        cdef int k
        if self._channel is not None:
            channel_forget(&self.c)
            for k in range(MAX_PAIRS):
                if self.c.hw[k] != NULL:
                    map_del(&self._channel.c.cqs, <uintptr_t>self.c.hw[k])
        self._channel = channel
        self.c.channel = NULL
        if channel is None:
            return
        self.c.channel = &channel.c
        for k in range(MAX_PAIRS):
            if self.c.hw[k] != NULL and not map_set(&channel.c.cqs, <uintptr_t>self.c.hw[k], <uintptr_t>&self.c):
                raise MemoryError

    @property
    def buffered(self) -> int:
        """WCs that wait for the application."""
        return self.c.count

    @property
    def armed(self) -> bool:
        """Whether the application asked for the next event and has not received it."""
        return self.c.armed != 0

    @property
    def polled(self) -> int:
        """WCs taken from hardware so far, our own included (for tests and counters)."""
        return self.c.polled

    @property
    def swallowed(self) -> int:
        """WCs of those that the application did not see."""
        return self.c.swallowed

    @property
    def journal_bytes(self) -> int:
        """Memory of the WC buffer."""
        return self.c.slots * sizeof(ibv_wc)

    def close(self) -> None:
        """Forget every hardware CQ and the waiting WCs. A second call does nothing."""
        self.unlink()
        self.c.count = 0
        self.channel = None


cdef long most_or_none(int sign) noexcept:
    """What a count that is too large for C stands for, or one that is too small."""
    return <long>((<unsigned long>-1) >> 1) if sign > 0 else 0


cdef long poll_count(num_entries) except? -1:
    """What pyverbs takes as a count: anything that compares with an int."""
    if num_entries != num_entries:  # no number is less than NaN
        return 0
    for rounded in (_index, math.ceil):
        try:
            return rounded(num_entries)
        except OverflowError:
            return most_or_none(1 if num_entries > 0 else -1)
        except TypeError:
            pass
    return 1 if 0 < num_entries else 0


include "native/core/qp.pxi"
include "native/core/sampling.pxi"
include "native/core/cqex.pxi"
include "native/core/qpex.pxi"
include "native/core/objects.pxi"
include "native/core/abi.pxi"


wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
main_thread = threading.main_thread().ident
os.register_at_fork(after_in_child=_after_fork_in_child)
check_abi()
