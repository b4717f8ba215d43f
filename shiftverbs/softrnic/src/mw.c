/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory windows (IBA 10.6.7): R_Keys that open a part of a region to peers, bound and invalidated by work requests.
 * Type 1 belongs to its PD and is bound by ibv_bind_mw(), which changes the key; type 2 (2B) belongs to the QP that
 * bound it, the program chooses the key's last byte, and it can be invalidated, by a peer too.
 */
#include <stdlib.h>

#include "softrnic.h"

#define WINDOW_ACCESS                                                                                        \
    (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED)

static struct srn_mw *srn_mw(struct ibv_mw *mw) {
    return srn_container(mw, struct srn_mw, ib);
}

struct ibv_mw *srn_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type) {
    struct srn_nic *nic = srn_pd(pd)->nic;
    struct srn_mw *mw;
    int rc = srn_command(nic);

    if (!rc && type != IBV_MW_TYPE_1 && type != IBV_MW_TYPE_2)
        rc = EINVAL;
    mw = rc ? NULL : calloc(1, sizeof(*mw));
    if (!mw) {
        errno = rc ? rc : ENOMEM;
        return NULL;
    }
    mw->nic = nic;
    mw->pd = srn_pd(pd);
    mw->ib.context = pd->context;
    mw->ib.pd = pd;
    mw->ib.type = type;
    srn_nic_lock(nic);
    mw->slot = srn_key_take(nic);
    if (mw->slot == UINT32_MAX) {
        srn_nic_unlock(nic);
        free(mw);
        errno = ENOMEM;
        return NULL;
    }
    nic->mr_slots[mw->slot].mw = mw;
    mw->key = mw->ib.rkey = srn_key_make(nic, mw->slot);
    mw->ib.handle = mw->slot;
    mw->pd->refs++;
    srn_ctx_get(srn_ctx(pd->context));
    srn_nic_unlock(nic);
    return &mw->ib;
}

/* nic->lock held. */
static void unbind(struct srn_mw *mw) {
    if (mw->mr)
        mw->mr->windows--;
    mw->mr = NULL;
}

int srn_dealloc_mw(struct ibv_mw *ibmw) {
    struct srn_mw *mw = srn_mw(ibmw);
    struct srn_ctx *ctx = srn_ctx(ibmw->context);

    (void)srn_command(mw->nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(mw->nic)) {
        srn_nic_lock(mw->nic);
        unbind(mw);
        srn_key_give(mw->nic, mw->slot);
        mw->pd->refs--;
        srn_nic_unlock(mw->nic);
    }
    free(mw);
    srn_ctx_put(ctx);
    return 0;
}

uint8_t *srn_remote_resolve(struct srn_qp *qp, uint32_t rkey, uint64_t va, uint64_t length,
                            unsigned int access) {
    const struct srn_mr_slot *slot = srn_key_slot(qp->nic, rkey);
    const struct srn_mw *mw = slot ? slot->mw : NULL;

    if (!mw)
        return srn_mr_resolve(qp->nic, qp->pd, rkey, va, length, access);
    if (!mw->mr || mw->key != rkey || mw->pd->base != qp->pd->base || (mw->access & access) != access)
        return NULL;
    if (mw->ib.type == IBV_MW_TYPE_2 && mw->qpn != qp->qpn)
        return NULL;
    if (va < mw->va || length > mw->length || va - mw->va > mw->length - length)
        return NULL;
    return mw->addr + (va - mw->va);
}

/* What a window would be bound to may be gone when the WR's turn comes: only keys are kept. */
static void fill_bind(struct srn_swqe *w, const struct srn_mw *mw, uint32_t rkey,
                      const struct ibv_mw_bind_info *info) {
    w->rkey = (mw->ib.rkey & ~0xffu) | (rkey & 0xff);
    w->bind.key = mw->ib.rkey;
    w->bind.type = mw->ib.type;
    w->bind.lkey = info->mr ? info->mr->lkey : 0;
    w->bind.addr = info->addr;
    w->bind.length = info->mr ? info->length : 0;
    w->bind.access = info->mw_access_flags & WINDOW_ACCESS;
    w->length = w->num_sge = 0;
}

int srn_build_bind(struct srn_qp *qp, struct srn_swqe *w, struct ibv_mw *mw, uint32_t rkey,
                   const struct ibv_mw_bind_info *info) {
    if (!mw || !srn_is_ours(mw->context) || srn_mw(mw)->nic != qp->nic || mw->type != IBV_MW_TYPE_2)
        return EINVAL;
    if (!info->mr || !srn_is_ours(info->mr->context))
        return EINVAL;
    fill_bind(w, srn_mw(mw), rkey, info);
    return 0;
}

int srn_bind_mw(struct ibv_qp *ibqp, struct ibv_mw *ibmw, struct ibv_mw_bind *bind) {
    struct srn_qp *qp = srn_container(ibqp, struct srn_qp, ib);
    struct srn_mw *mw = srn_mw(ibmw);
    struct srn_swqe *w;
    int rc = 0;

    if (srn_forked(qp->nic))
        return EIO;
    srn_nic_lock(qp->nic);
    if (!srn_sq_accepts(qp) || qp->type == IBV_QPT_UD || mw->nic != qp->nic || qp->nic->null_mode)
        rc = EINVAL;
    else if (srn_sq_full(qp))
        rc = ENOMEM;
    if (!rc) {
        w = &qp->sq.wqe[qp->sq.tail % qp->sq.capacity];
        w->wr_id = bind->wr_id;
        w->opcode = IBV_WR_BIND_MW;
        w->flags = bind->send_flags;
        fill_bind(w, mw, ibmw->rkey + 1, &bind->bind_info);
        ibmw->rkey = w->rkey;
        srn_sq_enqueue(qp);
    }
    srn_sq_run(qp);
    srn_nic_unlock(qp->nic);
    return rc;
}

static bool bind_window(struct srn_qp *qp, const struct srn_swqe *w) {
    const struct srn_mr_slot *slot = srn_key_slot(qp->nic, w->rkey);
    struct srn_mw *mw = slot ? slot->mw : NULL;
    struct srn_mr *mr;

    if (!mw || mw->key != w->bind.key || mw->ib.type != w->bind.type || mw->pd->base != qp->pd->base)
        return false;
    if (mw->ib.type == IBV_MW_TYPE_2 && (mw->mr || !w->bind.length))
        return false; /* bound already: it must be invalidated first; it cannot be bound to nothing */
    if (!w->bind.length) {
        unbind(mw);
        mw->key = w->rkey;
        return true;
    }
    mr = srn_mr_find(qp->nic, w->bind.lkey);
    if (!mr || mr->pd->base != mw->pd->base || !(mr->access & IBV_ACCESS_MW_BIND))
        return false;
    if ((w->bind.access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) &&
        !(mr->access & IBV_ACCESS_LOCAL_WRITE))
        return false;
    if (w->bind.addr < mr->iova || w->bind.length > mr->length ||
        w->bind.addr - mr->iova > mr->length - w->bind.length)
        return false;
    unbind(mw);
    mw->mr = mr;
    mr->windows++;
    mw->key = w->rkey;
    mw->addr = mr->addr + (w->bind.addr - mr->iova);
    mw->va = w->bind.access & IBV_ACCESS_ZERO_BASED ? 0 : w->bind.addr;
    mw->length = w->bind.length;
    mw->access = w->bind.access;
    mw->qpn = qp->qpn;
    return true;
}

bool srn_invalidate(struct srn_qp *qp, uint32_t rkey) {
    const struct srn_mr_slot *slot = srn_key_slot(qp->nic, rkey);
    struct srn_mw *mw = slot ? slot->mw : NULL;

    /* The keys of regions are not the QP's to take away, nor are those of type 1 windows. */
    if (!mw || mw->ib.type != IBV_MW_TYPE_2 || mw->key != rkey || !mw->mr || mw->qpn != qp->qpn)
        return false;
    unbind(mw);
    return true;
}

enum ibv_wc_status srn_execute_local(struct srn_qp *qp, const struct srn_swqe *w) {
    if (w->opcode == IBV_WR_BIND_MW)
        return bind_window(qp, w) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
    return srn_invalidate(qp, w->rkey) ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR;
}
