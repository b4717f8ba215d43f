/* SPDX-License-Identifier: BSD-3-Clause */
/* What all of a process shares, a NIC's and a context's memory, the clock, and what happens to a context by itself. */
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#include "objects/keys.h"
#include "objects/nic.h"
#include "objects/queues.h"

struct srn_globals srn_global = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .nics = {&srn_global.nics, &srn_global.nics},
};

uint64_t srn_now_ns(void) {
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t srn_random(void) {
    uint64_t value;

    if (getrandom(&value, sizeof(value), 0) != sizeof(value))
        value = srn_now_ns() * 0x9e3779b97f4a7c15u;
    return value;
}

/* --- lifetime --- */

void srn_nic_free(struct srn_nic *nic) {
    free(nic->mr_slots);
    pthread_mutex_destroy(&nic->lock);
    pthread_mutex_destroy(&nic->command_lock);
    pthread_cond_destroy(&nic->command_cond);
    free(nic);
}

void srn_ctx_get(struct srn_ctx *ctx) {
    atomic_fetch_add(&ctx->refs, 1);
}

void srn_ctx_put(struct srn_ctx *ctx) {
    struct srn_nic *nic = ctx->nic;

    if (atomic_fetch_sub(&ctx->refs, 1) != 1)
        return;
    free(ctx);
    /* After fork its locks may be held by threads that the child does not have: leave them. */
    if (atomic_fetch_sub(&nic->refs, 1) == 1 && !srn_forked(nic))
        srn_nic_free(nic);
}

/* --- asynchronous events --- */

void srn_async_port_event(struct srn_nic *nic, enum ibv_event_type type) {
    struct srn_list *pos, *tmp;
    struct ibv_async_event e = {.element.port_num = 1, .event_type = type};

    srn_for_each(pos, tmp, &nic->contexts) {
        srn_evq_push(&srn_container(pos, struct srn_ctx, link)->async, NULL, NULL, &e);
    }
}

void srn_async_qp_event(struct srn_qp *qp, enum ibv_event_type type) {
    struct ibv_async_event e = {.element.qp = &qp->ib, .event_type = type};

    srn_evq_push(&qp->ctx->async, qp, &qp->async_reported, &e);
}

void srn_async_cq_event(struct srn_cq *cq, enum ibv_event_type type) {
    struct ibv_async_event e = {.element.cq = &cq->ib, .event_type = type};

    srn_evq_push(&cq->ctx->async, cq, &cq->async_reported, &e);
}

void srn_async_srq_event(struct srn_srq *srq, enum ibv_event_type type) {
    struct ibv_async_event e = {.element.srq = &srq->ib, .event_type = type};

    srn_evq_push(&srq->ctx->async, srq, &srq->async_reported, &e);
}
