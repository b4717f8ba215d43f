/* SPDX-License-Identifier: BSD-3-Clause */
/* Which transport's work it is: a WR's turn, a packet's. */
#include "objects/nic.h"
#include "objects/queues.h"
#include "transport/transport.h"

void srn_sq_run(struct srn_qp *qp) {
    /* A killed NIC takes work and never does it, a stalled one later. */
    if (atomic_load_explicit(&qp->nic->dead, memory_order_relaxed) || srn_stalled(qp->nic))
        return;
    if (qp->state == IBV_QPS_ERR)
        srn_flush(qp);
    else if (qp->type == IBV_QPT_UD)
        srn_ud_run(qp);
    else if (qp->type == IBV_QPT_UC)
        srn_uc_run(qp);
    else
        srn_req_run(qp);
}

void srn_resume(struct srn_nic *nic, uint32_t qpn) {
    struct srn_qp *qp = srn_qp_find(nic, qpn);

    if (!qp || qp->type != IBV_QPT_RC)
        return;
    qp->req.window = nic->window;
    if (qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD)
        srn_sq_run(qp);
}

void srn_stall_over(struct srn_nic *nic) {
    if (!nic->port || fault_is_stalled(nic->port) || !atomic_exchange(&nic->stood_still, false))
        return;
    for (uint32_t i = 0; i < SRN_QP_BUCKETS; i++)
        for (struct srn_qp *qp = nic->qps[i]; qp; qp = qp->hash_next)
            if (qp->state == IBV_QPS_ERR || qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD)
                srn_sq_run(qp);
    srn_timer_at(nic, srn_now_ns());
}

void srn_receive(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip) {
    const struct srn_peer from = {.ip = src_ip,
                                  .gid_index = (pkt->bth.reserved & SRN_GID_BITS) ^ SRN_GID_BITS};
    struct srn_qp *qp = srn_qp_find(nic, pkt->bth.dest_qpn);
    uint8_t transport = WIRE_TRANSPORT(pkt->bth.opcode);

    nic->counters[SRN_CNT_RX_PACKETS]++;
    if (!qp || transport != (qp->type == IBV_QPT_UD ? WIRE_UD : qp->type == IBV_QPT_UC ? WIRE_UC : WIRE_RC)) {
        if (pkt->bth.opcode == WIRE_CNP)
            srn_handle_cnp(nic, pkt, src_ip);
        else
            nic->counters[SRN_CNT_RX_NO_QP]++;
        return;
    }
    /* Our one P_Key is full membership of the default partition: any membership of it may talk to us. */
    if ((pkt->bth.pkey & 0x7fff) != (WIRE_DEFAULT_PKEY & 0x7fff)) {
        nic->counters[SRN_CNT_RX_BAD_PKEY]++;
        return;
    }
    if (qp->type == IBV_QPT_UD) {
        srn_ud_handle(qp, pkt, from);
        return;
    }
    if (qp->peer.ip != from.ip || qp->peer.gid_index != from.gid_index) {
        nic->counters[SRN_CNT_RX_WRONG_PEER]++;
        return;
    }
    if (qp->type == IBV_QPT_UC)
        srn_uc_handle(qp, pkt);
    else if (pkt->flags & WIRE_F_RESPONSE)
        srn_req_handle(qp, pkt);
    else
        srn_resp_handle(qp, pkt);
}

void srn_rx_datagram(struct srn_nic *nic, uint32_t src_ip, const uint8_t *data, size_t len) {
    struct wire_packet pkt;

    if (wire_parse(&pkt, NULL, data, len) == WIRE_OK && !srn_stalled(nic))
        srn_receive(nic, &pkt, src_ip);
}
