/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The responder of an RC QP (and, through uc.c, of a UC QP): checks each request packet in the order that IBA 9.7.4 and 9.7.5 give, executes
 * it, and answers. ACKs are gathered: one for all that a batch of packets brought.
 */
#include <arpa/inet.h>

#include "faults/rails.h"
#include "transport/transport.h"

void srn_resp_reset(struct srn_qp *qp, uint32_t psn) {
    struct srn_responder *r = &qp->resp;

    r->psn = psn;
    r->msn = 0;
    r->message = SRN_MSG_NONE;
    r->nak_sent = false;
    r->ack_pending = false;
    r->recv_offset = 0;
    r->write_left = 0;
    for (uint32_t i = 0; i < r->resource_count; i++)
        r->resources[i].kind = SRN_RES_NONE;
}

/* --- answers --- */

static void send_aeth(struct srn_qp *qp, uint32_t psn, uint8_t syndrome) {
    struct wire_packet pkt = {
        .bth = {.opcode = WIRE_OPCODE(WIRE_RC, WIRE_OP_ACK),
                .pkey = WIRE_DEFAULT_PKEY,
                .migreq = true,
                .dest_qpn = qp->attr.dest_qp_num,
                .psn = psn},
        .aeth = {.syndrome = syndrome, .msn = qp->resp.msn},
    };

    srn_tx_payload(qp->nic);
    srn_tx_commit(qp->nic, &pkt, 0, qp->qpn, qp->peer);
}

static void ack_later(struct srn_qp *qp) {
    if (!qp->resp.ack_pending && qp->type == IBV_QPT_RC) {
        qp->resp.ack_pending = true;
        srn_list_add_tail(&qp->nic->ack_list, &qp->resp.ack_link);
    }
}

static void ack_drop(struct srn_qp *qp) {
    qp->resp.ack_pending = false;
    srn_list_del(&qp->resp.ack_link);
}

static void ack_now(struct srn_qp *qp) {
    ack_drop(qp);
    send_aeth(qp, wire_psn_add(qp->resp.psn, WIRE_PSN_MASK), WIRE_SYN_ACK | WIRE_ACK_CREDIT_INVALID);
}

void srn_resp_flush_acks(struct srn_nic *nic) {
    while (!srn_list_empty(&nic->ack_list))
        ack_now(srn_container(nic->ack_list.next, struct srn_qp, resp.ack_link));
}

/* A NAK acknowledges everything before it, so a gathered ACK need not go out. */
static void send_nak(struct srn_qp *qp, uint8_t syndrome) {
    ack_drop(qp);
    send_aeth(qp, qp->resp.psn, syndrome);
}

/*
 * The request is refused for good: NAK, the receive WR it had begun to fill fails, the QP goes to ERR.
 * Without such a WR the application learns of it by an asynchronous event (IBA 9.9.3, class C).
 */
static void refuse(struct srn_qp *qp, enum wire_nak_code code, enum ibv_wc_status recv_status) {
    bool began = qp->resp.message == SRN_MSG_SEND && srn_recv_wqe(qp);

    if (qp->type == IBV_QPT_UC) {
        /* The sender is not told; what is wrong with our own receive WR is an error of ours (IBA 9.9.3). */
        qp->resp.message = SRN_MSG_NONE;
        if (began) {
            struct ibv_wc wc = {.status = recv_status, .opcode = IBV_WC_RECV};

            srn_rq_complete(qp, &wc, true);
            srn_qp_error(qp);
        }
        return;
    }
    send_nak(qp, (uint8_t)(WIRE_SYN_NAK | code));
    if (began) {
        struct ibv_wc wc = {.status = recv_status, .opcode = IBV_WC_RECV};

        srn_rq_complete(qp, &wc, true);
    } else {
        srn_async_qp_event(qp,
                           code == WIRE_NAK_REMOTE_ACCESS ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
    }
    srn_qp_error(qp);
}

static void send_rnr(struct srn_qp *qp) {
    rails_count(qp->nic->port, OUT_OF_BUFFER);
    if (qp->type == IBV_QPT_UC) {
        qp->resp.message = SRN_MSG_NONE; /* the message is lost */
        return;
    }
    qp->nic->counters[SRN_CNT_RNR_NAK_SENT]++;
    /* What was sent behind it arrives out of sequence now, and is no news. */
    qp->resp.nak_sent = true;
    send_nak(qp, (uint8_t)(WIRE_SYN_RNR | qp->attr.min_rnr_timer));
}

/* --- READ and atomics, kept for duplicates --- */

static struct srn_resource *new_resource(struct srn_qp *qp) {
    struct srn_responder *r = &qp->resp;
    struct srn_resource *res = &r->resources[r->resource_next];

    r->resource_next = (r->resource_next + 1) % r->resource_count;
    return res;
}

static struct srn_resource *find_resource(struct srn_qp *qp, uint32_t psn, enum srn_resource_kind kind) {
    for (uint32_t i = 0; i < qp->resp.resource_count; i++) {
        struct srn_resource *res = &qp->resp.resources[i];

        if (res->kind == kind && wire_psn_cmp(psn, res->first_psn) >= 0 &&
            wire_psn_cmp(psn, res->last_psn) <= 0)
            return res;
    }
    return NULL;
}

/*
 * The response to a READ of [va, va + length), from this PSN on. Where the memory cannot be read (any more), it ends with a
 * NAK that has the PSN of what is missing.
 */
static void send_read_response(struct srn_qp *qp, uint32_t psn, uint64_t va, uint32_t rkey, uint32_t length,
                               uint32_t msn) {
    uint32_t n = srn_packets(length, qp->mtu), offset = 0;

    ack_drop(qp); /* the response acknowledges what came before */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t part = length - offset < qp->mtu ? length - offset : qp->mtu;
        uint8_t op = n == 1       ? WIRE_OP_READ_RESP_ONLY
                     : i == 0     ? WIRE_OP_READ_RESP_FIRST
                     : i == n - 1 ? WIRE_OP_READ_RESP_LAST
                                  : WIRE_OP_READ_RESP_MIDDLE;
        struct wire_packet pkt = {
            .bth = {.opcode = WIRE_OPCODE(WIRE_RC, op),
                    .pkey = WIRE_DEFAULT_PKEY,
                    .migreq = true,
                    .dest_qpn = qp->attr.dest_qp_num,
                    .psn = wire_psn_add(psn, i)},
            .aeth = {.syndrome = WIRE_SYN_ACK | WIRE_ACK_CREDIT_INVALID, .msn = msn},
        };
        uint8_t *payload = srn_tx_payload(qp->nic);

        if (part) {
            struct iovec from = {srn_remote_resolve(qp, rkey, va + offset, part, IBV_ACCESS_REMOTE_READ),
                                 part};

            if (!from.iov_base || !srn_memory_get(&qp->nic->memory, &from, 1, payload, part)) {
                qp->resp.psn = wire_psn_add(psn, i);
                refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
                return;
            }
        }
        srn_tx_commit(qp->nic, &pkt, part, qp->qpn, qp->peer);
        offset += part;
    }
}

static void send_atomic_response(struct srn_qp *qp, uint32_t psn, const struct srn_resource *res) {
    struct wire_packet pkt = {
        .bth = {.opcode = WIRE_OPCODE(WIRE_RC, WIRE_OP_ATOMIC_ACK),
                .pkey = WIRE_DEFAULT_PKEY,
                .migreq = true,
                .dest_qpn = qp->attr.dest_qp_num,
                .psn = psn},
        .aeth = {.syndrome = WIRE_SYN_ACK | WIRE_ACK_CREDIT_INVALID, .msn = res->msn},
        .atomic_ack = res->original,
    };

    ack_drop(qp);
    srn_tx_payload(qp->nic);
    srn_tx_commit(qp->nic, &pkt, 0, qp->qpn, qp->peer);
}

static void execute_read(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;
    struct srn_resource *res;
    uint32_t n = srn_packets(pkt->reth.length, qp->mtu), psn = pkt->bth.psn;

    if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) || !r->resource_count ||
        pkt->reth.length > SRN_MAX_MSG) {
        refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_SUCCESS);
        return;
    }
    if (pkt->reth.length &&
        !srn_remote_resolve(qp, pkt->reth.rkey, pkt->reth.va, pkt->reth.length, IBV_ACCESS_REMOTE_READ)) {
        refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
        return;
    }
    r->psn = wire_psn_add(psn, n);
    r->msn = (r->msn + 1) & WIRE_MSN_MASK;
    res = new_resource(qp);
    *res = (struct srn_resource){
        .kind = SRN_RES_READ,
        .first_psn = psn,
        .last_psn = wire_psn_add(psn, n - 1),
        .va = pkt->reth.va,
        .rkey = pkt->reth.rkey,
        .length = pkt->reth.length,
        .msn = r->msn,
    };
    send_read_response(qp, psn, res->va, res->rkey, res->length, res->msn);
}

static void execute_atomic(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;
    struct srn_resource *res;
    uint64_t original;
    uint8_t *memory;

    if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC) || !r->resource_count ||
        (pkt->atomic.va & 7)) {
        refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_SUCCESS);
        return;
    }
    memory = srn_remote_resolve(qp, pkt->atomic.rkey, pkt->atomic.va, 8, IBV_ACCESS_REMOTE_ATOMIC);
    if (!memory || ((uintptr_t)memory & 7) ||
        !srn_memory_atomic(&qp->nic->memory, memory, WIRE_OPERATION(pkt->bth.opcode) == WIRE_OP_CMP_SWAP,
                           pkt->atomic.compare, pkt->atomic.swap_add, &original)) {
        refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
        return;
    }
    r->psn = wire_psn_add(r->psn, 1);
    r->msn = (r->msn + 1) & WIRE_MSN_MASK;
    res = new_resource(qp);
    *res = (struct srn_resource){
        .kind = SRN_RES_ATOMIC,
        .first_psn = pkt->bth.psn,
        .last_psn = pkt->bth.psn,
        .original = original,
        .msn = r->msn,
    };
    send_atomic_response(qp, pkt->bth.psn, res);
}

/*
 * A PSN that was executed before (IBA 9.7.5.1.4, 9.7.5.1.5): SENDs and WRITEs are acknowledged again and not
 * executed again; a READ is answered afresh if it lies within one we remember, an atomic from the value we
 * kept.
 */
static void handle_duplicate(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_resource *res;

    qp->nic->counters[SRN_CNT_DUPLICATES]++;
    if (pkt->flags & WIRE_F_READ_REQ) {
        uint32_t offset, n = srn_packets(pkt->reth.length, qp->mtu);

        res = find_resource(qp, pkt->bth.psn, SRN_RES_READ);
        if (!res)
            return;
        offset = ((pkt->bth.psn - res->first_psn) & WIRE_PSN_MASK) * qp->mtu;
        if (pkt->reth.va != res->va + offset || pkt->reth.rkey != res->rkey ||
            pkt->reth.length > res->length - offset ||
            wire_psn_cmp(wire_psn_add(pkt->bth.psn, n - 1), res->last_psn) > 0)
            return;
        if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_READ))
            refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
        else
            send_read_response(qp, pkt->bth.psn, pkt->reth.va, pkt->reth.rkey, pkt->reth.length, res->msn);
        return;
    }
    if (pkt->flags & WIRE_F_ATOMIC) {
        res = find_resource(qp, pkt->bth.psn, SRN_RES_ATOMIC);
        if (res)
            send_atomic_response(qp, pkt->bth.psn, res);
        return;
    }
    ack_later(qp);
}

/* --- SEND and WRITE --- */

/* May this opcode follow what we have so far, and has its payload the length it must have (IBA 9.7.4.1)? */
static bool sequence_ok(const struct srn_qp *qp, const struct wire_packet *pkt) {
    enum srn_message message = qp->resp.message;
    size_t len = pkt->payload_len;

    if (pkt->flags & (WIRE_F_READ_REQ | WIRE_F_ATOMIC))
        return message == SRN_MSG_NONE;
    if (!(pkt->flags & (WIRE_F_SEND | WIRE_F_WRITE)))
        return false;
    if (pkt->flags & WIRE_F_FIRST) {
        if (message != SRN_MSG_NONE)
            return false;
    } else if (message != (pkt->flags & WIRE_F_SEND ? SRN_MSG_SEND : SRN_MSG_WRITE)) {
        return false;
    }
    if (!(pkt->flags & WIRE_F_LAST))
        return len == qp->mtu;
    return len <= qp->mtu && (len > 0 || (pkt->flags & WIRE_F_FIRST));
}

static void message_done(struct srn_qp *qp) {
    qp->resp.message = SRN_MSG_NONE;
    qp->resp.recv_offset = 0;
    qp->resp.msn = (qp->resp.msn + 1) & WIRE_MSN_MASK;
}

static uint64_t recv_capacity(const struct srn_rwqe *w) {
    uint64_t total = 0;

    for (uint32_t i = 0; i < w->num_sge; i++)
        total += w->sge[i].length;
    return total;
}

static void execute_send(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;
    uint32_t len = (uint32_t)pkt->payload_len;
    struct srn_rwqe *w = srn_recv_wqe(qp);

    if (!w) {
        send_rnr(qp);
        return;
    }
    if (pkt->flags & WIRE_F_FIRST) {
        r->message = SRN_MSG_SEND;
        r->recv_offset = 0;
    }
    if ((uint64_t)r->recv_offset + len > recv_capacity(w)) {
        refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_LOC_LEN_ERR);
        return;
    }
    if (!srn_sge_scatter(qp->nic, qp->pd, w->sge, w->num_sge, r->recv_offset, pkt->payload, len)) {
        refuse(qp, WIRE_NAK_REMOTE_OP, IBV_WC_LOC_PROT_ERR);
        return;
    }
    r->recv_offset += len;
    /* Before the program is told of the message: then the window's memory is its own again. */
    if ((pkt->flags & WIRE_F_IETH) && !srn_invalidate(qp, ntohl(pkt->imm_data))) {
        refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    r->psn = wire_psn_add(r->psn, 1);
    if (pkt->flags & WIRE_F_LAST) {
        struct ibv_wc wc = {
            .opcode = IBV_WC_RECV,
            .byte_len = r->recv_offset,
            .src_qp = qp->attr.dest_qp_num,
        };

        if (pkt->flags & WIRE_F_IMM) {
            wc.imm_data = pkt->imm_data;
            wc.wc_flags = IBV_WC_WITH_IMM;
        } else if (pkt->flags & WIRE_F_IETH) {
            wc.invalidated_rkey = ntohl(pkt->imm_data);
            wc.wc_flags = IBV_WC_WITH_INV;
        }
        message_done(qp);
        srn_rq_complete(qp, &wc, pkt->bth.solicited);
    }
    if (pkt->bth.ack_req)
        ack_later(qp);
}

static void execute_write(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;
    uint32_t len = (uint32_t)pkt->payload_len;

    if (pkt->flags & WIRE_F_FIRST) {
        if (!(qp->attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) || pkt->reth.length > SRN_MAX_MSG) {
            refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_SUCCESS);
            return;
        }
        if (pkt->reth.length && !srn_remote_resolve(qp, pkt->reth.rkey, pkt->reth.va, pkt->reth.length,
                                                    IBV_ACCESS_REMOTE_WRITE)) {
            refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
            return;
        }
        r->write_va = pkt->reth.va;
        r->write_rkey = pkt->reth.rkey;
        r->write_left = r->write_length = pkt->reth.length;
    }
    if (len > r->write_left || ((pkt->flags & WIRE_F_LAST) && len != r->write_left)) {
        refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_SUCCESS);
        return;
    }
    if ((pkt->flags & WIRE_F_IMM) && !srn_recv_wqe(qp)) {
        send_rnr(qp);
        return;
    }
    if (len) {
        struct iovec to = {srn_remote_resolve(qp, r->write_rkey, r->write_va, len, IBV_ACCESS_REMOTE_WRITE),
                           len};

        if (!to.iov_base ||
            !(pkt->flags & WIRE_F_LAST ? srn_memory_place(&qp->nic->memory, to.iov_base, pkt->payload, len)
                                       : srn_memory_put(&qp->nic->memory, &to, 1, pkt->payload, len))) {
            refuse(qp, WIRE_NAK_REMOTE_ACCESS, IBV_WC_SUCCESS);
            return;
        }
    }
    r->message = SRN_MSG_WRITE;
    r->write_va += len;
    r->write_left -= len;
    r->psn = wire_psn_add(r->psn, 1);
    if (pkt->flags & WIRE_F_LAST) {
        message_done(qp);
        if (pkt->flags & WIRE_F_IMM) {
            struct ibv_wc wc = {
                .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                .byte_len = r->write_length,
                .src_qp = qp->attr.dest_qp_num,
                .imm_data = pkt->imm_data,
                .wc_flags = IBV_WC_WITH_IMM,
            };

            srn_rq_complete(qp, &wc, pkt->bth.solicited);
        }
    }
    if (pkt->bth.ack_req)
        ack_later(qp);
}

void srn_resp_execute(struct srn_qp *qp, const struct wire_packet *pkt) {
    if (pkt->flags & WIRE_F_SEND)
        execute_send(qp, pkt);
    else
        execute_write(qp, pkt);
}

void srn_resp_handle(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;
    int order;

    if (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD) {
        qp->nic->counters[SRN_CNT_RX_WRONG_STATE]++;
        return;
    }
    order = wire_psn_cmp(pkt->bth.psn, r->psn);
    if (order < 0) {
        rails_count(qp->nic->port, DUPLICATE_REQUEST);
        handle_duplicate(qp, pkt);
        return;
    }
    if (order > 0) {
        rails_count(qp->nic->port, OUT_OF_SEQUENCE);
        if (!r->nak_sent) {
            r->nak_sent = true;
            qp->nic->counters[SRN_CNT_SEQ_NAK_SENT]++;
            send_nak(qp, WIRE_SYN_NAK | WIRE_NAK_PSN_SEQ);
        }
        return;
    }
    r->nak_sent = false;
    if (!sequence_ok(qp, pkt)) {
        refuse(qp, WIRE_NAK_INVALID_REQ, IBV_WC_REM_INV_REQ_ERR);
        return;
    }
    if (pkt->flags & WIRE_F_READ_REQ)
        execute_read(qp, pkt);
    else if (pkt->flags & WIRE_F_ATOMIC)
        execute_atomic(qp, pkt);
    else
        srn_resp_execute(qp, pkt);
}
