/* SPDX-License-Identifier: BSD-3-Clause */
/* Receive queues: a QP's own, an SRQ's, and where a QP finds the receive WR of the next message. */
#include <stdlib.h>
#include <string.h>

#include "objects/nic.h"
#include "objects/queues.h"

int srn_rq_alloc(struct srn_rq *rq, uint32_t capacity, uint32_t max_sge) {
    rq->capacity = capacity;
    rq->wqe = calloc((size_t)capacity + 1, sizeof(*rq->wqe));
    rq->sges = calloc((size_t)capacity * max_sge + 1, sizeof(*rq->sges));
    if (!rq->wqe || !rq->sges)
        return ENOMEM;
    for (uint32_t i = 0; i < capacity; i++)
        rq->wqe[i].sge = rq->sges + (size_t)i * max_sge;
    return 0;
}

void srn_rq_free(struct srn_rq *rq) {
    free(rq->wqe);
    free(rq->sges);
}

int srn_rq_post(struct srn_rq *rq, uint32_t max_sge, const struct ibv_recv_wr *wr) {
    struct srn_rwqe *w;

    if (rq->tail - rq->head >= rq->capacity)
        return ENOMEM;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > max_sge)
        return EINVAL;
    w = &rq->wqe[rq->tail % rq->capacity];
    w->wr_id = wr->wr_id;
    w->num_sge = (uint32_t)wr->num_sge;
    if (wr->num_sge)
        memcpy(w->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*w->sge));
    rq->tail++;
    return 0;
}

/* Copy the oldest WR of its SRQ to the QP; false if there is none. */
static bool srq_take(struct srn_qp *qp) {
    struct srn_srq *srq = qp->srq;
    const struct srn_rwqe *from;

    if (srq->rq.head == srq->rq.tail)
        return false;
    from = &srq->rq.wqe[srq->rq.head++ % srq->rq.capacity];
    qp->srq_wqe.wr_id = from->wr_id;
    qp->srq_wqe.num_sge = from->num_sge;
    memcpy(qp->srq_wqe.sge, from->sge, from->num_sge * sizeof(*from->sge));
    if (srq->limit && srq->rq.tail - srq->rq.head < srq->limit) {
        srq->limit = 0; /* told once, until it is armed again (IBA 10.2.9.1) */
        srn_async_srq_event(srq, IBV_EVENT_SRQ_LIMIT_REACHED);
    }
    return true;
}

struct srn_rwqe *srn_recv_wqe(struct srn_qp *qp) {
    if (!qp->srq)
        return qp->rq.head == qp->rq.tail ? NULL : &qp->rq.wqe[qp->rq.head % qp->rq.capacity];
    if (!qp->srq_taken)
        qp->srq_taken = srq_take(qp);
    return qp->srq_taken ? &qp->srq_wqe : NULL;
}

void srn_rq_complete(struct srn_qp *qp, struct ibv_wc *wc, bool solicited) {
    if (qp->srq) {
        wc->wr_id = qp->srq_wqe.wr_id;
        qp->srq_taken = false;
    } else {
        wc->wr_id = qp->rq.wqe[qp->rq.head % qp->rq.capacity].wr_id;
        qp->rq.head++;
    }
    wc->qp_num = qp->qpn;
    srn_cq_push(qp->recv_cq, wc, solicited);
}
