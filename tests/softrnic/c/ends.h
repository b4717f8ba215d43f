/* SPDX-License-Identifier: BSD-3-Clause */
/* The ends of RC connections, each with memory, a CQ and a PD of its own, for programs that give up at the first error. */
#ifndef SOFTRNIC_TEST_ENDS_H
#define SOFTRNIC_TEST_ENDS_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CQES 128
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #condition);                        \
            exit(2);                                                                                         \
        }                                                                                                    \
    } while (0)

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    char *buffer;
};

/* depth: of each of its queues */
static inline void end_make_qp(struct end *e, uint32_t depth) {
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC,
        .send_cq = e->cq,
        .recv_cq = e->cq,
        .cap = {.max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 1, .max_recv_sge = 1}};

    MUST(e->qp = ibv_create_qp(e->pd, &init));
}

/* size: of its memory, a multiple of 4096 bytes, which is all zero */
static inline void end_open(struct end *e, struct ibv_context *context, size_t size, uint32_t depth) {
    e->context = context;
    MUST(e->buffer = aligned_alloc(4096, size));
    memset(e->buffer, 0, size);
    MUST(e->pd = ibv_alloc_pd(context));
    MUST(e->mr = ibv_reg_mr(e->pd, e->buffer, size, ACCESS));
    MUST(e->channel = ibv_create_comp_channel(context));
    MUST(e->cq = ibv_create_cq(context, CQES, NULL, e->channel, 0));
    end_make_qp(e, depth);
}

static inline void end_close(struct end *e) {
    MUST(ibv_destroy_qp(e->qp) == 0);
    MUST(ibv_destroy_cq(e->cq) == 0);
    MUST(ibv_destroy_comp_channel(e->channel) == 0);
    MUST(ibv_dereg_mr(e->mr) == 0);
    MUST(ibv_dealloc_pd(e->pd) == 0);
    free(e->buffer);
}

/* From whatever state to RTS. reads: how many READs at a time, both ways; timeout: as in struct ibv_qp_attr. */
static inline void end_connect(struct end *e, const struct end *to, uint8_t reads, uint8_t timeout) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};

    MUST(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS};
    MUST(ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ==
         0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
                                .path_mtu = IBV_MTU_1024,
                                .dest_qp_num = to->qp->qp_num,
                                .rq_psn = 5,
                                .max_dest_rd_atomic = reads,
                                .min_rnr_timer = 1,
                                .ah_attr = {.is_global = 1, .port_num = 1}};
    MUST(ibv_query_gid(e->context, 1, 0, &attr.ah_attr.grh.dgid) == 0);
    MUST(ibv_modify_qp(e->qp, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS,
                                .timeout = timeout,
                                .retry_cnt = 7,
                                .rnr_retry = 7,
                                .sq_psn = 5,
                                .max_rd_atomic = reads};
    MUST(ibv_modify_qp(e->qp, &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

/* The only device's context. */
static inline struct ibv_context *open_device(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context;

    MUST(list && list[0]);
    MUST(context = ibv_open_device(list[0]));
    ibv_free_device_list(list);
    return context;
}

/* One signaled WR, `length` bytes from the start of its memory; false if the QP does not take it. */
static inline bool end_post(struct end *e, enum ibv_wr_opcode opcode, uint32_t length, uint64_t remote,
                            uint32_t rkey) {
    struct ibv_sge sge = {(uintptr_t)e->buffer, length, e->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge,
                             .num_sge = 1,
                             .opcode = opcode,
                             .send_flags = IBV_SEND_SIGNALED},
                       *bad;

    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    return ibv_post_send(e->qp, &wr, &bad) == 0;
}

#endif
