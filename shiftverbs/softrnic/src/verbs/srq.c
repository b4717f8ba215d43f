/* SPDX-License-Identifier: BSD-3-Clause */
/* Shared receive queues (basic ones). */
#include <stdlib.h>
#include <string.h>

#include "verbs/entry.h"

static struct srn_srq *srn_srq(struct ibv_srq *srq) {
    return srn_container(srq, struct srn_srq, ib);
}

SRN_EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) {
    struct srn_srq *srq;
    struct srn_nic *nic;
    int rc;

    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_create_srq, NULL, pd, attr);
    nic = srn_pd(pd)->nic;
    rc = srn_command(nic);
    /* A null device knows no QPs that could take the WRs out. */
    if (!rc && nic->null_mode)
        rc = EOPNOTSUPP;
    if (!rc &&
        (attr->attr.max_wr == 0 || attr->attr.max_wr > SRN_MAX_QP_WR || attr->attr.max_sge > SRN_MAX_SGE))
        rc = EINVAL;
    if (rc) {
        errno = rc;
        return NULL;
    }
    srq = calloc(1, sizeof(*srq));
    if (!srq || srn_rq_alloc(&srq->rq, attr->attr.max_wr, attr->attr.max_sge)) {
        if (srq)
            srn_rq_free(&srq->rq);
        free(srq);
        errno = ENOMEM;
        return NULL;
    }
    srq->nic = nic;
    srq->ctx = srn_ctx(pd->context);
    srq->pd = srn_pd(pd);
    srq->max_sge = attr->attr.max_sge;
    srq->ib.context = pd->context;
    srq->ib.srq_context = attr->srq_context;
    srq->ib.pd = pd;
    pthread_mutex_init(&srq->ib.mutex, NULL);
    pthread_cond_init(&srq->ib.cond, NULL);
    srn_nic_lock(nic);
    srq->ib.handle = ++nic->last_handle;
    srq->pd->refs++;
    srn_ctx_get(srq->ctx);
    srn_nic_unlock(nic);
    return &srq->ib;
}

/* nic->lock held. */
static int resize(struct srn_srq *srq, uint32_t max_wr) {
    struct srn_rq bigger = {0};
    uint32_t count = srq->rq.tail - srq->rq.head;

    if (max_wr == 0 || max_wr > SRN_MAX_QP_WR || max_wr < count)
        return EINVAL;
    if (srn_rq_alloc(&bigger, max_wr, srq->max_sge)) {
        srn_rq_free(&bigger);
        return ENOMEM;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct srn_rwqe *from = &srq->rq.wqe[(srq->rq.head + i) % srq->rq.capacity];
        struct srn_rwqe *to = &bigger.wqe[i];

        to->wr_id = from->wr_id;
        to->num_sge = from->num_sge;
        memcpy(to->sge, from->sge, from->num_sge * sizeof(*to->sge));
    }
    bigger.tail = count;
    srn_rq_free(&srq->rq);
    srq->rq = bigger;
    return 0;
}

SRN_EXPORT int ibv_modify_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr, int mask) {
    struct srn_srq *srq;
    uint32_t max_wr;
    int rc;

    if (!srn_is_ours(ibsrq->context))
        return SRN_PASS(ibv_modify_srq, ENOSYS, ibsrq, attr, mask);
    srq = srn_srq(ibsrq);
    rc = srn_command(srq->nic);
    if (rc)
        return rc;
    srn_nic_lock(srq->nic);
    max_wr = mask & IBV_SRQ_MAX_WR ? attr->max_wr : srq->rq.capacity;
    if ((mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT)) || ((mask & IBV_SRQ_LIMIT) && attr->srq_limit > max_wr))
        rc = EINVAL;
    if (!rc && (mask & IBV_SRQ_MAX_WR))
        rc = resize(srq, max_wr);
    if (!rc && (mask & IBV_SRQ_LIMIT))
        srq->limit = attr->srq_limit;
    srn_nic_unlock(srq->nic);
    return rc;
}

SRN_EXPORT int ibv_query_srq(struct ibv_srq *ibsrq, struct ibv_srq_attr *attr) {
    struct srn_srq *srq;
    int rc;

    if (!srn_is_ours(ibsrq->context))
        return SRN_PASS(ibv_query_srq, ENOSYS, ibsrq, attr);
    srq = srn_srq(ibsrq);
    rc = srn_command(srq->nic);
    if (rc)
        return rc;
    srn_nic_lock(srq->nic);
    *attr =
        (struct ibv_srq_attr){.max_wr = srq->rq.capacity, .max_sge = srq->max_sge, .srq_limit = srq->limit};
    srn_nic_unlock(srq->nic);
    return 0;
}

SRN_EXPORT int ibv_destroy_srq(struct ibv_srq *ibsrq) {
    struct srn_srq *srq;
    struct srn_ctx *ctx;
    uint32_t reported, refs;

    if (!srn_is_ours(ibsrq->context))
        return SRN_PASS(ibv_destroy_srq, ENOSYS, ibsrq);
    srq = srn_srq(ibsrq);
    ctx = srq->ctx;
    (void)srn_command(srq->nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(srq->nic)) {
        srn_nic_lock(srq->nic);
        refs = srq->refs;
        srn_nic_unlock(srq->nic);
        if (refs)
            return EBUSY;
        srn_evq_forget(&ctx->async, srq);
        pthread_mutex_lock(&ctx->async.lock);
        reported = srq->async_reported;
        pthread_mutex_unlock(&ctx->async.lock);
        pthread_mutex_lock(&ibsrq->mutex);
        while (ibsrq->events_completed != reported)
            pthread_cond_wait(&ibsrq->cond, &ibsrq->mutex);
        pthread_mutex_unlock(&ibsrq->mutex);
        srn_nic_lock(srq->nic);
        srq->pd->refs--;
        srn_nic_unlock(srq->nic);
        pthread_mutex_destroy(&ibsrq->mutex);
        pthread_cond_destroy(&ibsrq->cond);
    }
    srn_rq_free(&srq->rq);
    free(srq);
    srn_ctx_put(ctx);
    return 0;
}

int srn_post_srq_recv(struct ibv_srq *ibsrq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct srn_srq *srq = srn_srq(ibsrq);
    int rc = 0;

    if (srn_forked(srq->nic)) {
        *bad = wr;
        return EIO;
    }
    srn_nic_lock(srq->nic);
    for (; wr; wr = wr->next) {
        rc = srn_rq_post(&srq->rq, srq->max_sge, wr);
        if (rc) {
            *bad = wr;
            break;
        }
    }
    srn_nic_unlock(srq->nic);
    return rc;
}
