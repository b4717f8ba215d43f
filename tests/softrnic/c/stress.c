/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The software NIC under threads, for ThreadSanitizer: traffic in both directions from threads that also poll, queue
 * pairs made and destroyed, waits for events, and a cable that is pulled meanwhile. Built together with the engine.
 * Ends by itself; prints what was done. "stress SECONDS"
 */
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl.h"

#define SIZE 8192
#define DEPTH 32

struct end {
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    char *buffer;
};

static struct ibv_context *context;
static atomic_bool stop;
static atomic_long completions, lives, events, faults_given;

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #condition);                        \
            exit(2);                                                                                         \
        }                                                                                                    \
    } while (0)

static void end_open(struct end *e) {
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1}};

    e->buffer = calloc(1, SIZE);
    MUST(e->pd = ibv_alloc_pd(context));
    MUST(e->mr = ibv_reg_mr(e->pd, e->buffer, SIZE,
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
    MUST(e->channel = ibv_create_comp_channel(context));
    MUST(e->cq = ibv_create_cq(context, 4 * DEPTH, NULL, e->channel, 0));
    init.send_cq = init.recv_cq = e->cq;
    MUST(e->qp = ibv_create_qp(e->pd, &init));
}

static void end_close(struct end *e) {
    MUST(ibv_destroy_qp(e->qp) == 0);
    MUST(ibv_destroy_cq(e->cq) == 0);
    MUST(ibv_destroy_comp_channel(e->channel) == 0);
    MUST(ibv_dereg_mr(e->mr) == 0);
    MUST(ibv_dealloc_pd(e->pd) == 0);
    free(e->buffer);
}

static void end_connect(struct end *e, const struct end *to) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};

    MUST(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT,
                                .port_num = 1,
                                .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    MUST(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ==
         0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
                                .path_mtu = IBV_MTU_1024,
                                .dest_qp_num = to->qp->qp_num,
                                .rq_psn = 5,
                                .max_dest_rd_atomic = 4,
                                .min_rnr_timer = 1,
                                .ah_attr = {.is_global = 1, .port_num = 1}};
    MUST(ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
    MUST(ibv_modify_qp(e->qp, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                                .timeout = 12,
                                .retry_cnt = 7,
                                .rnr_retry = 7,
                                .sq_psn = 5,
                                .max_rd_atomic = 4};
    MUST(ibv_modify_qp(e->qp, &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static int post(struct end *e, const struct end *to, enum ibv_wr_opcode opcode) {
    struct ibv_sge sge = {(uintptr_t)e->buffer, SIZE / 2, e->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = opcode,
                             .send_flags = IBV_SEND_SIGNALED},
                       *bad;

    wr.wr.rdma.remote_addr = (uintptr_t)to->buffer + SIZE / 2;
    wr.wr.rdma.rkey = to->mr->rkey;
    return ibv_post_send(e->qp, &wr, &bad);
}

static int take(struct end *e) {
    struct ibv_wc wc[8];
    int n = ibv_poll_cq(e->cq, 8, wc);

    MUST(n >= 0);
    atomic_fetch_add(&completions, n);
    return n;
}

/* Post as much as fits and poll; sleep on the channel now and then. */
static void *traffic(void *arg) {
    struct end *ends = arg;
    struct end *mine = &ends[0], *other = &ends[1];

    for (unsigned turn = 0; !stop; turn++) {
        static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND};

        (void)post(mine, other, opcodes[turn % 2]);
        if (turn % 64 == 0) {
            struct pollfd fd = {mine->channel->fd, POLLIN, 0};
            struct ibv_cq *cq;
            void *cq_context;

            MUST(ibv_req_notify_cq(mine->cq, 0) == 0);
            if (take(mine) == 0 && poll(&fd, 1, 2) == 1 &&
                ibv_get_cq_event(mine->channel, &cq, &cq_context) == 0) {
                ibv_ack_cq_events(cq, 1);
                atomic_fetch_add(&events, 1);
            }
        }
        take(mine);
    }
    return NULL;
}

/* Queue pairs that live briefly and die with work outstanding. */
static void *churn(void *arg) {
    (void)arg;
    while (!stop) {
        struct end a, b;

        end_open(&a), end_open(&b);
        end_connect(&a, &b), end_connect(&b, &a);
        for (int i = 0; i < DEPTH / 2; i++)
            (void)post(&a, &b, i % 3 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND);
        take(&a);
        if (atomic_load(&lives) % 3 == 0) {
            struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

            MUST(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE) == 0);
            take(&a);
        }
        end_close(&a), end_close(&b);
        atomic_fetch_add(&lives, 1);
    }
    return NULL;
}

/* The cable, rules, queries, asynchronous events. */
static void *disturb(void *arg) {
    (void)arg;
    while (!stop) {
        struct timespec pause = {0, 2000000};
        struct softrnic_drop drop = {.target = "a/soft0",
                                     .direction = "both",
                                     .opcode = "any",
                                     .nth = 1,
                                     .count = 3,
                                     .probability = 1};
        struct ibv_port_attr port;
        struct pollfd fd = {context->async_fd, POLLIN, 0};
        struct ibv_async_event event;
        char err[200];

        MUST(softrnic_ctl_port("a/soft0", "down", err, sizeof(err)) == 0);
        MUST(ibv_query_port(context, 1, &port) == 0);
        MUST(softrnic_ctl_port("a/soft0", "up", err, sizeof(err)) == 0);
        MUST(softrnic_ctl_drop(&drop, err, sizeof(err)) > 0);
        while (poll(&fd, 1, 0) == 1 && ibv_get_async_event(context, &event) == 0)
            ibv_ack_async_event(&event);
        atomic_fetch_add(&faults_given, 1);
        nanosleep(&pause, NULL);
        MUST(softrnic_ctl_clear("a/soft0", 1, err, sizeof(err)) == 0);
    }
    return NULL;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    struct timespec run = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct end forth[2], back[2];
    pthread_t threads[4];

    MUST(list && list[0]);
    MUST(context = ibv_open_device(list[0]));
    ibv_free_device_list(list);
    for (int i = 0; i < 2; i++)
        end_open(&forth[i]), end_open(&back[i]);
    for (int i = 0; i < 2; i++)
        end_connect(&forth[i], &forth[1 - i]), end_connect(&back[i], &back[1 - i]);
    pthread_create(&threads[0], NULL, traffic, forth);
    pthread_create(&threads[1], NULL, traffic, back);
    pthread_create(&threads[2], NULL, churn, NULL);
    pthread_create(&threads[3], NULL, disturb, NULL);
    nanosleep(&run, NULL);
    stop = true;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++)
        end_close(&forth[i]), end_close(&back[i]);
    MUST(ibv_close_device(context) == 0);
    printf("completions=%ld lives=%ld events=%ld faults=%ld\n", completions, lives, events, faults_given);
    return 0;
}
