/* SPDX-License-Identifier: BSD-3-Clause */
/* Posting work requests; null mode, where a post is its own completion. */
#include <arpa/inet.h>
#include <string.h>

#include "verbs/entry.h"

static struct srn_qp *srn_qp(struct ibv_qp *qp) {
    return srn_container(qp, struct srn_qp, ib);
}

/* --- posting --- */

int srn_check_opcode(const struct srn_qp *qp, enum ibv_wr_opcode opcode, unsigned int flags) {
    switch (opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        return 0;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return qp->type == IBV_QPT_UD ? EINVAL : 0;
    case IBV_WR_SEND_WITH_INV:
        return qp->type == IBV_QPT_RC ? 0 : EINVAL;
    case IBV_WR_RDMA_READ:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        return qp->type == IBV_QPT_RC && !(flags & IBV_SEND_INLINE) ? 0 : EINVAL;
    case IBV_WR_BIND_MW:
    case IBV_WR_LOCAL_INV:
        return qp->type == IBV_QPT_UD || (flags & IBV_SEND_INLINE) ? EINVAL : 0;
    default:
        return EINVAL;
    }
}

static int build_data(struct srn_qp *qp, const struct ibv_send_wr *wr, struct srn_swqe *w) {
    uint64_t length = 0;

    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
        return EINVAL;
    for (int i = 0; i < wr->num_sge; i++)
        length += wr->sg_list[i].length;
    if (length > UINT32_MAX)
        return EINVAL;
    w->length = (uint32_t)length;
    w->num_sge = (uint32_t)wr->num_sge;
    if (wr->send_flags & IBV_SEND_INLINE) {
        uint8_t *to = w->inline_data;

        if (length > qp->cap.max_inline_data)
            return EINVAL;
        for (int i = 0; i < wr->num_sge; i++) {
            if (wr->sg_list[i].length)
                memcpy(to, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
            to += wr->sg_list[i].length;
        }
    } else if (wr->num_sge) {
        memcpy(w->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*w->sge));
    }
    return 0;
}

static int build_swqe(struct srn_qp *qp, const struct ibv_send_wr *wr, struct srn_swqe *w) {
    int rc = srn_check_opcode(qp, wr->opcode, wr->send_flags);

    if (rc)
        return rc;
    w->wr_id = wr->wr_id;
    w->opcode = wr->opcode;
    w->flags = wr->send_flags;
    w->imm = wr->imm_data;
    if (srn_is_local(w)) {
        w->length = w->num_sge = 0;
        w->rkey = wr->invalidate_rkey;
        return wr->opcode == IBV_WR_BIND_MW
                   ? srn_build_bind(qp, w, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info)
                   : 0;
    }
    rc = build_data(qp, wr, w);
    if (rc)
        return rc;
    switch (wr->opcode) {
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        if (w->length != 8)
            return EINVAL;
        w->remote_addr = wr->wr.atomic.remote_addr;
        w->rkey = wr->wr.atomic.rkey;
        w->compare_add = wr->wr.atomic.compare_add;
        w->swap = wr->wr.atomic.swap;
        break;
    case IBV_WR_SEND_WITH_INV:
        w->imm = htonl(wr->invalidate_rkey);
        break;
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        if (qp->type == IBV_QPT_UD) {
            if (!wr->wr.ud.ah || srn_pd(wr->wr.ud.ah->pd)->base != qp->pd->base)
                return EINVAL;
            w->peer = srn_container(wr->wr.ud.ah, struct srn_ah, ib)->peer;
            w->remote_qpn = wr->wr.ud.remote_qpn & WIRE_QPN_MASK;
            w->remote_qkey = wr->wr.ud.remote_qkey;
        }
        break;
    default:
        w->remote_addr = wr->wr.rdma.remote_addr;
        w->rkey = wr->wr.rdma.rkey;
        break;
    }
    return 0;
}

int srn_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct srn_qp *qp = srn_qp(ibqp);
    struct srn_nic *nic = qp->nic;
    int rc = 0;

    if (srn_forked(nic)) {
        *bad = wr;
        return EIO;
    }
    srn_nic_lock(nic);
    if (!srn_sq_accepts(qp))
        rc = EINVAL;
    for (; !rc && wr; wr = wr->next) {
        if (srn_sq_full(qp)) {
            rc = ENOMEM;
            break;
        }
        rc = build_swqe(qp, wr, &qp->sq.wqe[qp->sq.tail % qp->sq.capacity]);
        if (rc)
            break;
        srn_sq_enqueue(qp);
    }
    if (rc)
        *bad = wr;
    srn_sq_run(qp);
    srn_nic_unlock(nic);
    return rc;
}

int srn_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct srn_qp *qp = srn_qp(ibqp);
    struct srn_nic *nic = qp->nic;
    int rc = 0;

    if (srn_forked(nic)) {
        *bad = wr;
        return EIO;
    }
    srn_nic_lock(nic);
    if (qp->state == IBV_QPS_RESET || qp->srq)
        rc = EINVAL;
    for (; !rc && wr; wr = wr->next) {
        rc = srn_rq_post(&qp->rq, qp->cap.max_recv_sge, wr);
        if (rc)
            break;
    }
    if (rc)
        *bad = wr;
    if (qp->state == IBV_QPS_ERR && !atomic_load_explicit(&nic->dead, memory_order_relaxed))
        srn_flush(qp);
    srn_nic_unlock(nic);
    return rc;
}

/* --- null mode --- */

/*
 * What software above a NIC costs is measured with the NIC at its cheapest: no queue, no lock but the CQ's. A
 * post in ERR completes with a flush as ever, so that programs still tear down. What is posted while such a NIC is
 * stalled never completes, and a UD QP's receives do not until it is in ERR: it keeps no queue.
 */
static void null_finish(struct srn_qp *qp) {
    if (atomic_load_explicit(&qp->nic->overrun_pending, memory_order_relaxed)) {
        srn_nic_lock(qp->nic);
        srn_nic_unlock(qp->nic);
    }
}

int srn_null_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct srn_qp *qp = srn_qp(ibqp);
    int rc = 0;

    if (srn_nic_gone(qp->nic) || srn_stalled(qp->nic)) {
        rc = srn_forked(qp->nic) ? EIO : 0;
        *bad = wr;
        return rc;
    }
    for (; wr; wr = wr->next) {
        struct ibv_wc wc = {.wr_id = wr->wr_id, .opcode = srn_wc_opcode(wr->opcode), .qp_num = qp->qpn};

        if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR)
            rc = EINVAL;
        else if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
            rc = EINVAL;
        else
            rc = srn_check_opcode(qp, wr->opcode, wr->send_flags);
        if (rc) {
            *bad = wr;
            break;
        }
        if (qp->state == IBV_QPS_ERR)
            wc.status = IBV_WC_WR_FLUSH_ERR;
        else if (!qp->sq_sig_all && !(wr->send_flags & IBV_SEND_SIGNALED))
            continue;
        for (int i = 0; i < wr->num_sge; i++)
            wc.byte_len += wr->sg_list[i].length;
        srn_cq_push(qp->send_cq, &wc, false);
    }
    null_finish(qp);
    return rc;
}

int srn_null_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct srn_qp *qp = srn_qp(ibqp);
    int rc = 0;

    if (srn_nic_gone(qp->nic) || srn_stalled(qp->nic)) {
        *bad = wr;
        return srn_forked(qp->nic) ? EIO : 0;
    }
    for (; wr; wr = wr->next) {
        struct ibv_wc wc = {.wr_id = wr->wr_id, .opcode = IBV_WC_RECV, .qp_num = qp->qpn};

        if (qp->state == IBV_QPS_RESET || wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge) {
            rc = EINVAL;
            *bad = wr;
            break;
        }
        if (qp->state == IBV_QPS_ERR)
            wc.status = IBV_WC_WR_FLUSH_ERR;
        else if (qp->type == IBV_QPT_UD)
            continue; /* nobody sends; a program that posts again what completes would never stop */
        for (int i = 0; i < wr->num_sge; i++)
            wc.byte_len += wr->sg_list[i].length;
        srn_cq_push(qp->recv_cq, &wc, true);
    }
    null_finish(qp);
    return rc;
}
