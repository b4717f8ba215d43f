# SPDX-License-Identifier: BSD-3-Clause
"""How long what is outstanding takes: samples of some QPs' sends on one pair, for who judges whether a path is slow.

A post looks at `heed` instead of `closed`, a poll at `heed` instead of `failed`, and a completion at `watch` as ever:
so none of them has an instruction more while no sample is under way, and there is one now and then only.

A sample begins with a post, at the last moment before it. It is of all that is outstanding then on the pair, of each
QP up to the last WR that the hardware tells the end of, and ends when the last of that was polled. Where a QP is taken
off its pair, or closed, it is broken off.
"""

from libc.stdint cimport int64_t, uint64_t

from shiftverbs.native.core.journal cimport (
    HEED_SAMPLE, HEED_SAMPLED, REC_HW_SIGNALED, REC_PROVEN, SAMPLE_ENDED, SAMPLE_NONE, SAMPLE_UNDER_WAY, SAMPLE_WANTED,
    WATCH_SAMPLE, CQState, PathSample, QPState, SendRec, Shared, now_ns, send_rec,
)


cdef enum:
    MOST_RECORDS = 4096   # of one QP: what is behind them is left out


cdef inline int64_t sample_now(const Shared *s) noexcept nogil:
    return s.clock() if s.clock != NULL else now_ns()


cdef inline int looked(CQState *c) noexcept nogil:
    """The application has looked at this CQ, and taken what there was. 0."""
    if c.sampled:
        c.looked_ns = sample_now(c.shared)
    return 0


cdef inline void stop_watching(QPState *q, int k) noexcept nogil:
    """No sample waits for a completion of this QP any more."""
    cdef CQState *c = q.scq
    if not q.pairs[k].watch & WATCH_SAMPLE:
        return
    q.pairs[k].watch &= ~WATCH_SAMPLE
    c.sampled -= 1
    if not c.sampled:
        c.heed &= ~HEED_SAMPLED


cdef inline void sample_end(PathSample *s) noexcept nogil:
    """Nothing is left of it, or it was broken off: its QPs are free, and it waits to be taken."""
    cdef Shared *shared = s.shared
    cdef int i
    for i in range(s.n_members):
        s.members[i].heed &= ~HEED_SAMPLE
        stop_watching(s.members[i], s.k)
        s.members[i].sample = NULL
    s.n_members = 0
    s.state = SAMPLE_ENDED
    s.next_ended = NULL
    if shared.ended_last != NULL:
        shared.ended_last.next_ended = s
    else:
        shared.ended = s
    shared.ended_last = s


cdef inline void sample_break(PathSample *s) noexcept nogil:
    """Something else than time came between (NULL: there is none): it says nothing."""
    if s == NULL:
        return
    s.messages = 0
    sample_end(s)


cdef inline void sample_unlist(PathSample *s) noexcept nogil:
    """It is not waited for any more, whatever it is at."""
    cdef Shared *shared = s.shared
    cdef PathSample *at
    cdef PathSample *before = NULL
    if s.n_members:
        sample_break(s)
    if s.state == SAMPLE_ENDED:
        at = shared.ended
        while at != NULL and at != s:
            before = at
            at = at.next_ended
        if at != NULL:
            if before != NULL:
                before.next_ended = s.next_ended
            else:
                shared.ended = s.next_ended
            if shared.ended_last == s:
                shared.ended_last = before
    s.next_ended = NULL
    s.state = SAMPLE_NONE


cdef inline void sample_want(PathSample *s) noexcept nogil:
    """The next post of any of its members begins it."""
    cdef int i
    s.state = SAMPLE_WANTED
    s.bytes = s.messages = s.begun_bytes = 0
    s.left = 0
    for i in range(s.n_members):
        s.members[i].sample = s
        s.members[i].heed |= HEED_SAMPLE


cdef inline void sample_take_in(PathSample *s, QPState *q, bint idle) noexcept nogil:
    """What is outstanding of one member. idle: nothing was before the post."""
    cdef uint64_t seq = q.head
    cdef uint64_t end = 0
    cdef uint64_t last = min(q.wired, q.head + MOST_RECORDS)
    cdef uint64_t sizes = 0
    cdef uint64_t upto = 0
    cdef uint64_t first = 0
    cdef SendRec *rec
    cdef int i
    if q.closed or q.send_pair != s.k or not q.send_open or not q.guarded:
        return
    while seq < last:
        rec = send_rec(q, seq)
        for i in range(rec.wr.num_sge):
            sizes += rec.wr.sg_list[i].length
        if seq == q.head:
            first = sizes
        seq += 1
        if rec.state & (REC_HW_SIGNALED | REC_PROVEN) == REC_HW_SIGNALED:
            end = seq
            upto = sizes
    if not end:
        return
    s.bytes += upto
    s.messages += end - q.head
    if not idle:
        s.begun_bytes += first
    s.left += 1
    q.sample_end = end
    q.pairs[s.k].watch |= WATCH_SAMPLE
    q.scq.sampled += 1
    q.scq.heed |= HEED_SAMPLED


cdef inline void sample_begin(PathSample *s, QPState *idle, int64_t began_ns) noexcept nogil:
    """A post was made, before which `idle` (NULL: none) had nothing outstanding."""
    cdef int i
    s.began_ns = began_ns
    s.state = SAMPLE_UNDER_WAY
    for i in range(s.n_members):
        s.members[i].heed &= ~HEED_SAMPLE
        sample_take_in(s, s.members[i], s.members[i] == idle)
    if not s.left:
        sample_break(s)  # refused, or withheld, or nothing tells of its end


cdef inline void sample_reached(QPState *q, int k) noexcept nogil:
    """All of this member's part is complete."""
    cdef PathSample *s = q.sample
    cdef int64_t looked_ns = q.scq.looked_ns
    stop_watching(q, k)
    if s == NULL:
        return
    s.left -= 1
    if s.left:
        return
    s.ended_ns = sample_now(s.shared)
    if s.ended_ns <= s.began_ns:
        s.ended_ns = s.began_ns + 1
    s.unseen_ns = s.ended_ns - max(s.began_ns, min(looked_ns, s.ended_ns))
    sample_end(s)
