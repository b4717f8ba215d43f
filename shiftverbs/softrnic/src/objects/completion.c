/* SPDX-License-Identifier: BSD-3-Clause */
/* What is in a completion queue. */
#include "objects/nic.h"
#include "objects/queues.h"

/*
 * Add a completion. In a full CQ it is lost and the CQ is in error for good (IBA 11.6.3.4): CQ_ERR is raised
 * and the QPs that use it go to ERR as soon as the NIC's lock is released.
 */
void srn_cq_push(struct srn_cq *cq, const struct ibv_wc *wc, bool solicited) {
    uint32_t count, slot;
    bool raise = false, overrun = false;

    /* What was written before stays readable: the CQ is the program's memory. */
    if (srn_killed(cq->nic))
        return;
    srn_spin_lock(&cq->lock);
    count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    if (count == cq->capacity || cq->overrun) {
        overrun = !cq->overrun;
        cq->overrun = true;
    } else {
        slot = cq->head + count;
        if (slot >= cq->capacity)
            slot -= cq->capacity;
        cq->ring[slot] = *wc;
        atomic_store_explicit(&cq->count, count + 1, memory_order_release);
        if (cq->armed || (cq->armed_solicited && (solicited || wc->status != IBV_WC_SUCCESS))) {
            cq->armed = cq->armed_solicited = false;
            raise = cq->channel != NULL;
        }
    }
    srn_spin_unlock(&cq->lock);
    if (raise)
        srn_evq_push(&cq->channel->evq, cq, &cq->comp_reported, NULL);
    if (overrun) {
        srn_async_cq_event(cq, IBV_EVENT_CQ_ERR);
        atomic_store(&cq->nic->overrun_pending, true);
    }
}

void srn_cq_clean(struct srn_cq *cq, uint32_t qpn) {
    uint32_t count, from, to, kept = 0;

    srn_spin_lock(&cq->lock);
    count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++) {
        from = (cq->head + i) % cq->capacity;
        if (cq->ring[from].qp_num == qpn)
            continue;
        to = (cq->head + kept++) % cq->capacity;
        if (to != from)
            cq->ring[to] = cq->ring[from];
    }
    atomic_store_explicit(&cq->count, kept, memory_order_release);
    srn_spin_unlock(&cq->lock);
}

uint32_t srn_cq_pop(struct srn_cq *cq, uint32_t max, struct ibv_wc *wc) {
    uint32_t count, n;

    if (atomic_load_explicit(&cq->count, memory_order_acquire) == 0)
        return 0;
    srn_spin_lock(&cq->lock);
    count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    n = max < count ? max : count;
    for (uint32_t i = 0; i < n; i++) {
        wc[i] = cq->ring[cq->head];
        if (++cq->head == cq->capacity)
            cq->head = 0;
    }
    atomic_store_explicit(&cq->count, count - n, memory_order_relaxed);
    srn_spin_unlock(&cq->lock);
    return n;
}
