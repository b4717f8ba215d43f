/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Extended CQs: completions read field by field between start_poll and end_poll. The entry being read is a copy, so
 * the NIC is never kept waiting by a program that takes its time.
 */
#include <stdlib.h>

#include "verbs/entry.h"

static struct srn_cq *srn_cq(struct ibv_cq_ex *cq) {
    return srn_container(cq, struct srn_cq, ex);
}

static const struct ibv_wc *current(struct ibv_cq_ex *cq) {
    return &srn_cq(cq)->poll->wc;
}

static int take(struct srn_cq *cq) {
    if (!srn_cq_pop(cq, 1, &cq->poll->wc))
        return ENOENT;
    cq->ex.wr_id = cq->poll->wc.wr_id;
    cq->ex.status = cq->poll->wc.status;
    return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr) {
    struct srn_cq_poll *poll = srn_cq(cq)->poll;
    int rc;

    if (attr->comp_mask)
        return EINVAL;
    if (srn_forked(srn_cq(cq)->nic))
        return EIO;
    (void)pthread_mutex_lock(&poll->lock); /* EDEADLK: still ours */
    rc = take(srn_cq(cq));
    if (rc)
        pthread_mutex_unlock(&poll->lock);
    return rc;
}

static int next_poll(struct ibv_cq_ex *cq) {
    return take(srn_cq(cq));
}

static void end_poll(struct ibv_cq_ex *cq) {
    pthread_mutex_unlock(&srn_cq(cq)->poll->lock);
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *cq) {
    return current(cq)->opcode;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *cq) {
    return current(cq)->vendor_err;
}

static uint32_t read_byte_len(struct ibv_cq_ex *cq) {
    return current(cq)->byte_len;
}

static __be32 read_imm_data(struct ibv_cq_ex *cq) {
    return current(cq)->imm_data; /* or the invalidated R_Key */
}

static uint32_t read_qp_num(struct ibv_cq_ex *cq) {
    return current(cq)->qp_num;
}

static uint32_t read_src_qp(struct ibv_cq_ex *cq) {
    return current(cq)->src_qp;
}

static unsigned int read_wc_flags(struct ibv_cq_ex *cq) {
    return current(cq)->wc_flags;
}

static uint32_t read_slid(struct ibv_cq_ex *cq) {
    return current(cq)->slid;
}

static uint8_t read_sl(struct ibv_cq_ex *cq) {
    return current(cq)->sl;
}

static uint8_t read_dlid_path_bits(struct ibv_cq_ex *cq) {
    return current(cq)->dlid_path_bits;
}

static void set_readers(struct ibv_cq_ex *cq, uint64_t wc_flags) {
    cq->start_poll = start_poll;
    cq->next_poll = next_poll;
    cq->end_poll = end_poll;
    cq->read_opcode = read_opcode;
    cq->read_vendor_err = read_vendor_err;
    cq->read_wc_flags = read_wc_flags;
    /* Those that were not asked for stay NULL, as with real drivers. */
    if (wc_flags & IBV_WC_EX_WITH_BYTE_LEN)
        cq->read_byte_len = read_byte_len;
    if (wc_flags & IBV_WC_EX_WITH_IMM)
        cq->read_imm_data = read_imm_data;
    if (wc_flags & IBV_WC_EX_WITH_QP_NUM)
        cq->read_qp_num = read_qp_num;
    if (wc_flags & IBV_WC_EX_WITH_SRC_QP)
        cq->read_src_qp = read_src_qp;
    if (wc_flags & IBV_WC_EX_WITH_SLID)
        cq->read_slid = read_slid;
    if (wc_flags & IBV_WC_EX_WITH_SL)
        cq->read_sl = read_sl;
    if (wc_flags & IBV_WC_EX_WITH_DLID_PATH_BITS)
        cq->read_dlid_path_bits = read_dlid_path_bits;
}

/* 0, or EOPNOTSUPP if it asks for what we do not have. */
static int check_attr(const struct ibv_cq_init_attr_ex *attr) {
    if (attr->wc_flags & ~(uint64_t)IBV_WC_STANDARD_FLAGS)
        return EOPNOTSUPP;
    if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
        return EOPNOTSUPP;
    if ((attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) &&
        (attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED))
        return EOPNOTSUPP;
    return 0;
}

struct ibv_cq_ex *srn_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr) {
    pthread_mutexattr_t kind;
    struct srn_cq *cq;
    int rc = check_attr(attr);

    if (rc) {
        errno = rc;
        return NULL;
    }
    cq = srn_cq_create(context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector);
    if (!cq)
        return NULL;
    cq->poll = calloc(1, sizeof(*cq->poll));
    if (!cq->poll) {
        ibv_destroy_cq(&cq->ib);
        errno = ENOMEM;
        return NULL;
    }
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutex_init(&cq->poll->lock, &kind);
    pthread_mutexattr_destroy(&kind);
    set_readers(&cq->ex, attr->wc_flags);
    return &cq->ex;
}
