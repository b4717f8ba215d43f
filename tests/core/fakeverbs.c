// SPDX-License-Identifier: BSD-3-Clause
//
// A provider without a NIC, for tests of the data path: posts are recorded, completions are written by the test.
//
// Objects are real struct ibv_context, ibv_qp, ibv_cq and ibv_comp_channel, so the data path calls post_send,
// post_recv, poll_cq and req_notify_cq through context->ops as with any provider. ibv_get_cq_event and
// ibv_ack_cq_events replace libibverbs' own where this library comes first in the process (RTLD_GLOBAL, before
// libibverbs is loaded). One thread at a time: the tests hold the GIL.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_SGE 16
#define MAX_INLINE 512
#define EXPORT __attribute__((visibility("default")))

// One recorded post. Receives use wr_id, num_sge and sge only.
struct fv_post {
    uint64_t wr_id;
    uint32_t opcode;
    uint32_t flags;
    uint32_t imm;
    uint32_t num_sge;
    uint64_t remote_addr;
    uint64_t compare_add;
    uint64_t swap;
    uint32_t rkey;
    uint32_t inline_len;
    struct ibv_sge sge[MAX_SGE];
    uint8_t inline_data[MAX_INLINE];
};

struct fv_queue {
    struct fv_post *posts;
    size_t count;
    size_t slots;
    size_t completed; // posts below this number no longer occupy the queue
    size_t depth;
    size_t fail_at; // the post with this number is refused ...
    int fail_errno; // ... with this errno; 0: none
    size_t fail_times;
    size_t calls;
};

struct fv_qp {
    union {
        struct ibv_qp qp;
        struct ibv_qp_ex ex;
    };
    struct fv_queue send;
    struct fv_queue recv;
    int null_mode; // signaled sends complete at once
};

struct fv_cq {
    union {
        struct ibv_cq cq;
        struct ibv_cq_ex ex;
    };
    struct ibv_wc *wcs;
    uint32_t slots;
    uint32_t first;
    uint32_t count;
    int armed; // 1: for any completion, 2: for a solicited one or an error
    int fail_errno;
    unsigned int acked;
    unsigned int polls;
    unsigned int arms;
    unsigned int hidden; // polls that do not see the newest completion yet
};

struct fv_channel {
    struct ibv_comp_channel channel;
    int write_fd;
};

EXPORT void fv_push(struct fv_cq *cq, const struct ibv_wc *wc) {
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
    cq->wcs[(cq->first + cq->count++) & (cq->slots - 1)] = *wc;
    if ((cq->armed == 1 || (cq->armed && wc->status)) && cq->cq.channel) {
        struct fv_channel *channel = (struct fv_channel *)cq->cq.channel;
        void *event = cq;
        cq->armed = 0;
        if (write(channel->write_fd, &event, sizeof(event)) != sizeof(event))
            abort();
    }
}

static struct fv_post *record(struct fv_queue *q, int null_mode, int *err) {
    if (q->fail_errno && q->count == q->fail_at) {
        *err = q->fail_errno;
        if (--q->fail_times == 0)
            q->fail_errno = 0;
        return NULL;
    }
    if (q->count - q->completed >= q->depth) {
        *err = ENOMEM;
        return NULL;
    }
    if (null_mode) {
        q->slots = q->slots ? q->slots : 1;
        if (!q->posts)
            q->posts = calloc(1, sizeof(*q->posts));
        q->completed = q->count++;
        return &q->posts[0];
    }
    if (q->count == q->slots) {
        q->slots = q->slots ? q->slots * 2 : 64;
        q->posts = realloc(q->posts, q->slots * sizeof(*q->posts));
    }
    memset(&q->posts[q->count], 0, sizeof(q->posts[0]));
    return &q->posts[q->count++];
}

static int post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct fv_qp *qp = (struct fv_qp *)ibqp;
    qp->send.calls++;
    for (; wr; wr = wr->next) {
        int err = 0;
        struct fv_post *p = record(&qp->send, qp->null_mode, &err);
        if (!p || wr->num_sge < 0 || wr->num_sge > MAX_SGE) {
            *bad = wr;
            return p ? EINVAL : err;
        }
        p->wr_id = wr->wr_id;
        if (qp->null_mode) {
            if (wr->send_flags & IBV_SEND_SIGNALED) {
                struct ibv_wc wc = {.wr_id = wr->wr_id, .status = IBV_WC_SUCCESS, .qp_num = ibqp->qp_num};
                fv_push((struct fv_cq *)ibqp->send_cq, &wc);
            }
            continue;
        }
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
        for (int i = 0; i < wr->num_sge; i++) {
            p->sge[i] = wr->sg_list[i];
            if (wr->send_flags & IBV_SEND_INLINE && p->inline_len + wr->sg_list[i].length <= MAX_INLINE) {
                memcpy(p->inline_data + p->inline_len, (void *)(uintptr_t)wr->sg_list[i].addr,
                       wr->sg_list[i].length);
                p->inline_len += wr->sg_list[i].length;
            }
        }
    }
    return 0;
}

static int post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct fv_qp *qp = (struct fv_qp *)ibqp;
    qp->recv.calls++;
    for (; wr; wr = wr->next) {
        int err = 0;
        struct fv_post *p = record(&qp->recv, qp->null_mode, &err);
        if (!p) {
            *bad = wr;
            return err;
        }
        p->wr_id = wr->wr_id;
        p->num_sge = (uint32_t)wr->num_sge;
        for (int i = 0; i < wr->num_sge && i < MAX_SGE; i++)
            p->sge[i] = wr->sg_list[i];
    }
    return 0;
}

static int poll_cq(struct ibv_cq *ibcq, int n, struct ibv_wc *wc) {
    struct fv_cq *cq = (struct fv_cq *)ibcq;
    int i = 0;
    uint32_t hidden = cq->hidden ? 1 : 0;
    cq->polls++;
    cq->hidden -= hidden;
    if (cq->fail_errno)
        return -cq->fail_errno;
    for (; i < n && cq->count > hidden; i++) {
        wc[i] = cq->wcs[cq->first];
        cq->first = (cq->first + 1) & (cq->slots - 1);
        cq->count--;
    }
    return i;
}

static int req_notify(struct ibv_cq *ibcq, int solicited_only) {
    struct fv_cq *cq = (struct fv_cq *)ibcq;
    cq->arms++;
    if (cq->fail_errno)
        return cq->fail_errno;
    if (!solicited_only || !cq->armed) // a request for any completion stands
        cq->armed = solicited_only ? 2 : 1;
    return 0;
}

EXPORT struct ibv_context *fv_context(void) {
    struct ibv_context *ctx = calloc(1, sizeof(*ctx));
    ctx->ops.post_send = post_send;
    ctx->ops.post_recv = post_recv;
    ctx->ops.poll_cq = poll_cq;
    ctx->ops.req_notify_cq = req_notify;
    return ctx;
}

EXPORT struct fv_channel *fv_channel(struct ibv_context *ctx) {
    struct fv_channel *channel = calloc(1, sizeof(*channel));
    int fds[2];
    if (pipe2(fds, O_CLOEXEC))
        abort();
    channel->channel.context = ctx;
    channel->channel.fd = fds[0];
    channel->write_fd = fds[1];
    return channel;
}

EXPORT struct fv_cq *fv_cq(struct ibv_context *ctx, int cqe, struct fv_channel *channel) {
    struct fv_cq *cq = calloc(1, sizeof(*cq));
    cq->cq.context = ctx;
    cq->cq.cqe = cqe;
    cq->cq.channel = channel ? &channel->channel : NULL;
    return cq;
}

EXPORT struct fv_qp *fv_qp(struct ibv_context *ctx, struct fv_cq *send_cq, struct fv_cq *recv_cq,
                           uint32_t qp_num, size_t send_depth, size_t recv_depth) {
    struct fv_qp *qp = calloc(1, sizeof(*qp));
    qp->qp.context = ctx;
    qp->qp.send_cq = &send_cq->cq;
    qp->qp.recv_cq = &recv_cq->cq;
    qp->qp.qp_num = qp_num;
    qp->send.depth = send_depth;
    qp->recv.depth = recv_depth;
    return qp;
}

// What pyverbs' QPEx and CQEX write and read.
EXPORT void fv_next_wr(struct fv_qp *qp, uint64_t wr_id, unsigned int wr_flags) {
    qp->ex.wr_id = wr_id;
    qp->ex.wr_flags = wr_flags;
}

EXPORT uint64_t fv_cursor_wr_id(struct fv_cq *cq) {
    return cq->ex.wr_id;
}

EXPORT int fv_cursor_status(struct fv_cq *cq) {
    return (int)cq->ex.status;
}

EXPORT void fv_null_mode(struct fv_qp *qp, int on) {
    qp->null_mode = on;
}

static struct fv_queue *queue(struct fv_qp *qp, int recv) {
    return recv ? &qp->recv : &qp->send;
}

EXPORT size_t fv_count(struct fv_qp *qp, int recv) {
    return queue(qp, recv)->count;
}

EXPORT size_t fv_calls(struct fv_qp *qp, int recv) {
    return queue(qp, recv)->calls;
}

EXPORT const struct fv_post *fv_post(struct fv_qp *qp, int recv, size_t i) {
    return i < queue(qp, recv)->count ? &queue(qp, recv)->posts[i] : NULL;
}

EXPORT void fv_fail(struct fv_qp *qp, int recv, size_t after, int err, size_t times) {
    queue(qp, recv)->fail_at = queue(qp, recv)->count + after;
    queue(qp, recv)->fail_errno = err;
    queue(qp, recv)->fail_times = times;
}

// The newest completion shows itself after so many more polls.
EXPORT void fv_hide(struct fv_cq *cq, unsigned int polls) {
    cq->hidden = polls;
}

EXPORT void fv_free_slots(struct fv_qp *qp, int recv, size_t below) {
    if (below > queue(qp, recv)->completed)
        queue(qp, recv)->completed = below;
}

EXPORT void fv_fail_cq(struct fv_cq *cq, int err) {
    cq->fail_errno = err;
}

EXPORT uint32_t fv_pending(struct fv_cq *cq) {
    return cq->count;
}

EXPORT unsigned int fv_acked(struct fv_cq *cq) {
    return cq->acked;
}

EXPORT int fv_armed(struct fv_cq *cq) {
    return cq->armed;
}

EXPORT void fv_free_cq(struct fv_cq *cq) {
    free(cq->wcs);
    free(cq);
}

EXPORT void fv_free_qp(struct fv_qp *qp) {
    free(qp->send.posts);
    free(qp->recv.posts);
    free(qp);
}

EXPORT void fv_free_channel(struct fv_channel *channel) {
    close(channel->channel.fd);
    close(channel->write_fd);
    free(channel);
}

EXPORT void fv_free_context(struct ibv_context *ctx) {
    free(ctx);
}

EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp) {
    return &((struct fv_qp *)qp)->ex;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
    if (read(channel->fd, cq, sizeof(*cq)) != sizeof(*cq))
        return -1;
    *cq_context = (*cq)->cq_context;
    return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n) {
    ((struct fv_cq *)cq)->acked += n;
}
