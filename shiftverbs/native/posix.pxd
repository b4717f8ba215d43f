# SPDX-License-Identifier: BSD-3-Clause
"""C declarations of Linux and POSIX that Cython does not come with. Declarations only: no code, no Python."""

from libc.stdint cimport uint32_t, uint64_t


cdef extern from "<errno.h>" nogil:
    enum:
        ECANCELED
        ENOKEY


cdef extern from "<arpa/inet.h>" nogil:
    uint32_t htonl(uint32_t hostlong)


cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
        POLLERR
        POLLHUP
        POLLNVAL

    struct pollfd:
        int fd
        short events
        short revents

    int poll(pollfd *fds, unsigned long nfds, int timeout_ms)


cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLL_CLOEXEC
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
        EPOLLIN

    ctypedef union epoll_data_t:
        int fd
        uint64_t u64

    struct epoll_event:
        uint32_t events
        epoll_data_t data

    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event *event)
    int epoll_wait(int epfd, epoll_event *events, int maxevents, int timeout_ms)


cdef extern from "<sys/eventfd.h>" nogil:
    enum:
        EFD_CLOEXEC
        EFD_NONBLOCK

    int eventfd(unsigned int initval, int flags)


cdef extern from "<sys/timerfd.h>" nogil:
    enum:
        TFD_CLOEXEC
        TFD_NONBLOCK

    int timerfd_create(int clockid, int flags)


cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass

    ctypedef struct pthread_cond_t:
        pass

    int pthread_mutex_init(pthread_mutex_t *mutex, void *attr)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_cond_destroy(pthread_cond_t *cond)
    int pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
    int pthread_cond_signal(pthread_cond_t *cond)
    int pthread_cond_broadcast(pthread_cond_t *cond)
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
                       void (*child)() noexcept nogil)
