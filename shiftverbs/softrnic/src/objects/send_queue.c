/* SPDX-License-Identifier: BSD-3-Clause */
/* A QP's send queue: what is posted, completed and flushed. */
#include "objects/nic.h"
#include "objects/queues.h"

enum ibv_wc_opcode srn_wc_opcode(enum ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return IBV_WC_RDMA_WRITE;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        return IBV_WC_COMP_SWAP;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return IBV_WC_FETCH_ADD;
    case IBV_WR_BIND_MW:
        return IBV_WC_BIND_MW;
    case IBV_WR_LOCAL_INV:
        return IBV_WC_LOCAL_INV;
    default:
        return IBV_WC_SEND;
    }
}

void srn_sq_complete(struct srn_qp *qp, enum ibv_wc_status status) {
    struct srn_swqe *w = &qp->sq.wqe[qp->sq.head % qp->sq.capacity];

    qp->sq.head++;
    if (status == IBV_WC_SUCCESS && !qp->sq_sig_all && !(w->flags & IBV_SEND_SIGNALED))
        return;

    struct ibv_wc wc = {
        .wr_id = w->wr_id,
        .status = status,
        .opcode = srn_wc_opcode(w->opcode),
        .qp_num = qp->qpn,
        .byte_len = w->length,
    };
    srn_cq_push(qp->send_cq, &wc, false);
}

void srn_flush(struct srn_qp *qp) {
    if (srn_stalled(qp->nic))
        return;
    while (qp->sq.head != qp->sq.tail)
        srn_sq_complete(qp, IBV_WC_WR_FLUSH_ERR);
    qp->req.send_idx = qp->sq.tail;
    /* What lies in an SRQ is not this QP's, but for what it took out. */
    while (qp->srq ? qp->srq_taken : qp->rq.head != qp->rq.tail) {
        struct ibv_wc wc = {.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV};

        srn_rq_complete(qp, &wc, false);
    }
}

void srn_sq_enqueue(struct srn_qp *qp) {
    struct srn_swqe *w = &qp->sq.wqe[qp->sq.tail % qp->sq.capacity];
    uint32_t n = 0;

    if (qp->type != IBV_QPT_UD) {
        if (w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
            n = 1;
        else if (!srn_is_local(w))
            n = srn_packets(w->length, qp->mtu);
        w->first_psn = qp->req.next_psn;
        w->last_psn = wire_psn_add(w->first_psn, n + WIRE_PSN_MASK);
        qp->req.next_psn = wire_psn_add(w->first_psn, n);
    }
    w->executed = false;
    qp->sq.tail++;
}
