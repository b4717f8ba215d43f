/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * libFuzzer over the software NIC's receive path: packets for a QP of each type, behind the ICRC check. An input says
 * which WRs are posted, then what arrives. Packets are near valid ones (PSN, address and key close to the expected
 * ones) or raw bytes. Memory errors are the sanitizers' to find; checked here: completions stay within what was posted.
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "objects/queues.h"
#include "transport/transport.h"

#define SIZE 4096 /* bytes of the one memory region: WRs use it too */
#define RECV_SIZE 600
#define DEPTH 8
#define SQ_PSN 0xfffffe /* wraps at once */
#define RQ_PSN 0xfffffc
#define QKEY 0x11111111

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #condition);                        \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

static struct ibv_context *context;
static struct srn_nic *nic;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static uint8_t *buffer;
static union ibv_gid peer_gid;
static uint32_t peer_ip;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    struct ibv_device **list;
    struct ibv_ah_attr attr = {.is_global = 1, .port_num = 1};

    (void)argc, (void)argv;
    MUST(getenv("SOFTRNIC_DIR") && getenv("SOFTRNIC"));
    MUST((list = ibv_get_device_list(NULL)) && list[0]);
    MUST(context = ibv_open_device(list[0]));
    ibv_free_device_list(list);
    nic = srn_ctx(context)->nic;
    MUST(pd = ibv_alloc_pd(context));
    MUST(buffer = calloc(1, SIZE));
    MUST(mr = ibv_reg_mr(pd, buffer, SIZE,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                             IBV_ACCESS_REMOTE_ATOMIC));
    /* An address that nobody has: answers go nowhere. */
    MUST(ibv_query_gid(context, 1, SRN_GID_IPV4_V2, &peer_gid) == 0);
    peer_gid.raw[14] = 250;
    peer_gid.raw[15] = 250;
    memcpy(&peer_ip, peer_gid.raw + 12, 4);
    attr.grh.dgid = peer_gid;
    attr.grh.sgid_index = SRN_GID_IPV4_V2;
    MUST(ah = ibv_create_ah(pd, &attr));
    return 0;
}

struct input {
    const uint8_t *data;
    size_t left;
};

static uint8_t take(struct input *in) {
    if (!in->left)
        return 0;
    in->left--;
    return *in->data++;
}

static struct ibv_qp *make_qp(enum ibv_qp_type type, struct ibv_cq *cq) {
    struct ibv_qp_init_attr init = {
        .qp_type = type,
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 2}};
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);

    MUST(qp);
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (type == IBV_QPT_RC)
        attr.qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    MUST(ibv_modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                           (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)) == 0);
    return qp;
}

static void start_qp(struct ibv_qp *qp) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                               .path_mtu = IBV_MTU_256,
                               .dest_qp_num = 0x4711,
                               .rq_psn = RQ_PSN,
                               .max_dest_rd_atomic = 4,
                               .min_rnr_timer = 1,
                               .ah_attr = {.is_global = 1, .port_num = 1}};
    int mask = IBV_QP_STATE, connected = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;

    attr.ah_attr.grh.dgid = peer_gid;
    attr.ah_attr.grh.sgid_index = SRN_GID_IPV4_V2;
    if (qp->qp_type != IBV_QPT_UD)
        mask |= connected;
    if (qp->qp_type == IBV_QPT_RC)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    MUST(ibv_modify_qp(qp, &attr, mask) == 0);
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .retry_cnt = 1, .rnr_retry = 1, .sq_psn = SQ_PSN, .max_rd_atomic = 4};
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (qp->qp_type == IBV_QPT_RC)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    MUST(ibv_modify_qp(qp, &attr, mask) == 0);
}

static void post_receives(struct ibv_qp *qp, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        struct ibv_sge sge[2] = {{(uintptr_t)buffer + i * 64, 40, mr->lkey},
                                 {(uintptr_t)buffer + SIZE - RECV_SIZE + 40, RECV_SIZE - 40, mr->lkey}};
        struct ibv_recv_wr wr = {.wr_id = i, .sg_list = sge, .num_sge = 2}, *bad;

        MUST(ibv_post_recv(qp, &wr, &bad) == 0);
    }
}

/* One WR of each kind whose bit is set. */
static void post_sends(struct ibv_qp *qp, uint8_t which) {
    static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND,
                                                 IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_READ,
                                                 IBV_WR_ATOMIC_FETCH_AND_ADD,
                                                 IBV_WR_ATOMIC_CMP_AND_SWP,
                                                 IBV_WR_SEND_WITH_IMM,
                                                 IBV_WR_RDMA_READ};

    for (unsigned i = 0; i < sizeof(opcodes) / sizeof(opcodes[0]); i++) {
        bool atomic = opcodes[i] == IBV_WR_ATOMIC_FETCH_AND_ADD || opcodes[i] == IBV_WR_ATOMIC_CMP_AND_SWP;
        struct ibv_sge sge = {(uintptr_t)buffer + 128 * i, atomic ? 8 : 300 + 37 * i, mr->lkey};
        struct ibv_send_wr wr = {.wr_id = 100 + i,
                                 .sg_list = &sge,
                                 .num_sge = 1,
                                 .opcode = opcodes[i],
                                 .send_flags = i % 2 ? 0 : IBV_SEND_SIGNALED},
                           *bad;

        if (!(which >> i & 1))
            continue;
        if (atomic) {
            wr.wr.atomic.remote_addr = 0x1000;
            wr.wr.atomic.rkey = 7;
        } else {
            wr.wr.rdma.remote_addr = 0x1000;
            wr.wr.rdma.rkey = 7;
        }
        if (qp->qp_type == IBV_QPT_UD) {
            wr.wr.ud.ah = ah;
            wr.wr.ud.remote_qpn = 5;
            wr.wr.ud.remote_qkey = QKEY;
        }
        (void)ibv_post_send(qp, &wr, &bad); /* UC and UD refuse some of them */
    }
}

static void poll_all(struct ibv_cq *cq) {
    struct ibv_wc wc;
    int n;

    while ((n = ibv_poll_cq(cq, 1, &wc)) != 0) {
        MUST(n == 1);
        if (wc.status != IBV_WC_SUCCESS)
            continue;
        MUST(wc.wr_id < DEPTH ? wc.opcode & IBV_WC_RECV : wc.wr_id >= 100 && wc.wr_id < 107);
        /* RDMA WRITE with immediate tells the bytes written, not those of the receive. */
        if (wc.opcode == IBV_WC_RECV)
            MUST(wc.byte_len <= RECV_SIZE);
    }
}

static void arrive(struct input *in, struct ibv_qp *const *qps, uint32_t *next_psn) {
    static const uint8_t transports[] = {WIRE_RC, WIRE_UC, WIRE_UD, WIRE_RC};
    uint8_t datagram[WIRE_MAX_HDR_LEN + 4096 + WIRE_MAX_TAIL_LEN];
    uint8_t how = take(in), opcode = take(in), far = take(in);
    unsigned which = how & 3;
    uint32_t qpn = qps[which]->qp_num, from = how & 0x80 && far == 0xff ? nic->ip : peer_ip;
    size_t len;

    if (how & 4) { /* raw, but for the QPN */
        len = far;
        for (size_t i = 0; i < len; i++)
            datagram[i] = take(in);
        datagram[0] = opcode;
        if (len >= 8 && !(how & 8)) {
            datagram[5] = (uint8_t)(qpn >> 16);
            datagram[6] = (uint8_t)(qpn >> 8);
            datagram[7] = (uint8_t)qpn;
        }
    } else {
        struct wire_packet pkt = {0};
        size_t payload = (size_t)take(in) * 4;
        uint8_t syndrome = take(in);
        int16_t offset = (int16_t)(take(in) | take(in) << 8);
        uint32_t flags;

        if (!(opcode & 0x80))
            opcode = (uint8_t)(transports[which] << 5 | (opcode & 0x1f));
        flags = wire_opcode_flags(opcode);
        if (opcode & 0x40 && !(flags & WIRE_F_DETH))
            payload = 256; /* the MTU: what a first or middle packet must have */
        pkt.bth.opcode = opcode;
        pkt.bth.dest_qpn = qpn;
        pkt.bth.pkey = how & 0x40 ? (uint16_t)(syndrome << 8) : 0xffff;
        pkt.bth.ack_req = how & 8;
        pkt.bth.solicited = how & 16;
        if (flags & WIRE_F_RESPONSE) {
            pkt.bth.psn = wire_psn_add(SQ_PSN, far);
        } else {
            pkt.bth.psn = wire_psn_add(next_psn[which], (uint32_t)(int8_t)far);
            if (far == 0)
                next_psn[which] = wire_psn_add(next_psn[which], 1);
        }
        pkt.reth.va = pkt.atomic.va = (uintptr_t)buffer + (uint64_t)(int64_t)offset;
        pkt.reth.rkey = pkt.atomic.rkey = how & 32 ? syndrome : mr->rkey;
        pkt.reth.length = syndrome == 0xff ? 0xffffffffu : syndrome * 16u + (uint32_t)(payload % 16);
        if (how & 128 && flags & WIRE_F_WRITE)
            pkt.reth.length = (uint32_t)payload;
        pkt.aeth.syndrome = syndrome;
        pkt.aeth.msn = far;
        pkt.atomic.compare = syndrome;
        pkt.atomic.swap_add = far;
        pkt.imm_data = syndrome & 1 ? mr->rkey : far;
        pkt.deth.qkey = how & 32 ? far : QKEY;
        pkt.deth.src_qpn = far;
        if (payload && !(flags & WIRE_F_RESPONSE) && !(flags & (WIRE_F_SEND | WIRE_F_WRITE)))
            payload = 0;
        if (payload && (how & 16))
            payload -= 1 + far % 3;
        len = wire_pack_headers(datagram, &pkt, payload);
        if (!len)
            return;
        memset(datagram + len, syndrome, payload + pkt.bth.pad + 4);
        len += payload + pkt.bth.pad + 4;
    }
    {
        /* On the heap, with its exact size: a read behind its end is seen. */
        uint8_t *exact = malloc(len ? len : 1);

        MUST(exact);
        memcpy(exact, datagram, len);
        srn_nic_lock(nic);
        srn_rx_datagram(nic, from, exact, len);
        if (how & 16)
            srn_resp_flush_acks(nic);
        srn_nic_unlock(nic);
        free(exact);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_RC};
    uint32_t next_psn[4] = {RQ_PSN, RQ_PSN, RQ_PSN, RQ_PSN};
    struct input in = {data, size};
    struct ibv_cq *cq = ibv_create_cq(context, 8 * DEPTH, NULL, NULL, 0);
    struct ibv_qp *qps[4];
    uint8_t receives = take(&in), sends = take(&in);

    MUST(cq);
    for (unsigned i = 0; i < 4; i++) {
        MUST(qps[i] = make_qp(types[i], cq));
        post_receives(qps[i], receives >> (2 * i) & 3);
        start_qp(qps[i]);
        post_sends(qps[i], sends);
    }
    for (int packets = 0; in.left && packets < 64; packets++) {
        arrive(&in, qps, next_psn);
        if (packets % 8 == 7)
            poll_all(cq);
    }
    srn_nic_lock(nic);
    srn_resp_flush_acks(nic);
    srn_nic_unlock(nic);
    poll_all(cq);
    for (unsigned i = 0; i < 4; i++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

        MUST(ibv_modify_qp(qps[i], &attr, IBV_QP_STATE) == 0);
    }
    poll_all(cq);
    for (unsigned i = 0; i < 4; i++)
        MUST(ibv_destroy_qp(qps[i]) == 0);
    MUST(ibv_destroy_cq(cq) == 0);
    return 0;
}
