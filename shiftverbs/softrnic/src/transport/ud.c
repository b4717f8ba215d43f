/* SPDX-License-Identifier: BSD-3-Clause */
/* Unreliable datagrams: one packet per WR, done when it is handed to the network (IBA 9.8.3). */
#include <string.h>

#include "faults/rails.h"
#include "transport/transport.h"

/* With the top bit set a Q_Key in the WR stands for the QP's own (IBA 10.2.5). */
#define QKEY_PRIVILEGED 0x80000000u

static enum ibv_wc_status send_one(struct srn_qp *qp, const struct srn_swqe *w) {
    bool imm = w->opcode == IBV_WR_SEND_WITH_IMM;
    struct wire_packet pkt = {
        .bth = {.opcode = WIRE_OPCODE(WIRE_UD, imm ? WIRE_OP_SEND_ONLY_IMM : WIRE_OP_SEND_ONLY),
                .pkey = WIRE_DEFAULT_PKEY,
                .migreq = true,
                .solicited = (w->flags & IBV_SEND_SOLICITED) != 0,
                .dest_qpn = w->remote_qpn,
                .psn = qp->req.next_psn},
        .imm_data = w->imm,
        .deth = {.qkey = w->remote_qkey & QKEY_PRIVILEGED ? qp->attr.qkey : w->remote_qkey,
                 .src_qpn = qp->qpn},
    };
    uint8_t *payload;

    if (w->length > srn_mtu_bytes(qp->nic->active_mtu))
        return IBV_WC_LOC_LEN_ERR;
    payload = srn_tx_payload(qp->nic);
    if (w->flags & IBV_SEND_INLINE) {
        if (w->length)
            memcpy(payload, w->inline_data, w->length);
    } else if (!srn_sge_gather(qp->nic, qp->pd, w->sge, w->num_sge, 0, payload, w->length)) {
        return IBV_WC_LOC_PROT_ERR;
    }
    srn_tx_commit(qp->nic, &pkt, w->length, qp->qpn, w->peer);
    qp->req.next_psn = wire_psn_add(qp->req.next_psn, 1);
    return IBV_WC_SUCCESS;
}

void srn_ud_run(struct srn_qp *qp) {
    while (qp->state == IBV_QPS_RTS && qp->sq.head != qp->sq.tail) {
        enum ibv_wc_status status = send_one(qp, &qp->sq.wqe[qp->sq.head % qp->sq.capacity]);

        srn_sq_complete(qp, status);
        if (status != IBV_WC_SUCCESS)
            srn_qp_error(qp);
    }
}

/* What a receive shows before its payload: the network header of a packet that came by this GID. */
static void make_grh(uint8_t grh[SRN_UD_GRH], const struct srn_nic *nic, const struct wire_packet *pkt,
                     struct srn_peer from) {
    size_t ib_len = WIRE_BTH_LEN + WIRE_DETH_LEN + (pkt->flags & WIRE_F_IMM ? WIRE_IMM_LEN : 0) +
                    pkt->payload_len + pkt->bth.pad + WIRE_ICRC_LEN;
    bool v2 = srn_gid_is_v2(from.gid_index);
    union ibv_gid src;

    if (from.gid_index == SRN_GID_IPV4_V2) {
        wire_make_grh_ipv4(grh, from.ip, nic->ip, (uint16_t)(20 + 8 + ib_len), 0, 64);
        return;
    }
    srn_gid_make(from.ip, from.gid_index, &src);
    wire_make_grh(grh, src.raw, nic->gids[from.gid_index].raw, (uint16_t)(ib_len + (v2 ? 8 : 0)),
                  v2 ? WIRE_NEXT_UDP : WIRE_NEXT_BTH, 64);
}

/* What does not fit, or finds no receive WR, is dropped without a word. */
void srn_ud_handle(struct srn_qp *qp, const struct wire_packet *pkt, struct srn_peer from) {
    struct srn_nic *nic = qp->nic;
    uint8_t grh[SRN_UD_GRH];
    struct srn_rwqe *w = NULL;
    uint64_t room = 0;
    struct ibv_wc wc = {
        .opcode = IBV_WC_RECV,
        .byte_len = (uint32_t)(SRN_UD_GRH + pkt->payload_len),
        .src_qp = pkt->deth.src_qpn,
        .sl = srn_network_header(from.gid_index),
        .imm_data = pkt->flags & WIRE_F_IMM ? pkt->imm_data : 0,
        .wc_flags = IBV_WC_GRH | (pkt->flags & WIRE_F_IMM ? IBV_WC_WITH_IMM : 0),
    };

    if (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_SQD &&
        qp->state != IBV_QPS_SQE) {
        nic->counters[SRN_CNT_RX_WRONG_STATE]++;
        return;
    }
    if (pkt->deth.qkey != qp->attr.qkey) {
        nic->counters[SRN_CNT_RX_BAD_QKEY]++;
        return;
    }
    if (pkt->flags & WIRE_F_SEND)
        w = srn_recv_wqe(qp);
    if (!w) {
        rails_count(nic->port, OUT_OF_BUFFER);
        nic->counters[SRN_CNT_RX_UD_DROPPED]++;
        return;
    }
    for (uint32_t i = 0; i < w->num_sge; i++)
        room += w->sge[i].length;
    if (room < wc.byte_len) {
        nic->counters[SRN_CNT_RX_UD_DROPPED]++;
        return;
    }
    make_grh(grh, nic, pkt, from);
    if (!srn_sge_scatter(nic, qp->pd, w->sge, w->num_sge, 0, grh, sizeof(grh)) ||
        !srn_sge_scatter(nic, qp->pd, w->sge, w->num_sge, sizeof(grh), pkt->payload,
                         (uint32_t)pkt->payload_len)) {
        wc.status = IBV_WC_LOC_PROT_ERR;
        srn_rq_complete(qp, &wc, true);
        srn_qp_error(qp);
        return;
    }
    srn_rq_complete(qp, &wc, pkt->bth.solicited);
}
