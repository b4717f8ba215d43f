# SPDX-License-Identifier: BSD-3-Clause
"""The C records of the data path: journal rings, pairs, CQs, the event ring, and what retires or hands over a WR.

Everything here is plain C memory, and everything runs under the GIL, which is the data path's lock. One QPState
belongs to one QPCore, one CQState to one CQCore; pointers between them are dropped when either closes.

Life of a send WR: appended at `tail`; handed to the hardware of `send_pair` at `wired`; retired at `head`.
head <= wired <= tail, all three 64-bit and growing for ever; wired - head <= send_cap, tail - head <= 2 * send_cap.
A record is addressed by its sequence number, and that
number is what the hardware carries as wr_id:

    bit 63 receive | bits 62..60 kind | bits 59..56 generation of the pair | bits 55..0 sequence number
"""

from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, EINVAL, EIO, ENODEV, ENOMEM, ENXIO, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport write as posix_write

from shiftverbs.native.core.map cimport Map, MapSlot, map_find, map_free, map_set
from shiftverbs.native.verbs cimport (
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_BIND_MW, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_LOCAL_INV,
    IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_RECV, IBV_WC_SEND, IBV_WC_SUCCESS, IBV_WC_TSO, IBV_WC_WR_FLUSH_ERR,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV,
    IBV_WR_TSO, ibv_comp_channel, ibv_cq, ibv_post_recv, ibv_post_send, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge,
    ibv_wc, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode,
)


cdef enum:
    MAX_PAIRS = 16        # the default NIC and up to 15 backups
    EVENT_SLOTS = 4096    # a power of two
    SEEN_RKEYS_MAX = 65536

cdef enum:
    KIND_APP = 0
    KIND_MARKER = 1
    KIND_ARM = 2
    KIND_FENCE = 3

cdef enum:
    EV_ERROR = 1
    EV_APP_ERROR = 2
    EV_POST_FAILED = 3
    EV_SQ_FENCED = 4
    EV_RQ_FENCED = 5
    EV_ARM_WC = 6
    EV_FENCE_WR_POSTED = 7
    EV_FENCE_WR_DONE = 8
    EV_RX_REACHED = 9
    EV_NEW_RKEY = 10
    EV_KEY_MISSING = 11
    EV_FIRST_WC = 12
    EV_LATE_POST = 13

cdef enum:
    REC_SIGNALED = 1      # the application gets a WC for it
    REC_HW_SIGNALED = 2   # the hardware was asked for one
    REC_TWO_SIDED = 4     # consumes a receive of the peer
    REC_PROVEN = 8        # executed, as the peer's counter says: not handed to hardware again
    REC_DONE = 16         # a receive completed out of turn

cdef enum:
    MARKER_NONE = 0
    MARKER_POSTED = 1
    MARKER_SEEN = 2

cdef enum:
    HEED_CLOSED = 1       # bits of QPState.heed: nothing is taken any more
    HEED_SAMPLE = 2       # the next post begins a sample

cdef enum:
    HEED_FAILED = 1       # bits of CQState.heed: `failed` is to be told
    HEED_SAMPLED = 2      # a sample waits for a completion here: when it is looked at matters

cdef enum:
    WATCH_FIRST = 1       # bits of Pair.watch: the first completion here is to be told of
    WATCH_SAMPLE = 2      # a sample ends here

cdef enum:
    SAMPLE_NONE = 0
    SAMPLE_WANTED = 1     # it begins with the next post
    SAMPLE_UNDER_WAY = 2
    SAMPLE_ENDED = 3      # or was broken off; it waits to be taken

cdef enum:
    KEY_REMOTE = 1        # bits of EV_KEY_MISSING's b
    KEY_UNSHADOWABLE = 2


ctypedef struct Event:
    PyObject *owner       # the QPCore; NULL once it is closed
    int kind
    int k
    int64_t a
    int64_t b
    int64_t t_ns


ctypedef struct Shared:
    int attention
    int overflowed
    int tells_windows      # post_send puts a bound window's new rkey into the window, as pyverbs does since 65
    uint32_t first
    uint32_t count
    uint64_t dropped
    PathSample *ended      # samples that wait to be taken, oldest first
    PathSample *ended_last
    int64_t (*clock)() noexcept nogil   # of samples; NULL: CLOCK_MONOTONIC
    int (*heed_post)(QPState *q, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil   # where a post has more to do
    Event events[EVENT_SLOTS]


ctypedef struct ChannelState:
    PyObject *owner
    int epoll_fd
    int event_fd
    ibv_comp_channel *hw[MAX_PAIRS]
    Map cqs               # address of a hardware CQ -> CQState
    CQState *pending      # CQs with a synthetic event, oldest first
    CQState *pending_last


ctypedef struct CQState:
    PyObject *owner
    Shared *shared
    ChannelState *channel
    CQState *next_pending
    ibv_cq *hw[MAX_PAIRS]
    int active[MAX_PAIRS]  # flags: the application polls these
    int order[MAX_PAIRS]   # ... and their numbers, the first n_active
    int n_active
    Map qps                # pair << 32 | qp_num -> QPState
    uint64_t cached_key
    QPState *cached
    ibv_wc *buffer         # ring of WCs that wait for the application
    uint32_t slots         # a power of two, or 0
    uint32_t first
    uint32_t count
    int armed
    uint32_t rearmed       # how often armed again before the former arming's event was taken
    int solicited_only
    int quiet              # > 0: what enters the buffer needs no synthetic event
    int is_pending         # a synthetic event waits: 1 of the last arming, 2 of one before
    int failed             # errno of a lost WC (no memory for the buffer)
    int heed               # HEED_*: what a poll has to do beside polling
    uint32_t sampled       # how many samples wait for a completion here
    int64_t looked_ns      # when a poll last ended, while there were any
    int in_hand            # polls that are under way
    uint64_t changes       # cq_clean calls so far, and changes of the hardware CQs that are polled
    Map cleaned            # of the former amid polls: qp_num -> which of the changes was its last
    uint64_t polled
    uint64_t swallowed


ctypedef struct KeptError:
    uint64_t seq           # 1 + the number of the WR; 0: none
    int status
    uint32_t vendor_err


ctypedef struct Pair:
    ibv_qp *qp
    uint32_t qp_num
    uint8_t known          # registered with the CQs
    uint8_t generation
    uint8_t fencing
    uint8_t sq_fenced
    uint8_t rq_fenced
    uint8_t forgotten
    uint8_t fence_again    # the fence began while a RESET was under way: it goes on behind that
    uint8_t recv_stale     # receives went elsewhere; what lies here is not used any more
    uint8_t sending        # sends were handed over since the last RESET, or may have been
    uint8_t carried        # it was the application's in this life of its QP, whatever was reset since
    uint8_t error_raised
    uint8_t sq_error_seen
    uint8_t rq_error_seen
    uint8_t sq_marker
    uint8_t rq_marker
    uint8_t own_fence_write      # a fence WRITE of ours is on its way here: one at a time, there is no room for more
    uint8_t watch          # WATCH_*: what a completion here has to do beside completing
    int first_status
    uint32_t first_vendor_err
    int send_status        # the same of its send queue alone
    uint32_t send_vendor_err
    uint64_t failed_seq    # 1 + the number of the send WR that failed first, or was refused; 0: none
    uint32_t rq_out        # receives in the hardware's queue, our own included
    uint64_t recv_upto     # receives below this number were handed over in this generation


ctypedef struct SendRec:
    ibv_send_wr wr         # as handed to pair 0: our wr_id, our SGEs
    uint64_t app_wr_id
    uint64_t two_sided     # two-sided WRs since the start, this one included
    uint32_t app_flags
    uint32_t state


ctypedef struct RecvRec:
    ibv_recv_wr wr
    uint64_t app_wr_id
    uint64_t state
    uint64_t sends_before   # number of the first send WR that was posted after it


# What was outstanding on one pair of some QPs when a post was made, and how long it takes until that is complete.
ctypedef struct PathSample:
    PyObject *owner
    Shared *shared
    PathSample *next_ended
    QPState **members
    int n_members
    int k                  # the pair
    int state              # SAMPLE_*
    int left               # members that have some of it outstanding
    uint64_t bytes         # 0 messages: it was broken off
    uint64_t messages
    uint64_t begun_bytes   # of the oldest WRs, which may have been under way
    int64_t began_ns
    int64_t ended_ns
    int64_t unseen_ns


# QPs of one default NIC that are open, on whatever Contexts of it.
ctypedef struct Siblings:
    QPState *first
    uint32_t receiving[MAX_PAIRS]   # how many of them receive on each pair


ctypedef struct QPState:
    PyObject *owner
    Shared *shared
    CQState *scq
    CQState *rcq
    Map *local_keys        # lkey << 8 | pair -> shadow lkey | KEY_NONE
    Siblings *siblings     # the QPs of the same default NIC, this one among them
    QPState *next_sibling
    QPState *prev_sibling
    Map *remote_keys       # rkey << 8 | pair -> shadow rkey | KEY_NONE; NULL until paired
    Map seen_rkeys
    uint64_t last_rkey
    uint32_t qp_num
    uint32_t peer_qp_num   # as the application gave it
    int guarded
    int ending             # nothing is handed over any more, and no error shown, until abort() gives the rest back
    KeptError kept_send    # it was the first error of its queue: what is ahead of it was complete
    KeptError kept_recv
    int ends_at_post       # sends are withheld for good, and the first of them is told of: it ends the QP
    int closed
    int heed               # HEED_*: what a post has to do beside posting
    PathSample *sample     # this QP is a member of it
    uint64_t sample_end    # sends below it are in it
    Pair pairs[MAX_PAIRS]

    char *sends
    size_t send_stride
    uint64_t send_mask
    uint64_t send_cap
    uint32_t max_send_sge
    uint32_t max_inline
    int sq_sig_all
    uint64_t signal_every
    uint64_t last_signaled  # sequence number behind the last hardware-signaled WR
    uint64_t head
    uint64_t wired
    uint64_t tail
    uint64_t proven_end     # proven records lie below this number only
    uint64_t shown_end      # all below it was complete when a NIC showed its first error, with a WC or without
    uint64_t posted_ts      # two-sided WRs appended
    uint64_t wired_ts       # handed to hardware
    uint64_t acked_ts       # completed
    uint64_t crossed        # sends below it were handed over when something came over another NIC than theirs
    uint64_t answered       # crossed, when the queue was last full: these take no room of the application's
    int send_pair
    int send_open
    int refused             # errno of a post that closed the gate, until the next one
    int one_by_one          # a post whose WRs are no chain, or not to be handed over as one
    int blocked             # the hardware had no room: goes on when something completes
    int key_wait            # a translation is missing: goes on when the driver says so

    char *recvs
    size_t recv_stride
    uint64_t recv_mask
    uint64_t recv_cap
    uint32_t max_recv_sge
    uint64_t rhead
    uint64_t rwired
    uint64_t rtail
    uint64_t rx
    int recv_pair
    int recv_open
    int recv_key_wait
    int recv_withheld       # ... for a receive that the peer may be told of: sends from send_limit on wait for it
    uint64_t send_limit

    uint64_t withheld_send_end
    uint64_t withheld_recv_end
    int forgets_sends       # errors of them are withheld, and RESET is on the way: no more is told of any
    int forgets_recvs       # ... of receives
    uint64_t op_err_seq
    int op_err_pair
    int fence_wr_wanted
    uint64_t fence_wr_upto     # while a fence is wanted and its WR waits: nothing from here on is handed over before it
    int own_fence_write           # our own WRITE is to be posted as the fence, as soon as nothing waits ahead of it
    uint64_t own_fence_write_addr
    uint32_t own_fence_write_rkey
    int fence_wr_active
    uint64_t fence_wr_seq
    int rx_target_set
    uint64_t rx_target
    uint64_t watch_seq
    int64_t watch_ns
    ibv_sge *scratch
    uint64_t posted
    uint64_t stale
    int aborted            # every WR got its error, and the application has not begun anew
    int shown_error        # status of the first error WC that was shown to the application; 0: none
    bint sends_failed      # one of a send was: each send behind it has a flush, whatever was executed


# --- small things ---------------------------------------------------------------------------------------------

cdef inline uint64_t key_none() noexcept nogil:
    """Stands for "cannot be shadowed" in the key maps."""
    return <uint64_t>1 << 32


cdef inline uint64_t seq_mask() noexcept nogil:
    return (<uint64_t>1 << 56) - 1


cdef inline uint64_t make_id(bint recv, int kind, int generation, uint64_t seq) noexcept nogil:
    return ((<uint64_t>recv << 63) | (<uint64_t>kind << 60) | (<uint64_t>(generation & 15) << 56)
            | (seq & seq_mask()))


cdef inline int64_t now_ns() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


cdef inline bint opcode_in(int opcode, unsigned int mask) noexcept nogil:
    return 0 <= opcode < 32 and (mask >> opcode) & 1 != 0


cdef inline unsigned int two_sided_opcodes() noexcept nogil:
    return ((1u << IBV_WR_SEND) | (1u << IBV_WR_SEND_WITH_IMM) | (1u << IBV_WR_RDMA_WRITE_WITH_IMM)
            | (1u << IBV_WR_SEND_WITH_INV))


cdef inline unsigned int payload_out_opcodes() noexcept nogil:
    """Those whose SGEs are read, so that they may be inline."""
    return two_sided_opcodes() | (1u << IBV_WR_RDMA_WRITE)


cdef inline unsigned int atomic_opcodes() noexcept nogil:
    return (1u << IBV_WR_ATOMIC_CMP_AND_SWP) | (1u << IBV_WR_ATOMIC_FETCH_AND_ADD)


cdef inline unsigned int rdma_opcodes() noexcept nogil:
    """Those with an rkey in wr.rdma."""
    return (1u << IBV_WR_RDMA_WRITE) | (1u << IBV_WR_RDMA_WRITE_WITH_IMM) | (1u << IBV_WR_RDMA_READ)


cdef inline unsigned int known_opcodes() noexcept nogil:
    return (rdma_opcodes() | two_sided_opcodes() | atomic_opcodes() | (1u << IBV_WR_LOCAL_INV)
            | (1u << IBV_WR_BIND_MW))


cdef inline SendRec *send_rec(const QPState *q, uint64_t seq) noexcept nogil:
    return <SendRec *>(q.sends + <size_t>(seq & q.send_mask) * q.send_stride)


cdef inline RecvRec *recv_rec(const QPState *q, uint64_t seq) noexcept nogil:
    return <RecvRec *>(q.recvs + <size_t>(seq & q.recv_mask) * q.recv_stride)


cdef inline ibv_sge *send_sges(SendRec *rec) noexcept nogil:
    return <ibv_sge *>(rec + 1)


cdef inline char *inline_bytes(const QPState *q, SendRec *rec) noexcept nogil:
    return <char *>(send_sges(rec) + (q.max_send_sge if q.max_send_sge else 1))


cdef inline ibv_sge *recv_sges(RecvRec *rec) noexcept nogil:
    return <ibv_sge *>(rec + 1)


# --- events ---------------------------------------------------------------------------------------------------

cdef inline void emit(QPState *q, int kind, int k, int64_t a, int64_t b) noexcept nogil:
    """Queue an event for the driver and raise attention. A full ring says so and the driver looks at everything."""
    cdef Shared *s = q.shared
    cdef Event *e
    if s.count == EVENT_SLOTS:
        s.overflowed = 1
        s.dropped += 1
    else:
        e = &s.events[(s.first + s.count) & (EVENT_SLOTS - 1)]
        e.owner = q.owner
        e.kind = kind
        e.k = k
        e.a = a
        e.b = b
        e.t_ns = now_ns()
        s.count += 1
    s.attention = 1


cdef inline void forget_events(Shared *s, PyObject *owner) noexcept nogil:
    """Events hold no reference to their QPCore: called before it goes."""
    cdef uint32_t i
    cdef Event *e
    for i in range(s.count):
        e = &s.events[(s.first + i) & (EVENT_SLOTS - 1)]
        if e.owner == owner:
            e.owner = NULL


# --- the WC buffer of a CQ -----------------------------------------------------------------------------------

cdef inline void cq_signal(CQState *c) noexcept nogil:
    """A WC waits in the buffer of an armed CQ: make its channel readable, once, as hardware does."""
    cdef ChannelState *ch = c.channel
    cdef uint64_t one = 1
    if not c.armed or ch == NULL:
        return
    c.armed = 0
    if c.is_pending:
        return
    c.is_pending = 1
    c.next_pending = NULL
    if ch.pending_last != NULL:
        ch.pending_last.next_pending = c
    else:
        ch.pending = c
    ch.pending_last = c
    # An eventfd takes 8 bytes or fails with EAGAIN when it is readable anyway.
    posix_write(ch.event_fd, &one, sizeof(one))


cdef inline bint cq_reserve(CQState *c, uint32_t more) noexcept nogil:
    """Room for `more` WCs. False: out of memory, and the buffer as it was."""
    cdef uint32_t slots = c.slots if c.slots else 64
    cdef uint32_t i
    cdef ibv_wc *buffer
    while slots < c.count + more:
        slots *= 2
    if slots == c.slots:
        return True
    buffer = <ibv_wc *>malloc(slots * sizeof(ibv_wc))
    if buffer == NULL:
        return False
    for i in range(c.count):
        buffer[i] = c.buffer[(c.first + i) & (c.slots - 1)]
    free(c.buffer)
    c.buffer = buffer
    c.slots = slots
    c.first = 0
    return True


cdef inline void cq_pop(CQState *c, ibv_wc *wc) noexcept nogil:
    """The oldest WC in the buffer, which is not empty, goes to the application."""
    wc[0] = c.buffer[c.first]
    c.first = (c.first + 1) & (c.slots - 1)
    c.count -= 1


cdef inline void cq_push(CQState *c, const ibv_wc *wc) noexcept nogil:
    if c.count == c.slots and not cq_reserve(c, 1):
        c.failed = ENOMEM
        c.heed |= HEED_FAILED
        return
    c.buffer[(c.first + c.count) & (c.slots - 1)] = wc[0]
    c.count += 1
    if not c.quiet:
        cq_signal(c)


cdef inline void cq_unpop(CQState *c, const ibv_wc *wc) noexcept nogil:
    """It is the oldest WC in the buffer again; there is room."""
    c.first = (c.first - 1) & (c.slots - 1)
    c.buffer[c.first] = wc[0]
    c.count += 1


cdef inline void cq_clean(CQState *c, uint32_t qp_num) noexcept nogil:
    """Take a QP's WCs out of the buffer, as providers take them out of a CQ; the others stay in their order."""
    cdef uint32_t i
    cdef uint32_t kept = 0
    c.changes += 1
    if not c.in_hand:
        map_free(&c.cleaned)  # what is in it was for polls that have ended
    else:
        map_set(&c.cleaned, qp_num, c.changes)
    for i in range(c.count):
        if c.buffer[(c.first + i) & (c.slots - 1)].qp_num != qp_num:
            c.buffer[(c.first + kept) & (c.slots - 1)] = c.buffer[(c.first + i) & (c.slots - 1)]
            kept += 1
    c.count = kept


cdef inline ibv_wc_opcode send_wc_opcode(int opcode) noexcept nogil:
    if opcode == IBV_WR_RDMA_WRITE or opcode == IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE
    if opcode == IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ
    if opcode == IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP
    if opcode == IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD
    if opcode == IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV
    if opcode == IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW
    if opcode == IBV_WR_TSO:
        return IBV_WC_TSO
    return IBV_WC_SEND


cdef inline void push_send_wc(QPState *q, SendRec *rec, int status, uint32_t vendor_err) noexcept nogil:
    """A WC that no hardware wrote, for one send record."""
    cdef ibv_wc wc
    cdef int i
    memset(&wc, 0, sizeof(wc))
    wc.wr_id = rec.app_wr_id
    wc.status = <ibv_wc_status>status
    wc.opcode = send_wc_opcode(rec.wr.opcode)
    wc.vendor_err = vendor_err
    wc.qp_num = q.qp_num
    if status == IBV_WC_SUCCESS:
        for i in range(rec.wr.num_sge):
            wc.byte_len += rec.wr.sg_list[i].length
    cq_push(q.scq, &wc)


cdef inline void push_recv_error(QPState *q, RecvRec *rec, int status, uint32_t vendor_err) noexcept nogil:
    cdef ibv_wc wc
    memset(&wc, 0, sizeof(wc))
    wc.wr_id = rec.app_wr_id
    wc.status = <ibv_wc_status>status
    wc.opcode = IBV_WC_RECV
    wc.vendor_err = vendor_err
    wc.qp_num = q.qp_num
    cq_push(q.rcq, &wc)


# --- room ----------------------------------------------------------------------------------------------------

cdef inline bint has_room(const QPState *q, uint64_t n) noexcept nogil:
    """Whether n more send WRs are within what the application asked room for."""
    return q.tail - q.head + n <= q.send_cap or q.tail - q.answered + n <= q.send_cap


cdef inline bint double_sends(QPState *q) noexcept nogil:
    """Twice the records, each at its new place with what points into it. False: out of memory, nothing changed."""
    cdef uint64_t mask = 2 * q.send_mask + 1
    cdef char *sends = <char *>malloc(<size_t>(mask + 1) * q.send_stride)
    cdef uint64_t seq = q.head
    cdef SendRec *old
    cdef SendRec *rec
    if sends == NULL:
        return False
    while seq < q.tail:
        old = send_rec(q, seq)
        rec = <SendRec *>(sends + <size_t>(seq & mask) * q.send_stride)
        memcpy(rec, old, q.send_stride)
        rec.wr.next = NULL
        rec.wr.sg_list = send_sges(rec)
        if rec.app_flags & IBV_SEND_INLINE and opcode_in(rec.wr.opcode, payload_out_opcodes()):
            send_sges(rec)[0].addr = <uint64_t><size_t>inline_bytes(q, rec)
        seq += 1
    free(q.sends)
    q.sends = sends
    q.send_mask = mask
    return True


cdef inline bint is_answered_elsewhere(const QPState *q) noexcept nogil:
    """Whether an answer may come over another NIC than the sends go to: by this QP, or by another of the program's."""
    cdef int k
    if q.recv_pair != q.send_pair:
        return True
    if q.siblings != NULL:
        for k in range(MAX_PAIRS):
            if k != q.send_pair and q.siblings.receiving[k]:
                return True
    return False


cdef inline void note_answers(Siblings *siblings) noexcept nogil:
    """A QP is about to receive elsewhere, or to go: until now it may have had answers to what others sent."""
    cdef QPState *q = siblings.first
    while q != NULL:
        if q.crossed < q.wired and is_answered_elsewhere(q):
            q.crossed = q.wired
        q = q.next_sibling


cdef inline void receive_on(QPState *q, int k) noexcept nogil:
    """The QP receives on pair k from now on."""
    if q.siblings != NULL and k != q.recv_pair:
        note_answers(q.siblings)
        q.siblings.receiving[q.recv_pair] -= 1
        q.siblings.receiving[k] += 1
    q.recv_pair = k


cdef inline void join_siblings(QPState *q, Siblings *siblings) noexcept nogil:
    """The QP is one of these from now on, until `leave_siblings`."""
    q.siblings = siblings
    q.next_sibling = siblings.first
    if siblings.first != NULL:
        siblings.first.prev_sibling = q
    siblings.first = q
    siblings.receiving[q.recv_pair] += 1


cdef inline void leave_siblings(QPState *q) noexcept nogil:
    """The QP is closed. May be repeated."""
    if q.siblings == NULL:
        return
    note_answers(q.siblings)
    q.siblings.receiving[q.recv_pair] -= 1
    if q.next_sibling != NULL:
        q.next_sibling.prev_sibling = q.prev_sibling
    if q.prev_sibling != NULL:
        q.prev_sibling.next_sibling = q.next_sibling
    else:
        q.siblings.first = q.next_sibling
    q.siblings = NULL
    q.next_sibling = q.prev_sibling = NULL


cdef inline bint discount_answered(QPState *q) noexcept nogil:
    """The send queue is full: leave out what the peer may have answered. Whether that changed anything.

    On one NIC an ACK comes before the answer of the peer's application: who got the answer finds the send complete.
    While two directions, or two QPs, use different NICs the answer may overtake it, and who goes by the answer
    posts more than there is room for, as it sees it no more than ever. A WR can be answered only if the hardware has
    it, and that takes send_cap at most: twice as many records do.
    """
    if q.crossed < q.wired and is_answered_elsewhere(q):
        q.crossed = q.wired
    if q.crossed <= q.head or q.crossed <= q.answered:
        return False
    if q.send_mask + 1 < 2 * q.send_cap and not double_sends(q):
        return False
    q.answered = q.crossed
    return True


# --- appending -----------------------------------------------------------------------------------------------

cdef inline void note_rkey(QPState *q, uint32_t rkey) noexcept nogil:
    """Remember an rkey seen for the first time; report it where the QP is being paired, to be resolved ahead."""
    q.last_rkey = rkey
    if map_find(&q.seen_rkeys, rkey) != NULL:
        return
    if q.seen_rkeys.live >= SEEN_RKEYS_MAX:
        map_free(&q.seen_rkeys)  # those still in use are reported once more
    map_set(&q.seen_rkeys, rkey, 0)
    if q.remote_keys != NULL:
        emit(q, EV_NEW_RKEY, -1, rkey, 0)


cdef inline int copy_inline(QPState *q, SendRec *rec, const ibv_send_wr *wr) noexcept nogil:
    """The application may reuse inline buffers when post returns, so the journal keeps the bytes themselves."""
    cdef char *to = inline_bytes(q, rec)
    cdef uint64_t total = 0
    cdef int i
    for i in range(wr.num_sge):
        if total + wr.sg_list[i].length > q.max_inline:
            return EINVAL
        memcpy(to + total, <void *><size_t>wr.sg_list[i].addr, wr.sg_list[i].length)
        total += wr.sg_list[i].length
    rec.wr.num_sge = 1 if total else 0
    send_sges(rec)[0].addr = <uint64_t><size_t>to
    send_sges(rec)[0].length = <uint32_t>total
    send_sges(rec)[0].lkey = 0
    return 0


cdef inline void tell_window(QPState *q, SendRec *rec) noexcept nogil:
    """A window shows its new rkey from the post on. The one before stands where a bind has no address of its own."""
    if q.shared.tells_windows and rec.wr.bind_mw.mw != NULL:
        q.one_by_one = 1
        rec.wr.wr.rdma.remote_addr = rec.wr.bind_mw.mw.rkey
        rec.wr.bind_mw.mw.rkey = rec.wr.bind_mw.rkey


cdef inline int post_bind(QPState *q, ibv_qp *qp, SendRec *rec, ibv_send_wr *wr, ibv_send_wr **bad) noexcept nogil:
    """The NIC is told of the rkey that the window had before: providers read it there."""
    cdef int rc
    if not q.shared.tells_windows or wr.bind_mw.mw == NULL or wr.bind_mw.mw.rkey != wr.bind_mw.rkey:
        return ibv_post_send(qp, wr, bad)
    wr.bind_mw.mw.rkey = <uint32_t>rec.wr.wr.rdma.remote_addr
    rc = ibv_post_send(qp, wr, bad)
    wr.bind_mw.mw.rkey = wr.bind_mw.rkey
    return rc


cdef inline void take_back(QPState *q, SendRec *rec) noexcept nogil:
    if q.shared.tells_windows and rec.wr.opcode == IBV_WR_BIND_MW and rec.wr.bind_mw.mw != NULL:
        rec.wr.bind_mw.mw.rkey = <uint32_t>rec.wr.wr.rdma.remote_addr


cdef inline int send_append(QPState *q, const ibv_send_wr *wr) noexcept nogil:
    """Copy one WR behind the journal's tail. Errno as a provider would give it, nothing changed then."""
    cdef uint64_t seq = q.tail
    cdef SendRec *rec
    cdef uint32_t flags = wr.send_flags
    cdef uint32_t state = 0
    cdef uint32_t rkey
    cdef int i, rc
    if not has_room(q, 1):
        return ENOMEM
    if <uint32_t>wr.num_sge > q.max_send_sge or not opcode_in(wr.opcode, known_opcodes()):
        return EINVAL
    rec = send_rec(q, seq)
    rec.wr = wr[0]
    rec.wr.next = NULL
    rec.wr.sg_list = send_sges(rec)
    rec.wr.wr_id = make_id(False, KIND_APP, q.pairs[0].generation, seq)
    rec.app_wr_id = wr.wr_id
    rec.app_flags = flags
    if flags & IBV_SEND_INLINE and opcode_in(wr.opcode, payload_out_opcodes()):
        rc = copy_inline(q, rec, wr)
        if rc:
            return rc
    else:
        for i in range(wr.num_sge):
            send_sges(rec)[i] = wr.sg_list[i]
    if opcode_in(wr.opcode, two_sided_opcodes()):
        state |= REC_TWO_SIDED
        q.posted_ts += 1
    rec.two_sided = q.posted_ts
    if flags & IBV_SEND_SIGNALED or q.sq_sig_all:
        state |= REC_SIGNALED | REC_HW_SIGNALED
        q.last_signaled = seq + 1
    elif seq + 1 - q.last_signaled >= q.signal_every:
        # Somebody who never signals would never free the journal. The WC of this one is ours.
        state |= REC_HW_SIGNALED
        rec.wr.send_flags = flags | IBV_SEND_SIGNALED
        q.last_signaled = seq + 1
    rec.state = state
    if opcode_in(wr.opcode, rdma_opcodes()):
        rkey = rec.wr.wr.rdma.rkey
        if rkey != q.last_rkey:
            note_rkey(q, rkey)
    elif opcode_in(wr.opcode, atomic_opcodes() | (1u << IBV_WR_BIND_MW)):
        if wr.opcode == IBV_WR_BIND_MW:
            tell_window(q, rec)
        else:
            rkey = rec.wr.wr.atomic.rkey
            if rkey != q.last_rkey:
                note_rkey(q, rkey)
    q.tail = seq + 1
    return 0


cdef inline void send_cut(QPState *q, uint64_t seq) noexcept nogil:
    """Take the records from `seq` on back out of the journal: the post failed."""
    while q.tail > seq:
        q.tail -= 1
        take_back(q, send_rec(q, q.tail))
        if send_rec(q, q.tail).state & REC_TWO_SIDED:
            q.posted_ts -= 1
    if q.last_signaled > seq:
        q.last_signaled = q.head   # early rather than late: costs one swallowed WC
    if q.fence_wr_upto > seq:
        q.fence_wr_upto = 0
    if q.wired > seq:
        q.wired = seq


cdef inline int recv_append(QPState *q, const ibv_recv_wr *wr) noexcept nogil:
    cdef uint64_t seq = q.rtail
    cdef RecvRec *rec
    cdef int i
    if seq - q.rhead >= q.recv_cap:
        return ENOMEM
    if <uint32_t>wr.num_sge > q.max_recv_sge:
        return EINVAL
    rec = recv_rec(q, seq)
    rec.wr.wr_id = make_id(True, KIND_APP, q.pairs[0].generation, seq)
    rec.wr.next = NULL
    rec.wr.sg_list = recv_sges(rec)
    rec.wr.num_sge = wr.num_sge
    rec.app_wr_id = wr.wr_id
    rec.state = 0
    rec.sends_before = q.tail
    for i in range(wr.num_sge):
        recv_sges(rec)[i] = wr.sg_list[i]
    q.rtail = seq + 1
    return 0


# --- key translation -----------------------------------------------------------------------------------------

cdef inline int translate_sges(QPState *q, int k, const ibv_sge *src, int n, uint32_t *missing) noexcept nogil:
    """Into q.scratch. 0, or KEY_* bits | 4 with the default lkey that has no translation in *missing."""
    cdef MapSlot *slot
    cdef int i
    for i in range(n):
        q.scratch[i] = src[i]
        slot = map_find(q.local_keys, (<uint64_t>src[i].lkey << 8) | <uint64_t>k) if q.local_keys != NULL else NULL
        if slot != NULL and slot.value != key_none():
            q.scratch[i].lkey = <uint32_t>slot.value
        elif src[i].length == 0:
            q.scratch[i].lkey = 0
        else:
            missing[0] = src[i].lkey
            return 4 | (KEY_UNSHADOWABLE if slot != NULL else 0)
    return 0


cdef inline int translate_rkey(QPState *q, int k, uint32_t *rkey, uint32_t *missing) noexcept nogil:
    cdef MapSlot *slot = NULL
    if q.remote_keys != NULL:
        slot = map_find(q.remote_keys, (<uint64_t>rkey[0] << 8) | <uint64_t>k)
    if slot == NULL or slot.value == key_none():
        missing[0] = rkey[0]
        return 4 | KEY_REMOTE | (KEY_UNSHADOWABLE if slot != NULL else 0)
    rkey[0] = <uint32_t>slot.value
    return 0


cdef inline bint has_payload(const SendRec *rec) noexcept nogil:
    """Zero-length RDMA moves nothing and its rkey is not checked by the responder (IBA 9.7.4)."""
    cdef int i
    for i in range(rec.wr.num_sge):
        if rec.wr.sg_list[i].length:
            return True
    return False


cdef inline int translate_send(QPState *q, int k, SendRec *rec, ibv_send_wr *wr, uint32_t *missing) noexcept nogil:
    """Put the keys of pair k into `wr`, a copy of the record's. Returns as translate_sges."""
    cdef int rc
    if opcode_in(wr.opcode, rdma_opcodes()):
        rc = translate_rkey(q, k, &wr.wr.rdma.rkey, missing)
        if rc and has_payload(rec):
            return rc
    elif opcode_in(wr.opcode, atomic_opcodes()):
        rc = translate_rkey(q, k, &wr.wr.atomic.rkey, missing)
        if rc:
            return rc
    elif opcode_in(wr.opcode, (1u << IBV_WR_BIND_MW) | (1u << IBV_WR_LOCAL_INV) | (1u << IBV_WR_SEND_WITH_INV)):
        # Memory windows are not shadowed.
        missing[0] = wr.invalidate_rkey
        return 4 | KEY_REMOTE | KEY_UNSHADOWABLE
    if rec.app_flags & IBV_SEND_INLINE and opcode_in(wr.opcode, payload_out_opcodes()):
        return 0
    rc = translate_sges(q, k, rec.wr.sg_list, rec.wr.num_sge, missing)
    wr.sg_list = q.scratch
    return rc


# --- handing over --------------------------------------------------------------------------------------------

cdef inline int provider_errno(int rc) noexcept nogil:
    """What a provider's verb returned, as an errno. Some return -1 and set errno, some the errno below zero."""
    if rc >= 0:
        return rc
    return errno if rc == -1 and errno > 0 else -rc


cdef inline bint device_gone(int err) noexcept nogil:
    """Whether a verb that failed with this errno says that there is no device any more."""
    return err == EIO or err == ENODEV or err == ENXIO


cdef inline void post_refused(QPState *q, int k, int err) noexcept nogil:
    """The provider refused the WR at `wired`. It stays in the journal, the gate closes, the driver decides."""
    q.send_open = 0
    q.refused = err
    if not q.pairs[k].failed_seq:
        q.pairs[k].failed_seq = q.wired + 1
    emit(q, EV_POST_FAILED, k, err, 0)


cdef inline bint completion_due(const QPState *q) noexcept nogil:
    """Whether something that the hardware has will tell of its end."""
    cdef uint64_t seq = q.wired
    while seq > q.head:
        seq -= 1
        if send_rec(q, seq).state & (REC_HW_SIGNALED | REC_PROVEN) == REC_HW_SIGNALED:
            return True
    return False


cdef inline int hand_over(QPState *q) noexcept nogil:
    """Hand [wired, tail) to the hardware of send_pair, as far as it goes. 0, or how it refused the WR at wired."""
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad
    cdef SendRec *rec
    cdef Pair *pair = &q.pairs[q.send_pair]
    cdef int k = q.send_pair
    cdef int rc
    cdef uint64_t end = q.tail
    cdef uint32_t missing = 0
    q.blocked = 0
    if not q.send_open or pair.qp == NULL or q.key_wait:
        return 0
    q.refused = 0
    if q.recv_withheld and q.send_limit < end:
        end = q.send_limit
    if q.fence_wr_wanted and q.wired < q.fence_wr_upto < end:
        end = q.fence_wr_upto
    while q.wired < end:
        if q.wired - q.head >= q.send_cap:
            q.blocked = 1
            return 0
        rec = send_rec(q, q.wired)
        if not rec.state & REC_PROVEN:
            wr = rec.wr
            wr.next = NULL
            wr.wr_id = make_id(False, KIND_APP, pair.generation, q.wired)
            wr.send_flags = rec.app_flags | (IBV_SEND_SIGNALED if rec.state & REC_HW_SIGNALED else 0)
            if k:
                rc = translate_send(q, k, rec, &wr, &missing)
                if rc:
                    q.key_wait = 1
                    emit(q, EV_KEY_MISSING, k, missing, rc & 3)
                    return 0
            bad = NULL
            if wr.opcode == IBV_WR_BIND_MW:
                rc = post_bind(q, pair.qp, rec, &wr, &bad)
            else:
                rc = ibv_post_send(pair.qp, &wr, &bad)
            if rc:
                # Where nothing at the hardware will tell of its end, none would set this going again.
                if provider_errno(rc) == ENOMEM and q.wired > q.head and (completion_due(q) or not q.guarded):
                    q.blocked = 1
                    return 0
                return rc
        q.wired += 1
        if rec.two_sided > q.wired_ts:
            q.wired_ts = rec.two_sided
    return 0


cdef inline uint64_t send_end(const QPState *q) noexcept nogil:
    """Where a MOVE may cut: behind all that is posted, or where something is withheld that this pair cannot do yet.

    What is posted behind a fence that waits for room is for the next pair: a program that posts as long as it can would
    put it off for ever.
    """
    if q.wired < q.tail and (q.key_wait or (q.recv_withheld and q.wired >= q.send_limit)):
        return q.wired
    if q.fence_wr_wanted and q.wired <= q.fence_wr_upto < q.tail:
        return q.fence_wr_upto
    return q.tail


cdef inline void start_fence_wr(QPState *q, uint64_t seq) noexcept nogil:
    """WR `seq` is the last on this pair: what comes later is withheld until it has completed."""
    q.fence_wr_wanted = 0
    q.fence_wr_active = 1
    q.fence_wr_seq = seq
    q.send_open = 0


cdef inline int post_own_fence_write(QPState *q) noexcept nogil:
    """A signaled zero-length WRITE behind everything on the send pair; the gate closes. 0, or the provider's errno.

    EAGAIN: one of a MOVE that was called off is on its way still. Its WC brings us here again, if `own_fence_write`
    is set.
    """
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad = NULL
    cdef int rc
    if q.pairs[q.send_pair].own_fence_write:
        return EAGAIN
    memset(&wr, 0, sizeof(wr))
    wr.wr_id = make_id(False, KIND_FENCE, q.pairs[q.send_pair].generation, q.wired)
    wr.opcode = <ibv_wr_opcode>IBV_WR_RDMA_WRITE
    wr.send_flags = IBV_SEND_SIGNALED
    wr.wr.rdma.remote_addr = q.own_fence_write_addr
    wr.wr.rdma.rkey = q.own_fence_write_rkey
    rc = provider_errno(ibv_post_send(q.pairs[q.send_pair].qp, &wr, &bad))
    if rc == 0:
        q.pairs[q.send_pair].own_fence_write = 1
        start_fence_wr(q, q.wired)
    return rc


cdef inline void last_is_fence_wr(QPState *q) noexcept nogil:
    """A fence is wanted: the last that this pair is handed is it, if it tells of its end.

    Else our own WRITE, if that was to be posted and had to wait.
    """
    cdef SendRec *last
    if not q.send_open or q.pairs[q.send_pair].qp == NULL or q.wired != send_end(q):
        return
    if q.wired > q.head:
        last = send_rec(q, q.wired - 1)
        if last.state & REC_HW_SIGNALED:
            start_fence_wr(q, q.wired - 1)
            emit(q, EV_FENCE_WR_POSTED, q.send_pair, 0, 0)
            return
    if q.own_fence_write and post_own_fence_write(q) == 0:
        emit(q, EV_FENCE_WR_POSTED, q.send_pair, 0, 0)


cdef inline void pump_send(QPState *q) noexcept nogil:
    """Hand over what waits in the journal. A refusal is told when what is ahead has completed: each gets its own WC."""
    cdef int err = provider_errno(hand_over(q))
    if err:
        if completion_due(q) and not device_gone(err):
            q.blocked = 1
        else:
            post_refused(q, q.send_pair, err)
    elif q.fence_wr_wanted:
        last_is_fence_wr(q)


cdef inline int pump_recv(QPState *q) noexcept nogil:
    """Hand the receives that recv_pair does not have yet to its hardware. 0, errno, or -1: a key is missing."""
    cdef ibv_recv_wr wr
    cdef ibv_recv_wr *bad
    cdef RecvRec *rec
    cdef int k = q.recv_pair
    cdef Pair *pair = &q.pairs[k]
    cdef uint32_t missing = 0
    cdef int rc
    if pair.recv_upto < q.rhead:
        pair.recv_upto = q.rhead
    q.rwired = pair.recv_upto
    if pair.qp == NULL:
        return EINVAL
    while q.rwired < q.rtail:
        rec = recv_rec(q, q.rwired)
        if not rec.state & REC_DONE:
            wr = rec.wr
            wr.next = NULL
            wr.wr_id = make_id(True, KIND_APP, pair.generation, q.rwired)
            if k:
                rc = translate_sges(q, k, rec.wr.sg_list, rec.wr.num_sge, &missing)
                if rc:
                    emit(q, EV_KEY_MISSING, k, missing, rc & 3)
                    q.send_limit = rec.sends_before
                    return -1
                wr.sg_list = q.scratch
            bad = NULL
            rc = provider_errno(ibv_post_recv(pair.qp, &wr, &bad))
            if rc:
                return rc
            pair.rq_out += 1
        q.rwired += 1
        pair.recv_upto = q.rwired
    return 0


# --- retiring ------------------------------------------------------------------------------------------------

cdef inline void after_retire(QPState *q) noexcept nogil:
    """What head's moving sets going: proven records behind it, the fence, a pump that had stopped for room."""
    cdef SendRec *rec
    while q.head < q.proven_end and not q.sends_failed:
        rec = send_rec(q, q.head)
        if not rec.state & REC_PROVEN:
            break
        if rec.state & REC_SIGNALED:
            push_send_wc(q, rec, IBV_WC_SUCCESS, 0)
        q.head += 1
    if q.wired < q.head:
        q.wired = q.head
    if q.fence_wr_active and q.head > q.fence_wr_seq:
        q.fence_wr_active = 0
        emit(q, EV_FENCE_WR_DONE, q.send_pair, 0, 0)
    if q.blocked:
        pump_send(q)


cdef inline void retire_below(QPState *q, uint64_t seq) noexcept nogil:
    """Records before `seq` are complete (RC completes in order). Those that owe a WC and never got one get it now."""
    cdef SendRec *rec
    while q.head < seq:
        rec = send_rec(q, q.head)
        if rec.state & REC_SIGNALED:
            push_send_wc(q, rec, IBV_WC_SUCCESS, 0)
        if rec.two_sided > q.acked_ts:
            q.acked_ts = rec.two_sided
        q.head += 1


cdef inline void sends_shown(QPState *q, uint64_t seq) noexcept nogil:
    """The first error of a send queue is at `seq`. RC completes in order: all that it had before is complete.

    Of a message the peer's NIC may have lost the receipt, and died: its counter says whether that is sent again.
    """
    cdef uint64_t at = q.head
    cdef SendRec *rec
    if seq > q.wired:
        seq = q.wired
    while at < seq:
        rec = send_rec(q, at)
        if not rec.state & REC_TWO_SIDED:
            rec.state |= REC_PROVEN
        at += 1
    if q.shown_end < seq:
        q.shown_end = seq


cdef inline void abort_sends(QPState *q, uint64_t end, int status, uint32_t vendor_err) noexcept nogil:
    """Error WCs for the records below `end`: the first gets `status`, the rest are flushed, unsignaled ones too.

    What was complete before the first has none, or a success. Where an error was shown before, all are flushed. One
    whose NIC has said why it failed, in the end of its QP, has that status if it is the first.
    """
    cdef SendRec *rec
    if q.sends_failed:
        status = IBV_WC_WR_FLUSH_ERR
        vendor_err = 0
    while q.head < end:
        rec = send_rec(q, q.head)
        if (rec.state & REC_PROVEN or q.head < q.shown_end) and not q.sends_failed:
            if rec.state & REC_SIGNALED:
                push_send_wc(q, rec, IBV_WC_SUCCESS, 0)
        else:  # RC shows no success behind an error, whatever was executed
            if q.kept_send.seq == q.head + 1 and not q.sends_failed:
                status = q.kept_send.status
                vendor_err = q.kept_send.vendor_err
            push_send_wc(q, rec, status, vendor_err)
            status = IBV_WC_WR_FLUSH_ERR
            vendor_err = 0
            q.sends_failed = True
        q.head += 1
    if q.wired < q.head:
        q.wired = q.head
    if q.proven_end < q.head:
        q.proven_end = q.head


cdef inline void flush_proven(QPState *q) noexcept nogil:
    """An error went to the application: RC shows no success behind it, whatever was executed."""
    while q.head < q.proven_end:
        push_send_wc(q, send_rec(q, q.head), IBV_WC_WR_FLUSH_ERR, 0)
        q.head += 1
    if q.wired < q.head:
        q.wired = q.head


cdef inline void abort_recvs(QPState *q, uint64_t end) noexcept nogil:
    cdef RecvRec *rec
    while q.rhead < end:
        rec = recv_rec(q, q.rhead)
        if not rec.state & REC_DONE:
            if q.kept_recv.seq == q.rhead + 1:
                push_recv_error(q, rec, q.kept_recv.status, q.kept_recv.vendor_err)
            else:
                push_recv_error(q, rec, IBV_WC_WR_FLUSH_ERR, 0)
        q.rhead += 1
    if q.rwired < q.rhead:
        q.rwired = q.rhead
