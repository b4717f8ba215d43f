// SPDX-License-Identifier: BSD-3-Clause
//
// The provider of the simulator's NICs: libibverbs' objects whose posts go into one list, in order, for the model of a
// NIC that is written in Python, and whose completions that model writes.
//
// Objects are real struct ibv_context, ibv_qp and ibv_cq, so the data path calls post_send, post_recv and poll_cq through
// context->ops as with any provider. One thread at a time: all of it runs under the GIL.

#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define POSTS 8192
#define RECV 0xffff

// One WR as it was handed over. A receive has wr_id, addr, length, lkey and num_sge only.
struct post {
    uint64_t wr_id, remote_addr, addr, compare_add, swap, data;
    uint32_t qp, opcode, flags, imm, rkey, length, lkey, num_sge;
};

struct posts {
    uint32_t count;
    uint32_t reserved;
    struct post post[POSTS];
};

static struct posts posts;

// What the model and the provider share of one QP, by queue: 0 sends, 1 receives.
struct shared {
    int32_t refusal[2]; // what posts are answered, 0: they are taken
    uint32_t posted[2], freed[2], depth[2];
    int32_t refuse_at[2];   // the post that many from now is refused once ...
    int32_t refuse_err[2];  // ... with this errno; 0: none
    int32_t refuse_more[2]; // ... and so many behind it as well
    uint32_t overflows[2];  // posts for which there was no room
};

struct qp {
    struct ibv_qp qp;
    struct shared shared;
    uint32_t index;
};

struct cq {
    struct ibv_cq cq;
    struct ibv_wc *wcs;
    uint32_t slots, first, count, most;
    uint32_t hidden; // for so many polls the newest completion is not there yet
};

static struct post *take(struct qp *qp, int queue, int *err) {
    struct shared *s = &qp->shared;
    *err = s->refusal[queue];
    if (!*err && s->refuse_err[queue] && s->refuse_at[queue]-- <= 0) {
        *err = s->refuse_err[queue];
        if (s->refuse_more[queue])
            s->refuse_more[queue]--;
        else
            s->refuse_err[queue] = 0;
    }
    if (!*err && (s->posted[queue] - s->freed[queue] >= s->depth[queue] || posts.count == POSTS)) {
        *err = ENOMEM;
        s->overflows[queue]++;
    }
    if (*err)
        return NULL;
    s->posted[queue]++;
    struct post *p = &posts.post[posts.count++];
    memset(p, 0, sizeof(*p));
    p->qp = qp->index;
    return p;
}

static int post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    for (; wr; wr = wr->next) {
        int err = 0;
        struct post *p = take((struct qp *)ibqp, 0, &err);
        if (!p) {
            *bad = wr;
            return err;
        }
        p->wr_id = wr->wr_id;
        p->opcode = wr->opcode;
        p->flags = wr->send_flags;
        p->imm = wr->imm_data;
        p->num_sge = (uint32_t)wr->num_sge;
        if (wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
            p->remote_addr = wr->wr.atomic.remote_addr;
            p->rkey = wr->wr.atomic.rkey;
            p->compare_add = wr->wr.atomic.compare_add;
            p->swap = wr->wr.atomic.swap;
        } else {
            p->remote_addr = wr->wr.rdma.remote_addr;
            p->rkey = wr->wr.rdma.rkey;
        }
        if (wr->num_sge) {
            p->addr = wr->sg_list[0].addr;
            p->length = wr->sg_list[0].length;
            p->lkey = wr->sg_list[0].lkey;
            if (wr->send_flags & IBV_SEND_INLINE && p->length <= sizeof(p->data))
                memcpy(&p->data, (void *)(uintptr_t)p->addr, p->length);
        }
    }
    return 0;
}

static int post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    for (; wr; wr = wr->next) {
        int err = 0;
        struct post *p = take((struct qp *)ibqp, 1, &err);
        if (!p) {
            *bad = wr;
            return err;
        }
        p->wr_id = wr->wr_id;
        p->opcode = RECV;
        p->num_sge = (uint32_t)wr->num_sge;
        if (wr->num_sge) {
            p->addr = wr->sg_list[0].addr;
            p->length = wr->sg_list[0].length;
            p->lkey = wr->sg_list[0].lkey;
        }
    }
    return 0;
}

static int poll_cq(struct ibv_cq *ibcq, int n, struct ibv_wc *wc) {
    struct cq *cq = (struct cq *)ibcq;
    uint32_t late = cq->hidden ? 1 : 0;
    int i = 0;
    cq->hidden -= late;
    for (; i < n && cq->count > late; i++) {
        wc[i] = cq->wcs[cq->first];
        cq->first = (cq->first + 1) & (cq->slots - 1);
        cq->count--;
    }
    return i;
}

static int req_notify(struct ibv_cq *cq, int solicited_only) {
    (void)cq;
    (void)solicited_only;
    return 0;
}

EXPORT struct posts *sv_posts(void) {
    return &posts;
}

EXPORT struct ibv_context *sv_context(void) {
    struct ibv_context *ctx = calloc(1, sizeof(*ctx));
    ctx->ops.post_send = post_send;
    ctx->ops.post_recv = post_recv;
    ctx->ops.poll_cq = poll_cq;
    ctx->ops.req_notify_cq = req_notify;
    return ctx;
}

EXPORT struct cq *sv_cq(struct ibv_context *ctx, int cqe) {
    struct cq *cq = calloc(1, sizeof(*cq));
    cq->cq.context = ctx;
    cq->cq.cqe = cqe;
    return cq;
}

EXPORT struct qp *sv_qp(struct ibv_context *ctx, struct cq *send_cq, struct cq *recv_cq, uint32_t qp_num,
                        uint32_t index, uint32_t send_depth, uint32_t recv_depth) {
    struct qp *qp = calloc(1, sizeof(*qp));
    qp->qp.context = ctx;
    qp->qp.send_cq = &send_cq->cq;
    qp->qp.recv_cq = &recv_cq->cq;
    qp->qp.qp_num = qp_num;
    qp->index = index;
    qp->shared.depth[0] = send_depth;
    qp->shared.depth[1] = recv_depth;
    return qp;
}

EXPORT struct shared *sv_shared(struct qp *qp) {
    return &qp->shared;
}

// A completion; the number of those that wait in the CQ then.
EXPORT uint32_t sv_push(struct cq *cq, uint64_t wr_id, int status, int opcode, uint32_t qp_num,
                        uint32_t byte_len, uint32_t imm, int wc_flags) {
    if (cq->count == cq->slots) {
        uint32_t slots = cq->slots ? cq->slots * 2 : 64;
        struct ibv_wc *wcs = malloc(slots * sizeof(*wcs));
        for (uint32_t i = 0; i < cq->count; i++)
            wcs[i] = cq->wcs[(cq->first + i) & (cq->slots - 1)];
        free(cq->wcs);
        cq->wcs = wcs;
        cq->slots = slots;
        cq->first = 0;
    }
    cq->wcs[(cq->first + cq->count++) & (cq->slots - 1)] = (struct ibv_wc){
        .wr_id = wr_id,
        .status = status,
        .opcode = opcode,
        .qp_num = qp_num,
        .byte_len = byte_len,
        .imm_data = imm,
        .wc_flags = (unsigned int)wc_flags,
    };
    return cq->count;
}

EXPORT void sv_hide(struct cq *cq, uint32_t polls) {
    cq->hidden = polls;
}

EXPORT void sv_free_cq(struct cq *cq) {
    free(cq->wcs);
    free(cq);
}

EXPORT void sv_free(void *object) {
    free(object);
}
