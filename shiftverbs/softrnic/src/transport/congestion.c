/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Congestion control on rails that have limits, the NIC's part of DCQCN: packets that a switch marked are answered with
 * CNPs, which lower the rate of the QP that they come to. Who keeps to the rate is pace.c.
 */
#include <string.h>

#include "faults/rails.h"
#include "transport/net.h"
#include "transport/transport.h"

/* The QP that a packet is for, if it is connected with this address. Datagrams have no rate. */
static struct srn_qp *connected(struct srn_nic *nic, uint32_t qpn, uint32_t ip) {
    struct srn_qp *qp = srn_qp_find(nic, qpn);
    bool ready = qp && (qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS || qp->state == IBV_QPS_SQD);

    return ready && qp->type != IBV_QPT_UD && qp->peer.ip == ip ? qp : NULL;
}

static void handle_mark(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip) {
    struct srn_qp *qp = connected(nic, pkt->bth.dest_qpn, src_ip);
    struct wire_packet cnp = {.bth = {.opcode = WIRE_CNP, .pkey = WIRE_DEFAULT_PKEY, .becn = true}};
    struct fabric_params params;

    rails_count(nic->port, NP_ECN_MARKED_ROCE_PACKETS);
    if (!qp)
        return;
    params = rails_params(nic->port);
    if (!dcqcn_handle_mark(&qp->np, &params.dcqcn, srn_now_ns()))
        return;
    cnp.bth.dest_qpn = qp->attr.dest_qp_num;
    memset(srn_tx_payload(nic), 0, WIRE_CNP_PAYLOAD);
    srn_tx_commit(nic, &cnp, WIRE_CNP_PAYLOAD, qp->qpn, qp->peer);
    rails_count(nic->port, NP_CNP_SENT);
}

void srn_handle_marks(struct srn_nic *nic, int n) {
    const struct srn_net *net = nic->net;

    for (int i = 0; i < n; i++)
        if (net->rx[i].good && srn_rx_marked(net, i))
            handle_mark(nic, &net->rx[i].pkt, net->rx[i].from.sin_addr.s_addr);
}

void srn_handle_cnp(struct srn_nic *nic, const struct wire_packet *pkt, uint32_t src_ip) {
    struct srn_qp *qp = connected(nic, pkt->bth.dest_qpn, src_ip);
    const struct fabric_params params = rails_params(nic->port);

    if (!qp || !pkt->bth.becn || pkt->payload_len != WIRE_CNP_PAYLOAD || !params.rate ||
        !(params.dcqcn.g > 0)) {
        rails_count(nic->port, RP_CNP_IGNORED);
        return;
    }
    rails_count(nic->port, RP_CNP_HANDLED);
    dcqcn_handle_cnp(&qp->pace.rp, &params.dcqcn, (double)params.rate, srn_now_ns());
}
