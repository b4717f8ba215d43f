/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Memory windows (IBA 10.6.7): R_Keys that open a part of a region to peers, bound and invalidated by work requests.
 * Type 1 belongs to its PD and is bound by ibv_bind_mw(), which changes the key; type 2 (2B) belongs to the QP that
 * bound it, the program chooses the key's last byte, and it can be invalidated, by a peer too.
 */
#include "objects/keys.h"
#include "objects/nic.h"
#include "objects/queues.h"

void srn_mw_unbind(struct srn_mw *mw) {
    if (mw->mr)
        mw->mr->windows--;
    mw->mr = NULL;
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

static bool bind_window(struct srn_qp *qp, const struct srn_swqe *w) {
    const struct srn_mr_slot *slot = srn_key_slot(qp->nic, w->rkey);
    struct srn_mw *mw = slot ? slot->mw : NULL;
    struct srn_mr *mr;

    if (!mw || mw->key != w->bind.key || mw->ib.type != w->bind.type || mw->pd->base != qp->pd->base)
        return false;
    if (mw->ib.type == IBV_MW_TYPE_2 && (mw->mr || !w->bind.length))
        return false; /* bound already: it must be invalidated first; it cannot be bound to nothing */
    if (!w->bind.length) {
        srn_mw_unbind(mw);
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
    srn_mw_unbind(mw);
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
    srn_mw_unbind(mw);
    return true;
}

enum ibv_wc_status srn_execute_local(struct srn_qp *qp, const struct srn_swqe *w) {
    if (w->opcode == IBV_WR_BIND_MW)
        return bind_window(qp, w) ? IBV_WC_SUCCESS : IBV_WC_MW_BIND_ERR;
    return srn_invalidate(qp, w->rkey) ? IBV_WC_SUCCESS : IBV_WC_LOC_QP_OP_ERR;
}
