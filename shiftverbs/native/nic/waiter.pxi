# SPDX-License-Identifier: BSD-3-Clause
# The control thread's sleep. Included by _nic.pyx.

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <string.h>
    #include <sys/timerfd.h>

    /* When to expire, in CLOCK_MONOTONIC ns; 0 disarms, a time in the past expires at once. */
    static inline int sv_timer_set(int fd, int64_t at_ns)
    {
        struct itimerspec when;
        memset(&when, 0, sizeof(when));
        when.it_value.tv_sec = at_ns / 1000000000;
        when.it_value.tv_nsec = at_ns % 1000000000;
        return timerfd_settime(fd, TFD_TIMER_ABSTIME, &when, NULL);
    }
    """
    int sv_timer_set(int fd, int64_t at_ns)

# Descriptors reported by one wait; more are reported by the next (level-triggered).
cdef enum:
    MAX_READY = 64
    # Driver runs that may answer the same readiness without consuming it before Python is asked to look.
    MAX_INLINE_ROUNDS = 4
    # How often the grace period looks at the attention flag.
    GRACE_STEP_NS = 30000


cdef void write_eventfd(int fd) noexcept nogil:
    """Make an eventfd readable. A full counter is as good: it is readable already."""
    cdef uint64_t one = 1
    posix_write(fd, &one, sizeof(one))


cdef void drain_counter(int fd) noexcept nogil:
    """Read an eventfd or timerfd (both non-blocking) back to not readable."""
    cdef uint64_t value = 0
    posix_read(fd, &value, sizeof(value))


cdef WakePoint *wake_new(int *attention) except NULL:
    """A wake point with one reference, in the registry."""
    global wake_points
    cdef WakePoint *wake = <WakePoint *>calloc(1, sizeof(WakePoint))
    cdef epoll_event event
    cdef int own[2]
    cdef int i
    cdef int err = 0
    if wake == NULL:
        raise MemoryError()
    wake.refs = 1
    wake.pid = getpid()
    wake.attention = attention
    wake.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
    wake.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    wake.timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)
    if wake.epoll_fd < 0 or wake.event_fd < 0 or wake.timer_fd < 0:
        err = errno
    else:
        own[0] = wake.event_fd
        own[1] = wake.timer_fd
        for i in range(2):
            event.events = EPOLLIN
            event.data.fd = own[i]
            if epoll_ctl(wake.epoll_fd, EPOLL_CTL_ADD, own[i], &event) != 0:
                err = errno
    if err:
        wake_close_fds(wake)
        free(wake)
        raise OSError(err, f"epoll, eventfd, timerfd: {os.strerror(err)}")
    pthread_mutex_init(&wake.lock, NULL)
    pthread_mutex_lock(&registry_lock)
    wake.next = wake_points
    if wake_points != NULL:
        wake_points.previous = wake
    wake_points = wake
    pthread_mutex_unlock(&registry_lock)
    return wake


cdef void wake_close_fds(WakePoint *wake) noexcept nogil:
    """Close the descriptors, once."""
    if wake.epoll_fd >= 0:
        posix_close(wake.epoll_fd)
    if wake.event_fd >= 0:
        posix_close(wake.event_fd)
    if wake.timer_fd >= 0:
        posix_close(wake.timer_fd)
    wake.epoll_fd = wake.event_fd = wake.timer_fd = -1


cdef void wake_hold(WakePoint *wake) noexcept nogil:
    """Take a reference."""
    sv_add(&wake.refs, 1)


cdef void wake_drop(WakePoint *wake) noexcept nogil:
    """Drop a reference; the last one frees. Never called in a forked child."""
    global wake_points
    if sv_add(&wake.refs, -1) != 0:
        return
    pthread_mutex_lock(&registry_lock)
    if wake.previous != NULL:
        wake.previous.next = wake.next
    else:
        wake_points = wake.next
    if wake.next != NULL:
        wake.next.previous = wake.previous
    pthread_mutex_unlock(&registry_lock)
    wake_close_fds(wake)
    pthread_mutex_destroy(&wake.lock)
    free(wake.listeners)
    free(wake)


cdef void wake_listeners(WakePoint *wake) noexcept nogil:
    """Wake the application threads that are blocked elsewhere; under the lock, so that none is gone
    meanwhile."""
    cdef int i
    pthread_mutex_lock(&wake.lock)
    for i in range(wake.n_listeners):
        write_eventfd(wake.listeners[i])
    pthread_mutex_unlock(&wake.lock)


cdef void wake_raise(WakePoint *wake) noexcept nogil:
    """Set attention, then wake the control thread and the listeners. Any thread, no GIL.

    The order matters: whoever is woken finds the flag set, or cleared by a driver run that began after it.
    """
    if wake.attention != NULL:
        sv_store(wake.attention, 1)
    sv_count(&wake.raised)
    if not sv_load(&wake.closed):
        wake_listeners(wake)
        write_eventfd(wake.event_fd)


cdef int take_ready(WakePoint *wake, epoll_event *events, int n, int *fds, int *timer) noexcept nogil:
    """Sort what epoll reported: our own counters are drained, everything else goes to fds. Returns their
    number."""
    cdef int i
    cdef int n_fds = 0
    timer[0] = 0
    for i in range(n):
        if events[i].data.fd == wake.event_fd:
            drain_counter(wake.event_fd)
        elif events[i].data.fd == wake.timer_fd:
            drain_counter(wake.timer_fd)
            timer[0] = 1
        else:
            fds[n_fds] = events[i].data.fd
            n_fds += 1
    return n_fds


cdef bint cleared_within(WakePoint *wake, int64_t grace_ns) noexcept nogil:
    """Whether a driver run clears the attention flag within the grace period."""
    cdef int64_t end = sv_now_ns() + grace_ns
    while sv_load(wake.attention):
        if sv_load(&wake.closed) or sv_now_ns() >= end:
            return False
        sv_sleep_ns(GRACE_STEP_NS)
    return True


cdef bint consumed_within(WakePoint *wake, int64_t grace_ns) noexcept nogil:
    """Whether the driver run just begun takes what was ready; new wake-ups count as yes, the caller looks
    again."""
    cdef epoll_event events[MAX_READY]
    cdef int64_t end = sv_now_ns() + grace_ns
    cdef int n
    cdef int i
    while True:
        n = epoll_wait(wake.epoll_fd, events, MAX_READY, 0)
        if n <= 0:
            return True
        for i in range(n):
            if events[i].data.fd == wake.event_fd or events[i].data.fd == wake.timer_fd:
                return True
        if sv_load(&wake.closed) or sv_now_ns() >= end:
            return False
        sv_sleep_ns(GRACE_STEP_NS)


cdef int wait_in_c(WakePoint *wake, int timeout_ms, int64_t grace_ns, int *fds) noexcept nogil:
    """Waiter.wait without Python. Returns the number of descriptors in fds."""
    cdef epoll_event events[MAX_READY]
    cdef int64_t deadline = sv_now_ns() + <int64_t>timeout_ms * 1000000
    cdef int64_t left_ns
    cdef int left_ms = -1
    cdef int rounds = 0
    cdef int n
    cdef int n_fds
    cdef int timer = 0
    while not sv_load(&wake.closed):
        if timeout_ms >= 0:
            left_ns = deadline - sv_now_ns()
            left_ms = 0 if left_ns <= 0 else <int>((left_ns + 999999) // 1000000)
        n = epoll_wait(wake.epoll_fd, events, MAX_READY, left_ms)
        if n <= 0:  # time is up, or a signal that Python may want to handle
            return 0
        n_fds = take_ready(wake, events, n, fds, &timer)
        if sv_load(&wake.closed):
            return 0
        if n_fds == 0 and not timer and not sv_load(wake.attention):
            # Only a wake-up, and the run it asked for has begun already.
            sv_count(&wake.answered_inline)
            continue
        # Listeners of a flag that is set already were woken by who set it, or belong to no wake-up at all.
        if sv_exchange(wake.attention, 1) == 0:
            wake_listeners(wake)
        if grace_ns <= 0 or not cleared_within(wake, grace_ns):
            return n_fds
        sv_count(&wake.answered_inline)
        if n_fds == 0 or consumed_within(wake, grace_ns):
            rounds = 0
            continue
        # The driver ran and something is still ready: again, and at last let Python see it.
        rounds += 1
        if rounds >= MAX_INLINE_ROUNDS:
            sv_store(wake.attention, 1)
            return n_fds
    return 0


cdef class Waiter:
    """The control thread's epoll set, which sleeps, wakes and gives way without the GIL.

    Whatever becomes ready, the driver has to run. Application threads run it inline as soon as they see the
    attention flag, which costs them nothing; so `wait` sets the flag, gives them a grace period, and comes
    back to Python (where taking the GIL from a busy thread costs it 5 ms) only if none of them did.

    :param attention_address: address of a C int that means "run the driver" when it is not 0; it must outlive
        the Waiter and every NicWorker that was given it
    :raises OSError: no descriptors left
    """

    def __cinit__(self, uintptr_t attention_address):
        self.wake_point = NULL
        if attention_address == 0:
            raise ValueError("attention_address is 0")
        self.wake_point = wake_new(<int *>attention_address)

    def __dealloc__(self):
        if self.wake_point == NULL:
            return
        if self.wake_point.pid != getpid():
            wake_close_fds(self.wake_point)
            return
        sv_store(&self.wake_point.closed, 1)
        wake_drop(self.wake_point)
        self.wake_point = NULL

    cdef int _check(self) except -1:
        """Raise when used in a forked child or after close."""
        must_be_ours(self.wake_point.pid, "this Waiter")
        if sv_load(&self.wake_point.closed):
            raise ValueError("this Waiter is closed")
        return 0

    def add(self, int fd):
        """Watch a descriptor for input, level-triggered: it is reported until its input has been taken.

        Adding one twice is allowed. Closing a descriptor removes it only if no other process or dup holds it.

        :raises OSError: not a descriptor epoll can watch
        """
        cdef epoll_event event
        self._check()
        event.events = EPOLLIN
        event.data.fd = fd
        if epoll_ctl(self.wake_point.epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0 and errno != EEXIST:
            raise verb_error("epoll_ctl", errno)

    def remove(self, int fd):
        """Stop watching fd; no error if it is not watched, is closed, or this Waiter is.

        A wait that is just returning may still report it.
        """
        cdef epoll_event event
        if self.wake_point.pid != getpid() or sv_load(&self.wake_point.closed):
            return
        if epoll_ctl(self.wake_point.epoll_fd, EPOLL_CTL_DEL, fd, &event) != 0:
            if errno != ENOENT and errno != EBADF:
                raise verb_error("epoll_ctl", errno)

    def add_listener(self, int event_fd):
        """Write event_fd (an eventfd) whenever attention is raised here: it wakes a thread that is blocked
        elsewhere.

        The eventfd must be non-blocking. Remove it before closing it.
        """
        cdef WakePoint *wake = self.wake_point
        cdef int *bigger
        cdef int failed = 0
        self._check()
        pthread_mutex_lock(&wake.lock)
        if wake.n_listeners == wake.listeners_size:
            bigger = <int *>realloc(wake.listeners, (2 * wake.listeners_size + 4) * sizeof(int))
            if bigger == NULL:
                failed = 1
            else:
                wake.listeners = bigger
                wake.listeners_size = 2 * wake.listeners_size + 4
        if not failed:
            wake.listeners[wake.n_listeners] = event_fd
            wake.n_listeners += 1
        pthread_mutex_unlock(&wake.lock)
        if failed:
            raise MemoryError()

    def set_deadline(self, int64_t at_ns):
        """Wake up at a time, as if something had become ready: the driver's next timer.

        One deadline; a new one replaces it, so a driver run that happened inline simply sets its next.

        :param at_ns: CLOCK_MONOTONIC in ns (time.monotonic_ns()); 0 = none; a past time wakes at once
        """
        self._check()
        if at_ns < 0:
            raise ValueError("at_ns is negative")
        if sv_timer_set(self.wake_point.timer_fd, at_ns) != 0:
            raise verb_error("timerfd_settime", errno)

    def wake_within(self, int64_t ns):
        """Wake up after this many ns, as set_deadline does (and in its place), but from any thread; after close, and
        in a forked child, it does nothing.

        Waking a thread that sleeps takes several times as long as setting a timer.
        """
        if self.wake_point.pid == getpid() and not sv_load(&self.wake_point.closed):
            sv_timer_set(self.wake_point.timer_fd, sv_now_ns() + ns)

    def wake(self):
        """Set attention and wake the wait and the listeners. Any thread; after close it does nothing."""
        if self.wake_point.pid == getpid() and not sv_load(&self.wake_point.closed):
            wake_raise(self.wake_point)

    def wait(self, int timeout_ms=-1, int grace_us=200):
        """Sleep until the driver has to be run by the caller.

        Without the GIL: waits for a descriptor, a wake or the deadline; sets attention; waits up to grace_us
        for a driver run of another thread to clear it. If one does, and what was ready gets consumed, it
        sleeps on.

        :param timeout_ms: return after this long in any case; -1 = never
        :param grace_us: how long application threads may take to begin a driver run; 0 = return at once
        :return: descriptors that were ready (possibly none: a wake, the deadline, the timeout, a signal, or
            close). Unless the timeout passed or the Waiter was closed, attention is still set.
        """
        cdef WakePoint *wake = self.wake_point
        cdef int fds[MAX_READY]
        cdef int n
        must_be_ours(wake.pid, "this Waiter")
        wake_hold(wake)
        with nogil:
            n = wait_in_c(wake, timeout_ms, <int64_t>grace_us * 1000, fds)
            if sv_load(&wake.parked) and not sv_on_main_thread():
                sv_park()
            wake_drop(wake)
        return [fds[i] for i in range(n)]

    def close(self):
        """End the wait under way and all later ones; twice is allowed.

        Descriptors are closed when nobody uses them any more. In a forked child it closes the child's copies,
        without touching the epoll set that it shares with its parent.
        """
        cdef WakePoint *wake = self.wake_point
        if wake.pid != getpid():
            wake_close_fds(wake)
            return
        if sv_exchange(&wake.closed, 1) == 0:
            write_eventfd(wake.event_fd)

    @property
    def closed(self):
        """Whether close() was called."""
        return sv_load(&self.wake_point.closed) != 0

    @property
    def raised(self):
        """How often attention was raised through wake() or by a worker."""
        return sv_counted(&self.wake_point.raised)

    @property
    def answered_inline(self):
        """How often another thread's driver run made it unnecessary to come back to Python."""
        return sv_counted(&self.wake_point.answered_inline)
