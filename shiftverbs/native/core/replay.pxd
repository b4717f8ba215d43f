# SPDX-License-Identifier: BSD-3-Clause
"""Which replays would be seen: of the WRs that hardware was given and nothing proves, executed a second time in order.

Told by the journal alone, when a failure came; posts and polls pay nothing for it. The rules, pair by pair, are a table
in docs/protocol.md, "What must not be replayed". They stand on three facts of RC (IBA 9.7, 10.8.3.3):

- The responder executes in order, and what answers one request acknowledges all before it. So nothing behind a WR that
  was to show a WC and has shown none got an answer.
- A WR with the FENCE flag, and all behind it, is sent when the responses of all READs before it are there.
- A message that was executed is in the peer's counter, with all before it (but the READs that no fence completed);
  unless the peer's NIC died before it wrote the receive's WC: `receipts_lost`.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

from shiftverbs.native.core.journal cimport (
    REC_HW_SIGNALED, REC_PROVEN, REC_TWO_SIDED, QPState, SendRec, has_payload, opcode_in, payload_out_opcodes, send_rec,
    two_sided_opcodes,
)
from shiftverbs.native.verbs cimport (
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, ibv_sge,
)


cdef enum:
    SEEN_NOT = 0
    SEEN_OVERWRITTEN = 1     # the first's bytes would be sent from memory where the second, a READ, landed
    SEEN_BEHIND_FENCE = 2    # the first, a READ, would be repeated behind the second, which a fence held back
    SEEN_NO_MEMORY = 3       # ... to find out


ctypedef struct Seen:
    int how
    uint64_t first           # sequence numbers
    uint64_t second


ctypedef struct Span:
    uint64_t start
    uint64_t end             # behind the last byte


# --- a set of bytes: disjoint spans in order, those that touch are one ----------------------------------------------

cdef inline size_t span_from(const Span *spans, size_t n, uint64_t at) noexcept nogil:
    """Index of the first span that ends at `at` or behind it."""
    cdef size_t low = 0
    cdef size_t high = n
    cdef size_t middle
    while low < high:
        middle = (low + high) // 2
        if spans[middle].end >= at:
            high = middle
        else:
            low = middle + 1
    return low


cdef inline bint span_holds_any(const Span *spans, size_t n, const ibv_sge *sge) noexcept nogil:
    cdef size_t i = span_from(spans, n, sge.addr + 1)
    return sge.length != 0 and i < n and spans[i].start < sge.addr + sge.length


cdef inline size_t span_add(Span *spans, size_t n, const ibv_sge *sge) noexcept nogil:
    """Returns how many there are now: at most one more."""
    cdef Span new
    cdef size_t i, end
    new.start = sge.addr
    new.end = sge.addr + sge.length
    i = end = span_from(spans, n, new.start)
    while end < n and spans[end].start <= new.end:
        new.start = min(new.start, spans[end].start)
        new.end = max(new.end, spans[end].end)
        end += 1
    memmove(&spans[i + 1], &spans[end], (n - end) * sizeof(Span))
    spans[i] = new
    return n + 1 + i - end


# --- the two ways ----------------------------------------------------------------------------------------------------

cdef inline bint sends_memory(const SendRec *rec) noexcept nogil:
    """Whether the application's memory is read when it is executed. Inline bytes are the journal's."""
    return opcode_in(rec.wr.opcode, payload_out_opcodes()) and not rec.app_flags & IBV_SEND_INLINE


cdef inline bint owes_wc(const SendRec *rec, bint cqes_lost) noexcept nogil:
    """Whether its WC would be here, had it been answered."""
    return rec.state & REC_HW_SIGNALED and not cqes_lost


cdef inline bint is_counted(const SendRec *rec, bint receipts_lost) noexcept nogil:
    """Whether the peer's counter tells that it was executed."""
    return opcode_in(rec.wr.opcode, two_sided_opcodes()) and not receipts_lost


cdef inline bint overlap(const SendRec *a, const SendRec *b) noexcept nogil:
    """Whether they name the same bytes of ours, under whatever lkeys."""
    cdef const ibv_sge *x
    cdef const ibv_sge *y
    cdef int i, j
    for i in range(a.wr.num_sge):
        x = &a.wr.sg_list[i]
        for j in range(b.wr.num_sge):
            y = &b.wr.sg_list[j]
            if x.length and y.length and x.addr < y.addr + y.length and y.addr < x.addr + x.length:
                return True
    return False


cdef inline bint may_go_again(const QPState *q, uint64_t seq, bint receipts_lost, bint *behind) noexcept nogil:
    """Whether a WR that the hardware has counts in a replay. behind: whether a message before it may be sent again.

    Of what a NIC has shown to be complete, a message is sent again where its receipt is lost, and what is behind it
    with it: its data would cover that of a later WRITE.
    """
    cdef SendRec *rec = send_rec(q, seq)
    if not rec.state & REC_PROVEN:
        if receipts_lost and rec.state & REC_TWO_SIDED and seq < q.shown_end:
            behind[0] = True
        return True
    return behind[0] and seq < q.shown_end


cdef inline Seen overwritten(const QPState *q, bint cqes_lost, bint receipts_lost) noexcept nogil:
    """A WR that sends memory where a later READ, or a part of its response, may have landed.

    Looks no further than the first WR that owes a WC. n WRs with s SGEs each cost n * s * log(n * s) comparisons, and
    at worst (n * s) ** 2 / 2 spans moved in one memmove each: milliseconds for thousands that lie apart.
    """
    cdef Seen seen
    cdef Span *spans = NULL
    cdef Span *more
    cdef size_t n = 0
    cdef size_t room = 0
    cdef uint64_t since = q.head
    cdef uint64_t seq
    cdef SendRec *rec
    cdef bint behind = False
    cdef int i
    seen.how = SEEN_NOT
    seen.first = seen.second = 0
    for seq in range(q.head, q.wired):
        rec = send_rec(q, seq)
        if not may_go_again(q, seq, receipts_lost, &behind):
            continue
        if rec.wr.opcode == IBV_WR_RDMA_READ:
            for i in range(rec.wr.num_sge):
                if n and span_holds_any(spans, n, &rec.wr.sg_list[i]):
                    seen.how = SEEN_OVERWRITTEN
                    seen.second = seq
                    break
            if seen.how:
                break
        elif is_counted(rec, receipts_lost):
            # Executed, it is counted, and what this set holds is proven; else the READs behind it were not answered.
            n = 0
            since = seq + 1
        elif sends_memory(rec):
            if n + rec.wr.num_sge > room:
                room = 2 * (n + rec.wr.num_sge)
                more = <Span *>realloc(spans, room * sizeof(Span))
                if more == NULL:
                    seen.how = SEEN_NO_MEMORY
                    break
                spans = more
            for i in range(rec.wr.num_sge):
                if rec.wr.sg_list[i].length:
                    n = span_add(spans, n, &rec.wr.sg_list[i])
        if owes_wc(rec, cqes_lost):
            break
    free(spans)
    if seen.how == SEEN_OVERWRITTEN:
        behind = False
        for seq in range(since, seen.second):
            rec = send_rec(q, seq)
            if not may_go_again(q, seq, receipts_lost, &behind):
                continue
            if sends_memory(rec) and overlap(rec, send_rec(q, seen.second)):
                seen.first = seq
                break
    return seen


cdef inline Seen behind_fence(const QPState *q, bint cqes_lost, bint receipts_lost) noexcept nogil:
    """A READ that may be complete, and a WRITE that a fence held back until it was.

    Where the WRITE goes does not matter: whoever finds it there may change what was read, and be right to.
    """
    cdef Seen seen
    cdef uint64_t seq
    cdef SendRec *rec
    cdef bint answered = True   # a READ here may be complete
    cdef bint waited_for = False  # a READ that is not lies before: no fence behind it lets anything through
    cdef bint read_seen = False
    cdef bint fence_seen = False
    cdef uint64_t read = 0
    seen.how = SEEN_NOT
    seen.first = seen.second = 0
    for seq in range(q.head, q.wired):
        rec = send_rec(q, seq)
        if rec.state & REC_PROVEN:
            continue
        if rec.app_flags & IBV_SEND_FENCE:
            if waited_for:
                break
            if read_seen and not fence_seen:
                fence_seen = True
                seen.first = read
            read_seen = False
        if rec.wr.opcode == IBV_WR_RDMA_READ:
            if not answered or owes_wc(rec, cqes_lost):
                waited_for = True
            elif has_payload(rec) and not read_seen:
                read_seen = True
                read = seq
        elif is_counted(rec, receipts_lost):
            # Executed, it is counted, and the READs before the fence are proven; else nothing behind it was executed.
            fence_seen = False
        elif fence_seen and has_payload(rec) and (
                rec.wr.opcode == IBV_WR_RDMA_WRITE or rec.wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM):
            seen.how = SEEN_BEHIND_FENCE
            seen.second = seq
            break
        if owes_wc(rec, cqes_lost):
            answered = False
    return seen


cdef inline Seen replay_seen(const QPState *q, bint cqes_lost, bint receipts_lost) noexcept nogil:
    """Whether the replay of [head, wired) would be seen, and by which two WRs.

    cqes_lost: a NIC of ours died and may have kept WCs to itself. receipts_lost: the peer's did, of receives.
    """
    cdef Seen seen = overwritten(q, cqes_lost, receipts_lost)
    return seen if seen.how else behind_fence(q, cqes_lost, receipts_lost)
