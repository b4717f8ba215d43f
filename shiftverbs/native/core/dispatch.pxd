# SPDX-License-Identifier: BSD-3-Clause
"""What happens to a WC between the hardware and the application, and what a post does.

`dispatch` decides over one WC of one hardware CQ: it belongs to the application (wr_id and QP numbers are put back), or
it is ours, stale or withheld. The rules of RC completions it stands on (IBA 10.8, 11.5): a success of WR s completes
all before it; an error completes unsignaled WRs too, and everything behind it is flushed in order; a receive WC
retires exactly one receive, in the order of posting.
"""

from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport int64_t, uint32_t, uint64_t

from shiftverbs.native.core.journal cimport (
    EV_APP_ERROR, EV_ARM_WC, EV_ERROR, EV_FENCE_WR_DONE, EV_FIRST_WC, EV_LATE_POST, EV_POST_FAILED, EV_RQ_FENCED,
    EV_RX_REACHED, EV_SQ_FENCED, KIND_APP, KIND_ARM, KIND_FENCE, KIND_MARKER, MARKER_SEEN, MAX_PAIRS, REC_DONE,
    REC_HW_SIGNALED, REC_PROVEN, REC_SIGNALED, WATCH_FIRST, WATCH_SAMPLE, CQState, KeptError, Pair, QPState,
    RecvRec, SendRec, abort_recvs, abort_sends, after_retire, cq_push, device_gone, discount_answered, emit,
    flush_proven, hand_over, last_is_fence_wr, post_refused, provider_errno, pump_recv, pump_send, recv_append,
    recv_rec, retire_below, send_append, send_cut, send_rec, sends_shown, seq_mask,
)
from shiftverbs.native.core.map cimport MapSlot, map_find
from shiftverbs.native.core.sampling cimport sample_break, sample_reached
from shiftverbs.native.verbs cimport (
    IBV_SEND_SIGNALED, IBV_WC_FATAL_ERR, IBV_WC_GENERAL_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_RETRY_EXC_ERR, IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, ibv_poll_cq,
    ibv_post_recv, ibv_post_send, ibv_recv_wr, ibv_send_wr, ibv_wc,
)


cdef enum:
    POLL_BATCH = 32


# --- errors --------------------------------------------------------------------------------------------------

cdef inline void fenced(QPState *q, int k, bint recv) noexcept nogil:
    """The queue of pair k has shown that it accepts nothing any more."""
    cdef Pair *pair = &q.pairs[k]
    if not pair.fencing:
        return
    if recv and not pair.rq_fenced:
        pair.rq_fenced = 1
        emit(q, EV_RQ_FENCED, k, 0, 0)
    elif not recv and not pair.sq_fenced:
        pair.sq_fenced = 1
        emit(q, EV_SQ_FENCED, k, 0, 0)


cdef inline bint says_more(int before, int status) noexcept nogil:
    return before == 0 or (before == IBV_WC_WR_FLUSH_ERR and status != IBV_WC_WR_FLUSH_ERR)


cdef inline void note_error(QPState *q, int k, bint recv, const ibv_wc *wc) noexcept nogil:
    """Remember the error that says why: a flush only follows from one."""
    cdef Pair *pair = &q.pairs[k]
    cdef int kind = <int>((wc.wr_id >> 60) & 7)
    if recv:
        pair.rq_error_seen = 1
    else:
        if not pair.sq_error_seen:
            if kind == KIND_APP:
                pair.failed_seq = (wc.wr_id & seq_mask()) + 1
            if kind != KIND_ARM and k == q.send_pair and pair.sending:
                sends_shown(q, wc.wr_id & seq_mask())
        pair.sq_error_seen = 1
    if says_more(pair.first_status, wc.status):
        pair.first_status = wc.status
        pair.first_vendor_err = wc.vendor_err
    if not recv and says_more(pair.send_status, wc.status):
        pair.send_status = wc.status
        pair.send_vendor_err = wc.vendor_err


cdef inline KeptError why_sends_fail(const Pair *pair) noexcept nogil:
    """What the first send that a pair has failed is told: a flush, where a receive alone had an error of its own."""
    cdef KeptError why
    why.seq = 0
    why.status = pair.send_status if pair.send_status else IBV_WC_WR_FLUSH_ERR
    why.vendor_err = pair.send_vendor_err
    return why


cdef inline bint repeated(QPState *q, int k, uint64_t seq) noexcept nogil:
    """An error that the same WR gets on two pairs is the application's own, not the path's."""
    if q.op_err_pair >= 0 and q.op_err_seq == seq and q.op_err_pair != k:
        return True
    q.op_err_pair = k
    q.op_err_seq = seq
    return False


cdef inline bint may_be_path_error(int status) noexcept nogil:
    return (status == IBV_WC_RETRY_EXC_ERR or status == IBV_WC_WR_FLUSH_ERR or status == IBV_WC_LOC_QP_OP_ERR
            or status == IBV_WC_FATAL_ERR or status == IBV_WC_GENERAL_ERR or status == IBV_WC_RESP_TIMEOUT_ERR)


cdef inline bint is_path_error(QPState *q, int k, bint recv, uint64_t seq, int status) noexcept nogil:
    """Whether a guarded QP withholds an error WC of this status."""
    if status == IBV_WC_RETRY_EXC_ERR or status == IBV_WC_WR_FLUSH_ERR:
        return True
    return may_be_path_error(status) and (recv or not repeated(q, k, seq))


cdef inline bint in_use(const QPState *q, int k, bint recv, uint64_t seq) noexcept nogil:
    """Whether a WC from pair k for record `seq` can mean that record: it is outstanding, and not stale there."""
    if recv:
        return q.rhead <= seq < q.rwired and not q.pairs[k].recv_stale
    return q.head <= seq < q.wired


cdef inline void begin_end(QPState *q) noexcept nogil:
    """The QP has failed for good: what is posted from now on waits for its flush, and so does all that is outstanding.

    Receives that the hardware completes until every pair has stopped are the application's all the same.
    """
    q.ending = 1
    q.ends_at_post = 0
    q.send_open = q.recv_open = 0
    q.fence_wr_active = q.fence_wr_wanted = 0
    q.rx_target_set = 0
    q.key_wait = q.recv_key_wait = q.recv_withheld = q.blocked = 0


cdef inline bint is_plain(const QPState *q) noexcept nogil:
    """Whether all of it is at home and open: one hardware QP."""
    return q.send_pair == 0 and q.recv_pair == 0 and q.send_open and q.recv_open and not q.pairs[0].fencing


cdef inline bint flushes_itself(const QPState *q) noexcept nogil:
    """Whether it is plain, and no backup was ever the application's: there a late READ may still be answered."""
    cdef int k
    for k in range(1, MAX_PAIRS):
        if q.pairs[k].carried:
            return False
    return is_plain(q)


cdef inline void end_by_own_error(QPState *q) noexcept nogil:
    """The application's own error ends the protection. A QP that flushes itself is the hardware's from now on.

    Else one half of it may go on receiving, or will never be flushed by any hardware: the driver ends it.
    """
    if flushes_itself(q):
        q.guarded = 0
        q.fence_wr_active = q.fence_wr_wanted = 0
        q.key_wait = 0
    else:
        begin_end(q)


cdef inline void give_withheld(QPState *q) noexcept nogil:
    """Nothing is withheld any more: the errors that were are the application's, before a WC behind them comes.

    A QP that is not plain is ended by the driver, which gives them with the rest.
    """
    cdef Pair *pair = &q.pairs[0]
    cdef KeptError why
    if q.closed or q.ending or not is_plain(q) or not pair.first_status:
        return
    if q.forgets_sends or q.forgets_recvs:
        return
    if q.shown_error == 0 and (q.head < q.withheld_send_end or q.rhead < q.withheld_recv_end):
        q.shown_error = pair.first_status
    why = why_sends_fail(pair)
    abort_sends(q, q.withheld_send_end, why.status, why.vendor_err)
    abort_recvs(q, q.withheld_recv_end)
    if q.wired < q.tail:
        pump_send(q)  # what waited for room: perhaps nothing that the hardware has would make any


cdef inline void keep(KeptError *kept, uint64_t seq, const ibv_wc *wc) noexcept nogil:
    """The application's own error, in an end: its WR has it when the others have theirs."""
    kept.seq = seq + 1
    kept.status = wc.status
    kept.vendor_err = wc.vendor_err


cdef inline bint withhold(QPState *q, int k, bint recv, uint64_t seq, const ibv_wc *wc) noexcept nogil:
    """An error WC, not of our own WRs. True: the application does not see it."""
    cdef Pair *pair = &q.pairs[k]
    cdef KeptError before = why_sends_fail(pair)
    note_error(q, k, recv, wc)
    if q.ending:
        if in_use(q, k, recv, seq) and not may_be_path_error(wc.status):
            keep(&q.kept_recv if recv else &q.kept_send, seq, wc)
        fenced(q, k, recv)
        return True
    if q.forgets_recvs if recv else q.forgets_sends:
        fenced(q, k, recv)
        return True
    if not q.guarded and not pair.fencing:
        if q.shown_error == 0:
            q.shown_error = wc.status
        # What was withheld while that was still done comes first, in order: this is no first error behind successes.
        if recv:
            abort_recvs(q, min(seq, q.withheld_recv_end))
        else:
            abort_sends(q, min(seq, q.withheld_send_end), before.status, before.vendor_err)
        return False
    if not q.guarded or not in_use(q, k, recv, seq) or is_path_error(q, k, recv, seq, wc.status):
        if pair.fencing:
            fenced(q, k, recv)
            return True
        if in_use(q, k, recv, seq):
            if recv:
                q.withheld_recv_end = seq + 1
            else:
                q.withheld_send_end = seq + 1
        if not pair.error_raised:
            pair.error_raised = 1
            emit(q, EV_ERROR, k, wc.status, wc.vendor_err)
        return True
    # The application's own. What was withheld on its account comes first, in order: of the other queue when every pair
    # that may reach the application's memory has stopped.
    emit(q, EV_APP_ERROR, k, wc.status, wc.vendor_err)
    if not recv and q.withheld_send_end > seq:
        q.withheld_send_end = seq
    if recv and q.withheld_recv_end > seq:
        q.withheld_recv_end = seq
    if not recv or flushes_itself(q):
        abort_sends(q, q.withheld_send_end, before.status, before.vendor_err)
    if flushes_itself(q) or recv:
        abort_recvs(q, q.withheld_recv_end)
    if q.shown_error == 0:
        q.shown_error = wc.status  # behind it all that is left is flushed, whoever ends the QP
    end_by_own_error(q)
    return False


# --- one WC --------------------------------------------------------------------------------------------------

cdef inline void heed_wc(QPState *q, int k) noexcept nogil:
    """A completion came on pair k, which is watched."""
    if q.pairs[k].watch & WATCH_FIRST:
        q.pairs[k].watch &= ~WATCH_FIRST
        emit(q, EV_FIRST_WC, k, 0, 0)
    if q.pairs[k].watch & WATCH_SAMPLE and q.head >= q.sample_end:
        sample_reached(q, k)


cdef inline int own_wc(QPState *q, int k, int kind, bint recv, uint64_t seq, ibv_wc *wc) noexcept nogil:
    """A marker, ARM dummy or fence WRITE: never the application's."""
    cdef Pair *pair = &q.pairs[k]
    if recv and pair.rq_out:
        pair.rq_out -= 1
    if kind == KIND_MARKER:
        if recv:
            pair.rq_marker = MARKER_SEEN
        else:
            pair.sq_marker = MARKER_SEEN
    elif kind == KIND_ARM:
        emit(q, EV_ARM_WC, k, recv, wc.status)
    elif kind == KIND_FENCE:
        pair.own_fence_write = 0
    if wc.status != IBV_WC_SUCCESS:
        if pair.fencing:
            note_error(q, k, recv, wc)
            fenced(q, k, recv)
        elif kind == KIND_FENCE and q.guarded:
            note_error(q, k, recv, wc)
            if not pair.error_raised:
                pair.error_raised = 1
                emit(q, EV_ERROR, k, wc.status, wc.vendor_err)
    elif kind == KIND_FENCE and seq <= q.wired:
        retire_below(q, seq)
        after_retire(q)
        if q.fence_wr_active and q.fence_wr_seq == seq == q.wired:
            # Nothing is journaled at the fence's own number: after_retire cannot see it. Where something is, that is
            # the fence, and this WRITE is of a MOVE that was called off.
            q.fence_wr_active = 0
            emit(q, EV_FENCE_WR_DONE, k, 0, 0)
        if q.fence_wr_wanted:
            last_is_fence_wr(q)
    return 0


cdef inline int send_wc(QPState *q, int k, uint64_t seq, ibv_wc *wc) noexcept nogil:
    cdef SendRec *rec
    if wc.status != IBV_WC_SUCCESS and withhold(q, k, False, seq, wc):
        return 0
    if seq < q.head or seq >= q.wired:
        q.stale += 1
        return 0
    if q.head != seq:
        retire_below(q, seq)
    rec = send_rec(q, seq)
    wc.wr_id = rec.app_wr_id
    wc.qp_num = q.qp_num
    q.head = seq + 1
    if wc.status != IBV_WC_SUCCESS:
        q.sends_failed = True
        sample_break(q.sample)  # nothing that is outstanding there completes any more
        if q.proven_end > q.head and not q.ending:  # else they are flushed with the rest
            cq_push(q.scq, wc)
            flush_proven(q)
            after_retire(q)
            return 0
        after_retire(q)
        return 1
    if rec.two_sided > q.acked_ts:
        q.acked_ts = rec.two_sided
    if q.pairs[k].watch:
        heed_wc(q, k)
    if not rec.state & REC_SIGNALED:
        after_retire(q)
        return 0
    if q.proven_end > q.head:
        # Success WCs of proven records come behind this one.
        cq_push(q.scq, wc)
        after_retire(q)
        return 0
    if q.fence_wr_active or q.blocked:
        after_retire(q)
    return 1


cdef inline int recv_wc(QPState *q, int k, uint64_t seq, ibv_wc *wc) noexcept nogil:
    cdef Pair *pair = &q.pairs[k]
    cdef RecvRec *rec
    if pair.rq_out:
        pair.rq_out -= 1
    if wc.status != IBV_WC_SUCCESS and withhold(q, k, True, seq, wc):
        return 0
    if pair.recv_stale or seq < q.rhead or seq >= q.rwired:
        q.stale += 1
        return 0
    rec = recv_rec(q, seq)
    if rec.state & REC_DONE:
        q.stale += 1
        return 0
    wc.wr_id = rec.app_wr_id
    wc.qp_num = q.qp_num
    if k and wc.src_qp:
        wc.src_qp = q.peer_qp_num
    if seq == q.rhead:
        q.rhead = seq + 1
        while q.rhead < q.rwired and recv_rec(q, q.rhead).state & REC_DONE:
            q.rhead += 1
    else:
        rec.state |= REC_DONE
    if wc.status == IBV_WC_SUCCESS:
        q.rx += 1
        if q.rx_target_set and q.rx >= q.rx_target:
            q.rx_target_set = 0
            emit(q, EV_RX_REACHED, k, <int64_t>q.rx, 0)
        if k != q.send_pair and q.crossed < q.wired:
            q.crossed = q.wired
        if pair.watch:
            heed_wc(q, k)
    return 1


cdef inline int dispatch(CQState *c, int k, ibv_wc *wc) noexcept nogil:
    """1: the application's, wr_id and QP numbers put back in place. 0: not to be shown."""
    cdef uint64_t key = (<uint64_t>k << 32) | wc.qp_num
    cdef uint64_t wr_id = wc.wr_id
    cdef MapSlot *slot
    cdef QPState *q
    cdef Pair *pair
    cdef int result
    if key == c.cached_key:
        q = c.cached
    else:
        slot = map_find(&c.qps, key)
        if slot == NULL:
            # A QP that is not ours to guard. On a shadow CQ there are only ours: a leftover of one already closed.
            return k == 0
        q = <QPState *><size_t>slot.value
        c.cached_key = key
        c.cached = q
    pair = &q.pairs[k]
    if <int>((wr_id >> 56) & 15) != pair.generation:
        q.stale += 1
        result = 0
    elif pair.forgotten:
        # It means nothing any more, but that the QP is in ERR if it says so.
        q.stale += 1
        if wc.status != IBV_WC_SUCCESS:
            fenced(q, k, (wr_id >> 63) != 0)
        result = 0
    elif (wr_id >> 60) & 7 != KIND_APP:
        result = own_wc(q, k, <int>((wr_id >> 60) & 7), (wr_id >> 63) != 0, wr_id & seq_mask(), wc)
    elif wr_id >> 63:
        result = recv_wc(q, k, wr_id & seq_mask(), wc)
    else:
        result = send_wc(q, k, wr_id & seq_mask(), wc)
    if not result:
        c.swallowed += 1
    return result


cdef inline int cq_drain(CQState *c, int k) noexcept nogil:
    """Poll hardware CQ k to empty into the WC buffer. The number of WCs taken, or a negative errno."""
    cdef ibv_wc wcs[POLL_BATCH]
    cdef int i
    cdef int n = 0
    cdef int total = 0
    if c.hw[k] == NULL:
        return 0
    # The hardware itself raises an event for what arrives on a CQ that was armed.
    c.quiet += 1 if c.active[k] else 0
    while True:
        n = ibv_poll_cq(c.hw[k], POLL_BATCH, wcs)
        if n <= 0:
            break
        total += n
        for i in range(n):
            if dispatch(c, k, &wcs[i]):
                cq_push(c, &wcs[i])
        if n < POLL_BATCH:
            break
    c.quiet -= 1 if c.active[k] else 0
    return n if n < 0 else total


# --- posting -------------------------------------------------------------------------------------------------

cdef inline bint make_room(CQState *c, int k) noexcept nogil:
    """The hardware frees a slot when it completes, whether or not the application polls. Bounded by the CQ's size."""
    if c.hw[0] == NULL or c.count >= <unsigned int>c.hw[0].cqe:
        return False
    return cq_drain(c, k) > 0


cdef inline bint refused_by_path(QPState *q, int k, int err) noexcept nogil:
    """Whether a refused post says something about pair k, not about the WR: its QP is broken, or its device is gone.

    A provider may know of an error that is still in the CQs.
    """
    cdef Pair *pair = &q.pairs[k]
    if err == ENOMEM or not q.guarded:
        return False
    if device_gone(err):
        return True
    make_room(q.scq, k)
    if q.rcq != q.scq:
        make_room(q.rcq, k)
    return q.guarded and (pair.first_status != 0 or pair.sq_error_seen or pair.rq_error_seen)


cdef inline int post_default(QPState *q, uint64_t first) noexcept nogil:
    """Hand [first, tail), linked into a chain, to pair 0 in one call. Errno; q.wired says how far it went."""
    cdef ibv_send_wr *bad = NULL
    cdef uint64_t seq
    cdef int rc
    if q.pairs[0].qp == NULL:
        return EINVAL
    rc = ibv_post_send(q.pairs[0].qp, &send_rec(q, first).wr, &bad)
    if rc == 0:
        q.wired = q.tail
        q.wired_ts = q.posted_ts
        return 0
    seq = (bad.wr_id & seq_mask()) if bad != NULL else first
    if seq < first or seq >= q.tail:
        seq = first
    q.wired = seq
    if seq > first:
        q.wired_ts = send_rec(q, seq - 1).two_sided
    return rc


cdef inline int send_refused(
        QPState *q, uint64_t first, int rc, int err, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil:
    """The hardware refused the WR at `wired`; the chain `wr` was appended from `first` on. What the post returns.

    err: what it would return otherwise. Where the refusal is the application's own, the WR and what is behind it are
    taken out of the journal.
    """
    cdef int k = q.send_pair
    cdef int errno_ = provider_errno(rc)
    cdef int opcode = send_rec(q, q.wired).wr.opcode
    cdef uint64_t seq
    if q.wired < first:
        pump_send(q)  # one that waited longer: the new ones wait behind it
        return err
    if opcode != IBV_WR_LOCAL_INV and opcode != IBV_WR_BIND_MW and refused_by_path(q, k, errno_):
        post_refused(q, k, errno_)
        return err
    seq = first
    while seq < q.wired:
        seq += 1
        wr = wr.next
    bad[0] = wr
    q.posted -= q.tail - seq
    send_cut(q, seq)
    return rc


cdef inline int qp_post_send(QPState *q, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil:
    """Post a chain. Errno, and the application's first WR that was not taken in *bad."""
    cdef uint64_t first = q.tail
    cdef ibv_send_wr *at = wr
    cdef SendRec *rec
    cdef SendRec *last = NULL
    cdef int err = 0
    cdef int rc = 0
    if q.heed:
        return q.shared.heed_post(q, wr, bad)
    q.one_by_one = 0
    while at != NULL:
        err = send_append(q, at)
        if err == ENOMEM:
            if make_room(q.scq, q.send_pair):
                err = send_append(q, at)
            if err == ENOMEM and discount_answered(q):
                err = send_append(q, at)
                last = NULL  # the records may lie elsewhere now
                q.one_by_one |= q.tail != first + 1
        if err:
            bad[0] = at
            break
        rec = send_rec(q, q.tail - 1)
        if last != NULL:
            last.wr.next = &rec.wr
        last = rec
        at = at.next
    if last == NULL:
        if q.tail == first:
            return err
        last = send_rec(q, q.tail - 1)
    q.posted += q.tail - first
    # What was handed over while room was sought is as the hardware has it.
    if q.fence_wr_wanted and q.send_open and q.fence_wr_upto <= q.wired < q.tail:
        last.state |= REC_HW_SIGNALED
        last.wr.send_flags |= IBV_SEND_SIGNALED
        q.last_signaled = q.fence_wr_upto = q.tail
    if q.send_open:
        if q.send_pair or q.wired != first or q.recv_withheld or q.one_by_one or q.tail - q.head > q.send_cap:
            rc = hand_over(q)
        else:
            rc = post_default(q, first)
            if rc and provider_errno(rc) == ENOMEM and make_room(q.scq, 0):
                # Completions may have handed the rest over already.
                rc = post_default(q, q.wired) if q.wired < q.tail else 0
        if rc:
            err = send_refused(q, first, rc, err, wr, bad)
        if q.fence_wr_wanted and q.tail > first:
            last_is_fence_wr(q)
    elif q.ending or q.ends_at_post:
        emit(q, EV_LATE_POST, -1, 0, 0)
    return err


cdef inline int qp_post_recv(QPState *q, ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept nogil:
    """As qp_post_send, for receives."""
    cdef uint64_t first = q.rtail
    cdef uint64_t seq
    cdef ibv_recv_wr *at = wr
    cdef ibv_recv_wr *hw_bad = NULL
    cdef RecvRec *rec
    cdef RecvRec *last = NULL
    cdef Pair *pair
    cdef int err = 0
    cdef int rc
    if q.closed:
        bad[0] = wr
        return EINVAL
    while at != NULL:
        err = recv_append(q, at)
        if err == ENOMEM and make_room(q.rcq, q.recv_pair):
            err = recv_append(q, at)
        if err:
            bad[0] = at
            break
        rec = recv_rec(q, q.rtail - 1)
        if last != NULL:
            last.wr.next = &rec.wr
        last = rec
        at = at.next
    if last == NULL:
        return err
    if not q.recv_open:
        if q.ending:
            emit(q, EV_LATE_POST, -1, 0, 0)
        return err
    pair = &q.pairs[q.recv_pair]
    if q.recv_pair or q.rwired != first:
        rc = pump_recv(q)
        if rc == -1:
            q.recv_open = 0
            # Nothing that is posted from now on may tell the peer of it.
            q.recv_key_wait = q.recv_withheld = 1
            return err
    elif pair.qp == NULL:
        rc = EINVAL
    else:
        rc = ibv_post_recv(pair.qp, &recv_rec(q, first).wr, &hw_bad)
        seq = q.rtail
        if rc:
            seq = (hw_bad.wr_id & seq_mask()) if hw_bad != NULL else first
            if seq < first or seq >= q.rtail:
                seq = first
        pair.rq_out += <uint32_t>(seq - first)
        q.rwired = pair.recv_upto = seq
    if rc == 0:
        return err
    if q.rwired < first or refused_by_path(q, q.recv_pair, provider_errno(rc)):
        q.recv_open = 0
        emit(q, EV_POST_FAILED, q.recv_pair, provider_errno(rc), 1)
        return err
    at = wr
    for _ in range(q.rwired - first):
        at = at.next
    bad[0] = at
    q.rtail = q.rwired
    return rc
