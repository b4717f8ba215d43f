# SPDX-License-Identifier: BSD-3-Clause
"""NIC commands, the control channel's QP and the control thread's sleep: all that must not need the GIL.

Failover runs in the application's busy threads. A NIC command can block for a minute on dying hardware, and a
Python thread beside a busy one gets the GIL only after 5 to 10 ms; so commands run on one C thread per NIC
(NicWorker), the control thread sleeps in C (Waiter) and both hand over through C memory, an attention flag
and eventfds.

| part | where |
|---|---|
| raw verbs for shadow objects, async events | `nic/verbs.pxi` |
| QP transitions, to be carried out without the GIL | `nic/modify.pxi` |
| wake-up of the driver and the control thread's epoll | `nic/waiter.pxi` |
| the command thread of one NIC | `nic/worker.pxi` |
| the UD QP of the control channel | `nic/control_port.pxi` |

Rules for all of it:

- Objects are Python ints holding the address of a libibverbs object; 0 is refused.
- *Fork.* Every class remembers the pid that made it. In a child its objects are dead: methods that would
  touch hardware or locks raise RuntimeError, closing is a no-op, and nothing is freed through verbs.
- *Interpreter exit.* An exit hook tells every worker and every waiter of this process to stay away from
  Python. Idle workers end, a hung one dies with the process, a waiter about to return sleeps instead for what
  is left.
- *Errors* of a verb are OSError with the errno and the verb's name.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EBADF, EBUSY, EEXIST, EINTR, EINVAL, EIO, ENODEV, ENOENT, ENOMEM, ENOSYS
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset, strcmp
from posix.fcntl cimport F_GETFL, F_SETFL, O_NONBLOCK, fcntl
from posix.mman cimport (
    MADV_DONTFORK, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap,
)
from posix.time cimport CLOCK_MONOTONIC
from posix.unistd cimport close as posix_close, getpid, read as posix_read, write as posix_write

from shiftverbs.native.posix cimport (
    ECANCELED, EFD_CLOEXEC, EFD_NONBLOCK, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, POLLIN, TFD_CLOEXEC,
    TFD_NONBLOCK, epoll_create1, epoll_ctl, epoll_event, epoll_wait, eventfd, poll, pollfd, pthread_atfork,
    pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_signal, pthread_cond_t, pthread_cond_wait,
    pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    timerfd_create,
)
from shiftverbs.native.verbs cimport (
    IBV_ACCESS_LOCAL_WRITE, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_QPT_UD,
    IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CAP, IBV_QP_CUR_STATE, IBV_QP_DEST_QPN,
    IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER,
    IBV_QP_PATH_MIG_STATE, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_RATE_LIMIT,
    IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_SEND_SIGNALED,
    IBV_WC_GRH, IBV_WC_SUCCESS, IBV_WR_SEND, ibv_ack_async_event, ibv_ack_cq_events, ibv_ah, ibv_ah_attr,
    ibv_alloc_pd, ibv_async_event, ibv_close_device, ibv_comp_channel, ibv_context, ibv_cq, ibv_create_ah,
    ibv_create_comp_channel, ibv_create_cq, ibv_create_qp, ibv_dealloc_pd, ibv_dereg_mr, ibv_destroy_ah,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp, ibv_device, ibv_device_attr, ibv_free_device_list,
    ibv_get_async_event, ibv_get_cq_event, ibv_get_device_list, ibv_get_device_name, ibv_gid, ibv_gid_entry,
    ibv_mig_state, ibv_modify_qp, ibv_mr, ibv_mtu, ibv_open_device, ibv_pd, ibv_poll_cq, ibv_port_attr, ibv_post_recv,
    ibv_post_send, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_query_device,
    ibv_query_gid, ibv_query_gid_ex, ibv_query_pkey, ibv_query_port, ibv_query_qp, ibv_recv_wr, ibv_reg_mr_iova2,
    ibv_req_notify_cq, ibv_rereg_mr, ibv_resize_cq, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode,
)

import atexit
import logging
import os
import weakref
from _thread import allocate_lock
from concurrent.futures import CancelledError

logger = logging.getLogger("shiftverbs.nic")


cdef extern from *:
    """
    #include <errno.h>
    #include <pthread.h>
    #include <signal.h>
    #include <stdint.h>
    #include <string.h>
    #include <time.h>
    #include <unistd.h>

    static inline void sv_clear_errno(void) { errno = 0; }  /* in Cython this would make a local variable */
    static inline int sv_load(const int *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void sv_store(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int sv_exchange(int *p, int v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int sv_add(int *p, int v) { return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST); }
    static inline void sv_count(uint64_t *p) { __atomic_add_fetch(p, 1, __ATOMIC_RELAXED); }
    static inline uint64_t sv_counted(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

    static inline int64_t sv_now_ns(void)
    {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }

    static inline void sv_sleep_ns(int64_t ns)
    {
        struct timespec t = {ns / 1000000000, ns % 1000000000};
        nanosleep(&t, NULL);
    }

    /* For threads that must not touch Python again: the process is about to end. */
    static inline void sv_park(void)
    {
        for (;;)
            pause();
    }

    /* CLOCK_MONOTONIC: a clock set back must not make a deadline an hour long. */
    static inline int sv_cond_init(pthread_cond_t *cond)
    {
        pthread_condattr_t attr;
        int err = pthread_condattr_init(&attr);
        if (err)
            return err;
        err = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        if (!err)
            err = pthread_cond_init(cond, &attr);
        pthread_condattr_destroy(&attr);
        return err;
    }

    static inline int sv_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns)
    {
        struct timespec t = {deadline_ns / 1000000000, deadline_ns % 1000000000};
        return pthread_cond_timedwait(cond, lock, &t);
    }

    /* A detached thread that takes no signals: those are the application's. */
    static inline int sv_start_thread(void *(*run)(void *), void *arg, const char *name)
    {
        pthread_attr_t attr;
        pthread_t thread;
        sigset_t all, before;
        char short_name[16];
        int err = pthread_attr_init(&attr);
        if (err)
            return err;
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        err = pthread_create(&thread, &attr, run, arg);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
        if (!err) {
            strncpy(short_name, name, sizeof(short_name) - 1);
            short_name[sizeof(short_name) - 1] = 0;
            pthread_setname_np(thread, short_name);
        }
        return err;
    }
    static __thread int sv_is_worker_thread;
    static inline void sv_mark_worker_thread(void) { sv_is_worker_thread = 1; }
    static inline int sv_on_worker_thread(void) { return sv_is_worker_thread; }
    /* The thread that finalizes the interpreter may always go back to it. */
    static inline int sv_on_main_thread(void) { return gettid() == getpid(); }
    static inline uintptr_t sv_thread_id(void) { return (uintptr_t)pthread_self(); }

    /* A thread of ours has one state in the interpreter for all its life. It is made under a lock of CPython's and
     * without the GIL, so that a fork in that moment leaves the lock taken: until 3.12 the child waits for it for ever
     * (gh-112275). Ours is held where that is done, and over a fork. From 3.13 on os.fork() takes CPython's itself,
     * before the handlers of pthread_atfork (gh-116522): to wait for ours behind it would be a deadlock. */
    #if PY_VERSION_HEX < 0x030D0000
    static pthread_mutex_t sv_entry_lock = PTHREAD_MUTEX_INITIALIZER;
    static void sv_lock_entry(void) { pthread_mutex_lock(&sv_entry_lock); }
    static void sv_unlock_entry(void) { pthread_mutex_unlock(&sv_entry_lock); }
    #else
    static void sv_lock_entry(void) { }
    static void sv_unlock_entry(void) { }
    #endif

    /* NULL: no memory, or no interpreter any more. Without the GIL. */
    static inline PyThreadState *sv_enter_python(void)
    {
        PyThreadState *state;

        sv_lock_entry();
        state = PyThreadState_New(PyInterpreterState_Main());
        sv_unlock_entry();
        return state;
    }

    /* As the last PyGILState_Release: the state goes with it. Waits for the GIL. */
    static inline void sv_leave_python(PyThreadState *state)
    {
        PyEval_RestoreThread(state);
        PyGILState_Release(PyGILState_UNLOCKED);
    }
    """
    ctypedef struct PyThreadState:
        pass
    void sv_lock_entry() noexcept nogil
    void sv_unlock_entry() noexcept nogil
    PyThreadState *sv_enter_python() noexcept nogil
    void sv_leave_python(PyThreadState *state) noexcept nogil
    void sv_clear_errno() noexcept nogil
    int sv_load(const int *p) noexcept nogil
    void sv_store(int *p, int v) noexcept nogil
    int sv_exchange(int *p, int v) noexcept nogil
    int sv_add(int *p, int v) noexcept nogil
    void sv_count(uint64_t *p) noexcept nogil
    uint64_t sv_counted(const uint64_t *p) noexcept nogil
    int64_t sv_now_ns() noexcept nogil
    void sv_sleep_ns(int64_t ns) noexcept nogil
    void sv_park() noexcept nogil
    int sv_cond_init(pthread_cond_t *cond) noexcept nogil
    int sv_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns) noexcept nogil
    int sv_start_thread(void *(*run)(void *) noexcept nogil, void *arg, const char *name) noexcept nogil
    void sv_mark_worker_thread() noexcept nogil
    int sv_on_worker_thread() noexcept nogil
    int sv_on_main_thread() noexcept nogil
    uintptr_t sv_thread_id() noexcept nogil


# Live wake points and workers of this process, so that the exit hook reaches them whatever Python still
# holds. Lock order: registry_lock before a worker's or a wake point's lock. Both are held for a few
# instructions only and never while waiting for the GIL, so a thread may take them with the GIL.
cdef pthread_mutex_t registry_lock
cdef WakePoint *wake_points = NULL
cdef WorkerState *workers = NULL
# Atomic. exiting: the exit hook has begun; no verbs from __dealloc__ any more, the kernel cleans up.
# finalizing: it has ended; NIC threads must not take the GIL any more.
cdef int exiting = 0
cdef int finalizing = 0


cdef void forget_everything_in_child() noexcept nogil:
    """In a forked child: the parent's threads are not here, and a lock may have been held by one of them."""
    global wake_points, workers
    sv_unlock_entry()
    pthread_mutex_init(&registry_lock, NULL)
    wake_points = NULL
    workers = NULL


pthread_mutex_init(&registry_lock, NULL)
pthread_atfork(sv_lock_entry, sv_unlock_entry, forget_everything_in_child)


cdef void back_to_python() noexcept nogil:
    """At the end of every nogil block that may block in a NIC thread: not back into a finalized
    interpreter."""
    if sv_on_worker_thread() and sv_load(&finalizing):
        sv_park()


cdef int64_t deadline_after(object timeout_s) except? -1:
    """CLOCK_MONOTONIC in ns at which timeout_s seconds have passed; about 30 years for None."""
    cdef double seconds = 1e9 if timeout_s is None else float(timeout_s)
    if seconds < 0:
        seconds = 0
    elif seconds > 1e9:
        seconds = 1e9
    return sv_now_ns() + <int64_t>(seconds * 1e9)


cdef object verb_error(str verb, int err):
    """The OSError for a verb that failed with err (errno; some providers leave 0 behind)."""
    if err <= 0:
        err = EIO
    return OSError(err, f"{verb}: {os.strerror(err)}")


cdef int must_be_ours(int pid, str what) except -1:
    """Refuse to use, in a forked child, what the parent made."""
    if pid != getpid():
        raise RuntimeError(f"{what} was made by process {pid} and is dead in its child {getpid()}")
    return 0


include "native/nic/verbs.pxi"
include "native/nic/modify.pxi"
include "native/nic/waiter.pxi"
include "native/nic/job.pxi"
include "native/nic/worker.pxi"
include "native/nic/control_port.pxi"


# How long the exit of the interpreter waits for a Python job that is under way (it may be waiting for the
# GIL), and for a command under way to end by itself. A hung command is left to die with the process.
cdef int64_t EXIT_PYTHON_NS = 1000000000
cdef int64_t EXIT_COMMAND_NS = 100000000


def _at_exit():
    """Send workers and waiters of this process away from Python for good; registered with atexit."""
    cdef int64_t start = sv_now_ns()
    cdef int64_t waited
    cdef int busy
    cdef WakePoint *wake
    cdef WorkerState *worker
    sv_store(&exiting, 1)
    pthread_mutex_lock(&registry_lock)
    wake = wake_points
    while wake != NULL:
        sv_store(&wake.parked, 1)
        wake = wake.next
    worker = workers
    while worker != NULL:
        pthread_mutex_lock(&worker.lock)
        worker.stopping = 1
        pthread_cond_broadcast(&worker.work)
        pthread_mutex_unlock(&worker.lock)
        worker = worker.next
    pthread_mutex_unlock(&registry_lock)
    with nogil:
        while True:
            busy = 0
            waited = sv_now_ns() - start
            pthread_mutex_lock(&registry_lock)
            worker = workers
            while worker != NULL:
                pthread_mutex_lock(&worker.lock)
                if not worker.exited and waited < (EXIT_PYTHON_NS if worker.in_python else EXIT_COMMAND_NS):
                    busy = 1
                pthread_mutex_unlock(&worker.lock)
                worker = worker.next
            pthread_mutex_unlock(&registry_lock)
            if not busy:
                break
            sv_sleep_ns(1000000)
        sv_store(&finalizing, 1)


atexit.register(_at_exit)
