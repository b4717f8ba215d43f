# SPDX-License-Identifier: BSD-3-Clause
"""C declarations of _nic: QP transitions, and the C side of its wake-up."""

from libc.stdint cimport uint64_t

from shiftverbs.native.posix cimport pthread_mutex_t
from shiftverbs.native.verbs cimport ibv_qp_attr


# One QP state transition: what ibv_modify_qp is given.
cdef struct ModifyStep:
    ibv_qp_attr attr
    int mask


# What has to happen so that somebody runs the driver: the attention flag, the control thread's eventfd, and
# the eventfds of application threads blocked elsewhere ("listeners").
#
# Ownership: counted references (`refs`, atomic). The Waiter holds one, each NicWorker one (its C thread
# lives on the NicWorker's), each wait under way one. Whoever drops the last closes the descriptors and frees
# the memory, so a late command can never write to a descriptor number that has been reused. It contains no
# Python object, so any thread may drop it. In a forked child it is never touched, except that Waiter.close()
# closes the child's copies of the descriptors.
cdef struct WakePoint:
    int refs
    int pid
    int *attention
    int epoll_fd
    int event_fd
    int timer_fd
    int closed              # atomic
    int parked              # atomic; set at interpreter exit: waits never return to Python any more
    pthread_mutex_t lock    # guards the listeners
    int *listeners
    int n_listeners
    int listeners_size
    uint64_t raised         # atomic counters, for tests and statistics
    uint64_t answered_inline
    WakePoint *next         # registry of live wake points, under registry_lock
    WakePoint *previous


# Raise attention and wake everybody who might run the driver. Any thread, no GIL.
cdef void wake_raise(WakePoint *wake) noexcept nogil


cdef class ModifySteps:
    cdef ModifyStep *steps
    cdef readonly int count
    cdef int size
    cdef ModifyStep *_append(self) except NULL


cdef class Waiter:
    cdef WakePoint *wake_point
    cdef object __weakref__
    cdef int _check(self) except -1
