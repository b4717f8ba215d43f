/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Extended QPs: work requests written piece by piece between wr_start and wr_complete (ibv_wr_*). They are gathered
 * apart from the send queue and enter it all at once, so that an abort leaves no trace and nobody is locked out of the
 * queue meanwhile.
 */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "verbs/entry.h"

struct srn_builder {
    /* From wr_start to wr_complete or wr_abort; a thread that starts again has begun anew. */
    pthread_mutex_t lock;
    uint32_t count; /* WRs begun */
    int error;      /* the first thing that was wrong */
    struct srn_swqe *wqe;
    struct ibv_sge *sges;
    uint8_t *inline_pool;
};

static struct srn_qp *srn_qp(struct ibv_qp_ex *qp) {
    return srn_container(qp, struct srn_qp, ex);
}

static void fail(struct srn_qp *qp, int error) {
    if (!qp->builder->error)
        qp->builder->error = error;
}

/* --- batches --- */

static void wr_start(struct ibv_qp_ex *ex) {
    struct srn_builder *b = srn_qp(ex)->builder;

    (void)pthread_mutex_lock(&b->lock); /* EDEADLK: still ours */
    b->count = 0;
    b->error = 0;
}

/* nic->lock held. */
static void copy_to_queue(struct srn_qp *qp, const struct srn_swqe *from) {
    struct srn_swqe *to = &qp->sq.wqe[qp->sq.tail % qp->sq.capacity];
    struct ibv_sge *sge = to->sge;
    uint8_t *inline_data = to->inline_data;

    *to = *from;
    to->sge = sge;
    to->inline_data = inline_data;
    if (from->flags & IBV_SEND_INLINE)
        memcpy(inline_data, from->inline_data, from->length);
    else
        memcpy(sge, from->sge, from->num_sge * sizeof(*sge));
    srn_sq_enqueue(qp);
}

static bool is_atomic(const struct srn_swqe *w) {
    return w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* What only shows when a WR is whole. */
static int check(const struct srn_qp *qp, const struct srn_swqe *w) {
    if ((w->flags & IBV_SEND_INLINE) && srn_check_opcode(qp, w->opcode, w->flags))
        return EINVAL;
    if (is_atomic(w) && w->length != 8)
        return EINVAL;
    if (qp->type == IBV_QPT_UD && !w->peer.ip && !qp->nic->null_mode)
        return EINVAL; /* no wr_set_ud_addr */
    return 0;
}

/* A null device: the post is its own completion. */
static void complete_null(struct srn_qp *qp, const struct srn_swqe *w) {
    struct ibv_wc wc = {
        .wr_id = w->wr_id,
        .opcode = srn_wc_opcode(w->opcode),
        .qp_num = qp->qpn,
        .byte_len = w->length,
        .status = qp->state == IBV_QPS_ERR ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS,
    };

    if (wc.status != IBV_WC_SUCCESS || qp->sq_sig_all || (w->flags & IBV_SEND_SIGNALED))
        srn_cq_push(qp->send_cq, &wc, false);
}

static int post(struct srn_qp *qp) {
    struct srn_builder *b = qp->builder;

    if (!srn_sq_accepts(qp))
        return EINVAL;
    if (!qp->nic->null_mode && b->count > qp->sq.capacity - (qp->sq.tail - qp->sq.head))
        return ENOMEM;
    if (qp->nic->null_mode && (srn_nic_gone(qp->nic) || srn_stalled(qp->nic)))
        return 0;
    for (uint32_t i = 0; i < b->count; i++) {
        if (qp->nic->null_mode)
            complete_null(qp, &b->wqe[i]);
        else
            copy_to_queue(qp, &b->wqe[i]);
    }
    if (!qp->nic->null_mode)
        srn_sq_run(qp);
    return 0;
}

static int wr_complete(struct ibv_qp_ex *ex) {
    struct srn_qp *qp = srn_qp(ex);
    struct srn_builder *b = qp->builder;
    int rc = b->error;

    for (uint32_t i = 0; i < b->count && !rc; i++)
        rc = check(qp, &b->wqe[i]);
    if (!rc && srn_forked(qp->nic))
        rc = EIO;
    if (!rc) {
        srn_nic_lock(qp->nic);
        rc = post(qp);
        srn_nic_unlock(qp->nic);
    }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

static void wr_abort(struct ibv_qp_ex *ex) {
    pthread_mutex_unlock(&srn_qp(ex)->builder->lock);
}

/* --- beginning a WR --- */

/* The next WR with what it has of its own; NULL if there is no room or the operation is not possible. */
static struct srn_swqe *begin(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode) {
    struct srn_qp *qp = srn_qp(ex);
    struct srn_builder *b = qp->builder;
    struct srn_swqe *w;

    if (b->count >= qp->sq.capacity) {
        fail(qp, ENOMEM);
        return NULL;
    }
    w = &b->wqe[b->count++];
    w->wr_id = ex->wr_id;
    w->flags = ex->wr_flags & ~(unsigned int)IBV_SEND_INLINE; /* told by wr_set_inline_data */
    w->opcode = opcode;
    w->length = w->num_sge = 0;
    w->peer.ip = 0;
    return w;
}

/* The WR that is being written. */
static struct srn_swqe *current(struct ibv_qp_ex *ex) {
    struct srn_qp *qp = srn_qp(ex);

    if (!qp->builder->count) {
        fail(qp, EINVAL);
        return NULL;
    }
    return &qp->builder->wqe[qp->builder->count - 1];
}

static void begin_rdma(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t remote_addr) {
    struct srn_swqe *w = begin(ex, opcode);

    if (w) {
        w->rkey = rkey;
        w->remote_addr = remote_addr;
    }
}

static void begin_imm(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, __be32 imm) {
    struct srn_swqe *w = begin(ex, opcode);

    if (w)
        w->imm = imm;
}

static void wr_send(struct ibv_qp_ex *ex) {
    (void)begin(ex, IBV_WR_SEND);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) {
    begin_imm(ex, IBV_WR_SEND_WITH_IMM, imm);
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t rkey) {
    begin_imm(ex, IBV_WR_SEND_WITH_INV, htonl(rkey));
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr) {
    begin_rdma(ex, IBV_WR_RDMA_WRITE, rkey, remote_addr);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, __be32 imm) {
    struct srn_swqe *w = begin(ex, IBV_WR_RDMA_WRITE_WITH_IMM);

    if (w) {
        w->rkey = rkey;
        w->remote_addr = remote_addr;
        w->imm = imm;
    }
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr) {
    begin_rdma(ex, IBV_WR_RDMA_READ, rkey, remote_addr);
}

static void begin_atomic(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t remote_addr,
                         uint64_t compare_add, uint64_t swap) {
    struct srn_swqe *w = begin(ex, opcode);

    if (w) {
        w->rkey = rkey;
        w->remote_addr = remote_addr;
        w->compare_add = compare_add;
        w->swap = swap;
    }
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, uint64_t compare,
                              uint64_t swap) {
    begin_atomic(ex, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, remote_addr, compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr, uint64_t add) {
    begin_atomic(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, remote_addr, add, 0);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t rkey) {
    begin_rdma(ex, IBV_WR_LOCAL_INV, rkey, 0);
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey,
                       const struct ibv_mw_bind_info *info) {
    struct srn_swqe *w = begin(ex, IBV_WR_BIND_MW);
    int rc = w ? srn_build_bind(srn_qp(ex), w, mw, rkey, info) : 0;

    if (rc)
        fail(srn_qp(ex), rc);
}

/* --- its data and destination --- */

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t num_sge, const struct ibv_sge *sge) {
    struct srn_qp *qp = srn_qp(ex);
    struct srn_swqe *w = current(ex);
    uint64_t length = 0;

    if (!w)
        return;
    for (size_t i = 0; i < num_sge; i++)
        length += sge[i].length;
    if (num_sge > qp->cap.max_send_sge || length > UINT32_MAX) {
        fail(qp, EINVAL);
        return;
    }
    if (num_sge)
        memcpy(w->sge, sge, num_sge * sizeof(*sge));
    w->num_sge = (uint32_t)num_sge;
    w->length = (uint32_t)length;
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length) {
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};

    wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t num_buf, const struct ibv_data_buf *buf) {
    struct srn_qp *qp = srn_qp(ex);
    struct srn_swqe *w = current(ex);
    size_t length = 0;

    if (!w)
        return;
    for (size_t i = 0; i < num_buf; i++) {
        if (buf[i].length > qp->cap.max_inline_data - length) {
            fail(qp, EINVAL);
            return;
        }
        if (buf[i].length)
            memcpy(w->inline_data + length, buf[i].addr, buf[i].length);
        length += buf[i].length;
    }
    w->flags |= IBV_SEND_INLINE;
    w->num_sge = 0;
    w->length = (uint32_t)length;
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *addr, size_t length) {
    struct ibv_data_buf buf = {.addr = addr, .length = length};

    wr_set_inline_data_list(ex, 1, &buf);
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t remote_qpn,
                           uint32_t remote_qkey) {
    struct srn_qp *qp = srn_qp(ex);
    struct srn_swqe *w = current(ex);

    if (!w)
        return;
    if (!ah || srn_pd(ah->pd)->base != qp->pd->base) {
        fail(qp, EINVAL);
        return;
    }
    w->peer = srn_container(ah, struct srn_ah, ib)->peer;
    w->remote_qpn = remote_qpn & WIRE_QPN_MASK;
    w->remote_qkey = remote_qkey;
}

/* --- creation --- */

#define UD_OPS (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)
#define UC_OPS                                                                                               \
    (UD_OPS | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_LOCAL_INV |    \
     IBV_QP_EX_WITH_BIND_MW)
#define RC_OPS                                                                                               \
    (UC_OPS | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |                                 \
     IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_SEND_WITH_INV)

static int alloc_builder(struct srn_qp *qp) {
    const struct ibv_qp_cap *cap = &qp->cap;
    struct srn_builder *b = calloc(1, sizeof(*b));
    size_t n_inline = (cap->max_inline_data + 7u) & ~7u;
    pthread_mutexattr_t kind;

    if (!b)
        return ENOMEM;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&b->lock, &kind);
    pthread_mutexattr_destroy(&kind);
    qp->builder = b;
    b->wqe = calloc((size_t)cap->max_send_wr + 1, sizeof(*b->wqe));
    b->sges = calloc((size_t)cap->max_send_wr * cap->max_send_sge + 1, sizeof(*b->sges));
    b->inline_pool = calloc(cap->max_send_wr * n_inline + 1, 1);
    if (!b->wqe || !b->sges || !b->inline_pool)
        return ENOMEM;
    for (uint32_t i = 0; i < cap->max_send_wr; i++) {
        b->wqe[i].sge = b->sges + (size_t)i * cap->max_send_sge;
        b->wqe[i].inline_data = b->inline_pool + i * n_inline;
    }
    return 0;
}

static void set_operations(struct ibv_qp_ex *ex, uint64_t ops) {
    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_set_inline_data = wr_set_inline_data;
    ex->wr_set_inline_data_list = wr_set_inline_data_list;
    ex->wr_set_ud_addr = wr_set_ud_addr;
    /* Those that were not asked for stay NULL, as with real drivers. */
    if (ops & IBV_QP_EX_WITH_SEND)
        ex->wr_send = wr_send;
    if (ops & IBV_QP_EX_WITH_SEND_WITH_IMM)
        ex->wr_send_imm = wr_send_imm;
    if (ops & IBV_QP_EX_WITH_SEND_WITH_INV)
        ex->wr_send_inv = wr_send_inv;
    if (ops & IBV_QP_EX_WITH_RDMA_WRITE)
        ex->wr_rdma_write = wr_rdma_write;
    if (ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
        ex->wr_rdma_write_imm = wr_rdma_write_imm;
    if (ops & IBV_QP_EX_WITH_RDMA_READ)
        ex->wr_rdma_read = wr_rdma_read;
    if (ops & IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP)
        ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
    if (ops & IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
        ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
    if (ops & IBV_QP_EX_WITH_LOCAL_INV)
        ex->wr_local_inv = wr_local_inv;
    if (ops & IBV_QP_EX_WITH_BIND_MW)
        ex->wr_bind_mw = wr_bind_mw;
}

int srn_qpex_init(struct srn_qp *qp, uint64_t send_ops) {
    const uint64_t possible = qp->type == IBV_QPT_UD ? UD_OPS : qp->type == IBV_QPT_UC ? UC_OPS : RC_OPS;

    if (send_ops & ~possible)
        return EOPNOTSUPP;
    set_operations(&qp->ex, send_ops);
    return alloc_builder(qp);
}

void srn_qpex_free(struct srn_qp *qp) {
    if (!qp->builder)
        return;
    pthread_mutex_destroy(&qp->builder->lock);
    free(qp->builder->wqe);
    free(qp->builder->sges);
    free(qp->builder->inline_pool);
    free(qp->builder);
}

SRN_EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *ibqp) {
    struct srn_qp *qp;

    if (!srn_is_ours(ibqp->context))
        return SRN_PASS(ibv_qp_to_qp_ex, NULL, ibqp);
    qp = srn_container(ibqp, struct srn_qp, ib);
    return qp->builder ? &qp->ex : NULL;
}
