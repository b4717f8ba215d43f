# SPDX-License-Identifier: BSD-3-Clause
# QPCore: the journal of one application QP and the driver's primitives on it. Included by _core.pyx.

# What reasons call the operations that may be part of one.
cdef dict OPERATIONS = {
    IBV_WR_SEND: 'SEND', IBV_WR_SEND_WITH_IMM: 'SEND_WITH_IMM', IBV_WR_RDMA_WRITE: 'WRITE',
    IBV_WR_RDMA_WRITE_WITH_IMM: 'WRITE_WITH_IMM', IBV_WR_RDMA_READ: 'READ',
}


cdef uint64_t ring_slots(uint64_t n) noexcept nogil:
    """The next power of two, so that a sequence number is turned into a slot by a mask."""
    cdef uint64_t slots = 1
    while slots < n:
        slots *= 2
    return slots


cdef int post_send_plainly(QPState *q, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil:
    """In a forked child: the default NIC's word. The journal is its parent's."""
    return ibv_post_send(q.pairs[0].qp, wr, bad) if q.pairs[0].qp != NULL else EINVAL


cdef int post_recv_plainly(QPState *q, ibv_recv_wr *wr, ibv_recv_wr **bad) noexcept nogil:
    return ibv_post_recv(q.pairs[0].qp, wr, bad) if q.pairs[0].qp != NULL else EINVAL


# The release whose post_send gives a window its new rkey has brought this property as well.
shared.tells_windows = hasattr(SendWR, 'rdma_rkey')

# Up to release 56 at least pyverbs never frees a WR's list of SGEs: a slip in the name of __dealloc__. 65 does.
cdef bint wrs_free_their_list = not any(name.endswith('__dealloc') for name in vars(SendWR))


cdef ibv_sge *sges_of_its_own(ibv_sge *sges, int number) noexcept:
    """The list of a WR that becomes a copy of another one: both would free the same."""
    cdef ibv_sge *copied
    if not wrs_free_their_list or sges == NULL:
        return sges
    copied = <ibv_sge *>malloc((number if number > 0 else 1) * sizeof(ibv_sge))
    if copied != NULL and number > 0:
        memcpy(copied, sges, number * sizeof(ibv_sge))
    return copied


cdef void copy_refused(SendWR bad_wr, ibv_send_wr *bad) noexcept:
    if bad_wr is not None and bad != NULL and bad != &bad_wr.send_wr:
        bad_wr.send_wr = bad[0]
        bad_wr.send_wr.sg_list = sges_of_its_own(bad.sg_list, bad.num_sge)


def at_work(cores) -> list:
    """Those of these QPCores that have send WRs outstanding; costs next to nothing for the others."""
    cdef QPCore core
    cdef list found = []
    for core in cores:
        if core.q.tail != core.q.head:
            found.append(core)
    return found


@cython.no_gc
@cython.final
cdef class QPCore:
    """One application QP: pair 0 is the QP that the application created, the others lie on the backups.

    :param send_cq, recv_cq: CQCores of the application's CQs.
    :param qp_ptr: address of the default ibv_qp.
    :param qp_num: its QP number, the one that the application sees in every WC.
    :param max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data: the application's capacities (WRs,
        WRs, SGEs, SGEs, bytes). The hardware QPs have room for 2 more WRs in each queue, the CQs for 4 more.
    :param sq_sig_all: whether every send WR produces a WC.
    :param keymap: lkeys of the default NIC, or None while nothing is shadowed.

    Errors of post are pyverbs'. The driver's primitives raise ValueError for a pair that does not exist and
    PyverbsUserError after close().
    """

    cdef QPState q
    cdef CQCore send_core
    cdef CQCore recv_core
    cdef KeyMap keymap
    cdef RemoteKeys _remote_keys
    cdef int made_in
    cdef size_t recv_bytes
    cdef object __weakref__

    def __cinit__(self, CQCore send_cq not None, CQCore recv_cq not None, qp_ptr, uint32_t qp_num,
                  uint32_t max_send_wr, uint32_t max_recv_wr, uint32_t max_send_sge, uint32_t max_recv_sge,
                  uint32_t max_inline_data=0, bint sq_sig_all=False, KeyMap keymap=None):
        cdef QPState *q = &self.q
        cdef uint32_t sges = max_send_sge if max_send_sge else 1
        memset(q, 0, sizeof(QPState))
        self.made_in = forks
        q.owner = <PyObject *>self
        q.shared = &shared
        self.send_core = send_cq
        self.recv_core = recv_cq
        self.keymap = keymap
        q.scq = &send_cq.c
        q.rcq = &recv_cq.c
        q.local_keys = &keymap.map if keymap is not None else NULL
        q.last_rkey = <uint64_t>-1
        q.qp_num = qp_num
        q.op_err_pair = -1
        q.send_open = 1
        q.recv_open = 1
        q.send_cap = max_send_wr
        q.recv_cap = max_recv_wr
        q.max_send_sge = max_send_sge
        q.max_recv_sge = max_recv_sge
        q.max_inline = max_inline_data
        q.sq_sig_all = sq_sig_all
        q.signal_every = max_send_wr // 2 if max_send_wr > 1 else 1
        q.send_mask = ring_slots(max_send_wr) - 1
        q.recv_mask = ring_slots(max_recv_wr) - 1
        q.send_stride = sizeof(SendRec) + sges * sizeof(ibv_sge) + ((max_inline_data + 7) & ~<uint32_t>7)
        q.recv_stride = sizeof(RecvRec) + max_recv_sge * sizeof(ibv_sge)
        self.recv_bytes = (q.recv_mask + 1) * q.recv_stride
        # Not zeroed: a record is written whole when it is appended, and only those between head and tail are read.
        q.sends = <char *>malloc((q.send_mask + 1) * q.send_stride)
        q.recvs = <char *>malloc(self.recv_bytes)
        q.scratch = <ibv_sge *>calloc(max(sges, max_recv_sge, 1), sizeof(ibv_sge))
        if q.sends == NULL or q.recvs == NULL or q.scratch == NULL:
            raise MemoryError
        self.attach(0, qp_ptr, qp_num)
        q.pairs[0].sending = 1
        if keymap is not None:
            join_siblings(q, &keymap.group.siblings)

    def __dealloc__(self):
        self.unlink()
        map_free(&self.q.seen_rkeys)
        free(self.q.sends)
        free(self.q.recvs)
        free(self.q.scratch)

    cdef void unlink(self) noexcept:
        """Out of the CQs' tables and the event ring: C only, for close and dealloc."""
        cdef int k
        if self.q.shared == NULL:
            return
        self.q.closed = 1
        self.q.heed |= HEED_CLOSED
        sample_break(self.q.sample)
        leave_siblings(&self.q)
        for k in range(MAX_PAIRS):
            self.unregister(k)
            self.q.pairs[k].qp = NULL
        forget_events(&shared, <PyObject *>self)

    cdef void unregister(self, int k) noexcept:
        cdef uint64_t key = (<uint64_t>k << 32) | self.q.pairs[k].qp_num
        cdef CQState *cqs[2]
        cdef MapSlot *slot
        cdef int i
        if not self.q.pairs[k].known:
            return
        self.q.pairs[k].known = 0
        cqs[0] = self.q.scq
        cqs[1] = self.q.rcq
        for i in range(2):
            slot = map_find(&cqs[i].qps, key)
            # The number may belong to a newer QP already.
            if slot != NULL and slot.value == <uintptr_t>&self.q:
                map_del(&cqs[i].qps, key)
            cqs[i].cached_key = map_tombstone()

    cdef Pair *pair(self, int k) except NULL:
        check_pair(k)
        if self.q.closed:
            raise PyverbsUserError('The QP is closed')
        return &self.q.pairs[k]

    cdef Pair *ready(self, int k) except NULL:
        cdef Pair *pair = self.pair(k)
        if pair.qp == NULL:
            raise ValueError(f'pair {k} has no QP')
        return pair

    def attach(self, int k, qp_ptr, uint32_t qp_num) -> None:
        """The hardware QP of pair k and its number; WCs for it are recognised from now on."""
        cdef Pair *pair = self.pair(k)
        cdef uint64_t key = (<uint64_t>k << 32) | qp_num
        if not qp_ptr:
            raise ValueError('a QP has an address')
        self.unregister(k)
        if not (map_set(&self.q.scq.qps, key, <uintptr_t>&self.q)
                and map_set(&self.q.rcq.qps, key, <uintptr_t>&self.q)):
            raise MemoryError
        self.q.scq.cached_key = map_tombstone()
        self.q.rcq.cached_key = map_tombstone()
        pair.qp = <ibv_qp *><uintptr_t>qp_ptr
        pair.qp_num = qp_num
        pair.known = 1

    def detach(self, int k) -> None:
        """The hardware QP of pair k is about to be destroyed: nothing is posted there any more.

        WCs that it left in the CQs are still recognised, until close() or another attach(k).
        """
        check_pair(k)
        self.q.pairs[k].qp = NULL

    def close(self) -> None:
        """Take what the hardware completed so far into the CQs' buffers, then forget every pair.

        To be called when the hardware QPs are destroyed (detach them first), so that no WC comes after.
        A second call does nothing.
        """
        cdef int k
        if self.q.closed:
            return
        for k in range(MAX_PAIRS):
            # A forked child may not even have the memory of its parent's queues (ibv_fork_init).
            if self.q.pairs[k].known and self.made_in == forks:
                cq_drain(self.q.scq, k)
                if self.q.rcq != self.q.scq:
                    cq_drain(self.q.rcq, k)
        self.unlink()

    # --- the application's posts

    def post_send(self, SendWR wr not None, SendWR bad_wr=None):
        """Post `wr` and the chain behind it; pyverbs' QP.post_send with its errors.

        Errors: PyverbsRDMAError with ENOMEM where the send queue is full, or what the provider refused with;
        WRs before the refused one stay posted, and it is copied into `bad_wr`.
        """
        cdef ibv_send_wr *bad = NULL
        cdef int rc
        if shared.attention and run_driver_inline() == INHERITED:
            rc = post_send_plainly(&self.q, &wr.send_wr, &bad)
        else:
            rc = qp_post_send(&self.q, &wr.send_wr, &bad)
        if rc:
            copy_refused(bad_wr, bad)
            if shared.attention:
                run_driver_inline()
            raise PyverbsRDMAError('Failed to post send', rc)
        if shared.attention:
            run_driver_inline()

    def post_recv(self, RecvWR wr not None, RecvWR bad_wr=None):
        """Post `wr` and the chain behind it; pyverbs' QP.post_recv with its errors, as in post_send."""
        cdef ibv_recv_wr *bad = NULL
        cdef int rc
        if shared.attention and run_driver_inline() == INHERITED:
            rc = post_recv_plainly(&self.q, &wr.recv_wr, &bad)
        else:
            rc = qp_post_recv(&self.q, &wr.recv_wr, &bad)
        if rc:
            if bad_wr is not None and bad != NULL and bad != &bad_wr.recv_wr:
                bad_wr.recv_wr = bad[0]
                bad_wr.recv_wr.sg_list = sges_of_its_own(bad.sg_list, bad.num_sge)
            if shared.attention:
                run_driver_inline()
            raise PyverbsRDMAError('Failed to post recv', rc)
        if shared.attention:
            run_driver_inline()

    # --- what it is

    @property
    def guarded(self) -> bool:
        """Whether errors that a failover can heal are withheld from the application."""
        return self.q.guarded != 0

    @guarded.setter
    def guarded(self, bint value):
        self.q.guarded = value
        if not value:
            give_withheld(&self.q)

    @property
    def aborted(self) -> bool:
        """Whether abort() gave every WR its error, and no reset_journal() followed."""
        return self.q.aborted != 0

    def app_touched(self, bint forgets=False) -> None:
        """The application itself moves the QP to ERR, RESET or SQD: what comes now is its own.

        But where a backup is, or was, in use: there the driver says when nothing is withheld any more, or ends it.

        forgets: it is RESET, which takes what nobody has polled: what was withheld is not given, nor are the flushes
        behind it. Where that is refused, abort() tells of it all.
        """
        cdef QPState *q = &self.q
        cdef bint itself = flushes_itself(q)
        if itself or self.made_in != forks:
            q.guarded = 0
        q.fence_wr_wanted = 0  # the MOVE is over: nobody would open the gate behind its fence
        q.forgets_sends = forgets and q.withheld_send_end > q.head
        q.forgets_recvs = forgets and q.withheld_recv_end > q.rhead
        if itself:
            give_withheld(q)

    @property
    def forgets(self) -> bool:
        """Whether what RESET is to take is told nobody: there is some, and neither reset_journal() nor abort() came."""
        return self.q.forgets_sends != 0 or self.q.forgets_recvs != 0

    @property
    def ending(self) -> bool:
        """Whether the QP has failed for good, and the rest of its WCs waits until every pair has stopped."""
        return self.q.ending != 0

    @property
    def is_plain(self) -> bool:
        """Whether all of it is at home and open: one hardware QP."""
        return is_plain(&self.q)

    @property
    def flushes_itself(self) -> bool:
        """Whether that is so, and no backup was ever the application's: what its NIC flushes, the application sees."""
        return flushes_itself(&self.q)

    @property
    def carried(self) -> set[int]:
        """The backups that were the application's since it last moved its QP to RESET, or that ended."""
        return {k for k in range(1, MAX_PAIRS) if self.q.pairs[k].carried}

    @property
    def ends_at_post(self) -> bool:
        """Whether `end_at_post` was called, and the QP has not ended since."""
        return self.q.ends_at_post != 0

    def end_at_post(self) -> None:
        """No send is handed over any more; EV_LATE_POST tells of the next. Receives go on."""
        self.pair(0)
        self.q.send_open = 0
        self.q.ends_at_post = 1

    def begin_end(self) -> None:
        """The QP has failed for good: nothing is handed over and no error shown from now on, until abort()."""
        self.pair(0)
        begin_end(&self.q)

    @property
    def remote_keys(self):
        """The RemoteKeys of the peer, None until paired. Setting it reports every rkey seen before (EV_NEW_RKEY)."""
        return self._remote_keys

    @remote_keys.setter
    def remote_keys(self, RemoteKeys keys):
        cdef size_t i
        cdef Map *seen = &self.q.seen_rkeys
        self._remote_keys = keys
        self.q.remote_keys = &keys.map if keys is not None else NULL
        if keys is None or seen.slots == NULL:
            return
        for i in range(seen.mask + 1):
            if seen.slots[i].key < map_tombstone():
                emit(&self.q, journal.EV_NEW_RKEY, -1, seen.slots[i].key, 0)

    @property
    def seen_rkeys(self) -> list:
        """Every rkey the application has used on this QP."""
        cdef size_t i
        cdef Map *seen = &self.q.seen_rkeys
        cdef list result = []
        if seen.slots != NULL:
            for i in range(seen.mask + 1):
                if seen.slots[i].key < map_tombstone():
                    result.append(seen.slots[i].key)
        return result

    def forget_rkey(self, rkey) -> None:
        """`rkey` (None: every one) counts as not seen: the next WR that names it reports it again."""
        cdef uint32_t gone
        if rkey is None:
            map_free(&self.q.seen_rkeys)
        else:
            gone = rkey
            map_del(&self.q.seen_rkeys, gone)
        self.q.last_rkey = <uint64_t>-1

    @property
    def peer_qp_num(self) -> int:
        """The peer's QP number that receives show wherever they came: the one that the application connected to."""
        return self.q.peer_qp_num

    @peer_qp_num.setter
    def peer_qp_num(self, uint32_t value):
        self.q.peer_qp_num = value

    @property
    def qp_num(self) -> int:
        """The default QP's number."""
        return self.q.qp_num

    @property
    def send_cq(self):
        """CQCore of the send CQ."""
        return self.send_core

    @property
    def recv_cq(self):
        """CQCore of the receive CQ."""
        return self.recv_core

    @property
    def send_pair(self) -> int:
        """The pair that carries sends."""
        return self.q.send_pair

    @property
    def recv_pair(self) -> int:
        """The pair that carries receives."""
        return self.q.recv_pair

    @property
    def send_is_open(self) -> bool:
        """Whether posted sends go to the hardware at once."""
        return self.q.send_open != 0

    @property
    def recv_is_open(self) -> bool:
        """Whether posted receives go to the hardware at once."""
        return self.q.recv_open != 0

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.q.closed != 0

    @property
    def outstanding(self):
        """Send and receive WRs that have not completed: (sends, receives)."""
        return self.q.tail - self.q.head, self.q.rtail - self.q.rhead

    @property
    def unwired(self):
        """Of those, the ones that are journaled only: (sends, receives)."""
        return self.q.tail - self.q.wired, self.q.rtail - self.q.rwired

    @property
    def completion_due(self) -> bool:
        """Whether a send that the hardware has will tell of its end."""
        return completion_due(&self.q)

    @property
    def journal_bytes(self) -> int:
        """Memory of both rings."""
        return (self.q.send_mask + 1) * self.q.send_stride + self.recv_bytes

    @property
    def posted(self) -> int:
        """Send WRs taken from the application so far."""
        return self.q.posted

    @property
    def stale(self) -> int:
        """WCs of this QP that came too late to mean anything."""
        return self.q.stale

    def counters(self):
        """Cumulative two-sided counters (rx, acked, wired): received over all pairs; sends completed; handed over."""
        return self.q.rx, self.q.acked_ts, self.q.wired_ts

    def oldest_post_age(self, int64_t now_ns) -> int:
        """For how long the oldest send WR at the hardware is known to wait at now_ns, in ns; 0 where none is.

        The data path does not read the clock: age counts from the first look here that found the same WR in front. So
        it is right to within the time between two looks, never too large.
        """
        if self.q.wired <= self.q.head:
            self.q.watch_ns = 0
            return 0
        if self.q.watch_ns == 0 or self.q.watch_seq != self.q.head:
            self.q.watch_seq = self.q.head
            self.q.watch_ns = now_ns
        return max(now_ns - self.q.watch_ns, 1)

    def first_error(self, int k):
        """The error that came first on pair k since its last reset, (status, vendor_err); one that says why goes
        before a flush. None without error."""
        cdef Pair *pair = self.pair(k)
        if pair.first_status == 0:
            return None
        return pair.first_status, pair.first_vendor_err

    def why_sends_fail(self, int k):
        """The same for a send that it has failed, (status, vendor_err): what came of receives is not told of that."""
        cdef Pair *pair = self.pair(k)
        why = why_sends_fail(pair)
        return (why.status, why.vendor_err) if pair.first_status else None

    @property
    def shown_error(self) -> int:
        """Status of the first error WC since RESET that was shown while the QP was not protected; 0: none."""
        return self.q.shown_error

    def failed_wr(self, int k):
        """Number of the send WR whose failure on pair k was its first since its last reset, or that was refused there.

        WRs are numbered from 0 as they are posted. None where none of them failed.
        """
        cdef Pair *pair = self.pair(k)
        return pair.failed_seq - 1 if pair.failed_seq else None

    @property
    def refused(self) -> int:
        """The errno with which the hardware refused what it was handed last (EV_POST_FAILED); 0: it took it."""
        return self.q.refused

    @property
    def oldest_wr(self) -> int:
        """Number of the oldest send WR that has not completed, or of the next one."""
        return self.q.head

    # --- gates

    def close_send(self) -> None:
        """From now on sends are journaled only."""
        self.q.send_open = 0
        sample_break(self.q.sample)

    def close_recv(self) -> None:
        """From now on receives are journaled only. The peer sends nothing before it hears that they are posted."""
        self.q.recv_open = 0
        self.q.recv_key_wait = self.q.recv_withheld = 0

    def open_send(self, int k) -> None:
        """Sends go to pair k, first those that wait in the journal."""
        cdef Pair *pair = self.ready(k)
        pair.watch |= WATCH_FIRST
        pair.sending = pair.carried = 1
        self.q.send_pair = k
        self.q.send_open = 1
        sample_break(self.q.sample)
        self.pump()

    def open_recv(self, int k) -> int:
        """Receives go to pair k, first those outstanding that it does not have yet.

        Returns 0; the provider's errno, or ENOKEY after EV_KEY_MISSING: then the gate stays closed and the call can
        be repeated. Nothing is to come before the peer is told of the end of this: sends need not wait for it.
        """
        cdef Pair *pair = self.ready(k)
        cdef int withheld = self.q.recv_withheld
        cdef int rc
        pair.watch |= WATCH_FIRST
        pair.carried = 1
        pair.recv_stale = 0
        if self.q.crossed < self.q.wired and is_answered_elsewhere(&self.q):
            self.q.crossed = self.q.wired  # an answer may have come that was no message; a SWITCH takes `wired` back
        receive_on(&self.q, k)
        self.q.recv_withheld = 0
        rc = self.post_waiting_recvs()
        if withheld and not self.q.ending:
            pump_send(&self.q)
        return ENOKEY if rc < 0 else rc

    cdef int post_waiting_recvs(self) except? -2:
        """Hand over the receives that wait in the journal. As pump_recv, and the gate is open if all are there."""
        cdef int rc = pump_recv(&self.q)
        self.q.recv_open = rc == 0
        self.q.recv_key_wait = rc < 0
        if rc == 0:
            self.q.recv_withheld = 0
        return rc

    def pump(self) -> None:
        """Hand over what waits in the journal, as far as room and keys go. After EV_KEY_MISSING: look again."""
        cdef int rc
        if self.q.ending:
            return
        self.q.key_wait = 0
        if self.q.recv_key_wait:
            rc = self.post_waiting_recvs()
            if rc > 0 and self.q.recv_withheld:
                emit(&self.q, journal.EV_POST_FAILED, self.q.recv_pair, rc, 1)
        pump_send(&self.q)

    def missing_keys(self, int k, recv_k=None):
        """Keys of outstanding WRs without translation: (local lkeys, remote rkeys).

        Those of sends to pair k, those of receives to pair recv_k (None: k as well). Pair 0 needs none.
        """
        cdef int to_recv = k if recv_k is None else recv_k
        cdef set local = set()
        cdef set remote = set()
        cdef uint64_t seq
        cdef SendRec *rec
        cdef RecvRec *recv
        cdef int i
        self.pair(k)
        self.pair(to_recv)
        for seq in range(self.q.head, self.q.tail if k else self.q.head):
            rec = send_rec(&self.q, seq)
            if rec.state & REC_PROVEN:
                continue
            if opcode_in(rec.wr.opcode, rdma_opcodes()) and has_payload(rec):
                self.lacks(self.q.remote_keys, rec.wr.wr.rdma.rkey, k, remote)
            elif opcode_in(rec.wr.opcode, atomic_opcodes()):
                self.lacks(self.q.remote_keys, rec.wr.wr.atomic.rkey, k, remote)
            if rec.app_flags & IBV_SEND_INLINE and opcode_in(rec.wr.opcode, payload_out_opcodes()):
                continue
            for i in range(rec.wr.num_sge):
                if rec.wr.sg_list[i].length:
                    self.lacks(self.q.local_keys, rec.wr.sg_list[i].lkey, k, local)
        for seq in range(self.q.rhead, self.q.rtail if to_recv else self.q.rhead):
            recv = recv_rec(&self.q, seq)
            for i in range(recv.wr.num_sge):
                if recv.wr.sg_list[i].length:
                    self.lacks(self.q.local_keys, recv.wr.sg_list[i].lkey, to_recv, local)
        return local, remote

    def last_use(self, rkey=None) -> int:
        """Number behind the last send WR that a backup's hardware has and that names `rkey` (None: any); 0: none."""
        cdef uint64_t seq = self.q.wired if self.q.send_pair else self.q.head
        cdef uint64_t wanted = rkey if rkey is not None else <uint64_t>-1
        cdef SendRec *rec
        cdef uint32_t named
        while seq > self.q.head:
            rec = send_rec(&self.q, seq - 1)
            if opcode_in(rec.wr.opcode, rdma_opcodes()):
                named = rec.wr.wr.rdma.rkey
            elif opcode_in(rec.wr.opcode, atomic_opcodes()):
                named = rec.wr.wr.atomic.rkey
            else:
                named = 0
            if not rec.state & REC_PROVEN and opcode_in(rec.wr.opcode, rdma_opcodes() | atomic_opcodes()) and (
                    rkey is None or named == wanted):
                return seq
            seq -= 1
        return 0

    cdef int lacks(self, Map *m, uint32_t key, int k, set into) except -1:
        if m == NULL or map_find(m, (<uint64_t>key << 8) | <uint64_t>k) == NULL:
            into.add(key)
        return 0

    # --- fence, SWITCH

    def post_marker(self, int k) -> int:
        """Behind everything on pair k, whose QP is in ERR: a signaled zero-length SEND and an empty receive.

        An acknowledged unsignaled tail never flushes, and an empty queue shows nothing; the markers' own flushes do.
        One that lies there still is not posted again: in ERR nothing behind it is ever executed, and there is no room.
        Returns 0 or the errno of the first refusal (the SEND's before the receive's).
        """
        cdef Pair *pair = self.ready(k)
        cdef int send_errno = 0
        cdef int recv_errno = 0
        if pair.sq_marker != journal.MARKER_POSTED:
            send_errno = self.post_own_send(k, KIND_MARKER)
            if send_errno == 0:
                pair.sq_marker = journal.MARKER_POSTED
        if pair.rq_marker != journal.MARKER_POSTED:
            recv_errno = self.post_own_recv(k, KIND_MARKER)
            if recv_errno == 0:
                pair.rq_marker = journal.MARKER_POSTED
        return send_errno if send_errno else recv_errno

    cdef int post_own_send(self, int k, int kind) except -1:
        cdef ibv_send_wr wr
        cdef ibv_send_wr *bad = NULL
        cdef Pair *pair = self.ready(k)
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = make_id(False, kind, pair.generation, self.q.tail)
        wr.opcode = <ibv_wr_opcode>IBV_WR_SEND
        wr.send_flags = IBV_SEND_SIGNALED
        return self.errno_of(ibv_post_send(pair.qp, &wr, &bad))

    cdef int post_own_recv(self, int k, int kind) except -1:
        cdef ibv_recv_wr wr
        cdef ibv_recv_wr *bad = NULL
        cdef Pair *pair = self.ready(k)
        cdef int rc
        memset(&wr, 0, sizeof(wr))
        wr.wr_id = make_id(True, kind, pair.generation, self.q.rtail)
        rc = self.errno_of(ibv_post_recv(pair.qp, &wr, &bad))
        if rc == 0:
            pair.rq_out += 1
        return rc

    cdef int errno_of(self, int rc) noexcept:
        """Some providers return -1 and set errno."""
        if rc >= 0:
            return rc
        return errno if rc == -1 and errno > 0 else -rc

    def begin_fence(self, int k) -> None:
        """Pair k is being fenced: error WCs from it are swallowed, and tell when its queues are quiet.

        What it showed before counts (EV_SQ_FENCED, EV_RQ_FENCED come at once then). Successes go on as usual.
        On a forgotten pair a RESET may be under way: the fence outlives the next pair_reset.
        """
        cdef Pair *pair = self.pair(k)
        pair.fence_again = pair.forgotten
        if pair.fencing:
            return
        pair.fencing = 1
        pair.sq_fenced = 0
        pair.rq_fenced = 0
        if pair.sq_error_seen:
            pair.sq_fenced = 1
            emit(&self.q, journal.EV_SQ_FENCED, k, 0, 0)
        if pair.rq_error_seen or pair.rq_out == 0:
            pair.rq_fenced = 1
            emit(&self.q, journal.EV_RQ_FENCED, k, 0, 0)

    def fence_state(self, int k):
        """(SQ fenced, RQ fenced) of pair k: no packet can change anything there any more."""
        cdef Pair *pair = self.pair(k)
        if pair.fencing and not pair.rq_fenced and pair.rq_out == 0:
            pair.rq_fenced = 1
            emit(&self.q, journal.EV_RQ_FENCED, k, 0, 0)
        return pair.sq_fenced != 0, pair.rq_fenced != 0

    def forget_pair(self, int k) -> None:
        """The fence of pair k is complete: whatever still comes from it is stale, until pair_reset(k)."""
        cdef Pair *pair = self.pair(k)
        pair.forgotten = 1
        pair.fence_again = 0

    def pair_reset(self, int k) -> None:
        """The QP of pair k was moved to RESET: its queues are empty, and a new generation begins.

        Not fenced, unless begin_fence(k) came after the forget_pair(k) that this RESET follows.
        """
        cdef Pair *pair = self.pair(k)
        cdef ibv_qp *qp = pair.qp
        cdef uint32_t qp_num = pair.qp_num
        cdef uint8_t known = pair.known
        cdef uint8_t generation = (pair.generation + 1) & 15
        cdef uint8_t fencing = pair.fence_again
        cdef uint8_t carried = pair.carried
        sample_break(self.q.sample)
        memset(pair, 0, sizeof(Pair))
        pair.qp = qp
        pair.qp_num = qp_num
        pair.known = known
        pair.generation = generation
        pair.fencing = fencing
        pair.carried = carried

    def unsafe_reason(self, k=None, bint cqes_lost=False, bint receipts_lost=False):
        """Why replaying what the hardware was given could do harm, or None.

        cqes_lost: a NIC died and may have kept completions to itself: what was to show one and did not may be complete.
        receipts_lost: the peer's NIC may have kept those of receives: its counter proves less than was executed.
        WRs never handed over, and those proven executed, are safe. With `k` only that pair's keys count; without,
        memory that cannot be shadowed counts when no attached backup can.
        """
        cdef uint64_t seq
        cdef SendRec *rec
        cdef Seen seen
        cdef bint behind = False
        cdef int i
        cdef int only = -1
        if k is not None:
            only = k
            check_pair(only)
        for seq in range(self.q.head, self.q.wired):
            rec = send_rec(&self.q, seq)
            if not replay.may_go_again(&self.q, seq, receipts_lost, &behind):
                continue
            if opcode_in(rec.wr.opcode, atomic_opcodes()):
                return 'an atomic is outstanding'
            if rec.wr.opcode == IBV_WR_BIND_MW:
                return 'a memory window bind is outstanding'
            if rec.wr.opcode == IBV_WR_LOCAL_INV:
                return 'a local invalidate is outstanding'
            if rec.wr.opcode == IBV_WR_SEND_WITH_INV:
                return 'a SEND with invalidate is outstanding'
            if opcode_in(rec.wr.opcode, rdma_opcodes()) and has_payload(rec):
                if self.unshadowable(self.q.remote_keys, rec.wr.wr.rdma.rkey, only):
                    return f"the peer cannot shadow the memory of rkey {rec.wr.wr.rdma.rkey:#x}"
            if rec.app_flags & IBV_SEND_INLINE and opcode_in(rec.wr.opcode, payload_out_opcodes()):
                continue
            for i in range(rec.wr.num_sge):
                if rec.wr.sg_list[i].length and self.unshadowable(self.q.local_keys, rec.wr.sg_list[i].lkey, only):
                    return f"the memory of lkey {rec.wr.sg_list[i].lkey:#x} cannot be shadowed"
        seen = replay_seen(&self.q, cqes_lost, receipts_lost)
        return self.what_was_seen(seen) if seen.how else None

    cdef str what_was_seen(self, Seen seen):
        """A replay that would be seen, in words."""
        if seen.how == replay.SEEN_NO_MEMORY:
            return 'no memory to find out whether a replay would be seen'
        first, second = self.describe(seen.first), self.describe(seen.second)
        if seen.how == replay.SEEN_OVERWRITTEN:
            return f'the {first} would be sent again from memory that the {second} may have overwritten'
        return f'the fenced {second} is outstanding behind the {first}, which may be complete'

    cdef str describe(self, uint64_t seq):
        """A send WR by its operation and the application's wr_id."""
        cdef SendRec *rec = send_rec(&self.q, seq)
        return f"{OPERATIONS.get(rec.wr.opcode, 'WR')} with wr_id {rec.app_wr_id}"

    cdef bint unshadowable(self, Map *m, uint32_t key, int only) noexcept:
        cdef MapSlot *slot
        cdef int k
        cdef bint none = False
        if m == NULL or only == 0:
            return False
        for k in range(1, MAX_PAIRS):
            if (only > 0 and k != only) or (only < 0 and self.q.pairs[k].qp == NULL):
                continue
            slot = map_find(m, (<uint64_t>key << 8) | <uint64_t>k)
            if slot == NULL or slot.value != key_none():
                return False
            none = True
        return none

    def trim(self, uint64_t peer_rx) -> None:
        """The peer has received `peer_rx` two-sided messages: what lies up to that one is executed.

        Those WRs get their success WCs in turn and are not sent again; READs among them are (a response may be
        lost), signaled, unless their NIC has shown that they were complete. The next open_send starts there.
        Where the peer has lost receipts of what was complete, the WRITEs behind are sent again too, in order.

        Raises ValueError unless acked <= peer_rx <= wired: messages were lost, or the peer speaks of another QP.
        """
        cdef QPState *q = &self.q
        cdef uint64_t seq, end, first, lost, told
        cdef SendRec *rec
        cdef bint fenced = False
        cdef bint covered
        if not q.acked_ts <= peer_rx <= q.wired_ts:
            raise ValueError(f'peer has received {peer_rx}, but {q.acked_ts} are acknowledged and {q.wired_ts} sent')
        end = q.head
        for seq in range(q.head, q.tail):
            rec = send_rec(q, seq)
            if rec.two_sided > peer_rx:
                break
            if rec.state & REC_TWO_SIDED:
                end = seq + 1
        if end < q.shown_end:
            end = q.shown_end
        told = end  # of what is behind it, no more is known than the last time
        if end < q.proven_end:
            end = q.proven_end
        # From here on a NIC of the peer's acknowledged messages, and died before they were received.
        lost = q.head
        while lost < q.shown_end:
            rec = send_rec(q, lost)
            if rec.state & REC_TWO_SIDED and rec.two_sided > peer_rx:
                break
            lost += 1
        first = end
        seq = end
        while seq > q.head:
            seq -= 1
            rec = send_rec(q, seq)
            # What is sent again before it would cover its data.
            covered = lost <= seq < q.shown_end or (seq >= told and not rec.state & REC_PROVEN)
            if rec.state & REC_TWO_SIDED and rec.two_sided > peer_rx:
                first = seq
            elif covered and rec.wr.opcode == IBV_WR_RDMA_WRITE:
                rec.state &= ~REC_PROVEN
                first = seq
            elif (fenced or seq < q.shown_end
                    or not (rec.wr.opcode == IBV_WR_RDMA_READ or opcode_in(rec.wr.opcode, atomic_opcodes()))):
                rec.state |= REC_PROVEN
            else:
                rec.state |= REC_HW_SIGNALED
                first = seq
            # A fenced WR was sent only when the responses of all READs before it were there: those are proven too.
            fenced = fenced or rec.app_flags & IBV_SEND_FENCE != 0
        q.proven_end = end
        if q.crossed < end:
            q.crossed = end  # executed, and answered perhaps, though something ahead is sent again
        if q.shown_end > lost:
            q.shown_end = lost
        q.wired = first
        q.wired_ts = peer_rx
        q.acked_ts = peer_rx
        q.withheld_send_end = 0
        q.withheld_recv_end = 0
        q.fence_wr_active = 0
        q.fence_wr_wanted = 0
        q.key_wait = 0
        q.blocked = 0
        after_retire(q)

    def abort(self, status=None, uint32_t vendor_err=0, bint still_ending=False) -> None:
        """Give up: every outstanding WR gets its error WC, and the application has its default QP back, bare.

        :param status: of the first send; None: the error recorded first on the pair that carried sends, else
            RETRY_EXC_ERR. All others get WR_FLUSH_ERR. Proven ones succeed.
        :param vendor_err: that goes with it.
        :param still_ending: the default QP may still work. What is posted from now on waits for the next abort().
        """
        cdef QPState *q = &self.q
        cdef int first
        cdef int k
        self.pair(0)
        sample_break(q.sample)
        why = self.why_sends_fail(q.send_pair) if status is None else (status, vendor_err)
        first, vendor_err = why or (IBV_WC_RETRY_EXC_ERR, vendor_err)
        abort_sends(q, q.tail, first, vendor_err)
        abort_recvs(q, q.rtail)
        q.refused = 0
        if still_ending:
            return
        q.guarded = q.ending = q.ends_at_post = 0
        q.forgets_sends = q.forgets_recvs = 0
        q.aborted = 1
        q.fence_wr_active = q.fence_wr_wanted = 0
        q.rx_target_set = 0
        q.key_wait = q.recv_key_wait = q.recv_withheld = q.blocked = 0
        q.send_pair = 0
        receive_on(q, 0)
        q.send_open = q.recv_open = 1
        for k in range(MAX_PAIRS):
            q.pairs[k].forgotten = k != 0
            q.pairs[k].fence_again = 0
            q.pairs[k].carried = 0  # all of them were stopped
        # Pair 0 is the application's again. What it still flushes lies below head and is recognised by that.
        q.pairs[0].fencing = 0
        q.pairs[0].recv_stale = 0
        q.pairs[0].recv_upto = q.rtail

    cdef void take_unpolled(self) noexcept:
        """What nobody has polled goes, as providers clean a CQ at RESET and when a QP is destroyed.

        A NIC that does not (soft-RoCE) keeps only the last of the WCs, where the others are in the buffer already:
        they would be successes with none before them.
        """
        cdef QPState *q = &self.q
        cdef int k
        for k in range(MAX_PAIRS):
            # The default pair's in any case: what is left of a forgotten life there would be nobody's, and be shown.
            if q.pairs[k].known and (k == 0 or not q.pairs[k].forgotten):
                cq_drain(q.scq, k)
                if q.rcq != q.scq:
                    cq_drain(q.rcq, k)
        cq_clean(q.scq, q.qp_num)
        cq_clean(q.rcq, q.qp_num)

    def destroyed(self) -> None:
        """The default QP is no more, the backups' are stopped or about to be: nothing is told of the QP from now on.

        A new one may have its number before the last backup is gone. Until then what comes from a backup counts for
        nothing, and what comes from the default NIC is not this QP's.
        """
        cdef int k
        if self.q.closed or self.made_in != forks or not self.q.pairs[0].known:
            return
        self.take_unpolled()
        self.unregister(0)
        for k in range(MAX_PAIRS):
            self.q.pairs[k].forgotten = 1

    def reset_journal(self) -> None:
        """The application moved its QP to RESET: what is outstanding is forgotten, and so is what nobody has polled."""
        cdef QPState *q = &self.q
        cdef int k
        self.pair(0)
        sample_break(q.sample)
        q.send_open = 0  # what waited for room is forgotten too: a QP in RESET would refuse it
        if self.made_in == forks:
            self.take_unpolled()
        q.head = q.wired = q.proven_end = q.shown_end = q.tail
        q.rhead = q.rwired = q.rtail
        q.posted_ts = q.wired_ts = q.acked_ts = q.rx = 0
        q.last_signaled = q.tail
        q.withheld_send_end = q.withheld_recv_end = 0
        q.op_err_pair = -1
        q.aborted = q.shown_error = q.sends_failed = q.refused = 0
        # The next peer's memory has keys of its own.
        map_free(&q.seen_rkeys)
        q.last_rkey = <uint64_t>-1
        q.fence_wr_active = q.fence_wr_wanted = 0
        q.rx_target_set = 0
        q.key_wait = q.recv_key_wait = q.recv_withheld = q.blocked = 0
        q.send_pair = 0
        receive_on(q, 0)
        q.send_open = q.recv_open = 1
        q.guarded = q.ending = q.ends_at_post = 0
        q.forgets_sends = q.forgets_recvs = 0
        q.pairs[0].fence_again = 0
        self.pair_reset(0)
        q.pairs[0].sending = 1
        for k in range(1, MAX_PAIRS):
            q.pairs[k].forgotten = 1
            q.pairs[k].carried = 0

    def forget_events(self) -> None:
        """What the driver has not heard of yet was about a life that is over."""
        forget_events(self.q.shared, self.q.owner)

    # --- MOVE

    def move_begin(self) -> str:
        """Look for the fence of a MOVE of the send direction (paper's WAIT_SIGNALED).

        Returns 'idle': nothing is outstanding, the gate is closed; 'posted': the last outstanding WR is signaled and
        is the fence, the gate is closed; 'wanted': the next post becomes the fence (signaled by us where the
        application does not), EV_FENCE_WR_POSTED tells, and the gate closes behind it.
        WRs withheld for a missing key are not waited for: they stay withheld until the next pair has the sends.
        """
        cdef QPState *q = &self.q
        cdef uint64_t end = send_end(q)
        self.pair(0)
        q.fence_wr_active = q.fence_wr_wanted = q.own_fence_write = 0
        q.fence_wr_upto = 0
        if end == q.head:
            q.send_open = 0
            return 'idle'
        if q.wired == end and send_rec(q, end - 1).state & REC_HW_SIGNALED:
            start_fence_wr(q, end - 1)
            return 'posted'
        q.fence_wr_wanted = 1
        if q.blocked:
            # Nothing may be posted behind what waits for the hardware's room: the last of that will do.
            send_rec(q, end - 1).state |= REC_HW_SIGNALED
            q.last_signaled = q.fence_wr_upto = end
        return 'wanted'

    def post_fence_write(self, uint64_t remote_addr, uint32_t rkey) -> int:
        """Our own fence, if one is wanted: a signaled zero-length WRITE behind all on the send pair; the gate closes.

        `rkey` is the peer's on that pair. Returns 0 (EV_FENCE_WR_DONE follows); the provider's errno, or EAGAIN where
        there is a fence already, a former one is still on its way, or WRs wait in the journal for something else than
        a key: then EV_FENCE_WR_POSTED tells of it.
        """
        cdef QPState *q = &self.q
        self.ready(q.send_pair)
        self.pump()
        if not q.fence_wr_wanted:
            return EAGAIN
        q.own_fence_write_addr = remote_addr
        q.own_fence_write_rkey = rkey
        if q.wired != send_end(q) or q.pairs[q.send_pair].own_fence_write:
            q.own_fence_write = 1
            return EAGAIN
        return post_own_fence_write(q)

    def move_cancel(self) -> None:
        """No MOVE after all: the gate opens on the pair that carries sends now."""
        self.q.fence_wr_active = self.q.fence_wr_wanted = 0
        self.pair(0)
        if not self.q.ending:
            self.q.send_open = 1
            self.pump()

    def set_rx_target(self, n) -> None:
        """Report EV_RX_REACHED when `n` messages have been received (at once if so); None: no more."""
        self.q.rx_target_set = 0
        if n is None:
            return
        self.q.rx_target = n
        if self.q.rx >= self.q.rx_target:
            emit(&self.q, journal.EV_RX_REACHED, self.q.recv_pair, <int64_t>self.q.rx, 0)
        else:
            self.q.rx_target_set = 1

    def move_recv(self, int k) -> int:
        """Receives go to pair k from now on; those left in the old pair are stale. Returns as open_recv."""
        self.ready(k)
        if k != self.q.recv_pair:
            self.q.pairs[self.q.recv_pair].recv_stale = 1
        return self.open_recv(k)

    # --- ARM

    def post_arm_recv(self, int k) -> int:
        """The receive that the peer's ARM dummy lands in: no SGEs. Returns the errno."""
        return self.post_own_recv(k, KIND_ARM)

    def post_arm_send(self, int k) -> int:
        """Our ARM dummy: a signaled zero-length SEND. Returns the errno."""
        return self.post_own_send(k, KIND_ARM)


def destroy_qp(destroy, QPCore core, list cqs, uint32_t qp_num):
    """destroy(), pyverbs' QP.close, and take what nobody has polled before another thread can have the number.

    core: the QP's, or None; cqs: its CQs. The caller holds all that destroy() might drop the last reference of, which
    would run a program's code between the two. Raises what destroy() does.
    """
    destroy()
    if core is not None:
        core.destroyed()
    else:
        forget_unpolled(cqs, qp_num)


def forget_unpolled(list cqs, uint32_t qp_num):
    """A QP without a journal was reset or destroyed: CQCore.forget_qp on those of its CQs that have one."""
    for cq in cqs:
        core = getattr(cq, '_core', None)
        if isinstance(core, CQCore):
            (<CQCore>core).forget_qp(qp_num)
