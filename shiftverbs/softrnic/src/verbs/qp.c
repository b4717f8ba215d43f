/* SPDX-License-Identifier: BSD-3-Clause */
/* Queue pairs: creation, state machine, query, destruction; address handles. */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "verbs/entry.h"

/* IBV_ACCESS_FLUSH_GLOBAL and _PERSISTENT, which Debian 12's header does not have. */
#define SRN_ACCESS_FLUSH (1u << 8 | 1u << 9)

static struct srn_qp *srn_qp(struct ibv_qp *qp) {
    return srn_container(qp, struct srn_qp, ib);
}

/* --- creation --- */

static int check_caps(const struct ibv_qp_cap *cap) {
    if (cap->max_send_wr > SRN_MAX_QP_WR || cap->max_recv_wr > SRN_MAX_QP_WR ||
        cap->max_send_sge > SRN_MAX_SGE || cap->max_recv_sge > SRN_MAX_SGE ||
        cap->max_inline_data > SRN_MAX_INLINE)
        return EINVAL;
    return 0;
}

static void free_queues(struct srn_qp *qp) {
    free(qp->sq.wqe);
    free(qp->sq.sges);
    free(qp->sq.inline_pool);
    srn_rq_free(&qp->rq);
    free(qp->srq_wqe.sge);
    free(qp->resp.resources);
    srn_qpex_free(qp);
}

static int alloc_queues(struct srn_qp *qp) {
    const struct ibv_qp_cap *cap = &qp->cap;
    struct srn_sq *sq = &qp->sq;
    size_t n_inline = (cap->max_inline_data + 7u) & ~7u;

    sq->capacity = cap->max_send_wr;
    sq->wqe = calloc(sq->capacity + 1, sizeof(*sq->wqe));
    sq->sges = calloc((size_t)sq->capacity * cap->max_send_sge + 1, sizeof(*sq->sges));
    sq->inline_pool = calloc(sq->capacity * n_inline + 1, 1);
    if (!sq->wqe || !sq->sges || !sq->inline_pool)
        return ENOMEM;
    if (qp->srq) {
        qp->srq_wqe.sge = calloc((size_t)qp->srq->max_sge + 1, sizeof(*qp->srq_wqe.sge));
        if (!qp->srq_wqe.sge)
            return ENOMEM;
    }
    for (uint32_t i = 0; i < sq->capacity; i++) {
        sq->wqe[i].sge = sq->sges + (size_t)i * cap->max_send_sge;
        sq->wqe[i].inline_data = sq->inline_pool + i * n_inline;
    }
    return srn_rq_alloc(&qp->rq, cap->max_recv_wr, cap->max_recv_sge);
}

/* send_ops: what ibv_wr_* will be used for; 0 = nothing. */
static struct srn_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr, uint64_t send_ops) {
    struct srn_pd *spd = srn_pd(pd);
    struct srn_nic *nic = spd->nic;
    struct srn_qp *qp;
    int rc = srn_command(nic);

    if (!rc && attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UC && attr->qp_type != IBV_QPT_UD)
        rc = EOPNOTSUPP;
    if (!rc && attr->srq &&
        (!srn_is_ours(attr->srq->context) || srn_container(attr->srq, struct srn_srq, ib)->nic != nic))
        rc = EINVAL;
    if (!rc && (!attr->send_cq || !attr->recv_cq || !srn_is_ours(attr->send_cq->context) ||
                !srn_is_ours(attr->recv_cq->context)))
        rc = EINVAL;
    if (!rc && (srn_container(attr->send_cq, struct srn_cq, ib)->nic != nic ||
                srn_container(attr->recv_cq, struct srn_cq, ib)->nic != nic))
        rc = EINVAL;
    if (!rc)
        rc = check_caps(&attr->cap);
    if (rc) {
        errno = rc;
        return NULL;
    }
    qp = calloc(1, sizeof(*qp));
    if (!qp) {
        errno = ENOMEM;
        return NULL;
    }
    qp->nic = nic;
    qp->ctx = srn_ctx(pd->context);
    qp->pd = spd;
    qp->send_cq = srn_container(attr->send_cq, struct srn_cq, ib);
    qp->recv_cq = srn_container(attr->recv_cq, struct srn_cq, ib);
    qp->type = attr->qp_type;
    qp->sq_sig_all = attr->sq_sig_all != 0;
    if (attr->srq) {
        qp->srq = srn_container(attr->srq, struct srn_srq, ib);
        attr->cap.max_recv_wr = attr->cap.max_recv_sge = 0;
    }
    qp->cap = attr->cap;
    qp->state = IBV_QPS_RESET;
    qp->mtu = srn_mtu_bytes(nic->active_mtu);
    srn_list_init(&qp->timer_link);
    srn_list_init(&qp->resp.ack_link);
    rc = alloc_queues(qp);
    if (!rc && send_ops)
        rc = srn_qpex_init(qp, send_ops);
    if (rc) {
        free_queues(qp);
        free(qp);
        errno = rc;
        return NULL;
    }
    qp->ib.context = pd->context;
    qp->ib.qp_context = attr->qp_context;
    qp->ib.pd = pd;
    qp->ib.send_cq = attr->send_cq;
    qp->ib.recv_cq = attr->recv_cq;
    qp->ib.srq = attr->srq;
    qp->ib.state = IBV_QPS_RESET;
    qp->ib.qp_type = attr->qp_type;
    pthread_mutex_init(&qp->ib.mutex, NULL);
    pthread_cond_init(&qp->ib.cond, NULL);

    srn_nic_lock(nic);
    if (nic->qp_count >= SRN_MAX_QP) {
        srn_nic_unlock(nic);
        free_queues(qp);
        free(qp);
        errno = ENOMEM;
        return NULL;
    }
    qp->qpn = qp->ib.qp_num = qp->ib.handle = srn_qpn_new(nic);
    srn_qp_add(qp);
    nic->qp_count++;
    srn_ctx_get(qp->ctx);
    spd->refs++;
    qp->send_cq->refs++;
    qp->recv_cq->refs++;
    if (qp->srq)
        qp->srq->refs++;
    srn_nic_unlock(nic);
    return qp;
}

SRN_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    struct srn_qp *qp;

    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_create_qp, NULL, pd, attr);
    qp = create_qp(pd, attr, 0);
    return qp ? &qp->ib : NULL;
}

struct ibv_qp *srn_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *ex) {
    struct ibv_qp_init_attr attr = {
        .qp_context = ex->qp_context,
        .send_cq = ex->send_cq,
        .recv_cq = ex->recv_cq,
        .srq = ex->srq,
        .cap = ex->cap,
        .qp_type = ex->qp_type,
        .sq_sig_all = ex->sq_sig_all,
    };
    uint64_t send_ops = ex->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? ex->send_ops_flags : 0;
    const uint32_t known =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS | IBV_QP_INIT_ATTR_CREATE_FLAGS;
    struct srn_qp *qp;

    if (!(ex->comp_mask & IBV_QP_INIT_ATTR_PD) || (ex->comp_mask & ~known) ||
        ((ex->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS) && ex->create_flags)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (!ex->pd || ex->pd->context != context) {
        errno = EINVAL;
        return NULL;
    }
    qp = create_qp(ex->pd, &attr, send_ops);
    if (!qp)
        return NULL;
    ex->cap = attr.cap;
    return &qp->ib;
}

SRN_EXPORT int ibv_destroy_qp(struct ibv_qp *ibqp) {
    struct srn_qp *qp;
    struct srn_nic *nic;
    struct srn_ctx *ctx;
    uint32_t reported;

    if (!srn_is_ours(ibqp->context))
        return SRN_PASS(ibv_destroy_qp, ENOSYS, ibqp);
    qp = srn_qp(ibqp);
    nic = qp->nic;
    ctx = qp->ctx;
    (void)srn_command(nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(nic)) {
        srn_nic_lock(nic);
        srn_qp_remove(qp);
        srn_list_del(&qp->timer_link);
        srn_list_del(&qp->resp.ack_link);
        nic->qp_count--;
        srn_cq_clean(qp->send_cq, qp->qpn);
        srn_cq_clean(qp->recv_cq, qp->qpn);
        srn_nic_unlock(nic);

        /* As libibverbs: an event that was taken must be acknowledged before its QP can go. */
        srn_evq_forget(&qp->ctx->async, qp);
        pthread_mutex_lock(&qp->ctx->async.lock);
        reported = qp->async_reported;
        pthread_mutex_unlock(&qp->ctx->async.lock);
        pthread_mutex_lock(&ibqp->mutex);
        while (ibqp->events_completed != reported)
            pthread_cond_wait(&ibqp->cond, &ibqp->mutex);
        pthread_mutex_unlock(&ibqp->mutex);

        srn_nic_lock(nic);
        qp->pd->refs--;
        qp->send_cq->refs--;
        qp->recv_cq->refs--;
        if (qp->srq)
            qp->srq->refs--;
        srn_nic_unlock(nic);
        pthread_mutex_destroy(&ibqp->mutex);
        pthread_cond_destroy(&ibqp->cond);
    }
    free_queues(qp);
    free(qp);
    srn_ctx_put(ctx);
    return 0;
}

/* --- state machine --- */

static void reset(struct srn_qp *qp) {
    srn_list_del(&qp->timer_link);
    srn_list_del(&qp->resp.ack_link);
    srn_cq_clean(qp->send_cq, qp->qpn);
    if (qp->recv_cq != qp->send_cq)
        srn_cq_clean(qp->recv_cq, qp->qpn);
    qp->sq.head = qp->sq.tail = 0;
    qp->rq.head = qp->rq.tail = 0;
    qp->srq_taken = false;
    srn_req_reset(qp, 0);
    srn_resp_reset(qp, 0);
    free(qp->resp.resources);
    qp->resp.resources = NULL;
    qp->resp.resource_count = 0;
    memset(&qp->attr, 0, sizeof(qp->attr));
    qp->peer = (struct srn_peer){0};
    qp->sq_drain_event = false;
}

/* The values themselves. 0 or errno. */
static int check_values(const struct srn_qp *qp, const struct ibv_qp_attr *a, int mask) {
    struct srn_peer peer;

    if ((mask & IBV_QP_PORT) && a->port_num != 1)
        return EINVAL;
    if ((mask & IBV_QP_PKEY_INDEX) && a->pkey_index != 0)
        return EINVAL;
    if ((mask & IBV_QP_PATH_MTU) && (a->path_mtu < IBV_MTU_256 || a->path_mtu > qp->nic->active_mtu))
        return EINVAL;
    if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) && a->max_rd_atomic > SRN_MAX_RD_ATOMIC)
        return EINVAL;
    if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) && a->max_dest_rd_atomic > SRN_MAX_RD_ATOMIC)
        return EINVAL;
    if ((mask & IBV_QP_TIMEOUT) && a->timeout > 31)
        return EINVAL;
    if ((mask & IBV_QP_RETRY_CNT) && a->retry_cnt > 7)
        return EINVAL;
    if ((mask & IBV_QP_RNR_RETRY) && a->rnr_retry > 7)
        return EINVAL;
    if ((mask & IBV_QP_MIN_RNR_TIMER) && a->min_rnr_timer > 31)
        return EINVAL;
    /* Rights to FLUSH have no effect: no requester here has that operation. */
    if ((mask & IBV_QP_ACCESS_FLAGS) &&
        (a->qp_access_flags &
         ~(unsigned int)(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                         IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND | SRN_ACCESS_FLUSH)))
        return EINVAL;
    if ((mask & IBV_QP_AV) && !qp->nic->null_mode) {
        if (!srn_resolve_av(qp->nic, &a->ah_attr, &peer))
            return EINVAL;
        if (a->ah_attr.port_num > 1)
            return EINVAL;
    }
    if (mask & IBV_QP_ALT_PATH)
        return EINVAL;
    return 0;
}

static int apply(struct srn_qp *qp, const struct ibv_qp_attr *a, int mask) {
    struct ibv_qp_attr *mine = &qp->attr;

    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) {
        struct srn_resource *r = calloc(a->max_dest_rd_atomic + 1u, sizeof(*r));

        if (!r)
            return ENOMEM;
        free(qp->resp.resources);
        qp->resp.resources = r;
        qp->resp.resource_count = a->max_dest_rd_atomic;
        qp->resp.resource_next = 0;
        mine->max_dest_rd_atomic = a->max_dest_rd_atomic;
    }
    if (mask & IBV_QP_PKEY_INDEX)
        mine->pkey_index = a->pkey_index;
    if (mask & IBV_QP_PORT)
        mine->port_num = a->port_num;
    if (mask & IBV_QP_ACCESS_FLAGS)
        mine->qp_access_flags = a->qp_access_flags;
    if (mask & IBV_QP_QKEY)
        mine->qkey = a->qkey;
    if (mask & IBV_QP_AV) {
        mine->ah_attr = a->ah_attr;
        srn_resolve_av(qp->nic, &a->ah_attr, &qp->peer);
    }
    if (mask & IBV_QP_PATH_MTU) {
        mine->path_mtu = a->path_mtu;
        qp->mtu = srn_mtu_bytes(a->path_mtu);
    }
    if (mask & IBV_QP_DEST_QPN)
        mine->dest_qp_num = a->dest_qp_num & WIRE_QPN_MASK;
    if (mask & IBV_QP_RQ_PSN) {
        mine->rq_psn = a->rq_psn & WIRE_PSN_MASK;
        srn_resp_reset(qp, mine->rq_psn);
    }
    if (mask & IBV_QP_MIN_RNR_TIMER)
        mine->min_rnr_timer = a->min_rnr_timer;
    if (mask & IBV_QP_TIMEOUT)
        mine->timeout = a->timeout;
    if (mask & IBV_QP_RETRY_CNT)
        mine->retry_cnt = qp->req.retries = a->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY)
        mine->rnr_retry = qp->req.rnr_retries = a->rnr_retry;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
        mine->max_rd_atomic = a->max_rd_atomic;
    if (mask & IBV_QP_SQ_PSN) {
        mine->sq_psn = a->sq_psn & WIRE_PSN_MASK;
        srn_req_reset(qp, mine->sq_psn);
    }
    if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)
        mine->en_sqd_async_notify = a->en_sqd_async_notify;
    return 0;
}

/* nic->lock held. */
static int modify(struct srn_qp *qp, struct ibv_qp_attr *attr, int mask) {
    enum ibv_qp_state cur = qp->state, next;
    int rc;

    if ((mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != cur)
        return EINVAL;
    next = mask & IBV_QP_STATE ? attr->qp_state : cur;
    if (!srn_qp_attr_ok(qp->type, cur, next, mask))
        return EINVAL;
    rc = check_values(qp, attr, mask);
    if (rc)
        return rc;

    if (next == IBV_QPS_RESET) {
        reset(qp);
        qp->state = next;
        return 0;
    }
    if (next == IBV_QPS_ERR) {
        if (cur != IBV_QPS_ERR)
            srn_qp_error(qp);
        return 0;
    }
    rc = apply(qp, attr, mask);
    if (rc)
        return rc;
    qp->state = next;
    if (next == IBV_QPS_SQD && cur == IBV_QPS_RTS) {
        qp->sq_drain_event = (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY) && attr->en_sqd_async_notify;
        srn_sq_check_drained(qp);
    }
    if (next == IBV_QPS_RTS && qp->sq.head != qp->sq.tail)
        srn_sq_run(qp);
    return 0;
}

SRN_EXPORT int ibv_modify_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask) {
    struct srn_qp *qp;
    int rc;

    if (!srn_is_ours(ibqp->context))
        return SRN_PASS(ibv_modify_qp, ENOSYS, ibqp, attr, mask);
    qp = srn_qp(ibqp);
    rc = srn_command(qp->nic);
    if (rc)
        return rc;
    srn_nic_lock(qp->nic);
    rc = modify(qp, attr, mask);
    ibqp->state = qp->state;
    srn_nic_unlock(qp->nic);
    return rc;
}

SRN_EXPORT int ibv_query_qp(struct ibv_qp *ibqp, struct ibv_qp_attr *attr, int mask,
                            struct ibv_qp_init_attr *init_attr) {
    struct srn_qp *qp;
    int rc;

    if (!srn_is_ours(ibqp->context))
        return SRN_PASS(ibv_query_qp, ENOSYS, ibqp, attr, mask, init_attr);
    qp = srn_qp(ibqp);
    rc = srn_command(qp->nic);
    if (rc)
        return rc;
    srn_nic_lock(qp->nic);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = qp->state;
    attr->cap = qp->cap;
    attr->path_mig_state = IBV_MIG_MIGRATED;
    attr->sq_draining = qp->state == IBV_QPS_SQD && qp->sq.head != qp->req.send_idx;
    if (qp->type != IBV_QPT_UD) {
        attr->rq_psn = qp->resp.psn;
        attr->sq_psn = qp->req.next_psn;
    }
    ibqp->state = qp->state;
    srn_nic_unlock(qp->nic);
    memset(init_attr, 0, sizeof(*init_attr));
    init_attr->qp_context = ibqp->qp_context;
    init_attr->send_cq = ibqp->send_cq;
    init_attr->recv_cq = ibqp->recv_cq;
    init_attr->srq = ibqp->srq;
    init_attr->cap = qp->cap;
    init_attr->qp_type = qp->type;
    init_attr->sq_sig_all = qp->sq_sig_all;
    return 0;
}

/* --- address handles --- */

SRN_EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    struct srn_pd *spd;
    struct srn_ah *ah;
    struct srn_peer peer = {0};
    int rc;

    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_create_ah, NULL, pd, attr);
    spd = srn_pd(pd);
    rc = srn_nic_gone(spd->nic);
    if (!rc && (attr->port_num != 1 || !attr->is_global || attr->grh.sgid_index >= SRN_GID_COUNT))
        rc = EINVAL;
    if (!rc && !spd->nic->null_mode && !srn_resolve_av(spd->nic, attr, &peer))
        rc = EINVAL;
    if (rc) {
        errno = rc;
        return NULL;
    }
    ah = calloc(1, sizeof(*ah));
    if (!ah) {
        errno = ENOMEM;
        return NULL;
    }
    ah->pd = spd;
    ah->nic = spd->nic;
    ah->peer = peer;
    ah->ib.context = pd->context;
    ah->ib.pd = pd;
    srn_nic_lock(spd->nic);
    spd->refs++;
    ah->ib.handle = ++spd->nic->last_handle;
    srn_ctx_get(srn_ctx(pd->context));
    srn_nic_unlock(spd->nic);
    return &ah->ib;
}

SRN_EXPORT int ibv_destroy_ah(struct ibv_ah *ibah) {
    struct srn_ah *ah;
    struct srn_ctx *ctx;

    if (!srn_is_ours(ibah->context))
        return SRN_PASS(ibv_destroy_ah, ENOSYS, ibah);
    ah = srn_container(ibah, struct srn_ah, ib);
    if (!srn_forked(ah->nic)) {
        srn_nic_lock(ah->nic);
        ah->pd->refs--;
        srn_nic_unlock(ah->nic);
    }
    ctx = srn_ctx(ibah->context);
    free(ah);
    srn_ctx_put(ctx);
    return 0;
}

SRN_EXPORT struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh,
                                                uint8_t port_num) {
    struct ibv_ah_attr attr;

    if (!srn_is_ours(pd->context))
        return SRN_PASS(ibv_create_ah_from_wc, NULL, pd, wc, grh, port_num);
    if (ibv_init_ah_from_wc(pd->context, port_num, wc, grh, &attr))
        return NULL;
    return ibv_create_ah(pd, &attr);
}
