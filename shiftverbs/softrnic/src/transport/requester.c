/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The requester of an RC QP: turns WRs into packets, keeps at most a window of them unacknowledged, and
 * matches ACKs, NAKs and responses to them (IBA 9.7.3, 9.7.5, 9.9).
 *
 * Recovery is go-back-N: everything restarts from una_psn, the oldest PSN without an answer. A READ is asked
 * for in pieces of a window, so that a responder never has more to say than our socket can take.
 */
#include <string.h>

#include "faults/rails.h"
#include "transport/transport.h"

static struct srn_swqe *wqe_at(struct srn_qp *qp, uint32_t idx) {
    return &qp->sq.wqe[idx % qp->sq.capacity];
}

static bool is_atomic(const struct srn_swqe *w) {
    return w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

/* Does the answer carry data, so that an ACK alone does not complete it? */
static bool wants_response(const struct srn_swqe *w) {
    return w->opcode == IBV_WR_RDMA_READ || is_atomic(w);
}

static uint32_t read_chunk(const struct srn_qp *qp) {
    return qp->nic->window / 2;
}

/* 4.096 us * 2^timeout (IBA 9.9.2.1.2); 0 = wait for ever. */
static uint64_t retry_interval_ns(const struct srn_qp *qp) {
    return qp->attr.timeout ? (uint64_t)4096 << qp->attr.timeout : 0;
}

/* IBA table 46: the RNR NAK timer codes, in units of 10 us. */
static uint64_t rnr_interval_ns(unsigned int code) {
    static const uint32_t units[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                                       48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                                       2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

    return (uint64_t)units[code & 31] * 10000;
}

void srn_req_reset(struct srn_qp *qp, uint32_t psn) {
    struct srn_requester *r = &qp->req;

    r->next_psn = r->send_psn = r->max_psn = r->una_psn = psn;
    r->send_idx = qp->sq.tail;
    r->gap_valid = false;
    r->window = qp->nic->window;
    qp->pace = (struct srn_pace){0};
    r->rd_out = 0;
    r->retries = qp->attr.retry_cnt;
    r->rnr_retries = qp->attr.rnr_retry;
    r->retry_at = r->rnr_until = 0;
}

static void timer_start(struct srn_qp *qp) {
    uint64_t interval = retry_interval_ns(qp);

    if (!interval) {
        qp->req.retry_at = 0;
        return;
    }
    qp->req.retry_at = srn_now_ns() + interval;
    srn_timer_set(qp, qp->req.retry_at);
}

/* --- sending --- */

bool srn_send_data(struct srn_qp *qp, const struct srn_swqe *w, struct wire_packet *pkt) {
    bool write = w->opcode == IBV_WR_RDMA_WRITE || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    bool imm = w->opcode == IBV_WR_SEND_WITH_IMM || w->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    bool inv = w->opcode == IBV_WR_SEND_WITH_INV;
    uint32_t offset = ((qp->req.send_psn - w->first_psn) & WIRE_PSN_MASK) * qp->mtu;
    uint32_t left = w->length - offset, n = left < qp->mtu ? left : qp->mtu;
    bool first = qp->req.send_psn == w->first_psn, last = qp->req.send_psn == w->last_psn;
    uint8_t *payload, op;

    if (first && last)
        op = write ? (imm ? WIRE_OP_WRITE_ONLY_IMM : WIRE_OP_WRITE_ONLY)
                   : (imm   ? WIRE_OP_SEND_ONLY_IMM
                      : inv ? WIRE_OP_SEND_ONLY_INV
                            : WIRE_OP_SEND_ONLY);
    else if (first)
        op = write ? WIRE_OP_WRITE_FIRST : WIRE_OP_SEND_FIRST;
    else if (last)
        op = write ? (imm ? WIRE_OP_WRITE_LAST_IMM : WIRE_OP_WRITE_LAST)
                   : (imm   ? WIRE_OP_SEND_LAST_IMM
                      : inv ? WIRE_OP_SEND_LAST_INV
                            : WIRE_OP_SEND_LAST);
    else
        op = write ? WIRE_OP_WRITE_MIDDLE : WIRE_OP_SEND_MIDDLE;

    pkt->bth.opcode = WIRE_OPCODE(qp->type == IBV_QPT_UC ? WIRE_UC : WIRE_RC, op);
    pkt->bth.solicited = last && (w->flags & IBV_SEND_SOLICITED) && (!write || imm);
    /* An answer for every message, and often enough to keep the window moving within one. */
    pkt->bth.ack_req =
        qp->type == IBV_QPT_RC &&
        (last || ((qp->req.send_psn - w->first_psn) & WIRE_PSN_MASK) % (qp->nic->window / 4) == 0);
    pkt->imm_data = w->imm;
    pkt->reth.va = w->remote_addr;
    pkt->reth.rkey = w->rkey;
    pkt->reth.length = w->length;
    payload = srn_tx_payload(qp->nic);
    if (w->flags & IBV_SEND_INLINE) {
        if (n)
            memcpy(payload, w->inline_data + offset, n);
    } else if (!srn_sge_gather(qp->nic, qp->pd, w->sge, w->num_sge, offset, payload, n)) {
        return false;
    }
    srn_tx_commit(qp->nic, pkt, n, qp->qpn, qp->peer);
    qp->req.send_psn = wire_psn_add(qp->req.send_psn, 1);
    return true;
}

static void send_read(struct srn_qp *qp, const struct srn_swqe *w, struct wire_packet *pkt) {
    uint32_t done = (qp->req.send_psn - w->first_psn) & WIRE_PSN_MASK;
    uint32_t left = ((w->last_psn - qp->req.send_psn) & WIRE_PSN_MASK) + 1;
    uint32_t chunk = read_chunk(qp), n = chunk - done % chunk;
    uint32_t offset = done * qp->mtu;

    if (n > left)
        n = left;
    pkt->bth.opcode = WIRE_OPCODE(WIRE_RC, WIRE_OP_READ_REQUEST);
    pkt->bth.ack_req = true;
    pkt->reth.va = w->remote_addr + offset;
    pkt->reth.rkey = w->rkey;
    pkt->reth.length = n == left ? w->length - offset : n * qp->mtu;
    srn_tx_payload(qp->nic);
    srn_tx_commit(qp->nic, pkt, 0, qp->qpn, qp->peer);
    qp->req.send_psn = wire_psn_add(qp->req.send_psn, n);
    qp->req.rd_out++;
}

static void send_atomic(struct srn_qp *qp, const struct srn_swqe *w, struct wire_packet *pkt) {
    bool swap = w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP;

    pkt->bth.opcode = WIRE_OPCODE(WIRE_RC, swap ? WIRE_OP_CMP_SWAP : WIRE_OP_FETCH_ADD);
    pkt->bth.ack_req = true;
    pkt->atomic.va = w->remote_addr;
    pkt->atomic.rkey = w->rkey;
    pkt->atomic.swap_add = swap ? w->swap : w->compare_add;
    pkt->atomic.compare = swap ? w->compare_add : 0;
    srn_tx_payload(qp->nic);
    srn_tx_commit(qp->nic, pkt, 0, qp->qpn, qp->peer);
    qp->req.send_psn = wire_psn_add(qp->req.send_psn, 1);
    qp->req.rd_out++;
}

/* What is wrong with a WR before its first packet. */
enum ibv_wc_status srn_check_wqe(struct srn_qp *qp, const struct srn_swqe *w) {
    if (w->length > SRN_MAX_MSG)
        return IBV_WC_LOC_LEN_ERR;
    if (wants_response(w) && qp->attr.max_rd_atomic == 0)
        return IBV_WC_LOC_QP_OP_ERR;
    if (!(w->flags & IBV_SEND_INLINE) &&
        !srn_sge_check(qp->nic, qp->pd, w->sge, w->num_sge, wants_response(w) ? IBV_ACCESS_LOCAL_WRITE : 0))
        return IBV_WC_LOC_PROT_ERR;
    return IBV_WC_SUCCESS;
}

/* The oldest WR fails with this status, the rest is flushed. */
static void fail(struct srn_qp *qp, enum ibv_wc_status status) {
    srn_sq_complete(qp, status);
    srn_qp_error(qp);
}

/*
 * A WR that cannot be sent fails in its turn: those before it are waited for. Returns true if the QP failed.
 */
static bool fail_in_turn(struct srn_qp *qp, enum ibv_wc_status status) {
    if (qp->sq.head != qp->req.send_idx)
        return false;
    fail(qp, status);
    return true;
}

void srn_req_run(struct srn_qp *qp) {
    struct srn_requester *r = &qp->req;
    bool sent = false;

    if ((qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD) || r->rnr_until)
        return;
    while (r->send_idx != qp->sq.tail) {
        struct srn_swqe *w = wqe_at(qp, r->send_idx);
        bool local = srn_is_local(w);
        bool fresh = local ? !w->executed : wire_psn_cmp(r->send_psn, r->max_psn) >= 0;
        struct wire_packet pkt = {
            .bth = {.pkey = WIRE_DEFAULT_PKEY,
                    .migreq = true,
                    .dest_qpn = qp->attr.dest_qp_num,
                    .psn = r->send_psn},
        };

        if (r->send_psn == w->first_psn) {
            enum ibv_wc_status status;

            if (qp->state == IBV_QPS_SQD && fresh)
                break;
            if ((w->flags & IBV_SEND_FENCE) && r->rd_out)
                break;
            status = srn_check_wqe(qp, w);
            if (status == IBV_WC_SUCCESS && local && fresh)
                status = srn_execute_local(qp, w);
            if (status != IBV_WC_SUCCESS) {
                if (fail_in_turn(qp, status))
                    return;
                break;
            }
        }
        if (local) {
            /* It completes when all before it have. */
            w->executed = true;
            r->send_idx++;
            if (qp->sq.head + 1 == r->send_idx)
                srn_sq_complete(qp, IBV_WC_SUCCESS);
            continue;
        }
        if (((r->send_psn - r->una_psn) & WIRE_PSN_MASK) >= r->window)
            break;
        if (wants_response(w)) {
            if (r->rd_out >= qp->attr.max_rd_atomic)
                break;
            if (w->opcode == IBV_WR_RDMA_READ)
                send_read(qp, w, &pkt);
            else
                send_atomic(qp, w, &pkt);
        } else if (!srn_send_data(qp, w, &pkt)) {
            /* Its memory was deregistered on the way. */
            if (fail_in_turn(qp, IBV_WC_LOC_PROT_ERR))
                return;
            break;
        }
        sent = true;
        if (!fresh)
            qp->nic->counters[SRN_CNT_RETRANSMITS]++;
        if (wire_psn_cmp(r->send_psn, r->max_psn) > 0)
            r->max_psn = r->send_psn;
        if (wire_psn_cmp(r->send_psn, w->last_psn) > 0)
            r->send_idx++;
    }
    if (sent && !r->retry_at)
        timer_start(qp);
}

/* --- answers --- */

/* Progress was made: budgets are whole again (IBA 9.9.2.1.1), the timer runs for what is left. */
static void progress(struct srn_qp *qp) {
    struct srn_requester *r = &qp->req;

    r->retries = qp->attr.retry_cnt;
    r->rnr_retries = qp->attr.rnr_retry;
    r->gap_valid = false;
    if (wire_psn_cmp(r->una_psn, r->send_psn) > 0) {
        /* Answered by what was sent before we went back. */
        r->send_psn = r->una_psn;
        r->send_idx = qp->sq.head;
    }
    if (r->una_psn == r->max_psn)
        r->retry_at = 0;
    else
        timer_start(qp);
}

/* And the work without packets behind it that was done already. */
static void complete_head(struct srn_qp *qp) {
    struct srn_swqe *w = wqe_at(qp, qp->sq.head);

    qp->req.una_psn = wire_psn_add(w->last_psn, 1);
    do {
        if (qp->req.send_idx == qp->sq.head) {
            qp->req.send_idx++;
            qp->req.send_psn = qp->req.una_psn;
        }
        srn_sq_complete(qp, IBV_WC_SUCCESS);
        w = wqe_at(qp, qp->sq.head);
    } while (qp->sq.head != qp->sq.tail && srn_is_local(w) && w->executed);
}

/*
 * The responder has everything up to and including psn. Completes what an ACK can complete; stops at a READ
 * or atomic whose response did not come. Returns true if una_psn reached psn + 1.
 */
static bool acknowledge(struct srn_qp *qp, uint32_t psn) {
    struct srn_requester *r = &qp->req;
    uint32_t before = r->una_psn;

    while (qp->sq.head != qp->sq.tail && wire_psn_cmp(r->una_psn, psn) <= 0) {
        struct srn_swqe *w = wqe_at(qp, qp->sq.head);

        if (wants_response(w))
            break;
        if (wire_psn_cmp(w->last_psn, psn) <= 0)
            complete_head(qp);
        else
            r->una_psn = wire_psn_add(psn, 1);
    }
    if (r->una_psn != before)
        progress(qp);
    return wire_psn_cmp(r->una_psn, psn) > 0;
}

/* Start again from the oldest unanswered PSN. */
static void go_back(struct srn_qp *qp) {
    struct srn_requester *r = &qp->req;

    r->send_idx = qp->sq.head;
    r->send_psn = r->una_psn;
    r->rd_out = 0;
    r->retry_at = 0;
}

/* One more attempt, or the end, because of this. */
static void retry(struct srn_qp *qp, enum nic_counter why) {
    rails_count(qp->nic->port, qp->req.retries ? why : REQ_TRANSPORT_RETRIES_EXCEEDED);
    if (qp->req.retries == 0) {
        fail(qp, IBV_WC_RETRY_EXC_ERR);
        return;
    }
    qp->req.retries--;
    go_back(qp);
    srn_req_run(qp);
    /* A link that is paused may never let it send: that is an attempt all the same. */
    if (!qp->req.window && !qp->req.retry_at && qp->state != IBV_QPS_ERR && rails_switched(qp->nic->port))
        timer_start(qp);
}

/* A response that should be here is missing: ask for it again, once; after that the timer decides. */
static void response_missing(struct srn_qp *qp) {
    struct srn_requester *r = &qp->req;

    if (r->gap_valid && r->gap_psn == r->una_psn)
        return;
    r->gap_valid = true;
    r->gap_psn = r->una_psn;
    retry(qp, IMPLIED_NAK_SEQ_ERR);
}

static void handle_rnr(struct srn_qp *qp, unsigned int code) {
    struct srn_requester *r = &qp->req;

    qp->nic->counters[SRN_CNT_RNR_NAK_RECEIVED]++;
    rails_count(qp->nic->port,
                qp->attr.rnr_retry != 7 && !r->rnr_retries ? REQ_RNR_RETRIES_EXCEEDED : RNR_NAK_RETRY_ERR);
    if (qp->attr.rnr_retry != 7) {
        if (r->rnr_retries == 0) {
            fail(qp, IBV_WC_RNR_RETRY_EXC_ERR);
            return;
        }
        r->rnr_retries--;
    }
    r->retries = qp->attr.retry_cnt; /* the path works: only its end is not ready */
    go_back(qp);
    r->rnr_until = srn_now_ns() + rnr_interval_ns(code);
    srn_timer_set(qp, r->rnr_until);
}

static void handle_ack(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_requester *r = &qp->req;
    uint32_t psn = pkt->bth.psn;
    uint8_t value = WIRE_SYN_VALUE(pkt->aeth.syndrome);
    enum ibv_wc_status status;

    if (WIRE_SYN_KIND(pkt->aeth.syndrome) == WIRE_SYN_ACK) {
        if (!acknowledge(qp, psn))
            response_missing(qp);
        return;
    }
    /* A NAK acknowledges what is before it. */
    if (psn != r->una_psn && !acknowledge(qp, wire_psn_add(psn, WIRE_PSN_MASK))) {
        response_missing(qp);
        return;
    }
    /* Old news: we went on meanwhile, or go back already. */
    if (psn != r->una_psn || qp->sq.head == qp->sq.tail)
        return;
    if (WIRE_SYN_KIND(pkt->aeth.syndrome) == WIRE_SYN_RNR) {
        if (!r->rnr_until)
            handle_rnr(qp, value);
        return;
    }
    if (WIRE_SYN_KIND(pkt->aeth.syndrome) != WIRE_SYN_NAK)
        return;
    switch (value) {
    case WIRE_NAK_PSN_SEQ:
        qp->nic->counters[SRN_CNT_SEQ_NAK_RECEIVED]++;
        /* While a receiver that was not ready is waited for, all of it will be sent again anyway. */
        if (!r->rnr_until)
            retry(qp, PACKET_SEQ_ERR);
        return;
    case WIRE_NAK_INVALID_REQ:
        status = IBV_WC_REM_INV_REQ_ERR;
        break;
    case WIRE_NAK_REMOTE_ACCESS:
        status = IBV_WC_REM_ACCESS_ERR;
        break;
    case WIRE_NAK_REMOTE_OP:
        status = IBV_WC_REM_OP_ERR;
        break;
    default:
        return;
    }
    fail(qp, status);
}

/*
 * Is this the part of the READ that comes next, with the length it must have? A request covers a piece of the WR (see
 * send_read); after going back it may start within one, so that its first response is anywhere.
 */
static bool read_response_ok(const struct srn_qp *qp, const struct srn_swqe *w,
                             const struct wire_packet *pkt) {
    uint32_t done = (pkt->bth.psn - w->first_psn) & WIRE_PSN_MASK, left = w->length - done * qp->mtu;
    bool starts = done % read_chunk(qp) == 0;
    bool ends = pkt->bth.psn == w->last_psn || (done + 1) % read_chunk(qp) == 0;

    return w->opcode == IBV_WR_RDMA_READ && pkt->payload_len == (left < qp->mtu ? left : qp->mtu) &&
           ends == ((pkt->flags & WIRE_F_LAST) != 0) && (!starts || (pkt->flags & WIRE_F_FIRST));
}

/* A READ response or the answer to an atomic: everything before it is acknowledged too. */
static void handle_response(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_requester *r = &qp->req;
    uint32_t psn = pkt->bth.psn, offset;
    struct srn_swqe *w;

    if (psn != r->una_psn && !acknowledge(qp, wire_psn_add(psn, WIRE_PSN_MASK))) {
        response_missing(qp);
        return;
    }
    if (psn != r->una_psn || qp->sq.head == qp->sq.tail)
        return;
    w = wqe_at(qp, qp->sq.head);
    if (pkt->flags & WIRE_F_ATOMIC_ACK) {
        uint64_t original = pkt->atomic_ack;

        if (!is_atomic(w)) {
            fail(qp, IBV_WC_BAD_RESP_ERR);
            return;
        }
        if (!srn_sge_scatter(qp->nic, qp->pd, w->sge, w->num_sge, 0, (uint8_t *)&original, 8)) {
            fail(qp, IBV_WC_LOC_PROT_ERR);
            return;
        }
    } else {
        offset = ((psn - w->first_psn) & WIRE_PSN_MASK) * qp->mtu;
        if (!read_response_ok(qp, w, pkt)) {
            fail(qp, IBV_WC_BAD_RESP_ERR);
            return;
        }
        if (!srn_sge_scatter(qp->nic, qp->pd, w->sge, w->num_sge, offset, pkt->payload,
                             (uint32_t)pkt->payload_len)) {
            fail(qp, IBV_WC_LOC_PROT_ERR);
            return;
        }
        r->una_psn = wire_psn_add(psn, 1);
    }
    if (psn == w->last_psn || (w->opcode == IBV_WR_RDMA_READ &&
                               ((r->una_psn - w->first_psn) & WIRE_PSN_MASK) % read_chunk(qp) == 0))
        r->rd_out -= r->rd_out > 0;
    if (psn == w->last_psn)
        complete_head(qp);
    progress(qp);
}

void srn_req_handle(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_requester *r = &qp->req;

    if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD) {
        qp->nic->counters[SRN_CNT_RX_WRONG_STATE]++;
        return;
    }
    /* An answer to what was answered already, or to what was never asked. */
    if (wire_psn_cmp(pkt->bth.psn, r->una_psn) < 0 || wire_psn_cmp(pkt->bth.psn, r->max_psn) >= 0) {
        qp->nic->counters[SRN_CNT_DUPLICATES]++;
        return;
    }
    if (pkt->flags & WIRE_F_ACK)
        handle_ack(qp, pkt);
    else
        handle_response(qp, pkt);
    srn_req_run(qp);
    srn_sq_check_drained(qp);
}

void srn_req_timer(struct srn_qp *qp, uint64_t now_ns) {
    struct srn_requester *r = &qp->req;

    if (r->rnr_until && now_ns >= r->rnr_until) {
        r->rnr_until = 0;
        srn_req_run(qp);
    }
    if (r->retry_at && now_ns >= r->retry_at) {
        r->retry_at = 0;
        if (r->rnr_until || r->una_psn == r->max_psn)
            return;
        qp->nic->counters[SRN_CNT_TIMEOUTS]++;
        r->gap_valid = false;
        retry(qp, LOCAL_ACK_TIMEOUT_ERR);
    }
}

void srn_sq_check_drained(struct srn_qp *qp) {
    if (qp->state != IBV_QPS_SQD || !qp->sq_drain_event || qp->req.una_psn != qp->req.max_psn)
        return;
    qp->sq_drain_event = false;
    srn_async_qp_event(qp, IBV_EVENT_SQ_DRAINED);
}
