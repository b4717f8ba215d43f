/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Unreliable connections: messages of many packets, done when they are handed to the network (IBA 9.8.2). What does
 * not arrive whole is dropped, and nobody is told.
 */
#include "transport/transport.h"

static enum ibv_wc_status send_message(struct srn_qp *qp, struct srn_swqe *w) {
    enum ibv_wc_status status = srn_check_wqe(qp, w);

    if (status == IBV_WC_SUCCESS && srn_is_local(w))
        return srn_execute_local(qp, w);
    qp->req.send_psn = w->first_psn;
    while (status == IBV_WC_SUCCESS && wire_psn_cmp(qp->req.send_psn, w->last_psn) <= 0) {
        struct wire_packet pkt = {
            .bth = {.pkey = WIRE_DEFAULT_PKEY,
                    .migreq = true,
                    .dest_qpn = qp->attr.dest_qp_num,
                    .psn = qp->req.send_psn},
        };

        if (!srn_send_data(qp, w, &pkt))
            status = IBV_WC_LOC_PROT_ERR;
    }
    return status;
}

void srn_uc_run(struct srn_qp *qp) {
    while (qp->state == IBV_QPS_RTS && qp->sq.head != qp->sq.tail) {
        enum ibv_wc_status status = send_message(qp, &qp->sq.wqe[qp->sq.head % qp->sq.capacity]);

        srn_sq_complete(qp, status);
        if (status != IBV_WC_SUCCESS)
            srn_qp_error(qp);
    }
}

/* Does the packet belong where we are in a message, with the length it must have there? */
static bool fits(const struct srn_qp *qp, const struct wire_packet *pkt) {
    enum srn_message message = pkt->flags & WIRE_F_SEND ? SRN_MSG_SEND : SRN_MSG_WRITE;

    if (!(pkt->flags & WIRE_F_FIRST) && qp->resp.message != message)
        return false;
    if (!(pkt->flags & WIRE_F_LAST))
        return pkt->payload_len == qp->mtu;
    return pkt->payload_len <= qp->mtu && (pkt->payload_len > 0 || (pkt->flags & WIRE_F_FIRST));
}

void srn_uc_handle(struct srn_qp *qp, const struct wire_packet *pkt) {
    struct srn_responder *r = &qp->resp;

    if (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD) {
        qp->nic->counters[SRN_CNT_RX_WRONG_STATE]++;
        return;
    }
    /* With a packet missing, or the next message beginning, what there was of the last one is worth nothing. */
    if (pkt->bth.psn != r->psn || (pkt->flags & WIRE_F_FIRST))
        r->message = SRN_MSG_NONE;
    r->psn = pkt->bth.psn;
    if (fits(qp, pkt))
        srn_resp_execute(qp, pkt);
    else
        r->message = SRN_MSG_NONE;
    r->psn = wire_psn_add(pkt->bth.psn, 1);
}
