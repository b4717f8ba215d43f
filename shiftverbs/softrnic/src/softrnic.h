/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The software RNIC's own structures, shared by its source files.
 *
 * One srn_nic is one device as opened by this process: an address, a socket, a progress thread, and
 * everything that the process made on it. All ibv_contexts of one device in a process share it. Its lock
 * covers QPs, MRs and the transport state; a CQ has a lock of its own, so that polling does not wait for the
 * network.
 *
 * Lock order: srn_global.lock > srn_nic.lock > srn_cq.lock > srn_evq.lock > the mutex in ibv_cq / ibv_qp.
 * srn_cq_poll.lock and srn_builder.lock, which a program holds between two calls, come before all of them.
 */
#ifndef SOFTRNIC_H
#define SOFTRNIC_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <infiniband/verbs.h>

#include "config.h"
#include "fault.h"
#include "wire.h"

#define SRN_EXPORT __attribute__((visibility("default")))

#define SRN_GID_TABLE 8
#define SRN_MAX_QP_WR 65536
#define SRN_MAX_SGE 32
#define SRN_MAX_INLINE 1024
#define SRN_MAX_CQE (1 << 22)
#define SRN_MAX_QP 65536
#define SRN_MAX_CQ 65536
#define SRN_MAX_MR (1 << 20)
#define SRN_MAX_PD 65536
#define SRN_MAX_AH (1 << 20)
#define SRN_MAX_MW (1 << 19)
#define SRN_MAX_SRQ 65536
#define SRN_MAX_RD_ATOMIC 128
#define SRN_MAX_MSG ((uint32_t)1 << 30)
#define SRN_UD_GRH WIRE_GRH_LEN
#define SRN_QP_BUCKETS 1024

/* --- intrusive lists --- */
struct srn_list {
    struct srn_list *next, *prev;
};

static inline void srn_list_init(struct srn_list *l) {
    l->next = l->prev = l;
}

static inline bool srn_list_empty(const struct srn_list *l) {
    return l->next == l;
}

static inline void srn_list_add_tail(struct srn_list *head, struct srn_list *n) {
    n->prev = head->prev;
    n->next = head;
    head->prev->next = n;
    head->prev = n;
}

/* Leaves n empty, so that deleting twice is harmless. */
static inline void srn_list_del(struct srn_list *n) {
    n->prev->next = n->next;
    n->next->prev = n->prev;
    n->next = n->prev = n;
}

#define srn_container(ptr, type, member) ((type *)((char *)(ptr)-offsetof(type, member)))
#define srn_for_each(pos, tmp, head)                                                                         \
    for ((pos) = (head)->next, (tmp) = (pos)->next; (pos) != (head); (pos) = (tmp), (tmp) = (pos)->next)

/*
 * A lock for sections of a few instructions: half the price of a mutex where nobody else wants it, which is what a
 * poll of a CQ is. Whoever finds it taken gives up the core, in case its holder was preempted.
 */
struct srn_spin {
    atomic_bool taken;
};

static inline void srn_spin_lock(struct srn_spin *l) {
    for (unsigned int i = 0; atomic_exchange_explicit(&l->taken, true, memory_order_acquire); i++)
        if (i >= 64)
            sched_yield();
}

static inline void srn_spin_unlock(struct srn_spin *l) {
    atomic_store_explicit(&l->taken, false, memory_order_release);
}

/* --- addresses --- */
/*
 * The GID table of a RoCE port with one IPv4 address, as the kernel fills it. All of them travel in the same datagrams
 * between IPv4 addresses; the lowest reserved bits of the BTH tell by which one a packet goes, and are 0 for the one
 * that means just such datagrams. A QP takes what comes by its own, as packets of RoCE v1, of v2 over IPv6 and of v2
 * over IPv4 do not reach each other's QPs on a real port.
 */
enum srn_gid_index {
    SRN_GID_LINK_LOCAL_V1,
    SRN_GID_LINK_LOCAL_V2,
    SRN_GID_IPV4_V1,
    SRN_GID_IPV4_V2,
    SRN_GID_COUNT,
};
#define SRN_GID_BITS 3 /* exclusive or of index and reserved bits */

static inline bool srn_gid_is_ipv4(unsigned int index) {
    return index >= SRN_GID_IPV4_V1;
}

static inline bool srn_gid_is_v2(unsigned int index) {
    return index & 1;
}

/* Where packets go or come from. */
struct srn_peer {
    uint32_t ip;        /* network order; 0 = not set */
    uint32_t gid_index; /* here and there */
};

/* --- devices --- */
struct srn_nic;

struct srn_device {
    struct ibv_device ib; /* what ibv_get_device_list() shows */
    const struct config_device *config;
    uint64_t guid; /* network order */
    struct srn_nic *nic;
    int last_error; /* of opening it */
};

/* Process-wide state. */
struct srn_globals {
    pthread_mutex_t lock;
    struct config config;
    struct srn_device devices[CONFIG_MAX_DEVICES];
    struct srn_list nics;
};
extern struct srn_globals srn_global;

/* --- event queues: what stands behind a completion channel and behind a context's async_fd --- */
struct srn_evq {
    pthread_mutex_t lock;
    int fd; /* eventfd, readable exactly while the list is not empty */
    struct srn_list events;
};

struct srn_event {
    struct srn_list link;
    void *object; /* the srn_cq or srn_qp it is about, NULL for port and device events */
    uint32_t *reported;
    struct ibv_async_event async;
};

int srn_evq_init(struct srn_evq *q);
/*
 * Drop all events and close the descriptor; the structure stays, and takes no more. In a forked child the lock may be
 * held for ever by a thread that is not there: then only the descriptor is closed.
 */
void srn_evq_close(struct srn_evq *q, bool forked);
/* `reported` (may be NULL) is incremented when the event is taken. Drops the event if there is no memory. */
void srn_evq_push(struct srn_evq *q, void *object, uint32_t *reported, const struct ibv_async_event *async);
/* Wait for an event as a read on the descriptor would: 0, or -1 with errno (EAGAIN on O_NONBLOCK, EINTR). */
int srn_evq_pop(struct srn_evq *q, struct srn_event *out);
/* Remove what was not yet taken about this object. */
void srn_evq_forget(struct srn_evq *q, const void *object);

/* --- contexts --- */
struct srn_ctx {
    struct srn_list link; /* in srn_nic.contexts */
    atomic_uint refs;     /* itself while open, and every object made on it: they may outlive it */
    struct srn_nic *nic;
    struct srn_evq async;
    struct verbs_context verbs; /* holds the ibv_context; verbs_get_ctx() finds its way from there */
};

struct srn_pd {
    struct ibv_pd ib;
    struct srn_nic *nic;
    struct srn_pd *base; /* itself; of a parent domain, the PD whose protection it has */
    uint32_t refs;       /* MRs, QPs, AHs, ... */
};

struct srn_mr {
    struct ibv_mr ib;
    struct srn_nic *nic;
    struct srn_pd *pd;
    uint32_t slot;
    uint32_t key;
    uint64_t iova;
    uint8_t *addr;
    size_t length;
    unsigned int access;
    uint32_t windows; /* bound to it */
};

struct srn_mw {
    struct ibv_mw ib;
    struct srn_nic *nic;
    struct srn_pd *pd;
    uint32_t slot;
    uint32_t key;      /* the R_Key in force; ib.rkey is the program's copy */
    struct srn_mr *mr; /* NULL = not bound */
    uint64_t va;       /* as remote peers address it */
    uint64_t length;
    uint8_t *addr;
    unsigned int access;
    uint32_t qpn; /* type 2: only through this QP */
};

/* A line of the key table: of a region or of a window. */
struct srn_mr_slot {
    struct srn_mr *mr;
    struct srn_mw *mw;
    uint8_t generation;
    uint32_t next_free;
};

struct srn_channel {
    struct ibv_comp_channel ib;
    struct srn_nic *nic;
    struct srn_evq evq;
};

struct srn_cq {
    union {
        struct ibv_cq ib;
        struct ibv_cq_ex ex;
    };
    struct srn_nic *nic;
    struct srn_ctx *ctx;
    struct srn_channel *channel;
    struct srn_spin lock;
    struct ibv_wc *ring;
    uint32_t capacity;
    uint32_t head; /* index of the oldest entry */
    atomic_uint count;
    bool armed;           /* for any completion */
    bool armed_solicited; /* for solicited ones and errors */
    atomic_bool overrun;
    uint32_t comp_reported;   /* under the channel's evq.lock */
    uint32_t async_reported;  /* under the context's async.lock */
    uint32_t refs;            /* QPs, under nic->lock */
    struct srn_cq_poll *poll; /* extended CQs only */
};

struct srn_ah {
    struct ibv_ah ib;
    struct srn_pd *pd;
    struct srn_nic *nic;
    struct srn_peer peer;
};

/* --- work queues --- */
struct srn_swqe {
    uint64_t wr_id;
    enum ibv_wr_opcode opcode;
    unsigned int flags;
    uint32_t imm; /* network order; also the R_Key that a SEND invalidates */
    uint32_t num_sge;
    struct ibv_sge *sge;
    uint8_t *inline_data; /* instead of SGEs, if flags has IBV_SEND_INLINE */
    uint32_t length;
    uint64_t remote_addr;
    uint32_t rkey;
    uint64_t compare_add;
    uint64_t swap;
    /* UD */
    struct srn_peer peer;
    uint32_t remote_qpn;
    uint32_t remote_qkey;
    /* RC: the packets, or for READ the response packets, of this WR */
    uint32_t first_psn;
    uint32_t last_psn;
    /* Work on our own keys: no packets */
    struct {
        uint32_t key; /* the window's, as the program knew it */
        uint32_t lkey;
        unsigned int access;
        uint64_t addr;
        uint64_t length;
        enum ibv_mw_type type;
    } bind;
    bool executed;
};

struct srn_rwqe {
    uint64_t wr_id;
    uint32_t num_sge;
    struct ibv_sge *sge;
};

/* Rings with free-running indices; slot = index % capacity. */
struct srn_sq {
    struct srn_swqe *wqe;
    struct ibv_sge *sges;
    uint8_t *inline_pool;
    uint32_t capacity;
    uint32_t head; /* oldest not completed */
    uint32_t tail; /* next to be posted */
};

struct srn_rq {
    struct srn_rwqe *wqe;
    struct ibv_sge *sges;
    uint32_t capacity;
    uint32_t head;
    uint32_t tail;
};

struct srn_srq {
    struct ibv_srq ib;
    struct srn_nic *nic;
    struct srn_ctx *ctx;
    struct srn_pd *pd;
    struct srn_rq rq;
    uint32_t max_sge;
    uint32_t limit;          /* tell when fewer WRs than this are left; 0 = do not */
    uint32_t refs;           /* QPs */
    uint32_t async_reported; /* under the context's async.lock */
};

/* Requester (IBA 9.7.3, 9.7.5): what it sends and what it waits for. */
struct srn_requester {
    uint32_t next_psn; /* given to the next posted WR */
    uint32_t send_idx; /* WQE that the next packet comes from */
    uint32_t send_psn; /* its PSN */
    uint32_t max_psn;  /* one past the newest PSN ever sent */
    uint32_t una_psn;  /* oldest PSN not acknowledged, or whose response is missing */
    uint32_t gap_psn;  /* una_psn for which a missing response was already asked for again */
    bool gap_valid;
    uint32_t rd_out; /* READ and atomic requests under way */
    uint8_t retries;
    uint8_t rnr_retries;
    uint64_t retry_at; /* ns, 0 = not running */
    uint64_t rnr_until;
};

enum srn_resource_kind { SRN_RES_NONE, SRN_RES_READ, SRN_RES_ATOMIC };

/* What a duplicate READ or atomic request is answered from (IBA 9.7.5.1.5). */
struct srn_resource {
    enum srn_resource_kind kind;
    uint32_t first_psn, last_psn;
    uint64_t va;
    uint32_t rkey;
    uint32_t length;
    uint64_t original;
    uint32_t msn;
};

enum srn_message { SRN_MSG_NONE, SRN_MSG_SEND, SRN_MSG_WRITE };

/* Responder (IBA 9.7.4, 9.7.5). */
struct srn_responder {
    uint32_t psn; /* expected */
    uint32_t msn;
    enum srn_message message; /* the message whose middle we are in */
    bool nak_sent;            /* one NAK per gap */
    bool ack_pending;
    struct srn_list ack_link; /* in srn_nic.ack_list */
    uint32_t recv_offset;     /* bytes of the receive WR filled by a SEND */
    uint64_t write_va;
    uint32_t write_rkey;
    uint32_t write_left;
    uint32_t write_length;
    struct srn_resource *resources;
    uint32_t resource_count;
    uint32_t resource_next;
};

struct srn_qp {
    union {
        struct ibv_qp ib;
        struct ibv_qp_ex ex;
    };
    struct srn_nic *nic;
    struct srn_ctx *ctx;
    struct srn_pd *pd;
    struct srn_cq *send_cq;
    struct srn_cq *recv_cq;
    struct srn_qp *hash_next;
    struct srn_list timer_link; /* in srn_nic.timed */
    enum ibv_qp_state state;
    enum ibv_qp_type type;
    uint32_t qpn;
    bool sq_sig_all;
    bool sq_drain_event; /* SQD: tell when drained */
    struct ibv_qp_cap cap;
    struct ibv_qp_attr attr;
    struct srn_peer peer;
    uint32_t mtu; /* bytes */
    struct srn_sq sq;
    struct srn_rq rq;
    struct srn_srq *srq;
    struct srn_rwqe srq_wqe; /* taken out of the SRQ for the message under way */
    bool srq_taken;
    struct srn_builder *builder; /* extended QPs only */
    struct srn_requester req;
    struct srn_responder resp;
    uint32_t async_reported; /* under the context's async.lock */
};

/* --- the program's memory: memory.c --- */
#define SRN_MEMORY_BOUNCE 8192

struct srn_memory {
    int fd;        /* of the file in memory that packets lie in; -1 = there is none */
    uint8_t *base; /* where packets lie; at its end SRN_MEMORY_BOUNCE bytes for what is not a packet's */
    size_t size;
};

/* `packets`: bytes for packets at base. 0 or errno. */
int srn_memory_open(struct srn_memory *memory, size_t packets);
void srn_memory_close(struct srn_memory *memory);
/* In the child: only what must not live on there is closed. */
void srn_memory_after_fork(struct srn_memory *memory);
void srn_atomics_after_fork(void);
/*
 * Copy from and to the program's memory; nic->lock held. `to` and `from` on our side may be anywhere, and cost no copy
 * more within the file. `len` bytes, which is what the vectors have. False: not all of that memory is there, or it does
 * not permit this; some of it may have been written.
 */
bool srn_memory_get(struct srn_memory *memory, const struct iovec *from, int count, uint8_t *to, size_t len);
bool srn_memory_put(struct srn_memory *memory, const struct iovec *to, int count, const uint8_t *from,
                    size_t len);
/*
 * The same to one place, the end of it last. The specification promises no order within a message, but NICs keep it, and
 * programs wait for a flag in the last word of what they expect; one copy may well store the end before the middle.
 */
bool srn_memory_place(struct srn_memory *memory, uint8_t *to, const uint8_t *from, size_t len);
/* Compare and swap, or fetch and add: atomic with respect to all software NICs of this process. */
bool srn_memory_atomic(struct srn_memory *memory, uint8_t *at, bool swap, uint64_t compare, uint64_t swap_add,
                       uint64_t *original);

/* --- NIC --- */
enum srn_counter {
    SRN_CNT_TX_PACKETS,
    SRN_CNT_RX_PACKETS,
    SRN_CNT_TX_FILTERED,
    SRN_CNT_RX_FILTERED,
    SRN_CNT_TX_ERRORS,
    SRN_CNT_RX_NO_QP,
    SRN_CNT_RX_WRONG_PEER,
    SRN_CNT_RX_WRONG_STATE,
    SRN_CNT_RX_UD_DROPPED,
    SRN_CNT_RX_BAD_PKEY,
    SRN_CNT_RX_BAD_QKEY,
    SRN_CNT_DUPLICATES,
    SRN_CNT_SEQ_NAK_SENT,
    SRN_CNT_RNR_NAK_SENT,
    SRN_CNT_SEQ_NAK_RECEIVED,
    SRN_CNT_RNR_NAK_RECEIVED,
    SRN_CNT_TIMEOUTS,
    SRN_CNT_RETRANSMITS,
    SRN_CNT_RX_BAD, /* + enum wire_error */
    SRN_CNT_COUNT = SRN_CNT_RX_BAD + WIRE_ERR_COUNT
};

struct srn_net; /* sockets and buffers: net.c only */

struct srn_nic {
    struct srn_list link; /* in srn_global.nics */
    struct srn_device *dev;
    uint32_t opens;   /* open contexts, under srn_global.lock; the last one to close ends the network */
    atomic_uint refs; /* srn_ctx structures, which keep the memory */
    struct fault_port *port;
    struct srn_net *net; /* NULL in null mode */
    struct srn_memory memory;
    bool null_mode;
    atomic_bool forked; /* we are a child of the process that opened it */
    atomic_bool dead;   /* the NIC was killed: commands fail, nothing completes */
    uint32_t ip;        /* network order */
    union ibv_gid gids[SRN_GID_COUNT];
    uint32_t gid_count; /* only link-local ones in null mode */

    pthread_mutex_t lock;
    struct srn_list contexts;
    struct srn_qp *qps[SRN_QP_BUCKETS];
    uint32_t qp_count;
    uint32_t last_handle;
    uint32_t next_qpn;
    struct srn_mr_slot *mr_slots;
    uint32_t mr_slot_count;
    uint32_t mr_free; /* head of the free list, UINT32_MAX = none */
    uint32_t key_base;
    enum ibv_mtu active_mtu;
    uint32_t window; /* packets a QP may have unacknowledged */
    struct srn_list ack_list;
    struct srn_list timed;
    struct srn_list held; /* packets that a fault rule holds back */
    atomic_bool overrun_pending;
    atomic_bool stood_still; /* work was left undone because the NIC is stalled */
    pthread_mutex_t command_lock;
    pthread_cond_t command_cond;
    uint64_t counters[SRN_CNT_COUNT];
};

static inline void srn_nic_lock(struct srn_nic *nic) {
    pthread_mutex_lock(&nic->lock);
}
/* Sends what was queued and deals with overrun CQs before it lets go. */
void srn_nic_unlock(struct srn_nic *nic);

/* 0, or EIO if the NIC behind this object is gone (killed, or left behind by fork). */
static inline int srn_nic_gone(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->forked, memory_order_relaxed) ||
                   atomic_load_explicit(&nic->dead, memory_order_relaxed)
               ? EIO
               : 0;
}

/* Is the NIC dead, also if its thread has not heard of it yet? */
static inline bool srn_killed(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->dead, memory_order_relaxed) ||
           (nic->port && fault_was_killed(nic->port));
}

static inline bool srn_forked(struct srn_nic *nic) {
    return atomic_load_explicit(&nic->forked, memory_order_relaxed);
}

/* command.c */
/* Every verb that is a command begins with this: 0, or EIO if the NIC is gone. Waits while commands hang. */
int srn_command(struct srn_nic *nic);
void srn_commands_wake(struct srn_nic *nic);
/* Is the data path to stand still? Who asks leaves its work undone; srn_stall_over() has it done. */
bool srn_stalled(struct srn_nic *nic);
/* nic->lock held, on the progress thread. */
void srn_stall_over(struct srn_nic *nic);

/* hold.c: nic->lock held */
void srn_hold(struct srn_nic *nic, enum fault_direction direction, uint32_t peer_ip, const uint8_t *data,
              size_t len, uint32_t delay_us, bool overtaken_by_next);
/* A packet of this direction went on: those that it was to overtake follow. RX: on the progress thread. */
void srn_hold_passed(struct srn_nic *nic, enum fault_direction direction);
/* Release what is due; when the next will be, 0 = there is none. On the progress thread. */
uint64_t srn_hold_run(struct srn_nic *nic, uint64_t now_ns);
void srn_hold_clear(struct srn_nic *nic);

/* device.c */
bool srn_is_ours(const struct ibv_context *context);
static inline struct srn_ctx *srn_ctx(const struct ibv_context *context) {
    return srn_container(context, struct srn_ctx, verbs.context);
}
/* An object of this context was made, or went. */
void srn_ctx_get(struct srn_ctx *ctx);
void srn_ctx_put(struct srn_ctx *ctx);
void srn_async_port_event(struct srn_nic *nic, enum ibv_event_type type);
void srn_async_qp_event(struct srn_qp *qp, enum ibv_event_type type);
void srn_async_cq_event(struct srn_cq *cq, enum ibv_event_type type);
void srn_async_srq_event(struct srn_srq *srq, enum ibv_event_type type);

/* gid.c */
/* The GID table of a NIC whose address is known. */
void srn_gids_init(struct srn_nic *nic);
/* The GID of an address in a line of the table of its port. */
void srn_gid_make(uint32_t ip, unsigned int index, union ibv_gid *gid);
/* Whose GID is it? False if the line `index` of our table does not lead there. */
bool srn_gid_resolve(const union ibv_gid *gid, unsigned int index, struct srn_peer *peer);
/* As in the address vector of a QP or AH: false if it is not one that packets can go by. */
bool srn_resolve_av(const struct srn_nic *nic, const struct ibv_ah_attr *attr, struct srn_peer *peer);

/* query.c */
int srn_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                        struct ibv_device_attr_ex *attr, size_t len);
int srn_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *attr);
static inline uint32_t srn_mtu_bytes(enum ibv_mtu mtu) {
    return 128u << mtu;
}

/* counters.c */
void srn_counters_print(const struct srn_nic *nic);

/* real.c: the libibverbs we stand in front of */
void *srn_real_symbol(const char *name, void *_Atomic *cache);
#define SRN_REAL(name)                                                                                       \
    ({                                                                                                       \
        static void *_Atomic cache_;                                                                         \
        (__typeof__(&name))srn_real_symbol(#name, &cache_);                                                  \
    })
/* Call the real function, or give `otherwise` with errno ENOSYS where there is none. */
#define SRN_PASS(name, otherwise, ...)                                                                       \
    ({                                                                                                       \
        __typeof__(&name) real_ = SRN_REAL(name);                                                            \
        real_ ? real_(__VA_ARGS__) : (errno = ENOSYS, otherwise);                                            \
    })

/* mr.c: nic->lock held */
/* The memory behind [va, va + length) or NULL if key, PD, range or access do not permit it. length > 0. */
uint8_t *srn_mr_resolve(struct srn_nic *nic, const struct srn_pd *pd, uint32_t key, uint64_t va,
                        uint64_t length, unsigned int access);
/* The region with this key, NULL if there is none. */
struct srn_mr *srn_mr_find(const struct srn_nic *nic, uint32_t key);
/* Lines of the key table. take: UINT32_MAX if there is none left. */
uint32_t srn_key_take(struct srn_nic *nic);
void srn_key_give(struct srn_nic *nic, uint32_t slot);
uint32_t srn_key_make(const struct srn_nic *nic, uint32_t slot);
/* The line that a key belongs to, whatever its generation; NULL if there is none. */
struct srn_mr_slot *srn_key_slot(const struct srn_nic *nic, uint32_t key);
/* Copy between a flat buffer and an SGE list, starting `offset` bytes into the list. False on a bad SGE, or
 * one whose memory is gone. */
bool srn_sge_gather(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                    uint32_t offset, uint8_t *to, uint32_t length);
bool srn_sge_scatter(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge,
                     uint32_t num_sge, uint32_t offset, const uint8_t *from, uint32_t length);
/* Are all SGEs valid for this access? */
bool srn_sge_check(struct srn_nic *nic, const struct srn_pd *pd, const struct ibv_sge *sge, uint32_t num_sge,
                   unsigned int access);
void srn_mr_table_free(struct srn_nic *nic);

/* pd.c */
static inline struct srn_pd *srn_pd(struct ibv_pd *pd) {
    return srn_container(pd, struct srn_pd, ib);
}
struct ibv_pd *srn_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr);
struct ibv_td *srn_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr);
int srn_dealloc_td(struct ibv_td *td);

/* mw.c */
struct ibv_mw *srn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int srn_dealloc_mw(struct ibv_mw *mw);
int srn_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
/* nic->lock held. */
/* What a remote peer of this QP may do: as srn_mr_resolve, for keys of regions and of windows. */
uint8_t *srn_remote_resolve(struct srn_qp *qp, uint32_t rkey, uint64_t va, uint64_t length,
                            unsigned int access);
/* Fill in a BIND_MW from what the program gave; errno. */
int srn_build_bind(struct srn_qp *qp, struct srn_swqe *w, struct ibv_mw *mw, uint32_t rkey,
                   const struct ibv_mw_bind_info *info);
/* Do a BIND_MW or LOCAL_INV. */
enum ibv_wc_status srn_execute_local(struct srn_qp *qp, const struct srn_swqe *w);
/* Make a window's key invalid; false if this QP must not. */
bool srn_invalidate(struct srn_qp *qp, uint32_t rkey);

/* cq.c */
/* NULL and errno on failure. */
struct srn_cq *srn_cq_create(struct ibv_context *context, uint32_t cqe, void *cq_context,
                             struct ibv_comp_channel *channel, uint32_t comp_vector);
/* Take the oldest completions. */
uint32_t srn_cq_pop(struct srn_cq *cq, uint32_t max, struct ibv_wc *wc);
void srn_cq_push(struct srn_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Forget completions of a QP that goes to RESET or away, as hardware drivers do. */
void srn_cq_clean(struct srn_cq *cq, uint32_t qpn);
int srn_poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
int srn_req_notify_cq(struct ibv_cq *cq, int solicited_only);

/* cqex.c */
struct ibv_cq_ex *srn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
void srn_cqex_free(struct srn_cq *cq);

/* srq.c */
int srn_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/* nic->lock held: copy the oldest WR to the QP; false if there is none. */
bool srn_srq_take(struct srn_qp *qp);

/* rq.c: nic->lock held */
/* 0 or ENOMEM; what was allocated is freed by srn_rq_free in any case. */
int srn_rq_alloc(struct srn_rq *rq, uint32_t capacity, uint32_t max_sge);
void srn_rq_free(struct srn_rq *rq);
int srn_rq_post(struct srn_rq *rq, uint32_t max_sge, const struct ibv_recv_wr *wr);
/* The receive WR of the message under way or of the next one, NULL if there is none. */
struct srn_rwqe *srn_recv_wqe(struct srn_qp *qp);
/* Complete it. */
void srn_rq_complete(struct srn_qp *qp, struct ibv_wc *wc, bool solicited);

/* qpex.c */
/* Make an extended QP of it; errno. */
int srn_qpex_init(struct srn_qp *qp, uint64_t send_ops);
void srn_qpex_free(struct srn_qp *qp);

/* qp.c: nic->lock held */
struct srn_qp *srn_qp_find(struct srn_nic *nic, uint32_t qpn);
/* To ERR: both queues flush in order. */
void srn_qp_error(struct srn_qp *qp);
void srn_qp_overrun(struct srn_nic *nic);
struct ibv_qp *srn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
bool srn_qp_attr_ok(enum ibv_qp_type type, enum ibv_qp_state cur, enum ibv_qp_state next, int mask);

/* post.c */
int srn_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int srn_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int srn_null_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int srn_null_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
enum ibv_wc_opcode srn_wc_opcode(enum ibv_wr_opcode opcode);
int srn_check_opcode(const struct srn_qp *qp, enum ibv_wr_opcode opcode, unsigned int flags);
/* nic->lock held: complete the oldest send WR; free its slot. */
void srn_sq_complete(struct srn_qp *qp, enum ibv_wc_status status);
void srn_flush(struct srn_qp *qp);
/* nic->lock held: a WR that was written to the slot at the tail is posted; then work on what there is. */
static inline bool srn_sq_full(const struct srn_qp *qp) {
    return qp->sq.tail - qp->sq.head >= qp->sq.capacity;
}
void srn_sq_enqueue(struct srn_qp *qp);
void srn_sq_run(struct srn_qp *qp);
/* May WRs be posted in this state? */
static inline bool srn_sq_accepts(const struct srn_qp *qp) {
    return qp->state != IBV_QPS_RESET && qp->state != IBV_QPS_INIT && qp->state != IBV_QPS_RTR;
}

/* requester.c: nic->lock held */
void srn_req_reset(struct srn_qp *qp, uint32_t psn);
void srn_req_run(struct srn_qp *qp);
void srn_req_handle(struct srn_qp *qp, const struct wire_packet *pkt);
void srn_req_timer(struct srn_qp *qp, uint64_t now_ns);
uint32_t srn_packets(uint32_t length, uint32_t mtu);
static inline bool srn_is_local(const struct srn_swqe *w) {
    return w->opcode == IBV_WR_BIND_MW || w->opcode == IBV_WR_LOCAL_INV;
}
/* The next packet of a SEND or WRITE; false if its memory is gone. Fills in pkt but for what all packets have. */
bool srn_send_data(struct srn_qp *qp, const struct srn_swqe *w, struct wire_packet *pkt);
enum ibv_wc_status srn_check_wqe(struct srn_qp *qp, const struct srn_swqe *w);
void srn_sq_check_drained(struct srn_qp *qp);

/* responder.c: nic->lock held */
void srn_resp_reset(struct srn_qp *qp, uint32_t psn);
void srn_resp_handle(struct srn_qp *qp, const struct wire_packet *pkt);
void srn_resp_flush_acks(struct srn_nic *nic);
/* A SEND or WRITE packet whose turn it is. */
void srn_resp_execute(struct srn_qp *qp, const struct wire_packet *pkt);

/* uc.c: nic->lock held */
void srn_uc_run(struct srn_qp *qp);
void srn_uc_handle(struct srn_qp *qp, const struct wire_packet *pkt);

/* ud.c: nic->lock held */
void srn_ud_run(struct srn_qp *qp);
void srn_ud_handle(struct srn_qp *qp, const struct wire_packet *pkt, struct srn_peer from);

/* net.c */
int srn_net_open(struct srn_nic *nic, char *err, size_t err_len);
void srn_net_close(struct srn_nic *nic);
void srn_net_after_fork(struct srn_nic *nic);
uint64_t srn_now_ns(void);
uint64_t srn_random(void);
/* nic->lock held: where the next packet's payload (up to 4096 bytes) goes. */
uint8_t *srn_tx_payload(struct srn_nic *nic);
void srn_tx_commit(struct srn_nic *nic, struct wire_packet *pkt, size_t payload_len, uint32_t local_qpn,
                   struct srn_peer to);
void srn_tx_flush(struct srn_nic *nic);
/* A packet that was sealed before goes out; one that was checked before is received. */
void srn_tx_datagram(struct srn_nic *nic, uint32_t dst_ip, const uint8_t *data, size_t len);
void srn_rx_datagram(struct srn_nic *nic, uint32_t src_ip, const uint8_t *data, size_t len);
/* Look at all that waits for a time no later than then. */
void srn_timer_at(struct srn_nic *nic, uint64_t at_ns);
/* A QP's timer was set. */
void srn_timer_set(struct srn_qp *qp, uint64_t at_ns);

#endif
