/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Stands before libibverbs in one test child, for what no device does on demand: commands that hang until
 * told or fail with a given errno, completions that do not come or lie. Loaded RTLD_GLOBAL before anything
 * that uses libibverbs.
 *
 * ibv_modify_qp and ibv_query_qp are entirely fakes for QP pointers below 4096, which name no memory; other QPs and
 * address handles go to the functions given to fake_set_next, and can be held too.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MAX_CALLS 4096
#define FAKE_QPS 4096

struct call {
    uint64_t qp;
    int32_t state;
    int32_t mask;
    int64_t at_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct call calls[MAX_CALLS];
static int n_calls;
static int n_returned;
static int held_qp = -1; /* fake QP whose commands hang; 0 = those of all fake QPs; -1 = none */
static int ah_held;
static int ah_entered;
static struct {
    int state;
    int ret;
    int err;
} failing[FAKE_QPS];
static struct ibv_qp_attr last_attr;

static int (*next_modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
static int (*next_query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
static struct ibv_ah *(*next_create_ah)(struct ibv_pd *, struct ibv_ah_attr *);
static int (*next_poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
static int (*next_post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
static int post_send_err;
static int lie_byte_len = -1;

void fake_set_next(void *modify_qp, void *query_qp, void *create_ah) {
    next_modify_qp = (int (*)(struct ibv_qp *, struct ibv_qp_attr *, int))modify_qp;
    next_query_qp = (int (*)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *))query_qp;
    next_create_ah = (struct ibv_ah * (*)(struct ibv_pd *, struct ibv_ah_attr *)) create_ah;
}

/* Commands of this fake QP hang from now on; 0 = of every one; -1 = let go. */
void fake_hold(int qp) {
    pthread_mutex_lock(&lock);
    held_qp = qp;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void fake_hold_ah(int hold) {
    pthread_mutex_lock(&lock);
    ah_held = hold;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int fake_ah_entered(void) {
    pthread_mutex_lock(&lock);
    int n = ah_entered;
    pthread_mutex_unlock(&lock);
    return n;
}

/* The transition of this fake QP to this state returns ret and leaves err in errno. */
void fake_fail(int qp, int state, int ret, int err) {
    failing[qp].state = state + 1;
    failing[qp].ret = ret;
    failing[qp].err = err;
}

/* How many commands have begun, and copies of up to max of them. */
int fake_calls(struct call *copy, int max) {
    pthread_mutex_lock(&lock);
    int n = n_calls;
    memcpy(copy, calls, sizeof(*copy) * (size_t)(n < max ? n : max));
    pthread_mutex_unlock(&lock);
    return n;
}

/* How many commands have ended. */
int fake_returned(void) {
    pthread_mutex_lock(&lock);
    int n = n_returned;
    pthread_mutex_unlock(&lock);
    return n;
}

/* The attributes of the last command as text. */
const char *fake_last_attr(void) {
    static char text[2048];
    const struct ibv_qp_attr *a = &last_attr;
    int n = snprintf(
        text, sizeof(text),
        "qp_state=%d cur_qp_state=%d path_mtu=%d path_mig_state=%d qkey=%u rq_psn=%u sq_psn=%u "
        "dest_qp_num=%u qp_access_flags=%u cap=%u,%u,%u,%u,%u pkey_index=%u alt_pkey_index=%u "
        "en_sqd_async_notify=%u max_rd_atomic=%u max_dest_rd_atomic=%u min_rnr_timer=%u port_num=%u "
        "timeout=%u retry_cnt=%u rnr_retry=%u alt_port_num=%u alt_timeout=%u rate_limit=%u",
        a->qp_state, a->cur_qp_state, a->path_mtu, a->path_mig_state, a->qkey, a->rq_psn, a->sq_psn,
        a->dest_qp_num, a->qp_access_flags, a->cap.max_send_wr, a->cap.max_recv_wr, a->cap.max_send_sge,
        a->cap.max_recv_sge, a->cap.max_inline_data, a->pkey_index, a->alt_pkey_index, a->en_sqd_async_notify,
        a->max_rd_atomic, a->max_dest_rd_atomic, a->min_rnr_timer, a->port_num, a->timeout, a->retry_cnt,
        a->rnr_retry, a->alt_port_num, a->alt_timeout, a->rate_limit);
    for (int which = 0; which < 2; which++) {
        const struct ibv_ah_attr *ah = which ? &a->alt_ah_attr : &a->ah_attr;
        n += snprintf(text + n, sizeof(text) - (size_t)n,
                      " %sah=%u,%u,%u,%u,%u,%u grh=%u,%u,%u,%u dgid=", which ? "alt_" : "", ah->dlid, ah->sl,
                      ah->src_path_bits, ah->static_rate, ah->is_global, ah->port_num, ah->grh.flow_label,
                      ah->grh.sgid_index, ah->grh.hop_limit, ah->grh.traffic_class);
        for (int i = 0; i < 16; i++)
            n += snprintf(text + n, sizeof(text) - (size_t)n, "%02x", ah->grh.dgid.raw[i]);
    }
    return text;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    uintptr_t id = (uintptr_t)qp;
    struct timespec now;
    int ret = 0;
    int err = 0;
    if (id >= FAKE_QPS)
        return next_modify_qp(qp, attr, mask);
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&lock);
    if (n_calls < MAX_CALLS)
        calls[n_calls] =
            (struct call){id, (int32_t)attr->qp_state, mask, now.tv_sec * 1000000000LL + now.tv_nsec};
    n_calls++;
    last_attr = *attr;
    while (held_qp == 0 || held_qp == (int)id)
        pthread_cond_wait(&changed, &lock);
    if (failing[id].state == (int)attr->qp_state + 1) {
        ret = failing[id].ret;
        err = failing[id].err;
    }
    n_returned++;
    pthread_mutex_unlock(&lock);
    errno = err;
    return ret;
}

/* Counted and held as a command is. */
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    uintptr_t id = (uintptr_t)qp;
    if (id >= FAKE_QPS)
        return next_query_qp(qp, attr, mask, init);
    pthread_mutex_lock(&lock);
    n_calls++;
    while (held_qp == 0 || held_qp == (int)id)
        pthread_cond_wait(&changed, &lock);
    n_returned++;
    pthread_mutex_unlock(&lock);
    attr->qp_state = IBV_QPS_RESET;
    return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr) {
    pthread_mutex_lock(&lock);
    ah_entered++;
    while (ah_held)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return next_create_ah(pd, attr);
}

static int no_completions(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    (void)cq;
    (void)n;
    (void)wc;
    return 0;
}

static int lying_completions(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    int got = next_poll_cq(cq, n, wc);
    for (int i = 0; i < got; i++)
        if (wc[i].opcode & IBV_WC_RECV)
            wc[i].byte_len = (uint32_t)lie_byte_len;
    return got;
}

static int broken_completions(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    (void)cq;
    (void)n;
    (void)wc;
    return -1;
}

static int failing_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    (void)qp;
    *bad = wr;
    return post_send_err;
}

/* What polling a CQ of this context does: 0 = as the device, 1 = finds nothing, 2 = fails. */
void fake_poll(struct ibv_context *ctx, int how) {
    if (!next_poll_cq)
        next_poll_cq = ctx->ops.poll_cq;
    ctx->ops.poll_cq = how == 0 ? next_poll_cq : how == 1 ? no_completions : broken_completions;
}

/* Receive completions of this context claim this length. */
void fake_byte_len(struct ibv_context *ctx, int byte_len) {
    if (!next_poll_cq)
        next_poll_cq = ctx->ops.poll_cq;
    lie_byte_len = byte_len;
    ctx->ops.poll_cq = byte_len < 0 ? next_poll_cq : lying_completions;
}

/* Posting a send on this context returns err; 0 = as the device. */
void fake_post_send(struct ibv_context *ctx, int err) {
    if (!next_post_send)
        next_post_send = ctx->ops.post_send;
    post_send_err = err;
    ctx->ops.post_send = err ? failing_post_send : next_post_send;
}

/* A zero-length READ of nothing, which the peer has to refuse. */
int fake_post_read(struct ibv_qp *qp) {
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_send_wr *bad;
    return qp->context->ops.post_send(qp, &wr, &bad);
}
