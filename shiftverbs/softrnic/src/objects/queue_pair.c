/* SPDX-License-Identifier: BSD-3-Clause */
/* The table of QPs by number, and what an error does to one. */
#include "objects/nic.h"
#include "objects/queues.h"

struct srn_qp *srn_qp_find(struct srn_nic *nic, uint32_t qpn) {
    struct srn_qp *qp = nic->qps[qpn % SRN_QP_BUCKETS];

    while (qp && qp->qpn != qpn)
        qp = qp->hash_next;
    return qp;
}

void srn_qp_add(struct srn_qp *qp) {
    struct srn_qp **bucket = &qp->nic->qps[qp->qpn % SRN_QP_BUCKETS];

    qp->hash_next = *bucket;
    *bucket = qp;
}

void srn_qp_remove(struct srn_qp *qp) {
    struct srn_qp **p = &qp->nic->qps[qp->qpn % SRN_QP_BUCKETS];

    while (*p != qp)
        p = &(*p)->hash_next;
    *p = qp->hash_next;
}

/* Numbers go round, so that packets for a QP that is gone do not meet its successor. 0 and 1 are reserved. */
uint32_t srn_qpn_new(struct srn_nic *nic) {
    do {
        nic->next_qpn = (nic->next_qpn + 1) & WIRE_QPN_MASK;
    } while (nic->next_qpn < 16 || nic->next_qpn == WIRE_QPN_MASK || srn_qp_find(nic, nic->next_qpn));
    return nic->next_qpn;
}

void srn_qp_error(struct srn_qp *qp) {
    qp->state = IBV_QPS_ERR;
    qp->req.retry_at = qp->req.rnr_until = 0;
    qp->resp.ack_pending = false;
    srn_list_del(&qp->timer_link);
    srn_list_del(&qp->resp.ack_link);
    srn_flush(qp);
    /* It takes nothing out of the SRQ any more (IBA 10.2.9.5). */
    if (qp->srq)
        srn_async_qp_event(qp, IBV_EVENT_QP_LAST_WQE_REACHED);
}

void srn_qp_overrun(struct srn_nic *nic) {
    while (atomic_exchange(&nic->overrun_pending, false))
        for (uint32_t i = 0; i < SRN_QP_BUCKETS; i++)
            for (struct srn_qp *qp = nic->qps[i]; qp; qp = qp->hash_next)
                if (qp->state != IBV_QPS_RESET && qp->state != IBV_QPS_ERR &&
                    (qp->send_cq->overrun || qp->recv_cq->overrun)) {
                    srn_qp_error(qp);
                    srn_async_qp_event(qp, IBV_EVENT_QP_FATAL);
                }
}
