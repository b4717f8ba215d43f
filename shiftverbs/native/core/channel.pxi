# SPDX-License-Identifier: BSD-3-Clause
# The completion channel: one descriptor and one wait for the events of several NICs. Included by _core.pyx.


cdef void channel_forget(CQState *c) noexcept nogil:
    """Take a CQ out of its channel's list of synthetic events."""
    cdef ChannelState *ch = c.channel
    cdef CQState *at
    cdef CQState *before = NULL
    if ch == NULL or not c.is_pending:
        return
    at = ch.pending
    while at != NULL and at != c:
        before = at
        at = at.next_pending
    if at != NULL:
        if before != NULL:
            before.next_pending = c.next_pending
        else:
            ch.pending = c.next_pending
        if ch.pending_last == c:
            ch.pending_last = before
    c.is_pending = 0
    c.next_pending = NULL
    if ch.pending == NULL:
        channel_settle(ch)


cdef bint cq_guards(CQState *c) noexcept nogil:
    """Whether a QP that uses this CQ is guarded: a NIC that refuses is left, or its errors come as WCs."""
    cdef size_t i
    cdef MapSlot *slots = c.qps.slots
    if slots != NULL:
        for i in range(c.qps.mask + 1):
            if slots[i].key < map_tombstone() and (<QPState *><uintptr_t>slots[i].value).guarded:
                return True
    return False


cdef bint channel_guards(ChannelState *ch) noexcept nogil:
    """The same of a channel's CQs."""
    cdef size_t i
    cdef MapSlot *slots = ch.cqs.slots
    if slots != NULL:
        for i in range(ch.cqs.mask + 1):
            if slots[i].key < map_tombstone() and cq_guards(<CQState *><uintptr_t>slots[i].value):
                return True
    return False


cdef void channel_settle(ChannelState *ch) noexcept nogil:
    """No synthetic event is left: the eventfd is not readable any more."""
    cdef uint64_t value = 0
    posix_read(ch.event_fd, &value, sizeof(value))


@cython.no_gc
@cython.final
cdef class ChannelCore:
    """One application CompChannel: the default NIC's channel, those of the backups, and events of our own making.

    A synthetic event announces WCs that no hardware event announced (made up by failover, or polled ahead from a CQ
    that was not armed). It is never acknowledged to libibverbs: destroying a CQ waits until as many events are
    acknowledged as were reported.

    :param default_channel_ptr: address of the default NIC's ibv_comp_channel.
    """

    cdef ChannelState c
    cdef object __weakref__

    def __cinit__(self, default_channel_ptr):
        memset(&self.c, 0, sizeof(ChannelState))
        self.c.owner = <PyObject *>self
        self.c.epoll_fd = -1
        self.c.event_fd = -1
        if not default_channel_ptr:
            raise ValueError('a completion channel has an address')
        self.c.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
        self.c.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if self.c.epoll_fd < 0 or self.c.event_fd < 0:
            raise OSError(errno, 'descriptors of a completion channel')
        self.watch(self.c.event_fd)
        self.attach(0, default_channel_ptr)

    def __dealloc__(self):
        if self.c.epoll_fd >= 0:
            posix_close(self.c.epoll_fd)
        if self.c.event_fd >= 0:
            posix_close(self.c.event_fd)
        map_free(&self.c.cqs)

    cdef int watch(self, int fd) except -1:
        cdef epoll_event e
        e.events = EPOLLIN
        e.data.fd = fd
        if epoll_ctl(self.c.epoll_fd, EPOLL_CTL_ADD, fd, &e) < 0:
            raise OSError(errno, 'epoll_ctl')
        return 0

    def attach(self, int k, channel_ptr) -> None:
        """The channel on NIC k. Raises OSError where its descriptor cannot be watched."""
        check_pair(k)
        if not channel_ptr:
            raise ValueError('a completion channel has an address')
        self.alive()
        self.detach(k)
        cdef ibv_comp_channel *channel = <ibv_comp_channel *><uintptr_t>channel_ptr
        self.watch(channel.fd)
        self.c.hw[k] = channel

    def detach(self, int k) -> None:
        """Channel k is about to be destroyed."""
        check_pair(k)
        self.unwatch(k)
        self.c.hw[k] = NULL

    cdef void unwatch(self, int k) noexcept:
        cdef epoll_event e
        if self.c.hw[k] != NULL and self.c.epoll_fd >= 0:
            memset(&e, 0, sizeof(e))
            epoll_ctl(self.c.epoll_fd, EPOLL_CTL_DEL, self.c.hw[k].fd, &e)

    cdef int alive(self) except -1:
        if self.c.epoll_fd < 0:
            raise PyverbsUserError('The completion channel is closed')
        return 0

    @property
    def fd(self) -> int:
        """A descriptor that is readable while an event waits, from whichever NIC: for poll, epoll and asyncio."""
        self.alive()
        return self.c.epoll_fd

    cdef bint is_nonblocking(self) noexcept:
        """Whether the application made the descriptor non-blocking: then wait fails with EAGAIN as pyverbs does."""
        if self.c.hw[0] != NULL and fcntl(self.c.hw[0].fd, F_GETFL) & O_NONBLOCK:
            return True
        return (fcntl(self.c.epoll_fd, F_GETFL) & O_NONBLOCK) != 0

    cdef object take(self):
        """An event that is there now: (CQCore or None, k, address of the CQ), or None. Never blocks.

        Descriptors are tested under the GIL right before they are read, so no other thread takes the event between.
        """
        cdef pollfd fds[MAX_PAIRS]
        cdef int which[MAX_PAIRS]
        cdef int n = 0
        cdef int i, k
        cdef ibv_cq *cq
        cdef void *context = NULL
        cdef CQState *state
        cdef MapSlot *slot
        for k in range(MAX_PAIRS):
            if self.c.hw[k] != NULL:
                fds[n].fd = self.c.hw[k].fd
                fds[n].events = POLLIN
                fds[n].revents = 0
                which[n] = k
                n += 1
        if n and poll(fds, n, 0) > 0:
            for i in range(n):
                k = which[i]
                if not fds[i].revents & POLLIN:
                    if not fds[i].revents & (POLLERR | POLLHUP | POLLNVAL):
                        continue
                    # The device was removed, and the descriptor stays in error: whoever waits would never sleep again.
                    if k or channel_guards(&self.c):
                        self.unwatch(k)
                        continue
                cq = NULL
                if ibv_get_cq_event(self.c.hw[k], &cq, &context) != 0:
                    if errno == EAGAIN or errno == EINTR:
                        continue
                    raise PyverbsRDMAError('Failed to get CQ event', errno)
                ibv_ack_cq_events(cq, 1)
                slot = map_find(&self.c.cqs, <uintptr_t>cq)
                if slot != NULL:
                    state = <CQState *><uintptr_t>slot.value
                    looked(state)  # up to now nothing was there that the hardware had not told of
                    if not state.rearmed and state.is_pending == 1:
                        channel_forget(state)  # the same arming's
                    state.armed = state.rearmed > 0
                    if state.rearmed:
                        state.rearmed -= 1
                    return (<object>state.owner, k, <uintptr_t>cq)
                if k == 0:
                    return (None, 0, <uintptr_t>cq)
        state = self.c.pending
        if state != NULL:
            self.c.pending = state.next_pending
            if self.c.pending == NULL:
                self.c.pending_last = NULL
                channel_settle(&self.c)
            state.is_pending = 0
            state.next_pending = NULL
            return (<object>state.owner, -1, <uintptr_t>state.hw[0])
        return None

    def wait(self, int timeout_ms=-1):
        """The next completion event: (CQCore or None, k, address of the CQ).

        k is the NIC whose hardware raised it, acknowledged already; -1 for a synthetic event. The CQCore is None
        for a CQ of the default NIC that has none (an extended CQ). Sleeps without the GIL; runs the driver when
        attention is raised meanwhile.

        :param timeout_ms: milliseconds, negative for ever.

        Returns:
            (None, -1, 0) when the time is over.

        Raises:
            PyverbsRDMAError: EAGAIN on a descriptor the application made non-blocking; what ibv_get_cq_event failed
                with.
        """
        cdef pollfd fds[2]
        cdef int64_t deadline = 0
        cdef int64_t left = -1
        cdef uint64_t value = 0
        cdef int n
        global sleepers
        if timeout_ms >= 0:
            deadline = now_ns() + <int64_t>timeout_ms * 1000000
        while True:
            if shared.attention:
                run_driver_inline()
            self.alive()
            event = self.take()
            if event is not None:
                return event
            if self.is_nonblocking():
                raise PyverbsRDMAError('Failed to get CQ event', EAGAIN)
            if timeout_ms >= 0:
                left = (deadline - now_ns() + 999999) // 1000000
                if left <= 0:
                    return (None, -1, 0)
            fds[0].fd = self.c.epoll_fd
            fds[1].fd = wake_fd
            fds[0].events = fds[1].events = POLLIN
            fds[0].revents = fds[1].revents = 0
            sleepers += 1
            with nogil:
                n = poll(fds, 2, <int>left)
            sleepers -= 1
            if n > 0 and fds[1].revents & POLLIN:
                posix_read(wake_fd, &value, sizeof(value))
            PyErr_CheckSignals()

    def close(self) -> None:
        """Close the descriptors; those who wait get PyverbsUserError. A second call does nothing."""
        cdef int k
        cdef uint64_t one = 1
        if self.c.epoll_fd < 0:
            return
        for k in range(MAX_PAIRS):
            self.detach(k)
        posix_close(self.c.epoll_fd)
        posix_close(self.c.event_fd)
        self.c.epoll_fd = -1
        self.c.event_fd = -1
        if sleepers:
            posix_write(wake_fd, &one, sizeof(one))
