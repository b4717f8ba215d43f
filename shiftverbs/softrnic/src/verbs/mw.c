/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory windows: making and binding them. What a window lets through, and when: windows.c. */
#include <stdlib.h>

#include "verbs/entry.h"

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

int srn_dealloc_mw(struct ibv_mw *ibmw) {
    struct srn_mw *mw = srn_mw(ibmw);
    struct srn_ctx *ctx = srn_ctx(ibmw->context);

    (void)srn_command(mw->nic); /* a dead NIC's objects go all the same */
    if (!srn_forked(mw->nic)) {
        srn_nic_lock(mw->nic);
        srn_mw_unbind(mw);
        srn_key_give(mw->nic, mw->slot);
        mw->pd->refs--;
        srn_nic_unlock(mw->nic);
    }
    free(mw);
    srn_ctx_put(ctx);
    return 0;
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
