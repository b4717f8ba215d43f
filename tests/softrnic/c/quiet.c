/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What a NIC owes whoever takes memory back: after a queue pair's modify to ERR or RESET, its destruction, or the
 * deregistration of its memory has returned, nothing more is written there. WRITEs, SENDs and READ responses are on their
 * way each time, some of them held back; then the memory gets a mark of ours, which must stay. Built together with
 * the engine. Ends by itself; prints how often each end was tried, and how often something was under way. "quiet SECONDS"
 */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ends.h"
#include "faults/ctl.h"

#define SIZE 16384
#define DEPTH 16
#define MARK 0x5a

enum traffic { WRITES, SENDS, READS, TRAFFICS };
enum ending { TO_ERR, TO_RESET, DESTROY, DEREGISTER, ENDINGS };

static atomic_bool go, stop;
static _Atomic enum traffic traffic;
static struct end sender, victim;
static atomic_int sent;
static _Atomic uint64_t target; /* the victim's memory; its MR may be gone */
static atomic_uint target_key;

/* One WR; false if the queue is full or the QP does not take it. */
static bool post(struct end *e, enum ibv_wr_opcode opcode, uint64_t remote, uint32_t rkey) {
    return end_post(e, opcode, SIZE, remote, rkey);
}

static void receive(struct end *e) {
    struct ibv_sge sge = {(uintptr_t)e->buffer, SIZE, e->mr->lkey};
    struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

    (void)ibv_post_recv(e->qp, &wr, &bad);
}

static int drain(struct end *e) {
    struct ibv_wc wc[8];
    int n, good = 0;

    while ((n = ibv_poll_cq(e->cq, 8, wc)) > 0)
        for (int i = 0; i < n; i++)
            good += wc[i].status == IBV_WC_SUCCESS;
    return good;
}

static void pause_us(long us) {
    struct timespec t = {0, us * 1000};

    nanosleep(&t, NULL);
}

/* The peer never stops by itself. */
static void *send_always(void *arg) {
    (void)arg;
    while (!stop) {
        if (go && traffic != READS) {
            (void)post(&sender, traffic == WRITES ? IBV_WR_RDMA_WRITE : IBV_WR_SEND, target, target_key);
            atomic_fetch_add(&sent, drain(&sender));
        } else {
            pause_us(20);
        }
    }
    return NULL;
}

static void finish(enum ending ending) {
    struct ibv_qp_attr attr = {.qp_state = ending == TO_ERR ? IBV_QPS_ERR : IBV_QPS_RESET};

    if (ending == DESTROY) {
        MUST(ibv_destroy_qp(victim.qp) == 0);
    } else if (ending == DEREGISTER) {
        MUST(ibv_dereg_mr(victim.mr) == 0);
    } else {
        MUST(ibv_modify_qp(victim.qp, &attr, IBV_QP_STATE) == 0);
    }
}

/* Returns whether work was done before the end came. */
static bool one_round(enum ending ending) {
    int done = 0;

    memset(victim.buffer, 2, SIZE);
    end_connect(&sender, &victim, DEPTH, 14), end_connect(&victim, &sender, DEPTH, 14);
    drain(&sender), drain(&victim);
    target = (uintptr_t)victim.buffer;
    target_key = victim.mr->rkey;
    atomic_store(&sent, 0);
    atomic_store(&go, true);
    for (int i = 0; i < 200 && done < 3; i++) {
        if (traffic == READS)
            for (int n = 0; n < DEPTH; n++)
                (void)post(&victim, IBV_WR_RDMA_READ, (uintptr_t)sender.buffer, sender.mr->rkey);
        else if (traffic == SENDS)
            receive(&victim), receive(&victim);
        done += drain(&victim);
        if (traffic == WRITES)
            done = atomic_load(&sent);
        pause_us(20);
    }
    finish(ending);
    memset(victim.buffer, MARK, SIZE);
    for (int i = 0; i < 5; i++) {
        pause_us(200);
        for (int at = 0; at < SIZE; at++)
            if (victim.buffer[at] != MARK) {
                fprintf(stderr, "traffic %d, ending %d: byte %d is %d\n", traffic, ending, at,
                        victim.buffer[at]);
                exit(1);
            }
    }
    atomic_store(&go, false);
    if (ending == DESTROY)
        end_make_qp(&victim, DEPTH);
    if (ending == DEREGISTER)
        MUST(victim.mr = ibv_reg_mr(victim.pd, victim.buffer, SIZE, ACCESS));
    return done > 0;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    struct ibv_context *context = open_device();
    struct timespec now, start;
    int rounds[ENDINGS] = {0}, busy = 0;
    char err[200];
    pthread_t thread;

    end_open(&sender, context, SIZE, DEPTH), end_open(&victim, context, SIZE, DEPTH);
    pthread_create(&thread, NULL, send_always, NULL);
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int turn = 0;; turn++) {
        enum ending ending = (enum ending)(turn / TRAFFICS % ENDINGS);
        bool late = turn / (TRAFFICS * ENDINGS) % 2;

        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9 > seconds)
            break;
        traffic = (enum traffic)(turn % TRAFFICS);
        if (late) {
            struct softrnic_drop rule = {.target = "a/soft0",
                                         .direction = "rx",
                                         .opcode = "any",
                                         .action = "delay",
                                         .delay_us = 300,
                                         .nth = 1,
                                         .probability = 1};

            MUST(softrnic_ctl_drop(&rule, err, sizeof(err)) > 0);
        }
        busy += one_round(ending);
        rounds[ending]++;
        MUST(softrnic_ctl_clear("a/soft0", 1, err, sizeof(err)) == 0);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    end_close(&sender), end_close(&victim);
    MUST(ibv_close_device(context) == 0);
    printf("err=%d reset=%d destroy=%d deregister=%d busy=%d\n", rounds[TO_ERR], rounds[TO_RESET],
           rounds[DESTROY], rounds[DEREGISTER], busy);
    return 0;
}
