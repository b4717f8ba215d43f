/* SPDX-License-Identifier: BSD-3-Clause */
#include "faults/counted.h"

static const char *const names[NIC_COUNTERS] = {
    [NP_ECN_MARKED_ROCE_PACKETS] = "np_ecn_marked_roce_packets",
    [NP_CNP_SENT] = "np_cnp_sent",
    [RP_CNP_HANDLED] = "rp_cnp_handled",
    [RP_CNP_IGNORED] = "rp_cnp_ignored",
    [OUT_OF_SEQUENCE] = "out_of_sequence",
    [DUPLICATE_REQUEST] = "duplicate_request",
    [OUT_OF_BUFFER] = "out_of_buffer",
    [PACKET_SEQ_ERR] = "packet_seq_err",
    [LOCAL_ACK_TIMEOUT_ERR] = "local_ack_timeout_err",
    [RNR_NAK_RETRY_ERR] = "rnr_nak_retry_err",
    [IMPLIED_NAK_SEQ_ERR] = "implied_nak_seq_err",
    [REQ_TRANSPORT_RETRIES_EXCEEDED] = "req_transport_retries_exceeded",
    [REQ_RNR_RETRIES_EXCEEDED] = "req_rnr_retries_exceeded",
    [RX_ICRC_ENCAPSULATED] = "rx_icrc_encapsulated",
};

const char *nic_counter_name(enum nic_counter counter) {
    return names[counter];
}
