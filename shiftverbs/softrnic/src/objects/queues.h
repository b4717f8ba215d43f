/* SPDX-License-Identifier: BSD-3-Clause */
/* Completion queues and channels, work queues, queue pairs with their transport's state. */
#ifndef SOFTRNIC_OBJECTS_QUEUES_H
#define SOFTRNIC_OBJECTS_QUEUES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <infiniband/verbs.h>

#include "fabric/dcqcn.h"
#include "objects/event.h"
#include "objects/keys.h"
#include "objects/list.h"
#include "objects/nic.h"

struct srn_channel {
    struct ibv_comp_channel ib;
    struct srn_nic *nic;
    struct srn_evq evq;
};

/* What an extended CQ is read through: cqex.c. */
struct srn_cq_poll {
    /* From a start_poll that found something to its end_poll; a thread that starts again has begun anew. */
    pthread_mutex_t lock;
    struct ibv_wc wc;
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
    uint32_t window; /* packets that may be unacknowledged; 0 = it waits for its link */
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

/* What CNPs leave a QP of its link, on a rail that has limits. */
struct srn_pace {
    struct dcqcn_rp rp;
    uint64_t next_ns;             /* its rate has nothing for another packet before */
    struct carried *last_waiting; /* of the packets that wait for it (transport/carry.c): none overtakes it */
    size_t waiting_bytes;
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
    struct srn_pace pace;
    struct dcqcn_np np;      /* CNPs to its peer */
    uint32_t async_reported; /* under the context's async.lock */
};

/* --- completion.c --- */
/* Take the oldest completions. */
uint32_t srn_cq_pop(struct srn_cq *cq, uint32_t max, struct ibv_wc *wc);
void srn_cq_push(struct srn_cq *cq, const struct ibv_wc *wc, bool solicited);
/* Forget completions of a QP that goes to RESET or away, as hardware drivers do. */
void srn_cq_clean(struct srn_cq *cq, uint32_t qpn);

/* --- receive_queue.c: nic->lock held --- */
/* 0 or ENOMEM; what was allocated is freed by srn_rq_free in any case. */
int srn_rq_alloc(struct srn_rq *rq, uint32_t capacity, uint32_t max_sge);
void srn_rq_free(struct srn_rq *rq);
int srn_rq_post(struct srn_rq *rq, uint32_t max_sge, const struct ibv_recv_wr *wr);
/* The receive WR of the message under way or of the next one, NULL if there is none. */
struct srn_rwqe *srn_recv_wqe(struct srn_qp *qp);
/* Complete it. */
void srn_rq_complete(struct srn_qp *qp, struct ibv_wc *wc, bool solicited);

/* --- send_queue.c: nic->lock held --- */
enum ibv_wc_opcode srn_wc_opcode(enum ibv_wr_opcode opcode);
/* Complete the oldest send WR; free its slot. */
void srn_sq_complete(struct srn_qp *qp, enum ibv_wc_status status);
void srn_flush(struct srn_qp *qp);
static inline bool srn_sq_full(const struct srn_qp *qp) {
    return qp->sq.tail - qp->sq.head >= qp->sq.capacity;
}
/* A WR that was written to the slot at the tail is posted. */
void srn_sq_enqueue(struct srn_qp *qp);
/* May WRs be posted in this state? */
static inline bool srn_sq_accepts(const struct srn_qp *qp) {
    return qp->state != IBV_QPS_RESET && qp->state != IBV_QPS_INIT && qp->state != IBV_QPS_RTR;
}
static inline bool srn_is_local(const struct srn_swqe *w) {
    return w->opcode == IBV_WR_BIND_MW || w->opcode == IBV_WR_LOCAL_INV;
}
/* How many packets a message of this length is. */
static inline uint32_t srn_packets(uint32_t length, uint32_t mtu) {
    return length ? (uint32_t)(((uint64_t)length + mtu - 1) / mtu) : 1;
}

/* --- queue_pair.c: nic->lock held --- */
struct srn_qp *srn_qp_find(struct srn_nic *nic, uint32_t qpn);
/* To ERR: both queues flush in order. */
void srn_qp_error(struct srn_qp *qp);
void srn_qp_overrun(struct srn_nic *nic);
void srn_qp_add(struct srn_qp *qp);
void srn_qp_remove(struct srn_qp *qp);
/* Numbers go round, so that packets for a QP that is gone do not meet its successor. */
uint32_t srn_qpn_new(struct srn_nic *nic);

#endif
