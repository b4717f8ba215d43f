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

#include "ends.h"
#include "faults/ctl.h"

#define SIZE 8192
#define DEPTH 32

static struct ibv_context *context;
static atomic_bool stop;
static atomic_long completions, lives, events, faults_given;

static bool post(struct end *e, const struct end *to, enum ibv_wr_opcode opcode) {
    return end_post(e, opcode, SIZE / 2, (uintptr_t)to->buffer + SIZE / 2, to->mr->rkey);
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

        end_open(&a, context, SIZE, DEPTH), end_open(&b, context, SIZE, DEPTH);
        end_connect(&a, &b, 4, 12), end_connect(&b, &a, 4, 12);
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
    struct end forth[2], back[2];
    pthread_t threads[4];

    context = open_device();
    for (int i = 0; i < 2; i++)
        end_open(&forth[i], context, SIZE, DEPTH), end_open(&back[i], context, SIZE, DEPTH);
    for (int i = 0; i < 2; i++)
        end_connect(&forth[i], &forth[1 - i], 4, 12), end_connect(&back[i], &back[1 - i], 4, 12);
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
