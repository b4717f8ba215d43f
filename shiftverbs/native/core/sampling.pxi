# SPDX-License-Identifier: BSD-3-Clause
# SendSample: how long what is outstanding on a path takes (sampling.pxd). Included by _core.pyx.

cdef int heed_post(QPState *q, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil:
    """A post of a QP that is closed, or that begins a sample. By a pointer, or it would be a part of every post."""
    cdef PathSample *s = q.sample
    cdef bint idle = q.head == q.tail
    cdef int64_t began_ns
    cdef int rc
    if q.closed:
        bad[0] = wr
        return EINVAL
    began_ns = sample_now(q.shared)
    q.heed &= ~HEED_SAMPLE
    rc = qp_post_send(q, wr, bad)
    if s != NULL and s == q.sample:  # else it was broken off
        sample_begin(s, q if idle else NULL, began_ns)
    return rc


shared.heed_post = heed_post


@cython.no_gc
@cython.final
cdef class SendSample:
    """Samples of some QPs' sends on one pair, one after the other.

    `want` asks for one, the next post of any of these QPs begins it, and `ended_samples` has it when it is over.
    """

    cdef PathSample s
    cdef list cores
    cdef size_t room
    cdef object __weakref__

    def __cinit__(self):
        memset(&self.s, 0, sizeof(PathSample))
        self.s.owner = <PyObject *>self
        self.s.shared = &shared

    def __dealloc__(self):
        sample_unlist(&self.s)
        free(self.s.members)

    def want(self, list cores not None, int k) -> None:
        """Have the next post of any of these QPCores begin a sample of what they have outstanding on pair k.

        A QP is in one sample at a time: the former is broken off.
        """
        cdef QPCore core
        cdef QPState **members
        check_pair(k)
        sample_unlist(&self.s)
        if <size_t>len(cores) > self.room:
            members = <QPState **>realloc(self.s.members, len(cores) * sizeof(QPState *))
            if members == NULL:
                raise MemoryError
            self.s.members = members
            self.room = len(cores)
        self.cores = cores  # alive as long as they are named here
        self.s.k = k
        for core in cores:
            if core.q.sample != NULL:
                sample_break(core.q.sample)
            if not core.q.closed:
                self.s.members[self.s.n_members] = &core.q
                self.s.n_members += 1
        sample_want(&self.s)
        if not self.s.n_members:
            sample_break(&self.s)

    def drop(self) -> None:
        """None is wanted any more."""
        sample_unlist(&self.s)
        self.cores = None

    def take(self):
        """The sample that ended: (bytes, messages, began_ns, ended_ns, unseen_ns, begun_bytes).

        None: it was broken off. In CLOCK_MONOTONIC. unseen_ns: for how long before its end the CQ had not been looked
        at. begun_bytes: of the oldest WRs, where others were outstanding before them.
        """
        if self.s.state != SAMPLE_ENDED or not self.s.messages:
            return None
        return (self.s.bytes, self.s.messages, self.s.began_ns, self.s.ended_ns, self.s.unseen_ns,
                self.s.begun_bytes)


def ended_samples() -> list:
    """The SendSamples that have ended, or were broken off, since the last call."""
    cdef list found = []
    cdef PathSample *s
    while shared.ended != NULL:  # one by one: an object that is made may end another
        s = shared.ended
        shared.ended = s.next_ended
        if shared.ended == NULL:
            shared.ended_last = NULL
        found.append(<object>s.owner)
    return found


def set_sample_clock(uintptr_t address) -> None:
    """Where time is another one: the address of a C function that returns it, in ns. 0: CLOCK_MONOTONIC."""
    shared.clock = <int64_t (*)() noexcept nogil>address
