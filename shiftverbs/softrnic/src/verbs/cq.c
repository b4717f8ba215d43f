/* SPDX-License-Identifier: BSD-3-Clause */
/* Completion queues and completion channels. */
#include <stdlib.h>
#include <string.h>

#include "verbs/entry.h"

static struct srn_cq *srn_cq(struct ibv_cq *cq) {
    return srn_container(cq, struct srn_cq, ib);
}

/* --- channels --- */

SRN_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    struct srn_channel *ch;
    int rc;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_create_comp_channel, NULL, context);
    rc = srn_command(srn_ctx(context)->nic);
    if (rc) {
        errno = rc;
        return NULL;
    }
    ch = calloc(1, sizeof(*ch));
    if (!ch) {
        errno = ENOMEM;
        return NULL;
    }
    rc = srn_evq_init(&ch->evq);
    if (rc) {
        free(ch);
        errno = rc;
        return NULL;
    }
    ch->nic = srn_ctx(context)->nic;
    ch->ib.context = context;
    ch->ib.fd = ch->evq.fd;
    srn_ctx_get(srn_ctx(context));
    return &ch->ib;
}

SRN_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
    struct srn_channel *ch;
    struct srn_ctx *ctx;
    int refs;

    if (!srn_is_ours(channel->context))
        return SRN_PASS(ibv_destroy_comp_channel, ENOSYS, channel);
    ch = srn_container(channel, struct srn_channel, ib);
    ctx = srn_ctx(channel->context);
    if (!srn_forked(ch->nic)) {
        srn_nic_lock(ch->nic);
        refs = ch->ib.refcnt;
        srn_nic_unlock(ch->nic);
        if (refs)
            return EBUSY;
    }
    srn_evq_close(&ch->evq, srn_forked(ch->nic));
    free(ch);
    srn_ctx_put(ctx);
    return 0;
}

SRN_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
    struct srn_channel *ch;
    struct srn_event e;

    if (!srn_is_ours(channel->context))
        return SRN_PASS(ibv_get_cq_event, -1, channel, cq, cq_context);
    ch = srn_container(channel, struct srn_channel, ib);
    if (srn_forked(ch->nic)) {
        errno = EIO;
        return -1;
    }
    if (srn_evq_pop(&ch->evq, &e))
        return -1;
    *cq = &((struct srn_cq *)e.object)->ib;
    *cq_context = (*cq)->cq_context;
    return 0;
}

SRN_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents) {
    if (!srn_is_ours(cq->context)) {
        if (SRN_REAL(ibv_ack_cq_events))
            SRN_REAL(ibv_ack_cq_events)(cq, nevents);
        return;
    }
    if (srn_forked(srn_cq(cq)->nic))
        return;
    pthread_mutex_lock(&cq->mutex);
    cq->comp_events_completed += nevents;
    pthread_cond_broadcast(&cq->cond);
    pthread_mutex_unlock(&cq->mutex);
}

/* --- queues --- */

struct srn_cq *srn_cq_create(struct ibv_context *context, uint32_t cqe, void *cq_context,
                             struct ibv_comp_channel *channel, uint32_t comp_vector) {
    struct srn_cq *cq;
    struct srn_nic *nic;
    int rc;

    nic = srn_ctx(context)->nic;
    rc = srn_command(nic);
    if (!rc && (cqe == 0 || cqe > SRN_MAX_CQE || comp_vector >= (uint32_t)context->num_comp_vectors))
        rc = EINVAL;
    if (rc) {
        errno = rc;
        return NULL;
    }
    cq = calloc(1, sizeof(*cq));
    if (cq)
        cq->ring = calloc(cqe, sizeof(*cq->ring));
    if (!cq || !cq->ring) {
        free(cq);
        errno = ENOMEM;
        return NULL;
    }
    cq->nic = nic;
    cq->ctx = srn_ctx(context);
    cq->channel = channel ? srn_container(channel, struct srn_channel, ib) : NULL;
    cq->capacity = cqe;
    cq->ib.context = context;
    cq->ib.channel = channel;
    cq->ib.cq_context = cq_context;
    cq->ib.cqe = (int)cqe;
    pthread_mutex_init(&cq->ib.mutex, NULL);
    pthread_cond_init(&cq->ib.cond, NULL);
    srn_nic_lock(nic);
    cq->ib.handle = ++nic->last_handle;
    if (channel)
        channel->refcnt++;
    srn_ctx_get(cq->ctx);
    srn_nic_unlock(nic);
    return cq;
}

SRN_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                        struct ibv_comp_channel *channel, int comp_vector) {
    struct srn_cq *cq;

    if (!srn_is_ours(context))
        return SRN_PASS(ibv_create_cq, NULL, context, cqe, cq_context, channel, comp_vector);
    /* Negative numbers become ones that are too large. */
    cq = srn_cq_create(context, (uint32_t)cqe, cq_context, channel, (uint32_t)comp_vector);
    return cq ? &cq->ib : NULL;
}

/* srn_cq.lock held: copy the entries to the start of a new ring. */
static void move_ring(struct srn_cq *cq, struct ibv_wc *ring, uint32_t capacity) {
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);

    for (uint32_t i = 0; i < count; i++)
        ring[i] = cq->ring[(cq->head + i) % cq->capacity];
    free(cq->ring);
    cq->ring = ring;
    cq->capacity = capacity;
    cq->head = 0;
}

SRN_EXPORT int ibv_resize_cq(struct ibv_cq *ibcq, int cqe) {
    struct srn_cq *cq;
    struct ibv_wc *ring;

    if (!srn_is_ours(ibcq->context))
        return SRN_PASS(ibv_resize_cq, ENOSYS, ibcq, cqe);
    cq = srn_cq(ibcq);
    if (srn_command(cq->nic))
        return EIO;
    if (cqe <= 0 || cqe > SRN_MAX_CQE)
        return EINVAL;
    ring = calloc((size_t)cqe, sizeof(*ring));
    if (!ring)
        return ENOMEM;
    srn_spin_lock(&cq->lock);
    if (atomic_load_explicit(&cq->count, memory_order_relaxed) > (uint32_t)cqe) {
        srn_spin_unlock(&cq->lock);
        free(ring);
        return EINVAL;
    }
    move_ring(cq, ring, (uint32_t)cqe);
    cq->ib.cqe = cqe;
    srn_spin_unlock(&cq->lock);
    return 0;
}

/* As libibverbs: an event that was taken must be acknowledged before its CQ can go. */
static void wait_acknowledged(struct srn_cq *cq) {
    uint32_t comp = 0, async;

    if (cq->channel) {
        srn_evq_forget(&cq->channel->evq, cq);
        pthread_mutex_lock(&cq->channel->evq.lock);
        comp = cq->comp_reported;
        pthread_mutex_unlock(&cq->channel->evq.lock);
    }
    srn_evq_forget(&cq->ctx->async, cq);
    pthread_mutex_lock(&cq->ctx->async.lock);
    async = cq->async_reported;
    pthread_mutex_unlock(&cq->ctx->async.lock);

    pthread_mutex_lock(&cq->ib.mutex);
    while (cq->ib.comp_events_completed != comp || cq->ib.async_events_completed != async)
        pthread_cond_wait(&cq->ib.cond, &cq->ib.mutex);
    pthread_mutex_unlock(&cq->ib.mutex);
}

SRN_EXPORT int ibv_destroy_cq(struct ibv_cq *ibcq) {
    struct srn_cq *cq;
    struct srn_nic *nic;
    struct srn_ctx *ctx;

    if (!srn_is_ours(ibcq->context))
        return SRN_PASS(ibv_destroy_cq, ENOSYS, ibcq);
    cq = srn_cq(ibcq);
    nic = cq->nic;
    ctx = cq->ctx;
    (void)srn_command(nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(nic)) {
        srn_nic_lock(nic);
        if (cq->refs) {
            srn_nic_unlock(nic);
            return EBUSY;
        }
        srn_nic_unlock(nic);
        wait_acknowledged(cq);
        srn_nic_lock(nic);
        if (cq->channel)
            cq->channel->ib.refcnt--;
        srn_nic_unlock(nic);
        pthread_mutex_destroy(&cq->ib.mutex);
        pthread_cond_destroy(&cq->ib.cond);
    }
    if (cq->poll)
        pthread_mutex_destroy(&cq->poll->lock);
    free(cq->poll);
    free(cq->ring);
    free(cq);
    srn_ctx_put(ctx);
    return 0;
}

int srn_poll_cq(struct ibv_cq *ibcq, int num_entries, struct ibv_wc *wc) {
    struct srn_cq *cq = srn_cq(ibcq);

    if (srn_forked(cq->nic) || num_entries < 0)
        return -1;
    return (int)srn_cq_pop(cq, (uint32_t)num_entries, wc);
}

int srn_req_notify_cq(struct ibv_cq *ibcq, int solicited_only) {
    struct srn_cq *cq = srn_cq(ibcq);

    if (srn_nic_gone(cq->nic))
        return EIO;
    srn_spin_lock(&cq->lock);
    if (solicited_only)
        cq->armed_solicited = true;
    else
        cq->armed = true;
    srn_spin_unlock(&cq->lock);
    return 0;
}
